//! A GPU as ranks use it: context, stream, compiled modules, memory. Virtual ranks share one; ranks of several GPUs have
//! one each.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{
    self, CUdevice_attribute, CUfunction, CUgraphInstantiate_flags, CUmodule, CUresult, CUstreamCaptureMode,
};
use cudarc::driver::{CudaContext, CudaGraph, CudaStream, DriverError, result};
use lockstep_kernels::Unit;
use lockstep_kernels::geometry::Launch;

use super::cubin::{CubinError, Cubins};
use super::format::Format;
use super::libraries::why;

/// What went wrong on a GPU, and where.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum GpuError {
    #[error("no NVIDIA driver: {}. Install the driver, or run with --device cpu", why("libcuda.so"))]
    NoDriver,
    #[error("the NVIDIA driver is too old: expected one for CUDA {} or later, found one for CUDA {}. Install a newer one, or \
             run with --device cpu", cuda(*expected), cuda(*found))]
    OldDriver { expected: i32, found: i32 },
    #[error("GPU {ordinal}: expected one of the {found} GPUs of this machine (0 to {})", found.saturating_sub(1))]
    NoSuchGpu { ordinal: usize, found: usize },
    #[error("{what}: {error}")]
    Driver { what: String, error: String },
    #[error("{kernel} (grid {grid:?}, block {block}, {shared} bytes shared): {error}")]
    Launch { kernel: String, grid: (u32, u32, u32), block: u32, shared: u32, error: String },
    #[error("{kernel}: expected parameters of {expected} bytes, found {found:?}")]
    Parameters { kernel: String, expected: String, found: Vec<usize> },
    #[error("GPU {ordinal}: {wanted} more bytes do not fit: {free} of {total} bytes are free")]
    Memory { ordinal: usize, wanted: usize, free: usize, total: usize },
    #[error("the GPU did not finish within {} s; the last operation given to it was {last}", waited.as_secs())]
    Stuck { last: String, waited: Duration },
    #[error(transparent)]
    Cubin(#[from] CubinError),
}

/// The oldest driver that has every call used here, by the CUDA version that it was made for.
const OLDEST: i32 = 12_080;

/// 12080 as 12.8.
fn cuda(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// A driver call that failed, with what it was for.
pub(crate) fn at(what: impl Into<String>) -> impl FnOnce(DriverError) -> GpuError {
    move |e| GpuError::Driver { what: what.into(), error: describe(e) }
}

fn describe(e: DriverError) -> String {
    let text = e.error_string().map(|s| s.to_string_lossy().into_owned());
    format!("{} ({:?})", text.unwrap_or_else(|_| "unknown CUDA error".into()), e.0)
}

/// How long the host waits for a stream. The longest legitimate step is a long prefill chunk.
const STUCK_AFTER: Duration = Duration::from_secs(120);

/// A kernel by unit, format and name.
type KernelId = (&'static str, Option<Format>, &'static str);

#[derive(Default)]
struct Loaded {
    modules: HashMap<(&'static str, Option<Format>), CUmodule>,
    functions: HashMap<KernelId, CUfunction>,
}

/// An opened GPU.
pub struct Gpu {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    cubins: Cubins,
    loaded: Mutex<Loaded>,
    /// Held while a launch is timed: virtual ranks share the stream, and none's launch may come between another's events.
    pub(super) timed: Mutex<()>,
    /// Which GPU of the machine.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// `sm_90a` and the like.
    pub arch: String,
}

// SAFETY: module and function handles belong to the context, which any thread may use once it is current; the maps that
// hold them are behind a lock.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

/// A value that a kernel takes: a scalar, a device address or a plain struct.
pub trait Arg {
    /// Where it lies.
    fn address(&self) -> *mut c_void;
    /// Its bytes.
    fn bytes(&self) -> usize;
}

macro_rules! args {
    ($($ty:ty),*) => {
        $(impl $crate::device::cuda::gpu::Arg for $ty {
            fn address(&self) -> *mut std::ffi::c_void {
                std::ptr::from_ref(self).cast_mut().cast()
            }
            fn bytes(&self) -> usize {
                size_of::<$ty>()
            }
        })*
    };
}
pub(super) use args;
args!(i32, u32, i64, u64, f32, f64);

/// GPUs of this machine.
///
/// # Errors
/// No driver, or one that does not answer.
pub fn count() -> Result<usize, GpuError> {
    // SAFETY: only asks whether the library can be loaded.
    if !unsafe { sys::is_culib_present() } {
        return Err(GpuError::NoDriver);
    }
    let mut version = 0;
    // SAFETY: writes one integer.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(at("asking for the driver's version"))?;
    if version < OLDEST {
        return Err(GpuError::OldDriver { expected: OLDEST, found: version });
    }
    let count = CudaContext::device_count().map_err(at("counting GPUs"))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

impl Gpu {
    /// Opens GPU `ordinal`; kernels come from `cubins`.
    ///
    /// # Errors
    /// No driver, no such GPU.
    pub fn open(ordinal: usize, cubins: Cubins) -> Result<Arc<Self>, GpuError> {
        let found = count()?;
        if ordinal >= found {
            return Err(GpuError::NoSuchGpu { ordinal, found });
        }
        let open = || format!("opening GPU {ordinal}");
        let context = CudaContext::new(ordinal).map_err(at(open()))?;
        // SAFETY: every buffer is used on one stream, or handed over behind a synchronisation; tracking would break
        // recording.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(at(open()))?;
        let (major, minor) = context.compute_capability().map_err(at(open()))?;
        let arch = arch(major, minor);
        let name = context.name().map_err(at(open()))?;
        Ok(Arc::new(Gpu {
            context,
            stream,
            cubins,
            loaded: Mutex::default(),
            timed: Mutex::default(),
            ordinal,
            name,
            arch,
        }))
    }

    /// Its context.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// The stream on which everything runs.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// A recording of what `start` gives to the stream.
    ///
    /// # Errors
    /// What `start` ended with, and a driver that refuses.
    pub fn record(&self, what: &str, start: impl FnOnce() -> Result<(), GpuError>) -> Result<CudaGraph, GpuError> {
        let doing = || format!("recording {what}");
        // Relaxed: other threads do what they do in the meantime.
        self.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).map_err(at(doing()))?;
        let given = start();
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = self.stream.end_capture(flags).map_err(at(doing()));
        given?;
        graph?.ok_or_else(|| GpuError::Driver { what: doing(), error: "the recording is empty".into() })
    }

    /// Where its kernels come from.
    pub fn cubins(&self) -> &Cubins {
        &self.cubins
    }

    /// Makes the GPU current on this thread.
    ///
    /// # Errors
    /// A driver that refuses.
    pub fn bind(&self) -> Result<(), GpuError> {
        self.context.bind_to_thread().map_err(at("making the GPU current"))
    }

    /// Multiprocessors.
    ///
    /// # Errors
    /// A driver that refuses.
    pub fn multiprocessors(&self) -> Result<usize, GpuError> {
        let n = self.context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        Ok(usize::try_from(n.map_err(at("counting multiprocessors"))?).unwrap_or(1))
    }

    /// Free and total bytes of memory.
    ///
    /// # Errors
    /// A driver that refuses.
    pub fn memory(&self) -> Result<(usize, usize), GpuError> {
        self.bind()?;
        self.context.mem_get_info().map_err(at("asking for free memory"))
    }

    /// Starts a kernel; returns before it has run.
    ///
    /// # Errors
    /// A kernel that does not compile or load, parameters that are not its own, or a launch that the driver refuses.
    pub fn launch(
        &self,
        unit: &'static str,
        format: Option<Format>,
        kernel: &'static str,
        launch: Launch,
        args: &[&dyn Arg],
    ) -> Result<(), GpuError> {
        let function = self.function((unit, format, kernel), args)?;
        let mut params: Vec<*mut c_void> = args.iter().map(|a| a.address()).collect();
        let Launch { grid, block, shared } = launch;
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid.0,
            gridDimY: grid.1,
            gridDimZ: grid.2,
            blockDimX: block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: self.stream.cu_stream(),
            attrs: &raw mut early,
            numAttrs: u32::from(Unit::named(unit).is_some_and(|unit| unit.early)),
        };
        // SAFETY: the function belongs to this context, and its parameters have the sizes of `args`, which live until the
        // call returns, as the attribute does. What they point to is the caller's.
        let done = unsafe { sys::cuLaunchKernelEx(&config, function, params.as_mut_ptr(), std::ptr::null_mut()) };
        done.result().map_err(|e| GpuError::Launch {
            kernel: full_name(kernel, format),
            grid,
            block,
            shared,
            error: describe(e),
        })
    }

    /// The kernel's handle; its parameters are compared with `args` when it is first used.
    fn function(&self, id: KernelId, args: &[&dyn Arg]) -> Result<CUfunction, GpuError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        self.bind()?;
        if let Some(function) = loaded.functions.get(&id) {
            return Ok(*function);
        }
        let (unit, format, kernel) = id;
        let name = full_name(kernel, format);
        let module = match loaded.modules.get(&(unit, format)) {
            Some(module) => *module,
            None => {
                let image = self.cubins.get(unit, format, &self.arch)?;
                // SAFETY: the image is a whole cubin, made by NVRTC or read from the cache and compared with its digest.
                let module = unsafe { result::module::load_data(image.as_ptr().cast()) }
                    .map_err(at(format!("loading the module of {name} for {}", self.arch)))?;
                loaded.modules.insert((unit, format), module);
                module
            }
        };
        let symbol = CString::new(kernel).unwrap_or_default();
        // SAFETY: the module is loaded in this context.
        let function = unsafe { result::module::get_function(module, symbol) }
            .map_err(at(format!("looking for kernel {name}")))?;
        let found: Vec<usize> = args.iter().map(|a| a.bytes()).collect();
        let expected = parameters(function);
        if expected != found {
            return Err(GpuError::Parameters { kernel: name, expected: format!("{expected:?}"), found });
        }
        self.allow_shared(function, &name)?;
        // Kernels that follow each other closely share a multiprocessor only where they agree on how its memory is cut.
        let carveout = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: the function belongs to this context; it is a hint in percent.
        unsafe { sys::cuFuncSetAttribute(function, carveout, 100) }
            .result()
            .map_err(at(format!("cutting shared memory for {name}")))?;
        loaded.functions.insert(id, function);
        Ok(function)
    }

    /// Lets a kernel have all the shared memory that a block can have beside its own, once and for all: ranks that share
    /// the GPU start it with more and with less.
    fn allow_shared(&self, function: CUfunction, name: &str) -> Result<(), GpuError> {
        let doing = || format!("giving {name} shared memory");
        let most = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let most = self.context.attribute(most).map_err(at(doing()))?;
        let (own, dynamic) = (
            sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
            sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
        );
        let mut bytes = 0;
        // SAFETY: the function belongs to this context; the first call writes one integer.
        unsafe {
            sys::cuFuncGetAttribute(&mut bytes, own, function).result().map_err(at(doing()))?;
            sys::cuFuncSetAttribute(function, dynamic, (most - bytes).max(0)).result().map_err(at(doing()))
        }
    }

    /// Waits until everything given to the stream has run. `last` names it, should it hang.
    ///
    /// # Errors
    /// What any kernel before this ended with, or a GPU that does not finish.
    pub fn synchronise(&self, last: &dyn Fn() -> String) -> Result<(), GpuError> {
        self.bind()?;
        // SAFETY: the stream lives as long as `self`.
        wait_for(|| unsafe { sys::cuStreamQuery(self.stream.cu_stream()) }, last)
    }
}

/// Asks `query` until it says that the work is done: at first without a pause, as steps are short.
pub(super) fn wait_for(query: impl Fn() -> CUresult, last: &dyn Fn() -> String) -> Result<(), GpuError> {
    let start = Instant::now();
    loop {
        match query() {
            CUresult::CUDA_SUCCESS => return Ok(()),
            CUresult::CUDA_ERROR_NOT_READY => {
                let waited = start.elapsed();
                if waited > STUCK_AFTER {
                    return Err(GpuError::Stuck { last: last(), waited });
                }
                if waited > Duration::from_millis(20) {
                    std::thread::sleep(Duration::from_micros(50));
                } else {
                    std::hint::spin_loop();
                }
            }
            e => return Err(GpuError::Driver { what: format!("running up to {}", last()), error: format!("{e:?}") }),
        }
    }
}

/// The architecture that kernels are compiled for: with its own instructions where it has any; code for 8.0 runs on every
/// GPU of that generation.
fn arch(major: i32, minor: i32) -> String {
    match major {
        8 => "sm_80".into(),
        9.. => format!("sm_{major}{minor}a"),
        _ => format!("sm_{major}{minor}"),
    }
}

fn full_name(kernel: &str, format: Option<Format>) -> String {
    format.map_or(kernel.to_string(), |format| format!("{kernel}<{format}>"))
}

/// Sizes of a kernel's parameters.
fn parameters(function: CUfunction) -> Vec<usize> {
    let (mut sizes, mut offset, mut size) = (Vec::new(), 0, 0);
    // SAFETY: writes two integers; an index behind the last parameter is an error that ends the loop.
    while unsafe { sys::cuFuncGetParamInfo(function, sizes.len(), &mut offset, &mut size) } == CUresult::CUDA_SUCCESS {
        sizes.push(size);
    }
    sizes
}
