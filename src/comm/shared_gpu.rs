//! Virtual ranks on one GPU: they share its stream, so a collective is one kernel behind everything that each has given to
//! it. The ranks' threads meet; the last to come starts the kernel; nothing waits on the device.

use std::sync::{Arc, PoisonError};

use super::{Collective, CommError};
use crate::device::Device;
use crate::device::cuda::CudaDevice;
use crate::device::cuda::group::Group;
use crate::model::Place;

/// Most ranks of one card, as the kernel's table of addresses has it.
pub const MOST_RANKS: usize = 64;

/// The meeting of a group.
pub struct SharedGpu(pub Arc<Group>);

impl Collective<CudaDevice> for SharedGpu {
    fn tp(&self) -> usize {
        self.0.meeting().tp()
    }

    fn all_reduce(
        &self,
        rank: usize,
        site: Place,
        device: &CudaDevice,
        buf: &mut <CudaDevice as Device>::Buf,
        n: usize,
        width: usize,
    ) -> Result<(), CommError> {
        if self.0.meeting().tp() == 1 {
            return Ok(());
        }
        let slots = || self.0.slots.lock().unwrap_or_else(PoisonError::into_inner);
        slots()[rank] = device.place(buf);
        self.0.meeting().wait(rank, site, || {
            let slots = slots();
            let row = slots[0].1;
            if slots.iter().any(|s| s.1 != row) {
                return Err("ranks came with buffers of different widths".into());
            }
            let addresses: Vec<u64> = slots.iter().map(|s| s.0).collect();
            device.sum_ranks(site, &addresses, row, width, n).map_err(|e| e.to_string())
        })
    }

    /// What each found lies in memory that all share: they only have to have given it to the stream.
    fn share_best(&self, rank: usize, site: Place, _: &CudaDevice, _: usize) -> Result<(), CommError> {
        self.0.meeting().wait(rank, site, || Ok(()))
    }

    fn abort(&self, reason: &str) {
        self.0.meeting().abort(reason);
    }
}
