//! The `glm-dsa` architecture (GLM-5 family): keys, defaults and the rules that tie them together.

use std::ops::Range;

use super::config::{Config, ConfigError, Fact, Gating, Indexer, Metadata, Origin, Stated};
use crate::gguf::Value;

/// `general.architecture` of a GGUF.
pub const ARCHITECTURE: &str = "glm-dsa";
/// `model_type` of a `config.json`.
pub(super) const MODEL_TYPE: &str = "glm_moe_dsa";
/// eps of the indexer's LayerNorm; no file states it, transformers fixes it.
const INDEX_EPS: f64 = 1e-6;
/// eps that transformers gives the q_a and kv_a norms, whatever config.json says.
const HF_LATENT_EPS: f64 = 1e-6;
/// The flag of a `config.json` that ties the output matrix to the embedding.
pub const TIE: &str = "tie_word_embeddings";
/// The flag of a `config.json` that gives attention's projections biases, which no published model has.
pub const ATTENTION_BIAS: &str = "attention_bias";
/// The classes of transformers that run it begin so.
pub const CLASS: &str = "GlmMoeDsa";
/// Files without indexer types: below this context every layer is full, from it on the GLM-5.2 pattern holds.
const CONTEXT_OF_SHARED_INDEXERS: u64 = 1_048_576;
/// Bounds that no known model comes near; larger numbers are damage. Lists and buffers are sized by them, also where no
/// tensor confirms a number (top-k, experts without a layer that has some), and products of two widths and a count fit
/// in 63 bits.
const MOST_CONTEXT: u64 = 1 << 31;
const MOST_WIDTH: u64 = 1 << 24;
const MOST_TOP_K: u64 = 1 << 16;
const MOST_BLOCKS: u64 = 1 << 10;
const MOST_HEADS: u64 = 1 << 14;
const MOST_EXPERTS: u64 = 1 << 14;

/// The key of a GGUF that says `what` of the architecture.
pub fn key(what: &str) -> String {
    format!("{ARCHITECTURE}.{what}")
}

/// Reads values by key and remembers where each came from.
struct Reader<'a> {
    meta: &'a dyn Metadata,
    prefix: &'static str,
    facts: Vec<Fact>,
}

impl Reader<'_> {
    fn bad(&self, key: &str, expected: &str, found: Option<&Value>) -> ConfigError {
        ConfigError::Metadata {
            key: key.into(),
            expected: expected.into(),
            found: found.map_or("no such key".into(), |v| format!("{v} ({})", v.type_name())),
        }
    }

    /// A value that a key states.
    fn note(&mut self, name: &'static str, value: impl ToString, key: impl Into<String>) {
        self.conclude(name, value, key, Origin::Stated);
    }

    /// A value that comes from elsewhere.
    fn conclude(&mut self, name: &'static str, value: impl ToString, source: impl Into<String>, origin: Origin) {
        self.facts.push(Fact { name, value: value.to_string(), source: source.into(), origin });
    }

    fn stated(&self, name: &'static str) -> Stated {
        stated(&self.facts, name)
    }

    fn optional(&mut self, name: &'static str, key: &str, least: u64) -> Result<Option<usize>, ConfigError> {
        self.optional_over(name, key, least, 0..0)
    }

    /// Per-layer keys may be written as arrays. Those of `layers` use the value and must agree on it; what stands for
    /// the others does not matter. Where no layer is named, all must agree.
    fn optional_over(
        &mut self,
        name: &'static str,
        key: &str,
        least: u64,
        layers: Range<usize>,
    ) -> Result<Option<usize>, ConfigError> {
        let key = format!("{}{key}", self.prefix);
        let Some(v) = self.meta.get(&key) else { return Ok(None) };
        let n = match v {
            Value::Array(a) => {
                let mut layers = if layers.is_empty() { 0..a.len() } else { layers };
                let first = a.get(layers.start);
                let same = layers.all(|i| a.get(i) == first);
                first.filter(|_| same).and_then(|v| v.as_u64())
            }
            v => v.as_u64(),
        };
        let most = most(name);
        match n {
            Some(n) if (least..most).contains(&n) => {
                self.note(name, n, key);
                Ok(Some(n as usize))
            }
            _ => Err(self.bad(&key, &format!("an integer from {least} and below {most}"), Some(v))),
        }
    }

    fn uint(&mut self, name: &'static str, key: &str, least: u64) -> Result<usize, ConfigError> {
        self.uint_over(name, key, least, 0..0)
    }

    fn uint_over(
        &mut self,
        name: &'static str,
        key: &str,
        least: u64,
        layers: Range<usize>,
    ) -> Result<usize, ConfigError> {
        let value = self.optional_over(name, key, least, layers)?;
        value.ok_or_else(|| {
            let expected = format!("an integer from {least} and below {}", most(name));
            self.bad(&format!("{}{key}", self.prefix), &expected, None)
        })
    }

    fn float(&mut self, name: &'static str, key: &str) -> Result<f64, ConfigError> {
        let key = format!("{}{key}", self.prefix);
        let found = self.meta.get(&key);
        match found.and_then(|v| number(v).map(|x| (v, x))) {
            // Engines hold it as f32: what vanishes or overflows there is damage, too.
            Some((v, x)) if (x as f32).is_finite() && x as f32 > 0.0 => {
                self.note(name, v, key); // the file's own digits, not those of the wider type
                Ok(x)
            }
            _ => Err(self.bad(&key, "a positive number in the range of f32", found)),
        }
    }

    /// An optional truth value of any key, with what it is where the key is absent and what that means; a value of another
    /// type is damage, not absence.
    fn flag(&mut self, name: &'static str, key: &str, absent: (bool, Origin)) -> Result<bool, ConfigError> {
        let Some(found) = self.meta.get(key) else {
            let (value, origin) = absent;
            self.conclude(name, value, format!("{key} absent: {value}"), origin);
            return Ok(value);
        };
        let value = found.as_bool().ok_or_else(|| self.bad(key, "a bool", Some(found)))?;
        self.note(name, value, key);
        Ok(value)
    }

    /// An optional text of any key, which must be one of `allowed`; absent, it is the first of them.
    fn choice(&self, key: &str, allowed: &[&'static str]) -> Result<&'static str, ConfigError> {
        let expected = || allowed.join(" or ");
        match self.meta.get(key) {
            None => Ok(allowed[0]),
            Some(v) => {
                let found = allowed.iter().find(|a| v.as_str() == Some(**a));
                found.copied().ok_or_else(|| self.bad(key, &expected(), Some(v)))
            }
        }
    }

    /// An optional number of any key that must be 1, since another one makes another model.
    fn one(&self, key: &str) -> Result<(), ConfigError> {
        match self.meta.get(key) {
            Some(v) if number(v) != Some(1.0) => Err(self.bad(key, "1, or no such key", Some(v))),
            _ => Ok(()),
        }
    }

    /// A key of any kind that must not be there, since it makes another model.
    fn absent(&self, key: &str) -> Result<(), ConfigError> {
        match self.meta.get(key) {
            Some(v) => Err(self.bad(key, "no such key", Some(v))),
            None => Ok(()),
        }
    }

    fn name(&self, key: &str) -> String {
        self.meta.get(key).and_then(Value::as_str).unwrap_or_default().to_string()
    }
}

fn number(v: &Value) -> Option<f64> {
    v.as_f64().or(v.as_u64().map(|n| n as f64))
}

fn most(name: &str) -> u64 {
    match name {
        "blocks" | "trunk layers" | "MTP blocks" => MOST_BLOCKS,
        "heads" | "indexer heads" => MOST_HEADS,
        "experts" => MOST_EXPERTS,
        "context" => MOST_CONTEXT,
        "indexer top-k" => MOST_TOP_K,
        _ => MOST_WIDTH,
    }
}

/// Two statements of which one must be wrong.
fn contradiction(left: Stated, right: Stated, expected: impl ToString) -> ConfigError {
    ConfigError::Contradiction { both: Box::new([left, right]), expected: expected.to_string() }
}

/// How many entries a list of layers has.
fn entries(key: &str, count: usize) -> Stated {
    Stated { key: key.into(), value: format!("{count} entries"), name: "full indexer layers" }
}

fn inconsistent(what: &str, expected: impl ToString, found: impl ToString) -> ConfigError {
    ConfigError::Inconsistent { what: what.into(), expected: expected.to_string(), found: found.to_string() }
}

/// From a GGUF's metadata.
pub(super) fn from_gguf(meta: &dyn Metadata) -> Result<Config, ConfigError> {
    let mut r = Reader { meta, prefix: "glm-dsa.", facts: Vec::new() };
    // Rope is not scaled. Without a type the other keys would act alone, so each is looked at.
    r.choice("glm-dsa.rope.scaling.type", &["none", "default"])?;
    for key in ["scaling.factor", "scaling.attn_factor", "scaling.yarn_attn_factor", "scale_linear"] {
        r.one(&format!("glm-dsa.rope.{key}"))?;
    }
    let blocks = r.uint("blocks", "block_count", 1)?;
    let mtp_layers = r.optional("MTP blocks", "nextn_predict_layers", 0)?.unwrap_or(0);
    if mtp_layers >= blocks {
        let expected = "at least one block that is none of the MTP's";
        return Err(contradiction(r.stated("MTP blocks"), r.stated("blocks"), expected));
    }
    let layers = blocks - mtp_layers;
    r.conclude("trunk layers", layers, "glm-dsa.block_count - glm-dsa.nextn_predict_layers", Origin::Derived);
    let rope = r.uint("rope width", "rope.dimension_count", 2)?;
    let kv_lora = r.uint("kv latent", "attention.kv_lora_rank", 1)?;
    let (qk_head, v_head) = mla_sizes(&mut r, kv_lora, rope)?;
    if rope >= qk_head {
        let expected = format!("a rope width below {qk_head}, that of a whole head");
        return Err(contradiction(r.stated("rope width"), r.stated("head width"), expected));
    }
    if !rope.is_multiple_of(2) {
        return Err(inconsistent("glm-dsa.rope.dimension_count", "an even number", rope));
    }
    let nope = qk_head - rope;
    let source = format!("{} - glm-dsa.rope.dimension_count", r.stated("head width").key);
    r.conclude("nope width", nope, source, Origin::Derived);
    let gating_key = "glm-dsa.expert_gating_func";
    let gating = match meta.get(gating_key).map(|v| (v, v.as_u64())) {
        Some((_, Some(2))) => Gating::Sigmoid,
        Some((_, Some(1))) => Gating::Softmax,
        None => Gating::Sigmoid,
        Some((v, _)) => return Err(r.bad(gating_key, "1 (softmax) or 2 (sigmoid)", Some(v))),
    };
    match meta.get(gating_key) {
        Some(_) => r.note("gating", gating.name(), gating_key),
        None => r.conclude("gating", gating.name(), format!("{gating_key} absent: {}", gating.name()), Origin::Assumed),
    }
    let absent = (false, Origin::Assumed);
    let expert_norm = r.flag("normalised weights", "glm-dsa.expert_weights_norm", absent)?;
    let dense_layers = r.uint("dense layers", "leading_dense_block_count", 0)?;
    let context = r.uint("context", "context_length", 1)?;
    let indexer = indexer_types(&mut r, layers, context as u64)?;
    let rms_eps = r.float("RMSNorm eps", "attention.layer_norm_rms_epsilon")? as f32;
    r.conclude("indexer LayerNorm eps", INDEX_EPS, "fixed by the architecture", Origin::Derived);
    let vocab = match r.optional("vocabulary", "vocab_size", 1)? {
        Some(v) => v,
        None => {
            let tokens = meta.get("tokenizer.ggml.tokens").and_then(Value::as_array).map(|a| a.len()).unwrap_or(0);
            r.conclude("vocabulary", tokens, "length of tokenizer.ggml.tokens", Origin::Derived);
            tokens
        }
    };
    let config = Config {
        name: r.name("general.name"),
        layers,
        mtp_layers,
        dense_layers,
        hidden: r.uint("hidden", "embedding_length", 1)?,
        vocab,
        context,
        heads: r.uint("heads", "attention.head_count", 1)?,
        q_lora: r.uint("q latent", "attention.q_lora_rank", 1)?,
        kv_lora,
        nope,
        rope,
        v_head,
        ffn: r.uint_over("dense ffn", "feed_forward_length", 1, 0..dense_layers)?,
        experts: r.uint("experts", "expert_count", 1)?,
        experts_used: r.uint("experts per token", "expert_used_count", 1)?,
        shared_experts: r.uint("shared experts", "expert_shared_count", 0)?,
        expert_ffn: r.uint_over("expert ffn", "expert_feed_forward_length", 1, dense_layers..blocks)?,
        groups: r.optional("expert groups", "expert_group_count", 0)?.unwrap_or(1).max(1),
        groups_used: r.optional("expert groups used", "expert_group_used_count", 0)?.unwrap_or(1),
        gating,
        expert_norm,
        expert_scale: r.float("expert scale", "expert_weights_scale")? as f32,
        rms_eps,
        latent_eps: rms_eps,
        index_eps: INDEX_EPS as f32,
        rope_base: r.float("rope base", "rope.freq_base")?,
        index_heads: r.uint("indexer heads", "attention.indexer.head_count", 1)?,
        index_dim: r.uint("indexer width", "attention.indexer.key_length", 1)?,
        top_k: r.uint("indexer top-k", "attention.indexer.top_k", 1)?,
        indexer,
        may_tie: true,
        facts: r.facts,
    };
    check(config)
}

/// Real head sizes: from the `*_mla` keys, which stand beside those of the cached row. Files without them keep kv_b whole,
/// and state the real sizes themselves; those that describe the cached row all the same are refused, for their sizes
/// cannot be told from the metadata.
fn mla_sizes(r: &mut Reader, kv_lora: usize, rope: usize) -> Result<(usize, usize), ConfigError> {
    let key_length = r.uint("cached key", "attention.key_length", 1)?;
    let value_length = r.uint("cached value", "attention.value_length", 1)?;
    let mla = (
        r.optional("head width", "attention.key_length_mla", 1)?,
        r.optional("value width", "attention.value_length_mla", 1)?,
    );
    match mla {
        (Some(k), Some(v)) if (key_length, value_length) == (kv_lora + rope, kv_lora) => Ok((k, v)),
        (Some(_), Some(_)) => {
            let sum = |(a, b): (Stated, Stated)| Stated {
                key: format!("{} + {}", a.key, b.key),
                value: format!("{kv_lora} + {rope} = {}", kv_lora + rope),
                name: a.name,
            };
            let (latent, wide) = (r.stated("kv latent"), key_length != kv_lora + rope);
            let expected = "key_length and value_length to describe the cached row, as they do beside the *_mla keys: the \
                            latent and, as a key, the rope";
            Err(match wide {
                true => contradiction(r.stated("cached key"), sum((latent, r.stated("rope width"))), expected),
                false => contradiction(r.stated("cached value"), latent, expected),
            })
        }
        (None, None) if key_length == kv_lora + rope => Err(ConfigError::Metadata {
            key: "glm-dsa.attention.key_length_mla, value_length_mla".into(),
            expected: "the real head sizes, since key_length describes the cached row".into(),
            found: "no such keys (a file of an older converter): convert the model again".into(),
        }),
        (None, None) => {
            r.note("head width", key_length, "glm-dsa.attention.key_length");
            r.note("value width", value_length, "glm-dsa.attention.value_length");
            Ok((key_length, value_length))
        }
        (k, _) => {
            let missing = if k.is_none() { "key_length_mla" } else { "value_length_mla" };
            Err(r.bad(&format!("glm-dsa.attention.{missing}"), "an integer from 1, as its sibling", None))
        }
    }
}

fn indexer_types(r: &mut Reader, layers: usize, context: u64) -> Result<Vec<Indexer>, ConfigError> {
    let key = "glm-dsa.attention.indexer.types";
    let full = |yes: bool| if yes { Indexer::Full } else { Indexer::Shared };
    let types: Vec<Indexer> = match r.meta.get(key) {
        Some(v) => {
            let expected = format!("an array of at least {layers} bools");
            let Some(array) = v.as_array() else { return Err(r.bad(key, &expected, Some(v))) };
            if array.len() < layers {
                let blocks = r.stated("blocks").value;
                let mtp = blocks.parse().map_or(0, |n: usize| n - layers);
                let trunk = r.stated("trunk layers");
                let difference = Stated { value: format!("{blocks} - {mtp} = {layers}"), ..trunk };
                return Err(contradiction(entries(key, array.len()), difference, expected));
            }
            let read = (0..layers).map(|i| array.get(i).and_then(|e| e.as_bool())).collect();
            let Some(read): Option<Vec<bool>> = read else { return Err(r.bad(key, &expected, Some(v))) };
            r.note("full indexer layers", read.iter().filter(|f| **f).count(), key);
            read.into_iter().map(full).collect()
        }
        None if context < CONTEXT_OF_SHARED_INDEXERS => {
            let source = format!("{key} absent, glm-dsa.context_length {context} is below 2^20: all");
            r.conclude("full indexer layers", layers, source, Origin::Absent);
            vec![Indexer::Full; layers]
        }
        None => {
            // GLM-5.2's pattern: layers 0, 1, 2, then every fourth.
            let types: Vec<Indexer> = (0..layers).map(|i| full((i + 1).saturating_sub(3).is_multiple_of(4))).collect();
            let count = types.iter().filter(|t| **t == Indexer::Full).count();
            let source = format!("{key} absent, glm-dsa.context_length {context} is not below 2^20: GLM-5.2's pattern");
            r.conclude("full indexer layers", count, source, Origin::Absent);
            types
        }
    };
    Ok(types)
}

/// From a flattened `config.json`.
pub(super) fn from_hf(meta: &dyn Metadata) -> Result<Config, ConfigError> {
    let mut r = Reader { meta, prefix: "", facts: Vec::new() };
    let layers = r.uint("trunk layers", "num_hidden_layers", 1)?;
    for key in ["rope_parameters.rope_type", "rope_parameters.type"] {
        r.choice(key, &["default"])?;
    }
    // A flattened object has no key of its own; one that scales anything has at least one of these.
    for key in ["rope_scaling", "rope_scaling.rope_type", "rope_scaling.type", "rope_scaling.factor"] {
        r.absent(key)?;
    }
    r.choice("hidden_act", &["silu"])?;
    r.choice("topk_method", &["noaux_tc"])?;
    r.one("moe_layer_freq")?;
    r.absent("index_topk_pattern")?;
    let theta = hf_theta(&r)?;
    for (name, key) in [("interleaved rope", "rope_interleave"), ("indexer's rope, too", "indexer_rope_interleave")] {
        if !r.flag(name, key, (true, Origin::Absent))? {
            return Err(inconsistent(key, "true (adjacent pairs)", "false (half-split)"));
        }
    }
    let gating = match r.choice("scoring_func", &["sigmoid", "softmax"])? {
        "softmax" => Gating::Softmax,
        _ => Gating::Sigmoid,
    };
    match meta.get("scoring_func") {
        Some(_) => r.note("gating", gating.name(), "scoring_func"),
        None => r.conclude("gating", gating.name(), "scoring_func absent: sigmoid", Origin::Absent),
    }
    let expert_norm = r.flag("normalised weights", "norm_topk_prob", (true, Origin::Absent))?;
    let may_tie = r.flag("output may be tied", TIE, (false, Origin::Absent))?;
    let indexer = hf_indexer_types(&mut r, layers)?;
    r.conclude("indexer LayerNorm eps", INDEX_EPS, "fixed by the architecture", Origin::Derived);
    let source = "fixed by transformers, whatever rms_norm_eps says";
    r.conclude("q_a/kv_a norm eps", HF_LATENT_EPS, source, Origin::Derived);
    let dense_layers = hf_dense_layers(&mut r, layers)?;
    let (nope, rope) = (r.uint("nope width", "qk_nope_head_dim", 1)?, r.uint("rope width", "qk_rope_head_dim", 2)?);
    if r.optional("head width", "qk_head_dim", 1)?.is_some_and(|width| width != nope + rope) {
        let value = format!("{nope} + {rope} = {}", nope + rope);
        let parts = Stated { key: "qk_nope_head_dim + qk_rope_head_dim".into(), value, name: "rope width" };
        return Err(contradiction(r.stated("head width"), parts, "one width of a head"));
    }
    let config = Config {
        name: r.name("_name_or_path"),
        layers,
        mtp_layers: r.optional("MTP blocks", "num_nextn_predict_layers", 0)?.unwrap_or(0),
        dense_layers,
        hidden: r.uint("hidden", "hidden_size", 1)?,
        vocab: r.uint("vocabulary", "vocab_size", 1)?,
        context: r.uint("context", "max_position_embeddings", 1)?,
        heads: r.uint("heads", "num_attention_heads", 1)?,
        q_lora: r.uint("q latent", "q_lora_rank", 1)?,
        kv_lora: r.uint("kv latent", "kv_lora_rank", 1)?,
        nope,
        rope,
        v_head: r.uint("value width", "v_head_dim", 1)?,
        ffn: r.uint("dense ffn", "intermediate_size", 1)?,
        experts: r.uint("experts", "n_routed_experts", 1)?,
        experts_used: r.uint("experts per token", "num_experts_per_tok", 1)?,
        shared_experts: r.uint("shared experts", "n_shared_experts", 0)?,
        expert_ffn: r.uint("expert ffn", "moe_intermediate_size", 1)?,
        groups: r.optional("expert groups", "n_group", 0)?.unwrap_or(1).max(1),
        groups_used: r.optional("expert groups used", "topk_group", 0)?.unwrap_or(1),
        gating,
        expert_norm,
        expert_scale: r.float("expert scale", "routed_scaling_factor")? as f32,
        rms_eps: r.float("RMSNorm eps", "rms_norm_eps")? as f32,
        latent_eps: HF_LATENT_EPS as f32,
        index_eps: INDEX_EPS as f32,
        rope_base: r.float("rope base", theta)?,
        index_heads: r.uint("indexer heads", "index_n_heads", 1)?,
        index_dim: r.uint("indexer width", "index_head_dim", 1)?,
        top_k: r.uint("indexer top-k", "index_topk", 1)?,
        indexer,
        may_tie,
        facts: r.facts,
    };
    check(config)
}

/// The key of the rope base: transformers' newer place, or else its older one. Files with both must mean one base.
fn hf_theta(r: &Reader) -> Result<&'static str, ConfigError> {
    let (new, old) = ("rope_parameters.rope_theta", "rope_theta");
    match (r.meta.get(new), r.meta.get(old)) {
        (None, Some(_)) => Ok(old),
        (Some(a), Some(b)) if number(a) != number(b) => Err(r.bad(old, &format!("{a}, as {new} has it"), Some(b))),
        _ => Ok(new),
    }
}

/// Layers from the start whose feed-forward is dense: transformers has counted them and, since, listed every layer. Both may
/// be there, and must then say the same.
fn hf_dense_layers(r: &mut Reader, layers: usize) -> Result<usize, ConfigError> {
    let (key, name) = ("mlp_layer_types", "dense layers");
    let counted = r.optional(name, "first_k_dense_replace", 0)?;
    let Some(list) = r.meta.get(key) else {
        return counted.map_or_else(|| r.uint(name, "first_k_dense_replace", 0), Ok);
    };
    let word = |i: usize| list.as_array().and_then(|a| a.get(i)).and_then(|v| v.as_str().map(str::to_owned));
    let is_dense = |i: usize| match word(i).as_deref() {
        Some("dense") => Ok(true),
        Some("sparse") => Ok(false),
        _ => Err(r.bad(key, &format!("dense or sparse for each of {layers} layers"), Some(list))),
    };
    let dense: Vec<bool> = (0..layers).map(is_dense).collect::<Result<_, _>>()?;
    let (first, all) = (dense.iter().take_while(|d| **d).count(), dense.iter().filter(|d| **d).count());
    if first != all {
        let found = format!("{all} dense layers, of which {first} come first");
        return Err(ConfigError::Unhandled {
            key: key.into(),
            found,
            runs: "dense layers before all sparse ones".into(),
        });
    }
    let listed = Stated { key: key.into(), value: format!("{first} x dense, {} x sparse", layers - first), name };
    match counted {
        Some(n) if n.min(layers) != first => Err(contradiction(r.stated(name), listed, "as many dense layers in both")),
        Some(n) => Ok(n),
        None => {
            r.note(name, first, key);
            Ok(first)
        }
    }
}

/// `indexer_types` by layer; without it, every `index_topk_freq`-th layer after `index_skip_topk_offset`, as transformers
/// fills it in.
fn hf_indexer_types(r: &mut Reader, layers: usize) -> Result<Vec<Indexer>, ConfigError> {
    let key = "indexer_types";
    let (types, source): (Vec<Indexer>, _) = match r.meta.get(key) {
        None => match r.optional("indexer period", "index_topk_freq", 1)? {
            None => (vec![Indexer::Full; layers], "indexer_types and index_topk_freq absent: all"),
            Some(period) => {
                let offset = r.uint("indexer offset", "index_skip_topk_offset", 0)?;
                let full = |i: usize| (i + 1).saturating_sub(offset).is_multiple_of(period);
                let types = (0..layers).map(|i| if full(i) { Indexer::Full } else { Indexer::Shared });
                (types.collect(), "indexer_types absent: by index_topk_freq and index_skip_topk_offset")
            }
        },
        Some(v) => {
            let expected = format!("an array of {layers}");
            let Some(array) = v.as_array() else { return Err(r.bad(key, &expected, Some(v))) };
            if array.len() != layers {
                return Err(contradiction(entries(key, array.len()), r.stated("trunk layers"), expected));
            }
            let one = |i| match array.get(i).as_ref().and_then(Value::as_str) {
                Some("full") => Ok(Indexer::Full),
                Some("shared") => Ok(Indexer::Shared),
                _ => Err(r.bad(&format!("{key}[{i}]"), "full or shared", array.get(i).as_ref())),
            };
            ((0..layers).map(one).collect::<Result<_, _>>()?, key)
        }
    };
    let count = types.iter().filter(|t| **t == Indexer::Full).count();
    r.conclude("full indexer layers", count, source, if source == key { Origin::Stated } else { Origin::Absent });
    Ok(types)
}

/// Rules that hold for both forms.
fn check(mut c: Config) -> Result<Config, ConfigError> {
    if c.groups == 1 {
        c.groups_used = c.groups_used.max(1); // no groups, of which none is used
    }
    let stated = |name| stated(&c.facts, name);
    let within = c.experts / c.groups.min(c.experts) * c.groups_used;
    let pairs: [(bool, [&'static str; 2], String); 6] = [
        (c.dense_layers <= c.layers, ["dense layers", "trunk layers"], "no more dense layers than layers".into()),
        (
            c.index_dim >= c.rope,
            ["indexer width", "rope width"],
            "an indexer width of at least the rope width, since its first values are rotated".into(),
        ),
        (
            c.experts_used <= c.experts,
            ["experts per token", "experts"],
            "no more experts per token than there are".into(),
        ),
        (c.experts.is_multiple_of(c.groups), ["expert groups", "experts"], "expert groups of equal size".into()),
        (
            c.groups_used <= c.groups,
            ["expert groups used", "expert groups"],
            "no more expert groups used than there are".into(),
        ),
        (
            c.experts_used <= within,
            ["experts per token", "expert groups used"],
            format!("no more experts per token than the {within} of the groups used"),
        ),
    ];
    for (good, [left, right], expected) in pairs {
        if !good {
            return Err(contradiction(stated(left), stated(right), expected));
        }
    }
    let alone: [(&'static str, bool, &str, String); 4] = [
        ("vocabulary", c.vocab > 0, "at least 1", c.vocab.to_string()),
        ("rope width", c.rope.is_multiple_of(2), "an even number", c.rope.to_string()),
        // Several would act as one of their joint width, and activations of that form have no agreed shape.
        ("shared experts", c.shared_experts == 1, "1", c.shared_experts.to_string()),
        (
            "indexer types",
            c.indexer.first() == Some(&Indexer::Full),
            "a full first layer (a shared one has nothing to reuse)",
            "shared".into(),
        ),
    ];
    for (name, good, expected, found) in alone {
        if !good {
            let key = c.facts.iter().find(|f| f.name == name).map_or(String::new(), |f| format!(" ({})", f.source));
            return Err(inconsistent(&format!("{name}{key}"), expected, found));
        }
    }
    Ok(c)
}

/// What the facts say of a number: its key and its value.
fn stated(facts: &[Fact], name: &'static str) -> Stated {
    let fact = facts.iter().find(|f| f.name == name);
    let (key, value) = fact.map_or((format!("{name} (no key)"), "1"), |f| (f.source.clone(), f.value.as_str()));
    Stated { key, value: value.into(), name }
}
