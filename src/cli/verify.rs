//! `lockstep verify`: the stages in order, a table or JSON, and the exit code of the contract.

use std::io::Write;
use std::time::Instant;

use serde_json::json;

use super::args::{StageArg, VerifyArgs};
use super::subject::{Bar, device_name, engines, lists_faults, subject};
use super::{CliError, Exit, write_json};
#[cfg(feature = "cuda")]
use crate::doctor;
use crate::report::table::table;
use crate::report::{Check, Progress, StageReport, Verdict};
#[cfg(feature = "cuda")]
use crate::verify::kernels::run as kernels;
use crate::verify::{Subject, VerifyError, activations, asks, file, invariants, logits, tokenizer, weights};

type Stage = fn(&Subject, &dyn Progress) -> Result<StageReport, VerifyError>;

/// The stages in order of certainty.
const STAGES: [(StageArg, &str, Stage); 8] = [
    (StageArg::Host, "host", host),
    (StageArg::File, "file", file::run),
    (StageArg::Tokenizer, "tokenizer", tokenizer::run),
    (StageArg::Weights, "weights", weights::run),
    (StageArg::Kernels, "kernels", kernels),
    (StageArg::Activations, "activations", activations::run),
    (StageArg::Invariants, "invariants", invariants::run),
    (StageArg::Logits, "logits", logits::run),
];

#[cfg(feature = "cuda")]
fn host(subject: &Subject, progress: &dyn Progress) -> Result<StageReport, VerifyError> {
    crate::verify::host::run(subject, |gpus, cubins| {
        let request = doctor::gpus::Request { gpus, cubins, quick: true };
        let found = doctor::host::findings().into_iter().chain(doctor::gpus::run(&request, progress));
        found.map(|f| f.check).collect()
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
    let subject = subject;
    let mut reports = Vec::new();
    for (stage, name, run) in STAGES {
        if args.stages.is_empty() || args.stages.contains(&stage) {
            let start = Instant::now();
            let bar = Bar::new();
            let faulty = |r: &StageReport| r.verdict() >= Verdict::Divergent;
            let host = |r: &StageReport| r.verdict() == Verdict::Host;
            if reports.iter().any(host) {
                let why = "this machine copies or adds wrongly (stage host), so that nothing else is judged";
                reports.push(StageReport::unmeasured(name, why));
                continue;
            }
            let mut report = match run(&subject, &bar) {
                // What was found before says why this stage cannot run; it must not be lost.
                Err(e) if reports.iter().any(faulty) => StageReport::unmeasured(name, e.to_string()),
                other => other?,
            };
            report.seconds = start.elapsed().as_secs_f64();
            reports.push(report);
        }
    }
    let exit = exit_of(&reports, args);
    let device = device_name(&args.subject, &subject);
    if args.subject.model.json {
        write_json(out, &document(&subject, &device, &reports, exit))?;
    } else {
        print(&subject, &device, &reports, args.all, exit, out)?;
    }
    Ok(exit)
}

/// The exit code: a fault beats what was not measured, which beats success.
fn exit_of(reports: &[StageReport], args: &VerifyArgs) -> Exit {
    let worst = reports.iter().map(StageReport::verdict).max().unwrap_or(Verdict::Unmeasured);
    let drift = reports.iter().any(|r| r.checks.iter().any(|c| c.verdict == Verdict::Drift));
    // A stage that was asked for by name and cannot apply was not shown.
    let named_na = !args.stages.is_empty() && reports.iter().any(|r| r.verdict() == Verdict::NotApplicable);
    match Exit::from(worst) {
        _ if args.strict && drift => Exit::Fault,
        Exit::Ok if named_na => Exit::Unmeasured,
        exit => exit,
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
