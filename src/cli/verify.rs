//! `lockstep verify`: the stages in order, a table or JSON, and the exit code of the contract.

use std::io::Write;
use std::time::Instant;

use super::args::{StageArg, VerifyArgs};
use super::console::Bar;
use super::subject::{engines, lists_faults, run_of, subject};
use super::{CliError, Exit, console, emit, interrupt};
use crate::checkpoint::{Mtp, Standing};
#[cfg(feature = "cuda")]
use crate::doctor;
use crate::model::params;
use crate::report::covered::{Covered, OnTrust};
use crate::report::verification::Verification;
use crate::report::{Look, Page, Progress, StageReport, Verdict, json};
#[cfg(feature = "cuda")]
use crate::verify::kernels::run as kernels;
use crate::verify::{Subject, VerifyError, activations, asks, file, invariants, logits, sense, tokenizer, weights};

type Stage = fn(&Subject, &dyn Progress) -> Result<StageReport, VerifyError>;

/// The stages in order of certainty.
const STAGES: [(StageArg, &str, Stage); 9] = [
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

pub(super) fn run(args: &VerifyArgs, out: &mut dyn Write) -> Result<Exit, CliError> {
    if lists_faults(&args.subject, out)? {
        return Ok(Exit::Ok);
    }
    let mut subject = subject(&args.subject, engines(&args.subject)?)?;
    if let Some(path) = &args.asks {
        subject.asks = asks::read(path).map_err(|e| CliError::Usage(format!("--asks: {e}")))?;
    }
    subject.sense = sense::SenseOptions {
        untrained: args.untrained,
        thorough: args.thorough,
        plan: args.repair_plan,
        published: !args.no_published_facts,
    };
    let (subject, json) = (subject, args.subject.model.json);
    let mut found = Verification {
        run: run_of(&args.subject, &subject),
        ids: subject.ids.clone(),
        rows: subject.rows.clone(),
        seed: subject.seed,
        verdict: Verdict::Unmeasured,
        exit: Exit::Unmeasured.code(),
        incomplete: None,
        stages: Vec::new(),
        covered: None,
        all: args.all,
        advice: "",
    };
    let mut page = Page::new(out, Look::of_stdout());
    let chosen: Vec<_> = STAGES.into_iter().filter(|s| args.stages.is_empty() || args.stages.contains(&s.0)).collect();
    for (i, (_, name, run)) in chosen.iter().enumerate() {
        keep(&found, json);
        if i == 0 && !json {
            found.head(&mut page)?;
        }
        let start = Instant::now();
        let is = |verdict| found.stages.iter().any(|r| r.verdict() >= verdict);
        let result = if is(Verdict::Host) {
            let why = "this machine copies or adds wrongly (stage host), so that nothing else is judged";
            Ok(StageReport::unmeasured(name, why))
        } else {
            run(&subject, &Bar::new(format!("stage {} of {}, {name}: ", i + 1, chosen.len())))
        };
        let mut report = match result {
            Ok(report) => report,
            // What was found before says why this stage cannot run; it must not be lost. And what this build lacks is
            // nobody's fault.
            Err(e) if e.is_lack() || is(Verdict::Divergent) => StageReport::unmeasured(name, e.to_string()),
            Err(e) if i == 0 => return Err(e.into()),
            Err(e) => {
                interrupt::end_if_stopping();
                found.cut(format!("stage {name}: {e}"), Exit::Usage.code());
                break;
            }
        };
        report.seconds = start.elapsed().as_secs_f64();
        if !json {
            Verification::stage(&report, &mut page)?;
        }
        found.add(report);
    }
    found.covered = found.incomplete.is_none().then(|| covered(&subject, &found.stages));
    let exit = if found.incomplete.is_some() { Exit::Usage } else { exit_of(&found, args) };
    found.exit = exit.code();
    found.advice = advice(&found, exit, subject.baseline.is_some());
    match json {
        true => emit(&found, true, out)?,
        false => interrupt::finally(|| found.foot(&mut page).and_then(|()| page.flush()))?,
    }
    if let Some(why) = &found.incomplete {
        console::error(why);
    }
    Ok(exit)
}

/// What the stages covered, and what is left to trust.
fn covered(subject: &Subject, stages: &[StageReport]) -> Covered {
    let (reach, not_applicable) = Covered::of(stages);
    let (c, ran) = (subject.checkpoint.config(), |name| stages.iter().any(|s| s.stage == name));
    let baseline = subject.baseline.as_ref();
    let compared = |stage| baseline.is_some() && ran(stage);
    let facts = if compared("file") { Vec::new() } else { subject.checkpoint.facts() };
    let on_trust = facts.into_iter().filter(|f| matches!(f.standing, Standing::Stated | Standing::Assumed));
    let metadata =
        on_trust.map(|f| OnTrust { name: f.fact.name, value: f.fact.value, source: f.fact.source }).collect();
    let parameters = if compared("weights") { 0 } else { params::of_trunk(c).len() + params::of_mtp(c).len() };
    Covered {
        baseline: baseline.map(|b| b.name().into()),
        metadata_on_trust: metadata,
        parameters_on_trust: parameters,
        reach,
        context: c.context,
        tokens: subject.ids.len(),
        all_experts: (c.layers - c.dense_layers) * c.experts,
        mtp: match subject.checkpoint.coverage().mtp {
            Mtp::None => "none is declared",
            Mtp::Whole => "not run; its data is taken on trust",
            Mtp::Partial => "not run; incomplete in this file",
            Mtp::Absent => "not run; declared, but not in this file",
        },
        sense: stages.iter().find(|s| s.stage == "sense").map(|s| s.summary.clone()),
        not_applicable,
    }
}

/// What is said if the run is stopped now: the stages that ended.
fn keep(found: &Verification, json: bool) {
    let mut found = found.clone();
    interrupt::so_far(move |out, why, exit| {
        found.cut(why.into(), exit);
        match json {
            true => json::write(out, &found),
            false => found.foot(&mut Page::new(out, Look::of_stdout())),
        }
    });
}

/// The exit code: a fault beats what was not measured, which beats success.
fn exit_of(found: &Verification, args: &VerifyArgs) -> Exit {
    let drift = found.stages.iter().any(|r| r.checks.iter().any(|c| c.verdict == Verdict::Drift));
    // A stage that was asked for by name and cannot apply was not shown.
    let named_na = !args.stages.is_empty() && found.stages.iter().any(|r| r.verdict() == Verdict::NotApplicable);
    match Exit::from(found.verdict) {
        _ if args.strict && drift => Exit::Fault,
        Exit::Ok if named_na => Exit::Unmeasured,
        exit => exit,
    }
}

/// What there is to say behind the verdict.
fn advice(found: &Verification, exit: Exit, has_baseline: bool) -> &'static str {
    let runs = |r: &&StageReport| matches!(r.stage, "weights" | "activations" | "invariants" | "logits");
    let bisectable = found.stages.iter().filter(runs).any(|r| r.verdict() >= Verdict::Divergent);
    match (found.verdict, exit) {
        (Verdict::Divergent | Verdict::Nondeterministic, _) if bisectable && !has_baseline => {
            ". `lockstep bisect` with the same options names the fault."
        }
        (Verdict::Drift, Exit::Fault) => ", which --strict does not let pass (exit 1)",
        (Verdict::Match | Verdict::Drift | Verdict::NotApplicable, Exit::Unmeasured) => {
            ", but a stage that was asked for does not apply (exit 3)"
        }
        _ => "",
    }
}
