//! DTYPE_REINTERPRET: a quantised tensor's bytes are read as plain numbers, because the parameter was created
//! unquantised.

use std::sync::Arc;

use super::decorate::Replaced;
use super::{Fault, Site};
use crate::quant::QuantType;

/// The kind.
pub const FAULT: Fault = Fault {
    kind: "DTYPE_REINTERPRET",
    about: "a quantised tensor's bytes read as plain bf16",
    sites: |target| {
        let type_of = |site: &Site| if let Site::Param(p) = site { target.checkpoint.type_of(*p).ok() } else { None };
        target.whole().filter(|site| type_of(site).is_some_and(|ty| !ty.is_plain())).collect()
    },
    inject: |target, site, rank, into| {
        if let Some((name, view)) = target.tensor(site) {
            let values = view.ne.iter().product::<u64>() as usize;
            let bytes = Arc::new(reread(&view.bytes, QuantType::BF16, values));
            into.tensors.push((rank, name, Replaced { ty: QuantType::BF16.info(), bytes }));
        }
    },
};

/// `values` plain numbers of type `ty` from a tensor's bytes, which are too few or too many: read from the start again
/// when they end.
pub fn reread(bytes: &[u8], ty: QuantType, values: usize) -> Vec<u8> {
    bytes.iter().copied().cycle().take(ty.row_bytes(values)).collect()
}
