//! Do copies from one GPU to another arrive whole, and what is the link between them? Every ordered pair is tried, since
//! links are switched pair by pair and the two directions of one may differ.

use std::sync::Arc;

use serde_json::json;

use super::probe::{Outcome, Tally, fill, gb, host_check, size};
use super::watch::Watch;
use crate::device::cuda::bandwidth::Stopwatch;
use crate::device::cuda::gpu::{Gpu, GpuError};
use crate::device::cuda::memory::Memory;
use crate::device::cuda::peer::{self, Link};

/// Bytes: a page, a piece, an odd number of words, a large piece.
const SIZES: [usize; 4] = [4 << 10, 1 << 20, (1 << 20) + 12, 64 << 20];
const QUICK: usize = 16 << 20;
/// Words behind the copy that must stay as they are.
const GUARD: usize = 64;
/// What lies in the target before.
const MARKER: u8 = 0xa5;
/// Words that are checked once more through the host.
const HEAD: usize = 1024;
/// Copies that are timed together.
const LATENCY: usize = 100;
const BANDWIDTH: usize = 5;

/// How the driver describes a link.
pub(super) fn describe(link: Link) -> String {
    match (link.access, link.atomics) {
        (true, true) => format!("direct with atomics, as NVLink (rank {})", link.rank),
        (true, false) => format!("direct, as PCIe (rank {})", link.rank),
        (false, _) => format!("through the host (rank {})", link.rank),
    }
}

/// Copies from `from` to `to` in every size; time and link.
pub(super) fn pair(from: &Arc<Gpu>, to: &Arc<Gpu>, quick: bool, watch: &Watch) -> Result<Outcome, GpuError> {
    let way = format!("GPU {} to GPU {}", from.ordinal, to.ordinal);
    watch.at(format!("the link from {way}"));
    let link = peer::link(from, to)?;
    if link.access {
        peer::open(from, to)?;
        peer::open(to, from)?;
    }
    let large = if quick { QUICK } else { SIZES[3] };
    let (source, target) = (Memory::new(from, large + 4 * GUARD)?, Memory::new(to, large + 4 * GUARD)?);
    let tally = Tally::new(to)?;
    let mut wrong: Option<String> = None;
    for (i, bytes) in SIZES.map(|s| s.min(large)).into_iter().enumerate() {
        // The odd size starts at an odd word too.
        let offset = if bytes % 16 == 0 { 0 } else { 4 };
        let what = format!("a copy of {} from {way}", size(bytes));
        watch.at(what.clone());
        let seed = (from.ordinal as u32) << 16 | (to.ordinal as u32) << 8 | i as u32;
        let words = bytes / 4;
        target.wipe(MARKER)?;
        to.synchronise(&|| what.clone())?; // the copy is on the source's stream
        fill(from, source.address() + offset as u64, words, seed)?;
        peer::copy((from, &source), (to, &target), offset, bytes)?;
        from.synchronise(&|| what.clone())?;
        let differ = tally.pattern(&what, target.address() + offset as u64, words, seed)?;
        // Once more through the host, for a GPU whose own checks are at fault.
        let mut head = vec![0u32; HEAD.min(words)];
        target.download(offset, &mut head, &|| what.clone())?;
        let mut around = vec![0u32; GUARD - 1];
        target.download(offset + bytes, &mut around, &|| what.clone())?;
        let marker = u32::from_ne_bytes([MARKER; 4]);
        let found = match (differ, host_check(&head, seed)) {
            (Some(d), _) => Some(format!("of {words} words {d}")),
            (None, Some(d)) => Some(format!("read through the host, of the first {} words {d}", head.len())),
            (None, None) if around.iter().any(|w| *w != marker) => Some("words behind the end were written".into()),
            (None, None) => None,
        };
        wrong = wrong.or(found.map(|f| format!("{what}: {f}")));
    }
    watch.at(format!("timing copies from {way}"));
    let clock = Stopwatch::new(from)?;
    let each = |bytes: usize, times: usize| -> Result<f64, GpuError> {
        let all = || (0..times).try_for_each(|_| peer::copy((from, &source), (to, &target), 0, bytes));
        all()?;
        Ok(clock.time(&way, all)?.as_secs_f64() / times as f64)
    };
    let (latency, speed) = (each(SIZES[0], LATENCY)?, large as f64 / each(large, BANDWIDTH)?.max(1e-9));
    let evidence = format!("{}, {}, {:.1} us", describe(link), gb(speed), 1e6 * latency);
    let data = json!({
        "from": from.ordinal, "to": to.ordinal, "direct": link.access, "rank": link.rank, "atomics": link.atomics,
        "bytes_per_second": speed, "latency_seconds": latency, "latency_bytes": SIZES[0],
    });
    Ok(Outcome { wrong, evidence, data })
}
