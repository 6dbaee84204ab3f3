//! Feeding one sequence to an engine in a stated way: in chunks of any length, alone or beside other sequences, with the
//! pages of its cache in a row or scattered. Invariants say that none of this may matter.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::VerifyError;
use crate::device::{Batch, Token};
use crate::engine::kv::PAGE;
use crate::engine::{Engine, EngineError};
use crate::model::Place;
use crate::probe::capture::{Captured, Filter, Values};
use crate::probe::{Capture, Digest, Probe, Replace, Replacements, Trace};

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
#[derive(Clone, Debug)]
pub struct Fed {
    /// What was captured.
    pub trace: Trace,
    /// `[rows][vocab]`.
    pub logits: Vec<f32>,
}

impl Fed {
    /// The first row of logits that differs in its bits, or that only one of the runs holds.
    pub fn logits_part(&self, other: &Fed, vocab: usize) -> Option<usize> {
        let shorter = self.logits.len().min(other.logits.len());
        let at = self.logits.iter().zip(&other.logits).position(|(a, b)| a.to_bits() != b.to_bits());
        at.or_else(|| (self.logits.len() != other.logits.len()).then_some(shorter)).map(|i| i / vocab.max(1))
    }
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
    let (mut held, mut logits) = (vec![BTreeMap::new(); engine.tp()], Vec::new());
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
        logits.extend(output.logits);
        for (held, captured) in held.iter_mut().zip(output.captured) {
            for c in captured {
                keep(held, c, first, cut.clone());
            }
        }
    }
    let captured = held.into_iter().map(|rank| rank.into_values().collect()).collect();
    Ok(Fed { trace: Trace::new("lockstep".into(), feed.ids.to_vec(), engine.options().attention, captured), logits })
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
    use crate::model::{Attention, Point};

    #[test]
    fn cuts_cover_the_sequence_and_the_last_length_repeats() {
        let ids = [0; 10];
        assert_eq!(Feed::chunked(&ids, vec![1, 4]).cuts(), [0..1, 1..5, 5..9, 9..10]);
        assert_eq!(Feed::whole(&ids).cuts(), vec![0..10]);
        assert_eq!(Feed::chunked(&ids, vec![0]).cuts().len(), 10);
    }

    fn captured(point: Point, values: &[i32]) -> Captured {
        Captured::of_test(point, &[1], Values::I32(values.to_vec()))
    }

    #[test]
    fn logits_that_end_early_part_there() {
        let fed = |logits| Fed { trace: Trace::new("a run".into(), vec![0; 3], Attention::Dsa, Vec::new()), logits };
        let whole = fed(vec![0.5; 6]);
        assert_eq!(whole.logits_part(&fed(vec![0.5; 6]), 2), None);
        for (rows, row) in [(2, 2), (0, 0)] {
            let shorter = fed(vec![0.5; 2 * rows]);
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
