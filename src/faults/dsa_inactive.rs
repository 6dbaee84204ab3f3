//! DSA_INACTIVE: sparse attention was dropped and every visible key attended to. Clean up to top-k tokens, wrong beyond.

use super::around::OpFault;
use super::decorate::Decorations;
use super::{Fault, Site, Target};
use crate::device::Op;

/// The kind.
pub const FAULT: Fault = Fault {
    kind: "DSA_INACTIVE",
    about: "attention silently runs over all keys instead of the indexer's choice",
    sites,
    inject,
};

fn sites(target: &Target<'_>) -> Vec<Site> {
    target.places(|call| matches!(call.op, Op::Attend { chosen: Some(_), .. }))
}

fn inject(_: &Target<'_>, site: Site, rank: Option<usize>, into: &mut Decorations) {
    if let Site::Place(place) = site {
        into.ops.push((rank, place, OpFault::AllKeys));
    }
}
