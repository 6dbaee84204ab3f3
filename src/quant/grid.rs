//! Formats whose codes name the magnitudes of eight (IQ2) or four (IQ3) neighbouring values at once, by an index into a
//! grid; signs are kept beside the indices. Scales are (d * (code + 1/2)) times a power of two, or d * (2 code + 1): d
//! has eleven significant bits and the code at most five, so a scale is exact and only its product with the magnitude
//! rounds.

use super::float::scale;
use super::grids::{IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, SPREAD};
use super::isa::Codes;
use super::{Format, array, sixteen};

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

/// What tells the formats apart: 32 groups of eight values, and a scale for every two of them, often shared by four.
pub(crate) trait Grid<const BYTES: usize> {
    /// The largest magnitude.
    const TOP: f32;

    /// The scale that a code stands for.
    #[inline(always)]
    fn scaled(d: f32, code: u32) -> f32 {
        d * (0.5 + code as i32 as f32) * 0.25
    }

    /// The scale's code of groups `2 * pair` and `2 * pair + 1`.
    fn code(block: &[u8; BYTES], pair: usize) -> u32;

    /// The signed magnitudes of a group.
    fn eight(block: &[u8; BYTES], group: usize) -> u64;
}

impl<G: Grid<BYTES>, const BYTES: usize> Format<BYTES, 256> for G {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; BYTES], out: &mut [f32; 256]) {
        let d = scale(block, 0);
        for pair in 0..16 {
            let bytes = [G::eight(block, 2 * pair), G::eight(block, 2 * pair + 1)].map(u64::to_le_bytes);
            let d = G::scaled(d, G::code(block, pair));
            C::load(array(bytes.as_flattened(), 0)).affine(d, 0.0, sixteen(out, 16 * pair));
        }
    }

    /// |d| at its largest code, times the largest magnitude. A NaN or infinite d stays one: no factor is zero.
    #[inline(always)]
    fn bound(block: &[u8; BYTES]) -> f32 {
        let largest = (0..16).map(|pair| G::code(block, pair)).fold(0, u32::max);
        (G::scaled(scale(block, 0), largest) * G::TOP).abs()
    }
}

pub(crate) struct Iq2Xxs;

/// Per 32 values: four indices of a byte, four times seven sign bits, a scale of four bits.
impl Grid<66> for Iq2Xxs {
    const TOP: f32 = 43.0;

    #[inline(always)]
    fn code(block: &[u8; 66], pair: usize) -> u32 {
        word(block, 6 + 8 * (pair / 2)) >> 28
    }

    #[inline(always)]
    fn eight(block: &[u8; 66], group: usize) -> u64 {
        let (sub, l) = (group / 4, group % 4);
        signed(IQ2_XXS[usize::from(block[2 + 8 * sub + l])], even(word(block, 6 + 8 * sub) >> (7 * l)))
    }
}

pub(crate) struct Iq2Xs;

/// Per eight values: nine bits of index and seven sign bits; a scale of four bits per 16 values.
impl Grid<74> for Iq2Xs {
    const TOP: f32 = 43.0;

    #[inline(always)]
    fn code(block: &[u8; 74], pair: usize) -> u32 {
        nibble(&block[66..], pair)
    }

    #[inline(always)]
    fn eight(block: &[u8; 74], group: usize) -> u64 {
        let code = half_word(block, 2 + 2 * group);
        signed(IQ2_XS[(code & 511) as usize], even(code >> 9))
    }
}

pub(crate) struct Iq2S;

/// Per eight values: ten bits of index, two of them in a byte that four indices share, and eight sign bits; a scale of
/// four bits per 16 values.
impl Grid<82> for Iq2S {
    const TOP: f32 = 43.0;

    #[inline(always)]
    fn code(block: &[u8; 82], pair: usize) -> u32 {
        nibble(&block[74..], pair)
    }

    #[inline(always)]
    fn eight(block: &[u8; 82], group: usize) -> u64 {
        let upper = nibble(&block[66..], group / 2) >> (2 * (group % 2)) & 3;
        signed(IQ2_S[usize::from(block[2 + group]) | (upper << 8) as usize], block[34 + group])
    }
}

pub(crate) struct Iq3Xxs;

/// Per four values an index of a byte; per 32 values four times seven sign bits and a scale of four bits.
impl Grid<98> for Iq3Xxs {
    const TOP: f32 = 62.0;

    #[inline(always)]
    fn scaled(d: f32, code: u32) -> f32 {
        d * (0.5 + code as i32 as f32) * 0.25 * 2.0
    }

    #[inline(always)]
    fn code(block: &[u8; 98], pair: usize) -> u32 {
        word(block, 66 + 4 * (pair / 2)) >> 28
    }

    #[inline(always)]
    fn eight(block: &[u8; 98], group: usize) -> u64 {
        let [first, second] = [2 * group, 2 * group + 1].map(|i| IQ3_XXS[usize::from(block[2 + i])]);
        signed(pair(first, second), even(word(block, 66 + 4 * (group / 4)) >> (7 * (group % 4))))
    }
}

pub(crate) struct Iq3S;

/// Per four values nine bits of index, the ninth in a byte that eight indices share; a sign bit per value; a scale of
/// four bits per 32 values.
impl Grid<110> for Iq3S {
    const TOP: f32 = 15.0;

    #[inline(always)]
    fn scaled(d: f32, code: u32) -> f32 {
        d * (1 + 2 * code) as i32 as f32
    }

    #[inline(always)]
    fn code(block: &[u8; 110], pair: usize) -> u32 {
        nibble(&block[106..], pair / 2)
    }

    #[inline(always)]
    fn eight(block: &[u8; 110], group: usize) -> u64 {
        let ninth = usize::from(block[66 + group / 4]);
        let entry = |i: usize| IQ3_S[usize::from(block[2 + i]) | (ninth >> (i % 8) & 1) << 8];
        signed(pair(entry(2 * group), entry(2 * group + 1)), block[74 + group])
    }
}
