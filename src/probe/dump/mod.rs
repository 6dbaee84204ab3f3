//! Dumps: the activations of one prompt as a folder that other engines can write and read.
//!
//! `dump.json` says what was run and where each point's values lie (`docs/schemas/dump.json` is its form); `rank{r}.safetensors`
//! hold the values, one tensor per point under the point's full name, `[rows][shape]`, f32 or, for choices, i32. A dump
//! appears under its name whole or not at all. What is read is believed only as far as it was checked: names, ranks,
//! layouts and shapes against the points, and against the tensors.

mod read;
mod write;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::trace::Trace;
use crate::model::Point;

pub use read::read;
pub use write::write;

/// The form of `dump.json`, as JSON Schema.
pub const SCHEMA: &str = include_str!("../../../docs/schemas/dump.json");
/// `format` of every dump.
pub const FORMAT: &str = "lockstep-dump";
/// The version that is written and read here.
pub const VERSION: u32 = 1;
/// The description's file name.
const INDEX: &str = "dump.json";

/// What a dump says of the run beside the values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Meta {
    /// The model's name.
    pub model: String,
    /// Its digest, empty where unknown; see [`crate::checkpoint::Checkpoint::digest`].
    pub digest: String,
    /// How operations were computed: `strict`, `fast`, or another engine's word.
    pub recipe: String,
    /// What the ranks ran on, where known.
    pub device: Option<String>,
    /// eps of every RMSNorm, where known.
    pub rms_eps: Option<f32>,
    /// eps of the q_a and kv_a norms, on which engines disagree.
    pub latent_eps: Option<f32>,
    /// eps of the indexer's LayerNorm, on which engines disagree, too.
    pub index_eps: Option<f32>,
}

/// A dump that was read.
#[derive(Debug)]
pub struct Dump {
    /// The values.
    pub trace: Trace,
    /// What was said of the run.
    pub meta: Meta,
    /// What was left out and why, one line each.
    pub notes: Vec<String>,
}

/// Why a dump could not be written or read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum DumpError {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{}: expected a new folder, found something there already", path.display())]
    Exists { path: PathBuf },
    #[error("{}: {problem}", path.display())]
    Json { path: PathBuf, problem: String },
    #[error("{}: {field}: expected {expected}, found {found}", path.display())]
    Field { path: PathBuf, field: String, expected: String, found: String },
    #[error("{}: point {point}, {what}: expected {expected}, found {found}", path.display())]
    Point { path: PathBuf, point: String, what: &'static str, expected: String, found: String },
    #[error("{}: not safetensors: {problem}", path.display())]
    Safetensors { path: PathBuf, problem: String },
}

#[derive(Serialize, Deserialize)]
struct Index {
    format: String,
    version: u32,
    producer: Producer,
    model: Model,
    token_ids: Vec<u32>,
    positions: Vec<u32>,
    tp: usize,
    dtype: String,
    recipe: String,
    settings: Settings,
    points: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
struct Producer {
    name: String,
    version: String,
}

#[derive(Serialize, Deserialize)]
struct Model {
    name: String,
    #[serde(default)]
    digest: String,
}

#[derive(Serialize, Deserialize)]
struct Settings {
    attention: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rms_eps: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    latent_eps: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    index_eps: Option<f32>,
}

/// One rank's values of one point.
#[derive(Clone, Serialize, Deserialize)]
struct Entry {
    name: String,
    file: String,
    rank: usize,
    layout: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    axis: Option<usize>,
    shape: Vec<usize>,
    dtype: String,
}

/// Axes of one token's row, as [`crate::model::Place::shape`] has them.
fn axes(point: Point) -> usize {
    use Point::*;
    match point {
        QRaw | Q | QAbsorbed | Latent | IndexQ | Hidden => 2,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Checkpoint;
    use crate::model::Place;

    #[test]
    fn axes_are_those_of_the_points() {
        let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/models/nano52-Q2_K.gguf");
        let checkpoint = Checkpoint::open(Some(&golden)).unwrap();
        for point in Point::ALL {
            let place = Place::trunk(1, *point);
            assert_eq!(place.shape(checkpoint.config(), 2).len(), axes(*point), "{}", point.name());
        }
        assert_eq!(checkpoint.digest().len(), "sha256-sampled:".len() + 64);
    }
}
