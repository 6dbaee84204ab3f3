//! Ranks as threads of one process. They park while they wait, never spin, and never wait inside a rayon worker.

use std::fmt::Display;
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use super::meeting::Meeting;
use super::{Collective, CommError};

/// CPU ranks: each brings its contribution, and every one adds them up, or reads them, in rank order.
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

    /// Brings `own` and hands every rank's contribution, its own among them, to `each`, in rank order. All bring as many
    /// values.
    ///
    /// # Errors
    /// A rank that does not come in time, that gave up, or that brings another size.
    pub fn exchange(
        &self,
        rank: usize,
        site: impl Display,
        own: Vec<f32>,
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<(), CommError> {
        let expected = own.len();
        *self.slots[rank].write().unwrap_or_else(PoisonError::into_inner) = own;
        self.meeting.wait(rank, &site, || Ok(()))?;
        for (other, slot) in self.slots.iter().enumerate() {
            let part = slot.read().unwrap_or_else(PoisonError::into_inner);
            if part.len() != expected {
                let error = CommError::Mismatch { rank, site: site.to_string(), expected, found: part.len() };
                self.abort(&error.to_string());
                return Err(error);
            }
            each(other, &part);
        }
        // Nobody may overwrite a slot that another rank still reads.
        self.meeting.wait(rank, site, || Ok(()))
    }
}

impl Collective for Threads {
    fn tp(&self) -> usize {
        self.slots.len()
    }

    fn abort(&self, reason: &str) {
        self.meeting.abort(reason);
    }
}
