//! A rank's parameters on their way to its device: cut by the plan, fused groups joined in the plan's order.

use std::borrow::Cow;
use std::collections::HashMap;

use super::EngineError;
use super::arch::{Model, Resident};
use crate::checkpoint::{Checkpoint, CheckpointError, Matrix};
use crate::device::{BufId, Columns, Device, PartSpec, Piece, View, WeightId};
use crate::model::Param;
use crate::quant::{QuantType, dequantise};
use crate::shard::ShardPlan;

/// Where a parameter lies on a rank.
#[derive(Clone, Copy, Debug)]
enum At {
    /// Part of a (fused) weight.
    Part(WeightId, usize),
    /// A plain vector, and its width.
    Vector(BufId, usize),
}

/// Where everything lies that a rank has loaded.
pub(super) struct Weights(HashMap<Param, At>);

impl Weights {
    /// Loads the resident parameters that `rank` holds, and says `loaded` after each weight.
    ///
    /// # Errors
    /// Parameters that are missing, of the wrong shape or of an unreadable type; a device that refuses them.
    pub(super) fn load(
        checkpoint: &Checkpoint,
        plan: &dyn ShardPlan,
        model: &Model,
        device: &mut dyn Device,
        rank: usize,
        loaded: &dyn Fn(),
    ) -> Result<Self, EngineError> {
        let c = checkpoint.config();
        let mut places = HashMap::new();
        for (id, resident) in model.weights.iter().enumerate() {
            // Parts are looked for at their canonical places, whatever order they are joined in.
            let (joined, canonical) = match *resident {
                Resident::Single(param) => (vec![param], vec![param]),
                Resident::Group(group, layer) => (plan.parts(group, layer, rank), group.parts(c, layer)),
            };
            let parts = joined.into_iter().map(|p| part(checkpoint, plan, p, rank));
            device.load(parts.collect::<Result<_, _>>()?)?;
            loaded();
            places.extend(canonical.into_iter().enumerate().map(|(i, p)| (p, At::Part(WeightId(id), i))));
        }
        Ok(Weights(places))
    }

    /// Fills the vectors, once their buffers are there.
    ///
    /// # Errors
    /// As [`Weights::load`].
    pub(super) fn fill(
        &mut self,
        checkpoint: &Checkpoint,
        model: &Model,
        device: &mut dyn Device,
    ) -> Result<(), EngineError> {
        for (id, param) in &model.vectors {
            let matrix = plain(param, checkpoint.matrix(*param, 0)?)?;
            let (values, _) = matrix.bytes.as_chunks::<4>();
            let values: Vec<f32> = values.iter().map(|b| f32::from_le_bytes(*b)).collect();
            device.write(View::cols(*id, 0, values.len()), 1, &values)?;
            self.0.insert(*param, At::Vector(*id, values.len()));
        }
        Ok(())
    }

    /// The bytes that stand where `param` belongs, read back from the device in the file's layout (f32 for plain ones), and
    /// the columns that the device multiplies and stores; vectors are whole.
    ///
    /// # Errors
    /// A parameter that the rank does not hold.
    pub(super) fn read(&self, device: &mut dyn Device, param: Param) -> Result<(Vec<u8>, Columns), EngineError> {
        match self.0.get(&param) {
            None => Err(EngineError::Checkpoint(CheckpointError::Missing { param, expected: "loaded".into() })),
            Some(At::Part(weight, part)) => Ok(device.read_weight(*weight, *part)?),
            Some(At::Vector(id, width)) => {
                let values = device.read(View::cols(*id, 0, *width), 1)?;
                let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                Ok((bytes, Columns { own: 0..*width, stored: 0..*width }))
            }
        }
    }
}

fn part<'a>(
    checkpoint: &'a Checkpoint,
    plan: &dyn ShardPlan,
    param: Param,
    rank: usize,
) -> Result<PartSpec<'a>, EngineError> {
    let ty = match param.kind.is_plain() {
        true => QuantType::F32,
        false => checkpoint.type_of(param)?,
    };
    let slice = plan.slice(param, ty.block(), rank);
    let mut stack = Vec::with_capacity(slice.stack.len());
    for index in slice.stack.clone() {
        let matrix = checkpoint.matrix(param, index)?;
        let matrix = if param.kind.is_plain() { plain(&param, matrix)? } else { matrix };
        stack.push(Piece::new(matrix, slice.rows.clone(), slice.covered.clone()));
    }
    let first = slice.covered.start;
    Ok(PartSpec { stack, cols: slice.cols.start - first..slice.cols.end - first, first })
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
