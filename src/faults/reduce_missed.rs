//! REDUCE_MISSED: a rank's partial sum never enters the all-reduce, though the rank comes to the meeting and its
//! parameters are right.

use super::around::OpFault;
use super::decorate::Decorations;
use super::{Fault, Site, Target};
use crate::device::Op;

/// The kind.
pub const FAULT: Fault = Fault {
    kind: "REDUCE_MISSED",
    about: "one rank (1 unless typed) contributes zeros to an all-reduce in place of its partial sum",
    sites,
    inject,
};

/// The rank that contributes nothing where none was typed; every degree with a reduction has it.
const USUAL_RANK: usize = 1;

fn sites(target: &Target<'_>) -> Vec<Site> {
    target.places(|call| target.tp > 1 && matches!(call.op, Op::AllReduce { .. }))
}

fn inject(_: &Target<'_>, site: Site, rank: Option<usize>, into: &mut Decorations) {
    if let Site::Place(place) = site {
        into.ops.push((rank.or(Some(USUAL_RANK)), place, OpFault::NoContribution));
    }
}
