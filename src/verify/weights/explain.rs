//! What wrong bytes are: another rank's part, another part of the fused group, the whole tensor, the right rows in the
//! wrong order, nothing at all. The name is only given when the bytes are exactly that.

use std::collections::{BTreeSet, HashMap};

use lockstep_reference::RefError;

use super::expected::{Expected, Oracle};
use crate::model::{Config, Param};
use crate::shard::Group;

/// Rows shorter than this repeat by chance, so their places say nothing.
const LEAST_ROW_BYTES: usize = 16;

/// Names the bytes that stand where `expected` should: a kind and the evidence.
pub(super) fn explain(
    oracle: &Oracle<'_>,
    config: &Config,
    param: Param,
    (tp, rank): (usize, usize),
    expected: &Expected,
    found: &[u8],
) -> Result<(&'static str, String), RefError> {
    let place = format!("{} ({})", param, expected.part());
    if found.iter().all(|b| *b == 0) && !found.is_empty() {
        return Ok(("UNFILLED", format!("all {} bytes are zero where {place} belongs", found.len())));
    }
    for other in (0..tp).filter(|r| *r != rank) {
        let theirs = oracle.expected(param, tp, other)?;
        if theirs.bytes == found {
            let what = format!("rank {rank} holds rank {other}'s part of {param}: {}", theirs.part());
            return Ok(("SHARD_PLACEMENT", format!("{what}, expected {}", expected.part())));
        }
    }
    if let Some(group) = group_of(config, param) {
        let parts = group.parts(config, param.layer.unwrap_or_default());
        for other in parts.into_iter().filter(|p| *p != param) {
            for theirs in std::iter::once(rank).chain((0..tp).filter(|r| *r != rank)) {
                if oracle.expected(other, tp, theirs)?.bytes == found {
                    let whose = if theirs == rank { String::new() } else { format!(" of rank {theirs}") };
                    return Ok((
                        "SHARD_ORDER",
                        format!("in the fused {} {other}{whose} stands where {place} belongs", group.name()),
                    ));
                }
            }
        }
    }
    let file: Vec<u8> = oracle.tensors(param)?.iter().flat_map(|(_, t)| t.bytes.to_vec()).collect();
    if tp > 1 && file == found {
        let sizes = format!("{} bytes where {} are expected", found.len(), expected.bytes.len());
        return Ok(("FULL_TENSOR", format!("rank {rank} holds the whole tensor, {sizes} ({})", expected.part())));
    }
    if found.len() != expected.bytes.len() {
        let sizes = format!("expected {} bytes, found {}", expected.bytes.len(), found.len());
        return Ok(("WRONG_SIZE", format!("{place}: {sizes}")));
    }
    Ok(rows_elsewhere(expected, found, &file).unwrap_or_else(|| bytes_differ(expected, found, &place)))
}

fn group_of(config: &Config, param: Param) -> Option<Group> {
    let layer = param.layer.filter(|l| *l < config.layers)?;
    Group::of_layer(config, layer).into_iter().find(|g| g.parts(config, layer).contains(&param))
}

/// The right rows in another order, or rows from elsewhere in the tensor.
fn rows_elsewhere(expected: &Expected, found: &[u8], file: &[u8]) -> Option<(&'static str, String)> {
    let size = expected.row_bytes;
    if size < LEAST_ROW_BYTES || found.len() < 2 * size {
        return None;
    }
    let rows = |bytes: &[u8]| -> Vec<Vec<u8>> { bytes.chunks_exact(size).map(<[u8]>::to_vec).collect() };
    let (mut theirs, mut right) = (rows(found), rows(&expected.bytes));
    let first = theirs.iter().zip(&right).position(|(a, b)| a != b)?;
    let moved = theirs.iter().zip(&right).filter(|(a, b)| a != b).count();
    let from = right.iter().position(|r| *r == theirs[first]);
    let all = right.len();
    theirs.sort();
    right.sort();
    if theirs == right {
        let from = from.map_or(String::new(), |r| format!(": row {r} stands at row {first}"));
        return Some(("SHARD_ORDER", format!("the right rows in another order, {moved} of {all} moved{from}")));
    }
    let whole_rows = expected.stored == expected.own && matches!(file.len() % size, 0);
    if !whole_rows {
        return None;
    }
    let places: HashMap<&[u8], usize> = file.chunks_exact(size).zip(0..).collect();
    let from: Vec<usize> = found.chunks_exact(size).map(|r| places.get(r).copied()).collect::<Option<_>>()?;
    let what = format!("{moved} of {all} rows come from elsewhere in the tensor: its row {}", from[first]);
    Some(("SHARD_PLACEMENT", format!("{what} stands at the part's row {first}")))
}

fn bytes_differ(expected: &Expected, found: &[u8], place: &str) -> (&'static str, String) {
    let differ = || expected.bytes.iter().zip(found).enumerate().filter(|(_, (a, b))| a != b);
    let (count, row_bytes) = (differ().count(), expected.row_bytes.max(1));
    let rows: BTreeSet<usize> = differ().map(|(i, _)| i / row_bytes).collect();
    let first = differ().next().map_or(String::new(), |(i, (a, b))| {
        let (row, byte) = (i / row_bytes, i % row_bytes);
        format!("the first is byte {byte} of row {row} ({}): expected {a:#04x}, found {b:#04x}", expected.format)
    });
    let all = expected.bytes.len();
    ("BYTES", format!("{place}: {count} of {all} bytes in {} rows differ; {first}", rows.len()))
}
