//! Where ranks meet. They meet in collectives only; a rank that does not come is named, and a rank that fails takes the
//! others out with it.

pub mod meeting;
pub mod threads;

pub use threads::Threads;

use std::time::Duration;

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

/// A way for ranks to meet.
pub trait Collective: Send + Sync {
    /// Number of ranks.
    fn tp(&self) -> usize;
    /// Wakes every waiting rank with an error; later meetings fail too.
    fn abort(&self, reason: &str);
}
