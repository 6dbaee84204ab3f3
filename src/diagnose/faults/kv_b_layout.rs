//! KV_B_LAYOUT: k_b is read as [head][nope][latent], though it lies as [head][latent][nope].

use std::sync::Arc;

use lockstep_reference::Param;
use lockstep_reference::ndarray::Array3;

use super::decorate::{Decorations, Replaced};
use super::{Fault, param_of};
use crate::checkpoint::{Binding, Checkpoint};
use crate::diagnose::hypothesis::{Alter, Hypothesis, OpContext, on_ranks, value_of};
use crate::model::Kind;
use crate::quant::{QuantType, dequantise};
use crate::verify::altered::{Key, Value};

/// See the module.
pub struct KvBLayout;

impl Fault for KvBLayout {
    fn kind(&self) -> &'static str {
        "KV_B_LAYOUT"
    }

    fn about(&self) -> &'static str {
        "k_b read as [head][nope][latent] instead of [head][latent][nope]"
    }

    fn sites(&self, checkpoint: &Checkpoint, _: usize) -> Vec<String> {
        let layers = 0..checkpoint.config().layers;
        let params = layers.map(|l| crate::model::Param { layer: Some(l), kind: Kind::KB });
        params.filter(|p| matches!(checkpoint.binding(*p), Some(Binding::Whole(_)))).map(|p| p.to_string()).collect()
    }

    fn inject(&self, checkpoint: &Checkpoint, site: &str, rank: Option<usize>, into: &mut Decorations) {
        let c = checkpoint.config();
        let name = param_of(c, site).and_then(|p| checkpoint.binding(p)).map(|b| b.names()[0].clone());
        let Some((name, view)) = name.and_then(|n| checkpoint.source().tensor(&n).map(|v| (n, v))) else { return };
        let mut values = vec![0.0f32; c.heads * c.kv_lora * c.nope];
        let Some(ty) = view.ty.quant else { return };
        if dequantise(ty, &view.bytes, &mut values).is_err() {
            return; // the clean load refuses such a tensor by name
        }
        let mut bytes = Vec::with_capacity(values.len() * 4);
        for head in values.chunks_exact(c.kv_lora * c.nope) {
            for latent in 0..c.kv_lora {
                for nope in 0..c.nope {
                    bytes.extend_from_slice(&head[nope * c.kv_lora + latent].to_le_bytes());
                }
            }
        }
        into.tensors.push((rank, name, Replaced { ty: QuantType::F32.info(), bytes: Arc::new(bytes) }));
    }

    fn hypotheses<'a>(&self, op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
        if !op.params().contains(&(op.place.layer(), Param::KB)) {
            return Vec::new();
        }
        let scope = op.ranks.clone();
        let change = move |rank, key: Key| {
            if (key.0, key.1) != (op.place.layer(), Param::KB) {
                return Ok(None);
            }
            let base = value_of(op.weights, key)?;
            let Value::Heads(heads) = &base else { return Ok(None) };
            let (count, latent, nope) = heads.dim();
            // Element i of a head's flat values stands at row i / latent of a [nope][latent] matrix.
            let flat = |h: usize, i: usize| heads[[h, i / nope, i % nope]];
            let misread = Array3::from_shape_fn((count, latent, nope), |(h, l, n)| flat(h, n * latent + l));
            on_ranks(&|r| op.placement(Param::KB, r), &scope, rank, key, &base, Value::Heads(Arc::new(misread)))
                .map(Some)
        };
        vec![Hypothesis {
            kind: self.kind(),
            site: op.tensor(op.place.layer(), Param::KB),
            statement: "k_b is read as [head][nope][latent]; the file holds [head][latent][nope]".into(),
            overturn: "transpose k_b per head on load; if q_absorbed still diverges, the layout was not at fault"
                .into(),
            ranks: op.ranks.clone(),
            also: Vec::new(),
            reads: None,
            alter: Alter::Weights(Box::new(change)),
        }]
    }
}
