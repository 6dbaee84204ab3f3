//! `lockstep kernels`: what the kernels are, and a cache of them for machines that have no NVRTC.

use std::io::Write;
use std::time::Instant;

use lockstep_kernels::{ARCHS, UNITS};
use rayon::prelude::*;
use regex::Regex;
use serde_json::json;

use super::args::{KernelsAction, KernelsArgs};
use super::{CliError, Exit, write_json};
use crate::device::cuda::cubin::{Built, CubinError, Cubins, modules, nvrtc_version};
use crate::report::table::{bytes, table};

pub(super) fn run(args: &KernelsArgs, out: &mut dyn Write) -> Result<Exit, CliError> {
    match &args.action {
        KernelsAction::List { json } => list(*json, out),
        KernelsAction::Build { arch, kernels_dir, cache, filter, json } => {
            let mut cubins = Cubins { sources: kernels_dir.clone(), ..Cubins::default() };
            if let Some(cache) = cache {
                cubins.cache.clone_from(cache);
            }
            build(&cubins, arch, filter.as_deref(), *json, out)
        }
    }
}

fn list(json: bool, out: &mut dyn Write) -> Result<Exit, CliError> {
    if json {
        let unit = |u: &lockstep_kernels::Unit| json!({ "unit": u.name, "typed": u.typed, "kernels": u.kernels });
        let units: Vec<_> = UNITS.iter().map(unit).collect();
        write_json(out, &json!({ "archs": ARCHS, "types": lockstep_kernels::TYPES, "units": units }))?;
        return Ok(Exit::Ok);
    }
    let mut t = table(&["module", "kernels"]);
    for unit in &UNITS {
        let name = if unit.typed { format!("{}<type>", unit.name) } else { unit.name.into() };
        t.add_row([name, unit.kernels.join(", ")]);
    }
    writeln!(out, "{t}\n\ntypes: {}", lockstep_kernels::TYPES.join(", "))?;
    writeln!(out, "architectures: {}", ARCHS.join(", "))?;
    Ok(Exit::Ok)
}

fn build(
    cubins: &Cubins,
    archs: &[String],
    filter: Option<&str>,
    json: bool,
    out: &mut dyn Write,
) -> Result<Exit, CliError> {
    let filter = filter.map(Regex::new).transpose().map_err(|e| CliError::Usage(format!("--filter: {e}")))?;
    let archs: Vec<&str> = if archs.is_empty() { ARCHS.to_vec() } else { archs.iter().map(String::as_str).collect() };
    if let Some(other) = archs.iter().find(|a| !ARCHS.contains(a)) {
        let known = ARCHS.join(", ");
        return Err(CliError::Usage(format!(
            "--arch {other}: expected one of {known}, which the kernels are written for"
        )));
    }
    let archs: std::collections::BTreeSet<&str> = archs.into_iter().collect();
    let wanted = |name: &str| filter.as_ref().is_none_or(|f| f.is_match(name));
    let mut work = Vec::new();
    for arch in &archs {
        for (unit, ty) in modules() {
            let name = ty.map_or(unit.name.to_string(), |ty| format!("{}<{ty}>", unit.name));
            if wanted(&name) {
                work.push((unit.name, ty, *arch));
            }
        }
    }
    if work.is_empty() {
        let text = filter.as_ref().map_or("", Regex::as_str);
        return Err(CliError::Usage(format!(
            "--filter {text}: no module matches; `lockstep kernels list` names them, as in matmul<Q4_K>"
        )));
    }
    let start = Instant::now();
    let built: Result<Vec<Built>, CubinError> =
        work.par_iter().map(|(unit, ty, arch)| cubins.build(unit, *ty, arch)).collect();
    let built = built.map_err(|e| CliError::Usage(e.to_string()))?;
    let seconds = start.elapsed().as_secs_f64();
    let large: Vec<(&Built, &lockstep_kernels::Usage)> =
        built.iter().flat_map(|b| b.usage.iter().filter(|u| u.is_too_large()).map(move |u| (b, u))).collect();
    let compiled = built.iter().filter(|b| !b.cached).count();
    let nvrtc = nvrtc_version().map(|(major, minor)| format!("{major}.{minor}"));
    if json {
        let module = |b: &Built| {
            let kernel = |u: &lockstep_kernels::Usage| json!({ "kernel": u.kernel, "registers": u.registers, "stack": u.stack, "spills": u.spills });
            json!({
                "module": b.module, "arch": b.arch, "file": b.path.display().to_string(), "cached": b.cached, "bytes": b.bytes,
                "kernels": b.usage.iter().map(kernel).collect::<Vec<_>>(),
            })
        };
        let document = json!({
            "nvrtc": nvrtc, "cache": cubins.cache.display().to_string(), "seconds": seconds, "compiled": compiled,
            "modules": built.iter().map(module).collect::<Vec<_>>(),
        });
        write_json(out, &document)?;
    } else {
        let total: usize = built.iter().map(|b| b.bytes).sum();
        writeln!(
            out,
            "{} modules for {}: {compiled} compiled by NVRTC {}, {} cached; {} in {}, {seconds:.1} s",
            built.len(),
            archs.iter().copied().collect::<Vec<_>>().join(", "),
            nvrtc.as_deref().unwrap_or("(none)"),
            built.len() - compiled,
            bytes(total as u64),
            cubins.cache.display()
        )?;
        for (b, u) in &large {
            let (module, arch, kernel) = (&b.module, &b.arch, &u.kernel);
            writeln!(out, "{module} for {arch}: {kernel} uses {} bytes of stack and {} of spills", u.stack, u.spills)?;
        }
    }
    Ok(if large.is_empty() { Exit::Ok } else { Exit::Fault })
}
