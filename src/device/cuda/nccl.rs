//! Ranks on GPUs of their own: sums over NCCL, in f32, on each rank's stream and so inside its recording. NCCL sums in the
//! order that its algorithm has; every rank receives the same bits.

use std::ffi::{CStr, c_int};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cudarc::nccl::{result, sys};

use super::gpu::{Gpu, GpuError};
use super::libraries::why;
use super::{CudaDevice, Meet};
use crate::comm::meeting::Meeting;
use crate::comm::{Collective, CommError};
use crate::device::View;
use crate::model::Place;

/// NCCL's communicators, one per rank.
pub struct Nccl {
    state: Mutex<State>,
    gpus: Vec<Arc<Gpu>>,
    /// Ranks meet before every collective that is called, so that a missing one is named, not waited for.
    meeting: Meeting,
}

struct State {
    comms: Vec<Comm>,
    aborted: Option<String>,
}

/// A communicator. Whoever calls NCCL with it holds the lock, so that an abort does not free it meanwhile.
type Comm = Arc<Mutex<Handle>>;

struct Handle(sys::ncclComm_t);

// SAFETY: used under the lock around it.
unsafe impl Send for Handle {}

/// How long an abort waits for a call that is under way before it leaves its communicator alone.
const CALL: Duration = Duration::from_secs(5);

fn lock(comm: &Comm) -> MutexGuard<'_, Handle> {
    comm.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends a communicator whose kernels may be running. NCCL then waits for the recordings that hold its collectives, so this
/// has a thread of its own that nobody waits for.
fn end(comm: Comm) {
    std::thread::spawn(move || {
        let start = Instant::now();
        while start.elapsed() < CALL {
            if let Ok(handle) = comm.try_lock() {
                // SAFETY: taken from its owner, so it is aborted once, and no call uses it.
                let _ = unsafe { result::comm_abort(handle.0) }; // the reason for the abort is the one to tell
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    });
}

/// Version of the NCCL that would be used, as NCCL counts it, if there is one.
pub fn version() -> Option<i32> {
    // SAFETY: only asks whether the library can be loaded.
    if unsafe { !sys::is_culib_present() } {
        return None;
    }
    result::get_nccl_version().ok()
}

fn describe(e: &result::NcclError) -> String {
    // SAFETY: NCCL returns static texts.
    let text = unsafe { CStr::from_ptr(sys::ncclGetErrorString(e.0)) };
    format!("NCCL: {} ({:?})", text.to_string_lossy(), e.0)
}

impl Nccl {
    /// Communicators of one rank per GPU. They wait at most `timeout` for each other.
    ///
    /// # Errors
    /// No NCCL, or one that refuses.
    pub fn new(gpus: Vec<Arc<Gpu>>, timeout: Duration) -> Result<Self, CommError> {
        let failed = |reason: String| CommError::Device { rank: 0, site: "joining NCCL".into(), reason };
        if version().is_none() {
            let advice = "install NCCL, or link libnccl.so.2 to that name in a folder on LD_LIBRARY_PATH";
            return Err(failed(format!("{}: {advice}", why("libnccl.so"))));
        }
        let ordinals: Vec<c_int> = gpus.iter().map(|g| g.ordinal as c_int).collect();
        let mut comms = vec![std::ptr::null_mut(); gpus.len()];
        // SAFETY: room for as many communicators as there are GPUs in the list.
        unsafe { result::comm_init_all(comms.as_mut_ptr(), ordinals.len() as c_int, ordinals.as_ptr()) }
            .map_err(|e| failed(describe(&e)))?;
        let comms = comms.into_iter().map(|comm| Arc::new(Mutex::new(Handle(comm)))).collect();
        let meeting = Meeting::new(gpus.len(), timeout);
        Ok(Nccl { state: Mutex::new(State { comms, aborted: None }), gpus, meeting })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rank's communicator, its GPU made current.
    fn own(&self, rank: usize, site: &dyn Fn() -> String) -> Result<Comm, CommError> {
        let state = self.state();
        if let Some(reason) = &state.aborted {
            return Err(CommError::Aborted { rank, site: site(), reason: reason.clone() });
        }
        let device = |e: GpuError| CommError::Device { rank, site: site(), reason: e.to_string() };
        self.gpus[rank].bind().map_err(device)?;
        Ok(state.comms[rank].clone())
    }

    /// Adds `count` f32 values at `address` over all ranks, in place, on the rank's stream.
    ///
    /// # Errors
    /// An abort, or a call that NCCL refuses.
    pub fn sum(&self, rank: usize, site: &dyn Fn() -> String, address: u64, count: usize) -> Result<(), CommError> {
        let comm = self.own(rank, site)?;
        let device = |reason: String| CommError::Device { rank, site: site(), reason };
        let (f32_type, sum) = (sys::ncclDataType_t::ncclFloat32, sys::ncclRedOp_t::ncclSum);
        let stream = self.gpus[rank].stream().cu_stream().cast();
        let at = address as *mut std::ffi::c_void;
        // SAFETY: the buffer holds `count` values on the communicator's GPU, and the stream is that GPU's.
        let done = unsafe { result::all_reduce(at.cast_const(), at, count, f32_type, sum, lock(&comm).0, stream) };
        done.map(|_| ()).map_err(|e| device(describe(&e)))
    }
}

impl Meet for Nccl {
    fn all_reduce(&self, device: &CudaDevice, at: Place, x: View, n: usize) -> Result<(), CommError> {
        let rank = device.rank;
        self.meeting.wait(rank, at, || Ok(()))?;
        let rows = device.rows(x);
        debug_assert!(x.start == 0 && x.len() as i64 <= rows.row);
        let count = n * rows.row as usize;
        let summed = device.time(4 * count, || self.sum(rank, &|| at.to_string(), rows.at, count));
        summed.map_err(|e| CommError::Device { rank, site: at.to_string(), reason: e.to_string() })?
    }

    fn share(&self, device: &CudaDevice, at: Place) -> Result<(), CommError> {
        let rank = device.rank;
        self.meeting.wait(rank, at, || Ok(()))?;
        let site = || at.to_string();
        let comm = self.own(rank, &site)?;
        let failed = |reason: String| CommError::Device { rank, site: site(), reason };
        let (pairs, each) = device.choices().map_err(|e| failed(e.to_string()))?;
        let own = (pairs + (rank * each) as u64) as *const std::ffi::c_void;
        let stream = self.gpus[rank].stream().cu_stream().cast();
        // SAFETY: the buffer holds `each` bytes per rank on the communicator's GPU, this rank's at its own place.
        let done = unsafe {
            let (to, bytes) = (pairs as *mut std::ffi::c_void, sys::ncclDataType_t::ncclInt8);
            result::all_gather(own, to, each, bytes, lock(&comm).0, stream)
        };
        done.map(|_| ()).map_err(|e| failed(describe(&e)))
    }
}

impl Collective for Nccl {
    fn tp(&self) -> usize {
        self.gpus.len()
    }

    fn abort(&self, reason: &str) {
        self.meeting.abort(reason);
        let mut state = self.state();
        if state.aborted.is_none() {
            state.aborted = Some(reason.into());
            std::mem::take(&mut state.comms).into_iter().for_each(end);
        }
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let comms = std::mem::take(&mut self.state().comms);
        for (comm, gpu) in comms.into_iter().zip(&self.gpus) {
            if gpu.bind().is_ok() {
                // SAFETY: destroyed once, behind the last step.
                let _ = unsafe { result::comm_destroy(lock(&comm).0) }; // nobody is left to be told
            }
        }
    }
}
