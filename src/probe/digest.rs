//! A listener that keeps 64 bits of every token's row instead of the row: enough to say that two runs hold the same bits
//! and where they part, at a memory cost that lets all points of all layers be watched at once.

use super::capture::{Capture, Captured, Filter};
use super::{Data, Probe, Then, Visit};
use crate::model::Place;

/// Keeps, per point and row, a digest of the row's bits: captured as `[rows][2]` indices, the low and the high half.
pub struct Digest(Capture);

impl Digest {
    /// Watches the points that `filter` accepts.
    pub fn new(filter: Filter) -> Self {
        Digest(Capture::new(filter))
    }
}

impl Probe for Digest {
    fn wants(&self, place: Place) -> bool {
        self.0.wants(place)
    }

    fn visit(&mut self, visit: Visit<'_>) -> Then {
        let width = visit.shape.iter().product::<usize>().max(1);
        let halves = |digest: u64| [digest as u32 as i32, (digest >> 32) as u32 as i32];
        let mut values: Vec<i32> = match visit.values {
            Data::Values(v) => v.chunks_exact(width).flat_map(|row| halves(digest(of_values(row)))).collect(),
            Data::Indices(v) => {
                v.chunks_exact(width).flat_map(|row| halves(digest(row.iter().map(|i| *i as u32)))).collect()
            }
        };
        self.0.see(&Visit { shape: &[2], values: Data::Indices(&mut values), ..visit });
        Then::Continue
    }

    fn take(&mut self) -> Vec<Captured> {
        self.0.take()
    }
}

/// The bits of a row without the masked values at its end: how many there are depends on the longest sequence of the
/// step, which says nothing of this one.
fn of_values(row: &[f32]) -> impl Iterator<Item = u32> {
    let masked = row.iter().rev().take_while(|v| **v == f32::NEG_INFINITY).count();
    row[..row.len() - masked].iter().map(|v| v.to_bits())
}

/// FNV-1a over whole words: its step is a bijection, so rows that differ in one word never share a digest.
fn digest(words: impl Iterator<Item = u32>) -> u64 {
    words.fold(0xcbf2_9ce4_8422_2325, |hash, word| (hash ^ u64::from(word)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Point;
    use crate::probe::Values;

    fn rows(values: &mut [f32], width: usize) -> Vec<i32> {
        let mut listener = Digest::new(std::sync::Arc::new(|_| true));
        let rows = values.len() / width;
        let values = Data::Values(values);
        listener.visit(Visit { place: Place::trunk(0, Point::IndexScores), rows, shape: &[width], values });
        match listener.take().remove(0).values {
            Values::I32(v) => v,
            Values::F32(_) => Vec::new(),
        }
    }

    #[test]
    fn every_bit_counts_but_the_mask_at_the_end_does_not() {
        let masked = f32::NEG_INFINITY;
        let two = rows(&mut [1.0, 2.0, 1.0, 2.0], 2);
        assert_eq!(two[..2], two[2..]);
        assert_eq!(rows(&mut [1.0, 2.0, masked, masked], 4), two[..2]);
        assert_ne!(rows(&mut [1.0, f32::from_bits(2.0f32.to_bits() + 1)], 2), two[..2]);
        assert_ne!(rows(&mut [0.0], 1), rows(&mut [-0.0], 1));
        assert_ne!(rows(&mut [masked, 1.0], 2), rows(&mut [1.0], 1));
    }
}
