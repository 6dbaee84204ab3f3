//! GPUs as a kind of device for engines: one rank per GPU through NCCL, or all ranks on one GPU as virtual ranks.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use lockstep_kernels::geometry::{MOST_LATENT, MOST_ROPE};

use super::{Backend, Ranks, Told};
use crate::device::cuda::cubin::Cubins;
use crate::device::cuda::gpu::{Gpu, GpuError, count};
use crate::device::cuda::group::Group;
use crate::device::cuda::nccl::Nccl;
use crate::device::cuda::profile::Profile;
use crate::device::cuda::virtual_ranks::{MOST_RANKS, VirtualRanks};
use crate::device::cuda::{CudaDevice, Meet};
use crate::device::{Device, DeviceError, Recipe};
use crate::engine::EngineError;
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
    /// Who is told how far loading is.
    pub told: Told,
    /// The first group of the engine made last.
    pub(crate) made: Arc<Mutex<Weak<Group>>>,
}

impl CudaBackend {
    /// GPUs `ordinals`, or as many as there are ranks.
    pub fn new(ordinals: Vec<usize>, recipe: Recipe, cubins: Cubins) -> Self {
        CudaBackend { ordinals, recipe, cubins, profiles: None, told: None, made: Arc::default() }
    }

    /// Steps that the engine made last has replayed, and the launches of its last recording.
    pub fn replays(&self) -> (u64, usize) {
        let made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.upgrade().map_or((0, 0), |group| group.replays())
    }

    /// The GPUs that `tp` ranks run on: one each, or one for all. One rank alone, which many are compared with, is on the
    /// first.
    ///
    /// # Errors
    /// No driver, or a number of GPUs that is neither.
    pub fn gpus(&self, tp: usize) -> Result<Vec<usize>, EngineError> {
        let found = count()?;
        if self.ordinals.is_empty() {
            return Ok(if tp > 1 && found >= tp { (0..tp).collect() } else { vec![0] });
        }
        Ok(if tp == 1 { self.ordinals[..1].to_vec() } else { self.ordinals.clone() })
    }

    fn profile(&self, rank: usize) -> Option<Arc<Profile>> {
        self.profiles.as_ref().and_then(|p| p.get(rank).cloned())
    }

    /// The groups of `tp` ranks: one with all of them, or one each.
    ///
    /// # Errors
    /// GPUs that are not there, or whose number does not fit.
    pub fn groups(&self, tp: usize) -> Result<Vec<Arc<Group>>, EngineError> {
        let gpus = self.gpus(tp)?;
        if gpus.len() != 1 && gpus.len() != tp {
            let found = gpus.len();
            return Err(EngineError::Refused(format!(
                "{tp} ranks need {tp} GPUs, or one for all of them; found {found}"
            )));
        }
        if gpus.len() == 1 && tp > MOST_RANKS {
            return Err(EngineError::Refused(format!("at most {MOST_RANKS} virtual ranks share a GPU, found {tp}")));
        }
        let each = if gpus.len() == 1 { tp } else { 1 };
        let open = |ordinal: &usize| Gpu::open(*ordinal, self.cubins.clone());
        gpus.iter().map(|ordinal| Ok(Group::new(open(ordinal)?, each, MEETING_TIMEOUT))).collect()
    }
}

impl Backend for CudaBackend {
    fn ranks(&self, tp: usize, config: &Config) -> Result<Ranks, EngineError> {
        if config.kv_lora > MOST_LATENT || config.rope > MOST_ROPE {
            let found = format!("{} and {}", config.kv_lora, config.rope);
            let most = format!("latents of {MOST_LATENT} and rope parts of {MOST_ROPE}");
            return Err(EngineError::Refused(format!("attention on GPUs holds {most}, found {found}")));
        }
        let groups = self.groups(tp)?;
        *self.made.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&groups[0]);
        let meet: Arc<dyn Meet> = match &groups[..] {
            [all] => Arc::new(VirtualRanks(all.clone())),
            each => Arc::new(
                Nccl::new(each.iter().map(|g| g.gpu().clone()).collect(), MEETING_TIMEOUT)
                    .map_err(DeviceError::Comm)?,
            ),
        };
        let device = |rank: usize| -> Result<Box<dyn Device>, EngineError> {
            let group = groups[rank % groups.len()].clone();
            let made = CudaDevice::new(rank, group, meet.clone(), self.profile(rank));
            let failed = |e: GpuError| DeviceError::Failed { rank, place: None, problem: e.to_string() };
            Ok(Box::new(made.map_err(failed)?))
        };
        let devices = (0..tp).map(device).collect::<Result<_, _>>()?;
        Ok(Ranks { devices, comm: meet, recipe: self.recipe, told: self.told.clone() })
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
