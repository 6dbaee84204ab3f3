//! Feeding one sequence to an engine in a stated way: in chunks of any length, alone or beside other sequences, with the
//! pages of its cache in a row or scattered. Invariants say that none of this may matter.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use super::VerifyError;
use crate::device::{Batch, Token};
use crate::engine::kv::PAGE;
use crate::engine::{Engine, EngineError};
use crate::model::{Place, Point};
use crate::probe::capture::{Captured, Filter, Values};
use crate::probe::{Capture, Digest, Probe, Replace, Replacements};

/// What to listen to.
#[derive(Clone)]
pub enum Listen {
    /// Nothing.
    Off,
    /// A digest of every row of the points that a filter accepts.
    Digests(Filter),
    /// The points that a filter accepts.
    Capture(Filter),
    /// As `Capture`, and afterwards the given values in their place, on every rank.
    Replace(Arc<Replacements>, Filter),
}

/// How a sequence is fed.
#[derive(Clone)]
pub struct Feed<'a> {
    /// Its ids, from position 0.
    pub ids: &'a [u32],
    /// Lengths of its steps; the last one repeats.
    pub chunks: Vec<usize>,
    /// Sequences that stand in the same steps before it.
    pub before: Vec<Vec<u32>>,
    /// Sequences that stand in the same steps behind it.
    pub behind: Vec<Vec<u32>>,
    /// Through the program as it is written, without fusing.
    pub expanded: bool,
}

impl<'a> Feed<'a> {
    /// Alone, in one step.
    pub fn whole(ids: &'a [u32]) -> Self {
        Feed { ids, chunks: vec![ids.len()], before: Vec::new(), behind: Vec::new(), expanded: false }
    }

    /// Alone, in steps of these lengths; the last one repeats.
    pub fn chunked(ids: &'a [u32], chunks: Vec<usize>) -> Self {
        Feed { chunks, ..Feed::whole(ids) }
    }

    /// Where its steps begin and end.
    pub fn cuts(&self) -> Vec<Range<usize>> {
        let (mut cuts, mut start) = (Vec::new(), 0);
        let mut lengths = self.chunks.iter().copied();
        let mut length = 1;
        while start < self.ids.len() {
            length = lengths.next().unwrap_or(length).max(1);
            let end = (start + length).min(self.ids.len());
            cuts.push(start..end);
            start = end;
        }
        cuts
    }
}

/// What a fed sequence gave: its own rows only, by position.
#[derive(Clone, Debug, Default)]
pub struct Fed {
    /// Rows that every place must hold: the sequence's tokens.
    pub rows: usize,
    /// Per rank.
    pub ranks: Vec<BTreeMap<Place, Captured>>,
    /// `[rows][vocab]`.
    pub logits: Vec<f32>,
}

/// How two runs part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Difference {
    /// Both hold the row, with other bits.
    Bits,
    /// One of them holds nothing of the place on this rank.
    Missing,
    /// One of them holds fewer or more rows than its sequence has tokens; the row is the first that is missing or too
    /// many.
    Rows,
    /// Values of another type or width.
    Shape,
}

/// Where two runs part first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parting {
    /// The place.
    pub place: Place,
    /// The rank.
    pub rank: usize,
    /// The position.
    pub row: usize,
    /// In what.
    pub what: Difference,
}

impl std::fmt::Display for Parting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "first op {}, rank {}, token {}", self.place, self.rank, self.row)?;
        f.write_str(match self.what {
            Difference::Bits => "",
            Difference::Missing => " (one of the runs holds nothing there)",
            Difference::Rows => " (one of the runs has not one row per token)",
            Difference::Shape => " (values of another type or width)",
        })
    }
}

impl Fed {
    /// Every place that any rank holds, in the order of the forward pass.
    pub fn places(&self) -> BTreeSet<Place> {
        self.ranks.iter().flat_map(|rank| rank.keys().copied()).collect()
    }

    /// The same run as if only the places that a test accepts had been listened to.
    pub fn only(&self, wanted: impl Fn(Point) -> bool) -> Fed {
        let mut fed = self.clone();
        fed.ranks.iter_mut().for_each(|rank| rank.retain(|place, _| wanted(place.point)));
        fed
    }

    /// The first place, in the order of the forward pass, where two runs differ in these rows. Nothing is passed over:
    /// a place that any rank of either run holds must be held by every rank of both, with one row per token.
    pub fn parts_from(&self, other: &Fed, rows: Range<usize>) -> Option<Parting> {
        let mut places = self.places();
        places.extend(other.places());
        let ranks = self.ranks.len().max(other.ranks.len());
        places.into_iter().flat_map(|place| (0..ranks).map(move |rank| (place, rank))).find_map(|(place, rank)| {
            let part = |row, what| Some(Parting { place, rank, row, what });
            let (a, b) = (self.ranks.get(rank), other.ranks.get(rank));
            let (Some(a), Some(b)) = (a.and_then(|r| r.get(&place)), b.and_then(|r| r.get(&place))) else {
                return part(rows.start, Difference::Missing);
            };
            for (held, expected) in [(a, self.rows), (b, other.rows)] {
                let whole = held.values.len() == held.rows * held.row_len();
                if held.rows != expected || expected < rows.end || !whole {
                    return part(held.rows.min(expected), Difference::Rows);
                }
            }
            if a.row_len() != b.row_len() {
                return part(rows.start, Difference::Shape);
            }
            let width = a.row_len();
            match differs(&a.values, &b.values, rows.start * width..rows.end * width) {
                Ok(at) => at.and_then(|at| part(rows.start + at / width.max(1), Difference::Bits)),
                Err(Unlike) => part(rows.start, Difference::Shape),
            }
        })
    }

    /// The first row of logits that differs in its bits, or that only one of the runs holds.
    pub fn logits_part(&self, other: &Fed, vocab: usize) -> Option<usize> {
        let shorter = self.logits.len().min(other.logits.len());
        let at = self.logits.iter().zip(&other.logits).position(|(a, b)| a.to_bits() != b.to_bits());
        at.or_else(|| (self.logits.len() != other.logits.len()).then_some(shorter)).map(|i| i / vocab.max(1))
    }

    /// One rank's choices, as replacements for other runs.
    pub fn choices(&self, rank: usize) -> Replacements {
        let all = self.ranks.get(rank).into_iter().flatten();
        all.filter(|(p, _)| p.point.is_choice()).map(|(p, c)| (*p, c.clone())).collect()
    }
}

/// Values that cannot be compared: of two types, or without the range.
struct Unlike;

/// The first value behind the start of the range that differs in its bits.
fn differs(a: &Values, b: &Values, range: Range<usize>) -> Result<Option<usize>, Unlike> {
    match (a, b) {
        (Values::F32(a), Values::F32(b)) => {
            let (a, b) = (a.get(range.clone()).ok_or(Unlike)?, b.get(range).ok_or(Unlike)?);
            Ok(a.iter().zip(b).position(|(x, y)| x.to_bits() != y.to_bits()))
        }
        (Values::I32(a), Values::I32(b)) => {
            let (a, b) = (a.get(range.clone()).ok_or(Unlike)?, b.get(range).ok_or(Unlike)?);
            Ok(a.iter().zip(b).position(|(x, y)| x != y))
        }
        _ => Err(Unlike),
    }
}

/// Whether all values are the same, bit by bit.
pub(super) fn same_bits(a: &Values, b: &Values) -> bool {
    matches!(differs(a, b, 0..a.len().max(b.len())), Ok(None))
}

/// True for the points that hold choices.
pub fn choices() -> Filter {
    Arc::new(|place| place.point.is_choice())
}

/// Feeds a sequence, with logits of all its rows. Neighbours are fed in as many steps, evenly, and their pages lie between
/// its own.
///
/// # Errors
/// Failures of the engine; a listener's value that does not fit.
pub fn feed(engine: &mut Engine, feed: &Feed<'_>, listen: &Listen) -> Result<Fed, VerifyError> {
    let mut sequences: Vec<&[u32]> = feed.before.iter().map(Vec::as_slice).collect();
    let own = sequences.len();
    sequences.push(feed.ids);
    sequences.extend(feed.behind.iter().map(Vec::as_slice));
    let mut tables = vec![Vec::new(); sequences.len()];
    let reserved = scatter(engine, &sequences, &mut tables).map_err(VerifyError::from);
    let fed = reserved.and_then(|()| run(engine, feed, &sequences, own, &tables, listen));
    tables.iter_mut().for_each(|table| engine.pool().release(table));
    fed
}

/// Pages for every sequence, one each in turn, so that no table is a plain range once there are several.
fn scatter(engine: &mut Engine, sequences: &[&[u32]], tables: &mut [Vec<u32>]) -> Result<(), EngineError> {
    let longest = sequences.iter().map(|s| s.len()).max().unwrap_or(0);
    for tokens in (0..longest).step_by(PAGE) {
        for (ids, table) in sequences.iter().zip(tables.iter_mut()) {
            engine.pool().reserve(table, ids.len().min(tokens + PAGE))?;
        }
    }
    Ok(())
}

fn run(
    engine: &Engine,
    feed: &Feed<'_>,
    sequences: &[&[u32]],
    own: usize,
    tables: &[Vec<u32>],
    listen: &Listen,
) -> Result<Fed, VerifyError> {
    let cuts = feed.cuts();
    let mut fed = Fed { rows: feed.ids.len(), ranks: vec![BTreeMap::new(); engine.tp()], logits: Vec::new() };
    for (step, cut) in cuts.iter().enumerate() {
        let mut batch = Batch { tables: tables.to_vec(), expanded: feed.expanded, ..Batch::default() };
        let mut positions = Vec::new();
        for (s, ids) in sequences.iter().enumerate() {
            let cut = match s == own {
                true => cut.clone(),
                false => ids.len() * step / cuts.len()..ids.len() * (step + 1) / cuts.len(),
            };
            for p in cut {
                if s == own {
                    batch.logits.push(batch.tokens.len() as u32);
                }
                positions.push((s == own).then_some(p));
                batch.tokens.push(Token { id: ids[p], position: p as u32, sequence: s as u32 });
            }
        }
        let first = batch.logits.first().map_or(0, |row| *row as usize);
        let probe = || -> Option<Box<dyn Probe>> {
            match listen {
                Listen::Off => None,
                Listen::Digests(filter) => Some(Box::new(Digest::new(filter.clone()))),
                Listen::Capture(filter) => Some(Box::new(Capture::new(filter.clone()))),
                Listen::Replace(with, filter) => {
                    Some(Box::new(Replace::new(with.clone(), positions.clone(), filter.clone())))
                }
            }
        };
        let output = engine.step(batch, (0..engine.tp()).filter_map(|_| probe()).collect())?;
        if output.logits.len() != cut.len() * engine.config().vocab {
            return Err(VerifyError::Replacement);
        }
        fed.logits.extend(output.logits);
        for (held, captured) in fed.ranks.iter_mut().zip(output.captured) {
            for c in captured {
                keep(held, c, first, cut.clone());
            }
        }
    }
    Ok(fed)
}

/// Appends the sequence's rows of one step, which are the positions `cut`, to what is held of the place. Rows that did
/// not come are not made up: behind such a gap nothing is appended, so the place ends short and is found to.
fn keep(held: &mut BTreeMap<Place, Captured>, captured: Captured, first: usize, cut: Range<usize>) {
    let width = captured.row_len();
    // Logits come for the sequence's rows only.
    let first = if captured.place == Place::LOGITS { 0 } else { first };
    let came = captured.values.len() / width.max(1);
    let rows = first.min(came)..(first + cut.len()).min(came);
    let own = captured.values.cut(rows.start * width..rows.end * width);
    let all = held.entry(captured.place);
    let all = all.or_insert_with(|| Captured { rows: 0, values: captured.values.cut(0..0), ..captured });
    // More rows than the positions before this step are appended to all the same: one too many shows as well.
    if all.rows < cut.start {
        return;
    }
    match (&mut all.values, own) {
        (Values::F32(all), Values::F32(own)) => all.extend(own),
        (Values::I32(all), Values::I32(own)) => all.extend(own),
        _ => return,
    }
    all.rows += rows.len();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_cover_the_sequence_and_the_last_length_repeats() {
        let ids = [0; 10];
        assert_eq!(Feed::chunked(&ids, vec![1, 4]).cuts(), [0..1, 1..5, 5..9, 9..10]);
        assert_eq!(Feed::whole(&ids).cuts(), vec![0..10]);
        assert_eq!(Feed::chunked(&ids, vec![0]).cuts().len(), 10);
    }

    fn captured(point: Point, values: &[i32]) -> Captured {
        Captured {
            place: Place::trunk(0, point),
            rows: values.len(),
            shape: vec![1],
            values: Values::I32(values.to_vec()),
        }
    }

    /// Two ranks with two places of three rows.
    fn fed() -> Fed {
        let place = |point| (Place::trunk(0, point), captured(point, &[1, 2, 3]));
        Fed { rows: 3, ranks: vec![[Point::QA, Point::KvA].map(place).into(); 2], logits: vec![0.5; 6] }
    }

    #[test]
    fn what_only_one_run_holds_is_a_parting() {
        let (whole, at) = (fed(), Place::trunk(0, Point::KvA));
        assert_eq!(whole.parts_from(&fed(), 0..3), None);
        let part = |row, what| Some(Parting { place: at, rank: 1, row, what });
        let mut other = fed();
        other.ranks[1].remove(&at);
        assert_eq!(whole.parts_from(&other, 0..3), part(0, Difference::Missing));
        assert_eq!(other.parts_from(&whole, 0..3), part(0, Difference::Missing));
        assert_eq!(other.parts_from(&other, 0..3), part(0, Difference::Missing), "rank 0 holds it");
        other.ranks.truncate(1);
        let first = Parting { place: Place::trunk(0, Point::QA), rank: 1, row: 0, what: Difference::Missing };
        assert_eq!(other.parts_from(&whole, 0..3), Some(first));
        for (rows, row) in [(&[1, 2][..], 2), (&[1, 2, 3, 4], 3), (&[], 0)] {
            let mut other = fed();
            other.ranks[1].insert(at, captured(Point::KvA, rows));
            assert_eq!(whole.parts_from(&other, 0..3), part(row, Difference::Rows), "{rows:?}");
            assert_eq!(other.parts_from(&whole, 0..3), part(row, Difference::Rows), "{rows:?}");
            assert_eq!(other.parts_from(&other, 0..2), part(row, Difference::Rows), "{rows:?} on both sides");
        }
        assert!(whole.parts_from(&fed(), 0..4).is_some(), "no run has a fourth row");
    }

    #[test]
    fn only_the_rows_asked_for_are_compared() {
        let (whole, at) = (fed(), Place::trunk(0, Point::KvA));
        let mut other = fed();
        other.ranks[1].insert(at, captured(Point::KvA, &[1, 2, 4]));
        assert_eq!(whole.parts_from(&other, 0..2), None);
        let parting = Parting { place: at, rank: 1, row: 2, what: Difference::Bits };
        assert_eq!(whole.parts_from(&other, 1..3), Some(parting));
        assert_eq!(whole.only(|p| p == Point::QA).places().len(), 1);
    }

    #[test]
    fn logits_that_end_early_part_there() {
        let whole = fed();
        assert_eq!(whole.logits_part(&fed(), 2), None);
        for (rows, row) in [(2, 2), (0, 0)] {
            let shorter = Fed { logits: vec![0.5; 2 * rows], ..fed() };
            assert_eq!((whole.logits_part(&shorter, 2), shorter.logits_part(&whole, 2)), (Some(row), Some(row)));
        }
    }

    #[test]
    fn rows_that_do_not_come_leave_the_place_short() {
        let at = Place::trunk(0, Point::KvA);
        let rows = |steps: &[(&[i32], Range<usize>)]| {
            let mut held = BTreeMap::new();
            steps.iter().for_each(|(values, cut)| keep(&mut held, captured(Point::KvA, values), 1, cut.clone()));
            let place = &held[&at];
            assert_eq!(place.rows, place.values.len());
            place.values.clone()
        };
        // The row before the sequence's own is a neighbour's.
        assert_eq!(rows(&[(&[9, 1, 2, 9], 0..2), (&[9, 3], 2..3)]), Values::I32(vec![1, 2, 3]));
        assert_eq!(rows(&[(&[9, 1], 0..2), (&[9, 3], 2..3)]), Values::I32(vec![1]));
        assert_eq!(rows(&[(&[], 0..2)]), Values::I32(vec![]));
        assert_eq!(rows(&[(&[9, 3], 2..3)]), Values::I32(vec![]), "nothing came of the first step");
    }
}
