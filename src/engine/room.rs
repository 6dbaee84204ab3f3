//! How much a rank can hold at once, and whether a batch fits.

use super::EngineError;
use super::batch::{Batch, Token};
use crate::model::Config;

/// How much a rank can hold at once.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Tokens of one step.
    pub tokens: usize,
    /// Sequences of one step.
    pub sequences: usize,
    /// Rows of logits of one step.
    pub logits: usize,
    /// Cache pages.
    pub pages: usize,
    /// Tokens per page.
    pub page: usize,
}

impl Room {
    /// Refuses what does not fit, before the first meeting: every rank comes to the same conclusion.
    pub(super) fn check(&self, config: &Config, batch: &Batch) -> Result<(), EngineError> {
        let bad = |what, most: usize, found: usize| Err(EngineError::Room { what, most, found });
        let (room, c) = (self, config);
        if batch.tokens.is_empty() || batch.tokens.len() > room.tokens {
            return bad("tokens in a step (at least one)", room.tokens, batch.tokens.len());
        }
        if batch.tables.len() > room.sequences {
            return bad("sequences in a step", room.sequences, batch.tables.len());
        }
        if batch.logits.len() > room.logits {
            return bad("rows of logits", room.logits, batch.logits.len());
        }
        if !batch.ahead.is_empty() && batch.ahead.len() != batch.tokens.len() {
            return bad("choices to make ahead (one per token, or none)", batch.tokens.len(), batch.ahead.len());
        }
        if let Some(token) = batch.tokens.iter().find(|t| t.id as usize >= c.vocab) {
            return bad("token id", c.vocab - 1, token.id as usize);
        }
        if let Some(token) = batch.tokens.iter().find(|t| t.sequence as usize >= batch.tables.len()) {
            return bad("sequence of a token", batch.tables.len(), token.sequence as usize);
        }
        let short = |t: &&Token| (t.position as usize) >= batch.tables[t.sequence as usize].len() * room.page;
        if let Some(token) = batch.tokens.iter().find(short) {
            let pages = batch.tables[token.sequence as usize].len();
            return bad("position of a token in the pages of its sequence", pages * room.page, token.position as usize);
        }
        if let Some(page) = batch.tables.iter().flatten().find(|p| **p as usize >= room.pages) {
            return bad("page of a sequence", room.pages - 1, *page as usize);
        }
        if let Some(row) = batch.logits.iter().find(|r| **r as usize >= batch.tokens.len()) {
            return bad("row of logits", batch.tokens.len() - 1, *row as usize);
        }
        Ok(())
    }
}
