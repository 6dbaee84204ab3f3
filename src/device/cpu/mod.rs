//! The CPU device: f32 activations, quantised weights multiplied row by row without expanding a matrix, rayon inside an
//! operation. Every sum has one order that depends on neither threads nor batch, so runs are bit-equal.

mod attention;
pub mod host;
pub mod matmul;
mod memory;
pub mod ops;
mod run;
pub mod simd;

use std::collections::VecDeque;
use std::sync::Arc;

use self::memory::{Aligned, CpuBuf, CpuCache, CpuIndex, CpuWeight, Part};
use super::draw::NO_NUMBER;
use super::{
    Batch, BufRows, Call, Columns, Device, DeviceError, IndexId, Limits, PartSpec, ProgramId, Rows, StepShape, Stores,
    View, WeightId,
};
use crate::comm::Threads;
use crate::model::Place;

/// One rank's device.
pub struct CpuDevice {
    rank: usize,
    comm: Arc<Threads>,
    /// Most rows with which it runs ahead.
    ahead: usize,
    bufs: Vec<CpuBuf>,
    indices: Vec<CpuIndex>,
    caches: Vec<CpuCache>,
    weights: Vec<CpuWeight>,
    inputs: Batch,
    /// Each rank's choice in each row, as key and id; its own alone before they are shared.
    choices: Vec<Vec<(f32, u32)>>,
    /// Tokens of steps that were given ahead and not taken yet.
    posts: VecDeque<Vec<u32>>,
    /// Rows of the step that is running none of whose logits is a number.
    numberless: Vec<usize>,
    /// cos and sin of every position so far, per pair, for the base they were made for.
    rope: ops::RopeTable,
    /// Activations as wide as stored columns, zero outside the rank's own.
    padded: Vec<f32>,
    /// Rows of the chosen experts.
    experts: Vec<f32>,
}

/// The largest buffer that is believed, in bytes: more than the memory of any host.
const MOST_BYTES: usize = 1 << 40;

/// The largest buffer whose memory is not asked for first. An allocator keeps what small requests give back and hands it
/// out again, zeros written by itself.
const SMALL_BYTES: usize = 64 << 20;

impl CpuDevice {
    /// The device of `rank`, which meets the others in `comm`. It chooses next tokens itself for up to `ahead` rows (a
    /// power of two), as GPUs do, or not at all.
    pub fn new(rank: usize, comm: Arc<Threads>, ahead: usize) -> Self {
        CpuDevice {
            rank,
            comm,
            ahead,
            bufs: Vec::new(),
            indices: Vec::new(),
            caches: Vec::new(),
            weights: Vec::new(),
            inputs: Batch::default(),
            choices: Vec::new(),
            posts: VecDeque::new(),
            numberless: Vec::new(),
            rope: ops::RopeTable::default(),
            padded: Vec::new(),
            experts: Vec::new(),
        }
    }

    fn error(&self, place: Option<Place>, problem: impl ToString) -> DeviceError {
        DeviceError::Failed { rank: self.rank, place, problem: problem.to_string() }
    }

    /// `rows * width` copies of `value`, or an error that names the size where it is absurd or the memory is not there.
    fn filled<T: Clone>(&self, rows: usize, width: usize, value: T) -> Result<Aligned<T>, DeviceError> {
        let most = MOST_BYTES / size_of::<T>();
        // Only a reservation can be refused, and only `vec!` leaves zeros to the system, which takes no memory for them
        // before they are written.
        let small = SMALL_BYTES / size_of::<T>();
        let fits = |n: &usize| *n <= small || (*n <= most && Vec::<T>::new().try_reserve_exact(*n).is_ok());
        match rows.checked_mul(width).filter(fits) {
            Some(values) => Ok(Aligned::of(values, value)),
            None => {
                let found = format!("{rows} rows of {width} values");
                Err(self.error(None, format!("a buffer: expected a size that memory has room for, found {found}")))
            }
        }
    }

    fn part(&self, weight: WeightId, part: usize) -> Result<&Part, DeviceError> {
        let held = self.weights.get(weight.0).and_then(|w| w.parts.get(part));
        held.ok_or_else(|| self.error(None, format!("no part {part} of parameter {}", weight.0)))
    }
}

impl Device for CpuDevice {
    fn load(&mut self, parts: Vec<PartSpec<'_>>) -> Result<(), DeviceError> {
        let mut resident = Vec::with_capacity(parts.len());
        for part in parts {
            let Some(first) = part.stack.first() else {
                return Err(self.error(None, "a parameter without matrices"));
            };
            let (ty, rows, covered) = (first.ty, first.rows, first.cols);
            let mut stack = Vec::with_capacity(part.stack.len());
            for m in part.stack {
                if (m.ty, m.rows, m.cols) != (ty, rows, covered) {
                    return Err(self.error(None, "the matrices of a stack differ in type or shape"));
                }
                stack.push(m.into_bytes());
            }
            resident.push(Part { ty, rows, covered, cols: part.cols, first: part.first, stack });
        }
        self.weights.push(CpuWeight { parts: resident });
        Ok(())
    }

    fn alloc(&mut self, stores: &Stores, limits: Limits) -> Result<(), DeviceError> {
        for spec in &stores.bufs {
            let rows = match spec.rows {
                BufRows::Step(Rows::Tokens) => limits.tokens,
                BufRows::Step(Rows::Logits) => limits.logits,
                BufRows::Vector => 1,
                BufRows::Context => 0,
            };
            let data = self.filled(rows, spec.width, spec.fill.unwrap_or(0.0))?;
            self.bufs.push(CpuBuf { width: spec.width, data });
        }
        for width in &stores.indices {
            let data = self.filled(limits.tokens, *width, -1)?;
            self.indices.push(CpuIndex { width: *width, data });
        }
        for shape in &stores.caches {
            let layer = |_| self.filled(shape.pages * shape.page, shape.width, 0.0);
            let layers = (0..shape.layers).map(layer).collect::<Result<_, _>>()?;
            self.caches.push(CpuCache { shape: *shape, layers });
        }
        Ok(())
    }

    fn read_weight(&mut self, weight: WeightId, part: usize) -> Result<(Vec<u8>, Columns), DeviceError> {
        let part = self.part(weight, part)?;
        let own = part.first + part.cols.start..part.first + part.cols.end;
        Ok((part.stack.concat(), Columns { own, stored: part.first..part.first + part.covered }))
    }

    fn exchange(&mut self, a: (WeightId, usize), b: (WeightId, usize)) -> Result<(), DeviceError> {
        let shape = |part: &Part| (part.stack.len(), part.rows, part.cols.clone(), part.covered);
        let (of_a, of_b) = (shape(self.part(a.0, a.1)?), shape(self.part(b.0, b.1)?));
        if of_a != of_b {
            return Err(self.error(None, format!("parts to exchange: expected {of_a:?} twice, found {of_b:?}")));
        }
        match self.weights.get_disjoint_mut([a.0.0, b.0.0]) {
            Ok([x, y]) => std::mem::swap(&mut x.parts[a.1], &mut y.parts[b.1]),
            Err(_) => self.weights[a.0.0].parts.swap(a.1, b.1), // two parts of one parameter
        }
        Ok(())
    }

    fn read(&mut self, view: View, n: usize) -> Result<Vec<f32>, DeviceError> {
        let buf = &self.bufs[view.buf.0];
        let mut out = Vec::with_capacity(n * view.len());
        for t in 0..n {
            view.ranges().for_each(|cols| out.extend_from_slice(&buf.row(t)[cols]));
        }
        Ok(out)
    }

    fn write(&mut self, view: View, n: usize, values: &[f32]) -> Result<(), DeviceError> {
        let buf = &mut self.bufs[view.buf.0];
        let mut heads = values.chunks_exact(view.width.max(1));
        for t in 0..n {
            for (cols, head) in view.ranges().zip(&mut heads) {
                buf.row_mut(t)[cols].copy_from_slice(head);
            }
        }
        Ok(())
    }

    fn read_index(&mut self, index: IndexId, n: usize) -> Result<Vec<i32>, DeviceError> {
        let index = &self.indices[index.0];
        Ok(index.data[..n * index.width].to_vec())
    }

    fn write_index(&mut self, index: IndexId, n: usize, values: &[i32]) -> Result<(), DeviceError> {
        let index = &mut self.indices[index.0];
        index.data[..n * index.width].copy_from_slice(values);
        Ok(())
    }

    fn set_inputs(&mut self, batch: &Batch, _: StepShape) -> Result<(), DeviceError> {
        self.inputs.clone_from(batch);
        if !batch.ahead.is_empty() {
            self.posts.clear(); // a run ahead begins anew
        }
        Ok(())
    }

    fn run(&mut self, call: &Call, shape: StepShape) -> Result<(), DeviceError> {
        self.call(call, shape)
    }

    fn end(&mut self, shape: StepShape, _: ProgramId) -> Result<(), DeviceError> {
        if shape.ahead && self.rank == 0 {
            let mut ids: Vec<u32> = self.inputs.tokens.iter().map(|t| t.id).collect();
            self.numberless.drain(..).for_each(|row| ids[row] = NO_NUMBER);
            self.posts.push_back(ids);
        }
        Ok(())
    }

    fn posted(&mut self) -> Result<Vec<u32>, DeviceError> {
        let posted = self.posts.pop_front();
        posted.ok_or_else(|| self.error(Some(Place::NEXT_TOKEN), "no step has been given ahead"))
    }

    fn runs_ahead(&self) -> usize {
        self.ahead
    }
}
