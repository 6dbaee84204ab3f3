//! What the forward pass needs of a device. A rank owns one. It keeps buffers, parameters, caches and the step's inputs
//! under the numbers that a program knows them by, and runs a program's calls one by one.
//!
//! No call returns data to the host inside a step, so that a whole step can be recorded and replayed.

pub mod around;
pub mod batch;
pub mod call;
pub mod check;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod draw;
pub mod program;
pub mod recipe;

use std::borrow::Cow;
use std::ops::Range;

pub use around::{Around, Clock, Spent};
pub use batch::{Batch, Token};
pub use call::{BufId, CacheId, Call, IndexId, Op, Operand, Rounding, Router, Rows, View, WeightId};
pub use check::ProgramError;
pub use draw::Draw;
pub use program::{BufRows, BufSpec, Limits, Program, ProgramId, Show, Stores, Want};
pub use recipe::Recipe;

use crate::checkpoint::Matrix;
use crate::comm::CommError;
use crate::model::Place;
use crate::quant::QuantType;

/// A device that could not do what it was told.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum DeviceError {
    #[error("rank {rank}{}: {problem}", place.map(|p| format!(", {p}")).unwrap_or_default())]
    Failed { rank: usize, place: Option<Place>, problem: String },
    #[error(transparent)]
    Comm(#[from] CommError),
}

/// Rows and whole blocks of columns of a stored matrix. Nothing is copied until a device takes it, since a rank's part of
/// an expert stack can be larger than the host's memory.
#[derive(Debug)]
pub struct Piece<'a> {
    /// Type of the blocks.
    pub ty: QuantType,
    /// Rows.
    pub rows: usize,
    /// Values per row.
    pub cols: usize,
    source: Cow<'a, [u8]>,
    /// Where the first row's bytes start in the source, and from one row's to the next's.
    start: usize,
    stride: usize,
}

impl<'a> Piece<'a> {
    /// Rows `rows` and columns `cols` (whole blocks) of a matrix.
    pub fn new(matrix: Matrix<'a>, rows: Range<usize>, cols: Range<usize>) -> Self {
        let stride = matrix.ty.row_bytes(matrix.cols);
        let start = rows.start * stride + matrix.ty.row_bytes(cols.start);
        Piece { ty: matrix.ty, rows: rows.len(), cols: cols.len(), source: matrix.bytes, start, stride }
    }

    /// Bytes of one row.
    fn row_bytes(&self) -> usize {
        self.ty.row_bytes(self.cols)
    }

    /// Bytes in all.
    pub fn len(&self) -> usize {
        self.rows * self.row_bytes()
    }

    /// True without rows or columns.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the bytes from `first` on, as many as `out` holds.
    pub fn copy(&self, first: usize, out: &mut [u8]) {
        let row_bytes = self.row_bytes();
        if row_bytes == self.stride {
            out.copy_from_slice(&self.source[self.start + first..][..out.len()]);
            return;
        }
        let mut done = 0;
        while done < out.len() {
            let (row, at) = ((first + done) / row_bytes, (first + done) % row_bytes);
            let n = (row_bytes - at).min(out.len() - done);
            out[done..done + n].copy_from_slice(&self.source[self.start + row * self.stride + at..][..n]);
            done += n;
        }
    }

    /// All bytes, side by side.
    pub fn into_bytes(self) -> Vec<u8> {
        match self.source {
            Cow::Owned(bytes) if bytes.len() == self.rows * self.ty.row_bytes(self.cols) => bytes,
            _ => {
                let mut bytes = vec![0; self.len()];
                self.copy(0, &mut bytes);
                bytes
            }
        }
    }
}

/// One part of a fused parameter as a rank holds it.
#[derive(Debug)]
pub struct PartSpec<'a> {
    /// One piece per entry of the stack (one for plain matrices): the rank's rows, covered columns, file layout.
    pub stack: Vec<Piece<'a>>,
    /// The columns that belong to the rank, counted from the first covered one.
    pub cols: Range<usize>,
    /// The first covered column, counted in the whole parameter.
    pub first: usize,
}

/// Which columns of the whole parameter a resident part stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Columns {
    /// The columns that the device multiplies.
    pub own: Range<usize>,
    /// The columns that are stored: `own`, extended to whole blocks.
    pub stored: Range<usize>,
}

/// Shape of the key caches.
#[derive(Clone, Copy, Debug)]
pub struct CacheShape {
    /// Trunk layers.
    pub layers: usize,
    /// Tokens per page.
    pub page: usize,
    /// Pages.
    pub pages: usize,
    /// Width of a row.
    pub width: usize,
}

/// What a step is laid out for. A device that records steps rounds up, so that one recording serves many steps; rows
/// behind the batch's own then hold tokens without a position, which take part in nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepShape {
    /// Rows of tokens.
    pub tokens: usize,
    /// Keys that the longest sequence may have.
    pub context: usize,
    /// Rows of logits.
    pub logits: usize,
    /// True if the step may be recorded and replayed.
    pub recorded: bool,
    /// True if the device chooses each row's next token and puts it into its own inputs.
    pub ahead: bool,
}

impl StepShape {
    /// The shape of just this batch; it may be recorded if it decodes.
    pub fn exact(batch: &Batch) -> Self {
        let context = batch.tokens.iter().map(|t| t.position as usize + 1).max().unwrap_or(0);
        let (tokens, logits) = (batch.tokens.len(), batch.logits.len());
        StepShape { tokens, context, logits, recorded: batch.decodes(), ahead: !batch.ahead.is_empty() }
    }

    /// Rows of a call.
    pub fn rows(&self, rows: Rows) -> usize {
        match rows {
            Rows::Tokens => self.tokens,
            Rows::Logits => self.logits,
        }
    }
}

/// What is to happen with a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// It was replayed from a recording.
    Replayed,
    /// Its calls are to be run.
    Run,
}

/// A rank's device. A device that has failed is not used again.
///
/// # Errors
/// Every method fails with the rank, the place and what did not fit.
pub trait Device: Send {
    /// Makes a parameter resident: parts joined by row, in this order. Parameters are numbered from 0 in order of coming.
    fn load(&mut self, parts: Vec<PartSpec<'_>>) -> Result<(), DeviceError>;
    /// Makes the buffers, indices and caches of a rank, and room for a step's inputs. Parameters come before.
    fn alloc(&mut self, stores: &Stores, limits: Limits) -> Result<(), DeviceError>;
    /// The bytes of part `part` of a parameter as the device holds them, unpacked to the file's layout, and the columns that
    /// it stands for, from the ranges that the device multiplies by.
    fn read_weight(&mut self, weight: WeightId, part: usize) -> Result<(Vec<u8>, Columns), DeviceError>;
    /// Exchanges two parts of parameters, each given as a parameter and the part's number, of the same rows and columns; the
    /// bytes stay where they are. Never while recording.
    fn exchange(&mut self, a: (WeightId, usize), b: (WeightId, usize)) -> Result<(), DeviceError>;
    /// Copies the first `n` rows of a view to the host, `[n][heads][width]`: probes and logits only, never while recording.
    fn read(&mut self, view: View, n: usize) -> Result<Vec<f32>, DeviceError>;
    /// Copies values over the first `n` rows of a view.
    fn write(&mut self, view: View, n: usize, values: &[f32]) -> Result<(), DeviceError>;
    /// Copies the first `n` rows of indices to the host.
    fn read_index(&mut self, index: IndexId, n: usize) -> Result<Vec<i32>, DeviceError>;
    /// Overwrites the first `n` rows of indices.
    fn write_index(&mut self, index: IndexId, n: usize, values: &[i32]) -> Result<(), DeviceError>;
    /// Replaces the step's inputs.
    fn set_inputs(&mut self, batch: &Batch, shape: StepShape) -> Result<(), DeviceError>;
    /// The shape to run a step in that has at least `wanted`; recorded only if that is wanted.
    fn shape(&self, wanted: StepShape) -> StepShape {
        StepShape { recorded: false, ..wanted }
    }
    /// Begins a step, whose inputs are set: replays its recording, if there is one.
    fn begin(&mut self, _shape: StepShape, _program: ProgramId) -> Result<Next, DeviceError> {
        Ok(Next::Run)
    }
    /// Runs a call of the step.
    fn run(&mut self, call: &Call, shape: StepShape) -> Result<(), DeviceError>;
    /// Ends a step, replayed or run. If its shape is `ahead`, rank 0 lets the host have the tokens, once it has run.
    fn end(&mut self, shape: StepShape, program: ProgramId) -> Result<(), DeviceError>;
    /// The tokens of the oldest step given ahead that were not taken yet, on rank 0. Waits for it.
    fn posted(&mut self) -> Result<Vec<u32>, DeviceError>;
    /// Most rows for which the device chooses next tokens itself, and so runs a step before the host has seen the last one;
    /// a power of two, or 0 if it does not.
    fn runs_ahead(&self) -> usize;
}
