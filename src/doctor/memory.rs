//! Does a GPU's memory hold what is written to it, and how fast is it?

use std::sync::Arc;

use serde_json::json;

use super::probe::{Outcome, Tally, fill, gb, size};
use super::watch::Watch;
use crate::device::cuda::bandwidth;
use crate::device::cuda::gpu::{Gpu, GpuError};
use crate::device::cuda::memory::Memory;

/// Bit patterns that are tried in every place.
const SEEDS: [u32; 2] = [0x5eed_0001, 0xfeed_0002];

/// Patterns in stretches of 1 MiB and more: 64 MiB when quick, else up to 1 GiB or a tenth of the free memory.
pub(super) fn patterns(gpu: &Arc<Gpu>, quick: bool, watch: &Watch) -> Result<Outcome, GpuError> {
    let tally = Tally::new(gpu)?;
    let most = (gpu.memory()?.0 / 10).min(if quick { 64 << 20 } else { 1 << 30 }) / 4 * 4;
    let mut sizes = vec![1 << 20, 16 << 20, most];
    sizes.retain(|s| *s <= most);
    sizes.dedup();
    let mut wrong = None;
    for bytes in sizes.iter().copied().filter(|b| *b > 0) {
        let memory = Memory::new(gpu, bytes)?;
        for seed in SEEDS {
            let what = format!("a pattern over {} of GPU {}", size(bytes), gpu.ordinal);
            watch.at(what.clone());
            fill(gpu, memory.address(), bytes / 4, seed)?;
            if let Some(differ) = tally.pattern(&what, memory.address(), bytes / 4, seed)? {
                wrong.get_or_insert(format!("{what}: of {} words {differ} (seed {seed:#x})", bytes / 4));
            }
        }
    }
    let listed: Vec<String> = sizes.iter().map(|b| size(*b)).collect();
    let evidence = format!("patterns came back from {}", listed.join(", "));
    Ok(Outcome { wrong, evidence, data: json!({ "bytes": sizes }) })
}

/// Copy and read sweeps.
pub(super) fn speed(gpu: &Arc<Gpu>, watch: &Watch) -> Result<Outcome, GpuError> {
    watch.at(format!("sweeps over the memory of GPU {}", gpu.ordinal));
    let found = bandwidth::measure(gpu)?;
    let evidence = format!("copies {} (read and written), reads {}", gb(found.copy), gb(found.read));
    let data = json!({ "copy_bytes_per_second": found.copy, "read_bytes_per_second": found.read });
    Ok(Outcome { wrong: None, evidence, data })
}
