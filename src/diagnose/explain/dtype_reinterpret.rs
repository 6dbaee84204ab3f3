//! DTYPE_REINTERPRET: a quantised tensor's bytes are read as plain numbers, because the parameter was created
//! unquantised.

use std::borrow::Cow;
use std::sync::Arc;

use lockstep_reference::ndarray::{Array1, Array2, Array3};
use lockstep_reference::{Param, RawTensor, weights};

use crate::diagnose::hypothesis::{Alter, Hypothesis, OpContext, on_ranks, value_of};
use crate::faults::dtype_reinterpret::{FAULT, reread};
use crate::quant::{QuantType, TypeId, dequantise, lookup};
use crate::verify::altered::{Key, Value};

/// The plain types that bytes may be taken for.
const PLAIN: [QuantType; 3] = [QuantType::BF16, QuantType::F16, QuantType::F32];

pub(super) fn hypotheses<'a>(op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
    let mut all = Vec::new();
    for (layer, param) in op.params() {
        let Ok(Some((name, tensor))) = weights::file_tensor(op.raw, op.config, layer, param, None) else {
            continue;
        };
        let TypeId::Known(info) = lookup(tensor.type_id) else { continue };
        if info.quant.is_none_or(QuantType::is_plain) {
            continue;
        }
        for ty in PLAIN {
            for ranks in op.scopes() {
                let scope = ranks.clone();
                let change = move |rank, key: Key| {
                    if (key.0, key.1) != (layer, param) {
                        return Ok(None);
                    }
                    let base = value_of(op.weights, key)?;
                    let Some(misread) = misread(op, layer, param, key.2, ty, &base) else { return Ok(None) };
                    on_ranks(&|r| op.placement(param, r), &scope, rank, key, &base, misread).map(Some)
                };
                all.push(Hypothesis {
                    kind: FAULT.kind,
                    site: op.tensor(layer, param),
                    statement: format!("the {} bytes of {name} are read as plain {ty}", info.name),
                    overturn:
                        "dequantise the tensor on load; if the operation still diverges, the type was not at fault"
                            .into(),
                    ranks,
                    also: Vec::new(),
                    reads: Some((param, Box::new(move || reread_tensor(op, layer, param, ty)))),
                    alter: Alter::Weights(Box::new(change)),
                });
            }
        }
    }
    all
}

/// The whole tensor as the misreading takes it.
fn reread_tensor<'a>(
    op: &'a OpContext<'a>,
    layer: Option<usize>,
    param: Param,
    ty: QuantType,
) -> Option<RawTensor<'a>> {
    let (_, tensor) = weights::file_tensor(op.raw, op.config, layer, param, None).ok()??;
    let bytes = Cow::Owned(reread(&tensor.bytes, ty, tensor.ne.iter().product()));
    Some(RawTensor { type_id: ty.info().id, ne: tensor.ne, bytes })
}

/// A parameter (or one expert, one row of the embedding) as the misreading sees it.
fn misread(
    op: &OpContext<'_>,
    layer: Option<usize>,
    param: Param,
    index: Option<usize>,
    ty: QuantType,
    base: &Value,
) -> Option<Value> {
    let (_, tensor) = weights::file_tensor(op.raw, op.config, layer, param, None).ok()??;
    let count: usize = tensor.ne.iter().product();
    let one = match base {
        Value::Vector(v) => v.len(),
        Value::Matrix(m) => m.len(),
        Value::Heads(h) => h.len(),
    };
    let first = index.unwrap_or(0) * one;
    if first + one > count {
        return None;
    }
    let each = ty.row_bytes(1);
    let bytes: Vec<u8> = tensor.bytes.iter().copied().cycle().skip(first * each).take(one * each).collect();
    let mut values = vec![0.0f32; one];
    dequantise(ty, &bytes, &mut values).ok()?;
    Some(match base {
        Value::Vector(_) => Value::Vector(Arc::new(Array1::from_vec(values))),
        Value::Matrix(m) => Value::Matrix(Arc::new(Array2::from_shape_vec(m.dim(), values).ok()?)),
        Value::Heads(h) => Value::Heads(Arc::new(Array3::from_shape_vec(h.dim(), values).ok()?)),
    })
}
