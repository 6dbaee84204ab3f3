//! `lockstep verify`: the stages in order, a table or JSON, and the exit code of the contract.

use std::io::Write;
use std::time::Instant;

use super::args::{StageArg, VerifyArgs};
#[cfg(feature = "serve")]
use super::certificate::Certificate;
use super::console::Bar;
#[cfg(feature = "serve")]
use super::serve::gate::ROWS;
use super::stages::{STAGES, covered};
use super::subject::{engines, lists_faults, run_of, subject};
use super::{CliError, Exit, console, emit, interrupt};
use crate::report::verification::Verification;
use crate::report::{Look, Page, StageReport, Verdict, json};
use crate::verify::{asks, sense};

/// Stages that say something where a server is judged: of the model's file, and of what comes out.
const OF_SERVERS: [&str; 3] = ["file", "tokenizer", "logits"];

pub(super) fn run(args: &VerifyArgs, out: &mut dyn Write) -> Result<Exit, CliError> {
    if lists_faults(&args.subject, out)? {
        return Ok(Exit::Ok);
    }
    has_use(args)?;
    #[cfg(feature = "serve")]
    if args.certificate.is_some() {
        certifies(args)?;
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
        } else if subject.server.is_some() && !OF_SERVERS.contains(name) {
            Ok(StageReport::not_applicable(name, "a server shows only what comes out"))
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
    found.advice = advice(&found, exit, subject.baseline.is_some() || subject.server.is_some());
    match json {
        true => emit(&found, true, out)?,
        false => interrupt::finally(|| found.foot(&mut page).and_then(|()| page.flush()))?,
    }
    if let Some(why) = &found.incomplete {
        console::error(why);
    }
    #[cfg(feature = "serve")]
    if let Some(path) = &args.certificate {
        match exit {
            Exit::Ok => Certificate::new(&subject, &found, &Bar::new("certificate: "))?.write(path)?,
            _ => console::note(&format!("no certificate is written to {}: the run was no pass", path.display())),
        }
    }
    Ok(exit)
}

/// Refuses what asks for more of a stage that is not to run: it would be passed over without a word.
fn has_use(args: &VerifyArgs) -> Result<(), CliError> {
    let more = [
        ("--asks", StageArg::Logits, args.asks.is_some()),
        ("--convention", StageArg::Activations, args.subject.convention.is_some()),
        ("--thorough", StageArg::Sense, args.thorough),
        ("--repair-plan", StageArg::Sense, args.repair_plan),
    ];
    let idle = |stage| !args.stages.is_empty() && !args.stages.contains(&stage);
    match more.into_iter().find(|(_, stage, is)| *is && idle(*stage)) {
        Some((what, stage, _)) => {
            let stage = STAGES.iter().find(|s| s.0 == stage).map_or("", |s| s.1);
            Err(CliError::Usage(format!("{what} is for stage {stage}, which is not among those named")))
        }
        None => Ok(()),
    }
}

/// Refuses to certify less than everything: less than what the gate of `serve` looks at, which the certificate stands in
/// for. A model whose weights are random on purpose must say so itself.
#[cfg(feature = "serve")]
fn certifies(args: &VerifyArgs) -> Result<(), CliError> {
    let s = &args.subject;
    let less = [
        ("stages by name".into(), !args.stages.is_empty()),
        ("--inject".into(), !s.inject.is_empty()),
        ("--target".into(), s.target.is_some()),
        ("--layers".into(), s.layers.is_some()),
        ("--prompt".into(), s.prompt.is_some()),
        (format!("--rows {}, and at least {ROWS} are judged", s.rows), s.rows < ROWS),
        ("--untrained".into(), args.untrained),
        ("--no-published-facts".into(), args.no_published_facts),
    ];
    match less.into_iter().find(|(_, is)| *is) {
        Some((what, _)) => Err(CliError::Usage(format!("--certificate: expected a run of everything, found {what}"))),
        None => Ok(()),
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
fn advice(found: &Verification, exit: Exit, has_other: bool) -> &'static str {
    let runs = |r: &&StageReport| matches!(r.stage, "weights" | "activations" | "invariants" | "logits");
    let bisectable = found.stages.iter().filter(runs).any(|r| r.verdict() >= Verdict::Divergent);
    match (found.verdict, exit) {
        (Verdict::Divergent | Verdict::Nondeterministic, _) if bisectable && !has_other => {
            ". `lockstep bisect` with the same options names the fault."
        }
        (Verdict::Drift, Exit::Fault) => ", which --strict does not let pass (exit 1)",
        (Verdict::Match | Verdict::Drift | Verdict::NotApplicable, Exit::Unmeasured) => {
            ", but a stage that was asked for does not apply (exit 3)"
        }
        _ => "",
    }
}
