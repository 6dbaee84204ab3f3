//! The thread that makes tokens: it takes orders, runs steps, and gives every token to its sequence's [`Turn`]. Between
//! two steps it takes all orders that came, so that a client who goes is forgotten within one step; without work it
//! sleeps until an order comes.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvError, Sender, channel};
use std::time::Instant;

use tokio::sync::mpsc::UnboundedSender;

use super::metrics::{Metrics, Reason};
use super::state::{Shared, State};
use super::turn::{Ended, Piece, Spent, Turn, TurnOptions};
use crate::engine::chooser::Logprobs;
use crate::engine::kv::PageCounts;
use crate::engine::scheduler::{Counts, Event, PromptRead, Request, Scheduler};
use crate::engine::{Engine, EngineError};
use crate::tokenize::Tokenizer;

/// What a step gave.
#[derive(Debug, Default)]
pub struct Stepped {
    /// Prompts that have run; told before their first tokens.
    pub prompts: Vec<PromptRead>,
    /// New tokens.
    pub events: Vec<Event>,
}

/// What is counted of whatever makes tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Its sequences and steps.
    pub counts: Counts,
    /// Its cache.
    pub pages: PageCounts,
}

/// What makes tokens: the engine, or a script in its place.
pub trait Generator: Send {
    /// Queues a request.
    ///
    /// # Errors
    /// One that can never run.
    fn add(&mut self, request: Request) -> Result<u64, EngineError>;

    /// Ends a sequence; an unknown one is ignored.
    fn cancel(&mut self, sequence: u64);

    /// Runs one step.
    ///
    /// # Errors
    /// Failures after which nothing goes on.
    fn step(&mut self) -> Result<Stepped, EngineError>;

    /// What is counted.
    fn counters(&mut self) -> Counters;
}

/// The engine with its scheduler.
pub struct Serving {
    engine: Engine,
    scheduler: Scheduler,
}

impl Serving {
    /// Of an engine without sequences.
    pub fn new(engine: Engine) -> Self {
        Serving { engine, scheduler: Scheduler::default() }
    }
}

impl Generator for Serving {
    fn add(&mut self, request: Request) -> Result<u64, EngineError> {
        self.scheduler.add(&self.engine, request)
    }

    fn cancel(&mut self, sequence: u64) {
        self.scheduler.cancel(&mut self.engine, sequence);
    }

    fn step(&mut self) -> Result<Stepped, EngineError> {
        let events = self.scheduler.step(&mut self.engine)?;
        Ok(Stepped { prompts: self.scheduler.prompts_read(), events })
    }

    fn counters(&mut self) -> Counters {
        Counters { counts: self.scheduler.counts(), pages: self.engine.pool().counts() }
    }
}

/// One prompt, and the answers to it that are wanted.
#[derive(Debug)]
pub struct Job {
    /// Of whose request it is; several jobs can be of one.
    pub number: u64,
    /// What the scheduler is asked for; the seed is each answer's own.
    pub request: Request,
    /// The seed of each answer; at least one.
    pub seeds: Vec<u64>,
    /// The number of the first answer.
    pub first: usize,
    /// What is made of the ids.
    pub turn: TurnOptions,
    /// Who hears of it. Once nobody does, its sequences end.
    pub said: UnboundedSender<Said>,
}

/// What the driver says of an answer.
#[derive(Debug)]
pub struct Said {
    /// The answer's number.
    pub choice: usize,
    /// What became of it.
    pub what: What,
}

/// What became of an answer.
#[derive(Debug)]
pub enum What {
    /// Its prompt has run.
    Read {
        /// Tokens that were in the cache already.
        cached: usize,
        /// How likely its tokens were, from the second on, if that was wanted.
        logprobs: Vec<Logprobs>,
    },
    /// A part of its text.
    Piece(Piece),
    /// Its end, and what it took.
    Ended(Ended, Spent),
    /// It can never run.
    Refused(String),
}

/// What the driver is told.
#[derive(Debug)]
pub enum Order {
    /// A job.
    Add(Box<Job>),
    /// All sequences of a request's number are not wanted any more.
    Cancel(u64),
}

/// A sequence that runs or waits.
struct Live {
    number: u64,
    choice: usize,
    turn: Turn,
    said: UnboundedSender<Said>,
    /// The other answers to its prompt, which run once that is in the cache.
    rest: Option<Box<Job>>,
    asked: Instant,
    last: Option<Instant>,
}

impl Live {
    /// False if nobody hears it.
    fn say(&self, what: What) -> bool {
        self.said.send(Said { choice: self.choice, what }).is_ok()
    }
}

struct Driver<G> {
    generator: G,
    tokenizer: Arc<Tokenizer>,
    shared: Arc<Shared>,
    metrics: Arc<Metrics>,
    orders: Receiver<Order>,
    live: HashMap<u64, Live>,
}

/// Starts the thread. It ends when nobody can give orders any more, or with the first step that fails.
///
/// # Errors
/// What the system says of threads.
pub fn start<G: Generator + 'static>(
    generator: G,
    tokenizer: Arc<Tokenizer>,
    shared: Arc<Shared>,
    metrics: Arc<Metrics>,
) -> std::io::Result<Sender<Order>> {
    let (give, orders) = channel();
    let driver = Driver { generator, tokenizer, shared: shared.clone(), metrics, orders, live: HashMap::new() };
    std::thread::Builder::new().name("driver".into()).spawn(move || {
        let _told = TellPanic(shared.clone());
        if let Err(e) = driver.run() {
            tracing::error!("the engine failed: {e}");
            shared.enter(State::Failed(e.to_string()));
        }
    })?;
    Ok(give)
}

/// Says that the thread is gone, if it ends by a panic.
struct TellPanic(Arc<Shared>);

impl Drop for TellPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.enter(State::Failed("the thread that makes tokens panicked".into()));
        }
    }
}

impl<G: Generator> Driver<G> {
    fn run(mut self) -> Result<(), EngineError> {
        loop {
            self.metrics.note(&self.generator.counters());
            if self.live.is_empty() {
                self.shared.set_busy(false);
                match self.orders.recv() {
                    Ok(order) => self.obey(order),
                    Err(RecvError) => return Ok(()),
                }
            }
            while let Ok(order) = self.orders.try_recv() {
                self.obey(order);
            }
            if self.live.is_empty() {
                continue;
            }
            self.shared.set_busy(true);
            self.shared.begin_step();
            let began = Instant::now();
            let stepped = self.generator.step();
            self.metrics.step.observe(began.elapsed().as_secs_f64());
            self.shared.end_step();
            let Stepped { prompts, events } = stepped?;
            prompts.into_iter().for_each(|read| self.read(read));
            let now = Instant::now();
            events.into_iter().for_each(|event| self.token(event, now));
        }
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Add(job) => self.add(job),
            Order::Cancel(number) => {
                let of = |(sequence, live): (&u64, &Live)| (live.number == number).then_some(*sequence);
                let gone: Vec<u64> = self.live.iter().filter_map(of).collect();
                gone.into_iter().for_each(|sequence| self.give_up(sequence, "gone"));
            }
        }
    }

    /// Queues the first answer of a job; the others wait until its prompt is in the cache.
    fn add(&mut self, mut job: Box<Job>) {
        self.metrics.prompt_tokens.inc_by(job.request.prompt.len() as u64);
        let (seed, choice) = (job.seeds.remove(0), job.first);
        job.first += 1;
        let (request, live) = self.answer(&job, choice, seed);
        self.queue(request, Live { rest: (!job.seeds.is_empty()).then_some(job), ..live });
    }

    /// One answer to a job.
    fn answer(&self, job: &Job, choice: usize, seed: u64) -> (Request, Live) {
        let mut request = job.request.clone();
        request.sampling.seed = seed;
        let (number, said) = (job.number, job.said.clone());
        let turn = Turn::new(self.tokenizer.clone(), job.turn.clone());
        (request, Live { number, choice, turn, said, rest: None, asked: Instant::now(), last: None })
    }

    fn queue(&mut self, request: Request, live: Live) {
        match self.generator.add(request) {
            Ok(sequence) => drop(self.live.insert(sequence, live)),
            Err(e) => drop(live.say(What::Refused(e.to_string()))),
        }
    }

    /// A prompt has run: the other answers to it follow.
    fn read(&mut self, read: PromptRead) {
        let Some(live) = self.live.get_mut(&read.sequence) else { return };
        let rest = live.rest.take();
        let heard = live.say(What::Read { cached: read.shared, logprobs: read.logprobs });
        if read.ended {
            live.say(What::Ended(Ended::Length, live.turn.spent()));
            self.live.remove(&read.sequence);
        } else if !heard {
            return self.give_up(read.sequence, "gone");
        }
        let Some(mut job) = rest else { return };
        // What the prompt's tokens cost was said.
        job.request.wishes.prompt_logprobs = None;
        for (i, seed) in job.seeds.iter().enumerate() {
            let (request, live) = self.answer(&job, job.first + i, *seed);
            self.queue(request, live);
        }
    }

    fn token(&mut self, event: Event, now: Instant) {
        let Some(live) = self.live.get_mut(&event.sequence) else { return };
        match live.last.replace(now) {
            None => self.metrics.first_token.observe((now - live.asked).as_secs_f64()),
            Some(last) => self.metrics.between_tokens.observe((now - last).as_secs_f64()),
        }
        self.metrics.tokens.inc();
        let pieces = live.turn.push(event.token, event.logprobs.as_ref(), event.finish);
        let heard = pieces.into_iter().all(|piece| live.say(What::Piece(piece)));
        match live.turn.ended() {
            Some(ended) => {
                live.say(What::Ended(ended, live.turn.spent()));
                if event.finish.is_none() {
                    self.give_up(event.sequence, "stop");
                } else {
                    self.live.remove(&event.sequence);
                }
            }
            None if !heard => self.give_up(event.sequence, "gone"),
            None => {}
        }
    }

    fn give_up(&mut self, sequence: u64, reason: &'static str) {
        self.live.remove(&sequence);
        self.generator.cancel(sequence);
        self.metrics.cancelled.get_or_create(&Reason { reason }).inc();
    }
}
