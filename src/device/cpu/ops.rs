//! Element-wise operations, norms, rope and the router of the CPU device: plain functions over rows.

use super::simd::dot;
use crate::device::Router;
use crate::model::Gating;

/// cos and sin per position and pair. Angles, cos and sin are computed in f64 and rounded once: f32 angles would be off
/// by several noise floors a few hundred positions in.
#[derive(Debug, Default)]
pub struct RopeTable {
    made_for: (u64, usize),
    angles: Vec<(f32, f32)>,
}

impl RopeTable {
    /// (cos, sin) of each of `width / 2` pairs at a position.
    pub fn at(&mut self, base: f64, width: usize, position: usize) -> &[(f32, f32)] {
        let pairs = width / 2;
        if self.made_for != (base.to_bits(), width) {
            self.made_for = (base.to_bits(), width);
            self.angles.clear();
        }
        for p in self.angles.len() / pairs..=position {
            for i in 0..pairs {
                let (sin, cos) = (p as f64 * base.powf(-2.0 * i as f64 / width as f64)).sin_cos();
                self.angles.push((cos as f32, sin as f32));
            }
        }
        &self.angles[position * pairs..(position + 1) * pairs]
    }
}

/// Rotates adjacent pairs in place.
pub fn rotate_pairs(x: &mut [f32], angles: &[(f32, f32)]) {
    for (pair, (cos, sin)) in x.chunks_exact_mut(2).zip(angles) {
        let (a, b) = (pair[0], pair[1]);
        pair[0] = a * cos - b * sin;
        pair[1] = b * cos + a * sin;
    }
}

/// `out = w * x / sqrt(mean(x^2) + eps)`.
pub fn rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    let scale = 1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt();
    for ((out, x), w) in out.iter_mut().zip(x).zip(w) {
        *out = x * scale * w;
    }
}

/// `x = w * (x - mean) / sqrt(variance + eps) + b`, in place.
pub fn layer_norm(x: &mut [f32], w: &[f32], b: &[f32], eps: f32) {
    let n = x.len() as f32;
    let mean = x.iter().sum::<f32>() / n;
    x.iter_mut().for_each(|v| *v -= mean);
    let scale = 1.0 / (dot(x, x) / n + eps).sqrt();
    for ((x, w), b) in x.iter_mut().zip(w).zip(b) {
        *x = *x * scale * w + b;
    }
}

/// `out = silu(gate) * up`, gate and up side by side.
pub fn swiglu(gate_up: &[f32], out: &mut [f32]) {
    let (gate, up) = gate_up.split_at(out.len());
    for ((out, g), u) in out.iter_mut().zip(gate).zip(up) {
        *out = g / (1.0 + (-g).exp()) * u;
    }
}

/// Router scores of all experts.
fn gate(router: &Router, logits: &[f32], out: &mut [f32]) {
    match router.gating {
        Gating::Sigmoid => out.iter_mut().zip(logits).for_each(|(s, l)| *s = 1.0 / (1.0 + (-l).exp())),
        Gating::Softmax => {
            let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            out.iter_mut().zip(logits).for_each(|(s, l)| *s = (l - most).exp());
            let sum: f32 = out.iter().sum();
            out.iter_mut().for_each(|s| *s /= sum);
        }
    }
}

/// Scores plus bias, -inf outside the groups that are used. A group counts as the sum of its two best.
pub fn choice_scores(router: &Router, logits: &[f32], bias: &[f32], scores: &mut [f32]) {
    gate(router, logits, scores);
    scores.iter_mut().zip(bias).for_each(|(s, b)| *s += b);
    if router.groups_used == router.groups {
        return;
    }
    let size = router.experts / router.groups;
    let group_scores: Vec<f32> = scores
        .chunks_exact(size)
        .map(|g| {
            let mut two = [-1; 2];
            best(g, &mut two[..size.min(2)]);
            two.iter().filter_map(|i| usize::try_from(*i).ok()).map(|i| g[i]).sum()
        })
        .collect();
    let mut used = vec![-1; router.groups_used];
    best(&group_scores, &mut used);
    for (g, group) in scores.chunks_exact_mut(size).enumerate() {
        if !used.contains(&(g as i32)) {
            group.fill(f32::NEG_INFINITY);
        }
    }
}

/// The indices of the largest scores, best first; ties go to the lowest index.
pub fn best(scores: &[f32], out: &mut [i32]) {
    for slot in 0..out.len() {
        let taken = &out[..slot];
        let mut top: Option<usize> = None;
        for (i, s) in scores.iter().enumerate() {
            if !taken.contains(&(i as i32)) && top.is_none_or(|t| *s > scores[t]) {
                top = Some(i);
            }
        }
        out[slot] = top.map_or(-1, |t| t as i32);
    }
}

/// The guard of the denominator, as transformers has it.
const SUM_GUARD: f32 = 1e-20;

/// Unbiased scores of the chosen experts, divided by their sum where the model says so, times the routed scale.
pub fn expert_weights(router: &Router, logits: &[f32], ids: &[i32], weights: &mut [f32]) {
    let mut scores = vec![0.0; router.experts];
    gate(router, logits, &mut scores);
    for (w, id) in weights.iter_mut().zip(ids) {
        *w = usize::try_from(*id).ok().and_then(|i| scores.get(i)).copied().unwrap_or(0.0);
    }
    let sum: f32 = if router.normalise { weights.iter().sum::<f32>() + SUM_GUARD } else { 1.0 };
    weights.iter_mut().for_each(|w| *w = *w / sum * router.factor);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_breaks_ties_to_the_lowest_index() {
        let mut out = [0; 3];
        best(&[1.0, 3.0, 3.0, 2.0], &mut out);
        assert_eq!(out, [1, 2, 3]);
        let mut out = [0; 3];
        best(&[1.0, 2.0], &mut out);
        assert_eq!(out, [1, 0, -1]);
    }

    #[test]
    fn rotation_keeps_length_and_turns_adjacent_pairs() {
        let mut table = RopeTable::default();
        let mut x = [1.0, 0.0, 0.0, 2.0];
        rotate_pairs(&mut x, table.at(10_000.0, 4, 1));
        assert!((x[0] - 1f32.cos()).abs() < 1e-7 && (x[1] - 1f32.sin()).abs() < 1e-7);
        assert!((x[2] + 2.0 * 0.01f32.sin()).abs() < 1e-7 && (x[3] - 2.0 * 0.01f32.cos()).abs() < 1e-6);
        let mut still = [3.0, 4.0, 5.0, 6.0];
        rotate_pairs(&mut still, table.at(10_000.0, 4, 0));
        assert_eq!(still, [3.0, 4.0, 5.0, 6.0]);
    }
}
