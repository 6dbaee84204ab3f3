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
    dispatch(ty, bytes, false)
}

/// Index of the first block with a NaN or infinite value; stops soon after it. Errors when `bytes` is not whole blocks.
pub fn nonfinite(ty: QuantType, bytes: &[u8]) -> Result<Option<u64>, QuantError> {
    Ok(dispatch(ty, bytes, true)?.first_nonfinite_block)
}

fn dispatch(ty: QuantType, bytes: &[u8], stop_at_first: bool) -> Result<Scan, QuantError> {
    let block_bytes = ty.info().bytes;
    if !bytes.len().is_multiple_of(block_bytes) {
        return Err(QuantError::Ragged { ty, bytes: bytes.len(), block_bytes });
    }
    Ok(match ty {
        QuantType::F32 => walk::<float::F32, _, _>(bytes, stop_at_first),
        QuantType::F16 => walk::<float::F16, _, _>(bytes, stop_at_first),
        QuantType::BF16 => walk::<float::BF16, _, _>(bytes, stop_at_first),
        QuantType::Q4_0 => walk::<legacy::Q4_0, _, _>(bytes, stop_at_first),
        QuantType::Q4_1 => walk::<legacy::Q4_1, _, _>(bytes, stop_at_first),
        QuantType::Q5_0 => walk::<legacy::Q5_0, _, _>(bytes, stop_at_first),
        QuantType::Q5_1 => walk::<legacy::Q5_1, _, _>(bytes, stop_at_first),
        QuantType::Q8_0 => walk::<legacy::Q8_0, _, _>(bytes, stop_at_first),
        QuantType::Q2_K => walk::<kquants::Q2K, _, _>(bytes, stop_at_first),
        QuantType::Q3_K => walk::<kquants::Q3K, _, _>(bytes, stop_at_first),
        QuantType::Q4_K => walk::<kquants::Q4K, _, _>(bytes, stop_at_first),
        QuantType::Q5_K => walk::<kquants::Q5K, _, _>(bytes, stop_at_first),
        QuantType::Q6_K => walk::<kquants::Q6K, _, _>(bytes, stop_at_first),
        QuantType::IQ4_NL => walk::<codebook::Iq4Nl, _, _>(bytes, stop_at_first),
        QuantType::IQ4_XS => walk::<codebook::Iq4Xs, _, _>(bytes, stop_at_first),
        QuantType::MXFP4 => walk::<codebook::Mxfp4, _, _>(bytes, stop_at_first),
        QuantType::NVFP4 => walk::<codebook::Nvfp4, _, _>(bytes, stop_at_first),
        QuantType::IQ2_XXS => walk::<grid::Iq2Xxs, _, _>(bytes, stop_at_first),
        QuantType::IQ2_XS => walk::<grid::Iq2Xs, _, _>(bytes, stop_at_first),
        QuantType::IQ2_S => walk::<grid::Iq2S, _, _>(bytes, stop_at_first),
        QuantType::IQ3_XXS => walk::<grid::Iq3Xxs, _, _>(bytes, stop_at_first),
        QuantType::IQ3_S => walk::<grid::Iq3S, _, _>(bytes, stop_at_first),
    })
}

/// Blocks looked at before asking whether one of them was bad: long enough to keep the inner loop free of branches.
const STRIDE: usize = 1024;

fn walk<F: Format<B, N>, const B: usize, const N: usize>(bytes: &[u8], stop_at_first: bool) -> Scan {
    match Isa::best().level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 | Level::Avx512 => {
            // SAFETY: both levels include AVX2, and an `Isa` exists only on machines that have its level.
            unsafe { walk_avx2::<F, B, N>(bytes, stop_at_first) }
        }
        Level::Baseline => walk_body::<F, B, N>(bytes, stop_at_first),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn walk_avx2<F: Format<B, N>, const B: usize, const N: usize>(bytes: &[u8], stop_at_first: bool) -> Scan {
    walk_body::<F, B, N>(bytes, stop_at_first)
}

#[inline(always)]
fn walk_body<F: Format<B, N>, const B: usize, const N: usize>(bytes: &[u8], stop_at_first: bool) -> Scan {
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
            if stop_at_first {
                break;
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
            assert_eq!(nonfinite(ty, &bytes).unwrap(), bad.first().copied(), "{ty}");
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
    fn ragged_bytes_are_refused() {
        assert!(scan(QuantType::Q6_K, &[0; 209]).is_err());
        assert_eq!(nonfinite(QuantType::Q6_K, &[0; 210]), Ok(None));
    }
}
