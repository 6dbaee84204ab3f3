//! Kinds of devices. What needs engines (the commands, the checks, the decorators) is written once over a backend, so a
//! further kind of device is one further implementation.

use std::sync::Arc;

use super::{EngineError, Options, Recipe, cpu_collective};
use crate::comm::Collective;
use crate::device::Device;
use crate::device::cpu::CpuDevice;
#[cfg(feature = "cuda")]
use crate::device::cuda::CudaBackend;
use crate::model::Config;

/// One device per rank, in rank order, and the collective through which they meet.
pub type Ranks<D> = (Vec<D>, Arc<dyn Collective<D>>);

/// Makes the devices of an engine.
pub trait Backend: Send + Sync {
    /// What a rank owns.
    type Device: Device;

    /// The devices of `tp` ranks for a model and a set-up.
    ///
    /// # Errors
    /// Devices that are not there, or cannot be used.
    fn devices(&self, tp: usize, options: &Options, config: &Config) -> Result<Ranks<Self::Device>, EngineError>;

    /// How the devices multiply.
    fn recipe(&self) -> Recipe;

    /// Steps that the engine made last has replayed from recordings; `None` if the devices record none.
    fn replays(&self) -> Option<u64> {
        None
    }

    /// True if every sum has one order, which depends on neither the batch nor the chunk.
    fn sums_in_one_order(&self) -> bool;

    /// The GPUs, where the devices are GPUs.
    #[cfg(feature = "cuda")]
    fn cuda(&self) -> Option<&CudaBackend> {
        None
    }
}

/// Ranks on threads of this process.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuBackend;

impl Backend for CpuBackend {
    type Device = CpuDevice;

    fn devices(&self, tp: usize, _: &Options, _: &Config) -> Result<Ranks<CpuDevice>, EngineError> {
        Ok(((0..tp).map(CpuDevice::new).collect(), cpu_collective(tp)))
    }

    fn recipe(&self) -> Recipe {
        Recipe::Strict
    }

    fn sums_in_one_order(&self) -> bool {
        true
    }
}
