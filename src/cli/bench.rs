//! `lockstep bench`: prefill and decode speed, the share of each operation, and the share of the memory bandwidth that
//! was measured in the same process.
//!
//! Speed comes from an undecorated engine through the scheduler, as a user gets it. The shares come from a second engine
//! whose devices keep time, so that the clocks do not slow what is reported. The peak of memory is read before that.

#[cfg(feature = "cuda")]
mod gpu;

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value as Json, json};

use super::args::BenchArgs;
#[cfg(feature = "cuda")]
use super::args::DeviceArg;
use super::device::{Chosen, chosen};
use super::{CliError, Exit, options, write_json};
use crate::checkpoint::Checkpoint;
use crate::device::cpu::host::{Bandwidth, peak_resident, read_bandwidth};
use crate::device::{Around, Clock, Spent};
use crate::engine::sampler::Sampling;
use crate::engine::scheduler::{Request, Scheduler};
use crate::engine::{Backend, Engine, Options};
use crate::report::table::{bytes, table};
use crate::shard::TpPlan;
use crate::shard::budget::Budget;

pub(super) fn run(args: &BenchArgs, out: &mut dyn Write) -> Result<Exit, CliError> {
    #[cfg(feature = "cuda")]
    if args.batch.contains(&0) || (args.batch != [1] && args.device.device == DeviceArg::Cpu) {
        return Err(CliError::Usage("--batch: expected numbers from 1 on, and --device cuda".into()));
    }
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
    let options = options(&checkpoint, &args.engine)?;
    check(args, &options)?;
    let plan = TpPlan::new(config, args.tp)?;
    let budget = Budget::new(&checkpoint, &plan)?;
    let prompt = prompt(config.vocab, args.prompt);

    let start = Instant::now();
    let mut engine = Engine::on(backend, checkpoint.clone(), args.tp, options)?;
    let loaded = start.elapsed();
    let speed = Speed::measure(&mut engine, &prompt, args)?;
    drop(engine);
    let peak = peak_resident();
    let shares = shares(backend, &checkpoint, args, options, &prompt)?;
    let elements: u64 = budget.trunk.iter().map(|l| l.param.kind.shape(config).iter().product::<usize>() as u64).sum();
    let report = Report {
        name: checkpoint.name(),
        args,
        attention: options.attention.name(),
        recipe: backend.recipe().name(),
        opened,
        loaded,
        weights: budget.trunk_bytes(),
        expanded: 4 * elements,
        file: source_bytes(&checkpoint),
        token_bytes: budget.token_bytes(config),
        speed,
        shares,
        bandwidth: read_bandwidth(),
        peak,
    };
    if args.model.json {
        write_json(out, &report.document())?;
    } else {
        report.print(out)?;
    }
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
    let request = Request { prompt: prompt.to_vec(), most: steps + 1, stop: Vec::new(), sampling: Sampling::default() };
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
struct Speed {
    prefill: Vec<f64>,
    decode: Vec<f64>,
}

impl Speed {
    /// `--repeat` runs behind one that warms caches and buffers (on GPUs: compiles and records).
    fn measure(engine: &mut Engine, prompt: &[u32], args: &BenchArgs) -> Result<Self, CliError> {
        measure(engine, prompt, args.steps, &[])?;
        let mut speed = Speed::default();
        for _ in 0..args.repeat {
            let run = measure(engine, prompt, args.steps, &[])?;
            speed.prefill.push(args.prompt as f64 / run.prefill.wall.as_secs_f64());
            speed.decode.push(args.steps as f64 / run.decode.wall.as_secs_f64());
        }
        Ok(speed)
    }

    fn print(&self, args: &BenchArgs, out: &mut dyn Write) -> std::io::Result<()> {
        let repeats = args.repeat;
        for (name, tokens, values) in [("prefill", args.prompt, &self.prefill), ("decode", args.steps, &self.decode)] {
            let (median, least, most) = spread(values);
            writeln!(
                out,
                "  {name:<8} {median:.0} tokens/s, median of {repeats} runs of {tokens} tokens ({least:.0} to {most:.0})"
            )?;
        }
        Ok(())
    }
}

fn spread_document(tokens: usize, values: &[f64]) -> Json {
    let (median, least, most) = spread(values);
    json!({ "tokens": tokens, "median": median, "least": least, "most": most, "all": values })
}

/// Median, least and most.
fn spread(values: &[f64]) -> (f64, f64, f64) {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (Some(least), Some(most)) = (sorted.first(), sorted.last()) else { return (0.0, 0.0, 0.0) };
    let middle = sorted.len() / 2;
    let median =
        if sorted.len().is_multiple_of(2) { (sorted[middle - 1] + sorted[middle]) / 2.0 } else { sorted[middle] };
    (median, *least, *most)
}

/// The time of one operation, averaged over ranks.
#[derive(Serialize)]
struct Share {
    op: &'static str,
    calls: f64,
    seconds: f64,
    /// Of the phase's wall time.
    share: f64,
}

/// What is neither an operation nor a meeting: the scheduler, the sampler, channels and copies of the logits.
const HOST: &str = "host";

impl Phase {
    /// Longest first; the last is what no clock saw.
    fn shares(&self) -> Vec<Share> {
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
        shares
    }

    fn document(&self) -> Json {
        json!({ "seconds": self.wall.as_secs_f64(), "ops": self.shares() })
    }
}

struct Report<'a> {
    name: &'a str,
    args: &'a BenchArgs,
    attention: &'static str,
    recipe: &'static str,
    opened: Duration,
    loaded: Duration,
    /// Per rank, by the plan.
    weights: Vec<u64>,
    /// What all parameters would take in f32.
    expanded: u64,
    file: u64,
    token_bytes: u64,
    speed: Speed,
    shares: Phases,
    bandwidth: Option<Bandwidth>,
    peak: Option<u64>,
}

impl Report<'_> {
    /// Bytes of weights read per second of decode, at the median.
    fn read_rate(&self) -> f64 {
        spread(&self.speed.decode).0 * self.token_bytes as f64
    }

    fn document(&self) -> Json {
        json!({
            "model": self.name, "tp": self.args.tp, "attention": self.attention,
            "device": self.args.device.device.to_string(), "recipe": self.recipe,
            "threads": rayon::current_num_threads(),
            "open_seconds": self.opened.as_secs_f64(), "load_seconds": self.loaded.as_secs_f64(),
            "prefill_tokens_per_second": spread_document(self.args.prompt, &self.speed.prefill),
            "decode_tokens_per_second": spread_document(self.args.steps, &self.speed.decode),
            "weight_bytes_per_token": self.token_bytes,
            "weight_bytes_per_second": self.read_rate(),
            "read_bandwidth": self.bandwidth.map(|b| json!({
                "bytes_per_second": b.bytes_per_second, "buffer_bytes": b.buffer, "largest_cache_bytes": b.cache,
                "threads": b.threads, "cached": b.is_cached(), "share": self.read_rate() / b.bytes_per_second,
            })),
            "memory": {
                "peak_bytes": self.peak, "weights_per_rank": self.weights, "file_bytes": self.file,
                "weights_as_f32_bytes": self.expanded,
            },
            "prefill": self.shares.prefill.document(), "decode": self.shares.decode.document(),
        })
    }

    fn print(&self, out: &mut dyn Write) -> std::io::Result<()> {
        let threads = rayon::current_num_threads();
        let (device, recipe) = (&self.args.device.device, self.recipe);
        let (tp, attention) = (self.args.tp, self.attention);
        writeln!(out, "{}, tp {tp}, {device}, recipe {recipe}, attention {attention}, {threads} threads", self.name)?;
        let ms = |d: Duration| d.as_secs_f64() * 1e3;
        writeln!(out, "  load     open {:.0} ms, weights to ranks {:.0} ms", ms(self.opened), ms(self.loaded))?;
        self.speed.print(self.args, out)?;
        writeln!(out, "  reads    {}", self.reads())?;
        writeln!(out, "  memory   {}\n", self.memory())?;
        self.print_shares(out)
    }

    fn reads(&self) -> String {
        let gb = |rate: f64| format!("{:.2} GB/s", rate / 1e9);
        let reads = format!("{} of weights per decoded token: {}", bytes(self.token_bytes), gb(self.read_rate()));
        let Some(b) = self.bandwidth else {
            return format!("{reads}; no memory was left to measure the bandwidth");
        };
        let share = 100.0 * self.read_rate() / b.bytes_per_second;
        let mut text =
            format!("{reads}, {share:.0} % of the {} of a read sweep over {}", gb(b.bytes_per_second), bytes(b.buffer));
        if b.is_cached() {
            text.push_str(&format!("\n           (too small to rule out the cache of {})", bytes(b.cache)));
        }
        if self.weights.iter().sum::<u64>() <= b.cache {
            text.push_str(";\n           the weights fit into a cache, so memory is no limit here");
        }
        text
    }

    fn memory(&self) -> String {
        let weights: u64 = self.weights.iter().sum();
        let most = self.weights.iter().max().copied().unwrap_or(0);
        let peak = self.peak.map_or("unknown".into(), bytes);
        format!(
            "peak {peak} resident, with {} of weights by the plan (ranks: {}, at most {} on one)\n           and the mapped \
             file's {}; expanded to f32 the weights would take {}",
            bytes(weights),
            self.weights.len(),
            bytes(most),
            bytes(self.file),
            bytes(self.expanded)
        )
    }

    /// One line per operation, by its time in decode.
    fn print_shares(&self, out: &mut dyn Write) -> std::io::Result<()> {
        let (decode, prefill) = (self.shares.decode.shares(), self.shares.prefill.shares());
        let steps = self.args.steps as f64;
        let mut t = table(&["operation", ">decode", ">us/token", ">calls/token", ">prefill", ">us/token"]);
        for d in &decode {
            let p = prefill.iter().find(|p| p.op == d.op);
            t.add_row([
                d.op.to_string(),
                format!("{:.1} %", 100.0 * d.share),
                format!("{:.1}", 1e6 * d.seconds / steps),
                format!("{:.0}", d.calls / steps),
                p.map_or(String::new(), |p| format!("{:.1} %", 100.0 * p.share)),
                p.map_or(String::new(), |p| format!("{:.1}", 1e6 * p.seconds / self.args.prompt as f64)),
            ]);
        }
        writeln!(out, "{t}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_lies_between_the_extremes() {
        assert_eq!(spread(&[3.0, 1.0, 2.0]), (2.0, 1.0, 3.0));
        assert_eq!(spread(&[4.0, 1.0]), (2.5, 1.0, 4.0));
    }

    #[test]
    fn shares_average_over_ranks_and_end_with_what_no_clock_saw() {
        let spent = |ms| Spent { calls: 2, time: Duration::from_millis(ms) };
        let ranks = vec![BTreeMap::from([("a", spent(10)), ("b", spent(30))]), BTreeMap::from([("a", spent(20))])];
        let phase = Phase { wall: Duration::from_millis(60), ranks };
        let shares = phase.shares();
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
