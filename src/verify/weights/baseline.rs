//! A model's values against those of a checkpoint that is trusted: every parameter may differ by what its type must
//! cost, and by no more. Where one differs by more, its content says what it is: the baseline plus a constant, times a
//! factor, with its rows in another order, or another parameter.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use lockstep_reference::weights::shape;
use lockstep_reference::{RefError, Weights};
use ndarray::{Array2, ArrayView1};
use rayon::prelude::*;

use super::expected::{Oracle, is_expert_stack};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::oracle::Raw;
use crate::model::{Config, Kind, Param, params};
use crate::quant::QuantType;
use crate::report::{Check, Progress, StageReport, Verdict};
use crate::verify::param_map::reference_of;
use crate::verify::{Subject, VerifyError};

/// How much more than on Gaussian weights a type may cost. Trained rows have heavier tails, so that fewer of the codes
/// carry most values, and files made with an importance matrix trade plain error for weighted error. The most that the
/// trained test model costs is 1.14 times the Gaussian figure (Q4_K 0.083), random ones 1.05.
const MARGIN: f64 = 1.5;
/// What plain f32 may differ by: nothing but the arithmetic of a conversion.
const PLAIN: f64 = 1e-6;

/// Relative L2 error that a type costs on Gaussian weights, measured with ggml's own quantisers (the goldens' README);
/// for formats with a minimum of 32 values, the range of 32 Gaussian values (4.14 sigma) over the codes and sqrt(12).
fn cost(ty: QuantType) -> f64 {
    match ty {
        QuantType::F32 => 0.0,
        QuantType::F16 => 1.0 / 2048.0, // half an ulp at worst
        QuantType::BF16 => 1.0 / 256.0,
        QuantType::Q8_0 => 0.005,
        QuantType::Q6_K => 0.018,
        QuantType::Q5_K => 0.037,
        QuantType::Q5_0 => 0.041,
        QuantType::Q5_1 => 0.039,
        QuantType::Q4_K => 0.073,
        QuantType::Q4_0 => 0.086,
        QuantType::Q4_1 => 0.080,
        QuantType::IQ4_XS | QuantType::IQ4_NL => 0.077,
        QuantType::MXFP4 => 0.112,
        QuantType::NVFP4 => 0.113,
        QuantType::Q3_K => 0.159,
        QuantType::Q2_K => 0.292,
        QuantType::IQ2_XXS => 0.360,
        QuantType::IQ2_XS => 0.314,
        QuantType::IQ2_S => 0.273,
        QuantType::IQ3_XXS => 0.228,
        QuantType::IQ3_S => 0.166,
    }
}

/// The largest relative L2 distance of values stored as `target` from those of a baseline stored as `baseline`. Plain
/// baselines are what files are made from, so theirs is no error; two block formats each have their own.
fn limit(target: QuantType, baseline: QuantType) -> f64 {
    let other = if baseline.is_plain() { 0.0 } else { cost(baseline) };
    PLAIN + MARGIN * cost(target).hypot(other)
}

/// One parameter's distance.
struct Compared {
    param: Param,
    ty: QuantType,
    relative: f64,
    limit: f64,
}

impl Compared {
    fn is_right(&self) -> bool {
        self.relative <= self.limit
    }
}

/// Compares every parameter that both checkpoints hold.
pub(super) fn compare(
    subject: &Subject,
    target: &Oracle<'_>,
    other: &Checkpoint,
    progress: &dyn Progress,
) -> Result<StageReport, VerifyError> {
    let raw = Raw(other.source());
    let baseline = Oracle::new(&raw)?;
    let c = subject.checkpoint.config();
    let every: Vec<Param> = params::of_trunk(c).into_iter().chain(params::of_mtp(c)).collect();
    let (mut all, mut left_out) = (Vec::new(), Vec::new());
    for param in every.iter().copied().filter(|p| subject.wants_layer(p.layer)) {
        match (file_type(&subject.checkpoint, param), file_type(other, param)) {
            (Some(ty), Some(theirs)) => all.push((param, ty, theirs)),
            _ => left_out.push(param),
        }
    }
    let fits = |p: &Param| {
        let name = reference_of(p.kind);
        shape(&target.config, name) == shape(&baseline.config, name) && target.config.experts == baseline.config.experts
    };
    let misfit: Vec<&Param> = all.iter().map(|(p, ..)| p).filter(|p| !fits(p)).collect();
    if let Some(first) = misfit.first() {
        let [here, there] = [target, &baseline].map(|model| shape(&model.config, reference_of(first.kind)));
        let detail = format!(
            "DIFFERENT_MODEL: {} of {} parameters have other shapes, {first} first: {here:?} here, {there:?} in the baseline",
            misfit.len(),
            all.len()
        );
        let check = Check::exact("baseline", false, detail);
        return Ok(StageReport::new("weights", "another model", vec![check]));
    }
    let done = AtomicUsize::new(0);
    let compared: Vec<Compared> = all
        .par_iter()
        .map(|(param, ty, theirs)| {
            let relative = distance(target, &baseline, *param)?;
            progress.at("parameters compared with the baseline", done.fetch_add(1, Ordering::Relaxed) + 1, all.len());
            Ok(Compared { param: *param, ty: *ty, relative, limit: limit(*ty, *theirs) })
        })
        .collect::<Result<_, RefError>>()?;
    if compared.is_empty() {
        let check = Check::new("baseline", Verdict::Unmeasured, "no parameter that both checkpoints hold");
        return Ok(StageReport::new("weights", "nothing in common", vec![check]));
    }
    let wrong: Vec<&Compared> = compared.iter().filter(|c| !c.is_right()).collect();
    if let Some(check) = different_checkpoint(&compared, &wrong) {
        let report = StageReport::new("weights", "another checkpoint", vec![check]);
        return Ok(StageReport { made: compared.len(), ..report });
    }
    let mut checks: Vec<Check> = not_compared(c, &left_out).collect();
    for c in &wrong {
        let why = explain(target, &baseline, &every, c)?;
        let numbers = format!("relative L2 {:.4}, limit {:.4} for {}", c.relative, c.limit, c.ty);
        checks.push(Check::exact(format!("{} = baseline", c.param), false, format!("{why} ({numbers})")));
    }
    checks.extend(offsets(&compared, &checks));
    checks.extend(by_type(&compared));
    let right = compared.len() - wrong.len();
    let summary = format!("{right} of {} parameters within what their types cost", compared.len());
    Ok(StageReport { made: compared.len(), ..StageReport::new("weights", summary, checks) })
}

/// Parameters that only one of the checkpoints holds, or in a type that cannot be read: those of the trunk were to be
/// compared, the MTP block may be missing.
fn not_compared(c: &Config, left_out: &[Param]) -> impl Iterator<Item = Check> {
    let is_mtp = |p: &Param| p.layer.is_some_and(|layer| layer >= c.layers);
    let (mtp, trunk): (Vec<Param>, Vec<Param>) = left_out.iter().partition(|p| is_mtp(p));
    let check = |(name, verdict, params): (&str, Verdict, Vec<Param>)| {
        let first = params.first()?;
        let detail = format!("{} parameters have no readable counterpart, {first} first", params.len());
        Some(Check::new(name, verdict, detail))
    };
    let lists = [("trunk = baseline", Verdict::Unmeasured, trunk), ("MTP = baseline", Verdict::NotApplicable, mtp)];
    lists.into_iter().filter_map(check)
}

/// The type in the file, also of parameters that are derived on load.
fn file_type(checkpoint: &Checkpoint, param: Param) -> Option<QuantType> {
    checkpoint.source().tensor(checkpoint.binding(param)?.names().first()?)?.ty.quant
}

/// Matrix `index` of a parameter as plain values: vectors as one row.
fn matrix(model: &Oracle<'_>, param: Param, index: usize) -> Result<Array2<f32>, RefError> {
    let (weights, name) = (model.weights(), reference_of(param.kind));
    Ok(match (param.kind, shape(&model.config, name).len()) {
        (Kind::KB | Kind::VB, _) => weights.heads(param.layer, name)?.index_axis(ndarray::Axis(0), index).to_owned(),
        _ if is_expert_stack(name) => (*weights.expert(param.layer, name, index)?).clone(),
        (_, 1) => weights.vector(param.layer, name)?.view().insert_axis(ndarray::Axis(0)).to_owned(),
        _ => (*weights.matrix(param.layer, name)?).clone(),
    })
}

fn stack(model: &Oracle<'_>, kind: Kind) -> usize {
    match kind {
        Kind::KB | Kind::VB => model.config.heads,
        kind if is_expert_stack(reference_of(kind)) => model.config.experts,
        _ => 1,
    }
}

/// Sums of squares: of the errors, and of the baseline.
fn squares<'a>(t: impl IntoIterator<Item = &'a f32>, b: impl IntoIterator<Item = &'a f32>) -> [f64; 2] {
    let pair = |[error, size]: [f64; 2], (t, b): (&f32, &f32)| {
        [error + (f64::from(*t) - f64::from(*b)).powi(2), size + f64::from(*b).powi(2)]
    };
    t.into_iter().zip(b).fold([0.0; 2], pair)
}

fn ratio([error, size]: [f64; 2]) -> f64 {
    if error == 0.0 { 0.0 } else { (error / size.max(f64::MIN_POSITIVE)).sqrt() }
}

/// ||t - b|| / ||b||.
fn relative(t: &Array2<f32>, b: &Array2<f32>) -> f64 {
    ratio(squares(t, b))
}

/// The same over all matrices of a parameter.
fn distance(target: &Oracle<'_>, baseline: &Oracle<'_>, param: Param) -> Result<f64, RefError> {
    let mut sum = [0.0; 2];
    for index in 0..stack(target, param.kind) {
        let [error, size] = squares(&matrix(target, param, index)?, &matrix(baseline, param, index)?);
        sum = [sum[0] + error, sum[1] + size];
    }
    Ok(ratio(sum))
}

/// Everything differs, embeddings included: then nothing is corrupt, the two are not the same checkpoint.
fn different_checkpoint(all: &[Compared], wrong: &[&Compared]) -> Option<Check> {
    let embedding = all.iter().find(|c| c.param.kind == Kind::TokenEmbd);
    if wrong.len() * 10 < all.len() * 9 || embedding.is_some_and(Compared::is_right) || wrong.len() < 4 {
        return None;
    }
    let mut distances: Vec<f64> = wrong.iter().map(|c| c.relative).collect();
    distances.sort_by(f64::total_cmp);
    let detail = format!(
        "DIFFERENT_CHECKPOINT: {} of {} parameters differ{} (median relative L2 {:.3}): these are different checkpoints, \
         not a damaged copy. Name the checkpoint that this file was made from",
        wrong.len(),
        all.len(),
        if embedding.is_some() { ", embeddings included" } else { "" },
        distances[distances.len() / 2]
    );
    Some(Check::exact("baseline", false, detail))
}

/// One line per type of the parameters that are right.
fn by_type(compared: &[Compared]) -> Vec<Check> {
    let mut types: BTreeMap<QuantType, Vec<&Compared>> = BTreeMap::new();
    for c in compared.iter().filter(|c| c.is_right()) {
        types.entry(c.ty).or_default().push(c);
    }
    let line = |(ty, all): (QuantType, Vec<&Compared>)| {
        let least = all.iter().map(|c| c.relative).fold(f64::INFINITY, f64::min);
        let most = all.iter().map(|c| c.relative).fold(0.0, f64::max);
        let limit = all.iter().map(|c| c.limit).fold(0.0, f64::max);
        let detail = format!("{} parameters, relative L2 {least:.4} to {most:.4}, limit {limit:.4}", all.len());
        Check::exact(format!("{ty} = baseline"), true, detail)
    };
    types.into_iter().map(line).collect()
}

/// Norms that are all off by the same constant are one fault, not many.
fn offsets(compared: &[Compared], checks: &[Check]) -> Option<Check> {
    let count = checks.iter().filter(|c| c.detail.starts_with("NORM_OFFSET")).count();
    let is_norm = |c: &&Compared| c.param.kind.is_plain() && !matches!(c.param.kind, Kind::Router | Kind::RouterBias);
    let norms = compared.iter().filter(is_norm).count();
    (count > 1).then(|| {
        let detail = format!(
            "NORM_OFFSET: a constant offset on {count} of {norms} norms: a convention (weight, or 1 + weight) was applied \
             once too often or too seldom"
        );
        Check::exact("norms = baseline", false, detail)
    })
}

/// What a parameter that differs holds instead, from its first matrix.
fn explain(target: &Oracle<'_>, baseline: &Oracle<'_>, all: &[Param], c: &Compared) -> Result<String, RefError> {
    let t = matrix(target, c.param, 0)?;
    let b = matrix(baseline, c.param, 0)?;
    let pairs = || t.iter().zip(&b).map(|(t, b)| (f64::from(*t), f64::from(*b)));
    let offset = pairs().map(|(t, b)| t - b).sum::<f64>() / t.len() as f64;
    if is_changed(&t, &b, c.limit, |b| b + offset) {
        let kind = if c.param.kind.is_plain() { "NORM_OFFSET" } else { "OFFSET" };
        return Ok(format!("{kind}: the baseline plus a constant {offset:+.3}"));
    }
    let size: f64 = pairs().map(|(_, b)| b * b).sum();
    let factor = pairs().map(|(t, b)| t * b).sum::<f64>() / size.max(f64::MIN_POSITIVE);
    if factor != 0.0 && is_changed(&t, &b, c.limit, |b| b * factor) {
        return Ok(format!("SCALE: the baseline times {factor:.4}"));
    }
    for other in lookalikes(baseline, all, c.param) {
        if let Ok(theirs) = matrix(baseline, other, 0)
            && theirs.dim() == t.dim()
            && relative(&t, &theirs) <= c.limit
        {
            return Ok(format!("WRONG_TENSOR: holds the baseline's {other}"));
        }
    }
    if t.is_square() && relative(&t, &b.t().to_owned()) <= c.limit {
        return Ok("TRANSPOSED: the baseline with its axes exchanged".into());
    }
    if let Some((row, from)) = moved_row(&t, &b, c.limit) {
        return Ok(format!("PERMUTED_ROWS: the baseline's rows in another order, row {from} stands at row {row}"));
    }
    Ok("DIFFERS: beyond what the type costs, and none of constant offset, factor, other tensor, order of rows".into())
}

/// True where the target is what a change makes of the baseline. What f32 rounds into every value leaves up to half an ulp.
fn is_changed(t: &Array2<f32>, b: &Array2<f32>, limit: f64, change: impl Fn(f64) -> f64) -> bool {
    t.len() >= 8 && relative(t, &b.mapv(|b| change(f64::from(b)) as f32)) <= limit + 1e-6
}

/// Parameters that a converter may have taken for this one: of the same shape in its layer, and its neighbours'.
fn lookalikes(model: &Oracle<'_>, all: &[Param], param: Param) -> Vec<Param> {
    let of = |kind| shape(&model.config, reference_of(kind));
    let (own, near): (Vec<Param>, Vec<Param>) = all.iter().partition(|p| p.layer == param.layer);
    let alike = own.into_iter().filter(|p| p.kind != param.kind && of(p.kind) == of(param.kind));
    let next = |p: &Param| p.kind == param.kind && p.layer.zip(param.layer).is_some_and(|(a, b)| a.abs_diff(b) == 1);
    alike.chain(near.into_iter().filter(next)).collect()
}

/// Rows looked for; if every one of them is somewhere else in the baseline, the rows were permuted.
const SAMPLED_ROWS: usize = 8;

/// The first sampled row that stands elsewhere in the baseline, and where, provided that all sampled rows are found.
fn moved_row(t: &Array2<f32>, b: &Array2<f32>, limit: f64) -> Option<(usize, usize)> {
    let rows = t.nrows();
    if rows < 2 {
        return None;
    }
    let near = |row: ArrayView1<'_, f32>, other: ArrayView1<'_, f32>| {
        let [error, size] = squares(row, other);
        error <= (2.0 * limit).powi(2) * size // a single row scatters more than the whole
    };
    let mut moved = None;
    for i in 0..SAMPLED_ROWS.min(rows) {
        let row = i * rows / SAMPLED_ROWS.min(rows);
        if near(t.row(row), b.row(row)) {
            continue;
        }
        let from = (0..rows).find(|r| near(t.row(row), b.row(*r)))?;
        moved = moved.or(Some((row, from)));
    }
    moved
}
