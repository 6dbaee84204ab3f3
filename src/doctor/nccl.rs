//! Do sums over GPUs come out exact and the same everywhere, called one by one and replayed from a recording, as steps
//! are? One thread per GPU; the values are integers whose sum is known.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cudarc::driver::{CudaGraph, DriverError};
use serde_json::json;

use super::probe::{self, Outcome, Tally, fill_integers, size};
use super::watch::Watch;
use crate::comm::Collective;
use crate::comm::meeting::Meeting;
use crate::device::cuda::bandwidth::Stopwatch;
use crate::device::cuda::gpu::{Gpu, GpuError, at};
use crate::device::cuda::memory::Memory;
use crate::device::cuda::nccl::Nccl;

/// Values per sum: half a row of GLM-5, eight rows, and sizes that take NCCL's other paths.
const VALUES: [usize; 4] = [3072, 49_152, 1 << 20, 16 << 20];
const VALUES_QUICK: usize = 1 << 20;
/// Bytes per sum whose time is measured.
const TIMED: [usize; 4] = [12 << 10, 48 << 10, 192 << 10, 1 << 20];
/// Sums of a recording that is timed, and how often it is.
const RECORDED: usize = 20;
const REPLAYS: usize = 100;
const MEETING: Duration = Duration::from_secs(45);
const SITE: &str = "sum over GPUs";

/// Where the communicators lie while they are in use, so that a watcher can abort them.
pub(super) type Joined = Arc<Mutex<Option<Arc<Nccl>>>>;

/// Gives up on sums that hang. NCCL's own abort may hang too, so that it is not waited for.
pub(super) fn abandon(joined: &Joined, reason: &str) {
    let comms = joined.lock().unwrap_or_else(PoisonError::into_inner).take();
    let reason = reason.to_string();
    if let Some(comms) = comms {
        std::thread::spawn(move || comms.abort(&reason));
        std::thread::sleep(Duration::from_secs(2));
    }
}

/// What every rank of a run shares.
struct Run<'a> {
    gpus: &'a [Arc<Gpu>],
    nccl: Arc<Nccl>,
    meeting: Meeting,
    watch: &'a Watch,
    quick: bool,
}

/// What a rank saw.
#[derive(Default)]
struct Seen {
    wrong: Option<String>,
    /// The last sum of every size.
    sums: Vec<Vec<f32>>,
    /// Seconds per sum.
    times: Vec<f64>,
}

/// Sums over all of `gpus`.
pub(super) fn sums(gpus: &[Arc<Gpu>], quick: bool, joined: &Joined, watch: &Watch) -> Result<Outcome, GpuError> {
    let n = gpus.len();
    watch.at(format!("joining {n} GPUs in NCCL"));
    let nccl = Nccl::new(gpus.to_vec(), MEETING)
        .map_err(|e| GpuError::Driver { what: "joining NCCL".into(), error: e.to_string() })?;
    let nccl = Arc::new(nccl);
    *joined.lock().unwrap_or_else(PoisonError::into_inner) = Some(nccl.clone());
    let run = Run { gpus, nccl, meeting: Meeting::new(n, MEETING), watch, quick };
    let mut seen = probe::ranks(n, SITE, &|rank| run.rank(rank));
    // The first error is the cause; what it aborted comes after it in time, not in rank.
    let cause = |e: &GpuError| !e.to_string().contains("gave up");
    if let Some(rank) = seen.iter().position(|s| s.as_ref().is_err_and(cause)) {
        seen.swap(0, rank);
    }
    let seen = seen.into_iter().collect::<Result<Vec<_>, _>>()?;
    joined.lock().unwrap_or_else(PoisonError::into_inner).take();
    let wrong = seen.iter().find_map(|s| s.wrong.clone());
    let differ =
        |i: usize| apart(seen.iter().map(|s| s.sums[i].as_slice())).map(|d| format!("{} values: {d}", VALUES[i]));
    let wrong = wrong.or_else(|| (0..run.counts().len()).find_map(differ));
    let times = seen.first().map(|s| s.times.clone()).unwrap_or_default();
    let mut evidence = format!("exact and bit-equal over {n} GPUs, called and replayed, {:?} values", run.counts());
    if n > 1 {
        let said: Vec<String> =
            TIMED.iter().zip(&times).map(|(b, t)| format!("{} {:.1} us", size(*b), 1e6 * t)).collect();
        evidence = format!("{evidence}; in a recording {}", said.join(", "));
    }
    let latency: Vec<_> = TIMED.iter().zip(&times).map(|(b, t)| json!({ "bytes": b, "seconds": t })).collect();
    let gpus: Vec<usize> = gpus.iter().map(|g| g.ordinal).collect();
    Ok(Outcome { wrong, evidence, data: json!({ "gpus": gpus, "values": run.counts(), "latency": latency }) })
}

/// The first rank whose bits are not those of rank 0, and where.
pub(super) fn apart<'a>(mut ranks: impl Iterator<Item = &'a [f32]>) -> Option<String> {
    let first = ranks.next()?;
    ranks.enumerate().find_map(|(i, values)| {
        let differ = first.iter().zip(values).position(|(a, b)| a.to_bits() != b.to_bits());
        let differ = differ.or((first.len() != values.len()).then_some(first.len().min(values.len())));
        differ.map(|at| format!("rank {} holds other bits than rank 0, first at value {at}", i + 1))
    })
}

impl Run<'_> {
    fn counts(&self) -> &'static [usize] {
        let quick = VALUES.iter().take_while(|v| **v <= VALUES_QUICK).count();
        &VALUES[..if self.quick { quick } else { VALUES.len() }]
    }

    fn rank(&self, rank: usize) -> Result<Seen, GpuError> {
        self.checked(rank).inspect_err(|e| {
            // The others need not wait for this rank.
            self.meeting.abort(&e.to_string());
            self.nccl.abort(&e.to_string());
        })
    }

    fn meet(&self, rank: usize) -> Result<(), GpuError> {
        let met = self.meeting.wait(rank, SITE, || Ok(()));
        met.map_err(|e| GpuError::Driver { what: SITE.into(), error: e.to_string() })
    }

    fn sum(&self, rank: usize, address: u64, count: usize) -> Result<(), GpuError> {
        let done = self.nccl.sum(rank, &|| SITE.into(), address, count);
        done.map_err(|e| GpuError::Driver { what: format!("a sum of {count} values"), error: e.to_string() })
    }

    /// A recording of `times` sums.
    fn record(&self, rank: usize, address: u64, count: usize, times: usize) -> Result<CudaGraph, GpuError> {
        let what = format!("{times} sums of {count} values");
        self.gpus[rank].record(&what, || (0..times).try_for_each(|_| self.sum(rank, address, count)))
    }

    fn checked(&self, rank: usize) -> Result<Seen, GpuError> {
        let gpu = &self.gpus[rank];
        let n = self.gpus.len();
        let most = self.counts().iter().copied().max().unwrap_or_default();
        // Nothing is allocated or freed while a sum is under way: the driver may wait for it, and it for another rank.
        let (memory, tally, clock) = (Memory::new(gpu, 4 * most)?, Tally::new(gpu)?, Stopwatch::new(gpu)?);
        let address = memory.address();
        let replay = |graph: &CudaGraph| graph.launch().map_err(|e: DriverError| at("replaying sums")(e));
        let mut seen = Seen::default();
        let mut kept = Vec::new(); // recordings, until nobody sums any more
        for &count in self.counts() {
            let mut check = |how: &str, scale: usize| -> Result<(), GpuError> {
                let what = format!("a sum of {count} values over {n} GPUs, {how}");
                let differ = tally.integers(&what, address, count, (n, scale))?;
                let text = |d| format!("{what}, GPU {}: {d}", gpu.ordinal);
                seen.wrong = seen.wrong.take().or(differ.map(text));
                Ok(())
            };
            self.watch.at(format!("a sum of {count} values over {n} GPUs, called"));
            fill_integers(gpu, address, count, rank)?;
            self.meet(rank)?;
            self.sum(rank, address, count)?;
            check("called", 1)?;
            self.watch.at(format!("a sum of {count} values over {n} GPUs, replayed"));
            fill_integers(gpu, address, count, rank)?;
            self.meet(rank)?;
            let graph = self.record(rank, address, count, 1)?;
            self.meet(rank)?;
            replay(&graph)?;
            check("replayed once", 1)?;
            // The sums are summed again.
            self.meet(rank)?;
            replay(&graph)?;
            check("replayed twice", n)?;
            let mut sums = vec![0.0f32; count];
            memory.download(0, &mut sums, &|| SITE.into())?;
            seen.sums.push(sums);
            kept.push(graph);
        }
        if n > 1 {
            for bytes in TIMED {
                self.watch.at(format!("timing sums of {} over {n} GPUs", size(bytes)));
                memory.wipe(0)?; // zeros stay zeros, however often they are summed
                gpu.synchronise(&|| SITE.into())?;
                self.meet(rank)?;
                let graph = self.record(rank, address, bytes / 4, RECORDED)?;
                let mut times = Vec::with_capacity(REPLAYS);
                for i in 0..REPLAYS + 3 {
                    self.meet(rank)?;
                    let time = clock.time("timed sums", || replay(&graph))?;
                    if i >= 3 {
                        times.push(time.as_secs_f64() / RECORDED as f64);
                    }
                }
                times.sort_by(f64::total_cmp);
                seen.times.push(times[REPLAYS / 2]);
                kept.push(graph);
            }
        }
        gpu.synchronise(&|| SITE.into())?;
        self.meet(rank)?;
        Ok(seen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_hold_other_bits_are_named() {
        let (a, b) = ([1.0f32, 0.0], [1.0f32, -0.0]);
        assert_eq!(apart([&a[..], &a[..]].into_iter()), None);
        assert!(
            apart([&a[..], &a[..], &b[..]].into_iter())
                .is_some_and(|t| t.starts_with("rank 2") && t.ends_with("value 1"))
        );
        assert!(apart([&a[..], &a[..1]].into_iter()).is_some());
        assert_eq!(apart(std::iter::empty()), None);
    }

    #[test]
    fn timed_sums_fit_in_the_memory_of_the_checked_ones() {
        assert!(TIMED.iter().all(|b| *b <= 4 * VALUES_QUICK));
        // Every value of a sum that is summed again, over as many GPUs as a host has, is exact in f32.
        for ranks in 1..=16u32 {
            assert!((1023 * ranks + ranks * (ranks - 1) / 2) * ranks < 1 << 24, "{ranks}");
        }
    }
}
