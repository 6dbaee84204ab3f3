//! Hugging Face folders: `config.json` flattened to dotted keys, safetensors as named tensors.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};

use super::index::Index;
use super::names::Naming;
use super::{CheckpointError, TensorSource, View};
use crate::gguf::{Array, Value};
use crate::model::Metadata;
use crate::quant::{QuantType, TypeInfo, foreign};
use crate::regular;
use crate::report::table::plural;
use crate::tokenize::{OtherTemplate, TokenizeError, TokenizerSpec};

/// True for a folder that holds a `config.json` and no GGUF: a config may lie beside converted files.
pub fn is_folder(path: &Path) -> bool {
    let ends = |end: &str| {
        let files = std::fs::read_dir(path).into_iter().flatten().flatten();
        files.filter_map(|e| e.file_name().into_string().ok()).any(|n| n.ends_with(end))
    };
    path.is_dir() && path.join("config.json").is_file() && (ends(".safetensors") || !ends(".gguf"))
}

struct Entry {
    file: usize,
    ty: &'static TypeInfo,
    ne: Vec<u64>,
    start: usize,
    bytes: usize,
}

/// An opened folder.
pub struct HfFolder {
    files: Vec<(PathBuf, Mmap)>,
    tensors: HashMap<String, Entry>,
    order: Vec<String>,
    config: Config,
    folder: PathBuf,
    warnings: Vec<String>,
}

/// Flattened `config.json`.
struct Config(HashMap<String, Value>);

impl Metadata for Config {
    fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }
    fn is_hf(&self) -> bool {
        true
    }
}

/// A refusal of a file, with what is wrong with it.
pub(super) fn refuse(path: &Path, problem: impl Into<String>) -> CheckpointError {
    CheckpointError::Hf { path: path.into(), problem: problem.into() }
}

/// Files beside the weights that are read when somebody asks for the tokenizer.
const TEXTS: [&str; 5] =
    ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "chat_template.json"];

/// What a file that ends too early lacks, by its own header: bytes, and the first tensor that is not whole.
fn cut_short(bytes: &[u8]) -> Option<String> {
    let header = usize::try_from(u64::from_le_bytes(*bytes.first_chunk()?)).ok()?;
    let start = header.checked_add(8)?;
    let entries: HashMap<String, serde_json::Value> = serde_json::from_slice(bytes.get(8..start)?).ok()?;
    let offset =
        |entry: &serde_json::Value, at: usize| entry["data_offsets"][at].as_u64().and_then(|v| usize::try_from(v).ok());
    let tensors = entries.iter().filter_map(|(name, entry)| Some((offset(entry, 0)?, offset(entry, 1)?, name)));
    let held = bytes.len().checked_sub(start)?;
    let cut: Vec<_> = tensors.filter(|(_, end, _)| *end > held).collect();
    let expected = cut.iter().map(|(_, end, _)| *end).max()?.checked_add(start)?;
    let (_, _, first) = cut.iter().min()?;
    Some(format!("expected {expected} bytes, found {}: cut short, first in the tensor {first}", bytes.len()))
}

impl HfFolder {
    /// Opens a folder with `config.json` and either an index or plain `.safetensors` files.
    ///
    /// # Errors
    /// Unreadable or malformed files, shards that the index names and the folder lacks, types that hold no weights, and
    /// tensors that stand in two files.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let config_path = folder.join("config.json");
        let config = read_json(&config_path)?;
        let mut flat = HashMap::new();
        flatten("", &config, &mut flat);
        let mut this = HfFolder {
            files: Vec::new(),
            tensors: HashMap::new(),
            order: Vec::new(),
            config: Config(flat),
            folder: folder.into(),
            warnings: Vec::new(),
        };
        for name in TEXTS {
            let path = folder.join(name);
            if path.exists() && !path.is_file() {
                return Err(refuse(
                    &path,
                    "expected a regular file, found something else (a folder, a pipe or a device)",
                ));
            }
        }
        let index = Index::read(folder)?;
        for path in shard_files(folder, index.as_ref())? {
            this.add(path)?;
        }
        let file_of = |e: &Entry| this.files[e.file].0.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let stored = this.tensors.iter().map(|(name, e)| (name.as_str(), file_of(e))).collect();
        this.warnings = index.map_or(Vec::new(), |index| index.contradictions(&stored));
        Ok(this)
    }

    fn add(&mut self, path: PathBuf) -> Result<(), CheckpointError> {
        let file = std::fs::File::open(&path).map_err(|e| refuse(&path, e.to_string()))?;
        // SAFETY: read-only and private; see gguf::Shard::open for what a shrinking file would do.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| refuse(&path, e.to_string()))?;
        let parsed = SafeTensors::deserialize(&map).map_err(|e| {
            refuse(&path, cut_short(&map).unwrap_or(format!("expected safetensors, found damage: {e}")))
        })?;
        let mut entries = Vec::new();
        let mut tensors = parsed.tensors();
        tensors.sort_by(|a, b| a.0.cmp(&b.0)); // so that the same tensor is named at every run
        for (name, view) in tensors {
            let ty = match view.dtype() {
                Dtype::BF16 => Some(QuantType::BF16.info()),
                Dtype::F16 => Some(QuantType::F16.info()),
                Dtype::F32 => Some(QuantType::F32.info()),
                other => foreign(&format!("{other:?}")),
            };
            let unknown =
                || refuse(&path, format!("tensor {name}: expected BF16, F16 or F32, found {:?}", view.dtype()));
            let ty = ty.ok_or_else(unknown)?;
            self.expect_own_layout(&path, &name, ty)?;
            let ne: Vec<u64> = view.shape().iter().rev().map(|n| *n as u64).collect();
            let data = view.data();
            let start = data.as_ptr() as usize - map.as_ptr() as usize;
            entries.push((name, Entry { file: self.files.len(), ty, ne, start, bytes: data.len() }));
        }
        entries.sort_by_key(|(_, e)| e.start);
        for (name, entry) in entries {
            if let Some(other) = self.tensors.insert(name.clone(), entry) {
                let other = self.files[other.file].0.display().to_string();
                return Err(refuse(&path, format!("tensor {name}: expected once, found in {other} too")));
            }
            self.order.push(name);
        }
        self.files.push((path, map));
        Ok(())
    }
}

impl HfFolder {
    /// Wide integers hold what the config's method packed into them, in a layout that only the method knows.
    fn expect_own_layout(&self, path: &Path, name: &str, ty: &TypeInfo) -> Result<(), CheckpointError> {
        match self.config.get("quantization_config.quant_method") {
            Some(method) if ["I16", "U16", "I32", "U32", "I64", "U64"].contains(&ty.name) => {
                let problem = format!("tensor {name}: {}, packed by quant_method {method}", ty.name);
                Err(CheckpointError::Lacking { path: path.into(), problem })
            }
            _ => Ok(()),
        }
    }
}

/// A JSON file of the folder, whole.
pub(super) fn read_json(path: &Path) -> Result<serde_json::Value, CheckpointError> {
    let text = regular::read(path).map_err(|e| refuse(path, e.to_string()))?;
    serde_json::from_slice(&text).map_err(|e| refuse(path, format!("expected JSON, found something else: {e}")))
}

/// The safetensors files, in order of name.
fn shard_files(folder: &Path, index: Option<&Index>) -> Result<Vec<PathBuf>, CheckpointError> {
    let here = || -> Result<Vec<String>, CheckpointError> {
        let entries = std::fs::read_dir(folder).map_err(|e| refuse(folder, e.to_string()))?;
        let names = entries.flatten().filter_map(|e| e.file_name().into_string().ok());
        let mut names: Vec<String> = names.filter(|n| n.ends_with(".safetensors")).collect();
        names.sort();
        Ok(names)
    };
    let names = index.map_or_else(here, |index| Ok(index.files()))?;
    if names.is_empty() {
        return Err(refuse(
            folder,
            "expected .safetensors files beside config.json, found none: the weights are missing",
        ));
    }
    let missing: Vec<&str> = names.iter().map(String::as_str).filter(|n| !folder.join(n).is_file()).collect();
    if !missing.is_empty() {
        let others: Vec<String> = here()?.into_iter().filter(|n| !names.contains(n)).collect();
        let hint = match others.first() {
            None => String::new(),
            Some(first) => format!(
                ". {} that the index does not name are here (the first is {first}): if they are the weights, delete {}",
                plural(others.len(), "file"),
                super::index::NAME
            ),
        };
        let (all, found, missing) = (names.len(), names.len() - missing.len(), missing.join(", "));
        let problem = format!("expected {all} safetensors files, found {found}; missing: {missing}{hint}");
        return Err(refuse(folder, problem));
    }
    Ok(names.into_iter().map(|n| folder.join(n)).collect())
}

/// Objects become dotted keys; arrays of one type become arrays; null is left out.
fn flatten(prefix: &str, json: &serde_json::Value, out: &mut HashMap<String, Value>) {
    if let serde_json::Value::Object(map) = json {
        for (key, value) in map {
            let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            flatten(&key, value, out);
        }
    } else if let Some(value) = scalar(json) {
        out.insert(prefix.into(), value);
    } else if let serde_json::Value::Array(items) = json {
        let strings: Option<Vec<String>> = items.iter().map(|v| v.as_str().map(str::to_owned)).collect();
        let ints: Option<Vec<i64>> = items.iter().map(|v| v.as_i64()).collect();
        // Arrays of anything else stay visible as text, so that a reader refuses them instead of finding no key.
        let text = || Array::Str(items.iter().map(serde_json::Value::to_string).collect());
        out.insert(prefix.into(), Value::Array(ints.map(Array::I64).or(strings.map(Array::Str)).unwrap_or_else(text)));
    }
}

fn scalar(json: &serde_json::Value) -> Option<Value> {
    match json {
        serde_json::Value::Bool(b) => Some(Value::Bool(*b)),
        serde_json::Value::String(s) => Some(Value::Str(s.clone())),
        serde_json::Value::Number(n) => n.as_i64().map(Value::I64).or(n.as_f64().map(Value::F64)),
        _ => None,
    }
}

impl TensorSource for HfFolder {
    fn names(&self) -> Vec<&str> {
        self.order.iter().map(String::as_str).collect()
    }
    fn tensor(&self, name: &str) -> Option<View<'_>> {
        let e = self.tensors.get(name)?;
        let bytes = &self.files[e.file].1[e.start..e.start + e.bytes];
        Some(View { ty: e.ty, ne: e.ne.clone(), bytes: Cow::Borrowed(bytes) })
    }
    fn file_of(&self, name: &str) -> String {
        self.tensors.get(name).map_or(String::new(), |e| self.files[e.file].0.display().to_string())
    }
    fn offset_of(&self, name: &str) -> Option<u64> {
        self.tensors.get(name).map(|e| e.start as u64)
    }
    fn warnings(&self) -> Vec<String> {
        self.warnings.clone()
    }
    fn metadata(&self) -> &dyn Metadata {
        &self.config
    }
    fn naming(&self) -> Naming {
        Naming::Hf
    }
    fn tokenizer_spec(&self) -> Result<TokenizerSpec, TokenizeError> {
        let read = |name: &str| std::fs::read_to_string(self.folder.join(name)).ok();
        let Some(tokenizer) = read("tokenizer.json") else {
            return Err(TokenizeError::Metadata {
                key: self.folder.join("tokenizer.json").display().to_string(),
                expected: "a readable file".into(),
                found: "none".into(),
            });
        };
        let (config, generation) = (read("tokenizer_config.json"), read("generation_config.json"));
        let mut spec = TokenizerSpec::from_hf(&tokenizer, config.as_deref(), generation.as_deref())?;
        // As transformers has it, a file of its own goes before the config.
        if let Some(own) = read("chat_template.jinja") {
            let inner = spec.chat_template.replace(own);
            if inner.is_some() && inner != spec.chat_template {
                spec.other_templates.push(OtherTemplate { name: "tokenizer_config.json".into(), is_rival: true });
            }
        }
        // The place of models with processors, which some files without one use too.
        if let (None, Some(json)) = (&spec.chat_template, read("chat_template.json")) {
            spec.chat_template = TokenizerSpec::template_of_json(&json)?;
        }
        Ok(spec)
    }
}
