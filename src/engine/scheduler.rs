//! Which tokens run in the next step: every running sequence's next one, and prompts in chunks with what room is left.

use std::collections::VecDeque;

use super::kv::CacheFull;
use super::sampler::Sampling;
use super::{Engine, EngineError};
use crate::device::{Batch, Draw, Token};

/// A request to the scheduler.
#[derive(Clone, Debug)]
pub struct Request {
    /// Prompt ids; at least one.
    pub prompt: Vec<u32>,
    /// Most tokens to generate.
    pub most: usize,
    /// Ids that end the sequence; the id itself is reported.
    pub stop: Vec<u32>,
    /// How to choose.
    pub sampling: Sampling,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop id came.
    Stop,
    /// The most tokens were generated, or the context is full.
    Length,
}

/// Something that happened to a sequence in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The sequence's number, as [`Scheduler::add`] returned it.
    pub sequence: u64,
    /// The new token.
    pub token: u32,
    /// Set with the last token.
    pub finish: Option<Finish>,
}

struct Sequence {
    number: u64,
    ids: Vec<u32>,
    prompt: usize,
    /// Tokens whose keys are cached.
    cached: usize,
    table: Vec<u32>,
    request: Request,
}

impl Sequence {
    /// How a device can choose the token that follows; `None` if it cannot, or more than the last token is to run.
    fn draw(&self) -> Option<Draw> {
        self.request.sampling.draw().filter(|_| self.ids.len() - self.cached == 1)
    }

    /// True if the sequence ends with `more` further tokens.
    fn is_full_with(&self, more: usize, context: usize) -> bool {
        self.ids.len() + more - self.prompt >= self.request.most || self.ids.len() + more >= context
    }

    /// Appends a token.
    fn push(&mut self, token: u32, context: usize) -> Event {
        self.ids.push(token);
        let full = self.is_full_with(0, context);
        let finish =
            if self.request.stop.contains(&token) { Some(Finish::Stop) } else { full.then_some(Finish::Length) };
        Event { sequence: self.number, token, finish }
    }
}

/// Continuous batching over one engine.
#[derive(Default)]
pub struct Scheduler {
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    next: u64,
    /// True while the devices run ahead: a step of all running sequences, one token each, is on its way.
    ahead: bool,
}

impl Scheduler {
    /// Queues a request; its number is in every event.
    ///
    /// # Errors
    /// An empty prompt, one that leaves no room in the context, or an id outside the vocabulary.
    pub fn add(&mut self, engine: &Engine, request: Request) -> Result<u64, EngineError> {
        let context = engine.config().context.min(engine.options().cache_tokens);
        if request.prompt.is_empty() {
            return Err(EngineError::Refused("the prompt is empty".into()));
        }
        if request.prompt.len() >= context {
            return Err(EngineError::Limit { what: "prompt tokens", most: context - 1, found: request.prompt.len() });
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
            request,
        });
        Ok(number)
    }

    /// True while there is work.
    pub fn is_busy(&self) -> bool {
        !(self.waiting.is_empty() && self.running.is_empty())
    }

    /// Ends a sequence and frees its pages; unknown numbers are ignored. What the devices have on their way is lost for
    /// the other sequences too, and is run again.
    pub fn cancel(&mut self, engine: &mut Engine, number: u64) {
        self.waiting.retain(|s| s.number != number);
        if self.ahead && self.running.iter().any(|s| s.number == number) {
            // Should this fail, the ranks have given up, and so will the next step.
            let _ = engine.chosen();
            self.ahead = false;
            self.running.iter_mut().for_each(|s| s.cached -= 1);
        }
        if let Some(i) = self.running.iter().position(|s| s.number == number) {
            engine.pool().release(&mut self.running[i].table);
            self.running.remove(i);
        }
    }

    /// Runs one step.
    ///
    /// # Errors
    /// Failures of the engine; a cache that is too small for even one sequence.
    pub fn step(&mut self, engine: &mut Engine) -> Result<Vec<Event>, EngineError> {
        if self.ahead {
            return self.step_ahead(engine);
        }
        self.admit(engine)?;
        let mut batch = Batch::default();
        let mut ran = Vec::new();
        let most = engine.options().chunk;
        // Sequences that decode come first, so that a long prompt does not make them wait.
        let mut order: Vec<usize> = (0..self.running.len()).collect();
        order.sort_by_key(|i| self.running[*i].ids.len() - self.running[*i].cached > 1);
        for i in order {
            let s = &self.running[i];
            let take = (s.ids.len() - s.cached).min(most - batch.tokens.len());
            if take == 0 {
                continue;
            }
            let sequence = batch.tables.len() as u32;
            let tokens = s.ids[s.cached..s.cached + take].iter().enumerate();
            batch.tokens.extend(tokens.map(|(j, id)| Token { id: *id, position: (s.cached + j) as u32, sequence }));
            batch.tables.push(s.table.clone());
            let whole = s.cached + take == s.ids.len();
            if whole {
                batch.logits.push(batch.tokens.len() as u32 - 1);
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
        let output = engine.step(batch, Vec::new())?;
        let (vocab, context) = (engine.config().vocab, engine.config().context.min(engine.options().cache_tokens));
        let mut rows = output.logits.chunks_exact(vocab);
        let mut events = Vec::new();
        for (i, take, whole) in ran {
            let s = &mut self.running[i];
            s.cached += take;
            if let Some(logits) = whole.then(|| rows.next()).flatten() {
                let token = s.request.sampling.choose(s.ids.len() as u32 - 1, logits);
                events.push(s.push(token, context));
            }
        }
        self.retire(engine, &events);
        Ok(events)
    }

    /// Takes the tokens of the step that is on its way. The next one is given before that, unless a sequence will have
    /// ended by then, or another waits: the device then never waits for the host.
    fn step_ahead(&mut self, engine: &mut Engine) -> Result<Vec<Event>, EngineError> {
        let context = engine.config().context.min(engine.options().cache_tokens);
        let goes_on = self.waiting.is_empty() && self.running.iter().all(|s| !s.is_full_with(1, context));
        let tokens = if goes_on {
            let longest = self.running.iter().map(|s| s.cached + 1).max().unwrap_or(0);
            let tokens = engine.follow(longest)?;
            self.running.iter_mut().for_each(|s| s.cached += 1);
            tokens
        } else {
            self.ahead = false;
            engine.chosen()?
        };
        let mut events = self.take(tokens, context);
        if self.ahead && events.iter().any(|e| e.finish.is_some()) {
            // One has met its stop id: what is on its way is the last step with it in the batch.
            self.ahead = false;
            let ended: Vec<u64> = events.iter().filter(|e| e.finish.is_some()).map(|e| e.sequence).collect();
            let more = self.take(engine.chosen()?, context);
            events.extend(more.into_iter().filter(|e| !ended.contains(&e.sequence)));
        }
        self.retire(engine, &events);
        Ok(events)
    }

    /// One token for every running sequence, in order.
    fn take(&mut self, tokens: Vec<u32>, context: usize) -> Vec<Event> {
        self.running.iter_mut().zip(tokens).map(|(s, token)| s.push(token, context)).collect()
    }

    /// Ends the sequences whose last token came.
    fn retire(&mut self, engine: &mut Engine, events: &[Event]) {
        for event in events.iter().filter(|e| e.finish.is_some()) {
            self.cancel(engine, event.sequence);
        }
    }

    /// Moves waiting sequences in while there are pages for all they may need, so that a running one never starves.
    fn admit(&mut self, engine: &mut Engine) -> Result<(), EngineError> {
        let (context, most) = (engine.config().context.min(engine.options().cache_tokens), engine.options().sequences);
        while let Some(s) = self.waiting.front_mut() {
            if self.running.len() >= most {
                break;
            }
            let tokens = s.prompt.saturating_add(s.request.most).min(context);
            let reserved: Result<(), CacheFull> = engine.pool().reserve(&mut s.table, tokens);
            match reserved {
                Ok(()) => self.running.extend(self.waiting.pop_front()),
                Err(_) if !self.running.is_empty() => break, // pages come free when one ends
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }
}
