//! What people and machines read: verdicts, progress, and what each command found as a record with two renderings, text
//! and JSON.

pub mod bench;
pub mod bisection;
pub mod checkup;
mod cost;
pub mod covered;
pub mod inspection;
pub mod json;
mod page;
mod progress;
mod run;
pub mod table;
mod verdict;
pub mod verification;

use std::io;

use serde::Serialize;

pub use cost::Cost;
pub use page::{Look, Page, clean, clean_lines};
pub use progress::Progress;
pub use run::Run;
pub use verdict::{Check, Compared, Reach, StageReport, Verdict};

/// What a command found. Serialised it is the `--json` document, whose schema is in `docs/schemas`.
pub trait Record: Serialize {
    /// For people.
    ///
    /// # Errors
    /// Those of the output.
    fn text(&self, page: &mut Page<'_>) -> io::Result<()>;
}
