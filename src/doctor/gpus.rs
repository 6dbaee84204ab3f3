//! The checks of GPUs in their order: each alone, then each pair, then all together. A GPU or link that hangs ends them,
//! since nothing behind it could be trusted.

use std::sync::Arc;

use serde_json::{Value as Json, json};

use super::probe::{Outcome, size};
use super::watch::{PATIENCE, Watch, watched};
use super::{copies, memory, nccl, peers, virtual_ranks};
use crate::device::cuda::cubin::Cubins;
use crate::device::cuda::gpu::{Gpu, GpuError};
use crate::report::{Check, Progress, Verdict};

/// Memory in use that our own context does not explain.
const OTHERS: usize = 2 << 30;

/// What is to be checked.
pub struct Request {
    /// GPU numbers.
    pub gpus: Vec<usize>,
    /// Where kernels come from.
    pub cubins: Cubins,
    /// Smaller sizes.
    pub quick: bool,
}

/// The findings so far, and whether something hung.
struct Findings<'a> {
    all: Vec<Check>,
    stuck: bool,
    progress: &'a dyn Progress,
    steps: usize,
}

impl Findings<'_> {
    /// Judges one piece of work, unless something hung before.
    fn judge(
        &mut self,
        name: &str,
        work: impl FnOnce(&Watch) -> Result<Outcome, GpuError> + Send + 'static,
    ) -> Option<Check> {
        if self.stuck {
            return None;
        }
        self.progress.at(name, self.all.len().min(self.steps), self.steps);
        Some(match watched(PATIENCE, name, work) {
            Ok(Outcome { wrong: Some(wrong), data, .. }) => Check::new(name, Verdict::Host, wrong).with(data),
            Ok(Outcome { wrong: None, evidence, data }) => Check::new(name, Verdict::Match, evidence).with(data),
            Err(e) => {
                self.stuck = matches!(e, GpuError::Stuck { .. });
                Check::new(name, verdict_of(&e), e.to_string())
            }
        })
    }

    fn check(&mut self, name: &str, work: impl FnOnce(&Watch) -> Result<Outcome, GpuError> + Send + 'static) {
        let found = self.judge(name, work);
        self.all.extend(found);
    }
}

/// What could not be compiled or does not fit was not measured; what the driver refuses is the host's fault.
fn verdict_of(e: &GpuError) -> Verdict {
    match e {
        GpuError::Cubin(_)
        | GpuError::Memory { .. }
        | GpuError::NoDriver
        | GpuError::OldDriver { .. }
        | GpuError::NoSuchGpu { .. }
        | GpuError::Parameters { .. } => Verdict::Unmeasured,
        GpuError::Driver { .. } | GpuError::Launch { .. } | GpuError::Stuck { .. } => Verdict::Host,
    }
}

type Work = fn(&Arc<Gpu>, bool, &Watch) -> Result<Outcome, GpuError>;
/// What each GPU is asked by itself.
const ALONE: [(&str, Work); 4] = [
    ("memory holds patterns", memory::patterns),
    ("copies to and from the host", copies::copies),
    ("sums over virtual ranks", |gpu, _, w| virtual_ranks::sums(gpu, w)),
    ("memory bandwidth", |gpu, _, w| memory::speed(gpu, w)),
];

/// Runs every check that the GPUs allow; at least one GPU.
pub fn run(request: &Request, progress: &dyn Progress) -> Vec<Check> {
    let quick = request.quick;
    let mut ordinals = request.gpus.clone();
    ordinals.sort_unstable();
    ordinals.dedup();
    let n = ordinals.len();
    let mut f = Findings { all: Vec::new(), stuck: false, progress, steps: 6 * n + 2 };
    let mut gpus: Vec<Arc<Gpu>> = Vec::new();
    for ordinal in ordinals {
        let (cubins, name) = (request.cubins.clone(), format!("GPU {ordinal}"));
        let (send, receive) = std::sync::mpsc::channel();
        f.check(&name, move |_| {
            let gpu = Gpu::open(ordinal, cubins)?;
            let outcome = card(&gpu)?;
            let _ = send.send(gpu); // the receiver outlives the work, or the work came too late
            Ok(outcome)
        });
        if let Some(note) = f.all.last_mut() {
            warn_of_others(note);
        }
        gpus.extend(receive.try_recv().ok());
    }
    for gpu in &gpus {
        for (what, work) in ALONE {
            let own = gpu.clone();
            f.check(&format!("GPU {}: {what}", gpu.ordinal), move |w| work(&own, quick, w));
        }
    }
    pairs(&gpus, quick, &mut f);
    sums(&gpus, quick, &mut f);
    if f.stuck {
        let text = "something hung before; what came behind it was not run";
        f.all.push(Check::new("further checks", Verdict::Unmeasured, text));
    }
    f.all
}

/// What a GPU is.
fn card(gpu: &Gpu) -> Result<Outcome, GpuError> {
    let ((free, total), sms) = (gpu.memory()?, gpu.multiprocessors()?);
    let (name, arch) = (&gpu.name, &gpu.arch);
    let evidence = format!("{name}, {arch}, {} free of {}, {sms} multiprocessors", size(free), size(total));
    let data = json!({
        "gpu": gpu.ordinal, "model": name, "arch": arch, "memory_bytes": total, "free_bytes": free, "multiprocessors": sms,
    });
    Ok(Outcome { wrong: None, evidence, data })
}

/// Memory that someone else holds may be a process that was left behind.
fn warn_of_others(finding: &mut Check) {
    let number = |key: &str| finding.data.get(key).and_then(Json::as_u64).map(|n| n as usize);
    if let (Some(total), Some(free)) = (number("memory_bytes"), number("free_bytes")) {
        let used = total.saturating_sub(free);
        if used > OTHERS && finding.verdict == Verdict::Match {
            finding.verdict = Verdict::Drift;
            finding.detail += &format!("; {} are in use: is another process running there?", size(used));
        }
    }
}

/// Every ordered pair. Pairs that are right share a line; each that is not has its own.
fn pairs(gpus: &[Arc<Gpu>], quick: bool, f: &mut Findings) {
    const NAME: &str = "copies between GPUs";
    if gpus.len() < 2 {
        f.all.push(Check::new(NAME, Verdict::NotApplicable, "one GPU"));
        return;
    }
    let (mut right, mut wrong) = (Vec::new(), 0);
    for from in gpus {
        for to in gpus.iter().filter(|to| to.ordinal != from.ordinal) {
            let name = format!("copies GPU {} to GPU {}", from.ordinal, to.ordinal);
            let (a, b) = (from.clone(), to.clone());
            match f.judge(&name, move |w| peers::pair(&a, &b, quick, w)) {
                Some(found) if found.verdict == Verdict::Match => right.push(Json::Object(found.data)),
                Some(found) => {
                    wrong += 1;
                    f.all.push(found);
                }
                None => {}
            }
        }
    }
    if !right.is_empty() {
        let detail = summary(&right, wrong);
        f.all.push(Check::new(NAME, Verdict::Match, detail).with(json!({ "pairs": right })));
    }
}

/// Links, slowest and fastest.
fn summary(pairs: &[Json], wrong: usize) -> String {
    let number = |key: &str| pairs.iter().filter_map(|p| p[key].as_f64()).collect::<Vec<_>>();
    let spread = |values: Vec<f64>, scale: f64| {
        let (low, high) = values.iter().fold((f64::INFINITY, 0.0f64), |(l, h), v| (l.min(*v), h.max(*v)));
        format!("{:.1} to {:.1}", low * scale, high * scale)
    };
    let count = |direct: bool, atomics: bool| {
        let is = |p: &&Json| p["direct"] == direct && p["atomics"] == atomics;
        pairs.iter().filter(is).count()
    };
    let kinds = [
        ("direct with atomics, as NVLink", count(true, true)),
        ("direct, as PCIe", count(true, false)),
        ("through the host", count(false, true) + count(false, false)),
    ];
    let kinds: Vec<String> = kinds.iter().filter(|k| k.1 > 0).map(|(name, n)| format!("{n} {name}")).collect();
    let others = if wrong > 0 { format!(" ({wrong} others are wrong)") } else { String::new() };
    format!(
        "{} ordered pairs{others}: {}; {} GB/s, {} us",
        pairs.len(),
        kinds.join(", "),
        spread(number("bytes_per_second"), 1e-9),
        spread(number("latency_seconds"), 1e6)
    )
}

/// Sums over all GPUs through NCCL. One GPU alone needs none, but its NCCL is tried where there is one.
fn sums(gpus: &[Arc<Gpu>], quick: bool, f: &mut Findings) {
    const NAME: &str = "sums over GPUs (NCCL)";
    if crate::device::cuda::nccl::version().is_none() {
        let (verdict, text) = match gpus.len() {
            ..=1 => (Verdict::NotApplicable, "one GPU, and no NCCL"),
            _ => (Verdict::Unmeasured, "no NCCL, and several GPUs need it"),
        };
        f.all.push(Check::new(NAME, verdict, text));
        return;
    }
    if gpus.is_empty() {
        return;
    }
    let (own, joined) = (gpus.to_vec(), nccl::Joined::default());
    let inner = joined.clone();
    f.check(NAME, move |w| nccl::sums(&own, quick, &inner, w));
    if f.stuck {
        nccl::abandon(&joined, "a sum over GPUs hung");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_summed_up_by_link() {
        let pair = |direct: bool, atomics: bool, speed: f64| json!({ "direct": direct, "atomics": atomics, "bytes_per_second": speed, "latency_seconds": 5e-6 });
        let pairs = [pair(true, true, 380e9), pair(true, true, 390e9), pair(false, false, 20e9)];
        let text = summary(&pairs, 1);
        let expected = "3 ordered pairs (1 others are wrong): 2 direct with atomics, as NVLink, 1 through the host; \
                        20.0 to 390.0 GB/s, 5.0 to 5.0 us";
        assert_eq!(text, expected);
    }

    #[test]
    fn memory_that_others_hold_is_a_warning() {
        let card = |free: u64| {
            let data = json!({ "memory_bytes": 80u64 << 30, "free_bytes": free });
            let mut finding = Check::new("GPU 0", Verdict::Match, "a GPU").with(data);
            warn_of_others(&mut finding);
            finding.verdict
        };
        assert_eq!(card(79 << 30), Verdict::Match);
        assert_eq!(card(40 << 30), Verdict::Drift);
    }

    #[test]
    fn work_that_hangs_ends_the_checks() {
        let mut f = Findings { all: Vec::new(), stuck: false, progress: &Silent, steps: 1 };
        let stuck = |_: &Watch| Err(GpuError::Stuck { last: "a copy".into(), waited: PATIENCE });
        f.check("first", stuck);
        f.check("second", |_| Err(GpuError::NoDriver));
        assert!(f.stuck && f.all.len() == 1 && f.all[0].verdict == Verdict::Host);
    }

    struct Silent;
    impl Progress for Silent {
        fn at(&self, _: &str, _: usize, _: usize) {}
    }
}
