//! The oracle's only contract with the outside: metadata and tensors of one model by name, as the file has them.
//! Whoever opens containers implements [`RawModel`]; nothing here interprets a value, so a mistake in the engine's
//! reading of names, types or sizes cannot reach the oracle through this door.

use std::borrow::Cow;

/// One metadata value. Integers of every width arrive as 64 bits; an f32 arrives widened to f64.
#[derive(Debug, Clone, PartialEq)]
pub enum Meta {
    /// An unsigned integer.
    U64(u64),
    /// A signed integer.
    I64(i64),
    /// A real number.
    F64(f64),
    /// A truth value.
    Bool(bool),
    /// A text.
    Str(String),
    /// A list, whose elements need not be of one kind.
    Array(Vec<Meta>),
}

impl Meta {
    /// The value as a count, if it is a non-negative integer.
    pub fn as_count(&self) -> Option<u64> {
        match self {
            Meta::U64(v) => Some(*v),
            Meta::I64(v) => u64::try_from(*v).ok(),
            _ => None,
        }
    }

    /// The value as a real number, if it is a number.
    pub fn as_real(&self) -> Option<f64> {
        match self {
            Meta::U64(v) => Some(*v as f64),
            Meta::I64(v) => Some(*v as f64),
            Meta::F64(v) => Some(*v),
            _ => None,
        }
    }

    /// The value as a truth value: a bool, or an integer, of which all but 0 are true.
    pub fn as_flag(&self) -> Option<bool> {
        match self {
            Meta::Bool(v) => Some(*v),
            Meta::U64(v) => Some(*v != 0),
            Meta::I64(v) => Some(*v != 0),
            _ => None,
        }
    }

    /// The value as text, if it is text.
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Meta::Str(v) => Some(v),
            _ => None,
        }
    }

    /// A short form for error messages: long lists are given by their length.
    pub fn describe(&self) -> String {
        match self {
            Meta::U64(v) => v.to_string(),
            Meta::I64(v) => v.to_string(),
            Meta::F64(v) => v.to_string(),
            Meta::Bool(v) => v.to_string(),
            Meta::Str(v) => format!("\"{v}\""),
            Meta::Array(v) => format!("a list of {}", v.len()),
        }
    }
}

/// Which naming and metadata convention a model follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// GGUF keys and tensor names.
    Gguf,
    /// Hugging Face: `config.json` flattened to dotted keys (`rope_parameters.rope_theta`), nulls absent, tensors under
    /// HF names.
    Hf,
}

/// One tensor as the file stores it.
#[derive(Debug, Clone)]
pub struct RawTensor<'a> {
    /// The ggml type id; for HF files BF16 = 30, F16 = 1, F32 = 0.
    pub type_id: u32,
    /// Number of values per axis in ggml order, fastest axis first (an HF shape reversed).
    pub ne: Vec<usize>,
    /// The stored bytes, rows one after another without padding.
    pub bytes: Cow<'a, [u8]>,
}

/// A model on disk, uninterpreted.
pub trait RawModel: Sync {
    /// The convention that keys and names follow.
    fn format(&self) -> Format;
    /// The metadata value under `key`, or `None` where the file has none (or a JSON null).
    fn meta(&self, key: &str) -> Option<Meta>;
    /// The tensor called `name`, or `None` where the file has none.
    fn tensor(&self, name: &str) -> Option<RawTensor<'_>>;
}
