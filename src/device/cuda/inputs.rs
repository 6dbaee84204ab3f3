//! A step's inputs in one piece of memory: ids, positions, sequences, rows of logits, block tables.

use std::collections::VecDeque;

use lockstep_kernels::geometry::{self, Launch};

use super::gpu::{Arg, GpuError};
use super::memory::{Event, Memory, Pinned};
use super::{CudaBuf, CudaDevice, LOADING, Tokens};
use crate::device::{DeviceError, StepShape};
use crate::engine::batch::Batch;
use crate::engine::kv::PAGE;
use crate::model::Place;

/// Most rows of a step that is recorded: beyond, launches cost less than the work.
pub(super) const MOST_RECORDED: usize = 64;
/// Smallest context that steps are recorded for.
const LEAST_CONTEXT: usize = 256;

/// What rows behind the batch's own choose.
const NO_TOKEN: u32 = u32::MAX;
/// Words of a row's [`crate::engine::sampler::Draw`].
const DRAW: usize = 3;
/// Steps whose tokens may be on their way to the host at once.
const RING: usize = 4;

/// A step's inputs on the GPU.
pub struct CudaInputs {
    memory: Memory,
    /// How each row of a recorded step chooses: temperatures, then the two halves of each seed.
    draws: Memory,
    tokens: usize,
    sequences: usize,
    pages: usize,
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
    /// The inputs as kernels take them.
    pub(super) fn tokens(&self) -> Tokens {
        let at = |array: usize| self.memory.address() + 4 * (array * self.tokens) as u64;
        Tokens {
            id: at(0),
            position: at(1),
            sequence: at(2),
            tables: at(4),
            pages: self.pages as i32,
            page: PAGE as i32,
        }
    }

    /// Address of the rows whose logits are wanted.
    pub(super) fn rows(&self) -> u64 {
        self.memory.address() + 4 * (3 * self.tokens) as u64
    }

    /// Positions that the tables can name.
    pub(super) fn positions(&self) -> usize {
        self.pages * PAGE
    }

    /// Decode steps are rounded up to powers of two of tokens and context, and recorded.
    pub(super) fn shape(&self, batch: &Batch, listened: bool) -> StepShape {
        let exact = StepShape::exact(batch);
        let n = batch.tokens.len();
        // A token per sequence, each with its logits, in order.
        let decodes = batch.logits.len() == n
            && batch.tokens.iter().enumerate().all(|(i, t)| t.sequence as usize == i)
            && batch.logits.iter().enumerate().all(|(i, r)| *r as usize == i);
        let tokens = geometry::bucket(n, 1);
        if listened || !decodes || tokens > MOST_RECORDED.min(self.tokens) {
            return exact;
        }
        let context = self.context(exact.context);
        StepShape { tokens, context, logits: tokens, recorded: true, ahead: !batch.ahead.is_empty() }
    }

    /// The context that a step is recorded for.
    pub(super) fn context(&self, longest: usize) -> usize {
        geometry::bucket(longest, LEAST_CONTEXT).min(self.positions().max(longest))
    }
}

impl CudaDevice {
    pub(super) fn make_inputs(&self, tokens: usize, sequences: usize, pages: usize) -> Result<CudaInputs, DeviceError> {
        let memory =
            Memory::new(&self.gpu, 4 * (4 * tokens + sequences * pages)).map_err(|e| self.error(LOADING, e))?;
        let make = || -> Result<(Memory, Memory, Posts), GpuError> {
            let draws = Memory::new(&self.gpu, 4 * DRAW * MOST_RECORDED)?;
            // The counter stands behind the ring.
            let chosen = Memory::new(&self.gpu, 4 * (RING * MOST_RECORDED + 1))?;
            let pinned = Pinned::new(&self.gpu, 4 * RING * MOST_RECORDED)?;
            let events = (0..RING).map(|_| Event::new(&self.gpu)).collect::<Result<_, _>>()?;
            Ok((draws, chosen, Posts { pinned, events, waiting: VecDeque::new(), next: 0 }))
        };
        let (draws, chosen, posts) = make().map_err(|e| self.error(LOADING, e))?;
        Ok(CudaInputs { memory, draws, tokens, sequences, pages, chosen, posts })
    }

    /// This rank's choice in each row; see sample.cu.
    pub(super) fn best_of(
        &self,
        site: Place,
        logits: &CudaBuf,
        inputs: &CudaInputs,
        first: usize,
        width: usize,
        n: usize,
    ) -> Result<(), DeviceError> {
        let (pairs, each) = self.best_pairs().map_err(|e| self.error(site, e))?;
        let (from, row, w, id) = (logits.at(0), logits.row(), width as i32, first as i32);
        let (temperatures, position) = (inputs.draws.address(), inputs.tokens().position);
        let seeds = temperatures + 4 * MOST_RECORDED as u64;
        let to = pairs + (self.rank * each) as u64;
        let args: [&dyn Arg; 8] = [&from, &row, &w, &id, &temperatures, &seeds, &position, &to];
        self.launch(site, "sample", None, "best_token", geometry::per_row(n, 1024), 0, &args)
    }

    /// The best over ranks becomes each row's next token; see sample.cu.
    pub(super) fn choose(&self, site: Place, inputs: &CudaInputs, ranks: usize, n: usize) -> Result<(), DeviceError> {
        let pairs = self.group.pairs().map_err(|e| self.error(site, e))?;
        let tokens = inputs.tokens();
        let (tp, row, rows, ring) = (ranks as i32, MOST_RECORDED as i32, n as i32, RING as i32);
        let (chosen, step) = (inputs.chosen.address(), inputs.chosen.address() + 4 * (RING * MOST_RECORDED) as u64);
        let launch = Launch { grid: (1, 1, 1), block: 64, shared: 0 };
        let args: [&dyn Arg; 9] = [&pairs, &tp, &row, &rows, &tokens.id, &tokens.position, &chosen, &ring, &step];
        self.launch(site, "sample", None, "advance", launch, 0, &args)
    }

    /// Sends the tokens of the step given last to the host.
    pub(super) fn send_chosen(&self, site: Place, inputs: &mut CudaInputs, n: usize) -> Result<(), DeviceError> {
        let posts = &mut inputs.posts;
        let place = posts.next % RING;
        if posts.waiting.len() >= RING {
            return Err(self.error(site, format!("at most {RING} steps may be ahead of the host")));
        }
        // `advance` writes to the place that its own count of steps gives, so both count from the same beginning.
        let (from, bytes) = (inputs.chosen.address() + 4 * (place * n) as u64, 4 * n);
        let sent = posts.pinned.receive(4 * place * MOST_RECORDED, from, bytes);
        sent.and_then(|()| posts.events[place].record()).map_err(|e| self.error(site, e))?;
        posts.waiting.push_back((place, n));
        posts.next += 1;
        Ok(())
    }

    /// Waits for the oldest step that was sent.
    pub(super) fn take_chosen(&self, site: Place, inputs: &mut CudaInputs) -> Result<Vec<u32>, DeviceError> {
        let posts = &mut inputs.posts;
        let Some((place, n)) = posts.waiting.pop_front() else {
            return Err(self.error(site, "no step has been given ahead"));
        };
        posts.events[place].wait(&|| site.to_string()).map_err(|e| self.error(site, e))?;
        let first = place * MOST_RECORDED;
        let tokens = &posts.pinned.words(first + n)[first..];
        Ok(tokens.iter().copied().filter(|t| *t != NO_TOKEN).collect())
    }

    pub(super) fn fill_inputs(
        &self,
        inputs: &mut CudaInputs,
        batch: &Batch,
        shape: StepShape,
    ) -> Result<(), DeviceError> {
        let cap = inputs.tokens;
        if shape.tokens > cap || batch.tables.len() > inputs.sequences {
            let found = format!("{} tokens of {} sequences", shape.tokens, batch.tables.len());
            let problem = format!("a step of at most {cap} tokens of {} sequences, found {found}", inputs.sequences);
            return Err(self.error(LOADING, problem));
        }
        let mut image = vec![0i32; 4 * cap + batch.tables.len() * inputs.pages];
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
            for (place, page) in image[4 * cap + i * inputs.pages..].iter_mut().zip(table) {
                *place = *page as i32;
            }
        }
        inputs.memory.upload(0, &image).map_err(|e| self.error(LOADING, e))?;
        if shape.ahead {
            let mut draws = [0u32; DRAW * MOST_RECORDED];
            for (r, draw) in batch.ahead.iter().enumerate() {
                draws[r] = draw.temperature.to_bits();
                draws[MOST_RECORDED + 2 * r] = draw.seed as u32;
                draws[MOST_RECORDED + 2 * r + 1] = (draw.seed >> 32) as u32;
            }
            inputs.draws.upload(0, &draws).map_err(|e| self.error(LOADING, e))?;
            // The ring begins anew with the first step that runs ahead.
            inputs.posts.next = 0;
            inputs.posts.waiting.clear();
            inputs.chosen.upload(4 * RING * MOST_RECORDED, &[0u32]).map_err(|e| self.error(LOADING, e))?;
        }
        Ok(())
    }
}
