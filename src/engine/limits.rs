//! Whether a batch fits into what a rank can hold.

use super::EngineError;
use crate::device::{Batch, Limits, Token};
use crate::model::Config;

/// Refuses what does not fit, before the first meeting: every rank comes to the same conclusion.
pub(super) fn check(limits: &Limits, c: &Config, batch: &Batch) -> Result<(), EngineError> {
    let bad = |what, most: usize, found: usize| Err(EngineError::Limit { what, most, found });
    if batch.tokens.is_empty() || batch.tokens.len() > limits.tokens {
        return bad("tokens in a step (at least one)", limits.tokens, batch.tokens.len());
    }
    if batch.tables.len() > limits.sequences {
        return bad("sequences in a step", limits.sequences, batch.tables.len());
    }
    if batch.logits.len() > limits.logits {
        return bad("rows of logits", limits.logits, batch.logits.len());
    }
    if !batch.ahead.is_empty() && (batch.ahead.len() != batch.tokens.len() || !batch.decodes()) {
        return bad(
            "choices to make ahead (one per token of a batch that decodes, or none)",
            batch.tokens.len(),
            batch.ahead.len(),
        );
    }
    if let Some(token) = batch.tokens.iter().find(|t| t.id as usize >= c.vocab) {
        return bad("token id", c.vocab - 1, token.id as usize);
    }
    if let Some(token) = batch.tokens.iter().find(|t| t.sequence as usize >= batch.tables.len()) {
        return bad("sequence of a token", batch.tables.len(), token.sequence as usize);
    }
    let short = |t: &&Token| (t.position as usize) >= batch.tables[t.sequence as usize].len() * limits.page;
    if let Some(token) = batch.tokens.iter().find(short) {
        let pages = batch.tables[token.sequence as usize].len();
        return bad("position of a token in the pages of its sequence", pages * limits.page, token.position as usize);
    }
    if let Some(page) = batch.tables.iter().flatten().find(|p| **p as usize >= limits.pages) {
        return bad("page of a sequence", limits.pages - 1, *page as usize);
    }
    if let Some(row) = batch.logits.iter().find(|r| **r as usize >= batch.tokens.len()) {
        return bad("row of logits", batch.tokens.len() - 1, *row as usize);
    }
    Ok(())
}
