//! Do copies between the host and a GPU arrive whole, from and to pageable and pinned memory?

use std::sync::Arc;

use serde_json::json;

use super::probe::{Outcome, Tally, fill, gb, host_check, host_fill, size};
use super::watch::Watch;
use crate::device::cuda::bandwidth::Stopwatch;
use crate::device::cuda::gpu::{Gpu, GpuError};
use crate::device::cuda::memory::{Memory, Pinned};

/// Seeds of the way there and of the way back; what lies in a target before is neither.
const THERE: u32 = 0xc0de_0001;
const BACK: u32 = 0xc0de_0002;
const MARKER: u8 = 0xa5;

/// Bytes: a page, an odd number of words, a large piece.
fn sizes(quick: bool) -> [usize; 3] {
    [4 << 10, (1 << 20) + 12, if quick { 16 << 20 } else { 64 << 20 }]
}

/// Bytes per second there and back, of the largest size.
struct Speed {
    there: f64,
    back: f64,
}

/// Both ways, both kinds of memory.
pub(super) fn copies(gpu: &Arc<Gpu>, quick: bool, watch: &Watch) -> Result<Outcome, GpuError> {
    let sizes = sizes(quick);
    let most = sizes.iter().copied().max().unwrap_or_default();
    let memory = Memory::new(gpu, most)?;
    let mut wrong = None;
    let mut pinned = Pinned::new(gpu, most)?;
    let mut pageable = vec![0u32; most / 4];
    let mut speeds = Vec::new();
    for (kind, host) in [("pinned", pinned.words(most / 4)), ("pageable", pageable.as_mut_slice())] {
        for bytes in sizes {
            let site = format!("{} between {kind} memory and GPU {}", size(bytes), gpu.ordinal);
            watch.at(site.clone());
            let (speed, differ) = there_and_back(gpu, &memory, &mut host[..bytes / 4], &site)?;
            wrong = wrong.or(differ);
            if bytes == most {
                speeds.push((kind, speed));
            }
        }
    }
    let said: Vec<String> =
        speeds.iter().map(|(kind, s)| format!("{kind} {} to, {} from the GPU", gb(s.there), gb(s.back))).collect();
    let data = json!({ "bytes": sizes, "speeds": speeds.iter().map(|(kind, s)| json!({
        "memory": kind, "to_gpu_bytes_per_second": s.there, "from_gpu_bytes_per_second": s.back,
    })).collect::<Vec<_>>() });
    Ok(Outcome { wrong, evidence: said.join("; "), data })
}

fn there_and_back(
    gpu: &Arc<Gpu>,
    memory: &Memory,
    host: &mut [u32],
    site: &str,
) -> Result<(Speed, Option<String>), GpuError> {
    let (tally, clock, bytes) = (Tally::new(gpu)?, Stopwatch::new(gpu)?, size_of_val(host) as f64);
    let rate = |time: std::time::Duration| bytes / time.as_secs_f64().max(1e-9);
    host_fill(host, THERE);
    memory.wipe(MARKER)?;
    let there = rate(clock.time(site, || memory.upload(0, host))?);
    let came = tally.pattern(site, memory.address(), host.len(), THERE)?;
    fill(gpu, memory.address(), host.len(), BACK)?;
    host.fill(u32::from_ne_bytes([MARKER; 4]));
    let back = rate(clock.time(site, || memory.download(0, host, &|| site.to_string()))?);
    let returned = host_check(host, BACK);
    let text = |way: &str, differ| format!("{site}, {way}: of {} words {differ}", host.len());
    let wrong = came.map(|d| text("to the GPU", d)).or(returned.map(|d| text("from the GPU", d)));
    Ok((Speed { there, back }, wrong))
}
