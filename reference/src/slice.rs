//! The oracle's own rules for tensor parallelism: which part of a parameter a rank must hold, and the file bytes of
//! that part. A check of the engine's ranks compares the bytes read back from them with [`cut`], so nothing here may
//! come from the engine's plan.
//!
//! Rules: query heads, key and value heads by head; both halves of a gated unit by output row, each part alone; the
//! projections that follow them by input column; experts likewise, or whole; the vocabulary by row, padded; everything
//! else on every rank.

use std::ops::Range;

use crate::config::RefConfig;
use crate::dequant::block_format;
use crate::error::RefError;
use crate::names::RefParam;
use crate::source::RawTensor;

/// How routed experts are shared out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertSplit {
    /// Each expert is cut across all ranks.
    Tensor,
    /// Each rank holds whole experts.
    Expert,
}

/// One rank of a tensor-parallel group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Split {
    /// Number of ranks.
    pub tp: usize,
    /// This rank, from 0.
    pub rank: usize,
    /// How routed experts are shared out.
    pub experts: ExpertSplit,
}

/// The part of a parameter that a rank holds. Ranges count rows (outputs), columns (inputs), heads or experts of the
/// whole parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placement {
    /// All of it.
    Replicated,
    /// Output rows, of every expert where the parameter is a stack.
    Rows(Range<usize>),
    /// Input columns, of every row and every expert.
    Cols(Range<usize>),
    /// Whole heads.
    Heads(Range<usize>),
    /// Whole experts.
    Experts(Range<usize>),
    /// Vocabulary rows: `rows` exist in the file, `padded` is what the rank answers for, at and beyond the end of the
    /// vocabulary.
    Vocab {
        /// Rows that the file has.
        rows: Range<usize>,
        /// Rows including padding.
        padded: Range<usize>,
    },
}

/// The file bytes of a rank's part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    /// What the part is, in logical rows and columns.
    pub placement: Placement,
    /// For column ranges: the blocks of each row that intersect the range and are held whole. Otherwise `None`.
    pub covering_blocks: Option<Range<usize>>,
    /// The bytes, in file order.
    pub bytes: Vec<u8>,
}

/// The part of `param` that `split.rank` must hold.
///
/// # Errors
/// [`RefError::Split`] where the rank does not exist or the axis does not divide evenly.
pub fn placement(c: &RefConfig, param: RefParam, split: Split) -> Result<Placement, RefError> {
    use RefParam::*;
    let even = |what: &str, count: usize, unit: usize| {
        if split.tp == 0 || split.rank >= split.tp || !count.is_multiple_of(split.tp) {
            let reason = format!("{count} {what} do not divide evenly, or there is no such rank");
            return Err(RefError::Split { what: format!("{param:?}"), tp: split.tp, rank: split.rank, reason });
        }
        let share = count / split.tp * unit;
        Ok(split.rank * share..(split.rank + 1) * share)
    };
    let shared = c.shared_experts * c.moe_ffn;
    Ok(match param {
        Embed | Head => {
            let total = c.vocab.next_multiple_of(64 * split.tp.max(1));
            let padded = even("padded vocabulary rows", total, 1)?;
            Placement::Vocab { rows: padded.start.min(c.vocab)..padded.end.min(c.vocab), padded }
        }
        QB => Placement::Rows(even("heads", c.heads, c.nope + c.rope)?),
        KB | VB => Placement::Heads(even("heads", c.heads, 1)?),
        O => Placement::Cols(even("heads", c.heads, c.value)?),
        Gate | Up => Placement::Rows(even("feed-forward rows", c.ffn, 1)?),
        Down => Placement::Cols(even("feed-forward columns", c.ffn, 1)?),
        GateShared | UpShared => Placement::Rows(even("shared expert rows", shared, 1)?),
        DownShared => Placement::Cols(even("shared expert columns", shared, 1)?),
        GateExps | UpExps | DownExps if split.experts == ExpertSplit::Expert => {
            Placement::Experts(even("experts", c.experts, 1)?)
        }
        GateExps | UpExps => Placement::Rows(even("expert rows", c.moe_ffn, 1)?),
        DownExps => Placement::Cols(even("expert columns", c.moe_ffn, 1)?),
        FinalNorm | AttnNorm | QA | QANorm | KvA | KvANorm | IndexQB | IndexK | IndexKNormW | IndexKNormB
        | IndexProj | FfnNorm | Router | RouterBias | EhProj | ENorm | HNorm | MtpHeadNorm => Placement::Replicated,
    })
}

/// Cuts a rank's part out of the file's tensor for `param` (see [`file_tensor`](crate::weights::file_tensor)). Blocks
/// are never changed: where a column range begins or ends inside a block, the whole block is in the cut.
///
/// # Errors
/// As for [`placement`]; a type without a known layout; a tensor whose bytes do not fit its shape or whose axes do not
/// hold the part (such as whole experts of a file that has one tensor per expert).
pub fn cut(c: &RefConfig, param: RefParam, tensor: &RawTensor<'_>, split: Split) -> Result<Cut, RefError> {
    let name = format!("{param:?}");
    let placement = placement(c, param, split)?;
    let format =
        block_format(tensor.type_id).ok_or(RefError::Format { name: name.clone(), type_id: tensor.type_id })?;
    let axis = |i: usize| tensor.ne.get(i).copied().unwrap_or(1);
    let (cols, rows) = (axis(0), axis(1));
    let stack = tensor.ne.iter().skip(2).try_fold(1usize, |n, &axis| n.checked_mul(axis));
    let misfit =
        || RefError::tensor(name.clone(), format!("a tensor that holds {placement:?}"), format!("ne {:?}", tensor.ne));
    let (stack, row_bytes) = (stack.ok_or_else(misfit)?, format.row_bytes(cols).ok_or_else(misfit)?);
    let total = stack.checked_mul(rows).and_then(|n| n.checked_mul(row_bytes));
    if total != Some(tensor.bytes.len()) {
        return Err(misfit());
    }
    let mut covering_blocks = None;
    let (keep_stack, keep_rows, keep_bytes) = match &placement {
        Placement::Replicated => (0..stack, 0..rows, 0..row_bytes),
        Placement::Rows(range) | Placement::Vocab { rows: range, .. } => (0..stack, range.clone(), 0..row_bytes),
        Placement::Heads(range) | Placement::Experts(range) => (range.clone(), 0..rows, 0..row_bytes),
        Placement::Cols(range) => {
            let blocks = range.start / format.values..range.end.div_ceil(format.values);
            covering_blocks = Some(blocks.clone());
            (0..stack, 0..rows, blocks.start * format.bytes..blocks.end * format.bytes)
        }
    };
    if keep_stack.end > stack || keep_rows.end > rows || keep_bytes.end > row_bytes {
        return Err(misfit());
    }
    let mut bytes = Vec::with_capacity(keep_stack.len() * keep_rows.len() * keep_bytes.len());
    for matrix in keep_stack {
        for row in keep_rows.clone() {
            let start = (matrix * rows + row) * row_bytes;
            bytes.extend_from_slice(&tensor.bytes[start + keep_bytes.start..start + keep_bytes.end]);
        }
    }
    Ok(Cut { placement, covering_blocks, bytes })
}

/// Cuts a rank's value heads (`VB`) out of a whole `kv_b` tensor, \[heads * (nope + value), kv_rank\] with the key rows of
/// each head first: rows keep their bytes. Key rows are stored transposed and so have no bytes of their own; see
/// [`Weights::heads`](crate::weights::Weights::heads).
///
/// # Errors
/// As for [`placement`]; a type without a known layout; a tensor whose bytes do not fit the configuration.
pub fn cut_values(c: &RefConfig, tensor: &RawTensor<'_>, split: Split) -> Result<Cut, RefError> {
    let name = || "whole kv_b".to_string();
    let placement = placement(c, RefParam::VB, split)?;
    let format =
        block_format(tensor.type_id).ok_or_else(|| RefError::Format { name: name(), type_id: tensor.type_id })?;
    let misfit = || {
        let expected = format!("{} heads of {} + {} rows of {}", c.heads, c.nope, c.value, c.kv_rank);
        RefError::tensor(name(), expected, format!("ne {:?} in {} bytes", tensor.ne, tensor.bytes.len()))
    };
    let row = format.row_bytes(c.kv_rank).ok_or_else(misfit)?;
    let head = c.nope + c.value;
    let Placement::Heads(heads) = &placement else { return Err(misfit()) };
    let total = head.checked_mul(c.heads).and_then(|rows| rows.checked_mul(row));
    if total != Some(tensor.bytes.len()) || tensor.ne.first() != Some(&c.kv_rank) {
        return Err(misfit());
    }
    let values = heads.clone().flat_map(|h| &tensor.bytes[(h * head + c.nope) * row..(h + 1) * head * row]);
    let bytes = values.copied().collect();
    Ok(Cut { placement, covering_blocks: None, bytes })
}

#[cfg(test)]
#[path = "slice_tests.rs"]
mod tests;
