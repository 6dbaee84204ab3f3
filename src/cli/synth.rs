//! `lockstep synth`: writes a seeded model of GLM-5's widths.

use std::io::Write;
use std::time::Instant;

use serde_json::json;

use super::args::SynthArgs;
use super::subject::Bar;
use super::{CliError, Exit, write_json};
use crate::quant::QuantType;
use crate::report::Progress;
use crate::report::table::bytes;
use crate::synth::{self, GLM5, SMALL, Spec, Written};

pub(super) fn run(args: &SynthArgs, out: &mut dyn Write) -> Result<Exit, CliError> {
    let spec = spec(args)?;
    let start = Instant::now();
    let bar = Bar::new();
    let mib = |n: u64| (n >> 20) as usize;
    let written = synth::write(&spec, &args.out, &|done, all| bar.at("MiB written", mib(done), mib(all)))?;
    drop(bar);
    let (Written { bytes: size, tensors }, seconds) = (written, start.elapsed().as_secs_f64());
    if args.json {
        let document = json!({
            "path": args.out.display().to_string(), "bytes": size, "tensors": tensors, "seconds": seconds,
            "layers": spec.layers, "dense_layers": spec.dense_layers, "experts": spec.widths.experts, "top_k": spec.widths.top_k,
            "vocab": spec.widths.vocab, "seed": spec.seed,
        });
        write_json(out, &document)?;
    } else {
        let (path, speed) = (args.out.display(), size as f64 / 1e6 / seconds);
        let (layers, dense, experts) = (spec.layers, spec.dense_layers, spec.widths.experts);
        writeln!(
            out,
            "{path}: {}, {tensors} tensors, {layers} layers ({dense} dense), {experts} experts, seed {}; {seconds:.1} s, \
             {speed:.0} MB/s",
            bytes(size),
            spec.seed
        )?;
    }
    Ok(Exit::Ok)
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
