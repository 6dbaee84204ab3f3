//! Stage `activations`: is every operation of every layer right? Judged by replay and the noise floor.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use lockstep_reference::{Arith, ModelWeights, RefConfig, RefOptions, RefRecipe};

use super::choice::row_of;
use super::feed::{Feed, Listen, feed};
use super::misreported::Misreported;
use super::op::{OpFinding, judge_op};
use super::reference_run::own_eps;
use super::replay::Judge;
use super::replicas;
use super::subject::points_of;
use super::{Subject, VerifyError};
use crate::checkpoint::oracle::Raw;
use crate::engine::Attention;
use crate::model::{Block, Config, Layout, Place, Point};
use crate::probe::Trace;
use crate::probe::capture::Filter;
use crate::report::{Check, Progress, Reach, StageReport, Verdict};

/// Runs the stage.
///
/// # Errors
/// An engine that cannot run, a reference that cannot read the model.
pub fn run(subject: &Subject, progress: &dyn Progress) -> Result<StageReport, VerifyError> {
    if subject.rows.is_empty() {
        return Ok(StageReport::unmeasured("activations", "no rows to judge"));
    }
    let mut findings = Vec::new();
    let mut experts: BTreeSet<(Place, i32)> = BTreeSet::new();
    let floors = judge_all(subject, progress, &mut |judge, finding, trace| {
        let place = finding.place;
        if place.point == Point::Hidden && matches!(finding.verdict, Verdict::Match | Verdict::Divergent) {
            let chosen = trace.ranks(place.at(Point::ExpertIds)).and_then(|ranks| ranks.first().copied());
            let of_row = |row: &usize| chosen.and_then(|ids| row_of(ids, *row)).unwrap_or_default();
            experts.extend(judge.rows.iter().flat_map(of_row).map(|id| (place, *id)));
        }
        findings.push(finding);
        Ok(())
    })?;
    let made = findings.iter().filter(|f| f.verdict != Verdict::NotApplicable).count();
    // What a dump lacks it mostly lacks in every layer: one line for each point.
    let mut lacking: BTreeMap<(Point, Verdict), usize> = BTreeMap::new();
    let captured = |f: &&OpFinding| subject.target.as_ref().is_none_or(|trace| trace.ranks(f.place).is_some());
    for finding in findings.iter().filter(|f| !captured(f)) {
        *lacking.entry((finding.place.point, finding.verdict)).or_default() += 1;
    }
    let mut checks: Vec<Check> = findings
        .iter()
        .filter(captured)
        .map(|f| Check::new(f.place.to_string(), f.verdict, f.detail.clone()).of_floor(f.rho).with(f.data()))
        .collect();
    checks.extend(lacking.into_iter().map(|((point, verdict), places)| {
        let detail = match verdict {
            Verdict::NotApplicable => format!("not captured in {places} places: judged as part of spans"),
            _ => {
                format!("not captured in {places} places, and nothing behind them was: capture it, or what follows it")
            }
        };
        Check::new(point.name(), verdict, detail)
    }));
    checks.push(sparse_activity(subject, &findings));
    let (positions, rows) = (subject.ids.len(), subject.rows.len());
    let reach = Reach { positions, rows, experts: experts.len(), sequences: 1 };
    let report = StageReport { made, reach, ..StageReport::new("activations", "", checks) };
    let judged = findings.iter().filter(|f| f.verdict > Verdict::NotApplicable && f.verdict != Verdict::Unmeasured);
    let summary = match (judged.count(), report.worst()) {
        (0, _) | (_, None) => {
            format!("none of {made} operations could be replayed: their inputs or results are not there")
        }
        (judged, Some(c)) => {
            let (rho, limit) = c.rho.unwrap_or((0.0, 1.0));
            let of = if judged < made { format!(" of {made}") } else { String::new() };
            let (rows, all) = (subject.rows.len(), subject.ids.len());
            let worst = &c.name;
            let held = match floors {
                own if own == subject.recipe => String::new(),
                tighter => format!("; the dump says {}, but holds {}'s floors", subject.recipe.name(), tighter.name()),
            };
            format!(
                "{judged}{of} operations replayed at {rows} of {all} rows; worst {worst}: rho {rho:.2} of {limit:.2}{held}"
            )
        }
    };
    Ok(StageReport { summary, ..report })
}

/// Whether sparse attention ran at all, and was judged where it ran: a prompt within top-k exercises nothing of it.
pub(crate) fn sparse_activity(subject: &Subject, findings: &[OpFinding]) -> Check {
    let (top_k, tokens) = (subject.checkpoint.config().top_k, subject.ids.len());
    let dense_dump = subject.target.as_ref().is_some_and(|t| t.attention == Attention::Dense);
    let sparse_rows = subject.rows.iter().filter(|t| **t >= top_k).count();
    let attends = |p: &Place| matches!(p.point, Point::Latent | Point::Context);
    let attended = findings.iter().filter(|f| matches!(f.verdict, Verdict::Match | Verdict::Divergent));
    let attended =
        attended.filter(|f| f.unsure.is_empty() || subject.rows.iter().any(|t| *t >= top_k && !f.unsure.contains(t)));
    let layers =
        attended.flat_map(|f| f.over.iter().chain([&f.place]).filter(|p| attends(p)).filter_map(|p| p.layer()));
    let judged = layers.collect::<BTreeSet<_>>().len();
    let (verdict, detail) = if subject.attention == Attention::Dense {
        let exact = format!("exact up to {top_k} tokens, another model beyond");
        (Verdict::NotApplicable, format!("attention is dense by choice; {exact}"))
    } else if tokens <= top_k {
        let all = "every key was chosen; use a longer prompt";
        (Verdict::Inactive, format!("{tokens} tokens are no more than top-k {top_k}: {all}"))
    } else if dense_dump {
        (Verdict::Inactive, "the dump attended to all keys; say --attention dense if that is meant".into())
    } else if judged == 0 || sparse_rows == 0 {
        let judged = format!("judged in {judged} layers at {sparse_rows} rows beyond top-k {top_k}");
        (Verdict::Unmeasured, format!("attention was {judged}"))
    } else {
        (Verdict::Match, format!("active: {judged} layers judged at {sparse_rows} rows beyond top-k {top_k}"))
    };
    Check::new("sparse attention", verdict, detail)
}

/// Every operation's finding, in the order of the forward pass.
///
/// # Errors
/// As [`run`].
pub fn findings(subject: &Subject, progress: &dyn Progress) -> Result<Vec<OpFinding>, VerifyError> {
    let mut all = Vec::new();
    judge_all(subject, progress, &mut |_, finding, _| {
        all.push(finding);
        Ok(())
    })?;
    Ok(all)
}

/// Receives an operation's finding, with its judge and the run that it is of.
pub(crate) type Found<'a> = dyn FnMut(&Judge<'_>, OpFinding, &Trace) -> Result<(), VerifyError> + 'a;

/// Hands out every operation's finding, in the order of the forward pass, and returns whose floors judged.
pub(crate) fn judge_all(
    subject: &Subject,
    progress: &dyn Progress,
    each: &mut Found<'_>,
) -> Result<RefRecipe, VerifyError> {
    let recipe = match subject.target.is_some() && subject.recipe == RefRecipe::Fast {
        true => held(subject, progress)?,
        false => subject.recipe,
    };
    judge_by(subject, recipe, progress, each)?;
    Ok(recipe)
}

/// Products with weights of a dump that must be within strict's floors before all are held to these.
const HELD: f64 = 0.75;

/// A dump's word chooses its floors, and a wider one would excuse what is not rounding: a dump that says fast, but whose
/// products with weights, in which alone the two differ, mostly hold strict's floors, was computed strictly and is judged
/// so.
fn held(subject: &Subject, progress: &dyn Progress) -> Result<RefRecipe, VerifyError> {
    let (mut judged, mut within) = (0usize, 0usize);
    let config = subject.checkpoint.config();
    judge_by(subject, RefRecipe::Strict, progress, &mut |_, finding, _| {
        let product = multiplies(finding.place, config);
        let good = matches!(finding.verdict, Verdict::Match | Verdict::Drift);
        judged += usize::from(product && (good || finding.verdict == Verdict::Divergent));
        within += usize::from(product && good);
        Ok(())
    })?;
    let strict = judged > 0 && within as f64 >= HELD * judged as f64;
    Ok(if strict { RefRecipe::Strict } else { RefRecipe::Fast })
}

/// True for products with stored weights, whose operand `fast` rounds.
fn multiplies(place: Place, config: &Config) -> bool {
    use Point::*;
    let other = matches!(place.point, Embed | ENorm | HNorm | AttnNorm | QANorm | KvLatent | FfnNorm | FinalNorm)
        || matches!(place.point, RouterLogits | ChoiceScores | ExpertIds);
    !other && !place.params(config).is_empty()
}

fn judge_by(
    subject: &Subject,
    recipe: RefRecipe,
    progress: &dyn Progress,
    each: &mut Found<'_>,
) -> Result<(), VerifyError> {
    let raw = Raw(subject.checkpoint.source());
    let config = &RefConfig::from_raw(&raw, own_eps(&subject.checkpoint))?;
    let weights = &ModelWeights::new(&raw, config);
    let every: &[usize] = &(0..subject.ids.len()).collect::<Vec<_>>();
    let mut misreported = Misreported::default();
    for_traces(subject, &mut |traces, shows| {
        let options = RefOptions { expanded: expands(recipe, traces[0]), ..RefOptions::default() };
        let options = RefOptions { dense: traces[0].attention == Attention::Dense, ..options };
        let orders = Arith::orders(recipe, traces[0].tp);
        let bridges = subject.target.is_some();
        let judge = Judge { config, weights, options, orders: &orders, rows: &subject.rows, every, bridges };
        // By the reference's own list, whether they were captured or not.
        let places = lockstep_reference::points(config, options);
        let places: Vec<Place> = places.iter().filter_map(|name| name.parse().ok()).filter(|p| shows(*p)).collect();
        let captured = |place: Place| traces[0].ranks(place).is_some();
        let reads = places.iter().filter(|p| bridges && captured(**p)).filter_map(|p| judge.reads(*p, &captured));
        let spanned: BTreeSet<Place> = reads.flat_map(|reads| reads.over).collect();
        for place in places {
            let layer = place.layer().map_or(0, |l| l + 1);
            progress.at("layers replayed", layer, config.layers);
            if spanned.contains(&place) {
                let detail = "not captured: judged as part of a span".into();
                let finding = OpFinding { verdict: Verdict::NotApplicable, detail, ..OpFinding::of(place) };
                each(&judge, finding, traces[0])?;
                continue;
            }
            let (mut finding, trace) = judge_runs(&judge, traces, place, subject)?;
            if subject.target.is_some() {
                finding = misreported.next(&judge, trace, finding, subject)?;
                finding = replicas::judged(&judge, trace, finding);
            }
            each(&judge, finding, trace)?;
        }
        Ok(())
    })
}

/// True for a run that shows nothing of the absorbed form, in a recipe of engines that do not absorb.
fn expands(recipe: RefRecipe, trace: &Trace) -> bool {
    recipe.is_torch() && !trace.places().iter().any(|place| matches!(place.point, Point::QAbsorbed | Point::Latent))
}

/// Judges an operation in all runs of the same prompt: the worse finding, and the run that it is of. A run that holds the
/// bits of the first one, in what the operation reads and in what it gives, needs no second look.
fn judge_runs<'a>(
    judge: &Judge<'_>,
    traces: &[&'a Trace],
    place: Place,
    subject: &Subject,
) -> Result<(OpFinding, &'a Trace), VerifyError> {
    let mut worst = (judge_op(judge, traces[0], place, subject)?, traces[0]);
    // A choice is judged by what its scores are made from.
    let scored = place.point.scores().and_then(|scores| judge.inputs(place.at(scores)));
    let mut read = judge.inputs(place).unwrap_or_default();
    read.extend(scored.unwrap_or_default());
    read.push(place);
    read.retain(|p| !is_tap(*p));
    for other in traces[1..].iter().filter(|_| !is_tap(place)) {
        let held = |p: &Place| other.ranks(*p).is_some() && other.ranks(*p) == traces[0].ranks(*p);
        if !read.iter().all(held) {
            let found = judge_op(judge, other, place, subject)?;
            let badness = |f: &OpFinding| (f.verdict, f.rho.0 / f.rho.1);
            if badness(&found) > badness(&worst.0) {
                worst = (OpFinding { detail: format!("in the fused program: {}", found.detail), ..found }, other);
            }
        }
    }
    Ok(worst)
}

/// True for what the program that serves holds nowhere: the scores that its indexer chooses from.
fn is_tap(place: Place) -> bool {
    place.point == Point::IndexScores
}

/// Judges runs of the same prompt, at the places that a test accepts.
type Each<'a> = dyn FnMut(&[&Trace], &dyn Fn(Place) -> bool) -> Result<(), VerifyError> + 'a;

/// Hands out the traces to judge: the given one, or our own runs, in groups of layers that fit in memory. These are two:
/// of the program as it is written, which shows every point, and as it is fused to serve, by the points that it has.
fn for_traces(subject: &Subject, each: &mut Each<'_>) -> Result<(), VerifyError> {
    if let Some(trace) = &subject.target {
        return each(&[trace], &|place| subject.wants_layer(place.layer()));
    }
    let c = subject.checkpoint.config();
    let mut engine = subject.engine()?;
    let wanted: Vec<usize> = (0..c.layers).filter(|l| subject.wants_layer(Some(*l))).collect();
    let group = layers_at_once(subject);
    for (i, chunk) in wanted.chunks(group).enumerate() {
        let (first, last) = (i == 0, (i + 1) * group >= wanted.len());
        // A layer's inputs include the output of the one before and a shared layer's borrowed choice; the final norm's
        // is the last layer's.
        let mut needed = chunk.to_vec();
        needed.extend(chunk.iter().filter_map(|l| l.checked_sub(1)));
        needed.extend(chunk.iter().filter_map(|l| (0..=*l).rev().find(|f| c.is_full(*f))));
        needed.extend(last.then(|| c.layers - 1));
        let wanted = points_of(Some(needed));
        let whole = Feed::whole(&subject.ids);
        let written = Feed { expanded: true, ..whole.clone() };
        let written = feed(&mut engine, &written, &Listen::Capture(wanted.clone()))?.trace;
        // Another prompt in between, so that the second run finds nothing of the first in caches and buffers.
        let other: Vec<u32> = subject.ids.iter().rev().copied().collect();
        feed(&mut engine, &Feed::whole(&other), &Listen::Off)?;
        let own: Filter = Arc::new(move |place| wanted(place) && !is_tap(place));
        let fused = feed(&mut engine, &whole, &Listen::Capture(own))?.trace;
        // The rest was captured as inputs.
        each(&[&written, &fused], &|place| match place.block {
            Block::Front => first,
            Block::Trunk(layer) => chunk.contains(&layer),
            Block::Back | Block::Mtp(_) => last,
        })?;
    }
    Ok(())
}

/// Memory that captures of our own two runs may take.
const CAPTURE_BYTES: usize = 512 << 20;

fn layers_at_once(subject: &Subject) -> usize {
    let (c, n) = (subject.checkpoint.config(), subject.ids.len());
    let block = Block::Trunk(c.layers - 1);
    let replicated: usize = Point::ALL
        .iter()
        .filter(|point| point.is_in(block) && point.layout() == Layout::Replicated)
        .map(|point| Place { block, point: *point }.shape(c, 1).iter().product::<usize>())
        .sum();
    let sharded = c.heads * (2 * c.qk_head() + 2 * c.kv_lora + c.v_head) + (c.experts_used + 1) * c.expert_ffn;
    let row = subject.tp * (replicated + n + 2 * c.hidden) + sharded;
    (CAPTURE_BYTES / (2 * row * n * 4).max(1)).max(1)
}
