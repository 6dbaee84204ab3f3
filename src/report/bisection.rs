//! What `bisect` found: the first bad operation, and what kind of fault explains it.

use std::io;

use serde::{Serialize, Serializer};

use super::json::Number;
use super::table::{Table, ranges};
use super::{Page, Record, Run, Verdict};

/// The word for a fault that nothing of the catalogue explains.
pub const UNKNOWN: &str = "UNKNOWN";

/// Faults of a file that the text shows.
const FAULTS_SHOWN: usize = 8;

/// Other diverging operations that the text shows.
const OTHERS_SHOWN: usize = 8;

/// Whose fault something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Blame {
    /// The parameters'.
    Data,
    /// The settings'.
    Configuration,
    /// The operation's own.
    Operation,
}

impl Blame {
    fn text(self) -> &'static str {
        match self {
            Blame::Data => "the data; the operation itself is right",
            Blame::Configuration => "the configuration; the operation itself is right",
            Blame::Operation => "the operation; its data is right",
        }
    }
}

/// An explanation that fits.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// The kind of fault.
    pub kind: &'static str,
    /// Tensor, fused group or operation.
    pub site: String,
    /// In words.
    pub statement: String,
    /// Ranks that are affected.
    pub ranks: Vec<usize>,
    /// Residual under the hypothesis and its limit, in its own noise floors.
    #[serde(flatten)]
    pub fit: Fit,
    /// Whose fault it is.
    pub blame: Blame,
    /// True where no finite value was left and the bytes read back from the device decided.
    pub by_bytes: bool,
    /// The experiment that would overturn it.
    pub overturned_by: String,
}

/// An error in units of its noise floor.
#[derive(Clone, Copy, Debug)]
pub struct Fit {
    /// The error.
    pub rho: f64,
    /// Its limit.
    pub limit: f64,
}

impl Serialize for Fit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serde_json::json!({ "rho": Number(self.rho), "limit": Number(self.limit) }).serialize(serializer)
    }
}

/// A kind of fault that was tried and does not fit.
#[derive(Clone, Debug, Serialize)]
pub struct RuledOut {
    /// The kind.
    pub kind: &'static str,
    /// How many forms of it were tried.
    pub tried: usize,
    /// The smallest residual of them, in units of its noise floor.
    pub best_rho: Number,
}

/// The first operation that diverges.
#[derive(Clone, Debug, Serialize)]
pub struct Culprit {
    /// The kind of fault, or `UNKNOWN`.
    pub kind: &'static str,
    /// Place in the forward pass, as in dumps.
    pub place: String,
    /// Its layer; none outside the layers.
    pub layer: Option<usize>,
    /// Its name within the layer.
    pub operation: &'static str,
    /// Ranks whose own slice or copy diverges; none listed: all.
    pub ranks: Vec<usize>,
    /// Tokens whose rows diverge by themselves.
    pub tokens: Vec<usize>,
    /// Parts of the result that diverge: heads, slots or channel blocks, in words.
    pub region: String,
    /// The error of the slice that decided.
    #[serde(flatten)]
    pub error: Fit,
    /// What was seen there, in words.
    pub evidence: String,
    /// The explanation, if one fits.
    pub explanation: Option<Explanation>,
    /// Others that fit as well and cannot be told apart from captures of this operation.
    pub fits_as_well: Vec<Explanation>,
    /// What does not fit.
    pub ruled_out: Vec<RuledOut>,
}

/// Something that is wrong with the file itself.
#[derive(Clone, Debug, Serialize)]
pub struct FileFault {
    /// A tensor, a parameter, or what was checked.
    pub check: String,
    /// What was seen, in words.
    pub evidence: String,
}

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub struct Bisection {
    /// MATCH, DRIFT, INACTIVE, DIVERGENT, NONDETERMINISTIC or UNMEASURED.
    pub verdict: Verdict,
    /// What is wrong with the file; then no operation was judged.
    pub file: Vec<FileFault>,
    /// Operations judged.
    pub judged: usize,
    /// Operations that could not be judged, because their inputs are missing, not finite or all zeros.
    pub unmeasured: usize,
    /// Whether sparse attention was active, in words.
    pub sparse_attention: Option<String>,
    /// What became of the convention that a dump was said to follow, in words.
    pub convention: Option<String>,
    /// The first operation that diverges.
    pub culprit: Option<Culprit>,
    /// Where runs of the same input part, if they do.
    pub parts_at: Option<String>,
    /// Other operations that are wrong in their own right (each was judged from its own inputs).
    pub others: Vec<String>,
}

/// The same, with what ran.
#[derive(Clone, Debug, Serialize)]
pub struct BisectReport {
    /// What was looked at.
    #[serde(flatten)]
    pub run: Run,
    /// Rows judged in the end, and at first.
    pub rows: usize,
    /// Rows judged at first.
    pub rows_at_first: usize,
    /// What was found.
    #[serde(flatten)]
    pub found: Bisection,
}

impl Record for BisectReport {
    fn text(&self, page: &mut Page<'_>) -> io::Result<()> {
        let (found, first) = (&self.found, self.rows_at_first);
        let rows = match self.rows {
            all if all > first => format!("{first} rows, then at all {all}"),
            rows => format!("{rows} rows"),
        };
        page.line(format!("{}; {} operations judged at {rows}", self.run.line(), found.judged))?;
        page.gap()?;
        if !found.file.is_empty() {
            let mut faults = Table::new(&["stage", "check", "evidence"]);
            let shown = found.file.iter().take(FAULTS_SHOWN);
            shown.for_each(|f| faults.row(["file", f.check.as_str(), &f.evidence]));
            page.table(&faults)?;
            if found.file.len() > FAULTS_SHOWN {
                page.line(format!("and {} more; `lockstep verify file` lists them", found.file.len() - FAULTS_SHOWN))?;
            }
            page.gap()?;
            return page.verdict(found.verdict, " in the file, so no operation was judged");
        }
        if let Some(place) = &found.parts_at {
            let why = format!(", no other verdict. The same input parts first at {place}.");
            return page.verdict(Verdict::Nondeterministic, &why);
        }
        if let Some(convention) = &found.convention {
            page.line(format!("Convention: {convention}."))?;
        }
        let Some(culprit) = &found.culprit else {
            let sparse = found.sparse_attention.as_deref().unwrap_or_default();
            let unmeasured = found.unmeasured;
            page.line(format!("No operation diverges; {unmeasured} could not be judged. Sparse attention: {sparse}."))?;
            page.gap()?;
            return page.verdict(found.verdict, "");
        };
        page.table(&culprit.table(self.run.tp))?;
        page.gap()?;
        page.line(match found.others.len() {
            0 => {
                let but = match found.unmeasured {
                    0 => String::new(),
                    n => format!(", but for {n} that could not be judged"),
                };
                format!("Every other operation is right, given its own inputs{but}.")
            }
            n => {
                let shown = found.others[..n.min(OTHERS_SHOWN)].join(", ");
                let more = if n > OTHERS_SHOWN { format!(" and {} more", n - OTHERS_SHOWN) } else { String::new() };
                format!("Wrong in their own right as well: {shown}{more}.")
            }
        })?;
        page.gap()?;
        page.verdict(found.verdict, &format!(" {}", culprit.kind))
    }
}

impl Culprit {
    fn table(&self, tp: usize) -> Table {
        let mut rows = Table::facts();
        let layer = self.layer.map_or("none (outside the layers)".into(), |l| l.to_string());
        let ranks = match self.ranks.len() {
            n if n == tp || n == 0 => format!("all {tp}"),
            _ => format!("{} of {tp}", ranges(&self.ranks)),
        };
        let tokens = match self.tokens.is_empty() {
            true => "none alone; the whole output decides".into(),
            false => format!("tokens {}", ranges(&self.tokens)),
        };
        rows.row(["kind", self.kind]);
        rows.row(["first bad layer", &layer]);
        rows.row(["operation", &self.place]);
        rows.row(["ranks", &ranks]);
        rows.row(["region", &self.region]);
        rows.row(["rows", &tokens]);
        rows.row(["evidence", &self.evidence]);
        match &self.explanation {
            Some(e) => {
                rows.row(["site", &e.site]);
                rows.row(["explanation", &e.statement]);
                rows.row(["fault of", e.blame.text()]);
                let fit = match e.by_bytes {
                    true => {
                        "sums overflow, so values cannot decide; the device holds exactly the predicted bytes".into()
                    }
                    false => format!("residual rho {:.2} of {:.2} under this hypothesis", e.fit.rho, e.fit.limit),
                };
                rows.row(["fit", &fit]);
                rows.row(["overturned by", &e.overturned_by]);
            }
            None => rows.row(["explanation", "none of the catalogue fits; see what was ruled out"]),
        }
        for e in &self.fits_as_well {
            let text = format!("{} at {}: {} (rho {:.2})", e.kind, e.site, e.statement, e.fit.rho);
            rows.row(["fits as well", &text]);
        }
        let one = |r: &RuledOut| format!("{} ({} tried, best rho {:.1e})", r.kind, r.tried, r.best_rho.0);
        let ruled: Vec<String> = self.ruled_out.iter().map(one).collect();
        rows.row(["ruled out", if ruled.is_empty() { "nothing".into() } else { ruled.join("; ") }.as_str()]);
        rows
    }
}
