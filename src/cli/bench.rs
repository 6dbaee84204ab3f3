//! `lockstep bench`: prefill and decode speed, the share of each operation, and the share of the memory bandwidth that
//! was measured in the same process.
//!
//! Speed comes from an undecorated engine through the scheduler, as a user gets it. The shares come from a second engine
//! whose devices keep time, so that the clocks do not slow what is reported. The peak of memory is read before that.

#[cfg(feature = "cuda")]
mod gpu;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::args::BenchArgs;
use super::console::Bar;
use super::device::{Chosen, check_degree, chosen};
use super::{CliError, Exit, emit, options};
use crate::checkpoint::Checkpoint;
use crate::device::cpu::host::{Bandwidth, peak_resident, read_bandwidth};
use crate::device::{Around, Clock, Recipe, Spent};
use crate::engine::sampler::Sampling;
use crate::engine::scheduler::{Request, Scheduler};
use crate::engine::{Backend, Engine, Options};
use crate::report::Run;
use crate::report::bench::{self as record, BatchSpeed, CpuBench, Memory, Share, Speed, Spread, Sweep};
use crate::shard::TpPlan;
use crate::shard::budget::Budget;

pub(super) fn run(args: &BenchArgs, out: &mut dyn Write) -> Result<Exit, CliError> {
    if args.batch.contains(&0) {
        return Err(CliError::Usage("--batch: expected numbers from 1 on, found 0".into()));
    }
    check_degree(&args.device, args.tp)?;
    match chosen(&args.device)? {
        Chosen::Cpu(backend) => run_on(&backend, args, out),
        #[cfg(feature = "cuda")]
        Chosen::Cuda(backend) => gpu::run(&backend, args, out),
    }
}

fn run_on(backend: &dyn Backend, args: &BenchArgs, out: &mut dyn Write) -> Result<Exit, CliError> {
    let start = Instant::now();
    let checkpoint = Arc::new(Checkpoint::open(args.model.model.as_deref())?);
    let opened = start.elapsed();
    let config = checkpoint.config();
    let mut options = options(&checkpoint, &args.engine)?;
    check(args, &options)?;
    make_room(&mut options, args);
    let plan = TpPlan::new(config, args.tp)?;
    let budget = Budget::new(&checkpoint, &plan)?;
    let prompt = prompt(config.vocab, args.prompt);

    let bar = Bar::new("bench: ");
    let start = Instant::now();
    let mut engine = Engine::on(backend, checkpoint.clone(), args.tp, options)?;
    let loaded = start.elapsed();
    let speeds = Speeds::measure(&mut engine, &prompt, args)?;
    let speeds = Speeds { batches: batches(&mut engine, args, &prompt)?, ..speeds };
    drop(engine);
    let peak = peak_resident();
    let shares = shares(backend, &checkpoint, args, options, &prompt)?;
    let elements: u64 = budget.trunk.iter().map(|l| l.param.kind.shape(config).iter().product::<usize>() as u64).sum();
    let speed = speeds.of(&checkpoint, args, options, backend.recipe(), budget.token_bytes(config));
    let sweep = |b: Bandwidth| Sweep {
        bytes_per_second: b.bytes_per_second,
        buffer_bytes: b.buffer,
        largest_cache_bytes: b.cache,
        threads: b.threads,
        cached: b.is_cached(),
        share: speed.weight_bytes_per_second / b.bytes_per_second,
    };
    let record = CpuBench {
        threads: rayon::current_num_threads(),
        open_seconds: opened.as_secs_f64(),
        load_seconds: loaded.as_secs_f64(),
        read_bandwidth: read_bandwidth().map(sweep),
        memory: Memory {
            peak_bytes: peak,
            weights_per_rank: budget.trunk_bytes(),
            file_bytes: source_bytes(&checkpoint),
            weights_as_f32_bytes: 4 * elements,
        },
        prefill: shares.prefill.record(),
        decode: shares.decode.record(),
        speed,
    };
    drop(bar);
    emit(&record, args.model.json, out)?;
    Ok(Exit::Ok)
}

/// Bytes of all tensors on disk, MTP included.
fn source_bytes(checkpoint: &Checkpoint) -> u64 {
    let source = checkpoint.source();
    source.names().into_iter().filter_map(|n| source.tensor(n)).map(|t| t.bytes.len() as u64).sum()
}

fn check(args: &BenchArgs, options: &Options) -> Result<(), CliError> {
    for (flag, value) in [("--prompt", args.prompt), ("--steps", args.steps), ("--repeat", args.repeat)] {
        if value == 0 {
            return Err(CliError::Usage(format!("{flag}: expected at least 1, found 0")));
        }
    }
    let (most, found) = (options.cache_tokens, args.prompt.saturating_add(args.steps));
    if found > most {
        let problem = "--prompt and --steps together: expected at most";
        return Err(CliError::Usage(format!("{problem} {most} tokens, this model's context here, found {found}")));
    }
    Ok(())
}

/// Ids from a fixed sequence (Knuth's multiplicative hash), spread over the vocabulary and so over experts.
fn prompt(vocab: usize, n: usize) -> Vec<u32> {
    (0..n as u64).map(|i| (i.wrapping_mul(2_654_435_761) % (1 << 32) % vocab as u64) as u32).collect()
}

/// Room for the sequences of `--batch`.
fn make_room(options: &mut Options, args: &BenchArgs) {
    let most = args.batch.iter().copied().max().unwrap_or(1);
    options.sequences = most;
    options.cache_tokens = options.cache_tokens.max(most * (args.prompt + args.steps + 64));
}

/// Decode speed of several sequences at once, all of the same prompt length.
fn batches(engine: &mut Engine, args: &BenchArgs, ids: &[u32]) -> Result<Vec<BatchSpeed>, CliError> {
    let mut speeds = Vec::new();
    if args.batch == [1] {
        return Ok(speeds);
    }
    for n in &args.batch {
        let mut median = Vec::new();
        // The first run records.
        for repeat in 0..=args.repeat.min(3) {
            let mut scheduler = Scheduler::default();
            // Those that begin first decode while others are read in, and must not end before the clock does.
            let most = args.steps + 1 + n;
            for i in 0..*n {
                let mut prompt = ids.to_vec();
                let shift = i % ids.len();
                prompt.rotate_left(shift); // other tokens, so other experts
                let request = Request::plain(prompt, most, Vec::new(), Sampling::default());
                scheduler.add(engine, request)?;
            }
            // The clock starts when every prompt is behind its first token.
            let mut begun = BTreeSet::new();
            while begun.len() < *n {
                begun.extend(scheduler.step(engine)?.iter().map(|event| event.sequence));
            }
            let (start, mut tokens) = (Instant::now(), 0);
            for _ in 0..args.steps {
                tokens += scheduler.step(engine)?.len();
            }
            let seconds = start.elapsed().as_secs_f64();
            begun.into_iter().for_each(|number| scheduler.cancel(engine, number));
            if repeat > 0 {
                median.push(tokens as f64 / seconds);
            }
        }
        let tokens_per_second = Spread::new(args.steps, median).median;
        speeds.push(BatchSpeed { sequences: *n, tokens_per_second });
    }
    Ok(speeds)
}

/// One phase of a run: its wall time, and each rank's operations if they were timed.
#[derive(Default)]
struct Phase {
    wall: Duration,
    ranks: Vec<BTreeMap<&'static str, Spent>>,
}

#[derive(Default)]
struct Phases {
    prefill: Phase,
    decode: Phase,
}

/// Prefills the prompt up to its first token, then decodes `steps` more.
fn measure(engine: &mut Engine, prompt: &[u32], steps: usize, clocks: &[Clock]) -> Result<Phases, CliError> {
    let take = |wall| Phase { wall, ranks: clocks.iter().map(|c| c.take()).collect() };
    take(Duration::ZERO); // what came before does not count
    let mut scheduler = Scheduler::default();
    let request = Request::plain(prompt.to_vec(), steps + 1, Vec::new(), Sampling::default());
    let start = Instant::now();
    scheduler.add(engine, request)?;
    while scheduler.step(engine)?.is_empty() {}
    let prefill = take(start.elapsed());
    let start = Instant::now();
    while scheduler.is_busy() {
        scheduler.step(engine)?;
    }
    Ok(Phases { prefill, decode: take(start.elapsed()) })
}

/// The same run with clocks on every rank.
fn shares(
    backend: &dyn Backend,
    checkpoint: &Arc<Checkpoint>,
    args: &BenchArgs,
    options: Options,
    prompt: &[u32],
) -> Result<Phases, CliError> {
    let plan = Arc::new(TpPlan::new(checkpoint.config(), args.tp)?);
    let clocks: Vec<Clock> = (0..args.tp).map(|_| Clock::default()).collect();
    let ranks = backend.ranks(args.tp, checkpoint.config())?;
    let around = |rank: usize| Some(Box::new(clocks[rank].clone()) as Box<dyn Around>);
    let mut engine = Engine::start(&|_| checkpoint.clone(), plan, ranks, options, &around)?;
    measure(&mut engine, prompt, args.steps, &[])?;
    measure(&mut engine, prompt, args.steps, &clocks)
}

/// Tokens per second of every repetition.
#[derive(Default)]
struct Speeds {
    prefill: Vec<f64>,
    decode: Vec<f64>,
    batches: Vec<BatchSpeed>,
}

impl Speeds {
    /// `--repeat` runs behind one that warms caches and buffers (on GPUs: compiles and records).
    fn measure(engine: &mut Engine, prompt: &[u32], args: &BenchArgs) -> Result<Self, CliError> {
        measure(engine, prompt, args.steps, &[])?;
        let mut speeds = Speeds::default();
        for _ in 0..args.repeat {
            let run = measure(engine, prompt, args.steps, &[])?;
            speeds.prefill.push(args.prompt as f64 / run.prefill.wall.as_secs_f64());
            speeds.decode.push(args.steps as f64 / run.decode.wall.as_secs_f64());
        }
        Ok(speeds)
    }

    fn of(self, checkpoint: &Checkpoint, args: &BenchArgs, options: Options, recipe: Recipe, token: u64) -> Speed {
        let decode = Spread::new(args.steps, self.decode);
        Speed {
            run: Run {
                model: checkpoint.name().into(),
                tp: args.tp,
                device: args.device.device.to_string(),
                recipe: recipe.name(),
                attention: options.attention.name(),
                prompt: format!("{} ids of a fixed sequence", args.prompt),
            },
            prefill_tokens_per_second: Spread::new(args.prompt, self.prefill),
            weight_bytes_per_token: token,
            weight_bytes_per_second: decode.median * token as f64,
            decode_tokens_per_second: decode,
            batches: self.batches,
        }
    }
}

/// What is neither an operation nor a meeting: the scheduler, the sampler, channels and copies of the logits.
const HOST: &str = "host";

impl Phase {
    /// Longest first; the last is what no clock saw.
    fn record(&self) -> record::Phase {
        let (ranks, wall) = (self.ranks.len().max(1) as f64, self.wall.as_secs_f64().max(1e-9));
        let mut sums: BTreeMap<&'static str, (f64, f64)> = BTreeMap::new();
        for (op, spent) in self.ranks.iter().flatten() {
            let sum = sums.entry(op).or_default();
            sum.0 += spent.calls as f64 / ranks;
            sum.1 += spent.time.as_secs_f64() / ranks;
        }
        let seen: f64 = sums.values().map(|s| s.1).sum();
        let share = |(op, (calls, seconds))| Share { op, calls, seconds, share: seconds / wall };
        let mut shares: Vec<Share> = sums.into_iter().map(share).collect();
        shares.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        shares.push(share((HOST, (0.0, (wall - seen).max(0.0)))));
        record::Phase { seconds: self.wall.as_secs_f64(), ops: shares }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_average_over_ranks_and_end_with_what_no_clock_saw() {
        let spent = |ms| Spent { calls: 2, time: Duration::from_millis(ms) };
        let ranks = vec![BTreeMap::from([("a", spent(10)), ("b", spent(30))]), BTreeMap::from([("a", spent(20))])];
        let phase = Phase { wall: Duration::from_millis(60), ranks };
        let shares = phase.record().ops;
        let near = |a: f64, b: f64| (a - b).abs() < 1e-12;
        assert_eq!(shares.iter().map(|s| s.op).collect::<Vec<_>>(), ["a", "b", HOST]);
        assert!(near(shares[0].seconds, 0.015) && near(shares[0].share, 0.25) && near(shares[0].calls, 2.0));
        assert!(near(shares.iter().map(|s| s.share).sum(), 1.0));
    }

    #[test]
    fn prompt_ids_are_of_the_vocabulary_and_spread() {
        let mut ids = prompt(4096, 128);
        assert!(ids.iter().all(|id| *id < 4096));
        ids.sort_unstable();
        ids.dedup();
        assert!(ids.len() > 100, "{}", ids.len());
    }
}
