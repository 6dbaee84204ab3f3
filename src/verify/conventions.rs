//! The capture on trial. A dump can be wrong where the engine is right: values stored in another order, a place that holds
//! what another one should, one rank's part taken for the whole, sequences written one behind the other. Before an engine
//! is accused, the dump must agree with itself: where what follows was computed from the right value, and what is there is
//! the value of a convention that captures are known to have, the capture is at fault, and the dump is read on under it.

use std::collections::BTreeSet;

use lockstep_reference::ndarray::{Array2, ArrayD};
use lockstep_reference::{RefOptions, Variant, points};

use super::floor::Energy;
use super::op::judge_op;
use super::replay::{Judge, Recomputed, Seen, Unjudged};
use super::{Subject, VerifyError};
use crate::model::{Layout, Place, Point};
use crate::probe::{Captured, Trace, Values};
use crate::report::Verdict;

/// What captures are known to do with values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Convention {
    /// Rotated vectors are stored as halves.
    RopeHalves,
    /// Heads stand before tokens.
    HeadsFirst,
    /// A layer's number is one off.
    LayerOff,
    /// Rows stand one token early or late.
    RowsOff,
    /// Tokens stand in another order.
    TokensReordered,
    /// The residual is kept apart.
    ResidualApart,
    /// Values are those behind a norm.
    NormApplied,
    /// Values are those before or behind something that was written in place.
    InPlace,
    /// A rank's addend stands for the sum.
    RankPart,
    /// Sequences, or padding and a sequence, are written as one.
    Sequences,
}

impl Convention {
    /// All of them.
    pub const ALL: [Convention; 10] = [
        Convention::RopeHalves,
        Convention::HeadsFirst,
        Convention::LayerOff,
        Convention::RowsOff,
        Convention::TokensReordered,
        Convention::ResidualApart,
        Convention::NormApplied,
        Convention::InPlace,
        Convention::RankPart,
        Convention::Sequences,
    ];

    /// Its name, as it is typed.
    pub fn name(self) -> &'static str {
        match self {
            Convention::RopeHalves => "rope-halves",
            Convention::HeadsFirst => "heads-first",
            Convention::LayerOff => "layer-off",
            Convention::RowsOff => "rows-off",
            Convention::TokensReordered => "tokens-reordered",
            Convention::ResidualApart => "residual-apart",
            Convention::NormApplied => "norm-applied",
            Convention::InPlace => "in-place",
            Convention::RankPart => "rank-part",
            Convention::Sequences => "sequences",
        }
    }

    /// The convention of a name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|convention| convention.name() == name)
    }
}

/// A convention that a dump follows at a place.
pub(super) struct Reading {
    /// Which one.
    pub convention: Convention,
    /// What it is there, in words.
    pub note: String,
    /// The dump as it is to be read; `None` where it cannot be read on.
    pub trace: Option<Trace>,
}

/// Degrees whose ranks' parts are tried.
const DEGREES: [usize; 3] = [2, 4, 8];

/// The convention that explains what diverges at a place, if there is one. What was said of the capture beforehand is tried
/// first, and believed where nothing contradicts it; what is found needs a witness.
///
/// # Errors
/// Weights that cannot be read.
pub(super) fn fitting(
    judge: &Judge<'_>,
    trace: &Trace,
    place: Place,
    subject: &Subject,
) -> Result<Option<Reading>, VerifyError> {
    let trial = Trial { judge, trace, place, subject };
    if let Some(given) = subject.convention
        && let Some(reading) = trial.reading(&|convention| convention == given, false)?
    {
        return Ok(Some(reading));
    }
    trial.reading(&|_| true, true)
}

/// A convention, in words, and the places that follow it.
type Held = (Convention, String, BTreeSet<Place>);

struct Trial<'a> {
    judge: &'a Judge<'a>,
    trace: &'a Trace,
    place: Place,
    subject: &'a Subject,
}

impl Trial<'_> {
    /// The first convention of those wanted that the values follow. Without a need of witnesses, what was made from the place
    /// may say nothing.
    fn reading(&self, wanted: &dyn Fn(Convention) -> bool, witnessed: bool) -> Result<Option<Reading>, VerifyError> {
        if wanted(Convention::Sequences)
            && let Some(note) = Unjudged::or_none(self.restarts())?.flatten()
        {
            return Ok(Some(Reading { convention: Convention::Sequences, note, trace: None }));
        }
        let own = BTreeSet::from([self.place]);
        for (convention, note, trace) in self.other_orders().into_iter().filter(|(c, ..)| wanted(*c)) {
            let silent = !witnessed || trace.ranks(self.place).is_some();
            if self.all_right(&trace)? && self.follow(&trace, &own)?.unwrap_or(silent) {
                return Ok(Some(Reading { convention, note, trace: Some(trace) }));
            }
        }
        let parts = if wanted(Convention::RankPart) { Unjudged::or_none(self.rank_part())?.flatten() } else { None };
        let held = self.holds_another()?.into_iter().filter(|(c, ..)| wanted(*c)).chain(parts);
        for (convention, note, without) in held {
            let dropped = self.trace.only(|place| !without.contains(&place));
            // What follows must have been made from the right values, and not from what is there.
            let follows = match self.follow(&dropped, &without)? {
                Some(true) => !witnessed || self.follow(self.trace, &without)? == Some(false),
                other => other.is_none() && !witnessed,
            };
            if follows {
                return Ok(Some(Reading { convention, note, trace: Some(dropped) }));
            }
        }
        Ok(None)
    }

    /// True if every place of the point is right in another trace; where that lacks the place itself, two others at least
    /// must say so.
    fn all_right(&self, trace: &Trace) -> Result<bool, VerifyError> {
        let alike = trace.places().into_iter().filter(|place| place.point == self.place.point);
        let mut right = 0;
        for place in alike {
            if judge_op(self.judge, trace, place, self.subject)?.verdict != Verdict::Match {
                return Ok(false);
            }
            right += 1;
        }
        Ok(right >= if trace.ranks(self.place).is_some() { 1 } else { 2 })
    }

    /// Whether all operations of a trace that were made from these places, captured or not, are right; `None` where there is
    /// no such operation.
    fn follow(&self, trace: &Trace, of: &BTreeSet<Place>) -> Result<Option<bool>, VerifyError> {
        let captured = |place: Place| trace.ranks(place).is_some();
        let names = points(self.judge.config, self.judge.options);
        let mut right = None;
        for place in names.iter().filter_map(|name| name.parse::<Place>().ok()).filter(|p| captured(*p)) {
            let reads = self.judge.reads(place, &captured).unwrap_or_default();
            let hangs_on = !reads.from.is_disjoint(of) || !reads.over.is_disjoint(of);
            if hangs_on && !of.contains(&place) {
                match judge_op(self.judge, trace, place, self.subject)?.verdict {
                    Verdict::Match | Verdict::Drift => right = right.or(Some(true)),
                    // What was written over itself is no witness.
                    Verdict::Divergent if Trial { place, ..*self }.is_another_captured(of) => {}
                    Verdict::Divergent => return Ok(Some(false)),
                    _ => {}
                }
            }
        }
        Ok(right)
    }

    /// The dump in other orders of the same values.
    fn other_orders(&self) -> Vec<(Convention, String, Trace)> {
        use Point::*;
        let (rope, point, model) = (self.judge.config.rope, self.place.point, self.subject.checkpoint.config());
        let mut all = Vec::new();
        let turned = [Q, KRope, IndexQ, IndexK];
        if turned.contains(&point) {
            let pairs = |c: &Captured| {
                let (width, heads) = (c.shape.last().copied().unwrap_or(0), matches!(c.place.point, Q | IndexQ));
                let start = if c.place.point == Q { self.judge.config.nope } else { 0 };
                let width = if heads { width } else { c.row_len() };
                move |i: usize| match (i % width).checked_sub(start).filter(|j| *j < rope) {
                    Some(j) => i - i % width + start + j / 2 + j % 2 * (rope / 2),
                    None => i,
                }
            };
            let note = "rotated vectors are stored as halves, not as adjacent pairs";
            all.push((
                Convention::RopeHalves,
                note.into(),
                self.trace.map(|c| match turned.contains(&c.place.point) {
                    true => moved(c, &pairs(c)),
                    false => Some(c.clone()),
                }),
            ));
        }
        if matches!(point, QRaw | Q | QAbsorbed | Latent | IndexQ | Context) {
            let heads = if point == IndexQ { self.judge.config.index_heads } else { self.judge.config.heads };
            let trace = self.trace.map(|c| match c.place.point == point {
                true => {
                    let (rows, all) = (c.rows, c.row_len());
                    let heads = heads / self.trace.tp.max(1);
                    let width = all / heads.max(1);
                    let from = move |i: usize| {
                        let (row, head, j) = (i / all, i % all / width, i % width);
                        (head * rows + row) * width + j
                    };
                    if width * heads == all { moved(c, &from) } else { Some(c.clone()) }
                }
                false => Some(c.clone()),
            });
            all.push((Convention::HeadsFirst, format!("{} has heads before tokens", point.name()), trace));
        }
        // Hidden states that are counted from the embedding, or all of a layer.
        if let (Output | Input, alone) = (point, point == Output) {
            for (by, how) in [(-1, "too high"), (1, "too low")] {
                let renumbered = |c: &Captured| {
                    let Some(own) = c.place.layer().filter(|_| !alone || c.place.point == point) else {
                        return Some(c.clone());
                    };
                    let layer = own.checked_add_signed(by).filter(|layer| *layer < model.layers)?;
                    let place = Place::trunk(layer, c.place.point);
                    // Dense layers and those of experts are not alike in everything.
                    let fits = c.place.point.is_masked() || place.shape(model, self.trace.tp) == c.shape;
                    Some(Captured { place: if fits { place } else { c.place }, ..c.clone() })
                };
                let what = if alone { point.name() } else { "everything in layers" };
                let note = format!("{what} has a layer's number that is one {how}");
                all.push((Convention::LayerOff, note, self.trace.map(renumbered)));
            }
        }
        if matches!(point, QRaw | Q | KvA | KRope | KvLatent | Context) {
            let family = [QRaw, Q, QAbsorbed];
            let moves = |p: Point| p == point || (family.contains(&point) && family.contains(&p));
            for (by, how) in [(1, "late"), (self.trace.ids.len() - 1, "early")] {
                let turned = self.trace.map(|c| {
                    let (rows, width) = (c.rows, c.row_len());
                    let from = |i: usize| (i / width + rows - by) % rows * width + i % width;
                    if moves(c.place.point) { moved(c, &from) } else { Some(c.clone()) }
                });
                all.push((Convention::RowsOff, format!("rows of {} stand one token too {how}", point.name()), turned));
            }
        }
        if matches!(point, Embed | Input) {
            let rows = self.trace.ids.len();
            let flip = |c: &Captured| {
                let width = c.row_len();
                moved(c, &|i| (rows - 1 - i / width) * width + i % width)
            };
            let reordered = Convention::TokensReordered;
            all.push((reordered, "tokens stand in reverse order".into(), self.trace.map(flip)));
            if let Some(order) = self.order_of_tokens() {
                let sort = |c: &Captured| {
                    let width = c.row_len();
                    moved(c, &|i| order[i / width] * width + i % width)
                };
                all.push((reordered, "tokens stand in another order".into(), self.trace.map(sort)));
            }
        }
        all
    }

    /// At which row each token's embedding stands; of equal tokens the first that is left.
    fn order_of_tokens(&self) -> Option<Vec<usize>> {
        let found = self.trace.whole(self.place).ok()?;
        let (width, values) = (found.row_len(), found.as_f32());
        let judge = Judge { rows: self.judge.every, ..*self.judge };
        let ids: ArrayD<f32> =
            Array2::from_shape_fn((self.trace.ids.len(), 1), |(t, _)| self.trace.ids[t] as f32).into_dyn();
        let exact = judge.recompute(Place::EMBED, &|name| (name == "ids").then(|| ids.clone())).ok()?.floored;
        let mut left: Vec<usize> = (0..found.rows).collect();
        (0..self.trace.ids.len())
            .map(|t| {
                let near = |row: &usize| {
                    let row = &values[row * width..(row + 1) * width];
                    row.iter().zip(exact.exact.row(t)).all(|(v, e)| (f64::from(*v) - e).abs() <= 4.0 * exact.sigma[t])
                };
                let at = left.iter().position(near)?;
                Some(left.remove(at))
            })
            .collect()
    }

    /// What a place of this point may hold in place of its own values.
    fn others(&self) -> Vec<(Place, Convention, &'static str)> {
        use Convention::{InPlace, LayerOff, NormApplied, ResidualApart};
        use Point::*;
        const OVER: &str = "behind its norm: written over later";
        const APART: &str = "without the residual, which the engine keeps apart";
        const ADDED: &str = "with the residual added: written over later";
        let (layer, last) = (self.place.layer(), self.judge.config.layers - 1);
        let at = |point: Point| self.place.at(point);
        let next = |point: Point| layer.filter(|l| *l < last).map_or(Place::FINAL_NORM, |l| Place::trunk(l + 1, point));
        let behind = if layer == Some(last) { "behind the final norm" } else { "behind the next norm" };
        match self.place.point {
            Output => vec![
                (at(FfnOut), ResidualApart, APART),
                (at(Input), LayerOff, "of one layer before"),
                (next(AttnNorm), NormApplied, behind),
            ],
            Input => vec![(at(AttnNorm), NormApplied, OVER), (at(Output), LayerOff, "of one layer behind")],
            Residual => vec![
                (at(FfnNorm), NormApplied, OVER),
                (at(AttnOut), ResidualApart, APART),
                (at(Input), InPlace, "before attention"),
            ],
            AttnOut => vec![(at(Residual), InPlace, ADDED)],
            FfnOut => vec![(at(Output), InPlace, ADDED)],
            QA => vec![(at(QANorm), NormApplied, OVER)],
            QRaw => vec![(at(Q), InPlace, "behind rope: written over later")],
            Routed => vec![(at(FfnOut), InPlace, "with the shared expert's added: written over later")],
            Embed => vec![(Place::trunk(0, AttnNorm), NormApplied, OVER)],
            _ => Vec::new(),
        }
    }

    /// True where the place holds, bit for bit, what another place was captured with that is not under suspicion.
    fn is_another_captured(&self, suspects: &BTreeSet<Place>) -> bool {
        self.others().into_iter().any(|(other, ..)| !suspects.contains(&other) && self.holds(self.place, other))
    }

    /// Which places this one may hold the values of, in words, and all places that are so.
    fn holds_another(&self) -> Result<Vec<Held>, VerifyError> {
        let layer = self.place.layer();
        let rest = self.trace.only(|place| place != self.place);
        let mut all = Vec::new();
        for (other, convention, how) in self.others() {
            let note = format!("{} holds values {how} ({other})", self.place.point.name());
            let places = || self.trace.places().into_iter().filter(|place| place.point == self.place.point);
            if self.trace.ranks(other).is_none() {
                // It was not captured: made from what is there beside the place itself.
                if Unjudged::or_none(self.holds_what(&rest, other))?.unwrap_or(false) {
                    all.push((convention, note.clone(), BTreeSet::from([self.place])));
                    all.push((convention, note, places().collect()));
                }
                continue;
            }
            if !self.holds(self.place, other) {
                continue;
            }
            let shift = |place: Place| match (other.layer(), layer, place.layer()) {
                (Some(to), Some(from), Some(own)) => Some(Place::trunk(own + to - from, other.point)),
                _ => None,
            };
            let alike = |place: &Place| shift(*place).is_some_and(|other| self.holds(*place, other));
            let mut without: BTreeSet<Place> = places().filter(alike).collect();
            without.insert(self.place);
            // What one layer gives is what the next one takes: a copy, which is no second witness.
            let copies: Vec<Place> = without.iter().filter_map(|place| neighbour(*place)).collect();
            let is_copy = |copy: &Place| without.iter().any(|place| self.holds(*place, *copy));
            let copies: Vec<Place> = copies.into_iter().filter(is_copy).collect();
            without.extend(copies);
            all.push((convention, note, without));
        }
        Ok(all)
    }

    /// True where two places were captured with the same values.
    fn holds(&self, place: Place, other: Place) -> bool {
        let both = self.trace.ranks(place).zip(self.trace.ranks(other));
        both.is_some_and(|(a, b)| a.iter().zip(&b).all(|(a, b)| a.values.same_bits(&b.values)))
    }

    /// True where the place holds what another one would have, made from the rest of the dump.
    fn holds_what(&self, rest: &Trace, other: Place) -> Result<bool, Unjudged> {
        let seen = Seen::new(rest, 0);
        let recomputed = self.judge.recompute(other, &|n| seen.get(n))?;
        self.matches(0, recomputed)
    }

    /// True where a rank's values of the place are these, within their floor.
    fn matches(&self, rank: usize, recomputed: Recomputed) -> Result<bool, Unjudged> {
        let whole = self.trace.seen_by(rank, self.place).map_err(|e| Unjudged::NoData(e.to_string()))?;
        let measured = self.judge.measured(&whole, recomputed)?;
        let all: Energy = measured.energies(|_| true).iter().sum();
        Ok(all.m > 0 && all.undefined == 0 && all.share() <= 1.0)
    }

    /// Ranks' addends in place of their sum, and all such places.
    fn rank_part(&self) -> Result<Option<Held>, Unjudged> {
        let point = self.place.point;
        if !point.is_reduced() || point == Point::Embed {
            return Ok(None);
        }
        let (seen, ranks) = (Seen::new(self.trace, 0), self.trace.tp);
        let degrees = if ranks > 1 { vec![ranks] } else { DEGREES.to_vec() };
        let whose = degrees.into_iter().find_map(|tp| {
            let parts = self.judge.recompute_partials(self.place, &|n| seen.get(n), tp).ok()?;
            let held = |rank: usize, part: &Recomputed| self.matches(rank, part.clone()).unwrap_or(false);
            match ranks {
                1 => parts.iter().position(|part| held(0, part)).map(|rank| format!("rank {rank}'s addend of {tp}")),
                _ => {
                    let all = parts.iter().enumerate().all(|(rank, part)| held(rank, part));
                    all.then(|| "every rank's own addend".into())
                }
            }
        });
        let alike = || self.trace.places().into_iter().filter(|place| place.point == point).collect();
        let note = |whose: String| format!("{} is {whose}, not the sum over ranks", point.name());
        Ok(whose.map(|whose| (Convention::RankPart, note(whose), alike())))
    }

    /// Where positions begin again: sequences, or padding and a sequence, were written one behind the other.
    fn restarts(&self) -> Result<Option<String>, Unjudged> {
        use Point::*;
        if !matches!(self.place.point, Q | KRope | IndexQ | IndexK) || self.place.point.layout() == Layout::Partial {
            return Ok(None);
        }
        let whole = self.trace.seen_by(0, self.place).map_err(|e| Unjudged::NoData(e.to_string()))?;
        let every = Judge { rows: self.judge.every, ..*self.judge };
        let bad = |judge: &Judge<'_>| -> Result<BTreeSet<usize>, Unjudged> {
            let seen = Seen::new(self.trace, 0);
            let measured = judge.measured(&whole, judge.recompute(self.place, &|n| seen.get(n))?)?;
            let rows = measured.rows.iter().zip(measured.energies(|_| true));
            Ok(rows.filter(|(_, e)| e.share() > 1.0).map(|(row, _)| *row).collect())
        };
        let (wrong, ids) = (bad(&every)?, &self.trace.ids);
        let filled = ids.iter().take_while(|id| **id == ids[0]).count();
        let begins = [wrong.first().copied().unwrap_or(0), filled].into_iter().filter(|at| (1..ids.len()).contains(at));
        for first in begins {
            let variant = Some(Variant::Position(-(first as i64)));
            let moved = Judge { options: RefOptions { variant, ..every.options }, ..every };
            // A third sequence would begin again once more.
            let (behind, rest) = (bad(&moved)?.range(first..).count(), ids.len() - first);
            let before = wrong.range(first..).count();
            if before > 0 && (behind == 0 || (behind < rest / 2 && behind < before)) {
                let what = match filled == first && first > 1 {
                    true => "padding was written as tokens",
                    false => "sequences of a batch were written as one",
                };
                let note = format!("positions begin again at token {first}: {what}; capture one sequence by itself");
                return Ok(Some(note));
            }
        }
        Ok(None)
    }
}

/// The place on the other side of the border between two layers.
fn neighbour(place: Place) -> Option<Place> {
    match place.point {
        Point::Output => Some(Place::trunk(place.layer()? + 1, Point::Input)),
        Point::Input => Some(Place::trunk(place.layer()?.checked_sub(1)?, Point::Output)),
        _ => None,
    }
}

/// Values from other places of the same array; `None` for a place that is not in it.
fn moved(c: &Captured, from: &dyn Fn(usize) -> usize) -> Option<Captured> {
    let values = match &c.values {
        Values::F32(v) => Values::F32((0..v.len()).map(|i| v.get(from(i)).copied()).collect::<Option<_>>()?),
        Values::I32(v) => Values::I32((0..v.len()).map(|i| v.get(from(i)).copied()).collect::<Option<_>>()?),
    };
    Some(Captured { values, ..c.clone() })
}

/// Places whose values hang on positions, and on who sees whom.
pub(super) fn hangs_on_positions(point: Point) -> bool {
    use Point::*;
    matches!(point, Q | KRope | IndexQ | IndexK | IndexScores | IndexTopk | Latent | Context)
}
