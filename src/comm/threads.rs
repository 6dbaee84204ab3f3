//! Ranks as threads of one process. They park while they wait, never spin, and never wait inside a rayon worker.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use super::{Collective, CommError};
use crate::device::{Device, Site};

/// A meeting place for `tp` rank threads.
pub struct Threads {
    state: Mutex<State>,
    changed: Condvar,
    /// Each rank's contribution to the current meeting.
    slots: Vec<RwLock<Vec<f32>>>,
    timeout: Duration,
}

struct State {
    arrived: Vec<bool>,
    generation: u64,
    aborted: Option<String>,
}

/// A rank that panicked poisons a lock; the data under it is plain and the abort flag tells the others.
fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Threads {
    /// A meeting place for `tp` ranks that waits at most `timeout` at each meeting.
    pub fn new(tp: usize, timeout: Duration) -> Self {
        Threads {
            state: Mutex::new(State { arrived: vec![false; tp], generation: 0, aborted: None }),
            changed: Condvar::new(),
            slots: (0..tp).map(|_| RwLock::new(Vec::new())).collect(),
            timeout,
        }
    }

    /// Waits until every rank has come here.
    fn barrier(&self, rank: usize, site: Site) -> Result<(), CommError> {
        let mut state = lock(&self.state);
        let aborted = |reason: &str| CommError::Aborted { rank, site: site.to_string(), reason: reason.into() };
        if let Some(reason) = &state.aborted {
            return Err(aborted(reason));
        }
        state.arrived[rank] = true;
        if state.arrived.iter().all(|a| *a) {
            state.arrived.fill(false);
            state.generation += 1;
            self.changed.notify_all();
            return Ok(());
        }
        let (generation, start) = (state.generation, Instant::now());
        while state.generation == generation {
            if let Some(reason) = &state.aborted {
                return Err(aborted(reason));
            }
            let left = self.timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                let absent: Vec<usize> = (0..state.arrived.len()).filter(|r| !state.arrived[*r]).collect();
                let error = CommError::Timeout { rank, absent, site: site.to_string(), waited: self.timeout };
                state.aborted = Some(error.to_string());
                self.changed.notify_all();
                return Err(error);
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }
}

impl<D: Device> Collective<D> for Threads {
    fn tp(&self) -> usize {
        self.slots.len()
    }

    fn all_reduce(
        &self,
        rank: usize,
        site: Site,
        device: &D,
        buf: &mut D::Buf,
        n: usize,
        width: usize,
    ) -> Result<(), CommError> {
        let failed = |e: crate::device::DeviceError| {
            let error = CommError::Device { rank, site: site.to_string(), reason: e.to_string() };
            Collective::<D>::abort(self, &error.to_string());
            error
        };
        let own = device.read(buf, n, 0..width).map_err(failed)?;
        *self.slots[rank].write().unwrap_or_else(PoisonError::into_inner) = own;
        self.barrier(rank, site)?;
        let mut sum = vec![0.0f32; n * width];
        for slot in &self.slots {
            let part = slot.read().unwrap_or_else(PoisonError::into_inner);
            if part.len() != sum.len() {
                let (expected, found) = (sum.len(), part.len());
                let error = CommError::Mismatch { rank, site: site.to_string(), expected, found };
                Collective::<D>::abort(self, &error.to_string());
                return Err(error);
            }
            for (s, p) in sum.iter_mut().zip(part.iter()) {
                *s += p;
            }
        }
        // Nobody may overwrite a slot that another rank still reads.
        self.barrier(rank, site)?;
        device.write(buf, n, 0..width, &sum).map_err(failed)
    }

    fn abort(&self, reason: &str) {
        let mut state = lock(&self.state);
        state.aborted.get_or_insert_with(|| reason.into());
        self.changed.notify_all();
    }
}
