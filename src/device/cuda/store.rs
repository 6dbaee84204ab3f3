//! What a rank keeps on its GPU beside weights: activations, indices, key caches; and how the host reads and writes them.

use std::ops::Range;

use super::memory::Memory;
use super::{CudaDevice, Done, Rows};
use crate::device::{BufId, BufRows, CacheShape, DeviceError, Limits, StepShape, Stores, View, call};

/// Activations `[rows][row]` on a GPU; rows are padded so that each starts at a whole load.
pub(super) struct CudaBuf {
    memory: Memory,
    rows: usize,
    pub row: usize,
}

impl CudaBuf {
    /// Address of a column of the first row.
    pub fn at(&self, col: usize) -> u64 {
        self.memory.address() + 4 * col as u64
    }

    /// Values from one row to the next, as kernels take it.
    pub fn row(&self) -> i64 {
        self.row as i64
    }

    /// True if the first `n` rows of a view lie in one piece.
    fn is_whole(&self, view: View, n: usize) -> bool {
        n == 1 || (view.start == 0 && view.len() == self.row)
    }
}

/// Indices `[rows][width]` on a GPU.
pub(super) struct CudaIndex {
    pub memory: Memory,
    pub rows: usize,
    pub width: usize,
}

/// Key rows by layer, page and place, all in one piece.
pub(super) struct CudaCache {
    memory: Memory,
    pub shape: CacheShape,
}

impl CudaCache {
    /// Address of a layer's first row.
    pub fn layer(&self, layer: usize) -> u64 {
        self.memory.address() + (4 * layer * self.shape.pages * self.shape.page * self.shape.width) as u64
    }
}

/// Values of a row that holds `width`, with what pads it.
fn padded(width: usize) -> usize {
    width.next_multiple_of(4)
}

/// The columns from a view's first to its last.
fn covering(view: View) -> View {
    View::cols(view.buf, view.start, view.end() - view.start)
}

/// Where each head of `n` rows of a view lies in the rows that cover it.
fn heads_in_covering(view: View, n: usize) -> impl Iterator<Item = Range<usize>> {
    let (first, wide) = (view.start, view.end() - view.start);
    (0..n).flat_map(move |t| view.ranges().map(move |r| t * wide + r.start - first..t * wide + r.end - first))
}

impl CudaDevice {
    fn memory(&self, bytes: usize) -> Result<Memory, DeviceError> {
        Memory::new(&self.gpu, bytes).map_err(|e| self.error(e))
    }

    /// Makes everything that calls know by number.
    pub(super) fn make(&mut self, stores: &Stores, limits: Limits) -> Done {
        for (id, spec) in stores.bufs.iter().enumerate() {
            let rows = match spec.rows {
                BufRows::Step(call::Rows::Tokens) => limits.tokens,
                BufRows::Step(call::Rows::Logits) => limits.logits,
                BufRows::Vector => 1,
                BufRows::Context => 0, // see `fit`
            };
            let row = padded(spec.width);
            self.bufs.push(CudaBuf { memory: self.memory(4 * rows * row)?, rows, row });
            if let Some(value) = spec.fill {
                self.set_values(View::cols(BufId(id), 0, spec.width), rows, &vec![value; rows * spec.width])?;
            }
        }
        for &width in &stores.indices {
            let (rows, memory) = (limits.tokens, self.memory(4 * limits.tokens * width)?);
            memory.upload(0, &vec![-1i32; rows * width]).map_err(|e| self.error(e))?;
            self.indices.push(CudaIndex { memory, rows, width });
        }
        for &shape in &stores.caches {
            let memory = self.memory(4 * shape.layers * shape.pages * shape.page * shape.width)?;
            self.caches.push(CudaCache { memory, shape });
        }
        Ok(())
    }

    /// Lays a buffer out for rows as wide as the step's context. No recording uses it, so what is too small goes.
    pub(super) fn fit(&mut self, id: BufId, shape: StepShape) -> Done {
        let (rows, row) = (shape.tokens, padded(shape.context));
        if self.bufs[id.0].memory.bytes() < 4 * rows * row {
            self.bufs[id.0].memory = self.memory(0)?; // the old goes before the new comes
            self.bufs[id.0].memory = self.memory(4 * rows * row)?;
        }
        let buf = &mut self.bufs[id.0];
        (buf.rows, buf.row) = (rows, row);
        Ok(())
    }

    /// Address of a vector.
    pub(super) fn vector(&self, id: BufId) -> u64 {
        self.bufs[id.0].at(0)
    }

    /// A view's heads, as the products take them.
    pub(crate) fn rows(&self, view: View) -> Rows {
        let buf = &self.bufs[view.buf.0];
        let group = if view.heads > 1 { view.stride as i64 } else { 0 };
        Rows { at: buf.at(view.start), row: buf.row(), group }
    }

    /// Address, row and width of a view whose columns are a range, as most kernels take them.
    pub(super) fn cols(&self, view: View) -> Result<(u64, i64, i32), DeviceError> {
        if !view.is_dense() {
            return Err(self.error(format!("expected columns side by side, found {view:?}")));
        }
        let buf = &self.bufs[view.buf.0];
        Ok((buf.at(view.start), buf.row(), view.len() as i32))
    }

    /// Copies rows of a view to the host.
    pub(super) fn values(&self, view: View, n: usize) -> Result<Vec<f32>, DeviceError> {
        if !view.is_dense() {
            let all = self.values(covering(view), n)?;
            return Ok(heads_in_covering(view, n).flat_map(|head| all[head].iter().copied()).collect());
        }
        let mut out = vec![0.0f32; n * view.len()];
        if out.is_empty() {
            return Ok(out);
        }
        let buf = &self.bufs[view.buf.0];
        if buf.is_whole(view, n) {
            buf.memory.download(4 * view.start, &mut out, &|| self.last()).map_err(|e| self.error(e))?;
            return Ok(out);
        }
        let dense = self.memory(4 * out.len())?;
        let (from, row, width) = self.cols(view)?;
        let (to, y_row, rows) = (dense.address(), i64::from(width), n as i32);
        self.each("copy", out.len(), &[&from, &row, &width, &to, &y_row, &rows])?;
        dense.download(0, &mut out, &|| self.last()).map_err(|e| self.error(e))?;
        Ok(out)
    }

    /// Copies values over rows of a view.
    pub(super) fn set_values(&self, view: View, n: usize, values: &[f32]) -> Done {
        if !view.is_dense() {
            let mut all = self.values(covering(view), n)?;
            for (head, own) in heads_in_covering(view, n).zip(values.chunks(view.width)) {
                all[head].copy_from_slice(own);
            }
            return self.set_values(covering(view), n, &all);
        }
        let buf = &self.bufs[view.buf.0];
        let n = n.min(buf.rows);
        let values = &values[..n * view.len()];
        if values.is_empty() {
            return Ok(());
        }
        if buf.is_whole(view, n) {
            // On the stream, so behind whatever still reads what was there.
            return buf.memory.upload(4 * view.start, values).map_err(|e| self.error(e));
        }
        let dense = self.memory(4 * values.len())?;
        dense.upload(0, values).map_err(|e| self.error(e))?;
        let (to, y_row, width) = self.cols(view)?;
        let (from, row, rows) = (dense.address(), i64::from(width), n as i32);
        self.each("copy", values.len(), &[&from, &row, &width, &to, &y_row, &rows])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_found_in_the_columns_that_cover_them() {
        let view = View { buf: BufId(0), start: 3, width: 2, heads: 2, stride: 5 };
        assert_eq!((covering(view).start, covering(view).width), (3, 7));
        assert_eq!(heads_in_covering(view, 2).collect::<Vec<_>>(), [0..2, 5..7, 7..9, 12..14]);
    }
}
