//! The first bad layer, then the operation, then the region, then the kind of fault.
//!
//! The file comes first, as in `verify`: what is wrong with it would be laid on the operations that read it.
//!
//! The same input runs three times first: bits that differ are NONDETERMINISTIC, and nothing else is said. Then every
//! operation is replayed; the first that diverges is explained by the catalogue, or it is UNKNOWN and what was ruled out
//! is printed.

use std::collections::BTreeMap;

use lockstep_reference::RefParam;

use super::explain::EXPLANATIONS;
use super::hypothesis::{Alter, Hypothesis, OpContext};
use crate::checkpoint::oracle::Raw;
use crate::engine::{Engine, Lent};
use crate::model::place::Unit;
use crate::model::{Layout, params};
use crate::report::bisection::{Bisection, Blame, Culprit, Explanation, FileFault, Fit, RuledOut, UNKNOWN};
use crate::report::json::Number;
use crate::report::table::ranges;
use crate::report::{Progress, Verdict};
use crate::verify::activations::sparse_activity;
use crate::verify::feed::{Feed, Listen, feed};
use crate::verify::floor::{Energy, LEAST_VALUES, limit};
use crate::verify::op::OpFinding;
use crate::verify::operations::judge_all;
use crate::verify::param_map::reference_of;
use crate::verify::replay::{Measured, Unjudged};
use crate::verify::subject::points_of;
use crate::verify::{Subject, VerifyError, file};

/// Runs the bisection: the file, then the operations.
///
/// # Errors
/// An engine that cannot run, a reference that cannot read the model.
pub fn run(subject: &Subject, progress: &dyn Progress) -> Result<Bisection, VerifyError> {
    let checks = file::run(subject, progress)?.checks.into_iter().filter(|c| c.verdict >= Verdict::Divergent);
    let faults: Vec<FileFault> = checks.map(|c| FileFault { check: c.name, evidence: c.detail }).collect();
    if faults.is_empty() {
        return operations(subject, progress);
    }
    Ok(Bisection {
        verdict: Verdict::Divergent,
        file: faults,
        culprit: None,
        others: Vec::new(),
        judged: 0,
        unmeasured: 0,
        sparse_attention: None,
        convention: None,
        parts_at: None,
    })
}

/// The bisection of a model whose file is right.
///
/// # Errors
/// As [`run`].
pub fn operations(subject: &Subject, progress: &dyn Progress) -> Result<Bisection, VerifyError> {
    let mut found = Bisection {
        verdict: Verdict::Nondeterministic,
        file: Vec::new(),
        culprit: None,
        others: Vec::new(),
        judged: 0,
        unmeasured: 0,
        sparse_attention: None,
        convention: None,
        parts_at: match subject.target {
            Some(_) => None,
            None => nondeterminism(subject, progress)?,
        },
    };
    if found.parts_at.is_some() {
        return Ok(found);
    }
    let raw = &Raw(subject.checkpoint.source());
    let mut seen: Vec<OpFinding> = Vec::new();
    let judged = judge_all(subject, progress, &mut |judge, all, trace| {
        let first = first_that_matters(&all).filter(|_| found.culprit.is_none());
        for (i, finding) in all.into_iter().enumerate() {
            found.judged += usize::from(!matches!(finding.verdict, Verdict::NotApplicable | Verdict::Unmeasured));
            found.unmeasured += usize::from(finding.verdict == Verdict::Unmeasured);
            if finding.verdict != Verdict::Divergent {
                seen.push(finding);
            } else if first != Some(i) {
                found.others.push(finding.place.to_string());
            } else {
                let ranks = match finding.ranks.is_empty() {
                    true => (0..trace.tp).collect(),
                    false => finding.ranks.clone(),
                };
                let (model, place, over) = (subject.checkpoint.config(), finding.place, finding.over.clone());
                let op = OpContext { raw, model, judge, trace, place, over, ranks };
                let region = Unjudged::or_none(region(&op))?.unwrap_or_else(|| "unknown".into());
                found.culprit = Some(explain(subject, &op, finding, region, progress)?);
            }
        }
        Ok(())
    })?;
    let sparse = sparse_activity(subject, &seen);
    let contradicted = judged.given.as_ref().filter(|given| !given.followed).map(|_| Verdict::Drift);
    let drift = seen.iter().map(|f| f.verdict).filter(|v| *v == Verdict::Drift).chain(contradicted);
    found.verdict = match (&found.culprit, found.judged, found.unmeasured) {
        (Some(_), ..) => Verdict::Divergent,
        (None, 0, _) | (None, _, 1..) => Verdict::Unmeasured,
        // What did not run cannot be cleared; a dense run by choice is neutral.
        (None, ..) => drift.chain([sparse.verdict, Verdict::Match]).max().unwrap_or(Verdict::Unmeasured),
    };
    let convention = judged.given.map(|given| given.detail);
    Ok(Bisection { sparse_attention: Some(sparse.detail), convention, ..found })
}

/// Of the squared error, what a hypothesis may leave to be judged by its floor.
const MOST_LEFT: f64 = 0.25;

/// Copies of a value that all ranks should hold alike differ, and no kind says why.
const DISAGREE: &str = "RANKS_DISAGREE";

/// A share of its limit up to which a hit is near it, and how much grosser one behind it must be to come first.
const NEAR: f64 = 3.0;
const GROSS: f64 = 100.0;

/// The first operation that diverges; one that is near its limit does not outrank a gross one behind it, which it cannot
/// explain.
fn first_that_matters(all: &[OpFinding]) -> Option<usize> {
    let share = |f: &OpFinding| f.rho.0 / f.rho.1;
    let diverging = || all.iter().enumerate().filter(|(_, f)| f.verdict == Verdict::Divergent);
    let (first, near) = diverging().next()?;
    let gross = diverging().find(|(_, f)| share(near) < NEAR && share(f) > GROSS * share(near));
    Some(gross.map_or(first, |(i, _)| i))
}

/// Runs the same input three times on one engine and says where the bits part.
fn nondeterminism(subject: &Subject, progress: &dyn Progress) -> Result<Option<String>, VerifyError> {
    let mut engine = subject.engine()?;
    let listen = Listen::Digests(points_of(subject.layers.clone()));
    let mut run = |i| {
        progress.at("runs of the same input", i, 3);
        feed(&mut engine, &Feed::whole(&subject.ids), &listen)
    };
    let first = run(0)?;
    for i in 1..3 {
        let run = run(i)?;
        if let Some(parting) = first.trace.parts_from(&run.trace, 0..subject.ids.len()) {
            return Ok(Some(parting.place.to_string()));
        }
    }
    Ok(None)
}

/// Which heads, slots or channel blocks of the result diverge. These localise; they never decide.
fn region(op: &OpContext<'_>) -> Result<String, Unjudged> {
    if op.place.point.is_choice() {
        return Ok("the choice itself".into());
    }
    let measured = op.measured()?;
    let width = measured.target.ncols();
    let (unit, size) = match op.place.point.unit() {
        Unit::Head => ("head", width / op.model.heads),
        Unit::IndexHead => ("indexer head", width / op.model.index_heads),
        Unit::Slot if op.place.layer().is_some_and(|l| op.model.is_moe(l)) => {
            ("slot", width / (op.model.experts_used + 1))
        }
        Unit::Slot | Unit::Channel => ("block of 32 channels", 32),
    };
    let count = width.div_ceil(size);
    let bad: Vec<usize> = (0..count)
        .filter(|u| {
            let e: Energy = measured.energies(|j| j / size == *u).iter().sum();
            e.m + e.misplaced >= LEAST_VALUES.min(width) && e.share() > 1.0
        })
        .collect();
    if bad.is_empty() {
        let columns = measured.columns().into_iter().filter(|(_, _, e)| e.share() > 1.0);
        let columns: Vec<usize> = columns.flat_map(|(from, to, _)| from..=to).collect();
        return Ok(format!("columns {} of {width}", ranges(&columns)));
    }
    let list = ranges(&bad);
    let factor = factor(&measured, |j| bad.contains(&(j / size))).map_or(String::new(), |f| {
        format!(", by a factor of {f:.4}") // a finding of its own, whether or not a kind of fault explains it
    });
    let place =
        if bad.len() == count { format!("every {unit} ({count})") } else { format!("{unit} {list} of {count}") };
    Ok(place + &factor)
}

/// What the columns are of the truth, if one factor brings all of them within their floor.
fn factor(measured: &Measured, mine: impl Fn(usize) -> bool) -> Option<f64> {
    let (mut dot, mut size) = (0.0, 0.0);
    let all = measured.target.indexed_iter().zip(&measured.floored.exact).filter(|(((_, j), _), _)| mine(*j));
    for ((_, t), r) in all {
        dot += t * r;
        size += r * r;
    }
    let factor = dot / size;
    let exact = |i: usize, j: usize| mine(j).then(|| factor * measured.floored.exact[[i, j]]);
    let left: Energy = measured.floored.energies(measured.target.rows(), exact).iter().sum();
    (factor.is_finite() && factor != 0.0 && left.m > 0 && left.share() <= 1.0).then_some(factor)
}

/// Values of the target that are neither finite nor masked.
fn nonfinite(op: &OpContext<'_>) -> usize {
    let whole = op.trace.seen_by(op.ranks.first().copied().unwrap_or(0), op.place);
    let Ok(whole) = whole else { return 0 };
    let masked = op.place.point.is_masked();
    whole.as_f32().iter().filter(|v| !(v.is_finite() || masked && **v == f32::NEG_INFINITY)).count()
}

/// The bytes that a rank holds where a parameter of the reference belongs.
fn held(engine: &Engine, subject: &Subject, rank: usize, layer: Option<usize>, param: RefParam) -> Option<Vec<u8>> {
    let all = params::of_trunk(subject.checkpoint.config());
    let own = all.into_iter().find(|p| reference_of(p.kind) == param && (p.layer == layer || p.layer.is_none()))?;
    engine.read_weight(rank, own).ok().map(|(bytes, _)| bytes)
}

/// An engine to read bytes back from, made when it is first asked for.
fn engine<'a, 's>(made: &'a mut Option<Lent<'s>>, subject: &'s Subject) -> Result<&'a Engine, VerifyError> {
    match made {
        Some(engine) => Ok(engine),
        None => Ok(made.insert(subject.engine()?)),
    }
}

fn explain(
    subject: &Subject,
    op: &OpContext<'_>,
    finding: OpFinding,
    region: String,
    progress: &dyn Progress,
) -> Result<Culprit, VerifyError> {
    let mut fits: Vec<Explanation> = Vec::new();
    let mut made: Option<Lent<'_>> = None;
    let overflows = nonfinite(op);
    let mut misses: BTreeMap<&'static str, (usize, f64)> = BTreeMap::new();
    // Where only a copy differs from another, the judged rows are right: whatever changes nothing there would fit.
    let by_values = finding.rho.0 > finding.rho.1 || op.place.point.is_choice();
    let nothing = op.hypothesis(UNKNOWN, "", "", Alter::Options(op.judge.options));
    let base = op.left(&nothing)?;
    for (i, hypotheses) in EXPLANATIONS.iter().enumerate().filter(|_| by_values) {
        progress.at("kinds of faults tried", i, EXPLANATIONS.len());
        for h in hypotheses(op) {
            // What leaves most of the error is no explanation.
            let left = op.left(&h)? / base;
            if left > MOST_LEFT && !matches!(h.alter, Alter::Orders(_)) {
                let entry = misses.entry(h.kind).or_insert((0, f64::INFINITY));
                *entry = (entry.0 + 1, entry.1.min(finding.rho.0 * left.sqrt()));
                continue;
            }
            let Some(residual) = op.residual(&h)? else { continue };
            let (deciding, whole) = (residual.deciding(), residual.whole);
            let (rho, most) = (deciding.rho(), limit(deciding.m));
            // Where sums overflow, their order decides what becomes infinite and what NaN, and a prediction of NaN fits
            // anything: then values cannot decide, and the bytes on the device must be the predicted ones.
            let decisive = whole.m >= LEAST_VALUES && overflows + whole.undefined == 0;
            let by_bytes = !decisive && subject.target.is_none() && h.reads.is_some() && {
                let engine = engine(&mut made, subject)?;
                op.is_held(&h, &|rank, layer, param| held(engine, subject, rank, layer, param))
            };
            if (decisive && rho <= most) || by_bytes {
                let Hypothesis { kind, site, ranks, statement, overturn, alter, .. } = h;
                let blame = match alter {
                    Alter::Weights(_) => Blame::Data,
                    Alter::Config(_) => Blame::Configuration,
                    Alter::Options(_) | Alter::Missing(_) | Alter::Orders(_) => Blame::Operation,
                };
                let (fit, overturned_by) = (Fit { rho, limit: most }, overturn);
                fits.push(Explanation { kind, site, statement, ranks, fit, blame, by_bytes, overturned_by });
            } else {
                let entry = misses.entry(h.kind).or_insert((0, f64::INFINITY));
                // A prediction that is not finite came near to nothing.
                let rho = if whole.undefined > 0 { f64::INFINITY } else { rho };
                *entry = (entry.0 + 1, entry.1.min(rho));
            }
        }
    }
    // A lost contribution and zeros for the data that it is made from predict the same values: the bytes decide.
    if subject.target.is_none()
        && fits.iter().any(|f| f.blame == Blame::Data)
        && fits.iter().any(|f| f.blame != Blame::Data)
    {
        let engine = engine(&mut made, subject)?;
        let held = |rank, layer, param| held(engine, subject, rank, layer, param);
        fits.retain(|f| (f.blame == Blame::Data) != op.is_as_in_file(&f.ranks, &held));
    }
    // The best fit first; where several fit alike, the one that explains most ranks.
    let share = |e: &Explanation| if e.by_bytes { 0.0 } else { e.fit.rho / e.fit.limit };
    // A sum without one rank's part looks as with that part never filled; where no bytes can be asked, ranks miss meetings
    // more often than loaders fill a part of a parameter.
    let rarer = |e: &Explanation| subject.target.is_some() && e.kind != "REDUCE_MISSED";
    fits.sort_by(|a, b| {
        let most_ranks = b.ranks.len().cmp(&a.ranks.len());
        share(a).total_cmp(&share(b)).then(most_ranks).then(rarer(a).cmp(&rarer(b)))
    });
    let mut fits = fits.into_iter();
    let explanation = fits.next();
    let what = |f: &Explanation| (f.kind, f.site.clone(), f.statement.clone());
    let fits_as_well = fits.filter(|f| explanation.as_ref().is_none_or(|e| what(e) != what(f))).collect();
    let ruled = |(kind, (tried, rho))| RuledOut { kind, tried, best_rho: Number(rho) };
    let whole = op.is_reduced() || op.place.point.layout() == Layout::Replicated;
    let OpFinding { place, rho: (rho, most), ranks, mut tokens, detail, .. } = finding;
    tokens.sort_unstable();
    tokens.dedup();
    let some = !ranks.is_empty() && ranks.len() < op.trace.tp;
    let disagree = some && place.point.layout() == Layout::Replicated;
    Ok(Culprit {
        kind: explanation.as_ref().map_or(if disagree { DISAGREE } else { UNKNOWN }, |e| e.kind),
        place: place.to_string(),
        layer: place.layer(),
        operation: place.point.name(),
        ranks: explanation.as_ref().filter(|_| whole).map_or(ranks, |e| e.ranks.clone()),
        tokens,
        region,
        error: Fit { rho, limit: most },
        evidence: detail,
        explanation,
        fits_as_well,
        ruled_out: misses.into_iter().map(ruled).collect(),
    })
}
