//! The engine's promises: the same text at every degree and as the reference, the same bits however a prompt is cut or
//! batched, logits within f32 rounding of exact ones, and errors instead of panics and hangs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::goldens::{Goldens, OF_NANO_LONG, OF_NANO_SHORT, OF_NANO52, OF_PICO};
use crate::common::running::{bits, engine, greedy, logits_in_chunks, open, relative_l2, run_all, step};
use crate::common::{GLM5_NANO, NANO52, PICO};
use lockstep::checkpoint::Checkpoint;
use lockstep::checkpoint::oracle::Raw;
use lockstep::comm::{CommError, Threads};
use lockstep::device::cpu::CpuDevice;
use lockstep::device::{Around, Batch, Call, Device, DeviceError, Recipe as DeviceRecipe, StepShape, Token};
use lockstep::engine::kv::PAGE;
use lockstep::engine::scheduler::Scheduler;
use lockstep::engine::{Attention, Engine, EngineError, Options, Ranks};
use lockstep::model::{Place, Point};
use lockstep::probe::{Capture, Probe, Values};
use lockstep::shard::TpPlan;
use lockstep_reference::{Arith, Eps, ModelWeights, RefConfig, RefOptions, RefRecipe, forward};

const MODELS: [&str; 3] = [GLM5_NANO, NANO52, PICO];

/// Golden prompts of each model.
fn prompts(model: &str) -> Vec<Vec<u32>> {
    let ids = |path: &str| Goldens::read(path).ids();
    match model {
        GLM5_NANO => {
            // The question of a chat turn without its answer, and one that runs past top-k.
            let (turn, long) = (ids(OF_NANO_SHORT), ids(OF_NANO_LONG));
            vec![turn[..10].to_vec(), long[..100].to_vec()]
        }
        NANO52 => vec![ids(OF_NANO52)],
        _ => vec![ids(OF_PICO)],
    }
}

/// The reference's logits over `ids`, row by row.
fn reference_logits(checkpoint: &Checkpoint, ids: &[u32], arith: Arith) -> Vec<Vec<f64>> {
    let raw = Raw(checkpoint.source());
    let config = RefConfig::from_raw(&raw, Eps::File).expect("a configuration");
    let weights = ModelWeights::new(&raw, &config);
    let mut logits = Vec::new();
    let mut sink = |name: &str, value: ndarray::ArrayD<f64>| {
        if name == "logits" {
            let rows = value.rows().into_iter().map(|row| row.to_vec());
            logits = rows.collect();
        }
    };
    let options = RefOptions { dense: false, mtp: false, expanded: false, variant: None };
    forward(&config, &weights, ids, arith, options, &mut sink).expect("runs");
    logits
}

/// The two largest values: where the largest is, and how far the second lies below.
fn top(row: &[f64]) -> (u32, f64) {
    let mut best = 0;
    for (i, v) in row.iter().enumerate() {
        if *v > row[best] {
            best = i;
        }
    }
    let second = row.iter().enumerate().filter(|(i, _)| *i != best).map(|(_, v)| *v).fold(f64::MIN, f64::max);
    (best as u32, row[best] - second)
}

/// Free-running text is the same at 1, 2, 4 and 8 ranks, and each of its tokens is the one that exact arithmetic puts
/// first behind the same prefix, hence the text that the exact model writes. Nothing is replayed: the least gap between
/// the two best logits, which is shown, is a thousand times the rounding of logits, and no choice of keys or experts
/// flips.
#[test]
fn greedy_text_is_the_same_at_every_degree_and_the_references() {
    for model in MODELS {
        let checkpoint = open(model);
        for prompt in prompts(model) {
            let request = || vec![greedy(&prompt, 40, &[])];
            let [(baseline, _)] = &run_all(&mut engine(&checkpoint, 1, 1), request())[..] else { panic!("one answer") };
            for tp in [2, 4, 8] {
                let [(ids, _)] = &run_all(&mut engine(&checkpoint, tp, 1), request())[..] else { panic!("one answer") };
                assert_eq!(ids, baseline, "{model}, tp {tp}, prompt of {}", prompt.len());
            }
            let whole: Vec<u32> = prompt.iter().chain(baseline).copied().collect();
            let logits = reference_logits(&checkpoint, &whole[..whole.len() - 1], Arith::Exact);
            let mut least = f64::INFINITY;
            for (row, token) in logits[prompt.len() - 1..].iter().zip(baseline) {
                let (best, gap) = top(row);
                assert_eq!(best, *token, "{model}: the reference prefers another by {gap:e}");
                least = least.min(gap);
            }
            eprintln!(
                "{model}: {} tokens equal at 1, 2, 4, 8 ranks; least gap of the reference {least:.2e}",
                baseline.len()
            );
        }
    }
}

#[test]
fn a_prompt_in_chunks_has_the_same_bits() {
    let checkpoint = open(GLM5_NANO);
    let ids = Goldens::read(OF_NANO_LONG).ids();
    let mut engine = engine(&checkpoint, 1, 4);
    let whole = logits_in_chunks(&mut engine, &ids, ids.len());
    assert_eq!(whole.len(), ids.len() * checkpoint.config().vocab);
    for chunk in [1, 7, 64] {
        // Pages of a sequence that is still held are not reused, so these lie elsewhere.
        let mut held = Vec::new();
        engine.pool().reserve(&mut held, 3 * chunk).expect("pages");
        let chunked = logits_in_chunks(&mut engine, &ids, chunk);
        engine.pool().release(&mut held);
        assert!(bits(&chunked) == bits(&whole), "chunks of {chunk}: relative L2 {:e}", relative_l2(&chunked, &whole));
    }
}

#[test]
fn sequences_together_write_what_they_write_alone() {
    let checkpoint = open(NANO52);
    let ids = Goldens::read(OF_NANO52).ids();
    let requests: Vec<_> = [3, 32, 9, 1, 20].map(|n| greedy(&ids[..n], 12 + n, &[])).to_vec();
    let one = Options::for_one(checkpoint.config());
    // Little room: prompts are cut, sequences wait for others to end.
    let options = Options { chunk: 16, sequences: 3, cache_tokens: 5 * PAGE, ..one };
    let mut small = Engine::cpu(checkpoint.clone(), 1, options).expect("starts");
    let together = run_all(&mut small, requests.clone());
    for (request, together) in requests.into_iter().zip(together) {
        let alone = run_all(&mut engine(&checkpoint, 1, 1), vec![request]);
        assert_eq!(alone[0], together);
    }
}

#[test]
fn ended_and_cancelled_sequences_give_their_pages_back() {
    let checkpoint = open(PICO);
    let mut engine = engine(&checkpoint, 1, 2);
    let free = engine.pool().free();
    let mut scheduler = Scheduler::default();
    let long = scheduler.add(&engine, greedy(&[1, 2, 3], 200, &[])).expect("accepted");
    let short = scheduler.add(&engine, greedy(&[4, 5], 2, &[])).expect("accepted");
    let waits = scheduler.add(&engine, greedy(&[6], 5, &[])).expect("accepted");
    assert_eq!(scheduler.step(&mut engine).expect("a step").len(), 2);
    assert_eq!(engine.pool().free(), free - 2, "a page each: more is taken when it is needed");
    scheduler.cancel(&mut engine, long);
    assert_eq!(engine.pool().free(), free - 1);
    let mut ended = Vec::new();
    while scheduler.is_busy() {
        ended.extend(scheduler.step(&mut engine).expect("a step"));
    }
    assert!(ended.iter().all(|e| e.sequence != long));
    assert!(ended.iter().any(|e| e.sequence == short) && ended.iter().any(|e| e.sequence == waits));
    assert_eq!(engine.pool().free(), free);
    scheduler.cancel(&mut engine, 99); // unknown: ignored
}

#[test]
fn dense_attention_equals_dsa_up_to_top_k_tokens_and_no_further() {
    for model in MODELS {
        let checkpoint = open(model);
        let (vocab, top_k) = (checkpoint.config().vocab, checkpoint.config().top_k);
        let ids: Vec<u32> = (0..2 * top_k as u32).map(|i| (i * 37 + 11) % vocab as u32).collect();
        let run = |attention| {
            let options = Options { attention, ..Options::for_one(checkpoint.config()) };
            let mut engine = Engine::cpu(checkpoint.clone(), 1, options).expect("starts");
            logits_in_chunks(&mut engine, &ids, ids.len())
        };
        let (dsa, dense) = (run(Attention::Dsa), run(Attention::Dense));
        let (visible, beyond) = (..top_k * vocab, top_k * vocab..);
        assert!(bits(&dsa[visible]) == bits(&dense[visible]), "{model}");
        let differs = relative_l2(&dsa[beyond.clone()], &dense[beyond]);
        assert!(differs > 1e-3, "{model}: {differs:e}"); // f32 rounding is a thousand times less
        eprintln!("{model}: equal up to {top_k} tokens, relative L2 {differs:.1e} beyond");
    }
}

/// Rows up to the first whose choices are not the golden ones: a flipped choice moves a row, and through the cache the
/// rows behind it, by more than rounding does.
fn rows_with_golden_choices(engine: &mut Engine, golden: &Goldens, ids: &[u32]) -> (Vec<f32>, usize) {
    let wanted = |place: Place| place.point.is_choice();
    let probe: Box<dyn Probe> = Box::new(Capture::new(Arc::new(wanted)));
    let mut table = Vec::new();
    engine.pool().reserve(&mut table, ids.len()).expect("pages");
    let output = step(engine, ids, 0, &table, vec![probe]);
    engine.pool().release(&mut table);
    let mut rows = ids.len();
    let mut compared = 0;
    for captured in &output.captured[0] {
        let layer = captured.place.layer().expect("a layer");
        let name = if captured.place.point == Point::ExpertIds { "router_topk_ids" } else { "topk_indices" };
        let Values::I32(found) = &captured.values else { panic!("choices are indices") };
        let expected = golden.indices[&format!("blk.{layer}.{name}")].as_slice().expect("in order");
        assert_eq!(found.len(), expected.len(), "blk.{layer}.{name}");
        let width = captured.shape[0];
        let sorted = |row: &[i32]| {
            let mut row = row.to_vec();
            row.sort_unstable();
            row
        };
        let same = found.chunks(width).zip(expected.chunks(width)).take_while(|(a, b)| sorted(a) == sorted(b)).count();
        rows = rows.min(same);
        compared += 1;
    }
    assert!(compared > 0);
    (output.logits, rows)
}

/// The noise is what legitimate f32 runs of the same formulas differ from exact ones, as the reference computes them in
/// four orders of summation; the engine, whose sums are shorter trees, must stay below the largest of them.
#[test]
fn logits_are_those_of_exact_arithmetic_within_f32_rounding() {
    let files = [(GLM5_NANO, OF_NANO_SHORT), (GLM5_NANO, OF_NANO_LONG), (NANO52, OF_NANO52), (PICO, OF_PICO)];
    for (model, file) in files {
        let (checkpoint, golden) = (open(model), Goldens::read(file));
        let (ids, vocab) = (golden.ids(), checkpoint.config().vocab);
        let stored = golden.rows_of("logits");
        // The noise of the first rows, which no choice of keys can move.
        let short = checkpoint.config().top_k.min(ids.len()).min(24);
        let flat = |logits: Vec<Vec<f64>>| logits.into_iter().flatten().map(|v| v as f32).collect::<Vec<_>>();
        let exact = flat(reference_logits(&checkpoint, &ids[..short], Arith::Exact));
        let noise = Arith::orders(RefRecipe::Strict, 1)
            .into_iter()
            .map(|order| relative_l2(&flat(reference_logits(&checkpoint, &ids[..short], order)), &exact))
            .fold(0.0, f64::max);
        for tp in [1, 8] {
            let mut engine = engine(&checkpoint, tp, 1);
            let (logits, agreeing) = rows_with_golden_choices(&mut engine, &golden, &ids);
            assert!(agreeing >= checkpoint.config().top_k.min(ids.len()), "{file}: choices part at row {agreeing}");
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            let kept = golden.reals["logits"].as_slice().expect("in order").chunks(vocab);
            for (row, values) in stored.iter().zip(kept).filter(|(r, _)| **r < agreeing) {
                ours.extend_from_slice(&logits[row * vocab..(row + 1) * vocab]);
                theirs.extend_from_slice(values);
            }
            let error = relative_l2(&ours, &theirs);
            let rows = ours.len() / vocab;
            eprintln!(
                "{file}, tp {tp}: relative L2 {error:.2e} over {rows} of {} rows; noise {noise:.2e}",
                stored.len()
            );
            assert!(error <= noise, "{file}, tp {tp}: {error:e} > {noise:e}");
        }
    }
}

#[test]
fn prompts_that_cannot_be_run_are_errors_and_the_engine_goes_on() {
    let checkpoint = open(PICO);
    let (vocab, context) = (checkpoint.config().vocab as u32, checkpoint.config().context.min(4096));
    for tp in [1, 2] {
        let mut engine = engine(&checkpoint, tp, 1);
        let mut scheduler = Scheduler::default();
        let mut refused =
            |prompt: Vec<u32>| scheduler.add(&engine, greedy(&prompt, 4, &[])).expect_err("refused").to_string();
        assert_eq!(refused(vec![]), "the prompt is empty");
        let most = context - 1;
        assert_eq!(refused(vec![1; context]), format!("prompt tokens: expected at most {most}, found {context}"));
        assert_eq!(refused(vec![1, vocab]), format!("token id: expected at most {}, found {vocab}", vocab - 1));
        assert!(!scheduler.is_busy());

        // Batches that the scheduler would not make.
        let token = |id, position, sequence| Token { id, position, sequence };
        let batch = |tokens: Vec<Token>, tables: Vec<Vec<u32>>, logits: Vec<u32>| Batch {
            tokens,
            tables,
            logits,
            ..Batch::default()
        };
        for bad in [
            batch(vec![], vec![vec![0]], vec![]),
            batch(vec![token(vocab, 0, 0)], vec![vec![0]], vec![0]),
            batch(vec![token(1, 0, 1)], vec![vec![0]], vec![0]),
            batch(vec![token(1, PAGE as u32, 0)], vec![vec![0]], vec![0]),
            batch(vec![token(1, 0, 0)], vec![vec![u32::MAX]], vec![0]),
            batch(vec![token(1, 0, 0)], vec![vec![0], vec![1]], vec![0]),
            batch(vec![token(1, 0, 0)], vec![vec![0]], vec![1]),
        ] {
            let shown = format!("{bad:?}");
            let error = engine.step(bad, Vec::new()).expect_err("refused");
            assert!(matches!(error, EngineError::Limit { .. }), "{shown}: {error}");
        }
        assert_eq!(run_all(&mut engine, vec![greedy(&[1, 2], 3, &[])])[0].0.len(), 3);
    }
}

/// What one rank does at one meeting instead of meeting.
#[derive(Clone, Copy)]
enum Instead {
    Fail,
    Sleep(Duration),
    Panic,
}

/// Rank 1 misbehaves at layer 2's output projection.
struct Misbehaving(usize, Instead);

impl Around for Misbehaving {
    fn run(&mut self, call: &Call, shape: StepShape, device: &mut dyn Device) -> Result<(), DeviceError> {
        let (rank, place) = (self.0, Place::trunk(2, Point::AttnOut));
        if rank == 1 && call.at == place && call.op.is_collective() {
            match self.1 {
                Instead::Fail => {
                    let (site, reason) = (place.to_string(), "out of order".into());
                    return Err(DeviceError::Comm(CommError::Device { rank, site, reason }));
                }
                Instead::Sleep(time) => std::thread::sleep(time),
                Instead::Panic => panic!("a rank that panics, as the test wants"),
            }
        }
        device.run(call, shape)
    }
}

/// The error of a step in which rank 1 misbehaves, and how long it took.
fn misbehave(instead: Instead, timeout: Duration) -> (EngineError, Duration) {
    let checkpoint = open(PICO);
    let options = Options::for_one(checkpoint.config());
    let plan = Arc::new(TpPlan::new(checkpoint.config(), 4).expect("a plan"));
    let comm = Arc::new(Threads::new(4, timeout));
    let device = |rank| Box::new(CpuDevice::new(rank, comm.clone(), 0)) as Box<dyn Device>;
    let devices = (0..4).map(device).collect();
    let ranks = Ranks { devices, comm: comm.clone(), recipe: DeviceRecipe::Strict, told: None };
    let around = |rank| Some(Box::new(Misbehaving(rank, instead)) as Box<dyn Around>);
    let engine = Engine::start(&|_| checkpoint.clone(), plan, ranks, options, &around).expect("starts");
    let start = Instant::now();
    let batch = || Batch {
        tokens: vec![Token { id: 5, position: 0, sequence: 0 }],
        tables: vec![vec![0]],
        logits: vec![0],
        ..Batch::default()
    };
    let error = engine.step(batch(), Vec::new()).expect_err("the step fails");
    let took = start.elapsed();
    // Nobody can tell what the ranks hold now: every later step fails too, at once.
    assert!(engine.step(batch(), Vec::new()).is_err());
    (error, took)
}

const LONG: Duration = Duration::from_secs(120);

#[test]
fn a_rank_that_fails_ends_the_step_of_all() {
    let (error, took) = misbehave(Instead::Fail, LONG);
    assert_eq!(error.to_string(), "rank 1 at layers.2.attn.out: out of order");
    assert!(took < LONG / 4, "{took:?}");
}

#[test]
fn a_rank_that_panics_ends_the_step_of_all() {
    let (error, took) = misbehave(Instead::Panic, LONG);
    assert!(error.to_string().contains("rank 1"), "{error}");
    assert!(took < LONG / 4, "{took:?}");
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let timeout = Duration::from_secs(2);
    let (error, took) = misbehave(Instead::Sleep(3 * timeout), timeout);
    let text = error.to_string();
    assert!(text.contains("rank [1] did not reach layers.2.attn.out"), "{text}");
    assert!(took >= timeout && took < 5 * timeout, "{took:?}");
}
