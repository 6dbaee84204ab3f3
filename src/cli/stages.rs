//! The stages of `verify`, which the gate of `serve` runs, too.

use super::args::StageArg;
use crate::checkpoint::{Mtp, Standing};
#[cfg(feature = "cuda")]
use crate::doctor;
use crate::model::params;
use crate::report::covered::{Covered, OnTrust};
use crate::report::{Progress, StageReport, Verdict};
use crate::verify::floor::LEAST_ROWS;
#[cfg(feature = "cuda")]
use crate::verify::kernels::run as kernels;
use crate::verify::{Subject, VerifyError, activations, file, invariants, logits, sense, tokenizer, weights};

/// A stage.
pub(super) type Stage = fn(&Subject, &dyn Progress) -> Result<StageReport, VerifyError>;

/// The stages in order of certainty.
pub(super) const STAGES: [(StageArg, &str, Stage); 9] = [
    (StageArg::Host, "host", host),
    (StageArg::File, "file", file::run),
    (StageArg::Tokenizer, "tokenizer", tokenizer::run),
    (StageArg::Weights, "weights", weights::run),
    (StageArg::Kernels, "kernels", kernels),
    (StageArg::Activations, "activations", activations::run),
    (StageArg::Invariants, "invariants", invariants::run),
    (StageArg::Logits, "logits", logits::run),
    (StageArg::Sense, "sense", sense::run),
];

#[cfg(feature = "cuda")]
fn host(subject: &Subject, progress: &dyn Progress) -> Result<StageReport, VerifyError> {
    crate::verify::host::run(subject, |gpus, cubins| {
        let request = doctor::gpus::Request { gpus, cubins, quick: true };
        let found = doctor::host::findings().into_iter().chain(doctor::gpus::run(&request, progress));
        found.collect()
    })
}

#[cfg(not(feature = "cuda"))]
fn host(_: &Subject, _: &dyn Progress) -> Result<StageReport, VerifyError> {
    Ok(StageReport::not_applicable("host", "no GPU takes part: the ranks are CPU threads"))
}

#[cfg(not(feature = "cuda"))]
fn kernels(_: &Subject, _: &dyn Progress) -> Result<StageReport, VerifyError> {
    Ok(StageReport::not_applicable("kernels", "the CPU device has no kernels of its own"))
}

/// What the stages covered, and what is left to trust.
pub(super) fn covered(subject: &Subject, stages: &[StageReport]) -> Covered {
    let (reach, not_applicable) = Covered::of(stages);
    let (c, ran) = (subject.checkpoint.config(), |name| stages.iter().any(|s| s.stage == name));
    let baseline = subject.baseline.as_ref();
    let compared = |stage| baseline.is_some() && ran(stage);
    let facts = if compared("file") { Vec::new() } else { subject.checkpoint.facts() };
    let on_trust = facts.into_iter().filter(|f| matches!(f.standing, Standing::Stated | Standing::Assumed));
    let mut metadata: Vec<OnTrust> =
        on_trust.map(|f| OnTrust { name: f.fact.name, value: f.fact.value, source: f.fact.source }).collect();
    if subject.checkpoint.is_tied() && !compared("weights") {
        let (value, source) = ("tied to the embedding", "the files hold none");
        metadata.push(OnTrust { name: "output matrix", value: value.into(), source: source.into() });
    }
    let (trunk, mtp) = (params::of_trunk(c).len(), params::of_mtp(c).len());
    let values = stages.iter().find(|s| s.stage == "weights").map(|s| s.compared).unwrap_or_default();
    Covered {
        baseline: baseline.map(|b| b.name().into()),
        metadata_on_trust: metadata,
        parameters_on_trust: trunk + mtp - values.trunk - values.mtp,
        columns_judged: reach.rows >= LEAST_ROWS,
        reach,
        choice_unjudged: choice_unjudged(subject, stages),
        context: c.context,
        tokens: subject.ids.len(),
        all_experts: (c.layers - c.dense_layers) * c.experts,
        mtp: match subject.checkpoint.coverage().mtp {
            Mtp::None => "none is declared",
            Mtp::Whole if values.mtp == mtp => "not run; its data was compared with the baseline's",
            Mtp::Whole => "not run; its data is taken on trust",
            Mtp::Partial => "not run; incomplete in this file",
            Mtp::Absent => "not run; declared, but not in this file",
        },
        sense: stages.iter().find(|s| s.stage == "sense").map(|s| s.summary.clone()),
        not_applicable,
    }
}

/// What stage `activations` says where it could not judge which keys a dump's engine chose.
fn choice_unjudged(subject: &Subject, stages: &[StageReport]) -> Option<String> {
    let checks = stages.iter().filter(|s| s.stage == "activations").flat_map(|s| &s.checks);
    let mut unjudged = checks.filter(|c| c.name == activations::SPARSE && c.verdict == Verdict::NotApplicable);
    unjudged.next().filter(|_| subject.target.is_some()).map(|c| c.detail.clone())
}
