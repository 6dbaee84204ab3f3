//! Putting given values in place of what a run computed: another run's choices, so that two runs can be compared behind
//! a near tie, or the reference's result, to show that the rest recovers.

use std::collections::HashMap;
use std::sync::Arc;

use super::capture::{Capture, Captured, Filter, Values};
use super::{Data, Probe, Then, Visit};
use crate::model::Place;

/// Values by place; row `i` belongs to position `i` of the sequence.
pub type Replacements = HashMap<Place, Captured>;

/// Captures what `filter` accepts, as the run computed it, and then puts the given values in its place. A place whose
/// rows are of another width or kind than given ends the step: a replacement that silently does not happen would make
/// every later comparison worthless.
pub struct Replace {
    with: Arc<Replacements>,
    /// Position whose values each row of the step takes; `None` keeps the row.
    positions: Vec<Option<usize>>,
    capture: Capture,
}

impl Replace {
    /// Row `i` of the step takes the values of position `positions[i]`, of this rank.
    pub fn new(with: Arc<Replacements>, positions: Vec<Option<usize>>, filter: Filter) -> Self {
        Replace { with, positions, capture: Capture::new(filter) }
    }
}

impl Probe for Replace {
    fn wants(&self, place: Place) -> bool {
        self.with.contains_key(&place) || self.capture.wants(place)
    }

    fn changes(&self, place: Place) -> bool {
        self.with.contains_key(&place)
    }

    fn visit(&mut self, visit: Visit<'_>) -> Then {
        self.capture.see(&visit);
        let Visit { place, rows, shape, values } = visit;
        let Some(given) = self.with.get(&place) else { return Then::Continue };
        let width = shape.iter().product();
        let positions = self.positions.get(..rows);
        let done = positions.and_then(|positions| match (values, &given.values) {
            (Data::Values(v), Values::F32(with)) => over(v, with, width, positions),
            (Data::Indices(v), Values::I32(with)) => over(v, with, width, positions),
            _ => None,
        });
        if done.is_some() { Then::Replaced } else { Then::Stop }
    }

    fn take(&mut self) -> Vec<Captured> {
        self.capture.take()
    }
}

/// Copies each position's row over the row of the step that stands for it; `None` if one does not fit.
fn over<T: Copy>(values: &mut [T], with: &[T], width: usize, positions: &[Option<usize>]) -> Option<()> {
    for (i, position) in positions.iter().enumerate() {
        if let Some(p) = position {
            values.get_mut(i * width..(i + 1) * width)?.copy_from_slice(with.get(p * width..(p + 1) * width)?);
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Point;

    const IDS: Place = Place::trunk(1, Point::ExpertIds);

    fn replace(width: usize, positions: Vec<Option<usize>>, values: &mut [i32]) -> (Then, Vec<Captured>) {
        let given = Values::I32((0..3 * 2).collect());
        let given = Captured { place: IDS, rows: 3, shape: vec![2], values: given };
        let with = Arc::new(HashMap::from([(IDS, given)]));
        let mut probe = Replace::new(with, positions, Arc::new(|place| place == IDS));
        assert!(probe.wants(IDS) && !probe.wants(Place::EMBED));
        let rows = values.len() / width;
        let values = Data::Indices(values);
        (probe.visit(Visit { place: IDS, rows, shape: &[width], values }), probe.take())
    }

    #[test]
    fn rows_take_the_values_of_their_positions_and_the_own_ones_are_captured() {
        let mut values = [9, 9, 8, 8];
        let (then, captured) = replace(2, vec![Some(2), None], &mut values);
        assert_eq!((then, values), (Then::Replaced, [4, 5, 8, 8]));
        assert_eq!(captured[0].values, Values::I32(vec![9, 9, 8, 8]));
    }

    #[test]
    fn what_does_not_fit_ends_the_step() {
        assert_eq!(replace(2, vec![Some(3)], &mut [9, 9]).0, Then::Stop, "no such position");
        assert_eq!(replace(2, vec![Some(0)], &mut [9, 9, 9, 9]).0, Then::Stop, "rows that nobody named");
        assert_eq!(replace(4, vec![Some(2)], &mut [9, 9, 9, 9]).0, Then::Stop, "another width");
    }
}
