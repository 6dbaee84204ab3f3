//! Feeding one sequence to an engine in a stated way: in chunks of any length, alone or beside other sequences, with the
//! pages of its cache in a row or scattered. Invariants say that none of this may matter.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::VerifyError;
use crate::engine::batch::{Batch, Token};
use crate::engine::kv::PAGE;
use crate::engine::{Engine, EngineError};
use crate::probe::capture::{Captured, Filter, Values};
use crate::probe::{Capture, Digest, Point, Probe, Replace, Replacements};

/// A place of the forward pass; sorts in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// 0 before the layers, 1 in them, 2 behind.
    part: u8,
    /// Trunk layer.
    pub layer: Option<usize>,
    /// The point.
    pub point: Point,
}

impl Place {
    /// The place of a point.
    pub fn new(point: Point, layer: Option<usize>) -> Self {
        let part = match point {
            Point::Embed => 0,
            p if p.is_global() => 2,
            _ => 1,
        };
        Place { part, layer, point }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.point.full_name(self.layer))
    }
}

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
}

impl<'a> Feed<'a> {
    /// Alone, in one step.
    pub fn whole(ids: &'a [u32]) -> Self {
        Feed { ids, chunks: vec![ids.len()], before: Vec::new(), behind: Vec::new() }
    }

    /// Alone, in steps of these lengths; the last one repeats.
    pub fn chunked(ids: &'a [u32], chunks: Vec<usize>) -> Self {
        Feed { chunks, ..Feed::whole(ids) }
    }

    /// Where its steps begin and end.
    pub fn cuts(&self) -> Vec<std::ops::Range<usize>> {
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
    /// Per rank.
    pub ranks: Vec<BTreeMap<Place, Captured>>,
    /// `[rows][vocab]`.
    pub logits: Vec<f32>,
}

/// Where two runs part first.
#[derive(Clone, Copy, Debug)]
pub struct Parting {
    /// The place.
    pub place: Place,
    /// The rank.
    pub rank: usize,
    /// The position.
    pub row: usize,
}

impl std::fmt::Display for Parting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "first op {}, rank {}, token {}", self.place, self.rank, self.row)
    }
}

impl Fed {
    /// The first place, in the order of the forward pass, where rows that both runs hold differ in their bits. Only
    /// places that both listened to are compared.
    pub fn parts_from(&self, other: &Fed) -> Option<Parting> {
        let places = self.ranks.first()?.keys();
        places.flat_map(|place| (0..self.ranks.len()).map(move |rank| (*place, rank))).find_map(|(place, rank)| {
            let (a, b) = (self.ranks[rank].get(&place)?, other.ranks.get(rank)?.get(&place)?);
            first_row(&a.values, &b.values, a.row_len()).map(|row| Parting { place, rank, row })
        })
    }

    /// The first row of logits that differs in its bits.
    pub fn logits_part(&self, other: &Fed, vocab: usize) -> Option<usize> {
        let at = self.logits.iter().zip(&other.logits).position(|(a, b)| a.to_bits() != b.to_bits());
        at.map(|i| i / vocab).or_else(|| {
            let shorter = self.logits.len().min(other.logits.len());
            (shorter == 0 && self.logits.len() != other.logits.len()).then_some(0)
        })
    }

    /// One rank's choices, as replacements for other runs.
    pub fn choices(&self, rank: usize) -> Replacements {
        let all = self.ranks.get(rank).into_iter().flatten();
        all.filter(|(p, _)| p.point.is_choice()).map(|(p, c)| ((p.point, p.layer), c.clone())).collect()
    }
}

/// The first of the common rows that differs.
fn first_row(a: &Values, b: &Values, width: usize) -> Option<usize> {
    let at = match (a, b) {
        (Values::F32(a), Values::F32(b)) => a.iter().zip(b).position(|(x, y)| x.to_bits() != y.to_bits()),
        (Values::I32(a), Values::I32(b)) => a.iter().zip(b).position(|(x, y)| x != y),
        _ => Some(0),
    };
    at.map(|i| i / width.max(1))
}

/// True for the points that hold choices.
pub fn choices() -> Filter {
    Arc::new(|point: Point, _| point.is_choice())
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
    let mut fed = Fed { ranks: vec![BTreeMap::new(); engine.tp()], logits: Vec::new() };
    for (step, cut) in cuts.iter().enumerate() {
        let mut batch = Batch { tables: tables.to_vec(), ..Batch::default() };
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
        for (rank, captured) in output.captured.into_iter().enumerate() {
            for c in captured {
                keep(&mut fed.ranks[rank], c, first, cut.len());
            }
        }
    }
    Ok(fed)
}

/// Appends the rows of the sequence to what is held of the place.
fn keep(held: &mut BTreeMap<Place, Captured>, captured: Captured, first: usize, rows: usize) {
    let width = captured.row_len();
    // Logits come for the sequence's rows only.
    let first = if captured.point == Point::Logits { 0 } else { first };
    let range = first * width..(first + rows) * width;
    let own = match &captured.values {
        Values::F32(v) => Values::F32(v.get(range).unwrap_or_default().to_vec()),
        Values::I32(v) => Values::I32(v.get(range).unwrap_or_default().to_vec()),
    };
    match held.entry(Place::new(captured.point, captured.layer)) {
        std::collections::btree_map::Entry::Vacant(entry) => {
            entry.insert(Captured { rows, values: own, ..captured });
        }
        std::collections::btree_map::Entry::Occupied(mut entry) => {
            let all = entry.get_mut();
            all.rows += rows;
            match (&mut all.values, own) {
                (Values::F32(all), Values::F32(own)) => all.extend(own),
                (Values::I32(all), Values::I32(own)) => all.extend(own),
                _ => {}
            }
        }
    }
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

    #[test]
    fn places_sort_in_the_order_of_the_forward_pass() {
        let mut places = [
            Place::new(Point::Logits, None),
            Place::new(Point::Input, Some(1)),
            Place::new(Point::Output, Some(0)),
            Place::new(Point::AttnNorm, Some(0)),
            Place::new(Point::FinalNorm, None),
            Place::new(Point::Embed, None),
        ];
        places.sort();
        let names: Vec<String> = places.iter().map(Place::to_string).collect();
        let order = ["embed", "layers.0.attn.norm", "layers.0.output", "layers.1.input", "final_norm", "logits"];
        assert_eq!(names, order);
    }
}
