//! DTYPE_REINTERPRET: a quantised tensor's bytes are read as plain numbers, because the parameter was created
//! unquantised.

use std::borrow::Cow;
use std::sync::Arc;

use lockstep_reference::ndarray::{Array1, Array2, Array3};
use lockstep_reference::{ParamKey, RawTensor, RefParam, weights};

use crate::diagnose::hypothesis::{Hypothesis, Misread, OpContext};
use crate::faults::dtype_reinterpret::{FAULT, reread};
use crate::quant::{QuantType, TypeId, dequantise, lookup};
use crate::verify::patched_weights::Value;

/// The plain types that bytes may be taken for.
const PLAIN: [QuantType; 3] = [QuantType::BF16, QuantType::F16, QuantType::F32];

/// Each quantised parameter of the operation, read as each plain type.
pub(super) fn hypotheses<'a>(op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
    let overturn = "dequantise the tensor on load; if the operation still diverges, the type was not at fault";
    let mut all = Vec::new();
    for (layer, param) in op.params() {
        let Some((name, tensor)) = tensor_of(op, layer, param) else { continue };
        let TypeId::Known(info) = lookup(tensor.type_id) else { continue };
        if info.quant.is_none_or(QuantType::is_plain) {
            continue;
        }
        for ty in PLAIN {
            for ranks in op.scopes() {
                let alter = op.altering((layer, param), ranks.clone(), move |key, base| misread(op, key, ty, base));
                let statement = format!("the {} bytes of {name} are read as plain {ty}", info.name);
                let site = op.tensor(layer, param);
                let whole = move || {
                    let (_, RawTensor { ne, bytes, .. }) = tensor_of(op, layer, param)?;
                    let bytes = Cow::Owned(reread(&bytes, ty, ne.iter().product()));
                    Some(RawTensor { type_id: ty.info().id, ne, bytes })
                };
                let reads: Option<(_, Misread<'a>)> = Some((param, Box::new(whole)));
                all.push(Hypothesis { site, ranks, reads, ..op.hypothesis(FAULT.kind, statement, overturn, alter) });
            }
        }
    }
    all
}

fn tensor_of<'a>(op: &'a OpContext<'a>, layer: Option<usize>, param: RefParam) -> Option<(String, RawTensor<'a>)> {
    weights::file_tensor(op.raw, op.judge.config, layer, param, None).ok()?
}

/// A parameter (or one expert, one row of the embedding) as the misreading sees it.
fn misread(op: &OpContext<'_>, (layer, param, index): ParamKey, ty: QuantType, base: &Value) -> Option<Value> {
    let (_, tensor) = tensor_of(op, layer, param)?;
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
