//! The container as the reference sees it: raw metadata, shapes, types and bytes by name, and nothing that this crate
//! has concluded from them.

use lockstep_reference::source::{Format, Meta, RawModel, RawTensor};

use super::{Naming, TensorSource};
use crate::gguf::Value;

/// A source handed to the reference uninterpreted.
pub struct Raw<'a>(pub &'a dyn TensorSource);

impl RawModel for Raw<'_> {
    fn format(&self) -> Format {
        match self.0.naming() {
            Naming::Gguf => Format::Gguf,
            Naming::Hf => Format::Hf,
        }
    }

    fn meta(&self, key: &str) -> Option<Meta> {
        self.0.metadata().get(key).map(meta)
    }

    fn tensor(&self, name: &str) -> Option<RawTensor<'_>> {
        let view = self.0.tensor(name)?;
        let ne = view.ne.iter().map(|n| usize::try_from(*n).ok()).collect::<Option<Vec<usize>>>()?;
        Some(RawTensor { type_id: view.ty.id, ne, bytes: view.bytes })
    }
}

fn meta(value: &Value) -> Meta {
    match value {
        Value::Bool(v) => Meta::Bool(*v),
        Value::Str(v) => Meta::Str(v.clone()),
        Value::Array(v) => Meta::Array((0..v.len()).filter_map(|i| v.get(i)).map(|v| meta(&v)).collect()),
        Value::F32(v) => Meta::F64((*v).into()),
        Value::F64(v) => Meta::F64(*v),
        Value::I8(v) => signed((*v).into()),
        Value::I16(v) => signed((*v).into()),
        Value::I32(v) => signed((*v).into()),
        Value::I64(v) => signed(*v),
        Value::U8(v) => Meta::U64((*v).into()),
        Value::U16(v) => Meta::U64((*v).into()),
        Value::U32(v) => Meta::U64((*v).into()),
        Value::U64(v) => Meta::U64(*v),
    }
}

fn signed(v: i64) -> Meta {
    u64::try_from(v).map_or(Meta::I64(v), Meta::U64)
}
