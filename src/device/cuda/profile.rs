//! Where the time of a step goes on the GPU: events around every launch, read when the work is done. Steps are not
//! replayed then, so the sum is that of the kernels, without the gaps that a recording hides.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{result, sys};

use super::gpu::{Gpu, GpuError, at};

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
    gpu: Arc<Gpu>,
    op: &'static str,
    bytes: usize,
    events: [sys::CUevent; 2],
}

// SAFETY: events belong to the context, which any thread may use once it is current.
unsafe impl Send for Pending {}

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
        gpu.bind()?;
        let event = || result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).map_err(at("making an event"));
        let events = [event()?, event()?];
        let record = |e| {
            // SAFETY: event and stream are of this context.
            unsafe { result::event::record(e, gpu.stream().cu_stream()) }.map_err(at("recording an event"))
        };
        let alone = gpu.timed.lock().unwrap_or_else(PoisonError::into_inner);
        record(events[0])?;
        let done = start();
        record(events[1])?;
        drop(alone);
        let mut pending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pending.push(Pending { gpu: gpu.clone(), op, bytes, events });
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
            p.gpu.bind()?;
            let [a, b] = p.events;
            // SAFETY: both events were recorded on the stream of this context.
            let ms = unsafe { result::event::synchronize(b).and_then(|()| result::event::elapsed(a, b)) }
                .map_err(at("reading events"))?;
            let cost = costs.entry(p.op).or_default();
            cost.launches += 1;
            cost.seconds += f64::from(ms) / 1e3;
            cost.bytes += p.bytes as u64;
        }
        Ok(costs)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            for event in self.events {
                // SAFETY: made by `time` and destroyed once.
                let _ = unsafe { result::event::destroy(event) }; // nobody is left to be told
            }
        }
    }
}
