//! What `doctor` found.

use std::io;

use serde::Serialize;

use super::table::Table;
use super::{Check, Page, Record, Verdict};

/// The check that stands for GPUs where none is checked.
pub const GPUS: &str = "GPUs";

/// What `doctor` found on this host.
#[derive(Clone, Debug, Serialize)]
pub struct Checkup {
    /// The worst verdict.
    pub verdict: Verdict,
    /// The exit code.
    pub exit: u8,
    /// Whether sizes were small.
    pub quick: bool,
    /// The device that was asked for.
    pub device: Option<String>,
    /// The checks.
    pub checks: Vec<Check>,
}

impl Record for Checkup {
    fn text(&self, page: &mut Page<'_>) -> io::Result<()> {
        let mut table = Table::new(&["check", "verdict", "evidence"]);
        self.checks.iter().for_each(|c| table.row([c.name.as_str(), c.verdict.name(), &c.detail]));
        page.table(&table)?;
        page.gap()?;
        let none = self.checks.iter().any(|c| c.name == GPUS);
        page.verdict(self.verdict, if none { "; no GPU was checked" } else { "" })
    }
}
