//! A model on disk as named parameters: GGUF or safetensors underneath, and the name table between them.

pub mod coverage;
mod digest;
pub mod flags;
mod hf;
mod index;
pub mod indexers;
pub mod names;
pub mod oracle;
mod packed;
mod tokenizer;
pub mod trust;
mod witness;

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::gguf::{Gguf, GgufError, Value};
use crate::model::{Config, ConfigError, Kind, Metadata, Param};
use crate::quant::{QuantError, QuantType, TypeInfo, dequantise};
use crate::tokenize::{TokenizeError, TokenizerSpec};

pub use coverage::{Coverage, Mtp};
pub use flags::FlagDoubt;
pub use indexers::IndexerDoubt;
pub use names::{Binding, Naming};
pub use trust::{Standing, Trusted};

/// The name under which the built-in model appears in messages.
pub const BUILTIN: &str = "built-in glm5-nano";

/// Why a model could not be opened or read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CheckpointError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error("{model}: {source}{tensors}")]
    Config { model: String, source: Box<ConfigError>, tensors: String },
    #[error("{}: {problem}", path.display())]
    Hf { path: PathBuf, problem: String },
    #[error("parameter {param}: no tensor holds it (expected {expected})")]
    Missing { param: Param, expected: String },
    #[error("tensor {tensor}: shape: expected {expected:?} from the metadata, found {found:?} (fastest axis first)")]
    Shape { tensor: String, expected: Vec<u64>, found: Vec<u64> },
    #[error("tensor {tensor}: type {found} cannot be dequantised by this build (expected one of {expected})")]
    Type { tensor: String, expected: String, found: &'static str },
    #[error(
        "parameter {param}: tensor {tensor} holds {form}, which this build cannot read; the file may well be right{}",
        names::advice(form)
    )]
    Form { param: Param, tensor: String, form: &'static str },
    #[error("{}: {problem}, which this build cannot read; the file may well be right", path.display())]
    Lacking { path: PathBuf, problem: String },
    #[error("tensor {tensor}: {source}")]
    Quant { tensor: String, source: QuantError },
    #[error(
        "no model given: this build has no built-in one. Name a .gguf file, a folder of shards or a Hugging Face \
         folder with -m/--model"
    )]
    NoModel,
}

impl CheckpointError {
    /// Whether it is the tool that lacks something: then nothing is said against the model.
    pub fn is_lack(&self) -> bool {
        match self {
            CheckpointError::Type { .. } | CheckpointError::Form { .. } | CheckpointError::Lacking { .. } => true,
            CheckpointError::Config { source, .. } => source.is_lack(),
            _ => false,
        }
    }
}

/// A tensor as a source holds it.
#[derive(Clone, Debug)]
pub struct View<'a> {
    /// Its type.
    pub ty: &'static TypeInfo,
    /// Axes, fastest first.
    pub ne: Vec<u64>,
    /// Raw bytes in the file's layout.
    pub bytes: Cow<'a, [u8]>,
}

/// Named tensors and metadata, whatever the container. Decorated by fault injection.
pub trait TensorSource: Send + Sync {
    /// Names in the container's order.
    fn names(&self) -> Vec<&str>;
    /// The tensor called `name`.
    fn tensor(&self, name: &str) -> Option<View<'_>>;
    /// The file that holds `name`, for messages.
    fn file_of(&self, name: &str) -> String;
    /// Where in that file the data of `name` begins.
    fn offset_of(&self, name: &str) -> Option<u64>;
    /// What is odd about the files and keeps nobody from reading them.
    fn warnings(&self) -> Vec<String>;
    /// Metadata.
    fn metadata(&self) -> &dyn Metadata;
    /// How its tensors are named.
    fn naming(&self) -> Naming;
    /// The tokenizer as the container describes it.
    ///
    /// # Errors
    /// Absent or malformed metadata or files.
    fn tokenizer_spec(&self) -> Result<TokenizerSpec, TokenizeError>;
    /// The container, when it is a GGUF.
    fn gguf(&self) -> Option<&Gguf> {
        None
    }
}

impl Metadata for Gguf {
    fn get(&self, key: &str) -> Option<&Value> {
        self.meta(key)
    }
    fn is_hf(&self) -> bool {
        false
    }
}

impl TensorSource for Gguf {
    fn names(&self) -> Vec<&str> {
        self.tensors().iter().map(|t| t.name.as_str()).collect()
    }
    fn tensor(&self, name: &str) -> Option<View<'_>> {
        let t = Gguf::tensor(self, name)?;
        Some(View { ty: t.ty, ne: t.ne.clone(), bytes: Cow::Borrowed(self.data(t)) })
    }
    fn file_of(&self, name: &str) -> String {
        Gguf::tensor(self, name).map_or(String::new(), |t| Gguf::file_of(self, t).display().to_string())
    }
    fn offset_of(&self, name: &str) -> Option<u64> {
        Gguf::tensor(self, name).map(|t| t.start)
    }
    fn warnings(&self) -> Vec<String> {
        Gguf::warnings(self).map(Into::into).collect()
    }
    fn metadata(&self) -> &dyn Metadata {
        self
    }
    fn naming(&self) -> Naming {
        Naming::Gguf
    }
    fn tokenizer_spec(&self) -> Result<TokenizerSpec, TokenizeError> {
        TokenizerSpec::from_gguf(self)
    }
    fn gguf(&self) -> Option<&Gguf> {
        Some(self)
    }
}

/// One matrix of a parameter: `rows` rows of `cols` values in the file's layout.
#[derive(Clone, Debug)]
pub struct Matrix<'a> {
    /// Type of the blocks.
    pub ty: QuantType,
    /// Number of rows.
    pub rows: usize,
    /// Values per row.
    pub cols: usize,
    /// `rows * ty.row_bytes(cols)` bytes.
    pub bytes: Cow<'a, [u8]>,
}

/// An opened model: a source, its configuration, and which tensors fill which parameters.
pub struct Checkpoint {
    source: Box<dyn TensorSource>,
    name: String,
    config: Config,
    coverage: Coverage,
    bound: HashMap<Param, Binding>,
}

impl Checkpoint {
    /// Opens `path`: a GGUF file or set, a Hugging Face folder; `None` is the built-in model.
    ///
    /// # Errors
    /// Defects of the container and of the metadata. Names and shapes that do not fit are no error here: they are in
    /// [`Checkpoint::coverage`], so that `inspect` can list all of them.
    pub fn open(path: Option<&Path>) -> Result<Self, CheckpointError> {
        Self::from_source(open_source(path)?, path.map_or(BUILTIN.into(), |p| p.display().to_string()))
    }

    /// Binds an already opened source; `name` stands for it in messages.
    ///
    /// # Errors
    /// Metadata that no configuration can be derived from.
    pub fn from_source(source: Box<dyn TensorSource>, name: String) -> Result<Self, CheckpointError> {
        let bytes = source.names().iter().filter_map(|n| source.tensor(n)).map(|t| t.bytes.len() as u64).sum();
        let config = Config::from_metadata(source.metadata(), bytes).map_err(|e| {
            let tensors = tensors_on(&e, source.as_ref());
            CheckpointError::Config { model: name.clone(), source: Box::new(e), tensors }
        })?;
        let (coverage, bound) = coverage::bind(source.as_ref(), &config);
        Ok(Checkpoint { source, name, config, coverage, bound })
    }

    /// The same model as an engine takes it that has some of the configuration otherwise.
    pub fn with_config(mut self, change: impl FnOnce(&mut Config)) -> Self {
        change(&mut self.config);
        self
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The files that hold its tensors; none for the built-in model.
    pub fn files(&self) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = Vec::new();
        for name in self.source.names() {
            let file = PathBuf::from(self.source.file_of(name));
            if files.last() != Some(&file) && !files.contains(&file) && file.is_file() {
                files.push(file);
            }
        }
        files
    }

    /// What the model is called in messages: its path, or that it is built in.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Which tensors are used, unused and unknown, and which parameters lack one.
    pub fn coverage(&self) -> &Coverage {
        &self.coverage
    }

    /// The tensors and metadata underneath.
    pub fn source(&self) -> &dyn TensorSource {
        self.source.as_ref()
    }

    /// The tokenizer as the model's files describe it.
    ///
    /// # Errors
    /// Absent or malformed tokenizer metadata or files.
    pub fn tokenizer_spec(&self) -> Result<TokenizerSpec, TokenizeError> {
        self.source.tokenizer_spec()
    }

    /// How `param` is stored, if it is.
    pub fn binding(&self, param: Param) -> Option<&Binding> {
        self.bound.get(&param)
    }

    /// The type of `param` as the engine will hold it, and its name in the file when that cannot be read.
    ///
    /// # Errors
    /// A missing parameter, or a type without a dequantiser.
    pub fn type_of(&self, param: Param) -> Result<QuantType, CheckpointError> {
        if param.kind == Kind::KB && matches!(self.binding(param), Some(Binding::KvB(_))) {
            return Ok(QuantType::F32); // transposed, and so dequantised
        }
        let name = &self.require(param)?.names()[0];
        let view = self.source.tensor(name).ok_or_else(|| self.missing(param))?;
        readable(name, view.ty)
    }

    fn missing(&self, param: Param) -> CheckpointError {
        let candidates = names::candidates(self.source.naming(), param, 1);
        let expected = candidates.first().and_then(|b| b.names().first().cloned()).unwrap_or_default();
        CheckpointError::Missing { param, expected }
    }

    fn require(&self, param: Param) -> Result<&Binding, CheckpointError> {
        if let Some(fault) = self.coverage.shapes.iter().find(|f| f.param == param) {
            let (expected, found) = (fault.expected.clone(), fault.found.clone());
            return Err(CheckpointError::Shape { tensor: fault.tensor.clone(), expected, found });
        }
        if let Some(other) = self.coverage.unhandled.iter().find(|u| u.param == Some(param)) {
            return Err(CheckpointError::Form { param, tensor: other.tensor.clone(), form: other.form });
        }
        self.binding(param).ok_or_else(|| self.missing(param))
    }

    /// Whether the embedding serves as output matrix, since the files hold none.
    pub fn is_tied(&self) -> bool {
        let of = |kind| self.binding(Param { layer: None, kind });
        of(Kind::Output).is_some() && of(Kind::Output) == of(Kind::TokenEmbd)
    }

    /// Matrix `index` of `param`'s stack (0 where there is none), in the file's layout. Key rows of a whole kv_b are
    /// dequantised and transposed to `[latent][nope]`, everything else keeps its bytes.
    ///
    /// # Errors
    /// A missing parameter, a wrong shape, or a type without a dequantiser.
    pub fn matrix(&self, param: Param, index: usize) -> Result<Matrix<'_>, CheckpointError> {
        let [cols, rows, stack] = param.kind.shape(&self.config);
        debug_assert!(index < stack, "{param} has no matrix {index}");
        let binding = self.require(param)?;
        let name = match binding {
            Binding::PerExpert(names) => &names[index],
            other => &other.names()[0],
        };
        let view = self.source.tensor(name).ok_or_else(|| self.missing(param))?;
        let ty = readable(name, view.ty)?;
        let found = view.ne.clone();
        let shape = |expected: Vec<u64>| CheckpointError::Shape { tensor: name.clone(), expected, found };
        match binding {
            Binding::KvB(_) => {
                let c = &self.config;
                let (head_rows, row_bytes) = (c.nope + c.v_head, ty.row_bytes(c.kv_lora));
                let first = index * head_rows + if param.kind == Kind::VB { c.nope } else { 0 };
                let take = if param.kind == Kind::VB { c.v_head } else { c.nope };
                let bytes = cut(view.bytes, first * row_bytes, take * row_bytes)
                    .ok_or_else(|| shape(vec![c.kv_lora as u64, (c.heads * head_rows) as u64]))?;
                if param.kind == Kind::VB {
                    return Ok(Matrix { ty, rows, cols, bytes });
                }
                let bytes = transposed(name, ty, &bytes, c.nope, c.kv_lora)?;
                Ok(Matrix { ty: QuantType::F32, rows, cols, bytes: Cow::Owned(bytes) })
            }
            _ => {
                let each = rows * ty.row_bytes(cols);
                let at = if matches!(binding, Binding::PerExpert(_)) { 0 } else { index * each };
                let bytes = cut(view.bytes, at, each).ok_or_else(|| shape(vec![cols as u64, rows as u64]))?;
                Ok(Matrix { ty, rows, cols, bytes })
            }
        }
    }
}

/// The container at `path`, or the built-in model.
///
/// # Errors
/// Defects of the container.
pub fn open_source(path: Option<&Path>) -> Result<Box<dyn TensorSource>, CheckpointError> {
    match path {
        None => builtin(),
        Some(path) if hf::is_folder(path) => Ok(Box::new(hf::HfFolder::open(path)?)),
        Some(path) => Ok(Box::new(Gguf::open(path)?)),
    }
}

#[cfg(feature = "builtin-model")]
fn builtin() -> Result<Box<dyn TensorSource>, CheckpointError> {
    static BYTES: &[u8] = include_bytes!("../../goldens/models/glm5-nano-Q4_K_M.gguf");
    Ok(Box::new(Gguf::from_static(BUILTIN, BYTES)?))
}

#[cfg(not(feature = "builtin-model"))]
fn builtin() -> Result<Box<dyn TensorSource>, CheckpointError> {
    Err(CheckpointError::NoModel)
}

/// What tensors say of two keys that contradict each other.
fn tensors_on(e: &ConfigError, source: &dyn TensorSource) -> String {
    let ConfigError::Contradiction { both, .. } = e else { return String::new() };
    let witness = witness::Witness::new(source);
    let names = both.iter().flat_map(|stated| match stated.name {
        // A difference, where the key is none of its own.
        "trunk layers" if !source.metadata().is_hf() => vec![stated.name, "MTP blocks"],
        name => vec![name],
    });
    let said = names.filter_map(|name| {
        let (tensor, n) = witness.of(name)?;
        Some(format!("; the tensors say {n} for {name} ({tensor})"))
    });
    said.collect()
}

fn readable(tensor: &str, ty: &'static TypeInfo) -> Result<QuantType, CheckpointError> {
    ty.quant.ok_or_else(|| CheckpointError::Type {
        tensor: tensor.into(),
        expected: QuantType::all().map(QuantType::name).collect::<Vec<_>>().join(", "),
        found: ty.name,
    })
}

fn cut(bytes: Cow<'_, [u8]>, at: usize, len: usize) -> Option<Cow<'_, [u8]>> {
    match bytes {
        Cow::Borrowed(b) => b.get(at..at + len).map(Cow::Borrowed),
        Cow::Owned(b) => b.get(at..at + len).map(|s| Cow::Owned(s.to_vec())),
    }
}

/// Key rows `[nope][latent]` of one head as plain `[latent][nope]`.
fn transposed(
    tensor: &str,
    ty: QuantType,
    bytes: &[u8],
    nope: usize,
    latent: usize,
) -> Result<Vec<u8>, CheckpointError> {
    let mut values = vec![0.0f32; nope * latent];
    dequantise(ty, bytes, &mut values).map_err(|source| CheckpointError::Quant { tensor: tensor.into(), source })?;
    let mut out = Vec::with_capacity(values.len() * 4);
    for c in 0..latent {
        for j in 0..nope {
            out.extend_from_slice(&values[j * latent + c].to_le_bytes());
        }
    }
    Ok(out)
}
