//! Zeros in many short runs, by their share of a matrix: every second row, a rank's part of the columns of every row, one
//! column in two.
//!
//! The sound files that this was measured on hold none: a quarter of all values may be zero, where they were made from codes
//! of few bits, but strewn. Single rows of units that died are known, one in hundreds. A sixteenth of the rows, or of the
//! values 32 at a time, is what one rank of sixteen holds: such a part was lost. Single columns are zero where the unit
//! before died, and codes of few bits make a column of zeros out of one that is small beside its neighbours: so an eighth
//! of the columns must be, and fewer are legal. Of a vector's values, which are never codes, a quarter.

use std::ops::Range;

use super::zeros::Holds;
use crate::checkpoint::View;
use crate::quant::{QuantType, dequantise};

/// One in so many rows, or units of 32 values, may be zero; a single one always may.
const FEW: usize = 16;
/// The same of single columns, from the first to the last row of a matrix.
const FEW_COLUMNS: usize = 8;
/// The same of the values of a vector.
const FEW_VALUES: usize = 4;
/// Fewer rows do not make a column: zeros may meet by chance.
const LEAST_ROWS: usize = 16;
/// Rows that are looked at before a whole matrix is.
const SAMPLE: usize = 32;

/// More zeros than a sound tensor holds.
pub(super) struct Share {
    /// How many, of how many, and where.
    pub what: String,
    /// The bytes of the first of them.
    pub first: Range<usize>,
}

/// The first matrix of a tensor with too many zeros, given where units are zero.
pub(super) fn of(ty: QuantType, view: &View<'_>, holds: Holds<'_>, units: &[Range<usize>]) -> Option<Share> {
    let row = holds.row(view.bytes.len()).filter(|row| *row > 0)?;
    if matches!(holds, Holds::Vector) {
        return vector(ty, &view.bytes);
    }
    let stack = view.ne.get(2).map_or(1, |n| *n as usize).max(1);
    let matrix = Matrix { ty, row, unit: holds.unit(ty, row), rows: view.bytes.len() / row / stack };
    let mut found = Vec::new();
    let mut from = 0;
    for m in 0..stack {
        let end = (m + 1) * matrix.rows * row;
        let until = from + units[from..].iter().take_while(|u| u.start < end).count();
        // A range may reach into the next matrix.
        let back = units[..from].last().filter(|u| u.end > m * matrix.rows * row).map_or(0, |_| 1);
        let share = matrix.share(m, &units[from - back..until], holds);
        found.extend(share.or_else(|| matrix.columns(m, &view.bytes)).map(|share| (m, share)));
        from = until;
    }
    let count = found.len();
    let (m, share) = found.into_iter().next()?;
    let of = if stack > 1 { format!("in matrix {m} of {stack} (and {} more) ", count - 1) } else { String::new() };
    Some(Share { what: format!("ZERO_SHARE: {of}{}", share.what), ..share })
}

struct Matrix {
    ty: QuantType,
    /// Bytes of a row.
    row: usize,
    /// Bytes of what was looked at together.
    unit: usize,
    rows: usize,
}

impl Matrix {
    fn share(&self, m: usize, ranges: &[Range<usize>], holds: Holds<'_>) -> Option<Share> {
        let Self { ty, row, unit, rows } = *self;
        let per_row = row / unit;
        let (mut whole, mut parts) = (Vec::new(), Vec::new());
        for r in ranges.iter().flat_map(|u| (u.start / row..u.end.div_ceil(row)).map(move |r| (u, r))) {
            let (range, r) = r;
            let part = range.start.max(r * row)..range.end.min((r + 1) * row);
            match part.len() / unit {
                _ if r / rows != m || holds.is_unused(r) => {}
                n if n == per_row => whole.push(part),
                _ => parts.push(part),
            }
        }
        let percent = |n: usize, all: usize| format!("{n} of {all} ({:.1} %)", 100.0 * n as f64 / all as f64);
        let too_many = |n: usize, all: usize| n >= 2 && n * FEW >= all;
        if too_many(whole.len(), rows) {
            let first = whole.swap_remove(0);
            let what = format!(
                "{} rows are zero, the first is row {}",
                percent(whole.len() + 1, rows),
                first.start / row % rows
            );
            return Some(Share { what, first });
        }
        let zero: usize = parts.iter().map(|p| p.len() / unit).sum();
        if !too_many(zero, rows * per_row) {
            return None;
        }
        let values = unit / ty.info().bytes * ty.info().block;
        let column = |byte: usize| byte / unit * values;
        let start = parts.iter().map(|p| column(p.start % row)).min()?;
        let end = parts.iter().map(|p| column(p.start % row + p.len())).max()?;
        let mut of_rows: Vec<usize> = parts.iter().map(|p| p.start / row).collect();
        of_rows.dedup();
        let what = format!(
            "{} runs of {values} values are zero, in {} rows, within columns {start}..{end}",
            percent(zero, rows * per_row),
            of_rows.len()
        );
        Some(Share { what, first: parts.swap_remove(0) })
    }

    /// Columns that are zero in every row: first in some rows, then, where these are too many, in all.
    fn columns(&self, m: usize, bytes: &[u8]) -> Option<Share> {
        let Self { ty, row, rows, .. } = *self;
        if rows < LEAST_ROWS {
            return None;
        }
        let mut values = vec![0.0; row / ty.info().bytes * ty.info().block];
        let mut zero = vec![true; values.len()];
        let all = values.len();
        let start = m * rows * row;
        for step in [(rows / SAMPLE).max(1), 1] {
            for r in (0..rows).step_by(step) {
                dequantise(ty, &bytes[start + r * row..][..row], &mut values).ok()?;
                zero.iter_mut().zip(&values).for_each(|(zero, v)| *zero &= *v == 0.0);
            }
            let count = zero.iter().filter(|z| **z).count();
            if count < 2 || count * FEW_COLUMNS < all {
                return None;
            }
        }
        let (first, count) = (zero.iter().position(|z| *z)?, zero.iter().filter(|z| **z).count());
        let percent = 100.0 * count as f64 / all as f64;
        let what =
            format!("{count} of {all} ({percent:.1} %) columns are zero in every row, the first is column {first}");
        let block = start + first / ty.info().block * ty.info().bytes;
        Some(Share { what, first: block..block + ty.info().bytes })
    }
}

fn vector(ty: QuantType, bytes: &[u8]) -> Option<Share> {
    let info = ty.info();
    let mut values = vec![0.0; bytes.len() / info.bytes * info.block];
    dequantise(ty, bytes, &mut values).ok()?;
    let count = values.iter().filter(|v| **v == 0.0).count();
    if count < 2 || count * FEW_VALUES < values.len() {
        return None;
    }
    let first = values.iter().position(|v| *v == 0.0)?;
    let percent = 100.0 * count as f64 / values.len() as f64;
    let what =
        format!("ZERO_SHARE: {count} of {} ({percent:.1} %) values are zero, the first is value {first}", values.len());
    let block = first / info.block * info.bytes;
    Some(Share { what, first: block..block + info.bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::borrow::Cow;

    use crate::verify::file::zeros;

    /// 64 rows of 64 values in f32 in each of two matrices, zero where `zero` says so.
    fn found(zero: impl Fn(usize, usize, usize) -> bool) -> Option<String> {
        let value = |i: usize| if zero(i / 4096, i / 64 % 64, i % 64) { 0.0f32 } else { 1.0 };
        let bytes: Vec<u8> = (0..8192).flat_map(|i| value(i).to_le_bytes()).collect();
        let view = View { ty: QuantType::F32.info(), ne: vec![64, 64, 2], bytes: Cow::Owned(bytes) };
        let holds = Holds::Rows(256);
        let units = zeros::units(QuantType::F32, &view.bytes, holds);
        of(QuantType::F32, &view, holds, &units).map(|s| s.what)
    }

    #[test]
    fn rows_runs_and_columns_are_counted() {
        let says =
            |found: Option<String>, says: &str| assert!(found.as_ref().is_some_and(|f| f.contains(says)), "{found:?}");
        says(
            found(|m, r, _| m == 1 && r % 2 == 1),
            "in matrix 1 of 2 (and 0 more) 32 of 64 (50.0 %) rows are zero, the first is row 1",
        );
        says(found(|_, r, _| r % 16 == 0), "in matrix 0 of 2 (and 1 more) 4 of 64");
        says(
            found(|m, _, c| m == 0 && c >= 32),
            "64 of 128 (50.0 %) runs of 32 values are zero, in 64 rows, within columns 32..64",
        );
        says(found(|m, r, c| m == 0 && r < 8 && c < 32), "8 of 128 (6.2 %) runs of 32 values are zero, in 8 rows");
        says(found(|_, _, c| c % 8 == 3), "8 of 64 (12.5 %) columns are zero in every row, the first is column 3");
    }

    #[test]
    fn few_are_legal() {
        assert_eq!(found(|_, _, _| false), None);
        assert_eq!(found(|_, r, _| r % 32 == 5 && r < 37), None);
        assert_eq!(found(|_, r, c| r < 7 && c < 32), None);
        assert_eq!(found(|_, _, c| c == 3), None);
        // As codes of few bits leave them: a third of all values, strewn.
        assert_eq!(found(|_, r, c| (r * 7 + c * 11) % 3 == 0), None);
    }
}
