//! Where the time of a step goes on the GPU: events around every launch, read when the work is done. Steps are not
//! replayed then, so the sum is that of the kernels, without the gaps that a recording hides.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::gpu::{Gpu, GpuError};
use super::memory::Event;

/// What one operation has cost so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    /// Launches.
    pub launches: u64,
    /// Seconds between the events around them.
    pub seconds: f64,
    /// Bytes of weights and keys that they read.
    pub bytes: u64,
}

/// Events of launches that have not been read yet.
struct Pending {
    op: &'static str,
    bytes: usize,
    events: [Event; 2],
}

/// The costs of a rank's operations.
#[derive(Default)]
pub struct Profile(Mutex<Vec<Pending>>);

impl Profile {
    /// Runs `start`, which gives one launch to the stream, between two events.
    pub(super) fn time<T>(
        &self,
        gpu: &Arc<Gpu>,
        op: &'static str,
        bytes: usize,
        start: impl FnOnce() -> T,
    ) -> Result<T, GpuError> {
        let events = [Event::timed(gpu)?, Event::timed(gpu)?];
        let alone = gpu.timed.lock().unwrap_or_else(PoisonError::into_inner);
        events[0].record()?;
        let done = start();
        events[1].record()?;
        drop(alone);
        let mut pending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pending.push(Pending { op, bytes, events });
        Ok(done)
    }

    /// Everything since the last call, by operation.
    ///
    /// # Errors
    /// What the stream ended with.
    pub fn take(&self) -> Result<BTreeMap<&'static str, Cost>, GpuError> {
        let pending = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        let mut costs: BTreeMap<&'static str, Cost> = BTreeMap::new();
        for p in &pending {
            let seconds = p.events[1].seconds_since(&p.events[0])?;
            let cost = costs.entry(p.op).or_default();
            cost.launches += 1;
            cost.seconds += seconds;
            cost.bytes += p.bytes as u64;
        }
        Ok(costs)
    }
}
