//! The driver, NVRTC, NCCL and the cache of compiled kernels: there or not, and how to get what is missing.

use std::path::Path;

use cudarc::driver::{CudaContext, sys};
use serde_json::json;

use crate::device::cuda::cubin::{Cubins, nvrtc_version};
use crate::device::cuda::gpu::{self, GpuError};
use crate::device::cuda::libraries::why;
use crate::device::cuda::nccl;
use crate::report::{Check, Verdict};

/// Driver and GPUs: how many there are, and the finding.
pub fn driver() -> (usize, Check) {
    const NAME: &str = "driver";
    match gpu::count() {
        Err(e @ GpuError::NoDriver) => (0, Check::new(NAME, Verdict::NotApplicable, e.to_string())),
        Err(e @ GpuError::OldDriver { .. }) => (0, Check::new(NAME, Verdict::Unmeasured, e.to_string())),
        Err(e) => {
            // A driver without any GPU is no fault; one that cannot say is.
            let none = CudaContext::device_count().is_err_and(|e| e.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE);
            let verdict = if none { Verdict::NotApplicable } else { Verdict::Host };
            (0, Check::new(NAME, verdict, e.to_string()))
        }
        Ok(0) => (0, Check::new(NAME, Verdict::NotApplicable, "the driver finds no GPU")),
        Ok(found) => {
            let mut cuda = 0;
            // SAFETY: the library is there; writes an integer.
            let _ = unsafe { sys::cuDriverGetVersion(&mut cuda) }; // 0 if refused
            let text = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
            let version = kernel_module(&text);
            let cuda = format!("{}.{}", cuda / 1000, cuda % 1000 / 10);
            let detail = format!("NVIDIA {}, CUDA {cuda}, {found} GPUs", version.unwrap_or("of unknown version"));
            (
                found,
                Check::new(NAME, Verdict::Match, detail)
                    .with(json!({ "driver": version, "cuda": cuda, "gpus": found })),
            )
        }
    }
}

/// The version in the first line of /proc/driver/nvidia/version.
fn kernel_module(text: &str) -> Option<&str> {
    let is_version =
        |w: &&str| w.contains('.') && w.split('.').all(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
    text.lines().next()?.split_whitespace().find(is_version)
}

/// NVRTC, NCCL and the cache.
pub fn libraries(cubins: &Cubins) -> Vec<Check> {
    let missing = |name: &str, library: &str, advice: &str| {
        Check::new(name, Verdict::NotApplicable, format!("{}: {advice}", why(library)))
    };
    let nvrtc = match nvrtc_version() {
        Some((major, minor)) => {
            let version = format!("{major}.{minor}");
            Check::new("NVRTC", Verdict::Match, version.clone()).with(json!({ "version": version }))
        }
        None => missing(
            "NVRTC",
            "libnvrtc.so",
            "install CUDA's NVRTC (its wheel, nvidia-cuda-nvrtc, will do, with its folder on \
             LD_LIBRARY_PATH), or copy a cache that `lockstep kernels build` filled",
        ),
    };
    let nccl = match nccl::version() {
        Some(code) => {
            let version = nccl_version(code);
            Check::new("NCCL", Verdict::Match, version.clone()).with(json!({ "version": version }))
        }
        None => missing(
            "NCCL",
            "libnccl.so",
            "install NCCL (its wheel, nvidia-nccl-cu13, will do), and link libnccl.so.2 to that \
             name in a folder on LD_LIBRARY_PATH; one GPU needs none",
        ),
    };
    vec![nvrtc, nccl, cache(&cubins.cache)]
}

/// NCCL counts 2.28.3 as 22803; before 2.9 as 2803.
fn nccl_version(code: i32) -> String {
    let big = if code < 10_000 { 1000 } else { 10_000 };
    format!("{}.{}.{}", code / big, code % big / 100, code % 100)
}

/// Can compiled kernels be kept? Nothing is made for the question: the first folder upwards that is there is asked.
fn cache(path: &Path) -> Check {
    const NAME: &str = "kernel cache";
    let there = path.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/"));
    let data = json!({ "path": path.display().to_string() });
    match rustix::fs::access(there, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK) {
        Ok(()) if there.is_dir() => {
            Check::new(NAME, Verdict::Match, format!("{} can be written", path.display())).with(data)
        }
        other => {
            let why = other.err().map_or("is no folder".into(), |e| e.to_string());
            let detail = format!(
                "{} cannot be written ({}: {why}): set XDG_CACHE_HOME to a folder that can",
                path.display(),
                there.display()
            );
            Check::new(NAME, Verdict::Drift, detail).with(data)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        let text =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12.2\n";
        assert_eq!(kernel_module(text), Some("580.65.06"));
        assert_eq!(kernel_module(""), None);
        assert_eq!((nccl_version(22_803), nccl_version(2708)), ("2.28.3".into(), "2.7.8".into()));
    }

    #[test]
    fn a_cache_below_a_file_is_a_warning() {
        let dir = std::env::temp_dir();
        assert_eq!(cache(&dir.join("not-there/cubins")).verdict, Verdict::Match);
        let file = dir.join(format!("lockstep-doctor-{}", std::process::id()));
        std::fs::write(&file, b"x").unwrap();
        let found = cache(&file.join("cubins"));
        std::fs::remove_file(&file).unwrap();
        assert_eq!(found.verdict, Verdict::Drift);
        assert!(found.detail.contains("XDG_CACHE_HOME"));
    }
}
