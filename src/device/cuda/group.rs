//! Ranks that share a GPU and its stream, and the recordings of their steps. One recording holds the step of all of them:
//! they meet before it starts and behind its end, and what they give to the stream in between becomes one graph.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{self, CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::gpu::{Gpu, GpuError};
use super::inputs::MOST_RECORDED;
use super::memory::Memory;
use super::virtual_ranks::MOST_RANKS;
use crate::comm::CommError;
use crate::comm::meeting::Meeting;
use crate::device::{Next, ProgramId, StepShape};

/// A recorded step.
struct Recording(CudaGraph);

// SAFETY: a graph is used by one thread at a time, under the group's lock.
unsafe impl Send for Recording {}

/// What a step is recorded under.
pub(super) type RecordingId = (StepShape, ProgramId);

/// Where a whole step begins and ends, for errors.
const STEP: &str = "step";

#[derive(Default)]
struct Steps {
    /// `None` for steps that have been run once, so that nothing is allocated or loaded while recording.
    known: HashMap<RecordingId, Option<Recording>>,
    recording: Option<RecordingId>,
    replays: u64,
    nodes: usize,
}

/// Ranks that share a GPU.
pub struct Group {
    gpu: Arc<Gpu>,
    meeting: Meeting,
    /// Each rank's buffer at the current collective: address and row.
    pub(super) slots: Mutex<Vec<(u64, i64)>>,
    /// What ranks have chosen: a place for each rank.
    pairs: OnceLock<Memory>,
    steps: Mutex<Steps>,
}

/// Bytes of one rank's choices: a key and an id for each row that a recorded step can have.
pub(super) const PAIRS: usize = 8 * MOST_RECORDED;

impl Group {
    /// A group of `tp` ranks on `gpu`.
    pub fn new(gpu: Arc<Gpu>, tp: usize, timeout: Duration) -> Arc<Self> {
        let slots = Mutex::new(vec![(0, 0); tp]);
        Arc::new(Group {
            gpu,
            meeting: Meeting::new(tp, timeout),
            slots,
            pairs: OnceLock::new(),
            steps: Mutex::default(),
        })
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Where its ranks meet.
    pub fn meeting(&self) -> &Meeting {
        &self.meeting
    }

    /// Where ranks leave their choices: rank `r` at `r * PAIRS`.
    ///
    /// # Errors
    /// A GPU without any memory left.
    pub(super) fn pairs(&self) -> Result<u64, GpuError> {
        if let Some(pairs) = self.pairs.get() {
            return Ok(pairs.address());
        }
        let memory = Memory::new(&self.gpu, MOST_RANKS * PAIRS)?;
        Ok(self.pairs.get_or_init(|| memory).address()) // another rank may have been faster
    }

    fn steps(&self) -> MutexGuard<'_, Steps> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replays so far, and the launches of the last recording.
    pub fn replays(&self) -> (u64, usize) {
        let steps = self.steps();
        (steps.replays, steps.nodes)
    }

    /// Replays the step if it is recorded, starts recording if it has been run once.
    ///
    /// # Errors
    /// A rank that does not come, and a driver that refuses.
    pub(super) fn begin(&self, rank: usize, id: RecordingId) -> Result<Next, CommError> {
        self.meeting.wait(rank, STEP, || {
            let mut steps = self.steps();
            let text = |e: cudarc::driver::DriverError| format!("recording a step: {e:?}");
            match steps.known.get(&id) {
                None => {
                    steps.known.insert(id, None);
                }
                Some(None) => {
                    // Relaxed: other ranks' threads add to the recording, and any of them may end it.
                    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
                    self.gpu.stream().begin_capture(mode).map_err(text)?;
                    steps.recording = Some(id);
                }
                Some(Some(recording)) => {
                    recording.0.launch().map_err(|e| format!("replaying a step: {e:?}"))?;
                    steps.replays += 1;
                }
            }
            Ok(())
        })?;
        // The map does not change before the ranks' next meeting.
        let steps = self.steps();
        let replayed = steps.recording.is_none() && steps.known.get(&id).is_some_and(Option::is_some);
        Ok(if replayed { Next::Replayed } else { Next::Run })
    }

    /// Ends what `begin` began: a recording is closed, kept and run.
    ///
    /// # Errors
    /// As [`Group::begin`].
    pub(super) fn end(&self, rank: usize, id: RecordingId) -> Result<(), CommError> {
        if self.steps().recording != Some(id) {
            return Ok(());
        }
        self.meeting.wait(rank, STEP, || {
            let mut steps = self.steps();
            steps.recording = None;
            let text = |e: cudarc::driver::DriverError| format!("closing the recording of a step: {e:?}");
            let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            let graph = self.gpu.stream().end_capture(flags).map_err(text)?;
            let graph = graph.ok_or("the recording of a step is empty")?;
            let mut nodes = 0;
            // SAFETY: only counts the nodes of a graph that lives.
            let _ = unsafe { sys::cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &mut nodes) }; // 0 if refused
            steps.nodes = nodes;
            graph.launch().map_err(text)?;
            steps.known.insert(id, Some(Recording(graph)));
            Ok(())
        })
    }
}
