//! A place where rank threads meet: they park while they wait, never spin, and give up together when one does not come.

use std::fmt::Display;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::CommError;

/// A meeting place for a number of rank threads.
pub struct Meeting {
    state: Mutex<State>,
    changed: Condvar,
    timeout: Duration,
}

struct State {
    arrived: Vec<bool>,
    generation: u64,
    aborted: Option<String>,
}

impl Meeting {
    /// A meeting place for `tp` ranks that waits at most `timeout` each time.
    pub fn new(tp: usize, timeout: Duration) -> Self {
        let state = State { arrived: vec![false; tp], generation: 0, aborted: None };
        Meeting { state: Mutex::new(state), changed: Condvar::new(), timeout }
    }

    /// Ranks that meet.
    pub fn tp(&self) -> usize {
        self.lock().arrived.len()
    }

    /// A rank that panicked poisons the lock; the data under it is plain and the abort flag tells the others.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until every rank has come here; the last one runs `last` before any goes on.
    ///
    /// # Errors
    /// A rank that does not come in time, one that gave up, and what `last` says.
    pub fn wait(
        &self,
        rank: usize,
        site: impl Display,
        last: impl FnOnce() -> Result<(), String>,
    ) -> Result<(), CommError> {
        let mut state = self.lock();
        let aborted = |reason: &str| CommError::Aborted { rank, site: site.to_string(), reason: reason.into() };
        if let Some(reason) = &state.aborted {
            return Err(aborted(reason));
        }
        state.arrived[rank] = true;
        if state.arrived.iter().all(|a| *a) {
            state.arrived.fill(false);
            state.generation += 1;
            let done = last().map_err(|reason| CommError::Device { rank, site: site.to_string(), reason });
            if let Err(e) = &done {
                state.aborted = Some(e.to_string());
            }
            self.changed.notify_all();
            return done;
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
        match &state.aborted {
            Some(reason) => Err(aborted(reason)),
            None => Ok(()),
        }
    }

    /// Wakes every waiting rank with an error; later meetings fail too.
    pub fn abort(&self, reason: &str) {
        let mut state = self.lock();
        state.aborted.get_or_insert_with(|| reason.into());
        self.changed.notify_all();
    }
}
