//! The CPU device: f32 activations, quantised weights multiplied row by row without expanding a matrix, rayon inside an
//! operation. Every sum has one order that depends on neither threads nor batch, so runs are bit-equal.

mod attention;
pub mod host;
pub mod matmul;
mod memory;
mod ops;
pub mod simd;

use std::cell::RefCell;
use std::ops::Range;

use self::matmul::{Job, JobRows, MatmulError, Strided, StridedMut};
pub use self::memory::{CpuBuf, CpuCache, CpuIndex, CpuWeight};
use self::memory::{Part, by_expert};
use super::{CacheShape, Columns, Device, DeviceError, Heads, PartSpec, StepShape};
use crate::engine::batch::Batch;
use crate::model::{Config, Place};
use crate::quant::dequantise;

/// One rank's device.
#[derive(Debug)]
pub struct CpuDevice {
    rank: usize,
    /// cos and sin of every position so far, per pair, for the base they were made for.
    rope: RefCell<ops::RopeTable>,
    scratch: RefCell<Scratch>,
}

/// Intermediate values of fused operations, kept between calls.
#[derive(Debug, Default)]
struct Scratch {
    padded: Vec<f32>,
    experts: Vec<f32>,
}

/// The largest buffer that is believed, in bytes: more than the memory of any host.
const MOST_BYTES: usize = 1 << 40;

const LOADING: Option<Place> = None;

impl CpuDevice {
    /// The device of `rank`.
    pub fn new(rank: usize) -> Self {
        CpuDevice { rank, rope: RefCell::default(), scratch: RefCell::default() }
    }

    fn error(&self, place: impl Into<Option<Place>>, problem: impl ToString) -> DeviceError {
        DeviceError { rank: self.rank, place: place.into(), problem: problem.to_string() }
    }

    /// `rows * width` copies of `value`, or an error that names the size where it is absurd or the memory is not there.
    fn filled<T: Clone>(&self, rows: usize, width: usize, value: T) -> Result<Vec<T>, DeviceError> {
        let most = MOST_BYTES / size_of::<T>();
        let mut data = Vec::new();
        match rows.checked_mul(width).filter(|n| *n <= most && data.try_reserve_exact(*n).is_ok()) {
            Some(values) => {
                data.resize(values, value);
                Ok(data)
            }
            None => {
                let found = format!("{rows} rows of {width} values");
                Err(self.error(LOADING, format!("a buffer: expected a size that memory has room for, found {found}")))
            }
        }
    }

    /// Calls `product` with activations as wide as the stored columns: `x` itself, or a copy that is zero outside the
    /// rank's own columns.
    fn covered(
        &self,
        part: &Part,
        x: Strided<'_>,
        rows: usize,
        product: &mut dyn FnMut(Strided<'_>) -> Result<(), MatmulError>,
    ) -> Result<(), MatmulError> {
        if part.is_aligned() {
            return product(x);
        }
        let padded = &mut self.scratch.borrow_mut().padded;
        padded.clear();
        padded.resize(rows * part.covered, 0.0);
        for t in 0..rows {
            let from = x.offset + t * x.stride;
            padded[t * part.covered..][part.cols.clone()].copy_from_slice(&x.data[from..from + part.cols.len()]);
        }
        product(Strided { data: padded, offset: 0, stride: part.covered })
    }
}

impl Device for CpuDevice {
    type Buf = CpuBuf;
    type Index = CpuIndex;
    type Weight = CpuWeight;
    type Inputs = Batch;
    type Cache = CpuCache;

    fn buf(&self, rows: usize, width: usize) -> Result<CpuBuf, DeviceError> {
        Ok(CpuBuf { width, data: self.filled(rows, width, 0.0)? })
    }

    fn vector(&self, values: &[f32]) -> Result<CpuBuf, DeviceError> {
        Ok(CpuBuf { width: values.len(), data: values.to_vec() })
    }

    fn index(&self, rows: usize, width: usize) -> Result<CpuIndex, DeviceError> {
        Ok(CpuIndex { width, data: self.filled(rows, width, -1)? })
    }

    fn weight(&self, parts: Vec<PartSpec<'_>>) -> Result<CpuWeight, DeviceError> {
        let mut resident = Vec::with_capacity(parts.len());
        for part in parts {
            let Some(first) = part.stack.first() else {
                return Err(self.error(LOADING, "a parameter without matrices"));
            };
            let (ty, rows, covered) = (first.ty, first.rows, first.cols);
            let mut stack = Vec::with_capacity(part.stack.len());
            for m in part.stack {
                if (m.ty, m.rows, m.cols) != (ty, rows, covered) {
                    return Err(self.error(LOADING, "the matrices of a stack differ in type or shape"));
                }
                stack.push(m.into_bytes());
            }
            resident.push(Part { ty, rows, covered, cols: part.cols, first: part.first, stack });
        }
        Ok(CpuWeight { parts: resident })
    }

    fn read_weight(&self, weight: &CpuWeight, part: usize) -> Result<Vec<u8>, DeviceError> {
        let part = weight.parts.get(part).ok_or_else(|| self.error(LOADING, format!("no part {part}")))?;
        Ok(part.stack.concat())
    }

    fn read_cols(&self, weight: &CpuWeight, part: usize) -> Result<Columns, DeviceError> {
        let part = weight.parts.get(part).ok_or_else(|| self.error(LOADING, format!("no part {part}")))?;
        let own = part.first + part.cols.start..part.first + part.cols.end;
        Ok(Columns { own, stored: part.first..part.first + part.covered })
    }

    fn inputs(&self, _: usize, _: usize, _: usize) -> Result<Batch, DeviceError> {
        Ok(Batch::default())
    }

    fn set_inputs(&self, inputs: &mut Batch, batch: &Batch, _: StepShape) -> Result<(), DeviceError> {
        inputs.clone_from(batch);
        Ok(())
    }

    fn cache(&self, shape: CacheShape) -> Result<CpuCache, DeviceError> {
        let rows = shape.pages * shape.page;
        Ok(CpuCache { shape, layers: (0..shape.layers).map(|_| vec![0.0; rows * shape.width]).collect() })
    }

    fn read(&self, buf: &CpuBuf, n: usize, cols: Range<usize>) -> Result<Vec<f32>, DeviceError> {
        let mut out = Vec::with_capacity(n * cols.len());
        for t in 0..n {
            out.extend_from_slice(&buf.row(t)[cols.clone()]);
        }
        Ok(out)
    }

    fn write(&self, buf: &mut CpuBuf, n: usize, cols: Range<usize>, values: &[f32]) -> Result<(), DeviceError> {
        for (t, row) in values.chunks_exact(cols.len().max(1)).take(n).enumerate() {
            buf.row_mut(t)[cols.clone()].copy_from_slice(row);
        }
        Ok(())
    }

    fn read_index(&self, index: &CpuIndex, n: usize) -> Result<Vec<i32>, DeviceError> {
        Ok(index.data[..n * index.width].to_vec())
    }

    fn write_index(&self, index: &mut CpuIndex, n: usize, values: &[i32]) -> Result<(), DeviceError> {
        index.data[..n * index.width].copy_from_slice(values);
        Ok(())
    }

    fn embed(
        &self,
        site: Place,
        table: &CpuWeight,
        first_row: usize,
        inputs: &Batch,
        n: usize,
        out: &mut CpuBuf,
    ) -> Result<(), DeviceError> {
        let part = &table.parts[0];
        let row_bytes = part.ty.row_bytes(part.covered);
        for (t, token) in inputs.tokens.iter().take(n).enumerate() {
            let row = out.row_mut(t);
            match (token.id as usize).checked_sub(first_row).filter(|r| *r < part.rows) {
                None => row.fill(0.0),
                Some(r) => dequantise(part.ty, &part.stack[0][r * row_bytes..(r + 1) * row_bytes], row)
                    .map_err(|e| self.error(site, e))?,
            }
        }
        Ok(())
    }

    fn matmul(
        &self,
        site: Place,
        w: &CpuWeight,
        x: &CpuBuf,
        x_cols: Range<usize>,
        n: usize,
        out: &mut CpuBuf,
        out_start: usize,
    ) -> Result<(), DeviceError> {
        let x = Strided { data: &x.data, offset: x_cols.start, stride: x.width };
        let stride = out.width;
        if w.parts.iter().all(Part::is_aligned) {
            let mut y_offset = out_start;
            let mut jobs = Vec::with_capacity(w.parts.len());
            for part in &w.parts {
                jobs.push(Job { w: part.matrix(0), x, rows: JobRows::First(n), y_offset });
                y_offset += part.rows;
            }
            return matmul::matmul_all(&jobs, &mut out.data, stride).map_err(|e| self.error(site, e));
        }
        let mut offset = out_start;
        for part in &w.parts {
            let data = &mut out.data;
            self.covered(part, x, n, &mut |x| {
                matmul::matmul(&part.matrix(0), x, n, StridedMut { data: &mut *data, offset, stride })
            })
            .map_err(|e| self.error(site, e))?;
            offset += part.rows;
        }
        Ok(())
    }

    fn matmul_heads(
        &self,
        site: Place,
        w: &CpuWeight,
        x: &CpuBuf,
        x_heads: Heads,
        n: usize,
        out: &mut CpuBuf,
        out_heads: Heads,
    ) -> Result<(), DeviceError> {
        let job = |h: usize| Job {
            w: w.parts[0].matrix(h),
            x: Strided { data: &x.data, offset: x_heads.start + h * x_heads.stride, stride: x.width },
            rows: JobRows::First(n),
            y_offset: out_heads.start + h * out_heads.stride,
        };
        let jobs: Vec<Job<'_>> = (0..x_heads.count).map(job).collect();
        matmul::matmul_all(&jobs, &mut out.data, out.width).map_err(|e| self.error(site, e))
    }

    fn rms_norm(
        &self,
        _: Place,
        x: &CpuBuf,
        x_cols: Range<usize>,
        w: &CpuBuf,
        eps: f32,
        n: usize,
        out: &mut CpuBuf,
        out_start: usize,
    ) -> Result<(), DeviceError> {
        for t in 0..n {
            let x = &x.row(t)[x_cols.clone()];
            ops::rms_norm(x, &w.data, eps, &mut out.row_mut(t)[out_start..out_start + x.len()]);
        }
        Ok(())
    }

    fn layer_norm(
        &self,
        _: Place,
        x: &mut CpuBuf,
        cols: Range<usize>,
        w: &CpuBuf,
        b: &CpuBuf,
        eps: f32,
        n: usize,
    ) -> Result<(), DeviceError> {
        for t in 0..n {
            ops::layer_norm(&mut x.row_mut(t)[cols.clone()], &w.data, &b.data, eps);
        }
        Ok(())
    }

    fn rope(
        &self,
        _: Place,
        x: &mut CpuBuf,
        heads: Heads,
        base: f64,
        inputs: &Batch,
        n: usize,
    ) -> Result<(), DeviceError> {
        let table = &mut self.rope.borrow_mut();
        for (t, token) in inputs.tokens.iter().take(n).enumerate() {
            let angles = table.at(base, heads.width, token.position as usize);
            let row = x.row_mut(t);
            for h in 0..heads.count {
                let start = heads.start + h * heads.stride;
                ops::rotate_pairs(&mut row[start..start + heads.width], angles);
            }
        }
        Ok(())
    }

    fn scale(&self, _: Place, x: &mut CpuBuf, cols: Range<usize>, factor: f32, n: usize) -> Result<(), DeviceError> {
        for t in 0..n {
            x.row_mut(t)[cols.clone()].iter_mut().for_each(|v| *v *= factor);
        }
        Ok(())
    }

    fn copy(
        &self,
        _: Place,
        x: &CpuBuf,
        cols: Range<usize>,
        n: usize,
        out: &mut CpuBuf,
        out_start: usize,
    ) -> Result<(), DeviceError> {
        for t in 0..n {
            out.row_mut(t)[out_start..out_start + cols.len()].copy_from_slice(&x.row(t)[cols.clone()]);
        }
        Ok(())
    }

    fn take_rows(
        &self,
        _: Place,
        x: &CpuBuf,
        width: usize,
        inputs: &Batch,
        n: usize,
        out: &mut CpuBuf,
    ) -> Result<(), DeviceError> {
        for (i, t) in inputs.logits.iter().take(n).enumerate() {
            out.row_mut(i)[..width].copy_from_slice(&x.row(*t as usize)[..width]);
        }
        Ok(())
    }

    fn add(&self, _: Place, x: &mut CpuBuf, y: &CpuBuf, width: usize, n: usize) -> Result<(), DeviceError> {
        for t in 0..n {
            x.row_mut(t)[..width].iter_mut().zip(&y.row(t)[..width]).for_each(|(x, y)| *x += y);
        }
        Ok(())
    }

    fn append(
        &self,
        site: Place,
        cache: &mut CpuCache,
        layer: usize,
        x: &CpuBuf,
        cols: Range<usize>,
        inputs: &Batch,
        n: usize,
    ) -> Result<(), DeviceError> {
        attention::append(cache, layer, x, cols, inputs, n).map_err(|e| self.error(site, e))
    }

    fn index_top_k(
        &self,
        _: Place,
        cache: &CpuCache,
        layer: usize,
        q: &CpuBuf,
        q_heads: Heads,
        weights: &CpuBuf,
        weight_cols: Range<usize>,
        inputs: &Batch,
        shape: StepShape,
        top_k: usize,
        chosen: &mut CpuIndex,
        scores: Option<&mut CpuBuf>,
    ) -> Result<(), DeviceError> {
        let indexer = attention::Indexer { cache, layer, q, q_heads, weights, weight_cols, inputs, top_k };
        indexer.run(shape.tokens, chosen, scores);
        Ok(())
    }

    fn attend(
        &self,
        _: Place,
        cache: &CpuCache,
        layer: usize,
        q_latent: &CpuBuf,
        latent_heads: Heads,
        q_rope: &CpuBuf,
        rope_heads: Heads,
        scale: f32,
        chosen: Option<&CpuIndex>,
        inputs: &Batch,
        shape: StepShape,
        out: &mut CpuBuf,
    ) -> Result<(), DeviceError> {
        let attention =
            attention::Attention { cache, layer, q_latent, latent_heads, q_rope, rope_heads, scale, chosen, inputs };
        attention.run(shape.tokens, out);
        Ok(())
    }

    fn route(
        &self,
        _: Place,
        config: &Config,
        logits: &CpuBuf,
        bias: &CpuBuf,
        _: &Batch,
        n: usize,
        choice_scores: &mut CpuBuf,
        ids: &mut CpuIndex,
    ) -> Result<(), DeviceError> {
        for t in 0..n {
            let scores = choice_scores.row_mut(t);
            ops::choice_scores(config, logits.row(t), &bias.data, scores);
            ops::best(scores, ids.row_mut(t));
        }
        Ok(())
    }

    fn expert_weights(
        &self,
        _: Place,
        config: &Config,
        logits: &CpuBuf,
        ids: &CpuIndex,
        n: usize,
        weights: &mut CpuBuf,
    ) -> Result<(), DeviceError> {
        for t in 0..n {
            ops::expert_weights(config, logits.row(t), ids.row(t), weights.row_mut(t));
        }
        Ok(())
    }

    fn swiglu(
        &self,
        _: Place,
        x: &CpuBuf,
        width: usize,
        n: usize,
        out: &mut CpuBuf,
        out_start: usize,
    ) -> Result<(), DeviceError> {
        for t in 0..n {
            ops::swiglu(&x.row(t)[..2 * width], &mut out.row_mut(t)[out_start..out_start + width]);
        }
        Ok(())
    }

    fn experts_hidden(
        &self,
        site: Place,
        gate_up: &CpuWeight,
        x: &CpuBuf,
        ids: &CpuIndex,
        slots: usize,
        width: usize,
        n: usize,
        hidden: &mut CpuBuf,
    ) -> Result<(), DeviceError> {
        let gate_up_rows = &mut self.scratch.borrow_mut().experts;
        gate_up_rows.resize(n * slots * 2 * width, 0.0);
        let lists: Vec<(usize, Vec<u32>, Vec<u32>)> = by_expert(ids, slots, n)
            .into_iter()
            .map(|(expert, pairs)| (expert, pairs.iter().map(|p| p / slots as u32).collect(), pairs))
            .collect();
        let x = Strided { data: &x.data, offset: 0, stride: x.width };
        let mut jobs = Vec::new();
        for (expert, tokens, pairs) in &lists {
            let mut y_offset = 0;
            for part in &gate_up.parts {
                let rows = JobRows::Listed { x: tokens, y: pairs };
                jobs.push(Job { w: part.matrix(*expert), x, rows, y_offset });
                y_offset += part.rows;
            }
        }
        matmul::matmul_all(&jobs, gate_up_rows, 2 * width).map_err(|e| self.error(site, e))?;
        for t in 0..n {
            let row = hidden.row_mut(t);
            for slot in 0..slots {
                let pair = &gate_up_rows[(t * slots + slot) * 2 * width..][..2 * width];
                ops::swiglu(pair, &mut row[slot * width..(slot + 1) * width]);
            }
        }
        Ok(())
    }

    fn experts_down(
        &self,
        site: Place,
        down: &CpuWeight,
        hidden: &CpuBuf,
        ids: &CpuIndex,
        weights: &CpuBuf,
        slots: usize,
        width: usize,
        n: usize,
        out: &mut CpuBuf,
    ) -> Result<(), DeviceError> {
        let part = &down.parts[0];
        let rows = &mut self.scratch.borrow_mut().experts;
        rows.resize(n * slots * part.rows, 0.0);
        // Row `t * slots + slot` holds that slot's hidden values at the rank's own columns, zeros around them.
        let mut padded = vec![0.0; n * slots * part.covered];
        for pair in 0..n * slots {
            let from = &hidden.row(pair / slots)[pair % slots * width..][..width];
            padded[pair * part.covered..][part.cols.clone()].copy_from_slice(from);
        }
        let x = Strided { data: &padded, offset: 0, stride: part.covered };
        let lists = by_expert(ids, slots, n);
        let jobs: Vec<Job<'_>> = lists
            .iter()
            .map(|(expert, pairs)| {
                let rows = JobRows::Listed { x: pairs, y: pairs };
                Job { w: part.matrix(*expert), x, rows, y_offset: 0 }
            })
            .collect();
        matmul::matmul_all(&jobs, rows, part.rows).map_err(|e| self.error(site, e))?;
        for t in 0..n {
            let sum = &mut out.row_mut(t)[..part.rows];
            sum.fill(0.0);
            for slot in 0..slots {
                simd::axpy(weights.row(t)[slot], &rows[(t * slots + slot) * part.rows..][..part.rows], sum);
            }
        }
        Ok(())
    }
}
