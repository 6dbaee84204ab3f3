//! Which tokens run in the next step: every running sequence's next one, and prompts in chunks with what room is left.
//!
//! Pages are taken as sequences grow. Where there are none, the youngest gives its own back and is run again later, so
//! that the oldest always ends; its text is the one that it would have been.

use std::collections::VecDeque;

use super::chooser::{Choice, Chooser, Logprobs, Wishes};
use super::kv::{CacheFull, PAGE};
use super::prefix::Root;
use super::sampler::Sampling;
use super::{Engine, EngineError};
use crate::device::{Batch, Draw, Token};

/// A request to the scheduler.
#[derive(Clone, Debug)]
pub struct Request {
    /// Prompt ids; at least one.
    pub prompt: Vec<u32>,
    /// Most tokens to generate; 0 runs the prompt alone.
    pub most: usize,
    /// Ids that end the sequence; the id itself is reported.
    pub stop: Vec<u32>,
    /// How to choose.
    pub sampling: Sampling,
    /// What else it wants of the choice.
    pub wishes: Wishes,
    /// Whose cached texts it may share; `None` shares nothing.
    pub root: Option<Root>,
}

impl Request {
    /// A request that wants nothing else and shares nothing.
    pub fn plain(prompt: Vec<u32>, most: usize, stop: Vec<u32>, sampling: Sampling) -> Self {
        Request { prompt, most, stop, sampling, wishes: Wishes::default(), root: None }
    }
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop id came.
    Stop,
    /// The most tokens were generated, or the context is full.
    Length,
    /// Its own wishes left no token to choose.
    Failed,
}

/// A new token of a sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// The sequence's number, as [`Scheduler::add`] returned it.
    pub sequence: u64,
    /// The new token; of a sequence that failed, none that counts.
    pub token: u32,
    /// How likely it was, if that was wanted.
    pub logprobs: Option<Logprobs>,
    /// Set with the last token.
    pub finish: Option<Finish>,
}

/// A prompt that has run.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptRead {
    /// The sequence's number.
    pub sequence: u64,
    /// Tokens of it that were in the cache already.
    pub shared: usize,
    /// Of its tokens from the second on, if they were wanted.
    pub logprobs: Vec<Logprobs>,
    /// True if no token follows, since none was wanted.
    pub ended: bool,
}

/// What goes on, for people who watch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Sequences that wait for room.
    pub waiting: usize,
    /// Sequences that run.
    pub running: usize,
    /// Times that a sequence gave its pages back to an older one.
    pub preempted: u64,
    /// Tokens of prompts that were in the cache already.
    pub shared: u64,
    /// Steps whose tokens the host chose.
    pub host_steps: u64,
}

struct Sequence {
    number: u64,
    ids: Vec<u32>,
    prompt: usize,
    /// Tokens whose keys are cached, by steps that were given.
    cached: usize,
    table: Vec<u32>,
    request: Request,
    chooser: Chooser,
    /// Whether its prompt has run, and what was found of it.
    read: bool,
    shared: usize,
    logprobs: Vec<Logprobs>,
}

impl Sequence {
    /// True if it runs one token more in the next step, and not a part of its prompt.
    fn decodes(&self) -> bool {
        self.ids.len() - self.cached == 1
    }

    /// How a device can choose the token that follows; `None` if it cannot, or more than the last token is to run.
    fn draw(&self) -> Option<Draw> {
        self.chooser.draw().filter(|_| self.decodes() && self.read)
    }

    /// True if the sequence ends with `more` further tokens.
    fn is_full_with(&self, more: usize, context: usize) -> bool {
        self.ids.len() + more - self.prompt >= self.request.most || self.ids.len() + more >= context
    }

    /// Appends a token.
    fn push(&mut self, token: u32, logprobs: Option<Logprobs>, context: usize) -> Event {
        self.ids.push(token);
        self.chooser.note(token);
        let full = self.is_full_with(0, context);
        let finish =
            if self.request.stop.contains(&token) { Some(Finish::Stop) } else { full.then_some(Finish::Length) };
        Event { sequence: self.number, token, logprobs, finish }
    }
}

/// Continuous batching over one engine.
#[derive(Default)]
pub struct Scheduler {
    /// The oldest first.
    waiting: VecDeque<Sequence>,
    /// In the order in which they came to run.
    running: Vec<Sequence>,
    next: u64,
    /// True while the devices run ahead: a step of all running sequences, one token each, is on its way.
    ahead: bool,
    read: Vec<PromptRead>,
    preempted: u64,
    shared: u64,
    host_steps: u64,
}

/// Tokens that fit into one sequence.
fn context_of(engine: &Engine) -> usize {
    engine.config().context.min(engine.options().cache_tokens)
}

impl Scheduler {
    /// Queues a request; its number is in every event.
    ///
    /// # Errors
    /// An empty prompt, one that leaves no room in the context, or an id outside the vocabulary.
    pub fn add(&mut self, engine: &Engine, request: Request) -> Result<u64, EngineError> {
        let context = context_of(engine);
        if request.prompt.is_empty() {
            return Err(EngineError::Refused("the prompt is empty".into()));
        }
        let most = context - usize::from(request.most > 0);
        if request.prompt.len() > most {
            return Err(EngineError::Limit { what: "prompt tokens", most, found: request.prompt.len() });
        }
        let vocab = engine.config().vocab;
        if let Some(id) = request.prompt.iter().find(|id| **id as usize >= vocab) {
            return Err(EngineError::Limit { what: "token id", most: vocab - 1, found: *id as usize });
        }
        let number = self.next;
        self.next += 1;
        self.waiting.push_back(Sequence {
            number,
            ids: request.prompt.clone(),
            prompt: request.prompt.len(),
            cached: 0,
            table: Vec::new(),
            chooser: Chooser::new(request.sampling, request.wishes.clone()),
            request,
            read: false,
            shared: 0,
            logprobs: Vec::new(),
        });
        Ok(number)
    }

    /// True while there is work.
    pub fn is_busy(&self) -> bool {
        !(self.waiting.is_empty() && self.running.is_empty())
    }

    /// What goes on.
    pub fn counts(&self) -> Counts {
        let Scheduler { waiting, running, preempted, shared, host_steps, .. } = self;
        let (waiting, running) = (waiting.len(), running.len());
        Counts { waiting, running, preempted: *preempted, shared: *shared, host_steps: *host_steps }
    }

    /// The prompts that have run since this was asked last.
    pub fn prompts_read(&mut self) -> Vec<PromptRead> {
        std::mem::take(&mut self.read)
    }

    /// Ends a sequence and frees its pages; unknown numbers are ignored. What the devices have on their way is lost for
    /// the other sequences too, and is run again.
    pub fn cancel(&mut self, engine: &mut Engine, number: u64) {
        self.waiting.retain(|s| s.number != number);
        if let Some(i) = self.running.iter().position(|s| s.number == number) {
            self.take_back(engine);
            let mut gone = self.running.remove(i);
            leave(engine, &mut gone);
        }
    }

    /// Waits for the step that is on its way, if one is, and forgets it.
    fn take_back(&mut self, engine: &Engine) {
        if self.ahead {
            // Should this fail, the ranks have given up, and so will the next step.
            let _ = engine.chosen();
            self.ahead = false;
            self.running.iter_mut().for_each(|s| s.cached -= 1);
        }
    }

    /// Runs one step.
    ///
    /// # Errors
    /// Failures of the engine; a cache that is too small for even one sequence; a model that gives no numbers.
    pub fn step(&mut self, engine: &mut Engine) -> Result<Vec<Event>, EngineError> {
        if self.ahead {
            return self.step_ahead(engine);
        }
        self.grow(engine)?;
        self.admit(engine)?;
        let mut batch = Batch::default();
        let mut ran = Vec::new();
        let most = engine.options().chunk;
        // Sequences that decode come first, so that a long prompt does not make them wait.
        let mut order: Vec<usize> = (0..self.running.len()).collect();
        order.sort_by_key(|i| !self.running[*i].decodes());
        for i in order {
            let s = &self.running[i];
            let take = (s.ids.len() - s.cached).min(most - batch.tokens.len());
            if take == 0 {
                continue;
            }
            let sequence = batch.tables.len() as u32;
            let first = batch.tokens.len() as u32;
            let tokens = s.ids[s.cached..s.cached + take].iter().enumerate();
            batch.tokens.extend(tokens.map(|(j, id)| Token { id: *id, position: (s.cached + j) as u32, sequence }));
            batch.tables.push(s.table.clone());
            let end = first + take as u32;
            let whole = s.cached + take == s.ids.len();
            if s.chooser.of_prompt().is_some() && !s.read {
                batch.logits.extend(first..end);
            } else if whole {
                batch.logits.push(end - 1);
            }
            ran.push((i, take, whole));
        }
        if ran.is_empty() {
            return Ok(Vec::new());
        }
        let all = engine.runs_ahead(ran.len()) && ran.len() == self.running.len();
        if let Some(draws) = self.running.iter().map(Sequence::draw).collect::<Option<Vec<_>>>().filter(|_| all) {
            batch.ahead = draws;
            engine.step(batch, Vec::new())?;
            self.running.iter_mut().for_each(|s| s.cached += 1);
            self.ahead = true;
            return self.step_ahead(engine);
        }
        self.host_steps += 1;
        let output = engine.step(batch, Vec::new())?;
        let events = self.choose(engine, &output.logits, ran)?;
        self.retire(engine, &events);
        Ok(events)
    }

    /// Chooses on the host from the rows that a step gave: `ran` are sequences, how many tokens each ran, and whether
    /// these were its last ones.
    fn choose(
        &mut self,
        engine: &mut Engine,
        logits: &[f32],
        ran: Vec<(usize, usize, bool)>,
    ) -> Result<Vec<Event>, EngineError> {
        let context = context_of(engine);
        let mut rows = logits.chunks_exact(engine.config().vocab);
        let (mut events, mut ended) = (Vec::new(), Vec::new());
        for (i, take, whole) in ran {
            let s = &mut self.running[i];
            let first = s.cached;
            s.cached += take;
            let mut last = None;
            match s.chooser.of_prompt().filter(|_| !s.read) {
                Some(top) => {
                    for (row, at) in rows.by_ref().take(take).zip(first + 1..) {
                        // A prompt that runs a second time has some already.
                        if at < s.prompt && s.logprobs.len() < at {
                            s.logprobs.push(Logprobs::of(row, s.ids[at], top));
                        }
                        last = Some(row);
                    }
                }
                None if whole => last = rows.next(),
                None => {}
            }
            let Some(row) = last.filter(|_| whole) else { continue };
            if !s.read {
                s.read = true;
                let (shared, logprobs, ended) = (s.shared, std::mem::take(&mut s.logprobs), s.request.most == 0);
                self.shared += shared as u64;
                self.read.push(PromptRead { sequence: s.number, shared, logprobs, ended });
                if let Some(root) = &s.request.root {
                    engine.pool().keep(root, &s.ids[..s.cached], &s.table);
                }
            }
            if s.request.most == 0 {
                ended.push(s.number);
                continue;
            }
            let position = s.ids.len() - 1;
            let choice = s.chooser.choose(position as u32, row, &s.ids[s.prompt..], &s.request.stop);
            events.push(match choice {
                Choice::Token(token, logprobs) => s.push(token, logprobs, context),
                Choice::NoneAllowed => {
                    Event { sequence: s.number, token: 0, logprobs: None, finish: Some(Finish::Failed) }
                }
                Choice::NoNumbers => return Err(EngineError::NoNumbers { sequence: s.number, position }),
            });
        }
        ended.into_iter().for_each(|number| self.cancel(engine, number));
        Ok(events)
    }

    /// Takes the tokens of the step that is on its way. The next one is given before that, unless a sequence will have
    /// ended by then, another waits, or somebody's pages end: the device then never waits for the host.
    fn step_ahead(&mut self, engine: &mut Engine) -> Result<Vec<Event>, EngineError> {
        let context = context_of(engine);
        let room = |s: &Sequence| s.cached < s.table.len() * PAGE;
        let goes_on = self.waiting.is_empty() && self.running.iter().all(|s| !s.is_full_with(1, context) && room(s));
        let tokens = if goes_on {
            let longest = self.running.iter().map(|s| s.cached + 1).max().unwrap_or(0);
            let tokens = engine.follow(longest)?;
            self.running.iter_mut().for_each(|s| s.cached += 1);
            tokens
        } else {
            self.ahead = false;
            engine.chosen()?
        };
        let mut events = self.take(tokens, engine)?;
        if self.ahead && events.iter().any(|e| e.finish.is_some()) {
            // One has met its stop id: what is on its way is the last step with it in the batch.
            self.ahead = false;
            let ended: Vec<u64> = events.iter().filter(|e| e.finish.is_some()).map(|e| e.sequence).collect();
            let more = self.take(engine.chosen()?, engine)?;
            events.extend(more.into_iter().filter(|e| !ended.contains(&e.sequence)));
        }
        self.retire(engine, &events);
        Ok(events)
    }

    /// One token for every running sequence, in order.
    fn take(&mut self, tokens: Vec<u32>, engine: &Engine) -> Result<Vec<Event>, EngineError> {
        let (context, vocab) = (context_of(engine), engine.config().vocab);
        let one = |(s, token): (&mut Sequence, u32)| match (token as usize) < vocab {
            true => Ok(s.push(token, None, context)),
            // Devices choose an id that is none where no logit is a number.
            false => Err(EngineError::NoNumbers { sequence: s.number, position: s.ids.len() - 1 }),
        };
        self.running.iter_mut().zip(tokens).map(one).collect()
    }

    /// Ends the sequences whose last token came.
    fn retire(&mut self, engine: &mut Engine, events: &[Event]) {
        for event in events.iter().filter(|e| e.finish.is_some()) {
            self.cancel(engine, event.sequence);
        }
    }

    /// Makes room for the next token of every sequence that decodes, the oldest first. Where there is none, the youngest
    /// gives up its pages.
    fn grow(&mut self, engine: &mut Engine) -> Result<(), EngineError> {
        let ahead = if engine.runs_ahead(1) { AHEAD } else { 0 };
        let context = context_of(engine);
        let mut numbers: Vec<u64> = self.running.iter().filter(|s| s.decodes()).map(|s| s.number).collect();
        numbers.sort_unstable();
        for number in numbers {
            while let Some(i) = self.running.iter().position(|s| s.number == number) {
                let s = &mut self.running[i];
                let most = s.prompt.saturating_add(s.request.most).min(context);
                let (now, more) = (s.ids.len(), (s.ids.len() + ahead).min(most));
                let pool = engine.pool();
                let reserved = pool.reserve(&mut s.table, more).or_else(|_| pool.reserve(&mut s.table, now));
                let Err(full) = reserved else { break };
                if !self.trim(engine) {
                    self.give_way(engine, full)?;
                }
            }
        }
        Ok(())
    }

    /// Takes back the pages that sequences hold before they need them. False if there were none.
    fn trim(&mut self, engine: &mut Engine) -> bool {
        let free = engine.pool().free();
        self.running.iter_mut().for_each(|s| engine.pool().trim(&mut s.table, s.ids.len()));
        engine.pool().free() > free
    }

    /// Takes the pages of the youngest sequence, which waits then until all of it fits again.
    fn give_way(&mut self, engine: &mut Engine, full: CacheFull) -> Result<(), EngineError> {
        let youngest = self.running.iter().enumerate().max_by_key(|(_, s)| s.number).map(|(i, _)| i);
        let Some(i) = youngest.filter(|_| self.running.len() > 1) else { return Err(full.into()) };
        let mut s = self.running.remove(i);
        leave(engine, &mut s);
        s.cached = 0;
        self.preempted += 1;
        let at = self.waiting.partition_point(|other| other.number < s.number);
        self.waiting.insert(at, s);
        Ok(())
    }

    /// Moves waiting sequences in, in their order, while all of each fits.
    fn admit(&mut self, engine: &mut Engine) -> Result<(), EngineError> {
        let (most, context) = (engine.options().sequences, context_of(engine));
        while self.running.len() < most {
            let Some(s) = self.waiting.front_mut() else { break };
            // Every token of a prompt runs where its logits are wanted.
            if let Some(root) = s.request.root.as_ref().filter(|_| s.chooser.of_prompt().is_none() || s.read) {
                s.cached = engine.pool().share(root, &s.ids, &mut s.table);
            }
            if !s.read {
                s.shared = s.cached;
            }
            let reserved = engine.pool().reserve(&mut s.table, (s.ids.len() + 1).min(context));
            match reserved {
                Ok(()) => self.running.extend(self.waiting.pop_front()),
                Err(e) => {
                    engine.pool().release(&mut s.table);
                    s.cached = 0;
                    return if self.running.is_empty() { Err(e.into()) } else { Ok(()) };
                }
            }
        }
        Ok(())
    }
}

/// Tokens for which a sequence has pages before it needs them, if there are any: as long as it has, devices can run ahead.
const AHEAD: usize = 4 * PAGE;

/// Gives back a sequence's pages, whose text stays for others to share.
fn leave(engine: &mut Engine, s: &mut Sequence) {
    if let Some(root) = &s.request.root {
        engine.pool().keep(root, &s.ids[..s.cached], &s.table);
    }
    engine.pool().release(&mut s.table);
}
