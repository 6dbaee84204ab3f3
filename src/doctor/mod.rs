//! The host under the engine: driver, libraries, GPUs, their memory and the links between them. A machine that copies or
//! adds wrongly makes every later verdict worthless, so this is asked first, and exactly: data of a known pattern, sums of
//! integers. One file per family of checks.

#[cfg(feature = "cuda")]
mod copies;
#[cfg(feature = "cuda")]
pub mod gpus;
pub mod host;
#[cfg(feature = "cuda")]
mod memory;
#[cfg(feature = "cuda")]
mod nccl;
#[cfg(feature = "cuda")]
mod peers;
#[cfg(feature = "cuda")]
mod probe;
#[cfg(feature = "cuda")]
pub mod software;
#[cfg(feature = "cuda")]
mod virtual_ranks;
#[cfg(feature = "cuda")]
mod watch;
