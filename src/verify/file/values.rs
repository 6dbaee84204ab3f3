//! Every block of every tensor: NaN and infinities, blocks whose scale is out of all proportion, runs of zeros.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use super::shares;
use super::sizes::{self, Sizes};
use super::strewn::{self, Strewn};
use super::zeros::{self, Holds};
use crate::checkpoint::{Checkpoint, View};
use crate::model::{Kind, Param, params};
use crate::quant::{QuantType, scan};
use crate::report::{Check, Progress, Verdict};

/// Values per run: the unit whose largest value is compared with that of its neighbours.
const RUN: usize = 256;
/// Runs that a small tensor of weights is cut into at least, so that one value of a norm shows.
const RUNS: usize = 32;
/// Runs per tensor at most, so that the largest tensors cost no more memory than small ones.
const MOST_RUNS: usize = 1 << 16;
/// Fewer runs have no median worth the name.
const LEAST_RUNS: usize = 8;
/// A run this many times above the tensor's median. In the trained test model the largest is 6 times the median, and two
/// orders are known of embeddings of rare tokens; the flipped top bit of a scale's exponent is worth 2^16.
const OUTLIER: f32 = 1e4;
/// One run in so many may be out of proportion to the others and call itself damage. Where more are, most of the tensor may
/// be as good as zero (units that died), and the few that are alive are the sound ones.
const FEW: usize = 100;
/// A value of this size is damage wherever it stands out: activations would leave the range of half precision.
const ABSURD: f32 = 1e3;
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
pub(super) fn scan_all(checkpoint: &Checkpoint, progress: &dyn Progress) -> Scanned {
    let source = checkpoint.source();
    let kinds = kinds(checkpoint);
    let spec = checkpoint.tokenizer_spec().ok();
    // Padding, and place holders of converters.
    let unused = |row: usize| spec.as_ref().is_none_or(|s| s.types.get(row).is_none_or(|ty| *ty == 5));
    let names: Vec<&str> = source.names();
    let all: u64 = names.iter().filter_map(|n| source.tensor(n)).map(|v| v.bytes.len() as u64).sum();
    let done = AtomicU64::new(0);
    let found: Vec<(Vec<Check>, Option<Beside>)> = names
        .par_iter()
        .filter_map(|name| {
            let view = source.tensor(name)?;
            let ty = view.ty.quant?;
            let row = ty.row_bytes(view.ne.first().map_or(0, |n| *n as usize));
            let param = kinds.get(*name);
            let holds = match param.map(|param| param.kind) {
                None => Holds::Anything,
                Some(kind) if zeros::may_be_zero(kind) => Holds::Anything,
                Some(Kind::TokenEmbd | Kind::Output) => Holds::Vocabulary(row, &unused),
                Some(_) if view.bytes.len() == row => Holds::Vector,
                Some(_) => Holds::Rows(row),
            };
            let place = Place { file: source.file_of(name), offset: source.offset_of(name) };
            let units = zeros::units(ty, &view.bytes, holds);
            let checks = tensor(name, &place, ty, &view, (holds, &units));
            let beside_kin = |param: &Param| {
                let (name, kind, layer) = (name.to_string(), param.kind, param.layer);
                let (zero, all) = strewn::of(ty, &view, holds, &units);
                (Sizes { name: name.clone(), kind, of: sizes::of(ty, &view) }, Strewn { name, kind, layer, zero, all })
            };
            let kin = param.map(beside_kin);
            let before = done.fetch_add(view.bytes.len() as u64, Ordering::Relaxed);
            let now = before + view.bytes.len() as u64;
            if before / UNIT != now / UNIT || now == all {
                progress.bytes("scanned", now, all);
            }
            Some((checks, kin))
        })
        .collect();
    let tensors = found.len();
    let (checks, kin): (Vec<_>, Vec<_>) = found.into_iter().unzip();
    let mut checks: Vec<Check> = checks.into_iter().flatten().collect();
    let (sizes, strewn): (Vec<Sizes>, Vec<Strewn>) = kin.into_iter().flatten().unzip();
    let is_bad = |name: &str| checks.iter().any(|c| c.name == name && c.verdict == Verdict::Divergent);
    let range = |name: &str, range: &Range<usize>| {
        let place = Place { file: source.file_of(name), offset: source.offset_of(name) };
        format!("{}; {}", place.range(range), place.file)
    };
    let odd = [sizes::checks(&sizes, is_bad), strewn::checks(&strewn, is_bad, range)].concat();
    checks.extend(odd);
    if !checks.iter().any(|c| c.verdict == Verdict::Divergent) {
        checks.push(Check::exact("values", true, format!("no NaN and no infinity in {tensors} tensors")));
    }
    Scanned { tensors, bytes: all, checks }
}

/// The parameter that every tensor fills, or that it holds the first part of.
fn kinds(checkpoint: &Checkpoint) -> HashMap<&str, Param> {
    let c = checkpoint.config();
    let mut kinds = HashMap::new();
    for param in params::of_trunk(c).into_iter().chain(params::of_mtp(c)) {
        for name in checkpoint.binding(param).into_iter().flat_map(|b| b.names()) {
            kinds.entry(name.as_str()).or_insert(param);
        }
    }
    kinds
}

/// What of a tensor is held against its kin.
type Beside = (Sizes, Strewn);

/// Where units of a tensor are zero.
type Units = [Range<usize>];

/// Where a tensor's data lies.
struct Place {
    file: String,
    offset: Option<u64>,
}

impl Place {
    /// A range of the tensor's bytes, and where that is in the file.
    fn range(&self, range: &Range<usize>) -> String {
        let at = |offset: u64| format!(" (from offset {} of the file)", offset + range.start as u64);
        format!("bytes {}..{} of the tensor{}", range.start, range.end, self.offset.map_or(String::new(), at))
    }
}

fn tensor(name: &str, at: &Place, ty: QuantType, view: &View<'_>, (holds, units): (Holds<'_>, &Units)) -> Vec<Check> {
    let file = &at.file;
    let info = ty.info();
    let blocks = view.bytes.len() / info.bytes;
    // Biases may be next to nothing but for one.
    let run = match holds {
        Holds::Anything => RUN,
        _ => RUN.min(blocks * info.block / RUNS),
    };
    let per_run = (run / info.block).max(1).max(blocks.div_ceil(MOST_RUNS));
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
    if let Some(what) = zero(at, ty, view, (holds, units)) {
        let detail = format!(
            "{what}; {file}. No trained tensor is so: this part was never written, or lost; fetch or convert it again"
        );
        checks.push(Check::exact(name, false, detail));
    }
    let mut bounds: Vec<f32> = scans.iter().map(|s| s.max_abs_bound).filter(|b| *b > 0.0).collect();
    if bounds.len() < LEAST_RUNS {
        return checks;
    }
    bounds.sort_unstable_by(f32::total_cmp);
    let median = bounds[bounds.len() / 2];
    let others = bounds[bounds.len() - 1 - (bounds.len() / FEW).max(1)];
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
        let gross = largest > OUTLIER * others || largest > ABSURD;
        let verdict = if gross { Verdict::Divergent } else { Verdict::Drift };
        let advice = if gross { ". The file is damaged or was badly quantised: fetch it again" } else { "" };
        checks.push(Check::new(name, verdict, format!("{detail}{advice}")));
    }
    checks
}

/// What is zero in a tensor and must not be.
fn zero(at: &Place, ty: QuantType, view: &View<'_>, (holds, units): (Holds<'_>, &Units)) -> Option<String> {
    let all = view.bytes.len();
    let block = ty.info().bytes;
    let stack = view.ne.get(2).map_or(1, |n| *n as usize).max(1);
    let share = || shares::of(ty, view, holds, units).map(|s| format!("{}, {}", s.what, at.range(&s.first)));
    let runs = zeros::runs(ty, &view.bytes, holds, units);
    let Some(first) = runs.first() else { return share() };
    let bytes: usize = runs.iter().map(ExactSizeIterator::len).sum();
    let (matrices, range) = (first.start.div_ceil(all / stack)..first.end / (all / stack), at.range(first));
    // Scales may be zero where the codes are not.
    let codes = view.bytes[first.clone()].iter().any(|b| *b != 0);
    let why = if codes { format!(": every {ty} block's scale is zero") } else { String::new() };
    let what = match matrices.len() {
        _ if first.len() == all => format!("ALL_ZERO: all {} {ty} blocks are zero{why}, {range}", all / block),
        1 => format!("ALL_ZERO: matrix {} of {stack} is all zero{why}, {range}", matrices.start),
        2.. => format!("ALL_ZERO: matrices {matrices:?} of {stack} are all zero{why}, {range}"),
        0 => {
            let from = place(view, ty.info().block, (first.start / block) as u64);
            let values = first.len() / block * ty.info().block;
            format!("ZERO_RUN: {} zero bytes ({values} values), {range}, from {from} on{why}", first.len())
        }
    };
    let more = match runs.len() {
        1 => String::new(),
        n => {
            let share = shares::of(ty, view, holds, units).map_or(String::new(), |s| format!("; {}", s.what));
            format!("; {} more such runs, {bytes} bytes in all{share}", n - 1)
        }
    };
    Some(format!("{what}{more}"))
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
