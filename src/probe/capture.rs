//! Capturing points: what one rank held, and all ranks' values put together again.

use std::ops::Range;
use std::sync::Arc;

use super::{Data, Probe, Then, Visit};
use crate::model::{Layout, Place};

/// Captured values of one point.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// f32 activations.
    F32(Vec<f32>),
    /// Chosen indices.
    I32(Vec<i32>),
}

impl Values {
    /// Number of values.
    pub fn len(&self) -> usize {
        match self {
            Values::F32(v) => v.len(),
            Values::I32(v) => v.len(),
        }
    }

    /// The values of a range.
    pub(crate) fn cut(&self, range: Range<usize>) -> Values {
        match self {
            Values::F32(v) => Values::F32(v[range].to_vec()),
            Values::I32(v) => Values::I32(v[range].to_vec()),
        }
    }

    /// The first value behind the start of a range that differs in its bits.
    pub(crate) fn differs(&self, other: &Values, range: Range<usize>) -> Result<Option<usize>, Unlike> {
        match (self, other) {
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
    pub(crate) fn same_bits(&self, other: &Values) -> bool {
        matches!(self.differs(other, 0..self.len().max(other.len())), Ok(None))
    }

    /// One value, widened.
    pub(crate) fn at(&self, i: usize) -> f64 {
        let found = match self {
            Values::F32(v) => v.get(i).map(|x| f64::from(*x)),
            Values::I32(v) => v.get(i).map(|x| f64::from(*x)),
        };
        found.unwrap_or(f64::NAN)
    }

    /// True without values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Values that cannot be compared: of two types, or without the range.
pub(crate) struct Unlike;

/// One rank's values at one point: `[rows][shape]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Captured {
    /// The place.
    pub place: Place,
    /// Tokens.
    pub rows: usize,
    /// Shape of one token's row on the rank, slowest axis first.
    pub shape: Vec<usize>,
    /// The values.
    pub values: Values,
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

#[cfg(test)]
impl Captured {
    /// Values of the first layer, as tests need them.
    pub(crate) fn of_test(point: crate::model::Point, shape: &[usize], values: Values) -> Self {
        let rows = values.len() / shape.iter().product::<usize>();
        Captured { place: Place::trunk(0, point), rows, shape: shape.to_vec(), values }
    }
}

/// Which places to capture.
pub type Filter = Arc<dyn Fn(Place) -> bool + Send + Sync>;

/// A listener that keeps what it sees.
pub struct Capture {
    filter: Filter,
    seen: Vec<Captured>,
}

impl Capture {
    /// Captures the points that `filter` accepts.
    pub fn new(filter: Filter) -> Self {
        Capture { filter, seen: Vec::new() }
    }

    /// Keeps the values if they are wanted.
    pub(super) fn see(&mut self, visit: &Visit<'_>) {
        if self.wants(visit.place) {
            let values = match &visit.values {
                Data::Values(v) => Values::F32(v.to_vec()),
                Data::Indices(v) => Values::I32(v.to_vec()),
            };
            self.seen.push(Captured { place: visit.place, rows: visit.rows, shape: visit.shape.to_vec(), values });
        }
    }
}

impl Probe for Capture {
    fn wants(&self, place: Place) -> bool {
        (self.filter)(place)
    }

    fn visit(&mut self, visit: Visit<'_>) -> Then {
        self.see(&visit);
        Then::Continue
    }

    fn take(&mut self) -> Vec<Captured> {
        std::mem::take(&mut self.seen)
    }
}

/// Ranks whose captures do not fit together.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum UnshardError {
    #[error("{point}: rank {rank} holds {found:?}, expected {expected:?} as rank 0")]
    Shape { point: String, rank: usize, expected: Vec<usize>, found: Vec<usize> },
    #[error("{point}: replicated, but rank {rank} differs from rank 0 at value {index}: {expected} and {found}")]
    Replicas { point: String, rank: usize, index: usize, expected: f64, found: f64 },
    #[error("{point}: not every rank holds it")]
    Empty { point: String },
}

/// Puts one point's captures of all ranks (in rank order) together: sharded axes joined, partial sums added in f64 and
/// rounded once, replicated copies compared bit by bit.
///
/// # Errors
/// Shapes that do not fit, and replicas that differ.
pub fn unshard(ranks: &[&Captured]) -> Result<Captured, UnshardError> {
    let Some(first) = ranks.first() else { return Err(UnshardError::Empty { point: "?".into() }) };
    let point = || first.place.to_string();
    for (rank, other) in ranks.iter().enumerate() {
        if other.shape != first.shape || other.rows != first.rows || other.values.len() != first.values.len() {
            let (expected, found) = (first.shape.clone(), other.shape.clone());
            return Err(UnshardError::Shape { point: point(), rank, expected, found });
        }
    }
    let mut whole = (*first).clone();
    match first.place.point.layout() {
        Layout::Replicated => {
            for (rank, other) in ranks.iter().enumerate().skip(1) {
                let differs = first.values.differs(&other.values, 0..first.values.len());
                if let Some(index) = differs.unwrap_or(Some(0)) {
                    let (expected, found) = (first.values.at(index), other.values.at(index));
                    return Err(UnshardError::Replicas { point: point(), rank, index, expected, found });
                }
            }
        }
        Layout::Partial => {
            if let Values::F32(sum) = &mut whole.values {
                for (i, s) in sum.iter_mut().enumerate() {
                    *s = ranks.iter().map(|r| r.values.at(i)).sum::<f64>() as f32;
                }
            }
        }
        Layout::Sharded { axis } => {
            let outer: usize = first.rows * first.shape[..axis].iter().product::<usize>();
            let chunk: usize = first.shape[axis..].iter().product();
            let parts = ranks.iter().map(|r| match &r.values {
                Values::F32(v) => Some(v.as_slice()),
                Values::I32(_) => None,
            });
            if let Some(parts) = parts.collect::<Option<Vec<_>>>() {
                let row = |o: usize| parts.iter().flat_map(move |part| &part[o * chunk..(o + 1) * chunk]);
                whole.values = Values::F32((0..outer).flat_map(row).copied().collect());
                whole.shape[axis] *= ranks.len();
            }
        }
    }
    Ok(whole)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Point;

    fn captured(point: Point, shape: &[usize], values: &[f32]) -> Captured {
        Captured::of_test(point, shape, Values::F32(values.to_vec()))
    }

    #[test]
    fn sharded_points_are_joined_along_their_axis() {
        let a = captured(Point::Latent, &[1, 2], &[1.0, 2.0, 5.0, 6.0]);
        let b = captured(Point::Latent, &[1, 2], &[3.0, 4.0, 7.0, 8.0]);
        let whole = unshard(&[&a, &b]).expect("they fit");
        assert_eq!(whole.shape, [2, 2]);
        assert_eq!(whole.values, Values::F32(vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]));
        let a = captured(Point::Hidden, &[2, 1], &[1.0, 3.0]);
        let b = captured(Point::Hidden, &[2, 1], &[2.0, 4.0]);
        assert_eq!(unshard(&[&a, &b]).expect("they fit").values, Values::F32(vec![1.0, 2.0, 3.0, 4.0]));
    }

    #[test]
    fn partial_sums_are_added_and_replicas_compared() {
        let a = captured(Point::Shared, &[2], &[1.0, 2.0]);
        assert_eq!(unshard(&[&a, &a]).expect("they fit").values, Values::F32(vec![2.0, 4.0]));
        let (a, b) = (captured(Point::QA, &[2], &[1.0, 0.0]), captured(Point::QA, &[2], &[1.0, -0.0]));
        assert!(matches!(unshard(&[&a, &b]), Err(UnshardError::Replicas { rank: 1, index: 1, .. })));
        assert!(unshard(&[&a, &a]).is_ok());
    }
}
