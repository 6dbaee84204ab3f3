//! Block formats: how a tensor's bytes become f32 values.
//!
//! A loader that expands a block differently from the program that wrote it yields a model that talks, but wrongly. So
//! values here are those of ggml bit for bit: value = (d * sc) * q - dmin * m in f32, two roundings, never fused, with
//! the minimum subtracted inside each sub-block. Each format is one body (`Format::expand`) over vectors of sixteen
//! codes (`isa::Codes`), compiled once per instruction level ([`Isa`]); all levels give the same bits.
//!
//! The public golden rows of every format are compared in `tests/it/quantvec.rs`.

/// Calls a function of the [`Format`] of a type.
macro_rules! with_format {
    ($ty:expr, $function:ident $arguments:tt) => {
        with_format! { $ty, $function $arguments,
            F32: float::F32, F16: float::F16, BF16: float::BF16,
            Q4_0: legacy::Q4_0, Q4_1: legacy::Q4_1, Q5_0: legacy::Q5_0, Q5_1: legacy::Q5_1, Q8_0: legacy::Q8_0,
            Q2_K: kquants::Q2K, Q3_K: kquants::Q3K, Q4_K: kquants::Q4K, Q5_K: kquants::Q5K, Q6_K: kquants::Q6K,
            IQ4_NL: codebook::Iq4Nl, IQ4_XS: codebook::Iq4Xs, MXFP4: codebook::Mxfp4, NVFP4: codebook::Nvfp4,
            IQ2_XXS: grid::Iq2Xxs, IQ2_XS: grid::Iq2Xs, IQ2_S: grid::Iq2S, IQ3_XXS: grid::Iq3Xxs, IQ3_S: grid::Iq3S
        }
    };
    ($ty:expr, $function:ident $arguments:tt, $($name:ident: $format:ty),*) => {
        match $ty { $(QuantType::$name => $function::<$format, _, _> $arguments,)* }
    };
}

pub mod types;

mod codebook;
mod float;
mod grid;
mod grids;
mod isa;
mod kquants;
mod legacy;
mod scan;

pub use isa::Isa;
pub(crate) use isa::Level;
pub use scan::{Scan, scan, zero_units};
pub use types::*;

use isa::Codes;

/// The codes of the baseline level.
type Baseline = [u8; 16];

/// The `N` bytes of a block from `at` on. The bounds are constants at every call, so the check folds away.
#[inline(always)]
fn array<const N: usize>(block: &[u8], at: usize) -> &[u8; N] {
    match block[at..].first_chunk() {
        Some(chunk) => chunk,
        None => unreachable!("block layout: {N} bytes from {at} do not fit {}", block.len()),
    }
}

/// The 16 values of an output from `at` on.
#[inline(always)]
fn sixteen(out: &mut [f32], at: usize) -> &mut [f32; 16] {
    match out[at..].first_chunk_mut() {
        Some(chunk) => chunk,
        None => unreachable!("block layout: values {at} to {} do not fit", at + 16),
    }
}

/// Why bytes could not be expanded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantError {
    /// The bytes are not a whole number of blocks.
    #[error("{bytes} bytes are not whole {ty} blocks of {block_bytes} bytes")]
    Ragged {
        /// The format.
        ty: QuantType,
        /// Bytes given.
        bytes: usize,
        /// Bytes of one block.
        block_bytes: usize,
    },
    /// The output does not have one place per value.
    #[error("{ty}: the bytes hold {expected} values, the output has room for {found}")]
    Length {
        /// The format.
        ty: QuantType,
        /// Values the bytes hold.
        expected: usize,
        /// Values the output holds.
        found: usize,
    },
}

/// One block format: `BYTES` bytes hold `VALUES` values.
pub(crate) trait Format<const BYTES: usize, const VALUES: usize> {
    /// Expands one block. Marked `inline(always)` in every implementation, so that it takes on its caller's
    /// instructions.
    fn expand<C: Codes>(block: &[u8; BYTES], out: &mut [f32; VALUES]);

    /// An upper bound of |value| in the block, from its scales; NaN or infinite iff one of its values is.
    fn bound(block: &[u8; BYTES]) -> f32;
}

/// A format's dequantiser at one instruction level, chosen once and then called per run of blocks.
#[derive(Clone, Copy, Debug)]
pub struct Dequantiser {
    ty: QuantType,
    block: usize,
    block_bytes: usize,
    run: unsafe fn(&[u8], &mut [f32]),
}

impl Dequantiser {
    /// The dequantiser of `ty` at this machine's best level.
    pub fn new(ty: QuantType) -> Self {
        Self::with(ty, Isa::best())
    }

    /// The dequantiser of `ty` at a given level.
    pub fn with(ty: QuantType, isa: Isa) -> Self {
        let run = with_format!(ty, body(isa));
        let info = ty.info();
        Self { ty, block: info.block, block_bytes: info.bytes, run }
    }

    /// Expands whole blocks into `out`. Errors when `bytes` is not whole blocks or `out` has not one place per value.
    pub fn expand(&self, bytes: &[u8], out: &mut [f32]) -> Result<(), QuantError> {
        let Self { ty, block, block_bytes, run } = *self;
        if !bytes.len().is_multiple_of(block_bytes) {
            return Err(QuantError::Ragged { ty, bytes: bytes.len(), block_bytes });
        }
        let expected = bytes.len() / block_bytes * block;
        if expected != out.len() {
            return Err(QuantError::Length { ty, expected, found: out.len() });
        }
        // SAFETY: `run` was compiled for the level of an `Isa`, which exists only on machines that have that level.
        unsafe { run(bytes, out) };
        Ok(())
    }
}

/// Expands whole blocks of `ty` to f32, bit-equal to ggml. Errors when `bytes` is not whole blocks or `out` has not
/// exactly one place per value.
pub fn dequantise(ty: QuantType, bytes: &[u8], out: &mut [f32]) -> Result<(), QuantError> {
    Dequantiser::new(ty).expand(bytes, out)
}

fn body<F: Format<B, N>, const B: usize, const N: usize>(isa: Isa) -> unsafe fn(&[u8], &mut [f32]) {
    match isa.level() {
        Level::Baseline => blocks::<F, Baseline, B, N>,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => blocks_avx2::<F, B, N>,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => blocks_avx512::<F, B, N>,
    }
}

#[inline(always)]
fn blocks<F: Format<B, N>, C: Codes, const B: usize, const N: usize>(bytes: &[u8], out: &mut [f32]) {
    for (block, values) in bytes.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        F::expand::<C>(block, values);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn blocks_avx2<F: Format<B, N>, const B: usize, const N: usize>(bytes: &[u8], out: &mut [f32]) {
    blocks::<F, isa::x86::Avx2, B, N>(bytes, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
fn blocks_avx512<F: Format<B, N>, const B: usize, const N: usize>(bytes: &[u8], out: &mut [f32]) {
    blocks::<F, isa::x86::Avx512, B, N>(bytes, out);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes from a small generator: every pattern of scales and codes turns up, NaN scales included.
    fn noise(len: usize) -> Vec<u8> {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        };
        (0..len).map(|_| next()).collect()
    }

    #[test]
    fn every_level_gives_the_same_bits() {
        let levels: Vec<Isa> = Isa::available().collect();
        for ty in QuantType::all() {
            let blocks = 1031;
            let bytes = noise(blocks * ty.info().bytes);
            let mut first = vec![0.0f32; blocks * ty.block()];
            Dequantiser::with(ty, levels[0]).expand(&bytes, &mut first).unwrap();
            for &isa in &levels[1..] {
                let mut out = vec![0.0f32; first.len()];
                Dequantiser::with(ty, isa).expand(&bytes, &mut out).unwrap();
                for (i, (a, b)) in first.iter().zip(&out).enumerate() {
                    assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), "{ty} {isa:?} {i}: {a} {b}");
                }
            }
        }
    }

    #[test]
    fn lengths_are_checked() {
        let mut out = [0.0; 32];
        let ty = QuantType::Q8_0;
        assert_eq!(dequantise(ty, &[0; 33], &mut out), Err(QuantError::Ragged { ty, bytes: 33, block_bytes: 34 }));
        assert_eq!(dequantise(ty, &[0; 68], &mut out), Err(QuantError::Length { ty, expected: 64, found: 32 }));
        assert_eq!(dequantise(ty, &[0; 34], &mut out), Ok(()));
        assert_eq!(dequantise(ty, &[], &mut []), Ok(()));
    }
}
