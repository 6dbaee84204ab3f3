//! KV_B_LAYOUT: k_b is read as [head][nope][latent], though it lies as [head][latent][nope].

use std::sync::Arc;

use lockstep_reference::Param;
use lockstep_reference::ndarray::Array3;

use crate::diagnose::hypothesis::{Alter, Hypothesis, OpContext, on_ranks, value_of};
use crate::faults::kv_b_layout::FAULT;
use crate::verify::altered::{Key, Value};

pub(super) fn hypotheses<'a>(op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
    if !op.params().contains(&(op.place.layer(), Param::KB)) {
        return Vec::new();
    }
    let scope = op.ranks.clone();
    let change = move |rank, key: Key| {
        if (key.0, key.1) != (op.place.layer(), Param::KB) {
            return Ok(None);
        }
        let base = value_of(op.weights, key)?;
        let Value::Heads(heads) = &base else { return Ok(None) };
        let (count, latent, nope) = heads.dim();
        // Element i of a head's flat values stands at row i / latent of a [nope][latent] matrix.
        let flat = |h: usize, i: usize| heads[[h, i / nope, i % nope]];
        let misread = Array3::from_shape_fn((count, latent, nope), |(h, l, n)| flat(h, n * latent + l));
        on_ranks(&|r| op.placement(Param::KB, r), &scope, rank, key, &base, Value::Heads(Arc::new(misread))).map(Some)
    };
    vec![Hypothesis {
        kind: FAULT.kind,
        site: op.tensor(op.place.layer(), Param::KB),
        statement: "k_b is read as [head][nope][latent]; the file holds [head][latent][nope]".into(),
        overturn: "transpose k_b per head on load; if q_absorbed still diverges, the layout was not at fault".into(),
        ranks: op.ranks.clone(),
        also: Vec::new(),
        reads: None,
        alter: Alter::Weights(Box::new(change)),
    }]
}
