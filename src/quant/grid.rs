//! Formats whose codes name the magnitudes of eight (IQ2) or four (IQ3) neighbouring values at once, by an index into a
//! grid; signs are kept beside the indices. Scales are (d * (code + 1/2)) times a power of two, or d * (2 code + 1): d
//! has eleven significant bits and the code at most five, so a scale is exact and only its product with the magnitude
//! rounds.

use super::float::scale;
use super::grids::{IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, SPREAD};
use super::isa::Codes;
use super::{Format, array, sixteen};

/// The largest magnitudes of the grids.
const TOP_IQ2: f32 = 43.0;
const TOP_IQ3_XXS: f32 = 62.0;
const TOP_IQ3_S: f32 = 15.0;

/// Eight magnitudes, those negated whose sign bit is set. No magnitude is zero, so no byte carries into the next.
#[inline(always)]
fn signed(magnitudes: u64, signs: u8) -> u64 {
    let mask = SPREAD[usize::from(signs)];
    (magnitudes ^ mask).wrapping_add(mask & 0x0101_0101_0101_0101)
}

/// Eight signs from the lowest seven bits: the eighth makes the number of set bits even.
#[inline(always)]
fn even(bits: u32) -> u8 {
    let seven = (bits & 127) as u8;
    seven | ((seven.count_ones() as u8 & 1) << 7)
}

/// Sixteen values from two runs of eight signed bytes.
#[inline(always)]
fn expand16<C: Codes>(d: f32, bytes: [u64; 2], out: &mut [f32; 16]) {
    let bytes = bytes.map(u64::to_le_bytes);
    C::load(array(bytes.as_flattened(), 0)).affine(d, 0.0, out);
}

/// Eight magnitudes of IQ3 from two entries.
#[inline(always)]
fn pair(first: u32, second: u32) -> u64 {
    u64::from(first) | (u64::from(second) << 32)
}

/// The four bits of value group `i`, low nibbles first.
#[inline(always)]
fn nibble(bytes: &[u8], i: usize) -> u32 {
    u32::from(bytes[i / 2] >> (4 * (i % 2)) & 15)
}

#[inline(always)]
fn word(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*array(block, at))
}

#[inline(always)]
fn half_word(block: &[u8], at: usize) -> u32 {
    u32::from(u16::from_le_bytes(*array(block, at)))
}

/// The scale of an IQ2 sub-block.
#[inline(always)]
fn eighths(d: f32, code: u32) -> f32 {
    d * (0.5 + code as i32 as f32) * 0.25
}

/// |d| at its largest code, times the largest magnitude. A NaN or infinite d stays one: no factor is zero.
#[inline(always)]
fn bound(scale: impl Fn(u32) -> f32, codes: impl Iterator<Item = u32>, top: f32) -> f32 {
    (scale(codes.fold(0, u32::max)) * top).abs()
}

pub(crate) struct Iq2Xxs;

/// Per 32 values: four indices of a byte, four times seven sign bits, a scale of four bits.
impl Format<66, 256> for Iq2Xxs {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; 66], out: &mut [f32; 256]) {
        let d = scale(block, 0);
        for sub in 0..8 {
            let (index, rest): (&[u8; 4], u32) = (array(block, 2 + 8 * sub), word(block, 6 + 8 * sub));
            let d = eighths(d, rest >> 28);
            let eight = |l: usize| signed(IQ2_XXS[usize::from(index[l])], even(rest >> (7 * l)));
            expand16::<C>(d, [eight(0), eight(1)], sixteen(out, 32 * sub));
            expand16::<C>(d, [eight(2), eight(3)], sixteen(out, 32 * sub + 16));
        }
    }

    #[inline(always)]
    fn bound(block: &[u8; 66]) -> f32 {
        let d = scale(block, 0);
        bound(|code| eighths(d, code), (0..8).map(|sub| word(block, 6 + 8 * sub) >> 28), TOP_IQ2)
    }
}

pub(crate) struct Iq2Xs;

/// Per eight values: nine bits of index and seven sign bits; a scale of four bits per 16 values.
impl Format<74, 256> for Iq2Xs {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; 74], out: &mut [f32; 256]) {
        let d = scale(block, 0);
        for sub in 0..16 {
            let eight = |l: usize| {
                let code = half_word(block, 2 + 4 * sub + 2 * l);
                signed(IQ2_XS[(code & 511) as usize], even(code >> 9))
            };
            expand16::<C>(eighths(d, nibble(&block[66..], sub)), [eight(0), eight(1)], sixteen(out, 16 * sub));
        }
    }

    #[inline(always)]
    fn bound(block: &[u8; 74]) -> f32 {
        let d = scale(block, 0);
        bound(|code| eighths(d, code), (0..16).map(|sub| nibble(&block[66..], sub)), TOP_IQ2)
    }
}

pub(crate) struct Iq2S;

/// Per eight values: ten bits of index, two of them in a byte that four indices share, and eight sign bits; a scale of
/// four bits per 16 values.
impl Format<82, 256> for Iq2S {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; 82], out: &mut [f32; 256]) {
        let d = scale(block, 0);
        for sub in 0..16 {
            let upper = nibble(&block[66..], sub);
            let eight = |l: usize| {
                let index = usize::from(block[2 + 2 * sub + l]) | ((upper >> (2 * l) & 3) << 8) as usize;
                signed(IQ2_S[index], block[34 + 2 * sub + l])
            };
            expand16::<C>(eighths(d, nibble(&block[74..], sub)), [eight(0), eight(1)], sixteen(out, 16 * sub));
        }
    }

    #[inline(always)]
    fn bound(block: &[u8; 82]) -> f32 {
        let d = scale(block, 0);
        bound(|code| eighths(d, code), (0..16).map(|sub| nibble(&block[74..], sub)), TOP_IQ2)
    }
}

pub(crate) struct Iq3Xxs;

/// Per four values an index of a byte; per 32 values four times seven sign bits and a scale of four bits.
impl Format<98, 256> for Iq3Xxs {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; 98], out: &mut [f32; 256]) {
        let d = scale(block, 0);
        for sub in 0..8 {
            let (index, rest): (&[u8; 8], u32) = (array(block, 2 + 8 * sub), word(block, 66 + 4 * sub));
            let d = eighths(d, rest >> 28) * 2.0;
            let eight = |l: usize| {
                let [first, second] = [2 * l, 2 * l + 1].map(|i| IQ3_XXS[usize::from(index[i])]);
                signed(pair(first, second), even(rest >> (7 * l)))
            };
            expand16::<C>(d, [eight(0), eight(1)], sixteen(out, 32 * sub));
            expand16::<C>(d, [eight(2), eight(3)], sixteen(out, 32 * sub + 16));
        }
    }

    #[inline(always)]
    fn bound(block: &[u8; 98]) -> f32 {
        let d = scale(block, 0);
        bound(|code| eighths(d, code) * 2.0, (0..8).map(|sub| word(block, 66 + 4 * sub) >> 28), TOP_IQ3_XXS)
    }
}

pub(crate) struct Iq3S;

impl Iq3S {
    #[inline(always)]
    fn scaled(d: f32, code: u32) -> f32 {
        d * (1 + 2 * code) as i32 as f32
    }
}

/// Per four values nine bits of index, the ninth in a byte that eight indices share; a sign bit per value; a scale of
/// four bits per 32 values.
impl Format<110, 256> for Iq3S {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; 110], out: &mut [f32; 256]) {
        let d = scale(block, 0);
        for sub in 0..8 {
            let (index, ninth): (&[u8; 8], usize) = (array(block, 2 + 8 * sub), usize::from(block[66 + sub]));
            let d = Self::scaled(d, nibble(&block[106..], sub));
            let eight = |l: usize| {
                let entry = |i: usize| IQ3_S[usize::from(index[i]) | (ninth >> i & 1) << 8];
                signed(pair(entry(2 * l), entry(2 * l + 1)), block[74 + 4 * sub + l])
            };
            expand16::<C>(d, [eight(0), eight(1)], sixteen(out, 32 * sub));
            expand16::<C>(d, [eight(2), eight(3)], sixteen(out, 32 * sub + 16));
        }
    }

    #[inline(always)]
    fn bound(block: &[u8; 110]) -> f32 {
        let d = scale(block, 0);
        bound(|code| Self::scaled(d, code), (0..8).map(|sub| nibble(&block[106..], sub)), TOP_IQ3_S)
    }
}
