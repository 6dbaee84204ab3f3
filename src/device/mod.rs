//! What the forward pass needs of a device, at the granularity at which a device may fuse.
//!
//! A rank owns one device. Activations are f32 buffers of `[rows][width]`; a step's inputs (ids, positions, block
//! tables) live in device buffers too, and no operation returns data to the host, so that a whole step can be recorded
//! and replayed. Fused operations have a default body of primitive ones; where a fused kernel has interior probe points,
//! it takes a tap that says whether they are wanted.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod recipe;
pub mod timed;

use std::borrow::Cow;
use std::ops::Range;

use crate::checkpoint::Matrix;
use crate::engine::batch::Batch;
use crate::model::{Config, Place};
use crate::quant::QuantType;

/// A device that could not do what it was told.
#[derive(Debug, thiserror::Error)]
#[error("rank {rank}{}: {problem}", .place.map_or_else(String::new, |p| format!(", {p}")))]
pub struct DeviceError {
    /// The rank.
    pub rank: usize,
    /// The place in the forward pass; `None` while loading.
    pub place: Option<Place>,
    /// What went wrong.
    pub problem: String,
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

/// Heads side by side in a buffer: head `h` of a row starts at `start + h * stride` and is `width` wide.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// First value of head 0.
    pub start: usize,
    /// From one head to the next.
    pub stride: usize,
    /// Values per head.
    pub width: usize,
    /// Heads.
    pub count: usize,
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
    /// The shape of just this batch.
    pub fn exact(batch: &Batch) -> Self {
        let context = batch.tokens.iter().map(|t| t.position as usize + 1).max().unwrap_or(0);
        StepShape { tokens: batch.tokens.len(), context, logits: batch.logits.len(), recorded: false, ahead: false }
    }
}

/// The operations. `n` is the number of rows (tokens) of this step; buffers may have room for more.
///
/// # Errors
/// Every operation fails with the site, the rank and what did not fit; a failed device is not used again.
#[allow(clippy::too_many_arguments)] // an operation names its operands
pub trait Device: Send + Sized + 'static {
    /// f32 activations `[rows][width]`.
    type Buf: Send;
    /// i32 indices `[rows][width]`, -1 where there is none.
    type Index: Send;
    /// A resident (fused) parameter.
    type Weight: Send;
    /// A step's inputs.
    type Inputs: Send;
    /// Rows per token position, by layer and page.
    type Cache: Send;

    /// Allocates activations of zeros.
    fn buf(&self, rows: usize, width: usize) -> Result<Self::Buf, DeviceError>;
    /// Uploads plain f32 values as one row.
    fn vector(&self, values: &[f32]) -> Result<Self::Buf, DeviceError>;
    /// Allocates indices.
    fn index(&self, rows: usize, width: usize) -> Result<Self::Index, DeviceError>;
    /// Uploads a parameter: parts joined by row, in this order.
    fn weight(&self, parts: Vec<PartSpec<'_>>) -> Result<Self::Weight, DeviceError>;
    /// The bytes of part `part` as the device holds them, unpacked to the file's layout.
    fn read_weight(&self, weight: &Self::Weight, part: usize) -> Result<Vec<u8>, DeviceError>;
    /// The columns that part `part` stands for, from the ranges that the device multiplies by.
    fn read_cols(&self, weight: &Self::Weight, part: usize) -> Result<Columns, DeviceError>;
    /// Allocates inputs for at most `tokens` tokens of `sequences` sequences of `pages` pages.
    fn inputs(&self, tokens: usize, sequences: usize, pages: usize) -> Result<Self::Inputs, DeviceError>;
    /// The shape to run a batch in. A step that is listened to is never recorded.
    fn shape(&self, _inputs: &Self::Inputs, batch: &Batch, _listened: bool) -> StepShape {
        StepShape::exact(batch)
    }
    /// Replaces a step's inputs.
    fn set_inputs(&self, inputs: &mut Self::Inputs, batch: &Batch, shape: StepShape) -> Result<(), DeviceError>;
    /// Replays the recording of a shape; false if there is none, and then the operations that follow are run, and may be
    /// recorded, until [`Device::finish`].
    fn replay(&self, _shape: StepShape) -> Result<bool, DeviceError> {
        Ok(false)
    }
    /// Ends a step whose operations were given one by one.
    fn finish(&self, _shape: StepShape) -> Result<(), DeviceError> {
        Ok(())
    }
    /// Most rows for which the device can choose the next tokens itself, and so run a step before the host has seen the
    /// last one; a power of two, or 0 if it cannot.
    fn runs_ahead(&self) -> usize {
        0
    }
    /// The context to lay a step out for whose longest sequence has `longest` keys.
    fn context(&self, _inputs: &Self::Inputs, longest: usize) -> usize {
        longest
    }
    /// This rank's choice in each of `n` rows, as the inputs say ([`crate::engine::sampler::Draw`]), from its `width`
    /// logits, of which the first is token `first`'s. For devices that run ahead.
    fn best(
        &self,
        site: Place,
        _logits: &Self::Buf,
        _: &Self::Inputs,
        _first: usize,
        _width: usize,
        _n: usize,
    ) -> Result<(), DeviceError> {
        Err(self.cannot_run_ahead(site))
    }
    /// The best of `ranks` ranks' choices becomes each row's next token, in the inputs.
    fn advance(&self, site: Place, _: &mut Self::Inputs, _ranks: usize, _n: usize) -> Result<(), DeviceError> {
        Err(self.cannot_run_ahead(site))
    }
    /// Lets the host have the tokens of the step given last, once it has run: see [`Device::posted`].
    fn post(&self, site: Place, _: &mut Self::Inputs, _n: usize) -> Result<(), DeviceError> {
        Err(self.cannot_run_ahead(site))
    }
    /// The tokens of the oldest step that was posted and not taken yet. Waits for it.
    fn posted(&self, site: Place, _: &mut Self::Inputs) -> Result<Vec<u32>, DeviceError> {
        Err(self.cannot_run_ahead(site))
    }
    /// The error of a device that does not run ahead.
    fn cannot_run_ahead(&self, site: Place) -> DeviceError {
        DeviceError { rank: 0, place: Some(site), problem: "this device does not choose tokens itself".into() }
    }
    /// Allocates a cache.
    fn cache(&self, shape: CacheShape) -> Result<Self::Cache, DeviceError>;

    /// Copies columns of rows to the host (probes and logits only, never inside a recorded step).
    fn read(&self, buf: &Self::Buf, n: usize, cols: Range<usize>) -> Result<Vec<f32>, DeviceError>;
    /// Copies values over columns of rows (probes only).
    fn write(&self, buf: &mut Self::Buf, n: usize, cols: Range<usize>, values: &[f32]) -> Result<(), DeviceError>;
    /// Copies indices to the host (probes only).
    fn read_index(&self, index: &Self::Index, n: usize) -> Result<Vec<i32>, DeviceError>;
    /// Overwrites indices (probes only).
    fn write_index(&self, index: &mut Self::Index, n: usize, values: &[i32]) -> Result<(), DeviceError>;

    /// Rows `first_row..` of a vocabulary-parallel embedding; ids of other ranks give zeros.
    fn embed(
        &self,
        site: Place,
        table: &Self::Weight,
        first_row: usize,
        inputs: &Self::Inputs,
        n: usize,
        out: &mut Self::Buf,
    ) -> Result<(), DeviceError>;
    /// `out[:, out_cols.start..] = x[:, x_cols] W^T`, all parts of `w` side by side.
    fn matmul(
        &self,
        site: Place,
        w: &Self::Weight,
        x: &Self::Buf,
        x_cols: Range<usize>,
        n: usize,
        out: &mut Self::Buf,
        out_start: usize,
    ) -> Result<(), DeviceError>;
    /// One matrix of a stack per head.
    fn matmul_heads(
        &self,
        site: Place,
        w: &Self::Weight,
        x: &Self::Buf,
        x_heads: Heads,
        n: usize,
        out: &mut Self::Buf,
        out_heads: Heads,
    ) -> Result<(), DeviceError>;
    /// RMSNorm of columns: `out = w * x / sqrt(mean(x^2) + eps)`.
    fn rms_norm(
        &self,
        site: Place,
        x: &Self::Buf,
        x_cols: Range<usize>,
        w: &Self::Buf,
        eps: f32,
        n: usize,
        out: &mut Self::Buf,
        out_start: usize,
    ) -> Result<(), DeviceError>;
    /// LayerNorm with bias of columns, in place.
    fn layer_norm(
        &self,
        site: Place,
        x: &mut Self::Buf,
        cols: Range<usize>,
        w: &Self::Buf,
        b: &Self::Buf,
        eps: f32,
        n: usize,
    ) -> Result<(), DeviceError>;
    /// Rotates adjacent pairs of every head by position, in place; `heads.width` is the rotated width.
    fn rope(
        &self,
        site: Place,
        x: &mut Self::Buf,
        heads: Heads,
        base: f64,
        inputs: &Self::Inputs,
        n: usize,
    ) -> Result<(), DeviceError>;
    /// Multiplies columns by `factor`, in place.
    fn scale(
        &self,
        site: Place,
        x: &mut Self::Buf,
        cols: Range<usize>,
        factor: f32,
        n: usize,
    ) -> Result<(), DeviceError>;
    /// Copies columns.
    fn copy(
        &self,
        site: Place,
        x: &Self::Buf,
        cols: Range<usize>,
        n: usize,
        out: &mut Self::Buf,
        out_start: usize,
    ) -> Result<(), DeviceError>;
    /// The `n` rows whose logits are wanted, in order.
    fn take_rows(
        &self,
        site: Place,
        x: &Self::Buf,
        width: usize,
        inputs: &Self::Inputs,
        n: usize,
        out: &mut Self::Buf,
    ) -> Result<(), DeviceError>;
    /// `x += y`, whole rows of `width`.
    fn add(&self, site: Place, x: &mut Self::Buf, y: &Self::Buf, width: usize, n: usize) -> Result<(), DeviceError>;
    /// Residual and the norm behind it: `residual += delta`, then `out = rms_norm(residual)`. The tap sees the sum.
    fn add_norm(
        &self,
        site: Place,
        residual: &mut Self::Buf,
        delta: &Self::Buf,
        w: &Self::Buf,
        eps: f32,
        width: usize,
        n: usize,
        out: &mut Self::Buf,
    ) -> Result<(), DeviceError> {
        self.add(site, residual, delta, width, n)?;
        self.rms_norm(site, residual, 0..width, w, eps, n, out, 0)
    }
    /// Writes columns of rows to each token's place in a layer of a cache.
    fn append(
        &self,
        site: Place,
        cache: &mut Self::Cache,
        layer: usize,
        x: &Self::Buf,
        cols: Range<usize>,
        inputs: &Self::Inputs,
        n: usize,
    ) -> Result<(), DeviceError>;
    /// Indexer: scores of every visible key and the `top_k` best, ascending, -1 behind the last; ties go to the lowest
    /// position. `scores`, when wanted, receives `[n][tap_width]`, -inf where masked.
    fn index_top_k(
        &self,
        site: Place,
        cache: &Self::Cache,
        layer: usize,
        q: &Self::Buf,
        q_heads: Heads,
        weights: &Self::Buf,
        weight_cols: Range<usize>,
        inputs: &Self::Inputs,
        shape: StepShape,
        top_k: usize,
        chosen: &mut Self::Index,
        scores: Option<&mut Self::Buf>,
    ) -> Result<(), DeviceError>;
    /// Absorbed MLA over the cached `[latent | rope key]` rows: softmax over the chosen keys (all visible ones without a
    /// choice) and the sum of their latents, per head.
    fn attend(
        &self,
        site: Place,
        cache: &Self::Cache,
        layer: usize,
        q_latent: &Self::Buf,
        latent_heads: Heads,
        q_rope: &Self::Buf,
        rope_heads: Heads,
        scale: f32,
        chosen: Option<&Self::Index>,
        inputs: &Self::Inputs,
        shape: StepShape,
        out: &mut Self::Buf,
    ) -> Result<(), DeviceError>;
    /// Router: from logits to choice scores, chosen experts (best first, ties to the lowest) and their weights.
    fn route(
        &self,
        site: Place,
        config: &Config,
        logits: &Self::Buf,
        bias: &Self::Buf,
        inputs: &Self::Inputs,
        n: usize,
        choice_scores: &mut Self::Buf,
        ids: &mut Self::Index,
    ) -> Result<(), DeviceError>;
    /// The chosen experts' weights, from the logits and the ids.
    fn expert_weights(
        &self,
        site: Place,
        config: &Config,
        logits: &Self::Buf,
        ids: &Self::Index,
        n: usize,
        weights: &mut Self::Buf,
    ) -> Result<(), DeviceError>;
    /// `out[:, 0..width] = silu(x[:, 0..width]) * x[:, width..2 * width]`.
    fn swiglu(
        &self,
        site: Place,
        x: &Self::Buf,
        width: usize,
        n: usize,
        out: &mut Self::Buf,
        out_start: usize,
    ) -> Result<(), DeviceError>;
    /// The chosen experts' gate, up and SwiGLU: `hidden[t][slot * width..]` for each of `slots` slots.
    fn experts_hidden(
        &self,
        site: Place,
        gate_up: &Self::Weight,
        x: &Self::Buf,
        ids: &Self::Index,
        slots: usize,
        width: usize,
        n: usize,
        hidden: &mut Self::Buf,
    ) -> Result<(), DeviceError>;
    /// The chosen experts' down projections, weighted and added in slot order.
    fn experts_down(
        &self,
        site: Place,
        down: &Self::Weight,
        hidden: &Self::Buf,
        ids: &Self::Index,
        weights: &Self::Buf,
        slots: usize,
        width: usize,
        n: usize,
        out: &mut Self::Buf,
    ) -> Result<(), DeviceError>;
}
