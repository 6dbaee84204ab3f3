//! The stage `invariants`: the engine against itself. What must not matter (the number of ranks, how a prompt is cut,
//! what else is in the batch, who listens) is changed, and nothing else; no reference is needed to say that a result
//! which changes with it is wrong.
//!
//! Where the device promises that every sum has one order, results are compared bit by bit, by 64-bit digests of every
//! row of every point on every rank, so that the first op, rank and token where two runs part are named. Where it does
//! not (and always between tensor-parallel degrees, since an all-reduce changes the order) logits are compared row by
//! row in units of the noise floor of whole runs: see [`whole`](super::reference_run) for how that is measured, and [`freely`]
//! for the comparison. Both sides of such a comparison carry an error of their own; the limit is nevertheless the one
//! for a single side, as a correct engine's error is a tenth of its floor.

mod draws;
pub mod freely;
mod scheduled;

use std::cell::OnceCell;
use std::sync::Arc;

use super::feed::{Fed, Feed, Listen, feed};
use super::{Subject, VerifyError};
use crate::engine::kv::PAGE;
use crate::engine::{Attention, Lent, Options};
use crate::model::{Layout, Place, Point};
use crate::probe::capture::Filter;
use crate::probe::{Difference, Trace};
use crate::report::{Check, Progress, Reach, StageReport, Verdict};

/// One part of the stage: what it is called where it cannot be run, and its checks.
type Step<'a> = (&'static str, fn(&mut Bench<'a>) -> Result<Vec<Check>, VerifyError>);

/// Parts of the stage, for the progress line, and what it calls them.
const PARTS: usize = 12;
const COUNTED: &str = "groups of invariants checked";

/// Runs the stage.
///
/// # Errors
/// Engines that cannot be made, and steps that fail.
pub fn run(subject: &Subject, progress: &dyn Progress) -> Result<StageReport, VerifyError> {
    if subject.target.is_some() {
        return Ok(StageReport::not_applicable("invariants", "a dump is judged: there is no engine to run again"));
    }
    if subject.ids.len() < 2 {
        return Ok(StageReport::unmeasured("invariants", "the prompt has fewer than two tokens"));
    }
    let mut bench = Bench::new(subject, progress)?;
    let steps: [Step<'_>; PARTS - 1] = [
        ("replicated on every rank", Bench::replicas),
        // Before another engine is made: replays are counted for the one made last.
        ("graph = eager", Bench::graph),
        ("device's choice = host's", |bench| {
            let check = draws::check(bench.subject, &mut bench.engine);
            bench.engine.forget();
            Ok(vec![check?])
        }),
        ("dumps on = off", Bench::dumps),
        ("prefill = decode", Bench::decode),
        ("chunked = whole", Bench::chunks),
        ("length sweep", Bench::lengths),
        ("batch 1 = N", Bench::batch),
        ("scheduled", Bench::scheduled),
        ("sparse and dense attention", Bench::dense),
        ("TP 1 = TP N", Bench::degrees),
    ];
    progress.at(COUNTED, 0, PARTS);
    let mut checks = vec![bench.repeat()?];
    if checks[0].verdict == Verdict::Match {
        for (i, (name, step)) in steps.into_iter().enumerate() {
            progress.at(COUNTED, i + 1, PARTS);
            match step(&mut bench) {
                Ok(more) => checks.extend(more),
                // What runs already is all that there is room for.
                Err(VerifyError::Engine(e)) if e.is_not_lent() => {
                    checks.push(Check::new(name, Verdict::NotApplicable, e.to_string()));
                }
                Err(e) => return Err(e),
            }
        }
    }
    progress.at(COUNTED, PARTS, PARTS);
    let summary = format!(
        "{} tokens at tp {}, {}; {}",
        subject.ids.len(),
        subject.tp,
        subject.attention.name(),
        if bench.exact { "bit by bit, degrees by the noise floor" } else { "by the noise floor" },
    );
    let Options { sequences, .. } = options_for(subject, subject.attention);
    let reach = Reach { positions: subject.ids.len(), sequences, ..Reach::default() };
    Ok(StageReport { reach, ..StageReport::new("invariants", summary, checks) })
}

/// The engine under test with its plain run.
struct Bench<'a> {
    subject: &'a Subject,
    progress: &'a dyn Progress,
    engine: Lent<'a>,
    /// True where bits are promised.
    exact: bool,
    /// Digests of the prompt in one step, at every point, and its logits.
    base: Fed,
    /// The floor of whole runs, with the baseline's choices, once something needs it.
    floor: OnceCell<freely::Free>,
}

/// Every place.
fn all() -> Filter {
    Arc::new(|_| true)
}

impl<'a> Bench<'a> {
    fn new(subject: &'a Subject, progress: &'a dyn Progress) -> Result<Self, VerifyError> {
        let mut engine =
            subject.engines.lend(&subject.checkpoint, subject.tp, options_for(subject, subject.attention))?;
        let base = feed(&mut engine, &Feed::whole(&subject.ids), &Listen::Digests(all()))?;
        let (exact, floor) = (subject.engines.backend().sums_in_one_order(), OnceCell::new());
        Ok(Bench { subject, progress, engine, exact, base, floor })
    }

    fn vocab(&self) -> usize {
        self.engine.config().vocab
    }

    fn digests(&mut self, of: &Feed<'_>) -> Result<Fed, VerifyError> {
        feed(&mut self.engine, of, &Listen::Digests(all()))
    }

    /// Three runs, with and without a listener. If they differ nothing can be judged.
    fn repeat(&mut self) -> Result<Check, VerifyError> {
        let (name, ids) = ("three runs bit-equal", &self.subject.ids);
        let points = self.base.trace.held().len() * self.subject.tp;
        if points == 0 {
            let detail = "the engine showed no point of its forward pass; nothing else was judged";
            return Ok(Check::new(name, Verdict::Unmeasured, detail));
        }
        for _ in 0..2 {
            let again = self.digests(&Feed::whole(ids))?;
            if let Some(parting) = self.base.trace.parts_from(&again.trace, 0..ids.len()) {
                if parting.what != Difference::Bits {
                    let detail = format!("the runs do not show the same: {parting}; nothing else was judged");
                    return Ok(Check::new(name, Verdict::Unmeasured, detail));
                }
                let detail = format!("the same input gives other bits: {parting}; nothing else was judged");
                return Ok(Check::new(name, Verdict::Nondeterministic, detail));
            }
        }
        let silent = feed(&mut self.engine, &Feed::whole(ids), &Listen::Off)?;
        for _ in 0..2 {
            let again = feed(&mut self.engine, &Feed::whole(ids), &Listen::Off)?;
            if let Some(row) = silent.logits_part(&again, self.vocab()) {
                let detail = format!(
                    "the same input gives other logits at token {row}, but only while nobody listens; nothing else was \
                     judged"
                );
                return Ok(Check::new(name, Verdict::Nondeterministic, detail));
            }
        }
        Ok(Check::exact(name, true, format!("{points} points on {} ranks, all rows", self.subject.tp)))
    }

    /// Replicated points hold the same bits on every rank.
    fn replicas(&mut self) -> Result<Vec<Check>, VerifyError> {
        let name = "replicated on every rank";
        let base = &self.base.trace;
        if base.tp == 1 {
            return Ok(vec![Check::new(name, Verdict::NotApplicable, "one rank")]);
        }
        // Both what the first rank holds and what any other holds: "three runs" has seen that all hold the same places.
        let replicated: Vec<_> =
            base.held().into_iter().filter(|place| place.point.layout() == Layout::Replicated).collect();
        if replicated.is_empty() {
            return Ok(vec![Check::new(name, Verdict::Unmeasured, "no replicated point was shown")]);
        }
        let odd = replicated.iter().find_map(|place| {
            let Some(ranks) = base.ranks(*place) else { return Some(format!("{place}: not every rank holds it")) };
            let rank = ranks.iter().position(|other| other.values != ranks[0].values)?;
            Some(format!("{place}: rank {rank} differs from rank 0"))
        });
        Ok(vec![unless(odd, name, format!("{} points", replicated.len()))])
    }

    /// Listening changes nothing, and neither does taking fused operations apart.
    fn dumps(&mut self) -> Result<Vec<Check>, VerifyError> {
        let whole = Feed::whole(&self.subject.ids);
        let silent = feed(&mut self.engine, &whole, &Listen::Off)?;
        let part = silent.logits_part(&self.base, self.vocab());
        let odd = part.map(|row| format!("logits of token {row} change when points are listened to"));
        let listening = unless(odd, "dumps on = off", "same bits".into());
        let name = "fused = composed";
        let composed = Feed { expanded: true, ..whole.clone() };
        let check = if !self.engine.fuses() {
            Check::new(name, Verdict::Unmeasured, "the program that serves has nothing fused")
        } else {
            self.same(name, "in one operation and in several", &composed)?
        };
        Ok(vec![listening, check])
    }

    /// A recorded step gives the bits that its operations give one by one, as they are run when somebody listens.
    fn graph(&mut self) -> Result<Vec<Check>, VerifyError> {
        let name = "graph = eager";
        let subject = self.subject;
        let Some(before) = subject.engines.backend().replays() else {
            return Ok(vec![Check::new(name, Verdict::NotApplicable, "the device records no steps")]);
        };
        // The first decode step of a shape is run, the second recorded, the rest replayed.
        let engine = &mut self.engine;
        let tail = (subject.ids.len() / 2).min(12);
        let feeding = Feed::chunked(&subject.ids, vec![subject.ids.len() - tail, 1]);
        let replayed = feed(engine, &feeding, &Listen::Off)?;
        let count = subject.engines.backend().replays().unwrap_or(0) - before;
        let eager = feed(engine, &feeding, &Listen::Digests(all()))?;
        Ok(vec![match replayed.logits_part(&eager, self.vocab()) {
            Some(row) => Check::exact(name, false, format!("the logits of token {row} differ")),
            None if count == 0 => Check::new(name, Verdict::Inactive, "no step was replayed"),
            None => Check::exact(name, true, format!("{tail} decode steps, {count} of them replayed: same bits")),
        }])
    }

    fn decode(&mut self) -> Result<Vec<Check>, VerifyError> {
        let decoded = Feed::chunked(&self.subject.ids, vec![1]);
        Ok(vec![self.same("prefill = decode", "DECODE_DEPENDENCE", &decoded)?])
    }

    fn chunks(&mut self) -> Result<Vec<Check>, VerifyError> {
        let top_k = self.engine.config().top_k;
        // A page and one, so that pages fill in the middle of a step; a small prime; and a cut where choosing begins.
        let mut all = vec![vec![PAGE + 1], vec![7], vec![top_k, 5]];
        all.retain(|chunks| chunks[0] < self.subject.ids.len());
        if all.is_empty() {
            let reason = format!("no chunk is shorter than the prompt of {} tokens", self.subject.ids.len());
            return Ok(vec![Check::new("chunked = whole", Verdict::NotApplicable, reason)]);
        }
        let same = |chunks: Vec<usize>| {
            let name = match chunks[..] {
                [first, then] => format!("chunked = whole ({first}, then {then} tokens)"),
                _ => format!("chunked = whole ({} tokens)", chunks[0]),
            };
            self.same(&name, "CHUNK_DEPENDENCE", &Feed::chunked(&self.subject.ids, chunks))
        };
        all.into_iter().map(same).collect()
    }

    /// Prompts of every length that crosses a boundary: what comes later may not change what came before.
    fn lengths(&mut self) -> Result<Vec<Check>, VerifyError> {
        let (ids, top_k) = (&self.subject.ids, self.engine.config().top_k);
        let mut lengths = Vec::new();
        for boundary in [8, PAGE, 2 * PAGE, top_k, 2 * top_k, ids.len()] {
            lengths.extend([boundary - 1, boundary, boundary + 1]);
        }
        lengths.retain(|l| (1..ids.len()).contains(l));
        lengths.sort_unstable();
        lengths.dedup();
        let name = format!("length sweep ({} lengths)", lengths.len());
        if !self.exact {
            // Rows by the floor are what `chunked = whole` has judged; a sweep adds names, which need bits.
            let reason = "the device promises no bits; rows of other lengths are judged as chunks";
            return Ok(vec![Check::new(name, Verdict::NotApplicable, reason)]);
        }
        let mut bad = None;
        for length in &lengths {
            let run = self.digests(&Feed::whole(&ids[..*length]))?;
            if let Some(parting) = run.trace.parts_from(&self.base.trace, 0..*length) {
                bad = Some(format!("LENGTH_DEPENDENCE: first bad length {length}: {parting}"));
                break;
            }
        }
        Ok(vec![unless(bad, &name, format!("rows are the same at {lengths:?} tokens"))])
    }

    /// Alone, and beside sequences of other lengths in other slots, with scattered pages.
    fn batch(&mut self) -> Result<Vec<Check>, VerifyError> {
        let ids = &self.subject.ids;
        let (long, short) = neighbours(ids);
        let steps = vec![ids.len() / 2 + 1];
        let last = Feed { before: vec![long.clone(), short.clone()], ..Feed::whole(ids) };
        let middle = Feed { before: vec![short], behind: vec![long], ..Feed::chunked(ids, steps) };
        let last = self.same("batch 1 = N (last of 3)", "BATCH_DEPENDENCE", &last)?;
        Ok(vec![last, self.same("batch 1 = N (second of 3, in two steps)", "BATCH_DEPENDENCE", &middle)?])
    }

    /// The prompt fed in another way gives what it gives alone in one step.
    fn same(&mut self, name: &str, kind: &str, other: &Feed<'_>) -> Result<Check, VerifyError> {
        Ok(if self.exact {
            let run = self.digests(other)?;
            let part = run.trace.parts_from(&self.base.trace, 0..self.subject.ids.len());
            let steps = other.cuts();
            let odd = part.map(|p| {
                let chunk = steps.iter().position(|c| c.contains(&p.row)).unwrap_or(0);
                format!("{kind}: {p}, chunk {} of {}", chunk + 1, steps.len())
            });
            unless(odd, name, format!("same bits; steps: {}", steps.len()))
        } else {
            let mut check = self.freely(name, &[], |engine, listen| feed(engine, other, listen))?;
            if check.verdict == Verdict::Divergent {
                check.detail = format!("{kind}: {}", check.detail);
            }
            check
        })
    }

    /// Sparse attention is dense attention while every key is chosen, and something else afterwards.
    fn dense(&mut self) -> Result<Vec<Check>, VerifyError> {
        let (subject, top_k) = (self.subject, self.engine.config().top_k);
        let other = match subject.attention {
            Attention::Dsa => Attention::Dense,
            Attention::Dense => Attention::Dsa,
        };
        let mut engine = subject.engines.lend(&subject.checkpoint, subject.tp, options_for(subject, other))?;
        let name = "DSA with top-k >= length = dense";
        let short = subject.ids.len().min(top_k);
        let run = feed(&mut engine, &Feed::whole(&subject.ids), &Listen::Digests(all()))?;
        // Later rows cannot change earlier ones: the length sweep has seen to that, so one run serves both questions.
        let short = if self.exact {
            let bad = shared(&run.trace).parts_from(&shared(&self.base.trace), 0..short);
            unless(bad.map(|p| format!("other bits: {p}")), name, format!("same bits at all {short} tokens"))
        } else {
            let first = &subject.ids[..short];
            // Only one of the two chooses keys, and here it chooses all.
            let keys: Vec<Place> = (0..engine.config().layers).map(|l| Place::trunk(l, Point::IndexTopk)).collect();
            self.freely(name, &keys, |_, listen| feed(&mut engine, &Feed::whole(first), listen))?
        };
        let name = "sparse attention is active";
        let active = if engine.config().context <= top_k {
            let reason = format!("the context of {} tokens never exceeds top-k {top_k}", engine.config().context);
            Check::new(name, Verdict::NotApplicable, reason)
        } else if subject.ids.len() <= top_k {
            let reason = format!("the prompt of {} tokens does not exceed top-k {top_k}", subject.ids.len());
            Check::new(name, Verdict::Inactive, reason)
        } else {
            match shared(&run.trace).parts_from(&shared(&self.base.trace), top_k..subject.ids.len()) {
                Some(p) if p.what != Difference::Bits => {
                    Check::new(name, Verdict::Unmeasured, format!("the runs do not show the same: {p}"))
                }
                Some(p) => {
                    let detail = format!("with {} tokens over top-k, dense differs: {p}", subject.ids.len() - top_k);
                    Check::exact(name, true, detail)
                }
                None => Check::new(
                    name,
                    Verdict::Inactive,
                    format!(
                        "layers.0.attn.latent: {} tokens over top-k {top_k} and yet the bits of dense attention: every \
                         key was attended to",
                        subject.ids.len() - top_k
                    ),
                ),
            }
        };
        Ok(vec![short, active])
    }
}

/// A check that is right unless something odd was found.
fn unless(odd: Option<String>, name: &str, right: String) -> Check {
    Check::exact(name, odd.is_none(), odd.unwrap_or(right))
}

/// What sparse and dense attention both do: everything but the indexer and its choices.
fn shared(run: &Trace) -> Trace {
    run.only(|place| !place.point.is_indexer())
}

/// Other sequences with other ids, one longer than the other: were their keys read by mistake, the bits would change.
fn neighbours(ids: &[u32]) -> (Vec<u32>, Vec<u32>) {
    let backwards = || ids.iter().rev().copied();
    (backwards().take(ids.len() * 2 / 3 + 1).collect(), backwards().skip(1).take(ids.len() / 3 + 1).collect())
}

/// Options that hold the prompt and its neighbours in one step.
fn options_for(subject: &Subject, attention: Attention) -> Options {
    let tokens = subject.ids.len();
    let (long, short) = neighbours(&subject.ids);
    let all = tokens + long.len() + short.len();
    // And three of its length with their texts, one after the other.
    let cached = (all + PAGE).max(3 * (tokens + scheduled::STEPS + PAGE));
    Options { attention, ..subject.options_for(all, cached, 3) }
}
