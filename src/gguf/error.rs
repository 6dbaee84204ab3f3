//! Every way in which a GGUF file or a set of shards can be refused.

use std::path::PathBuf;

/// A refusal. Each variant says which file, where in it, what was expected and what was found.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the message of each variant is its documentation
pub enum GgufError {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{}: not a GGUF file: expected the magic \"GGUF\" at offset 0, found {found}", path.display())]
    Magic { path: PathBuf, found: String },
    #[error("{}: GGUF version at offset 4: expected 2 or 3, found {found}", path.display())]
    Version { path: PathBuf, found: String },
    #[error(
        "{}: truncated at offset {offset} while reading {what}: expected {expected} bytes, found {found}",
        path.display()
    )]
    Truncated { path: PathBuf, what: String, offset: u64, expected: u64, found: u64 },
    #[error("{}: offset {offset}, {what}: expected {expected}, found {found}", path.display())]
    Malformed { path: PathBuf, what: String, offset: u64, expected: String, found: String },
    #[error(
        "{}: tensor {tensor} (entry at offset {offset}): type id {id}: expected a type of the format, found {found}",
        path.display()
    )]
    Type { path: PathBuf, tensor: String, offset: u64, id: u32, found: String },
    #[error(
        "{}: tensor {tensor}: expected data at bytes {start}..{end}, found the end of the file at {found}: {} bytes are \
         missing. The file was cut; fetch it again",
        path.display(), end - found
    )]
    Cut { path: PathBuf, tensor: String, start: u64, end: u64, found: u64 },
    #[error(
        "{}: tensors {first} and {second} overlap: {second} expected at byte {expected} or later, found at {found}",
        path.display()
    )]
    Overlap { path: PathBuf, first: String, second: String, expected: u64, found: u64 },
    #[error(
        "{}: tensor {tensor} is named twice: expected one entry, found another {}", path.display(), at(other, *offset)
    )]
    DuplicateTensor { path: PathBuf, tensor: String, other: PathBuf, offset: u64 },
    #[error(
        "{}: a second GGUF header at offset {offset}: expected the end of the file there, found {count} shards joined \
         with cat. Keep the shards apart and name the first one (or merge them with llama-gguf-split --merge)",
        path.display()
    )]
    Concatenated { path: PathBuf, offset: u64, count: String },
    #[error("{}: {problem}", path.display())]
    Set { path: PathBuf, problem: String },
}

fn at(other: &std::path::Path, offset: u64) -> String {
    format!("in {} at offset {offset}", other.display())
}
