//! `lockstep bisect`: the first bad layer, operation and region, and the kind of fault with its evidence.

use std::io::Write;

use super::args::BisectArgs;
use super::console::Bar;
use super::subject::{engines, lists_faults, run_of, subject};
use super::{CliError, Exit, emit};
use crate::diagnose::bisect;
use crate::report::bisection::BisectReport;

/// Prompts up to this length are judged at every token before bisect says that nothing is wrong.
const WIDEN_UP_TO: usize = 512;

pub(super) fn run(args: &BisectArgs, out: &mut dyn Write) -> Result<Exit, CliError> {
    if lists_faults(&args.subject, out)? {
        return Ok(Exit::Ok);
    }
    if let Some(path) = &args.subject.baseline {
        let problem = format!("--baseline {}: bisect judges by the reference; verify compares models", path.display());
        return Err(CliError::Usage(problem));
    }
    let mut subject = subject(&args.subject, engines(&args.subject)?)?;
    if subject.server.is_some() {
        let problem = "--target: a server shows no operation; expected a dump, or no target and --inject";
        return Err(CliError::Usage(problem.into()));
    }
    let found = {
        let bar = Bar::new("bisect: ");
        let found = bisect::run(&subject, &bar)?;
        // Nothing at the sampled rows: a fault of few tokens may lie between them.
        let all = subject.ids.len();
        let clean = found.file.is_empty() && found.culprit.is_none() && found.parts_at.is_none();
        if clean && subject.rows.len() < all && all <= WIDEN_UP_TO {
            subject.rows = (0..all).collect();
            bisect::operations(&subject, &bar)?
        } else {
            found
        }
    };
    let exit = found.verdict.into();
    let run = run_of(&args.subject, &subject);
    let report = BisectReport { run, rows: subject.rows.len(), rows_at_first: args.subject.rows, found };
    emit(&report, args.subject.model.json, out)?;
    Ok(exit)
}
