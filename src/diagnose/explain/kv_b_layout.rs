//! KV_B_LAYOUT: k_b is read as [head][nope][latent], though it lies as [head][latent][nope]; or the one matrix of keys and
//! values is read in another order of its rows than it is stored in.

use std::sync::Arc;

use lockstep_reference::ndarray::Array3;
use lockstep_reference::{ParamKey, RefParam};

use crate::diagnose::hypothesis::{Alter, Hypothesis, OpContext};
use crate::faults::kv_b_layout::FAULT;
use crate::verify::patched_weights::Value;

/// k_b in the other layout, and both in the other order.
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
    if !op.params().contains(&(at.0, RefParam::VB)) {
        return all;
    }
    for (stored, read, statement) in [
        (
            Rows::ByHead,
            Rows::KeysFirst,
            "kv_b, key and value of each head in turn, is read as all keys and then all values",
        ),
        (Rows::KeysFirst, Rows::ByHead, "kv_b is stored as all keys and then all values, and read head by head"),
    ] {
        let change = move |_: usize, key: ParamKey| {
            if key.0 != at.0 || !matches!(key.1, RefParam::KB | RefParam::VB) {
                return Ok(None);
            }
            let weights = op.judge.weights;
            let (keys, values) = (weights.heads(at.0, RefParam::KB)?, weights.heads(at.0, RefParam::VB)?);
            let (keys, values) = misread(&keys, &values, stored, read);
            Ok(Some(Value::Heads(Arc::new(if key.1 == RefParam::KB { keys } else { values }))))
        };
        let overturn = "split kv_b by hand; if the context still diverges, the order of its rows was not at fault";
        let alter = Alter::Weights(Box::new(change));
        let site = op.tensors(at.0, &[RefParam::KB, RefParam::VB]).join(" + ");
        all.push(Hypothesis { site, ..op.hypothesis(FAULT.kind, statement, overturn, alter) });
    }
    all
}

/// In which order the rows of keys and values stand in one matrix.
#[derive(Clone, Copy)]
enum Rows {
    ByHead,
    KeysFirst,
}

impl Rows {
    /// At which row a head's row stands: its keys' rows, and behind them its values'.
    fn at(self, (heads, nope, value): (usize, usize, usize), head: usize, row: usize) -> usize {
        match self {
            Rows::ByHead => head * (nope + value) + row,
            Rows::KeysFirst if row < nope => head * nope + row,
            Rows::KeysFirst => heads * nope + head * value + row - nope,
        }
    }
}

/// k_b and v_b as they come out where the rows of both are stored in one order and read in another.
fn misread(keys: &Array3<f32>, values: &Array3<f32>, stored: Rows, read: Rows) -> (Array3<f32>, Array3<f32>) {
    let ((heads, latent, nope), value) = (keys.dim(), values.dim().1);
    let sizes = (heads, nope, value);
    let mut whose = vec![(0, 0); heads * (nope + value)];
    for head in 0..heads {
        (0..nope + value).for_each(|row| whose[stored.at(sizes, head, row)] = (head, row));
    }
    let of = |head: usize, row: usize, l: usize| match whose[read.at(sizes, head, row)] {
        (head, row) if row < nope => keys[[head, l, row]],
        (head, row) => values[[head, row - nope, l]],
    };
    let misread_keys = Array3::from_shape_fn((heads, latent, nope), |(h, l, n)| of(h, n, l));
    (misread_keys, Array3::from_shape_fn((heads, value, latent), |(h, v, l)| of(h, nope + v, l)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is read so is another parameter, of the same numbers; read as it is stored it is the same one.
    #[test]
    fn another_order_moves_rows() {
        let keys = Array3::from_shape_fn((2, 3, 2), |(h, l, n)| (100 * h + 10 * n + l) as f32);
        let values = Array3::from_shape_fn((2, 2, 3), |(h, v, l)| (1000 + 100 * h + 10 * v + l) as f32);
        let (k, v) = misread(&keys, &values, Rows::ByHead, Rows::KeysFirst);
        assert_eq!((k[[0, 1, 1]], k[[1, 1, 0]], v[[0, 0, 2]]), (11.0, 1001.0, 102.0));
        let (k, v) = misread(&keys, &values, Rows::KeysFirst, Rows::ByHead);
        assert_eq!((k[[0, 0, 1]], k[[1, 0, 0]], v[[0, 1, 2]]), (10.0, 1000.0, 112.0));
        for rows in [Rows::ByHead, Rows::KeysFirst] {
            assert_eq!(misread(&keys, &values, rows, rows), (keys.clone(), values.clone()));
        }
    }
}
