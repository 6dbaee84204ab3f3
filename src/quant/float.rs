//! Plain floats, as blocks of one value, and the f16 conversion that every other format's scales go through.

use super::Format;
use super::isa::Codes;

/// An IEEE half from its bits: exact, branch-free, and without f32 subnormals on the way. Scales of K-quants are often
/// subnormal halves, and an f32 subnormal operand costs some hundred cycles on common processors.
#[inline(always)]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    let bits = u32::from(bits);
    let magnitude = (bits & 0x7fff) << 13;
    // 2^-24 is the unit of subnormal halves; their ten bits fit f32 exactly.
    let subnormal = ((bits & 0x3ff) as i32 as f32 * f32::from_bits((127 - 24) << 23)).to_bits();
    let normal = magnitude.wrapping_add((127 - 15) << 23);
    // Infinities and NaNs: the exponent field 31 becomes 255.
    let special = magnitude.wrapping_add(2 * ((127 - 15) << 23));
    let exponent = bits & 0x7c00;
    let magnitude = if exponent == 0x7c00 { special } else { normal };
    let magnitude = if exponent == 0 { subnormal } else { magnitude };
    f32::from_bits(magnitude | ((bits & 0x8000) << 16))
}

/// The f16 at `at` of a block.
#[inline(always)]
pub(crate) fn scale<const B: usize>(block: &[u8; B], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([block[at], block[at + 1]]))
}

pub(crate) struct F32;

impl Format<4, 1> for F32 {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; 4], out: &mut [f32; 1]) {
        out[0] = f32::from_le_bytes(*block);
    }

    #[inline(always)]
    fn bound(block: &[u8; 4]) -> f32 {
        f32::from_le_bytes(*block).abs()
    }
}

pub(crate) struct F16;

impl Format<2, 1> for F16 {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; 2], out: &mut [f32; 1]) {
        out[0] = scale(block, 0);
    }

    #[inline(always)]
    fn bound(block: &[u8; 2]) -> f32 {
        scale(block, 0).abs()
    }
}

pub(crate) struct BF16;

impl Format<2, 1> for BF16 {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; 2], out: &mut [f32; 1]) {
        out[0] = f32::from_bits(u32::from(u16::from_le_bytes(*block)) << 16);
    }

    #[inline(always)]
    fn bound(block: &[u8; 2]) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes(*block)) << 16).abs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_converts_as_the_half_crate_does() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32_const());
            assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{bits:#06x}");
        }
    }

    #[test]
    fn f32_is_copied_bit_for_bit() {
        for bits in [0u32, 0x8000_0000, 1, 0x7f7f_ffff, 0x7f80_0000, 0x3f80_0001] {
            let mut out = [0.0];
            crate::quant::dequantise(crate::quant::QuantType::F32, &bits.to_le_bytes(), &mut out).unwrap();
            assert_eq!(out[0].to_bits(), bits);
        }
    }
}
