//! What a GPU's memory delivers when it does nothing else: the roof under which speeds are read, measured here rather than
//! taken from a data sheet.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{result, sys};
use lockstep_kernels::geometry::Launch;

use super::gpu::{Gpu, GpuError, at};
use super::memory::Memory;

/// Bytes per second of a GPU's memory.
#[derive(Clone, Copy, Debug)]
pub struct Bandwidth {
    /// Bytes read and bytes written by a copy within the GPU.
    pub copy: f64,
    /// Bytes read.
    pub read: f64,
}

/// Two events on a GPU's stream, and the time between them.
pub struct Stopwatch {
    gpu: Arc<Gpu>,
    events: [sys::CUevent; 2],
}

// SAFETY: events belong to the context, which any thread may use once it is current.
unsafe impl Send for Stopwatch {}

impl Stopwatch {
    /// A stopwatch for a GPU's stream.
    ///
    /// # Errors
    /// A driver that refuses.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, GpuError> {
        gpu.bind()?;
        let event = || result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).map_err(at("making an event"));
        Ok(Stopwatch { gpu: gpu.clone(), events: [event()?, event()?] })
    }

    /// Time on the stream that `start`'s work takes; waits for its end. `what` names it, should it hang.
    ///
    /// # Errors
    /// What `start` or the stream ended with.
    pub fn time(&self, what: &str, start: impl FnOnce() -> Result<(), GpuError>) -> Result<Duration, GpuError> {
        self.gpu.bind()?;
        let record = |event| {
            // SAFETY: event and stream are of this context.
            unsafe { result::event::record(event, self.gpu.stream().cu_stream()) }.map_err(at("recording an event"))
        };
        record(self.events[0])?;
        start()?;
        record(self.events[1])?;
        self.gpu.synchronise(&|| what.to_string())?;
        // SAFETY: both events were recorded on the stream of this context, which has finished.
        let ms = unsafe { result::event::elapsed(self.events[0], self.events[1]) }.map_err(at("reading events"))?;
        Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }
}

impl Drop for Stopwatch {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            for event in self.events {
                // SAFETY: made by `new` and destroyed once.
                let _ = unsafe { result::event::destroy(event) }; // nobody is left to be told
            }
        }
    }
}

/// Bytes swept: far more than any cache holds.
const SWEEP: usize = 2 << 30;
/// The least that still measures memory instead of caches.
const LEAST: usize = 512 << 20;
/// Threads of a block of the sweeps, and blocks that fill a multiprocessor.
const BLOCK: u32 = 512;
const BLOCKS: usize = 4;
const REPEATS: usize = 5;

/// Sweeps over 2 GiB (less where less is free), each once to warm up; the median of five.
///
/// # Errors
/// Too little free memory to see past the caches; what the GPU says.
pub fn measure(gpu: &Arc<Gpu>) -> Result<Bandwidth, GpuError> {
    let (free, total) = gpu.memory()?;
    let bytes = SWEEP.min(free / 5 * 2) / 4096 * 4096;
    if bytes < LEAST {
        return Err(GpuError::Memory { ordinal: gpu.ordinal, wanted: 2 * LEAST, free, total });
    }
    let (from, to) = (Memory::new(gpu, bytes)?, Memory::new(gpu, bytes)?);
    let sink = Memory::new(gpu, 4)?;
    let blocks = u32::try_from(BLOCKS * gpu.multiprocessors()?).unwrap_or(u32::MAX);
    let launch = Launch { grid: (blocks, 1, 1), block: BLOCK, shared: 0 };
    let (quads, x, y, sink_at) = ((bytes / 16) as u64, from.address(), to.address(), sink.address());
    let watch = Stopwatch::new(gpu)?;
    let copy =
        median(|| watch.time("a copy sweep", || gpu.launch("doctor", None, "copy_sweep", launch, &[&x, &y, &quads])))?;
    let read = median(|| {
        watch.time("a read sweep", || gpu.launch("doctor", None, "read_sweep", launch, &[&x, &quads, &sink_at]))
    })?;
    Ok(Bandwidth { copy: 2.0 * bytes as f64 / copy, read: bytes as f64 / read })
}

/// Seconds.
fn median(mut run: impl FnMut() -> Result<Duration, GpuError>) -> Result<f64, GpuError> {
    run()?;
    let mut times = (0..REPEATS).map(|_| run()).collect::<Result<Vec<_>, _>>()?;
    times.sort();
    Ok(times[REPEATS / 2].as_secs_f64().max(f64::MIN_POSITIVE))
}
