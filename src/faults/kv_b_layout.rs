//! KV_B_LAYOUT: k_b is read as `[head][nope][latent]`, though it lies as `[head][latent][nope]`.

use std::sync::Arc;

use super::decorate::{Decorations, Replaced};
use super::{Fault, Site, Target, trunk};
use crate::checkpoint::Binding;
use crate::model::Kind;
use crate::quant::{QuantType, dequantise};

/// The kind.
pub const FAULT: Fault = Fault {
    kind: "KV_B_LAYOUT",
    about: "k_b read as [head][nope][latent] instead of [head][latent][nope]",
    sites,
    inject,
};

fn sites(target: &Target<'_>) -> Vec<Site> {
    let whole = |site: &Site| match site {
        Site::Param(p) if p.kind == Kind::KB => matches!(target.checkpoint.binding(*p), Some(Binding::Whole(_))),
        _ => false,
    };
    trunk(target.config()).filter(whole).collect()
}

fn inject(target: &Target<'_>, site: Site, rank: Option<usize>, into: &mut Decorations) {
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
}
