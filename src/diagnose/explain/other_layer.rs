//! OTHER_LAYER: a parameter holds what another layer's should; keys and values, which many files keep in one tensor, both.

use lockstep_reference::{ParamKey, RefError, RefParam};

use crate::diagnose::hypothesis::{Alter, Hypothesis, OpContext};
use crate::model::Place;
use crate::verify::param_map::reference_of;
use crate::verify::patched_weights::{Value, value_of};

/// Layers on either side whose tensors are tried: indices that are off by one, or by the dense layers before.
const NEAR: usize = 4;

/// Each parameter of the operation, from each layer near it that has the same one in the same shape.
pub(super) fn hypotheses<'a>(op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
    let (Some(own), mut all) = (op.place.layer(), Vec::new()) else { return Vec::new() };
    let params: Vec<RefParam> =
        op.params().into_iter().filter(|(layer, _)| *layer == Some(own)).map(|(_, param)| param).collect();
    let mut sets: Vec<Vec<RefParam>> = params.iter().map(|param| vec![*param]).collect();
    let joined = [RefParam::KB, RefParam::VB];
    sets.extend(joined.iter().all(|part| params.contains(part)).then(|| joined.to_vec()));
    for set in sets {
        let near = own.saturating_sub(NEAR)..(own + NEAR + 1).min(op.model.layers);
        for other in near.filter(|layer| *layer != own && set.iter().all(|param| has(op, *layer, *param))) {
            for ranks in op.scopes() {
                let (params, scope) = (set.clone(), ranks.clone());
                let change = move |rank: usize, key: ParamKey| match params.contains(&key.1) && key.0 == Some(own) {
                    true => moved(op, other, rank, &scope, key),
                    false => Ok(None),
                };
                let statement = format!("it holds what belongs to layer {other}");
                let overturn = "compare its bytes with the file's";
                let (site, alter) = (op.tensors(Some(own), &set).join(" + "), Alter::Weights(Box::new(change)));
                all.push(Hypothesis { site, ranks, ..op.hypothesis("OTHER_LAYER", statement, overturn, alter) });
            }
        }
    }
    all
}

/// The parameter as it acts where `ranks` hold another layer's; `None` where that has another form.
fn moved(
    op: &OpContext<'_>,
    other: usize,
    rank: usize,
    ranks: &[usize],
    key: ParamKey,
) -> Result<Option<Value>, RefError> {
    let base = value_of(op.judge.weights, key)?;
    let found = value_of(op.judge.weights, (Some(other), key.1, key.2)).ok();
    found.filter(|found| same_form(&base, found)).map(|found| op.on_ranks(ranks, rank, key, &base, found)).transpose()
}

fn has(op: &OpContext<'_>, layer: usize, param: RefParam) -> bool {
    // Where nothing is absorbed, attention makes its keys of k_b, though no point of its own lists that.
    let listed = if op.judge.options.expanded && param == RefParam::KB { RefParam::VB } else { param };
    let places = op.over.iter().chain([&op.place]).map(|place| Place::trunk(layer, place.point));
    places.flat_map(|place| place.params(op.model)).any(|p| reference_of(p.kind) == listed)
}

fn same_form(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Vector(a), Value::Vector(b)) => a.dim() == b.dim(),
        (Value::Matrix(a), Value::Matrix(b)) => a.dim() == b.dim(),
        (Value::Heads(a), Value::Heads(b)) => a.dim() == b.dim(),
        _ => false,
    }
}
