//! KV_B_LAYOUT: k_b is read as `[head][nope][latent]`, though it lies as `[head][latent][nope]`.

use std::sync::Arc;

use super::decorate::Replaced;
use super::{Fault, Site};
use crate::model::Kind;
use crate::quant::{QuantType, dequantise};

/// The kind.
pub const FAULT: Fault = Fault {
    kind: "KV_B_LAYOUT",
    about: "k_b read as [head][nope][latent] instead of [head][latent][nope]",
    sites: |target| {
        let is_key = |site: &Site| matches!(site, Site::Param(p) if p.kind == Kind::KB);
        target.whole().filter(is_key).collect()
    },
    inject: |target, site, rank, into| {
        let c = target.config();
        let Some((name, view)) = target.tensor(site) else { return };
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
    },
};
