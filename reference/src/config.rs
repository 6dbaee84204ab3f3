//! The model's configuration as the oracle reads it: from raw metadata, key by key, with no help from the engine.
//! Fields are public so that a hypothesis ("the target ropes half-split", "the target's eps is 1e-6") is a changed copy
//! of this struct.

use crate::error::RefError;
use crate::source::{Format, Meta, RawModel};

/// The largest size of any axis that is believed; anything above is a damaged file.
const LARGEST: u64 = 1 << 24;
/// The largest number of layers that is believed.
const MOST_LAYERS: u64 = 1 << 10;

/// Which small constants stand under the roots. References disagree on these, so the caller says whom to follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Eps {
    /// The file's RMS eps for every RMSNorm, 1e-6 for the indexer's LayerNorm.
    File,
    /// As transformers runs it: 1e-6 for the norms of the query and key/value latents too.
    Hf,
    /// As llama.cpp runs glm-dsa: the file's RMS eps for every RMSNorm, 0 for the indexer's LayerNorm.
    LlamaCpp,
}

/// How router logits become probabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gating {
    /// Softmax over the experts.
    Softmax,
    /// Sigmoid, each expert alone.
    Sigmoid,
    /// Square root of softplus, each expert alone.
    SqrtSoftplus,
}

/// Which coordinates rotate together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// Interleaved: (2i, 2i + 1).
    Interleaved,
    /// Half-split: (i, i + width / 2).
    HalfSplit,
}

/// Everything that the forward pass needs to know beside the weights. Sizes are counts of values.
#[derive(Debug, Clone, PartialEq)]
pub struct RefConfig {
    /// Trunk layers, without MTP.
    pub layers: usize,
    /// MTP layers after the trunk; the oracle runs the first.
    pub mtp_layers: usize,
    /// Trunk layers at the start that have a dense feed-forward part.
    pub dense_layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Token ids.
    pub vocab: usize,
    /// Attention heads.
    pub heads: usize,
    /// Unrotated part of a query head.
    pub nope: usize,
    /// Rotated part of a query head, and of the one shared key.
    pub rope: usize,
    /// Width of a value head.
    pub value: usize,
    /// Query latent.
    pub q_rank: usize,
    /// Key/value latent.
    pub kv_rank: usize,
    /// Inner width of a dense feed-forward part.
    pub ffn: usize,
    /// Inner width of one expert.
    pub moe_ffn: usize,
    /// Routed experts.
    pub experts: usize,
    /// Routed experts that each token uses.
    pub experts_used: usize,
    /// Shared experts, which act as one of `shared_experts * moe_ffn`.
    pub shared_experts: usize,
    /// Expert groups.
    pub groups: usize,
    /// Expert groups that each token may use.
    pub groups_used: usize,
    /// How router logits become probabilities.
    pub gating: Gating,
    /// Whether the chosen experts' weights are divided by their sum.
    pub normalise_weights: bool,
    /// Factor on the routed experts' weights.
    pub routed_scale: f64,
    /// Indexer heads.
    pub index_heads: usize,
    /// Width of an indexer head, of which the first `rope` values rotate.
    pub index_dim: usize,
    /// Keys that each query may attend to.
    pub top_k: usize,
    /// Per trunk layer: runs its own indexer (full), or reuses the last full layer's choice (shared). Layer 0 is full.
    pub index_full: Vec<bool>,
    /// Base of the rotation frequencies.
    pub rope_theta: f64,
    /// Rope of the main attention.
    pub rope_style: RopeStyle,
    /// Rope of the indexer.
    pub index_rope_style: RopeStyle,
    /// Eps of every RMSNorm but those of the latents.
    pub eps: f64,
    /// Eps of the norms of the query and key/value latents.
    pub latent_eps: f64,
    /// Eps of the indexer's key LayerNorm.
    pub index_eps: f64,
    /// Whether the head reuses the token embedding.
    pub tied_head: bool,
}

impl RefConfig {
    /// Reads a `glm-dsa` (GGUF) or `glm_moe_dsa` (Hugging Face) configuration.
    ///
    /// # Errors
    /// [`RefError::Key`] for a key that is missing, of the wrong kind, out of range or in contradiction with another,
    /// and for every other architecture.
    pub fn from_raw(raw: &dyn RawModel, eps: Eps) -> Result<Self, RefError> {
        let mut config = match raw.format() {
            Format::Gguf => from_gguf(raw)?,
            Format::Hf => from_hf(raw)?,
        };
        (config.latent_eps, config.index_eps) = match eps {
            Eps::File => (config.eps, 1e-6),
            Eps::Hf => (1e-6, 1e-6),
            Eps::LlamaCpp => (config.eps, 0.0),
        };
        config.check()?;
        Ok(config)
    }

    /// Whether `layer` (MTP layers count after the trunk) has experts.
    pub fn is_moe(&self, layer: usize) -> bool {
        layer >= self.dense_layers
    }

    /// The layer whose index choice trunk layer `layer` uses: itself, or the last full layer before it.
    pub fn index_source(&self, layer: usize) -> usize {
        (0..=layer).rev().find(|&l| self.index_full.get(l).copied().unwrap_or(false)).unwrap_or(0)
    }

    fn check(&self) -> Result<(), RefError> {
        let need = |ok: bool, key: &str, expected: String, found: usize| match ok {
            true => Ok(()),
            false => Err(RefError::key(key, expected, found.to_string())),
        };
        need(self.rope.is_multiple_of(2), "rope dimension", "an even number".into(), self.rope)?;
        need(self.index_dim >= self.rope, "indexer key length", format!("at least {}", self.rope), self.index_dim)?;
        need(
            self.experts_used <= self.experts,
            "experts used",
            format!("at most {}", self.experts),
            self.experts_used,
        )?;
        need(
            self.experts.is_multiple_of(self.groups),
            "expert groups",
            format!("a divisor of {}", self.experts),
            self.groups,
        )?;
        need(
            self.groups_used <= self.groups,
            "expert groups used",
            format!("at most {}", self.groups),
            self.groups_used,
        )?;
        let choosable = self.experts / self.groups * self.groups_used;
        need(
            self.experts_used <= choosable,
            "experts used",
            format!("at most {choosable} in the groups used"),
            self.experts_used,
        )?;
        need(self.dense_layers <= self.layers, "dense layers", format!("at most {}", self.layers), self.dense_layers)?;
        let first_full = self.index_full.first().copied().unwrap_or(false);
        need(first_full, "indexer types", "a full layer 0, whose choice the others can reuse".into(), 0)
    }
}

fn from_gguf(raw: &dyn RawModel) -> Result<RefConfig, RefError> {
    let keys = Keys { raw, prefix: "" };
    keys.must_be("general.architecture", "glm-dsa")?;
    let keys = Keys { raw, prefix: "glm-dsa." };
    if let Some(scaling) = keys.get("rope.scaling.type").filter(|s| !matches!(s.as_text(), Some("none" | "default"))) {
        return Err(keys.wrong("rope.scaling.type", "no rope scaling", &scaling));
    }
    for key in ["rope.scaling.factor", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scale_linear"]
    {
        if let Some(factor) = keys.get(key).filter(|f| f.as_real() != Some(1.0)) {
            return Err(keys.wrong(key, "1 (no rope scaling)", &factor));
        }
    }
    let blocks = keys.layers("block_count")?;
    let mtp_layers = keys.optional("nextn_predict_layers", Keys::count_or_zero)?.unwrap_or(0);
    let layers = (blocks.checked_sub(mtp_layers).filter(|&n| n > 0)).ok_or_else(|| {
        RefError::key("glm-dsa.nextn_predict_layers", format!("less than {blocks}"), mtp_layers.to_string())
    })?;
    let dense_layers = keys.count_or_zero("leading_dense_block_count")?;
    let rope = keys.count("rope.dimension_count")?;
    let q_rank = keys.count("attention.q_lora_rank")?;
    let kv_rank = keys.count("attention.kv_lora_rank")?;
    let (query, value) = gguf_heads(&keys, kv_rank, rope)?;
    let nope = (query.checked_sub(rope).filter(|&n| n > 0)).ok_or_else(|| {
        RefError::key("glm-dsa.attention.key_length_mla", format!("more than {rope}"), query.to_string())
    })?;
    let vocab = match keys.optional("vocab_size", Keys::count)? {
        Some(n) => n,
        None => (raw.tensor("token_embd.weight").and_then(|t| t.ne.get(1).copied()))
            .ok_or_else(|| RefError::key("glm-dsa.vocab_size", "a count, or token_embd.weight", "neither"))?,
    };
    let gating = match keys.optional("expert_gating_func", Keys::count)? {
        None | Some(2) => Gating::Sigmoid,
        Some(1) => Gating::Softmax,
        Some(4) => Gating::SqrtSoftplus,
        Some(n) => return Err(RefError::key("glm-dsa.expert_gating_func", "1, 2 or 4", n.to_string())),
    };
    let (groups, groups_used) = keys.groups("expert_group_count", "expert_group_used_count")?;
    let index_full = match keys.get("attention.indexer.types") {
        Some(types) => keys.full_layers("attention.indexer.types", &types, layers, Meta::as_flag)?,
        None if keys.count("context_length")? < 1 << 20 => vec![true; layers],
        None => every_fourth(layers, 3, 4),
    };
    Ok(RefConfig {
        layers,
        mtp_layers,
        dense_layers,
        hidden: keys.count("embedding_length")?,
        vocab,
        heads: keys.count("attention.head_count")?,
        nope,
        rope,
        value,
        q_rank,
        kv_rank,
        ffn: keys.count_in("feed_forward_length", 0..dense_layers)?,
        moe_ffn: keys.count_in("expert_feed_forward_length", dense_layers..blocks)?,
        experts: keys.count("expert_count")?,
        experts_used: keys.count("expert_used_count")?,
        shared_experts: keys.count("expert_shared_count")?,
        groups,
        groups_used,
        gating,
        normalise_weights: keys.flag_or("expert_weights_norm", false)?,
        routed_scale: keys.real("expert_weights_scale")?,
        index_heads: keys.count("attention.indexer.head_count")?,
        index_dim: keys.count("attention.indexer.key_length")?,
        top_k: keys.count("attention.indexer.top_k")?,
        index_full,
        rope_theta: keys.real("rope.freq_base")?,
        rope_style: RopeStyle::Interleaved,
        index_rope_style: RopeStyle::Interleaved,
        eps: keys.real("attention.layer_norm_rms_epsilon")?,
        latent_eps: 0.0,
        index_eps: 0.0,
        tied_head: raw.tensor("output.weight").is_none(),
    })
}

/// Widths of a real query head and of a real value head. With the `_mla` keys, the plain ones describe the cached row; a
/// file that keeps `kv_b` whole has the plain ones only, and they say it themselves.
fn gguf_heads(keys: &Keys<'_>, kv_rank: usize, rope: usize) -> Result<(usize, usize), RefError> {
    let real = ["attention.key_length_mla", "attention.value_length_mla"];
    if real.iter().any(|key| keys.get(key).is_some()) {
        keys.agrees("attention.key_length", kv_rank + rope)?;
        keys.agrees("attention.value_length", kv_rank)?;
        return Ok((keys.count(real[0])?, keys.count(real[1])?));
    }
    let plain = (keys.count("attention.key_length")?, keys.count("attention.value_length")?);
    if plain.0 == kv_rank + rope {
        return Err(RefError::key(
            real.map(|key| format!("glm-dsa.{key}")).join(", "),
            "the real head widths",
            "nothing",
        ));
    }
    Ok(plain)
}

fn from_hf(raw: &dyn RawModel) -> Result<RefConfig, RefError> {
    let keys = Keys { raw, prefix: "" };
    keys.must_be("model_type", "glm_moe_dsa")?;
    let fixed = [
        ("rope_parameters.rope_type", "default"),
        ("rope_parameters.type", "default"),
        ("hidden_act", "silu"),
        ("topk_method", "noaux_tc"),
    ];
    for (key, value) in fixed {
        if keys.get(key).is_some() {
            keys.must_be(key, value)?;
        }
    }
    for key in ["rope_scaling", "rope_scaling.type", "rope_scaling.rope_type", "rope_scaling.factor"] {
        if let Some(scaling) = keys.get(key) {
            return Err(keys.wrong(key, "no rope scaling", &scaling));
        }
    }
    keys.agrees("moe_layer_freq", 1)?;
    let layers = keys.layers("num_hidden_layers")?;
    let dense_layers = hf_dense(&keys, layers)?;
    let (nope, rope) = (keys.count("qk_nope_head_dim")?, keys.count("qk_rope_head_dim")?);
    if let Some(width) = keys.get("qk_head_dim").filter(|w| everywhere(w).as_count() != Some((nope + rope) as u64)) {
        let expected = format!("qk_nope_head_dim {nope} + qk_rope_head_dim {rope} = {}", nope + rope);
        return Err(keys.wrong("qk_head_dim", expected, &width));
    }
    let gating = match keys.get("scoring_func") {
        None => Gating::Sigmoid,
        Some(Meta::Str(s)) if s == "sigmoid" => Gating::Sigmoid,
        Some(Meta::Str(s)) if s == "softmax" => Gating::Softmax,
        Some(other) => return Err(keys.wrong("scoring_func", "\"sigmoid\" or \"softmax\"", &other)),
    };
    if let Some(pattern) = keys.get("index_topk_pattern") {
        return Err(keys.wrong("index_topk_pattern", "none (indexer_types says it)", &pattern));
    }
    let index_full = match keys.get("indexer_types") {
        Some(types) => keys.full_layers("indexer_types", &types, layers, |t| match t.as_text() {
            Some("full") => Some(true),
            Some("shared") => Some(false),
            _ => None,
        })?,
        None => match keys.optional("index_topk_freq", Keys::count)? {
            Some(freq) => every_fourth(layers, keys.count_or_zero("index_skip_topk_offset")?, freq),
            None => vec![true; layers],
        },
    };
    let (groups, groups_used) = keys.groups("n_group", "topk_group")?;
    let style = |key: &str| {
        Ok(match keys.flag_or(key, true)? {
            true => RopeStyle::Interleaved,
            false => RopeStyle::HalfSplit,
        })
    };
    let rope_theta = match (keys.get("rope_parameters.rope_theta"), keys.get("rope_theta")) {
        (None, Some(_)) => keys.real("rope_theta")?,
        (Some(_), Some(outer)) => {
            let inner = keys.real("rope_parameters.rope_theta")?;
            if keys.real("rope_theta")? != inner {
                return Err(keys.wrong("rope_theta", format!("{inner}, as in rope_parameters"), &outer));
            }
            inner
        }
        _ => keys.real("rope_parameters.rope_theta")?,
    };
    Ok(RefConfig {
        layers,
        mtp_layers: keys.optional("num_nextn_predict_layers", Keys::count_or_zero)?.unwrap_or(0),
        dense_layers,
        hidden: keys.count("hidden_size")?,
        vocab: keys.count("vocab_size")?,
        heads: keys.count("num_attention_heads")?,
        nope,
        rope,
        value: keys.count("v_head_dim")?,
        q_rank: keys.count("q_lora_rank")?,
        kv_rank: keys.count("kv_lora_rank")?,
        ffn: keys.count("intermediate_size")?,
        moe_ffn: keys.count("moe_intermediate_size")?,
        experts: keys.count("n_routed_experts")?,
        experts_used: keys.count("num_experts_per_tok")?,
        shared_experts: keys.count("n_shared_experts")?,
        groups,
        groups_used,
        gating,
        normalise_weights: keys.flag_or("norm_topk_prob", true)?,
        routed_scale: keys.real("routed_scaling_factor")?,
        index_heads: keys.count("index_n_heads")?,
        index_dim: keys.count("index_head_dim")?,
        top_k: keys.count("index_topk")?,
        index_full,
        rope_theta,
        rope_style: style("rope_interleave")?,
        index_rope_style: style("indexer_rope_interleave")?,
        eps: keys.real("rms_norm_eps")?,
        latent_eps: 0.0,
        index_eps: 0.0,
        // A head that is there is used, whatever the flag says.
        tied_head: raw.tensor("lm_head.weight").is_none() && keys.flag_or("tie_word_embeddings", false)?,
    })
}

/// How many layers at the start are dense: as a count, as a list with a word for each layer, or both.
fn hf_dense(keys: &Keys<'_>, layers: usize) -> Result<usize, RefError> {
    let Some(list) = keys.get("mlp_layer_types") else { return keys.count_or_zero("first_k_dense_replace") };
    let sparse = keys.full_layers("mlp_layer_types", &list, layers, |word| match word.as_text() {
        Some("sparse") => Some(true),
        Some("dense") => Some(false),
        _ => None,
    })?;
    let dense = sparse.iter().position(|s| *s).unwrap_or(layers);
    if sparse[dense..].contains(&false) {
        return Err(keys.wrong("mlp_layer_types", "all dense layers before the first sparse one", &list));
    }
    let counted = keys.optional("first_k_dense_replace", Keys::count_or_zero)?;
    match counted.filter(|n| (*n).min(layers) != dense) {
        Some(n) => Err(RefError::key("first_k_dense_replace", format!("{dense}, as mlp_layer_types"), n.to_string())),
        None => Ok(counted.unwrap_or(dense)),
    }
}

/// GLM-5.2's rule: layer i is full where max(i - offset + 1, 0) is a multiple of `freq`.
fn every_fourth(layers: usize, offset: usize, freq: usize) -> Vec<bool> {
    (0..layers).map(|i| (i + 1).saturating_sub(offset).is_multiple_of(freq)).collect()
}

/// What a list with one entry per layer says for every layer; a list of different entries, and all else, as it is.
fn everywhere(meta: &Meta) -> &Meta {
    match meta {
        Meta::Array(list) if !list.is_empty() && list.iter().all(|entry| *entry == list[0]) => &list[0],
        _ => meta,
    }
}

/// Metadata under a prefix, with errors that name the whole key.
struct Keys<'a> {
    raw: &'a dyn RawModel,
    prefix: &'static str,
}

impl Keys<'_> {
    fn get(&self, key: &str) -> Option<Meta> {
        self.raw.meta(&format!("{}{key}", self.prefix))
    }

    fn wrong(&self, key: &str, expected: impl Into<String>, found: &Meta) -> RefError {
        RefError::key(format!("{}{key}", self.prefix), expected, found.describe())
    }

    fn need(&self, key: &str, expected: &str) -> Result<Meta, RefError> {
        self.get(key).ok_or_else(|| RefError::key(format!("{}{key}", self.prefix), expected, "nothing"))
    }

    fn optional<T>(&self, key: &str, read: impl Fn(&Self, &str) -> Result<T, RefError>) -> Result<Option<T>, RefError> {
        self.get(key).map(|_| read(self, key)).transpose()
    }

    /// A size, or a list of one per layer that says the same for all.
    fn size(&self, key: &str, meta: &Meta, least: u64, most: u64) -> Result<usize, RefError> {
        let n = everywhere(meta).as_count().filter(|n| (least..=most).contains(n));
        n.map(|n| n as usize).ok_or_else(|| self.wrong(key, format!("an integer from {least} to {most}"), meta))
    }

    fn count(&self, key: &str) -> Result<usize, RefError> {
        self.size(key, &self.need(key, "a count")?, 1, LARGEST)
    }

    fn count_or_zero(&self, key: &str) -> Result<usize, RefError> {
        self.size(key, &self.need(key, "a count")?, 0, LARGEST)
    }

    /// Groups of experts, and how many of them are used. No key and zero both say that there are none: all experts are one
    /// group, which is used. Where there are several, none used is damage.
    fn groups(&self, all: &str, used: &str) -> Result<(usize, usize), RefError> {
        let groups = self.optional(all, Keys::count_or_zero)?.unwrap_or(1).max(1);
        let read = if groups == 1 { Keys::count_or_zero } else { Keys::count };
        Ok((groups, self.optional(used, read)?.unwrap_or(1).max(1)))
    }

    fn layers(&self, key: &str) -> Result<usize, RefError> {
        self.size(key, &self.need(key, "a count")?, 1, MOST_LAYERS)
    }

    /// A count that may be one number, or a list with one per layer that agrees over `layers`, which use it; over all
    /// where none does.
    fn count_in(&self, key: &str, layers: std::ops::Range<usize>) -> Result<usize, RefError> {
        let meta = self.need(key, "a count")?;
        let list = match &meta {
            Meta::Array(list) if !layers.is_empty() => list,
            _ => return self.size(key, &meta, 1, LARGEST),
        };
        let part = list.get(layers.clone()).filter(|part| !part.is_empty() && part.iter().all(|v| *v == part[0]));
        let part = part.ok_or_else(|| self.wrong(key, format!("one value for layers {layers:?}"), &meta))?;
        self.size(key, &part[0], 1, LARGEST)
    }

    fn real(&self, key: &str) -> Result<f64, RefError> {
        let meta = self.need(key, "a positive number")?;
        (meta.as_real().filter(|v| v.is_finite() && *v > 0.0))
            .ok_or_else(|| self.wrong(key, "a positive number", &meta))
    }

    fn flag_or(&self, key: &str, default: bool) -> Result<bool, RefError> {
        let Some(meta) = self.get(key) else { return Ok(default) };
        meta.as_flag().ok_or_else(|| self.wrong(key, "true or false", &meta))
    }

    fn must_be(&self, key: &str, value: &str) -> Result<(), RefError> {
        let meta = self.need(key, value)?;
        if meta.as_text() == Some(value) { Ok(()) } else { Err(self.wrong(key, format!("\"{value}\""), &meta)) }
    }

    /// A key that says again what other keys say must say the same.
    fn agrees(&self, key: &str, value: usize) -> Result<(), RefError> {
        match self.get(key) {
            Some(meta) if everywhere(&meta).as_count() != Some(value as u64) => {
                Err(self.wrong(key, value.to_string(), &meta))
            }
            _ => Ok(()),
        }
    }

    /// One entry per trunk layer; further entries belong to MTP layers, which run dense.
    fn full_layers(
        &self,
        key: &str,
        list: &Meta,
        layers: usize,
        read: impl Fn(&Meta) -> Option<bool>,
    ) -> Result<Vec<bool>, RefError> {
        let expected = || format!("a list with one of its two words for each of {layers} layers");
        let Meta::Array(items) = list else { return Err(self.wrong(key, expected(), list)) };
        let items = items.get(..layers).ok_or_else(|| self.wrong(key, expected(), list))?;
        items.iter().map(|item| read(item).ok_or_else(|| self.wrong(key, expected(), item))).collect()
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
