//! The tokenizer's statement, with another chat template if one was typed.

use std::path::Path;

use crate::checkpoint::Checkpoint;
use crate::cli::CliError;
use crate::tokenize::TokenizerSpec;

/// What the model states, with the template of `path` in place of its own.
pub(super) fn spec(checkpoint: &Checkpoint, path: Option<&Path>) -> Result<TokenizerSpec, CliError> {
    let mut spec = checkpoint.tokenizer_spec()?;
    if let Some(path) = path {
        let wrong = |e| CliError::Usage(format!("--chat-template {}: {e}", path.display()));
        spec.chat_template = Some(std::fs::read_to_string(path).map_err(wrong)?);
    }
    Ok(spec)
}
