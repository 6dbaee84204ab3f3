//! Judging one operation of a trace: by ranks that see the same, by slices that decide, choices as sets with margins.

use std::collections::BTreeSet;

use lockstep_reference::{ParamKey, RefError};

use super::choice::{Chosen, Sizes, row_of};
use super::disagreements;
use super::floor::{Energy, LEAST_VALUES, limit, pools};
use super::patched_weights::{PatchedWeights, Value};
use super::replay::{Judge, Measured, Reads, Seen, Unjudged, classes, owner};
use super::{Subject, VerifyError};
use crate::model::{Layout, Place};
use crate::probe::{Captured, Trace};
use crate::report::Verdict;
use crate::report::table::{ranges, short};

/// What was found at one operation.
#[derive(Clone, Debug)]
pub struct OpFinding {
    /// The place of what the operation produces.
    pub place: Place,
    /// The verdict.
    pub verdict: Verdict,
    /// rho and limit of the slice that decided (the worst one).
    pub rho: (f64, f64),
    /// Ranks whose own slice or copy diverges.
    pub ranks: Vec<usize>,
    /// Tokens whose row diverges.
    pub tokens: Vec<usize>,
    /// Evidence.
    pub detail: String,
    /// Operations before it that were bridged, and are judged with it.
    pub over: BTreeSet<Place>,
    /// Judged rows that were left out: they hang on a choice that nobody captured.
    pub unsure: BTreeSet<usize>,
}

impl Unjudged {
    /// As a finding.
    fn finding(self, place: Place) -> Result<OpFinding, VerifyError> {
        let (verdict, detail) = match self {
            Unjudged::NoSuchPoint => (Verdict::NotApplicable, "no such point in this model and run".into()),
            Unjudged::NoData(why) => (Verdict::Unmeasured, why),
            Unjudged::WrongShape(why) => (Verdict::Divergent, why),
            Unjudged::Failed(e) => return Err(e),
        };
        Ok(OpFinding { verdict, detail, ..OpFinding::of(place) })
    }
}

impl OpFinding {
    /// Nothing yet.
    pub(super) fn of(place: Place) -> Self {
        let (ranks, tokens, over, unsure) = (Vec::new(), Vec::new(), BTreeSet::new(), BTreeSet::new());
        OpFinding {
            place,
            verdict: Verdict::Unmeasured,
            rho: (0.0, 0.0),
            ranks,
            tokens,
            detail: String::new(),
            over,
            unsure,
        }
    }

    /// Where, for machines.
    pub(crate) fn data(&self) -> serde_json::Value {
        let OpFinding { place, ranks, tokens, .. } = self;
        serde_json::json!({
            "layer": place.layer(), "operation": place.point.name(), "ranks": ranks, "tokens": tokens,
        })
    }
}

/// What a parameter becomes on a rank under a hypothesis; `None` leaves it as it is.
pub type RankChange<'a> = dyn Fn(usize, ParamKey) -> Result<Option<Value>, RefError> + Sync + 'a;

/// No hypothesis.
fn unchanged(_: usize, _: ParamKey) -> Result<Option<Value>, RefError> {
    Ok(None)
}

/// True where the values of an operation are right for another judge of them.
///
/// # Errors
/// Weights that cannot be read.
pub(super) fn fits(judge: &Judge<'_>, trace: &Trace, place: Place) -> Result<bool, VerifyError> {
    let slices = Unjudged::or_none(Slices::collect(judge, trace, place, &unchanged, None))?;
    Ok(slices.is_some_and(|slices| slices.finding(place).verdict == Verdict::Match))
}

/// Judges one operation.
pub(crate) fn judge_op(
    judge: &Judge<'_>,
    trace: &Trace,
    place: Place,
    subject: &Subject,
) -> Result<OpFinding, VerifyError> {
    let found = match place.point.scores() {
        Some(_) => judge_choice(judge, trace, place, &unchanged),
        None => judge_values(judge, trace, place, subject),
    };
    found.or_else(|why| why.finding(place))
}

fn judge_values(judge: &Judge<'_>, trace: &Trace, place: Place, subject: &Subject) -> Result<OpFinding, Unjudged> {
    let finding = Slices::collect(judge, trace, place, &unchanged, None)?.finding(place);
    match finding.verdict {
        Verdict::Divergent => disagreements::weighed(judge, trace, finding, subject),
        _ => Ok(finding),
    }
}

/// Energies of an operation by slice.
#[derive(Default)]
pub(crate) struct Slices {
    /// All values together.
    pub whole: Energy,
    ranks: Vec<(usize, Energy)>,
    tokens: Vec<(usize, usize, Energy)>,
    columns: Vec<(usize, usize, Energy)>,
    cosine: f64,
    worst: Option<(usize, usize, f64, f64)>,
    /// Where it was read from, and what was bridged.
    reads: Reads,
    /// Judged rows that hang on a choice nobody captured.
    unsure: BTreeSet<usize>,
}

fn decides(e: &Energy) -> bool {
    e.m + e.misplaced >= LEAST_VALUES
}

impl Slices {
    /// Replays a point for every class of ranks that see the same, with parameters changed per rank, and adds up what
    /// the ranks of `only` (all without a list) hold.
    ///
    /// # Errors
    /// [`Unjudged`].
    pub fn collect(
        judge: &Judge<'_>,
        trace: &Trace,
        place: Place,
        change: &RankChange<'_>,
        only: Option<&[usize]>,
    ) -> Result<Slices, Unjudged> {
        let (judge, layout) = (judge.at(place.point), place.point.layout());
        let reads = judge.reads(place, &|input| trace.ranks(input).is_some()).ok_or(Unjudged::NoSuchPoint)?;
        let captured = captured(trace, place)?;
        let places: Vec<Place> = reads.from.iter().copied().chain([place]).collect();
        let mut slices = Slices { reads, ..Slices::default() };
        for class in classes(trace, &places) {
            let class: Vec<usize> = class.into_iter().filter(|r| only.is_none_or(|ranks| ranks.contains(r))).collect();
            let Some(&first) = class.first() else { continue };
            let of_rank = |key: ParamKey| change(first, key);
            let weights = PatchedWeights::new(judge.weights, &of_rank);
            let judge = Judge { weights: &weights, ..judge };
            let seen = Seen::new(trace, first);
            if layout == Layout::Partial && trace.tp > 1 {
                let expected = judge.recompute_partials(place, &|n| seen.get(n), trace.tp)?;
                for rank in &class {
                    slices.add(&judge.measured(captured[*rank], expected[*rank].clone())?, &[*rank], |_| None);
                }
                if only.is_some() {
                    continue; // the sum of all ranks says nothing of some
                }
            }
            let recomputed = judge.recompute(place, &|n| seen.get(n))?;
            slices.unsure.extend(&recomputed.unsure);
            let whole = trace.seen_by(first, place).map_err(|e| Unjudged::NoData(e.to_string()))?;
            let measured = judge.measured(&whole, recomputed)?;
            let known = layout == Layout::Partial && trace.tp > 1;
            let ranks: &[usize] = if known { &[] } else { &class };
            slices.add(&measured, ranks, |j| owner(place.point, &whole.shape, trace.tp, j));
            slices.nonfinite(&whole, judge.rows);
        }
        Ok(slices)
    }

    /// What stands for a choice that is right, or is not.
    pub fn of_choice(right: bool) -> Slices {
        let whole = Energy {
            m: LEAST_VALUES,
            floor: 1.0,
            misplaced: if right { 0 } else { LEAST_VALUES },
            ..Energy::default()
        };
        Slices { whole, ..Slices::default() }
    }

    /// Adds values that belong to `ranks`: columns with an owner to it alone, the others to each of them.
    fn add(&mut self, measured: &Measured, ranks: &[usize], own: impl Fn(usize) -> Option<usize>) {
        let mine = |j: usize| own(j).is_none_or(|r| ranks.is_empty() || ranks.contains(&r));
        let rows = measured.energies(mine);
        self.whole.join(rows.iter().sum());
        for rank in ranks {
            self.ranks.push((*rank, measured.energies(|j| own(j).is_none_or(|r| r == *rank)).iter().sum()));
        }
        self.tokens.extend(pools(&rows).into_iter().map(|(a, b, e)| (measured.rows[a], measured.rows[b], e)));
        let owned = measured.columns().into_iter().filter(|(from, to, _)| mine(*from) && mine(*to));
        self.columns.extend(owned);
        self.cosine = if self.worst.is_some() { self.cosine.min(measured.cosine()) } else { measured.cosine() };
        self.worst = measured.worst().or(self.worst);
    }

    /// Values outside the judged rows that are not finite although all inputs are: wrong without a floor.
    fn nonfinite(&mut self, whole: &Captured, judged: &[usize]) {
        let (values, width) = (whole.as_f32(), whole.row_len().max(1));
        for (i, v) in values.iter().enumerate() {
            let masked = whole.place.point.is_masked() && *v == f32::NEG_INFINITY;
            if !v.is_finite() && !masked && !judged.contains(&(i / width)) {
                let token = i / width;
                let row = Energy { misplaced: LEAST_VALUES, ..Energy::default() };
                if self.tokens.last().is_none_or(|(a, ..)| *a != token) {
                    self.tokens.push((token, token, row));
                }
                self.worst = Some((token, i % width, f64::from(*v), f64::NAN));
            }
        }
    }

    /// The slice with the largest share of its limit among those that decide.
    pub fn deciding(&self) -> Energy {
        let slices = self.ranks.iter().map(|(_, e)| *e).chain(self.tokens.iter().map(|(_, _, e)| *e));
        let columns = self.columns.iter().map(|(_, _, e)| *e);
        let all = std::iter::once(self.whole).chain(slices.filter(decides)).chain(columns);
        all.max_by(|a, b| a.share().total_cmp(&b.share())).unwrap_or(self.whole)
    }

    /// What the operation stands for, if it is more than one, and what could not be judged for that.
    fn span(&self) -> String {
        let Reads { from, over } = &self.reads;
        let mut said = String::new();
        if !over.is_empty() {
            let from: Vec<String> = from.iter().map(Place::to_string).collect();
            let from = if from.is_empty() { "the token ids".into() } else { from.join(", ") };
            said = format!("; a span of {} operations, from {from}", over.len() + 1);
        }
        if !self.unsure.is_empty() {
            said +=
                &format!("; {} rows left out, whose choices nobody captured are inside their band", self.unsure.len());
        }
        said
    }

    fn finding(self, place: Place) -> OpFinding {
        let worst = self.deciding();
        let (rho, most) = (worst.rho(), limit(worst.m));
        let bad = |e: &Energy| decides(e) && e.share() > 1.0;
        let mut ranks: Vec<usize> = self.ranks.iter().filter(|(_, e)| bad(e)).map(|(r, _)| *r).collect();
        ranks.sort_unstable();
        let pairs = self.tokens.iter().filter(|(_, _, e)| bad(e));
        let columns: Vec<usize> =
            self.columns.iter().filter(|(_, _, e)| e.share() > 1.0).flat_map(|(a, b, _)| *a..=*b).collect();
        let tokens = pairs.flat_map(|(a, b, _)| if a == b { vec![*a] } else { vec![*a, *b] }).collect();
        let verdict = if rho > most {
            Verdict::Divergent
        } else if self.whole.undefined > 0 || (self.whole.m == 0 && self.whole.misplaced == 0) {
            Verdict::Unmeasured
        } else {
            Verdict::Match
        };
        let mut detail = format!(
            "rho {} of {:.2} (worst slice {} of {most:.2}), relative L2 {:.1e}, cosine {:.6}",
            short(self.whole.rho()),
            limit(self.whole.m),
            short(rho),
            self.whole.relative(),
            self.cosine
        );
        if self.whole.m < LEAST_VALUES {
            detail.push_str(&format!("; only {} values, decided as a whole", self.whole.m));
        }
        detail.push_str(&self.span());
        if self.whole.undefined > 0 {
            detail.push_str(&format!("; the reference itself has {} values that are not finite", self.whole.undefined));
        }
        if verdict == Verdict::Divergent && place.point.layout() == Layout::Replicated {
            detail.push_str(&odd_ones(&ranks, self.ranks.len()));
        }
        if let Some(first) = columns.first().filter(|_| verdict == Verdict::Divergent && self.whole.share() <= 1.0) {
            let (last, count) = (columns[columns.len() - 1], columns.len());
            detail.push_str(&format!("; {count} columns by themselves, {first} to {last}"));
        }
        if let (Verdict::Divergent, Some((token, column, t, r))) = (verdict, self.worst) {
            let expected = if r.is_nan() { "a finite value".to_string() } else { format!("{r:.3e}") };
            detail.push_str(&format!("; token {token}, column {column}: {t:.3e}, expected {expected}"));
        }
        let (over, unsure) = (self.reads.over, self.unsure);
        OpFinding { place, verdict, rho: (rho, most), ranks, tokens, detail, over, unsure }
    }
}

/// Which ranks hold another value than the others, of one that all should hold alike, if some do.
fn odd_ones(bad: &[usize], all: usize) -> String {
    let named = format!("{} {}", if bad.len() == 1 { "rank" } else { "ranks" }, ranges(bad));
    match (bad.len(), all - bad.len()) {
        (0, _) | (_, 0) => String::new(),
        (few, most) if few < most => format!("; ranks disagree: {named} of {all} against the others, which are right"),
        (_, few) => format!("; ranks disagree: {named} of {all} are wrong, and only {few} right"),
    }
}

fn captured(trace: &Trace, place: Place) -> Result<Vec<&Captured>, Unjudged> {
    trace.ranks(place).ok_or_else(|| Unjudged::NoData("it was not captured on every rank".into()))
}

/// Choices are compared as sets with margins: see [`choice`](super::choice).
pub(crate) fn judge_choice(
    judge: &Judge<'_>,
    trace: &Trace,
    place: Place,
    change: &RankChange<'_>,
) -> Result<OpFinding, Unjudged> {
    let scores = place.at(place.point.scores().ok_or(Unjudged::NoSuchPoint)?);
    captured(trace, place)?;
    let sizes = Sizes::of(judge.config);
    let mut bad: Vec<String> = Vec::new();
    let (mut bad_ranks, mut bad_tokens, mut swapped) = (Vec::new(), Vec::new(), 0);
    let reads = judge.reads(place, &|input| trace.ranks(input).is_some()).unwrap_or_default();
    let mut unsure = BTreeSet::new();
    for class in classes(trace, &reads.from.iter().copied().chain([place]).collect::<Vec<_>>()) {
        let seen = Seen::new(trace, class[0]);
        let of_rank = |key: ParamKey| change(class[0], key);
        let weights = PatchedWeights::new(judge.weights, &of_rank);
        let judge = Judge { weights: &weights, ..*judge };
        let recomputed = judge.recompute(scores, &|n| seen.get(n))?;
        let scores = &recomputed.floored;
        unsure.extend(&recomputed.unsure);
        let chosen = trace.seen_by(class[0], place);
        let chosen = chosen.map_err(|_| Unjudged::NoData("not captured on every rank".into()))?;
        let mut outside = |token: usize, why: String| {
            bad.push(format!("token {token}: {why}"));
            bad_tokens.push(token);
            bad_ranks.extend(&class);
        };
        // What is no choice at all is seen without scores, at every row.
        for token in judge.every.iter().filter(|t| !judge.rows.contains(t)) {
            let row = row_of(&chosen, *token);
            let row = row.ok_or_else(|| Unjudged::NoData("fewer rows of choices than tokens".into()))?;
            if let Some(why) = sizes.illegal(place.point, *token, scores.exact.ncols(), row) {
                outside(*token, why);
            }
        }
        for (i, t) in judge.rows.iter().enumerate().filter(|(_, t)| !recomputed.unsure.contains(t)) {
            let row =
                row_of(&chosen, *t).ok_or_else(|| Unjudged::NoData("fewer rows of choices than tokens".into()))?;
            match sizes.judge(place.point, *t, scores.exact.row(i), scores.sigma[i], row) {
                Chosen::Within(differences) => swapped += differences,
                Chosen::Outside(why) => outside(*t, why),
                Chosen::Unmeasured => return Err(Unjudged::NoData("its scores are not numbers".into())),
            }
        }
    }
    if unsure.len() == judge.rows.len() {
        return Err(Unjudged::NoData("every judged row hangs on an earlier choice that was not captured".into()));
    }
    bad_ranks.sort_unstable();
    bad_ranks.dedup();
    let verdict = if bad.is_empty() { Verdict::Match } else { Verdict::Divergent };
    let detail = match bad.first() {
        None => {
            let rows = judge.rows.len() - unsure.len();
            format!("sets equal at {rows} rows but for {swapped} choices inside their band")
        }
        Some(first) => format!("{} rows chose wrongly; {first}", bad.len()),
    };
    let rho = (if bad.is_empty() { 0.0 } else { f64::INFINITY }, 1.0); // sets agree or they do not
    let over = reads.over;
    Ok(OpFinding { place, verdict, rho, ranks: bad_ranks, tokens: bad_tokens, detail, over, unsure })
}
