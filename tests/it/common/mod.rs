//! What tests share: small models made here, the golden ones opened once, engines that break promises, and the real binary.

pub mod binary;
pub mod folder;
pub mod goldens;
pub mod odd;
pub mod running;
pub mod schema;
pub mod subject;

use std::path::{Path, PathBuf};

pub use binary::{GLM5_NANO, NANO52, PICO, Run, golden, inspect, lockstep, pico_shard, run};
use lockstep::checkpoint::{Naming, names};
use lockstep::gguf::value::{Array, Value};
use lockstep::gguf::write::{self, NewTensor};
use lockstep::gguf::{Gguf, header};
use lockstep::model::{Config, Metadata, params};
use lockstep::quant::QuantType;

/// A model held as metadata and tensors, to be edited and written.
#[derive(Clone)]
pub struct Model {
    pub metadata: Vec<(String, Value)>,
    pub tensors: Vec<(NewTensor, Vec<u8>)>,
}

impl Model {
    /// Everything in a file or set, without the keys that make it one.
    pub fn read(path: &Path) -> Self {
        let gguf = Gguf::open(path).expect("a valid model");
        let metadata = gguf.metadata().filter(|(k, _)| !k.starts_with("split."));
        let tensors = gguf
            .tensors()
            .iter()
            .map(|t| (NewTensor { name: t.name.clone(), ne: t.ne.clone(), ty: t.ty }, gguf.data(t).to_vec()));
        Model { metadata: metadata.map(|(k, v)| (k.into(), v.clone())).collect(), tensors: tensors.collect() }
    }

    /// Sets a key, at its old place if it had one.
    pub fn set(mut self, key: &str, value: Value) -> Self {
        match self.metadata.iter_mut().find(|(k, _)| k == key) {
            Some((_, old)) => *old = value,
            None => self.metadata.push((key.into(), value)),
        }
        self
    }

    /// Removes a key that must be there.
    pub fn unset(mut self, key: &str) -> Self {
        let before = self.metadata.len();
        self.metadata.retain(|(k, _)| k != key);
        assert_eq!(self.metadata.len() + 1, before, "no key {key}");
        self
    }

    /// Renames a tensor that must be there.
    pub fn rename(mut self, from: &str, to: &str) -> Self {
        self.tensor(from).0.name = to.into();
        self
    }

    /// Removes the tensors that `gone` selects; there must be some.
    pub fn drop(mut self, gone: impl Fn(&str) -> bool) -> Self {
        let before = self.tensors.len();
        self.tensors.retain(|(t, _)| !gone(&t.name));
        assert!(self.tensors.len() < before, "nothing dropped");
        self
    }

    /// Gives a tensor another shape, with zeros for data.
    pub fn reshape(mut self, name: &str, ne: &[u64]) -> Self {
        let (tensor, data) = self.tensor(name);
        tensor.ne = ne.to_vec();
        *data = vec![0; tensor.bytes().expect("whole blocks") as usize];
        self
    }

    /// Gives a tensor another type, with zeros for data.
    pub fn retype(mut self, name: &str, id: u32) -> Self {
        let lockstep::quant::TypeId::Known(ty) = lockstep::quant::lookup(id) else { panic!("type {id}") };
        let (tensor, data) = self.tensor(name);
        tensor.ty = ty;
        *data = vec![0; tensor.bytes().expect("whole blocks") as usize];
        self
    }

    /// Adds a tensor of zeros.
    pub fn add(mut self, name: &str, ne: &[u64], ty: QuantType) -> Self {
        self.tensors.push(zeros(name, ne, ty));
        self
    }

    fn tensor(&mut self, name: &str) -> &mut (NewTensor, Vec<u8>) {
        self.tensors.iter_mut().find(|(t, _)| t.name == name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// The model as the bytes of one file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let table: Vec<NewTensor> = self.tensors.iter().map(|(t, _)| t.clone()).collect();
        let alignment = self.metadata.iter().find(|(k, _)| k == "general.alignment").and_then(|(_, v)| v.as_u64());
        let alignment = alignment.unwrap_or(32);
        write::header(&mut out, alignment, &self.metadata, &table).expect("a header");
        for (_, data) in &self.tensors {
            out.extend_from_slice(data);
            write::pad(&mut out, data.len() as u64, alignment).expect("padding");
        }
        out
    }

    /// Writes the model into `folder` and returns the path.
    pub fn write(&self, folder: &Path, name: &str) -> PathBuf {
        put(folder, name, &self.bytes())
    }

    /// The model as the shards of a set, `per_shard` tensors each, full metadata in the first.
    pub fn shards(&self, per_shard: usize) -> Vec<Model> {
        let count = self.tensors.len().div_ceil(per_shard);
        let parts = self.tensors.chunks(per_shard).enumerate().map(|(no, tensors)| {
            let mut metadata = if no == 0 { self.metadata.clone() } else { Vec::new() };
            metadata.push(("split.no".into(), Value::U16(no as u16)));
            metadata.push(("split.count".into(), Value::U16(count as u16)));
            metadata.push(("split.tensors.count".into(), Value::I32(self.tensors.len() as i32)));
            Model { metadata, tensors: tensors.to_vec() }
        });
        parts.collect()
    }
}

/// Writes shards under their proper names and returns the paths.
pub fn write_set(folder: &Path, prefix: &str, shards: &[Model]) -> Vec<PathBuf> {
    let name = |i: usize| format!("{prefix}-{:05}-of-{:05}.gguf", i + 1, shards.len());
    shards.iter().enumerate().map(|(i, s)| s.write(folder, &name(i))).collect()
}

/// Writes a file and returns its path.
pub fn put(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, bytes).expect("a writable folder");
    path
}

/// A tensor of zeros.
pub fn zeros(name: &str, ne: &[u64], ty: QuantType) -> (NewTensor, Vec<u8>) {
    let tensor = NewTensor { name: name.into(), ne: ne.to_vec(), ty: ty.info() };
    let bytes = tensor.bytes().expect("whole blocks") as usize;
    (tensor, vec![0; bytes])
}

/// Metadata of a glm-dsa model small enough to be written hundreds of times: 2 layers and an MTP block, of which one
/// dense, width 32.
pub fn tiny_metadata() -> Vec<(String, Value)> {
    let mut all: Vec<(String, Value)> = vec![
        ("general.architecture".into(), Value::Str("glm-dsa".into())),
        ("general.name".into(), Value::Str("Tiny".into())),
    ];
    for (key, value) in [
        ("block_count", 3),
        ("nextn_predict_layers", 1),
        ("context_length", 64),
        ("embedding_length", 32),
        ("feed_forward_length", 64),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 40),
        ("attention.value_length", 32),
        ("attention.key_length_mla", 24),
        ("attention.value_length_mla", 16),
        ("attention.q_lora_rank", 32),
        ("attention.kv_lora_rank", 32),
        ("rope.dimension_count", 8),
        ("leading_dense_block_count", 1),
        ("expert_count", 4),
        ("expert_used_count", 2),
        ("expert_shared_count", 1),
        ("expert_group_count", 1),
        ("expert_group_used_count", 1),
        ("expert_feed_forward_length", 32),
        ("expert_gating_func", 2),
        ("attention.indexer.head_count", 2),
        ("attention.indexer.key_length", 16),
        ("attention.indexer.top_k", 8),
        ("vocab_size", 64),
    ] {
        all.push((format!("glm-dsa.{key}"), Value::U32(value)));
    }
    for (key, value) in
        [("attention.layer_norm_rms_epsilon", 1e-5), ("expert_weights_scale", 2.5), ("rope.freq_base", 1e6)]
    {
        all.push((format!("glm-dsa.{key}"), Value::F32(value)));
    }
    all.push(("glm-dsa.expert_weights_norm".into(), Value::Bool(true)));
    all.push(("glm-dsa.attention.indexer.types".into(), Value::Array(Array::Bool(vec![true, true, true]))));
    all
}

struct Pairs<'a>(&'a [(String, Value)]);

impl Metadata for Pairs<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.0.iter().find(|(k, _)| k == key).map(|(_, v)| v)
    }
    fn is_hf(&self) -> bool {
        false
    }
}

/// The configuration that metadata states.
pub fn config(metadata: &[(String, Value)]) -> Config {
    Config::from_metadata(&Pairs(metadata), 0).expect("a configuration")
}

/// Every parameter of a configuration by its usual GGUF name, with its shape; trailing axes of 1 left out.
pub fn table_of(config: &Config) -> Vec<(params::Param, String, Vec<u64>)> {
    let all = params::of_trunk(config).into_iter().chain(params::of_mtp(config));
    let row = |param: params::Param| {
        let name = names::candidates(Naming::Gguf, param, 1)[0].names()[0].clone();
        let mut ne: Vec<u64> = param.kind.shape(config).iter().map(|n| *n as u64).collect();
        while ne.len() > 1 && ne.last() == Some(&1) {
            ne.pop();
        }
        (param, name, ne)
    };
    all.map(row).collect()
}

/// A whole tiny model: F32 throughout, zeros.
pub fn tiny() -> Model {
    let metadata = tiny_metadata();
    let table = table_of(&config(&metadata));
    let tensors = table.into_iter().map(|(_, name, ne)| zeros(&name, &ne, QuantType::F32)).collect();
    Model { metadata, tensors }
}

/// Parses bytes as the file `path` would be.
pub fn parse(path: &Path, bytes: &[u8]) -> Result<header::Header, lockstep::gguf::GgufError> {
    header::parse(path, bytes)
}
