//! SHARD_ORDER: the parts of a fused parameter are joined in another order than the one in which they are split off.

use super::decorate::Decorations;
use super::{Fault, Site, Target, groups};

/// The kind.
pub const FAULT: Fault = Fault {
    kind: "SHARD_ORDER",
    about: "the first two parts of a fused parameter joined in swapped order",
    sites,
    inject,
};

fn sites(target: &Target<'_>) -> Vec<Site> {
    let c = target.config();
    groups(c, |g, l| g.parts(c, l).len() > 1).collect()
}

fn inject(target: &Target<'_>, site: Site, rank: Option<usize>, into: &mut Decorations) {
    if let Site::Group(group, layer) = site {
        let mut order: Vec<usize> = (0..group.parts(target.config(), layer).len()).collect();
        order.swap(0, 1);
        into.orders.push((rank, group, layer, order));
    }
}
