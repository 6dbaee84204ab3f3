//! Formats whose 4-bit codes index a table of 16 values: IQ4_NL, IQ4_XS, MXFP4 and NVFP4.

use super::float::scale;
use super::isa::Codes;
use super::{Format, array, sixteen};

/// The non-linear levels of IQ4_NL and IQ4_XS.
const LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The e2m1 values of MXFP4 and NVFP4, doubled so that they are integers; the scales are halved in return.
const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// 32 values: low nibbles first, then high ones.
#[inline(always)]
fn nibbles<C: Codes>(d: f32, table: &[i8; 16], codes: &[u8; 16], out: &mut [f32]) {
    let codes = C::load(codes);
    codes.bits(0, 15).lookup(table).affine(d, 0.0, sixteen(out, 0));
    codes.bits(4, 15).lookup(table).affine(d, 0.0, sixteen(out, 16));
}

pub(crate) struct Iq4Nl;

impl Format<18, 32> for Iq4Nl {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; 18], out: &mut [f32; 32]) {
        nibbles::<C>(scale(block, 0), &LEVELS, array(block, 2), out);
    }

    #[inline(always)]
    fn bound(block: &[u8; 18]) -> f32 {
        (scale(block, 0) * 127.0).abs()
    }
}

pub(crate) struct Iq4Xs;

impl Iq4Xs {
    /// Scale of the 8 sub-blocks of 32: 6-bit integers less 32, low nibbles in four bytes, upper two bits in a u16.
    #[inline(always)]
    fn scales(block: &[u8; 136]) -> [f32; 8] {
        let d = scale(block, 0);
        let upper = u32::from(u16::from_le_bytes([block[2], block[3]]));
        let low = u32::from_le_bytes(*array(block, 4));
        std::array::from_fn(|s| {
            let code = ((low >> (4 * s)) & 15) | (((upper >> (2 * s)) & 3) << 4);
            d * (code as i32 - 32) as f32
        })
    }
}

impl Format<136, 256> for Iq4Xs {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; 136], out: &mut [f32; 256]) {
        let d = Self::scales(block);
        for s in 0..8 {
            nibbles::<C>(d[s], &LEVELS, array(block, 8 + 16 * s), &mut out[32 * s..32 * s + 32]);
        }
    }

    #[inline(always)]
    fn bound(block: &[u8; 136]) -> f32 {
        if !scale(block, 0).is_finite() {
            return f32::NAN;
        }
        Self::scales(block).iter().fold(0.0f32, |bound, d| bound.max((d * 127.0).abs()))
    }
}

/// Half of the power of two that an e8m0 byte stands for: 2^(e - 128). The two smallest are f32 subnormals.
#[inline(always)]
fn half_e8m0(e: u8) -> f32 {
    let e = u32::from(e);
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e - 1) << 23 })
}

pub(crate) struct Mxfp4;

impl Format<17, 32> for Mxfp4 {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; 17], out: &mut [f32; 32]) {
        nibbles::<C>(half_e8m0(block[0]), &E2M1_DOUBLED, array(block, 1), out);
    }

    #[inline(always)]
    fn bound(block: &[u8; 17]) -> f32 {
        // The three largest scales overflow with some codes only (12 * 2^125 does, 6 * 2^125 does not), so look at
        // them.
        let top = if block[0] < 253 {
            12
        } else {
            let largest =
                |byte: u8| E2M1_DOUBLED[usize::from(byte & 7)].max(E2M1_DOUBLED[usize::from((byte >> 4) & 7)]);
            block[1..].iter().map(|&byte| largest(byte)).fold(0, i8::max)
        };
        half_e8m0(block[0]) * f32::from(top)
    }
}

/// Half of an unsigned e4m3 scale (bias 7, subnormals in units of 2^-9). The top bit is ignored; 0x7f reads as zero, as
/// in ggml.
#[inline(always)]
fn half_ue4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (u32::from(byte >> 3) & 15, u32::from(byte & 7));
    let subnormal = mantissa as i32 as f32 * f32::from_bits((127 - 10) << 23);
    let normal = f32::from_bits(((exponent + 127 - 8) << 23) | (mantissa << 20));
    match (byte, exponent) {
        (0x7f, _) => 0.0,
        (_, 0) => subnormal,
        _ => normal,
    }
}

pub(crate) struct Nvfp4;

impl Format<36, 64> for Nvfp4 {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; 36], out: &mut [f32; 64]) {
        // Sub-block s is 16 values from 8 bytes: low nibbles, then high ones, side by side here as 16 bytes.
        for sub in 0..4 {
            let bytes = u64::from_le_bytes(*array(block, 4 + 8 * sub));
            let sides = [bytes & 0x0f0f_0f0f_0f0f_0f0f, (bytes >> 4) & 0x0f0f_0f0f_0f0f_0f0f].map(u64::to_le_bytes);
            let codes = C::load(array(sides.as_flattened(), 0));
            codes.lookup(&E2M1_DOUBLED).affine(half_ue4m3(block[sub]), 0.0, sixteen(out, 16 * sub));
        }
    }

    #[inline(always)]
    fn bound(block: &[u8; 36]) -> f32 {
        block[..4].iter().fold(0.0f32, |bound, &byte| bound.max(half_ue4m3(byte) * 12.0))
    }
}
