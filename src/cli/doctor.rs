//! `lockstep doctor`: is this host fit to run ranks? A table or JSON, and the exit code of the contract.

use std::io::Write;

use serde_json::json;

use super::args::{DeviceArg, DoctorArgs};
#[cfg(feature = "cuda")]
use super::subject::Bar;
use super::{CliError, Exit, write_json};
use crate::doctor::{Finding, host};
use crate::report::Verdict;
use crate::report::table::table;

pub(super) fn run(args: &DoctorArgs, out: &mut dyn Write) -> Result<Exit, CliError> {
    let mut findings = host::findings();
    let (more, missing) = gpus(args)?;
    findings.extend(more);
    let worst = findings.iter().map(|f| f.check.verdict).max().unwrap_or(Verdict::Unmeasured);
    let exit = if missing.is_some() { Exit::Usage } else { worst.into() };
    if args.json {
        let document = json!({
            "verdict": worst.name(), "exit": exit.code(), "quick": args.quick,
            "device": args.device.as_ref().map(DeviceArg::to_string),
            "checks": findings.iter().map(Finding::json).collect::<Vec<_>>(),
        });
        write_json(out, &document)?;
    } else {
        print(&findings, worst, out)?;
    }
    out.flush()?;
    missing.map_or(Ok(exit), |problem| Err(CliError::Usage(format!("--device cuda: {problem}"))))
}

fn print(findings: &[Finding], worst: Verdict, out: &mut dyn Write) -> std::io::Result<()> {
    let mut t = table(&["check", "verdict", "evidence"]);
    for Finding { check, .. } in findings {
        t.add_row([check.name.clone(), check.verdict.name().into(), check.detail.clone()]);
    }
    let gpus = findings.iter().any(|f| f.check.name == GPUS);
    let but = if gpus { "; no GPU was checked" } else { "" };
    writeln!(out, "{t}\n\nverdict: {}{but}", worst.name())
}

/// The finding that stands for GPUs where none is checked.
const GPUS: &str = "GPUs";

/// Libraries and GPUs: those that were asked for, or all that there are. And why those that were asked for cannot be
/// checked.
#[cfg(feature = "cuda")]
fn gpus(args: &DoctorArgs) -> Result<(Vec<Finding>, Option<String>), CliError> {
    use crate::device::cuda::cubin::Cubins;
    use crate::doctor::{gpus, software};

    let asked = match &args.device {
        Some(DeviceArg::Cpu) => return Ok((vec![without("--device cpu")], None)),
        Some(DeviceArg::Cuda(list)) => Some(list),
        None => None,
    };
    let (found, driver) = software::driver();
    if let Some(gpu) = asked.into_iter().flatten().find(|g| **g >= found && found > 0) {
        return Err(CliError::Usage(format!("--device cuda: there is no GPU {gpu}; found {found}")));
    }
    let cubins = Cubins { sources: args.kernels_dir.clone(), ..Cubins::default() };
    let reason = driver.check.detail.clone();
    let mut findings = vec![driver];
    findings.extend(software::libraries(&cubins));
    if found == 0 {
        findings.push(without(&reason));
        return Ok((findings, asked.map(|_| reason)));
    }
    let list = asked.filter(|list| !list.is_empty()).cloned().unwrap_or_else(|| (0..found).collect());
    findings.extend(gpus::run(&gpus::Request { gpus: list, cubins, quick: args.quick }, &Bar::new()));
    Ok((findings, None))
}

#[cfg(not(feature = "cuda"))]
fn gpus(args: &DoctorArgs) -> Result<(Vec<Finding>, Option<String>), CliError> {
    const NONE: &str = "this build has no CUDA device (feature cuda)";
    match &args.device {
        Some(DeviceArg::Cuda(_)) => Ok((vec![without(NONE)], Some(NONE.into()))),
        Some(DeviceArg::Cpu) => Ok((vec![without("--device cpu")], None)),
        None => Ok((vec![without(NONE)], None)),
    }
}

fn without(reason: &str) -> Finding {
    Finding::plain(GPUS, Verdict::NotApplicable, format!("none is checked: {reason}"))
}
