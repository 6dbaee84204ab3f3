//! The forward pass, written once over [`Device`], in the order of the paper: embed, then per layer attention and
//! feed-forward, then the head. Read it beside `reference/src/model.rs`.
//!
//! Ranks meet three times: behind the embedding, the output projection and the feed-forward. Everything between runs on
//! the rank's own shards.

use std::ops::Range;

use super::batch::Batch;
use super::listener::{Halt, Listener};
use super::room::Room;
use super::weights::{Ffn, Layer, VectorId, Weights};
use super::{Attention, EngineError};
use crate::comm::Collective;
use crate::device::{CacheShape, Device, Heads, StepShape};
use crate::model::{Config, Param, Place, Point};
use crate::probe::{Data, Probe};
use crate::shard::ShardPlan;

/// Where a rank's ends of a fused projection lie, in columns of its buffer.
struct Columns {
    q_a: Range<usize>,
    kv_a: Range<usize>,
    index_k: Range<usize>,
    index_weights: Range<usize>,
}

/// One rank's state: its device, weights, cache and every buffer of a step.
pub struct Forward<D: Device> {
    pub(super) config: Config,
    pub(super) tp: usize,
    rank: usize,
    attention: Attention,
    room: Room,
    columns: Columns,
    pub(super) device: D,
    weights: Weights<D>,
    inputs: D::Inputs,
    latent_cache: D::Cache,
    index_cache: D::Cache,
    pub(super) work: Work<D>,
    /// The shape of the step given last, while the device runs ahead.
    ahead: StepShape,
}

/// Every buffer of a step; they hold nothing between steps.
pub(super) struct Work<D: Device> {
    residual: D::Buf,
    norm: D::Buf,
    qkv_a: D::Buf,
    q_a_norm: D::Buf,
    kv: D::Buf,
    q_b: D::Buf,
    q_latent: D::Buf,
    latent: D::Buf,
    context: D::Buf,
    chosen: D::Index,
    delta: D::Buf,
    router_logits: D::Buf,
    choice_scores: D::Buf,
    expert_ids: D::Index,
    expert_weights: D::Buf,
    gate_up: D::Buf,
    hidden: D::Buf,
    routed: D::Buf,
    shared: D::Buf,
    last: D::Buf,
    logits: D::Buf,
}

/// How a step ended.
pub enum Ended {
    /// With this rank's logits, `[rows][padded_vocab / tp]`; padding is -inf.
    Logits(Vec<f32>),
    /// At a probe point, because the listener said so.
    Stopped,
    /// With the next tokens on the device: see [`Forward::follow`].
    Ahead,
}

impl<D: Device> Forward<D> {
    /// Allocates everything a rank needs for steps within `room`.
    ///
    /// # Errors
    /// A device without enough memory.
    pub fn new(
        config: &Config,
        plan: &dyn ShardPlan,
        rank: usize,
        attention: Attention,
        room: Room,
        device: D,
        weights: Weights<D>,
    ) -> Result<Self, EngineError> {
        let (c, tp, rows) = (config, plan.tp(), room.tokens);
        let heads = c.heads / tp;
        let q_a = 0..c.q_lora;
        let kv_a = q_a.end..q_a.end + c.cache_width();
        let index_k = kv_a.end..kv_a.end + c.index_dim;
        let index_weights = index_k.end..index_k.end + c.index_heads;
        // Widths that no layer uses are confirmed by no tensor, so nothing is sized by them.
        let (dense, moe) = (c.dense_layers > 0, c.dense_layers < c.layers);
        let moe_ffn = if moe { c.expert_ffn / tp } else { 0 };
        let slots = c.experts_used + usize::from(c.shared_experts > 0);
        let dense_ffn = if dense { c.ffn / tp } else { 0 };
        let shared_ffn = if moe { c.shared_ffn() / tp } else { 0 };
        let cache = |width| CacheShape { layers: c.layers, page: room.page, pages: room.pages, width };
        let mut logits = device.buf(room.logits, c.padded_vocab(tp) / tp)?;
        let width = c.padded_vocab(tp) / tp;
        // Rows behind the real vocabulary are never written, so they keep losing.
        device.write(&mut logits, room.logits, 0..width, &vec![f32::NEG_INFINITY; room.logits * width])?;
        let work = Work {
            residual: device.buf(rows, c.hidden)?,
            norm: device.buf(rows, c.hidden)?,
            qkv_a: device.buf(rows, index_weights.end)?,
            q_a_norm: device.buf(rows, c.q_lora)?,
            kv: device.buf(rows, c.cache_width())?,
            q_b: device.buf(rows, heads * c.qk_head() + c.index_heads * c.index_dim)?,
            q_latent: device.buf(rows, heads * c.kv_lora)?,
            latent: device.buf(rows, heads * c.kv_lora)?,
            context: device.buf(rows, heads * c.v_head)?,
            chosen: device.index(rows, c.top_k)?,
            delta: device.buf(rows, c.hidden)?,
            router_logits: device.buf(rows, c.experts)?,
            choice_scores: device.buf(rows, c.experts)?,
            expert_ids: device.index(rows, c.experts_used)?,
            expert_weights: device.buf(rows, c.experts_used)?,
            gate_up: device.buf(rows, 2 * dense_ffn.max(shared_ffn))?,
            hidden: device.buf(rows, dense_ffn.max(slots * moe_ffn).max(c.experts_used * moe_ffn + shared_ffn))?,
            routed: device.buf(rows, c.hidden)?,
            shared: device.buf(rows, c.hidden)?,
            last: device.buf(room.logits, c.hidden)?,
            logits,
        };
        Ok(Forward {
            inputs: device.inputs(room.tokens, room.sequences, room.pages)?,
            latent_cache: device.cache(cache(c.cache_width()))?,
            index_cache: device.cache(cache(c.index_dim))?,
            columns: Columns { q_a, kv_a, index_k, index_weights },
            config: config.clone(),
            tp,
            rank,
            attention,
            room,
            device,
            weights,
            work,
            ahead: StepShape::exact(&Batch::default()),
        })
    }

    /// Runs a batch through all layers.
    ///
    /// # Errors
    /// A batch beyond the room, and failures of the device or of a collective.
    pub fn run(
        &mut self,
        comm: &dyn Collective<D>,
        batch: &Batch,
        probe: Option<&mut (dyn Probe + 'static)>,
    ) -> Result<Ended, EngineError> {
        self.room.check(&self.config, batch)?;
        let shape = self.device.shape(&self.inputs, batch, probe.is_some());
        self.device.set_inputs(&mut self.inputs, batch, shape)?;
        if !self.give(comm, shape, probe)? {
            return Ok(Ended::Stopped);
        }
        if shape.ahead {
            self.ahead = shape;
            return Ok(Ended::Ahead);
        }
        let width = self.config.padded_vocab(self.tp) / self.tp;
        Ok(Ended::Logits(self.device.read(&self.work.logits, batch.logits.len(), 0..width)?))
    }

    /// Gives a step to the device, from its recording if there is one. False if the listener stopped it.
    fn give(
        &mut self,
        comm: &dyn Collective<D>,
        shape: StepShape,
        probe: Option<&mut (dyn Probe + 'static)>,
    ) -> Result<bool, EngineError> {
        if !self.device.replay(shape)? {
            match self.forward(comm, shape, &mut Listener(probe)) {
                Ok(()) => self.device.finish(shape)?,
                Err(Halt::Stopped) => return Ok(false),
                Err(Halt::Failed(e)) => return Err(e),
            }
        }
        if shape.ahead && self.rank == 0 {
            self.device.post(Place::NEXT_TOKEN, &mut self.inputs, shape.tokens)?;
        }
        Ok(true)
    }

    /// Gives the step behind the one given last, whose tokens the host has not seen; the longest sequence then has
    /// `longest` keys. Returns the tokens of the step before it, on rank 0.
    ///
    /// # Errors
    /// Failures of the device or of a collective.
    pub fn follow(&mut self, comm: &dyn Collective<D>, longest: usize) -> Result<Vec<u32>, EngineError> {
        self.ahead.context = self.device.context(&self.inputs, longest);
        self.give(comm, self.ahead, None)?;
        self.chosen()
    }

    /// The tokens of the oldest step given ahead that were not returned yet, on rank 0.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn chosen(&mut self) -> Result<Vec<u32>, EngineError> {
        if self.rank > 0 {
            return Ok(Vec::new());
        }
        Ok(self.device.posted(Place::NEXT_TOKEN, &mut self.inputs)?)
    }

    /// Most rows with which the device can run ahead of the host.
    pub fn runs_ahead(&self) -> usize {
        self.device.runs_ahead()
    }

    /// The bytes that stand where `param` belongs, read back from the device.
    ///
    /// # Errors
    /// A parameter that the rank does not hold.
    pub fn read_weight(&self, param: Param) -> Result<Vec<u8>, EngineError> {
        self.weights.read(&self.device, param, param.kind.shape(&self.config)[0])
    }

    /// The columns of `param` that the device multiplies and stores.
    ///
    /// # Errors
    /// A parameter that the rank does not hold.
    pub fn read_cols(&self, param: Param) -> Result<crate::device::Columns, EngineError> {
        self.weights.columns(&self.device, param, param.kind.shape(&self.config)[0])
    }

    fn forward(&mut self, comm: &dyn Collective<D>, shape: StepShape, probe: &mut Listener<'_>) -> Result<(), Halt> {
        let (n, hidden) = (shape.tokens, self.config.hidden);
        let site = Place::EMBED;
        let (table, first_row) = self.weights.embedding;
        self.device.embed(site, self.weights.weight(table), first_row, &self.inputs, n, &mut self.work.residual)?;
        comm.all_reduce(self.rank, site, &self.device, &mut self.work.residual, n, hidden)?;
        probe.values(self, Place::EMBED, n, |w| (&mut w.residual, 0))?;

        for layer in 0..self.config.layers {
            let at = |point| Place::trunk(layer, point);
            probe.values(self, at(Point::Input), n, |w| (&mut w.residual, 0))?;
            if layer == 0 {
                self.norm_residual(at(Point::AttnNorm), self.weights.layers[0].attn_norm, n)?;
            }
            probe.values(self, at(Point::AttnNorm), n, |w| (&mut w.norm, 0))?;
            self.attention(comm, layer, shape, probe)?;
            let norm = self.weights.layers[layer].ffn_norm;
            self.add_norm(at(Point::Residual), at(Point::FfnNorm), norm, n, probe)?;
            probe.values(self, at(Point::FfnNorm), n, |w| (&mut w.norm, 0))?;
            self.feed_forward(comm, layer, n, probe)?;
            // The norm behind a layer is the next layer's first, or the final one.
            let (normed, norm) = match self.weights.layers.get(layer + 1) {
                Some(next) => (Place::trunk(layer + 1, Point::AttnNorm), next.attn_norm),
                None => (Place::FINAL_NORM, self.weights.final_norm),
            };
            self.add_norm(at(Point::Output), normed, norm, n, probe)?;
        }
        probe.values(self, Place::FINAL_NORM, n, |w| (&mut w.norm, 0))?;
        self.head(shape.logits, probe)?;
        if shape.ahead {
            let first = self.rank * self.config.padded_vocab(self.tp) / self.tp;
            self.device.best(Place::NEXT_TOKEN, &self.work.logits, &self.inputs, first, self.weights.head.1, n)?;
            comm.share_best(self.rank, Place::NEXT_TOKEN, &self.device, n)?;
            self.device.advance(Place::NEXT_TOKEN, &mut self.inputs, self.tp, n)?;
        }
        Ok(())
    }

    fn norm_residual(&mut self, site: Place, norm: VectorId, n: usize) -> Result<(), EngineError> {
        let (c, w) = (&self.config, self.weights.vector(norm));
        Ok(self.device.rms_norm(site, &self.work.residual, 0..c.hidden, w, c.rms_eps, n, &mut self.work.norm, 0)?)
    }

    /// `residual += delta` and the norm behind it: one fused operation, or two with the sum shown in between. The norm may
    /// belong to the next layer.
    fn add_norm(
        &mut self,
        sum: Place,
        normed: Place,
        norm: VectorId,
        n: usize,
        probe: &mut Listener<'_>,
    ) -> Result<(), Halt> {
        let hidden = self.config.hidden;
        if probe.wants(sum) {
            self.device.add(sum, &mut self.work.residual, &self.work.delta, hidden, n)?;
            probe.values(self, sum, n, |w| (&mut w.residual, 0))?;
            self.norm_residual(normed, norm, n)?;
        } else {
            let (w, eps) = (self.weights.vector(norm), self.config.rms_eps);
            let (x, y) = (&mut self.work.residual, &mut self.work.norm);
            self.device.add_norm(normed, x, &self.work.delta, w, eps, hidden, n, y)?;
        }
        Ok(())
    }

    fn attention(
        &mut self,
        comm: &dyn Collective<D>,
        layer: usize,
        shape: StepShape,
        probe: &mut Listener<'_>,
    ) -> Result<(), Halt> {
        let at = |point| Place::trunk(layer, point);
        let n = shape.tokens;
        let (hidden, q_lora, kv_lora, rope, nope) =
            (self.config.hidden, self.config.q_lora, self.config.kv_lora, self.config.rope, self.config.nope);
        let (base, latent_eps, qk) = (self.config.rope_base, self.config.latent_eps, self.config.qk_head());
        let heads = self.config.heads / self.tp;
        let Layer { qkv_a, q_a_norm, kv_a_norm, q_b, k_b, v_b, o, .. } = self.weights.layers[layer];
        let (q_a_cols, kv_a_cols) = (self.columns.q_a.clone(), self.columns.kv_a.clone());
        let w = self.weights.weight(qkv_a);
        self.device.matmul(at(Point::QA), w, &self.work.norm, 0..hidden, n, &mut self.work.qkv_a, 0)?;
        probe.values(self, at(Point::QA), n, |w| (&mut w.qkv_a, 0))?;
        probe.values(self, at(Point::KvA), n, |w| (&mut w.qkv_a, kv_a_cols.start))?;

        // Queries: latent, norm, heads of [nope | rope].
        let w = self.weights.vector(q_a_norm);
        self.device.rms_norm(
            at(Point::QANorm),
            &self.work.qkv_a,
            q_a_cols,
            w,
            latent_eps,
            n,
            &mut self.work.q_a_norm,
            0,
        )?;
        probe.values(self, at(Point::QANorm), n, |w| (&mut w.q_a_norm, 0))?;
        let w = self.weights.weight(q_b);
        self.device.matmul(at(Point::QRaw), w, &self.work.q_a_norm, 0..q_lora, n, &mut self.work.q_b, 0)?;
        probe.values(self, at(Point::QRaw), n, |w| (&mut w.q_b, 0))?;
        let rope_heads = Heads { start: nope, stride: qk, width: rope, count: heads };
        self.device.rope(at(Point::Q), &mut self.work.q_b, rope_heads, base, &self.inputs, n)?;
        probe.values(self, at(Point::Q), n, |w| (&mut w.q_b, 0))?;

        // The cached row: normed latent, rotated key.
        let w = self.weights.vector(kv_a_norm);
        let (latent, key) = (kv_a_cols.start..kv_a_cols.start + kv_lora, kv_a_cols.start + kv_lora..kv_a_cols.end);
        self.device.rms_norm(at(Point::KvLatent), &self.work.qkv_a, latent, w, latent_eps, n, &mut self.work.kv, 0)?;
        probe.values(self, at(Point::KvLatent), n, |w| (&mut w.kv, 0))?;
        self.device.copy(at(Point::KRope), &self.work.qkv_a, key, n, &mut self.work.kv, kv_lora)?;
        let one = Heads { start: kv_lora, stride: rope, width: rope, count: 1 };
        self.device.rope(at(Point::KRope), &mut self.work.kv, one, base, &self.inputs, n)?;
        probe.values(self, at(Point::KRope), n, |w| (&mut w.kv, kv_lora))?;
        let width = kv_lora + rope;
        self.device.append(
            at(Point::KRope),
            &mut self.latent_cache,
            layer,
            &self.work.kv,
            0..width,
            &self.inputs,
            n,
        )?;

        // Absorbed queries.
        let w = self.weights.weight(k_b);
        let nope_heads = Heads { start: 0, stride: qk, width: nope, count: heads };
        let latent_heads = Heads { start: 0, stride: kv_lora, width: kv_lora, count: heads };
        let site = at(Point::QAbsorbed);
        self.device.matmul_heads(site, w, &self.work.q_b, nope_heads, n, &mut self.work.q_latent, latent_heads)?;
        probe.values(self, at(Point::QAbsorbed), n, |w| (&mut w.q_latent, 0))?;

        let sparse = self.attention == Attention::Dsa;
        if sparse && self.config.is_full(layer) {
            self.indexer(layer, shape, heads * qk, probe)?;
        }
        let chosen = sparse.then_some(&self.work.chosen);
        let scale = self.config.softmax_scale();
        self.device.attend(
            at(Point::Latent),
            &self.latent_cache,
            layer,
            &self.work.q_latent,
            latent_heads,
            &self.work.q_b,
            rope_heads,
            scale,
            chosen,
            &self.inputs,
            shape,
            &mut self.work.latent,
        )?;
        probe.values(self, at(Point::Latent), n, |w| (&mut w.latent, 0))?;
        let w = self.weights.weight(v_b);
        let v_head = self.config.v_head;
        let value_heads = Heads { start: 0, stride: v_head, width: v_head, count: heads };
        let site = at(Point::Context);
        self.device.matmul_heads(site, w, &self.work.latent, latent_heads, n, &mut self.work.context, value_heads)?;
        probe.values(self, at(Point::Context), n, |w| (&mut w.context, 0))?;
        let w = self.weights.weight(o);
        let site = at(Point::AttnOut);
        self.device.matmul(site, w, &self.work.context, 0..heads * v_head, n, &mut self.work.delta, 0)?;
        comm.all_reduce(self.rank, site, &self.device, &mut self.work.delta, n, hidden)?;
        probe.values(self, at(Point::AttnOut), n, |w| (&mut w.delta, 0))
    }

    /// A full layer's indexer: keys appended, every query's top-k chosen. Shared layers reuse what it leaves.
    fn indexer(
        &mut self,
        layer: usize,
        shape: StepShape,
        q_start: usize,
        probe: &mut Listener<'_>,
    ) -> Result<(), Halt> {
        let at = |point| Place::trunk(layer, point);
        let (n, longest) = (shape.tokens, shape.context);
        let c = &self.config;
        let (dim, count, rope, base, eps, top_k) =
            (c.index_dim, c.index_heads, c.rope, c.rope_base, c.index_eps, c.top_k);
        let (key, weight_cols) = (self.columns.index_k.clone(), self.columns.index_weights.clone());
        let q_heads = Heads { start: q_start, stride: dim, width: dim, count };
        let rotated = Heads { width: rope, ..q_heads };
        self.device.rope(at(Point::IndexQ), &mut self.work.q_b, rotated, base, &self.inputs, n)?;
        probe.values(self, at(Point::IndexQ), n, |w| (&mut w.q_b, q_start))?;
        if let Some((w, b)) = self.weights.layers[layer].index_norm {
            let (w, b) = (self.weights.vector(w), self.weights.vector(b));
            self.device.layer_norm(at(Point::IndexK), &mut self.work.qkv_a, key.clone(), w, b, eps, n)?;
        }
        let one = Heads { start: key.start, stride: dim, width: rope, count: 1 };
        self.device.rope(at(Point::IndexK), &mut self.work.qkv_a, one, base, &self.inputs, n)?;
        probe.values(self, at(Point::IndexK), n, |w| (&mut w.qkv_a, key.start))?;
        self.device.append(at(Point::IndexK), &mut self.index_cache, layer, &self.work.qkv_a, key, &self.inputs, n)?;
        let factor = self.config.index_scale();
        self.device.scale(at(Point::IndexWeights), &mut self.work.qkv_a, weight_cols.clone(), factor, n)?;
        probe.values(self, at(Point::IndexWeights), n, |w| (&mut w.qkv_a, weight_cols.start))?;

        let mut scores = match probe.wants(at(Point::IndexScores)) {
            true => Some(self.device.buf(n, longest)?),
            false => None,
        };
        self.device.index_top_k(
            at(Point::IndexTopk),
            &self.index_cache,
            layer,
            &self.work.q_b,
            q_heads,
            &self.work.qkv_a,
            weight_cols,
            &self.inputs,
            shape,
            top_k,
            &mut self.work.chosen,
            scores.as_mut(),
        )?;
        if let Some(buf) = &mut scores {
            let mut values = self.device.read(buf, n, 0..longest)?;
            probe.show(at(Point::IndexScores), n, &[longest], Data::Values(&mut values))?;
        }
        probe.indices(self, at(Point::IndexTopk), n, |w| &mut w.chosen)
    }

    fn feed_forward(
        &mut self,
        comm: &dyn Collective<D>,
        layer: usize,
        n: usize,
        probe: &mut Listener<'_>,
    ) -> Result<(), Halt> {
        let at = |point| Place::trunk(layer, point);
        let hidden = self.config.hidden;
        match self.weights.layers[layer].ffn {
            Ffn::Dense { gate_up, down } => {
                let width = self.config.ffn / self.tp;
                let w = self.weights.weight(gate_up);
                self.device.matmul(at(Point::Hidden), w, &self.work.norm, 0..hidden, n, &mut self.work.gate_up, 0)?;
                self.device.swiglu(at(Point::Hidden), &self.work.gate_up, width, n, &mut self.work.hidden, 0)?;
                probe.values(self, at(Point::Hidden), n, |w| (&mut w.hidden, 0))?;
                let w = self.weights.weight(down);
                self.device.matmul(at(Point::FfnOut), w, &self.work.hidden, 0..width, n, &mut self.work.delta, 0)?;
            }
            Ffn::Moe { router, bias, gate_up, down, shared } => {
                self.route(layer, router, bias, n, probe)?;
                let (slots, width) = (self.config.experts_used, self.config.expert_ffn / self.tp);
                let w = self.weights.weight(gate_up);
                let (x, ids) = (&self.work.norm, &self.work.expert_ids);
                self.device.experts_hidden(at(Point::Hidden), w, x, ids, slots, width, n, &mut self.work.hidden)?;
                let shared_width = self.config.shared_ffn() / self.tp;
                if let Some((gate_up, _)) = shared {
                    let w = self.weights.weight(gate_up);
                    self.device.matmul(
                        at(Point::Hidden),
                        w,
                        &self.work.norm,
                        0..hidden,
                        n,
                        &mut self.work.gate_up,
                        0,
                    )?;
                    let (x, out) = (&self.work.gate_up, &mut self.work.hidden);
                    self.device.swiglu(at(Point::Hidden), x, shared_width, n, out, slots * width)?;
                }
                probe.values(self, at(Point::Hidden), n, |w| (&mut w.hidden, 0))?;
                let w = self.weights.weight(down);
                self.device.experts_down(
                    at(Point::Routed),
                    w,
                    &self.work.hidden,
                    &self.work.expert_ids,
                    &self.work.expert_weights,
                    slots,
                    width,
                    n,
                    &mut self.work.routed,
                )?;
                probe.values(self, at(Point::Routed), n, |w| (&mut w.routed, 0))?;
                self.device.copy(at(Point::FfnOut), &self.work.routed, 0..hidden, n, &mut self.work.delta, 0)?;
                if let Some((_, down)) = shared {
                    let w = self.weights.weight(down);
                    let cols = slots * width..slots * width + shared_width;
                    self.device.matmul(at(Point::Shared), w, &self.work.hidden, cols, n, &mut self.work.shared, 0)?;
                    probe.values(self, at(Point::Shared), n, |w| (&mut w.shared, 0))?;
                    // Routed and shared are reduced together: one meeting instead of two.
                    self.device.add(at(Point::FfnOut), &mut self.work.delta, &self.work.shared, hidden, n)?;
                }
            }
        }
        comm.all_reduce(self.rank, at(Point::FfnOut), &self.device, &mut self.work.delta, n, hidden)?;
        probe.values(self, at(Point::FfnOut), n, |w| (&mut w.delta, 0))
    }

    fn route(
        &mut self,
        layer: usize,
        router: super::weights::WeightId,
        bias: VectorId,
        n: usize,
        probe: &mut Listener<'_>,
    ) -> Result<(), Halt> {
        let at = |point| Place::trunk(layer, point);
        let hidden = self.config.hidden;
        let w = self.weights.weight(router);
        self.device.matmul(
            at(Point::RouterLogits),
            w,
            &self.work.norm,
            0..hidden,
            n,
            &mut self.work.router_logits,
            0,
        )?;
        probe.values(self, at(Point::RouterLogits), n, |w| (&mut w.router_logits, 0))?;
        let (c, b) = (&self.config, self.weights.vector(bias));
        let (scores, ids) = (&mut self.work.choice_scores, &mut self.work.expert_ids);
        self.device.route(at(Point::ExpertIds), c, &self.work.router_logits, b, &self.inputs, n, scores, ids)?;
        probe.values(self, at(Point::ChoiceScores), n, |w| (&mut w.choice_scores, 0))?;
        probe.indices(self, at(Point::ExpertIds), n, |w| &mut w.expert_ids)?;
        let (site, ids, out) = (at(Point::ExpertWeights), &self.work.expert_ids, &mut self.work.expert_weights);
        self.device.expert_weights(site, &self.config, &self.work.router_logits, ids, n, out)?;
        probe.values(self, at(Point::ExpertWeights), n, |w| (&mut w.expert_weights, 0))
    }

    /// This rank's part of the vocabulary, for the rows that are wanted.
    fn head(&mut self, rows: usize, probe: &mut Listener<'_>) -> Result<(), Halt> {
        if rows == 0 {
            return Ok(());
        }
        let site = Place::LOGITS;
        let (w, hidden) = (self.weights.weight(self.weights.head.0), self.config.hidden);
        self.device.take_rows(site, &self.work.norm, hidden, &self.inputs, rows, &mut self.work.last)?;
        if self.weights.head.1 > 0 {
            self.device.matmul(site, w, &self.work.last, 0..hidden, rows, &mut self.work.logits, 0)?;
        }
        probe.values(self, Place::LOGITS, rows, |w| (&mut w.logits, 0))
    }
}
