//! Every operation of a run or of a dump, judged in the order of the forward pass.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use lockstep_reference::{Arith, ModelWeights, RefConfig, RefOptions, RefRecipe};

use super::conventions::{self, Convention};
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
use crate::report::{Progress, Verdict};

/// Every operation's finding, in the order of the forward pass.
///
/// # Errors
/// Engines that cannot run, a reference that cannot read the model.
pub fn findings(subject: &Subject, progress: &dyn Progress) -> Result<Vec<OpFinding>, VerifyError> {
    let mut all = Vec::new();
    judge_all(subject, progress, &mut |_, found, _| {
        all.extend(found);
        Ok(())
    })?;
    Ok(all)
}

/// Receives findings, with their judge and the run that they are of: of a dump all at once.
pub(crate) type Found<'a> = dyn FnMut(&Judge<'_>, Vec<OpFinding>, &Trace) -> Result<(), VerifyError> + 'a;

/// How a run was judged.
pub(crate) struct Judged {
    /// Whose floors judged.
    pub floors: RefRecipe,
    /// What became of a convention that was given.
    pub given: Option<Given>,
}

/// A convention that was given.
pub(crate) struct Given {
    /// True where the dump was read so; false where the values contradict it.
    pub followed: bool,
    /// Why, in words.
    pub detail: String,
}

/// Hands out every operation's finding, in the order of the forward pass, and returns how they were judged.
pub(crate) fn judge_all(
    subject: &Subject,
    progress: &dyn Progress,
    each: &mut Found<'_>,
) -> Result<Judged, VerifyError> {
    let recipe = match subject.target.is_some() && subject.recipe == RefRecipe::Fast {
        true if holds(subject, RefRecipe::Strict, progress)? => RefRecipe::Strict,
        _ => subject.recipe,
    };
    let known = !subject.guessed || holds(subject, recipe, progress)?;
    let given = judge_by(subject, recipe, progress, &mut |judge, mut found, trace| {
        for f in found.iter_mut().filter(|f| !known && f.verdict == Verdict::Divergent) {
            let detail = format!("the floor of the dump's recipe is not known, and {}'s does not hold", recipe.name());
            (f.verdict, f.detail) = (Verdict::Unmeasured, format!("{detail}; {}", f.detail));
        }
        each(judge, found, trace)
    })?;
    Ok(Judged { floors: recipe, given })
}

/// Products with weights of a dump that must be within a recipe's floors before all are held to these.
const HELD: f64 = 0.75;

/// True for a dump whose products with weights, in which recipes differ most, mostly hold a recipe's floors. A dump's word
/// chooses its floors, and a wider one would excuse what is not rounding: what says fast, and holds strict's, was computed
/// strictly. And what is computed in a way that nobody knows is not held to what only some of it holds.
fn holds(subject: &Subject, recipe: RefRecipe, progress: &dyn Progress) -> Result<bool, VerifyError> {
    let (mut judged, mut within) = (0usize, 0usize);
    let config = subject.checkpoint.config();
    judge_by(subject, recipe, progress, &mut |_, found, _| {
        for finding in found.iter().filter(|f| multiplies(f.place, config) || !f.over.is_empty()) {
            let good = matches!(finding.verdict, Verdict::Match | Verdict::Drift);
            judged += usize::from(good || finding.verdict == Verdict::Divergent);
            within += usize::from(good);
        }
        Ok(())
    })?;
    Ok(judged > 0 && within as f64 >= HELD * judged as f64)
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
) -> Result<Option<Given>, VerifyError> {
    let mut given = None;
    let raw = Raw(subject.checkpoint.source());
    let config = &RefConfig::from_raw(&raw, own_eps(&subject.checkpoint))?;
    let weights = &ModelWeights::new(&raw, config);
    let every: &[usize] = &(0..subject.ids.len()).collect::<Vec<_>>();
    for_traces(subject, &mut |traces, shows| {
        let options = RefOptions { expanded: expands(recipe, traces[0]), ..RefOptions::default() };
        let options = RefOptions { dense: traces[0].attention == Attention::Dense, ..options };
        let orders = Arith::orders(recipe, traces[0].tp);
        let bridges = subject.target.is_some();
        let judge = Judge { config, weights, options, orders: &orders, rows: &subject.rows, every, bridges };
        // By the reference's own list, whether they were captured or not.
        let places = lockstep_reference::points(config, options);
        let places: Vec<Place> = places.iter().filter_map(|name| name.parse().ok()).filter(|p| shows(*p)).collect();
        if !bridges {
            for place in places {
                progress.at("layers replayed", place.layer().map_or(0, |l| l + 1), config.layers);
                let (finding, trace) = judge_runs(&judge, traces, place, subject)?;
                each(&judge, vec![finding], trace)?;
            }
            return Ok(());
        }
        let (found, trace, read) = of_dump(&judge, traces[0], &places, subject, progress)?;
        given = subject.convention.map(|given| read_as(given, &read, &found));
        each(&judge, found, &trace)
    })?;
    Ok(given)
}

/// Where a dump was read under a convention, and which it is there.
type Read = Vec<(Place, Convention, String)>;

/// What became of a convention that was given.
fn read_as(given: Convention, read: &Read, found: &[OpFinding]) -> Given {
    let name = given.name();
    let detail = match read.iter().find(|(_, convention, _)| *convention == given) {
        Some((place, _, note)) => return Given { followed: true, detail: format!("{name}, from {place} on: {note}") },
        None if !read.is_empty() => format!("they follow {}", read[0].1.name()),
        None if found.iter().any(|f| f.verdict == Verdict::Divergent) => "what diverges is not right under it".into(),
        None => "every operation that was judged is right without it".into(),
    };
    Given { followed: false, detail: format!("the values contradict --convention {name}: {detail}") }
}

/// Conventions that a dump is read under, one behind the other, before it is taken as it is.
const MOST_CONVENTIONS: usize = 8;

/// The findings of a dump, and the dump as it was read: where it contradicts itself, under the convention that it follows.
fn of_dump<'a>(
    judge: &Judge<'_>,
    dump: &'a Trace,
    places: &[Place],
    subject: &Subject,
    progress: &dyn Progress,
) -> Result<(Vec<OpFinding>, Cow<'a, Trace>, Read), VerifyError> {
    let (mut trace, mut read): (Cow<'a, Trace>, Read) = (Cow::Borrowed(dump), Vec::new());
    loop {
        let mut found = judge_dump(judge, &trace, places, subject, progress)?;
        let first = found.iter().find(|f| f.verdict == Verdict::Divergent).map(|f| f.place);
        let reading = match first.filter(|_| read.len() < MOST_CONVENTIONS) {
            Some(place) => conventions::fitting(judge, &trace, place, subject)?.map(|reading| (place, reading)),
            None => None,
        };
        match reading {
            Some((place, conventions::Reading { convention, note, trace: Some(other) })) => {
                read.push((place, convention, note));
                trace = Cow::Owned(other);
                continue;
            }
            Some((place, conventions::Reading { convention, note, trace: None })) => {
                read.push((place, convention, note.clone()));
                let hangs = |f: &&mut OpFinding| conventions::hangs_on_positions(f.place.point) || !f.over.is_empty();
                for f in found.iter_mut().filter(|f| f.verdict == Verdict::Divergent).filter(hangs) {
                    (f.verdict, f.detail) = (Verdict::Unmeasured, format!("CAPTURE: {note}"));
                }
            }
            None => {}
        }
        for (place, convention, note) in &read {
            for f in found.iter_mut().filter(|f| f.place == *place && f.verdict <= Verdict::Drift) {
                let name = convention.name();
                let detail = format!(
                    "CAPTURE: {note} (--convention {name}); the dump is read so, and this is no fault of the engine"
                );
                (f.verdict, f.detail) = (Verdict::Drift, format!("{detail}; {}", f.detail));
            }
        }
        return Ok((found, trace, read));
    }
}

/// The findings of a dump as it is.
fn judge_dump(
    judge: &Judge<'_>,
    trace: &Trace,
    places: &[Place],
    subject: &Subject,
    progress: &dyn Progress,
) -> Result<Vec<OpFinding>, VerifyError> {
    let captured = |place: Place| trace.ranks(place).is_some();
    let reads = places.iter().filter(|p| captured(**p)).filter_map(|p| judge.reads(*p, &captured));
    let spanned: BTreeSet<Place> = reads.flat_map(|reads| reads.over).collect();
    let mut misreported = Misreported::default();
    let mut found = Vec::new();
    for place in places {
        progress.at("layers replayed", place.layer().map_or(0, |l| l + 1), judge.config.layers);
        if !captured(*place) && spanned.contains(place) {
            let detail = "not captured: judged as part of a span".into();
            found.push(OpFinding { verdict: Verdict::NotApplicable, detail, ..OpFinding::of(*place) });
            continue;
        }
        let finding = misreported.next(judge, trace, judge_op(judge, trace, *place, subject)?, subject)?;
        found.push(replicas::judged(judge, trace, finding));
    }
    Ok(found)
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
