//! NAME_MAP: a name was altered on the way from file to parameter, so the parameter was never filled and holds zeros.

use std::sync::Arc;

use crate::diagnose::hypothesis::{Alter, Hypothesis, OpContext, on_ranks, value_of};
use crate::faults::name_map::FAULT;
use crate::verify::altered::{Key, Value};

pub(super) fn hypotheses<'a>(op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
    let mut all = Vec::new();
    for (layer, param) in op.params() {
        for ranks in op.scopes() {
            let scope = ranks.clone();
            let change = move |rank, key: Key| {
                if (key.0, key.1) != (layer, param) {
                    return Ok(None);
                }
                let base = value_of(op.weights, key)?;
                let zero = match &base {
                    Value::Vector(v) => Value::Vector(Arc::new(v.mapv(|_| 0.0))),
                    Value::Matrix(m) => Value::Matrix(Arc::new(m.mapv(|_| 0.0))),
                    Value::Heads(h) => Value::Heads(Arc::new(h.mapv(|_| 0.0))),
                };
                on_ranks(&|r| op.placement(param, r), &scope, rank, key, &base, zero).map(Some)
            };
            all.push(Hypothesis {
                kind: FAULT.kind,
                site: op.tensor(layer, param),
                statement: "the parameter was never filled: it holds zeros".into(),
                overturn: "fill it by hand; if the operation still diverges, the name was not at fault".into(),
                ranks,
                also: Vec::new(),
                reads: None,
                alter: Alter::Weights(Box::new(change)),
            });
        }
    }
    all
}
