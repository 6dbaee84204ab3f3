//! The mixture of experts over [`Weights`]: tokens are gathered by expert, so that each expert that is hit is decoded
//! once and every other one not at all.

use std::collections::BTreeMap;
use std::ops::Range;

use ndarray::{Array2, Array3, Axis, s};

use crate::arith::{Arith, Order};
use crate::config::RefConfig;
use crate::error::RefError;
use crate::names::RefParam;
use crate::ops;
use crate::slice::{ExpertSplit, Placement, Split, placement};
use crate::weights::Weights;

/// For each expert that is hit, the (token, slot) pairs that it serves.
fn gathered(ids: &[Vec<usize>]) -> BTreeMap<usize, Vec<(usize, usize)>> {
    let mut served = BTreeMap::<usize, Vec<(usize, usize)>>::new();
    for (t, ids) in ids.iter().enumerate() {
        for (slot, &expert) in ids.iter().enumerate() {
            served.entry(expert).or_default().push((t, slot));
        }
    }
    served
}

/// Inner activations of the chosen experts, in the order of `ids`, then of the shared experts: \[tokens, slots,
/// moe_ffn\].
///
/// # Errors
/// An expert's tensor cannot be read.
pub fn hidden(
    a: Arith,
    c: &RefConfig,
    w: &dyn Weights,
    layer: usize,
    x: &Array2<f64>,
    ids: &[Vec<usize>],
) -> Result<Array3<f64>, RefError> {
    let layer = Some(layer);
    let mut out = Array3::zeros((x.nrows(), c.experts_used + c.shared_experts, c.moe_ffn));
    for (expert, pairs) in gathered(ids) {
        let tokens: Vec<usize> = pairs.iter().map(|&(t, _)| t).collect();
        let (gate, up) = (w.expert(layer, RefParam::GateExps, expert)?, w.expert(layer, RefParam::UpExps, expert)?);
        let y = ops::swiglu(a.of_experts(), &x.select(Axis(0), &tokens), &gate, &up);
        for (&(t, slot), y) in pairs.iter().zip(y.rows()) {
            out.slice_mut(s![t, slot, ..]).assign(&y);
        }
    }
    let shared = ops::swiglu(a, x, &*w.matrix(layer, RefParam::GateShared)?, &*w.matrix(layer, RefParam::UpShared)?);
    for slot in 0..c.shared_experts {
        let part = shared.slice(s![.., slot * c.moe_ffn..(slot + 1) * c.moe_ffn]);
        out.slice_mut(s![.., c.experts_used + slot, ..]).assign(&part);
    }
    Ok(out)
}

/// The weighted sum of the chosen experts' outputs, \[tokens, hidden\]. `columns` says which columns of an expert's
/// down projection take part: all for the whole result, a rank's for its partial sum.
///
/// # Errors
/// As for [`hidden`].
pub fn routed(
    a: Arith,
    w: &dyn Weights,
    layer: usize,
    hidden: &Array3<f64>,
    weights: &Array2<f64>,
    ids: &[Vec<usize>],
    columns: impl Fn(usize) -> Range<usize>,
) -> Result<Array2<f64>, RefError> {
    let mut y: Option<Array3<f64>> = None;
    for (expert, pairs) in gathered(ids) {
        let columns = columns(expert);
        let down = w.expert(Some(layer), RefParam::DownExps, expert)?;
        let slots = weights.ncols();
        let y = y.get_or_insert_with(|| Array3::zeros((ids.len(), slots, down.nrows())));
        let mut x = Array2::zeros((pairs.len(), hidden.dim().2));
        for (mut row, &(t, slot)) in x.rows_mut().into_iter().zip(&pairs) {
            row.assign(&hidden.slice(s![t, slot, ..]));
        }
        for (&(t, slot), out) in pairs.iter().zip(ops::linear_part(a.of_experts(), &x, &down, columns).rows()) {
            y.slice_mut(s![t, slot, ..]).assign(&out);
        }
    }
    Ok(y.map_or_else(|| Array2::zeros((ids.len(), 0)), |y| ops::mix_experts(a.of_experts(), weights, &y)))
}

/// Routed and shared experts together, as ranks make them that store their addends in a half type and every step of their
/// sum; `None` where no rank rounds, or the experts are not divided by so many.
///
/// # Errors
/// As for [`hidden`].
pub fn reduced(
    a: Arith,
    c: &RefConfig,
    w: &dyn Weights,
    layer: usize,
    hidden: &Array3<f64>,
    weights: &Array2<f64>,
    ids: &[Vec<usize>],
) -> Result<Option<Array2<f64>>, RefError> {
    let Arith::F32(_, Order::Ranks(tp)) = a else { return Ok(None) };
    let mut sum: Option<Array2<f64>> = None;
    for rank in (0..tp).filter(|_| a.reduces()) {
        let split = Split { tp, rank, experts: ExpertSplit::Tensor };
        let of = |param| placement(c, param, split).ok();
        let (Some(Placement::Cols(own)), Some(Placement::Cols(common))) =
            (of(RefParam::DownExps), of(RefParam::DownShared))
        else {
            return Ok(None);
        };
        let routed = routed(a, w, layer, hidden, weights, ids, |_| own.clone())?;
        let addend = ops::add(a, &routed, &shared(a, c, w, layer, hidden, common)?);
        sum = Some(sum.map_or(addend.clone(), |sum| ops::add(a, &sum, &addend)));
    }
    Ok(sum)
}

/// The shared experts' output, \[tokens, hidden\]; `columns` as for [`routed`], over all shared experts side by side.
///
/// # Errors
/// As for [`hidden`].
pub fn shared(
    a: Arith,
    c: &RefConfig,
    w: &dyn Weights,
    layer: usize,
    hidden: &Array3<f64>,
    columns: Range<usize>,
) -> Result<Array2<f64>, RefError> {
    let x = Array2::from_shape_fn((hidden.dim().0, c.shared_experts * c.moe_ffn), |(t, i)| {
        hidden[[t, c.experts_used + i / c.moe_ffn, i % c.moe_ffn]]
    });
    Ok(ops::linear_part(a, &x, &*w.matrix(Some(layer), RefParam::DownShared)?, columns))
}
