//! Seeded models of the GLM-5 family at real widths, for tests and benches: no download, any number of layers, and the
//! same bytes from the same seed on every machine.
//!
//! Weights are random blocks, but not noise of any size: each tensor's values have mean 0 and the spread that keeps
//! activations near 1 through any number of layers, so that routers, indexers and softmaxes choose among real
//! alternatives. Types, names, shapes and metadata are those that converters write, and the tokenizer is a whole one
//! (bytes, a few merges, filler words, GLM's special tokens).

mod header;
mod values;
mod vocabulary;
mod write;

use std::path::PathBuf;

use crate::quant::QuantType;
use crate::report::table::bytes;

pub(crate) use values::Random;
pub use values::makes;
pub use vocabulary::LEAST_VOCAB;
pub use write::{Written, write};

/// The key of a GGUF that says that its weights are random on purpose.
pub const UNTRAINED: &str = "lockstep.untrained";

/// What a layer is wide, and how many experts and tokens there are by default. Widths are in values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the names are those of the configuration
pub struct Widths {
    pub name: &'static str,
    pub hidden: u32,
    pub ffn: u32,
    pub heads: u32,
    pub q_lora: u32,
    pub kv_lora: u32,
    pub nope: u32,
    pub rope: u32,
    pub v_head: u32,
    pub experts: u32,
    pub experts_used: u32,
    pub expert_ffn: u32,
    pub index_heads: u32,
    pub index_dim: u32,
    pub top_k: u32,
    pub vocab: u32,
}

/// GLM-5's own widths.
pub const GLM5: Widths = Widths {
    name: "GLM-5",
    hidden: 6144,
    ffn: 12_288,
    heads: 64,
    q_lora: 2048,
    kv_lora: 512,
    nope: 192,
    rope: 64,
    v_head: 256,
    experts: 256,
    experts_used: 8,
    expert_ffn: 2048,
    index_heads: 32,
    index_dim: 128,
    top_k: 2048,
    vocab: 154_880,
};

/// GLM-5's head sizes in layers of 3 MB (dense) and 9 MB; whole super-blocks per rank up to eight ranks.
pub const SMALL: Widths = Widths {
    name: "small GLM-5",
    hidden: 256,
    ffn: 2048,
    heads: 8,
    q_lora: 512,
    kv_lora: 256,
    nope: 192,
    rope: 64,
    v_head: 256,
    experts: 8,
    experts_used: 2,
    expert_ffn: 2048,
    index_heads: 4,
    index_dim: 128,
    top_k: 32,
    vocab: 1024,
};

/// A model to be made.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Widths; its experts, top-k and vocabulary are those to be written.
    pub widths: Widths,
    /// Trunk layers, from 1. There is no MTP block.
    pub layers: u32,
    /// Layers from the start whose feed-forward is dense.
    pub dense_layers: u32,
    /// Type of every matrix that converters quantise; `None` is the mixture that `write` documents.
    pub ty: Option<QuantType>,
    /// Seed of all values.
    pub seed: u64,
}

/// Why a model was not made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum SynthError {
    #[error("{what}: expected {expected}, found {found}")]
    Spec { what: &'static str, expected: String, found: String },
    #[error("{}: expected a path where nothing is yet, found a file or folder", path.display())]
    Exists { path: PathBuf },
    #[error("{}: another run is writing it, or one was stopped; remove it if none runs", path.display())]
    Left { path: PathBuf },
    #[error("{}: the model takes {}, and {} are free there", path.display(), bytes(*needed), bytes(*free))]
    Disk { path: PathBuf, needed: u64, free: u64 },
    #[error("{}: cannot {doing}: {source}", path.display())]
    Io { path: PathBuf, doing: &'static str, source: std::io::Error },
}
