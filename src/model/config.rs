//! The configuration: every number the forward pass and the plan need, each with the key it came from.

use super::glm_dsa;
use crate::gguf::Value;

/// Metadata as keys and values: a GGUF's pairs, or a Hugging Face `config.json` flattened to dotted keys.
pub trait Metadata {
    /// The value of `key`.
    fn get(&self, key: &str) -> Option<&Value>;
    /// True when the keys are those of a `config.json`.
    fn is_hf(&self) -> bool;
}

/// Why a configuration could not be derived.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ConfigError {
    #[error("metadata key {key}: expected {expected}, found {found}")]
    Metadata { key: String, expected: String, found: String },
    #[error(
        "{key}: expected {expected:?}, found {found:?}, which is not handled here; the file itself is complete: all {bytes} \
         bytes of its tensors are present"
    )]
    Architecture { key: &'static str, expected: &'static str, found: String, bytes: u64 },
    #[error("{what}: expected {expected}, found {found}")]
    Inconsistent { what: String, expected: String, found: String },
    #[error("expected {expected}, found {} and {}, which contradict each other", both[0], both[1])]
    Contradiction { both: Box<[Stated; 2]>, expected: String },
    #[error("{key}: {found}, which this build cannot run (it runs {runs}); the file may well be right")]
    Unhandled { key: String, found: String, runs: String },
}

impl ConfigError {
    /// Whether it is the tool that lacks something: then nothing is said against the model.
    pub fn is_lack(&self) -> bool {
        matches!(self, ConfigError::Unhandled { .. })
    }
}

/// A key, or what stands in for one, with the value that it states.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stated {
    /// The key.
    pub key: String,
    /// Its value as text.
    pub value: String,
    /// The number of [`Config::facts`] that it is, where tensors can tell whether it is right.
    pub name: &'static str,
}

impl std::fmt::Display for Stated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} = {}", self.key, self.value)
    }
}

/// How router logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gating {
    /// Over all experts.
    Softmax,
    /// Each expert alone.
    Sigmoid,
}

impl Gating {
    /// The field's word.
    pub fn name(self) -> &'static str {
        match self {
            Gating::Softmax => "softmax",
            Gating::Sigmoid => "sigmoid",
        }
    }
}

/// What every query attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// The keys that the indexer chooses, as the model was trained.
    Dsa,
    /// All keys: exact up to top-k tokens, beyond that a stated choice.
    Dense,
}

impl Attention {
    /// The word on the command line and in dumps.
    pub fn name(self) -> &'static str {
        match self {
            Attention::Dsa => "dsa",
            Attention::Dense => "dense",
        }
    }
}

/// What a layer does for its top-k choice of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Indexer {
    /// Runs its own indexer.
    Full,
    /// Reuses the choice of the last full layer.
    Shared,
}

/// What stands behind a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A key states it.
    Stated,
    /// Its key is absent, and a default took over that other files are known to differ from: it decides what the model
    /// computes, and no tensor can tell whether it is right.
    Assumed,
    /// Its key is absent, and the default is what absence means.
    Absent,
    /// It follows from other values, or from the architecture.
    Derived,
}

impl Origin {
    /// The word in reports.
    pub fn name(self) -> &'static str {
        match self {
            Origin::Stated => "stated",
            Origin::Assumed => "assumed",
            Origin::Absent => "absent",
            Origin::Derived => "derived",
        }
    }
}

/// One derived value and where it came from, for `inspect`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// Name of the value.
    pub name: &'static str,
    /// Its value as text.
    pub value: String,
    /// The key, or the rule, it was derived from.
    pub source: String,
    /// What stands behind it.
    pub origin: Origin,
}

/// Everything the engine needs to know of a model. Widths are in values.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The model's own name.
    pub name: String,
    /// Trunk layers (without MTP).
    pub layers: usize,
    /// MTP blocks the metadata declares.
    pub mtp_layers: usize,
    /// Layers from the start whose feed-forward is dense.
    pub dense_layers: usize,
    /// Residual width.
    pub hidden: usize,
    /// Real vocabulary, without padding.
    pub vocab: usize,
    /// Longest context the model was made for, in tokens.
    pub context: usize,
    /// Attention heads.
    pub heads: usize,
    /// Width of the query latent.
    pub q_lora: usize,
    /// Width of the key-value latent.
    pub kv_lora: usize,
    /// Per head: query and key width without rope.
    pub nope: usize,
    /// Per head: rotated width.
    pub rope: usize,
    /// Per head: value width.
    pub v_head: usize,
    /// Width of a dense feed-forward.
    pub ffn: usize,
    /// Routed experts.
    pub experts: usize,
    /// Routed experts per token.
    pub experts_used: usize,
    /// Shared experts: 1 in this architecture.
    pub shared_experts: usize,
    /// Width of one routed expert.
    pub expert_ffn: usize,
    /// Groups that experts are chosen by.
    pub groups: usize,
    /// Groups kept.
    pub groups_used: usize,
    /// Router scores.
    pub gating: Gating,
    /// Divide the chosen weights by their sum.
    pub expert_norm: bool,
    /// Factor on the routed experts' weights.
    pub expert_scale: f32,
    /// eps of every RMSNorm.
    pub rms_eps: f32,
    /// eps of the q_a and kv_a latent norms: transformers fixes 1e-6 for its own checkpoints.
    pub latent_eps: f32,
    /// eps of the indexer's LayerNorm.
    pub index_eps: f32,
    /// Rope base.
    pub rope_base: f64,
    /// Indexer heads.
    pub index_heads: usize,
    /// Indexer head width; the first `rope` values are rotated.
    pub index_dim: usize,
    /// Keys each query attends to.
    pub top_k: usize,
    /// One entry per trunk layer.
    pub indexer: Vec<Indexer>,
    /// Whether the embedding serves as output matrix where the files have none: in GGUF that is what its absence means, a
    /// Hugging Face folder says it with a flag. An output matrix that is there is used, whatever the flag says.
    pub may_tie: bool,
    /// Where each value came from.
    pub facts: Vec<Fact>,
}

impl Config {
    /// Derives the configuration. `bytes` is the size of all tensors, for the message about a foreign architecture.
    ///
    /// # Errors
    /// A missing key, a value of the wrong type or out of range, or values that contradict each other.
    pub fn from_metadata(meta: &dyn Metadata, bytes: u64) -> Result<Self, ConfigError> {
        let (key, expected, read): (_, _, fn(&dyn Metadata) -> _) = match meta.is_hf() {
            true => ("model_type", glm_dsa::MODEL_TYPE, glm_dsa::from_hf),
            false => ("general.architecture", glm_dsa::ARCHITECTURE, glm_dsa::from_gguf),
        };
        match meta.get(key).and_then(Value::as_str) {
            Some(found) if found == expected => read(meta),
            found => {
                let found = found.unwrap_or("no text there").into();
                Err(ConfigError::Architecture { key, expected, found, bytes })
            }
        }
    }

    /// Width of one query head.
    pub fn qk_head(&self) -> usize {
        self.nope + self.rope
    }

    /// Width of one token's row in the latent cache.
    pub fn cache_width(&self) -> usize {
        self.kv_lora + self.rope
    }

    /// Factor on attention scores: 1/sqrt of the real head width, also in the absorbed form.
    pub fn softmax_scale(&self) -> f32 {
        (1.0 / (self.qk_head() as f64).sqrt()) as f32
    }

    /// Factor on the indexer's weights: 1/sqrt(head width x heads).
    pub fn index_scale(&self) -> f32 {
        (1.0 / ((self.index_dim * self.index_heads) as f64).sqrt()) as f32
    }

    /// True for trunk layers with a router.
    pub fn is_moe(&self, layer: usize) -> bool {
        layer >= self.dense_layers
    }

    /// True for trunk layers that run their own indexer.
    pub fn is_full(&self, layer: usize) -> bool {
        self.indexer.get(layer) == Some(&Indexer::Full)
    }

    /// Width of the shared expert.
    pub fn shared_ffn(&self) -> usize {
        self.shared_experts * self.expert_ffn
    }

    /// Vocabulary padded so that each of `tp` ranks holds a multiple of 64 rows.
    pub fn padded_vocab(&self, tp: usize) -> usize {
        self.vocab.next_multiple_of(64 * tp)
    }
}
