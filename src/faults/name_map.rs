//! NAME_MAP: a name was altered on the way from file to parameter, so the parameter was never filled and holds zeros.

use std::sync::Arc;

use super::decorate::Replaced;
use super::{Fault, Site, trunk};

/// The kind.
pub const FAULT: Fault = Fault {
    kind: "NAME_MAP",
    about: "a mangled name leaves a parameter unfilled (zeros)",
    sites: |target| trunk(target.config()).collect(),
    inject: |target, site, rank, into| {
        let Site::Param(param) = site else { return };
        for name in target.checkpoint.binding(param).map(|b| b.names()).unwrap_or_default() {
            if let Some(view) = target.checkpoint.source().tensor(name) {
                let bytes = Arc::new(vec![0; view.bytes.len()]);
                into.tensors.push((rank, name.clone(), Replaced { ty: view.ty, bytes }));
            }
        }
    },
};
