//! Plain floats, and the 32-wide formats with one scale (and one minimum) per block. Byte j of a nibble array holds
//! value j in its low half and value j + 16 in its high half.

use super::half;

pub(super) fn f32(b: &[u8], y: &mut [f32]) {
    y[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
}

pub(super) fn f16(b: &[u8], y: &mut [f32]) {
    y[0] = half(b, 0);
}

pub(super) fn bf16(b: &[u8], y: &mut [f32]) {
    y[0] = half::bf16::from_bits(u16::from_le_bytes([b[0], b[1]])).to_f32();
}

/// y = d (q - 8)
pub(super) fn q4_0(b: &[u8], y: &mut [f32]) {
    let (d, qs) = (half(b, 0), &b[2..18]);
    for (j, q) in qs.iter().enumerate() {
        y[j] = (i32::from(q & 15) - 8) as f32 * d;
        y[j + 16] = (i32::from(q >> 4) - 8) as f32 * d;
    }
}

/// y = d q + m
pub(super) fn q4_1(b: &[u8], y: &mut [f32]) {
    let (d, m, qs) = (half(b, 0), half(b, 2), &b[4..20]);
    for (j, q) in qs.iter().enumerate() {
        y[j] = f32::from(q & 15) * d + m;
        y[j + 16] = f32::from(q >> 4) * d + m;
    }
}

/// y = d (q - 16), the fifth bit of value i being bit i of qh
pub(super) fn q5_0(b: &[u8], y: &mut [f32]) {
    let (d, high, qs) = (half(b, 0), fifth_bits(b, 2), &b[6..22]);
    for (j, q) in qs.iter().enumerate() {
        y[j] = (i32::from(q & 15 | high(j)) - 16) as f32 * d;
        y[j + 16] = (i32::from(q >> 4 | high(j + 16)) - 16) as f32 * d;
    }
}

/// y = d q + m, the fifth bit as in Q5_0
pub(super) fn q5_1(b: &[u8], y: &mut [f32]) {
    let (d, m, high, qs) = (half(b, 0), half(b, 2), fifth_bits(b, 4), &b[8..24]);
    for (j, q) in qs.iter().enumerate() {
        y[j] = f32::from(q & 15 | high(j)) * d + m;
        y[j + 16] = f32::from(q >> 4 | high(j + 16)) * d + m;
    }
}

fn fifth_bits(b: &[u8], at: usize) -> impl Fn(usize) -> u8 {
    let qh = u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
    move |i| ((qh >> i & 1) as u8) << 4
}

/// y = d q with signed q
pub(super) fn q8_0(b: &[u8], y: &mut [f32]) {
    let d = half(b, 0);
    for (y, q) in y.iter_mut().zip(&b[2..34]) {
        *y = f32::from(*q as i8) * d;
    }
}
