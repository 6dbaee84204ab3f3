//! The 256-value super-blocks Q2_K to Q6_K: an f16 scale (and minimum) per super-block, small integer scales (and
//! minima) per sub-block of 16 or 32 values. Scales are unpacked first; codes are then cut out of their bytes sixteen
//! at a time.

use super::float::scale;
use super::isa::Codes;
use super::{Format, array, sixteen};

/// NaN where a super-block scale is not finite, since then every value is not: it multiplies or is subtracted
/// everywhere.
#[inline(always)]
fn or_nan(scales: &[f32], bound: f32) -> f32 {
    if scales.iter().all(|s| s.is_finite()) { bound } else { f32::NAN }
}

/// The widest of the ranges [-min, scale * top - min]. Rounding is monotone, so the ends computed as the values are
/// computed enclose every value.
#[inline(always)]
fn widest<const N: usize>(scales: &[f32; N], mins: &[f32; N], top: f32) -> f32 {
    let mut bound = 0.0f32;
    for (d, m) in scales.iter().zip(mins) {
        bound = bound.max(m.abs()).max((d * top - m).abs());
    }
    bound
}

/// `scale` times 16 integer sub-block scales.
#[inline(always)]
fn times<C: Codes>(scale: f32, codes: C) -> [f32; 16] {
    let mut out = [0.0; 16];
    codes.affine(scale, 0.0, &mut out);
    out
}

pub(crate) struct Q2K;

impl Q2K {
    /// Scale and minimum of the 16 sub-blocks of 16.
    #[inline(always)]
    fn scales<C: Codes>(block: &[u8; 84]) -> ([f32; 16], [f32; 16]) {
        let bytes = C::load(array(block, 0));
        (times(scale(block, 80), bytes.bits(0, 15)), times(scale(block, 82), bytes.bits(4, 15)))
    }
}

impl Format<84, 256> for Q2K {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; 84], out: &mut [f32; 256]) {
        let (d, m) = Self::scales::<C>(block);
        for sub in 0..16 {
            let (half, group, part) = (sub / 8, sub / 2 % 4, sub % 2);
            let codes = C::load(array(block, 16 + 32 * half + 16 * part)).bits(2 * group, 3);
            codes.affine(d[sub], m[sub], sixteen(out, 16 * sub));
        }
    }

    #[inline(always)]
    fn bound(block: &[u8; 84]) -> f32 {
        let (d, m) = Self::scales::<super::Baseline>(block);
        or_nan(&[scale(block, 80), scale(block, 82)], widest(&d, &m, 3.0))
    }
}

pub(crate) struct Q3K;

impl Q3K {
    /// Scale of the 16 sub-blocks of 16: 6-bit integers less 32, low nibbles in eight bytes, upper two bits in four.
    #[inline(always)]
    fn scales<C: Codes>(block: &[u8; 110]) -> [f32; 16] {
        let word = |at: usize| u32::from_le_bytes(*array(block, 96 + at));
        let (first, second, upper) = (word(0), word(4), word(8));
        let quarter =
            |low: u32, shift: u32| ((low & 0x0f0f_0f0f) | (((upper >> shift) & 0x0303_0303) << 4)).to_le_bytes();
        let packed = [quarter(first, 0), quarter(second, 2), quarter(first >> 4, 4), quarter(second >> 4, 6)];
        times(scale(block, 108), C::load(array(packed.as_flattened(), 0)).less(32))
    }
}

impl Format<110, 256> for Q3K {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; 110], out: &mut [f32; 256]) {
        let d = Self::scales::<C>(block);
        for (sub, d) in d.into_iter().enumerate() {
            let (half, group, part) = (sub / 8, sub / 2 % 4, sub % 2);
            let low = C::load(array(block, 32 + 32 * half + 16 * part)).bits(2 * group, 3);
            let third = C::load(array(block, 16 * part)).bits(4 * half + group, 1);
            low.with(third, 2).less(4).affine(d, 0.0, sixteen(out, 16 * sub));
        }
    }

    #[inline(always)]
    fn bound(block: &[u8; 110]) -> f32 {
        let scales = Self::scales::<super::Baseline>(block);
        or_nan(&[scale(block, 108)], scales.iter().fold(0.0f32, |bound, d| bound.max((d * 4.0).abs())))
    }
}

/// Scale and minimum of the 8 sub-blocks of 32 of Q4_K and Q5_K, from d, dmin and twelve bytes of 6-bit integers: bytes
/// 0..4 hold scales 0..4, bytes 4..8 minima 0..4, bytes 8..12 the low nibbles of both for 4..8, whose upper two bits
/// are the upper two bits of the first eight bytes.
#[inline(always)]
fn scales_and_mins<const B: usize>(block: &[u8; B]) -> ([f32; 8], [f32; 8]) {
    let (d, dmin) = (scale(block, 0), scale(block, 2));
    let word = |at: usize| u32::from_le_bytes(*array(block, 4 + at));
    let (a, b, c) = (word(0), word(4), word(8));
    let upper = |w: u32| ((w >> 6) & 0x0303_0303) << 4;
    let scales = [(a & 0x3f3f_3f3f).to_le_bytes(), ((c & 0x0f0f_0f0f) | upper(a)).to_le_bytes()];
    let mins = [(b & 0x3f3f_3f3f).to_le_bytes(), (((c >> 4) & 0x0f0f_0f0f) | upper(b)).to_le_bytes()];
    let (mut out_d, mut out_m) = ([0.0; 8], [0.0; 8]);
    for s in 0..8 {
        out_d[s] = d * f32::from(scales.as_flattened()[s]);
        out_m[s] = dmin * f32::from(mins.as_flattened()[s]);
    }
    (out_d, out_m)
}

pub(crate) struct Q4K;

impl Format<144, 256> for Q4K {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; 144], out: &mut [f32; 256]) {
        let (d, m) = scales_and_mins(block);
        for sub in 0..8 {
            for part in 0..2 {
                let codes = C::load(array(block, 16 + 32 * (sub / 2) + 16 * part)).bits(4 * (sub % 2), 15);
                codes.affine(d[sub], m[sub], sixteen(out, 32 * sub + 16 * part));
            }
        }
    }

    #[inline(always)]
    fn bound(block: &[u8; 144]) -> f32 {
        let (d, m) = scales_and_mins(block);
        or_nan(&[scale(block, 0), scale(block, 2)], widest(&d, &m, 15.0))
    }
}

pub(crate) struct Q5K;

impl Format<176, 256> for Q5K {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; 176], out: &mut [f32; 256]) {
        let (d, m) = scales_and_mins(block);
        for sub in 0..8 {
            for part in 0..2 {
                let low = C::load(array(block, 48 + 32 * (sub / 2) + 16 * part)).bits(4 * (sub % 2), 15);
                let fifth = C::load(array(block, 16 + 16 * part)).bits(sub, 1);
                low.with(fifth, 4).affine(d[sub], m[sub], sixteen(out, 32 * sub + 16 * part));
            }
        }
    }

    #[inline(always)]
    fn bound(block: &[u8; 176]) -> f32 {
        let (d, m) = scales_and_mins(block);
        or_nan(&[scale(block, 0), scale(block, 2)], widest(&d, &m, 31.0))
    }
}

pub(crate) struct Q6K;

impl Q6K {
    /// Scale of the 16 sub-blocks of 16.
    #[inline(always)]
    fn scales<C: Codes>(block: &[u8; 210]) -> [f32; 16] {
        times(scale(block, 208), C::load(array(block, 192)))
    }
}

impl Format<210, 256> for Q6K {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; 210], out: &mut [f32; 256]) {
        let d = Self::scales::<C>(block);
        for (sub, d) in d.into_iter().enumerate() {
            // Quarter k takes nibbles of bytes 32 * (k & 1).., low ones for k < 2, and bits 2k, 2k + 1 of the high
            // bytes.
            let (half, quarter, part) = (sub / 8, sub / 2 % 4, sub % 2);
            let low = C::load(array(block, 64 * half + 32 * (quarter & 1) + 16 * part)).bits(4 * (quarter >> 1), 15);
            let upper = C::load(array(block, 128 + 32 * half + 16 * part)).bits(2 * quarter, 3);
            low.with(upper, 4).less(32).affine(d, 0.0, sixteen(out, 16 * sub));
        }
    }

    #[inline(always)]
    fn bound(block: &[u8; 210]) -> f32 {
        let scales = Self::scales::<super::Baseline>(block);
        or_nan(&[scale(block, 208)], scales.iter().fold(0.0f32, |bound, d| bound.max((d * 32.0).abs())))
    }
}
