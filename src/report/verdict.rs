//! Verdicts, checks and what a stage reports.

use serde::{Serialize, Serializer};
use serde_json::{Map, Value as Json, json};

use super::cost::Cost;
use super::json::Number;

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
    /// All of them, from best to worst.
    pub const ALL: [Verdict; 8] = [
        Verdict::NotApplicable,
        Verdict::Match,
        Verdict::Drift,
        Verdict::Inactive,
        Verdict::Unmeasured,
        Verdict::Divergent,
        Verdict::Nondeterministic,
        Verdict::Host,
    ];

    /// That with this word.
    pub fn named(word: &str) -> Option<Self> {
        Verdict::ALL.into_iter().find(|v| v.name() == word)
    }

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

impl Verdict {
    /// Its colour, one of the terminal's palette.
    pub(super) fn colour(self) -> u8 {
        match self {
            Verdict::NotApplicable => 8,
            Verdict::Match => 2,
            Verdict::Drift => 3,
            Verdict::Inactive | Verdict::Unmeasured => 5,
            Verdict::Divergent | Verdict::Nondeterministic | Verdict::Host => 1,
        }
    }
}

impl Serialize for Verdict {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
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
    /// The evidence as data: what was measured, at which rank, rows, tensor; bytes, seconds, bytes per second.
    pub data: Map<String, Json>,
}

impl Check {
    /// A check judged by something exact.
    pub fn exact(name: impl Into<String>, good: bool, detail: impl Into<String>) -> Self {
        Check::new(name, if good { Verdict::Match } else { Verdict::Divergent }, detail)
    }

    /// A check with a verdict of its own.
    pub fn new(name: impl Into<String>, verdict: Verdict, detail: impl Into<String>) -> Self {
        Check { name: name.into(), verdict, detail: detail.into(), rho: None, data: Map::new() }
    }

    /// What is told to whoever reads, and could not have turned out badly: no check.
    pub fn information(name: impl Into<String>, detail: impl std::fmt::Display) -> Self {
        Check::new(name, Verdict::NotApplicable, format!("for information: {detail}"))
    }

    /// Judged by the noise floor: the error in its units, and the limit.
    pub fn of_floor(self, rho: (f64, f64)) -> Self {
        Check { rho: Some(rho), ..self }
    }

    /// With evidence for machines; what is no object is passed over.
    pub fn with(mut self, data: Json) -> Self {
        if let Json::Object(more) = data {
            self.data.extend(more);
        }
        self
    }
}

impl Serialize for Check {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        json!({
            "name": self.name, "verdict": self.verdict, "detail": self.detail,
            "rho": self.rho.map(|r| Number(r.0)), "limit": self.rho.map(|r| Number(r.1)), "data": self.data,
        })
        .serialize(serializer)
    }
}

/// How much of the model a stage ran and judged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Reach {
    /// Positions of the context that were reached.
    pub positions: usize,
    /// Rows at which operations were judged.
    pub rows: usize,
    /// Experts, of every layer, whose products were judged.
    pub experts: usize,
    /// Sequences that ran in one step.
    pub sequences: usize,
}

impl Reach {
    /// The further of two, in each.
    #[must_use]
    pub fn max(self, other: Reach) -> Reach {
        Reach {
            positions: self.positions.max(other.positions),
            rows: self.rows.max(other.rows),
            experts: self.experts.max(other.experts),
            sequences: self.sequences.max(other.sequences),
        }
    }
}

/// Parameters whose values were compared with a baseline's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compared {
    /// Of the layers that run, with what stands before and behind them.
    pub trunk: usize,
    /// Of MTP blocks.
    pub mtp: usize,
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
    /// How many checks were made, including those without a line; what did not apply was not made.
    pub made: usize,
    /// Wall time.
    pub seconds: f64,
    /// How much of the model it ran and judged; nothing for stages that run none of it.
    pub reach: Reach,
    /// What it compared with a baseline, value by value.
    pub compared: Compared,
    /// What it took, of a stage that searches.
    pub cost: Option<Cost>,
}

impl StageReport {
    /// What it found, without its checks. Seconds are rounded, so that they are the same when read back.
    pub fn brief(&self) -> Json {
        let StageReport { stage, summary, .. } = self;
        let seconds = (1e3 * self.seconds).round() / 1e3;
        json!({ "stage": stage, "verdict": self.verdict().name(), "summary": summary, "seconds": seconds })
    }

    /// A stage that cannot apply, with the reason.
    pub fn not_applicable(stage: &'static str, reason: impl Into<String>) -> Self {
        StageReport::nothing(stage, Verdict::NotApplicable, reason.into())
    }

    /// A stage that had nothing to judge although it should have: no data is never a pass.
    pub fn unmeasured(stage: &'static str, reason: impl Into<String>) -> Self {
        StageReport::nothing(stage, Verdict::Unmeasured, reason.into())
    }

    fn nothing(stage: &'static str, verdict: Verdict, reason: String) -> Self {
        let check = Check::new(stage, verdict, reason.clone());
        StageReport { made: 0, ..StageReport::new(stage, reason, vec![check]) }
    }

    /// How many of these were made.
    pub fn made(checks: &[Check]) -> usize {
        checks.iter().filter(|c| c.verdict != Verdict::NotApplicable).count()
    }

    /// From checks, all of them kept.
    pub fn new(stage: &'static str, summary: impl Into<String>, checks: Vec<Check>) -> Self {
        let (made, reach, compared) = (StageReport::made(&checks), Reach::default(), Compared::default());
        StageReport { stage, summary: summary.into(), made, checks, seconds: 0.0, reach, compared, cost: None }
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
}

impl Serialize for StageReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        json!({
            "stage": self.stage, "verdict": self.verdict(), "summary": self.summary,
            "checks_made": self.made, "seconds": self.seconds, "cost": self.cost, "checks": self.checks,
        })
        .serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_brief_report_is_the_same_when_read_back() {
        for i in 1..2000 {
            let report = StageReport { seconds: f64::from(i).sqrt() * 1e-3, ..StageReport::unmeasured("file", "x") };
            let brief = report.brief();
            assert_eq!(serde_json::from_str::<Json>(&brief.to_string()).expect("JSON"), brief);
        }
    }
}
