//! What `verify` found: stages with their checks. Its text comes stage by stage, as they end.

use std::io;

use serde::Serialize;

use super::covered::Covered;
use super::table::Table;
use super::{Check, Page, Record, Run, StageReport, Verdict};

/// What `verify` found.
#[derive(Clone, Debug, Serialize)]
pub struct Verification {
    /// What was looked at.
    #[serde(flatten)]
    pub run: Run,
    /// Token ids of the prompt.
    pub ids: Vec<u32>,
    /// Rows at which operations were judged.
    pub rows: Vec<usize>,
    /// Seed of these rows.
    pub seed: u64,
    /// The worst verdict of all stages.
    pub verdict: Verdict,
    /// The exit code.
    pub exit: u8,
    /// Why it ended before its last stage, if it did.
    pub incomplete: Option<String>,
    /// The stages that ended, in order.
    pub stages: Vec<StageReport>,
    /// What they covered, once all ended.
    pub covered: Option<Covered>,
    /// Whether every check is shown, not only those that did not match.
    #[serde(skip)]
    pub all: bool,
    /// What else there is to say behind the verdict.
    #[serde(skip)]
    pub advice: &'static str,
}

/// Checks shown without `--all`.
const SHOWN: usize = 20;

/// The table of stages, and the columns of all but its last.
const COLUMNS: [&str; 5] = ["stage", "verdict", ">checks", ">s", "what was seen"];
const WIDTHS: [u16; 4] = [13, 12, 8, 7];

impl Verification {
    /// Takes in a stage that ended.
    pub fn add(&mut self, report: StageReport) {
        self.stages.push(report);
        self.verdict = self.stages.iter().map(StageReport::verdict).max().unwrap_or(Verdict::Unmeasured);
    }

    /// It ended before its last stage, so that it is no pass whatever was found.
    pub fn cut(&mut self, why: String, exit: u8) {
        self.verdict = self.verdict.max(Verdict::Unmeasured);
        (self.incomplete, self.exit) = (Some(why), exit);
    }

    /// What stands above the stages.
    ///
    /// # Errors
    /// Those of the output, as for all that follow.
    pub fn head(&self, page: &mut Page<'_>) -> io::Result<()> {
        page.line(format!("{}, rows judged with seed {}", self.run.line(), self.seed))?;
        page.gap()?;
        page.table(&Table::streamed(&COLUMNS, &WIDTHS))?;
        page.flush()
    }

    /// One stage.
    pub fn stage(report: &StageReport, page: &mut Page<'_>) -> io::Result<()> {
        let StageReport { stage, summary, made, seconds, .. } = report;
        let (verdict, made, seconds) = (report.verdict().name(), made.to_string(), format!("{seconds:.1}"));
        page.table(&Table::next(&COLUMNS, &WIDTHS, [stage, verdict, &made, &seconds, summary]))?;
        if let Some(cost) = &report.cost {
            page.line(format!("    {}", cost.line()))?;
        }
        page.flush()
    }

    /// What stands below them: checks that are worth a line, and the verdict.
    pub fn foot(&self, page: &mut Page<'_>) -> io::Result<()> {
        let shown = |c: &&Check| self.all || !matches!(c.verdict, Verdict::Match | Verdict::NotApplicable);
        let rows = self.stages.iter().flat_map(|r| r.checks.iter().filter(shown).map(|c| (r.stage, c)));
        let rows: Vec<(&str, &Check)> = rows.collect();
        let mut checks = Table::new(&["stage", "check", "verdict", "evidence"]);
        let most = if self.all { usize::MAX } else { SHOWN };
        for (stage, c) in rows.iter().take(most) {
            checks.row([stage, c.name.as_str(), c.verdict.name(), &c.detail]);
        }
        page.gap()?;
        if !checks.is_empty() {
            page.table(&checks)?;
            if rows.len() > most {
                page.line(format!("and {} more; --all or --json shows every one", rows.len() - most))?;
            }
            page.gap()?;
        }
        if let Some(covered) = &self.covered {
            covered.text(page)?;
            page.gap()?;
        }
        match &self.incomplete {
            Some(why) => page.verdict(self.verdict, &format!(", INCOMPLETE: {why}; what ended before stands above")),
            None => page.verdict(self.verdict, self.advice),
        }
    }
}

impl Record for Verification {
    fn text(&self, page: &mut Page<'_>) -> io::Result<()> {
        self.head(page)?;
        self.stages.iter().try_for_each(|report| Verification::stage(report, page))?;
        self.foot(page)
    }
}
