//! `lockstep doctor`: is this host fit to run ranks? A table or JSON, and the exit code of the contract.

use std::io::Write;

use super::args::{DeviceArg, DoctorArgs};
#[cfg(feature = "cuda")]
use super::console::Bar;
use super::{CliError, Exit, console, emit};
use crate::doctor::host;
use crate::report::checkup::{Checkup, GPUS};
use crate::report::{Check, Verdict};

pub(super) fn run(args: &DoctorArgs, out: &mut dyn Write) -> Result<Exit, CliError> {
    let mut checks = host::findings();
    let (more, missing) = gpus(args)?;
    checks.extend(more);
    let verdict = checks.iter().map(|c| c.verdict).max().unwrap_or(Verdict::Unmeasured);
    let exit = if missing.is_some() { Exit::Usage } else { verdict.into() };
    let device = args.device.as_ref().map(DeviceArg::to_string);
    emit(&Checkup { verdict, exit: exit.code(), quick: args.quick, device, checks }, args.json, out)?;
    if let Some(problem) = missing {
        console::error(&format!("--device cuda: {problem}"));
    }
    Ok(exit)
}

/// Libraries and GPUs: those that were asked for, or all that there are. And why those that were asked for cannot be
/// checked.
#[cfg(feature = "cuda")]
fn gpus(args: &DoctorArgs) -> Result<(Vec<Check>, Option<String>), CliError> {
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
    let reason = driver.detail.clone();
    let mut findings = vec![driver];
    findings.extend(software::libraries(&cubins));
    if found == 0 {
        findings.push(without(&reason));
        return Ok((findings, asked.map(|_| reason)));
    }
    let list = asked.filter(|list| !list.is_empty()).cloned().unwrap_or_else(|| (0..found).collect());
    findings.extend(gpus::run(&gpus::Request { gpus: list, cubins, quick: args.quick }, &Bar::new("doctor: ")));
    Ok((findings, None))
}

#[cfg(not(feature = "cuda"))]
fn gpus(args: &DoctorArgs) -> Result<(Vec<Check>, Option<String>), CliError> {
    const NONE: &str = "this build has no CUDA device (feature cuda)";
    match &args.device {
        Some(DeviceArg::Cuda(_)) => Ok((vec![without(NONE)], Some(NONE.into()))),
        Some(DeviceArg::Cpu) => Ok((vec![without("--device cpu")], None)),
        None => Ok((vec![without(NONE)], None)),
    }
}

fn without(reason: &str) -> Check {
    Check::new(GPUS, Verdict::NotApplicable, format!("none is checked: {reason}"))
}
