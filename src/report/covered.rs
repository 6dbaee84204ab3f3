//! What a run of `verify` looked at, and what it took on trust: a verdict says no more than this.

use std::io;

use serde::Serialize;

use super::table::plural;
use super::{Page, Reach, StageReport, Verdict};

/// A number of the metadata that no tensor contradicts or confirms.
#[derive(Clone, Debug, Serialize)]
pub struct OnTrust {
    /// Its name, as `inspect` lists it.
    pub name: &'static str,
    /// Its value.
    pub value: String,
    /// The key, or the rule, that it comes from.
    pub source: String,
}

/// A stage that could not apply.
#[derive(Clone, Debug, Serialize)]
pub struct Skipped {
    /// The stage.
    pub stage: &'static str,
    /// Why.
    pub why: String,
}

/// What was covered.
#[derive(Clone, Debug, Serialize)]
pub struct Covered {
    /// The checkpoint that values and metadata were compared with, if they were.
    pub baseline: Option<String>,
    /// Metadata taken on trust; none where a baseline says the same.
    pub metadata_on_trust: Vec<OnTrust>,
    /// Parameters whose values were taken on trust.
    pub parameters_on_trust: usize,
    /// How far the stages reached.
    #[serde(flatten)]
    pub reach: Reach,
    /// Positions that the model's context has.
    pub context: usize,
    /// Tokens of the prompt.
    pub tokens: usize,
    /// Experts of all layers.
    pub all_experts: usize,
    /// Whether operations were judged column by column, too: not at few rows.
    pub columns_judged: bool,
    /// Why nothing was said of the keys that sparse attention chooses, where a dump could not show it.
    pub choice_unjudged: Option<String>,
    /// The block that predicts further tokens.
    pub mtp: &'static str,
    /// What stage sense could tell of the file itself, where it ran.
    pub sense: Option<String>,
    /// Stages that could not apply.
    pub not_applicable: Vec<Skipped>,
}

impl Covered {
    /// The reach of the stages that ended, and those that could not apply.
    pub fn of(stages: &[StageReport]) -> (Reach, Vec<Skipped>) {
        let reach = stages.iter().fold(Reach::default(), |reach, stage| reach.max(stage.reach));
        let skipped = stages.iter().filter(|stage| stage.verdict() == Verdict::NotApplicable);
        let skipped = skipped.map(|stage| Skipped { stage: stage.stage, why: stage.summary.clone() });
        (reach, skipped.collect())
    }

    /// As paragraphs.
    ///
    /// # Errors
    /// Those of the output.
    pub fn text(&self, page: &mut Page<'_>) -> io::Result<()> {
        let Reach { positions, rows, experts, sequences } = self.reach;
        let Covered { context, tokens, all_experts, .. } = self;
        page.line(match positions {
            0 => "Covered: the file alone; no token was run.".into(),
            _ => {
                let mut parts = vec![format!("{positions} of {context} positions")];
                if rows > 0 {
                    let few = if self.columns_judged { "" } else { ", too few to judge single columns by" };
                    parts.push(format!("operations at {rows} of {tokens} rows{few}"));
                    parts.push(format!("products of {experts} of {all_experts} experts"));
                }
                parts.push(format!("up to {} in a step", plural(sequences, "sequence")));
                format!("Covered: {}.", parts.join("; "))
            }
        })?;
        let mut trusted = Vec::new();
        if self.parameters_on_trust > 0 {
            trusted.push(format!("the values of {} parameters", self.parameters_on_trust));
        }
        let metadata = self.metadata_on_trust.iter().map(|t| format!("{} {} ({})", t.name, t.value, t.source));
        trusted.extend(metadata);
        let trusted = trusted.join(", ");
        if let Some(baseline) = &self.baseline {
            page.line(format!("Compared with {baseline}."))?;
        }
        if !trusted.is_empty() {
            let more = if self.baseline.is_none() { " --baseline compares it." } else { "" };
            page.line(format!("On trust, as nothing in the file checks it: {trusted}.{more}"))?;
        }
        if let Some(sense) = &self.sense {
            page.line(format!("By itself the file says: {sense}."))?;
        }
        if let Some(why) = &self.choice_unjudged {
            page.line(format!("Sparse attention: {why}."))?;
        }
        page.line(format!("MTP block: {}.", self.mtp))?;
        let skipped: Vec<String> = self.not_applicable.iter().map(|s| format!("{} ({})", s.stage, s.why)).collect();
        match skipped.is_empty() {
            true => Ok(()),
            false => page.line(format!("Not applicable: {}.", skipped.join("; "))),
        }
    }
}
