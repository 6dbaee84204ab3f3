//! `lockstep verify`: the stages in order, a table or JSON, and the exit code of the contract.

use std::io::Write;
use std::time::Instant;

use serde_json::json;

use super::args::{StageArg, VerifyArgs};
use super::subject::{Bar, device_name, engines, list_faults, subject};
use super::{CliError, Exit};
use crate::report::table::table;
#[cfg(feature = "cuda")]
use crate::verify::kernels;
use crate::verify::{
    Check, Progress, StageReport, Subject, Verdict, VerifyError, activations, asks, file, host, invariants, logits,
    tokenizer, weights,
};

/// The stages in order of certainty.
const ORDER: [StageArg; 8] = [
    StageArg::Host,
    StageArg::File,
    StageArg::Tokenizer,
    StageArg::Weights,
    StageArg::Kernels,
    StageArg::Activations,
    StageArg::Invariants,
    StageArg::Logits,
];

pub(super) fn run(args: &VerifyArgs, out: &mut dyn Write) -> Result<Exit, CliError> {
    if args.subject.inject.iter().any(|i| i == "list") {
        list_faults(&args.subject, out)?;
        return Ok(Exit::Ok);
    }
    let mut subject = subject(&args.subject, engines(&args.subject)?)?;
    if let Some(path) = &args.asks {
        subject.asks = asks::read(path).map_err(|e| CliError::Usage(format!("--asks: {e}")))?;
    }
    let subject = subject;
    let mut reports = Vec::new();
    for stage in ORDER {
        if args.stages.is_empty() || args.stages.contains(&stage) {
            let start = Instant::now();
            let bar = Bar::new();
            let faulty = |r: &StageReport| r.verdict() >= Verdict::Divergent;
            let host = |r: &StageReport| r.verdict() == Verdict::Host;
            if reports.iter().any(host) {
                let why = "this machine copies or adds wrongly (stage host), so that nothing else is judged";
                reports.push(StageReport::unmeasured(name(stage), why));
                continue;
            }
            let mut report = match run_stage(stage, &subject, &bar) {
                // What was found before says why this stage cannot run; it must not be lost.
                Err(e) if reports.iter().any(faulty) => StageReport::unmeasured(name(stage), e.to_string()),
                other => other?,
            };
            report.seconds = start.elapsed().as_secs_f64();
            reports.push(report);
        }
    }
    let exit = exit_of(&reports, args);
    let device = device_name(&args.subject, &subject);
    if args.subject.model.json {
        serde_json::to_writer_pretty(&mut *out, &document(&subject, &device, &reports, exit))?;
        writeln!(out)?;
    } else {
        print(&subject, &device, &reports, args.all, exit, out)?;
    }
    Ok(exit)
}

fn name(stage: StageArg) -> &'static str {
    match stage {
        StageArg::Host => "host",
        StageArg::File => "file",
        StageArg::Tokenizer => "tokenizer",
        StageArg::Weights => "weights",
        StageArg::Kernels => "kernels",
        StageArg::Activations => "activations",
        StageArg::Invariants => "invariants",
        StageArg::Logits => "logits",
    }
}

fn run_stage(stage: StageArg, subject: &Subject, progress: &dyn Progress) -> Result<StageReport, VerifyError> {
    match stage {
        StageArg::Host => host::run(subject, progress),
        #[cfg(feature = "cuda")]
        StageArg::Kernels => kernels::run(subject, progress),
        #[cfg(not(feature = "cuda"))]
        StageArg::Kernels => Ok(StageReport::not_applicable("kernels", "the CPU device has no kernels of its own")),
        StageArg::File => file::run(subject, progress),
        StageArg::Tokenizer => tokenizer::run(subject, progress),
        StageArg::Weights if subject.target.is_some() => {
            Ok(StageReport::not_applicable("weights", "a dump is judged, and it holds no weights"))
        }
        StageArg::Weights => weights::run(subject, progress),
        StageArg::Activations => activations::run(subject, progress),
        StageArg::Invariants => invariants::run(subject, progress),
        StageArg::Logits => logits::run(subject, progress),
    }
}

/// The exit code: a fault beats what was not measured, which beats success.
fn exit_of(reports: &[StageReport], args: &VerifyArgs) -> Exit {
    let worst = reports.iter().map(StageReport::verdict).max().unwrap_or(Verdict::Unmeasured);
    let drift = reports.iter().any(|r| r.checks.iter().any(|c| c.verdict == Verdict::Drift));
    // A stage that was asked for by name and cannot apply was not shown.
    let named_na = !args.stages.is_empty() && reports.iter().any(|r| r.verdict() == Verdict::NotApplicable);
    match worst {
        Verdict::Divergent | Verdict::Nondeterministic | Verdict::Host => Exit::Fault,
        _ if args.strict && drift => Exit::Fault,
        Verdict::Unmeasured | Verdict::Inactive => Exit::Unmeasured,
        _ if named_na => Exit::Unmeasured,
        _ => Exit::Ok,
    }
}

fn print(
    subject: &Subject,
    device: &str,
    reports: &[StageReport],
    all: bool,
    exit: Exit,
    out: &mut dyn Write,
) -> std::io::Result<()> {
    writeln!(
        out,
        "{}: tp {}, {device}, recipe {}, attention {}, {}, rows judged with seed {}\n",
        subject.checkpoint.name(),
        subject.tp,
        subject.recipe.name(),
        subject.attention.name(),
        subject.prompt,
        subject.seed
    )?;
    let mut stages = table(&["stage", "verdict", ">checks", ">s", "what was seen"]);
    for r in reports {
        let seconds = format!("{:.1}", r.seconds);
        stages.add_row([
            r.stage.to_string(),
            r.verdict().name().into(),
            r.made.to_string(),
            seconds,
            r.summary.clone(),
        ]);
    }
    writeln!(out, "{stages}")?;
    let shown = |c: &&Check| all || !matches!(c.verdict, Verdict::Match | Verdict::NotApplicable);
    let rows: Vec<(&str, &Check)> =
        reports.iter().flat_map(|r| r.checks.iter().filter(shown).map(|c| (r.stage, c))).collect();
    if !rows.is_empty() {
        let mut checks = table(&["stage", "check", "verdict", "evidence"]);
        let most = if all { usize::MAX } else { 20 };
        for (stage, c) in rows.iter().take(most) {
            checks.add_row([stage, c.name.as_str(), c.verdict.name(), &c.detail]);
        }
        writeln!(out, "\n{checks}")?;
        if rows.len() > most {
            writeln!(out, "and {} more; --all or --json shows every one", rows.len() - most)?;
        }
    }
    let worst = reports.iter().map(StageReport::verdict).max().unwrap_or(Verdict::Unmeasured);
    write!(out, "\nverdict: {}", worst.name())?;
    let runs = |r: &&StageReport| matches!(r.stage, "weights" | "activations" | "invariants" | "logits");
    let bisectable = reports.iter().filter(runs).any(|r| r.verdict() >= Verdict::Divergent);
    match (worst, exit) {
        (Verdict::Divergent | Verdict::Nondeterministic, _) if bisectable && subject.baseline.is_none() => {
            writeln!(out, ". `lockstep bisect` with the same options names the fault.")
        }
        (Verdict::Drift, Exit::Fault) => writeln!(out, ", which --strict does not let pass (exit 1)"),
        (Verdict::Match | Verdict::Drift | Verdict::NotApplicable, Exit::Unmeasured) => {
            writeln!(out, ", but a stage that was asked for does not apply (exit 3)")
        }
        _ => writeln!(out),
    }
}

fn document(subject: &Subject, device: &str, reports: &[StageReport], exit: Exit) -> serde_json::Value {
    json!({
        "model": subject.checkpoint.name(),
        "tp": subject.tp,
        "device": device,
        "recipe": subject.recipe.name(),
        "attention": subject.attention.name(),
        "prompt": subject.prompt,
        "ids": subject.ids,
        "rows": subject.rows,
        "seed": subject.seed,
        "verdict": reports.iter().map(StageReport::verdict).max().unwrap_or(Verdict::Unmeasured).name(),
        "exit": exit.code(),
        "stages": reports.iter().map(StageReport::json).collect::<Vec<_>>(),
    })
}
