//! The checks, in order of certainty: cheap and exact first, so that blame never lands on a later part for an earlier
//! fault. One file per stage; each returns a [`StageReport`](crate::report::StageReport).

pub mod activations;
pub mod asks;
pub mod choice;
pub mod conventions;
mod disagreements;
pub mod feed;
pub mod file;
pub mod floor;
#[cfg(feature = "cuda")]
pub mod host;
pub mod invariants;
#[cfg(feature = "cuda")]
pub mod kernels;
pub mod logits;
mod misreported;
pub mod op;
pub mod operations;
pub mod param_map;
pub mod patched_weights;
pub mod producer;
pub mod reference_run;
pub mod replay;
mod replicas;
pub mod sense;
pub mod subject;
pub mod tokenizer;
pub mod weights;

pub use subject::Subject;

use crate::checkpoint::CheckpointError;
use crate::engine::EngineError;
use crate::tokenize::TokenizeError;

/// Why a stage could not run at all (not: what it found).
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum VerifyError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Tokenize(#[from] TokenizeError),
    #[error("reference: {0}")]
    Reference(String),
    #[error("reference: {0}")]
    Undecodable(String),
    #[error("{0}")]
    Choice(String),
    #[error(transparent)]
    Server(#[from] logits::server::http::HttpError),
    #[error("a value that was to replace the run's own does not fit its place, so the step ended there")]
    Replacement,
}

impl VerifyError {
    /// Whether it is the tool that lacks something: then nothing is said against the model.
    pub fn is_lack(&self) -> bool {
        match self {
            VerifyError::Engine(e) => e.is_lack(),
            VerifyError::Checkpoint(e) => e.is_lack(),
            VerifyError::Undecodable(_) => true,
            _ => false,
        }
    }
}

impl From<lockstep_reference::RefError> for VerifyError {
    fn from(e: lockstep_reference::RefError) -> Self {
        match e {
            lockstep_reference::RefError::Format { .. } => VerifyError::Undecodable(e.to_string()),
            e => VerifyError::Reference(e.to_string()),
        }
    }
}
