//! A run's captures by place: every rank's own, and the whole that a reader of the paper would expect.

use std::collections::HashMap;

use super::capture::{Captured, UnshardError, Values, unshard};
use crate::model::{Attention, Block, Layout, Place};

/// The captures of one prompt of one sequence, from our engine or from somebody's dump. Row `i` of every point is
/// position `i` (logits: the rows asked for, which are all of them here).
#[derive(Clone, Debug)]
pub struct Trace {
    /// Who made it, for messages.
    pub producer: String,
    /// Token ids.
    pub ids: Vec<u32>,
    /// Ranks.
    pub tp: usize,
    /// What queries attended to.
    pub attention: Attention,
    ranks: HashMap<Place, Vec<Captured>>,
    shown: Option<Shown>,
}

/// The part of a run that a trace shows.
#[derive(Clone, Debug)]
struct Shown {
    layers: Vec<usize>,
    first: bool,
    last: bool,
}

impl Trace {
    /// From each rank's captures, in rank order.
    pub fn new(producer: String, ids: Vec<u32>, attention: Attention, captured: Vec<Vec<Captured>>) -> Self {
        let tp = captured.len();
        let mut ranks: HashMap<Place, Vec<Captured>> = HashMap::new();
        for c in captured.into_iter().flatten() {
            ranks.entry(c.place).or_default().push(c);
        }
        Trace { producer, ids, tp, attention, ranks, shown: None }
    }

    /// Adds the captures of another run of the same prompt (other layers).
    pub fn extend(&mut self, other: Trace) {
        self.ranks.extend(other.ranks);
    }

    /// The same trace, of which only `layers`, the embedding if it is the `first` part of a run and the head if it is the
    /// `last` one are shown; the rest stays as inputs.
    pub fn restricted(mut self, layers: &[usize], first: bool, last: bool) -> Trace {
        self.shown = Some(Shown { layers: layers.to_vec(), first, last });
        self
    }

    /// True for the places that this trace is to be judged at.
    pub fn shows(&self, place: Place) -> bool {
        self.shown.as_ref().is_none_or(|s| match place.block {
            Block::Front => s.first,
            Block::Trunk(layer) => s.layers.contains(&layer),
            Block::Back | Block::Mtp(_) => s.last,
        })
    }

    /// The places that were captured on every rank, in the order of the forward pass.
    pub fn places(&self) -> Vec<Place> {
        let complete = self.ranks.iter().filter(|(place, c)| c.len() == self.tp && self.shows(**place));
        let mut places: Vec<Place> = complete.map(|(place, _)| *place).collect();
        places.sort();
        places
    }

    /// Some of the captures, as if `ranks` had nothing to add: what they hold of sharded and partial points is zeros.
    pub fn without(&self, ranks: &[usize], places: &[Place]) -> Trace {
        let silent = |(rank, captured): (usize, &Captured)| {
            let mut captured = captured.clone();
            if captured.place.point.layout() != Layout::Replicated && ranks.contains(&rank) {
                captured.values = match captured.values {
                    Values::F32(v) => Values::F32(vec![0.0; v.len()]),
                    Values::I32(v) => Values::I32(vec![0; v.len()]),
                };
            }
            captured
        };
        let kept = places.iter().filter_map(|p| Some((*p, self.ranks.get(p)?)));
        let ranks = kept.map(|(p, all)| (p, all.iter().enumerate().map(silent).collect())).collect();
        Trace { ranks, producer: self.producer.clone(), ids: self.ids.clone(), shown: self.shown.clone(), ..*self }
    }

    /// Every rank's captures of a place.
    pub fn ranks(&self, place: Place) -> Option<&[Captured]> {
        self.ranks.get(&place).map(Vec::as_slice).filter(|c| c.len() == self.tp)
    }

    /// All ranks' captures put together; replicated copies must agree.
    ///
    /// # Errors
    /// See [`unshard`].
    pub fn whole(&self, place: Place) -> Result<Captured, UnshardError> {
        let ranks = self.ranks(place).unwrap_or_default();
        unshard(&ranks.iter().collect::<Vec<_>>())
    }

    /// The place as `rank` sees it: its own copy of a replicated one, everybody's parts of any other.
    ///
    /// # Errors
    /// See [`unshard`].
    pub fn seen_by(&self, rank: usize, place: Place) -> Result<Captured, UnshardError> {
        match (place.point.layout(), self.ranks(place).and_then(|ranks| ranks.get(rank))) {
            (Layout::Replicated, Some(own)) => Ok(own.clone()),
            _ => self.whole(place),
        }
    }
}

impl Captured {
    /// The values as f32, indices widened.
    pub fn as_f32(&self) -> Vec<f32> {
        match &self.values {
            Values::F32(v) => v.clone(),
            Values::I32(v) => v.iter().map(|i| *i as f32).collect(),
        }
    }

    /// Values of one token's row.
    pub fn row_len(&self) -> usize {
        self.shape.iter().product()
    }
}
