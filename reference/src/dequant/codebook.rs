//! Four-bit formats whose nibble is an index into a table of values.

use super::half;

/// The sixteen values of IQ4_NL and IQ4_XS.
const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The sixteen values of MXFP4 and NVFP4: e2m1, doubled so that they are integers.
const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// y = d table[q]
pub(super) fn iq4_nl(b: &[u8], y: &mut [f32]) {
    nibbles(half(b, 0), &IQ4, &b[2..18], y);
}

/// Eight sub-blocks of 32 with 6-bit scales less 32: four low bits in scales_l, two high bits in scales_h.
pub(super) fn iq4_xs(b: &[u8], y: &mut [f32]) {
    let (d, high, low, qs) = (half(b, 0), u16::from_le_bytes([b[2], b[3]]), &b[4..8], &b[8..136]);
    for s in 0..8 {
        let scale = i32::from(low[s / 2] >> (4 * (s % 2)) & 15) | i32::from(high >> (2 * s) & 3) << 4;
        nibbles(d * (scale - 32) as f32, &IQ4, &qs[16 * s..16 * s + 16], &mut y[32 * s..32 * s + 32]);
    }
}

/// y = 2^(e - 128) table[q]: half of the e8m0 scale, since the table is doubled
pub(super) fn mxfp4(b: &[u8], y: &mut [f32]) {
    let d = match b[0] {
        e @ 0..=1 => f32::from_bits(1 << (21 + e)), // 2^-128 and 2^-127, below the smallest normal number
        e => f32::from_bits(u32::from(e - 1) << 23),
    };
    nibbles(d, &E2M1, &b[1..17], y);
}

/// Four sub-blocks of 16, each with an unsigned e4m3 scale. y = scale / 2 table[q]
pub(super) fn nvfp4(b: &[u8], y: &mut [f32]) {
    for s in 0..4 {
        nibbles(0.5 * ue4m3(b[s]), &E2M1, &b[4 + 8 * s..12 + 8 * s], &mut y[16 * s..16 * s + 16]);
    }
}

/// Low nibbles give the first half of `y`, high nibbles the second.
fn nibbles(d: f32, table: &[i8; 16], qs: &[u8], y: &mut [f32]) {
    let half = qs.len();
    for (j, q) in qs.iter().enumerate() {
        y[j] = d * f32::from(table[usize::from(q & 15)]);
        y[j + half] = d * f32::from(table[usize::from(q >> 4)]);
    }
}

/// Exponent bias 7, three mantissa bits, no sign; 0x7f would be NaN and counts as zero.
fn ue4m3(x: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(x >> 3 & 15), f32::from(x & 7));
    match x {
        0 | 0x7f => 0.0,
        _ if exponent == 0 => mantissa * 2f32.powi(-9),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    }
}
