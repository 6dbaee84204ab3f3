//! `lockstep synth`: writes a seeded model of GLM-5's widths.

use std::io::Write;
use std::time::Instant;

use serde::Serialize;

use super::args::SynthArgs;
use super::console::Bar;
use super::{CliError, Exit, emit};
use crate::quant::QuantType;
use crate::report::table::{bytes, rate};
use crate::report::{Page, Progress, Record};
use crate::synth::{self, GLM5, SMALL, Spec, Written};

pub(super) fn run(args: &SynthArgs, out: &mut dyn Write) -> Result<Exit, CliError> {
    let spec = spec(args)?;
    let start = Instant::now();
    let bar = Bar::new("synth: ");
    let Written { bytes, tensors } = synth::write(&spec, &args.out, &|done, all| bar.bytes("written", done, all))?;
    drop(bar);
    let record = Made {
        path: args.out.display().to_string(),
        bytes,
        tensors,
        seconds: start.elapsed().as_secs_f64(),
        layers: spec.layers,
        dense_layers: spec.dense_layers,
        experts: spec.widths.experts,
        top_k: spec.widths.top_k,
        vocab: spec.widths.vocab,
        seed: spec.seed,
    };
    emit(&record, args.json, out)?;
    Ok(Exit::Ok)
}

/// The file that was made.
#[derive(Serialize)]
struct Made {
    path: String,
    bytes: u64,
    tensors: usize,
    seconds: f64,
    layers: u32,
    dense_layers: u32,
    experts: u32,
    top_k: u32,
    vocab: u32,
    seed: u64,
}

impl Record for Made {
    fn text(&self, page: &mut Page<'_>) -> std::io::Result<()> {
        let Made { path, bytes: size, tensors, seconds, layers, dense_layers: dense, experts, seed, .. } = self;
        let how = format!("{seconds:.1} s, {}", rate(*size as f64 / seconds));
        let what = format!("{tensors} tensors, {layers} layers ({dense} dense), {experts} experts, seed {seed}");
        page.line(format!("{path}: {}, {what}; {how}", bytes(*size)))
    }
}

fn spec(args: &SynthArgs) -> Result<Spec, CliError> {
    let mut widths = if args.small { SMALL } else { GLM5 };
    widths.experts = args.experts.unwrap_or(widths.experts);
    if widths.experts < 2 {
        let found = widths.experts;
        return Err(CliError::Usage(format!(
            "--experts: expected at least 2, so that a router has a choice, found {found}"
        )));
    }
    // Of few experts at most half are used, so that the router still has a choice.
    widths.experts_used = widths.experts_used.min(widths.experts / 2).max(1);
    widths.top_k = args.index_top_k.unwrap_or(widths.top_k);
    widths.vocab = args.vocab.unwrap_or(widths.vocab);
    let ty = args.r#type.as_deref().map(type_called).transpose()?;
    Ok(Spec { widths, layers: args.layers, dense_layers: args.dense_layers, ty, seed: args.seed })
}

fn type_called(name: &str) -> Result<QuantType, CliError> {
    let known = || QuantType::all().filter(|ty| synth::makes(*ty));
    known().find(|ty| ty.name().eq_ignore_ascii_case(name)).ok_or_else(|| {
        let names: Vec<&str> = known().map(QuantType::name).collect();
        CliError::Usage(format!("--type {name}: expected one of {}", names.join(", ")))
    })
}
