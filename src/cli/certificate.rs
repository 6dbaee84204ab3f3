//! A certificate: that a model passed every stage, byte for byte this one, with this build, on these devices. Whoever
//! serves it need not run the checks again, as long as nothing of it has changed.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::UNIX_EPOCH;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};
use sha2::{Digest, Sha256};

use super::CliError;
use crate::checkpoint::Checkpoint;
#[cfg(feature = "cuda")]
use crate::device::cuda::gpu::Gpu;
use crate::engine::{Attention, Backend};
use crate::partial::Partial;
use crate::report::Progress;
use crate::report::verification::Verification;
use crate::verify::Subject;

/// Of what a certificate says.
const FORMAT: u32 = 1;
const CHUNK: usize = 1 << 20;

/// A file of the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ModelFile {
    path: PathBuf,
    bytes: u64,
    /// Nanoseconds since 1970 at which it was last written.
    modified: u128,
    /// SHA-256 of all bytes.
    sha256: String,
}

/// What ran it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Setting {
    version: String,
    /// SHA-256 of the program.
    program: String,
    device: String,
    tp: usize,
    recipe: String,
    attention: String,
    /// Name of each GPU, and the driver.
    gpus: Vec<String>,
    driver: Option<String>,
    /// Digests of compiled kernels, by module.
    kernels: BTreeMap<String, String>,
}

/// A certificate.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Certificate {
    format: u32,
    made: String,
    model: Vec<ModelFile>,
    setting: Setting,
    /// The stages with their verdicts, and what they covered.
    pub stages: Vec<Json>,
    /// What they covered.
    pub covered: Json,
    /// SHA-256 over all of the above.
    seal: String,
}

fn hex(digest: impl AsRef<[u8]>) -> String {
    digest.as_ref().iter().map(|b| format!("{b:02x}")).collect()
}

impl Setting {
    /// Of a run on a backend.
    ///
    /// # Errors
    /// A program that cannot be read, GPUs that do not answer.
    pub(super) fn of(backend: &dyn Backend, device: &str, tp: usize, attention: Attention) -> Result<Self, CliError> {
        let program = hash(Path::new("/proc/self/exe"), &|_| {})?;
        let setting = Setting {
            version: env!("CARGO_PKG_VERSION").into(),
            program,
            device: device.into(),
            tp,
            recipe: backend.recipe().name().into(),
            attention: attention.name().into(),
            gpus: Vec::new(),
            driver: None,
            kernels: BTreeMap::new(),
        };
        #[cfg(feature = "cuda")]
        if let Some(cuda) = backend.cuda() {
            let gpus = cuda.gpus(tp)?.into_iter().map(|ordinal| Gpu::open(ordinal, cuda.cubins.clone()));
            let gpus = gpus.collect::<Result<Vec<_>, _>>().map_err(crate::engine::EngineError::from)?;
            let mut kernels = BTreeMap::new();
            gpus.iter().for_each(|gpu| kernels.extend(cuda.cubins.cached(&gpu.arch)));
            let gpus = gpus.iter().map(|gpu| gpu.name.clone()).collect();
            let driver = Some(crate::doctor::software::driver().1.detail);
            return Ok(Setting { gpus, driver, kernels, ..setting });
        }
        Ok(setting)
    }
}

impl Certificate {
    /// Of a run that passed.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub(super) fn new(subject: &Subject, found: &Verification, progress: &dyn Progress) -> Result<Self, CliError> {
        let mut certificate = Certificate {
            format: FORMAT,
            made: chrono::Utc::now().format("%Y-%m-%dT%H:%M:%SZ").to_string(),
            model: hashed(&files(&subject.checkpoint)?, progress)?,
            setting: Setting::of(subject.engines.backend(), &found.run.device, subject.tp, subject.attention)?,
            stages: found.stages.iter().map(|stage| stage.brief()).collect(),
            covered: serde_json::to_value(&found.covered).unwrap_or_default(),
            seal: String::new(),
        };
        certificate.seal = certificate.sealed();
        Ok(certificate)
    }

    /// The hash over everything but itself.
    fn sealed(&self) -> String {
        let bare = Certificate { seal: String::new(), ..self.clone() };
        hex(Sha256::digest(serde_json::to_vec(&bare).unwrap_or_default()))
    }

    /// Writes it, whole or not at all.
    ///
    /// # Errors
    /// What the file system says.
    pub(super) fn write(&self, path: &Path) -> Result<(), CliError> {
        let mut name = path.as_os_str().to_owned();
        name.push(".partial");
        let (partial, mut file) = Partial::create(name.into(), |path| File::create(path))?;
        file.write_all(serde_json::to_string_pretty(self).unwrap_or_default().as_bytes())?;
        file.write_all(b"\n")?;
        file.sync_all()?;
        partial.publish(path)?;
        Ok(())
    }

    /// Reads one.
    ///
    /// # Errors
    /// A file that cannot be read, or that is none.
    pub(super) fn read(path: &Path) -> Result<Self, CliError> {
        let wrong = |e: String| CliError::Usage(format!("--certificate {}: {e}", path.display()));
        let text = crate::regular::read(path).map_err(|e| wrong(e.to_string()))?;
        serde_json::from_slice(&text).map_err(|e| wrong(format!("expected a certificate: {e}")))
    }

    /// What differs from the model and the setting of today: the first thing, or nothing. All bytes are read again if
    /// `rehash` says so, else sizes and times count.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub(super) fn differs(
        &self,
        checkpoint: &Checkpoint,
        setting: &Setting,
        rehash: bool,
        progress: &dyn Progress,
    ) -> Result<Option<String>, CliError> {
        if self.format != FORMAT {
            return Ok(Some(format!("format: expected {FORMAT}, found {}", self.format)));
        }
        if self.seal != self.sealed() {
            return Ok(Some("seal: the certificate was changed after it was made".into()));
        }
        if let Some(field) = self.setting_differs(setting) {
            return Ok(Some(field));
        }
        let now = files(checkpoint)?;
        let stated: Vec<&PathBuf> = self.model.iter().map(|f| &f.path).collect();
        let found: Vec<&PathBuf> = now.iter().map(|f| &f.path).collect();
        if stated != found {
            return Ok(Some(format!("model: the certificate is of {stated:?}, not of {found:?}")));
        }
        for (then, now) in self.model.iter().zip(&now) {
            let path = then.path.display();
            if then.bytes != now.bytes {
                return Ok(Some(format!("{path}: size: expected {} bytes, found {}", then.bytes, now.bytes)));
            }
            if then.modified != now.modified && !rehash {
                return Ok(Some(format!("{path}: it was written to since (--rehash compares its bytes)")));
            }
        }
        if rehash {
            let hashed = hashed(&now, progress)?;
            let other = self.model.iter().zip(&hashed).find(|(then, now)| then.sha256 != now.sha256);
            let differs = |(then, now): (&ModelFile, &ModelFile)| {
                format!("{}: sha256: expected {}, found {}", then.path.display(), then.sha256, now.sha256)
            };
            return Ok(other.map(differs));
        }
        Ok(None)
    }

    /// What it says, for those who ask a service that goes by it.
    pub(super) fn verification(&self) -> Json {
        let Certificate { made, stages, covered, .. } = self;
        json!({ "verified": true, "source": "certificate", "time": made, "stages": stages, "covered": covered })
    }

    fn setting_differs(&self, now: &Setting) -> Option<String> {
        let then = &self.setting;
        let text = |v: &Option<String>| v.clone().unwrap_or_else(|| "none".into());
        let fields = [
            ("version", then.version.clone(), now.version.clone()),
            ("program", then.program.clone(), now.program.clone()),
            ("device", then.device.clone(), now.device.clone()),
            ("tp", then.tp.to_string(), now.tp.to_string()),
            ("recipe", then.recipe.clone(), now.recipe.clone()),
            ("attention", then.attention.clone(), now.attention.clone()),
            ("gpus", then.gpus.join(", "), now.gpus.join(", ")),
            ("driver", text(&then.driver), text(&now.driver)),
        ];
        let other = fields.into_iter().find(|(_, then, now)| then != now);
        let kernel = || {
            // The cache may hold more by now: other models' types.
            let mut all = then.kernels.iter();
            let (name, _) = all.find(|(name, digest)| now.kernels.get(*name) != Some(*digest))?;
            Some(format!("kernels: {name} was compiled otherwise, or is not in the cache"))
        };
        other.map(|(field, then, now)| format!("{field}: expected {then}, found {now}")).or_else(kernel)
    }
}

/// The model's files, without their hashes. The built-in model has none: it is part of the program.
fn files(checkpoint: &Checkpoint) -> Result<Vec<ModelFile>, CliError> {
    let mut paths = checkpoint.files();
    if checkpoint.source().gguf().is_none()
        && let Some(folder) = paths.first().and_then(|p| p.parent()).map(Path::to_path_buf)
    {
        // Configuration, tokenizer and template stand beside the tensors.
        let beside = std::fs::read_dir(folder)?.filter_map(|entry| Some(entry.ok()?.path()));
        let said =
            |p: &PathBuf| p.extension().is_some_and(|e| ["json", "jinja", "txt", "model"].iter().any(|k| e == *k));
        paths.extend(beside.filter(said));
    }
    paths.sort();
    let one = |path: PathBuf| -> Result<ModelFile, CliError> {
        let path = path.canonicalize()?;
        let meta = path.metadata()?;
        let modified = meta.modified()?.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
        Ok(ModelFile { path, bytes: meta.len(), modified, sha256: String::new() })
    };
    paths.into_iter().map(one).collect()
}

fn hashed(files: &[ModelFile], progress: &dyn Progress) -> Result<Vec<ModelFile>, CliError> {
    let all: u64 = files.iter().map(|f| f.bytes).sum();
    let done = AtomicU64::new(0);
    let told = |n: u64| progress.bytes("bytes hashed", done.fetch_add(n, Ordering::Relaxed) + n, all);
    let one = |file: &ModelFile| Ok(ModelFile { sha256: hash(&file.path, &told)?, ..file.clone() });
    files.par_iter().map(one).collect()
}

/// SHA-256 of a file.
fn hash(path: &Path, told: &(dyn Fn(u64) + Sync)) -> Result<String, CliError> {
    let wrong = |e| CliError::Refused(format!("{}: {e}", path.display()));
    let mut file = File::open(path).map_err(wrong)?;
    let (mut hash, mut chunk) = (Sha256::new(), vec![0; CHUNK]);
    loop {
        let n = file.read(&mut chunk).map_err(wrong)?;
        if n == 0 {
            return Ok(hex(hash.finalize()));
        }
        hash.update(&chunk[..n]);
        told(n as u64);
    }
}
