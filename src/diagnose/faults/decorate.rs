//! The decorators through which faults enter: sources (bytes, names, types), plans (order, rank, range) and devices
//! (results). `generate` and `serve` construct undecorated types only.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::checkpoint::{Checkpoint, CheckpointError, Naming, TensorSource, View};
use crate::comm::{Collective, CommError};
#[cfg(feature = "cuda")]
use crate::device::cuda::CudaBackend;
use crate::device::{CacheShape, Columns, Device, DeviceError, Heads, PartSpec, StepShape};
use crate::engine::batch::Batch;
use crate::engine::{Backend, Engine, EngineError, Options, Recipe};
use crate::gguf::Gguf;
use crate::model::{Config, Metadata, Param, Place};
use crate::quant::TypeInfo;
use crate::shard::{Group, ShardPlan, Slice, TpPlan};
use crate::tokenize::{TokenizeError, TokenizerSpec};
use crate::verify::Engines;

/// A tensor that replaces another.
#[derive(Clone, Debug)]
pub struct Replaced {
    /// Type as the faulty loader believes it.
    pub ty: &'static TypeInfo,
    /// Bytes as it reads them.
    pub bytes: Arc<Vec<u8>>,
}

/// A change of one device operation.
#[derive(Clone, Debug, PartialEq)]
pub enum OpFault {
    /// Attention ignores the choice and attends to every visible key.
    AllKeys,
    /// Results are off by this relative amount, with alternating sign.
    Noise(f32),
    /// Zeros enter the all-reduce in place of the rank's partial sum.
    NoContribution,
}

/// All faults of a run, by where they enter. An entry's rank is one rank, or all.
#[derive(Clone, Debug, Default)]
pub struct Decorations {
    /// Tensors that a rank reads wrongly.
    pub tensors: Vec<(Option<usize>, String, Replaced)>,
    /// Fused groups joined in another order.
    pub orders: Vec<(Option<usize>, Group, usize, Vec<usize>)>,
    /// Parameters whose range is rank 0's.
    pub placements: Vec<(Option<usize>, Param)>,
    /// Operations that compute something else.
    pub ops: Vec<(Option<usize>, Place, OpFault)>,
}

fn hits(rank: Option<usize>, of: usize) -> bool {
    rank.is_none_or(|r| r == of)
}

/// A source in which some tensors are read wrongly.
struct FaultySource {
    inner: Arc<Checkpoint>,
    tensors: HashMap<String, Replaced>,
}

impl TensorSource for FaultySource {
    fn names(&self) -> Vec<&str> {
        self.inner.source().names()
    }
    fn tensor(&self, name: &str) -> Option<View<'_>> {
        let view = self.inner.source().tensor(name)?;
        Some(match self.tensors.get(name) {
            None => view,
            Some(r) => View { ty: r.ty, ne: view.ne, bytes: Cow::Owned(r.bytes.to_vec()) },
        })
    }
    fn file_of(&self, name: &str) -> String {
        self.inner.source().file_of(name)
    }
    fn metadata(&self) -> &dyn Metadata {
        self.inner.source().metadata()
    }
    fn naming(&self) -> Naming {
        self.inner.source().naming()
    }
    fn tokenizer_spec(&self) -> Result<TokenizerSpec, TokenizeError> {
        self.inner.source().tokenizer_spec()
    }
    fn gguf(&self) -> Option<&Gguf> {
        self.inner.source().gguf()
    }
}

/// A plan with faults.
struct FaultyPlan {
    inner: TpPlan,
    faults: Decorations,
}

impl ShardPlan for FaultyPlan {
    fn tp(&self) -> usize {
        self.inner.tp()
    }

    fn slice(&self, param: Param, block: usize, rank: usize) -> Slice {
        let misplaced = self.faults.placements.iter().any(|(r, p)| *p == param && hits(*r, rank));
        self.inner.slice(param, block, if misplaced { 0 } else { rank })
    }

    fn parts(&self, group: Group, layer: usize, rank: usize) -> Vec<Param> {
        let parts = self.inner.parts(group, layer, rank);
        let order = self.faults.orders.iter().find(|(r, g, l, _)| (*g, *l) == (group, layer) && hits(*r, rank));
        match order {
            Some((.., order)) if order.len() == parts.len() => order.iter().map(|i| parts[*i]).collect(),
            _ => parts,
        }
    }
}

/// Engines of a kind of device, with the faults of [`Decorations`].
pub struct FaultyEngines<B>(pub B, pub Decorations);

impl<B: Backend> Engines for FaultyEngines<B> {
    fn engine(&self, checkpoint: &Arc<Checkpoint>, tp: usize, options: Options) -> Result<Engine, EngineError> {
        let plan = TpPlan::new(checkpoint.config(), tp)?;
        let mut views = Vec::with_capacity(tp);
        for rank in 0..tp {
            views.push(self.view(checkpoint, rank)?);
        }
        let (devices, comm) = self.0.devices(tp, &options, checkpoint.config())?;
        let devices = devices.into_iter().enumerate().map(|(rank, d)| FaultyDevice::new(d, rank, &self.1)).collect();
        let comm = Arc::new(FaultyCollective(comm));
        let plan = Arc::new(FaultyPlan { inner: plan, faults: self.1.clone() });
        Engine::start(&|rank| views[rank].clone(), plan, devices, comm, options)
    }
    fn sums_in_one_order(&self) -> bool {
        self.0.sums_in_one_order()
    }
    fn recipe(&self) -> Recipe {
        self.0.recipe()
    }
    fn replays(&self) -> Option<u64> {
        self.0.replays()
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self) -> Option<&CudaBackend> {
        self.0.cuda()
    }
}

impl<B> FaultyEngines<B> {
    fn view(&self, checkpoint: &Arc<Checkpoint>, rank: usize) -> Result<Arc<Checkpoint>, CheckpointError> {
        let faults = self.1.tensors.iter().filter(|(r, ..)| hits(*r, rank));
        let tensors: HashMap<String, Replaced> = faults.map(|(_, n, t)| (n.clone(), t.clone())).collect();
        if tensors.is_empty() {
            return Ok(checkpoint.clone());
        }
        let source = FaultySource { inner: checkpoint.clone(), tensors };
        Ok(Arc::new(Checkpoint::from_source(Box::new(source), checkpoint.name().into())?))
    }
}

/// The collective as the decorated device's ranks use it; some of their contributions are lost.
struct FaultyCollective<D: Device>(Arc<dyn Collective<D>>);

impl<D: Device> Collective<FaultyDevice<D>> for FaultyCollective<D> {
    fn tp(&self) -> usize {
        self.0.tp()
    }
    fn all_reduce(
        &self,
        rank: usize,
        site: Place,
        device: &FaultyDevice<D>,
        buf: &mut D::Buf,
        n: usize,
        width: usize,
    ) -> Result<(), CommError> {
        if device.fault(site) == Some(&OpFault::NoContribution) {
            let lost = device.inner.write(buf, n, 0..width, &vec![0.0; n * width]);
            lost.map_err(|e| {
                let error = CommError::Device { rank, site: site.to_string(), reason: e.to_string() };
                self.0.abort(&error.to_string()); // nobody may wait for a rank that does not come
                error
            })?;
        }
        self.0.all_reduce(rank, site, &device.inner, buf, n, width)
    }
    fn share_best(&self, rank: usize, site: Place, device: &FaultyDevice<D>, n: usize) -> Result<(), CommError> {
        self.0.share_best(rank, site, &device.inner, n)
    }
    fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }
}

/// A device with faulty operations.
struct FaultyDevice<D> {
    inner: D,
    ops: Vec<(Place, OpFault)>,
    /// True if any rank's operations are faulty: such a step must not be recorded, on no rank.
    eager: bool,
}

type Done = Result<(), DeviceError>;

impl<D: Device> FaultyDevice<D> {
    fn new(inner: D, rank: usize, faults: &Decorations) -> Self {
        let ops = faults.ops.iter().filter(|(r, ..)| hits(*r, rank)).map(|(_, s, f)| (*s, f.clone())).collect();
        FaultyDevice { inner, ops, eager: !faults.ops.is_empty() }
    }

    fn fault(&self, site: Place) -> Option<&OpFault> {
        self.ops.iter().find(|(s, _)| *s == site).map(|(_, f)| f)
    }

    /// Damages columns of a result where the site asks for it.
    fn after(&self, site: Place, out: &mut D::Buf, n: usize, cols: Range<usize>) -> Done {
        let Some(OpFault::Noise(amount)) = self.fault(site) else { return Ok(()) };
        let mut values = self.inner.read(out, n, cols.clone())?;
        for (i, v) in values.iter_mut().enumerate() {
            *v *= if i % 2 == 0 { 1.0 + amount } else { 1.0 - amount };
        }
        self.inner.write(out, n, cols, &values)
    }
}

impl<D: Device> Device for FaultyDevice<D> {
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
    fn read_cols(&self, weight: &D::Weight, part: usize) -> Result<Columns, DeviceError> {
        self.inner.read_cols(weight, part)
    }
    fn inputs(&self, tokens: usize, sequences: usize, pages: usize) -> Result<D::Inputs, DeviceError> {
        self.inner.inputs(tokens, sequences, pages)
    }
    fn shape(&self, inputs: &D::Inputs, batch: &Batch, listened: bool) -> StepShape {
        self.inner.shape(inputs, batch, listened || self.eager)
    }
    fn set_inputs(&self, inputs: &mut D::Inputs, batch: &Batch, shape: StepShape) -> Done {
        self.inner.set_inputs(inputs, batch, shape)
    }
    fn replay(&self, shape: StepShape) -> Result<bool, DeviceError> {
        self.inner.replay(shape)
    }
    fn finish(&self, shape: StepShape) -> Done {
        self.inner.finish(shape)
    }
    fn cache(&self, shape: CacheShape) -> Result<D::Cache, DeviceError> {
        self.inner.cache(shape)
    }
    fn read(&self, buf: &D::Buf, n: usize, cols: Range<usize>) -> Result<Vec<f32>, DeviceError> {
        self.inner.read(buf, n, cols)
    }
    fn write(&self, buf: &mut D::Buf, n: usize, cols: Range<usize>, values: &[f32]) -> Done {
        self.inner.write(buf, n, cols, values)
    }
    fn read_index(&self, index: &D::Index, n: usize) -> Result<Vec<i32>, DeviceError> {
        self.inner.read_index(index, n)
    }
    fn write_index(&self, index: &mut D::Index, n: usize, values: &[i32]) -> Done {
        self.inner.write_index(index, n, values)
    }
    fn embed(
        &self,
        site: Place,
        table: &D::Weight,
        first_row: usize,
        inputs: &D::Inputs,
        n: usize,
        out: &mut D::Buf,
    ) -> Done {
        self.inner.embed(site, table, first_row, inputs, n, out)
    }
    fn matmul(
        &self,
        site: Place,
        w: &D::Weight,
        x: &D::Buf,
        x_cols: Range<usize>,
        n: usize,
        out: &mut D::Buf,
        out_start: usize,
    ) -> Done {
        self.inner.matmul(site, w, x, x_cols, n, out, out_start)
    }
    fn matmul_heads(
        &self,
        site: Place,
        w: &D::Weight,
        x: &D::Buf,
        x_heads: Heads,
        n: usize,
        out: &mut D::Buf,
        out_heads: Heads,
    ) -> Done {
        self.inner.matmul_heads(site, w, x, x_heads, n, out, out_heads)?;
        self.after(site, out, n, out_heads.start..out_heads.start + out_heads.count * out_heads.stride)
    }
    fn rms_norm(
        &self,
        site: Place,
        x: &D::Buf,
        x_cols: Range<usize>,
        w: &D::Buf,
        eps: f32,
        n: usize,
        out: &mut D::Buf,
        out_start: usize,
    ) -> Done {
        let width = x_cols.len();
        self.inner.rms_norm(site, x, x_cols, w, eps, n, out, out_start)?;
        self.after(site, out, n, out_start..out_start + width)
    }
    fn layer_norm(
        &self,
        site: Place,
        x: &mut D::Buf,
        cols: Range<usize>,
        w: &D::Buf,
        b: &D::Buf,
        eps: f32,
        n: usize,
    ) -> Done {
        self.inner.layer_norm(site, x, cols, w, b, eps, n)
    }
    fn rope(&self, site: Place, x: &mut D::Buf, heads: Heads, base: f64, inputs: &D::Inputs, n: usize) -> Done {
        self.inner.rope(site, x, heads, base, inputs, n)
    }
    fn scale(&self, site: Place, x: &mut D::Buf, cols: Range<usize>, factor: f32, n: usize) -> Done {
        self.inner.scale(site, x, cols, factor, n)
    }
    fn copy(&self, site: Place, x: &D::Buf, cols: Range<usize>, n: usize, out: &mut D::Buf, out_start: usize) -> Done {
        self.inner.copy(site, x, cols, n, out, out_start)
    }
    fn take_rows(&self, site: Place, x: &D::Buf, width: usize, inputs: &D::Inputs, n: usize, out: &mut D::Buf) -> Done {
        self.inner.take_rows(site, x, width, inputs, n, out)
    }
    fn add(&self, site: Place, x: &mut D::Buf, y: &D::Buf, width: usize, n: usize) -> Done {
        self.inner.add(site, x, y, width, n)
    }
    fn add_norm(
        &self,
        site: Place,
        residual: &mut D::Buf,
        delta: &D::Buf,
        w: &D::Buf,
        eps: f32,
        width: usize,
        n: usize,
        out: &mut D::Buf,
    ) -> Done {
        self.inner.add_norm(site, residual, delta, w, eps, width, n, out)?;
        self.after(site, out, n, 0..width)
    }
    fn append(
        &self,
        site: Place,
        cache: &mut D::Cache,
        layer: usize,
        x: &D::Buf,
        cols: Range<usize>,
        inputs: &D::Inputs,
        n: usize,
    ) -> Done {
        self.inner.append(site, cache, layer, x, cols, inputs, n)
    }
    fn index_top_k(
        &self,
        site: Place,
        cache: &D::Cache,
        layer: usize,
        q: &D::Buf,
        q_heads: Heads,
        weights: &D::Buf,
        weight_cols: Range<usize>,
        inputs: &D::Inputs,
        shape: StepShape,
        top_k: usize,
        chosen: &mut D::Index,
        scores: Option<&mut D::Buf>,
    ) -> Done {
        self.inner.index_top_k(
            site,
            cache,
            layer,
            q,
            q_heads,
            weights,
            weight_cols,
            inputs,
            shape,
            top_k,
            chosen,
            scores,
        )
    }
    fn attend(
        &self,
        site: Place,
        cache: &D::Cache,
        layer: usize,
        q_latent: &D::Buf,
        latent_heads: Heads,
        q_rope: &D::Buf,
        rope_heads: Heads,
        scale: f32,
        chosen: Option<&D::Index>,
        inputs: &D::Inputs,
        shape: StepShape,
        out: &mut D::Buf,
    ) -> Done {
        let chosen = if self.fault(site) == Some(&OpFault::AllKeys) { None } else { chosen };
        let width = latent_heads.count * latent_heads.width;
        self.inner.attend(
            site,
            cache,
            layer,
            q_latent,
            latent_heads,
            q_rope,
            rope_heads,
            scale,
            chosen,
            inputs,
            shape,
            out,
        )?;
        self.after(site, out, shape.tokens, 0..width)
    }
    fn route(
        &self,
        site: Place,
        config: &Config,
        logits: &D::Buf,
        bias: &D::Buf,
        inputs: &D::Inputs,
        n: usize,
        choice_scores: &mut D::Buf,
        ids: &mut D::Index,
    ) -> Done {
        self.inner.route(site, config, logits, bias, inputs, n, choice_scores, ids)
    }
    fn expert_weights(
        &self,
        site: Place,
        config: &Config,
        logits: &D::Buf,
        ids: &D::Index,
        n: usize,
        weights: &mut D::Buf,
    ) -> Done {
        self.inner.expert_weights(site, config, logits, ids, n, weights)?;
        self.after(site, weights, n, 0..config.experts_used)
    }
    fn swiglu(&self, site: Place, x: &D::Buf, width: usize, n: usize, out: &mut D::Buf, out_start: usize) -> Done {
        self.inner.swiglu(site, x, width, n, out, out_start)?;
        self.after(site, out, n, out_start..out_start + width)
    }
    fn experts_hidden(
        &self,
        site: Place,
        gate_up: &D::Weight,
        x: &D::Buf,
        ids: &D::Index,
        slots: usize,
        width: usize,
        n: usize,
        hidden: &mut D::Buf,
    ) -> Done {
        self.inner.experts_hidden(site, gate_up, x, ids, slots, width, n, hidden)
    }
    fn experts_down(
        &self,
        site: Place,
        down: &D::Weight,
        hidden: &D::Buf,
        ids: &D::Index,
        weights: &D::Buf,
        slots: usize,
        width: usize,
        n: usize,
        out: &mut D::Buf,
    ) -> Done {
        self.inner.experts_down(site, down, hidden, ids, weights, slots, width, n, out)
    }
}
