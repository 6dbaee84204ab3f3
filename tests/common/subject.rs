//! Subjects of verification over the golden models.

use std::sync::Arc;

use lockstep::checkpoint::Checkpoint;
use lockstep::engine::{Attention, CpuBackend, Engines, Recipe};
use lockstep::report::{Check, Progress, StageReport, Verdict};
use lockstep::verify::Subject;

use crate::common::golden;

pub const NANO: &str = "glm5-nano-Q4_K_M.gguf";
pub const PICO: &str = "pico-Q4_K_M-split-00001-of-00004.gguf";
pub const NANO52: &str = "nano52-Q2_K.gguf";

/// Says nothing.
pub struct Silent;

impl Progress for Silent {
    fn at(&self, _: &str, _: usize, _: usize) {}
}

/// A subject with a prompt of `tokens` ids from a fixed sequence and plain engines.
pub fn subject(model: &str, tp: usize, tokens: usize) -> Subject {
    let checkpoint = Arc::new(Checkpoint::open(Some(&golden(model))).expect("a model"));
    let vocab = checkpoint.config().vocab as u64;
    // Knuth's multiplicative sequence: spread over the vocabulary, the same everywhere.
    let ids = (1..=tokens as u64).map(|i| (i * 2_654_435_761 % 4_294_967_296 % (vocab - 64)) as u32).collect();
    Subject {
        checkpoint,
        baseline: None,
        engines: Box::new(CpuBackend::default()),
        recipe: Recipe::Strict,
        tp,
        attention: Attention::Dsa,
        ids,
        prompt: "a fixed sequence".into(),
        own_prompt: false,
        asks: Vec::new(),
        rows: vec![0, tokens / 2, tokens - 1],
        layers: None,
        target: None,
        seed: 1,
    }
}

/// The same with engines of another make.
pub fn with(model: &str, tp: usize, tokens: usize, engines: impl Engines + 'static) -> Subject {
    Subject { engines: Box::new(engines), ..subject(model, tp, tokens) }
}

/// Verdict and detail of the check whose name begins with `name`.
pub fn check<'a>(report: &'a StageReport, name: &str) -> (Verdict, &'a str) {
    let found = report.checks.iter().find(|c| c.name.starts_with(name));
    let found = found.unwrap_or_else(|| panic!("no check {name} in {}", show(report)));
    (found.verdict, &found.detail)
}

/// Every check as a line.
pub fn show(report: &StageReport) -> String {
    let line = |c: &Check| format!("{:16} {} {:?}: {}\n", c.verdict.name(), c.name, c.rho, c.detail);
    format!("{} {:.1} s\n{}", report.summary, report.seconds, report.checks.iter().map(line).collect::<String>())
}
