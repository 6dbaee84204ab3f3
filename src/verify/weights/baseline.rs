//! A model's values against those of a checkpoint that is trusted: every parameter may differ by what its type must
//! cost, and by no more, as a whole and in every part. Where one differs by more, its content says what it is.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use lockstep_reference::weights::shape;
use lockstep_reference::{RefError, RefParam};
use rayon::prelude::*;

use super::bytes::Blocks;
use super::differs::Differs;
use super::distance::{Distance, Found, Part, distance, limit};
use super::expected::Oracle;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::oracle::Raw;
use crate::model::{Config, Kind, Param, params};
use crate::quant::QuantType;
use crate::report::{self, Check, Progress, StageReport, Verdict};
use crate::verify::param_map::reference_of;
use crate::verify::{Subject, VerifyError};

/// One parameter's distance, and its bytes where they can be compared.
struct Compared {
    param: Param,
    ty: QuantType,
    limit: f64,
    distance: Distance,
    blocks: Option<Blocks>,
}

impl Compared {
    /// No further from the baseline than the types may cost.
    fn is_near(&self) -> bool {
        self.distance.is_right()
    }

    /// What is wrong with its bytes, where its values are near.
    fn damage(&self) -> Option<Check> {
        let damage = self.blocks.as_ref().filter(|_| self.is_near())?.damage()?;
        Some(Check::exact(format!("{} = baseline", self.param), false, damage))
    }

    fn is_right(&self) -> bool {
        self.is_near() && self.damage().is_none()
    }

    fn is_equal(&self) -> bool {
        self.blocks.as_ref().is_some_and(Blocks::are_equal)
    }

    /// Where it differs, if not as a whole, and how much.
    fn place(&self) -> String {
        let Found { part, relative, limit } = self.distance.decides;
        let [matrices, rows, blocks] = self.distance.beyond;
        let place = match part {
            Part::Whole(_) => String::new(),
            Part::Matrix(m) => format!("matrix {m}, of {matrices} that differ: "),
            Part::Row(m, row) => format!("row {row} of matrix {m}, of {rows} rows that differ: "),
            Part::Block(m, row, from, n) => {
                format!(
                    "columns {from} to {} of row {row} of matrix {m}, of {blocks} blocks that differ: ",
                    from + n - 1
                )
            }
        };
        format!("{place}relative L2 {relative:.4}, limit {limit:.4} for {}", self.ty)
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
            let distance = distance(target, &baseline, *param, (*ty, *theirs))?;
            progress.at("parameters compared with the baseline", done.fetch_add(1, Ordering::Relaxed) + 1, all.len());
            let blocks = if ty == theirs { Blocks::of(target, &baseline, *param, *ty)? } else { None };
            Ok(Compared { param: *param, ty: *ty, limit: limit(*ty, *theirs), distance, blocks })
        })
        .collect::<Result<_, RefError>>()?;
    if compared.is_empty() {
        let check = Check::new("baseline", Verdict::Unmeasured, "no parameter that both checkpoints hold");
        return Ok(StageReport::new("weights", "nothing in common", vec![check]));
    }
    let mtp = compared.iter().filter(|found| is_mtp(c, &found.param)).count();
    let made = compared.len();
    let report = |summary, checks| {
        let values = report::Compared { trunk: made - mtp, mtp };
        StageReport { made, compared: values, ..StageReport::new("weights", summary, checks) }
    };
    let far: Vec<&Compared> = compared.iter().filter(|c| !c.is_near()).collect();
    if let Some(check) = different_checkpoint(&compared, &far) {
        return Ok(report("another checkpoint".to_string(), vec![check]));
    }
    let mut checks: Vec<Check> = not_compared(c, &left_out).collect();
    for c in &far {
        let (param, found) = (c.param, c.distance.decides);
        let why = Differs { target, baseline: &baseline, all: &every, param, found }.explain()?;
        checks.push(Check::exact(format!("{param} = baseline"), false, format!("{why} ({})", c.place())));
    }
    checks.extend(compared.iter().filter_map(Compared::damage));
    checks.extend(offsets(&compared, &checks));
    checks.extend(by_type(&compared));
    let right = compared.iter().filter(|c| c.is_right()).count();
    let equal = compared.iter().filter(|c| c.is_equal()).count();
    let summary =
        format!("{right} of {made} parameters within what their types cost, {equal} of them equal byte for byte");
    Ok(report(summary, checks))
}

fn is_mtp(c: &Config, param: &Param) -> bool {
    param.layer.is_some_and(|layer| layer >= c.layers)
}

/// Parameters that only one of the checkpoints holds, or in a type that cannot be read: those of the trunk were to be
/// compared, the MTP block may be missing.
fn not_compared(c: &Config, left_out: &[Param]) -> impl Iterator<Item = Check> {
    let (mtp, trunk): (Vec<Param>, Vec<Param>) = left_out.iter().partition(|p| is_mtp(c, p));
    let check = |(name, verdict, params): (&str, Verdict, Vec<Param>)| {
        let first = params.first()?;
        let detail = format!("{} parameters have no readable counterpart, {first} first", params.len());
        Some(Check::new(name, verdict, detail))
    };
    let lists = [("trunk = baseline", Verdict::Unmeasured, trunk), ("MTP = baseline", Verdict::NotApplicable, mtp)];
    lists.into_iter().filter_map(check)
}

/// How far each parameter of the trunk may be from the baseline's, relative to its size: not at all where its bytes are
/// the baseline's and nobody quantised it again. Those that one of them lacks are left out.
///
/// # Errors
/// A model that the reference cannot read.
pub(in crate::verify) fn may_cost(
    target: &Checkpoint,
    baseline: &Checkpoint,
) -> Result<BTreeMap<(Option<usize>, RefParam), f64>, RefError> {
    let (raw, other) = (Raw(target.source()), Raw(baseline.source()));
    let (ours, theirs) = (Oracle::new(&raw)?, Oracle::new(&other)?);
    let cost = |param: Param| {
        let (Some(ty), Some(other)) = (file_type(target, param), file_type(baseline, param)) else { return Ok(None) };
        let blocks = if ty == other { Blocks::of(&ours, &theirs, param, ty)? } else { None };
        let cost = if blocks.is_some_and(|blocks| blocks.are_kept()) { 0.0 } else { limit(ty, other) };
        Ok(Some(((param.layer, reference_of(param.kind)), cost)))
    };
    let all = params::of_trunk(target.config());
    all.into_par_iter().filter_map(|param| cost(param).transpose()).collect()
}

/// The type in the file, also of parameters that are derived on load.
fn file_type(checkpoint: &Checkpoint, param: Param) -> Option<QuantType> {
    checkpoint.source().tensor(checkpoint.binding(param)?.names().first()?)?.ty.quant
}

/// Everything differs, embeddings included: then nothing is corrupt, the two are not the same checkpoint.
fn different_checkpoint(all: &[Compared], wrong: &[&Compared]) -> Option<Check> {
    let embedding = all.iter().find(|c| c.param.kind == Kind::TokenEmbd);
    if wrong.len() * 10 < all.len() * 9 || embedding.is_some_and(Compared::is_near) || wrong.len() < 4 {
        return None;
    }
    let mut distances: Vec<f64> = wrong.iter().map(|c| c.distance.whole).collect();
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
        let least = all.iter().map(|c| c.distance.whole).fold(f64::INFINITY, f64::min);
        let most = all.iter().map(|c| c.distance.whole).fold(0.0, f64::max);
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
