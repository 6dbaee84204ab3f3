//! A rank's thread: it loads its shards, then serves steps until the engine is dropped.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::batch::Batch;
use super::room::Room;
use super::step::{Ended, Forward};
use super::weights::Weights;
use super::{Attention, EngineError};
use crate::checkpoint::Checkpoint;
use crate::comm::Collective;
use crate::device::{Columns, Device};
use crate::model::Param;
use crate::probe::{Captured, Probe};
use crate::shard::ShardPlan;

enum Command {
    Step(Arc<Batch>, Option<Box<dyn Probe>>),
    /// Runs the step behind the last one, which was given ahead; the longest sequence then has so many keys.
    Follow(usize),
    /// Takes what the last step given ahead has chosen.
    Chosen,
    ReadWeight(Param),
    ReadCols(Param),
}

enum Reply {
    /// With the most rows with which the device can run ahead of the host.
    Loaded(usize),
    Step(RankOutput),
    Tokens(Vec<u32>),
    Weight(Vec<u8>),
    Cols(Columns),
}

/// What one rank returns from a step.
pub(super) struct RankOutput {
    /// `[rows][padded_vocab / tp]`; empty if stopped.
    pub logits: Vec<f32>,
    /// What its listener captured.
    pub captured: Vec<Captured>,
}

/// The engine's end of a rank.
pub(super) struct RankThread {
    rank: usize,
    /// `None` once the rank is told to end.
    commands: Option<Sender<Command>>,
    replies: Mutex<Receiver<Result<Reply, EngineError>>>,
    thread: Option<JoinHandle<()>>,
}

impl RankThread {
    pub(super) fn spawn<D: Device>(
        rank: usize,
        attention: Attention,
        room: Room,
        device: D,
        checkpoint: Arc<Checkpoint>,
        plan: Arc<dyn ShardPlan>,
        comm: Arc<dyn Collective<D>>,
    ) -> Result<Self, EngineError> {
        let (commands, inbox) = channel();
        let (outbox, replies) = channel();
        let run = move || {
            let loaded = Weights::load(&checkpoint, plan.as_ref(), &device, rank).and_then(|weights| {
                Forward::new(checkpoint.config(), plan.as_ref(), rank, attention, room, device, weights)
            });
            drop(checkpoint);
            match loaded {
                Ok(forward) => {
                    let _ = outbox.send(Ok(Reply::Loaded(forward.runs_ahead()))); // the engine may be gone already
                    serve(rank, forward, comm, &inbox, &outbox);
                }
                Err(e) => {
                    let _ = outbox.send(Err(e));
                }
            }
        };
        let builder = std::thread::Builder::new().name(format!("rank{rank}"));
        let thread = builder.spawn(run).map_err(|source| EngineError::Thread { rank, source })?;
        Ok(RankThread { rank, commands: Some(commands), replies: Mutex::new(replies), thread: Some(thread) })
    }

    fn send(&self, command: Command) -> Result<(), EngineError> {
        let sent = self.commands.as_ref().map(|c| c.send(command));
        sent.and_then(Result::ok).ok_or(EngineError::RankGone { rank: self.rank })
    }

    fn receive(&self) -> Result<Reply, EngineError> {
        let replies = self.replies.lock().unwrap_or_else(PoisonError::into_inner);
        replies.recv().unwrap_or(Err(EngineError::RankGone { rank: self.rank }))
    }

    /// Waits until the rank has loaded. Returns the most rows with which its device can run ahead of the host.
    pub(super) fn loaded(&self) -> Result<usize, EngineError> {
        match self.receive()? {
            Reply::Loaded(rows) => Ok(rows),
            _ => Err(EngineError::RankGone { rank: self.rank }),
        }
    }

    /// Tells the rank to run the step behind the last one, see [`Forward::follow`].
    pub(super) fn follow(&self, longest: usize) -> Result<(), EngineError> {
        self.send(Command::Follow(longest))
    }

    /// Asks the rank for what the last step given ahead has chosen.
    pub(super) fn ask_chosen(&self) -> Result<(), EngineError> {
        self.send(Command::Chosen)
    }

    /// Waits for tokens that were chosen ahead.
    pub(super) fn tokens(&self) -> Result<Vec<u32>, EngineError> {
        match self.receive()? {
            Reply::Tokens(tokens) => Ok(tokens),
            _ => Err(EngineError::RankGone { rank: self.rank }),
        }
    }

    /// Tells the rank to run a step.
    pub(super) fn begin(&self, batch: Arc<Batch>, probe: Option<Box<dyn Probe>>) -> Result<(), EngineError> {
        self.send(Command::Step(batch, probe))
    }

    /// Waits for the step's end.
    pub(super) fn end(&self) -> Result<RankOutput, EngineError> {
        match self.receive()? {
            Reply::Step(output) => Ok(output),
            _ => Err(EngineError::RankGone { rank: self.rank }),
        }
    }

    /// Reads a weight back.
    pub(super) fn read_weight(&self, param: Param) -> Result<Vec<u8>, EngineError> {
        self.send(Command::ReadWeight(param))?;
        match self.receive()? {
            Reply::Weight(bytes) => Ok(bytes),
            _ => Err(EngineError::RankGone { rank: self.rank }),
        }
    }

    /// Reads a weight's columns back.
    pub(super) fn read_cols(&self, param: Param) -> Result<Columns, EngineError> {
        self.send(Command::ReadCols(param))?;
        match self.receive()? {
            Reply::Cols(columns) => Ok(columns),
            _ => Err(EngineError::RankGone { rank: self.rank }),
        }
    }
}

impl Drop for RankThread {
    fn drop(&mut self) {
        self.commands = None; // ends the rank's loop
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic has already been printed by its thread
        }
    }
}

/// A rank that panics would leave the others waiting until they time out.
struct AbortOnPanic<D: Device> {
    rank: usize,
    comm: Arc<dyn Collective<D>>,
}

impl<D: Device> Drop for AbortOnPanic<D> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.comm.abort(&format!("rank {}: its thread panicked", self.rank));
        }
    }
}

fn serve<D: Device>(
    rank: usize,
    mut forward: Forward<D>,
    comm: Arc<dyn Collective<D>>,
    inbox: &Receiver<Command>,
    outbox: &Sender<Result<Reply, EngineError>>,
) {
    let _guard = AbortOnPanic { rank, comm: comm.clone() };
    while let Ok(command) = inbox.recv() {
        let reply = match command {
            Command::Step(batch, mut probe) => {
                let ended = forward.run(comm.as_ref(), &batch, probe.as_deref_mut());
                // A batch without room was refused by every rank alike, before they met: the next one may fit.
                if let Some(e) = ended.as_ref().err().filter(|e| !matches!(e, EngineError::Room { .. })) {
                    comm.abort(&format!("rank {rank}: {e}"));
                }
                ended.map(|ended| {
                    let logits = match ended {
                        Ended::Logits(logits) => logits,
                        Ended::Stopped | Ended::Ahead => Vec::new(),
                    };
                    Reply::Step(RankOutput { logits, captured: probe.map(|mut p| p.take()).unwrap_or_default() })
                })
            }
            Command::Follow(longest) => {
                let tokens = forward.follow(comm.as_ref(), longest);
                if let Err(e) = &tokens {
                    comm.abort(&format!("rank {rank}: {e}"));
                }
                tokens.map(Reply::Tokens)
            }
            Command::Chosen => {
                let tokens = forward.chosen();
                if let Err(e) = &tokens {
                    comm.abort(&format!("rank {rank}: {e}"));
                }
                tokens.map(Reply::Tokens)
            }
            Command::ReadWeight(param) => forward.read_weight(param).map(Reply::Weight),
            Command::ReadCols(param) => forward.read_cols(param).map(Reply::Cols),
        };
        if outbox.send(reply).is_err() {
            break;
        }
    } // Recordings hold collectives, which some libraries wait for when their end is asked for: so the rank goes first.
    drop(forward);
}
