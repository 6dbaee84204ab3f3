//! The GGUF container: header, values, tensor table, split sets, and a writer.
//!
//! Nothing a file says is believed before it is checked against the file: every length, count, offset and type. What
//! opens here is whole; what does not is refused with the file, the place, what was expected and what was found.
//! The format is the public one of ggml (`gguf.h` at `0c1e57098`), versions 2 and 3.

mod error;
pub mod header;
pub mod split;
pub mod value;
pub mod write;

use std::collections::HashMap;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

pub use error::GgufError;
pub use header::Header;
pub use value::{Array, Value};

use crate::quant::TypeInfo;

/// The bytes of one file: mapped, or compiled into the binary.
type Bytes = Box<dyn Deref<Target = [u8]> + Send + Sync>;

/// One file of a set with its header.
struct Shard {
    path: PathBuf,
    bytes: Bytes,
    header: Header,
}

impl Shard {
    fn open(path: PathBuf) -> Result<Self, GgufError> {
        let io = |source| GgufError::Io { path: path.clone(), source };
        let file = std::fs::File::open(&path).map_err(io)?;
        if file.metadata().map_err(io)?.len() == 0 {
            return Self::parse(path, Box::new(&[][..])); // an empty file cannot be mapped; the parser names it
        }
        // SAFETY: the map is read-only and private to this value. If another process shortens the file while it is
        // mapped, reads fault; that is the price of every mapped model and is documented in the README.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Self::parse(path, Box::new(map))
    }

    fn parse(path: PathBuf, bytes: Bytes) -> Result<Self, GgufError> {
        let header = header::parse(&path, &bytes)?;
        Ok(Shard { path, bytes, header })
    }
}

/// A tensor of the model, wherever its bytes lie.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// The name in the file.
    pub name: String,
    /// Extent of each axis, fastest first (ggml's `ne`).
    pub ne: Vec<u64>,
    /// Its type.
    pub ty: &'static TypeInfo,
    /// Index of the file that holds it, in its set.
    pub shard: usize,
    /// Data offset in bytes from the start of that file.
    pub start: u64,
    /// Data size in bytes.
    pub bytes: u64,
    /// Where its entry stands in that file, for messages.
    pub entry_offset: u64,
}

/// An opened model: one file, or a split set with all its shards.
pub struct Gguf {
    shards: Vec<Shard>,
    tensors: Vec<Tensor>,
    by_name: HashMap<String, usize>,
}

impl Gguf {
    /// Opens a model from a single file, any shard of a split set, or a folder with exactly one set.
    ///
    /// # Errors
    /// Every defect of a file or of the set, see [`GgufError`].
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        Self::from_shards(split::locate(path)?.into_iter().map(Shard::open).collect::<Result<_, _>>()?)
    }

    /// Opens a model that is compiled into the binary; `name` stands in for a path in messages.
    ///
    /// # Errors
    /// As [`Gguf::open`].
    pub fn from_static(name: &str, bytes: &'static [u8]) -> Result<Self, GgufError> {
        Self::from_shards(vec![Shard::parse(name.into(), Box::new(bytes))?])
    }

    fn from_shards(shards: Vec<Shard>) -> Result<Self, GgufError> {
        split::check(&shards.iter().map(|s| (s.path.as_path(), &s.header)).collect::<Vec<_>>())?;
        let mut tensors: Vec<Tensor> = Vec::new();
        let mut by_name = HashMap::new();
        for (shard, file) in shards.iter().enumerate() {
            for t in &file.header.tensors {
                if let Some(previous) = by_name.insert(t.name.clone(), tensors.len()) {
                    return Err(GgufError::DuplicateTensor {
                        path: shards[tensors[previous].shard].path.clone(),
                        tensor: t.name.clone(),
                        other: file.path.clone(),
                        offset: t.entry_offset,
                    });
                }
                tensors.push(Tensor { shard, ..t.clone() });
            }
        }
        Ok(Gguf { shards, tensors, by_name })
    }

    /// The metadata value of `key`; metadata is that of the first shard.
    pub fn meta(&self, key: &str) -> Option<&Value> {
        self.metadata().find(|(k, _)| *k == key).map(|(_, v)| v)
    }

    /// All metadata in file order.
    pub fn metadata(&self) -> impl Iterator<Item = (&str, &Value)> {
        let first = self.shards.first().map(|s| s.header.metadata.as_slice()).unwrap_or_default();
        first.iter().map(|(k, v)| (k.as_str(), v))
    }

    /// All tensors, shard by shard in file order.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name).map(|i| &self.tensors[*i])
    }

    /// The raw bytes of a tensor of this model.
    pub fn data(&self, tensor: &Tensor) -> &[u8] {
        // The range was checked against the file when the header was read.
        &self.shards[tensor.shard].bytes[tensor.start as usize..(tensor.start + tensor.bytes) as usize]
    }

    /// The files of the set, in order, with their sizes in bytes.
    pub fn files(&self) -> impl Iterator<Item = (&Path, u64)> {
        self.shards.iter().map(|s| (s.path.as_path(), s.bytes.len() as u64))
    }

    /// The file that holds `tensor`.
    pub fn file_of(&self, tensor: &Tensor) -> &Path {
        &self.shards[tensor.shard].path
    }

    /// Container version of the first file.
    pub fn version(&self) -> u32 {
        self.shards.first().map_or(0, |s| s.header.version)
    }

    /// Things about the files that are odd but harmless.
    pub fn warnings(&self) -> impl Iterator<Item = &str> {
        self.shards.iter().flat_map(|s| s.header.warnings.iter().map(String::as_str))
    }
}
