//! The engine: ranks that run the same forward pass on their shards, and the host side that feeds them.
//!
//! A rank is a thread that owns its device state. The host sends a step to all of them and receives their logits and
//! captures. The engine knows neither the reference nor the checks, and contains no fault code: faults enter through
//! decorated sources, plans, devices and collectives.

pub mod backend;
pub mod batch;
pub mod generate;
pub mod kv;
mod listener;
mod rank;
mod room;
pub mod sampler;
pub mod scheduler;
mod step;
mod weights;

use std::sync::Arc;
use std::time::Duration;

pub use crate::device::recipe::Recipe;
pub use backend::{Backend, CpuBackend};
use batch::Batch;
use kv::{CacheFull, KvPool, PAGE};
use rank::RankThread;
pub use room::Room;

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::comm::{Collective, CommError, Solo, Threads};
use crate::device::{Columns, Device, DeviceError};
use crate::model::{Config, Param};
use crate::probe::{Captured, Probe};
use crate::shard::{ShardError, ShardPlan, TpPlan};

/// What every query attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// The keys that the indexer chooses, as the model was trained.
    Dsa,
    /// All keys: exact up to top-k tokens, beyond that a stated choice.
    Dense,
}

impl Attention {
    /// The word on the command line and in dumps.
    pub fn name(self) -> &'static str {
        match self {
            Attention::Dsa => "dsa",
            Attention::Dense => "dense",
        }
    }
}

/// A step or a load that failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum EngineError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Shard(#[from] ShardError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error(transparent)]
    Cache(#[from] CacheFull),
    #[error("{what}: expected at most {most}, found {found}")]
    Room { what: &'static str, most: usize, found: usize },
    #[error("rank {rank} is gone: its thread ended")]
    RankGone { rank: usize },
    #[error("a thread for rank {rank} could not be started: {source}")]
    Thread { rank: usize, source: std::io::Error },
    #[error("{0}")]
    Prompt(String),
}

/// How an engine is set up.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// What queries attend to.
    pub attention: Attention,
    /// Longest step in tokens; longer prompts are prefilled in chunks.
    pub chunk: usize,
    /// Tokens that the cache has room for, over all sequences.
    pub cache_tokens: usize,
    /// Most sequences of one step.
    pub sequences: usize,
}

impl Options {
    /// Room for one sequence of the model's whole context, at most 4096 tokens, in one chunk.
    pub fn for_one(config: &Config) -> Self {
        let tokens = config.context.min(4096);
        Options { attention: Attention::Dsa, chunk: tokens.min(512), cache_tokens: tokens, sequences: 1 }
    }
}

/// How long a rank waits for the others before it names the absent one. The slowest legitimate step is a long prefill
/// chunk of one rank that the others have already finished.
const MEETING_TIMEOUT: Duration = Duration::from_secs(60);

/// Logits and captures of one step.
#[derive(Debug, Default)]
pub struct StepOutput {
    /// `[rows][vocab]`, for the rows that the batch asked for; empty if a listener stopped the step.
    pub logits: Vec<f32>,
    /// What each rank's listener captured.
    pub captured: Vec<Vec<Captured>>,
}

/// A running model.
pub struct Engine {
    ranks: Vec<RankThread>,
    config: Config,
    options: Options,
    pool: KvPool,
    /// Most rows with which the devices can run ahead of the host.
    runs_ahead: usize,
}

impl Engine {
    /// Starts `tp` CPU ranks without decoration.
    ///
    /// # Errors
    /// An illegal degree, and everything that loading refuses.
    pub fn cpu(checkpoint: Arc<Checkpoint>, tp: usize, options: Options) -> Result<Self, EngineError> {
        Self::on(&CpuBackend, checkpoint, tp, options)
    }

    /// Starts `tp` ranks of a kind of device without decoration.
    ///
    /// # Errors
    /// An illegal degree, devices that are not there, and everything that loading refuses.
    pub fn on<B: Backend>(
        backend: &B,
        checkpoint: Arc<Checkpoint>,
        tp: usize,
        options: Options,
    ) -> Result<Self, EngineError> {
        let plan = Arc::new(TpPlan::new(checkpoint.config(), tp)?);
        let (devices, comm) = backend.devices(tp, &options, checkpoint.config())?;
        Self::start(&|_| checkpoint.clone(), plan, devices, comm, options)
    }

    /// Starts one rank per device, each loading from its own view of the model. All load at the same time; the first
    /// failure stops them all.
    ///
    /// # Errors
    /// Everything that loading refuses.
    pub fn start<D: Device>(
        checkpoint: &dyn Fn(usize) -> Arc<Checkpoint>,
        plan: Arc<dyn ShardPlan>,
        devices: Vec<D>,
        comm: Arc<dyn Collective<D>>,
        options: Options,
    ) -> Result<Self, EngineError> {
        let config = checkpoint(0).config().clone();
        // Every running sequence has a place in every step, so that none starves.
        let options = Options { chunk: options.chunk.max(options.sequences), ..options };
        let pages = options.cache_tokens.div_ceil(PAGE) + options.sequences - 1;
        let room =
            Room { tokens: options.chunk, sequences: options.sequences, logits: options.chunk, pages, page: PAGE };
        let mut ranks = Vec::with_capacity(devices.len());
        for (rank, device) in devices.into_iter().enumerate() {
            let (checkpoint, plan, comm) = (checkpoint(rank), plan.clone(), comm.clone());
            ranks.push(RankThread::spawn(rank, options.attention, room, device, checkpoint, plan, comm)?);
        }
        // All are heard, so that none still loads when the first failure is told.
        let loaded: Vec<Result<usize, EngineError>> = ranks.iter().map(RankThread::loaded).collect();
        let rows: Vec<usize> = loaded.into_iter().collect::<Result<_, _>>()?;
        let runs_ahead = rows.into_iter().min().unwrap_or(0);
        Ok(Engine { ranks, config, options, pool: KvPool::new(pages), runs_ahead })
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// How it was set up.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Number of ranks.
    pub fn tp(&self) -> usize {
        self.ranks.len()
    }

    /// The cache's pages.
    pub fn pool(&mut self) -> &mut KvPool {
        &mut self.pool
    }

    /// Runs one step on every rank, with one listener per rank or none.
    ///
    /// # Errors
    /// The first failure that is not another rank's echo.
    pub fn step(&self, batch: Batch, probes: Vec<Box<dyn Probe>>) -> Result<StepOutput, EngineError> {
        let batch = Arc::new(batch);
        let mut probes = probes.into_iter();
        for rank in &self.ranks {
            rank.begin(batch.clone(), probes.next())?;
        }
        let outputs = all(self.ranks.iter().map(RankThread::end))?;
        Ok(self.join(&batch, outputs))
    }

    /// True if the devices can choose tokens for so many rows, and run ahead of the host.
    pub fn runs_ahead(&self, rows: usize) -> bool {
        rows.next_power_of_two() <= self.runs_ahead.min(self.options.chunk)
    }

    /// Behind a step of a batch with `ahead`: runs the next one, whose tokens are those that the devices have chosen, and
    /// returns the tokens that the step before it chose, one per row. `longest` keys are visible to the longest sequence.
    ///
    /// # Errors
    /// As [`Engine::step`].
    pub fn follow(&self, longest: usize) -> Result<Vec<u32>, EngineError> {
        self.ranks.iter().try_for_each(|rank| rank.follow(longest))?;
        self.tokens()
    }

    /// The tokens that the last step given ahead chose.
    ///
    /// # Errors
    /// As [`Engine::step`].
    pub fn chosen(&self) -> Result<Vec<u32>, EngineError> {
        self.ranks.iter().try_for_each(RankThread::ask_chosen)?;
        self.tokens()
    }

    /// Every rank's answer; the first rank's holds the tokens.
    fn tokens(&self) -> Result<Vec<u32>, EngineError> {
        let answers = all(self.ranks.iter().map(RankThread::tokens))?;
        Ok(answers.into_iter().next().unwrap_or_default())
    }

    /// Joins the ranks' parts of the vocabulary and drops its padding.
    fn join(&self, batch: &Batch, outputs: Vec<rank::RankOutput>) -> StepOutput {
        let width = self.config.padded_vocab(self.tp()) / self.tp();
        let mut out = StepOutput::default();
        if outputs.iter().all(|o| !o.logits.is_empty()) {
            for row in 0..batch.logits.len() {
                let parts = outputs.iter().flat_map(|o| &o.logits[row * width..(row + 1) * width]);
                out.logits.extend(parts.take(self.config.vocab));
            }
        }
        out.captured = outputs.into_iter().map(|o| o.captured).collect();
        out
    }

    /// The bytes that stand where `param` belongs on `rank`, read back from its device.
    ///
    /// # Errors
    /// A parameter that the rank does not hold.
    pub fn read_weight(&self, rank: usize, param: Param) -> Result<Vec<u8>, EngineError> {
        self.ranks.get(rank).ok_or(EngineError::RankGone { rank })?.read_weight(param)
    }

    /// The columns of `param` that `rank`'s device multiplies and stores.
    ///
    /// # Errors
    /// A parameter that the rank does not hold.
    pub fn read_cols(&self, rank: usize, param: Param) -> Result<Columns, EngineError> {
        self.ranks.get(rank).ok_or(EngineError::RankGone { rank })?.read_cols(param)
    }
}

/// What every rank answered, or the first failure that is not another rank's echo. All are heard.
fn all<T>(answers: impl Iterator<Item = Result<T, EngineError>>) -> Result<Vec<T>, EngineError> {
    let mut heard = Vec::new();
    let mut failure: Option<EngineError> = None;
    for answer in answers {
        match answer {
            Ok(answer) => heard.push(answer),
            Err(e) => {
                let echo = |e: &EngineError| matches!(e, EngineError::Comm(CommError::Aborted { .. }));
                if failure.as_ref().is_none_or(echo) {
                    failure = Some(e);
                }
            }
        }
    }
    failure.map_or(Ok(heard), Err)
}

/// The collective that ranks use whose devices share one process and read and write host memory.
pub fn cpu_collective<D: Device>(tp: usize) -> Arc<dyn Collective<D>> {
    if tp == 1 { Arc::new(Solo) } else { Arc::new(Threads::new(tp, MEETING_TIMEOUT)) }
}
