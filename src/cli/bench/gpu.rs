//! The bench on GPUs: what the CPU's shows, and what matters there beside it. Loading is compared with a plain sequential
//! read of the same file; operations are timed by events on the GPU, with the launches queued before the first runs; the
//! bandwidth of copies and of reads is measured in the same process.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Speeds, batches, check, make_room, prompt};
use crate::checkpoint::Checkpoint;
use crate::cli::args::BenchArgs;
use crate::cli::console::Bar;
use crate::cli::{CliError, Exit, emit, options};
use crate::device::call::ALL_REDUCE;
use crate::device::cpu::host::anonymous;
use crate::device::cuda::bandwidth;
use crate::device::cuda::gpu::GpuError;
use crate::device::cuda::launches::{self, EmptyLaunch};
use crate::device::cuda::memory::PINNED;
use crate::device::cuda::profile::{Cost, Profile};
use crate::device::{Batch, Draw, Token};
use crate::engine::backend::CudaBackend;
use crate::engine::{Backend, Engine, Options};
use crate::model::Config;
use crate::report::bench::{Empty, GpuBandwidth, GpuBench, GpuMemory, Load, OpCost, Spread, Step};
use crate::shard::TpPlan;
use crate::shard::budget::Budget;

/// Rows of the profile: operations by name.
type Costs = BTreeMap<&'static str, Cost>;

pub(super) fn run(backend: &CudaBackend, args: &BenchArgs, out: &mut dyn Write) -> Result<Exit, CliError> {
    let gpu = |e: GpuError| CliError::Usage(e.to_string());
    let checkpoint = Arc::new(Checkpoint::open(args.model.model.as_deref())?);
    let config = checkpoint.config().clone();
    let mut options = options(&checkpoint, &args.engine)?;
    check(args, &options)?;
    make_room(&mut options, args);
    let plan = TpPlan::new(&config, args.tp)?;
    let budget = Budget::new(&checkpoint, &plan)?;
    let groups = backend.groups(args.tp)?;
    let bandwidth = bandwidth::measure(groups[0].gpu()).map_err(gpu)?;
    let empty = launches::measure(groups[0].gpu()).map_err(gpu)?;
    let gpus = groups.iter().map(|g| format!("{} ({})", g.gpu().name, g.gpu().arch)).collect();
    let free: Vec<u64> =
        groups.iter().map(|g| g.gpu().memory().map(|m| m.0 as u64)).collect::<Result<_, _>>().map_err(gpu)?;

    let bar = Bar::new("bench: ");
    read_whole(&checkpoint)?; // both then find the file in the same state
    let start = Instant::now();
    let mut engine = Engine::on(backend, checkpoint.clone(), args.tp, options)?;
    let loaded = start.elapsed();
    let host = anonymous();
    let start = Instant::now();
    let file = read_whole(&checkpoint)?;
    let reader = start.elapsed();

    let ids = prompt(config.vocab, args.prompt);
    let speeds = Speeds::measure(&mut engine, &ids, args)?;
    let used = groups.iter().zip(&free).map(|(g, before)| Ok(before.saturating_sub(g.gpu().memory()?.0 as u64)));
    let used: Vec<u64> = used.collect::<Result<_, _>>().map_err(gpu)?;
    let (replays, nodes) = backend.replays();
    let batches = batches(&mut engine, args, &ids)?;
    let speeds = Speeds { batches, ..speeds };
    drop(engine);
    let costs = profile(backend, &checkpoint, args, options, &config, empty, groups.len())?;
    let alone = if args.tp > 1 { Some(alone(backend, &checkpoint, args, options, &config)?) } else { None };
    let speed = speeds.of(&checkpoint, args, options, backend.recipe, budget.token_bytes(&config));
    let (per_second, kernels) =
        (|time: Duration| file as f64 / time.as_secs_f64(), costs.iter().map(|c| c.seconds).sum());
    let (seconds, read) = (1.0 / speed.decode_tokens_per_second.median.max(1e-9), speed.weight_bytes_per_second);
    let launches: u64 = costs.iter().map(|c| c.launches).sum();
    let record = GpuBench {
        gpus,
        load: Load {
            file_bytes: file,
            seconds: loaded.as_secs_f64(),
            bytes_per_second: per_second(loaded),
            plain_reader_bytes_per_second: per_second(reader),
            share: reader.as_secs_f64() / loaded.as_secs_f64(),
            host_anonymous_bytes: host,
            host_pinned_bytes: PINNED * args.tp,
        },
        bandwidth: GpuBandwidth {
            copy_bytes_per_second: bandwidth.copy,
            read_bytes_per_second: bandwidth.read,
            share_of_copy: read / bandwidth.copy,
            share_of_read: read / bandwidth.read,
        },
        step: Step {
            seconds,
            kernel_seconds: kernels,
            all_reduce_seconds: costs.iter().find(|c| c.op == ALL_REDUCE).map_or(0.0, |c| c.seconds),
            first_rank_alone_seconds: alone,
            launches,
            recorded_nodes: nodes,
            replays,
            empty_launch_seconds: Empty { timed: empty.timed, recorded: empty.recorded },
            unexplained_seconds: seconds - kernels - launches as f64 * empty.recorded,
            ops: costs,
        },
        memory: GpuMemory { weights_per_rank_by_plan: budget.trunk_bytes(), used_per_gpu: used },
        speed,
    };
    drop(bar);
    emit(&record, args.model.json, out)?;
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
    Ok(Spread::new(1, times).median)
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
) -> Result<Vec<OpCost>, CliError> {
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
    let cost = |(op, c): (&'static str, Cost)| OpCost {
        op,
        launches: (c.launches as f64 / times).round() as u64,
        seconds: ((c.seconds - c.launches as f64 * empty.timed) / times).max(0.0),
        bytes: (c.bytes as f64 / times).round() as u64,
    };
    let mut costs: Vec<OpCost> = mean.into_iter().map(cost).collect();
    costs.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    Ok(costs)
}
