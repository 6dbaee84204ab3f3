//! What the families share: known patterns and sums on a GPU, their twins on the host, and counting what differs.

use std::sync::Arc;

use lockstep_kernels::geometry::each;
use rayon::prelude::*;
use serde_json::Value as Json;

use crate::device::cuda::gpu::{Arg, Gpu, GpuError};
use crate::device::cuda::memory::Memory;

/// What a family saw.
pub(super) struct Outcome {
    /// The first thing that was wrong.
    pub wrong: Option<String>,
    /// What was done and measured.
    pub evidence: String,
    /// The same for machines.
    pub data: Json,
}

/// A word of the pattern, as the kernel makes it.
fn pattern_at(i: u64, seed: u32) -> u32 {
    let h = i as u32 ^ ((i >> 32) as u32).wrapping_mul(0x9e37_79b9) ^ seed.wrapping_mul(0x85eb_ca6b);
    let h = (h ^ (h >> 16)).wrapping_mul(0x85eb_ca6b);
    let h = (h ^ (h >> 13)).wrapping_mul(0xc2b2_ae35);
    h ^ (h >> 16)
}

/// Fills the host's words with the pattern.
pub(super) fn host_fill(words: &mut [u32], seed: u32) {
    words.par_iter_mut().enumerate().for_each(|(i, w)| *w = pattern_at(i as u64, seed));
}

/// How many of the host's words differ from the pattern, and the first of them.
pub(super) fn host_check(words: &[u32], seed: u32) -> Option<Differ> {
    let differ = |(i, w): (usize, &u32)| (*w != pattern_at(i as u64, seed)).then_some(i as u64);
    let wrong = words.par_iter().enumerate().filter_map(differ);
    let (count, first) = wrong
        .fold(|| (0, u64::MAX), |a, i| (a.0 + 1, a.1.min(i)))
        .reduce(|| (0, u64::MAX), |a, b| (a.0 + b.0, a.1.min(b.1)));
    (count > 0).then_some(Differ { count, first })
}

/// Fills `words` words at `address` with the pattern.
pub(super) fn fill(gpu: &Gpu, address: u64, words: usize, seed: u32) -> Result<(), GpuError> {
    gpu.launch("doctor", None, "pattern_fill", each(words), &[&address, &(words as u64), &seed])
}

/// Fills `count` values at `address` with what a rank contributes.
pub(super) fn fill_integers(gpu: &Gpu, address: u64, count: usize, rank: usize) -> Result<(), GpuError> {
    gpu.launch("doctor", None, "integers_fill", each(count), &[&address, &(count as u64), &(rank as i32)])
}

/// Words or values that are not what they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Differ {
    pub count: u64,
    pub first: u64,
}

impl std::fmt::Display for Differ {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} differ, the first at {}", self.count, self.first)
    }
}

/// Where kernels count what differs.
pub(super) struct Tally {
    gpu: Arc<Gpu>,
    memory: Memory,
}

impl Tally {
    /// A count of zero.
    ///
    /// # Errors
    /// A GPU without any memory left.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, GpuError> {
        Ok(Tally { gpu: gpu.clone(), memory: Memory::new(gpu, 16)? })
    }

    /// Compares `words` words at `address` with the pattern, behind everything on the stream.
    pub fn pattern(&self, what: &str, address: u64, words: usize, seed: u32) -> Result<Option<Differ>, GpuError> {
        self.count(what, |wrong, first| {
            let args: [&dyn Arg; 5] = [&address, &(words as u64), &seed, &wrong, &first];
            self.gpu.launch("doctor", None, "pattern_check", each(words), &args)
        })
    }

    /// Compares `count` values at `address` with `scale` times the sum of `ranks` ranks.
    pub fn integers(
        &self,
        what: &str,
        address: u64,
        count: usize,
        (ranks, scale): (usize, usize),
    ) -> Result<Option<Differ>, GpuError> {
        let (n, ranks, scale) = (count as u64, ranks as i32, scale as i32);
        self.count(what, |wrong, first| {
            let args: [&dyn Arg; 6] = [&address, &n, &ranks, &scale, &wrong, &first];
            self.gpu.launch("doctor", None, "integers_check", each(count), &args)
        })
    }

    fn count(
        &self,
        what: &str,
        launch: impl FnOnce(u64, u64) -> Result<(), GpuError>,
    ) -> Result<Option<Differ>, GpuError> {
        self.memory.upload(0, &[0u64, u64::MAX])?;
        let at = self.memory.address();
        launch(at, at + 8)?;
        let mut out = [0u64; 2];
        self.memory.download(0, &mut out, &|| what.to_string())?;
        Ok((out[0] != 0).then_some(Differ { count: out[0], first: out[1] }))
    }
}

/// Runs `one` for each of `n` ranks on a thread of its own.
pub(super) fn ranks<T: Send>(
    n: usize,
    site: &str,
    one: &(dyn Fn(usize) -> Result<T, GpuError> + Sync),
) -> Vec<Result<T, GpuError>> {
    let panicked = || GpuError::Driver { what: site.into(), error: "a rank panicked".into() };
    std::thread::scope(|scope| {
        let started: Vec<_> = (0..n).map(|rank| scope.spawn(move || one(rank))).collect();
        started.into_iter().map(|t| t.join().unwrap_or_else(|_| Err(panicked()))).collect()
    })
}

/// Sizes as people write them.
pub(super) fn size(bytes: usize) -> String {
    crate::report::table::bytes(bytes as u64)
}

/// Decimal gigabytes per second.
pub(super) fn gb(bytes_per_second: f64) -> String {
    format!("{:.1} GB/s", bytes_per_second / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_words_and_seeds_differ() {
        let mut words = vec![0; 4096];
        host_fill(&mut words, 7);
        assert_eq!(host_check(&words, 7), None);
        assert!(words.windows(2).all(|w| w[0] != w[1]));
        assert!(host_check(&words, 8).is_some_and(|d| d.count == 4096 && d.first == 0));
        words[100] ^= 1;
        words[3000] ^= 1 << 31;
        assert_eq!(host_check(&words, 7), Some(Differ { count: 2, first: 100 }));
        // Copies that are late by a word, or that come from the upper half, are seen.
        host_fill(&mut words, 7);
        assert!(host_check(&words[1..], 7).is_some_and(|d| d.first == 0));
        assert_ne!(pattern_at(1 << 32, 7), pattern_at(0, 7));
    }
}
