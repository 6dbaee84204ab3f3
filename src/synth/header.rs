//! What stands before the data: GLM-5's metadata for the widths asked for, and the tensors with the types that
//! converters give them.

use super::values::{Fill, Units};
use super::{Spec, SynthError, UNTRAINED, Widths, vocabulary};
use crate::checkpoint::{Naming, names};
use crate::gguf::Value;
use crate::gguf::write::NewTensor;
use crate::model::{self, Config, Kind, Metadata, Param, params};
use crate::quant::QuantType;

/// GLM-5's context. Below 2^20, so every layer has an indexer of its own.
const CONTEXT: u32 = 202_752;

struct Pairs<'a>(&'a [(String, Value)]);

impl Metadata for Pairs<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.0.iter().find(|(k, _)| k == key).map(|(_, v)| v)
    }

    fn is_hf(&self) -> bool {
        false
    }
}

/// All metadata of a model.
pub(super) fn metadata(spec: &Spec) -> Vec<(String, Value)> {
    let w = &spec.widths;
    let name = format!("Synthetic {}, {} layers, seed {}", w.name, spec.layers, spec.seed);
    let mut all: Vec<(String, Value)> = vec![
        ("general.architecture".into(), Value::Str(model::ARCHITECTURE.into())),
        ("general.type".into(), Value::Str("model".into())),
        ("general.name".into(), Value::Str(name)),
        ("general.description".into(), Value::Str("Random weights, for tests and benches".into())),
        ("general.quantization_version".into(), Value::U32(2)),
        (UNTRAINED.into(), Value::Bool(true)),
    ];
    for (key, value) in [
        ("block_count", spec.layers),
        ("nextn_predict_layers", 0),
        ("context_length", CONTEXT),
        ("embedding_length", w.hidden),
        ("feed_forward_length", w.ffn),
        ("attention.head_count", w.heads),
        // Absorbed attention has one key head, whose row and value prefix are the cached ones.
        ("attention.head_count_kv", 1),
        ("attention.key_length", w.kv_lora + w.rope),
        ("attention.value_length", w.kv_lora),
        ("attention.key_length_mla", w.nope + w.rope),
        ("attention.value_length_mla", w.v_head),
        ("attention.q_lora_rank", w.q_lora),
        ("attention.kv_lora_rank", w.kv_lora),
        ("rope.dimension_count", w.rope),
        ("leading_dense_block_count", spec.dense_layers),
        ("expert_count", w.experts),
        ("expert_used_count", w.experts_used),
        ("expert_shared_count", 1),
        ("expert_group_count", 1),
        ("expert_group_used_count", 1),
        ("expert_feed_forward_length", w.expert_ffn),
        ("expert_gating_func", 2), // sigmoid
        ("attention.indexer.head_count", w.index_heads),
        ("attention.indexer.key_length", w.index_dim),
        ("attention.indexer.top_k", w.top_k),
        ("vocab_size", w.vocab),
    ] {
        all.push((model::key(key), Value::U32(value)));
    }
    for (key, value) in
        [("attention.layer_norm_rms_epsilon", 1e-5), ("expert_weights_scale", 2.5), ("rope.freq_base", 1e6)]
    {
        all.push((model::key(key), Value::F32(value)));
    }
    all.push((model::key("expert_weights_norm"), Value::Bool(true)));
    all.extend(vocabulary::metadata(w.vocab as usize));
    all
}

/// The tensors with what fills them, in the order of published files: the head first, then by block, alphabetical
/// within. Errors: metadata that makes no model, a type that cannot hold a row.
pub(super) fn tensors(spec: &Spec, metadata: &[(String, Value)]) -> Result<Vec<(NewTensor, Fill)>, SynthError> {
    let config = Config::from_metadata(&Pairs(metadata), 0).map_err(|e| SynthError::Spec {
        what: "the sizes of the model",
        expected: format!("a {} model", model::ARCHITECTURE),
        found: e.to_string(),
    })?;
    let (mut all, mut units) = (Vec::new(), Units::default());
    for param in params::of_trunk(&config) {
        let Some(binding) = names::candidates(Naming::Gguf, param, 1).into_iter().next() else { continue };
        let Some(name) = binding.names().first().cloned() else { continue };
        let mut ne: Vec<u64> = param.kind.shape(&config).iter().map(|n| *n as u64).collect();
        while ne.len() > 1 && ne.last() == Some(&1) {
            ne.pop();
        }
        let ty = type_of(spec.ty, param, ne[0]);
        let fill = Fill::new(&mut units, spec.seed, &name, ty, distribution(param.kind, &spec.widths, ne[0]))?;
        all.push((param.layer, NewTensor { name, ne, ty: ty.info() }, fill));
    }
    all.sort_by(|(a_layer, a, _), (b_layer, b, _)| (a_layer, &a.name).cmp(&(b_layer, &b.name)));
    Ok(all.into_iter().map(|(_, tensor, fill)| (tensor, fill)).collect())
}

/// Vectors, router and the indexer's weights projection are F32 in every file. Of the rest `asked` decides, or else the
/// mixture: Q4_K, with Q6_K in the head and in the down projections of odd layers.
fn type_of(asked: Option<QuantType>, param: Param, cols: u64) -> QuantType {
    let is_down = matches!(param.kind, Kind::FfnDown | Kind::DownExps | Kind::DownShexp);
    let is_odd = param.layer.is_some_and(|l| l % 2 == 1);
    let ty = match (asked, param.kind) {
        (_, kind) if kind.is_plain() || kind == Kind::IndexProj => QuantType::F32,
        (Some(ty), _) => ty,
        (None, Kind::Output) => QuantType::Q6_K,
        (None, _) if is_down && is_odd => QuantType::Q6_K,
        (None, _) => QuantType::Q4_K,
    };
    if cols.is_multiple_of(ty.block() as u64) { ty } else { narrow(ty) }
}

/// The type that llama-quantize takes in place of one whose blocks do not divide a row, as those of k_b.
fn narrow(ty: QuantType) -> QuantType {
    match ty {
        QuantType::Q2_K | QuantType::Q3_K => QuantType::Q4_0,
        QuantType::Q4_K => QuantType::Q5_0,
        QuantType::Q5_K => QuantType::Q5_1,
        QuantType::Q6_K => QuantType::Q8_0,
        _ => QuantType::IQ4_NL,
    }
}

/// Mean and standard deviation of a parameter's values. A product keeps its operand's size when each weight has the
/// deviation 1/sqrt(values summed over); those are a row's columns, with these exceptions.
fn distribution(kind: Kind, widths: &Widths, cols: u64) -> (f32, f32) {
    let summed = |n: f64| (0.0, (1.0 / n.sqrt()) as f32);
    match kind {
        Kind::OutputNorm | Kind::AttnNorm | Kind::QANorm | Kind::KvANorm | Kind::IndexKNorm | Kind::FfnNorm => {
            (1.0, 0.1)
        }
        Kind::IndexKNormBias => (0.0, 0.1),
        // Of the order of the gaps between neighbouring scores, so that it changes some choices.
        Kind::RouterBias => (0.0, 0.01),
        // A row is taken as it is: the residual starts at 1 and differs from token to token.
        Kind::TokenEmbd => summed(1.0),
        // Stored transposed: keys are sums over the latent.
        Kind::KB => summed(f64::from(widths.kv_lora)),
        _ => summed(cols as f64),
    }
}
