//! The operations: each checks what its kernel holds true, and launches.

use std::ops::Range;

use lockstep_kernels::geometry::{self, GEMV_ROWS, Launch, MOST_LATENT, MOST_ROPE};

use super::group::Next;
use super::inputs::MOST_RECORDED;
use super::memory::Memory;
use super::params::{IndexQueries, Queries, router};
use super::weight::Matrix;
use super::{Arg, CudaBuf, CudaCache, CudaDevice, CudaIndex, CudaInputs, CudaWeight, LOADING, Rows, heads_at};
use crate::device::{CacheShape, Columns, Device, DeviceError, Heads, PartSpec, StepShape};
use crate::engine::batch::Batch;
use crate::model::{Config, Place};

/// Threads per row of a norm.
const NORM_THREADS: u32 = 512;

/// Where a whole step begins and ends, for errors.
const STEP: &str = "step";

impl Device for CudaDevice {
    type Buf = CudaBuf;
    type Index = CudaIndex;
    type Weight = CudaWeight;
    type Inputs = CudaInputs;
    type Cache = CudaCache;

    fn buf(&self, rows: usize, width: usize) -> Result<CudaBuf, DeviceError> {
        let row = width.next_multiple_of(4);
        let memory = Memory::new(&self.gpu, 4 * rows * row).map_err(|e| self.error(LOADING, e))?;
        Ok(CudaBuf { memory, rows, row })
    }

    fn vector(&self, values: &[f32]) -> Result<CudaBuf, DeviceError> {
        let buf = self.buf(1, values.len())?;
        buf.memory.upload(0, values).map_err(|e| self.error(LOADING, e))?;
        Ok(buf)
    }

    fn index(&self, rows: usize, width: usize) -> Result<CudaIndex, DeviceError> {
        let memory = Memory::new(&self.gpu, 4 * rows * width).map_err(|e| self.error(LOADING, e))?;
        memory.upload(0, &vec![-1i32; rows * width]).map_err(|e| self.error(LOADING, e))?;
        Ok(CudaIndex { memory, rows, width })
    }

    fn weight(&self, parts: Vec<PartSpec<'_>>) -> Result<CudaWeight, DeviceError> {
        Ok(CudaWeight { parts: parts.into_iter().map(|p| self.load(p)).collect::<Result<_, _>>()? })
    }

    fn read_weight(&self, weight: &CudaWeight, part: usize) -> Result<Vec<u8>, DeviceError> {
        self.unload(weight, part)
    }

    fn read_cols(&self, weight: &CudaWeight, part: usize) -> Result<Columns, DeviceError> {
        self.columns(weight, part)
    }

    fn inputs(&self, tokens: usize, sequences: usize, pages: usize) -> Result<CudaInputs, DeviceError> {
        self.loaded()?; // weights come before inputs
        self.make_inputs(tokens, sequences, pages)
    }

    fn shape(&self, inputs: &CudaInputs, batch: &Batch, listened: bool) -> StepShape {
        // Launches that are timed are given one by one, in the shape that would be recorded.
        let shape = inputs.shape(batch, listened);
        StepShape { recorded: shape.recorded && self.profile.is_none(), ..shape }
    }

    fn set_inputs(&self, inputs: &mut CudaInputs, batch: &Batch, shape: StepShape) -> Result<(), DeviceError> {
        self.fill_inputs(inputs, batch, shape)?;
        if self.profile.is_some() {
            // Longer than the launches of a step take to be given.
            let nanoseconds = 8_000_000u64;
            let one = Launch { grid: (1, 1, 1), block: 1, shared: 0 };
            let paused = self.gpu.launch("doctor", None, "pause", one, &[&nanoseconds]);
            paused.map_err(|e| self.error(None, e))?;
        }
        Ok(())
    }

    fn replay(&self, shape: StepShape) -> Result<bool, DeviceError> {
        if !shape.recorded {
            return Ok(false);
        }
        let next = self.group.begin(self.rank % self.group.meeting().tp(), STEP, shape);
        Ok(next.map_err(|e| self.error(None, e))? == Next::Replayed)
    }

    fn finish(&self, shape: StepShape) -> Result<(), DeviceError> {
        if !shape.recorded {
            return Ok(());
        }
        self.group.end(self.rank % self.group.meeting().tp(), STEP, shape).map_err(|e| self.error(None, e))
    }

    fn runs_ahead(&self) -> usize {
        MOST_RECORDED
    }

    fn context(&self, inputs: &CudaInputs, longest: usize) -> usize {
        inputs.context(longest)
    }

    fn best(
        &self,
        site: Place,
        logits: &CudaBuf,
        inputs: &CudaInputs,
        first: usize,
        width: usize,
        n: usize,
    ) -> Result<(), DeviceError> {
        self.best_of(site, logits, inputs, first, width, n)
    }

    fn advance(&self, site: Place, inputs: &mut CudaInputs, ranks: usize, n: usize) -> Result<(), DeviceError> {
        self.choose(site, inputs, ranks, n)
    }

    fn post(&self, site: Place, inputs: &mut CudaInputs, n: usize) -> Result<(), DeviceError> {
        self.send_chosen(site, inputs, n)
    }

    fn posted(&self, site: Place, inputs: &mut CudaInputs) -> Result<Vec<u32>, DeviceError> {
        self.take_chosen(site, inputs)
    }

    fn cache(&self, shape: CacheShape) -> Result<CudaCache, DeviceError> {
        let values = shape.layers * shape.pages * shape.page * shape.width;
        let memory = Memory::new(&self.gpu, 4 * values).map_err(|e| self.error(LOADING, e))?;
        Ok(CudaCache { memory, shape })
    }

    fn read(&self, buf: &CudaBuf, n: usize, cols: Range<usize>) -> Result<Vec<f32>, DeviceError> {
        let mut out = vec![0.0f32; n * cols.len()];
        if out.is_empty() {
            return Ok(out);
        }
        let site = self.last.get();
        let last = || site.map_or_else(|| "load".into(), |place| place.to_string());
        let failed = |e: super::GpuError| self.error(site, e);
        if n == 1 || (cols.start == 0 && cols.len() == buf.row) {
            buf.memory.download(4 * cols.start, &mut out, &last).map_err(failed)?;
            return Ok(out);
        }
        let dense = Memory::new(&self.gpu, 4 * out.len()).map_err(failed)?;
        let (from, row, width, to, y_row, rows) =
            (buf.at(cols.start), buf.row(), cols.len() as i32, dense.address(), cols.len() as i64, n as i32);
        self.each(site, "copy", out.len(), &[&from, &row, &width, &to, &y_row, &rows])?;
        dense.download(0, &mut out, &last).map_err(failed)?;
        Ok(out)
    }

    fn write(&self, buf: &mut CudaBuf, n: usize, cols: Range<usize>, values: &[f32]) -> Result<(), DeviceError> {
        let n = n.min(buf.rows);
        if n == 0 || cols.is_empty() {
            return Ok(());
        }
        let site = self.last.get();
        let dense = Memory::new(&self.gpu, 4 * n * cols.len()).map_err(|e| self.error(site, e))?;
        dense.upload(0, &values[..n * cols.len()]).map_err(|e| self.error(site, e))?;
        let (from, row, width, to, y_row, rows) =
            (dense.address(), cols.len() as i64, cols.len() as i32, buf.at(cols.start), buf.row(), n as i32);
        self.each(site, "copy", n * cols.len(), &[&from, &row, &width, &to, &y_row, &rows])
    }

    fn read_index(&self, index: &CudaIndex, n: usize) -> Result<Vec<i32>, DeviceError> {
        let mut out = vec![0i32; n.min(index.rows) * index.width];
        let site = self.last.get();
        index
            .memory
            .download(0, &mut out, &|| site.map_or_else(|| "load".into(), |place| place.to_string()))
            .map_err(|e| self.error(site, e))?;
        Ok(out)
    }

    fn write_index(&self, index: &mut CudaIndex, n: usize, values: &[i32]) -> Result<(), DeviceError> {
        index.memory.upload(0, &values[..n * index.width]).map_err(|e| self.error(self.last.get(), e))
    }

    fn embed(
        &self,
        site: Place,
        table: &CudaWeight,
        first_row: usize,
        inputs: &CudaInputs,
        n: usize,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let part = &table.parts[0];
        let (matrix, first, ids) = (part.matrix(), first_row as i32, inputs.tokens().id);
        let y = Rows { at: out.at(0), row: out.row(), group: 0 };
        let launch = geometry::per_row(n, 128);
        self.launch(site, "matmul", Some(part.ty), "embed", launch, 0, &[&matrix, &first, &ids, &y])
    }

    fn matmul(
        &self,
        site: Place,
        w: &CudaWeight,
        x: &CudaBuf,
        x_cols: Range<usize>,
        n: usize,
        out: &mut CudaBuf,
        out_start: usize,
    ) -> Result<(), DeviceError> {
        let from = Rows { at: x.at(x_cols.start), row: x.row(), group: 0 };
        let mut start = out_start;
        for part in &w.parts {
            self.product(site, part, from, Rows { at: out.at(start), row: out.row(), group: 0 }, n, 1)?;
            start += part.rows;
        }
        Ok(())
    }

    fn matmul_heads(
        &self,
        site: Place,
        w: &CudaWeight,
        x: &CudaBuf,
        x_heads: Heads,
        n: usize,
        out: &mut CudaBuf,
        out_heads: Heads,
    ) -> Result<(), DeviceError> {
        self.product(site, &w.parts[0], heads_at(x, x_heads), heads_at(out, out_heads), n, x_heads.count)
    }

    fn rms_norm(
        &self,
        site: Place,
        x: &CudaBuf,
        x_cols: Range<usize>,
        w: &CudaBuf,
        eps: f32,
        n: usize,
        out: &mut CudaBuf,
        out_start: usize,
    ) -> Result<(), DeviceError> {
        let (from, row, weights, width) = (x.at(x_cols.start), x.row(), w.at(0), x_cols.len() as i32);
        let (to, y_row) = (out.at(out_start), out.row());
        let args: [&dyn Arg; 7] = [&from, &row, &weights, &eps, &width, &to, &y_row];
        self.launch(site, "norm", None, "rms_norm", geometry::per_row(n, NORM_THREADS), 0, &args)
    }

    fn layer_norm(
        &self,
        site: Place,
        x: &mut CudaBuf,
        cols: Range<usize>,
        w: &CudaBuf,
        b: &CudaBuf,
        eps: f32,
        n: usize,
    ) -> Result<(), DeviceError> {
        let (at, row, weights, bias, width) = (x.at(cols.start), x.row(), w.at(0), b.at(0), cols.len() as i32);
        let args: [&dyn Arg; 6] = [&at, &row, &weights, &bias, &eps, &width];
        self.launch(site, "norm", None, "layer_norm", geometry::per_row(n, 128), 0, &args)
    }

    fn rope(
        &self,
        site: Place,
        x: &mut CudaBuf,
        heads: Heads,
        base: f64,
        inputs: &CudaInputs,
        n: usize,
    ) -> Result<(), DeviceError> {
        let table = self.angles(site, base, heads.width, inputs.positions())?;
        let (at, row, start, stride) = (x.at(0), x.row(), heads.start as i32, heads.stride as i32);
        let (width, count, tokens, rows) = (heads.width as i32, heads.count as i32, inputs.tokens(), n as i32);
        let values = n * heads.count * heads.width / 2;
        self.each(site, "rope", values, &[&at, &row, &start, &stride, &width, &count, &table, &tokens, &rows])
    }

    fn scale(
        &self,
        site: Place,
        x: &mut CudaBuf,
        cols: Range<usize>,
        factor: f32,
        n: usize,
    ) -> Result<(), DeviceError> {
        let (at, row, width, rows) = (x.at(cols.start), x.row(), cols.len() as i32, n as i32);
        self.each(site, "scale", n * cols.len(), &[&at, &row, &width, &factor, &rows])
    }

    fn copy(
        &self,
        site: Place,
        x: &CudaBuf,
        cols: Range<usize>,
        n: usize,
        out: &mut CudaBuf,
        out_start: usize,
    ) -> Result<(), DeviceError> {
        let (from, row, width, to, y_row, rows) =
            (x.at(cols.start), x.row(), cols.len() as i32, out.at(out_start), out.row(), n as i32);
        self.each(site, "copy", n * cols.len(), &[&from, &row, &width, &to, &y_row, &rows])
    }

    fn take_rows(
        &self,
        site: Place,
        x: &CudaBuf,
        width: usize,
        inputs: &CudaInputs,
        n: usize,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let (from, row, w, wanted) = (x.at(0), x.row(), width as i32, inputs.rows());
        let (to, y_row, rows) = (out.at(0), out.row(), n as i32);
        self.each(site, "take_rows", n * width, &[&from, &row, &w, &wanted, &to, &y_row, &rows])
    }

    fn add(&self, site: Place, x: &mut CudaBuf, y: &CudaBuf, width: usize, n: usize) -> Result<(), DeviceError> {
        let (to, row, from, y_row, w, rows) = (x.at(0), x.row(), y.at(0), y.row(), width as i32, n as i32);
        self.each(site, "add", n * width, &[&to, &row, &from, &y_row, &w, &rows])
    }

    fn add_norm(
        &self,
        site: Place,
        residual: &mut CudaBuf,
        delta: &CudaBuf,
        w: &CudaBuf,
        eps: f32,
        width: usize,
        n: usize,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let (r, r_row, d, d_row) = (residual.at(0), residual.row(), delta.at(0), delta.row());
        let (weights, wide, to, y_row) = (w.at(0), width as i32, out.at(0), out.row());
        let args: [&dyn Arg; 9] = [&r, &r_row, &d, &d_row, &weights, &eps, &wide, &to, &y_row];
        self.launch(site, "norm", None, "add_rms_norm", geometry::per_row(n, NORM_THREADS), 0, &args)
    }

    fn append(
        &self,
        site: Place,
        cache: &mut CudaCache,
        layer: usize,
        x: &CudaBuf,
        cols: Range<usize>,
        inputs: &CudaInputs,
        n: usize,
    ) -> Result<(), DeviceError> {
        let (to, width, from, row) = (cache.layer(layer), cols.len() as i32, x.at(cols.start), x.row());
        let (tokens, rows) = (inputs.tokens(), n as i32);
        self.each(site, "append", n * cols.len(), &[&to, &width, &from, &row, &tokens, &rows])
    }

    fn index_top_k(
        &self,
        site: Place,
        cache: &CudaCache,
        layer: usize,
        q: &CudaBuf,
        q_heads: Heads,
        weights: &CudaBuf,
        weight_cols: Range<usize>,
        inputs: &CudaInputs,
        shape: StepShape,
        top_k: usize,
        chosen: &mut CudaIndex,
        scores: Option<&mut CudaBuf>,
    ) -> Result<(), DeviceError> {
        let (n, tokens) = (shape.tokens, inputs.tokens());
        let queries = IndexQueries {
            q: q.at(0),
            q_row: q.row(),
            start: q_heads.start as i32,
            stride: q_heads.stride as i32,
            width: q_heads.width as i32,
            heads: q_heads.count as i32,
            weights: weights.at(weight_cols.start),
            w_row: weights.row(),
        };
        // Who listens wants every score; else rows are left out where every key will be chosen.
        let (at, width, unscored) = match scores {
            Some(buf) => (buf.at(0), buf.row, 0),
            None if shape.context <= top_k => (0, 0, top_k),
            None => (self.scratch(site, "scores", 4 * n * shape.context)?, shape.context, top_k),
        };
        let (keys, wide, skip) = (cache.layer(layer), width as i32, unscored as i32);
        if width > 0 {
            let launch = geometry::index_scores(width, n, q_heads.count, q_heads.width);
            let bytes = 4 * n * width * q_heads.width;
            let args: [&dyn Arg; 6] = [&keys, &queries, &tokens, &skip, &wide, &at];
            self.launch(site, "indexer", None, "index_scores", launch, bytes, &args)?;
        }
        let (most, to, row) = (top_k as i32, chosen.memory.address(), chosen.width as i32);
        let args: [&dyn Arg; 6] = [&at, &wide, &tokens, &most, &to, &row];
        self.launch(site, "indexer", None, "top_k", geometry::per_row(n, 1024), 0, &args)
    }

    fn attend(
        &self,
        site: Place,
        cache: &CudaCache,
        layer: usize,
        q_latent: &CudaBuf,
        latent_heads: Heads,
        q_rope: &CudaBuf,
        rope_heads: Heads,
        scale: f32,
        chosen: Option<&CudaIndex>,
        inputs: &CudaInputs,
        shape: StepShape,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let (n, heads, latent) = (shape.tokens, latent_heads.count, latent_heads.width);
        if latent > MOST_LATENT || rope_heads.width > MOST_ROPE {
            let found = format!("{latent} and {}", rope_heads.width);
            let problem =
                format!("attention holds latents of {MOST_LATENT} and rope parts of {MOST_ROPE}, found {found}");
            return Err(self.error(site, problem));
        }
        let queries = Queries {
            latent: q_latent.at(0),
            latent_row: q_latent.row(),
            latent_start: latent_heads.start as i32,
            latent_stride: latent_heads.stride as i32,
            latent_width: latent as i32,
            rope: q_rope.at(0),
            rope_row: q_rope.row(),
            rope_start: rope_heads.start as i32,
            rope_stride: rope_heads.stride as i32,
            rope_width: rope_heads.width as i32,
            heads: heads as i32,
        };
        let (ids, most) = chosen.map_or((0, 0), |c| (c.memory.address(), c.width));
        let keys = if chosen.is_some() { shape.context.min(most) } else { shape.context };
        let ever = if chosen.is_some() { inputs.positions().min(most) } else { inputs.positions() };
        let (per_split, splits) = geometry::splits(n, keys, ever);
        let (per, count, most) = (per_split as i32, splits as i32, most as i32);
        let parts = n * heads * splits;
        let peaks = self.scratch(site, "peaks", 4 * parts)?;
        let sums = self.scratch(site, "sums", 4 * parts)?;
        let partial = self.scratch(site, "partial", 4 * parts * latent)?;
        let (rows, tokens) = (cache.layer(layer), inputs.tokens());
        let bytes = 4 * n * keys * cache.shape.width;
        let args: [&dyn Arg; 11] =
            [&rows, &queries, &scale, &ids, &most, &tokens, &count, &per, &peaks, &sums, &partial];
        self.launch(site, "attention", None, "attend", geometry::attend(splits, heads, n), bytes, &args)?;
        let launch = Launch { grid: (heads as u32, n as u32, 1), block: 128, shared: 0 };
        let (h, l, to, row) = (heads as i32, latent as i32, out.at(0), out.row());
        let args: [&dyn Arg; 12] = [&peaks, &sums, &partial, &h, &l, &ids, &most, &tokens, &count, &per, &to, &row];
        self.launch(site, "attention", None, "combine", launch, 0, &args)
    }

    fn route(
        &self,
        site: Place,
        config: &Config,
        logits: &CudaBuf,
        bias: &CudaBuf,
        inputs: &CudaInputs,
        n: usize,
        choice_scores: &mut CudaBuf,
        ids: &mut CudaIndex,
    ) -> Result<(), DeviceError> {
        let shared = 4 * (config.experts + config.groups + config.groups_used.max(config.experts_used));
        let launch = Launch { shared: shared as u32, ..geometry::per_row(n, 256) };
        let (r, from, row, b) = (router(config), logits.at(0), logits.row(), bias.at(0));
        let (position, to, c_row, chosen) =
            (inputs.tokens().position, choice_scores.at(0), choice_scores.row(), ids.memory.address());
        self.launch(site, "router", None, "route", launch, 0, &[&r, &from, &row, &b, &position, &to, &c_row, &chosen])
    }

    fn expert_weights(
        &self,
        site: Place,
        config: &Config,
        logits: &CudaBuf,
        ids: &CudaIndex,
        n: usize,
        weights: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let launch = Launch { shared: 4 * config.experts as u32, ..geometry::per_row(n, 256) };
        let (r, from, row) = (router(config), logits.at(0), logits.row());
        let (chosen, to, w_row) = (ids.memory.address(), weights.at(0), weights.row());
        self.launch(site, "router", None, "expert_weights", launch, 0, &[&r, &from, &row, &chosen, &to, &w_row])
    }

    fn swiglu(
        &self,
        site: Place,
        x: &CudaBuf,
        width: usize,
        n: usize,
        out: &mut CudaBuf,
        out_start: usize,
    ) -> Result<(), DeviceError> {
        let x = Rows { at: x.at(0), row: x.row(), group: 0 };
        self.gated(site, x, 1, width, out, out_start, n)
    }

    fn experts_hidden(
        &self,
        site: Place,
        gate_up: &CudaWeight,
        x: &CudaBuf,
        ids: &CudaIndex,
        slots: usize,
        width: usize,
        n: usize,
        hidden: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let from = Rows { at: x.at(0), row: x.row(), group: 0 };
        let [gate, up] = &gate_up.parts[..] else {
            return Err(self.error(site, format!("gate and up: expected 2 parts, found {}", gate_up.parts.len())));
        };
        if n <= GEMV_ROWS && gate.ty == up.ty {
            let to = Rows { at: hidden.at(0), row: hidden.row(), group: width as i64 };
            let (g, u): (Matrix, Matrix) = (gate.matrix(), up.matrix());
            let (stack, chosen, count, recipe) =
                (gate.stack as i32, ids.memory.address(), slots as i32, self.rounds(site));
            let bytes = n * slots * (gate.matrix_bytes() + up.matrix_bytes());
            let args: [&dyn Arg; 8] = [&g, &u, &stack, &chosen, &count, &from, &to, &recipe];
            let launch = geometry::gemv(gate.rows, n * slots);
            return self.launch(site, "matmul", Some(gate.ty), "gemv_gate_up", launch, bytes, &args);
        }
        let both = self.scratch(site, "gate_up", 4 * n * slots * 2 * width)?;
        let sorted = self.sorted(site, ids, slots, n, gate.stack)?;
        let pair = 2 * width as i64;
        let mut at = both;
        for part in [gate, up] {
            let to = Rows { at, row: slots as i64 * pair, group: pair };
            self.slots(site, part, ids, sorted, slots, from, to, n)?;
            at += 4 * part.rows as u64;
        }
        self.gated(site, Rows { at: both, row: slots as i64 * pair, group: pair }, slots, width, hidden, 0, n)
    }

    fn experts_down(
        &self,
        site: Place,
        down: &CudaWeight,
        hidden: &CudaBuf,
        ids: &CudaIndex,
        weights: &CudaBuf,
        slots: usize,
        width: usize,
        n: usize,
        out: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        let part = &down.parts[0];
        let from = Rows { at: hidden.at(0), row: hidden.row(), group: width as i64 };
        let from = self.widened(site, part, from, n, slots)?;
        let rows = self.scratch(site, "down", 4 * n * slots * part.rows)?;
        let to = Rows { at: rows, row: (slots * part.rows) as i64, group: part.rows as i64 };
        let sorted = self.sorted(site, ids, slots, n, part.stack)?;
        self.slots(site, part, ids, sorted, slots, from, to, n)?;
        let launch = Launch { grid: (part.rows.div_ceil(256) as u32, n as u32, 1), block: 256, shared: 0 };
        let (count, w, by, w_row) = (slots as i32, part.rows as i32, weights.at(0), weights.row());
        let (chosen, y, row) = (ids.memory.address(), out.at(0), out.row());
        let experts = part.stack as i32;
        let args: [&dyn Arg; 9] = [&rows, &chosen, &experts, &count, &w, &by, &w_row, &y, &row];
        self.launch(site, "router", None, "combine_slots", launch, 0, &args)
    }
}
