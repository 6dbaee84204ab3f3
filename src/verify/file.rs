//! Stage `file`: is the file whole and consistent, free of NaN, zeros and outlier blocks; has every tensor a home and every
//! parameter a source; which numbers does nothing bear out?
//!
//! The container's reader has already refused what is cut, doubled, foreign or misplaced; here its account is printed,
//! every block is looked at, and the two independent readings of the metadata (the engine's and the reference's) must
//! agree on every number.

mod config;
mod shares;
mod sizes;
mod strewn;
mod trust;
mod values;
mod zeros;

use std::collections::BTreeSet;

use super::{Subject, VerifyError};
use crate::checkpoint::{Binding, Checkpoint, Mtp};
use crate::model::{Kind, Param, params};
use crate::quant::QuantType;
use crate::report::table::{bytes, plural};
use crate::report::{Check, Progress, StageReport, Verdict};

const STAGE: &str = "file";

/// Runs the stage. `progress` counts bytes.
///
/// # Errors
/// None of its own: what is wrong with a file is a finding.
pub fn run(subject: &Subject, progress: &dyn Progress) -> Result<StageReport, VerifyError> {
    let checkpoint = &subject.checkpoint;
    let mut checks = container(checkpoint);
    // A number that is wrong explains the many tensors that do not fit it, so it comes first.
    let trust = trust::checks(checkpoint);
    let (contradicted, others) = trust.into_iter().partition::<Vec<_>, _>(|c| c.verdict == Verdict::Divergent);
    checks.extend(contradicted);
    checks.extend(coverage(checkpoint));
    checks.extend(forms(checkpoint));
    checks.push(types(checkpoint));
    checks.push(kv_b(checkpoint, subject.baseline.is_some()));
    checks.push(dequantised(checkpoint));
    let mut made = StageReport::made(&checks) + StageReport::made(&others);
    let (readings, compared) = config::readings(checkpoint);
    made += compared;
    checks.extend(readings);
    checks.extend(others);
    if let Some(baseline) = &subject.baseline {
        let (differences, compared) = config::differences(checkpoint, baseline);
        made += compared;
        checks.extend(differences);
    }
    let scan = values::scan_all(checkpoint, progress);
    made += scan.tensors;
    let summary = format!(
        "{} in {} tensors, every block looked at; {} tensors bound to parameters",
        bytes(scan.bytes),
        checkpoint.coverage().tensors,
        checkpoint.coverage().bound
    );
    checks.extend(scan.checks);
    Ok(StageReport { made, ..StageReport::new(STAGE, summary, checks) })
}

/// What the reader has established, so that a complete file is never called truncated, or what it found odd.
fn container(checkpoint: &Checkpoint) -> Vec<Check> {
    let source = checkpoint.source();
    let detail = match source.gguf() {
        Some(gguf) => {
            let files: Vec<u64> = gguf.files().map(|(_, size)| size).collect();
            format!(
                "GGUF version {}, {} of one set, {}: all tensor data present, nothing overlaps, nothing is named twice",
                gguf.version(),
                plural(files.len(), "file"),
                bytes(files.iter().sum())
            )
        }
        None => {
            let files: BTreeSet<String> = source.names().into_iter().map(|n| source.file_of(n)).collect();
            format!("{}, all tensor data present, nothing is named twice", plural(files.len(), "file"))
        }
    };
    match source.warnings() {
        odd if odd.is_empty() => vec![Check::exact("container", true, detail)],
        odd => odd.into_iter().map(|odd| Check::new("container", Verdict::Drift, odd)).collect(),
    }
}

/// Parameters that are there in a form which this build cannot read: nothing is said against the file.
fn forms(checkpoint: &Checkpoint) -> Option<Check> {
    let unhandled = &checkpoint.coverage().unhandled;
    let first = unhandled.first()?;
    let forms: BTreeSet<&str> = unhandled.iter().map(|u| u.form).collect();
    let forms: Vec<&str> = forms.into_iter().collect();
    let detail = format!(
        "UNREADABLE: {} in a form that this build cannot read: {} (the first is {}). The file may well be right",
        plural(unhandled.len(), "tensor"),
        forms.join("; "),
        first.tensor
    );
    Some(Check::new("forms", Verdict::Unmeasured, detail))
}

fn coverage(checkpoint: &Checkpoint) -> Vec<Check> {
    let coverage = checkpoint.coverage();
    let mut checks = Vec::new();
    for u in &coverage.unbound {
        let near =
            u.nearest.as_ref().map_or(String::new(), |(name, d)| format!("; nearest expected name: {name} ({d} off)"));
        checks.push(Check::exact(&u.tensor, false, format!("UNBOUND: no parameter takes this tensor{near}")));
    }
    for (param, name) in &coverage.missing {
        checks.push(Check::exact(param.to_string(), false, format!("MISSING: no tensor holds it, expected {name}")));
    }
    for fault in &coverage.shapes {
        let facts = &checkpoint.config().facts;
        let value = |key: &String| facts.iter().find(|f| f.source == *key).map_or(String::new(), |f| f.value.clone());
        let keys: Vec<String> = fault.keys.iter().map(|key| format!("{key} = {}", value(key))).collect();
        let detail = format!(
            "SHAPE: expected {:?} from {}, found {:?} (fastest axis first)",
            fault.expected,
            keys.join(", "),
            fault.found
        );
        checks.push(Check::exact(&fault.tensor, false, detail));
    }
    match coverage.mtp {
        Mtp::Partial => checks.push(Check::exact(
            "mtp",
            false,
            format!("MISSING: the MTP block lacks {}", coverage.mtp_missing.join(", ")),
        )),
        Mtp::Absent => checks.push(Check::new(
            "mtp",
            Verdict::Drift,
            "the metadata declares an MTP block, the file holds none of its tensors: it runs without one",
        )),
        Mtp::None | Mtp::Whole => {}
    }
    if coverage.is_whole() {
        let mut detail = format!("{} of {} tensors fill parameters", coverage.bound, coverage.tensors);
        if !coverage.unused.is_empty() {
            let reasons: BTreeSet<&str> = coverage.unused.iter().map(|u| u.reason.as_str()).collect();
            let reasons: Vec<&str> = reasons.into_iter().collect();
            detail.push_str(&format!("; {} unused: {}", coverage.unused.len(), reasons.join("; ")));
        }
        for (alias, usual) in coverage.aliases.iter().take(1) {
            detail.push_str(&format!("; {} under another spelling ({alias} for {usual})", coverage.aliases.len()));
        }
        checks.push(Check::exact("coverage", true, detail));
    }
    checks
}

/// A type that cannot be dequantised matters where a parameter needs the tensor, and is no fault of the file.
fn types(checkpoint: &Checkpoint) -> Check {
    let coverage = checkpoint.coverage();
    let unused = |name: &str| coverage.unused.iter().any(|u| u.tensor == name);
    let list = |all: Vec<&(String, &str)>| {
        let shown = all.iter().take(8).map(|(name, ty)| format!("{name} is {ty}")).collect::<Vec<_>>().join(", ");
        format!("UNREADABLE: {} cannot be dequantised by this build: {shown}", plural(all.len(), "tensor"))
    };
    let (idle, needed): (Vec<_>, Vec<_>) = coverage.unreadable.iter().partition(|(name, _)| unused(name));
    if !needed.is_empty() {
        let detail = format!("{}. The file may well be right; another type of it can be judged", list(needed));
        return Check::new("types", Verdict::Unmeasured, detail);
    }
    if !idle.is_empty() {
        return Check::new("types", Verdict::Drift, format!("{}, which nothing uses", list(idle)));
    }
    let source = checkpoint.source();
    let types: BTreeSet<QuantType> =
        source.names().into_iter().filter_map(|n| source.tensor(n)).filter_map(|v| v.ty.quant).collect();
    let names: Vec<&str> = types.into_iter().map(QuantType::name).collect();
    Check::exact("types", true, names.join(" "))
}

/// How the key-value up-projection is stored. Its orientation follows from the format; shape alone confirms it only
/// where the two axes differ.
fn kv_b(checkpoint: &Checkpoint, has_baseline: bool) -> Check {
    let c = checkpoint.config();
    let binding = |layer, kind| checkpoint.binding(Param { layer: Some(layer), kind });
    let is_whole = |b: Option<&Binding>| matches!(b, Some(Binding::KvB(_)));
    let mut mixed = Vec::new();
    let mut whole = 0;
    for layer in 0..c.layers {
        let parts = [Kind::KB, Kind::VB].map(|kind| is_whole(binding(layer, kind)));
        whole += usize::from(parts == [true, true]);
        if parts[0] != parts[1] {
            mixed.push(layer);
        }
    }
    let name = "kv_b";
    if !mixed.is_empty() || (whole != 0 && whole != c.layers) {
        let detail = format!(
            "{whole} of {} layers keep kv_b whole, and layers {mixed:?} have one of its parts only: expected one form \
             throughout",
            c.layers
        );
        return Check::exact(name, false, format!("MIXED_FORMS: {detail}"));
    }
    if whole > 0 {
        let detail = format!(
            "whole in {whole} layers, rows [head][nope {} then value {}]: keys are dequantised and transposed on load",
            c.nope, c.v_head
        );
        return Check::exact(name, true, detail);
    }
    let detail = format!("split, k_b [head][latent {}][nope {}]", c.kv_lora, c.nope);
    match (c.nope == c.kv_lora, has_baseline) {
        (false, _) => Check::exact(name, true, format!("{detail}: the axes differ, so a transposed one would not fit")),
        (true, true) => Check::new(
            name,
            Verdict::NotApplicable,
            format!("{detail}: both axes alike, so it is for stage weights to compare the values with the baseline's"),
        ),
        (true, false) => Check::new(
            name,
            Verdict::Unmeasured,
            format!("{detail}: both axes alike, so only values can tell a transposed one; give a --baseline"),
        ),
    }
}

/// Parameters that the engine does not keep as the file has them.
fn dequantised(checkpoint: &Checkpoint) -> Check {
    let c = checkpoint.config();
    let source = checkpoint.source();
    let mut list = Vec::new();
    for param in params::of_trunk(c) {
        let Some(binding) = checkpoint.binding(param) else { continue };
        let ty = binding.names().first().and_then(|n| source.tensor(n)).and_then(|v| v.ty.quant);
        let transposed = param.kind == Kind::KB && matches!(binding, Binding::KvB(_));
        if let Some(ty) = ty.filter(|ty| transposed || (param.kind.is_plain() && *ty != QuantType::F32)) {
            list.push(format!("{param} from {ty}"));
        }
    }
    let detail = match list.len() {
        0 => "nothing: every parameter keeps its bytes".to_string(),
        n => {
            let more = if n > 6 { format!(" and {} more", n - 6) } else { String::new() };
            format!("{n} on load, to f32: {}{more}", list[..n.min(6)].join(", "))
        }
    };
    Check::information("dequantised", detail)
}
