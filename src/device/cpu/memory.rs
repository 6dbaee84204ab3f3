//! What the CPU device keeps: activations, indices, parameters in the file's own blocks, and the paged cache.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut, Range};

use super::matmul::Rows;
use crate::device::CacheShape;
use crate::quant::QuantType;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Values that begin with a cache line: a wide load of a row then touches one line, not two.
#[derive(Debug, Default)]
pub struct Aligned<T> {
    start: usize,
    all: Vec<T>,
}

impl<T: Clone> Aligned<T> {
    /// `n` copies of `value`.
    pub(super) fn of(n: usize, value: T) -> Self {
        let mut all = vec![value; n + LINE / size_of::<T>()];
        let start = all.as_ptr().align_offset(LINE);
        all.truncate(start + n);
        Aligned { start, all }
    }
}

impl<T> Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.all[self.start..]
    }
}

impl<T> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.all[self.start..]
    }
}

/// Values `[rows][width]`.
#[derive(Debug, Default)]
pub struct Table<T> {
    pub(super) width: usize,
    pub(super) data: Aligned<T>,
}

/// Activations.
pub type CpuBuf = Table<f32>;
/// Indices.
pub type CpuIndex = Table<i32>;

impl<T> Table<T> {
    /// Row `t`.
    pub(super) fn row(&self, t: usize) -> &[T] {
        &self.data[t * self.width..(t + 1) * self.width]
    }
    /// Row `t`, to be written.
    pub(super) fn row_mut(&mut self, t: usize) -> &mut [T] {
        &mut self.data[t * self.width..(t + 1) * self.width]
    }
}

/// A resident parameter: parts in order, each a stack of matrices in the file's layout.
#[derive(Debug)]
pub struct CpuWeight {
    pub(super) parts: Vec<Part>,
}

/// One part of a resident parameter.
#[derive(Debug)]
pub struct Part {
    pub(super) ty: QuantType,
    pub(super) rows: usize,
    /// Stored columns; the rank's own are `cols`.
    pub(super) covered: usize,
    pub(super) cols: Range<usize>,
    /// The first stored column, counted in the whole parameter.
    pub(super) first: usize,
    pub(super) stack: Vec<Vec<u8>>,
}

impl Part {
    /// The rows of one matrix of the stack.
    pub(super) fn matrix(&self, index: usize) -> Rows<'_> {
        Rows { ty: self.ty, bytes: &self.stack[index], rows: self.rows, cols: self.covered }
    }
    /// True if its columns are those that are stored, with none beside them.
    pub(super) fn is_aligned(&self) -> bool {
        self.cols == (0..self.covered)
    }
}

/// A paged cache of one row per token position and layer.
#[derive(Debug)]
pub struct CpuCache {
    pub(super) shape: CacheShape,
    pub(super) layers: Vec<Aligned<f32>>,
}

impl CpuCache {
    /// Where position `p` of a sequence with this block table lies, in rows of a layer.
    pub(super) fn slot(&self, table: &[u32], p: usize) -> usize {
        table[p / self.shape.page] as usize * self.shape.page + p % self.shape.page
    }
    /// The values of a layer at a slot.
    pub(super) fn row(&self, layer: usize, slot: usize) -> &[f32] {
        &self.layers[layer][slot * self.shape.width..(slot + 1) * self.shape.width]
    }
}

/// For every expert that is hit, the (token, slot) pairs that chose it, as `token * slots + slot`.
pub(super) fn by_expert(ids: &CpuIndex, slots: usize, n: usize) -> BTreeMap<usize, Vec<u32>> {
    let mut lists: BTreeMap<usize, Vec<u32>> = Default::default();
    for t in 0..n {
        for (slot, id) in ids.row(t).iter().take(slots).enumerate() {
            if let Ok(id) = usize::try_from(*id) {
                lists.entry(id).or_default().push((t * slots + slot) as u32);
            }
        }
    }
    lists
}
