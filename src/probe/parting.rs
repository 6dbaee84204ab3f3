//! Where two runs part: the first place, rank and row that do not hold the same bits.

use std::ops::Range;

use super::capture::Unlike;
use super::trace::Trace;
use crate::model::Place;

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

impl Trace {
    /// The first place, in the order of the forward pass, where two runs differ in these rows. Nothing is passed over:
    /// a place that any rank of either run holds must be held by every rank of both, with one row per token.
    pub fn parts_from(&self, other: &Trace, rows: Range<usize>) -> Option<Parting> {
        let mut places = self.held();
        places.extend(other.held());
        let ranks = self.tp.max(other.tp);
        places.into_iter().flat_map(|place| (0..ranks).map(move |rank| (place, rank))).find_map(|(place, rank)| {
            let part = |row, what| Some(Parting { place, rank, row, what });
            let (a, b) = (self.held.get(rank), other.held.get(rank));
            let (Some(a), Some(b)) = (a.and_then(|r| r.get(&place)), b.and_then(|r| r.get(&place))) else {
                return part(rows.start, Difference::Missing);
            };
            for (held, expected) in [(a, self.ids.len()), (b, other.ids.len())] {
                let whole = held.values.len() == held.rows * held.row_len();
                if held.rows != expected || expected < rows.end || !whole {
                    return part(held.rows.min(expected), Difference::Rows);
                }
            }
            if a.row_len() != b.row_len() {
                return part(rows.start, Difference::Shape);
            }
            let width = a.row_len();
            match a.values.differs(&b.values, rows.start * width..rows.end * width) {
                Ok(at) => at.and_then(|at| part(rows.start + at / width.max(1), Difference::Bits)),
                Err(Unlike) => part(rows.start, Difference::Shape),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Attention, Point};
    use crate::probe::{Captured, Values};

    fn captured(point: Point, values: &[i32]) -> Captured {
        Captured::of_test(point, &[1], Values::I32(values.to_vec()))
    }

    /// Two ranks with two places of three rows.
    fn run() -> Trace {
        let rank = [Point::QA, Point::KvA].map(|point| captured(point, &[1, 2, 3])).to_vec();
        Trace::new("a run".into(), vec![0; 3], Attention::Dsa, vec![rank; 2])
    }

    #[test]
    fn what_only_one_run_holds_is_a_parting() {
        let (whole, at) = (run(), Place::trunk(0, Point::KvA));
        assert_eq!(whole.parts_from(&run(), 0..3), None);
        let part = |row, what| Some(Parting { place: at, rank: 1, row, what });
        let mut other = run();
        other.held[1].remove(&at);
        assert_eq!(whole.parts_from(&other, 0..3), part(0, Difference::Missing));
        assert_eq!(other.parts_from(&whole, 0..3), part(0, Difference::Missing));
        assert_eq!(other.parts_from(&other, 0..3), part(0, Difference::Missing), "rank 0 holds it");
        other.held.truncate(1);
        other.tp = 1;
        let first = Parting { place: Place::trunk(0, Point::QA), rank: 1, row: 0, what: Difference::Missing };
        assert_eq!(other.parts_from(&whole, 0..3), Some(first));
        for (rows, row) in [(&[1, 2][..], 2), (&[1, 2, 3, 4], 3), (&[], 0)] {
            let mut other = run();
            other.held[1].insert(at, captured(Point::KvA, rows));
            assert_eq!(whole.parts_from(&other, 0..3), part(row, Difference::Rows), "{rows:?}");
            assert_eq!(other.parts_from(&whole, 0..3), part(row, Difference::Rows), "{rows:?}");
            assert_eq!(other.parts_from(&other, 0..2), part(row, Difference::Rows), "{rows:?} on both sides");
        }
        assert!(whole.parts_from(&run(), 0..4).is_some(), "no run has a fourth row");
    }

    #[test]
    fn only_the_rows_asked_for_are_compared() {
        let (whole, at) = (run(), Place::trunk(0, Point::KvA));
        let mut other = run();
        other.held[1].insert(at, captured(Point::KvA, &[1, 2, 4]));
        assert_eq!(whole.parts_from(&other, 0..2), None);
        let parting = Parting { place: at, rank: 1, row: 2, what: Difference::Bits };
        assert_eq!(whole.parts_from(&other, 1..3), Some(parting));
        assert_eq!(whole.only(|p| p.point == Point::QA).held().len(), 1);
    }
}
