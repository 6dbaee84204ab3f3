//! What a rank must hold, by the reference's own names, rules and dequantisers over the raw file. Nothing here asks the
//! engine's plan, name table or configuration.

use std::ops::Range;

use lockstep_reference::config::{Eps, RefConfig};
use lockstep_reference::dequant::block_format;
use lockstep_reference::names::whole_kv_b;
use lockstep_reference::slice::{Cut, ExpertSplit, Placement, Split, cut, cut_values, placement};
use lockstep_reference::weights::{file_tensor, shape};
use lockstep_reference::{Format, ModelWeights, RawModel, RawTensor, RefError, Weights};

use crate::checkpoint::oracle::Raw;
use crate::model::Param;
use crate::verify::pairing::reference_of;

/// The bytes of one parameter on one rank, and what they are.
#[derive(Debug)]
pub(super) struct Expected {
    /// In the file's layout; little-endian f32 where the engine keeps the parameter plain.
    pub bytes: Vec<u8>,
    /// Bytes of one row of the rank's part.
    pub row_bytes: usize,
    /// Columns of the whole parameter that belong to the rank.
    pub own: Range<usize>,
    /// Columns that are stored, in whole blocks.
    pub stored: Range<usize>,
    /// The rank's part in the reference's words.
    pub placement: Placement,
    /// Name of the block format.
    pub format: &'static str,
}

impl Expected {
    /// The part in people's words.
    pub fn part(&self) -> String {
        match &self.placement {
            Placement::Replicated => "all of it".into(),
            Placement::Rows(r) => format!("rows {}..{}", r.start, r.end),
            Placement::Cols(r) => format!("columns {}..{}", r.start, r.end),
            Placement::Heads(r) => format!("heads {}..{}", r.start, r.end),
            Placement::Experts(r) => format!("experts {}..{}", r.start, r.end),
            Placement::Vocab { rows, .. } => format!("vocabulary rows {}..{}", rows.start, rows.end),
        }
    }
}

/// The reference's reading of one model.
pub(super) struct Oracle<'a> {
    raw: &'a Raw<'a>,
    /// Its configuration.
    pub config: RefConfig,
    weights: ModelWeights<'a>,
}

impl<'a> Oracle<'a> {
    pub fn new(raw: &'a Raw<'a>) -> Result<Self, RefError> {
        let config = RefConfig::from_raw(raw, Eps::File)?;
        let weights = ModelWeights::new(raw, &config);
        Ok(Oracle { raw, config, weights })
    }

    /// The parameters as plain values.
    pub fn weights(&self) -> &ModelWeights<'a> {
        &self.weights
    }

    /// The part of rank `rank` of `tp`.
    pub fn expected(&self, param: Param, tp: usize, rank: usize) -> Result<Expected, RefError> {
        let (c, name) = (&self.config, reference_of(param.kind));
        let split = Split { tp, rank, experts: ExpertSplit::Tensor };
        let cols = shape(c, name).last().copied().unwrap_or(1);
        let whole = |bytes, row_bytes, placement, format| Expected {
            bytes,
            row_bytes,
            own: 0..cols,
            stored: 0..cols,
            placement,
            format,
        };
        let tensors = self.tensors(param)?;
        if param.kind.is_plain() {
            let placement = placement(c, name, split)?;
            let mut bytes = Vec::new();
            for (file_name, tensor) in &tensors {
                bytes.extend(plain(file_name, tensor)?);
            }
            return Ok(whole(bytes, 4 * cols, placement, "F32"));
        }
        if tensors.is_empty() {
            return self.of_whole_kv_b(param, split, cols);
        }
        let mut joined: Option<(Cut, lockstep_reference::dequant::BlockFormat)> = None;
        for (file_name, tensor) in &tensors {
            let format = block_format(tensor.type_id)
                .ok_or_else(|| RefError::Format { name: file_name.clone(), type_id: tensor.type_id })?;
            let part = cut(c, name, tensor, split)?;
            match &mut joined {
                None => joined = Some((part, format)),
                Some((all, _)) => all.bytes.extend(part.bytes),
            }
        }
        let Some((part, format)) = joined else { return Err(RefError::Form { param: name, asked: "tensor" }) };
        let mut expected = whole(part.bytes, 0, part.placement, format.name);
        if let (Placement::Cols(range), Some(blocks)) = (&expected.placement, part.covering_blocks) {
            expected.own = range.clone();
            expected.stored = blocks.start * format.values..blocks.end * format.values;
        }
        expected.row_bytes = expected.stored.len() / format.values * format.bytes;
        Ok(expected)
    }

    /// Key and value heads of a file that keeps `kv_b` whole.
    fn of_whole_kv_b(&self, param: Param, split: Split, cols: usize) -> Result<Expected, RefError> {
        let (c, name) = (&self.config, reference_of(param.kind));
        let layer = param.layer.unwrap_or_default();
        let file_name = whole_kv_b(self.raw.format(), layer);
        let missing =
            || RefError::Tensor { name: file_name.clone(), expected: "a tensor".into(), found: "none".into() };
        let tensor = self.raw.tensor(&file_name).ok_or_else(missing)?;
        let range = |p: &Placement| match p {
            Placement::Heads(range) => range.clone(),
            _ => 0..c.heads,
        };
        if name == lockstep_reference::Param::VB {
            let part = cut_values(c, &tensor, split)?;
            let format = block_format(tensor.type_id);
            let rows = range(&part.placement).len() * c.value;
            return Ok(Expected {
                row_bytes: part.bytes.len() / rows.max(1),
                bytes: part.bytes,
                own: 0..cols,
                stored: 0..cols,
                placement: part.placement,
                format: format.map_or("?", |f| f.name),
            });
        }
        let placement = placement(c, name, split)?;
        let heads = self.weights.heads(Some(layer), name)?;
        let part = heads.slice(ndarray::s![range(&placement), .., ..]);
        let bytes = part.iter().flat_map(|v| v.to_le_bytes()).collect();
        Ok(Expected { bytes, row_bytes: 4 * cols, own: 0..cols, stored: 0..cols, placement, format: "F32" })
    }

    /// The file's tensors of a parameter: one, or one per expert; none where `kv_b` is whole.
    pub fn tensors(&self, param: Param) -> Result<Vec<(String, RawTensor<'_>)>, RefError> {
        let name = reference_of(param.kind);
        let find = |expert| file_tensor(self.raw, &self.config, param.layer, name, expert);
        if param.kind.is_expert_stack() && self.raw.format() == Format::Hf {
            return (0..self.config.experts).filter_map(|e| find(Some(e)).transpose()).collect();
        }
        Ok(find(None)?.into_iter().collect())
    }
}

/// A tensor's values as little-endian f32, by the reference's dequantiser.
fn plain(name: &str, tensor: &RawTensor<'_>) -> Result<Vec<u8>, RefError> {
    let format = block_format(tensor.type_id)
        .ok_or_else(|| RefError::Format { name: name.to_string(), type_id: tensor.type_id })?;
    let values = format.decode(&tensor.bytes).ok_or_else(|| RefError::Tensor {
        name: name.to_string(),
        expected: format!("whole {} blocks", format.name),
        found: format!("{} bytes", tensor.bytes.len()),
    })?;
    Ok(values.iter().flat_map(|v| v.to_le_bytes()).collect())
}
