//! What a launch costs that does nothing, between two events and in a recording: the floor under every kernel's time.

use std::sync::Arc;

use lockstep_kernels::geometry::Launch;

use super::bandwidth::{Stopwatch, median};
use super::gpu::{Gpu, GpuError, at};
use super::profile::Profile;

/// Seconds of an empty kernel's launch.
#[derive(Clone, Copy, Debug)]
pub struct EmptyLaunch {
    /// Between two events.
    pub timed: f64,
    /// In a recording, from one launch to the next.
    pub recorded: f64,
}

/// Launches of a round. Recordings of `FEW` and of `MANY + FEW` are compared, so that what a replay costs once drops out.
const FEW: usize = 32;
const MANY: usize = 512;
const REPEATS: usize = 9;

/// Medians of nine.
///
/// # Errors
/// What the GPU says.
pub fn measure(gpu: &Arc<Gpu>) -> Result<EmptyLaunch, GpuError> {
    let one = Launch { grid: (1, 1, 1), block: 32, shared: 0 };
    let pause = |nanoseconds: u64| gpu.launch("doctor", None, "pause", one, &[&nanoseconds]);
    pause(0)?; // compiles
    let profile = Profile::default();
    let timed = || -> Result<f64, GpuError> {
        // The launches are all given before the first runs, as in a profile of a step.
        pause(1_000_000)?;
        for _ in 0..FEW {
            profile.time(gpu, "empty", 0, || pause(0)).and_then(|done| done)?;
        }
        Ok(profile.take()?.values().map(|cost| cost.seconds).sum::<f64>() / FEW as f64)
    };
    let timed = median(REPEATS, timed)?;

    let watch = Stopwatch::new(gpu)?;
    let replayed = |launches: usize| -> Result<f64, GpuError> {
        let graph = gpu.record("empty launches", || (0..launches).try_for_each(|_| pause(0)))?;
        let run = || watch.time("empty launches", || graph.launch().map_err(at("replaying empty launches")));
        median(REPEATS, || run().map(|time| time.as_secs_f64()))
    };
    let recorded = (replayed(FEW + MANY)? - replayed(FEW)?).max(0.0) / MANY as f64;
    Ok(EmptyLaunch { timed, recorded })
}
