//! A watch over work that may hang: links and collectives that are wrong often wait for ever, in the driver as well as on
//! the GPU. The work runs on a thread of its own and says what it is at; when it says nothing for too long it is left
//! behind, with everything that it holds, and what it was at is the finding.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::device::cuda::gpu::GpuError;

/// How long work may say nothing.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_millis(100);

/// Where work says what it is at.
#[derive(Clone)]
pub(super) struct Watch(Arc<Mutex<(String, Instant)>>);

impl Watch {
    fn new(what: &str) -> Self {
        Watch(Arc::new(Mutex::new((what.into(), Instant::now()))))
    }

    /// The work is at `what` now.
    pub fn at(&self, what: impl Into<String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = (what.into(), Instant::now());
    }

    fn last(&self) -> (String, Duration) {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (state.0.clone(), state.1.elapsed())
    }
}

/// Runs `work` and waits for it as long as it says every `patience` what it is at.
///
/// # Errors
/// What the work ends with; [`GpuError::Stuck`] when it says nothing.
pub(super) fn watched<T: Send + 'static>(
    patience: Duration,
    what: &str,
    work: impl FnOnce(&Watch) -> Result<T, GpuError> + Send + 'static,
) -> Result<T, GpuError> {
    let watch = Watch::new(what);
    let inner = watch.clone();
    let (done, wait) = channel();
    std::thread::spawn(move || {
        let _ = done.send(work(&inner)); // nobody waits for what came too late
    });
    loop {
        match wait.recv_timeout(TICK) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(GpuError::Driver {
                    what: watch.last().0,
                    error: "the check ended without a result".into(),
                });
            }
            Err(RecvTimeoutError::Timeout) => {
                let (last, waited) = watch.last();
                if waited > patience {
                    return Err(GpuError::Stuck { last, waited });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silent_work_is_left_behind_and_named() {
        let hang = |watch: &Watch| {
            watch.at("a copy of 4 KiB");
            std::thread::sleep(Duration::from_secs(600));
            Ok(())
        };
        match watched(Duration::from_millis(50), "starting", hang) {
            Err(GpuError::Stuck { last, waited }) => {
                assert_eq!(last, "a copy of 4 KiB");
                assert!(waited < Duration::from_secs(60));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(watched(PATIENCE, "adding", |_| Ok(2 + 2)).ok(), Some(4));
    }

    #[test]
    fn work_that_panics_is_no_result() {
        let failed = watched::<()>(PATIENCE, "dividing", |_| panic!("on purpose"));
        assert!(matches!(failed, Err(GpuError::Driver { what, .. }) if what == "dividing"));
    }
}
