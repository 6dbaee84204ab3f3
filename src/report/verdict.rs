//! Verdicts, checks and what a stage reports.

use serde_json::{Value as Json, json};

/// What was found. Ordered from best to worst, as a stage's verdict is the worst of its checks'.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// Cannot apply to this device or model; neutral.
    NotApplicable,
    /// Within its limit.
    Match,
    /// A warning.
    Drift,
    /// The path that was to be checked did not run: never a pass.
    Inactive,
    /// Could apply, but there was no floor or no data: never a pass.
    Unmeasured,
    /// Outside its limit.
    Divergent,
    /// The same input gave different bits.
    Nondeterministic,
    /// Links or memory are wrong; nothing else is judged.
    Host,
}

impl Verdict {
    /// The word in tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::NotApplicable => "N/A",
            Verdict::Match => "MATCH",
            Verdict::Drift => "DRIFT",
            Verdict::Inactive => "INACTIVE",
            Verdict::Unmeasured => "UNMEASURED",
            Verdict::Divergent => "DIVERGENT",
            Verdict::Nondeterministic => "NONDETERMINISTIC",
            Verdict::Host => "HOST",
        }
    }
}

/// One thing that was checked.
#[derive(Clone, Debug)]
pub struct Check {
    /// What: `layers.3.attn.q_a`, `blk.3.ffn_down rank 2`, `TP 1 = TP 8`.
    pub name: String,
    /// The verdict.
    pub verdict: Verdict,
    /// Evidence for people: what was expected, what was found, where, what to do next.
    pub detail: String,
    /// Error in units of the noise floor and its limit, where that is how it was judged.
    pub rho: Option<(f64, f64)>,
}

impl Check {
    /// A check judged by something exact.
    pub fn exact(name: impl Into<String>, good: bool, detail: impl Into<String>) -> Self {
        let verdict = if good { Verdict::Match } else { Verdict::Divergent };
        Check { name: name.into(), verdict, detail: detail.into(), rho: None }
    }

    /// A check with a verdict of its own.
    pub fn new(name: impl Into<String>, verdict: Verdict, detail: impl Into<String>) -> Self {
        Check { name: name.into(), verdict, detail: detail.into(), rho: None }
    }

    fn json(&self) -> Json {
        json!({
            "name": self.name, "verdict": self.verdict.name(), "detail": self.detail,
            "rho": self.rho.map(|r| finite(r.0)), "limit": self.rho.map(|r| finite(r.1)),
        })
    }
}

/// JSON has no infinities.
fn finite(x: f64) -> Json {
    if x.is_finite() { json!(x) } else { json!(x.to_string()) }
}

/// What a stage found.
#[derive(Clone, Debug)]
pub struct StageReport {
    /// The stage's name.
    pub stage: &'static str,
    /// One line on what was looked at: counts, coverage, the worst case.
    pub summary: String,
    /// Every check that is worth a line; all that did not match are here.
    pub checks: Vec<Check>,
    /// How many checks were made, including those without a line.
    pub made: usize,
    /// Wall time.
    pub seconds: f64,
}

impl StageReport {
    /// A stage that cannot apply, with the reason.
    pub fn not_applicable(stage: &'static str, reason: impl Into<String>) -> Self {
        let check = Check::new(stage, Verdict::NotApplicable, reason);
        StageReport { stage, summary: check.detail.clone(), checks: vec![check], made: 0, seconds: 0.0 }
    }

    /// A stage that had nothing to judge although it should have: no data is never a pass.
    pub fn unmeasured(stage: &'static str, reason: impl Into<String>) -> Self {
        let check = Check::new(stage, Verdict::Unmeasured, reason);
        StageReport { stage, summary: check.detail.clone(), checks: vec![check], made: 0, seconds: 0.0 }
    }

    /// From checks, all of them kept.
    pub fn new(stage: &'static str, summary: impl Into<String>, checks: Vec<Check>) -> Self {
        StageReport { stage, summary: summary.into(), made: checks.len(), checks, seconds: 0.0 }
    }

    /// The worst verdict; a stage without a single check is unmeasured.
    pub fn verdict(&self) -> Verdict {
        self.checks.iter().map(|c| c.verdict).max().unwrap_or(Verdict::Unmeasured)
    }

    /// The largest error in units of its limit.
    pub fn worst(&self) -> Option<&Check> {
        let share = |c: &Check| c.rho.map_or(f64::NEG_INFINITY, |(rho, limit)| rho / limit);
        self.checks.iter().filter(|c| c.rho.is_some()).max_by(|a, b| share(a).total_cmp(&share(b)))
    }

    /// For `--json`.
    pub fn json(&self) -> Json {
        json!({
            "stage": self.stage, "verdict": self.verdict().name(), "summary": self.summary,
            "checks_made": self.made, "seconds": self.seconds,
            "checks": self.checks.iter().map(Check::json).collect::<Vec<_>>(),
        })
    }
}
