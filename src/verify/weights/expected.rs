//! What a rank must hold, by the reference's own names, rules and dequantisers over the raw file. Nothing here asks the
//! engine's plan, name table or configuration. Which parameters there are, which of them are stacks and which may be
//! plain is said here once more: a parameter that the engine forgets, or keeps in a form of its own, must not vanish
//! from the check with it.

use std::ops::Range;

use lockstep_reference::config::{Eps, RefConfig};
use lockstep_reference::dequant::{BlockFormat, block_format};
use lockstep_reference::names::{self, whole_kv_b};
use lockstep_reference::slice::{Cut, ExpertSplit, Placement, Split, cut, cut_values, placement};
use lockstep_reference::weights::{file_tensor, shape};
use lockstep_reference::{Format, ModelWeights, RawModel, RawTensor, RefError, RefParam, Weights};

use crate::checkpoint::oracle::Raw;
use crate::model::Param;
use crate::verify::param_map::reference_of;

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
    /// A part that has all columns.
    fn whole(bytes: Vec<u8>, row_bytes: usize, cols: usize, placement: Placement, format: &'static str) -> Self {
        Expected { bytes, row_bytes, own: 0..cols, stored: 0..cols, placement, format }
    }

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
    /// The reading of `raw`, with the file's eps, which no byte depends on.
    pub fn new(raw: &'a Raw<'a>) -> Result<Self, RefError> {
        let config = RefConfig::from_raw(raw, Eps::File)?;
        let weights = ModelWeights::new(raw, &config);
        Ok(Oracle { raw, config, weights })
    }

    /// The parameters as plain values.
    pub fn weights(&self) -> &ModelWeights<'a> {
        &self.weights
    }

    /// Every parameter of the trunk: embedding, layers, final norm, head.
    pub fn trunk(&self) -> Vec<(Option<usize>, RefParam)> {
        let c = &self.config;
        let of = |layer| names::ALL.into_iter().filter(move |p| exists(c, *p, layer)).map(move |p| (layer, p));
        of(None).chain((0..c.layers).flat_map(|layer| of(Some(layer)))).collect()
    }

    /// The part of rank `rank` of `tp`.
    pub fn expected(&self, param: Param, tp: usize, rank: usize) -> Result<Expected, RefError> {
        let (c, name) = (&self.config, reference_of(param.kind));
        let split = Split { tp, rank, experts: ExpertSplit::Tensor };
        let cols = shape(c, name).last().copied().unwrap_or(1);
        let tensors = self.tensors(param)?;
        // Whether the engine keeps a small parameter plain is its own choice; that of a large one is not.
        if param.kind.is_plain() && may_be_plain(c, name) {
            let placement = placement(c, name, split)?;
            let mut bytes = Vec::new();
            for (file_name, tensor) in &tensors {
                bytes.extend(plain(file_name, tensor)?);
            }
            return Ok(Expected::whole(bytes, 4 * cols, cols, placement, "F32"));
        }
        if tensors.is_empty() {
            return self.of_whole_kv_b(param, split, cols);
        }
        let mut joined: Option<(Cut, BlockFormat)> = None;
        for (file_name, tensor) in &tensors {
            let format = format_of(file_name, tensor)?;
            let part = cut(c, name, tensor, split)?;
            match &mut joined {
                None => joined = Some((part, format)),
                Some((all, _)) => all.bytes.extend(part.bytes),
            }
        }
        let Some((part, format)) = joined else { return Err(RefError::Form { param: name, asked: "tensor" }) };
        let mut expected = Expected::whole(part.bytes, 0, cols, part.placement, format.name);
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
        if name == RefParam::VB {
            let part = cut_values(c, &tensor, split)?;
            let format = block_format(tensor.type_id).map_or("?", |f| f.name);
            let rows = range(&part.placement).len() * c.value;
            let row_bytes = part.bytes.len() / rows.max(1);
            return Ok(Expected::whole(part.bytes, row_bytes, cols, part.placement, format));
        }
        let placement = placement(c, name, split)?;
        let heads = self.weights.heads(Some(layer), name)?;
        let part = heads.slice(ndarray::s![range(&placement), .., ..]);
        let bytes = part.iter().flat_map(|v| v.to_le_bytes()).collect();
        Ok(Expected::whole(bytes, 4 * cols, cols, placement, "F32"))
    }

    /// The file's tensors of a parameter: one, or one per expert; none where `kv_b` is whole.
    pub fn tensors(&self, param: Param) -> Result<Vec<(String, RawTensor<'_>)>, RefError> {
        let name = reference_of(param.kind);
        let find = |expert| file_tensor(self.raw, &self.config, param.layer, name, expert);
        if is_expert_stack(name) && self.raw.format() == Format::Hf {
            return (0..self.config.experts).filter_map(|e| find(Some(e)).transpose()).collect();
        }
        Ok(find(None)?.into_iter().collect())
    }

    /// The file's tensors that hold a parameter, also where it shares one with another.
    pub fn kept(&self, param: Param) -> Result<Vec<(String, RawTensor<'_>)>, RefError> {
        let own = self.tensors(param)?;
        let whole = || {
            let name = whole_kv_b(self.raw.format(), param.layer?);
            Some((name.clone(), self.raw.tensor(&name)?))
        };
        Ok(if own.is_empty() { whole().into_iter().collect() } else { own })
    }

    /// Row `row` of every matrix of a parameter, without what else is in them.
    pub fn row_of_each(&self, param: Param, row: usize) -> Result<Vec<Vec<f32>>, RefError> {
        let name = reference_of(param.kind);
        let tensors = self.tensors(param)?;
        if tensors.is_empty() {
            let heads = self.weights.heads(param.layer, name)?;
            return Ok(heads.outer_iter().map(|head| head.row(row).to_vec()).collect());
        }
        let axes = shape(&self.config, name);
        let cols = axes.last().copied().unwrap_or(1);
        let rows = if axes.len() > 1 { axes[axes.len() - 2] } else { 1 };
        let mut found = Vec::new();
        for (file_name, tensor) in &tensors {
            let format = format_of(file_name, tensor)?;
            let size = tensor.bytes.len() / (tensor.ne.iter().product::<usize>() / cols).max(1);
            let starts = (0..tensor.bytes.len()).step_by((rows * size).max(1));
            found.extend(
                starts.filter_map(|at| format.decode(tensor.bytes.get(at + row * size..at + (row + 1) * size)?)),
            );
        }
        Ok(found)
    }
}

/// Whether the trunk has a parameter outside the layers (`None`), or in a layer of it.
fn exists(c: &RefConfig, param: RefParam, layer: Option<usize>) -> bool {
    use RefParam::*;
    let Some(layer) = layer else { return matches!(param, Embed | FinalNorm | Head) };
    match param {
        Embed | FinalNorm | Head => false,
        AttnNorm | QA | QANorm | QB | KvA | KvANorm | KB | VB | O | FfnNorm => true,
        // Shared layers take the choice of the last full one.
        IndexQB | IndexK | IndexKNormW | IndexKNormB | IndexProj => c.index_full.get(layer).copied().unwrap_or(false),
        Gate | Up | Down => !c.is_moe(layer),
        Router | RouterBias | GateExps | UpExps | DownExps => c.is_moe(layer),
        GateShared | UpShared | DownShared => c.is_moe(layer) && c.shared_experts > 0,
        // Those of the MTP layers, which come after the trunk.
        EhProj | ENorm | HNorm | MtpHeadNorm => false,
    }
}

/// Parameters that may be kept as f32 whatever the file's type is: vectors, and the router, whose logits decide choices.
fn may_be_plain(c: &RefConfig, param: RefParam) -> bool {
    param == RefParam::Router || shape(c, param).len() == 1
}

/// Parameters of which each expert has its own.
pub(super) fn is_expert_stack(param: RefParam) -> bool {
    matches!(param, RefParam::GateExps | RefParam::UpExps | RefParam::DownExps)
}

fn format_of(name: &str, tensor: &RawTensor<'_>) -> Result<BlockFormat, RefError> {
    block_format(tensor.type_id).ok_or_else(|| RefError::Format { name: name.to_string(), type_id: tensor.type_id })
}

/// A tensor's values as little-endian f32, by the reference's dequantiser.
fn plain(name: &str, tensor: &RawTensor<'_>) -> Result<Vec<u8>, RefError> {
    let format = format_of(name, tensor)?;
    let values = format.decode(&tensor.bytes).ok_or_else(|| RefError::Tensor {
        name: name.to_string(),
        expected: format!("whole {} blocks", format.name),
        found: format!("{} bytes", tensor.bytes.len()),
    })?;
    Ok(values.iter().flat_map(|v| v.to_le_bytes()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Checkpoint;

    /// The trunk of a golden model, and what of it may be plain.
    fn trunk(golden: &str) -> (Vec<(Option<usize>, RefParam)>, Vec<RefParam>) {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens").join(golden);
        let checkpoint = Checkpoint::open(Some(&path)).expect("a golden model");
        let raw = Raw(checkpoint.source());
        let oracle = Oracle::new(&raw).expect("the reference reads it");
        let plain = names::ALL.into_iter().filter(|p| may_be_plain(&oracle.config, *p)).collect();
        (oracle.trunk(), plain)
    }

    #[test]
    fn layers_have_what_their_kind_has() {
        use RefParam::*;
        let (all, plain) = trunk("models/nano52-Q2_K.gguf");
        let layers = |param| all.iter().filter(|(_, p)| *p == param).map(|(l, _)| *l).collect::<Vec<_>>();
        assert_eq!([layers(Embed), layers(FinalNorm), layers(Head)], [vec![None], vec![None], vec![None]]);
        assert_eq!(layers(QB).len(), layers(Gate).len() + layers(Router).len());
        assert!(!layers(IndexK).is_empty() && layers(IndexK).len() < layers(QB).len(), "shared layers have no indexer");
        assert!(layers(Gate).iter().all(|l| !layers(DownExps).contains(l) && !layers(UpShared).contains(l)));
        assert!(layers(EhProj).is_empty());
        let vectors = [AttnNorm, QANorm, KvANorm, IndexKNormW, IndexKNormB, FfnNorm, Router, RouterBias, FinalNorm];
        assert_eq!(plain, [&vectors[..], &[ENorm, HNorm, MtpHeadNorm]].concat());
    }
}
