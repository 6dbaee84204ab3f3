//! Products with few rows of x whose weights lie in tiles, a launch for each row: where there is much to read, even eight
//! are sooner done one by one than together by the kernels that take anything. Each product says whether it did it: rows that do not start at a whole load,
//! or do not fit the shared memory of a block, are left to those.

use lockstep_kernels::geometry::{TILE_PARTS, TileProduct, UNIT_COLS, UNIT_ROWS};

use super::gpu::args;
use super::store::CudaIndex;
use super::weight::Part;
use super::{CudaDevice, Rows};
use crate::device::{DeviceError, Rounding};
use crate::quant::QuantType;

/// What a product is made of, as its kernels take it.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Work {
    pub at: [u64; TILE_PARTS],
    pub tiles: [i32; TILE_PARTS],
    pub units: i32,
    pub stack: i32,
    pub slots: i32,
    /// Nothing: what follows starts at a whole word of eight bytes.
    pub unused: i32,
    pub x: u64,
    pub ids: u64,
    pub weights: u64,
    pub y: u64,
    pub y_group: i64,
}

args!(Work);

impl Work {
    /// Of parts of one format and the same columns.
    pub(super) fn of<'a>(parts: impl IntoIterator<Item = &'a Part>, x: Rows, y: Rows) -> Self {
        let mut work = Work { x: x.at, y: y.at, y_group: y.group, slots: 1, ..Work::default() };
        for (i, part) in parts.into_iter().enumerate() {
            (work.at[i], work.tiles[i]) = (part.address, (part.rows / UNIT_ROWS) as i32);
            (work.units, work.stack) = ((part.covered / UNIT_COLS) as i32, part.stack as i32);
        }
        work
    }
}

/// A product of a row of `units` units with tiles of a type.
pub(crate) fn tile_product(ty: QuantType, units: usize, fast: bool) -> TileProduct {
    let group = if ty == QuantType::Q6_K { 16 } else { 32 };
    TileProduct { unit: UNIT_ROWS * ty.row_bytes(UNIT_COLS), group, units, planes: if fast { 1 } else { 3 } }
}

/// Bytes from what belongs to a row to what belongs to the next.
#[derive(Clone, Copy, Default)]
struct Steps {
    x: u64,
    y: u64,
    ids: u64,
    weights: u64,
}

impl Work {
    /// The same for row `t`.
    fn row(self, t: usize, by: Steps) -> Work {
        let t = t as u64;
        let (x, y) = (self.x + t * by.x, self.y + t * by.y);
        Work { x, y, ids: self.ids + t * by.ids, weights: self.weights + t * by.weights, ..self }
    }
}

/// Bytes of weights from which on several rows are worth a launch each.
const WORTH_A_LAUNCH: usize = 1 << 20;

/// A kernel's names, strict and fast.
type Names = [&'static str; 2];

/// Bytes of so many values.
fn bytes_of(values: i64) -> u64 {
    4 * values as u64
}

impl CudaDevice {
    /// Parts side by side, of one run.
    pub(super) fn tile_parts(
        &self,
        parts: &[Part],
        x: Rows,
        y: Rows,
        operand: Rounding,
        n: usize,
    ) -> Result<bool, DeviceError> {
        let Some(first) = parts.first().filter(|part| part.format.tiled && part.stack == 1) else { return Ok(false) };
        let x = self.widened(first, x, n, 1)?;
        let work = Work::of(parts, x, y);
        let by = Steps { x: bytes_of(x.row), y: bytes_of(y.row), ..Steps::default() };
        let jobs = parts.iter().map(|part| part.rows / UNIT_ROWS).sum();
        let bytes = parts.iter().map(Part::matrix_bytes).sum();
        let units = work.units as usize;
        self.tile(first, ["tile_parts_strict", "tile_parts_fast"], operand, (work, by, n), units, jobs, bytes)
    }

    /// Gate and up of the slots' experts.
    #[allow(clippy::too_many_arguments)] // as the operation
    pub(super) fn tile_gate_up(
        &self,
        [gate, up]: [&Part; 2],
        ids: &CudaIndex,
        slots: usize,
        operand: Rounding,
        x: Rows,
        y: Rows,
        n: usize,
    ) -> Result<bool, DeviceError> {
        if !gate.format.tiled || gate.format != up.format || gate.rows != up.rows {
            return Ok(false);
        }
        let of = Work::of([gate, up], x, y);
        let work = Work { ids: ids.memory.address(), slots: slots as i32, ..of };
        let ids = bytes_of(ids.width as i64);
        let by = Steps { x: bytes_of(x.row), y: bytes_of(y.row), ids, weights: 0 };
        let (jobs, bytes) = (slots * gate.rows / UNIT_ROWS, slots * 2 * gate.matrix_bytes());
        let units = work.units as usize;
        self.tile(gate, ["tile_gate_up_strict", "tile_gate_up_fast"], operand, (work, by, n), units, jobs, bytes)
    }

    /// The slots' down projections, weighted and added.
    #[allow(clippy::too_many_arguments)] // as the operation
    pub(super) fn tile_down(
        &self,
        part: &Part,
        ids: &CudaIndex,
        slots: usize,
        operand: Rounding,
        x: Rows,
        weights: Rows,
        y: Rows,
        n: usize,
    ) -> Result<bool, DeviceError> {
        if !part.format.tiled || (slots > 1 && x.group != part.covered as i64) {
            return Ok(false);
        }
        let of = Work::of([part], x, y);
        let work = Work { ids: ids.memory.address(), weights: weights.at, slots: slots as i32, ..of };
        let (ids, weights) = (bytes_of(ids.width as i64), bytes_of(weights.row));
        let by = Steps { x: bytes_of(x.row), y: bytes_of(y.row), ids, weights };
        let (jobs, bytes) = (part.rows / UNIT_ROWS, slots * part.matrix_bytes());
        let units = work.units as usize * slots;
        self.tile(part, ["tile_down_strict", "tile_down_fast"], operand, (work, by, n), units, jobs, bytes)
    }

    #[allow(clippy::too_many_arguments)] // of one caller each
    fn tile(
        &self,
        of: &Part,
        names: Names,
        operand: Rounding,
        (work, by, n): (Work, Steps, usize),
        units: usize,
        jobs: usize,
        bytes: usize,
    ) -> Result<bool, DeviceError> {
        let fast = operand == Rounding::Bf16;
        let product = tile_product(of.format.ty, units, fast);
        let processors = self.gpu.multiprocessors().map_err(|e| self.error(e))?;
        let whole = work.x.is_multiple_of(16) && by.x.is_multiple_of(16);
        let fits = if n == 1 { work.x.is_multiple_of(16) } else { whole && bytes >= WORTH_A_LAUNCH };
        let Some(launch) = product.launch(jobs, processors).filter(|_| fits) else { return Ok(false) };
        for t in 0..n {
            self.launch("tiles", Some(of.format), names[usize::from(fast)], launch, bytes, &[&work.row(t, by)])?;
        }
        Ok(true)
    }
}
