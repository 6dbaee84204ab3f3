//! Running golden models in tests: engines, whole prompts through a step.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use lockstep::checkpoint::Checkpoint;
use lockstep::device::{Batch, Token};
use lockstep::engine::sampler::Sampling;
use lockstep::engine::scheduler::{Finish, Request, Scheduler};
use lockstep::engine::{Engine, Options, StepOutput};
use lockstep::probe::Probe;

use super::golden;

/// A model of goldens/models; each is opened once.
pub fn open(model: &str) -> Arc<Checkpoint> {
    static OPENED: LazyLock<Mutex<HashMap<String, Arc<Checkpoint>>>> = LazyLock::new(Mutex::default);
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let one = || Arc::new(Checkpoint::open(Some(&golden(model))).expect("a valid model"));
    opened.entry(model.to_string()).or_insert_with(one).clone()
}

/// An engine with room for `sequences` sequences of the whole context.
pub fn engine(checkpoint: &Arc<Checkpoint>, tp: usize, sequences: usize) -> Engine {
    let one = Options::for_one(checkpoint.config());
    let options = Options { sequences, cache_tokens: one.cache_tokens * sequences, ..one };
    Engine::cpu(checkpoint.clone(), tp, options).expect("starts")
}

/// A greedy request.
pub fn greedy(prompt: &[u32], most: usize, stop: &[u32]) -> Request {
    Request::plain(prompt.to_vec(), most, stop.to_vec(), Sampling::default())
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
