//! A script in the engine's place, and services that run it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lockstep::engine::EngineError;
use lockstep::engine::chooser::Logprobs;
use lockstep::engine::sampler::Sampling;
use lockstep::engine::scheduler::{Counts, Event, Finish, PromptRead, Request};
use lockstep::serve::api::Model;
use lockstep::serve::driver::{self, Counters, Generator, Stepped};
use lockstep::serve::http::{Limits, Service};
use lockstep::serve::keys::Keys;
use lockstep::serve::listen::listen;
use lockstep::serve::turn::Markers;
use lockstep::tokenize::Tokenizer;
use tokio::runtime::{Builder, Runtime};

use crate::common::running::open;

/// What a script does.
#[derive(Clone, Default)]
pub struct Play {
    /// Ids of every answer; behind them it goes on with the last.
    pub answer: Vec<u32>,
    /// Steps that a prompt takes.
    pub prefill: usize,
    /// Time of a step.
    pub step: Duration,
    /// The step that fails.
    pub fails_at: Option<usize>,
    /// The step that hangs.
    pub hangs_at: Option<usize>,
    /// The step that panics.
    pub panics_at: Option<usize>,
    /// Sequences that run at once; 0 for all.
    pub at_once: usize,
}

/// What was asked of it.
#[derive(Default)]
pub struct Seen {
    pub requests: Vec<Request>,
    pub cancelled: Vec<u64>,
    pub live: usize,
    pub steps: usize,
}

pub struct Script {
    play: Play,
    seen: Arc<Mutex<Seen>>,
    live: BTreeMap<u64, (Request, usize, usize)>,
    next: u64,
}

impl Generator for Script {
    fn add(&mut self, request: Request) -> Result<u64, EngineError> {
        self.next += 1;
        let mut seen = self.seen.lock().unwrap();
        seen.requests.push(request.clone());
        self.live.insert(self.next, (request, self.play.prefill, 0));
        seen.live = self.live.len();
        Ok(self.next)
    }

    fn cancel(&mut self, sequence: u64) {
        let mut seen = self.seen.lock().unwrap();
        if self.live.remove(&sequence).is_some() {
            seen.cancelled.push(sequence);
        }
        seen.live = self.live.len();
    }

    fn step(&mut self) -> Result<Stepped, EngineError> {
        let step = {
            let mut seen = self.seen.lock().unwrap();
            seen.steps += 1;
            seen.steps
        };
        if self.play.hangs_at == Some(step) {
            std::thread::sleep(Duration::from_secs(3600));
        }
        assert_ne!(self.play.panics_at, Some(step), "as the script says");
        if self.play.fails_at == Some(step) {
            return Err(EngineError::NoNumbers { sequence: 3, position: 5 });
        }
        std::thread::sleep(self.play.step);
        let mut stepped = Stepped::default();
        let most = if self.play.at_once == 0 { usize::MAX } else { self.play.at_once };
        for (sequence, (request, prefill, at)) in self.live.iter_mut().take(most) {
            if *prefill > 0 {
                *prefill -= 1;
                continue;
            }
            if *at == 0 {
                let top = request.wishes.prompt_logprobs;
                let of = |id: &u32| Logprobs { chosen: -1.0, top: vec![(*id, -1.0)] };
                let logprobs = request.prompt.iter().skip(1).filter(|_| top.is_some()).map(of).collect();
                let ended = request.most == 0;
                stepped.prompts.push(PromptRead { sequence: *sequence, shared: 0, logprobs, ended });
                if ended {
                    *at = usize::MAX;
                    continue;
                }
            }
            let token = self.play.answer.get(*at).or(self.play.answer.last()).copied().unwrap_or(0);
            *at += 1;
            let finish = if request.stop.contains(&token) {
                Some(Finish::Stop)
            } else {
                (*at >= request.most).then_some(Finish::Length)
            };
            let logprobs = request.wishes.logprobs.map(|_| Logprobs { chosen: -0.5, top: vec![(token, -0.5)] });
            stepped.events.push(Event { sequence: *sequence, token, logprobs, finish });
            if finish.is_some() {
                *at = usize::MAX;
            }
        }
        self.live.retain(|_, (_, _, at)| *at != usize::MAX);
        self.seen.lock().unwrap().live = self.live.len();
        Ok(stepped)
    }

    fn counters(&mut self) -> Counters {
        let counts = Counts { running: self.live.len(), ..Counts::default() };
        Counters { counts, ..Counters::default() }
    }
}

/// How a service is set up.
pub struct Setup {
    pub limits: Limits,
    pub keys: &'static str,
    pub template: Option<&'static str>,
    pub sequences: usize,
    pub context: usize,
    pub stall: Option<Duration>,
}

impl Default for Setup {
    fn default() -> Self {
        Setup { limits: Limits::default(), keys: "", template: None, sequences: 4, context: 384, stall: None }
    }
}

/// A service at a port of its own.
pub struct Running {
    pub port: u16,
    pub service: Arc<Service>,
    pub tokenizer: Arc<Tokenizer>,
    pub seen: Arc<Mutex<Seen>>,
    _runtime: Runtime,
}

impl Running {
    /// Waits until something holds of what was seen.
    pub fn wait(&self, what: &str, holds: impl Fn(&Seen) -> bool) {
        let until = Instant::now() + Duration::from_secs(20);
        while !holds(&self.seen.lock().unwrap()) {
            assert!(Instant::now() < until, "{what}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// The tokenizer of glm5-nano, perhaps with another template.
pub fn tokenizer(template: Option<&str>) -> Arc<Tokenizer> {
    let mut spec = open("glm5-nano-Q4_K_M.gguf").tokenizer_spec().unwrap();
    if let Some(template) = template {
        spec.chat_template = Some(template.into());
    }
    Arc::new(Tokenizer::new(&spec).unwrap())
}

/// A service that is loading.
pub fn loading(setup: &Setup) -> Running {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let service = Arc::new(Service::new(setup.limits, Keys::of(setup.keys), None));
    let listener = runtime.block_on(tokio::net::TcpListener::bind(("127.0.0.1", 0))).unwrap();
    let port = listener.local_addr().unwrap().port();
    runtime.spawn(listen(listener, service.clone(), 64));
    let (tokenizer, seen) = (tokenizer(setup.template), Arc::default());
    Running { port, service, tokenizer, seen, _runtime: runtime }
}

/// A service over something that makes tokens.
pub fn over(setup: &Setup, generator: impl Generator + 'static) -> Running {
    let running = loading(setup);
    let Running { service, tokenizer, .. } = &running;
    let orders = driver::start(generator, tokenizer.clone(), service.shared.clone(), service.metrics.clone()).unwrap();
    let model = Model {
        names: vec!["nano".into(), "other".into()],
        tokenizer: tokenizer.clone(),
        markers: Markers::of(tokenizer),
        stop: tokenizer.stop_ids().ids.iter().map(|s| s.id).collect(),
        vocab: tokenizer.len(),
        context: setup.context,
        longest_token: tokenizer.longest(),
        sequences: setup.sequences,
        created: 1,
        fingerprint: "test".into(),
        also_reasoning: false,
        verified: false,
        verification: serde_json::json!({ "verified": false }),
    };
    service.ready(model, Sampling::default(), orders);
    running
}

/// A service that plays.
pub fn start(setup: &Setup, play: Play) -> Running {
    let seen: Arc<Mutex<Seen>> = Arc::default();
    let script = Script { play, seen: seen.clone(), live: BTreeMap::new(), next: 0 };
    Running { seen, ..over(setup, script) }
}
