//! `lockstep doctor`: is this host fit to run ranks? A table or JSON, and the exit code of the contract.

use std::io::Write;

use serde_json::json;

use super::args::{DeviceArg, DoctorArgs};
#[cfg(feature = "cuda")]
use super::subject::Bar;
use super::{CliError, Exit};
use crate::doctor::{Finding, host};
use crate::report::table::table;
use crate::verify::Verdict;

pub(super) fn run(args: &DoctorArgs, out: &mut dyn Write) -> Result<Exit, CliError> {
    let mut findings = host::findings();
    findings.extend(gpus(args)?);
    let worst = findings.iter().map(|f| f.check.verdict).max().unwrap_or(Verdict::Unmeasured);
    let exit = match worst {
        Verdict::Host | Verdict::Divergent | Verdict::Nondeterministic => Exit::Fault,
        Verdict::Unmeasured | Verdict::Inactive => Exit::Unmeasured,
        Verdict::NotApplicable | Verdict::Match | Verdict::Drift => Exit::Ok,
    };
    if args.json {
        let document = json!({
            "verdict": worst.name(), "exit": exit.code(), "quick": args.quick,
            "device": args.device.as_ref().map(DeviceArg::to_string),
            "checks": findings.iter().map(Finding::json).collect::<Vec<_>>(),
        });
        serde_json::to_writer_pretty(&mut *out, &document)?;
        writeln!(out)?;
        return Ok(exit);
    }
    let mut t = table(&["check", "verdict", "evidence"]);
    for Finding { check, .. } in &findings {
        t.add_row([check.name.clone(), check.verdict.name().into(), check.detail.clone()]);
    }
    writeln!(out, "{t}\n\nverdict: {}", worst.name())?;
    Ok(exit)
}

/// Libraries and GPUs: those that were asked for, or all that there are.
#[cfg(feature = "cuda")]
fn gpus(args: &DoctorArgs) -> Result<Vec<Finding>, CliError> {
    use crate::device::cuda::cubin::Cubins;
    use crate::doctor::{gpus, software};

    let asked = match &args.device {
        Some(DeviceArg::Cpu) => return Ok(vec![without("--device cpu")]),
        Some(DeviceArg::Cuda(list)) => Some(list),
        None => None,
    };
    let (found, driver) = software::driver();
    if let Some(list) = asked {
        let usage = |problem: String| Err(CliError::Usage(format!("--device cuda: {problem}")));
        if driver.check.verdict == Verdict::NotApplicable {
            return usage(driver.check.detail);
        }
        if let Some(gpu) = list.iter().find(|g| **g >= found && found > 0) {
            return usage(format!("there is no GPU {gpu}; found {found}"));
        }
    }
    let cubins = Cubins { sources: args.kernels_dir.clone(), ..Cubins::default() };
    let reason = driver.check.detail.clone();
    let mut findings = vec![driver];
    findings.extend(software::libraries(&cubins));
    if found == 0 {
        findings.push(without(&reason));
        return Ok(findings);
    }
    let list = asked.filter(|list| !list.is_empty()).cloned().unwrap_or_else(|| (0..found).collect());
    findings.extend(gpus::run(&gpus::Request { gpus: list, cubins, quick: args.quick }, &Bar::new()));
    Ok(findings)
}

#[cfg(not(feature = "cuda"))]
fn gpus(args: &DoctorArgs) -> Result<Vec<Finding>, CliError> {
    const NONE: &str = "this build has no CUDA device (feature cuda)";
    match &args.device {
        Some(DeviceArg::Cuda(_)) => Err(CliError::Usage(format!("--device cuda: {NONE}"))),
        Some(DeviceArg::Cpu) => Ok(vec![without("--device cpu")]),
        None => Ok(vec![without(NONE)]),
    }
}

fn without(reason: &str) -> Finding {
    Finding::plain("GPUs", Verdict::NotApplicable, format!("none is checked: {reason}"))
}
