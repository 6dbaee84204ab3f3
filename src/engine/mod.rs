//! The engine: ranks that run the same forward pass on their shards, and the host side that feeds them.
//!
//! A rank is a thread that owns its device state. The host sends a step to all of them and receives their logits and
//! captures. The engine knows neither the reference nor the checks, and contains no fault code: faults enter through
//! decorated sources and plans, and what stands around devices.

pub mod arch;
pub mod backend;
pub mod chooser;
pub mod generate;
pub mod kv;
mod limits;
pub mod prefix;
mod rank;
pub mod sampler;
pub mod scheduler;
mod step;
mod weights;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use crate::device::Recipe;
pub use crate::model::Attention;
use arch::Model;
pub use backend::{Backend, CpuBackend, Engines, Lent, Ranks, Told};
use kv::{CacheFull, KvPool, PAGE};
use rank::{Answer, RankThread};
use step::{Ended, Forward};

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::comm::CommError;
use crate::device::{Around, Batch, Columns, DeviceError, Limits, ProgramError, ProgramId, Want, check};
use crate::model::{Config, Param};
use crate::probe::{Captured, Probe};
use crate::shard::{ShardError, ShardPlan, TpPlan};

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
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Gpu(#[from] crate::device::cuda::gpu::GpuError),
    #[error(transparent)]
    Program(#[from] ProgramError),
    #[error(transparent)]
    Cache(#[from] CacheFull),
    #[error("{what}: expected at most {most}, found {found}")]
    Limit { what: &'static str, most: usize, found: usize },
    #[error("rank {rank} is gone: its thread ended")]
    RankGone { rank: usize },
    #[error("a thread for rank {rank} could not be started: {source}")]
    Thread { rank: usize, source: std::io::Error },
    #[error("sequence {sequence}: no logit behind token {position} is a number")]
    NoNumbers { sequence: u64, position: usize },
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    NotLent(String),
}

impl EngineError {
    /// Whether it is the tool that lacks something: then nothing is said against the model.
    pub fn is_lack(&self) -> bool {
        matches!(self, EngineError::Checkpoint(e) if e.is_lack())
    }

    /// Whether there was no engine to run it on, so that it does not apply here.
    pub fn is_not_lent(&self) -> bool {
        matches!(self, EngineError::NotLent(_))
    }
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
    /// True if the program that serves has operations in place of several.
    fuses: bool,
    /// Whether what the ranks hold goes together. Told by the first step, not before: what a wrong plan has loaded can
    /// still be read back.
    programs: Result<(), ProgramError>,
}

impl Engine {
    /// Starts `tp` CPU ranks that nobody stands around.
    ///
    /// # Errors
    /// An illegal degree, and everything that loading refuses.
    pub fn cpu(checkpoint: Arc<Checkpoint>, tp: usize, options: Options) -> Result<Self, EngineError> {
        Self::on(&CpuBackend::default(), checkpoint, tp, options)
    }

    /// Starts `tp` ranks of a kind of device that nobody stands around.
    ///
    /// # Errors
    /// An illegal degree, devices that are not there, and everything that loading refuses.
    pub fn on(
        backend: &dyn Backend,
        checkpoint: Arc<Checkpoint>,
        tp: usize,
        options: Options,
    ) -> Result<Self, EngineError> {
        let plan = Arc::new(TpPlan::new(checkpoint.config(), tp)?);
        let ranks = backend.ranks(tp, checkpoint.config())?;
        Self::start(&|_| checkpoint.clone(), plan, ranks, options, &|_| None)
    }

    /// Starts one rank per device, each loading from its own view of the model, and with somebody around it: on every rank,
    /// or on none. All load at the same time; the first failure stops them all.
    ///
    /// # Errors
    /// Everything that loading refuses.
    pub fn start(
        checkpoint: &dyn Fn(usize) -> Arc<Checkpoint>,
        plan: Arc<dyn ShardPlan>,
        ranks: Ranks,
        options: Options,
        around: &dyn Fn(usize) -> Option<Box<dyn Around>>,
    ) -> Result<Self, EngineError> {
        let config = checkpoint(0).config().clone();
        // Every running sequence has a place in every step, so that none starves.
        let options = Options { chunk: options.chunk.max(options.sequences), ..options };
        let pages = options.cache_tokens.div_ceil(PAGE) + options.sequences - 1;
        let (tokens, sequences) = (options.chunk, options.sequences);
        let limits = Limits { tokens, sequences, logits: tokens, pages, page: PAGE };
        let Ranks { devices, comm, recipe, told } = ranks;
        let model =
            |rank| Model::new(checkpoint(rank).config(), plan.as_ref(), rank, options.attention, recipe, limits);
        let models: Vec<Model> = (0..devices.len()).map(model).collect();
        let programs = check_programs(&models);
        let calls = |expanded| {
            let id = ProgramId { head: true, ahead: false, expanded };
            models.first().map(|model| step::fused(model, id, &|_| Want::Nothing).calls.len())
        };
        let fuses = calls(false) < calls(true);
        let progress =
            Arc::new(Loading { told, done: AtomicUsize::new(0), all: models.iter().map(|m| m.weights.len()).sum() });
        let mut ranks = Vec::with_capacity(devices.len());
        let mut loading = Vec::with_capacity(devices.len());
        for (rank, (device, model)) in devices.into_iter().zip(models).enumerate() {
            let (checkpoint, plan, around) = (checkpoint(rank), plan.clone(), around(rank));
            let progress = progress.clone();
            let load = move || {
                let one = || progress.one();
                let forward = Forward::new(&checkpoint, plan.as_ref(), rank, model, limits, device, &one)?;
                Ok(forward.within(around))
            };
            let (thread, loaded) = RankThread::spawn(rank, comm.clone(), load)?;
            ranks.push(thread);
            loading.push(loaded);
        }
        // All are heard, so that none still loads when the first failure is told.
        let loaded: Vec<Result<usize, EngineError>> = loading.into_iter().map(Answer::wait).collect();
        let rows: Vec<usize> = loaded.into_iter().collect::<Result<_, _>>()?;
        let runs_ahead = rows.into_iter().min().unwrap_or(0);
        Ok(Engine { ranks, config, options, pool: KvPool::new(pages), runs_ahead, fuses, programs })
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

    /// True if the program that serves has operations in place of several, which another run can take apart.
    pub fn fuses(&self) -> bool {
        self.fuses
    }

    /// Forgets every sequence and every text, as if it had just started.
    pub fn forget(&mut self) {
        let pages = self.options.cache_tokens.div_ceil(PAGE) + self.options.sequences - 1;
        self.pool = KvPool::new(pages);
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
        self.programs.clone()?;
        let batch = Arc::new(batch);
        let mut probes = probes.into_iter();
        let outputs = self.all(|| {
            let (batch, mut probe) = (batch.clone(), probes.next());
            move |forward| {
                let logits = match forward.run(&batch, probe.as_deref_mut())? {
                    Ended::Logits(logits) => logits,
                    Ended::Stopped | Ended::Ahead => Vec::new(),
                };
                Ok((logits, probe.map(|mut p| p.take()).unwrap_or_default()))
            }
        })?;
        Ok(self.join(&batch, outputs))
    }

    /// Every rank's answer to what `ask` makes for each of them in turn, or the first failure that is not another rank's
    /// echo. All are heard.
    fn all<T, W>(&self, mut ask: impl FnMut() -> W) -> Result<Vec<T>, EngineError>
    where
        T: Send + 'static,
        W: FnOnce(&mut Forward) -> Result<T, EngineError> + Send + 'static,
    {
        let answers: Vec<Answer<T>> = self.ranks.iter().map(|rank| rank.ask(ask())).collect();
        let echo = |e: &EngineError| matches!(e, EngineError::Device(DeviceError::Comm(CommError::Aborted { .. })));
        let (mut heard, mut failure) = (Vec::new(), None);
        for answer in answers {
            match answer.wait() {
                Ok(answer) => heard.push(answer),
                Err(e) if failure.as_ref().is_none_or(echo) => failure = Some(e),
                Err(_) => {}
            }
        }
        failure.map_or(Ok(heard), Err)
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
        self.tokens(move |forward| forward.follow(longest))
    }

    /// The tokens that the last step given ahead chose.
    ///
    /// # Errors
    /// As [`Engine::step`].
    pub fn chosen(&self) -> Result<Vec<u32>, EngineError> {
        self.tokens(Forward::chosen)
    }

    /// The first rank's answer, which holds the tokens.
    fn tokens<W>(&self, work: W) -> Result<Vec<u32>, EngineError>
    where
        W: FnOnce(&mut Forward) -> Result<Vec<u32>, EngineError> + Clone + Send + 'static,
    {
        Ok(self.all(|| work.clone())?.into_iter().next().unwrap_or_default())
    }

    /// Joins the ranks' parts of the vocabulary and drops its padding.
    fn join(&self, batch: &Batch, outputs: Vec<(Vec<f32>, Vec<Captured>)>) -> StepOutput {
        let width = self.config.padded_vocab(self.tp()) / self.tp();
        let (logits, captured): (Vec<_>, Vec<_>) = outputs.into_iter().unzip();
        let mut out = StepOutput { logits: Vec::new(), captured };
        if logits.iter().all(|own| !own.is_empty()) {
            for row in 0..batch.logits.len() {
                let parts = logits.iter().flat_map(|own| &own[row * width..(row + 1) * width]);
                out.logits.extend(parts.take(self.config.vocab));
            }
        }
        out
    }

    /// The bytes that stand where `param` belongs on `rank`, read back from its device, and the columns that the device
    /// multiplies and stores.
    ///
    /// # Errors
    /// A parameter that the rank does not hold.
    pub fn read_weight(&self, rank: usize, param: Param) -> Result<(Vec<u8>, Columns), EngineError> {
        let thread = self.ranks.get(rank).ok_or(EngineError::RankGone { rank })?;
        thread.ask(move |forward| forward.read_weight(param)).wait()
    }
}

/// How many weights all ranks have loaded.
struct Loading {
    told: Told,
    done: AtomicUsize,
    all: usize,
}

impl Loading {
    fn one(&self) {
        let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        self.told.iter().for_each(|told| told.at("weights loaded to ranks", done, self.all));
    }
}

/// Every program that the ranks may run, as it is written and as it is fused, with all that they can show.
fn check_programs(models: &[Model]) -> Result<(), ProgramError> {
    for (head, ahead) in [(false, false), (true, false), (true, true)] {
        for expanded in [true, false] {
            let id = ProgramId { head, ahead, expanded };
            let programs: Vec<_> = models.iter().map(|model| step::fused(model, id, &|_| Want::Read)).collect();
            let ranks: Vec<_> = programs.iter().zip(models).map(|(p, m)| (p, &m.stores)).collect();
            check::check(&ranks)?;
        }
    }
    Ok(())
}
