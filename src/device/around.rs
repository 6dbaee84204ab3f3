//! What stands around a device: one function that sees every call of a step, with the device at hand. Clocks, faults and
//! the oddities of tests are made of it; an engine without one runs its calls itself.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Batch, Call, Device, DeviceError, StepShape};

/// Sees every call of a rank. Steps around which somebody stands are never recorded, on any rank.
pub trait Around: Send {
    /// Runs `call`, or something in its place: may read and write any view, and run what else it wants. A collective is
    /// run exactly once, or the other ranks wait.
    ///
    /// # Errors
    /// As [`Device::run`].
    fn run(&mut self, call: &Call, shape: StepShape, device: &mut dyn Device) -> Result<(), DeviceError>;

    /// Sees a step's inputs, and may alter them, before the device has them.
    fn inputs(&mut self, _batch: &mut Batch) {}
}

/// What one operation has cost so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// Calls.
    pub calls: u64,
    /// Wall time, on the rank's thread.
    pub time: Duration,
}

/// The times of one rank, by operation ([`Call::label`]). In a collective, waiting and adding count together, since a rank
/// that waits does nothing else.
#[derive(Clone, Debug, Default)]
pub struct Clock(Arc<Mutex<BTreeMap<&'static str, Spent>>>);

impl Clock {
    /// Everything since the last call.
    pub fn take(&self) -> BTreeMap<&'static str, Spent> {
        std::mem::take(&mut *self.ops())
    }

    /// A rank that panicked leaves sums that are still sums.
    fn ops(&self) -> MutexGuard<'_, BTreeMap<&'static str, Spent>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Around for Clock {
    fn run(&mut self, call: &Call, shape: StepShape, device: &mut dyn Device) -> Result<(), DeviceError> {
        let start = Instant::now();
        let done = device.run(call, shape);
        let time = start.elapsed();
        let mut ops = self.ops();
        let spent = ops.entry(call.label()).or_default();
        spent.calls += 1;
        spent.time += time;
        done
    }
}
