//! Zeros strewn over a matrix, too few for a share: pieces of it that were lost one by one.
//!
//! A unit of values that is zero from its first to its last, between neighbours in its row that have values, is nothing that
//! training leaves: a unit that died takes a whole row or column; in a part that died, the neighbours are next to zero as
//! well; codes of few bits, and weights that were pruned, have zeros in the neighbours, too. So few such units are enough.
//! Kin decide all the same: where most layers have them in a parameter, they were put there on purpose.

use std::collections::BTreeMap;
use std::ops::Range;

use super::zeros::Holds;
use crate::checkpoint::View;
use crate::model::Kind;
use crate::quant::{QuantType, dequantise};
use crate::report::Check;

/// So many units in the same parameter of a layer are damage.
const LEAST: usize = 8;
/// Their share is so many times that of the median of the other layers.
const TIMES: f64 = 16.0;
/// Fewer other layers have no median.
const LEAST_KIN: usize = 2;
/// A column that is zero in one of so many rows died.
const OF_COLUMN: usize = 4;
/// What a neighbour must have: values of this size, far above the least that any type can hold, and few zeros.
const LEAST_SIZE: f64 = 1e-4;
const MOST_ZEROS: usize = 2;
/// Fewer rows are too few to know a column.
const LEAST_ROWS: usize = 16;

/// What was found in a tensor that fills a parameter.
pub(super) struct Strewn {
    /// The tensor.
    pub name: String,
    /// What it is, and of which block.
    pub kind: Kind,
    pub layer: Option<usize>,
    /// Units that lie alone among values.
    pub zero: Vec<Range<usize>>,
    /// All units.
    pub all: usize,
}

/// Units of a tensor that are zero, alone among values, given where units are zero; and how many units there are.
pub(super) fn of(
    ty: QuantType,
    view: &View<'_>,
    holds: Holds<'_>,
    units: &[Range<usize>],
) -> (Vec<Range<usize>>, usize) {
    let Holds::Rows(row) = holds else { return (Vec::new(), 0) };
    let unit = holds.unit(ty, row);
    let stack = view.ne.get(2).map_or(1, |n| *n as usize).max(1);
    let rows = view.bytes.len() / row.max(1) / stack;
    let per_row = row / unit.max(1);
    if units.is_empty() || per_row < 2 || rows < LEAST_ROWS {
        return (Vec::new(), rows * stack * per_row);
    }
    // Runs within rows, as numbers of units from the tensor's first.
    let number = |byte: usize| byte / row * per_row + byte % row / unit;
    let mut runs: Vec<Range<usize>> = Vec::new();
    for range in units {
        let (mut at, end) = (number(range.start), number(range.end));
        while at < end {
            let stop = end.min((at / per_row + 1) * per_row);
            runs.push(at..stop);
            at = stop;
        }
    }
    let mut of_column: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    let column = |u: usize| (u / per_row / rows, u % per_row);
    runs.iter().flat_map(Clone::clone).for_each(|u| *of_column.entry(column(u)).or_default() += 1);
    let died = |u: usize| of_column.get(&column(u)).is_some_and(|n| n * OF_COLUMN >= rows);
    let bytes = |u: usize| u / per_row * row + u % per_row * unit..u / per_row * row + u % per_row * unit + unit;
    let mut values = vec![0.0; unit / ty.info().bytes * ty.info().block];
    let mut lives = |u: usize| dequantise(ty, &view.bytes[bytes(u)], &mut values).is_ok() && lives(&values);
    let alone = |run: &&Range<usize>| {
        let first = run.start.is_multiple_of(per_row);
        let last = run.end.is_multiple_of(per_row);
        !(first && last) && (first || lives(run.start - 1)) && (last || lives(run.end)) && !Range::clone(run).any(died)
    };
    let found: Vec<Range<usize>> = runs.iter().filter(alone).flat_map(Clone::clone).map(bytes).collect();
    (found, rows * stack * per_row)
}

/// Whether values are a part of a matrix that learned something.
fn lives(values: &[f32]) -> bool {
    let zeros = values.iter().filter(|v| **v == 0.0).count();
    let sum: f64 = values.iter().map(|v| f64::from(*v).powi(2)).sum();
    zeros * MOST_ZEROS <= values.len() && (sum / values.len() as f64).sqrt() >= LEAST_SIZE
}

/// A check for each parameter of a layer with more than its kin have, but for tensors of which something is known already.
pub(super) fn checks(
    all: &[Strewn],
    is_bad: impl Fn(&str) -> bool,
    range: impl Fn(&str, &Range<usize>) -> String,
) -> Vec<Check> {
    let mut layers: BTreeMap<(Kind, Option<usize>), Vec<&Strewn>> = BTreeMap::new();
    all.iter().for_each(|s| layers.entry((s.kind, s.layer)).or_default().push(s));
    let count = |list: &[&Strewn]| list.iter().map(|s| s.zero.len()).sum::<usize>();
    let share = |list: &[&Strewn]| count(list) as f64 / list.iter().map(|s| s.all).sum::<usize>().max(1) as f64;
    let mut checks = Vec::new();
    for ((kind, layer), list) in &layers {
        let mut kin: Vec<f64> =
            layers.iter().filter(|((k, l), _)| k == kind && l != layer).map(|(_, list)| share(list)).collect();
        kin.sort_unstable_by(f64::total_cmp);
        let Some(median) = kin.get(kin.len() / 2).filter(|_| kin.len() >= LEAST_KIN) else { continue };
        let hit: Vec<&&Strewn> = list.iter().filter(|s| !s.zero.is_empty()).collect();
        let Some(first) = hit.first().filter(|_| count(list) >= LEAST && share(list) > TIMES * median) else {
            continue;
        };
        if hit.iter().any(|s| is_bad(&s.name)) {
            continue;
        }
        let of = if hit.len() > 1 { format!(" of {} tensors", hit.len()) } else { String::new() };
        let detail = format!(
            "ZEROS_STREWN: {} pieces{of} are zero among values ({:.3} %, the median of the other layers is {:.3} %), the \
             first is {}. No training leaves that: these were never written, or lost; fetch or convert it again",
            count(list),
            100.0 * share(list),
            100.0 * median,
            range(&first.name, &first.zero[0])
        );
        checks.push(Check::exact(&first.name, false, detail));
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify::file::zeros;

    /// 64 rows of 256 values in f32, of this size, zero where `zero` says so: units that lie alone.
    fn alone(size: f32, zero: impl Fn(usize, usize) -> bool) -> usize {
        let value = |i: usize| if zero(i / 256, i % 256) { 0.0f32 } else { size };
        let bytes: Vec<u8> = (0..64 * 256).flat_map(|i| value(i).to_le_bytes()).collect();
        let view = View { ty: QuantType::F32.info(), ne: vec![256, 64], bytes: bytes.into() };
        let holds = Holds::Rows(1024);
        of(QuantType::F32, &view, holds, &zeros::units(QuantType::F32, &view.bytes, holds)).0.len()
    }

    #[test]
    fn pieces_among_values_are_counted_and_what_died_is_not() {
        assert_eq!(alone(0.1, |r, c| c / 32 == r * 5 % 8 && r % 4 == 0), 16);
        assert_eq!(alone(0.1, |r, c| r == 7 && (64..128).contains(&c)), 2, "two beside each other");
        assert_eq!(alone(0.1, |r, _| r % 20 == 0), 0, "rows");
        assert_eq!(alone(0.1, |_, c| c / 32 == 3), 0, "columns");
        assert_eq!(alone(1e-6, |r, c| c / 32 == r % 8), 0, "a part that died");
        assert_eq!(alone(0.1, |r, c| c / 32 == r % 8 || (r * 7 + c * 11) % 4 != 0), 0, "pruned");
    }
}
