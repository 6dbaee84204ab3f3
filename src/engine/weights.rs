//! A rank's parameters on its device: cut by the plan, fused groups joined in the plan's order.

use std::borrow::Cow;
use std::collections::HashMap;

use super::EngineError;
use crate::checkpoint::{Checkpoint, CheckpointError, Matrix};
use crate::device::{Columns, Device, PartSpec, Piece};
use crate::model::{Config, Kind, Param};
use crate::quant::{QuantType, dequantise};
use crate::shard::{Group, ShardPlan};

/// Where a parameter lies on a rank.
#[derive(Clone, Copy, Debug)]
enum Held {
    /// Part of a (fused) weight.
    Weight { index: usize, part: usize },
    /// A plain vector.
    Vector(usize),
}

/// Everything a rank has loaded.
pub struct Weights<D: Device> {
    weights: Vec<D::Weight>,
    vectors: Vec<D::Buf>,
    held: HashMap<Param, Held>,
    /// The trunk's layers.
    pub layers: Vec<Layer>,
    /// Vocabulary-parallel embedding and its first row.
    pub embedding: (WeightId, usize),
    /// Final norm.
    pub final_norm: VectorId,
    /// Vocabulary-parallel head and its real rows.
    pub head: (WeightId, usize),
}

/// A weight of [`Weights`].
#[derive(Clone, Copy, Debug)]
pub struct WeightId(usize);

/// A vector of [`Weights`].
#[derive(Clone, Copy, Debug)]
pub struct VectorId(usize);

/// A trunk layer's parameters.
pub struct Layer {
    /// Norm before attention.
    pub attn_norm: VectorId,
    /// q_a, kv_a and the indexer's key and weights projections.
    pub qkv_a: WeightId,
    /// Norm of the query latent.
    pub q_a_norm: VectorId,
    /// Norm of the key-value latent.
    pub kv_a_norm: VectorId,
    /// q_b and the indexer's query projection.
    pub q_b: WeightId,
    /// Key up-projection per head, `[latent][nope]`.
    pub k_b: WeightId,
    /// Value up-projection per head, `[v][latent]`.
    pub v_b: WeightId,
    /// Output projection.
    pub o: WeightId,
    /// LayerNorm of the indexer's keys, on full layers.
    pub index_norm: Option<(VectorId, VectorId)>,
    /// Norm before the feed-forward.
    pub ffn_norm: VectorId,
    /// The feed-forward.
    pub ffn: Ffn,
}

/// A feed-forward's parameters.
pub enum Ffn {
    /// Dense SwiGLU.
    Dense {
        /// Gate and up.
        gate_up: WeightId,
        /// Down.
        down: WeightId,
    },
    /// Routed experts and, usually, a shared one.
    Moe {
        /// Router, plain.
        router: WeightId,
        /// Correction bias.
        bias: VectorId,
        /// Experts' gate and up.
        gate_up: WeightId,
        /// Experts' down.
        down: WeightId,
        /// The shared expert's gate and up, and down.
        shared: Option<(WeightId, WeightId)>,
    },
}

impl<D: Device> Weights<D> {
    /// Loads what `rank` holds.
    ///
    /// # Errors
    /// Parameters that are missing, of the wrong shape or of an unreadable type; a device that refuses them.
    pub fn load(checkpoint: &Checkpoint, plan: &dyn ShardPlan, device: &D, rank: usize) -> Result<Self, EngineError> {
        let c = checkpoint.config();
        let mut loader =
            Loader { checkpoint, plan, device, rank, weights: Vec::new(), vectors: Vec::new(), held: HashMap::new() };
        let global = |kind| Param { layer: None, kind };
        let first_row = plan.slice(global(Kind::TokenEmbd), 1, rank).rows.start;
        let embedding = (loader.single(global(Kind::TokenEmbd))?, first_row);
        let layers = (0..c.layers).map(|layer| loader.layer(c, layer)).collect::<Result<_, _>>()?;
        let final_norm = loader.vector(global(Kind::OutputNorm))?;
        let rows = plan.slice(global(Kind::Output), 1, rank).rows.len();
        let head = (loader.single(global(Kind::Output))?, rows);
        let Loader { weights, vectors, held, .. } = loader;
        Ok(Weights { weights, vectors, held, layers, embedding, final_norm, head })
    }

    /// The weight `id`.
    pub fn weight(&self, id: WeightId) -> &D::Weight {
        &self.weights[id.0]
    }

    /// The vector `id`.
    pub fn vector(&self, id: VectorId) -> &D::Buf {
        &self.vectors[id.0]
    }

    /// The bytes that stand where `param` belongs, read back from the device in the file's layout (f32 for plain ones).
    ///
    /// # Errors
    /// A parameter that the rank does not hold.
    pub fn read(&self, device: &D, param: Param, width: usize) -> Result<Vec<u8>, EngineError> {
        match self.held.get(&param) {
            None => Err(EngineError::Checkpoint(CheckpointError::Missing { param, expected: "loaded".into() })),
            Some(Held::Weight { index, part }) => Ok(device.read_weight(&self.weights[*index], *part)?),
            Some(Held::Vector(i)) => {
                let values = device.read(&self.vectors[*i], 1, 0..width)?;
                Ok(values.iter().flat_map(|v| v.to_le_bytes()).collect())
            }
        }
    }

    /// The columns of `param` that the device multiplies and stores; vectors are whole.
    ///
    /// # Errors
    /// A parameter that the rank does not hold.
    pub fn columns(&self, device: &D, param: Param, width: usize) -> Result<Columns, EngineError> {
        match self.held.get(&param) {
            None => Err(EngineError::Checkpoint(CheckpointError::Missing { param, expected: "loaded".into() })),
            Some(Held::Weight { index, part }) => Ok(device.read_cols(&self.weights[*index], *part)?),
            Some(Held::Vector(_)) => Ok(Columns { own: 0..width, stored: 0..width }),
        }
    }
}

struct Loader<'a, D: Device> {
    checkpoint: &'a Checkpoint,
    plan: &'a dyn ShardPlan,
    device: &'a D,
    rank: usize,
    weights: Vec<D::Weight>,
    vectors: Vec<D::Buf>,
    held: HashMap<Param, Held>,
}

impl<'a, D: Device> Loader<'a, D> {
    fn layer(&mut self, c: &Config, layer: usize) -> Result<Layer, EngineError> {
        let p = |kind| Param { layer: Some(layer), kind };
        let index_norm = match c.is_full(layer) {
            true => Some((self.vector(p(Kind::IndexKNorm))?, self.vector(p(Kind::IndexKNormBias))?)),
            false => None,
        };
        let ffn = if c.is_moe(layer) {
            Ffn::Moe {
                router: self.single(p(Kind::Router))?,
                bias: self.vector(p(Kind::RouterBias))?,
                gate_up: self.group(c, Group::GateUpExps, layer)?,
                down: self.single(p(Kind::DownExps))?,
                shared: match c.shared_experts > 0 {
                    true => Some((self.group(c, Group::GateUpShexp, layer)?, self.single(p(Kind::DownShexp))?)),
                    false => None,
                },
            }
        } else {
            Ffn::Dense { gate_up: self.group(c, Group::GateUp, layer)?, down: self.single(p(Kind::FfnDown))? }
        };
        Ok(Layer {
            attn_norm: self.vector(p(Kind::AttnNorm))?,
            qkv_a: self.group(c, Group::QkvA, layer)?,
            q_a_norm: self.vector(p(Kind::QANorm))?,
            kv_a_norm: self.vector(p(Kind::KvANorm))?,
            q_b: self.group(c, Group::QB, layer)?,
            k_b: self.single(p(Kind::KB))?,
            v_b: self.single(p(Kind::VB))?,
            o: self.single(p(Kind::AttnOutput))?,
            index_norm,
            ffn_norm: self.vector(p(Kind::FfnNorm))?,
            ffn,
        })
    }

    fn vector(&mut self, param: Param) -> Result<VectorId, EngineError> {
        let matrix = plain(&param, self.checkpoint.matrix(param, 0)?)?;
        let values: Vec<f32> =
            matrix.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        self.vectors.push(self.device.vector(&values)?);
        self.held.insert(param, Held::Vector(self.vectors.len() - 1));
        Ok(VectorId(self.vectors.len() - 1))
    }

    fn single(&mut self, param: Param) -> Result<WeightId, EngineError> {
        let part = self.part(param)?;
        self.weights.push(self.device.weight(vec![part])?);
        self.held.insert(param, Held::Weight { index: self.weights.len() - 1, part: 0 });
        Ok(WeightId(self.weights.len() - 1))
    }

    /// Joins the parts in the plan's order; they are looked for at their canonical places.
    fn group(&mut self, c: &Config, group: Group, layer: usize) -> Result<WeightId, EngineError> {
        let parts =
            self.plan.parts(group, layer, self.rank).into_iter().map(|p| self.part(p)).collect::<Result<_, _>>()?;
        self.weights.push(self.device.weight(parts)?);
        let index = self.weights.len() - 1;
        for (part, param) in group.parts(c, layer).into_iter().enumerate() {
            self.held.insert(param, Held::Weight { index, part });
        }
        Ok(WeightId(index))
    }

    fn part(&self, param: Param) -> Result<PartSpec<'a>, EngineError> {
        let ty = match param.kind.is_plain() {
            true => QuantType::F32,
            false => self.checkpoint.type_of(param)?,
        };
        let slice = self.plan.slice(param, ty.block(), self.rank);
        let mut stack = Vec::with_capacity(slice.stack.len());
        for index in slice.stack.clone() {
            let matrix = self.checkpoint.matrix(param, index)?;
            let matrix = if param.kind.is_plain() { plain(&param, matrix)? } else { matrix };
            stack.push(Piece::new(matrix, slice.rows.clone(), slice.covered.clone()));
        }
        let first = slice.covered.start;
        Ok(PartSpec { stack, cols: slice.cols.start - first..slice.cols.end - first, first })
    }
}

/// A matrix as plain f32, whatever its type.
fn plain<'a>(param: &Param, m: Matrix<'a>) -> Result<Matrix<'a>, EngineError> {
    if m.ty == QuantType::F32 {
        return Ok(m);
    }
    let mut values = vec![0.0f32; m.rows * m.cols];
    dequantise(m.ty, &m.bytes, &mut values)
        .map_err(|source| CheckpointError::Quant { tensor: param.to_string(), source })?;
    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Ok(Matrix { ty: QuantType::F32, bytes: Cow::Owned(bytes), ..m })
}
