//! Subjects of verification over the golden models.

use std::sync::Arc;

use lockstep::checkpoint::Checkpoint;
use lockstep::checkpoint::oracle::Raw;
use lockstep::engine::{Attention, CpuBackend, Engines};
use lockstep::model::{Place, Point};
use lockstep::probe::{Captured, Trace, Values};
use lockstep::report::{Check, Progress, StageReport, Verdict};
use lockstep::verify::{Subject, sense};
use lockstep_reference::{Arith, Eps, ModelWeights, RefConfig, RefOptions, RefRecipe, forward};

use super::running::open;

/// Says nothing.
pub struct Silent;

impl Progress for Silent {
    fn at(&self, _: &str, done: usize, all: usize) {
        assert!(done <= all, "{done} of {all}");
    }
}

/// A subject with a prompt of `tokens` ids from a fixed sequence and plain engines.
pub fn subject(model: &str, tp: usize, tokens: usize) -> Subject {
    let checkpoint = open(model);
    let vocab = checkpoint.config().vocab as u64;
    // Knuth's multiplicative sequence: spread over the vocabulary, the same everywhere.
    let ids = (1..=tokens as u64).map(|i| (i * 2_654_435_761 % 4_294_967_296 % (vocab - 64)) as u32).collect();
    let rows = vec![0, tokens / 2, tokens - 1];
    Subject { prompt: "a fixed sequence".into(), seed: 1, ..over(checkpoint, tp, ids, rows) }
}

/// A subject with this prompt and plain engines.
pub fn over(checkpoint: Arc<Checkpoint>, tp: usize, ids: Vec<u32>, rows: Vec<usize>) -> Subject {
    Subject {
        checkpoint,
        baseline: None,
        engines: Box::new(CpuBackend::default()),
        recipe: RefRecipe::Strict,
        guessed: false,
        tp,
        attention: Attention::Dsa,
        ids,
        prompt: "fixed ids".into(),
        own_prompt: false,
        asks: Vec::new(),
        rows,
        layers: None,
        target: None,
        convention: None,
        server: None,
        seed: 0,
        sense: sense::SenseOptions::default(),
    }
}

/// The same with engines of another make.
pub fn with(model: &str, tp: usize, tokens: usize, engines: impl Engines + 'static) -> Subject {
    Subject { engines: Box::new(engines), ..subject(model, tp, tokens) }
}

/// A run of the reference on one rank, as an engine of that arithmetic would show it.
pub fn run_of_reference(of: &Subject, arith: Arith, options: RefOptions) -> Trace {
    let raw = Raw(of.checkpoint.source());
    let config = RefConfig::from_raw(&raw, Eps::File).expect("a configuration");
    let weights = ModelWeights::new(&raw, &config);
    let mut seen = Vec::new();
    let mut sink = |name: &str, value: ndarray::ArrayD<f64>| {
        let place: Place = name.parse().expect("a place");
        let rows = value.shape()[0];
        let shape = match place.point {
            Point::IndexScores => vec![rows],
            _ => place.shape(of.checkpoint.config(), 1),
        };
        let values = match place.point.is_choice() {
            true => Values::I32(value.iter().map(|v| *v as i32).collect()),
            false => Values::F32(value.iter().map(|v| *v as f32).collect()),
        };
        seen.push(Captured { place, rows, shape, values });
    };
    forward(&config, &weights, &of.ids, arith, options, &mut sink).expect("runs");
    Trace::new("another engine".into(), of.ids.clone(), of.attention, vec![seen])
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
