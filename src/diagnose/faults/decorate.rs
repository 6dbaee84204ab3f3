//! The decorators through which faults enter: sources (bytes, names, types), plans (order, rank, range) and devices
//! (results). `generate` and `serve` construct undecorated types only.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::checkpoint::{Checkpoint, CheckpointError, Naming, TensorSource, View};
use crate::device::cpu::CpuDevice;
use crate::device::{CacheShape, Columns, Device, DeviceError, Heads, PartSpec, Site};
use crate::engine::batch::Batch;
use crate::engine::{Engine, EngineError, Options, cpu_collective};
use crate::gguf::Gguf;
use crate::model::{Config, Metadata, Param};
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
    pub ops: Vec<(Option<usize>, Site, OpFault)>,
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

/// Engines with the faults of [`Decorations`].
pub struct FaultyEngines(pub Decorations);

impl Engines for FaultyEngines {
    fn engine(&self, checkpoint: &Arc<Checkpoint>, tp: usize, options: Options) -> Result<Engine, EngineError> {
        let plan = TpPlan::new(checkpoint.config(), tp)?;
        let mut views = Vec::with_capacity(tp);
        for rank in 0..tp {
            views.push(self.view(checkpoint, rank)?);
        }
        let devices = (0..tp).map(|rank| FaultyDevice::new(CpuDevice::new(rank), rank, &self.0)).collect();
        let comm = Arc::new(FaultyCollective(cpu_collective(tp)));
        let plan = Arc::new(FaultyPlan { inner: plan, faults: self.0.clone() });
        Engine::start(&|rank| views[rank].clone(), plan, devices, comm, options)
    }
}

impl FaultyEngines {
    fn view(&self, checkpoint: &Arc<Checkpoint>, rank: usize) -> Result<Arc<Checkpoint>, CheckpointError> {
        let faults = self.0.tensors.iter().filter(|(r, ..)| hits(*r, rank));
        let tensors: HashMap<String, Replaced> = faults.map(|(_, n, t)| (n.clone(), t.clone())).collect();
        if tensors.is_empty() {
            return Ok(checkpoint.clone());
        }
        let source = FaultySource { inner: checkpoint.clone(), tensors };
        Ok(Arc::new(Checkpoint::from_source(Box::new(source), checkpoint.name().into())?))
    }
}

/// The undecorated collective, as the decorated device's ranks use it.
struct FaultyCollective(Arc<dyn crate::comm::Collective<CpuDevice>>);

impl crate::comm::Collective<FaultyDevice> for FaultyCollective {
    fn tp(&self) -> usize {
        self.0.tp()
    }
    fn all_reduce(
        &self,
        rank: usize,
        site: Site,
        device: &FaultyDevice,
        buf: &mut <CpuDevice as Device>::Buf,
        n: usize,
        width: usize,
    ) -> Result<(), crate::comm::CommError> {
        self.0.all_reduce(rank, site, &device.inner, buf, n, width)
    }
    fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }
}

/// A CPU device with faulty operations.
struct FaultyDevice {
    inner: CpuDevice,
    ops: Vec<(Site, OpFault)>,
}

type Buf = <CpuDevice as Device>::Buf;
type Index = <CpuDevice as Device>::Index;
type Weight = <CpuDevice as Device>::Weight;
type Inputs = <CpuDevice as Device>::Inputs;
type Cache = <CpuDevice as Device>::Cache;
type Done = Result<(), DeviceError>;

impl FaultyDevice {
    fn new(inner: CpuDevice, rank: usize, faults: &Decorations) -> Self {
        let ops = faults.ops.iter().filter(|(r, ..)| hits(*r, rank)).map(|(_, s, f)| (*s, f.clone())).collect();
        FaultyDevice { inner, ops }
    }

    fn fault(&self, site: Site) -> Option<&OpFault> {
        self.ops.iter().find(|(s, _)| *s == site).map(|(_, f)| f)
    }

    /// Damages columns of a result where the site asks for it.
    fn after(&self, site: Site, out: &mut Buf, n: usize, cols: Range<usize>) -> Done {
        let Some(OpFault::Noise(amount)) = self.fault(site) else { return Ok(()) };
        let mut values = self.inner.read(out, n, cols.clone())?;
        for (i, v) in values.iter_mut().enumerate() {
            *v *= if i % 2 == 0 { 1.0 + amount } else { 1.0 - amount };
        }
        self.inner.write(out, n, cols, &values)
    }
}

impl Device for FaultyDevice {
    type Buf = Buf;
    type Index = Index;
    type Weight = Weight;
    type Inputs = Inputs;
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
    fn read_cols(&self, weight: &Weight, part: usize) -> Result<Columns, DeviceError> {
        self.inner.read_cols(weight, part)
    }
    fn inputs(&self, tokens: usize, sequences: usize, pages: usize) -> Result<Inputs, DeviceError> {
        self.inner.inputs(tokens, sequences, pages)
    }
    fn set_inputs(&self, inputs: &mut Inputs, batch: &Batch) -> Done {
        self.inner.set_inputs(inputs, batch)
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
    fn embed(&self, site: Site, table: &Weight, first_row: usize, inputs: &Inputs, n: usize, out: &mut Buf) -> Done {
        self.inner.embed(site, table, first_row, inputs, n, out)
    }
    fn matmul(
        &self,
        site: Site,
        w: &Weight,
        x: &Buf,
        x_cols: Range<usize>,
        n: usize,
        out: &mut Buf,
        out_start: usize,
    ) -> Done {
        self.inner.matmul(site, w, x, x_cols, n, out, out_start)
    }
    fn matmul_heads(
        &self,
        site: Site,
        w: &Weight,
        x: &Buf,
        x_heads: Heads,
        n: usize,
        out: &mut Buf,
        out_heads: Heads,
    ) -> Done {
        self.inner.matmul_heads(site, w, x, x_heads, n, out, out_heads)?;
        self.after(site, out, n, out_heads.start..out_heads.start + out_heads.count * out_heads.stride)
    }
    fn rms_norm(
        &self,
        site: Site,
        x: &Buf,
        x_cols: Range<usize>,
        w: &Buf,
        eps: f32,
        n: usize,
        out: &mut Buf,
        out_start: usize,
    ) -> Done {
        let width = x_cols.len();
        self.inner.rms_norm(site, x, x_cols, w, eps, n, out, out_start)?;
        self.after(site, out, n, out_start..out_start + width)
    }
    fn layer_norm(&self, site: Site, x: &mut Buf, cols: Range<usize>, w: &Buf, b: &Buf, eps: f32, n: usize) -> Done {
        self.inner.layer_norm(site, x, cols, w, b, eps, n)
    }
    fn rope(&self, site: Site, x: &mut Buf, heads: Heads, base: f64, inputs: &Inputs, n: usize) -> Done {
        self.inner.rope(site, x, heads, base, inputs, n)
    }
    fn scale(&self, site: Site, x: &mut Buf, cols: Range<usize>, factor: f32, n: usize) -> Done {
        self.inner.scale(site, x, cols, factor, n)
    }
    fn copy(&self, site: Site, x: &Buf, cols: Range<usize>, n: usize, out: &mut Buf, out_start: usize) -> Done {
        self.inner.copy(site, x, cols, n, out, out_start)
    }
    fn take_rows(&self, site: Site, x: &Buf, width: usize, inputs: &Inputs, out: &mut Buf) -> Done {
        self.inner.take_rows(site, x, width, inputs, out)
    }
    fn add(&self, site: Site, x: &mut Buf, y: &Buf, width: usize, n: usize) -> Done {
        self.inner.add(site, x, y, width, n)
    }
    fn append(
        &self,
        site: Site,
        cache: &mut Cache,
        layer: usize,
        x: &Buf,
        cols: Range<usize>,
        inputs: &Inputs,
        n: usize,
    ) -> Done {
        self.inner.append(site, cache, layer, x, cols, inputs, n)
    }
    fn index_top_k(
        &self,
        site: Site,
        cache: &Cache,
        layer: usize,
        q: &Buf,
        q_heads: Heads,
        weights: &Buf,
        weight_cols: Range<usize>,
        inputs: &Inputs,
        n: usize,
        top_k: usize,
        chosen: &mut Index,
        scores: Option<&mut Buf>,
    ) -> Done {
        self.inner.index_top_k(site, cache, layer, q, q_heads, weights, weight_cols, inputs, n, top_k, chosen, scores)
    }
    fn attend(
        &self,
        site: Site,
        cache: &Cache,
        layer: usize,
        q_latent: &Buf,
        latent_heads: Heads,
        q_rope: &Buf,
        rope_heads: Heads,
        scale: f32,
        chosen: Option<&Index>,
        inputs: &Inputs,
        n: usize,
        out: &mut Buf,
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
            n,
            out,
        )?;
        self.after(site, out, n, 0..width)
    }
    fn route(
        &self,
        site: Site,
        config: &Config,
        logits: &Buf,
        bias: &Buf,
        n: usize,
        choice_scores: &mut Buf,
        ids: &mut Index,
    ) -> Done {
        self.inner.route(site, config, logits, bias, n, choice_scores, ids)
    }
    fn expert_weights(
        &self,
        site: Site,
        config: &Config,
        logits: &Buf,
        ids: &Index,
        n: usize,
        weights: &mut Buf,
    ) -> Done {
        self.inner.expert_weights(site, config, logits, ids, n, weights)?;
        self.after(site, weights, n, 0..config.experts_used)
    }
    fn swiglu(&self, site: Site, x: &Buf, width: usize, n: usize, out: &mut Buf, out_start: usize) -> Done {
        self.inner.swiglu(site, x, width, n, out, out_start)?;
        self.after(site, out, n, out_start..out_start + width)
    }
    fn experts_hidden(
        &self,
        site: Site,
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
        site: Site,
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
