//! Copies of a replicated value in a dump, at every row. Only some rows are judged against the reference, and a damaged copy
//! of another row would pass; but ranks that read the same bits must give the same bits, whatever the recipe is. Our own runs are
//! compared so by stage `invariants`.

use super::op::OpFinding;
use super::replay::Judge;
use crate::model::{Layout, Place};
use crate::probe::{Captured, Trace};
use crate::report::Verdict;

/// The finding of an operation, or, where that says nothing against it, the first row at which a rank's copy differs from
/// rank 0's although nothing differs that the row is made from.
pub(super) fn judged(judge: &Judge<'_>, trace: &Trace, finding: OpFinding) -> OpFinding {
    let place = finding.place;
    let sound = matches!(finding.verdict, Verdict::Match | Verdict::Drift);
    let Some(odd) = Some(sound && place.point.layout() == Layout::Replicated)
        .filter(|applies| *applies)
        .and_then(|_| odd(judge, trace, place))
    else {
        return finding;
    };
    let Odd { rank, row, column, here, there } = odd;
    let detail = format!(
        "COPIES: rank {rank}'s copy differs from rank 0's at token {row}, value {column}: {here} there, {there} on rank 0, \
         and both were made from the same; {}",
        finding.detail
    );
    OpFinding { verdict: Verdict::Divergent, ranks: vec![rank], tokens: vec![row], detail, ..finding }
}

/// Where a copy differs.
struct Odd {
    rank: usize,
    row: usize,
    column: usize,
    here: f64,
    there: f64,
}

fn odd(judge: &Judge<'_>, trace: &Trace, place: Place) -> Option<Odd> {
    let copies = trace.ranks(place)?;
    let mut read = Vec::new();
    for input in judge.inputs(place)? {
        // A choice is judged by what its scores are made from, so that these need not be there.
        match trace.ranks(input) {
            None => read.extend(judge.inputs(input)?),
            Some(_) => read.push(input),
        }
    }
    // What is summed over ranks, or gathered, all ranks read alike.
    let read = read.into_iter().filter(|input| input.point.layout() == Layout::Replicated);
    let read: Vec<Vec<&Captured>> = read.map(|input| trace.ranks(input)).collect::<Option<_>>()?;
    let first = copies.first()?;
    for (rank, copy) in copies.iter().enumerate().skip(1) {
        let Some((row, column)) = differs(first, copy, first.rows.min(copy.rows)) else { continue };
        // A row is made from rows up to its own.
        if read.iter().any(|ranks| differs(ranks[0], ranks[rank], row + 1).is_some()) {
            continue;
        }
        let value = |c: &Captured| c.values.at(row * c.row_len() + column);
        return Some(Odd { rank, row, column, here: value(copy), there: value(first) });
    }
    None
}

/// The first value, as row and column, in which two copies differ within so many rows.
fn differs(a: &Captured, b: &Captured, rows: usize) -> Option<(usize, usize)> {
    let width = a.row_len().max(1);
    let range = 0..(rows * width).min(a.values.len()).min(b.values.len());
    // Copies of another shape, or of another kind of values, are refused where the dump is read.
    let at = a.values.differs(&b.values, range).ok()??;
    (a.row_len() == b.row_len()).then_some((at / width, at % width))
}
