//! The cache, the indexer and absorbed attention of the CPU device, one task per token.

use std::ops::Range;

use rayon::prelude::*;

use super::simd::{axpy, dot};
use super::{CpuBuf, CpuCache, CpuIndex};
use crate::device::Heads;
use crate::engine::batch::Batch;

/// Multiply-adds below which one thread is faster than waking others.
const PARALLEL_FROM: usize = 1 << 20;

/// Writes each token's columns to its place.
pub fn append(
    cache: &mut CpuCache,
    layer: usize,
    x: &CpuBuf,
    cols: Range<usize>,
    inputs: &Batch,
    n: usize,
) -> Result<(), String> {
    let width = cache.shape.width;
    for (t, token) in inputs.tokens.iter().take(n).enumerate() {
        let table = &inputs.tables[token.sequence as usize];
        let page = token.position as usize / cache.shape.page;
        if table.get(page).is_none_or(|p| *p as usize >= cache.shape.pages) {
            return Err(format!("position {} has no page in its block table", token.position));
        }
        let slot = cache.slot(table, token.position as usize);
        cache.layers[layer][slot * width..(slot + 1) * width].copy_from_slice(&x.row(t)[cols.clone()]);
    }
    Ok(())
}

/// Runs one task per row of `out`, on several threads when `work` multiply-adds are worth it.
fn for_rows<T: Send>(out: &mut [T], width: usize, work: usize, task: impl Fn(usize, &mut [T]) + Sync) {
    if work < PARALLEL_FROM {
        out.chunks_exact_mut(width).enumerate().for_each(|(t, row)| task(t, row));
    } else {
        out.par_chunks_exact_mut(width).enumerate().for_each(|(t, row)| task(t, row));
    }
}

/// Operands of the indexer.
pub struct Indexer<'a> {
    pub cache: &'a CpuCache,
    pub layer: usize,
    pub q: &'a CpuBuf,
    pub q_heads: Heads,
    pub weights: &'a CpuBuf,
    pub weight_cols: Range<usize>,
    pub inputs: &'a Batch,
    pub top_k: usize,
}

impl Indexer<'_> {
    /// Chooses for every token; fills `scores` when given.
    pub fn run(&self, n: usize, chosen: &mut CpuIndex, scores: Option<&mut CpuBuf>) {
        let keys: usize = self.inputs.tokens.iter().take(n).map(|t| t.position as usize + 1).sum();
        let work = keys * self.q_heads.count * self.q_heads.width;
        let width = chosen.width;
        let visible = |t: usize| self.inputs.tokens[t].position as usize + 1;
        match scores {
            Some(buf) => {
                let stride = buf.width;
                for_rows(&mut buf.data[..n * stride], stride, work, |t, row| {
                    row.fill(f32::NEG_INFINITY);
                    let seen = visible(t).min(stride);
                    self.score(t, &mut row[..seen]);
                });
                for t in 0..n {
                    choose(&buf.row(t)[..visible(t).min(stride)], self.top_k, chosen.row_mut(t));
                }
            }
            None => for_rows(&mut chosen.data[..n * width], width, work, |t, row| {
                let seen = visible(t);
                if seen <= self.top_k {
                    choose_all(seen, row); // every score would be chosen
                } else {
                    let mut scores = vec![0.0; seen];
                    self.score(t, &mut scores);
                    choose(&scores, self.top_k, row);
                }
            }),
        }
    }

    /// Scores of the first keys: sum over heads of weight * relu(q . k), heads in order.
    fn score(&self, t: usize, out: &mut [f32]) {
        let table = &self.inputs.tables[self.inputs.tokens[t].sequence as usize];
        let (q, w) = (self.q.row(t), &self.weights.row(t)[self.weight_cols.clone()]);
        for (p, out) in out.iter_mut().enumerate() {
            let key = self.cache.row(self.layer, self.cache.slot(table, p));
            let mut sum = 0.0;
            for (h, w) in w.iter().enumerate() {
                let start = self.q_heads.start + h * self.q_heads.stride;
                sum += w * dot(&q[start..start + self.q_heads.width], key).max(0.0);
            }
            *out = sum;
        }
    }
}

fn choose_all(seen: usize, out: &mut [i32]) {
    for (p, out) in out.iter_mut().enumerate() {
        *out = if p < seen { p as i32 } else { -1 };
    }
}

/// The `top_k` best of `scores`, ascending by position; ties go to the lowest.
fn choose(scores: &[f32], top_k: usize, out: &mut [i32]) {
    if scores.len() <= top_k {
        return choose_all(scores.len(), out);
    }
    let mut order: Vec<i32> = (0..scores.len() as i32).collect();
    let by_score = |a: &i32, b: &i32| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b));
    order.select_nth_unstable_by(top_k - 1, by_score);
    order.truncate(top_k);
    order.sort_unstable();
    out[..top_k].copy_from_slice(&order);
    out[top_k..].fill(-1);
}

/// Operands of absorbed attention.
pub struct Attention<'a> {
    pub cache: &'a CpuCache,
    pub layer: usize,
    pub q_latent: &'a CpuBuf,
    pub latent_heads: Heads,
    pub q_rope: &'a CpuBuf,
    pub rope_heads: Heads,
    pub scale: f32,
    pub chosen: Option<&'a CpuIndex>,
    pub inputs: &'a Batch,
}

impl Attention<'_> {
    /// Attends for every token: `out[t][h * latent..]`.
    pub fn run(&self, n: usize, out: &mut CpuBuf) {
        let per_key = self.latent_heads.count * (2 * self.latent_heads.width + self.rope_heads.width);
        let most = self.chosen.map_or(usize::MAX, |c| c.width);
        let keys: usize = self.inputs.tokens.iter().take(n).map(|t| (t.position as usize + 1).min(most)).sum();
        let width = out.width;
        for_rows(&mut out.data[..n * width], width, keys * per_key, |t, row| self.token(t, row));
    }

    fn token(&self, t: usize, out: &mut [f32]) {
        let token = self.inputs.tokens[t];
        let table = &self.inputs.tables[token.sequence as usize];
        let slots: Vec<usize> = match self.chosen {
            Some(chosen) => {
                let positions = chosen.row(t).iter().filter_map(|p| usize::try_from(*p).ok());
                positions.filter(|p| *p <= token.position as usize).map(|p| self.cache.slot(table, p)).collect()
            }
            None => (0..=token.position as usize).map(|p| self.cache.slot(table, p)).collect(),
        };
        let latent = self.latent_heads.width;
        let mut p = vec![0.0f32; slots.len()];
        for h in 0..self.latent_heads.count {
            let at = self.latent_heads.start + h * self.latent_heads.stride;
            let q_latent = &self.q_latent.row(t)[at..at + latent];
            let at = self.rope_heads.start + h * self.rope_heads.stride;
            let q_rope = &self.q_rope.row(t)[at..at + self.rope_heads.width];
            for (p, slot) in p.iter_mut().zip(&slots) {
                let row = self.cache.row(self.layer, *slot);
                *p = (dot(q_latent, &row[..latent]) + dot(q_rope, &row[latent..])) * self.scale;
            }
            softmax(&mut p);
            let out = &mut out[h * latent..(h + 1) * latent];
            out.fill(0.0);
            for (p, slot) in p.iter().zip(&slots) {
                axpy(*p, &self.cache.row(self.layer, *slot)[..latent], out);
            }
        }
    }
}

fn softmax(x: &mut [f32]) {
    let most = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    x.iter_mut().for_each(|v| *v = (*v - most).exp());
    let sum: f32 = x.iter().sum();
    x.iter_mut().for_each(|v| *v /= sum);
}

#[cfg(test)]
mod tests {
    use super::choose;

    #[test]
    fn ties_at_the_boundary_go_to_the_lowest_position() {
        let mut out = [0; 4];
        choose(&[0.0, 1.0, 0.0, 2.0, 0.0], 4, &mut out);
        assert_eq!(out, [0, 1, 2, 3]);
        choose(&[0.5, 0.25], 4, &mut out);
        assert_eq!(out, [0, 1, -1, -1]);
    }
}
