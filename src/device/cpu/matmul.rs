//! Matrix products of the CPU device: weights in the file's own block formats, f32 activations, no expanded matrix.
//!
//! Four weight rows are dequantised a chunk of columns at a time into a small buffer and multiplied with all tokens
//! before the next chunk, so weights are read and expanded once per block of tokens. The order of every sum is that of
//! `simd`: it depends on the column alone, hence prefill = decode, batch 1 = N and any split of rows over threads give
//! the same bits.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::simd::{Kernels, LANES, Lanes, TILE_ROWS, TILE_TOKENS};
use crate::quant::{Dequantiser, Isa, QuantType};

/// A weight matrix `[rows][cols]` in a block format, row after row.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The block format.
    pub ty: QuantType,
    /// `rows` x the bytes of `cols` values.
    pub bytes: &'a [u8],
    /// Outputs.
    pub rows: usize,
    /// Inputs; whole blocks.
    pub cols: usize,
}

/// Activations: row t begins at `offset + t * stride`.
#[derive(Clone, Copy, Debug)]
pub struct Strided<'a> {
    /// All values.
    pub data: &'a [f32],
    /// Where row 0 begins.
    pub offset: usize,
    /// From one row to the next.
    pub stride: usize,
}

/// Results, laid out as [`Strided`].
#[derive(Debug)]
pub struct StridedMut<'a> {
    /// All values.
    pub data: &'a mut [f32],
    /// Where row 0 begins.
    pub offset: usize,
    /// From one row to the next; at least the rows of the matrix where more than one row is written.
    pub stride: usize,
}

/// Operands that do not fit one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MatmulError {
    /// The columns are not whole blocks of the weight's format, or there are none.
    #[error("{cols} columns are not whole {ty} blocks")]
    PartialBlocks {
        /// The format.
        ty: QuantType,
        /// Columns given.
        cols: usize,
    },
    /// The weight does not have the bytes of its shape.
    #[error("a {ty} weight of {rows} x {cols} does not have {found} bytes")]
    Weight {
        /// The format.
        ty: QuantType,
        /// Rows given.
        rows: usize,
        /// Columns given.
        cols: usize,
        /// Bytes given.
        found: usize,
    },
    /// A row of activations or results lies outside its buffer.
    #[error("row {row} of {operand} (offset {offset}, stride {stride}, width {width}) ends outside its {found} values")]
    Outside {
        /// "x" or "y".
        operand: &'static str,
        /// The row.
        row: usize,
        /// Offset of row 0.
        offset: usize,
        /// Stride between rows.
        stride: usize,
        /// Values per row.
        width: usize,
        /// Values in the buffer.
        found: usize,
    },
    /// Rows of results overlap.
    #[error("a result stride of {stride} lets rows of {width} overlap")]
    Overlap {
        /// The stride.
        stride: usize,
        /// Values per row.
        width: usize,
    },
    /// The two index lists differ in length.
    #[error("{x} rows to gather, {y} to scatter")]
    Indices {
        /// Entries of the activations' list.
        x: usize,
        /// Entries of the results' list.
        y: usize,
    },
}

/// One matrix product among several that write into the same results.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// The matrix.
    pub w: Rows<'a>,
    /// The activations.
    pub x: Strided<'a>,
    /// Which rows of `x` and, in the same order, of the results.
    pub rows: JobRows<'a>,
    /// Where its first result of row 0 goes.
    pub y_offset: usize,
}

/// The rows of a job.
#[derive(Clone, Copy, Debug)]
pub enum JobRows<'a> {
    /// Rows 0 to n - 1 of both.
    First(usize),
    /// Row `x[i]` of the activations gives row `y[i]` of the results: the tokens that share one expert.
    Listed {
        /// Rows of the activations.
        x: &'a [u32],
        /// Rows of the results.
        y: &'a [u32],
    },
}

/// `y[y_row][y_offset + r] = sum over c of w[r][c] x[x_row][c]`, for every job, row pair and weight row r. All jobs share
/// the threads, so that several small products are worth waking them. A result has the same bits whatever runs along.
///
/// # Errors
/// Sizes that do not fit, and jobs that would write to the same place.
pub fn matmul_all(jobs: &[Job<'_>], y: &mut [f32], y_stride: usize) -> Result<(), MatmulError> {
    let isa = Isa::best();
    let mut products = Vec::with_capacity(jobs.len());
    let shape = StridedMut { data: y, offset: 0, stride: y_stride };
    for job in jobs {
        let (x_rows, y_rows) = match job.rows {
            JobRows::First(n) => (Which::First(n), Which::First(n)),
            JobRows::Listed { x, y } if x.len() == y.len() => (Which::Listed(x), Which::Listed(y)),
            JobRows::Listed { x, y } => return Err(MatmulError::Indices { x: x.len(), y: y.len() }),
        };
        let row_bytes = check(&job.w, &job.x, x_rows, &shape, job.y_offset, y_rows)?;
        if x_rows.len() > 0 && job.w.rows > 0 {
            products.push(Product {
                w: job.w,
                row_bytes,
                dequantiser: Dequantiser::with(job.w.ty, isa),
                kernels: Kernels::new(isa),
                x: job.x,
                x_rows,
                y: std::ptr::null_mut(),
                y_offset: job.y_offset,
                y_stride,
                y_rows,
            });
        }
    }
    disjoint(&products)?;
    let to = y.as_mut_ptr();
    products.iter_mut().for_each(|p| p.y = to);
    run(&products);
    Ok(())
}

/// Refuses jobs that share a place: their columns must be disjoint, or else be the same with disjoint rows.
fn disjoint(products: &[Product<'_>]) -> Result<(), MatmulError> {
    let columns = |p: &Product<'_>| p.y_offset..p.y_offset + p.w.rows;
    let clash = |p: &Product<'_>| MatmulError::Overlap { stride: p.y_stride, width: p.w.rows };
    let all_rows = |p: &Product<'_>| matches!(p.y_rows, Which::First(_));
    for (i, a) in products.iter().enumerate() {
        for b in &products[i + 1..] {
            let (x, y) = (columns(a), columns(b));
            let meet = x.start < y.end && y.start < x.end;
            if meet && (x != y || all_rows(a) || all_rows(b)) {
                return Err(clash(a));
            }
        }
    }
    // Columns that start at the same place are the same, or they would have met.
    let mut taken: BTreeMap<usize, Vec<bool>> = BTreeMap::new();
    for p in products.iter().filter(|p| !all_rows(p)) {
        let rows = taken.entry(p.y_offset).or_default();
        rows.resize(rows.len().max(p.y_rows.last() + 1), false);
        for i in 0..p.y_rows.len() {
            if std::mem::replace(&mut rows[p.y_rows.at(i)], true) {
                return Err(clash(p));
            }
        }
    }
    Ok(())
}

/// `y[t][r] = sum over c of w[r][c] x[t][c]`, for every row r and t in 0..tokens. Errors when sizes do not fit.
pub fn matmul(w: &Rows<'_>, x: Strided<'_>, tokens: usize, y: StridedMut<'_>) -> Result<(), MatmulError> {
    let job = Job { w: *w, x, rows: JobRows::First(tokens), y_offset: y.offset };
    matmul_all(&[job], y.data, y.stride)
}

/// Which rows of an operand take part, in order.
#[derive(Clone, Copy)]
enum Which<'a> {
    First(usize),
    Listed(&'a [u32]),
}

impl Which<'_> {
    fn len(self) -> usize {
        match self {
            Which::First(n) => n,
            Which::Listed(rows) => rows.len(),
        }
    }

    #[inline(always)]
    fn at(self, i: usize) -> usize {
        match self {
            Which::First(_) => i,
            Which::Listed(rows) => rows[i] as usize,
        }
    }

    fn last(self) -> usize {
        match self {
            Which::First(n) => n.saturating_sub(1),
            Which::Listed(rows) => rows.iter().copied().max().unwrap_or(0) as usize,
        }
    }
}

/// Columns dequantised at a time: four rows of 1024 values take 16 KiB, a third to a half of a first-level cache.
const CHUNK: usize = 1024;

/// Tokens that pass over a chunk of weights before the next: their sums for four rows take 48 KiB.
const TOKEN_BLOCK: usize = 96;

/// Multiply-adds below which other threads are not woken: handing work over costs some 7 microseconds, a twentieth of
/// the time of so many multiply-adds in decode.
const PARALLEL_FROM: usize = 1 << 17;

/// Rows that a thread takes at a time.
const SHARE: usize = 8 * TILE_ROWS;

struct Product<'a> {
    w: Rows<'a>,
    row_bytes: usize,
    dequantiser: Dequantiser,
    kernels: Kernels,
    x: Strided<'a>,
    x_rows: Which<'a>,
    y: *mut f32,
    y_offset: usize,
    y_stride: usize,
    y_rows: Which<'a>,
}

// SAFETY: `y` points into a buffer that the caller of `matmul_all` borrows mutably for all its products; threads take
// disjoint ranges of weight rows, and `check` and `disjoint` made sure that different weight rows and different products
// never share a place in it.
unsafe impl Sync for Product<'_> {}

/// Runs products on one thread, or on all when they are worth it.
fn run(products: &[Product<'_>]) {
    let work = |p: &Product<'_>| p.w.rows.saturating_mul(p.w.cols).saturating_mul(p.x_rows.len());
    let total = products.iter().map(work).fold(0usize, usize::saturating_add);
    let shares: Vec<usize> = products.iter().map(|p| p.w.rows.div_ceil(SHARE)).collect();
    let all: usize = shares.iter().sum();
    let threads = if total < PARALLEL_FROM { 1 } else { rayon::current_num_threads().min(all) };
    if threads <= 1 {
        products.iter().for_each(|p| p.rows(0..p.w.rows));
        return;
    }
    let taken = AtomicUsize::new(0);
    let take = || {
        loop {
            let mut share = taken.fetch_add(1, Ordering::Relaxed);
            if share >= all {
                break;
            }
            for (product, shares) in products.iter().zip(&shares) {
                if share < *shares {
                    product.rows(share * SHARE..((share + 1) * SHARE).min(product.w.rows));
                    break;
                }
                share -= shares;
            }
        }
    };
    // The calling thread, mostly a rank and no worker of the pool, works too instead of only waiting.
    rayon::in_place_scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|_| take());
        }
        take();
    });
}

/// The bytes of one weight row, once all operands are known to fit.
fn check(
    w: &Rows<'_>,
    x: &Strided<'_>,
    x_rows: Which<'_>,
    y: &StridedMut<'_>,
    y_offset: usize,
    y_rows: Which<'_>,
) -> Result<usize, MatmulError> {
    let &Rows { ty, bytes, rows, cols } = w;
    let row_bytes = ty.info().row_bytes(cols as u64).and_then(|bytes| usize::try_from(bytes).ok());
    let row_bytes = row_bytes.filter(|_| cols > 0).ok_or(MatmulError::PartialBlocks { ty, cols })?;
    if row_bytes.checked_mul(rows) != Some(bytes.len()) {
        return Err(MatmulError::Weight { ty, rows, cols, found: bytes.len() });
    }
    if x_rows.len() == 0 {
        return Ok(row_bytes);
    }
    let inside = |operand, row: usize, offset: usize, stride: usize, width: usize, found: usize| {
        let end = row.checked_mul(stride).and_then(|at| at.checked_add(offset)).and_then(|at| at.checked_add(width));
        match end {
            Some(end) if end <= found => Ok(()),
            _ => Err(MatmulError::Outside { operand, row, offset, stride, width, found }),
        }
    };
    inside("x", x_rows.last(), x.offset, x.stride, cols, x.data.len())?;
    inside("y", y_rows.last(), y_offset, y.stride, rows, y.data.len())?;
    if y.stride < rows && y_rows.last() > 0 {
        return Err(MatmulError::Overlap { stride: y.stride, width: rows });
    }
    Ok(row_bytes)
}

/// A thread's working memory: a chunk of expanded weights and the sums of a block of tokens.
struct Scratch {
    weights: Vec<Lanes>,
    sums: Vec<Lanes>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch { weights: Vec::new(), sums: Vec::new() }) };
}

impl Product<'_> {
    /// The results of a range of weight rows, for all tokens.
    fn rows(&self, range: Range<usize>) {
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.weights.resize(TILE_ROWS * CHUNK / LANES, Lanes::ZERO);
            scratch.sums.resize(TILE_ROWS * TOKEN_BLOCK, Lanes::ZERO);
            let tokens = self.x_rows.len();
            for first in (0..tokens).step_by(TOKEN_BLOCK) {
                let block = first..(first + TOKEN_BLOCK).min(tokens);
                let mut row = range.start;
                while row < range.end {
                    let height = if range.end - row >= TILE_ROWS { TILE_ROWS } else { 1 };
                    self.strip(row, height, block.clone(), scratch);
                    row += height;
                }
            }
        });
    }

    /// The results of 1 or [`TILE_ROWS`] rows for one block of tokens.
    fn strip(&self, row: usize, height: usize, tokens: Range<usize>, scratch: &mut Scratch) {
        let weights = Lanes::flat(&mut scratch.weights);
        for start in (0..self.w.cols).step_by(CHUNK) {
            let columns = start..(start + CHUNK).min(self.w.cols);
            let weights = &mut weights[..height * columns.len()];
            self.expand(row, columns.clone(), weights);
            for first in tokens.clone().step_by(TILE_TOKENS) {
                let width = (tokens.end - first).min(TILE_TOKENS);
                // Sums that no other chunk adds to are not kept: all tokens use the same few, which stay in the cache.
                let at = if self.w.cols > CHUNK { height * (first - tokens.start) } else { 0 };
                let sums = &mut scratch.sums[at..at + height * width];
                let mut x: [&[f32]; TILE_TOKENS] = [&[]; TILE_TOKENS];
                for (i, x) in x[..width].iter_mut().enumerate() {
                    let at = self.x.offset + self.x_rows.at(first + i) * self.x.stride;
                    *x = &self.x.data[at + columns.start..at + columns.end];
                }
                self.kernels.tile(weights, &x[..width], sums, start == 0);
                if columns.end == self.w.cols {
                    self.store(row, height, first..first + width, sums);
                }
            }
        }
    }

    /// Writes the results of a tile.
    fn store(&self, row: usize, height: usize, tokens: Range<usize>, sums: &[Lanes]) {
        let mut totals = [0.0; TILE_ROWS * TILE_TOKENS];
        self.kernels.totals(sums, &mut totals);
        for (i, token) in tokens.clone().enumerate() {
            let at = self.y_offset + self.y_rows.at(token) * self.y_stride + row;
            for r in 0..height {
                // SAFETY: `check` showed that the last row's last place is inside the buffer, and no other thread has
                // this weight row.
                unsafe { *self.y.add(at + r) = totals[r * tokens.len() + i] };
            }
        }
    }

    /// Expands a range of columns of consecutive rows, whole blocks since chunks are multiples of every block.
    fn expand(&self, row: usize, columns: Range<usize>, weights: &mut [f32]) {
        let bytes = &self.w.bytes[row * self.row_bytes..];
        let height = weights.len() / columns.len();
        let result = if columns.len() == self.w.cols {
            self.dequantiser.expand(&bytes[..height * self.row_bytes], weights)
        } else {
            let (from, to) = (self.w.ty.row_bytes(columns.start), self.w.ty.row_bytes(columns.end));
            let mut rows = bytes.chunks(self.row_bytes).zip(weights.chunks_exact_mut(columns.len()));
            rows.try_for_each(|(bytes, weights)| self.dequantiser.expand(&bytes[from..to], weights))
        };
        if let Err(error) = result {
            unreachable!("the operands were checked: {error}");
        }
    }
}

const _: () = assert!(CHUNK.is_multiple_of(LANES) && CHUNK.is_multiple_of(256));

#[cfg(test)]
mod tests {
    use super::super::simd::dot;
    use super::super::simd::tests::Random;
    use super::*;
    use crate::quant::{dequantise, scan};

    /// Random blocks whose values are finite and at most a million.
    fn blocks(random: &mut Random, ty: QuantType, values: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while bytes.len() < ty.row_bytes(values) {
            let block: Vec<u8> = (0..ty.info().bytes).map(|_| (random.next() >> 24) as u8).collect();
            let found = scan(ty, &block).unwrap();
            if found.nonfinite_blocks == 0 && found.max_abs_bound <= 1e6 {
                bytes.extend(block);
            }
        }
        bytes
    }

    fn expanded(w: &Rows<'_>) -> Vec<f32> {
        let mut values = vec![0.0; w.rows * w.cols];
        dequantise(w.ty, w.bytes, &mut values).unwrap();
        values
    }

    fn run(w: &Rows<'_>, x: &[f32], tokens: usize) -> Vec<f32> {
        let mut y = vec![f32::NAN; tokens * w.rows];
        let out = StridedMut { data: &mut y, offset: 0, stride: w.rows };
        matmul(w, Strided { data: x, offset: 0, stride: w.cols }, tokens, out).unwrap();
        y
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|v| v.to_bits()).collect()
    }

    /// Each lane rounds once per 32 columns and the tree five times, so |error| <= gamma(k) sum |w x| with
    /// k = ceil(n / 32) + 5 and gamma(k) = k u / (1 - k u), u = 2^-24; plus one smallest subnormal per operation.
    #[test]
    fn products_are_within_the_rounding_of_their_order() {
        let mut random = Random(1);
        for ty in QuantType::all() {
            for (rows, cols, tokens) in [(1, 256, 1), (5, 512, 1), (7, 1280, 2), (9, 2304, 7), (4, 256, 100)] {
                let bytes = blocks(&mut random, ty, rows * cols);
                let w = Rows { ty, bytes: &bytes, rows, cols };
                let (x, weights) = (random.values(tokens * cols), expanded(&w));
                let y = run(&w, &x, tokens);
                let k = (cols.div_ceil(32) + 5) as f64 * 2f64.powi(-24);
                for t in 0..tokens {
                    for r in 0..rows {
                        let terms = weights[r * cols..][..cols].iter().zip(&x[t * cols..][..cols]);
                        let terms = terms.map(|(w, x)| f64::from(*w) * f64::from(*x));
                        let (exact, size) = terms.fold((0.0, 0.0), |(sum, size), v| (sum + v, size + v.abs()));
                        let bound = k / (1.0 - k) * size + cols as f64 * 2f64.powi(-149);
                        let error = (f64::from(y[t * rows + r]) - exact).abs();
                        assert!(error <= bound, "{ty} {rows}x{cols}x{tokens} [{t}][{r}]: {error:e} > {bound:e}");
                    }
                }
            }
        }
    }

    /// Odd sizes need formats with blocks of one: columns that end inside a vector, rows that end inside a tile, more
    /// tokens than a block of them, more columns than a chunk; the last case is shared among threads. Every result has
    /// the bits of `dot`, hence none depends on what ran along. The last case is shared among threads.
    #[test]
    fn one_token_or_many_give_the_same_bits() {
        const { assert!(601 * 768 * 5 >= PARALLEL_FROM) };
        let mut random = Random(2);
        for ty in [QuantType::F32, QuantType::F16, QuantType::BF16] {
            for (rows, cols, tokens) in
                [(1, 1, 1), (3, 31, 5), (4, 33, 3), (6, 1023, 4), (5, 1100, 2), (2, 77, 199), (601, 768, 5)]
            {
                let bytes = blocks(&mut random, ty, rows * cols);
                let w = Rows { ty, bytes: &bytes, rows, cols };
                let (x, weights) = (random.values(tokens * cols), expanded(&w));
                let y = run(&w, &x, tokens);
                for t in 0..tokens {
                    let alone = run(&w, &x[t * cols..][..cols], 1);
                    assert_eq!(bits(&y[t * rows..][..rows]), bits(&alone), "{ty} {rows}x{cols}, token {t}");
                    for r in 0..rows {
                        let single = dot(&weights[r * cols..][..cols], &x[t * cols..][..cols]);
                        assert_eq!(alone[r].to_bits(), single.to_bits(), "{ty} {rows}x{cols} [{t}][{r}]");
                    }
                }
            }
        }
    }

    #[test]
    fn gathered_rows_equal_plain_ones_and_nothing_else_is_written() {
        let mut random = Random(4);
        let (rows, cols) = (7, 512);
        let bytes = blocks(&mut random, QuantType::Q6_K, rows * cols);
        let w = Rows { ty: QuantType::Q6_K, bytes: &bytes, rows, cols };
        let (stride, offset) = (cols + 9, 5);
        let data = random.values(10 * stride);
        let (x_rows, y_rows) = ([9, 0, 3, 3, 7], [1, 4, 0, 2, 8]);
        let mut y = vec![-7.0; 9 * 11];
        let x = Strided { data: &data, offset, stride };
        let listed = JobRows::Listed { x: &x_rows, y: &y_rows };
        matmul_all(&[Job { w, x, rows: listed, y_offset: 2 }], &mut y, 11).unwrap();
        for (from, to) in x_rows.into_iter().zip(y_rows) {
            let at = to as usize * 11 + 2;
            let alone = run(&w, &data[offset + from as usize * stride..][..cols], 1);
            assert_eq!(bits(&y[at..at + rows]), bits(&alone));
            y[at..at + rows].fill(-7.0);
        }
        assert!(y.iter().all(|&v| v == -7.0), "a place outside the listed rows was written");
    }

    #[test]
    fn operands_that_do_not_fit_are_refused() {
        let (bytes, x) = ([0u8; 2 * 144], [0.0f32; 512]);
        let w = Rows { ty: QuantType::Q4_K, bytes: &bytes, rows: 2, cols: 256 };
        let mut y = [0.0f32; 4];
        let mut call = |w: Rows<'_>, tokens, x_stride, y_stride, y_len: usize| {
            let y = StridedMut { data: &mut y[..y_len], offset: 0, stride: y_stride };
            matmul(&w, Strided { data: &x, offset: 0, stride: x_stride }, tokens, y)
        };
        assert_eq!(call(w, 2, 256, 2, 4), Ok(()));
        assert_eq!(call(w, 0, usize::MAX, 0, 0), Ok(()));
        assert!(matches!(call(Rows { cols: 255, ..w }, 1, 256, 2, 4), Err(MatmulError::PartialBlocks { .. })));
        assert!(matches!(call(Rows { cols: 0, bytes: &[], ..w }, 1, 0, 2, 4), Err(MatmulError::PartialBlocks { .. })));
        assert!(matches!(call(Rows { rows: 3, ..w }, 1, 256, 2, 4), Err(MatmulError::Weight { .. })));
        assert!(matches!(call(Rows { rows: usize::MAX, ..w }, 1, 256, 2, 4), Err(MatmulError::Weight { .. })));
        assert!(matches!(call(w, 2, 257, 2, 4), Err(MatmulError::Outside { operand: "x", row: 1, .. })));
        assert!(matches!(call(w, 2, usize::MAX, 2, 4), Err(MatmulError::Outside { operand: "x", .. })));
        assert!(matches!(call(w, 2, 256, 2, 3), Err(MatmulError::Outside { operand: "y", row: 1, .. })));
        assert!(matches!(call(w, 2, 256, 1, 4), Err(MatmulError::Overlap { stride: 1, width: 2 })));
        let x = Strided { data: &x, offset: 0, stride: 256 };
        let listed = |x, y| JobRows::Listed { x, y };
        let lists = matmul_all(&[Job { w, x, rows: listed(&[0, 1], &[0]), y_offset: 0 }], &mut y, 2);
        assert_eq!(lists, Err(MatmulError::Indices { x: 2, y: 1 }));
        let job = |rows, y_offset| Job { w, x, rows, y_offset };
        for clash in [
            [job(JobRows::First(1), 0), job(JobRows::First(1), 1)],
            [job(listed(&[0], &[1]), 0), job(listed(&[1], &[1]), 0)],
            [job(JobRows::First(1), 0), job(listed(&[1], &[0]), 0)],
        ] {
            let found = matmul_all(&clash, &mut y, 2);
            assert_eq!(found, Err(MatmulError::Overlap { stride: 2, width: 2 }));
        }
        let apart = [job(listed(&[0], &[1]), 0), job(listed(&[1], &[0]), 0)];
        assert_eq!(matmul_all(&apart, &mut y, 2), Ok(()));
    }
}
