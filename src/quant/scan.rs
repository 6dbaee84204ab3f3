//! What can be said of a tensor from its scales alone, at the speed of reading it: blocks that hold NaN or infinity,
//! and how large a value can be. A few such blocks in hundreds of gigabytes are enough to turn every token to garbage.

use super::{Format, Isa, Level, QuantError, QuantType, codebook, float, grid, kquants, legacy};

/// The findings over a run of blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scan {
    /// Blocks with at least one value that is NaN or infinite (exact). A plain float is a block of one.
    pub nonfinite_blocks: u64,
    /// Index of the first such block.
    pub first_nonfinite_block: Option<u64>,
    /// An upper bound of |value| over all other blocks, 0 without any. Exact for plain floats; for block formats the
    /// value that the scales allow at the extreme code, reached only if a block uses that code.
    pub max_abs_bound: f32,
}

/// Scans all blocks of `bytes`. Errors when they are not whole blocks.
pub fn scan(ty: QuantType, bytes: &[u8]) -> Result<Scan, QuantError> {
    let block_bytes = ty.info().bytes;
    if !bytes.len().is_multiple_of(block_bytes) {
        return Err(QuantError::Ragged { ty, bytes: bytes.len(), block_bytes });
    }
    Ok(with_format!(ty, walk(bytes)))
}

/// The units of `unit` bytes, each some whole blocks, all of whose values are zero: because their bytes are, or because
/// their scales are, whatever the codes say. What is left behind the last whole unit is not looked at. Errors when a unit
/// is not whole blocks.
pub fn zero_units(ty: QuantType, bytes: &[u8], unit: usize) -> Result<Vec<usize>, QuantError> {
    let block_bytes = ty.info().bytes;
    if unit == 0 || !unit.is_multiple_of(block_bytes) {
        return Err(QuantError::Ragged { ty, bytes: unit, block_bytes });
    }
    let blocks = unit / block_bytes;
    Ok(with_format!(ty, zeros(bytes, blocks)))
}

fn zeros<F: Format<B, N>, const B: usize, const N: usize>(bytes: &[u8], unit: usize) -> Vec<usize> {
    match Isa::best().level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 | Level::Avx512 => {
            // SAFETY: both levels include AVX2, and an `Isa` exists only on machines that have its level.
            unsafe { zeros_avx2::<F, B, N>(bytes, unit) }
        }
        Level::Baseline => zeros_body::<F, B, N>(bytes, unit),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn zeros_avx2<F: Format<B, N>, const B: usize, const N: usize>(bytes: &[u8], unit: usize) -> Vec<usize> {
    zeros_body::<F, B, N>(bytes, unit)
}

#[inline(always)]
fn zeros_body<F: Format<B, N>, const B: usize, const N: usize>(bytes: &[u8], unit: usize) -> Vec<usize> {
    // Some formats have no scale of zero: there zero bytes are codes of zero.
    let is_zero = |blocks: &[[u8; B]]| {
        let largest = blocks.iter().fold(0, |m: u32, b| m.max(F::bound(b).to_bits() & 0x7fff_ffff));
        largest == 0 || blocks.iter().flatten().all(|b| *b == 0)
    };
    let units = bytes.as_chunks::<B>().0.chunks_exact(unit).enumerate();
    units.filter(|(_, blocks)| is_zero(blocks)).map(|(i, _)| i).collect()
}

/// Blocks looked at before asking whether one of them was bad: long enough to keep the inner loop free of branches.
const STRIDE: usize = 1024;

fn walk<F: Format<B, N>, const B: usize, const N: usize>(bytes: &[u8]) -> Scan {
    match Isa::best().level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 | Level::Avx512 => {
            // SAFETY: both levels include AVX2, and an `Isa` exists only on machines that have its level.
            unsafe { walk_avx2::<F, B, N>(bytes) }
        }
        Level::Baseline => walk_body::<F, B, N>(bytes),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn walk_avx2<F: Format<B, N>, const B: usize, const N: usize>(bytes: &[u8]) -> Scan {
    walk_body::<F, B, N>(bytes)
}

#[inline(always)]
fn walk_body<F: Format<B, N>, const B: usize, const N: usize>(bytes: &[u8]) -> Scan {
    let mut found = Scan { nonfinite_blocks: 0, first_nonfinite_block: None, max_abs_bound: 0.0 };
    for (stride, blocks) in bytes.as_chunks::<B>().0.chunks(STRIDE).enumerate() {
        let mut bad = 0u32;
        // Non-negative floats are ordered as their bits are, and integers have an associative maximum.
        let mut largest = 0u32;
        for block in blocks {
            let bits = F::bound(block).to_bits() & 0x7fff_ffff;
            let finite = bits < f32::INFINITY.to_bits();
            bad += u32::from(!finite);
            largest = largest.max(if finite { bits } else { 0 });
        }
        found.max_abs_bound = found.max_abs_bound.max(f32::from_bits(largest));
        if bad > 0 {
            found.nonfinite_blocks += u64::from(bad);
            if found.first_nonfinite_block.is_none() {
                let at = blocks.iter().position(|block| !F::bound(block).is_finite());
                found.first_nonfinite_block = at.map(|at| (stride * STRIDE + at) as u64);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::dequantise;

    /// Random bytes hold every kind of scale; what the scan says must be what expanding all values says.
    #[test]
    fn a_scan_agrees_with_expanding_every_value() {
        for ty in QuantType::all() {
            let (info, blocks) = (ty.info(), 3000);
            let mut state = 0x2545_f491_4f6c_dd1du64;
            let bytes: Vec<u8> = (0..blocks * info.bytes)
                .map(|i| {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    // One MXFP4 block in four gets a scale at the edge of the f32 range, where only some codes
                    // overflow.
                    let edge = ty == QuantType::MXFP4 && i % (4 * info.bytes) == 0;
                    if edge { 250 + (state >> 40) as u8 % 6 } else { (state >> 40) as u8 }
                })
                .collect();
            let mut values = vec![0.0; blocks * info.block];
            dequantise(ty, &bytes, &mut values).unwrap();
            let bad: Vec<u64> = (0..blocks as u64)
                .filter(|&b| values[b as usize * info.block..][..info.block].iter().any(|v| !v.is_finite()))
                .collect();
            let found = scan(ty, &bytes).unwrap();
            assert_eq!(found.nonfinite_blocks, bad.len() as u64, "{ty}");
            assert_eq!(found.first_nonfinite_block, bad.first().copied(), "{ty}");
            if ty != QuantType::NVFP4 {
                assert!(!bad.is_empty(), "{ty}: the bytes were meant to hold bad scales");
            }
            let good = values.chunks(info.block).filter(|b| b.iter().all(|v| v.is_finite()));
            let largest = good.flatten().fold(0.0f32, |m, v| m.max(v.abs()));
            assert!(found.max_abs_bound >= largest, "{ty}: {} < {largest}", found.max_abs_bound);
            // 3000 blocks use the extreme code of a large scale; twice the largest value would be a useless bound.
            assert!(found.max_abs_bound <= 2.0 * largest, "{ty}: {} > 2 x {largest}", found.max_abs_bound);
        }
    }

    #[test]
    fn units_of_zeros_are_found_by_bytes_and_by_scales() {
        for ty in QuantType::all() {
            let (info, blocks) = (ty.info(), 24);
            // 0x35 is a finite, positive scale wherever a format has one.
            let mut bytes = vec![0x35; blocks * info.bytes + info.bytes / 2];
            bytes[4 * info.bytes..6 * info.bytes].fill(0);
            bytes[9 * info.bytes..10 * info.bytes].fill(0);
            assert_eq!(zero_units(ty, &bytes, 2 * info.bytes).unwrap(), [2], "{ty}");
            assert_eq!(zero_units(ty, &bytes, info.bytes).unwrap(), [4, 5, 9], "{ty}");
        }
        let negative = [[0x00, 0x80].repeat(32), [0x00, 0x3c].repeat(32)].concat();
        assert_eq!(zero_units(QuantType::BF16, &negative, 64).unwrap(), [0]);
        let silent = [[vec![0; 2], vec![0x77; 32]].concat(), vec![0x35; 34]].concat();
        assert_eq!(zero_units(QuantType::Q8_0, &silent, 34).unwrap(), [0]);
        assert!(zero_units(QuantType::Q8_0, &silent, 33).is_err() && zero_units(QuantType::F32, &silent, 0).is_err());
    }

    #[test]
    fn ragged_bytes_are_refused() {
        assert!(scan(QuantType::Q6_K, &[0; 209]).is_err());
        assert_eq!(scan(QuantType::Q6_K, &[0; 210]).unwrap().first_nonfinite_block, None);
    }
}
