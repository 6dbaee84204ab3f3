//! A run's captures by point: every rank's own, and the whole that a reader of the paper would expect.

use std::collections::HashMap;

use super::capture::{Captured, UnshardError, Values, unshard};
use super::points::{Layout, Point};
use crate::engine::Attention;

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
    ranks: HashMap<(Point, Option<usize>), Vec<Captured>>,
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
        let mut ranks: HashMap<(Point, Option<usize>), Vec<Captured>> = HashMap::new();
        for c in captured.into_iter().flatten() {
            ranks.entry((c.point, c.layer)).or_default().push(c);
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

    /// True for the points that this trace is to be judged at.
    pub fn shows(&self, point: Point, layer: Option<usize>) -> bool {
        self.shown.as_ref().is_none_or(|s| match layer {
            Some(layer) => s.layers.contains(&layer),
            None if point == Point::Embed => s.first,
            None => s.last,
        })
    }

    /// The points that were captured on every rank, in the order of the forward pass.
    pub fn points(&self) -> Vec<(Point, Option<usize>)> {
        let complete = self.ranks.iter().filter(|((p, l), c)| c.len() == self.tp && self.shows(*p, *l));
        let mut points: Vec<(Point, Option<usize>)> = complete.map(|(p, _)| *p).collect();
        points.sort_by_key(|(p, layer)| match p {
            Point::Embed => (0, 0, *p),
            p if p.is_global() => (2, 0, *p),
            p => (1, layer.unwrap_or(0), *p),
        });
        points
    }

    /// Some of the captures, as if `ranks` had nothing to add: what they hold of sharded and partial points is zeros.
    pub fn without(&self, ranks: &[usize], points: &[(Point, Option<usize>)]) -> Trace {
        let silent = |(rank, captured): (usize, &Captured)| {
            let mut captured = captured.clone();
            if captured.point.layout() != Layout::Replicated && ranks.contains(&rank) {
                captured.values = match captured.values {
                    Values::F32(v) => Values::F32(vec![0.0; v.len()]),
                    Values::I32(v) => Values::I32(vec![0; v.len()]),
                };
            }
            captured
        };
        let kept = points.iter().filter_map(|p| Some((*p, self.ranks.get(p)?)));
        let ranks = kept.map(|(p, all)| (p, all.iter().enumerate().map(silent).collect())).collect();
        Trace { ranks, producer: self.producer.clone(), ids: self.ids.clone(), shown: self.shown.clone(), ..*self }
    }

    /// Every rank's captures of a point.
    pub fn ranks(&self, point: Point, layer: Option<usize>) -> Option<&[Captured]> {
        self.ranks.get(&(point, layer)).map(Vec::as_slice).filter(|c| c.len() == self.tp)
    }

    /// All ranks' captures put together; replicated copies must agree.
    ///
    /// # Errors
    /// See [`unshard`].
    pub fn whole(&self, point: Point, layer: Option<usize>) -> Result<Captured, UnshardError> {
        let ranks = self.ranks(point, layer).unwrap_or_default();
        unshard(&ranks.iter().collect::<Vec<_>>())
    }

    /// The point as `rank` sees it: its own copy of a replicated one, everybody's parts of any other.
    ///
    /// # Errors
    /// See [`unshard`].
    pub fn seen_by(&self, rank: usize, point: Point, layer: Option<usize>) -> Result<Captured, UnshardError> {
        let ranks = self.ranks(point, layer).unwrap_or_default();
        match (point.layout(), ranks.get(rank)) {
            (Layout::Replicated, Some(own)) => Ok(own.clone()),
            _ => unshard(&ranks.iter().collect::<Vec<_>>()),
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
