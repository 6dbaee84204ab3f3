//! Formats whose codes are indices into a grid: an entry gives the magnitudes of eight (IQ2) or four (IQ3) values in
//! a row. A block has 256 values; where signs take seven bits for eight values, the last sign is the parity of the
//! others.

use super::{grids, half};

const IQ2_LEVELS: [i8; 3] = [0x08, 0x19, 0x2b];
const IQ3_XXS_LEVELS: [i8; 8] = [0x04, 0x0c, 0x14, 0x1c, 0x24, 0x2c, 0x34, 0x3e];
const IQ3_S_LEVELS: [i8; 8] = [1, 3, 5, 7, 9, 11, 13, 15];

/// Writes entry `index` of a grid, times `d`, to `y`; bit j of `signs` negates value j.
fn entry(d: f32, grid: &[u8], levels: &[i8], index: usize, signs: u32, y: &mut [f32]) {
    let width = y.len();
    for (j, (y, digit)) in y.iter_mut().zip(&grid[width * index..]).enumerate() {
        let magnitude = levels[usize::from(digit - b'0')];
        let sign = if signs >> j & 1 == 1 { -1.0 } else { 1.0 };
        *y = d * f32::from(magnitude) * sign;
    }
}

/// Seven sign bits and the eighth.
fn with_parity(bits: u32) -> u32 {
    let bits = bits & 0x7f;
    bits | (bits.count_ones() % 2) << 7
}

fn word(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// Four bits of a byte, the low ones for even `i`.
fn nibble(b: &[u8], i: usize) -> u8 {
    b[i / 2] >> (4 * (i % 2)) & 15
}

/// Eight sub-blocks of 32: four index bytes, then a word of four times seven sign bits and the scale.
/// y = d (1/2 + scale) / 4 grid
pub(super) fn iq2_xxs(b: &[u8], y: &mut [f32]) {
    let (d, qs) = (half(b, 0), &b[2..66]);
    for (i, y) in y.chunks_exact_mut(8).enumerate() {
        let (sub, l) = (i / 4, i % 4);
        let rest = word(qs, 8 * sub + 4);
        let dl = d * (0.5 + (rest >> 28) as f32) * 0.25;
        let index = usize::from(qs[8 * sub + l]);
        entry(dl, grids::IQ2_XXS, &IQ2_LEVELS, index, with_parity(rest >> (7 * l)), y);
    }
}

/// Per eight values nine bits of index and seven sign bits; a scale for 16 values. y as in IQ2_XXS
pub(super) fn iq2_xs(b: &[u8], y: &mut [f32]) {
    let (d, qs, scales) = (half(b, 0), &b[2..66], &b[66..74]);
    for (i, y) in y.chunks_exact_mut(8).enumerate() {
        let code = u16::from_le_bytes([qs[2 * i], qs[2 * i + 1]]);
        let dl = d * (0.5 + f32::from(nibble(scales, i / 2))) * 0.25;
        entry(dl, grids::IQ2_XS, &IQ2_LEVELS, usize::from(code % 512), with_parity(u32::from(code / 512)), y);
    }
}

/// Per eight values ten bits of index, the upper two from qh, and a byte of signs; a scale for 16 values. y as in
/// IQ2_XXS
pub(super) fn iq2_s(b: &[u8], y: &mut [f32]) {
    let (d, qs, signs, qh, scales) = (half(b, 0), &b[2..34], &b[34..66], &b[66..74], &b[74..82]);
    for (i, y) in y.chunks_exact_mut(8).enumerate() {
        let index = usize::from(qs[i]) + 256 * usize::from(qh[i / 4] >> (2 * (i % 4)) & 3);
        let dl = d * (0.5 + f32::from(nibble(scales, i / 2))) * 0.25;
        entry(dl, grids::IQ2_S, &IQ2_LEVELS, index, u32::from(signs[i]), y);
    }
}

/// Per four values an index byte; per 32 a word of four times seven sign bits and the scale.
/// y = d (1/2 + scale) / 2 grid
pub(super) fn iq3_xxs(b: &[u8], y: &mut [f32]) {
    let (d, qs, rest) = (half(b, 0), &b[2..66], &b[66..98]);
    for (i, y) in y.chunks_exact_mut(4).enumerate() {
        let rest = word(rest, 4 * (i / 8));
        let signs = with_parity(rest >> (7 * (i / 2 % 4))) >> (4 * (i % 2));
        let dl = d * (0.5 + (rest >> 28) as f32) * 0.5;
        entry(dl, grids::IQ3_XXS, &IQ3_XXS_LEVELS, usize::from(qs[i]), signs, y);
    }
}

/// Per four values nine bits of index, the ninth from qh; a bit of sign per value; a scale for 32 values.
/// y = d (1 + 2 scale) grid
pub(super) fn iq3_s(b: &[u8], y: &mut [f32]) {
    let (d, qs, qh, signs, scales) = (half(b, 0), &b[2..66], &b[66..74], &b[74..106], &b[106..110]);
    for (i, y) in y.chunks_exact_mut(4).enumerate() {
        let index = usize::from(qs[i]) + 256 * usize::from(qh[i / 8] >> (i % 8) & 1);
        let dl = d * f32::from(1 + 2 * nibble(scales, i / 8));
        entry(dl, grids::IQ3_S, &IQ3_S_LEVELS, index, u32::from(signs[i / 2] >> (4 * (i % 2))), y);
    }
}
