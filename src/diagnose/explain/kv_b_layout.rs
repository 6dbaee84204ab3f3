//! KV_B_LAYOUT: k_b is read as [head][nope][latent], though it lies as [head][latent][nope].

use std::sync::Arc;

use lockstep_reference::ndarray::Array3;
use lockstep_reference::{ParamKey, RefParam};

use super::unit_order::keys_then_values;

use crate::diagnose::hypothesis::{Alter, Hypothesis, OpContext};
use crate::faults::kv_b_layout::FAULT;
use crate::verify::patched_weights::Value;

/// k_b in the other layout.
pub(super) fn hypotheses<'a>(op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
    let at = (op.place.layer(), RefParam::KB);
    if !op.params().contains(&at) {
        return Vec::new();
    }
    let alter = op.altering(at, op.ranks.clone(), |_, base| {
        let Value::Heads(heads) = base else { return None };
        let (count, latent, nope) = heads.dim();
        // Element i of a head's flat values stands at row i / latent of a [nope][latent] matrix.
        let flat = |h: usize, i: usize| heads[[h, i / nope, i % nope]];
        let misread = Array3::from_shape_fn((count, latent, nope), |(h, l, n)| flat(h, n * latent + l));
        Some(Value::Heads(Arc::new(misread)))
    });
    let statement = "k_b is read as [head][nope][latent]; the file holds [head][latent][nope]";
    let overturn = "transpose k_b per head on load; if q_absorbed still diverges, the layout was not at fault";
    let mut all =
        vec![Hypothesis { site: op.tensor(at.0, at.1), ..op.hypothesis(FAULT.kind, statement, overturn, alter) }];
    if op.params().contains(&(at.0, RefParam::VB)) {
        let change = move |_: usize, key: ParamKey| {
            if key.0 != at.0 || !matches!(key.1, RefParam::KB | RefParam::VB) {
                return Ok(None);
            }
            let (keys, values) =
                (op.judge.weights.heads(at.0, RefParam::KB)?, op.judge.weights.heads(at.0, RefParam::VB)?);
            let misread = keys_then_values(&keys, &values);
            Ok(misread.map(|(k, v)| Value::Heads(Arc::new(if key.1 == RefParam::KB { k } else { v }))))
        };
        let statement = "a joined kv_b, key and value of each head in turn, is read as all keys and then all values";
        let overturn = "split kv_b head by head; if the context still diverges, the layout was not at fault";
        let alter = Alter::Weights(Box::new(change));
        all.push(Hypothesis { site: op.tensor(at.0, at.1), ..op.hypothesis(FAULT.kind, statement, overturn, alter) });
    }
    all
}
