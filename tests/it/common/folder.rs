//! A small Hugging Face folder made in tests: two layers, the second of experts, values from a fixed sequence.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value as Json, json};

use super::put;

/// The file of the first layer.
pub const FIRST: &str = "model-00001-of-00002.safetensors";
/// The file of everything else.
pub const SECOND: &str = "model-00002-of-00002.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// A tensor of a folder.
#[derive(Clone)]
pub struct Entry {
    /// Its type, as safetensors names it.
    pub dtype: &'static str,
    /// Its shape, slowest axis first.
    pub shape: Vec<usize>,
    /// Its values.
    pub bytes: Vec<u8>,
}

/// A folder, to be edited and written.
#[derive(Clone)]
pub struct Folder {
    /// config.json.
    pub config: Json,
    /// Tensors by name.
    pub tensors: BTreeMap<String, Entry>,
    /// File by tensor, as the index says; `None` writes no index.
    pub index: Option<BTreeMap<String, String>>,
}

/// Tensors of every layer.
pub const ATTENTION: [(&str, &[usize]); 14] = [
    ("input_layernorm.weight", &[32]),
    ("self_attn.q_a_proj.weight", &[32, 32]),
    ("self_attn.q_a_layernorm.weight", &[32]),
    ("self_attn.q_b_proj.weight", &[48, 32]),
    ("self_attn.kv_a_proj_with_mqa.weight", &[40, 32]),
    ("self_attn.kv_a_layernorm.weight", &[32]),
    ("self_attn.kv_b_proj.weight", &[64, 32]),
    ("self_attn.o_proj.weight", &[32, 32]),
    ("self_attn.indexer.wq_b.weight", &[32, 32]),
    ("self_attn.indexer.wk.weight", &[16, 32]),
    ("self_attn.indexer.k_norm.weight", &[16]),
    ("self_attn.indexer.k_norm.bias", &[16]),
    ("self_attn.indexer.weights_proj.weight", &[2, 32]),
    ("post_attention_layernorm.weight", &[32]),
];
/// Tensors of a dense layer.
pub const DENSE: [(&str, &[usize]); 3] =
    [("mlp.gate_proj.weight", &[64, 32]), ("mlp.up_proj.weight", &[64, 32]), ("mlp.down_proj.weight", &[32, 64])];
/// Tensors outside the layers.
pub const GLOBAL: [(&str, &[usize]); 3] =
    [("model.embed_tokens.weight", &[64, 32]), ("model.norm.weight", &[32]), ("lm_head.weight", &[64, 32])];

/// The folder without faults.
pub fn folder() -> Folder {
    let config = json!({
        "model_type": "glm_moe_dsa", "num_hidden_layers": 2, "num_nextn_predict_layers": 0, "hidden_size": 32,
        "first_k_dense_replace": 1, "vocab_size": 64, "max_position_embeddings": 64, "num_attention_heads": 2,
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "intermediate_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 32, "scoring_func": "sigmoid", "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "index_n_heads": 2, "index_head_dim": 16,
        "index_topk": 8, "tie_word_embeddings": false
    });
    let mut folder = Folder { config, tensors: BTreeMap::new(), index: Some(BTreeMap::new()) };
    for layer in 0..2 {
        let mut add = |name: &str, shape: &[usize]| folder.add(&format!("model.layers.{layer}.{name}"), shape);
        ATTENTION.iter().for_each(|(name, shape)| add(name, shape));
        if layer == 0 {
            DENSE.iter().for_each(|(name, shape)| add(name, shape));
            continue;
        }
        add("mlp.gate.weight", &[4, 32]);
        add("mlp.gate.e_score_correction_bias", &[4]);
        for part in ["gate_proj", "up_proj", "down_proj"] {
            (0..4).for_each(|e| add(&format!("mlp.experts.{e}.{part}.weight"), &[32, 32]));
            add(&format!("mlp.shared_experts.{part}.weight"), &[32, 32]);
        }
    }
    GLOBAL.iter().for_each(|(name, shape)| folder.add(name, shape));
    folder
}

impl Folder {
    /// Adds a tensor of BF16 between -0.5 and 0.5, and lists it.
    fn add(&mut self, name: &str, shape: &[usize]) {
        let mut state = name.bytes().fold(1u64, |h, b| h.wrapping_mul(31).wrapping_add(b.into()));
        let mut value = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        let bytes = (0..shape.iter().product()).flat_map(|_: usize| value().to_le_bytes()[2..].to_vec()).collect();
        self.insert(name, Entry { dtype: "BF16", shape: shape.to_vec(), bytes });
    }

    /// Adds a tensor, and lists it.
    pub fn insert(&mut self, name: &str, entry: Entry) {
        self.index.as_mut().unwrap().insert(name.into(), file_of(name).into());
        self.tensors.insert(name.into(), entry);
    }

    /// Takes a tensor that must be there out of the folder and its index.
    pub fn take(&mut self, name: &str) -> Entry {
        self.index.as_mut().unwrap().remove(name);
        self.tensors.remove(name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// Gives a tensor one byte a value, as FP8 does.
    pub fn make_fp8(&mut self, name: &str) {
        let entry = self.tensors.get_mut(name).unwrap();
        entry.dtype = "F8_E4M3";
        entry.bytes = entry.bytes.chunks(2).map(|b| b[0] & 0x7e).collect();
    }

    /// The factor of an FP8 tensor of one block.
    pub fn factor() -> Entry {
        Entry { dtype: "F32", shape: vec![1, 1], bytes: 1f32.to_le_bytes().to_vec() }
    }

    /// Writes the folder.
    pub fn write(&self, to: &Path) {
        put(to, "config.json", self.config.to_string().as_bytes());
        for file in [FIRST, SECOND] {
            let own = self.tensors.iter().filter(|(name, _)| file_of(name) == file);
            put(to, file, &safetensors(own));
        }
        if let Some(index) = &self.index {
            put(to, INDEX, json!({"metadata": {}, "weight_map": index}).to_string().as_bytes());
        }
    }
}

fn file_of(name: &str) -> &'static str {
    if name.starts_with("model.layers.0.") { FIRST } else { SECOND }
}

fn safetensors<'a>(tensors: impl Iterator<Item = (&'a String, &'a Entry)>) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, entry) in tensors {
        let offsets = [data.len(), data.len() + entry.bytes.len()];
        header.insert(name.clone(), json!({"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}));
        data.extend_from_slice(&entry.bytes);
    }
    let mut text = Json::Object(header).to_string();
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &data].concat()
}
