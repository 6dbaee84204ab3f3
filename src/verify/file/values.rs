//! Every block of every tensor: NaN and infinities, blocks whose scale is out of all proportion, tensors of zeros.

use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use crate::checkpoint::{TensorSource, View};
use crate::quant::{QuantType, scan};
use crate::report::{Check, Progress, Verdict};

/// Values per run: the unit whose largest value is compared with that of its neighbours.
const RUN: usize = 256;
/// Runs per tensor at most, so that the largest tensors cost no more memory than small ones.
const MOST_RUNS: usize = 1 << 16;
/// Fewer runs have no median worth the name.
const LEAST_RUNS: usize = 8;
/// A run this many times above the tensor's median. In the trained test model the largest is 6 times the median, and two
/// orders are known of embeddings of rare tokens; the flipped top bit of a scale's exponent is worth 2^16.
const OUTLIER: f32 = 1e4;
/// Bytes between two reports of progress, so that the counter is not fought over.
const UNIT: u64 = 1 << 20;

/// What was found in all tensors.
pub(super) struct Scanned {
    /// Tensors that could be read.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
    /// One line for all that is well, one for each tensor that is not.
    pub checks: Vec<Check>,
}

/// Scans every tensor that can be dequantised.
pub(super) fn scan_all(source: &dyn TensorSource, progress: &dyn Progress) -> Scanned {
    let names: Vec<&str> = source.names();
    let all: u64 = names.iter().filter_map(|n| source.tensor(n)).map(|v| v.bytes.len() as u64).sum();
    let done = AtomicU64::new(0);
    let found: Vec<Vec<Check>> = names
        .par_iter()
        .filter_map(|name| {
            let view = source.tensor(name)?;
            let ty = view.ty.quant?;
            let checks = tensor(name, &source.file_of(name), ty, &view);
            let before = done.fetch_add(view.bytes.len() as u64, Ordering::Relaxed);
            let now = before + view.bytes.len() as u64;
            if before / UNIT != now / UNIT || now == all {
                progress.bytes("scanned", now, all);
            }
            Some(checks)
        })
        .collect();
    let tensors = found.len();
    let mut checks: Vec<Check> = found.into_iter().flatten().collect();
    if !checks.iter().any(|c| c.verdict == Verdict::Divergent) {
        checks.push(Check::exact("values", true, format!("no NaN and no infinity in {tensors} tensors")));
    }
    Scanned { tensors, bytes: all, checks }
}

fn tensor(name: &str, file: &str, ty: QuantType, view: &View<'_>) -> Vec<Check> {
    let info = ty.info();
    let blocks = view.bytes.len() / info.bytes;
    let per_run = (RUN / info.block).max(1).max(blocks.div_ceil(MOST_RUNS));
    // Rows of tensors were checked against the block size when the file was opened.
    let scans: Result<Vec<_>, _> = view.bytes.par_chunks(per_run * info.bytes).map(|run| scan(ty, run)).collect();
    let scans = match scans {
        Ok(scans) => scans,
        Err(e) => return vec![Check::exact(name, false, format!("MALFORMED: {e}"))],
    };
    let place = |block: u64| place(view, info.block, block);
    let mut checks = Vec::new();
    let bad: u64 = scans.iter().map(|s| s.nonfinite_blocks).sum();
    let first = scans.iter().zip(0u64..).find_map(|(s, run)| Some(run * per_run as u64 + s.first_nonfinite_block?));
    if let Some(first) = first {
        let detail = format!(
            "NAN_IN_FILE: {bad} of {blocks} {ty} blocks hold NaN or infinity, the first is {}; {file}. The file is \
             damaged or was badly quantised: fetch it again, or another type of it",
            place(first)
        );
        checks.push(Check::exact(name, false, detail));
    }
    let mut bounds: Vec<f32> = scans.iter().map(|s| s.max_abs_bound).filter(|b| *b > 0.0).collect();
    if bounds.is_empty() && bad == 0 && view.ne.len() > 1 && view.ne.get(1).is_some_and(|n| *n > 1) {
        checks.push(Check::new(name, Verdict::Drift, format!("ALL_ZERO: all {blocks} {ty} blocks are zero; {file}")));
    }
    if bounds.len() < LEAST_RUNS {
        return checks;
    }
    let middle = bounds.len() / 2;
    let median = *bounds.select_nth_unstable_by(middle, f32::total_cmp).1;
    let outliers = scans.iter().filter(|s| s.max_abs_bound > OUTLIER * median).count();
    if let Some((run, largest)) = largest_run(&scans).filter(|(_, s)| *s > OUTLIER * median) {
        let start = run * per_run * info.bytes;
        let bytes = &view.bytes[start..view.bytes.len().min(start + per_run * info.bytes)];
        let within = bytes.chunks(info.bytes).position(|b| scan(ty, b).is_ok_and(|s| s.max_abs_bound == largest));
        let detail = format!(
            "OUTLIER_BLOCK: {} allows values up to {largest:.3e}, the tensor's median is {median:.3e} ({outliers} such \
             runs of {}); {file}",
            place((run * per_run + within.unwrap_or(0)) as u64),
            per_run * info.block
        );
        checks.push(Check::new(name, Verdict::Drift, detail));
    }
    checks
}

fn largest_run(scans: &[crate::quant::Scan]) -> Option<(usize, f32)> {
    let bounds = scans.iter().map(|s| s.max_abs_bound).enumerate();
    bounds.max_by(|a, b| a.1.total_cmp(&b.1))
}

/// Block number `block` as people count: block, row, and matrix of a stack.
fn place(view: &View<'_>, values: usize, block: u64) -> String {
    let cols = view.ne.first().copied().unwrap_or(1).max(1);
    let per_row = (cols / values as u64).max(1);
    let (row, column) = (block / per_row, block % per_row * values as u64);
    let rows = view.ne.get(1).copied().unwrap_or(1).max(1);
    let unit = if values == 1 { "value" } else { "block" };
    match view.ne.get(2) {
        Some(stack) if *stack > 1 => {
            format!("{unit} {block}: matrix {}, row {}, column {column}", row / rows, row % rows)
        }
        _ => format!("{unit} {block}: row {row}, column {column}"),
    }
}
