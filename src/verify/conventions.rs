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

/// A convention that a dump follows.
pub(super) struct Reading {
    /// What it is, in words.
    pub note: String,
    /// The dump as it is to be read; `None` where it cannot be read on.
    pub trace: Option<Trace>,
}

/// Degrees whose ranks' parts are tried.
const DEGREES: [usize; 3] = [2, 4, 8];

/// The convention that explains what diverges at a place, if there is one.
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
    if let Some(note) = Unjudged::or_none(trial.restarts())?.flatten() {
        return Ok(Some(Reading { note, trace: None }));
    }
    for (note, trace) in trial.other_orders() {
        if trial.is_right(&trace)? && trial.follow(&trace)?.is_none_or(|follow| follow) {
            return Ok(Some(Reading { note, trace: Some(trace) }));
        }
    }
    if let Some((note, dropped)) = trial.holds_another()?.or(Unjudged::or_none(trial.rank_part())?.flatten())
        // What follows must have been made from the right value, and not from what is there.
        && trial.follow(&dropped)? == Some(true)
        && trial.follow(trace)? == Some(false)
    {
        return Ok(Some(Reading { note, trace: Some(dropped) }));
    }
    Ok(None)
}

struct Trial<'a> {
    judge: &'a Judge<'a>,
    trace: &'a Trace,
    place: Place,
    subject: &'a Subject,
}

impl Trial<'_> {
    /// True if the place is right in another trace.
    fn is_right(&self, trace: &Trace) -> Result<bool, VerifyError> {
        Ok(judge_op(self.judge, trace, self.place, self.subject)?.verdict == Verdict::Match)
    }

    /// Whether all operations of a trace that were made from the place, captured or not, are right; `None` where there is no
    /// such operation.
    fn follow(&self, trace: &Trace) -> Result<Option<bool>, VerifyError> {
        let captured = |place: Place| trace.ranks(place).is_some();
        let names = points(self.judge.config, self.judge.options);
        let mut right = None;
        for place in names.iter().filter_map(|name| name.parse::<Place>().ok()).filter(|place| captured(*place)) {
            let reads = self.judge.reads(place, &captured).unwrap_or_default();
            if place != self.place && (reads.from.contains(&self.place) || reads.over.contains(&self.place)) {
                match judge_op(self.judge, trace, place, self.subject)?.verdict {
                    Verdict::Match | Verdict::Drift => right = right.or(Some(true)),
                    Verdict::Divergent => right = Some(false),
                    _ => {}
                }
            }
        }
        Ok(right)
    }

    /// The dump in other orders of the same values.
    fn other_orders(&self) -> Vec<(String, Trace)> {
        use Point::*;
        let (rope, point) = (self.judge.config.rope, self.place.point);
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
            all.push((format!("{} has heads before tokens", point.name()), trace));
        }
        if matches!(point, Embed | Input) {
            let rows = self.trace.ids.len();
            let flip = |c: &Captured| {
                let width = c.row_len();
                moved(c, &|i| (rows - 1 - i / width) * width + i % width)
            };
            all.push(("tokens stand in reverse order".into(), self.trace.map(flip)));
            if let Some(order) = self.order_of_tokens() {
                let sort = |c: &Captured| {
                    let width = c.row_len();
                    moved(c, &|i| order[i / width] * width + i % width)
                };
                all.push(("tokens stand in another order".into(), self.trace.map(sort)));
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

    /// The place that this one holds the values of, and the dump without what is so.
    fn holds_another(&self) -> Result<Option<(String, Trace)>, VerifyError> {
        use Point::*;
        let (layer, last) = (self.place.layer(), self.judge.config.layers - 1);
        let at = |point: Point| self.place.at(point);
        let next = |point: Point| layer.filter(|l| *l < last).map(|l| Place::trunk(l + 1, point));
        let others: Vec<(Place, &str)> = match self.place.point {
            Output => vec![
                (at(FfnOut), "without the residual, which the engine keeps apart"),
                (at(Input), "of one layer before"),
                (
                    next(Output).unwrap_or(Place::FINAL_NORM),
                    if layer == Some(last) { "behind the final norm" } else { "of one layer behind" },
                ),
                (next(AttnNorm).unwrap_or(Place::FINAL_NORM), "behind the next norm"),
            ],
            Input => vec![(at(AttnNorm), "behind its norm: written over later"), (at(Output), "of one layer behind")],
            Residual => vec![
                (at(FfnNorm), "behind its norm: written over later"),
                (at(AttnOut), "without the residual, which the engine keeps apart"),
                (at(Input), "before attention"),
            ],
            QA => vec![(at(QANorm), "behind its norm: written over later")],
            Embed => vec![(Place::trunk(0, AttnNorm), "behind the first norm: written over later")],
            _ => Vec::new(),
        };
        let rest = self.trace.only(|place| place != self.place);
        for (other, how) in others {
            let holds = match self.trace.ranks(other) {
                Some(_) => self.holds(self.place, other),
                // It was not captured: made from what is there beside the place itself.
                None => Unjudged::or_none(self.holds_what(&rest, other))?.unwrap_or(false),
            };
            if holds {
                let shift = |place: Place| {
                    let ((to, from), own) = other.layer().zip(layer).zip(place.layer())?;
                    Some(Place::trunk(own + to - from, other.point))
                };
                let same = |place: Place| {
                    place == self.place
                        || (place.point == self.place.point && shift(place).is_some_and(|o| self.holds(place, o)))
                };
                let note = format!("{} holds values {how} ({other})", self.place.point.name());
                return Ok(Some((note, self.trace.only(|place| !same(place)))));
            }
        }
        Ok(None)
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
        self.matches(recomputed)
    }

    /// True where the place's values are these, within their floor.
    fn matches(&self, recomputed: Recomputed) -> Result<bool, Unjudged> {
        let whole = self.trace.seen_by(0, self.place).map_err(|e| Unjudged::NoData(e.to_string()))?;
        let measured = self.judge.measured(&whole, recomputed)?;
        let all: Energy = measured.energies(|_| true).iter().sum();
        Ok(all.m > 0 && all.undefined == 0 && all.share() <= 1.0)
    }

    /// One rank's addend in place of the sum over ranks, and the dump without all such sums.
    fn rank_part(&self) -> Result<Option<(String, Trace)>, Unjudged> {
        if self.trace.tp != 1 || !self.place.point.is_reduced() || self.place.point == Point::Embed {
            return Ok(None);
        }
        let seen = Seen::new(self.trace, 0);
        for tp in DEGREES {
            let Ok(parts) = self.judge.recompute_partials(self.place, &|n| seen.get(n), tp) else { continue };
            for (rank, part) in parts.into_iter().enumerate() {
                if self.matches(part)? {
                    let note =
                        format!("{} is rank {rank}'s addend of {tp}, not the sum over ranks", self.place.point.name());
                    return Ok(Some((note, self.trace.only(|place| place.point != self.place.point))));
                }
            }
        }
        Ok(None)
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
        let wrong = bad(&every)?;
        let Some(first) = wrong.first().copied().filter(|row| *row > 0) else { return Ok(None) };
        let variant = Some(Variant::Position(-(first as i64)));
        let moved = Judge { options: RefOptions { variant, ..every.options }, ..every };
        let behind = bad(&moved)?.into_iter().filter(|row| *row >= first).count();
        // The first token of a sequence is not turned; a third sequence would begin again once more.
        let rest = self.trace.ids.len() - first;
        if behind > 0 && behind >= rest / 2 {
            return Ok(None);
        }
        let padding = self.trace.ids[..first].iter().all(|id| *id == self.trace.ids[0]) && first > 1;
        let what = if padding { "padding was written as tokens" } else { "sequences of a batch were written as one" };
        Ok(Some(format!("positions begin again at token {first}: {what}; capture one sequence by itself")))
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
