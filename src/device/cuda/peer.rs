//! One GPU's view of another's memory: what the link between them is, and copies over it.

use cudarc::driver::sys::{self, CUdevice_P2PAttribute, CUresult};
use cudarc::driver::{DriverError, result};

use super::gpu::{Gpu, GpuError, at};
use super::memory::Memory;

/// What the driver says about the link from one GPU to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// True if the one can read and write the other's memory itself; copies go through the host otherwise.
    pub access: bool,
    /// The driver's rank of the link: 0 is the fastest kind of this machine.
    pub rank: i32,
    /// True if atomics work over the link, as they do over NVLink.
    pub atomics: bool,
}

/// The link from `from` to `to`.
///
/// # Errors
/// A driver that refuses.
pub fn link(from: &Gpu, to: &Gpu) -> Result<Link, GpuError> {
    let (a, b) = (from.context().cu_device(), to.context().cu_device());
    let what = || at(format!("asking about the link from GPU {} to GPU {}", from.ordinal, to.ordinal));
    let mut access = 0;
    // SAFETY: writes an integer.
    unsafe { sys::cuDeviceCanAccessPeer(&mut access, a, b) }.result().map_err(what())?;
    let attribute = |attribute| {
        let mut value = 0;
        // SAFETY: writes an integer.
        unsafe { sys::cuDeviceGetP2PAttribute(&mut value, attribute, a, b) }.result().map_err(what())?;
        Ok::<_, GpuError>(value)
    };
    let rank = attribute(CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK)?;
    let atomics = attribute(CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)? != 0;
    Ok(Link { access: access != 0, rank, atomics })
}

/// Lets `from` read and write `to`'s memory; a link that is open already stays so.
///
/// # Errors
/// A driver that refuses.
pub fn open(from: &Gpu, to: &Gpu) -> Result<(), GpuError> {
    from.bind()?;
    // SAFETY: both contexts live.
    match unsafe { sys::cuCtxEnablePeerAccess(to.context().cu_ctx(), 0) } {
        CUresult::CUDA_SUCCESS | CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
        e => Err(at(format!("opening the link from GPU {} to GPU {}", from.ordinal, to.ordinal))(DriverError(e))),
    }
}

/// Copies `bytes` bytes on `from`'s stream; returns before they have arrived. Both stretches start at byte `offset`.
///
/// # Errors
/// A driver that refuses.
pub fn copy(
    (from, source): (&Gpu, &Memory),
    (to, target): (&Gpu, &Memory),
    offset: usize,
    bytes: usize,
) -> Result<(), GpuError> {
    assert!(offset + bytes <= source.bytes().min(target.bytes()), "copy behind the end");
    from.bind()?;
    let (a, b) = (source.address() + offset as u64, target.address() + offset as u64);
    let (here, there) = (from.context().cu_ctx(), to.context().cu_ctx());
    // SAFETY: within both allocations, each of its own context.
    unsafe { result::memcpy_peer_async(there, b, here, a, bytes, from.stream().cu_stream()) }
        .map_err(at(format!("copying from GPU {} to GPU {}", from.ordinal, to.ordinal)))
}
