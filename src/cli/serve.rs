//! `lockstep serve`: the port, the checks, the service, and its end.

pub mod args;
pub mod gate;
pub mod preflight;
pub mod systemd;
mod template;
pub mod watchdog;

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::process::exit;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::header::HeaderValue;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};

use serde_json::{Value as Json, json};

use self::args::{LogArg, ServeArgs};
use self::preflight::{Room, RunFile};
use self::systemd::Told;
use super::certificate::{Certificate, Setting};
use super::{CliError, Exit, attention, console, device};
use crate::checkpoint::Checkpoint;
use crate::engine::sampler::Sampling;
use crate::engine::scheduler::Request;
use crate::engine::{Engine, EngineError, Engines, Options};
use crate::serve::api::Model;
use crate::serve::driver::{self, Generator, Serving};
use crate::serve::http::{Limits, Service};
use crate::serve::keys::Keys;
use crate::serve::listen::listen;
use crate::serve::state::State;
use crate::serve::turn::Markers;
use crate::tokenize::Tokenizer;

/// Tokens of all contexts that the cache has room for, if nothing is typed.
const CACHE: usize = 1 << 16;
/// Time for last frames to go out.
const LAST_WORDS: Duration = Duration::from_millis(500);

pub(super) fn run(args: &ServeArgs, out: &mut dyn Write) -> Result<Exit, CliError> {
    check(args)?;
    if args.print_unit {
        let program = std::env::current_exe()?;
        let typed: Vec<String> = std::env::args().skip(1).collect();
        out.write_all(systemd::unit(args, &program.display().to_string(), &typed).as_bytes())?;
        return Ok(Exit::Ok);
    }
    match serve(args) {
        Ok(exit) => Ok(exit),
        Err(e @ CliError::Usage(_)) => Err(e),
        // The next start would end in the same way.
        Err(e) => {
            console::error(&e.to_string());
            Ok(Exit::Refused)
        }
    }
}

/// Refuses flags that mean nothing.
fn check(args: &ServeArgs) -> Result<(), CliError> {
    device::check_degree(&args.device, args.tp)?;
    for (flag, found, most) in [("--temperature", args.temperature, 2.0), ("--top-p", args.top_p, 1.0)] {
        if !(0.0..=most).contains(&found) {
            return Err(CliError::Usage(format!("{flag}: expected 0 to {most}, found {found}")));
        }
    }
    Ok(())
}

fn serve(args: &ServeArgs) -> Result<Exit, CliError> {
    log(args.log);
    let keys = match &args.api_key_file {
        None => Keys::default(),
        Some(path) => {
            let text = std::fs::read_to_string(path)
                .map_err(|e| CliError::Refused(format!("--api-key-file {}: {e}", path.display())))?;
            let keys = Keys::of(&text);
            if keys.is_empty() {
                let problem = format!("--api-key-file {}: expected a key, found none", path.display());
                return Err(CliError::Refused(problem));
            }
            keys
        }
    };
    let cors = args.cors.as_deref().map(HeaderValue::from_str).transpose();
    let cors = cors.map_err(|e| CliError::Usage(format!("--cors: {e}")))?;
    let address = SocketAddr::new(args.host, args.port);
    let note = RunFile::check(args.port, args.reap)?;
    let listener = TcpListener::bind(address).map_err(|e| {
        let holder = preflight::holder(address).map_or(String::new(), |who| format!(": held by {who}"));
        CliError::Refused(format!("cannot listen at {address}: {e}{holder}"))
    })?;
    let limits = Limits { body: args.body, queue: args.queue, ..Limits::default() };
    let service = Arc::new(Service::new(limits, keys, cors));
    let runtime = Builder::new_multi_thread().worker_threads(2).max_blocking_threads(4).enable_all().build()?;
    open(&runtime, listener, &service, args)?;
    note.write();
    tracing::info!(%address, "listening; 503 until the model is loaded and checked");
    let loaded = load(args, &service);
    if let Err(e) = loaded {
        note.remove();
        return Err(e);
    }
    tracing::info!("ready");
    systemd::ready();
    let drain = Duration::from_secs(args.drain);
    let exit_of = runtime.block_on(end(&service, drain));
    note.remove();
    // Ranks that hang would never end; whoever serves has to.
    exit(i32::from(exit_of.code()))
}

/// Takes connections, and signals, from here on.
fn open(runtime: &Runtime, listener: TcpListener, service: &Arc<Service>, args: &ServeArgs) -> std::io::Result<()> {
    listener.set_nonblocking(true)?;
    let _inside = runtime.enter();
    let listener = tokio::net::TcpListener::from_std(listener)?;
    runtime.spawn(listen(listener, service.clone(), args.connections));
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let (shared, mut seen) = (service.shared.clone(), false);
    runtime.spawn(async move {
        loop {
            tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
            if seen || shared.state() == State::Loading {
                exit(if seen { 143 } else { 0 });
            }
            seen = true;
            shared.enter(State::Draining);
        }
    });
    Ok(())
}

/// Waits until the service is over, and says how the process ends.
async fn end(service: &Service, drain: Duration) -> Exit {
    let shared = &service.shared;
    let mut state = shared.watch();
    let now = state.wait_for(|s| !matches!(s, State::Loading | State::Ready)).await.map(|s| s.clone());
    if let Ok(State::Draining) = now {
        systemd::stopping();
        tracing::info!(requests = shared.asked(), seconds = drain.as_secs(), "draining");
        let deadline = Instant::now() + drain;
        while shared.asked() > 0 && Instant::now() < deadline && shared.state() == State::Draining {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        shared.enter(State::Ended);
    }
    tokio::time::sleep(LAST_WORDS).await;
    match shared.state() {
        State::Failed(why) => {
            tracing::error!("the service failed: {why}");
            Exit::Fault
        }
        _ => {
            tracing::info!("stopped");
            Exit::Ok
        }
    }
}

fn log(form: LogArg) {
    use tracing_subscriber::EnvFilter;
    let chosen = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(chosen).with_writer(std::io::stderr).with_target(false);
    match form {
        LogArg::Text => log.init(),
        LogArg::Json => log.json().init(),
    }
}

/// Loads the model, checks it, and says that requests are taken.
fn load(args: &ServeArgs, service: &Arc<Service>) -> Result<(), CliError> {
    let told = Arc::new(Told::new());
    let engines: Arc<dyn Engines> = device::telling(&args.device, told.clone())?.engines(None).into();
    let checkpoint = Arc::new(Checkpoint::open(args.model.as_deref())?);
    let spec = template::spec(&checkpoint, args.chat_template.as_deref())?;
    let tokenizer = Arc::new(Tokenizer::new(&spec)?);
    let options = options(args, &checkpoint);
    let room = preflight::memory(&checkpoint, engines.backend(), args.tp, &options)?;
    told.stage("loading weights");
    let engine = engines.engine(&checkpoint, args.tp, options)?;
    let (engine, verification) = checked(args, &checkpoint, &engines, engine, room, &told)?;
    let verified = verification["verified"] == true;
    let model = model(args, &checkpoint, &*engines, &engine, &tokenizer);
    let mut serving = Serving::new(engine);
    warm(&mut serving)?;
    let orders = driver::start(serving, tokenizer, service.shared.clone(), service.metrics.clone())?;
    watchdog::watch(service.shared.clone(), args.stall.map(Duration::from_secs))?;
    let defaults = Sampling { temperature: args.temperature, top_p: args.top_p, ..Sampling::default() };
    service.ready(Model { verified, verification, ..model }, defaults, orders);
    Ok(())
}

/// The engine once it is checked, by a certificate or by the stages, and what that said.
fn checked(
    args: &ServeArgs,
    checkpoint: &Arc<Checkpoint>,
    engines: &Arc<dyn Engines>,
    engine: Engine,
    room: Room,
    told: &Told,
) -> Result<(Engine, Json), CliError> {
    if args.unverified {
        tracing::warn!("nothing is checked (--unverified): replies say so");
        let time = chrono::Utc::now().format("%Y-%m-%dT%H:%M:%SZ").to_string();
        return Ok((engine, json!({ "verified": false, "source": "--unverified: nothing was checked", "time": time })));
    }
    if let Some(path) = &args.certificate {
        let device = args.device.device.to_string();
        let setting = Setting::of(engines.backend(), &device, args.tp, attention(args.attention))?;
        told.stage("certificate");
        // One that cannot be read says as little as one of something else.
        let certificate = Certificate::read(path).map_err(|e| e.to_string());
        let differs = match &certificate {
            Ok(certificate) => certificate.differs(checkpoint, &setting, args.rehash, told)?,
            Err(e) => Some(e.clone()),
        };
        match (differs, certificate) {
            (None, Ok(certificate)) => {
                tracing::info!(certificate = %path.display(), "the certificate holds: the checks are not run again");
                return Ok((engine, certificate.verification()));
            }
            (field, _) => {
                let field = field.unwrap_or_default();
                tracing::warn!("the certificate does not hold, so the checks are run: {field}");
            }
        }
    }
    let (checkpoint, engines, untrained) = (checkpoint.clone(), engines.clone(), args.untrained);
    let passed = gate::run(gate::Asked { checkpoint, engines, engine, untrained, room }, told)?;
    Ok((passed.engine, passed.verification))
}

fn options(args: &ServeArgs, checkpoint: &Checkpoint) -> Options {
    let context = checkpoint.config().context;
    let cache_tokens = args.cache_tokens.unwrap_or_else(|| context.saturating_mul(args.sequences).min(CACHE));
    let chunk = args.chunk.min(cache_tokens);
    Options { attention: attention(args.attention), chunk, cache_tokens, sequences: args.sequences }
}

fn model(
    args: &ServeArgs,
    checkpoint: &Checkpoint,
    engines: &dyn Engines,
    engine: &Engine,
    tokenizer: &Arc<Tokenizer>,
) -> Model {
    let names = if args.served_name.is_empty() {
        vec![checkpoint.name().trim_start_matches("built-in ").into()]
    } else {
        args.served_name.clone()
    };
    let recipe = engines.backend().recipe().name();
    Model {
        names,
        tokenizer: tokenizer.clone(),
        markers: Markers::of(tokenizer),
        stop: tokenizer.stop_ids().ids.iter().map(|s| s.id).collect(),
        vocab: engine.config().vocab.min(tokenizer.len()),
        context: engine.config().context.min(engine.options().cache_tokens),
        longest_token: tokenizer.longest(),
        sequences: args.sequences,
        created: chrono::Utc::now().timestamp(),
        fingerprint: format!("lockstep-{}-{}-{recipe}-tp{}", env!("CARGO_PKG_VERSION"), args.device.device, args.tp),
        also_reasoning: args.also_reasoning,
        verified: false,
        verification: Json::Null,
    }
}

/// One token through scheduler and ranks.
fn warm(serving: &mut Serving) -> Result<(), EngineError> {
    serving.add(Request::plain(vec![0], 1, Vec::new(), Sampling::default()))?;
    while serving.counters().counts.running + serving.counters().counts.waiting > 0 {
        serving.step()?;
    }
    Ok(())
}
