//! Weights as the operations want them: plain f32 arrays of unfused parameters. [`Weights`] is a trait so that a
//! hypothesis about a fault can stand between the model and the oracle and hand in altered arrays; [`ModelWeights`]
//! reads them from a file, one layer at a time, and decodes only the experts that are asked for.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use ndarray::{Array1, Array2, Array3, s};

use crate::config::RefConfig;
use crate::dequant::block_format;
use crate::error::RefError;
use crate::names::{RefParam, file_names, whole_kv_b};
use crate::source::{Format, RawModel, RawTensor};

/// Decoded weights kept at most, unless one parameter alone is larger.
const CACHE_BYTES: usize = 4 << 30;

/// The parameters of one model. `layer` is `None` for parameters outside the layers; MTP layers count after the trunk.
pub trait Weights: Sync {
    /// A norm weight or a bias.
    ///
    /// # Errors
    /// The tensor is missing or does not fit the configuration; the parameter is not a vector.
    fn vector(&self, layer: Option<usize>, param: RefParam) -> Result<Arc<Array1<f32>>, RefError>;
    /// A projection, \[out, in\].
    ///
    /// # Errors
    /// As for [`Weights::vector`].
    fn matrix(&self, layer: Option<usize>, param: RefParam) -> Result<Arc<Array2<f32>>, RefError>;
    /// One matrix per head: `KB` as \[head, latent, nope\], `VB` as \[head, value, latent\].
    ///
    /// # Errors
    /// As for [`Weights::vector`].
    fn heads(&self, layer: Option<usize>, param: RefParam) -> Result<Arc<Array3<f32>>, RefError>;
    /// One routed expert's projection, \[out, in\].
    ///
    /// # Errors
    /// As for [`Weights::vector`].
    fn expert(&self, layer: Option<usize>, param: RefParam, expert: usize) -> Result<Arc<Array2<f32>>, RefError>;
    /// One row of the token embedding, \[hidden\].
    ///
    /// # Errors
    /// As for [`Weights::vector`], and for an id outside the vocabulary.
    fn embedding_row(&self, id: usize) -> Result<Array1<f32>, RefError>;
}

/// The shape of a parameter, slowest axis first; for experts that of one of them. `KB` and `VB` have three axes.
pub fn shape(c: &RefConfig, param: RefParam) -> Vec<usize> {
    use RefParam::*;
    let shared = c.shared_experts * c.moe_ffn;
    match param {
        Embed | Head => vec![c.vocab, c.hidden],
        FinalNorm | AttnNorm | FfnNorm | ENorm | HNorm | MtpHeadNorm => vec![c.hidden],
        QA => vec![c.q_rank, c.hidden],
        QANorm => vec![c.q_rank],
        QB => vec![c.heads * (c.nope + c.rope), c.q_rank],
        KvA => vec![c.kv_rank + c.rope, c.hidden],
        KvANorm => vec![c.kv_rank],
        KB => vec![c.heads, c.kv_rank, c.nope],
        VB => vec![c.heads, c.value, c.kv_rank],
        O => vec![c.hidden, c.heads * c.value],
        IndexQB => vec![c.index_heads * c.index_dim, c.q_rank],
        IndexK => vec![c.index_dim, c.hidden],
        IndexKNormW | IndexKNormB => vec![c.index_dim],
        IndexProj => vec![c.index_heads, c.hidden],
        Gate | Up => vec![c.ffn, c.hidden],
        Down => vec![c.hidden, c.ffn],
        Router => vec![c.experts, c.hidden],
        RouterBias => vec![c.experts],
        GateExps | UpExps => vec![c.moe_ffn, c.hidden],
        DownExps => vec![c.hidden, c.moe_ffn],
        GateShared | UpShared => vec![shared, c.hidden],
        DownShared => vec![c.hidden, shared],
        EhProj => vec![c.hidden, 2 * c.hidden],
    }
}

/// The file's tensor for a parameter and its name, shape checked; a stack holds all experts, elsewhere `expert` picks
/// the tensor. `None` where `KB` or `VB` has no tensor of its own, because the file keeps `kv_b` whole.
///
/// # Errors
/// The tensor is missing, or its shape or byte count is wrong.
pub fn file_tensor<'a>(
    raw: &'a dyn RawModel,
    c: &RefConfig,
    layer: Option<usize>,
    param: RefParam,
    expert: Option<usize>,
) -> Result<Option<(String, RawTensor<'a>)>, RefError> {
    let param = if param == RefParam::Head && c.tied_head { RefParam::Embed } else { param };
    let names = file_names(raw.format(), param, layer, expert);
    let Some((name, tensor)) = names.iter().find_map(|name| Some((name.clone(), raw.tensor(name)?))) else {
        return match (param, names.into_iter().next()) {
            (RefParam::KB | RefParam::VB, _) => Ok(None),
            (_, name) => Err(RefError::tensor(name.unwrap_or_default(), "a tensor", "nothing")),
        };
    };
    let mut expected = shape(c, param);
    if is_expert(param) && raw.format() == Format::Gguf {
        expected.insert(0, c.experts);
    }
    check(&name, &tensor, &expected)?;
    // Of the ending alone: `indexer.weights_proj.weight` has the word twice.
    let scale = name.strip_suffix(".weight").map(|stem| format!("{stem}.scale"));
    if let Some(scale) = scale.filter(|scale| raw.tensor(scale).is_some()) {
        return Err(RefError::tensor(scale, "no separate scale", "one"));
    }
    Ok(Some((name, tensor)))
}

fn is_expert(param: RefParam) -> bool {
    matches!(param, RefParam::GateExps | RefParam::UpExps | RefParam::DownExps)
}

/// Shape (slowest axis first) and byte count against what the configuration and the block format demand.
fn check(name: &str, tensor: &RawTensor<'_>, shape: &[usize]) -> Result<(), RefError> {
    let mut ne = tensor.ne.clone();
    while ne.len() > shape.len() && ne.last() == Some(&1) {
        ne.pop();
    }
    ne.reverse();
    if ne != shape {
        return Err(RefError::tensor(name, format!("shape {shape:?} (slowest axis first)"), format!("{ne:?}")));
    }
    let format = format_of(name, tensor)?;
    let cols = shape.last().copied().unwrap_or(0);
    let row = format.row_bytes(cols).ok_or_else(|| {
        RefError::tensor(
            name,
            format!("rows of whole {} blocks of {}", format.name, format.values),
            format!("{cols} columns"),
        )
    })?;
    let rows = shape[..shape.len() - 1].iter().try_fold(1usize, |n, &axis| n.checked_mul(axis));
    let bytes = rows.and_then(|rows| rows.checked_mul(row));
    if bytes != Some(tensor.bytes.len()) {
        let expected = bytes.map_or_else(|| "a size that fits".to_string(), |b| format!("{b} bytes"));
        return Err(RefError::tensor(name, expected, format!("{} bytes", tensor.bytes.len())));
    }
    Ok(())
}

fn format_of(name: &str, tensor: &RawTensor<'_>) -> Result<crate::dequant::BlockFormat, RefError> {
    block_format(tensor.type_id).ok_or_else(|| RefError::Format { name: name.to_string(), type_id: tensor.type_id })
}

/// Decodes part `part` of `parts` equal parts of a checked tensor.
fn decode(name: &str, tensor: &RawTensor<'_>, part: usize, parts: usize) -> Result<Vec<f32>, RefError> {
    let size = tensor.bytes.len() / parts;
    let bytes = tensor.bytes.get(part * size..(part + 1) * size);
    let values = bytes.and_then(|bytes| format_of(name, tensor).ok()?.decode(bytes));
    values.ok_or_else(|| {
        RefError::tensor(name, format!("part {part} of {parts}"), format!("{} bytes", tensor.bytes.len()))
    })
}

/// A parameter: layer, kind, and one expert of a stack (for the embedding: one id).
pub type ParamKey = (Option<usize>, RefParam, Option<usize>);

#[derive(Clone)]
enum Plain {
    Vector(Arc<Array1<f32>>),
    Matrix(Arc<Array2<f32>>),
    Heads(Arc<Array3<f32>>),
}

#[derive(Default)]
struct Cache {
    layer: Option<usize>,
    bytes: usize,
    kept: HashMap<ParamKey, Plain>,
}

/// The parameters of a [`RawModel`]. Keeps what it decoded until another layer is asked for.
pub struct ModelWeights<'a> {
    raw: &'a dyn RawModel,
    config: RefConfig,
    cache: Mutex<Cache>,
}

impl<'a> ModelWeights<'a> {
    /// Weights of `raw`, whose tensors must have the shapes that `config` says.
    pub fn new(raw: &'a dyn RawModel, config: &RefConfig) -> Self {
        ModelWeights { raw, config: config.clone(), cache: Mutex::default() }
    }

    fn cached(&self, key: ParamKey, read: impl FnOnce() -> Result<Plain, RefError>) -> Result<Plain, RefError> {
        let lock = || self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plain) = lock().kept.get(&key) {
            return Ok(plain.clone());
        }
        // Outside the lock: other threads may read meanwhile, and a value read twice is the same value.
        let plain = read()?;
        let bytes = 4 * match &plain {
            Plain::Vector(a) => a.len(),
            Plain::Matrix(a) => a.len(),
            Plain::Heads(a) => a.len(),
        };
        let mut cache = lock();
        if cache.layer != key.0 || cache.bytes + bytes > CACHE_BYTES {
            *cache = Cache { layer: key.0, ..Cache::default() };
        }
        if cache.kept.insert(key, plain.clone()).is_none() {
            cache.bytes += bytes;
        }
        Ok(plain)
    }

    fn tensor(
        &self,
        layer: Option<usize>,
        param: RefParam,
        expert: Option<usize>,
    ) -> Result<(String, RawTensor<'_>), RefError> {
        let found = file_tensor(self.raw, &self.config, layer, param, expert)?;
        found.ok_or(RefError::Form { param, asked: "tensor" })
    }

    fn read_matrix(&self, layer: Option<usize>, param: RefParam, expert: Option<usize>) -> Result<Plain, RefError> {
        let (name, tensor) = self.tensor(layer, param, expert)?;
        let (part, parts) = match (expert, self.raw.format()) {
            (Some(e), Format::Gguf) => (e, self.config.experts),
            _ => (0, 1),
        };
        let want = shape(&self.config, param);
        let values = decode(&name, &tensor, part, parts)?;
        let array = Array2::from_shape_vec((want[0], want[1]), values);
        Ok(Plain::Matrix(Arc::new(
            array.map_err(|e| RefError::tensor(name, format!("shape {want:?}"), e.to_string()))?,
        )))
    }

    fn read_heads(&self, layer: usize, param: RefParam) -> Result<Plain, RefError> {
        let c = &self.config;
        let want = shape(c, param);
        if let Some((name, tensor)) = file_tensor(self.raw, c, Some(layer), param, None)? {
            let array = Array3::from_shape_vec((want[0], want[1], want[2]), decode(&name, &tensor, 0, 1)?);
            return Ok(Plain::Heads(Arc::new(
                array.map_err(|e| RefError::tensor(name, format!("shape {want:?}"), e.to_string()))?,
            )));
        }
        let name = whole_kv_b(self.raw.format(), layer);
        let Some(tensor) = self.raw.tensor(&name) else {
            let own = file_names(self.raw.format(), param, Some(layer), None).into_iter().next();
            return Err(RefError::tensor(
                own.unwrap_or_else(|| name.clone()),
                format!("it, or a whole {name}"),
                "neither",
            ));
        };
        check(&name, &tensor, &[c.heads * (c.nope + c.value), c.kv_rank])?;
        let whole = Array3::from_shape_vec((c.heads, c.nope + c.value, c.kv_rank), decode(&name, &tensor, 0, 1)?)
            .map_err(|e| RefError::tensor(name, "heads of nope and value rows", e.to_string()))?;
        let part = match param {
            // Per head the key rows come first; stored [nope, latent], wanted [latent, nope].
            RefParam::KB => {
                whole.slice(s![.., ..c.nope, ..]).permuted_axes([0, 2, 1]).as_standard_layout().into_owned()
            }
            _ => whole.slice(s![.., c.nope.., ..]).to_owned(),
        };
        Ok(Plain::Heads(Arc::new(part)))
    }
}

impl Weights for ModelWeights<'_> {
    fn vector(&self, layer: Option<usize>, param: RefParam) -> Result<Arc<Array1<f32>>, RefError> {
        let read = || {
            let (name, tensor) = self.tensor(layer, param, None)?;
            Ok(Plain::Vector(Arc::new(Array1::from(decode(&name, &tensor, 0, 1)?))))
        };
        match shape(&self.config, param).len() {
            1 => match self.cached((layer, param, None), read)? {
                Plain::Vector(a) => Ok(a),
                _ => Err(RefError::Form { param, asked: "vector" }),
            },
            _ => Err(RefError::Form { param, asked: "vector" }),
        }
    }

    fn matrix(&self, layer: Option<usize>, param: RefParam) -> Result<Arc<Array2<f32>>, RefError> {
        let wrong = RefError::Form { param, asked: "matrix" };
        if shape(&self.config, param).len() != 2 || is_expert(param) {
            return Err(wrong);
        }
        match self.cached((layer, param, None), || self.read_matrix(layer, param, None))? {
            Plain::Matrix(a) => Ok(a),
            _ => Err(wrong),
        }
    }

    fn heads(&self, layer: Option<usize>, param: RefParam) -> Result<Arc<Array3<f32>>, RefError> {
        let wrong = RefError::Form { param, asked: "heads" };
        let (RefParam::KB | RefParam::VB, Some(n)) = (param, layer) else { return Err(wrong) };
        match self.cached((layer, param, None), || self.read_heads(n, param))? {
            Plain::Heads(a) => Ok(a),
            _ => Err(wrong),
        }
    }

    fn expert(&self, layer: Option<usize>, param: RefParam, expert: usize) -> Result<Arc<Array2<f32>>, RefError> {
        let wrong = RefError::Form { param, asked: "expert" };
        if !is_expert(param) || expert >= self.config.experts {
            return Err(wrong);
        }
        match self.cached((layer, param, Some(expert)), || self.read_matrix(layer, param, Some(expert)))? {
            Plain::Matrix(a) => Ok(a),
            _ => Err(wrong),
        }
    }

    fn embedding_row(&self, id: usize) -> Result<Array1<f32>, RefError> {
        let vocab = self.config.vocab;
        if id >= vocab {
            return Err(RefError::Token { id, vocab });
        }
        let (name, tensor) = self.tensor(None, RefParam::Embed, None)?;
        Ok(Array1::from(decode(&name, &tensor, id, vocab)?))
    }
}

#[cfg(test)]
#[path = "weights_tests.rs"]
mod tests;
