//! What can go wrong when the oracle reads a model. Every variant names the place, what was expected and what was
//! found, because the reader of the message has a 400 GB file and no debugger. Written by hand: this crate depends on
//! `ndarray` and `half` only.

use std::fmt;

use crate::names::RefParam;

/// A model that the oracle cannot read, or a question that it cannot answer about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RefError {
    /// A metadata key is missing, or its value is of the wrong kind or out of range.
    Key {
        /// The key as it stands in the file.
        key: String,
        /// What would have been right.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A tensor is missing, or its shape or byte count does not fit the configuration.
    Tensor {
        /// The tensor's name in the file.
        name: String,
        /// What would have been right.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A tensor is stored in a block format that the oracle cannot decode.
    Format {
        /// The tensor's name in the file.
        name: String,
        /// Its ggml type id.
        type_id: u32,
    },
    /// A parameter was asked for in a form that it does not have (for example a norm as a matrix).
    Form {
        /// The parameter.
        param: RefParam,
        /// The form asked for.
        asked: &'static str,
    },
    /// A parameter cannot be cut for this tensor-parallel degree.
    Split {
        /// What was to be cut.
        what: String,
        /// The tensor-parallel degree.
        tp: usize,
        /// The rank.
        rank: usize,
        /// Why it cannot be cut.
        reason: String,
    },
    /// A choice that was forced on the model does not fit it.
    Choice {
        /// The point.
        point: String,
        /// What would have been right.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A token id outside the vocabulary.
    Token {
        /// The id.
        id: usize,
        /// The number of ids that exist.
        vocab: usize,
    },
}

impl RefError {
    pub(crate) fn key(key: impl Into<String>, expected: impl Into<String>, found: impl Into<String>) -> Self {
        RefError::Key { key: key.into(), expected: expected.into(), found: found.into() }
    }

    /// A tensor that is not as it should be.
    pub fn tensor(name: impl Into<String>, expected: impl Into<String>, found: impl Into<String>) -> Self {
        RefError::Tensor { name: name.into(), expected: expected.into(), found: found.into() }
    }
}

impl fmt::Display for RefError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RefError::Key { key, expected, found } => {
                write!(f, "metadata key `{key}`: expected {expected}, found {found}")
            }
            RefError::Tensor { name, expected, found } => {
                write!(f, "tensor `{name}`: expected {expected}, found {found}")
            }
            RefError::Format { name, type_id } => {
                write!(f, "tensor `{name}`: the reference cannot decode ggml type {type_id}")
            }
            RefError::Form { param, asked } => write!(f, "parameter {param:?} has no form `{asked}`"),
            RefError::Split { what, tp, rank, reason } => {
                write!(f, "{what} cannot be cut for rank {rank} of {tp}: {reason}")
            }
            RefError::Choice { point, expected, found } => {
                write!(f, "choice forced at `{point}`: expected {expected}, found {found}")
            }
            RefError::Token { id, vocab } => write!(f, "token id {id} is outside the vocabulary of {vocab}"),
        }
    }
}

impl std::error::Error for RefError {}
