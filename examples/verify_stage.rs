//! Runs one stage of `verify` from code: does each of four ranks hold the right bytes?
//!
//! `cargo run --example verify_stage [MODEL]`
#![allow(clippy::print_stdout)] // an example talks to a terminal

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use lockstep::checkpoint::Checkpoint;
use lockstep::engine::{Attention, CpuBackend};
use lockstep::report::{Progress, Verdict, clean};
use lockstep::verify::{Subject, sense, weights};
use lockstep_reference::RefRecipe;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/goldens/models/glm5-nano-Q4_K_M.gguf");

/// Says nothing of how far the stage is.
struct Silent;

impl Progress for Silent {
    fn at(&self, _: &str, _: usize, _: usize) {}
}

fn main() -> Result<(), Box<dyn Error>> {
    let model = PathBuf::from(std::env::args().nth(1).unwrap_or_else(|| GOLDEN.into()));
    let subject = Subject {
        checkpoint: Arc::new(Checkpoint::open(Some(&model))?),
        baseline: None,
        engines: Box::new(CpuBackend::default()),
        recipe: RefRecipe::Strict,
        convention: None,
        guessed: false,
        tp: 4,
        attention: Attention::Dsa,
        ids: vec![1, 2, 3],
        prompt: "three ids".into(),
        own_prompt: true,
        asks: Vec::new(),
        rows: vec![0, 1, 2],
        layers: None,
        target: None,
        server: None,
        seed: 0,
        sense: sense::SenseOptions::default(),
    };
    let report = weights::run(&subject, &Silent)?;
    println!("{}: {} ({} checks)", report.stage, report.verdict().name(), report.made);
    println!("{}", clean(&report.summary));
    for check in report.checks.iter().filter(|c| c.verdict > Verdict::Match) {
        println!("{} {}: {}", check.verdict.name(), clean(&check.name), clean(&check.detail));
    }
    Ok(())
}
