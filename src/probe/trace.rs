//! A run's captures by place: every rank's own, and the whole that a reader of the paper would expect.

use std::collections::{BTreeMap, BTreeSet};

use super::capture::{Captured, UnshardError, Values, unshard};
use super::replace::Replacements;
use crate::model::{Attention, Layout, Place};

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
    pub(super) held: Vec<BTreeMap<Place, Captured>>,
}

impl Trace {
    /// From each rank's captures, in rank order.
    pub fn new(producer: String, ids: Vec<u32>, attention: Attention, captured: Vec<Vec<Captured>>) -> Self {
        let by_place = |rank: Vec<Captured>| rank.into_iter().map(|c| (c.place, c)).collect();
        let held: Vec<_> = captured.into_iter().map(by_place).collect();
        Trace { producer, ids, tp: held.len(), attention, held }
    }

    /// Adds the captures of another run of the same prompt (other layers).
    pub fn extend(&mut self, other: Trace) {
        self.held.iter_mut().zip(other.held).for_each(|(own, theirs)| own.extend(theirs));
    }

    /// The places that any rank holds, in the order of the forward pass.
    pub fn held(&self) -> BTreeSet<Place> {
        self.held.iter().flat_map(|rank| rank.keys().copied()).collect()
    }

    /// Those of them that every rank holds.
    pub fn places(&self) -> Vec<Place> {
        self.held().into_iter().filter(|place| self.ranks(*place).is_some()).collect()
    }

    /// What each rank holds of the places for which `of` gives something.
    fn each(&self, of: impl Fn(usize, &Captured) -> Option<Captured>) -> Trace {
        let rank = |(r, held): (usize, &BTreeMap<Place, Captured>)| {
            held.values().filter_map(|captured| of(r, captured)).map(|captured| (captured.place, captured)).collect()
        };
        let held = self.held.iter().enumerate().map(rank).collect();
        Trace { held, producer: self.producer.clone(), ids: self.ids.clone(), ..*self }
    }

    /// The same run with other captures, of other places perhaps; what becomes nothing is left out.
    pub(crate) fn map(&self, of: impl Fn(&Captured) -> Option<Captured>) -> Trace {
        self.each(|_, captured| of(captured))
    }

    /// The same run as if only the places that a test accepts had been listened to.
    pub fn only(&self, wanted: impl Fn(Place) -> bool) -> Trace {
        self.each(|_, captured| wanted(captured.place).then(|| captured.clone()))
    }

    /// Puts other values into some rows of a place: `row` gives those of a rank at the number of a row within `rows`.
    /// `None`, with some of them there, where they do not fit into what is captured.
    pub(crate) fn set_rows(
        &mut self,
        place: Place,
        rows: &[usize],
        row: &dyn Fn(usize, usize) -> Vec<f32>,
    ) -> Option<()> {
        for (rank, held) in self.held.iter_mut().enumerate() {
            let captured = held.get_mut(&place)?;
            let (width, Values::F32(values)) = (captured.row_len(), &mut captured.values) else { return None };
            for (i, at) in rows.iter().enumerate() {
                let new = row(rank, i);
                let old = values.get_mut(at * width..(at + 1) * width).filter(|old| old.len() == new.len())?;
                old.copy_from_slice(&new);
            }
        }
        Some(())
    }

    /// Some of the captures, as if `ranks` had nothing to add: what they hold of sharded and partial points is zeros.
    pub fn without(&self, ranks: &[usize], places: &[Place]) -> Trace {
        self.each(|rank, captured| {
            let mut captured = places.contains(&captured.place).then(|| captured.clone())?;
            if captured.place.point.layout() != Layout::Replicated && ranks.contains(&rank) {
                captured.values = match captured.values {
                    Values::F32(v) => Values::F32(vec![0.0; v.len()]),
                    Values::I32(v) => Values::I32(vec![0; v.len()]),
                };
            }
            Some(captured)
        })
    }

    /// Every rank's captures of a place; none where a rank lacks it, or holds more rows than there are tokens.
    pub fn ranks(&self, place: Place) -> Option<Vec<&Captured>> {
        self.held.iter().map(|rank| rank.get(&place).filter(|c| c.rows <= self.ids.len())).collect()
    }

    /// One rank's choices, as replacements for other runs.
    pub fn choices(&self, rank: usize) -> Replacements {
        let all = self.held.get(rank).into_iter().flatten();
        all.filter(|(p, _)| p.point.is_choice()).map(|(p, c)| (*p, c.clone())).collect()
    }

    /// All ranks' captures put together; replicated copies must agree.
    ///
    /// # Errors
    /// See [`unshard`].
    pub fn whole(&self, place: Place) -> Result<Captured, UnshardError> {
        unshard(&self.ranks(place).ok_or_else(|| UnshardError::Empty { point: place.to_string() })?)
    }

    /// The place as `rank` sees it: its own copy of a replicated one, everybody's parts of any other.
    ///
    /// # Errors
    /// See [`unshard`].
    pub fn seen_by(&self, rank: usize, place: Place) -> Result<Captured, UnshardError> {
        match (place.point.layout(), self.ranks(place).and_then(|ranks| ranks.get(rank).copied())) {
            (Layout::Replicated, Some(own)) => Ok(own.clone()),
            _ => self.whole(place),
        }
    }
}
