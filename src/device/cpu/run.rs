//! The operations of the CPU device: each finds its operands and runs over the step's rows. A buffer that is written is
//! taken out for the time, so that all others can be read.

use std::mem::take;

use super::attention::{self, Attention, Indexer};
use super::matmul::{self, Job, JobRows, MatmulError, Strided, StridedMut};
use super::memory::{Aligned, CpuBuf, Part, by_expert};
use super::{CpuDevice, ops, simd};
use crate::comm::Collective;
use crate::device::{BufId, Call, Device, DeviceError, Draw, IndexId, Op, StepShape, Token, View, WeightId};
use crate::quant::dequantise;

/// What went wrong; the place is the call's.
type Done = Result<(), String>;

/// Activations as products take them.
fn strided(buf: &CpuBuf, start: usize) -> Strided<'_> {
    Strided { data: &buf.data, offset: start, stride: buf.width }
}

/// Calls `product` with activations as wide as the stored columns: `x` itself, or a copy that is zero outside the rank's
/// own columns.
fn covered(
    padded: &mut Vec<f32>,
    part: &Part,
    x: Strided<'_>,
    rows: usize,
    product: &mut dyn FnMut(Strided<'_>) -> Result<(), MatmulError>,
) -> Result<(), MatmulError> {
    if part.is_aligned() {
        return product(x);
    }
    padded.clear();
    padded.resize(rows * part.covered, 0.0);
    for t in 0..rows {
        let from = x.offset + t * x.stride;
        padded[t * part.covered..][part.cols.clone()].copy_from_slice(&x.data[from..from + part.cols.len()]);
    }
    product(Strided { data: padded, offset: 0, stride: part.covered })
}

impl CpuDevice {
    /// Runs a call over the rows of the step that it is for.
    pub(super) fn call(&mut self, call: &Call, shape: StepShape) -> Result<(), DeviceError> {
        let n = shape.rows(call.rows);
        let done = match call.op {
            Op::AllReduce { x } => return self.sum(call, x, n),
            Op::Share { .. } => return self.share(call),
            Op::Embed { table, first_row, out } => self.embed(table, first_row, out, n),
            Op::Product { w, x, out, .. } if x.heads > 1 => self.product_of_heads(w, x, out, n),
            Op::Product { w, x, out, .. } => self.product(w, x, out, n),
            Op::RmsNorm { x, w, eps, out } => self.rms_norm(x, w, eps, out, n),
            Op::LayerNorm { x, w, b, eps } => {
                self.in_place(x, n, |d, row| ops::layer_norm(row, &d.bufs[w.0].data, &d.bufs[b.0].data, eps))
            }
            Op::Rope { x, base } => self.rope(x, base, n),
            Op::Scale { x, factor } => self.in_place(x, n, |_, row| row.iter_mut().for_each(|v| *v *= factor)),
            Op::Copy { x, out } => self.between(x, out, n, |_, t| t, |from, to| to.copy_from_slice(from)),
            Op::GatherRows { x, out } => {
                let wanted = |d: &Self, i: usize| d.inputs.logits[i] as usize;
                self.between(x, out, n, wanted, |from, to| to.copy_from_slice(from))
            }
            Op::Add { x, y } => self.add(x, y, n),
            Op::AddNorm { x, y, w, eps, out } => self.add(x, y, n).and_then(|()| self.rms_norm(x, w, eps, out, n)),
            Op::Append { x, cache, layer } => {
                let (cache, from) = (&mut self.caches[cache.0], &self.bufs[x.buf.0]);
                attention::append(cache, layer, from, x.start..x.end(), &self.inputs, n)
            }
            Op::IndexTopK { cache, layer, q, weights, top_k, chosen, scores } => {
                let mut index = take(&mut self.indices[chosen.0]);
                let mut shown =
                    scores.map(|_| CpuBuf { width: shape.context, data: Aligned::of(n * shape.context, 0.0) });
                let indexer = Indexer {
                    cache: &self.caches[cache.0],
                    layer,
                    q: &self.bufs[q.buf.0],
                    q_heads: q,
                    weights: &self.bufs[weights.buf.0],
                    weight_cols: weights.start..weights.end(),
                    inputs: &self.inputs,
                    top_k,
                };
                indexer.run(n, &mut index, shown.as_mut());
                self.indices[chosen.0] = index;
                if let (Some(id), Some(shown)) = (scores, shown) {
                    self.bufs[id.0] = shown;
                }
                Ok(())
            }
            Op::Attend { cache, layer, q_latent, q_rope, scale, chosen, out } => self.with(out.buf, |d, to| {
                let attention = Attention {
                    cache: &d.caches[cache.0],
                    layer,
                    q_latent: &d.bufs[q_latent.buf.0],
                    latent_heads: q_latent,
                    q_rope: &d.bufs[q_rope.buf.0],
                    rope_heads: q_rope,
                    scale,
                    chosen: chosen.map(|id| &d.indices[id.0]),
                    inputs: &d.inputs,
                };
                attention.run(n, to);
                Ok(())
            }),
            Op::Route { logits, bias, router, scores, ids } => {
                let mut index = take(&mut self.indices[ids.0]);
                let done = self.with(scores.buf, |d, to| {
                    for t in 0..n {
                        let scores = &mut to.row_mut(t)[scores.start..scores.end()];
                        ops::choice_scores(&router, d.row(logits, t), &d.bufs[bias.0].data, scores);
                        ops::best(scores, index.row_mut(t));
                    }
                    Ok(())
                });
                self.indices[ids.0] = index;
                done
            }
            Op::ExpertWeights { logits, ids, router, out } => self.with(out.buf, |d, to| {
                for t in 0..n {
                    let weights = &mut to.row_mut(t)[out.start..out.end()];
                    ops::expert_weights(&router, d.row(logits, t), d.indices[ids.0].row(t), weights);
                }
                Ok(())
            }),
            Op::SwiGlu { x, out } => self.between(x, out, n, |_, t| t, ops::swiglu),
            Op::ExpertsHidden { w, x, ids, out, .. } => self.experts_hidden(w, x, ids, out, n),
            Op::ExpertsDown { w, x, ids, weights, out, .. } => self.experts_down(w, x, ids, weights, out, n),
            Op::Sample { logits, first } => self.sample(logits, first, n),
            Op::Commit { .. } => self.commit(n),
        };
        done.map_err(|problem| self.error(Some(call.at), problem))
    }

    /// Hands out a buffer to be written, beside the device with all others.
    fn with<T>(&mut self, id: BufId, work: impl FnOnce(&mut Self, &mut CpuBuf) -> T) -> T {
        let mut buf = take(&mut self.bufs[id.0]);
        let done = work(self, &mut buf);
        self.bufs[id.0] = buf;
        done
    }

    /// The columns of a view of one head, in row `t`.
    fn row(&self, view: View, t: usize) -> &[f32] {
        &self.bufs[view.buf.0].row(t)[view.start..view.end()]
    }

    /// Changes the columns of `x`, row by row.
    fn in_place(&mut self, x: View, n: usize, change: impl Fn(&Self, &mut [f32])) -> Done {
        self.with(x.buf, |d, buf| (0..n).for_each(|t| change(d, &mut buf.row_mut(t)[x.start..x.end()])));
        Ok(())
    }

    /// Makes each row of `out` from row `from` of `x`.
    fn between(
        &mut self,
        x: View,
        out: View,
        n: usize,
        from: impl Fn(&Self, usize) -> usize,
        make: impl Fn(&[f32], &mut [f32]),
    ) -> Done {
        self.with(out.buf, |d, to| {
            (0..n).for_each(|t| make(d.row(x, from(d, t)), &mut to.row_mut(t)[out.start..out.end()]));
        });
        Ok(())
    }

    fn add(&mut self, x: View, y: View, n: usize) -> Done {
        self.between(y, x, n, |_, t| t, |y, x| x.iter_mut().zip(y).for_each(|(x, y)| *x += y))
    }

    fn rms_norm(&mut self, x: View, w: BufId, eps: f32, out: View, n: usize) -> Done {
        self.with(out.buf, |d, to| {
            for t in 0..n {
                ops::rms_norm(d.row(x, t), &d.bufs[w.0].data, eps, &mut to.row_mut(t)[out.start..out.end()]);
            }
        });
        Ok(())
    }

    fn rope(&mut self, x: View, base: f64, n: usize) -> Done {
        let buf = &mut self.bufs[x.buf.0];
        for (t, token) in self.inputs.tokens.iter().take(n).enumerate() {
            let angles = self.rope.at(base, x.width, token.position as usize);
            x.ranges().for_each(|cols| ops::rotate_pairs(&mut buf.row_mut(t)[cols], angles));
        }
        Ok(())
    }

    fn embed(&mut self, table: WeightId, first_row: usize, out: View, n: usize) -> Done {
        self.with(out.buf, |d, to| {
            let part = &d.weights[table.0].parts[0];
            let row_bytes = part.ty.row_bytes(part.covered);
            for (t, token) in d.inputs.tokens.iter().take(n).enumerate() {
                let row = &mut to.row_mut(t)[out.start..out.end()];
                match (token.id as usize).checked_sub(first_row).filter(|r| *r < part.rows) {
                    None => row.fill(0.0),
                    Some(r) => dequantise(part.ty, &part.stack[0][r * row_bytes..(r + 1) * row_bytes], row)
                        .map_err(|e| e.to_string())?,
                }
            }
            Ok(())
        })
    }

    fn product(&mut self, w: WeightId, x: View, out: View, n: usize) -> Done {
        let mut padded = take(&mut self.padded);
        let done = self.with(out.buf, |d, to| {
            let (parts, x, stride) = (&d.weights[w.0].parts, strided(&d.bufs[x.buf.0], x.start), to.width);
            let mut offset = out.start;
            if parts.iter().all(Part::is_aligned) {
                let mut jobs = Vec::with_capacity(parts.len());
                for part in parts {
                    jobs.push(Job { w: part.matrix(0), x, rows: JobRows::First(n), y_offset: offset });
                    offset += part.rows;
                }
                return matmul::matmul_all(&jobs, &mut to.data, stride);
            }
            for part in parts {
                let data = &mut to.data;
                covered(&mut padded, part, x, n, &mut |x| {
                    matmul::matmul(&part.matrix(0), x, n, StridedMut { data: &mut *data, offset, stride })
                })?;
                offset += part.rows;
            }
            Ok(())
        });
        self.padded = padded;
        done.map_err(|e| e.to_string())
    }

    /// One matrix of a stack per head.
    fn product_of_heads(&mut self, w: WeightId, x: View, out: View, n: usize) -> Done {
        let done = self.with(out.buf, |d, to| {
            let (part, from) = (&d.weights[w.0].parts[0], &d.bufs[x.buf.0]);
            let job = |h: usize| Job {
                w: part.matrix(h),
                x: strided(from, x.start + h * x.stride),
                rows: JobRows::First(n),
                y_offset: out.start + h * out.stride,
            };
            matmul::matmul_all(&(0..x.heads).map(job).collect::<Vec<_>>(), &mut to.data, to.width)
        });
        done.map_err(|e| e.to_string())
    }

    fn experts_hidden(&mut self, w: WeightId, x: View, ids: IndexId, out: View, n: usize) -> Done {
        let (slots, width) = (out.heads, out.width);
        let mut both = take(&mut self.experts);
        both.resize(n * slots * 2 * width, 0.0);
        let lists: Vec<(usize, Vec<u32>, Vec<u32>)> = by_expert(&self.indices[ids.0], slots, n)
            .into_iter()
            .map(|(expert, pairs)| (expert, pairs.iter().map(|p| p / slots as u32).collect(), pairs))
            .collect();
        let x = strided(&self.bufs[x.buf.0], x.start);
        let mut jobs = Vec::new();
        for (expert, tokens, pairs) in &lists {
            let mut y_offset = 0;
            for part in &self.weights[w.0].parts {
                let rows = JobRows::Listed { x: tokens, y: pairs };
                jobs.push(Job { w: part.matrix(*expert), x, rows, y_offset });
                y_offset += part.rows;
            }
        }
        matmul::matmul_all(&jobs, &mut both, 2 * width).map_err(|e| e.to_string())?;
        let hidden = &mut self.bufs[out.buf.0];
        for t in 0..n {
            for (slot, cols) in out.ranges().enumerate() {
                let pair = &both[(t * slots + slot) * 2 * width..][..2 * width];
                ops::swiglu(pair, &mut hidden.row_mut(t)[cols]);
            }
        }
        self.experts = both;
        Ok(())
    }

    fn experts_down(&mut self, w: WeightId, x: View, ids: IndexId, weights: View, out: View, n: usize) -> Done {
        let part = &self.weights[w.0].parts[0];
        let slots = x.heads;
        let mut rows = take(&mut self.experts);
        rows.resize(n * slots * part.rows, 0.0);
        // Row `t * slots + slot` holds that slot's hidden values at the rank's own columns, zeros around them.
        let mut padded = Aligned::of(n * slots * part.covered, 0.0);
        let hidden = &self.bufs[x.buf.0];
        for t in 0..n {
            for (slot, cols) in x.ranges().enumerate() {
                padded[(t * slots + slot) * part.covered..][part.cols.clone()].copy_from_slice(&hidden.row(t)[cols]);
            }
        }
        let from = Strided { data: &padded, offset: 0, stride: part.covered };
        let lists = by_expert(&self.indices[ids.0], slots, n);
        let jobs: Vec<Job<'_>> = lists
            .iter()
            .map(|(expert, pairs)| {
                let rows = JobRows::Listed { x: pairs, y: pairs };
                Job { w: part.matrix(*expert), x: from, rows, y_offset: 0 }
            })
            .collect();
        matmul::matmul_all(&jobs, &mut rows, part.rows).map_err(|e| e.to_string())?;
        let width = part.rows;
        self.with(out.buf, |d, to| {
            for t in 0..n {
                let sum = &mut to.row_mut(t)[out.start..out.end()];
                sum.fill(0.0);
                for (slot, weight) in d.row(weights, t).iter().enumerate() {
                    simd::axpy(*weight, &rows[(t * slots + slot) * width..][..width], sum);
                }
            }
        });
        self.experts = rows;
        Ok(())
    }

    fn sum(&mut self, call: &Call, x: View, n: usize) -> Result<(), DeviceError> {
        if self.comm.tp() == 1 {
            return Ok(());
        }
        let own = self.read(x, n)?;
        let mut sum = vec![0.0f32; own.len()];
        let comm = self.comm.clone();
        comm.exchange(self.rank, call.at, own, |_, part| sum.iter_mut().zip(part).for_each(|(s, p)| *s += p))?;
        self.write(x, n, &sum)
    }

    /// The largest key of this rank's tokens in each row.
    fn sample(&mut self, logits: View, first: usize, n: usize) -> Done {
        let rows = self.inputs.tokens.iter().zip(&self.inputs.ahead).take(n).enumerate();
        let choose = |(t, (token, draw)): (usize, (&Token, &Draw))| {
            let tokens = self.row(logits, t).iter().enumerate().map(|(i, logit)| ((first + i) as u32, *logit));
            draw.sample(token.position, tokens).unwrap_or((f32::NEG_INFINITY, u32::MAX))
        };
        let own = rows.map(choose).collect();
        self.choices.resize(self.comm.tp(), Vec::new());
        self.choices[self.rank] = own;
        Ok(())
    }

    fn share(&mut self, call: &Call) -> Result<(), DeviceError> {
        if self.comm.tp() == 1 {
            return Ok(());
        }
        // Ids travel as bits.
        let own = self.choices[self.rank].iter().flat_map(|(key, id)| [*key, f32::from_bits(*id)]).collect();
        let (comm, choices) = (self.comm.clone(), &mut self.choices);
        comm.exchange(self.rank, call.at, own, |rank, pairs| {
            choices[rank] = pairs.chunks_exact(2).map(|pair| (pair[0], pair[1].to_bits())).collect();
        })?;
        Ok(())
    }

    /// The largest key of all ranks' becomes the next token; ties go to the lowest id.
    fn commit(&mut self, n: usize) -> Done {
        self.numberless.clear();
        for (t, token) in self.inputs.tokens.iter_mut().take(n).enumerate() {
            let all = self.choices.iter().filter_map(|of| of.get(t).copied());
            let choice = all.reduce(|a, b| if b.0 > a.0 || (b.0 == a.0 && b.1 < a.1) { b } else { a });
            let id = choice.map(|(_, id)| id).filter(|id| *id != u32::MAX);
            self.numberless.extend(id.is_none().then_some(t));
            token.id = id.unwrap_or(0); // the step behind this one runs on some id
            token.position += 1;
        }
        Ok(())
    }
}
