//! From `--device` and `--recipe` to the devices that ranks run on.

use std::sync::Arc;

use super::CliError;
use super::args::{DeviceArg, DeviceArgs, RecipeArg};
use super::console::Teller;
#[cfg(feature = "cuda")]
use crate::device::Recipe;
#[cfg(feature = "cuda")]
use crate::device::cuda::{cubin::Cubins, gpu};
#[cfg(feature = "cuda")]
use crate::engine::backend::CudaBackend;
use crate::engine::{Backend, CpuBackend, Engines};
use crate::faults::decorate::{Decorations, FaultyEngines};
use crate::report::Progress;

/// The kinds of devices that this build has, ready to be used.
pub(super) enum Chosen {
    /// Ranks on threads of this process.
    Cpu(CpuBackend),
    /// Ranks on NVIDIA GPUs.
    #[cfg(feature = "cuda")]
    Cuda(CudaBackend),
}

/// The devices that were asked for.
///
/// # Errors
/// A recipe that the device does not have; a device that this build does not have.
pub(super) fn chosen(args: &DeviceArgs) -> Result<Chosen, CliError> {
    telling(args, Arc::new(Teller))
}

/// The same, with somebody who is told how far loading is.
///
/// # Errors
/// As [`chosen`].
pub(super) fn telling(args: &DeviceArgs, told: Arc<dyn Progress + Send>) -> Result<Chosen, CliError> {
    match (&args.device, args.recipe) {
        #[cfg(feature = "cuda")]
        (DeviceArg::Cpu, _) if args.kernels_dir.is_some() => {
            Err(CliError::Usage("--kernels-dir: expected --device cuda; the CPU device has no kernels".into()))
        }
        (DeviceArg::Cpu, RecipeArg::Strict) => {
            Ok(Chosen::Cpu(CpuBackend { told: Some(told), ..CpuBackend::default() }))
        }
        (DeviceArg::Cpu, RecipeArg::Fast) => {
            Err(CliError::Usage("--recipe fast: expected strict, the only recipe of the CPU device".into()))
        }
        #[cfg(feature = "cuda")]
        (DeviceArg::Cuda(ordinals), recipe) => {
            let recipe = match recipe {
                RecipeArg::Strict => Recipe::Strict,
                RecipeArg::Fast => Recipe::Fast,
            };
            let cubins = Cubins { sources: args.kernels_dir.clone(), ..Cubins::default() };
            let backend = CudaBackend { told: Some(told), ..CudaBackend::new(ordinals.clone(), recipe, cubins) };
            let found = gpu::count().map_err(|e| CliError::Usage(format!("--device {}: {e}", args.device)))?;
            if let Some(ordinal) = ordinals.iter().chain([&0]).find(|o| **o >= found) {
                let problem = format!("--device {}: there is no GPU {ordinal}; found {found}", args.device);
                return Err(CliError::Usage(problem));
            }
            Ok(Chosen::Cuda(backend))
        }
        #[cfg(not(feature = "cuda"))]
        (DeviceArg::Cuda(_), _) => {
            Err(CliError::Usage(format!("--device {}: this build has no CUDA device (feature cuda)", args.device)))
        }
    }
}

/// Refuses a list of GPUs that is neither one for all ranks nor one for each.
///
/// # Errors
/// Such a list.
pub(super) fn check_degree(args: &DeviceArgs, tp: usize) -> Result<(), CliError> {
    match &args.device {
        DeviceArg::Cuda(gpus) if gpus.len() > 1 && gpus.len() != tp => {
            let found = gpus.len();
            Err(CliError::Usage(format!("--device {}: expected one GPU or {tp}, found {found}", args.device)))
        }
        _ => Ok(()),
    }
}

/// Engines on the devices that were asked for, with faults or without decoration.
///
/// # Errors
/// As [`chosen`].
pub(super) fn engines(args: &DeviceArgs, faults: Option<Decorations>) -> Result<Box<dyn Engines>, CliError> {
    Ok(chosen(args)?.engines(faults))
}

impl Chosen {
    /// Engines on these devices, with faults or without decoration.
    pub(super) fn engines(self, faults: Option<Decorations>) -> Box<dyn Engines> {
        match self {
            Chosen::Cpu(backend) => engines_on(backend, faults),
            #[cfg(feature = "cuda")]
            Chosen::Cuda(backend) => engines_on(backend, faults),
        }
    }
}

fn engines_on<B: Backend + 'static>(backend: B, faults: Option<Decorations>) -> Box<dyn Engines> {
    match faults {
        None => Box::new(backend),
        Some(faults) => Box::new(FaultyEngines(backend, faults)),
    }
}
