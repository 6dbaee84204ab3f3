//! OP_NOISE: an operation whose results are off in a way that no kind of the catalogue explains. It exists so that the
//! tool can be seen to say UNKNOWN instead of a wrong name.

use super::around::OpFault;
use super::decorate::Decorations;
use super::{Fault, Site, Target};
use crate::model::Point;

/// The kind.
pub const FAULT: Fault = Fault {
    kind: "OP_NOISE",
    about: "results of an operation off by 1 %, or choices exchanged; explained by nothing, so bisect must say UNKNOWN",
    sites,
    inject,
};

fn sites(target: &Target<'_>) -> Vec<Site> {
    target.places(|call| call.at.point != Point::NextToken)
}

fn inject(_: &Target<'_>, site: Site, rank: Option<usize>, into: &mut Decorations) {
    if let Site::Place(place) = site {
        into.ops.push((rank, place, OpFault::Damaged(None)));
    }
}
