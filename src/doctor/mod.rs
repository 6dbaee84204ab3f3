//! The host under the engine: driver, libraries, GPUs, their memory and the links between them. A machine that copies or
//! adds wrongly makes every later verdict worthless, so this is asked first, and exactly: data of a known pattern, sums of
//! integers. One file per family of checks.

#[cfg(feature = "cuda")]
mod copies;
#[cfg(feature = "cuda")]
pub mod gpus;
pub mod host;
#[cfg(feature = "cuda")]
mod memory;
#[cfg(feature = "cuda")]
mod nccl;
#[cfg(feature = "cuda")]
mod peers;
#[cfg(feature = "cuda")]
mod probe;
#[cfg(feature = "cuda")]
pub mod software;
#[cfg(feature = "cuda")]
mod virtual_ranks;
#[cfg(feature = "cuda")]
mod watch;

use serde_json::{Value as Json, json};

use crate::report::{Check, Verdict};

/// A check and what was measured on the way.
#[derive(Clone, Debug)]
pub struct Finding {
    /// What, the verdict, the evidence.
    pub check: Check,
    /// Measurements for machines; bytes, seconds, bytes per second.
    pub data: Json,
}

impl Finding {
    /// A finding with its measurements.
    pub fn new(name: impl Into<String>, verdict: Verdict, detail: impl Into<String>, data: Json) -> Self {
        Finding { check: Check::new(name, verdict, detail), data }
    }

    /// A finding without any.
    pub fn plain(name: impl Into<String>, verdict: Verdict, detail: impl Into<String>) -> Self {
        Finding::new(name, verdict, detail, Json::Null)
    }

    /// For `--json`.
    pub fn json(&self) -> Json {
        let Check { name, verdict, detail, .. } = &self.check;
        json!({ "name": name, "verdict": verdict.name(), "detail": detail, "data": self.data })
    }
}
