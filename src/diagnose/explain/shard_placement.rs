//! SHARD_PLACEMENT: ranks hold and use rank 0's range of a parameter instead of their own.

use lockstep_reference::slice::Placement;
use lockstep_reference::{ParamKey, RefParam};

use crate::diagnose::hypothesis::{Alter, Hypothesis, OpContext, part};
use crate::faults::shard_placement::FAULT;
use crate::verify::patched_weights::{Value, value_of};

/// Rank 0's range of each sharded parameter, alone and together.
pub(super) fn hypotheses<'a>(op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
    let tp = op.trace.tp;
    let sharded: Vec<(Option<usize>, RefParam)> = op
        .params()
        .into_iter()
        .filter(|(_, p)| !matches!(op.placement(*p, 0), Ok(Placement::Replicated) | Err(_)))
        .collect();
    if tp == 1 || sharded.is_empty() {
        return Vec::new();
    }
    // Alone, or with the others of the same operation (a fused group).
    let mut sets: Vec<Vec<(Option<usize>, RefParam)>> = sharded.iter().map(|p| vec![*p]).collect();
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
            let change = move |_: usize, key: ParamKey| match params.contains(&(key.0, key.1)) {
                true => displaced(op, key, &scope).map(Some),
                false => Ok(None),
            };
            let names: Vec<String> = set.iter().map(|(l, p)| op.tensor(*l, *p)).collect();
            let who = if affected.len() + 1 == tp { "every rank".into() } else { format!("rank {affected:?}") };
            let statement = format!("{who} uses rank 0's range of {}", names.join(" and "));
            let overturn = "run at --tp 1: if the operation diverges there too, placement is not at fault";
            let (site, alter) = (names.join(" + "), Alter::Weights(Box::new(change)));
            all.push(Hypothesis { site, ranks: affected, ..op.hypothesis(FAULT.kind, statement, overturn, alter) });
        }
    }
    all
}

/// The parameter as it acts when `ranks` use rank 0's range.
fn displaced(op: &OpContext<'_>, key: ParamKey, ranks: &[usize]) -> Result<Value, lockstep_reference::RefError> {
    let base = value_of(op.judge.weights, key)?;
    if key.1 == RefParam::Embed {
        // Every rank answers for the ids of its range, and the answers are added.
        let (id, mut answers) = (key.2.unwrap_or(0), 0.0);
        for rank in 0..op.trace.tp {
            let used = if ranks.contains(&rank) { 0 } else { rank };
            if let Placement::Vocab { rows, .. } = op.placement(key.1, used)? {
                answers += f32::from(u8::from(rows.contains(&id)));
            }
        }
        return Ok(base.map(|x| x * answers));
    }
    let mut out = base.clone();
    for rank in ranks {
        if let (Some((axis, first)), Some((_, own))) =
            (part(op.placement(key.1, 0)?), part(op.placement(key.1, *rank)?))
        {
            out.copy(axis, own.clone(), &base, first.start..first.start + own.len());
        }
    }
    Ok(out)
}
