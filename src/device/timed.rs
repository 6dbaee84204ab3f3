//! A device that keeps time: what each operation of the forward pass costs, by the name of its point. It stands
//! outside the engine, so an engine without it pays nothing.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{CacheShape, Columns, Device, DeviceError, Heads, PartSpec, StepShape};
use crate::engine::batch::Batch;
use crate::model::{Config, Place};

/// What one operation has cost so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// Calls.
    pub calls: u64,
    /// Wall time, on the rank's thread.
    pub time: Duration,
}

/// The times of one rank, by operation.
#[derive(Debug, Default)]
pub struct Clock(Mutex<BTreeMap<&'static str, Spent>>);

impl Clock {
    /// Runs `work` and adds its time to `op`.
    pub fn time<T>(&self, op: &'static str, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        let time = start.elapsed();
        let mut ops = self.ops();
        let spent = ops.entry(op).or_default();
        spent.calls += 1;
        spent.time += time;
        result
    }

    /// Everything since the last call.
    pub fn take(&self) -> BTreeMap<&'static str, Spent> {
        std::mem::take(&mut *self.ops())
    }

    /// A rank that panicked leaves sums that are still sums.
    fn ops(&self) -> MutexGuard<'_, BTreeMap<&'static str, Spent>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A device and its clock.
#[derive(Debug)]
pub struct Timed<D> {
    inner: D,
    clock: Arc<Clock>,
}

impl<D> Timed<D> {
    /// Lets `clock` count what `inner` does.
    pub fn new(inner: D, clock: Arc<Clock>) -> Self {
        Timed { inner, clock }
    }

    /// The device whose time is kept.
    pub fn inner(&self) -> &D {
        &self.inner
    }
}

/// Operations with a site: the inner one, timed.
macro_rules! timed {
    ($(fn $name:ident($($operand:ident: $ty:ty),* $(,)?);)*) => {
        $(fn $name(&self, site: Place, $($operand: $ty),*) -> Result<(), DeviceError> {
            self.clock.time(site.point.name(), || self.inner.$name(site, $($operand),*))
        })*
    };
}

impl<D: Device> Device for Timed<D> {
    type Buf = D::Buf;
    type Index = D::Index;
    type Weight = D::Weight;
    type Inputs = D::Inputs;
    type Cache = D::Cache;

    fn buf(&self, rows: usize, width: usize) -> Result<D::Buf, DeviceError> {
        self.inner.buf(rows, width)
    }
    fn vector(&self, values: &[f32]) -> Result<D::Buf, DeviceError> {
        self.inner.vector(values)
    }
    fn index(&self, rows: usize, width: usize) -> Result<D::Index, DeviceError> {
        self.inner.index(rows, width)
    }
    fn weight(&self, parts: Vec<PartSpec<'_>>) -> Result<D::Weight, DeviceError> {
        self.inner.weight(parts)
    }
    fn read_weight(&self, weight: &D::Weight, part: usize) -> Result<Vec<u8>, DeviceError> {
        self.inner.read_weight(weight, part)
    }
    fn read_cols(&self, weight: &Self::Weight, part: usize) -> Result<Columns, DeviceError> {
        self.inner.read_cols(weight, part)
    }
    fn inputs(&self, tokens: usize, sequences: usize, pages: usize) -> Result<D::Inputs, DeviceError> {
        self.inner.inputs(tokens, sequences, pages)
    }
    /// Operations are timed one by one, so no step is recorded.
    fn shape(&self, inputs: &D::Inputs, batch: &Batch, _: bool) -> StepShape {
        self.inner.shape(inputs, batch, true)
    }
    fn set_inputs(&self, inputs: &mut D::Inputs, batch: &Batch, shape: StepShape) -> Result<(), DeviceError> {
        self.inner.set_inputs(inputs, batch, shape)
    }
    fn replay(&self, shape: StepShape) -> Result<bool, DeviceError> {
        self.inner.replay(shape)
    }
    fn finish(&self, shape: StepShape) -> Result<(), DeviceError> {
        self.inner.finish(shape)
    }
    fn cache(&self, shape: CacheShape) -> Result<D::Cache, DeviceError> {
        self.inner.cache(shape)
    }
    fn read(&self, buf: &D::Buf, n: usize, cols: Range<usize>) -> Result<Vec<f32>, DeviceError> {
        self.inner.read(buf, n, cols)
    }
    fn write(&self, buf: &mut D::Buf, n: usize, cols: Range<usize>, values: &[f32]) -> Result<(), DeviceError> {
        self.inner.write(buf, n, cols, values)
    }
    fn read_index(&self, index: &D::Index, n: usize) -> Result<Vec<i32>, DeviceError> {
        self.inner.read_index(index, n)
    }
    fn write_index(&self, index: &mut D::Index, n: usize, values: &[i32]) -> Result<(), DeviceError> {
        self.inner.write_index(index, n, values)
    }

    timed! {
        fn embed(table: &D::Weight, first_row: usize, inputs: &D::Inputs, n: usize, out: &mut D::Buf);
        fn matmul(w: &D::Weight, x: &D::Buf, x_cols: Range<usize>, n: usize, out: &mut D::Buf, out_start: usize);
        fn matmul_heads(
            w: &D::Weight, x: &D::Buf, x_heads: Heads, n: usize, out: &mut D::Buf, out_heads: Heads,
        );
        fn rms_norm(
            x: &D::Buf, x_cols: Range<usize>, w: &D::Buf, eps: f32, n: usize, out: &mut D::Buf, out_start: usize,
        );
        fn layer_norm(x: &mut D::Buf, cols: Range<usize>, w: &D::Buf, b: &D::Buf, eps: f32, n: usize);
        fn rope(x: &mut D::Buf, heads: Heads, base: f64, inputs: &D::Inputs, n: usize);
        fn scale(x: &mut D::Buf, cols: Range<usize>, factor: f32, n: usize);
        fn copy(x: &D::Buf, cols: Range<usize>, n: usize, out: &mut D::Buf, out_start: usize);
        fn take_rows(x: &D::Buf, width: usize, inputs: &D::Inputs, n: usize, out: &mut D::Buf);
        fn add(x: &mut D::Buf, y: &D::Buf, width: usize, n: usize);
        fn add_norm(
            residual: &mut D::Buf, delta: &D::Buf, w: &D::Buf, eps: f32, width: usize, n: usize, out: &mut D::Buf,
        );
        fn append(
            cache: &mut D::Cache, layer: usize, x: &D::Buf, cols: Range<usize>, inputs: &D::Inputs, n: usize,
        );
        fn index_top_k(
            cache: &D::Cache, layer: usize, q: &D::Buf, q_heads: Heads, weights: &D::Buf, weight_cols: Range<usize>,
            inputs: &D::Inputs, shape: StepShape, top_k: usize, chosen: &mut D::Index, scores: Option<&mut D::Buf>,
        );
        fn attend(
            cache: &D::Cache, layer: usize, q_latent: &D::Buf, latent_heads: Heads, q_rope: &D::Buf,
            rope_heads: Heads, scale: f32, chosen: Option<&D::Index>, inputs: &D::Inputs, shape: StepShape, out: &mut D::Buf,
        );
        fn route(
            config: &Config, logits: &D::Buf, bias: &D::Buf, inputs: &D::Inputs, n: usize, choice_scores: &mut D::Buf,
            ids: &mut D::Index,
        );
        fn expert_weights(config: &Config, logits: &D::Buf, ids: &D::Index, n: usize, weights: &mut D::Buf);
        fn swiglu(x: &D::Buf, width: usize, n: usize, out: &mut D::Buf, out_start: usize);
        fn experts_hidden(
            gate_up: &D::Weight, x: &D::Buf, ids: &D::Index, slots: usize, width: usize, n: usize, hidden: &mut D::Buf,
        );
        fn experts_down(
            down: &D::Weight, hidden: &D::Buf, ids: &D::Index, weights: &D::Buf, slots: usize, width: usize, n: usize,
            out: &mut D::Buf,
        );
    }
}
