//! Engines that break one promise each: a device and a collective around the plain ones.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lockstep::checkpoint::Checkpoint;
use lockstep::comm::{Collective, CommError, Solo, Threads};
use lockstep::device::cpu::CpuDevice;
use lockstep::device::{CacheShape, Device, DeviceError, Heads, PartSpec, StepShape};
use lockstep::engine::batch::{Batch, Token};
use lockstep::engine::sampler::Draw;
use lockstep::engine::{Engine, EngineError, Options};
use lockstep::model::{Config, Place};
use lockstep::shard::TpPlan;
use lockstep::verify::Engines;

/// What is broken. Layers and ranks count from 0; a fault of rank 1 does not exist at tp 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    None,
    /// Nothing: the device chooses the next tokens itself and runs ahead of the host, as GPUs do. At tp 1.
    RunsAhead,
    /// It runs ahead, and draws every sequence's token as the first sequence's.
    DrawsAsTheFirst,
    /// q_a of layer 2 is larger by this share in steps of more than 8 tokens.
    DependsOnRows(f32),
    /// attn.out of layer 1 on rank 0: the first value is a little larger in every second call.
    Flips,
    /// Queries of layer 0 turn by one position more in every sequence but the first.
    DependsOnSlot,
    /// The norm behind the residual of layer 1 has another eps where it is fused.
    FusedEps,
    /// All keys are attended to, whatever was chosen.
    AttendsToAll,
    /// Layer 2, rank 1: the shared expert's partial sum is missing.
    SharedLost,
    /// Layer 2, rank 1, token 5: the last expert is the worst one.
    ChoosesWorst,
    /// Layer 3, ffn.out: what rank 1 contributes, times this.
    Contributes(f32),
}

/// Engines with a fault.
pub struct OddEngines {
    pub fault: Fault,
    /// What the device promises.
    pub one_order: bool,
    /// Rows for which devices have chosen the token.
    pub chosen: Arc<AtomicUsize>,
}

pub fn odd(fault: Fault) -> OddEngines {
    OddEngines { fault, one_order: true, chosen: Arc::default() }
}

impl Engines for OddEngines {
    fn engine(&self, checkpoint: &Arc<Checkpoint>, tp: usize, options: Options) -> Result<Engine, EngineError> {
        let plan = Arc::new(TpPlan::new(checkpoint.config(), tp)?);
        let device = |rank| Odd {
            inner: CpuDevice::new(rank),
            rank,
            fault: self.fault,
            calls: Cell::new(0),
            chosen: self.chosen.clone(),
            best: RefCell::default(),
            posts: RefCell::default(),
        };
        let comm: Arc<dyn Collective<Odd>> = match tp {
            1 => Arc::new(Solo),
            _ => Arc::new(OddComm { inner: Threads::new(tp, Duration::from_secs(60)), fault: self.fault }),
        };
        Engine::start(&|_| checkpoint.clone(), plan, (0..tp).map(device).collect(), comm, options)
    }

    fn sums_in_one_order(&self) -> bool {
        self.one_order
    }
}

struct OddComm {
    inner: Threads,
    fault: Fault,
}

impl Collective<Odd> for OddComm {
    fn tp(&self) -> usize {
        Collective::<Odd>::tp(&self.inner)
    }
    fn all_reduce(
        &self,
        rank: usize,
        site: Place,
        device: &Odd,
        buf: &mut Buf,
        n: usize,
        width: usize,
    ) -> Result<(), CommError> {
        if let Fault::Contributes(factor) = self.fault
            && rank == 1
            && is(site, 3, "ffn.out")
        {
            device.times(buf, n, 0..width, factor).expect("a buffer that can be read");
        }
        self.inner.all_reduce(rank, site, device, buf, n, width)
    }
    fn abort(&self, reason: &str) {
        Collective::<Odd>::abort(&self.inner, reason);
    }
}

/// The CPU device with a fault.
pub struct Odd {
    inner: CpuDevice,
    rank: usize,
    fault: Fault,
    calls: Cell<usize>,
    chosen: Arc<AtomicUsize>,
    /// While it runs ahead: the best token of each row, and what was chosen and not taken yet.
    best: RefCell<Vec<u32>>,
    posts: RefCell<VecDeque<Vec<u32>>>,
}

type Buf = <CpuDevice as Device>::Buf;
type Index = <CpuDevice as Device>::Index;
type Weight = <CpuDevice as Device>::Weight;
type Cache = <CpuDevice as Device>::Cache;
type Done = Result<(), DeviceError>;

fn is(site: Place, layer: usize, op: &str) -> bool {
    site.layer() == Some(layer) && site.point.name() == op
}

impl Odd {
    fn times(&self, buf: &mut Buf, n: usize, cols: Range<usize>, factor: f32) -> Done {
        let values: Vec<f32> = self.inner.read(buf, n, cols.clone())?.iter().map(|v| v * factor).collect();
        self.inner.write(buf, n, cols, &values)
    }
}

impl Device for Odd {
    type Buf = Buf;
    type Index = Index;
    type Weight = Weight;
    type Inputs = Batch;
    type Cache = Cache;

    fn buf(&self, rows: usize, width: usize) -> Result<Buf, DeviceError> {
        self.inner.buf(rows, width)
    }
    fn vector(&self, values: &[f32]) -> Result<Buf, DeviceError> {
        self.inner.vector(values)
    }
    fn index(&self, rows: usize, width: usize) -> Result<Index, DeviceError> {
        self.inner.index(rows, width)
    }
    fn weight(&self, parts: Vec<PartSpec<'_>>) -> Result<Weight, DeviceError> {
        self.inner.weight(parts)
    }
    fn read_weight(&self, weight: &Weight, part: usize) -> Result<Vec<u8>, DeviceError> {
        self.inner.read_weight(weight, part)
    }
    fn read_cols(&self, weight: &Weight, part: usize) -> Result<lockstep::device::Columns, DeviceError> {
        self.inner.read_cols(weight, part)
    }
    fn inputs(&self, tokens: usize, sequences: usize, pages: usize) -> Result<Batch, DeviceError> {
        self.inner.inputs(tokens, sequences, pages)
    }
    fn shape(&self, inputs: &Batch, batch: &Batch, listened: bool) -> StepShape {
        StepShape { ahead: !batch.ahead.is_empty(), ..self.inner.shape(inputs, batch, listened) }
    }
    fn runs_ahead(&self) -> usize {
        if matches!(self.fault, Fault::RunsAhead | Fault::DrawsAsTheFirst) { 4 } else { 0 }
    }
    fn best(&self, _: Place, logits: &Buf, inputs: &Batch, first: usize, width: usize, n: usize) -> Done {
        let rows = self.inner.read(logits, n, 0..width)?;
        self.chosen.fetch_add(n, Ordering::Relaxed);
        let choose = |(row, (token, draw)): (&[f32], (&Token, &Draw))| {
            let draw = if self.fault == Fault::DrawsAsTheFirst { &inputs.ahead[0] } else { draw };
            let tokens = row.iter().enumerate().map(|(i, logit)| ((first + i) as u32, *logit));
            draw.best(token.position, tokens).map_or(0, |(_, id)| id)
        };
        let steps = inputs.tokens.iter().zip(&inputs.ahead);
        *self.best.borrow_mut() = rows.chunks_exact(width).zip(steps).map(choose).collect();
        Ok(())
    }
    fn advance(&self, _: Place, inputs: &mut Batch, _: usize, n: usize) -> Done {
        for (token, id) in inputs.tokens.iter_mut().take(n).zip(self.best.borrow().iter()) {
            token.id = *id;
            token.position += 1;
        }
        Ok(())
    }
    fn post(&self, _: Place, _: &mut Batch, n: usize) -> Done {
        self.posts.borrow_mut().push_back(self.best.borrow()[..n].to_vec());
        Ok(())
    }
    fn posted(&self, _: Place, _: &mut Batch) -> Result<Vec<u32>, DeviceError> {
        Ok(self.posts.borrow_mut().pop_front().expect("a step that was given ahead"))
    }
    fn set_inputs(&self, inputs: &mut Batch, batch: &Batch, shape: StepShape) -> Done {
        self.inner.set_inputs(inputs, batch, shape)
    }
    fn cache(&self, shape: CacheShape) -> Result<Cache, DeviceError> {
        self.inner.cache(shape)
    }
    fn read(&self, buf: &Buf, n: usize, cols: Range<usize>) -> Result<Vec<f32>, DeviceError> {
        self.inner.read(buf, n, cols)
    }
    fn write(&self, buf: &mut Buf, n: usize, cols: Range<usize>, values: &[f32]) -> Done {
        self.inner.write(buf, n, cols, values)
    }
    fn read_index(&self, index: &Index, n: usize) -> Result<Vec<i32>, DeviceError> {
        self.inner.read_index(index, n)
    }
    fn write_index(&self, index: &mut Index, n: usize, values: &[i32]) -> Done {
        self.inner.write_index(index, n, values)
    }
    fn embed(&self, site: Place, table: &Weight, first_row: usize, inputs: &Batch, n: usize, out: &mut Buf) -> Done {
        self.inner.embed(site, table, first_row, inputs, n, out)
    }
    fn matmul(
        &self,
        site: Place,
        w: &Weight,
        x: &Buf,
        x_cols: Range<usize>,
        n: usize,
        out: &mut Buf,
        out_start: usize,
    ) -> Done {
        self.inner.matmul(site, w, x, x_cols, n, out, out_start)?;
        match self.fault {
            Fault::DependsOnRows(share) if is(site, 2, "attn.q_a") && n > 8 => {
                self.times(out, n, out_start..out_start + 64, 1.0 + share)
            }
            Fault::Flips if is(site, 1, "attn.out") && self.rank == 0 => {
                self.calls.set(self.calls.get() + 1);
                self.times(out, 1, out_start..out_start + 1, 1.0 + 1e-4 * (self.calls.get() % 2) as f32)
            }
            Fault::SharedLost if is(site, 2, "ffn.shared") && self.rank == 1 => {
                self.times(out, n, out_start..out_start + 256, 0.0)
            }
            _ => Ok(()),
        }
    }
    fn matmul_heads(
        &self,
        site: Place,
        w: &Weight,
        x: &Buf,
        x_heads: Heads,
        n: usize,
        out: &mut Buf,
        out_heads: Heads,
    ) -> Done {
        self.inner.matmul_heads(site, w, x, x_heads, n, out, out_heads)
    }
    fn rms_norm(
        &self,
        site: Place,
        x: &Buf,
        x_cols: Range<usize>,
        w: &Buf,
        eps: f32,
        n: usize,
        out: &mut Buf,
        out_start: usize,
    ) -> Done {
        self.inner.rms_norm(site, x, x_cols, w, eps, n, out, out_start)
    }
    fn layer_norm(&self, site: Place, x: &mut Buf, cols: Range<usize>, w: &Buf, b: &Buf, eps: f32, n: usize) -> Done {
        self.inner.layer_norm(site, x, cols, w, b, eps, n)
    }
    fn rope(&self, site: Place, x: &mut Buf, heads: Heads, base: f64, inputs: &Batch, n: usize) -> Done {
        let mut inputs = inputs.clone();
        if self.fault == Fault::DependsOnSlot && is(site, 0, "attn.q") {
            inputs.tokens.iter_mut().filter(|t| t.sequence > 0).for_each(|t| t.position += 1);
        }
        self.inner.rope(site, x, heads, base, &inputs, n)
    }
    fn scale(&self, site: Place, x: &mut Buf, cols: Range<usize>, factor: f32, n: usize) -> Done {
        self.inner.scale(site, x, cols, factor, n)
    }
    fn copy(&self, site: Place, x: &Buf, cols: Range<usize>, n: usize, out: &mut Buf, out_start: usize) -> Done {
        self.inner.copy(site, x, cols, n, out, out_start)
    }
    fn take_rows(&self, site: Place, x: &Buf, width: usize, inputs: &Batch, n: usize, out: &mut Buf) -> Done {
        self.inner.take_rows(site, x, width, inputs, n, out)
    }
    fn add(&self, site: Place, x: &mut Buf, y: &Buf, width: usize, n: usize) -> Done {
        self.inner.add(site, x, y, width, n)
    }
    fn add_norm(
        &self,
        site: Place,
        residual: &mut Buf,
        delta: &Buf,
        w: &Buf,
        eps: f32,
        width: usize,
        n: usize,
        out: &mut Buf,
    ) -> Done {
        let eps = if self.fault == Fault::FusedEps && is(site, 1, "ffn.norm") { eps * 10.0 } else { eps };
        self.inner.add_norm(site, residual, delta, w, eps, width, n, out)
    }
    fn append(
        &self,
        site: Place,
        cache: &mut Cache,
        layer: usize,
        x: &Buf,
        cols: Range<usize>,
        inputs: &Batch,
        n: usize,
    ) -> Done {
        self.inner.append(site, cache, layer, x, cols, inputs, n)
    }
    fn index_top_k(
        &self,
        site: Place,
        cache: &Cache,
        layer: usize,
        q: &Buf,
        q_heads: Heads,
        weights: &Buf,
        weight_cols: Range<usize>,
        inputs: &Batch,
        shape: StepShape,
        top_k: usize,
        chosen: &mut Index,
        scores: Option<&mut Buf>,
    ) -> Done {
        let d = &self.inner;
        d.index_top_k(site, cache, layer, q, q_heads, weights, weight_cols, inputs, shape, top_k, chosen, scores)
    }
    fn attend(
        &self,
        site: Place,
        cache: &Cache,
        layer: usize,
        q_latent: &Buf,
        latent_heads: Heads,
        q_rope: &Buf,
        rope_heads: Heads,
        scale: f32,
        chosen: Option<&Index>,
        inputs: &Batch,
        shape: StepShape,
        out: &mut Buf,
    ) -> Done {
        let chosen = chosen.filter(|_| self.fault != Fault::AttendsToAll);
        let d = &self.inner;
        d.attend(site, cache, layer, q_latent, latent_heads, q_rope, rope_heads, scale, chosen, inputs, shape, out)
    }
    fn route(
        &self,
        site: Place,
        config: &Config,
        logits: &Buf,
        bias: &Buf,
        inputs: &Batch,
        n: usize,
        choice_scores: &mut Buf,
        ids: &mut Index,
    ) -> Done {
        self.inner.route(site, config, logits, bias, inputs, n, choice_scores, ids)?;
        if self.fault == Fault::ChoosesWorst && is(site, 2, "ffn.expert_ids") && self.rank == 1 && n > 5 {
            let scores = self.inner.read(choice_scores, n, 0..config.experts)?;
            let scores = &scores[5 * config.experts..6 * config.experts];
            let worst = (0..config.experts).min_by(|a, b| scores[*a].total_cmp(&scores[*b])).expect("experts");
            let mut chosen = self.inner.read_index(ids, n)?;
            chosen[6 * config.experts_used - 1] = worst as i32;
            self.inner.write_index(ids, n, &chosen)?;
        }
        Ok(())
    }
    fn expert_weights(&self, site: Place, c: &Config, logits: &Buf, ids: &Index, n: usize, weights: &mut Buf) -> Done {
        self.inner.expert_weights(site, c, logits, ids, n, weights)
    }
    fn swiglu(&self, site: Place, x: &Buf, width: usize, n: usize, out: &mut Buf, out_start: usize) -> Done {
        self.inner.swiglu(site, x, width, n, out, out_start)
    }
    fn experts_hidden(
        &self,
        site: Place,
        gate_up: &Weight,
        x: &Buf,
        ids: &Index,
        slots: usize,
        width: usize,
        n: usize,
        hidden: &mut Buf,
    ) -> Done {
        self.inner.experts_hidden(site, gate_up, x, ids, slots, width, n, hidden)
    }
    fn experts_down(
        &self,
        site: Place,
        down: &Weight,
        hidden: &Buf,
        ids: &Index,
        weights: &Buf,
        slots: usize,
        width: usize,
        n: usize,
        out: &mut Buf,
    ) -> Done {
        self.inner.experts_down(site, down, hidden, ids, weights, slots, width, n, out)
    }
}
