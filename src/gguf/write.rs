//! Writing GGUF version 3: metadata, tensor table, data. Used for fixtures and converted models; what it writes,
//! [`super::header::parse`] reads back.

use std::io::{self, Write};

use super::value::Value;
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
    let mut head = b"GGUF".to_vec();
    3u32.put(&mut head);
    (tensors.len() as u64).put(&mut head);
    (metadata.len() as u64).put(&mut head);
    for (key, value) in metadata {
        key.put(&mut head);
        value.put(&mut head);
    }
    let (mut offsets, mut next) = (Vec::with_capacity(tensors.len()), 0u64);
    for t in tensors {
        t.name.put(&mut head);
        (t.ne.len() as u32).put(&mut head);
        t.ne.iter().for_each(|extent| extent.put(&mut head));
        t.ty.id.put(&mut head);
        next.put(&mut head);
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

/// What stands in a file as bytes.
pub(super) trait Put {
    /// Appends them.
    fn put(&self, out: &mut Vec<u8>);
}

macro_rules! put {
    ($($number:ty)*) => {
        $(impl Put for $number {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
        })*
    };
}

put! { u8 i8 u16 i16 u32 i32 f32 u64 i64 f64 }

impl Put for bool {
    fn put(&self, out: &mut Vec<u8>) {
        u8::from(*self).put(out);
    }
}

impl Put for String {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u64).put(out);
        out.extend_from_slice(self.as_bytes());
    }
}
