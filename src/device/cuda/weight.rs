//! Resident parameters: parts side by side, each a stack of matrices repacked into planes or tiles.

use std::sync::Arc;

use lockstep_kernels::geometry::TILE_PARTS;

use super::format::Format;
use super::gpu::args;
use super::memory::Memory;

/// A (fused) parameter on a GPU.
pub(super) struct CudaWeight {
    pub parts: Vec<Part>,
}

impl CudaWeight {
    /// Its parts, in runs that one kernel can take: as many as it takes, of one format and the same columns.
    pub fn runs(&self) -> impl Iterator<Item = &[Part]> {
        let same = |a: &Part, b: &Part| (a.format, a.covered, &a.cols) == (b.format, b.covered, &b.cols);
        self.parts.chunk_by(same).flat_map(|run| run.chunks(TILE_PARTS))
    }
}

/// One part of a fused parameter.
pub(super) struct Part {
    pub format: Format,
    /// Matrices.
    pub stack: usize,
    /// Rows of each.
    pub rows: usize,
    /// Stored columns of each: whole blocks.
    pub covered: usize,
    /// The rank's columns among them.
    pub cols: std::ops::Range<usize>,
    /// The first stored column, counted in the whole parameter.
    pub first: usize,
    /// Where the planes or tiles start, and what keeps them.
    pub address: u64,
    pub _memory: Arc<Memory>,
}

/// A part as kernels take it.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct MatrixArg {
    pub planes: u64,
    pub blocks: i64,
    pub rows: i32,
    pub cols: i32,
}

args!(MatrixArg);

impl Part {
    /// Blocks of the whole stack.
    pub fn blocks(&self) -> usize {
        self.stack * self.rows * self.covered / self.format.ty.block()
    }

    /// Bytes of one matrix.
    pub fn matrix_bytes(&self) -> usize {
        self.rows * self.format.ty.row_bytes(self.covered)
    }

    /// True if the stored columns are the rank's own.
    pub fn is_aligned(&self) -> bool {
        self.cols.len() == self.covered
    }

    /// As kernels take it.
    pub fn matrix(&self) -> MatrixArg {
        MatrixArg {
            planes: self.address,
            blocks: self.blocks() as i64,
            rows: self.rows as i32,
            cols: self.covered as i32,
        }
    }
}
