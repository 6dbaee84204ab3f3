//! What people and machines read: verdicts, progress, terminal tables and JSON.

mod progress;
pub mod table;
mod verdict;

pub use progress::Progress;
pub use verdict::{Check, StageReport, Verdict};
