//! Memory of a GPU and pinned memory of the host, each freed by its owner; the arena that weights lie in; the ring through
//! which files reach the GPU.

use std::sync::Arc;

use cudarc::driver::{result, sys};
use rayon::prelude::*;

use super::gpu::{Gpu, GpuError, at, wait_for};

/// Bytes of a GPU.
pub struct Memory {
    gpu: Arc<Gpu>,
    address: u64,
    bytes: usize,
}

impl Memory {
    /// `bytes` bytes of zeros.
    ///
    /// # Errors
    /// More than the GPU has free.
    pub fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, GpuError> {
        gpu.bind()?;
        let (free, total) = gpu.memory()?;
        if bytes > free {
            return Err(GpuError::Memory { ordinal: gpu.ordinal, wanted: bytes, free, total });
        }
        let bytes = bytes.max(16);
        // SAFETY: the memory is filled before anyone reads it.
        let address = unsafe { result::malloc_sync(bytes) }.map_err(at(format!("allocating {bytes} bytes")))?;
        let memory = Memory { gpu: gpu.clone(), address, bytes };
        memory.wipe(0)?;
        Ok(memory)
    }

    /// Sets every byte to `byte`, on the stream.
    ///
    /// # Errors
    /// A driver that refuses.
    pub fn wipe(&self, byte: u8) -> Result<(), GpuError> {
        self.gpu.bind()?;
        // SAFETY: the whole allocation.
        unsafe { result::memset_d8_async(self.address, byte, self.bytes, self.gpu.stream().cu_stream()) }
            .map_err(at("clearing memory"))
    }

    /// The first byte's address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies `values` to the byte offset `offset`; returns when the source may change again.
    ///
    /// # Errors
    /// A driver that refuses.
    pub fn upload<T: Copy>(&self, offset: usize, values: &[T]) -> Result<(), GpuError> {
        assert!(offset + size_of_val(values) <= self.bytes, "upload behind the end");
        self.gpu.bind()?;
        // SAFETY: within the allocation. From pageable memory the driver has copied the source when the call returns.
        unsafe { result::memcpy_htod_async(self.address + offset as u64, values, self.gpu.stream().cu_stream()) }
            .map_err(at("copying to the GPU"))
    }

    /// Copies from the byte offset `offset` on, after everything before it on the stream.
    ///
    /// # Errors
    /// What the stream ended with.
    pub fn download<T: Copy>(&self, offset: usize, out: &mut [T], last: &dyn Fn() -> String) -> Result<(), GpuError> {
        assert!(offset + size_of_val(out) <= self.bytes, "download behind the end");
        self.gpu.bind()?;
        // SAFETY: within the allocation, and waited for below.
        unsafe { result::memcpy_dtoh_async(out, self.address + offset as u64, self.gpu.stream().cu_stream()) }
            .map_err(at(format!("copying from the GPU behind {}", last())))?;
        self.gpu.synchronise(last)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: allocated by `new` and freed once; the driver waits for work that uses it.
            let _ = unsafe { result::free_sync(self.address) }; // nobody is left to be told
        }
    }
}

/// Alignment of everything in an arena: the widest load, and whole sectors.
const ALIGN: usize = 256;
/// Room for the planes of any type beyond the bytes of its blocks: each starts at a multiple of 16 bytes, and no format
/// has more than eight fields.
pub const PLANE_ROOM: usize = 8 * 16;
/// Smallest stretch that an arena takes at once.
const CHUNK: usize = 64 << 20;

/// Memory that is handed out in order and freed as a whole.
pub struct Arena {
    gpu: Arc<Gpu>,
    chunk: Option<Arc<Memory>>,
    used: usize,
}

impl Arena {
    /// An empty arena.
    pub fn new(gpu: &Arc<Gpu>) -> Self {
        Arena { gpu: gpu.clone(), chunk: None, used: 0 }
    }

    /// `bytes` bytes: the memory that they lie in, and their address.
    ///
    /// # Errors
    /// More than the GPU has free.
    pub fn take(&mut self, bytes: usize) -> Result<(Arc<Memory>, u64), GpuError> {
        let bytes = bytes.next_multiple_of(ALIGN);
        if let Some(chunk) = self.chunk.as_ref().filter(|c| c.bytes() - self.used >= bytes) {
            let address = chunk.address() + self.used as u64;
            self.used += bytes;
            return Ok((chunk.clone(), address));
        }
        // A small rest is worth less than a chunk of the right size for a large tensor.
        let chunk = Arc::new(Memory::new(&self.gpu, bytes.max(CHUNK))?);
        let address = chunk.address();
        if bytes < CHUNK {
            self.used = bytes;
            self.chunk = Some(chunk.clone());
        }
        Ok((chunk, address))
    }
}

/// Bytes of one place of the ring.
pub const SLOT: usize = 32 << 20;
const SLOTS: usize = 3;
/// Host memory that a rank pins while it loads.
pub const PINNED: usize = SLOT * SLOTS;

/// Pinned memory of the host, which the GPU reads and writes by itself.
pub struct Pinned {
    address: *mut u8,
    bytes: usize,
    gpu: Arc<Gpu>,
}

impl Pinned {
    /// `bytes` bytes of zeros.
    ///
    /// # Errors
    /// More than the host can pin.
    pub fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, GpuError> {
        gpu.bind()?;
        // SAFETY: the memory is written below, before it is read.
        let address = unsafe { result::malloc_host(bytes, 0) }.map_err(at(format!("pinning {bytes} bytes")))?;
        let address: *mut u8 = address.cast();
        // SAFETY: the whole allocation.
        unsafe { address.write_bytes(0, bytes) };
        Ok(Pinned { address, bytes, gpu: gpu.clone() })
    }

    /// Its first `n` bytes; the GPU must be done with them.
    fn slice(&mut self, n: usize) -> &mut [u8] {
        assert!(n <= self.bytes, "behind the end of pinned memory");
        // SAFETY: within the allocation, initialised, and borrowed with its owner.
        unsafe { std::slice::from_raw_parts_mut(self.address, n) }
    }

    /// Starts a copy of `bytes` bytes from the GPU to the byte offset `offset`.
    ///
    /// # Errors
    /// A driver that refuses.
    pub fn receive(&mut self, offset: usize, from: u64, bytes: usize) -> Result<(), GpuError> {
        assert!(offset + bytes <= self.bytes, "behind the end of pinned memory");
        self.gpu.bind()?;
        // SAFETY: within both allocations; whoever reads waits for an event behind the copy.
        let done = unsafe {
            sys::cuMemcpyDtoHAsync_v2(self.address.add(offset).cast(), from, bytes, self.gpu.stream().cu_stream())
        };
        done.result().map_err(at("copying from the GPU"))
    }

    /// Its first `n` words; the GPU must be done with them.
    pub fn words(&mut self, n: usize) -> &mut [u32] {
        assert!(4 * n <= self.bytes, "words behind the end");
        // SAFETY: within the allocation, initialised, aligned to a page.
        unsafe { std::slice::from_raw_parts_mut(self.address.cast(), n) }
    }
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Pinned {}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: allocated by `new` and freed once.
            let _ = unsafe { result::free_host(self.address.cast()) }; // nobody is left to be told
        }
    }
}

/// A mark on a GPU's stream.
pub struct Event {
    gpu: Arc<Gpu>,
    event: sys::CUevent,
}

// SAFETY: events belong to the context, which any thread may use once it is current.
unsafe impl Send for Event {}

impl Event {
    /// A mark that counts as passed until it is set.
    ///
    /// # Errors
    /// A driver that refuses.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, GpuError> {
        Event::with(gpu, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// As [`Event::new`], with a time.
    pub(super) fn timed(gpu: &Arc<Gpu>) -> Result<Self, GpuError> {
        Event::with(gpu, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with(gpu: &Arc<Gpu>, flags: sys::CUevent_flags) -> Result<Self, GpuError> {
        gpu.bind()?;
        let event = result::event::create(flags).map_err(at("making an event"))?;
        Ok(Event { gpu: gpu.clone(), event })
    }

    /// Seconds from `first` to this mark, once the stream has passed it; both must be timed and set.
    pub(super) fn seconds_since(&self, first: &Event) -> Result<f64, GpuError> {
        self.gpu.bind()?;
        // SAFETY: both events were recorded on the stream of this context.
        let ms = unsafe {
            result::event::synchronize(self.event).and_then(|()| result::event::elapsed(first.event, self.event))
        };
        Ok(f64::from(ms.map_err(at("reading events"))?) / 1e3)
    }

    /// Sets the mark behind everything given to the stream so far.
    ///
    /// # Errors
    /// A driver that refuses.
    pub fn record(&self) -> Result<(), GpuError> {
        // SAFETY: event and stream are of this context.
        unsafe { result::event::record(self.event, self.gpu.stream().cu_stream()) }.map_err(at("recording an event"))
    }

    /// Waits until the mark is passed. `last` names what stands before it, should it hang.
    ///
    /// # Errors
    /// What anything before it ended with, or a GPU that does not come there.
    pub fn wait(&self, last: &dyn Fn() -> String) -> Result<(), GpuError> {
        self.gpu.bind()?;
        // SAFETY: the event lives as long as `self`.
        wait_for(|| unsafe { sys::cuEventQuery(self.event) }, last)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: made by `new` and destroyed once.
            let _ = unsafe { result::event::destroy(self.event) }; // nobody is left to be told
        }
    }
}

/// A ring of pinned places and their twins on the GPU. A place is filled again once the GPU is done with it.
pub struct Ring {
    gpu: Arc<Gpu>,
    places: Vec<(Pinned, Memory, Event)>,
    next: usize,
}

impl Ring {
    /// An empty ring.
    ///
    /// # Errors
    /// Too little memory here or there.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, GpuError> {
        let place = || Ok((Pinned::new(gpu, SLOT)?, Memory::new(gpu, SLOT)?, Event::new(gpu)?));
        Ok(Ring { gpu: gpu.clone(), places: (0..SLOTS).map(|_| place()).collect::<Result<_, GpuError>>()?, next: 0 })
    }

    /// Sends `bytes` bytes through the ring, `step` at a time: `fill(first, out)` writes the source's bytes from `first` on, `take(address,
    /// first, bytes)` starts what the GPU does with them.
    ///
    /// # Errors
    /// What the GPU says.
    pub fn send(
        &mut self,
        bytes: usize,
        step: usize,
        fill: &(dyn Fn(usize, &mut [u8]) + Sync),
        take: &mut dyn FnMut(u64, usize, usize) -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        /// Bytes that one thread copies at a time.
        const PIECE: usize = 2 << 20;
        for first in (0..bytes).step_by(step) {
            let n = step.min(bytes - first);
            let place = self.next % self.places.len();
            let (pinned, memory, event) = &mut self.places[place];
            event.wait(&|| "loading".into())?;
            let out = pinned.slice(n);
            out.par_chunks_mut(PIECE).enumerate().for_each(|(i, piece)| fill(first + i * PIECE, piece));
            let stream = self.gpu.stream().cu_stream();
            // SAFETY: both places are `SLOT` bytes; the host's is not written before the event.
            unsafe { result::memcpy_htod_async(memory.address(), out, stream) }.map_err(at("copying to the GPU"))?;
            take(memory.address(), first, n)?;
            event.record()?;
            self.next += 1;
        }
        Ok(())
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        for (.., event) in &self.places {
            let _ = event.wait(&|| "loading".into()); // the GPU may still read; what failed was told already
        }
    }
}
