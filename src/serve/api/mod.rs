//! What clients send and get: JSON to what the driver is asked for, and what it says to JSON.

pub mod ask;
pub mod chat;
pub mod completions;
pub mod error;
pub mod fields;
pub mod frame;
pub mod literals;
pub mod reply;

use std::sync::Arc;

use serde_json::Value as Json;

use self::ask::over_context;
use self::error::ApiError;
use super::turn::Markers;
use crate::tokenize::Tokenizer;

/// What is served, and within which limits.
#[derive(Debug)]
pub struct Model {
    /// The names by which it is asked for; the first is told in replies.
    pub names: Vec<String>,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Its markers.
    pub markers: Markers,
    /// Ids that end a turn.
    pub stop: Vec<u32>,
    /// Ids.
    pub vocab: usize,
    /// Most tokens of a sequence, prompt and answer.
    pub context: usize,
    /// Most sequences that run at once.
    pub sequences: usize,
    /// Bytes of the longest token.
    pub longest_token: usize,
    /// Seconds since 1970 at which it was loaded.
    pub created: i64,
    /// Build and recipe.
    pub fingerprint: String,
    /// Whether reasoning is told under a second name, too.
    pub also_reasoning: bool,
    /// Whether all checks that were run have passed.
    pub verified: bool,
    /// What the checks said.
    pub verification: Json,
}

impl Model {
    /// Refuses a text that cannot fit however it is cut into tokens, before it is cut.
    ///
    /// # Errors
    /// Such a text.
    pub fn holds(&self, text: &str, param: &str) -> Result<(), ApiError> {
        let least = text.len() / self.longest_token.max(1);
        match least > self.context {
            true => Err(over_context(param, self.context, &format!("at least {least} tokens of the prompt"))),
            false => Ok(()),
        }
    }
}
