//! Running golden models in tests: engines, whole prompts through a step, golden tensors.
#![allow(dead_code)] // each test binary uses its own part

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lockstep::checkpoint::Checkpoint;
use lockstep::device::{Batch, Token};
use lockstep::engine::sampler::Sampling;
use lockstep::engine::scheduler::{Finish, Request, Scheduler};
use lockstep::engine::{Engine, Options, StepOutput};
use lockstep::probe::Probe;
use safetensors::{Dtype, SafeTensors};

pub const GLM5_NANO: &str = "glm5-nano-Q4_K_M.gguf";
pub const NANO52: &str = "nano52-Q2_K.gguf";
pub const PICO: &str = "pico-Q4_K_M-split-00001-of-00004.gguf";

/// A file of goldens/.
pub fn goldens(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens").join(path)
}

/// A model of goldens/models.
pub fn open(model: &str) -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open(Some(&goldens("models").join(model))).expect("a valid model"))
}

/// An engine with room for `sequences` sequences of the whole context.
pub fn engine(checkpoint: &Arc<Checkpoint>, tp: usize, sequences: usize) -> Engine {
    let one = Options::for_one(checkpoint.config());
    let options = Options { sequences, cache_tokens: one.cache_tokens * sequences, ..one };
    Engine::cpu(checkpoint.clone(), tp, options).expect("starts")
}

/// A greedy request.
pub fn greedy(prompt: &[u32], most: usize, stop: &[u32]) -> Request {
    Request { prompt: prompt.to_vec(), most, stop: stop.to_vec(), sampling: Sampling::default() }
}

/// Runs requests together to their ends: the tokens of each, stop ids included.
pub fn run_all(engine: &mut Engine, requests: Vec<Request>) -> Vec<(Vec<u32>, Finish)> {
    let mut scheduler = Scheduler::default();
    let numbers: Vec<u64> = requests.into_iter().map(|r| scheduler.add(engine, r).expect("accepted")).collect();
    let mut out: HashMap<u64, (Vec<u32>, Option<Finish>)> = HashMap::new();
    while scheduler.is_busy() {
        for event in scheduler.step(engine).expect("a step") {
            let entry = out.entry(event.sequence).or_default();
            assert!(entry.1.is_none(), "a token after the end");
            entry.0.push(event.token);
            entry.1 = event.finish;
        }
    }
    let take = |n: u64| out.remove(&n).map(|(ids, finish)| (ids, finish.expect("an end"))).expect("tokens");
    numbers.into_iter().map(take).collect()
}

/// A step over `ids` from position `start` of the sequence with this block table; logits of every row.
pub fn step(engine: &Engine, ids: &[u32], start: usize, table: &[u32], probes: Vec<Box<dyn Probe>>) -> StepOutput {
    let tokens = ids.iter().enumerate();
    let tokens = tokens.map(|(i, id)| Token { id: *id, position: (start + i) as u32, sequence: 0 }).collect();
    let batch =
        Batch { tokens, tables: vec![table.to_vec()], logits: (0..ids.len() as u32).collect(), ..Batch::default() };
    engine.step(batch, probes).expect("a step")
}

/// Logits of all rows of a prompt that is run in chunks, in a sequence of its own.
pub fn logits_in_chunks(engine: &mut Engine, ids: &[u32], chunk: usize) -> Vec<f32> {
    let mut table = Vec::new();
    engine.pool().reserve(&mut table, ids.len()).expect("pages");
    let mut logits = Vec::new();
    for (i, part) in ids.chunks(chunk).enumerate() {
        logits.extend(step(engine, part, i * chunk, &table, Vec::new()).logits);
    }
    engine.pool().release(&mut table);
    logits
}

/// Golden tensors by name.
pub struct Goldens {
    pub f32: HashMap<String, Vec<f32>>,
    pub i32: HashMap<String, Vec<i32>>,
}

impl Goldens {
    pub fn read(path: &str) -> Self {
        let file = std::fs::read(goldens(path)).expect("a golden file");
        let mut all = Goldens { f32: HashMap::new(), i32: HashMap::new() };
        for (name, view) in SafeTensors::deserialize(&file).expect("safetensors").tensors() {
            let words = view.data().as_chunks::<4>().0.iter();
            match view.dtype() {
                Dtype::F32 => drop(all.f32.insert(name, words.map(|b| f32::from_le_bytes(*b)).collect())),
                Dtype::I32 => drop(all.i32.insert(name, words.map(|b| i32::from_le_bytes(*b)).collect())),
                other => panic!("{name}: {other:?}"),
            }
        }
        all
    }

    pub fn ids(&self) -> Vec<u32> {
        self.i32["input_ids"].iter().map(|id| *id as u32).collect()
    }
}

/// |a - b| / |b| over all values.
pub fn relative_l2(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |v: f64| v * v;
    let difference: f64 = a.iter().zip(b).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    (difference / b.iter().map(|b| square(f64::from(*b))).sum::<f64>()).sqrt()
}

/// The bits of every value.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}
