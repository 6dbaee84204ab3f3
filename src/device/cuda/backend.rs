//! GPUs as a kind of device for engines: one rank per GPU through NCCL, or all ranks on one GPU as virtual ranks.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use lockstep_kernels::geometry::{MOST_LATENT, MOST_ROPE};

use super::cubin::Cubins;
use super::gpu::{Gpu, GpuError, count};
use super::group::Group;
use super::profile::Profile;
use super::{CudaDevice, LOADING};
use crate::comm::nccl::Nccl;
use crate::comm::shared_gpu::{MOST_RANKS, SharedGpu};
use crate::device::DeviceError;
use crate::device::recipe::Recipe;
use crate::engine::backend::Ranks;
use crate::engine::{Backend, EngineError, Options};
use crate::model::Config;

/// How long a rank waits for the others before it names the absent one.
const MEETING_TIMEOUT: Duration = Duration::from_secs(60);

/// GPUs.
#[derive(Clone)]
pub struct CudaBackend {
    /// Which GPUs; none: as many as there are ranks, or the first where there are fewer.
    pub ordinals: Vec<usize>,
    /// How products are computed.
    pub recipe: Recipe,
    /// Where kernels come from.
    pub cubins: Cubins,
    /// Who keeps the time, if anyone: one per rank.
    pub profiles: Option<Arc<Vec<Arc<Profile>>>>,
    /// The first group of the engine made last.
    pub(crate) made: Arc<Mutex<Weak<Group>>>,
}

impl CudaBackend {
    /// GPUs `ordinals`, or as many as there are ranks.
    pub fn new(ordinals: Vec<usize>, recipe: Recipe, cubins: Cubins) -> Self {
        CudaBackend { ordinals, recipe, cubins, profiles: None, made: Arc::default() }
    }

    /// Steps that the engine made last has replayed, and the launches of its last recording.
    pub fn replays(&self) -> (u64, usize) {
        let made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.upgrade().map_or((0, 0), |group| group.replays())
    }

    /// The GPUs that `tp` ranks run on: one each, or one for all.
    ///
    /// # Errors
    /// No driver, or a number of GPUs that is neither.
    pub fn gpus(&self, tp: usize) -> Result<Vec<usize>, GpuError> {
        let found = count()?;
        if self.ordinals.is_empty() {
            return Ok(if tp > 1 && found >= tp { (0..tp).collect() } else { vec![0] });
        }
        Ok(self.ordinals.clone())
    }

    fn profile(&self, rank: usize) -> Option<Arc<Profile>> {
        self.profiles.as_ref().and_then(|p| p.get(rank).cloned())
    }

    /// The groups of `tp` ranks: one with all of them, or one each.
    ///
    /// # Errors
    /// GPUs that are not there, or whose number does not fit.
    pub fn groups(&self, tp: usize) -> Result<Vec<Arc<Group>>, EngineError> {
        let error = |problem: String| EngineError::Device(DeviceError { rank: 0, place: LOADING, problem });
        let gpus = self.gpus(tp).map_err(|e| error(e.to_string()))?;
        if gpus.len() != 1 && gpus.len() != tp {
            return Err(error(format!("{tp} ranks need {tp} GPUs, or one for all of them; found {}", gpus.len())));
        }
        if gpus.len() == 1 && tp > MOST_RANKS {
            return Err(error(format!("at most {MOST_RANKS} virtual ranks share a GPU, found {tp}")));
        }
        let open = |ordinal: &usize| Gpu::open(*ordinal, self.cubins.clone()).map_err(|e| error(e.to_string()));
        let each = if gpus.len() == 1 { tp } else { 1 };
        gpus.iter().map(|ordinal| Ok(Group::new(open(ordinal)?, each, MEETING_TIMEOUT))).collect()
    }
}

impl Backend for CudaBackend {
    type Device = CudaDevice;

    fn devices(&self, tp: usize, _: &Options, config: &Config) -> Result<Ranks<CudaDevice>, EngineError> {
        if config.kv_lora > MOST_LATENT || config.rope > MOST_ROPE {
            let found = format!("{} and {}", config.kv_lora, config.rope);
            let problem = format!(
                "attention on GPUs holds latents of {MOST_LATENT} and rope parts of {MOST_ROPE}, found {found}"
            );
            return Err(EngineError::Device(DeviceError { rank: 0, place: LOADING, problem }));
        }
        let groups = self.groups(tp)?;
        *self.made.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&groups[0]);
        let device = |rank: usize| {
            let group = groups[rank % groups.len()].clone();
            CudaDevice::new(rank, group, self.recipe, self.profile(rank))
                .map_err(|e| EngineError::Device(DeviceError { rank, place: LOADING, problem: e.to_string() }))
        };
        let devices = (0..tp).map(device).collect::<Result<Vec<_>, _>>()?;
        if groups.len() == 1 {
            return Ok((devices, Arc::new(SharedGpu(groups[0].clone()))));
        }
        let gpus: Vec<Arc<Gpu>> = groups.iter().map(|g| g.gpu().clone()).collect();
        Ok((devices, Arc::new(Nccl::new(gpus, MEETING_TIMEOUT)?)))
    }

    fn recipe(&self) -> Recipe {
        self.recipe
    }

    fn cuda(&self) -> Option<&CudaBackend> {
        Some(self)
    }

    fn replays(&self) -> Option<u64> {
        Some(CudaBackend::replays(self).0)
    }

    /// Few rows and many are multiplied by different kernels.
    fn sums_in_one_order(&self) -> bool {
        false
    }
}
