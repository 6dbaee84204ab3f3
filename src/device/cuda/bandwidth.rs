//! What a GPU's memory delivers when it does nothing else: the roof under which speeds are read, measured here rather than
//! taken from a data sheet.

use std::sync::Arc;
use std::time::Duration;

use lockstep_kernels::geometry::Launch;

use super::gpu::{Arg, Gpu, GpuError};
use super::memory::{Event, Memory};

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
    events: [Event; 2],
}

impl Stopwatch {
    /// A stopwatch for a GPU's stream.
    ///
    /// # Errors
    /// A driver that refuses.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, GpuError> {
        Ok(Stopwatch { gpu: gpu.clone(), events: [Event::timed(gpu)?, Event::timed(gpu)?] })
    }

    /// Time on the stream that `start`'s work takes; waits for its end. `what` names it, should it hang.
    ///
    /// # Errors
    /// What `start` or the stream ended with.
    pub fn time(&self, what: &str, start: impl FnOnce() -> Result<(), GpuError>) -> Result<Duration, GpuError> {
        self.gpu.bind()?;
        self.events[0].record()?;
        start()?;
        self.events[1].record()?;
        self.gpu.synchronise(&|| what.to_string())?;
        Ok(Duration::from_secs_f64(self.events[1].seconds_since(&self.events[0])?.max(0.0)))
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
    let sweep = |what: &str, kernel, args: &[&dyn Arg]| {
        let run = || watch.time(what, || gpu.launch("doctor", None, kernel, launch, args));
        Ok::<_, GpuError>(median(REPEATS, || Ok(run()?.as_secs_f64()))?.max(f64::MIN_POSITIVE))
    };
    let copy = sweep("a copy sweep", "copy_sweep", &[&x, &y, &quads])?;
    let read = sweep("a read sweep", "read_sweep", &[&x, &quads, &sink_at])?;
    Ok(Bandwidth { copy: 2.0 * bytes as f64 / copy, read: bytes as f64 / read })
}

/// Of so many runs, behind one that warms up.
pub(super) fn median(repeats: usize, mut run: impl FnMut() -> Result<f64, GpuError>) -> Result<f64, GpuError> {
    run()?;
    let mut seconds = (0..repeats).map(|_| run()).collect::<Result<Vec<_>, _>>()?;
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[repeats / 2])
}
