//! The GLM-5 family: multi-head latent attention in its absorbed form, keys chosen by a sparse indexer, and experts behind
//! a sigmoid router. In the order of the paper; read it beside `reference/src/model.rs`.
//!
//! Ranks meet three times: behind the embedding, the output projection and the feed-forward. Everything between runs on
//! the rank's own shards.

use super::Writer;
use crate::device::{BufId, BufRows, CacheId, IndexId, Op, Operand, Recipe, Rounding, Router, Rows, View, WeightId};
use crate::model::{Attention, Block, Config, Kind, Param, Point};
use crate::shard::Group;

/// What every layer uses.
struct Glm<'a, 'b> {
    p: &'a mut Writer<'b>,
    c: &'b Config,
    tp: usize,
    attention: Attention,
    /// The operand of products with stored weights.
    operand: Rounding,
    residual: View,
    norm: View,
    /// What is added to the residual.
    delta: View,
    latent_cache: CacheId,
    index_cache: CacheId,
    scores: BufId,
    chosen: IndexId,
    expert_ids: IndexId,
}

/// Writes the model down. Returns where its logits are.
pub(super) fn write(p: &mut Writer<'_>, attention: Attention, recipe: Recipe) -> View {
    let (c, tp, rank) = (p.config, p.plan.tp(), p.rank);
    let operand = match recipe {
        Recipe::Strict => Rounding::Exact,
        Recipe::Fast => Rounding::Bf16,
    };
    let part = |kind| p.plan.slice(Param { layer: None, kind }, 1, rank).rows;
    let (first_row, head_rows) = (part(Kind::TokenEmbd).start, part(Kind::Output).len());
    let (residual, norm, delta) = (p.work("residual", c.hidden), p.work("norm", c.hidden), p.work("delta", c.hidden));
    let (latent_cache, index_cache) = (p.cache(c.cache_width()), p.cache(c.index_dim));
    let (scores, chosen) = (p.buf(BufRows::Context, 0, None), p.index(c.top_k));
    let expert_ids = p.index(c.experts_used);

    let table = p.single(Kind::TokenEmbd);
    p.call(Point::Embed, Op::Embed { table, first_row, out: residual });
    p.call(Point::Embed, Op::AllReduce { x: residual });
    p.values(Point::Embed, residual);
    let mut glm = Glm {
        p,
        c,
        tp,
        attention,
        operand,
        residual,
        norm,
        delta,
        latent_cache,
        index_cache,
        scores,
        chosen,
        expert_ids,
    };
    for layer in 0..c.layers {
        glm.p.block = Block::Trunk(layer);
        glm.p.values(Point::Input, residual);
        glm.norm(Point::AttnNorm, Kind::AttnNorm);
        glm.attention(layer);
        glm.add(Point::Residual);
        glm.norm(Point::FfnNorm, Kind::FfnNorm);
        if c.is_moe(layer) {
            glm.route();
            glm.experts(layer);
        } else {
            glm.dense(layer);
        }
        glm.p.call(Point::FfnOut, Op::AllReduce { x: delta });
        glm.p.values(Point::FfnOut, delta);
        glm.add(Point::Output);
    }
    glm.p.block = Block::Back;
    glm.norm(Point::FinalNorm, Kind::OutputNorm);
    glm.head(head_rows, rank)
}

impl Glm<'_, '_> {
    fn product(&mut self, point: Point, w: WeightId, x: View, out: View) {
        self.p.call(point, Op::Product { w, x, out, operand: self.operand });
    }

    fn rms_norm(&mut self, point: Point, x: View, kind: Kind, eps: f32, out: View) {
        let w = self.p.vector(kind);
        self.p.call(point, Op::RmsNorm { x, w, eps, out });
        self.p.values(point, out);
    }

    /// The norm of the residual.
    fn norm(&mut self, point: Point, kind: Kind) {
        self.rms_norm(point, self.residual, kind, self.c.rms_eps, self.norm);
    }

    /// What attention or the feed-forward gave, to the residual.
    fn add(&mut self, point: Point) {
        self.p.call(point, Op::Add { x: self.residual, y: self.delta });
        self.p.values(point, self.residual);
    }

    fn attention(&mut self, layer: usize) {
        let (c, heads, base, eps) = (self.c, self.c.heads / self.tp, self.c.rope_base, self.c.latent_eps);
        let sparse = self.attention == Attention::Dsa;
        // Full layers have the indexer's projections behind the others.
        let (index_k, index_q) = match c.is_full(layer) {
            true => (c.index_dim + c.index_heads, c.index_heads * c.index_dim),
            false => (0, 0),
        };
        let qkv_a = self.p.work("qkv_a", c.q_lora + c.cache_width() + index_k);
        let (q_a, kv_a) = (qkv_a.part(0, c.q_lora), qkv_a.part(c.q_lora, c.cache_width()));
        let w = self.p.group(Group::QkvA, layer);
        self.product(Point::QA, w, self.norm, qkv_a);
        self.p.values(Point::QA, q_a);
        self.p.values(Point::KvA, kv_a);

        // Queries: latent, norm, heads of [nope | rope].
        let q_a_norm = self.p.work("q_a_norm", c.q_lora);
        self.rms_norm(Point::QANorm, q_a, Kind::QANorm, eps, q_a_norm);
        let q_b = self.p.work("q_b", heads * c.qk_head() + index_q);
        let q = View::heads(q_b.buf, 0, c.qk_head(), heads);
        let w = self.p.group(Group::QB, layer);
        self.product(Point::QRaw, w, q_a_norm, q_b);
        self.p.values(Point::QRaw, q);
        let q_rope = q.part(c.nope, c.rope);
        self.p.call(Point::Q, Op::Rope { x: q_rope, base });
        self.p.values(Point::Q, q);

        // The cached row: normed latent, rotated key.
        let kv = self.p.work("kv", c.cache_width());
        let (latent, key) = (kv.part(0, c.kv_lora), kv.part(c.kv_lora, c.rope));
        self.rms_norm(Point::KvLatent, kv_a.part(0, c.kv_lora), Kind::KvANorm, eps, latent);
        self.p.call(Point::KRope, Op::Copy { x: kv_a.part(c.kv_lora, c.rope), out: key });
        self.p.call(Point::KRope, Op::Rope { x: key, base });
        self.p.values(Point::KRope, key);
        self.p.call(Point::KRope, Op::Append { x: kv, cache: self.latent_cache, layer });

        // Absorbed queries.
        let q_latent = self.p.heads("q_latent", c.kv_lora, heads);
        let k_b = self.p.single(Kind::KB);
        self.product(Point::QAbsorbed, k_b, q.part(0, c.nope), q_latent);
        self.p.values(Point::QAbsorbed, q_latent);
        if c.is_full(layer) {
            // A dense run holds the indexer's parameters as well: they are the model's.
            let norm = (self.p.vector(Kind::IndexKNorm), self.p.vector(Kind::IndexKNormBias));
            if sparse {
                let index_k = qkv_a.part(kv_a.end(), c.index_dim);
                let weights = qkv_a.part(index_k.end(), c.index_heads);
                let index_q = View::heads(q_b.buf, q.end(), c.index_dim, c.index_heads);
                self.indexer(layer, index_q, index_k, weights, norm);
            }
        }
        let latent = self.p.heads("latent", c.kv_lora, heads);
        let attend = Op::Attend {
            cache: self.latent_cache,
            layer,
            q_latent,
            q_rope,
            scale: c.softmax_scale(),
            chosen: sparse.then_some(self.chosen),
            out: latent,
        };
        self.p.call(Point::Latent, attend);
        self.p.values(Point::Latent, latent);
        let context = self.p.heads("context", c.v_head, heads);
        let v_b = self.p.single(Kind::VB);
        self.product(Point::Context, v_b, latent, context);
        self.p.values(Point::Context, context);
        let o = self.p.single(Kind::AttnOutput);
        self.product(Point::AttnOut, o, View::cols(context.buf, 0, context.len()), self.delta);
        self.p.call(Point::AttnOut, Op::AllReduce { x: self.delta });
        self.p.values(Point::AttnOut, self.delta);
    }

    /// A full layer's indexer: keys appended, every query's top-k chosen. Shared layers reuse what it leaves.
    fn indexer(&mut self, layer: usize, q: View, k: View, weights: View, (w, b): (BufId, BufId)) {
        let (c, cache, chosen, base) = (self.c, self.index_cache, self.chosen, self.c.rope_base);
        self.p.call(Point::IndexQ, Op::Rope { x: q.part(0, c.rope), base });
        self.p.values(Point::IndexQ, q);
        self.p.call(Point::IndexK, Op::LayerNorm { x: k, w, b, eps: c.index_eps });
        self.p.call(Point::IndexK, Op::Rope { x: k.part(0, c.rope), base });
        self.p.values(Point::IndexK, k);
        self.p.call(Point::IndexK, Op::Append { x: k, cache, layer });
        self.p.call(Point::IndexWeights, Op::Scale { x: weights, factor: c.index_scale() });
        self.p.values(Point::IndexWeights, weights);
        let scores = Some(self.scores);
        self.p.call(Point::IndexTopk, Op::IndexTopK { cache, layer, q, weights, top_k: c.top_k, chosen, scores });
        self.p.show(Point::IndexScores, Operand::Context(self.scores));
        self.p.show(Point::IndexTopk, Operand::Indices(chosen));
    }

    /// Gate and up, then SwiGLU, into `out`.
    fn swiglu(&mut self, gate_up: WeightId, out: View) {
        let both = self.p.work("gate_up", 2 * out.len());
        self.product(Point::Hidden, gate_up, self.norm, both);
        self.p.call(Point::Hidden, Op::SwiGlu { x: both, out });
    }

    fn dense(&mut self, layer: usize) {
        let hidden = self.p.work("hidden", self.c.ffn / self.tp);
        let gate_up = self.p.group(Group::GateUp, layer);
        self.swiglu(gate_up, hidden);
        self.p.values(Point::Hidden, hidden);
        let down = self.p.single(Kind::FfnDown);
        self.product(Point::FfnOut, down, hidden, self.delta);
    }

    fn route(&mut self) {
        let (c, ids, router) = (self.c, self.expert_ids, Router::from(self.c));
        let logits = self.p.work("router_logits", c.experts);
        let w = self.p.single(Kind::Router);
        // The router's choice is the one that a rounding can turn over: its operand stays as it is.
        self.p.call(Point::RouterLogits, Op::Product { w, x: self.norm, out: logits, operand: Rounding::Exact });
        self.p.values(Point::RouterLogits, logits);
        let (scores, bias) = (self.p.work("choice_scores", c.experts), self.p.vector(Kind::RouterBias));
        self.p.call(Point::ExpertIds, Op::Route { logits, bias, router, scores, ids });
        self.p.values(Point::ChoiceScores, scores);
        self.p.show(Point::ExpertIds, Operand::Indices(ids));
        let weights = self.p.work("expert_weights", c.experts_used);
        self.p.call(Point::ExpertWeights, Op::ExpertWeights { logits, ids, router, out: weights });
        self.p.values(Point::ExpertWeights, weights);
    }

    fn experts(&mut self, layer: usize) {
        let (c, ids, operand) = (self.c, self.expert_ids, self.operand);
        let shared = c.shared_experts > 0;
        let width = if shared { c.shared_ffn() / self.tp } else { 0 };
        let slots = c.experts_used * (c.expert_ffn / self.tp);
        let hidden = self.p.work("hidden", slots + width);
        let (of_slots, own) =
            (View::heads(hidden.buf, 0, c.expert_ffn / self.tp, c.experts_used), hidden.part(slots, width));
        let gate_up = self.p.group(Group::GateUpExps, layer);
        self.p.call(Point::Hidden, Op::ExpertsHidden { w: gate_up, x: self.norm, ids, out: of_slots, operand });
        if shared {
            let gate_up = self.p.group(Group::GateUpShexp, layer);
            self.swiglu(gate_up, own);
        }
        self.p.values(Point::Hidden, hidden);
        let (routed, weights) = (self.p.work("routed", c.hidden), self.p.work("expert_weights", c.experts_used));
        let w = self.p.single(Kind::DownExps);
        self.p.call(Point::Routed, Op::ExpertsDown { w, x: of_slots, ids, weights, out: routed, operand });
        self.p.values(Point::Routed, routed);
        self.p.call(Point::FfnOut, Op::Copy { x: routed, out: self.delta });
        if shared {
            let (down, out) = (self.p.single(Kind::DownShexp), self.p.work("shared", c.hidden));
            self.product(Point::Shared, down, own, out);
            self.p.values(Point::Shared, out);
            // Routed and shared are reduced together: one meeting instead of two.
            self.p.call(Point::FfnOut, Op::Add { x: self.delta, y: out });
        }
    }

    /// This rank's part of the vocabulary, for the rows that are wanted, and the choice of next tokens from it.
    fn head(&mut self, real: usize, rank: usize) -> View {
        let (c, ranks) = (self.c, self.tp);
        self.p.rows = Rows::Logits;
        let width = c.padded_vocab(ranks) / ranks;
        // Rows behind the real vocabulary are never written, so they keep losing.
        let logits = self.p.buf(BufRows::Step(Rows::Logits), width, Some(f32::NEG_INFINITY));
        let (all, real) = (View::cols(logits, 0, width), View::cols(logits, 0, real));
        let (last, w) = (self.p.work("last", c.hidden), self.p.single(Kind::Output));
        self.p.call(Point::Logits, Op::GatherRows { x: self.norm, out: last });
        if !real.is_empty() {
            self.product(Point::Logits, w, last, real);
        }
        self.p.values(Point::Logits, all);
        self.p.call(Point::NextToken, Op::Sample { logits: real, first: rank * width });
        self.p.call(Point::NextToken, Op::Share { ranks });
        self.p.call(Point::NextToken, Op::Commit { ranks });
        all
    }
}
