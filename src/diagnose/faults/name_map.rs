//! NAME_MAP: a name was altered on the way from file to parameter, so the parameter was never filled and holds zeros.

use std::sync::Arc;

use super::decorate::{Decorations, Replaced};
use super::{Fault, param_of};
use crate::checkpoint::Checkpoint;
use crate::diagnose::hypothesis::{Alter, Hypothesis, OpContext, on_ranks, value_of};
use crate::model::params;
use crate::verify::altered::Value;

/// See the module.
pub struct NameMap;

impl Fault for NameMap {
    fn kind(&self) -> &'static str {
        "NAME_MAP"
    }

    fn about(&self) -> &'static str {
        "a mangled name leaves a parameter unfilled (zeros)"
    }

    fn sites(&self, checkpoint: &Checkpoint, _: usize) -> Vec<String> {
        params::of_trunk(checkpoint.config()).iter().map(|p| p.to_string()).collect()
    }

    fn inject(&self, checkpoint: &Checkpoint, site: &str, rank: Option<usize>, into: &mut Decorations) {
        let binding = param_of(checkpoint.config(), site).and_then(|p| checkpoint.binding(p));
        for name in binding.map(|b| b.names()).unwrap_or_default() {
            if let Some(view) = checkpoint.source().tensor(name) {
                let bytes = Arc::new(vec![0; view.bytes.len()]);
                into.tensors.push((rank, name.clone(), Replaced { ty: view.ty, bytes }));
            }
        }
    }

    fn hypotheses<'a>(&self, op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
        let mut all = Vec::new();
        for (layer, param) in op.params() {
            for ranks in op.scopes() {
                let scope = ranks.clone();
                let change = move |rank, key: crate::verify::altered::Key| {
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
                    kind: self.kind(),
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
}
