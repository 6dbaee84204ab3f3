//! Copies of a replicated value in a dump, at every row. Only some rows are judged against the reference, and a damaged copy
//! of another row would pass; but ranks that read the same bits must give the same bits, whatever the recipe is. Our own runs are
//! compared so by stage `invariants`.

use super::op::OpFinding;
use super::replay::Judge;
use crate::model::{Layout, Place};
use crate::probe::{Captured, Trace};
use crate::report::{Verdict, table};

/// The finding of an operation, or, where that says nothing against it, the first row at which ranks' copies differ although
/// nothing differs that the row is made from.
pub(super) fn judged(judge: &Judge<'_>, trace: &Trace, finding: OpFinding) -> OpFinding {
    let place = finding.place;
    let sound = matches!(finding.verdict, Verdict::Match | Verdict::Drift);
    let Some(odd) = Some(sound && place.point.layout() == Layout::Replicated)
        .filter(|applies| *applies)
        .and_then(|_| odd(judge, trace, place))
    else {
        return finding;
    };
    let Odd { ranks, than, row, column, here, there, known } = odd;
    let who = match ranks.as_slice() {
        _ if !known && trace.tp > 2 => "; neither has more ranks on its side".into(),
        [_] if known => format!("; it is the odd one of {}", trace.tp),
        all if known => format!("; ranks {} of {} are the odd ones", table::ranges(all), trace.tp),
        _ => String::new(),
    };
    let detail = format!(
        "COPIES: rank {}'s copy differs from rank {than}'s at token {row}, value {column}: {here} there, {there} on rank \
         {than}, and both were made from the same{who}; {}",
        ranks[0], finding.detail
    );
    OpFinding { verdict: Verdict::Divergent, ranks, tokens: vec![row], detail, ..finding }
}

/// Where copies differ: those of the fewer ranks from that of one of the others. Where neither side has more, from rank 0's.
struct Odd {
    ranks: Vec<usize>,
    than: usize,
    row: usize,
    column: usize,
    here: f64,
    there: f64,
    /// More ranks hold the other copy.
    known: bool,
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
        let value = |rank: usize| copies[rank].values.at(row * first.row_len() + column);
        let alike = |a: usize, b: usize| differs(copies[a], copies[b], row + 1).is_none();
        let side = |a: usize| (0..copies.len()).filter(|b| alike(a, *b)).count();
        let most = (0..copies.len()).find(|a| 2 * side(*a) > copies.len());
        let (ranks, than) = match most {
            Some(than) => ((0..copies.len()).filter(|r| !alike(than, *r)).collect(), than),
            None => (vec![rank], 0),
        };
        let here = value(*ranks.first()?);
        return Some(Odd { ranks, than, row, column, here, there: value(than), known: most.is_some() });
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
