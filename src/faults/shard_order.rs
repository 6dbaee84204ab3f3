//! SHARD_ORDER: the parts of a fused parameter are joined in another order than the one in which they are split off.

use super::{Fault, Site, groups};

/// The kind.
pub const FAULT: Fault = Fault {
    kind: "SHARD_ORDER",
    about: "the first two parts of a fused parameter joined in swapped order",
    sites: |target| {
        let c = target.config();
        groups(c, |g, l| g.parts(c, l).len() > 1).collect()
    },
    inject: |target, site, rank, into| {
        if let Site::Group(group, layer) = site {
            let mut order: Vec<usize> = (0..group.parts(target.config(), layer).len()).collect();
            order.swap(0, 1);
            into.orders.push((rank, group, layer, order));
        }
    },
};
