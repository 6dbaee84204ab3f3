//! The 32-value formats with one scale per block: Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0. Nibble byte j holds value j (low
//! half) and value j + 16 (high half); the fifth bits of Q5 sit in one u32, bit i for value i.

use super::float::scale;
use super::isa::Codes;
use super::{Format, array, sixteen};

/// Value range [lo, hi] to a bound, NaN kept: `f32::max` would drop it.
#[inline(always)]
fn widest(lo: f32, hi: f32) -> f32 {
    if lo.is_nan() || hi.is_nan() { f32::NAN } else { lo.abs().max(hi.abs()) }
}

pub(crate) struct Q4_0;

impl Format<18, 32> for Q4_0 {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; 18], out: &mut [f32; 32]) {
        let d = scale(block, 0);
        let bytes = C::load(array(block, 2));
        bytes.bits(0, 15).less(8).affine(d, 0.0, sixteen(out, 0));
        bytes.bits(4, 15).less(8).affine(d, 0.0, sixteen(out, 16));
    }

    #[inline(always)]
    fn bound(block: &[u8; 18]) -> f32 {
        (scale(block, 0) * 8.0).abs()
    }
}

pub(crate) struct Q4_1;

impl Format<20, 32> for Q4_1 {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; 20], out: &mut [f32; 32]) {
        let (d, m) = (scale(block, 0), scale(block, 2));
        let bytes = C::load(array(block, 4));
        // d * code + m, since subtracting -m is adding m.
        bytes.bits(0, 15).affine(d, -m, sixteen(out, 0));
        bytes.bits(4, 15).affine(d, -m, sixteen(out, 16));
    }

    #[inline(always)]
    fn bound(block: &[u8; 20]) -> f32 {
        let (d, m) = (scale(block, 0), scale(block, 2));
        widest(m, d * 15.0 + m)
    }
}

/// The five-bit codes of values 0..16 and 16..32 of a Q5 block, whose high bits (4 bytes) and nibbles (16) begin at
/// `at`.
#[inline(always)]
fn five_bit<C: Codes, const B: usize>(block: &[u8; B], at: usize) -> [C; 2] {
    let high = u32::from_le_bytes(*array(block, at));
    let nibbles = C::load(array(block, at + 4));
    let (first, second) = (C::fifth(high as u16), C::fifth((high >> 16) as u16));
    [nibbles.bits(0, 15).with(first, 0), nibbles.bits(4, 15).with(second, 0)]
}

pub(crate) struct Q5_0;

impl Format<22, 32> for Q5_0 {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; 22], out: &mut [f32; 32]) {
        let d = scale(block, 0);
        for (half, codes) in five_bit::<C, _>(block, 2).into_iter().enumerate() {
            codes.less(16).affine(d, 0.0, sixteen(out, 16 * half));
        }
    }

    #[inline(always)]
    fn bound(block: &[u8; 22]) -> f32 {
        (scale(block, 0) * 16.0).abs()
    }
}

pub(crate) struct Q5_1;

impl Format<24, 32> for Q5_1 {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; 24], out: &mut [f32; 32]) {
        let (d, m) = (scale(block, 0), scale(block, 2));
        for (half, codes) in five_bit::<C, _>(block, 4).into_iter().enumerate() {
            codes.affine(d, -m, sixteen(out, 16 * half));
        }
    }

    #[inline(always)]
    fn bound(block: &[u8; 24]) -> f32 {
        let (d, m) = (scale(block, 0), scale(block, 2));
        widest(m, d * 31.0 + m)
    }
}

pub(crate) struct Q8_0;

impl Format<34, 32> for Q8_0 {
    #[inline(always)]
    fn expand<C: Codes>(block: &[u8; 34], out: &mut [f32; 32]) {
        let d = scale(block, 0);
        for half in 0..2 {
            C::load(array(block, 2 + 16 * half)).affine(d, 0.0, sixteen(out, 16 * half));
        }
    }

    #[inline(always)]
    fn bound(block: &[u8; 34]) -> f32 {
        (scale(block, 0) * 128.0).abs()
    }
}
