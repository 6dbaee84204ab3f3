//! One step's work as the host describes it: tokens of several sequences, each with its position, and where their keys
//! lie in the paged cache.

use super::draw::Draw;

/// A token to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// Vocabulary id.
    pub id: u32,
    /// Position in its sequence, from 0; keys `0..=position` are visible.
    pub position: u32,
    /// Index into [`Batch::tables`].
    pub sequence: u32,
}

/// A step's inputs. Tokens of one sequence stand in order of position and follow those already cached.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Tokens, sequence by sequence.
    pub tokens: Vec<Token>,
    /// Block table of each sequence: its pages, in order of position.
    pub tables: Vec<Vec<u32>>,
    /// Rows of `tokens` whose logits are wanted, ascending.
    pub logits: Vec<u32>,
    /// How the device is to choose each row's next token itself, to be ready to run on with it; empty: it is not to.
    pub ahead: Vec<Draw>,
    /// Run the program as it is written, without fusing.
    pub expanded: bool,
}

impl Batch {
    /// True for a token per sequence, each with its logits, in order.
    pub fn decodes(&self) -> bool {
        self.logits.len() == self.tokens.len()
            && self.tokens.iter().enumerate().all(|(i, t)| t.sequence as usize == i)
            && self.logits.iter().enumerate().all(|(i, row)| *row as usize == i)
    }
}
