//! SHARD_PLACEMENT: ranks hold and use rank 0's range of a parameter instead of their own.

use std::sync::Arc;

use lockstep_reference::Param;
use lockstep_reference::ndarray::{Axis, Slice as NdSlice};
use lockstep_reference::slice::Placement;

use crate::diagnose::hypothesis::{Alter, Hypothesis, OpContext, value_of};
use crate::faults::shard_placement::FAULT;
use crate::verify::altered::{Key, Value};

pub(super) fn hypotheses<'a>(op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
    let tp = op.trace.tp;
    let sharded: Vec<(Option<usize>, Param)> = op
        .params()
        .into_iter()
        .filter(|(_, p)| !matches!(op.placement(*p, 0), Ok(Placement::Replicated) | Err(_)))
        .collect();
    if tp == 1 || sharded.is_empty() {
        return Vec::new();
    }
    // Alone, or with the others of the same operation (a fused group).
    let mut sets: Vec<Vec<(Option<usize>, Param)>> = sharded.iter().map(|p| vec![*p]).collect();
    for pair in sharded.chunks(2).filter(|c| c.len() == 2 && sharded.len() > 2) {
        sets.push(pair.to_vec());
    }
    if sharded.len() > 1 {
        sets.push(sharded);
    }
    let mut all = Vec::new();
    for set in sets {
        for ranks in op.scopes() {
            // Rank 0's own range is right, so it never diverges.
            let affected: Vec<usize> = ranks.iter().copied().filter(|r| *r != 0).collect();
            if affected.is_empty() {
                continue;
            }
            let (params, scope) = (set.clone(), affected.clone());
            let change = move |_: usize, key: Key| match params.contains(&(key.0, key.1)) {
                true => displaced(op, key, &scope).map(Some),
                false => Ok(None),
            };
            let names: Vec<String> = set.iter().map(|(l, p)| op.tensor(*l, *p)).collect();
            let who = if affected.len() + 1 == tp { "every rank".into() } else { format!("rank {affected:?}") };
            all.push(Hypothesis {
                kind: FAULT.kind,
                site: names.join(" + "),
                statement: format!("{who} uses rank 0's range of {}", names.join(" and ")),
                overturn: "run at --tp 1: if the operation diverges there too, placement is not at fault".into(),
                ranks: affected,
                also: Vec::new(),
                reads: None,
                alter: Alter::Weights(Box::new(change)),
            });
        }
    }
    all
}

/// The parameter as it acts when `ranks` use rank 0's range.
fn displaced(op: &OpContext<'_>, key: Key, ranks: &[usize]) -> Result<Value, lockstep_reference::RefError> {
    let base = value_of(op.weights, key)?;
    if key.1 == Param::Embed {
        // Every rank answers for the ids of its range, and the answers are added.
        let (id, mut answers) = (key.2.unwrap_or(0), 0.0);
        for rank in 0..op.trace.tp {
            let used = if ranks.contains(&rank) { 0 } else { rank };
            if let Placement::Vocab { rows, .. } = op.placement(key.1, used)? {
                answers += f32::from(u8::from(rows.contains(&id)));
            }
        }
        return Ok(match base {
            Value::Vector(v) => Value::Vector(Arc::new(v.mapv(|x| x * answers))),
            other => other,
        });
    }
    let mut out = base.clone();
    for rank in ranks {
        let (axis, from, to) = match (op.placement(key.1, 0)?, op.placement(key.1, *rank)?) {
            (Placement::Cols(a), Placement::Cols(b)) => (1, a, b),
            (Placement::Rows(a), Placement::Rows(b)) | (Placement::Heads(a), Placement::Heads(b)) => (0, a, b),
            (Placement::Vocab { rows: a, .. }, Placement::Vocab { rows: b, .. }) => (0, a.start..a.start + b.len(), b),
            _ => continue,
        };
        let (from, to) = (NdSlice::from(from), NdSlice::from(to));
        match (&mut out, &base) {
            (Value::Matrix(o), Value::Matrix(b)) => {
                Arc::make_mut(o).slice_axis_mut(Axis(axis), to).assign(&b.slice_axis(Axis(axis), from));
            }
            (Value::Heads(o), Value::Heads(b)) => {
                Arc::make_mut(o).slice_axis_mut(Axis(0), to).assign(&b.slice_axis(Axis(0), from));
            }
            _ => {}
        }
    }
    Ok(out)
}
