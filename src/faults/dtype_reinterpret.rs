//! DTYPE_REINTERPRET: a quantised tensor's bytes are read as plain numbers, because the parameter was created
//! unquantised.

use std::sync::Arc;

use super::decorate::{Decorations, Replaced};
use super::{Fault, Site, Target, trunk};
use crate::checkpoint::Binding;
use crate::quant::QuantType;

/// The kind.
pub const FAULT: Fault =
    Fault { kind: "DTYPE_REINTERPRET", about: "a quantised tensor's bytes read as plain bf16", sites, inject };

/// `values` plain numbers of type `ty` from a tensor's bytes, which are too few or too many: read from the start again
/// when they end.
pub fn reread(bytes: &[u8], ty: QuantType, values: usize) -> Vec<u8> {
    bytes.iter().copied().cycle().take(ty.row_bytes(values)).collect()
}

fn sites(target: &Target<'_>) -> Vec<Site> {
    let quantised = |site: &Site| {
        let Site::Param(param) = site else { return false };
        let whole = matches!(target.checkpoint.binding(*param), Some(Binding::Whole(_)));
        whole && target.checkpoint.type_of(*param).is_ok_and(|t| !t.is_plain())
    };
    trunk(target.config()).filter(quantised).collect()
}

fn inject(target: &Target<'_>, site: Site, rank: Option<usize>, into: &mut Decorations) {
    if let Some((name, view)) = target.tensor(site) {
        let values = view.ne.iter().product::<u64>() as usize;
        let bytes = Arc::new(reread(&view.bytes, QuantType::BF16, values));
        into.tensors.push((rank, name, Replaced { ty: QuantType::BF16.info(), bytes }));
    }
}
