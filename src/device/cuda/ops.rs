//! The operations: each checks what its kernel holds true, and launches.
#![allow(clippy::too_many_arguments)] // an operation names its operands

use lockstep_kernels::geometry::{self, GEMV_ROWS, Launch, MOST_LATENT, MOST_ROPE};

use super::gpu::Arg;
use super::inputs::{MOST_RECORDED, RING};
use super::params::{IndexQueries, Queries, RouterArg};
use super::pieces::rounds;
use super::{CudaDevice, Done, Rows};
use crate::device::{BufId, CacheId, IndexId, Rounding, Router, StepShape, View, WeightId};

/// Threads per row of a norm.
const NORM_THREADS: u32 = 512;

impl CudaDevice {
    /// [`Op::Embed`](crate::device::Op::Embed).
    pub(super) fn embed(&self, table: WeightId, first_row: usize, out: View, n: usize) -> Done {
        let part = &self.weights[table.0].parts[0];
        let (matrix, first, ids, y) = (part.matrix(), first_row as i32, self.inputs()?.tokens().id, self.rows(out));
        let launch = geometry::per_row(n, 128);
        self.launch("matmul", Some(part.format), "embed", launch, 0, &[&matrix, &first, &ids, &y])
    }

    /// All parts side by side; of a stack, which is one part, a matrix per head.
    pub(super) fn multiply(&self, w: WeightId, x: View, out: View, operand: Rounding, n: usize) -> Done {
        let (from, mut to) = (self.rows(x), self.rows(out));
        for parts in self.weights[w.0].runs() {
            let rows: usize = parts.iter().map(|part| part.rows).sum();
            if n > GEMV_ROWS || x.heads != 1 || !self.tile_parts(parts, from, to, operand, n)? {
                let mut to = to;
                for part in parts {
                    self.product(part, from, to, operand, n, x.heads)?;
                    to.at += 4 * part.rows as u64;
                }
            }
            to.at += 4 * rows as u64;
        }
        Ok(())
    }

    /// [`Op::RmsNorm`](crate::device::Op::RmsNorm).
    pub(super) fn rms_norm(&self, x: View, w: BufId, eps: f32, out: View, n: usize) -> Done {
        let ((from, row, width), weights, (to, y_row, _)) = (self.cols(x)?, self.vector(w), self.cols(out)?);
        let args: [&dyn Arg; 7] = [&from, &row, &weights, &eps, &width, &to, &y_row];
        self.launch("norm", None, "rms_norm", geometry::per_row(n, NORM_THREADS), 0, &args)
    }

    /// [`Op::LayerNorm`](crate::device::Op::LayerNorm).
    pub(super) fn layer_norm(&self, x: View, w: BufId, b: BufId, eps: f32, n: usize) -> Done {
        let ((at, row, width), weights, bias) = (self.cols(x)?, self.vector(w), self.vector(b));
        let args: [&dyn Arg; 6] = [&at, &row, &weights, &bias, &eps, &width];
        self.launch("norm", None, "layer_norm", geometry::per_row(n, 128), 0, &args)
    }

    /// [`Op::Rope`](crate::device::Op::Rope).
    pub(super) fn rotate(&self, x: View, base: f64, n: usize) -> Done {
        let table = self.angles(base, x.width, self.inputs()?.positions())?;
        let buf = &self.bufs[x.buf.0];
        let (at, row, start, stride) = (buf.at(0), buf.row(), x.start as i32, x.stride as i32);
        let (width, count, tokens, rows) = (x.width as i32, x.heads as i32, self.inputs()?.tokens(), n as i32);
        let values = n * x.heads * x.width / 2;
        self.each("rope", values, &[&at, &row, &start, &stride, &width, &count, &table, &tokens, &rows])
    }

    /// [`Op::Scale`](crate::device::Op::Scale).
    pub(super) fn scale(&self, x: View, factor: f32, n: usize) -> Done {
        let ((at, row, width), rows) = (self.cols(x)?, n as i32);
        self.each("scale", n * x.len(), &[&at, &row, &width, &factor, &rows])
    }

    /// [`Op::Copy`](crate::device::Op::Copy).
    pub(super) fn copy(&self, x: View, out: View, n: usize) -> Done {
        let ((from, row, width), (to, y_row, _), rows) = (self.cols(x)?, self.cols(out)?, n as i32);
        self.each("copy", n * x.len(), &[&from, &row, &width, &to, &y_row, &rows])
    }

    /// [`Op::GatherRows`](crate::device::Op::GatherRows).
    pub(super) fn gather_rows(&self, x: View, out: View, n: usize) -> Done {
        let ((from, row, width), wanted) = (self.cols(x)?, self.inputs()?.rows());
        let ((to, y_row, _), rows) = (self.cols(out)?, n as i32);
        self.each("gather_rows", n * x.len(), &[&from, &row, &width, &wanted, &to, &y_row, &rows])
    }

    /// [`Op::Add`](crate::device::Op::Add).
    pub(super) fn add(&self, x: View, y: View, n: usize) -> Done {
        let ((to, row, width), (from, y_row, _), rows) = (self.cols(x)?, self.cols(y)?, n as i32);
        self.each("add", n * x.len(), &[&to, &row, &from, &y_row, &width, &rows])
    }

    /// [`Op::AddNorm`](crate::device::Op::AddNorm), in one kernel.
    pub(super) fn add_norm(&self, x: View, y: View, w: BufId, eps: f32, out: View, n: usize) -> Done {
        let ((sum, row, width), (delta, d_row, _)) = (self.cols(x)?, self.cols(y)?);
        let (weights, (to, y_row, _)) = (self.vector(w), self.cols(out)?);
        let args: [&dyn Arg; 9] = [&sum, &row, &delta, &d_row, &weights, &eps, &width, &to, &y_row];
        self.launch("norm", None, "add_rms_norm", geometry::per_row(n, NORM_THREADS), 0, &args)
    }

    /// [`Op::Append`](crate::device::Op::Append).
    pub(super) fn append(&self, x: View, cache: CacheId, layer: usize, n: usize) -> Done {
        let (to, (from, row, width)) = (self.caches[cache.0].layer(layer), self.cols(x)?);
        let (tokens, rows) = (self.inputs()?.tokens(), n as i32);
        self.each("append", n * x.len(), &[&to, &width, &from, &row, &tokens, &rows])
    }

    /// [`Op::IndexTopK`](crate::device::Op::IndexTopK), in two kernels: scores, then the choice.
    pub(super) fn index_top_k(
        &self,
        cache: CacheId,
        layer: usize,
        q: View,
        weights: View,
        top_k: usize,
        chosen: IndexId,
        scores: Option<BufId>,
        shape: StepShape,
    ) -> Done {
        let (n, tokens, q_buf) = (shape.tokens, self.inputs()?.tokens(), &self.bufs[q.buf.0]);
        let (w_at, w_row, _) = self.cols(weights)?;
        let queries = IndexQueries {
            q: q_buf.at(0),
            q_row: q_buf.row(),
            start: q.start as i32,
            stride: q.stride as i32,
            width: q.width as i32,
            heads: q.heads as i32,
            weights: w_at,
            w_row,
        };
        // Who listens wants every score; else rows are left out where every key will be chosen.
        let (at, width, unscored) = match scores {
            Some(id) => (self.bufs[id.0].at(0), self.bufs[id.0].row, 0),
            None if shape.context <= top_k => (0, 0, top_k),
            None => (self.scratch("scores", 4 * n * shape.context)?, shape.context, top_k),
        };
        let (keys, wide, skip) = (self.caches[cache.0].layer(layer), width as i32, unscored as i32);
        if width > 0 {
            let launch = geometry::index_scores(width, n, q.heads, q.width);
            let bytes = 4 * n * width * q.width;
            let args: [&dyn Arg; 6] = [&keys, &queries, &tokens, &skip, &wide, &at];
            self.launch("indexer", None, "index_scores", launch, bytes, &args)?;
        }
        let chosen = &self.indices[chosen.0];
        let (most, to, row) = (top_k as i32, chosen.memory.address(), chosen.width as i32);
        let args: [&dyn Arg; 6] = [&at, &wide, &tokens, &most, &to, &row];
        self.launch("indexer", None, "top_k", geometry::per_row(n, 1024), 0, &args)
    }

    /// [`Op::Attend`](crate::device::Op::Attend), in two kernels: splits of the keys, then their sum.
    pub(super) fn attend(
        &self,
        cache: CacheId,
        layer: usize,
        q_latent: View,
        q_rope: View,
        scale: f32,
        chosen: Option<IndexId>,
        out: View,
        shape: StepShape,
    ) -> Done {
        let (n, heads, latent) = (shape.tokens, q_latent.heads, q_latent.width);
        if latent > MOST_LATENT || q_rope.width > MOST_ROPE {
            let found = format!("{latent} and {}", q_rope.width);
            let problem =
                format!("attention holds latents of {MOST_LATENT} and rope parts of {MOST_ROPE}, found {found}");
            return Err(self.error(problem));
        }
        let (latent_buf, rope_buf) = (&self.bufs[q_latent.buf.0], &self.bufs[q_rope.buf.0]);
        let queries = Queries {
            latent: latent_buf.at(0),
            latent_row: latent_buf.row(),
            latent_start: q_latent.start as i32,
            latent_stride: q_latent.stride as i32,
            latent_width: latent as i32,
            rope: rope_buf.at(0),
            rope_row: rope_buf.row(),
            rope_start: q_rope.start as i32,
            rope_stride: q_rope.stride as i32,
            rope_width: q_rope.width as i32,
            heads: heads as i32,
        };
        let (cache, inputs) = (&self.caches[cache.0], self.inputs()?);
        let chosen = chosen.map(|id| &self.indices[id.0]);
        let (ids, most) = chosen.map_or((0, 0), |c| (c.memory.address(), c.width));
        let keys = if chosen.is_some() { shape.context.min(most) } else { shape.context };
        let ever = if chosen.is_some() { inputs.positions().min(most) } else { inputs.positions() };
        let (per_split, splits) = geometry::splits(n, keys, ever);
        let (per, count, most) = (per_split as i32, splits as i32, most as i32);
        let parts = n * heads * splits;
        let peaks = self.scratch("peaks", 4 * parts)?;
        let sums = self.scratch("sums", 4 * parts)?;
        let partial = self.scratch("partial", 4 * parts * latent)?;
        let (rows, tokens) = (cache.layer(layer), inputs.tokens());
        let bytes = 4 * n * keys * cache.shape.width;
        let args: [&dyn Arg; 11] =
            [&rows, &queries, &scale, &ids, &most, &tokens, &count, &per, &peaks, &sums, &partial];
        self.launch("attention", None, "attend", geometry::attend(splits, heads, n), bytes, &args)?;
        let launch = Launch { grid: (heads as u32, n as u32, 1), block: 128, shared: 0 };
        let (h, l, (to, row, _)) = (heads as i32, latent as i32, self.cols(out)?);
        let args: [&dyn Arg; 12] = [&peaks, &sums, &partial, &h, &l, &ids, &most, &tokens, &count, &per, &to, &row];
        self.launch("attention", None, "combine", launch, 0, &args)
    }

    /// [`Op::Route`](crate::device::Op::Route).
    pub(super) fn route(
        &self,
        logits: View,
        bias: BufId,
        router: Router,
        scores: View,
        ids: IndexId,
        n: usize,
    ) -> Done {
        let shared = 4 * (router.experts + router.groups + router.groups_used.max(router.used));
        let launch = Launch { shared: shared as u32, ..geometry::per_row(n, 256) };
        let (r, (from, row, _), b) = (RouterArg::from(&router), self.cols(logits)?, self.vector(bias));
        let (position, (to, c_row, _)) = (self.inputs()?.tokens().position, self.cols(scores)?);
        let chosen = self.indices[ids.0].memory.address();
        self.launch("router", None, "route", launch, 0, &[&r, &from, &row, &b, &position, &to, &c_row, &chosen])
    }

    /// [`Op::ExpertWeights`](crate::device::Op::ExpertWeights).
    pub(super) fn expert_weights(&self, logits: View, ids: IndexId, router: Router, out: View, n: usize) -> Done {
        let launch = Launch { shared: 4 * router.experts as u32, ..geometry::per_row(n, 256) };
        let (r, (from, row, _), (to, w_row, _)) = (RouterArg::from(&router), self.cols(logits)?, self.cols(out)?);
        let chosen = self.indices[ids.0].memory.address();
        self.launch("router", None, "expert_weights", launch, 0, &[&r, &from, &row, &chosen, &to, &w_row])
    }

    /// [`Op::SwiGlu`](crate::device::Op::SwiGlu).
    pub(super) fn swiglu(&self, x: View, out: View, n: usize) -> Done {
        let (at, row, _) = self.cols(x)?;
        self.gated(Rows { at, row, group: 0 }, 1, out.len(), out, n)
    }

    /// [`Op::ExpertsHidden`](crate::device::Op::ExpertsHidden).
    pub(super) fn experts_hidden(
        &self,
        w: WeightId,
        x: View,
        ids: IndexId,
        out: View,
        operand: Rounding,
        n: usize,
    ) -> Done {
        let (from, ids, slots, width) = (self.rows(x), &self.indices[ids.0], out.heads, out.width);
        let gate_up = &self.weights[w.0].parts;
        let [gate, up] = &gate_up[..] else {
            return Err(self.error(format!("gate and up: expected 2 parts, found {}", gate_up.len())));
        };
        if n <= GEMV_ROWS && self.tile_gate_up([gate, up], ids, slots, operand, from, self.rows(out), n)? {
            return Ok(());
        }
        if n <= GEMV_ROWS && gate.format == up.format {
            let (to, g, u) = (self.rows(out), gate.matrix(), up.matrix());
            let (stack, chosen, count, recipe) =
                (gate.stack as i32, ids.memory.address(), slots as i32, rounds(operand));
            let bytes = n * slots * (gate.matrix_bytes() + up.matrix_bytes());
            let args: [&dyn Arg; 8] = [&g, &u, &stack, &chosen, &count, &from, &to, &recipe];
            let launch = geometry::gemv(gate.rows, n * slots);
            return self.launch("matmul", Some(gate.format), "gemv_gate_up", launch, bytes, &args);
        }
        let both = self.scratch("gate_up", 4 * n * slots * 2 * width)?;
        let sorted = self.sorted(ids, slots, n, gate.stack)?;
        let pair = 2 * width as i64;
        let mut at = both;
        for part in [gate, up] {
            let to = Rows { at, row: slots as i64 * pair, group: pair };
            self.slots(part, ids, sorted, operand, slots, from, to, n)?;
            at += 4 * part.rows as u64;
        }
        self.gated(Rows { at: both, row: slots as i64 * pair, group: pair }, slots, width, out, n)
    }

    /// [`Op::ExpertsDown`](crate::device::Op::ExpertsDown).
    pub(super) fn experts_down(
        &self,
        w: WeightId,
        x: View,
        ids: IndexId,
        weights: View,
        out: View,
        operand: Rounding,
        n: usize,
    ) -> Done {
        let (part, ids, slots) = (&self.weights[w.0].parts[0], &self.indices[ids.0], x.heads);
        let from = self.widened(part, self.rows(x), n, slots)?;
        let by = self.rows(weights);
        if n <= GEMV_ROWS && self.tile_down(part, ids, slots, operand, from, by, self.rows(out), n)? {
            return Ok(());
        }
        let rows = self.scratch("down", 4 * n * slots * part.rows)?;
        let to = Rows { at: rows, row: (slots * part.rows) as i64, group: part.rows as i64 };
        let sorted = self.sorted(ids, slots, n, part.stack)?;
        self.slots(part, ids, sorted, operand, slots, from, to, n)?;
        let launch = Launch { grid: (part.rows.div_ceil(256) as u32, n as u32, 1), block: 256, shared: 0 };
        let (count, width, (by, w_row, _)) = (slots as i32, part.rows as i32, self.cols(weights)?);
        let (chosen, (y, row, _)) = (ids.memory.address(), self.cols(out)?);
        let experts = part.stack as i32;
        let args: [&dyn Arg; 9] = [&rows, &chosen, &experts, &count, &width, &by, &w_row, &y, &row];
        self.launch("router", None, "combine_slots", launch, 0, &args)
    }

    /// See sample.cu.
    pub(super) fn sample(&self, logits: View, first: usize, n: usize) -> Done {
        let (pairs, each) = self.choices().map_err(|e| self.error(e))?;
        let ((from, row, width), id, inputs) = (self.cols(logits)?, first as i32, self.inputs()?);
        let (temperatures, position) = (inputs.draws(), inputs.tokens().position);
        let seeds = temperatures + 4 * MOST_RECORDED as u64;
        let to = pairs + (self.rank * each) as u64;
        let args: [&dyn Arg; 8] = [&from, &row, &width, &id, &temperatures, &seeds, &position, &to];
        self.launch("sample", None, "sample", geometry::per_row(n, 1024), 0, &args)
    }

    /// See sample.cu.
    pub(super) fn commit(&self, ranks: usize, n: usize) -> Done {
        let (pairs, _) = self.choices().map_err(|e| self.error(e))?;
        let (tokens, (chosen, step)) = (self.inputs()?.tokens(), self.inputs()?.chosen());
        let (tp, row, rows, ring) = (ranks as i32, MOST_RECORDED as i32, n as i32, RING as i32);
        let launch = Launch { grid: (1, 1, 1), block: 64, shared: 0 };
        let args: [&dyn Arg; 9] = [&pairs, &tp, &row, &rows, &tokens.id, &tokens.position, &chosen, &ring, &step];
        self.launch("sample", None, "commit", launch, 0, &args)
    }
}
