//! Writing GGUF version 3: metadata, tensor table, data. Used for fixtures and converted models; what it writes,
//! [`super::header::parse`] reads back.

use std::io::{self, Write};

use super::value::{Array, Value};
use crate::quant::TypeInfo;

/// A tensor to be written; its data follows in the same order.
#[derive(Debug, Clone)]
pub struct NewTensor {
    /// Name in the file.
    pub name: String,
    /// Axes, fastest first.
    pub ne: Vec<u64>,
    /// Type.
    pub ty: &'static TypeInfo,
}

impl NewTensor {
    /// Data size in bytes; `None` when rows are not whole blocks or the size overflows.
    pub fn bytes(&self) -> Option<u64> {
        let rows = self.ne.iter().skip(1).try_fold(1u64, |a, n| a.checked_mul(*n))?;
        self.ty.row_bytes(*self.ne.first()?)?.checked_mul(rows)
    }
}

/// Writes everything before the data and returns the offset of each tensor relative to the data start, which is where
/// `out` then stands. The caller writes each tensor's bytes and pads each to `alignment` with [`pad`].
///
/// # Errors
/// Write errors, and `InvalidInput` for a tensor whose rows are not whole blocks.
pub fn header(
    out: &mut impl Write,
    alignment: u64,
    metadata: &[(String, Value)],
    tensors: &[NewTensor],
) -> io::Result<Vec<u64>> {
    let mut head = Vec::new();
    head.extend_from_slice(b"GGUF");
    head.extend_from_slice(&3u32.to_le_bytes());
    head.extend_from_slice(&(tensors.len() as u64).to_le_bytes());
    head.extend_from_slice(&(metadata.len() as u64).to_le_bytes());
    for (key, v) in metadata {
        string(&mut head, key);
        value(&mut head, v);
    }
    let (mut offsets, mut next) = (Vec::with_capacity(tensors.len()), 0u64);
    for t in tensors {
        string(&mut head, &t.name);
        head.extend_from_slice(&(t.ne.len() as u32).to_le_bytes());
        for extent in &t.ne {
            head.extend_from_slice(&extent.to_le_bytes());
        }
        head.extend_from_slice(&t.ty.id.to_le_bytes());
        head.extend_from_slice(&next.to_le_bytes());
        offsets.push(next);
        let end = t.bytes().and_then(|b| next.checked_add(b)).and_then(|e| e.checked_next_multiple_of(alignment));
        next = end.ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, format!("tensor {}: rows are not whole blocks", t.name))
        })?;
    }
    if !tensors.is_empty() {
        head.resize(head.len().next_multiple_of(alignment as usize), 0);
    }
    out.write_all(&head)?;
    Ok(offsets)
}

/// Writes the zeros between the end of `bytes` bytes of data and the next multiple of `alignment`.
///
/// # Errors
/// Write errors.
pub fn pad(out: &mut impl Write, bytes: u64, alignment: u64) -> io::Result<()> {
    let missing = bytes.next_multiple_of(alignment) - bytes;
    out.write_all(&vec![0; missing as usize])
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&(text.len() as u64).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

fn value(out: &mut Vec<u8>, value: &Value) {
    macro_rules! scalar {
        ($id:expr, $v:expr) => {{
            out.extend_from_slice(&($id as u32).to_le_bytes());
            out.extend_from_slice(&$v.to_le_bytes());
        }};
    }
    match value {
        Value::U8(v) => scalar!(0, v),
        Value::I8(v) => scalar!(1, v),
        Value::U16(v) => scalar!(2, v),
        Value::I16(v) => scalar!(3, v),
        Value::U32(v) => scalar!(4, v),
        Value::I32(v) => scalar!(5, v),
        Value::F32(v) => scalar!(6, v),
        Value::Bool(v) => scalar!(7, (*v as u8)),
        Value::Str(v) => {
            out.extend_from_slice(&8u32.to_le_bytes());
            string(out, v);
        }
        Value::U64(v) => scalar!(10, v),
        Value::I64(v) => scalar!(11, v),
        Value::F64(v) => scalar!(12, v),
        Value::Array(v) => {
            out.extend_from_slice(&9u32.to_le_bytes());
            array(out, v);
        }
    }
}

fn array(out: &mut Vec<u8>, array_: &Array) {
    macro_rules! elements {
        ($id:expr, $v:expr) => {{
            out.extend_from_slice(&($id as u32).to_le_bytes());
            out.extend_from_slice(&($v.len() as u64).to_le_bytes());
            for x in $v {
                out.extend_from_slice(&x.to_le_bytes());
            }
        }};
    }
    match array_ {
        Array::U8(v) => elements!(0, v),
        Array::I8(v) => elements!(1, v),
        Array::U16(v) => elements!(2, v),
        Array::I16(v) => elements!(3, v),
        Array::U32(v) => elements!(4, v),
        Array::I32(v) => elements!(5, v),
        Array::F32(v) => elements!(6, v),
        Array::Bool(v) => elements!(7, v.iter().map(|b| *b as u8).collect::<Vec<_>>()),
        Array::Str(v) => {
            out.extend_from_slice(&8u32.to_le_bytes());
            out.extend_from_slice(&(v.len() as u64).to_le_bytes());
            for s in v {
                string(out, s);
            }
        }
        Array::U64(v) => elements!(10, v),
        Array::I64(v) => elements!(11, v),
        Array::F64(v) => elements!(12, v),
        Array::Array(v) => {
            out.extend_from_slice(&9u32.to_le_bytes());
            out.extend_from_slice(&(v.len() as u64).to_le_bytes());
            for a in v {
                array(out, a);
            }
        }
    }
}
