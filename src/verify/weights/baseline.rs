//! A model's values against those of a checkpoint that is trusted: every parameter may differ by what its type must
//! cost, and by no more, as a whole and in every part. Where one differs by more, its content says what it is.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use lockstep_reference::weights::shape;
use lockstep_reference::{RawTensor, RefError};
use rayon::prelude::*;

use super::differs::Differs;
use super::distance::{Distance, Found, LEAST_BLOCK, Part, distance, limit};
use super::expected::Oracle;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::oracle::Raw;
use crate::model::{Config, Kind, Param, params};
use crate::quant::QuantType;
use crate::report::{Check, Progress, StageReport, Verdict};
use crate::verify::param_map::reference_of;
use crate::verify::{Subject, VerifyError};

/// One parameter's distance.
struct Compared {
    param: Param,
    ty: QuantType,
    limit: f64,
    distance: Distance,
}

impl Compared {
    fn is_right(&self) -> bool {
        self.distance.is_right()
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
            Ok(Compared { param: *param, ty: *ty, limit: limit(*ty, *theirs), distance })
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
        let (param, found) = (c.param, c.distance.decides);
        let why = Differs { target, baseline: &baseline, all: &every, param, found }.explain()?;
        checks.push(Check::exact(format!("{param} = baseline"), false, format!("{why} ({})", c.place())));
    }
    for c in compared.iter().filter(|c| c.is_right()) {
        checks.extend(few_blocks(target, &baseline, c)?);
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

/// How far a parameter may be from the baseline's, relative to its size; `None` where one of them lacks it.
pub(in crate::verify) fn may_cost(target: &Checkpoint, baseline: &Checkpoint, param: Param) -> Option<f64> {
    Some(limit(file_type(target, param)?, file_type(baseline, param)?))
}

/// The type in the file, also of parameters that are derived on load.
fn file_type(checkpoint: &Checkpoint, param: Param) -> Option<QuantType> {
    checkpoint.source().tensor(checkpoint.binding(param)?.names().first()?)?.ty.quant
}

/// Everything differs, embeddings included: then nothing is corrupt, the two are not the same checkpoint.
fn different_checkpoint(all: &[Compared], wrong: &[&Compared]) -> Option<Check> {
    let embedding = all.iter().find(|c| c.param.kind == Kind::TokenEmbd);
    if wrong.len() * 10 < all.len() * 9 || embedding.is_some_and(Compared::is_right) || wrong.len() < 4 {
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

/// Who quantises a tensor again changes blocks everywhere or nowhere. This share of them at most is damage.
const FEW: f64 = 0.01;

/// Blocks of a parameter whose bytes are not the baseline's, where its type is the same and nearly all others are.
fn few_blocks(target: &Oracle<'_>, baseline: &Oracle<'_>, c: &Compared) -> Result<Option<Check>, RefError> {
    let (ours, theirs) = (target.tensors(c.param)?, baseline.tensors(c.param)?);
    let alike = |((_, a), (_, b)): (&(_, RawTensor<'_>), &(_, RawTensor<'_>))| {
        a.type_id == b.type_id && a.bytes.len() == b.bytes.len()
    };
    if ours.len() != theirs.len() || !ours.iter().zip(&theirs).all(alike) {
        return Ok(None);
    }
    let size = c.ty.row_bytes(c.ty.block().max(LEAST_BLOCK));
    let (mut all, mut differ, mut first) = (0, 0, None);
    for ((name, a), (_, b)) in ours.iter().zip(&theirs) {
        let blocks = a.bytes.chunks(size).zip(b.bytes.chunks(size)).enumerate();
        all += a.bytes.len().div_ceil(size);
        for (i, _) in blocks.filter(|(_, (a, b))| a != b) {
            differ += 1;
            first.get_or_insert((name, i * size));
        }
    }
    let few = differ as f64 <= FEW * all as f64;
    Ok(first.filter(|_| few).map(|(name, at)| {
        let (param, ty) = (c.param, c.ty);
        let detail = format!(
            "BYTES: {differ} of {all} {ty} blocks are not the baseline's, the first at byte {at} of {name}; all others \
             are, byte for byte"
        );
        Check::exact(format!("{param} = baseline"), false, detail)
    }))
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
