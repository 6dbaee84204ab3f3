//! Where ranks meet. A collective is exact in its order: partial sums are added in rank order in f32, so that every
//! rank holds the same bits.

pub mod meeting;
#[cfg(feature = "cuda")]
pub mod nccl;
#[cfg(feature = "cuda")]
pub mod shared_gpu;
mod threads;
pub mod timed;

pub use threads::Threads;

use std::time::Duration;

use crate::device::Device;
use crate::model::Place;

/// A meeting that failed.
#[derive(Clone, Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CommError {
    #[error("rank {absent:?} did not reach {site} within {} s; rank {rank} waited", waited.as_secs())]
    Timeout { rank: usize, absent: Vec<usize>, site: String, waited: Duration },
    #[error("rank {rank} stopped at {site}: another rank gave up: {reason}")]
    Aborted { rank: usize, site: String, reason: String },
    #[error("ranks do not agree at {site}: expected {expected} values, rank {rank} came with {found}")]
    Mismatch { rank: usize, site: String, expected: usize, found: usize },
    #[error("rank {rank} at {site}: {reason}")]
    Device { rank: usize, site: String, reason: String },
}

/// Collective operations over the buffers of device `D`. Decorated by fault injection.
pub trait Collective<D: Device>: Send + Sync {
    /// Number of ranks.
    fn tp(&self) -> usize;
    /// Adds `[n][width]` of every rank's `buf` in rank order; every rank receives the sum.
    ///
    /// # Errors
    /// A rank that does not come in time, that gave up, or that brings another size.
    fn all_reduce(
        &self,
        rank: usize,
        site: Place,
        device: &D,
        buf: &mut D::Buf,
        n: usize,
        width: usize,
    ) -> Result<(), CommError>;
    /// Lets every rank see what each has found by [`Device::best`] for `n` rows.
    ///
    /// # Errors
    /// As [`Collective::all_reduce`].
    fn share_best(&self, _rank: usize, _site: Place, _device: &D, _n: usize) -> Result<(), CommError> {
        Ok(())
    }
    /// Wakes every waiting rank with an error; later meetings fail too.
    fn abort(&self, reason: &str);
}

/// One rank alone: there is nobody to meet.
#[derive(Debug, Default)]
pub struct Solo;

impl<D: Device> Collective<D> for Solo {
    fn tp(&self) -> usize {
        1
    }
    fn all_reduce(&self, _: usize, _: Place, _: &D, _: &mut D::Buf, _: usize, _: usize) -> Result<(), CommError> {
        Ok(())
    }
    fn abort(&self, _: &str) {}
}
