//! Kinds of devices. What needs engines (the commands, the checks, faults) is written once over a backend, so a further
//! kind of device is one further implementation.

#[cfg(feature = "cuda")]
pub mod cuda;

use std::ops::DerefMut;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "cuda")]
pub use cuda::CudaBackend;

use super::{Engine, EngineError, Options, Recipe};
use crate::checkpoint::Checkpoint;
use crate::comm::{Collective, Threads};
use crate::device::Device;
use crate::device::cpu::CpuDevice;
use crate::model::Config;
use crate::report::Progress;

/// How long a rank waits for the others before it names the absent one. The slowest legitimate step is a long prefill
/// chunk of one rank that the others have already finished.
const MEETING_TIMEOUT: Duration = Duration::from_secs(60);

/// One device per rank, in rank order, and where they meet.
pub struct Ranks {
    /// The devices.
    pub devices: Vec<Box<dyn Device>>,
    /// Where they meet, for whoever has to wake them.
    pub comm: Arc<dyn Collective>,
    /// How they multiply.
    pub recipe: Recipe,
    /// Who is told how far loading is.
    pub told: Told,
}

/// Who is told how far long work is, if anyone.
pub type Told = Option<Arc<dyn Progress + Send>>;

/// Makes the devices of an engine.
pub trait Backend: Send + Sync {
    /// The devices of `tp` ranks for a model.
    ///
    /// # Errors
    /// Devices that are not there, or cannot be used.
    fn ranks(&self, tp: usize, config: &Config) -> Result<Ranks, EngineError>;

    /// How the devices multiply.
    fn recipe(&self) -> Recipe;

    /// Steps that the engine made last has replayed from recordings; `None` if the devices record none.
    fn replays(&self) -> Option<u64> {
        None
    }

    /// True if every sum has one order, which depends on neither the batch nor the chunk: what must be equal then is
    /// compared bit by bit, and by the noise floor otherwise.
    fn sums_in_one_order(&self) -> bool;

    /// The GPUs, where the devices are GPUs.
    #[cfg(feature = "cuda")]
    fn cuda(&self) -> Option<&CudaBackend> {
        None
    }
}

/// An engine that somebody has for a while.
pub type Lent<'a> = Box<dyn DerefMut<Target = Engine> + 'a>;

/// Makes engines. Every backend makes plain ones; faults make theirs around a backend.
pub trait Engines: Send + Sync {
    /// An engine of `tp` ranks.
    ///
    /// # Errors
    /// Everything that loading refuses.
    fn engine(&self, checkpoint: &Arc<Checkpoint>, tp: usize, options: Options) -> Result<Engine, EngineError>;

    /// An engine of `tp` ranks for a while: one that is made for it, or one that runs already.
    ///
    /// # Errors
    /// Everything that loading refuses; none that runs and no room for another.
    fn lend<'a>(&'a self, checkpoint: &Arc<Checkpoint>, tp: usize, options: Options) -> Result<Lent<'a>, EngineError> {
        Ok(Box::new(Box::new(self.engine(checkpoint, tp, options)?)))
    }

    /// What the engines run on.
    fn backend(&self) -> &dyn Backend;
}

impl<B: Backend> Engines for B {
    fn engine(&self, checkpoint: &Arc<Checkpoint>, tp: usize, options: Options) -> Result<Engine, EngineError> {
        Engine::on(self, checkpoint.clone(), tp, options)
    }

    fn backend(&self) -> &dyn Backend {
        self
    }
}

/// Ranks on threads of this process.
#[derive(Clone, Default)]
pub struct CpuBackend {
    /// Most rows for which the devices choose next tokens themselves, as GPUs do; a power of two, or 0.
    pub ahead: usize,
    /// Who is told how far loading is.
    pub told: Told,
}

impl CpuBackend {
    /// Devices that choose next tokens themselves for up to so many rows.
    pub const fn ahead(ahead: usize) -> Self {
        CpuBackend { ahead, told: None }
    }
}

impl Backend for CpuBackend {
    fn ranks(&self, tp: usize, _: &Config) -> Result<Ranks, EngineError> {
        let comm = Arc::new(Threads::new(tp, MEETING_TIMEOUT));
        let device = |rank| Box::new(CpuDevice::new(rank, comm.clone(), self.ahead)) as Box<dyn Device>;
        let devices = (0..tp).map(device).collect();
        Ok(Ranks { devices, comm: comm.clone(), recipe: self.recipe(), told: self.told.clone() })
    }

    fn recipe(&self) -> Recipe {
        Recipe::Strict
    }

    fn sums_in_one_order(&self) -> bool {
        true
    }
}
