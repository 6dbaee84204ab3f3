//! A step's inputs in one piece of memory: ids, positions, sequences, rows of logits, block tables.

use std::collections::VecDeque;
use std::sync::Arc;

use lockstep_kernels::geometry;

use super::Tokens;
use super::gpu::{Gpu, GpuError};
use super::memory::{Event, Memory, Pinned};
use crate::device::{Batch, Limits, StepShape};
use crate::model::Place;

/// Most rows of a step that is recorded: beyond, launches cost less than the work.
pub(super) const MOST_RECORDED: usize = 64;
/// Smallest context that steps are recorded for.
const LEAST_CONTEXT: usize = 256;

/// What rows behind the batch's own choose.
const NO_TOKEN: u32 = u32::MAX;
/// Words of a row's [`crate::device::Draw`].
const DRAW: usize = 3;
/// Steps whose tokens may be on their way to the host at once.
pub(super) const RING: usize = 4;

/// What is wrong where a step is run before there is room for its inputs.
pub(super) const NONE: &str = "there is no room for inputs yet";

/// What went wrong with inputs.
#[derive(Debug, thiserror::Error)]
pub(super) enum Problem {
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[error("{0}")]
    Refused(String),
}

/// A step's inputs on the GPU.
pub(super) struct CudaInputs {
    memory: Memory,
    /// How each row of a recorded step chooses: temperatures, then the two halves of each seed.
    draws: Memory,
    limits: Limits,
    /// Tokens chosen by the last steps, `[RING][rows of the step]`, and how many steps have chosen.
    chosen: Memory,
    /// The same on the host, with an event for each.
    posts: Posts,
}

/// Tokens on their way to the host.
struct Posts {
    pinned: Pinned,
    events: Vec<Event>,
    /// Rows of the steps that were posted and not taken yet, oldest first, by place of the ring.
    waiting: VecDeque<(usize, usize)>,
    next: usize,
}

impl CudaInputs {
    /// Room for the inputs of a step.
    pub fn new(gpu: &Arc<Gpu>, limits: Limits) -> Result<Self, GpuError> {
        let pinned = Pinned::new(gpu, 4 * RING * MOST_RECORDED)?;
        let events = (0..RING).map(|_| Event::new(gpu)).collect::<Result<_, _>>()?;
        Ok(CudaInputs {
            memory: Memory::new(gpu, 4 * (4 * limits.tokens + limits.sequences * limits.pages))?,
            draws: Memory::new(gpu, 4 * DRAW * MOST_RECORDED)?,
            limits,
            // The counter stands behind the ring.
            chosen: Memory::new(gpu, 4 * (RING * MOST_RECORDED + 1))?,
            posts: Posts { pinned, events, waiting: VecDeque::new(), next: 0 },
        })
    }

    /// The inputs as kernels take them.
    pub fn tokens(&self) -> Tokens {
        let at = |array: usize| self.memory.address() + 4 * (array * self.limits.tokens) as u64;
        Tokens {
            id: at(0),
            position: at(1),
            sequence: at(2),
            tables: at(4),
            pages: self.limits.pages as i32,
            page: self.limits.page as i32,
        }
    }

    /// Address of the rows whose logits are wanted.
    pub fn rows(&self) -> u64 {
        self.memory.address() + 4 * (3 * self.limits.tokens) as u64
    }

    /// Address of what says how each row chooses.
    pub fn draws(&self) -> u64 {
        self.draws.address()
    }

    /// Addresses of the tokens chosen by the last steps, and of how many steps have chosen.
    pub fn chosen(&self) -> (u64, u64) {
        let chosen = self.chosen.address();
        (chosen, chosen + 4 * (RING * MOST_RECORDED) as u64)
    }

    /// Positions that the tables can name.
    pub fn positions(&self) -> usize {
        self.limits.pages * self.limits.page
    }

    /// Steps that may be recorded are rounded up to powers of two of tokens and context. `None` for others, and for
    /// those with too many tokens.
    pub fn rounded(&self, wanted: StepShape) -> Option<StepShape> {
        let tokens = geometry::bucket(wanted.tokens, 1);
        let context = geometry::bucket(wanted.context, LEAST_CONTEXT).min(self.positions().max(wanted.context));
        let fits = tokens <= MOST_RECORDED.min(self.limits.tokens);
        (wanted.recorded && fits).then_some(StepShape { tokens, context, logits: tokens, ..wanted })
    }

    /// Sends the tokens of the step given last to the host.
    pub fn post(&mut self, n: usize) -> Result<(), Problem> {
        let posts = &mut self.posts;
        let place = posts.next % RING;
        if posts.waiting.len() >= RING {
            return Err(Problem::Refused(format!("at most {RING} steps may be ahead of the host")));
        }
        // `commit` writes to the place that its own count of steps gives, so both count from the same beginning.
        let (from, bytes) = (self.chosen.address() + 4 * (place * n) as u64, 4 * n);
        posts.pinned.receive(4 * place * MOST_RECORDED, from, bytes)?;
        posts.events[place].record()?;
        posts.waiting.push_back((place, n));
        posts.next += 1;
        Ok(())
    }

    /// Waits for the oldest step that was sent.
    pub fn posted(&mut self) -> Result<Vec<u32>, Problem> {
        let posts = &mut self.posts;
        let (place, n) =
            posts.waiting.pop_front().ok_or_else(|| Problem::Refused("no step has been given ahead".into()))?;
        posts.events[place].wait(&|| Place::NEXT_TOKEN.to_string())?;
        let first = place * MOST_RECORDED;
        let tokens = &posts.pinned.words(first + n)[first..];
        Ok(tokens.iter().copied().filter(|t| *t != NO_TOKEN).collect())
    }

    /// Replaces them.
    pub fn fill(&mut self, batch: &Batch, shape: StepShape) -> Result<(), Problem> {
        let Limits { tokens: cap, sequences, pages, .. } = self.limits;
        if shape.tokens > cap || batch.tables.len() > sequences {
            let found = format!("{} tokens of {} sequences", shape.tokens, batch.tables.len());
            return Err(Problem::Refused(format!(
                "a step of at most {cap} tokens of {sequences} sequences, found {found}"
            )));
        }
        let mut image = vec![0i32; 4 * cap + batch.tables.len() * pages];
        image[..2 * cap].fill(-1);
        image[3 * cap..4 * cap].fill(-1);
        for (i, token) in batch.tokens.iter().enumerate() {
            image[i] = token.id as i32;
            image[cap + i] = token.position as i32;
            image[2 * cap + i] = token.sequence as i32;
        }
        for (i, row) in batch.logits.iter().enumerate() {
            image[3 * cap + i] = *row as i32;
        }
        for (i, table) in batch.tables.iter().enumerate() {
            for (place, page) in image[4 * cap + i * pages..].iter_mut().zip(table) {
                *place = *page as i32;
            }
        }
        self.memory.upload(0, &image)?;
        if shape.ahead {
            let mut draws = [0u32; DRAW * MOST_RECORDED];
            for (r, draw) in batch.ahead.iter().enumerate() {
                draws[r] = draw.temperature.to_bits();
                draws[MOST_RECORDED + 2 * r] = draw.seed as u32;
                draws[MOST_RECORDED + 2 * r + 1] = (draw.seed >> 32) as u32;
            }
            self.draws.upload(0, &draws)?;
            // The ring begins anew with the first step that runs ahead.
            self.posts.next = 0;
            self.posts.waiting.clear();
            self.chosen.upload(4 * RING * MOST_RECORDED, &[0u32])?;
        }
        Ok(())
    }
}
