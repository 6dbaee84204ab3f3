//! The 256-wide formats: a super-block of sub-blocks, each with its own small scale (and minimum) that one or two half-
//! precision numbers multiply. The order of the roundings is part of the format: (d * scale) is rounded before it meets
//! q.

use super::half;

/// Two halves n of 128 values, four groups j of 32, two parts h of 16, one scale byte per part.
/// y = d (scale & 15) q - dmin (scale >> 4), q = two bits
pub(super) fn q2_k(b: &[u8], y: &mut [f32]) {
    let (scales, qs, d, dmin) = (&b[0..16], &b[16..80], half(b, 80), half(b, 82));
    for (n, j, h) in parts() {
        let s = scales[8 * n + 2 * j + h];
        let (dl, ml) = (d * f32::from(s & 15), dmin * f32::from(s >> 4));
        for l in 0..16 {
            let q = qs[32 * n + 16 * h + l] >> (2 * j) & 3;
            y[128 * n + 32 * j + 16 * h + l] = dl * f32::from(q) - ml;
        }
    }
}

/// As Q2_K with sixteen 6-bit scales less 32 and a third bit of q, whose absence means -4.
pub(super) fn q3_k(b: &[u8], y: &mut [f32]) {
    let (mask, qs, s, d) = (&b[0..32], &b[32..96], &b[96..108], half(b, 108));
    let scale = |i: usize| {
        let low = if i < 8 { s[i] & 15 } else { s[i - 8] >> 4 };
        let high = s[8 + i % 4] >> (2 * (i / 4)) & 3;
        i32::from(low | high << 4) - 32
    };
    for (n, j, h) in parts() {
        let dl = d * scale(8 * n + 2 * j + h) as f32;
        for l in 0..16 {
            let q = i32::from(qs[32 * n + 16 * h + l] >> (2 * j) & 3);
            let set = mask[16 * h + l] >> (4 * n + j) & 1 == 1;
            y[128 * n + 32 * j + 16 * h + l] = dl * (if set { q } else { q - 4 }) as f32;
        }
    }
}

/// Eight sub-blocks of 32. y = d scale q - dmin min, q = four bits
pub(super) fn q4_k(b: &[u8], y: &mut [f32]) {
    let (d, dmin, scales, qs) = (half(b, 0), half(b, 2), &b[4..16], &b[16..144]);
    for s in 0..8 {
        let (scale, min) = scale_and_min(scales, s);
        let (dl, ml) = (d * f32::from(scale), dmin * f32::from(min));
        for l in 0..32 {
            let q = qs[32 * (s / 2) + l] >> (4 * (s % 2)) & 15;
            y[32 * s + l] = dl * f32::from(q) - ml;
        }
    }
}

/// As Q4_K; bit s of qh[l] is the fifth bit of value l of sub-block s.
pub(super) fn q5_k(b: &[u8], y: &mut [f32]) {
    let (d, dmin, scales, qh, qs) = (half(b, 0), half(b, 2), &b[4..16], &b[16..48], &b[48..176]);
    for s in 0..8 {
        let (scale, min) = scale_and_min(scales, s);
        let (dl, ml) = (d * f32::from(scale), dmin * f32::from(min));
        for l in 0..32 {
            let q = qs[32 * (s / 2) + l] >> (4 * (s % 2)) & 15 | (qh[l] >> s & 1) << 4;
            y[32 * s + l] = dl * f32::from(q) - ml;
        }
    }
}

/// Sixteen sub-blocks of 16 with signed 8-bit scales. y = (d scale) (q - 32), q = four bits of ql and two of qh
pub(super) fn q6_k(b: &[u8], y: &mut [f32]) {
    let (ql, qh, scales, d) = (&b[0..128], &b[128..192], &b[192..208], half(b, 208));
    for n in 0..2 {
        for group in 0..4 {
            for l in 0..32 {
                let low = ql[64 * n + 32 * (group % 2) + l] >> (4 * (group / 2)) & 15;
                let high = qh[32 * n + l] >> (2 * group) & 3;
                let scale = scales[8 * n + 2 * group + l / 16] as i8;
                y[128 * n + 32 * group + l] = d * f32::from(scale) * (i32::from(low | high << 4) - 32) as f32;
            }
        }
    }
}

fn parts() -> impl Iterator<Item = (usize, usize, usize)> {
    (0..16).map(|i| (i / 8, i / 2 % 4, i % 2))
}

/// The 6-bit scale and minimum of sub-block `s`, packed in 12 bytes.
fn scale_and_min(b: &[u8], s: usize) -> (u8, u8) {
    if s < 4 {
        (b[s] & 63, b[s + 4] & 63)
    } else {
        (b[s + 4] & 15 | (b[s - 4] >> 6) << 4, b[s + 4] >> 4 | (b[s] >> 6) << 4)
    }
}
