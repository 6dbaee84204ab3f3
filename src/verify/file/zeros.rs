//! Runs of zeros: what a file holds whose data was never written, in part or at all. Nothing is NaN then, every shape
//! fits, and the model talks nonsense.
//!
//! What is legal decides the limits. Training leaves no weight at zero, but what was made from codes of few bits has zeros
//! strewn all over it: so values are looked at 32 at a time, which no such matrix has all zero. A run counts from 512
//! bytes on, the least that storage loses, or from 512 values, which is less in a packed format. What does hold zeros in
//! sound files: a bias; a whole row, where a unit died; rows of the vocabulary that stand for no token; tensors that
//! nothing uses. So a single row that is zero from its first to its last value passes, as do the vocabulary's rows without
//! a token. Zeros in many short runs are judged by their share (`shares`).

use std::ops::Range;

use rayon::prelude::*;

use crate::model::Kind;
use crate::quant::{QuantType, zero_units};

/// A run as long as this is no coincidence in a matrix: one sector of a disk.
const LEAST: usize = 512;
/// So many values are none either, however few bytes hold them.
const LEAST_VALUES: usize = 512;
/// The same in a vector, whose values are few and large: 16 in f32, 32 in bf16.
const LEAST_IN_VECTOR: usize = 64;
/// Values that are looked at together in a matrix, and in a vector.
const UNIT: (usize, usize) = (32, 8);
/// Bytes that one thread looks at before it takes the next.
const PIECE: usize = 1 << 20;

/// What a tensor is, as far as its zeros are concerned.
#[derive(Clone, Copy)]
pub(super) enum Holds<'a> {
    /// Values that may all be zero, or that nothing uses.
    Anything,
    /// One row of weights.
    Vector,
    /// Rows of so many bytes.
    Rows(usize),
    /// Rows of so many bytes, one a token; the other says which of them stand for none.
    Vocabulary(usize, &'a (dyn Fn(usize) -> bool + Sync)),
}

impl Holds<'_> {
    /// Bytes of a row, where zeros mean anything, of a tensor of `all` bytes.
    pub(super) fn row(self, all: usize) -> Option<usize> {
        match self {
            Holds::Anything => None,
            Holds::Vector => Some(all),
            Holds::Rows(row) | Holds::Vocabulary(row, _) => Some(row),
        }
    }

    /// Whether a row may be zero whatever its neighbours are.
    pub(super) fn is_unused(self, row: usize) -> bool {
        matches!(self, Holds::Vocabulary(_, unused) if unused(row))
    }

    /// Bytes of the values that are looked at together.
    pub(super) fn unit(self, ty: QuantType, row: usize) -> usize {
        let (info, vector) = (ty.info(), matches!(self, Holds::Vector));
        let values = if vector { UNIT.1 } else { UNIT.0 };
        (values.div_ceil(info.block) * info.bytes).min(row)
    }
}

/// Whether zeros of this parameter are legal throughout.
pub(super) fn may_be_zero(kind: Kind) -> bool {
    matches!(kind, Kind::RouterBias | Kind::IndexKNormBias)
}

/// Where whole units of a tensor are zero: ranges of bytes, joined where they touch.
pub(super) fn units(ty: QuantType, bytes: &[u8], holds: Holds<'_>) -> Vec<Range<usize>> {
    let Some(row) = holds.row(bytes.len()).filter(|row| *row > 0) else { return Vec::new() };
    let unit = holds.unit(ty, row);
    let piece = row * (PIECE / row).max(1);
    let ranges = |(i, piece_bytes): (usize, &[u8])| -> Vec<Range<usize>> {
        let mut joined = Vec::new();
        for (r, values) in piece_bytes.chunks(row).enumerate() {
            // Rows were checked against the block size when the file was opened.
            for k in zero_units(ty, values, unit).unwrap_or_default() {
                let start = i * piece + r * row + k * unit;
                join(&mut joined, start..start + unit);
            }
        }
        joined
    };
    let found: Vec<Vec<Range<usize>>> = bytes.par_chunks(piece).enumerate().map(ranges).collect();
    let mut joined = Vec::new();
    found.into_iter().flatten().for_each(|range| join(&mut joined, range));
    joined
}

fn join(list: &mut Vec<Range<usize>>, range: Range<usize>) {
    match list.last_mut() {
        Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
        _ => list.push(range),
    }
}

/// The maximal runs of zeros that no sound file holds, given where units are zero.
pub(super) fn runs(ty: QuantType, bytes: &[u8], holds: Holds<'_>, units: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for unit in units {
        if runs.last().is_some_and(|last| last.end >= unit.end) {
            continue;
        }
        // What comes before and behind, up to the first byte that is not zero.
        let start = unit.start - bytes[..unit.start].iter().rev().take_while(|b| **b == 0).count();
        let end = unit.end + bytes[unit.end..].iter().take_while(|b| **b == 0).count();
        join(&mut runs, start..end);
    }
    let info = ty.info();
    let values = |run: &Range<usize>| run.len() / info.bytes * info.block;
    let is_long = |run: &Range<usize>| match holds {
        Holds::Vector => run.len() >= LEAST_IN_VECTOR,
        _ => run.len() >= LEAST || values(run) >= LEAST_VALUES,
    };
    runs.retain(|run| run.len() == bytes.len() || (is_long(run) && !legal(run, holds)));
    runs
}

/// Whether a run is a row, or rows, that may be zero.
fn legal(run: &Range<usize>, holds: Holds<'_>) -> bool {
    let (Holds::Rows(row) | Holds::Vocabulary(row, _)) = holds else { return false };
    // Zeros at the edges may be the neighbours' own first or last values.
    let mut rows = run.start.div_ceil(row)..run.end / row;
    let edges = run.len() - rows.len() * row;
    edges < LEAST.min(row) && (rows.len() == 1 || (!rows.is_empty() && rows.all(|r| holds.is_unused(r))))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of 1000 bytes, all ones but for these ranges.
    fn matrix(zero: impl IntoIterator<Item = Range<usize>>) -> Vec<u8> {
        let mut bytes = vec![1; 3_000_000];
        zero.into_iter().for_each(|range| bytes[range].fill(0));
        bytes
    }

    fn of(ty: QuantType, bytes: &[u8], holds: Holds<'_>) -> Vec<Range<usize>> {
        runs(ty, bytes, holds, &units(ty, bytes, holds))
    }

    /// The run that must be the only one.
    fn only(bytes: &[u8], holds: Holds<'_>) -> (usize, usize) {
        let found = of(QuantType::F32, bytes, holds);
        assert_eq!(found.len(), 1, "{found:?}");
        (found[0].start, found[0].end)
    }

    #[test]
    fn runs_are_found_to_the_byte_wherever_they_lie() {
        let inside = [5_100..5_612, 777_001..778_500, PIECE - 1_300..PIECE + 1_450, 2_990_500..3_000_000];
        assert_eq!(of(QuantType::F32, &matrix(inside.clone()), Holds::Rows(1000)), inside);
        assert_eq!(only(&vec![0; 3_000_000], Holds::Rows(1000)), (0, 3_000_000));
        assert_eq!(only(&[0; 8], Holds::Vector), (0, 8));
        let mut vector = vec![1; 1024];
        vector[100..164].fill(0);
        assert_eq!(only(&vector, Holds::Vector), (100, 164));
    }

    #[test]
    fn values_count_where_bytes_are_few() {
        // Rows of one block of 256 values.
        let mut rows = vec![0x35; 144 * 64];
        rows[144 * 7..144 * 9].fill(0);
        let found = of(QuantType::Q4_K, &rows, Holds::Rows(144));
        assert!(found.len() == 1 && found[0] == (144 * 7..144 * 9), "{found:?}");
        rows[144 * 8..144 * 9].fill(0x35);
        assert!(of(QuantType::Q4_K, &rows, Holds::Rows(144)).is_empty());
    }

    #[test]
    fn what_sound_files_hold_passes() {
        // Short ones, and single rows with a zero or two of their neighbours.
        let legal = [100..611, 5_000..6_000, 7_000..8_002, 1_999_990..2_001_000];
        assert!(of(QuantType::F32, &matrix(legal), Holds::Rows(1000)).is_empty());
        assert!(of(QuantType::F32, &[0; 3_000], Holds::Anything).is_empty());
        let padding = |row: usize| row >= 2_900;
        let tail = matrix(std::iter::once(2_900_000..3_000_000));
        assert!(of(QuantType::F32, &tail, Holds::Vocabulary(1000, &padding)).is_empty());
        assert_eq!(of(QuantType::F32, &tail, Holds::Rows(1000)).len(), 1);
        let more = matrix(std::iter::once(2_898_000..3_000_000));
        assert_eq!(of(QuantType::F32, &more, Holds::Vocabulary(1000, &padding)).len(), 1);
    }
}
