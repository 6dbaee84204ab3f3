//! What the metadata says and no tensor bears out: defaults that took over, numbers far from what models use, and keys that
//! tensors contradict.

use crate::checkpoint::{Checkpoint, Standing};
use crate::model::{Fact, TIE};
use crate::report::{Check, Verdict};

/// Numbers that no tensor can tell, within what models are known to use and an order of magnitude more: eps 1e-6 and 1e-5,
/// rope bases 1e4 to 1e8.
const USUAL: [(&str, f64, f64, &str); 2] =
    [("RMSNorm eps", 1e-7, 5e-5, "1e-6 or 1e-5"), ("rope base", 1e3, 1e9, "1e4 to 1e8")];

/// A check per number that is doubtful or contradicted.
pub(super) fn checks(checkpoint: &Checkpoint) -> Vec<Check> {
    let mut checks = Vec::new();
    for trusted in checkpoint.facts() {
        let Fact { name, value, source, .. } = &trusted.fact;
        if trusted.standing == Standing::Assumed {
            let detail = format!(
                "ABSENT_KEY: {source} is taken, on trust. It decides what the model computes and no tensor can tell it: \
                 state the key, or convert the model again"
            );
            checks.push(Check::new(*name, Verdict::Drift, detail));
        }
        if let Standing::Contradicted(by) = &trusted.standing
            && by.starts_with("the tensors say")
        {
            let detail = format!("CONTRADICTION: {source} = {value}, and {by}");
            checks.push(Check::exact(*name, false, detail));
        }
        let usual = USUAL.iter().find(|(of, ..)| of == name);
        let read = value.parse::<f64>().ok();
        if let (Some((_, least, most, usual)), Some(read)) = (usual, read)
            && !(*least..=*most).contains(&read)
        {
            let detail = format!("UNUSUAL: {source} is {value}, models use {usual}; no tensor can tell it");
            checks.push(Check::new(*name, Verdict::Drift, detail));
        }
    }
    let contradicted = checks.iter().any(|c| c.verdict == Verdict::Divergent);
    if let Some(denied) = checkpoint.undeclared_mtp().filter(|_| !contradicted) {
        let detail = format!("UNDECLARED: {denied}: here they are not used, and an engine that runs them finds none");
        checks.push(Check::new("MTP blocks", Verdict::Drift, detail));
    }
    for doubt in checkpoint.indexer_doubts() {
        let verdict = if doubt.certain { Verdict::Divergent } else { Verdict::Drift };
        checks.push(Check::new("full indexer layers", verdict, format!("INDEXERS: {}", doubt.detail)));
    }
    for doubt in checkpoint.flag_doubts() {
        let verdict = if doubt.certain { Verdict::Divergent } else { Verdict::Drift };
        checks.push(Check::new(doubt.key, verdict, format!("FLAG: {}", doubt.detail)));
    }
    checks.push(output(checkpoint));
    checks
}

/// Whether the embedding serves as output matrix, and whether that is what the files mean.
fn output(checkpoint: &Checkpoint) -> Check {
    match (checkpoint.tie_contradiction(), checkpoint.is_tied()) {
        (Some(contradiction), _) => Check::exact(TIE, false, format!("TIED: {contradiction}")),
        (None, true) => {
            Check::exact("output", true, "tied: the files hold no output matrix, so the embedding serves as one")
        }
        (None, false) => Check::exact("output", true, "a matrix of its own"),
    }
}
