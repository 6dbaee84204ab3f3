//! OTHER_LAYER: a parameter holds what another layer's should.

use crate::diagnose::hypothesis::{Hypothesis, OpContext};
use crate::model::Place;
use crate::verify::param_map::reference_of;
use crate::verify::patched_weights::{Value, value_of};

/// Layers on either side whose tensors are tried: indices that are off by one, or by the dense layers before.
const NEAR: usize = 4;

/// Each parameter of the operation, from each layer near it that has the same one in the same shape.
pub(super) fn hypotheses<'a>(op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
    let Some(own) = op.place.layer() else { return Vec::new() };
    let mut all = Vec::new();
    for at in op.params().into_iter().filter(|(layer, _)| *layer == Some(own)) {
        let near = own.saturating_sub(NEAR)..(own + NEAR + 1).min(op.model.layers);
        for other in near.filter(|layer| *layer != own && has(op, *layer, at.1)) {
            for ranks in op.scopes() {
                let alter = op.altering(at, ranks.clone(), move |key, base| {
                    let found = value_of(op.judge.weights, (Some(other), key.1, key.2)).ok()?;
                    same_form(base, &found).then_some(found)
                });
                let statement = format!("it holds what belongs to layer {other}");
                let overturn = "compare its bytes with the file's";
                let site = op.tensor(at.0, at.1);
                all.push(Hypothesis { site, ranks, ..op.hypothesis("OTHER_LAYER", statement, overturn, alter) });
            }
        }
    }
    all
}

fn has(op: &OpContext<'_>, layer: usize, param: lockstep_reference::RefParam) -> bool {
    let places = op.over.iter().chain([&op.place]).map(|place| Place::trunk(layer, place.point));
    places.flat_map(|place| place.params(op.model)).any(|p| reference_of(p.kind) == param)
}

fn same_form(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Vector(a), Value::Vector(b)) => a.dim() == b.dim(),
        (Value::Matrix(a), Value::Matrix(b)) => a.dim() == b.dim(),
        (Value::Heads(a), Value::Heads(b)) => a.dim() == b.dim(),
        _ => false,
    }
}
