//! What kernels take by value: structs with the layout of their twins in `kernels/cu`.

use super::gpu::args;
use super::virtual_ranks::MOST_RANKS;
use crate::device::Router;
use crate::model::Gating;

/// Queries of attention, as its kernels take them.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Queries {
    pub latent: u64,
    pub latent_row: i64,
    pub latent_start: i32,
    pub latent_stride: i32,
    pub latent_width: i32,
    pub rope: u64,
    pub rope_row: i64,
    pub rope_start: i32,
    pub rope_stride: i32,
    pub rope_width: i32,
    pub heads: i32,
}

/// Queries of the indexer, as its kernels take them.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct IndexQueries {
    pub q: u64,
    pub q_row: i64,
    pub start: i32,
    pub stride: i32,
    pub width: i32,
    pub heads: i32,
    pub weights: u64,
    pub w_row: i64,
}

/// The router's constants, as its kernels take them.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct RouterArg {
    pub experts: i32,
    pub used: i32,
    pub groups: i32,
    pub groups_used: i32,
    pub softmax: i32,
    pub normalise: i32,
    pub factor: f32,
}

/// Addresses of all ranks' buffers.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Ranks {
    pub at: [u64; MOST_RANKS],
}

args!(Queries, IndexQueries, RouterArg, Ranks);

impl From<&Router> for RouterArg {
    fn from(r: &Router) -> Self {
        RouterArg {
            experts: r.experts as i32,
            used: r.used as i32,
            groups: r.groups as i32,
            groups_used: r.groups_used as i32,
            softmax: i32::from(r.gating == Gating::Softmax),
            normalise: i32::from(r.normalise),
            factor: r.factor,
        }
    }
}
