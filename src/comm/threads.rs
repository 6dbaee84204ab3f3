//! Ranks as threads of one process. They park while they wait, never spin, and never wait inside a rayon worker.

use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use super::meeting::Meeting;
use super::{Collective, CommError};
use crate::device::Device;
use crate::model::Place;

/// CPU ranks: each brings its contribution, and all add them up in rank order.
pub struct Threads {
    meeting: Meeting,
    /// Each rank's contribution to the current meeting.
    slots: Vec<RwLock<Vec<f32>>>,
}

impl Threads {
    /// A meeting place for `tp` ranks that waits at most `timeout` at each meeting.
    pub fn new(tp: usize, timeout: Duration) -> Self {
        Threads { meeting: Meeting::new(tp, timeout), slots: (0..tp).map(|_| RwLock::new(Vec::new())).collect() }
    }
}

impl<D: Device> Collective<D> for Threads {
    fn tp(&self) -> usize {
        self.slots.len()
    }

    fn all_reduce(
        &self,
        rank: usize,
        site: Place,
        device: &D,
        buf: &mut D::Buf,
        n: usize,
        width: usize,
    ) -> Result<(), CommError> {
        let failed = |e: crate::device::DeviceError| {
            let error = CommError::Device { rank, site: site.to_string(), reason: e.to_string() };
            self.meeting.abort(&error.to_string());
            error
        };
        let own = device.read(buf, n, 0..width).map_err(failed)?;
        *self.slots[rank].write().unwrap_or_else(PoisonError::into_inner) = own;
        self.meeting.wait(rank, site, || Ok(()))?;
        let mut sum = vec![0.0f32; n * width];
        for slot in &self.slots {
            let part = slot.read().unwrap_or_else(PoisonError::into_inner);
            if part.len() != sum.len() {
                let (expected, found) = (sum.len(), part.len());
                let error = CommError::Mismatch { rank, site: site.to_string(), expected, found };
                self.meeting.abort(&error.to_string());
                return Err(error);
            }
            for (s, p) in sum.iter_mut().zip(part.iter()) {
                *s += p;
            }
        }
        // Nobody may overwrite a slot that another rank still reads.
        self.meeting.wait(rank, site, || Ok(()))?;
        device.write(buf, n, 0..width, &sum).map_err(failed)
    }

    fn abort(&self, reason: &str) {
        self.meeting.abort(reason);
    }
}
