//! `lockstep kernels`: what the kernels are, and a cache of them for machines that have no NVRTC.

use std::io::Write;
use std::time::Instant;

use lockstep_kernels::{ARCHS, TILED, Types, UNITS};
use rayon::prelude::*;
use regex::Regex;
use serde::{Serialize, Serializer};
use serde_json::json;

use super::args::{KernelsAction, KernelsArgs};
use super::{CliError, Exit, emit};
use crate::device::cuda::cubin::{Built, CubinError, Cubins, modules, nvrtc_version};
use crate::report::table::{Table, bytes};
use crate::report::{Page, Record};

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

/// The kernels, by module.
#[derive(Serialize)]
struct Listed {
    archs: &'static [&'static str],
    types: &'static [&'static str],
    tiled: &'static [&'static str],
    units: Vec<ListedUnit>,
}

#[derive(Serialize)]
struct ListedUnit {
    unit: &'static str,
    formats: &'static [&'static str],
    kernels: &'static [&'static str],
}

impl Record for Listed {
    fn text(&self, page: &mut Page<'_>) -> std::io::Result<()> {
        let mut t = Table::new(&["module", "kernels"]);
        for ListedUnit { unit, formats, kernels } in &self.units {
            let of = |format: &&str| format!("{unit}<type{}>", if *format == "tiles" { " tiles" } else { "" });
            let modules: Vec<String> = formats.iter().map(of).collect();
            t.row([if modules.is_empty() { (*unit).into() } else { modules.join(", ") }, kernels.join(", ")]);
        }
        page.table(&t)?;
        page.gap()?;
        page.line(format!("types: {}", self.types.join(", ")))?;
        page.line(format!("in tiles on sm_90 and later: {}", self.tiled.join(", ")))?;
        page.line(format!("architectures: {}", self.archs.join(", ")))
    }
}

/// What a unit is compiled for, of each type.
fn formats(types: Types) -> &'static [&'static str] {
    match types {
        Types::None => &[],
        Types::Planes => &["planes"],
        Types::Tiles => &["tiles"],
        Types::All => &["planes", "tiles"],
    }
}

fn list(json: bool, out: &mut dyn Write) -> Result<Exit, CliError> {
    let unit =
        |u: &'static lockstep_kernels::Unit| ListedUnit { unit: u.name, formats: formats(u.types), kernels: u.kernels };
    let units = UNITS.iter().map(unit).collect();
    emit(&Listed { archs: &ARCHS, types: &lockstep_kernels::TYPES, tiled: &TILED, units }, json, out)?;
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
    let large = |b: &Built| b.usage.iter().any(|u| u.is_too_large());
    let exit = if built.iter().any(large) { Exit::Fault } else { Exit::Ok };
    let record = Compiled {
        nvrtc: nvrtc_version().map(|(major, minor)| format!("{major}.{minor}")),
        cache: cubins.cache.display().to_string(),
        seconds,
        compiled: built.iter().filter(|b| !b.cached).count(),
        modules: built,
        archs: archs.into_iter().collect::<Vec<_>>().join(", "),
    };
    emit(&record, json, out)?;
    Ok(exit)
}

/// What was compiled, and what was there.
#[derive(Serialize)]
struct Compiled {
    nvrtc: Option<String>,
    cache: String,
    seconds: f64,
    compiled: usize,
    #[serde(serialize_with = "modules_as_json")]
    modules: Vec<Built>,
    #[serde(skip)]
    archs: String,
}

/// The crate of the kernels depends on nothing, so what is its own is written here.
fn modules_as_json<S: Serializer>(modules: &[Built], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(modules.iter().map(|b| {
        let kernel = |u: &lockstep_kernels::Usage| json!({ "kernel": u.kernel, "registers": u.registers, "stack": u.stack, "spills": u.spills });
        let kernels: Vec<_> = b.usage.iter().map(kernel).collect();
        let (file, cached) = (b.path.display().to_string(), b.cached);
        json!({ "module": b.module, "arch": b.arch, "file": file, "cached": cached, "bytes": b.bytes, "kernels": kernels })
    }))
}

impl Record for Compiled {
    fn text(&self, page: &mut Page<'_>) -> std::io::Result<()> {
        let Compiled { nvrtc, cache, seconds, compiled, modules, archs } = self;
        let (all, size) = (modules.len(), bytes(modules.iter().map(|b| b.bytes as u64).sum()));
        let (nvrtc, cached) = (nvrtc.as_deref().unwrap_or("(none)"), all - compiled);
        page.line(format!(
            "{all} modules for {archs}: {compiled} compiled by NVRTC {nvrtc}, {cached} cached; {size} in {cache}, \
             {seconds:.1} s"
        ))?;
        for (b, u) in modules.iter().flat_map(|b| b.usage.iter().map(move |u| (b, u))).filter(|(_, u)| u.is_too_large())
        {
            let (module, arch, kernel) = (&b.module, &b.arch, &u.kernel);
            page.line(format!(
                "{module} for {arch}: {kernel} uses {} bytes of stack and {} of spills",
                u.stack, u.spills
            ))?;
        }
        Ok(())
    }
}
