//! Stage `kernels`: is every kernel right on this model's shapes and types, on this GPU?
//!
//! Each kernel runs on inputs of its own, three times, in memory whose every word is known: it must give the same bits,
//! write all that it is to write and nothing else, lose what a NaN touches and nothing else. Values are judged against
//! f64 by the noise floor, and against a naive kernel that shares no loop with the fast one; what is exact is compared
//! bit for bit. The inputs need no model, so every tensor type and many ragged shapes are tried beside the model's own.

mod attention;
mod cache;
mod case;
mod indexer;
mod lab;
mod norms;
mod pack;
mod products;
mod random;
mod router;
mod rows;
mod sample;
mod slots;
mod weights;

use std::collections::BTreeSet;

use lockstep_kernels::{UNITS, Unit, geometry};
use rayon::prelude::*;

use self::lab::Lab;
use self::products::Shape;
use super::{Subject, VerifyError};
use crate::device::cuda::cubin::modules;
use crate::device::cuda::format::Format;
use crate::device::cuda::gpu::Gpu;
use crate::engine::EngineError;
use crate::model::{Kind, params};
use crate::quant::QuantType;
use crate::report::{Check, Progress, StageReport, Verdict};
use crate::shard::{ShardPlan, TpPlan};

/// The unit whose kernels test the machine: the stage `host` runs and judges them.
const OF_HOST: &str = "doctor";
/// Rows of a matrix beyond which only the rest counts: tiles repeat.
const MOST_ROWS: usize = 2048;
/// Matrices of a stack.
const MOST_STACK: usize = 4;
/// Rows of x at the model's own shapes.
const MODEL_ROWS: usize = 33;

/// Runs the stage.
///
/// # Errors
/// A GPU that cannot be opened. What goes wrong on it later is a finding.
pub fn run(subject: &Subject, progress: &dyn Progress) -> Result<StageReport, VerifyError> {
    let Some(backend) = subject.engines.backend().cuda() else {
        return Ok(StageReport::not_applicable("kernels", "the CPU device has no kernels of its own"));
    };
    let ordinal = backend.gpus(subject.tp)?.first().copied().unwrap_or(0);
    let gpu = Gpu::open(ordinal, backend.cubins.clone()).map_err(EngineError::from)?;
    // Compiling takes longer than running, and modules compile side by side. One that does not says so at its first launch.
    let modules = of_gpu(&gpu.arch);
    modules.par_iter().for_each(|(unit, format)| {
        let _ = gpu.cubins().build(unit.name, *format, &gpu.arch); // reported by the check that needs it
    });
    let lab = Lab::new(&gpu, subject.tp);
    let steps = steps(subject, &gpu.arch);
    let mut checks = Vec::new();
    for (i, step) in steps.iter().enumerate() {
        progress.at("groups of checks", i, steps.len());
        step(&lab, &mut checks);
        // A kernel that breaks the context takes every later one with it; they are not to blame.
        if let Err(e) = gpu.synchronise(&|| "the kernels under test".into()) {
            let rest = steps.len() - i - 1;
            checks.push(Check::new(
                "the rest",
                Verdict::Unmeasured,
                format!("{rest} groups of checks did not run: {e}"),
            ));
            break;
        }
    }
    checks.push(coverage(&lab));
    let doctors: Vec<&str> = Unit::named(OF_HOST).map_or(Vec::new(), |unit| unit.kernels.to_vec());
    let detail = format!("{}: the stage host runs them", doctors.join(", "));
    checks.push(Check::new("kernels that test the machine", Verdict::NotApplicable, detail));
    let report = StageReport::new("kernels", "", checks);
    let worst = report.worst().map_or("none".into(), |c| {
        let (rho, limit) = c.rho.unwrap_or((0.0, 1.0));
        format!("{}: rho {rho:.2} of {limit:.2}", c.name)
    });
    let summary = format!("{} checks on GPU {ordinal} ({}, {}); worst {worst}", report.made, gpu.name, gpu.arch);
    Ok(StageReport { summary, ..report })
}

/// A group of checks that runs as a whole.
type Step<'a> = Box<dyn Fn(&Lab<'_>, &mut Vec<Check>) + 'a>;

fn steps<'a>(subject: &'a Subject, arch: &'a str) -> Vec<Step<'a>> {
    let tiles = geometry::has_tiles(arch);
    let c = subject.checkpoint.config();
    let mut steps: Vec<Step<'_>> = vec![
        Box::new(|lab, out| rows::run(lab, c, out)),
        Box::new(|lab, out| norms::run(lab, c, out)),
        Box::new(|lab, out| cache::run(lab, c.cache_width(), out)),
        Box::new(sample::run),
        Box::new(|lab, out| router::run(lab, c, out)),
        Box::new(|lab, out| indexer::run(lab, c, out)),
        Box::new(|lab, out| attention::run(lab, c, out)),
    ];
    for ty in QuantType::all() {
        steps.push(Box::new(move |lab, out| {
            pack::run(lab, ty, out);
            for format in Format::all(ty).filter(|format| tiles || !format.tiled) {
                if format.tiled {
                    pack::tiles(lab, ty, out);
                }
                products::ragged(format).iter().for_each(|shape| products::run(lab, shape, out));
                slots::run(lab, &products::experts(format), out);
            }
        }));
    }
    let (whole, experts) = shapes(subject, arch);
    for shape in whole {
        steps.push(Box::new(move |lab, out| products::run(lab, &shape, out)));
    }
    for shape in experts {
        steps.push(Box::new(move |lab, out| slots::run(lab, &shape, out)));
    }
    steps
}

/// The shapes that the first and the last rank multiply, each once: single matrices and heads, then stacks of experts.
fn shapes(subject: &Subject, arch: &str) -> (BTreeSet<Shape>, BTreeSet<Shape>) {
    let (c, tp) = (subject.checkpoint.config(), subject.tp);
    let (mut whole, mut experts) = (BTreeSet::new(), BTreeSet::new());
    let Ok(plan) = TpPlan::new(c, tp) else { return (whole, experts) }; // refused before anything runs
    for param in params::of_trunk(c) {
        let router = param.kind == Kind::Router;
        // Vectors are not multiplied, and the embedding is only looked up.
        if (param.kind.is_plain() && !router) || param.kind == Kind::TokenEmbd {
            continue;
        }
        let ty = match router {
            true => QuantType::F32,
            false => match subject.checkpoint.type_of(param) {
                Ok(ty) => ty,
                Err(_) => continue, // the stages file and weights say so
            },
        };
        for rank in 0..tp {
            let slice = plan.slice(param, ty.block(), rank);
            let (rows, cols) = (slice.rows.len(), slice.covered.len());
            let rows = if rows > MOST_ROWS + 64 { MOST_ROWS + rows % 64 } else { rows };
            let stack = slice.stack.len().min(MOST_STACK);
            if rows == 0 || cols == 0 || stack == 0 {
                continue;
            }
            let own = match param.kind.is_expert_stack() {
                true => (0, cols),
                false => (slice.cols.start - slice.covered.start, slice.cols.end - slice.covered.start),
            };
            let format = Format::of(ty, rows, cols, arch);
            let shape = Shape { format, stack, rows, cols, own, odd: false, most: MODEL_ROWS };
            if param.kind.is_expert_stack() {
                experts.insert(shape)
            } else {
                whole.insert(shape)
            };
        }
    }
    (whole, experts)
}

/// The modules that are tried on a GPU: those that test the machine are the stage `host`'s, and old ones take no tiles.
fn of_gpu(arch: &str) -> Vec<(&'static Unit, Option<Format>)> {
    let fits = |format: &Option<Format>| geometry::has_tiles(arch) || !format.is_some_and(|format| format.tiled);
    modules().filter(|(unit, format)| unit.name != OF_HOST && fits(format)).collect()
}

/// Every kernel of the manifest must have run, typed ones for every type: no data is never a pass.
fn coverage(lab: &Lab<'_>) -> Check {
    let launched = lab.launched();
    let missing: Vec<String> = of_gpu(&lab.gpu.arch)
        .into_iter()
        .flat_map(|(unit, format)| unit.kernels.iter().map(move |kernel| (*kernel, format)))
        .filter(|key| !launched.contains(key))
        .map(|(kernel, format)| format.map_or(kernel.to_string(), |format| format!("{kernel}<{format}>")))
        .collect();
    match missing.len() {
        0 => Check::new("coverage", Verdict::Match, format!("every kernel of {} units ran", UNITS.len() - 1)),
        n => Check::new("coverage", Verdict::Unmeasured, format!("{n} kernels did not run: {}", missing.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The families that launch a kernel of each unit.
    const SOURCES: [(&str, &[&str]); 9] = [
        ("matmul", &[include_str!("products.rs"), include_str!("slots.rs"), include_str!("pack.rs")]),
        ("pack", &[include_str!("pack.rs")]),
        ("tiles", &[include_str!("pack.rs"), include_str!("products.rs"), include_str!("slots.rs")]),
        ("norm", &[include_str!("norms.rs")]),
        ("rows", &[include_str!("rows.rs"), include_str!("cache.rs"), include_str!("products.rs")]),
        ("attention", &[include_str!("attention.rs")]),
        ("indexer", &[include_str!("indexer.rs")]),
        ("router", &[include_str!("router.rs")]),
        ("sample", &[include_str!("sample.rs")]),
    ];

    #[test]
    fn every_kernel_of_the_manifest_has_a_case() {
        for unit in UNITS.iter().filter(|u| u.name != OF_HOST) {
            let sources = SOURCES.iter().find(|(name, _)| *name == unit.name).map_or(&[][..], |(_, s)| *s);
            for kernel in unit.kernels {
                let name = format!("\"{kernel}\"");
                assert!(sources.iter().any(|text| text.contains(&name)), "{}: {kernel} has no check", unit.name);
            }
        }
        assert_eq!(SOURCES.len() + 1, UNITS.len());
        assert!(Unit::named(OF_HOST).is_some());
    }
}
