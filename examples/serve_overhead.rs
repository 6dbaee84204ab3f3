//! What the way through HTTP costs: the same sequences once by the scheduler alone, once as streams of clients.
//!
//!     RAYON_NUM_THREADS=1 cargo run --release --example serve_overhead
//!
//! One thread computes; clients stay on the last core, the server runs where the system puts it. Prints tokens per second of both, in alternation, and
//! their ratio; and what the way costs in a processor's time, which other programs on the machine disturb less: that of
//! the driver and of the threads that move bytes, less that of the scheduler alone.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use lockstep::checkpoint::Checkpoint;
use lockstep::engine::sampler::Sampling;
use lockstep::engine::scheduler::Request;
use lockstep::engine::{Attention, Engine, Options};
use lockstep::serve::api::Model;
use lockstep::serve::driver::{self, Generator, Serving};
use lockstep::serve::http::{Limits, Service};
use lockstep::serve::keys::Keys;
use lockstep::serve::listen::listen;
use lockstep::serve::turn::Markers;
use lockstep::tokenize::Tokenizer;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tokio::runtime::Builder;

type Failed = Box<dyn std::error::Error + Send + Sync>;

const PROMPT: &str = "In the beginning God created the heaven and the earth.";
const TOKENS: usize = 200;
const REPEATS: usize = 7;

fn serving(checkpoint: &Arc<Checkpoint>, sequences: usize) -> Result<Serving, Failed> {
    let options = Options { attention: Attention::Dsa, chunk: 512, cache_tokens: 384 * sequences, sequences };
    Ok(Serving::new(Engine::cpu(checkpoint.clone(), 1, options)?))
}

/// Seconds of a processor that a thread has taken so far.
fn taken(thread: &Path) -> Result<f64, Failed> {
    let text = std::fs::read_to_string(thread.join("schedstat"))?;
    let nanoseconds: u64 = text.split(' ').next().unwrap_or_default().parse()?;
    Ok(nanoseconds as f64 / 1e9)
}

/// The same of all threads of the server. None of them ends.
fn taken_by_server() -> Result<f64, Failed> {
    let mut all = 0.0;
    for thread in std::fs::read_dir("/proc/self/task")? {
        let thread = thread?.path();
        // A client's thread may be gone by now.
        let name = std::fs::read_to_string(thread.join("comm")).unwrap_or_default();
        if ["driver", "tokio-rt-worker"].contains(&name.trim()) {
            all += taken(&thread)?;
        }
    }
    Ok(all)
}

/// Seconds of the scheduler alone.
fn alone(serving: &mut Serving, prompt: &[u32], sequences: usize) -> Result<f64, Failed> {
    let start = Instant::now();
    for _ in 0..sequences {
        serving.add(Request::plain(prompt.to_vec(), TOKENS, Vec::new(), Sampling::default()))?;
    }
    let mut left = sequences * TOKENS;
    while left > 0 {
        left -= serving.step()?.events.len();
    }
    Ok(start.elapsed().as_secs_f64())
}

/// One stream, read to its end.
fn stream(port: u16) -> Result<(), Failed> {
    let body =
        format!(r#"{{"prompt":"{PROMPT}","max_tokens":{TOKENS},"temperature":0,"ignore_eos":true,"stream":true}}"#);
    stay_on_last_core()?;
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n";
    stream.write_all(format!("{head}content-length: {}\r\n\r\n{body}", body.len()).as_bytes())?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    match text.contains("data: [DONE]") && text.contains("\"length\"") {
        true => Ok(()),
        false => Err(text.into()),
    }
}

/// Keeps this thread on the last core that it may use.
fn stay_on_last_core() -> Result<(), Failed> {
    let all = sched_getaffinity(None)?;
    let mut last = CpuSet::new();
    (0..CpuSet::MAX_CPU).rev().find(|core| all.is_set(*core)).into_iter().for_each(|core| last.set(core));
    Ok(sched_setaffinity(None, &last)?)
}

/// Seconds of as many clients.
fn clients(port: u16, sequences: usize) -> Result<f64, Failed> {
    let start = Instant::now();
    let all: Vec<_> = (0..sequences).map(|_| std::thread::spawn(move || stream(port))).collect();
    for thread in all {
        thread.join().map_err(|_| "a client panicked")??;
    }
    Ok(start.elapsed().as_secs_f64())
}

fn main() -> Result<(), Failed> {
    let mut out = std::io::stdout();
    let path = std::env::args_os().nth(1).map(std::path::PathBuf::from);
    let checkpoint = Arc::new(Checkpoint::open(path.as_deref())?);
    let tokenizer = Arc::new(Tokenizer::new(&checkpoint.tokenizer_spec()?)?);
    let prompt = tokenizer.prompt_ids(PROMPT)?;
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    for sequences in [1, 16] {
        let mut direct = serving(&checkpoint, sequences)?;
        let service = Arc::new(Service::new(Limits::default(), Keys::default(), None));
        let listener = runtime.block_on(tokio::net::TcpListener::bind(("127.0.0.1", 0)))?;
        let port = listener.local_addr()?.port();
        runtime.spawn(listen(listener, service.clone(), 64));
        let served = serving(&checkpoint, sequences)?;
        let orders = driver::start(served, tokenizer.clone(), service.shared.clone(), service.metrics.clone())?;
        let model = Model {
            names: vec!["model".into()],
            tokenizer: tokenizer.clone(),
            markers: Markers::of(&tokenizer),
            stop: Vec::new(),
            vocab: tokenizer.len(),
            context: checkpoint.config().context,
            longest_token: tokenizer.longest(),
            sequences,
            created: 0,
            fingerprint: String::new(),
            also_reasoning: false,
            verified: false,
            verification: serde_json::Value::Null,
        };
        service.ready(model, Sampling::default(), orders);
        let (mut ratios, mut costs) = (Vec::new(), Vec::new());
        for repeat in 0..=REPEATS {
            let here = Path::new("/proc/thread-self");
            let (before, server) = (taken(here)?, taken_by_server()?);
            let a = alone(&mut direct, &prompt, sequences)?;
            let scheduler = taken(here)? - before;
            let b = clients(port, sequences)?;
            let cost = taken_by_server()? - server - scheduler;
            let tokens = (sequences * TOKENS) as f64;
            let (alone, through) = (tokens / a, tokens / b);
            if repeat > 0 {
                writeln!(out, "{sequences} streams: {alone:.0} tokens/s alone, {through:.0} through HTTP")?;
                ratios.push(a / b);
                costs.push(cost / tokens * 1e6);
            }
        }
        let median = |mut all: Vec<f64>| {
            all.sort_by(f64::total_cmp);
            all[REPEATS / 2]
        };
        let (ratio, cost) = (median(ratios), median(costs));
        writeln!(out, "{sequences} streams: {ratio:.3} of the speed, {cost:.1} us a token (medians of {REPEATS})")?;
    }
    Ok(())
}
