//! Runs of zero bytes: what a file holds whose data was never written, in part or at all. Nothing is NaN then, every shape
//! fits, and the model talks nonsense.
//!
//! What is legal decides the limits. Training leaves no weight at zero: a run of 512 bytes, the least that storage loses,
//! is 128 to 1024 weights in a row, and 64 bytes of a norm are 16 or 32 channels. What does hold zeros in sound files: a
//! bias; a whole row, where a unit died; rows of the vocabulary that stand for no token; tensors that nothing uses. So a
//! single row that is zero from its first to its last byte passes, as do the vocabulary's rows without a token.

use std::ops::Range;

use rayon::prelude::*;

use crate::model::Kind;

/// A run as long as this is no coincidence in a matrix: one sector of a disk.
const LEAST: usize = 512;
/// The same in a vector, whose values are few and large.
const LEAST_IN_VECTOR: usize = 64;
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

/// Whether zeros of this parameter are legal throughout.
pub(super) fn may_be_zero(kind: Kind) -> bool {
    matches!(kind, Kind::RouterBias | Kind::IndexKNormBias)
}

/// The maximal runs of zero bytes that no sound file holds.
pub(super) fn runs(bytes: &[u8], holds: Holds<'_>) -> Vec<Range<usize>> {
    let least = match holds {
        Holds::Anything => return Vec::new(),
        Holds::Vector => LEAST_IN_VECTOR,
        Holds::Rows(_) | Holds::Vocabulary(..) => LEAST,
    };
    // Every run of the least length covers one of these cells whole, so that only cells need be looked at.
    let size = least / 2;
    let cells = |(i, piece): (usize, &[u8])| -> Vec<usize> {
        let zero = |cell: &[u8]| cell.iter().fold(0, |all, b| all | b) == 0;
        piece.chunks(size).enumerate().filter(|(_, c)| zero(c)).map(|(k, _)| i * PIECE + k * size).collect()
    };
    let found: Vec<Vec<usize>> = bytes.par_chunks(PIECE).enumerate().map(cells).collect();
    let mut runs: Vec<Range<usize>> = Vec::new();
    for start in found.into_iter().flatten() {
        let end = (start + size).min(bytes.len());
        match runs.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => runs.push(start..end),
        }
    }
    for run in &mut runs {
        run.start -= bytes[..run.start].iter().rev().take_while(|b| **b == 0).count();
        run.end += bytes[run.end..].iter().take_while(|b| **b == 0).count();
    }
    runs.retain(|run| run.len() == bytes.len() || (run.len() >= least && !legal(run, holds)));
    runs
}

/// Whether a run is a row, or rows, that may be zero.
fn legal(run: &Range<usize>, holds: Holds<'_>) -> bool {
    let (Holds::Rows(row) | Holds::Vocabulary(row, _)) = holds else { return false };
    // Zeros at the edges may be the neighbours' own first or last values.
    let rows = run.start.div_ceil(row)..run.end / row;
    let edges = run.len() - rows.len() * row;
    let unused = |rows: Range<usize>| match holds {
        Holds::Vocabulary(_, unused) => rows.into_iter().all(unused),
        _ => false,
    };
    edges < LEAST.min(row) && (rows.len() == 1 || (!rows.is_empty() && unused(rows)))
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

    /// The run that must be the only one.
    fn only(bytes: &[u8], holds: Holds<'_>) -> (usize, usize) {
        let found = runs(bytes, holds);
        assert_eq!(found.len(), 1, "{found:?}");
        (found[0].start, found[0].end)
    }

    #[test]
    fn runs_are_found_to_the_byte_wherever_they_lie() {
        let inside = [5_100..5_612, 777_001..778_500, PIECE - 1_300..PIECE + 1_450, 2_990_500..3_000_000];
        assert_eq!(runs(&matrix(inside.clone()), Holds::Rows(1000)), inside);
        assert_eq!(only(&vec![0; 3_000_000], Holds::Rows(1000)), (0, 3_000_000));
        assert_eq!(only(&[0; 8], Holds::Vector), (0, 8));
        let mut vector = vec![1; 1024];
        vector[100..164].fill(0);
        assert_eq!(only(&vector, Holds::Vector), (100, 164));
    }

    #[test]
    fn what_sound_files_hold_passes() {
        // Short ones, and single rows with a zero or two of their neighbours.
        let legal = [100..611, 5_000..6_000, 7_000..8_002, 1_999_990..2_001_000];
        assert!(runs(&matrix(legal), Holds::Rows(1000)).is_empty());
        assert!(runs(&[0; 3_000], Holds::Anything).is_empty());
        let padding = |row: usize| row >= 2_900;
        let tail = matrix(std::iter::once(2_900_000..3_000_000));
        assert!(runs(&tail, Holds::Vocabulary(1000, &padding)).is_empty());
        assert_eq!(runs(&tail, Holds::Rows(1000)).len(), 1);
        let more = matrix(std::iter::once(2_898_000..3_000_000));
        assert_eq!(runs(&more, Holds::Vocabulary(1000, &padding)).len(), 1);
    }
}
