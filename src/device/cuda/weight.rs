//! Resident parameters: parts side by side, each a stack of matrices repacked into planes.

use std::sync::Arc;

use super::gpu::args;
use super::memory::Memory;
use crate::quant::QuantType;

/// A (fused) parameter on a GPU.
pub(super) struct CudaWeight {
    pub parts: Vec<Part>,
}

/// One part of a fused parameter.
pub(super) struct Part {
    pub ty: QuantType,
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
    /// Where the planes start, and what keeps them.
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
        self.stack * self.rows * self.covered / self.ty.block()
    }

    /// Bytes of one matrix.
    pub fn matrix_bytes(&self) -> usize {
        self.rows * self.ty.row_bytes(self.covered)
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
