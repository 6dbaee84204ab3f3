//! What the host gives this process: the bandwidth of a read-only sweep, so that decode, which mostly reads weights,
//! can be shown as a share of what is possible; and the memory that was held.

use std::hint::black_box;
use std::time::Instant;

use rayon::prelude::*;

/// Sweeps; the best counts, since only interference makes one slower.
const SWEEPS: usize = 7;
/// Never sweep less than this, whatever the caches say.
const LEAST_BYTES: u64 = 256 << 20;

/// A measured read bandwidth.
#[derive(Clone, Copy, Debug)]
pub struct Bandwidth {
    /// Bytes per second of the best sweep.
    pub bytes_per_second: f64,
    /// Bytes of the buffer.
    pub buffer: u64,
    /// Bytes of the largest cache that the system states, 0 if it states none.
    pub cache: u64,
    /// Threads that read at the same time.
    pub threads: usize,
}

impl Bandwidth {
    /// True if the buffer was too small to show memory and not the cache.
    pub fn is_cached(&self) -> bool {
        self.buffer < 2 * self.cache
    }
}

/// Reads a buffer twice as large as the largest cache, but at most a quarter of the memory that is free, with all
/// threads of the pool. `None` if there is no memory for it.
pub fn read_bandwidth() -> Option<Bandwidth> {
    let cache = largest_cache();
    let free = available_memory().unwrap_or(4 * LEAST_BYTES);
    let buffer = (2 * cache).max(LEAST_BYTES).min(free / 4);
    let words = usize::try_from(buffer / 8).ok().filter(|w| *w > 0)?;
    let mut data: Vec<u64> = Vec::new();
    data.try_reserve_exact(words).ok()?;
    data.resize(words, 1); // written, so that every page has memory of its own
    let threads = rayon::current_num_threads();
    let share = words.div_ceil(4 * threads);
    let mut best = 0.0f64;
    for _ in 0..SWEEPS {
        let start = Instant::now();
        let sum = data.par_chunks(share).map(|c| c.iter().fold(0u64, |a, b| a.wrapping_add(*b))).sum::<u64>();
        black_box(sum);
        best = best.max((8 * words) as f64 / start.elapsed().as_secs_f64().max(1e-9));
    }
    Some(Bandwidth { bytes_per_second: best, buffer: 8 * words as u64, cache, threads })
}

/// Anonymous memory of this process, in bytes: what it has allocated, without mapped files.
#[cfg(feature = "cuda")]
pub fn anonymous() -> Option<u64> {
    proc_kib("/proc/self/status", "RssAnon:")
}

/// The largest cache of the first processor, in bytes.
fn largest_cache() -> u64 {
    let size = |index: usize| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size");
        let text = std::fs::read_to_string(path).ok()?;
        text.trim().strip_suffix('K')?.parse::<u64>().ok()?.checked_mul(1024)
    };
    (0..8).filter_map(size).max().unwrap_or(0)
}

fn available_memory() -> Option<u64> {
    proc_kib("/proc/meminfo", "MemAvailable:")
}

/// The most memory that this process has ever held resident, in bytes; `None` where the system does not say.
pub fn peak_resident() -> Option<u64> {
    proc_kib("/proc/self/status", "VmHWM:")
}

fn proc_kib(path: &str, name: &str) -> Option<u64> {
    kib(&std::fs::read_to_string(path).ok()?, name)
}

/// A line `name  123 kB` of a file of /proc, in bytes.
pub fn kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}
