//! Virtual ranks on one GPU: they share its stream, so a collective is one kernel behind everything that each has given to
//! it. The ranks' threads meet; the last to come starts the kernel; nothing waits on the device.

use std::sync::{Arc, PoisonError};

use super::group::Group;
use super::{CudaDevice, Meet};
use crate::comm::{Collective, CommError};
use crate::device::View;
use crate::model::Place;

/// Most ranks of one card, as the kernel's table of addresses has it.
pub const MOST_RANKS: usize = 64;

/// The meeting of a group.
pub struct VirtualRanks(pub Arc<Group>);

impl Meet for VirtualRanks {
    fn all_reduce(&self, device: &CudaDevice, at: Place, x: View, n: usize) -> Result<(), CommError> {
        if self.tp() == 1 {
            return Ok(());
        }
        let slots = || self.0.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let own = device.rows(x);
        slots()[device.rank] = (own.at, own.row);
        self.0.meeting().wait(device.rank, at, || {
            let slots = slots();
            let row = slots[0].1;
            if slots.iter().any(|s| s.1 != row) {
                return Err("ranks came with buffers of different widths".into());
            }
            let addresses: Vec<u64> = slots.iter().map(|s| s.0).collect();
            device.sum_ranks(&addresses, row, x.len(), n).map_err(|e| e.to_string())
        })
    }

    /// What each found lies in memory that all share: they only have to have given it to the stream.
    fn share(&self, device: &CudaDevice, at: Place) -> Result<(), CommError> {
        self.0.meeting().wait(device.rank, at, || Ok(()))
    }
}

impl Collective for VirtualRanks {
    fn tp(&self) -> usize {
        self.0.meeting().tp()
    }

    fn abort(&self, reason: &str) {
        self.0.meeting().abort(reason);
    }
}
