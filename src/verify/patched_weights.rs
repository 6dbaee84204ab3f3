//! Weights with some parameters altered: how a suspected fault of the data is tried out in the reference.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use lockstep_reference::ndarray::{Array1, Array2, Array3, Axis, Slice};
use lockstep_reference::{ParamKey, RefError, RefParam, Weights};

/// An altered parameter.
#[derive(Clone, Debug)]
pub enum Value {
    /// A vector.
    Vector(Arc<Array1<f32>>),
    /// A matrix `[out][in]`.
    Matrix(Arc<Array2<f32>>),
    /// One matrix per head.
    Heads(Arc<Array3<f32>>),
}

impl Value {
    /// The same form with `f` of every number.
    pub fn map(&self, f: impl FnMut(f32) -> f32) -> Value {
        match self {
            Value::Vector(v) => Value::Vector(Arc::new(v.mapv(f))),
            Value::Matrix(m) => Value::Matrix(Arc::new(m.mapv(f))),
            Value::Heads(h) => Value::Heads(Arc::new(h.mapv(f))),
        }
    }

    /// Puts what `source` has at `from` of an axis (of heads: the first) at `to`. False for forms without parts.
    pub fn copy(&mut self, axis: usize, to: Range<usize>, source: &Value, from: Range<usize>) -> bool {
        let (to, from) = (Slice::from(to), Slice::from(from));
        match (self, source) {
            (Value::Matrix(own), Value::Matrix(m)) => {
                Arc::make_mut(own).slice_axis_mut(Axis(axis), to).assign(&m.slice_axis(Axis(axis), from));
            }
            (Value::Heads(own), Value::Heads(h)) => {
                Arc::make_mut(own).slice_axis_mut(Axis(0), to).assign(&h.slice_axis(Axis(0), from));
            }
            _ => return false,
        }
        true
    }
}

/// A parameter of the reference in whichever form it has.
///
/// # Errors
/// Weights that cannot be read.
pub fn value_of(weights: &dyn Weights, key: ParamKey) -> Result<Value, RefError> {
    use RefParam::*;
    let (layer, param, expert) = key;
    Ok(match param {
        FinalNorm | AttnNorm | QANorm | KvANorm | IndexKNormW | IndexKNormB | FfnNorm | RouterBias | ENorm | HNorm
        | MtpHeadNorm => Value::Vector(weights.vector(layer, param)?),
        KB | VB => Value::Heads(weights.heads(layer, param)?),
        GateExps | UpExps | DownExps => Value::Matrix(weights.expert(layer, param, expert.unwrap_or(0))?),
        Embed => Value::Vector(Arc::new(weights.embedding_row(expert.unwrap_or(0))?)),
        _ => Value::Matrix(weights.matrix(layer, param)?),
    })
}

/// What a parameter becomes; `None` leaves it as it is.
pub type Change<'a> = dyn Fn(ParamKey) -> Result<Option<Value>, RefError> + Sync + 'a;

/// The weights of `base`, but for what `change` says. Every parameter is altered at most once.
pub struct PatchedWeights<'a> {
    base: &'a dyn Weights,
    change: &'a Change<'a>,
    made: Mutex<HashMap<ParamKey, Option<Value>>>,
}

impl<'a> PatchedWeights<'a> {
    /// `base` altered by `change`.
    pub fn new(base: &'a dyn Weights, change: &'a Change<'a>) -> Self {
        PatchedWeights { base, change, made: Mutex::default() }
    }

    fn get(&self, key: ParamKey) -> Result<Option<Value>, RefError> {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = made.get(&key) {
            return Ok(known.clone());
        }
        let value = (self.change)(key)?;
        made.insert(key, value.clone());
        Ok(value)
    }
}

impl Weights for PatchedWeights<'_> {
    fn vector(&self, layer: Option<usize>, param: RefParam) -> Result<Arc<Array1<f32>>, RefError> {
        match self.get((layer, param, None))? {
            Some(Value::Vector(v)) => Ok(v),
            _ => self.base.vector(layer, param),
        }
    }

    fn matrix(&self, layer: Option<usize>, param: RefParam) -> Result<Arc<Array2<f32>>, RefError> {
        match self.get((layer, param, None))? {
            Some(Value::Matrix(m)) => Ok(m),
            _ => self.base.matrix(layer, param),
        }
    }

    fn heads(&self, layer: Option<usize>, param: RefParam) -> Result<Arc<Array3<f32>>, RefError> {
        match self.get((layer, param, None))? {
            Some(Value::Heads(h)) => Ok(h),
            _ => self.base.heads(layer, param),
        }
    }

    fn expert(&self, layer: Option<usize>, param: RefParam, expert: usize) -> Result<Arc<Array2<f32>>, RefError> {
        match self.get((layer, param, Some(expert)))? {
            Some(Value::Matrix(m)) => Ok(m),
            _ => self.base.expert(layer, param, expert),
        }
    }

    fn embedding_row(&self, id: usize) -> Result<Array1<f32>, RefError> {
        match self.get((None, RefParam::Embed, Some(id)))? {
            Some(Value::Vector(v)) => Ok(v.to_vec().into()),
            _ => self.base.embedding_row(id),
        }
    }
}
