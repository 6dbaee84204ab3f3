//! The bench on GPUs: what the CPU's shows, and what matters there beside it. Loading is compared with a plain sequential
//! read of the same file; operations are timed by events on the GPU, with the launches queued before the first runs; the
//! bandwidth of copies and of reads is measured in the same process.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value as Json, json};

use super::{Speed, check, prompt, spread, spread_document};
use crate::checkpoint::Checkpoint;
use crate::cli::args::BenchArgs;
use crate::cli::{CliError, Exit, options, write_json};
use crate::device::call::ALL_REDUCE;
use crate::device::cpu::host::anonymous;
use crate::device::cuda::bandwidth::{self, Bandwidth};
use crate::device::cuda::gpu::GpuError;
use crate::device::cuda::launches::{self, EmptyLaunch};
use crate::device::cuda::memory::PINNED;
use crate::device::cuda::profile::{Cost, Profile};
use crate::device::{Batch, Draw, Token};
use crate::engine::backend::CudaBackend;
use crate::engine::sampler::Sampling;
use crate::engine::scheduler::{Request, Scheduler};
use crate::engine::{Backend, Engine, Options};
use crate::model::Config;
use crate::report::table::{bytes, table};
use crate::shard::TpPlan;
use crate::shard::budget::Budget;

/// Rows of the profile: operations by name.
type Costs = BTreeMap<&'static str, Cost>;

struct Report<'a> {
    args: &'a BenchArgs,
    name: String,
    recipe: &'static str,
    attention: &'static str,
    gpus: Vec<String>,
    file: u64,
    reader: Duration,
    loaded: Duration,
    host: Option<u64>,
    plan: Vec<u64>,
    used: Vec<u64>,
    speed: Speed,
    token_bytes: u64,
    bandwidth: Bandwidth,
    /// Of one decode step on one GPU, mean over GPUs, without what empty launches take.
    costs: Costs,
    empty: EmptyLaunch,
    /// Launches of one recorded step, and steps that were replayed.
    nodes: usize,
    replays: u64,
    batches: Vec<(usize, f64)>,
    /// Seconds of a decode step of the first rank alone, without meetings, where there are several.
    alone: Option<f64>,
}

pub(super) fn run(backend: &CudaBackend, args: &BenchArgs, out: &mut dyn Write) -> Result<Exit, CliError> {
    let gpu = |e: GpuError| CliError::Usage(e.to_string());
    let checkpoint = Arc::new(Checkpoint::open(args.model.model.as_deref())?);
    let config = checkpoint.config().clone();
    let mut options = options(&checkpoint, &args.engine)?;
    check(args, &options)?;
    let most = args.batch.iter().copied().max().unwrap_or(1);
    options.sequences = most;
    options.cache_tokens = options.cache_tokens.max(most * (args.prompt + args.steps + 64));
    let plan = TpPlan::new(&config, args.tp)?;
    let budget = Budget::new(&checkpoint, &plan)?;
    let groups = backend.groups(args.tp)?;
    let bandwidth = bandwidth::measure(groups[0].gpu()).map_err(gpu)?;
    let empty = launches::measure(groups[0].gpu()).map_err(gpu)?;
    let gpus = groups.iter().map(|g| format!("{} ({})", g.gpu().name, g.gpu().arch)).collect();
    let free: Vec<u64> =
        groups.iter().map(|g| g.gpu().memory().map(|m| m.0 as u64)).collect::<Result<_, _>>().map_err(gpu)?;

    read_whole(&checkpoint)?; // both then find the file in the same state
    let start = Instant::now();
    let mut engine = Engine::on(backend, checkpoint.clone(), args.tp, options)?;
    let loaded = start.elapsed();
    let host = anonymous();
    let start = Instant::now();
    let file = read_whole(&checkpoint)?;
    let reader = start.elapsed();

    let ids = prompt(config.vocab, args.prompt);
    let speed = Speed::measure(&mut engine, &ids, args)?;
    let used = groups.iter().zip(&free).map(|(g, before)| Ok(before.saturating_sub(g.gpu().memory()?.0 as u64)));
    let used: Vec<u64> = used.collect::<Result<_, _>>().map_err(gpu)?;
    let (replays, nodes) = backend.replays();
    let batches = batches(&mut engine, args, &ids)?;
    drop(engine);
    let costs = profile(backend, &checkpoint, args, options, &config, empty, groups.len())?;
    let alone = if args.tp > 1 { Some(alone(backend, &checkpoint, args, options, &config)?) } else { None };
    let report = Report {
        args,
        name: checkpoint.name().to_string(),
        recipe: backend.recipe.name(),
        attention: options.attention.name(),
        gpus,
        file,
        reader,
        loaded,
        host,
        plan: budget.trunk_bytes(),
        used,
        speed,
        token_bytes: budget.token_bytes(&config),
        bandwidth,
        costs,
        empty,
        nodes,
        replays,
        batches,
        alone,
    };
    if args.model.json {
        write_json(out, &report.document())?;
    } else {
        report.print(out)?;
    }
    Ok(Exit::Ok)
}

/// Reads the model's files from end to end, as plainly as can be, and returns their bytes.
fn read_whole(checkpoint: &Checkpoint) -> Result<u64, CliError> {
    let mut buffer = vec![0u8; 16 << 20];
    let mut total = 0;
    for path in checkpoint.files() {
        let mut file = std::fs::File::open(&path)?;
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                n => total += n as u64,
            }
        }
    }
    Ok(total)
}

/// Decode speed of several sequences at once, all of the same prompt length.
fn batches(engine: &mut Engine, args: &BenchArgs, ids: &[u32]) -> Result<Vec<(usize, f64)>, CliError> {
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
                let request = Request { prompt, most, stop: Vec::new(), sampling: Sampling::default() };
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
        speeds.push((*n, spread(&median).0));
    }
    Ok(speeds)
}

/// The prompt's keys in the cache, without logits; returns the block table.
fn prefill(engine: &mut Engine, ids: &[u32], more: usize) -> Result<Vec<u32>, CliError> {
    let mut table = Vec::new();
    engine.pool().reserve(&mut table, ids.len() + more).map_err(crate::engine::EngineError::from)?;
    let chunk = engine.options().chunk;
    for (i, part) in ids.chunks(chunk).enumerate() {
        let token = |(j, id): (usize, &u32)| Token { id: *id, position: (i * chunk + j) as u32, sequence: 0 };
        let tokens = part.iter().enumerate().map(token).collect();
        engine.step(Batch { tokens, tables: vec![table.clone()], ..Batch::default() }, Vec::new())?;
    }
    Ok(table)
}

/// One token behind the prompt, after which the device chooses the next.
fn decode(id: u32, position: usize, table: &[u32]) -> Batch {
    Batch {
        tokens: vec![Token { id, position: position as u32, sequence: 0 }],
        tables: vec![table.to_vec()],
        logits: vec![0],
        ahead: vec![Draw::GREEDY],
        expanded: false,
    }
}

/// Seconds of a decode step of the first rank with nobody to meet: what N ranks would reach if meeting cost nothing.
fn alone(
    backend: &CudaBackend,
    checkpoint: &Arc<Checkpoint>,
    args: &BenchArgs,
    options: Options,
    config: &Config,
) -> Result<f64, CliError> {
    let one = CudaBackend { ordinals: vec![backend.ordinals.first().copied().unwrap_or(0)], ..backend.clone() };
    let ranks = one.ranks(1, config)?;
    let plan = Arc::new(TpPlan::new(config, args.tp)?);
    let mut engine = Engine::start(&|_| checkpoint.clone(), plan, ranks, options, &|_| None)?;
    let ids = prompt(config.vocab, args.prompt);
    let mut times = Vec::new();
    for _ in 0..args.repeat {
        let mut table = prefill(&mut engine, &ids, args.steps + 4)?;
        engine.step(decode(ids[0], ids.len(), &table), Vec::new())?;
        // The second step is recorded, the third replayed.
        (0..2).try_for_each(|i| engine.follow(ids.len() + 2 + i).map(|_| ()))?;
        let start = Instant::now();
        (0..args.steps).try_for_each(|i| engine.follow(ids.len() + 4 + i).map(|_| ()))?;
        times.push(start.elapsed().as_secs_f64() / args.steps as f64);
        engine.chosen()?;
        engine.pool().release(&mut table);
    }
    Ok(spread(&times).0)
}

/// One decode step behind the prompt, its launches timed on the GPU.
fn profile(
    backend: &CudaBackend,
    checkpoint: &Arc<Checkpoint>,
    args: &BenchArgs,
    options: Options,
    config: &Config,
    empty: EmptyLaunch,
    gpus: usize,
) -> Result<Costs, CliError> {
    /// Steps that are averaged.
    const STEPS: usize = 8;
    let profiles: Arc<Vec<Arc<Profile>>> = Arc::new((0..args.tp).map(|_| Arc::default()).collect());
    let timed = CudaBackend { profiles: Some(profiles.clone()), ..backend.clone() };
    let mut engine = Engine::on(&timed, checkpoint.clone(), args.tp, options)?;
    let ids = prompt(config.vocab, args.prompt);
    let table = prefill(&mut engine, &ids, STEPS + 2)?;
    let step = |i: usize| {
        let position = args.prompt + i;
        engine.step(decode(ids[position % ids.len()], position, &table), Vec::new())?;
        engine.chosen().map(|_| ())
    };
    step(0)?;
    let take = || -> Result<Vec<Costs>, CliError> {
        profiles.iter().map(|p| p.take().map_err(|e| CliError::Usage(e.to_string()))).collect()
    };
    take()?;
    for i in 1..=STEPS {
        step(i)?;
    }
    let mut mean = Costs::new();
    for (op, cost) in take()?.into_iter().flatten() {
        let sum = mean.entry(op).or_default();
        sum.launches += cost.launches;
        sum.seconds += cost.seconds;
        sum.bytes += cost.bytes;
    }
    let times = (STEPS * gpus) as f64;
    for cost in mean.values_mut() {
        cost.seconds = ((cost.seconds - cost.launches as f64 * empty.timed) / times).max(0.0);
        cost.launches = (cost.launches as f64 / times).round() as u64;
        cost.bytes = (cost.bytes as f64 / times).round() as u64;
    }
    Ok(mean)
}

fn gb(rate: f64) -> String {
    format!("{:.1} GB/s", rate / 1e9)
}

impl Report<'_> {
    /// Seconds of a decode step at the median.
    fn step(&self) -> f64 {
        1.0 / spread(&self.speed.decode).0.max(1e-9)
    }

    /// Seconds that kernels ran in a step, by events, beyond what as many empty ones take.
    fn kernels(&self) -> f64 {
        self.costs.values().map(|c| c.seconds).sum()
    }

    /// Seconds of a step in which ranks met, by events: the sums and the waiting for each other.
    fn meetings(&self) -> f64 {
        self.costs.get(ALL_REDUCE).map_or(0.0, |c| c.seconds)
    }

    fn launches(&self) -> u64 {
        self.costs.values().map(|c| c.launches).sum()
    }

    /// Seconds of a step that neither kernels nor as many empty launches of a recording explain.
    fn rest(&self) -> f64 {
        self.step() - self.kernels() - self.launches() as f64 * self.empty.recorded
    }

    /// Bytes of weights that one rank reads per second of decode.
    fn read_rate(&self) -> f64 {
        self.token_bytes as f64 / self.step()
    }

    fn load_rate(&self) -> (f64, f64) {
        (self.file as f64 / self.loaded.as_secs_f64(), self.file as f64 / self.reader.as_secs_f64())
    }

    fn document(&self) -> Json {
        let op = |(op, c): (&&str, &Cost)| json!({ "op": op, "launches": c.launches, "seconds": c.seconds, "bytes": c.bytes });
        let (load, reader) = self.load_rate();
        json!({
            "model": self.name, "tp": self.args.tp, "device": self.args.device.device.to_string(), "gpus": self.gpus,
            "recipe": self.recipe, "attention": self.attention,
            "load": {
                "file_bytes": self.file, "seconds": self.loaded.as_secs_f64(), "bytes_per_second": load,
                "plain_reader_bytes_per_second": reader, "share": load / reader,
                "host_anonymous_bytes": self.host, "host_pinned_bytes": PINNED * self.args.tp,
            },
            "prefill_tokens_per_second": spread_document(self.args.prompt, &self.speed.prefill),
            "decode_tokens_per_second": spread_document(self.args.steps, &self.speed.decode),
            "weight_bytes_per_token": self.token_bytes, "weight_bytes_per_second": self.read_rate(),
            "bandwidth": {
                "copy_bytes_per_second": self.bandwidth.copy, "read_bytes_per_second": self.bandwidth.read,
                "share_of_copy": self.read_rate() / self.bandwidth.copy,
                "share_of_read": self.read_rate() / self.bandwidth.read,
            },
            "step": {
                "seconds": self.step(), "kernel_seconds": self.kernels(),
                "all_reduce_seconds": self.meetings(), "first_rank_alone_seconds": self.alone, "launches": self.launches(),
                "recorded_nodes": self.nodes, "replays": self.replays,
                "empty_launch_seconds": { "timed": self.empty.timed, "recorded": self.empty.recorded },
                "unexplained_seconds": self.rest(),
                "ops": self.costs.iter().map(op).collect::<Vec<_>>(),
            },
            "memory": { "weights_per_rank_by_plan": self.plan, "used_per_gpu": self.used },
            "batches": self.batches.iter().map(|(n, s)| json!({ "sequences": n, "tokens_per_second": s })).collect::<Vec<_>>(),
        })
    }

    fn print(&self, out: &mut dyn Write) -> std::io::Result<()> {
        let (tp, device, recipe, attention) = (self.args.tp, &self.args.device.device, self.recipe, self.attention);
        writeln!(out, "{}, tp {tp}, {device}, recipe {recipe}, attention {attention}", self.name)?;
        writeln!(out, "  gpus     {}", self.gpus.join(", "))?;
        let (load, reader) = self.load_rate();
        let seconds = self.loaded.as_secs_f64();
        match self.file {
            0 => writeln!(out, "  load     {seconds:.2} s, from no file: the model is built in")?,
            size => writeln!(
                out,
                "  load     {} in {seconds:.2} s: {}, {:.0} % of a plain sequential read of the same file ({})",
                bytes(size),
                gb(load),
                100.0 * load / reader,
                gb(reader)
            )?,
        }
        let anonymous = self.host.map_or("unknown".into(), bytes);
        writeln!(out, "  host     {anonymous} anonymous memory, {} pinned while loading", bytes((PINNED * tp) as u64))?;
        self.speed.print(self.args, out)?;
        let rate = self.read_rate();
        writeln!(
            out,
            "  reads    {} of weights per token: {}, {:.0} % of a copy ({}), {:.0} % of a read sweep ({})",
            bytes(self.token_bytes),
            gb(rate),
            100.0 * rate / self.bandwidth.copy,
            gb(self.bandwidth.copy),
            100.0 * rate / self.bandwidth.read,
            gb(self.bandwidth.read)
        )?;
        let us = |s: f64| format!("{:.1} us", 1e6 * s);
        let launches = self.launches();
        writeln!(
            out,
            "  step     {} = {:.1} in kernels + {:.1} in {launches} launches (as if empty) + {:.1} elsewhere",
            us(self.step()),
            1e6 * self.kernels(),
            1e6 * launches as f64 * self.empty.recorded,
            1e6 * self.rest()
        )?;
        writeln!(out, "  graph    {} nodes, replayed {} times", self.nodes, self.replays)?;
        if let Some(alone) = self.alone {
            writeln!(
                out,
                "  ranks    {} of the kernels' time in all-reduces; the first rank's step alone takes {}",
                us(self.meetings()),
                us(alone)
            )?;
        }
        let most = |v: &[u64]| bytes(v.iter().max().copied().unwrap_or(0));
        writeln!(
            out,
            "  memory   {} of weights on a rank by the plan, {} taken from a GPU in all\n",
            most(&self.plan),
            most(&self.used)
        )?;
        let mut rows: Vec<(&&str, &Cost)> = self.costs.iter().collect();
        rows.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds));
        let mut t = table(&["operation", ">us/step", ">share", ">launches", ">bytes", ">GB/s"]);
        for (op, c) in rows {
            t.add_row([
                (*op).to_string(),
                format!("{:.1}", 1e6 * c.seconds),
                format!("{:.1} %", 100.0 * c.seconds / self.kernels().max(1e-12)),
                c.launches.to_string(),
                if c.bytes > 0 { bytes(c.bytes) } else { String::new() },
                if c.bytes > 0 { format!("{:.0}", c.bytes as f64 / c.seconds.max(1e-12) / 1e9) } else { String::new() },
            ]);
        }
        writeln!(out, "{t}")?;
        if !self.batches.is_empty() {
            let mut t = table(&[">sequences", ">tokens/s", ">tokens/s each"]);
            for (n, s) in &self.batches {
                t.add_row([n.to_string(), format!("{s:.0}"), format!("{:.0}", s / *n as f64)]);
            }
            writeln!(out, "\n{t}")?;
        }
        Ok(())
    }
}
