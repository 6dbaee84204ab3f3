//! The cache, the indexer and absorbed attention of the CPU device, one task per token.

use std::ops::Range;

use rayon::prelude::*;

use super::simd::{Kernels, Lanes, TILE_TOKENS, axpy};
use super::{CpuBuf, CpuCache, CpuIndex};
use crate::device::{Batch, View};
use crate::quant::Isa;

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
    pub q_heads: View,
    pub weights: &'a CpuBuf,
    pub weight_cols: Range<usize>,
    pub inputs: &'a Batch,
    pub top_k: usize,
}

impl Indexer<'_> {
    /// Chooses for every token; fills `scores` when given.
    pub fn run(&self, n: usize, chosen: &mut CpuIndex, scores: Option<&mut CpuBuf>) {
        let keys: usize = self.inputs.tokens.iter().take(n).map(|t| t.position as usize + 1).sum();
        let work = keys * self.q_heads.heads * self.q_heads.width;
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
        let w = &self.weights.row(t)[self.weight_cols.clone()];
        let (kernels, heads) = (Kernels::new(Isa::best()), heads_of(self.q.row(t), self.q_heads));
        let mut products = vec![0.0; w.len()];
        for (p, out) in out.iter_mut().enumerate() {
            let key = self.cache.row(self.layer, self.cache.slot(table, p));
            dots(&kernels, [(key, &heads)], &mut products);
            *out = w.iter().zip(&products).fold(0.0, |sum, (w, product)| sum + w * relu(*product));
        }
    }
}

/// NaN stays NaN: a damaged key must show.
fn relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
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
    pub latent_heads: View,
    pub q_rope: &'a CpuBuf,
    pub rope_heads: View,
    pub scale: f32,
    pub chosen: Option<&'a CpuIndex>,
    pub inputs: &'a Batch,
}

impl Attention<'_> {
    /// Attends for every token: `out[t][h * latent..]`.
    pub fn run(&self, n: usize, out: &mut CpuBuf) {
        let per_key = self.latent_heads.heads * (2 * self.latent_heads.width + self.rope_heads.width);
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
        let (latent, count, keys) = (self.latent_heads.width, self.latent_heads.heads, slots.len());
        let q_latent = heads_of(self.q_latent.row(t), self.latent_heads);
        let q_rope = heads_of(self.q_rope.row(t), self.rope_heads);
        let kernels = Kernels::new(Isa::best());
        let mut products = vec![0.0; count];
        // Scores key by key, since all heads read the same row; `p` is [heads][keys].
        let mut p = vec![0.0f32; count * keys];
        for (k, slot) in slots.iter().enumerate() {
            let row = self.cache.row(self.layer, *slot);
            dots(&kernels, [(&row[..latent], &q_latent), (&row[latent..], &q_rope)], &mut products);
            for (h, product) in products.iter().enumerate() {
                p[h * keys + k] = product * self.scale;
            }
        }
        out.fill(0.0);
        let row = |slot: usize| &self.cache.row(self.layer, slot)[..latent];
        for (p, out) in p.chunks_exact_mut(keys.max(1)).zip(out.chunks_exact_mut(latent)) {
            softmax(p);
            let ((fours, last), (slots, last_slots)) = (p.as_chunks::<4>(), slots.as_chunks::<4>());
            for (p, slots) in fours.iter().zip(slots) {
                kernels.axpy_four(*p, slots.map(row), out);
            }
            for (p, slot) in last.iter().zip(last_slots) {
                axpy(*p, row(*slot), out);
            }
        }
    }
}

/// The heads of one row.
fn heads_of(row: &[f32], heads: View) -> Vec<&[f32]> {
    heads.ranges().map(|cols| &row[cols]).collect()
}

/// The product of a key with every head, both given in the same parts: their columns run on in the same lanes, and each
/// product is totalled once.
fn dots<const P: usize>(kernels: &Kernels, parts: [(&[f32], &[&[f32]]); P], out: &mut [f32]) {
    for (i, out) in out.chunks_mut(TILE_TOKENS).enumerate() {
        let mut sums = [Lanes::ZERO; TILE_TOKENS];
        let sums = &mut sums[..out.len()];
        for (part, (key, heads)) in parts.into_iter().enumerate() {
            kernels.tile(key, &heads[i * TILE_TOKENS..][..out.len()], sums, part == 0);
        }
        kernels.totals(sums, out);
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
