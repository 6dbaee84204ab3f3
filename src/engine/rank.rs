//! A rank's thread: it loads its shards, then does what the engine asks until the engine is dropped.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use super::EngineError;
use super::step::Forward;
use crate::comm::Collective;

/// Something to do on a rank's thread.
type Work = Box<dyn FnOnce(&mut Forward, &dyn Collective) + Send>;

/// The engine's end of a rank.
pub(super) struct RankThread {
    rank: usize,
    /// `None` once the rank is told to end.
    work: Option<Sender<Work>>,
    thread: Option<JoinHandle<()>>,
}

/// What a rank will answer.
pub(super) struct Answer<T> {
    rank: usize,
    from: Receiver<Result<T, EngineError>>,
}

impl<T> Answer<T> {
    /// Waits for it.
    pub(super) fn wait(self) -> Result<T, EngineError> {
        self.from.recv().unwrap_or(Err(EngineError::RankGone { rank: self.rank }))
    }
}

impl RankThread {
    /// Starts a rank whose thread begins with `load`; answers when that is done, with the most rows with which the device
    /// runs ahead of the host.
    pub(super) fn spawn(
        rank: usize,
        comm: Arc<dyn Collective>,
        load: impl FnOnce() -> Result<Forward, EngineError> + Send + 'static,
    ) -> Result<(Self, Answer<usize>), EngineError> {
        let ((work, inbox), (outbox, from)) = (channel(), channel());
        let run = move || match load() {
            Ok(forward) => {
                let _ = outbox.send(Ok(forward.runs_ahead())); // the engine may be gone already
                serve(rank, forward, comm, &inbox);
            }
            Err(e) => {
                let _ = outbox.send(Err(e));
            }
        };
        let builder = std::thread::Builder::new().name(format!("rank{rank}"));
        let thread = builder.spawn(run).map_err(|source| EngineError::Thread { rank, source })?;
        Ok((RankThread { rank, work: Some(work), thread: Some(thread) }, Answer { rank, from }))
    }

    /// Asks the rank to do something. A failure wakes the other ranks, unless all come to it alike.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Forward) -> Result<T, EngineError> + Send + 'static,
    ) -> Answer<T> {
        let ((to, from), rank) = (channel(), self.rank);
        let work: Work = Box::new(move |forward, comm| {
            let done = work(forward);
            // A batch beyond the limits was refused by every rank before they met: the next one may fit. Nobody meets to
            // read a weight.
            let alike = |e: &&EngineError| matches!(e, EngineError::Limit { .. } | EngineError::Checkpoint(_));
            if let Some(e) = done.as_ref().err().filter(|e| !alike(e)) {
                comm.abort(&format!("rank {rank}: {e}"));
            }
            let _ = to.send(done); // whoever asked may be gone
        });
        // A rank that is gone drops the work and with it the answer's other end.
        let _ = self.work.as_ref().map(|inbox| inbox.send(work));
        Answer { rank, from }
    }
}

impl Drop for RankThread {
    fn drop(&mut self) {
        self.work = None; // ends the rank's loop
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic has already been printed by its thread
        }
    }
}

/// A rank that panics would leave the others waiting until they time out.
struct AbortOnPanic {
    rank: usize,
    comm: Arc<dyn Collective>,
}

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.comm.abort(&format!("rank {}: its thread panicked", self.rank));
        }
    }
}

fn serve(rank: usize, mut forward: Forward, comm: Arc<dyn Collective>, inbox: &Receiver<Work>) {
    let guard = AbortOnPanic { rank, comm };
    while let Ok(work) = inbox.recv() {
        work(&mut forward, guard.comm.as_ref());
    }
    // Recordings hold collectives, which some libraries wait for when their end is asked for: so the rank goes first.
    drop(forward);
}
