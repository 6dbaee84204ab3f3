//! SHARD_ORDER: the parts of a fused parameter are joined in another order than the one in which they are split off.

use std::sync::Arc;

use lockstep_reference::ndarray::{Array2, s};
use lockstep_reference::slice::Placement;
use lockstep_reference::{ParamKey, RefError, RefParam};

use crate::diagnose::hypothesis::{Alter, Hypothesis, OpContext, stacked};
use crate::faults::Site;
use crate::faults::shard_order::FAULT;
use crate::model::Point;
use crate::shard::Group;
use crate::verify::param_map::reference_of;
use crate::verify::patched_weights::{Value, value_of};

/// The fused groups that the operation multiplies with, and their parts as the reference knows them.
fn groups(op: &OpContext<'_>, layer: usize) -> Vec<(Group, Vec<RefParam>)> {
    let parts = |group: Group| {
        let parts = group.parts(op.model, layer).into_iter().map(|p| reference_of(p.kind));
        (group, parts.collect::<Vec<_>>())
    };
    let all = Group::of_layer(op.model, layer).into_iter().map(parts);
    all.filter(|(_, parts)| parts.len() > 1 && multiplies(op, op.place.point, parts)).collect()
}

/// Whether a point of the operation's block is made from any of these parameters.
fn multiplies(op: &OpContext<'_>, point: Point, parts: &[RefParam]) -> bool {
    op.place.at(point).params(op.model).into_iter().any(|p| parts.contains(&reference_of(p.kind)))
}

/// Each other order of the parts of the fused group.
pub(super) fn hypotheses<'a>(op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
    let Some(layer) = op.place.layer() else { return Vec::new() };
    let mut all = Vec::new();
    for (group, canonical) in groups(op, layer) {
        for order in permutations(canonical.len()) {
            let found: Vec<&str> = order.iter().map(|i| name(canonical[*i])).collect();
            let expected: Vec<&str> = canonical.iter().map(|p| name(*p)).collect();
            let (parts, scope) = (canonical.clone(), op.ranks.clone());
            let change = move |rank: usize, key: ParamKey| match parts.iter().position(|p| *p == key.1) {
                Some(at) if key.0 == op.place.layer() => misjoined(op, &parts, &order, at, rank, &scope, key).map(Some),
                _ => Ok(None),
            };
            let statement = format!("parts found as [{}], canonical [{}]", found.join(", "), expected.join(", "));
            let overturn = "load the parts unfused: if the operation still diverges, their order is not at fault";
            let site = Site::Group(group, layer).to_string();
            let also = Point::ALL.iter().copied().filter(|point| multiplies(op, *point, &canonical)).collect();
            let alter = Alter::Weights(Box::new(change));
            all.push(Hypothesis { site, also, ..op.hypothesis(FAULT.kind, statement, overturn, alter) });
        }
    }
    all
}

fn name(param: RefParam) -> &'static str {
    match param {
        RefParam::QA => "q_a",
        RefParam::KvA => "kv_a",
        RefParam::IndexK => "indexer.attn_k",
        RefParam::IndexProj => "indexer.proj",
        RefParam::QB => "q_b",
        RefParam::IndexQB => "indexer.attn_q_b",
        RefParam::Gate | RefParam::GateExps | RefParam::GateShared => "gate",
        RefParam::Up | RefParam::UpExps | RefParam::UpShared => "up",
        _ => "part",
    }
}

/// Every order of `n` things but the first, the usual one.
fn permutations(n: usize) -> Vec<Vec<usize>> {
    let mut all = vec![Vec::new()];
    for _ in 0..n {
        let longer =
            |p: &Vec<usize>| (0..n).filter(|i| !p.contains(i)).map(|i| [p.as_slice(), &[i]].concat()).collect();
        all = all.iter().flat_map(|p| -> Vec<Vec<usize>> { longer(p) }).collect();
    }
    all.split_off(1)
}

/// What the place of part `at` holds when ranks of `scope` join their parts in `order`.
fn misjoined(
    op: &OpContext<'_>,
    parts: &[RefParam],
    order: &[usize],
    at: usize,
    rank: usize,
    scope: &[usize],
    key: ParamKey,
) -> Result<Value, RefError> {
    let part = |p: RefParam, r: usize| -> Result<Array2<f32>, RefError> {
        let Value::Matrix(m) = value_of(op.judge.weights, (key.0, p, key.2))? else {
            return Err(RefError::tensor(name(p).to_string(), "a matrix".to_string(), "another form".to_string()));
        };
        Ok(match op.placement(p, r)? {
            Placement::Rows(rows) => m.slice(s![rows, ..]).to_owned(),
            _ => (*m).clone(),
        })
    };
    let of_rank = |r: usize| -> Result<Array2<f32>, RefError> {
        let own = parts.iter().map(|p| part(*p, r)).collect::<Result<Vec<_>, _>>()?;
        if !scope.contains(&r) {
            return Ok(own[at].clone());
        }
        let joined = stacked(order.iter().map(|i| &own[*i]))?;
        let first: usize = own[..at].iter().map(|m| m.nrows()).sum();
        Ok(joined.slice(s![first..first + own[at].nrows(), ..]).to_owned())
    };
    let sharded = matches!(op.placement(parts[at], 0)?, Placement::Rows(_));
    let ranks = if sharded { 0..op.trace.tp } else { rank..rank + 1 };
    let all = ranks.map(of_rank).collect::<Result<Vec<_>, _>>()?;
    Ok(Value::Matrix(Arc::new(stacked(all.iter())?)))
}

#[cfg(test)]
mod tests {
    use super::permutations;

    #[test]
    fn all_orders_but_the_usual_one() {
        assert_eq!(permutations(2), [[1, 0]]);
        assert_eq!(permutations(4).len(), 23);
        assert!(!permutations(4).contains(&vec![0, 1, 2, 3]));
    }
}
