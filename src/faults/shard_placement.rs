//! SHARD_PLACEMENT: ranks hold and use rank 0's range of a parameter instead of their own.

use super::{Fault, Site, groups, trunk};
use crate::shard::{Cut, Group};

/// The kind.
pub const FAULT: Fault = Fault {
    kind: "SHARD_PLACEMENT",
    about: "ranks use rank 0's range of a parameter: its bytes and its activation columns",
    sites: |target| {
        let c = target.config();
        let sharded = |site: &Site| matches!(site, Site::Param(p) if Cut::of(p.kind) != Cut::Replicated);
        let all = trunk(c).filter(sharded).chain(groups(c, |g, _| g != Group::QkvA));
        all.filter(|_| target.tp > 1).collect()
    },
    inject: |target, site, rank, into| match site {
        Site::Param(param) => into.placements.push((rank, param)),
        Site::Group(group, layer) => {
            into.placements.extend(group.parts(target.config(), layer).into_iter().map(|p| (rank, p)));
        }
        Site::Place(_) | Site::Setting(_) => {}
    },
};
