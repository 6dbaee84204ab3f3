//! HEAD_ORDER, EXPERT_ORDER: heads or experts of a parameter stand in each other's places.

use std::sync::Arc;

use lockstep_reference::ndarray::Axis;
use lockstep_reference::{ParamKey, RefError, RefParam};

use crate::diagnose::hypothesis::{Alter, Hypothesis, OpContext};
use crate::verify::patched_weights::{Value, value_of};

/// So many units are exchanged two by two in every way; of more, only those that the result shows.
const MOST_TO_PAIR: usize = 16;

/// Parameters that are exchanged together, and whether the units are experts.
const PARTS: [(&[RefParam], bool); 8] = [
    (&[RefParam::QB], false),
    (&[RefParam::KB, RefParam::VB], false),
    (&[RefParam::KB], false),
    (&[RefParam::VB], false),
    (&[RefParam::O], false),
    (&[RefParam::GateExps, RefParam::UpExps], true),
    (&[RefParam::DownExps], true),
    (&[RefParam::IndexQB], false),
];

/// Every order of units that faults are known to make, for each parameter of the operation that has units.
pub(super) fn hypotheses<'a>(op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
    let (Some(layer), params, mut all) = (op.place.layer(), op.params(), Vec::new()) else { return Vec::new() };
    for (parts, experts) in PARTS {
        if !parts.iter().all(|part| params.contains(&(Some(layer), *part))) {
            continue;
        }
        let units = match (experts, parts[0]) {
            (true, _) => op.model.experts,
            (_, RefParam::IndexQB) => op.model.index_heads,
            _ => op.model.heads,
        };
        let (kind, unit) = if experts { ("EXPERT_ORDER", "experts") } else { ("HEAD_ORDER", "heads") };
        let names = op.tensors(Some(layer), parts);
        for (how, order) in orders(units, op.bad_units(experts, units)) {
            let change = move |_: usize, key: ParamKey| match parts.contains(&key.1) && key.0 == Some(layer) {
                true => reordered(op, key, &order, experts),
                false => Ok(None),
            };
            let statement = format!("{unit} {how} in {}", names.join(" and "));
            let overturn = format!(
                "compare one of the {unit} with the file's; if it stands in its place, the order was not at fault"
            );
            let alter = Alter::Weights(Box::new(change));
            all.push(Hypothesis { site: names[0].clone(), ..op.hypothesis(kind, statement, overturn, alter) });
        }
    }
    all
}

/// Orders of `n` units, as words and as the unit that stands at each place. Those in the wrong place, where that is known.
fn orders(n: usize, bad: Option<Vec<usize>>) -> Vec<(String, Vec<usize>)> {
    let mut all = Vec::new();
    let of = |place: &dyn Fn(usize) -> usize| (0..n).map(place).collect::<Vec<_>>();
    let whole = bad.as_ref().is_none_or(|bad| bad.len() + 1 >= n);
    if n > 1 && whole {
        all.push(("stand one place too late".into(), of(&|i| (i + n - 1) % n)));
        all.push(("stand one place too early".into(), of(&|i| (i + 1) % n)));
        all.push(("stand in reverse".into(), of(&|i| n - 1 - i)));
        all.push(("are exchanged in pairs".into(), of(&|i| if i % 2 == 0 { (i + 1).min(n - 1) } else { i - 1 })));
        all.push(("are exchanged by halves".into(), of(&|i| (i + n / 2) % n)));
    }
    let candidates = match bad {
        Some(bad) if bad.len() <= MOST_TO_PAIR => bad,
        _ if n <= MOST_TO_PAIR => (0..n).collect(),
        _ => Vec::new(),
    };
    for (i, a) in candidates.iter().enumerate() {
        for b in &candidates[i + 1..] {
            let swapped = of(&|u| {
                if u == *a {
                    *b
                } else if u == *b {
                    *a
                } else {
                    u
                }
            });
            all.push((format!("{a} and {b} are exchanged"), swapped));
        }
    }
    all.retain(|(_, order)| order.iter().enumerate().any(|(i, u)| i != *u));
    all
}

/// The parameter with the units of another order.
fn reordered(op: &OpContext<'_>, key: ParamKey, order: &[usize], experts: bool) -> Result<Option<Value>, RefError> {
    let (layer, param, index) = key;
    if experts {
        let Some(from) = index.and_then(|index| order.get(index)) else { return Ok(None) };
        return value_of(op.judge.weights, (layer, param, Some(*from))).map(Some);
    }
    Ok(match value_of(op.judge.weights, key)? {
        Value::Heads(heads) => Some(Value::Heads(Arc::new(heads.select(Axis(0), order)))),
        Value::Matrix(m) => {
            let axis = usize::from(param == RefParam::O);
            let width = m.len_of(Axis(axis)) / order.len().max(1);
            let places: Vec<usize> = order.iter().flat_map(|u| u * width..(u + 1) * width).collect();
            Some(Value::Matrix(Arc::new(m.select(Axis(axis), &places))))
        }
        Value::Vector(_) => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_other_orders() {
        for (n, bad) in
            [(8, None), (8, Some(vec![2, 5])), (3, None), (2, None), (64, Some(vec![1, 9])), (64, None), (1, None)]
        {
            let all = orders(n, bad);
            assert!(
                all.iter().all(|(_, order)| (0..n).all(|i| order.contains(&i)) && *order != (0..n).collect::<Vec<_>>())
            );
            assert_eq!(all.is_empty(), n == 1);
        }
        assert_eq!(orders(64, Some(vec![1, 9])).len(), 1);
    }
}
