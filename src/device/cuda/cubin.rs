//! Compiled kernels: made by NVRTC, kept under a name that is a hash of everything they were made from, so that a cached
//! file is never stale and two processes may write the same one.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char};
use std::io::Write;
use std::path::{Path, PathBuf};

use cudarc::nvrtc::sys;
use lockstep_kernels::{TYPES, Types, UNITS, Unit, Usage, embedded, options};
use sha2::{Digest, Sha256};

use super::format::Format;
use super::libraries::why;
use crate::partial::Partial;
use crate::quant::QuantType;

/// A kernel that could not be compiled, or a cache that could not be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CubinError {
    #[error(
        "no NVRTC: {}, and {module} for {arch} is not in the cache {}. Install CUDA's NVRTC (its wheel will do, with its \
         folder on LD_LIBRARY_PATH), or copy a cache that `lockstep kernels build` filled",
        why("libnvrtc.so"),
        cache.display()
    )]
    NoNvrtc { module: String, arch: String, cache: PathBuf },
    #[error("kernels: expected the file {path} in {}", dir.display())]
    Source { path: String, dir: PathBuf },
    #[error("{module} for {arch} does not compile: {log}")]
    Compile { module: String, arch: String, log: String },
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
}

/// Where kernels come from and where they are kept.
#[derive(Clone, Debug)]
pub struct Cubins {
    /// A folder with the layout of `kernels/cu`, read instead of the embedded sources.
    pub sources: Option<PathBuf>,
    /// The cache.
    pub cache: PathBuf,
}

impl Default for Cubins {
    /// Embedded sources; the user's cache folder, or a temporary one where there is none.
    fn default() -> Self {
        let home = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let cache = home("XDG_CACHE_HOME").or_else(|| home("HOME").map(|h| h.join(".cache")));
        let cache = cache.unwrap_or_else(std::env::temp_dir).join("lockstep").join("cubins");
        Cubins { sources: None, cache }
    }
}

/// A module that was compiled or found.
#[derive(Debug)]
pub struct Built {
    /// `matmul<Q4_K>` and the like.
    pub module: String,
    /// The architecture.
    pub arch: String,
    /// Its file in the cache.
    pub path: PathBuf,
    /// True if the cache had it.
    pub cached: bool,
    /// Bytes of the cubin.
    pub bytes: usize,
    /// Registers and local memory of its kernels, as ptxas reported them.
    pub usage: Vec<Usage>,
}

/// Every module: units, once per format where they read weights.
pub fn modules() -> impl Iterator<Item = (&'static Unit, Option<Format>)> {
    UNITS.iter().flat_map(|unit| {
        let wanted = |f: &Format| match unit.types {
            Types::None => false,
            Types::Planes => !f.tiled,
            Types::Tiles => f.tiled,
            Types::All => true,
        };
        let known = QuantType::all().filter(|t| TYPES.contains(&t.name()));
        let formats = known.flat_map(Format::all).filter(wanted).map(Some);
        let once = (unit.types == Types::None).then_some(None);
        formats.chain(once).map(move |format| (unit, format)).collect::<Vec<_>>()
    })
}

/// Version of the NVRTC that would be used, if there is one.
pub fn nvrtc_version() -> Option<(i32, i32)> {
    // SAFETY: asks whether the library can be loaded, then fills two integers.
    unsafe {
        if !sys::is_culib_present() {
            return None;
        }
        let (mut major, mut minor) = (0, 0);
        let done = sys::nvrtcVersion(&mut major, &mut minor);
        (done == sys::nvrtcResult::NVRTC_SUCCESS).then_some((major, minor))
    }
}

impl Cubins {
    /// The cubin of a module, from the cache or compiled now.
    ///
    /// # Errors
    /// No NVRTC, a source that does not compile, a cache that cannot be written.
    pub fn get(&self, unit: &'static str, ty: Option<Format>, arch: &str) -> Result<Vec<u8>, CubinError> {
        self.entry(unit, ty, arch).map(|(_, image)| image)
    }

    /// Makes sure that a module is in the cache.
    ///
    /// # Errors
    /// As [`Cubins::get`].
    pub fn build(&self, unit: &'static str, ty: Option<Format>, arch: &str) -> Result<Built, CubinError> {
        self.entry(unit, ty, arch).map(|(built, _)| built)
    }

    fn entry(&self, unit: &'static str, ty: Option<Format>, arch: &str) -> Result<(Built, Vec<u8>), CubinError> {
        let module = module(unit, ty);
        let (found, source) = self.source(unit)?;
        let mut options = options(arch, ty.map(Format::name).as_deref());
        let key = key(&source, &options);
        let version = nvrtc_version();
        // From 12.9 on NVRTC has a cache of its own, which gives a cubin without ptxas' report; older ones refuse the option.
        options.extend(version.filter(|v| *v >= (12, 9)).map(|_| "--no-cache".to_string()));
        let named = version.map(|(major, minor)| self.cache.join(format!("{key}-{major}.{minor}.cubin")));
        let built = |path: PathBuf, cached: bool, bytes: usize, log: &str| {
            let (arch, usage) = (arch.to_string(), Usage::parse(log));
            Built { module: module.clone(), arch, path, cached, bytes, usage }
        };
        // Without a compiler any compiler's cubin of this source will do.
        let kept = named.clone().map_or_else(|| self.all(&key), |path| vec![path]);
        if let Some((path, (image, log))) = kept.into_iter().find_map(|path| Some((path.clone(), read_whole(&path)?))) {
            return Ok((built(path, true, image.len(), &log), image));
        }
        let Some(path) = named else {
            return Err(CubinError::NoNvrtc { module, arch: arch.into(), cache: self.cache.clone() });
        };
        let failed = |log: String| CubinError::Compile { module: module.clone(), arch: arch.into(), log };
        let (image, log) = compile(&source, unit, &options).map_err(failed)?;
        let reported = Usage::parse(&log);
        if let Some(lost) = found.kernels.iter().find(|k| !reported.iter().any(|u| u.kernel == **k)) {
            return Err(failed(format!(
                "expected the kernel {lost}, which the manifest names; it is not in {unit}.cu"
            )));
        }
        std::fs::create_dir_all(&self.cache).map_err(|source| CubinError::Io { path: self.cache.clone(), source })?;
        write_whole(&path.with_extension("log"), format!("{}\n{log}", digest(&image, &log)).as_bytes())?;
        write_whole(&path, &image)?;
        Ok((built(path, false, image.len(), &log), image))
    }

    /// A module's unit and its source.
    fn source(&self, unit: &'static str) -> Result<(&'static Unit, String), CubinError> {
        let missing = |path: String| CubinError::Source { path, dir: self.sources.clone().unwrap_or_default() };
        let found = Unit::named(unit).ok_or_else(|| missing(format!("{unit}.cu")))?;
        let source = match &self.sources {
            None => found.source(&embedded),
            Some(dir) => found.source(&|path| std::fs::read_to_string(dir.join(path)).ok()),
        };
        Ok((found, source.map_err(missing)?))
    }

    /// Digests of the modules for an architecture that are in the cache, by name.
    pub fn cached(&self, arch: &str) -> BTreeMap<String, String> {
        let one = |(unit, ty): (&'static Unit, Option<Format>)| {
            let (_, source) = self.source(unit.name).ok()?;
            let key = key(&source, &options(arch, ty.map(Format::name).as_deref()));
            let (image, log) = self.all(&key).iter().find_map(|path| read_whole(path))?;
            Some((module(unit.name, ty), digest(&image, &log)))
        };
        modules().filter_map(one).collect()
    }

    /// The cubins of this key, by any compiler.
    fn all(&self, key: &str) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.cache).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
        let mut found: Vec<PathBuf> = entries
            .filter(|path| path.extension().is_some_and(|e| e == "cubin"))
            .filter(|path| path.file_stem().is_some_and(|stem| stem.to_string_lossy().starts_with(key)))
            .collect();
        found.sort();
        found
    }
}

/// `matmul<Q4_K>` and the like.
fn module(unit: &str, ty: Option<Format>) -> String {
    ty.map_or(unit.to_string(), |ty| format!("{unit}<{ty}>"))
}

/// What a cubin was made from, as a name.
fn key(source: &str, options: &[String]) -> String {
    let mut hash = Sha256::new();
    for part in std::iter::once(source).chain(options.iter().map(String::as_str)) {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

fn digest(image: &[u8], log: &str) -> String {
    Sha256::new().chain_update(image).chain_update(log).finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// A cubin of the cache and its compiler's log, whose first line is the digest of both. What is damaged is not there: the
/// driver takes an image without its length.
fn read_whole(path: &Path) -> Option<(Vec<u8>, String)> {
    let (image, text) = (std::fs::read(path).ok()?, std::fs::read_to_string(path.with_extension("log")).ok()?);
    let (first, log) = text.split_once('\n')?;
    (digest(&image, log) == first).then(|| (image, log.to_string()))
}

/// Writes beside the place and moves it there: a reader sees the whole file or none.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), CubinError> {
    // Processes of several containers may have the same number, so the time is in the name, and a name is taken once.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |t| t.as_nanos());
    let beside = path.with_extension(format!("{now}-{}-{:?}.part", std::process::id(), std::thread::current().id()));
    let write = || -> std::io::Result<()> {
        let (part, mut file) = Partial::create(beside, |p| std::fs::File::create_new(p))?;
        file.write_all(bytes)?;
        file.sync_all()?;
        part.publish(path)
    };
    write().map_err(|source| CubinError::Io { path: path.into(), source })
}

/// The cubin and NVRTC's log, or the log alone.
fn compile(source: &str, name: &str, options: &[String]) -> Result<(Vec<u8>, String), String> {
    let text = |s: &str| CString::new(s).map_err(|e| e.to_string());
    let (source, name) = (text(source)?, text(&format!("{name}.cu"))?);
    let options: Vec<CString> = options.iter().map(|o| text(o)).collect::<Result<_, _>>()?;
    let options: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
    let ok = |what: &str, r: sys::nvrtcResult| match r {
        sys::nvrtcResult::NVRTC_SUCCESS => Ok(()),
        e => Err(format!("{what}: {e:?}")),
    };
    // SAFETY: every pointer outlives the call that it is given to, and buffers have the sizes that NVRTC asked for.
    unsafe {
        let mut program = std::ptr::null_mut();
        let none = std::ptr::null();
        ok("creating", sys::nvrtcCreateProgram(&mut program, source.as_ptr(), name.as_ptr(), 0, none, none))?;
        let compiled = sys::nvrtcCompileProgram(program, options.len() as i32, options.as_ptr());
        let mut size = 0;
        let mut log = vec![0u8; 1];
        if sys::nvrtcGetProgramLogSize(program, &mut size) == sys::nvrtcResult::NVRTC_SUCCESS && size > 0 {
            log.resize(size, 0);
            let _ = sys::nvrtcGetProgramLog(program, log.as_mut_ptr().cast()); // an empty log then
        }
        let log = CStr::from_bytes_until_nul(&log).map(|l| l.to_string_lossy().into_owned()).unwrap_or_default();
        let image = ok("compiling", compiled).map_err(|e| format!("{e}\n{log}")).and_then(|()| {
            let mut size = 0;
            ok("asking for the cubin", sys::nvrtcGetCUBINSize(program, &mut size))?;
            let mut image = vec![0u8; size];
            ok("taking the cubin", sys::nvrtcGetCUBIN(program, image.as_mut_ptr().cast()))?;
            Ok(image)
        });
        let _ = sys::nvrtcDestroyProgram(&mut program); // nothing is left to do with it
        image.map(|image| (image, log))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "ptxas info    : Compiling entry function 'commit' for 'sm_90a'\n";

    #[test]
    fn what_is_damaged_is_not_in_the_cache() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.cubin");
        let image = b"a cubin".to_vec();
        write_whole(&path.with_extension("log"), format!("{}\n{LOG}", digest(&image, LOG)).as_bytes()).unwrap();
        assert!(read_whole(&path).is_none(), "a log without its cubin");
        write_whole(&path, &image).unwrap();
        assert_eq!(read_whole(&path), Some((image.clone(), LOG.to_string())));
        std::fs::write(&path, &image[..3]).unwrap();
        assert!(read_whole(&path).is_none(), "a cubin that was cut off");
        std::fs::write(&path, &image).unwrap();
        std::fs::write(path.with_extension("log"), format!("{}\n{}", digest(&image, LOG), &LOG[..9])).unwrap();
        assert!(read_whole(&path).is_none(), "a log that was cut off, which may say nothing of spills");
    }

    #[test]
    fn a_key_holds_source_and_options_and_where_they_part() {
        let options = |o: &[&str]| o.iter().map(|o| (*o).to_string()).collect::<Vec<_>>();
        assert_ne!(key("ab", &options(&["c"])), key("a", &options(&["bc"])));
        assert_ne!(key("a", &options(&["b", "c"])), key("a", &options(&["bc"])));
    }
}
