//! The catalogue's explaining half: what an operation looks like under each kind of fault, one file per kind.

mod config_value;
mod dsa_inactive;
mod dtype_reinterpret;
mod kv_b_layout;
mod name_map;
mod operation;
mod other_layer;
mod reduce_missed;
mod rounded;
mod shard_order;
mod shard_placement;
mod unit_order;

use super::hypothesis::{Hypothesis, OpContext};

/// Explanations of one kind for an operation that diverges.
pub type Explain = for<'a> fn(&'a OpContext<'a>) -> Vec<Hypothesis<'a>>;

/// Every kind that explains something, in the catalogue's order.
pub const EXPLANATIONS: [Explain; 12] = [
    shard_order::hypotheses,
    kv_b_layout::hypotheses,
    name_map::hypotheses,
    dtype_reinterpret::hypotheses,
    dsa_inactive::hypotheses,
    config_value::hypotheses,
    shard_placement::hypotheses,
    reduce_missed::hypotheses,
    operation::hypotheses,
    unit_order::hypotheses,
    other_layer::hypotheses,
    rounded::hypotheses,
];
