//! What several operations are made of: products of one part, alone or by slots of chosen experts, the sum over virtual
//! ranks, the table of angles.

use lockstep_kernels::geometry::{self, GEMV_ROWS, Launch, TILE};

use super::memory::Memory;
use super::params::Ranks;
use super::store::CudaIndex;
use super::virtual_ranks::MOST_RANKS;
use super::weight::Part;
use super::{Arg, CudaDevice, Done, RopeTable, Rows};
use crate::device::{DeviceError, Rounding, View};

/// 1 where the operand of products is rounded to bf16.
pub(super) fn rounds(operand: Rounding) -> i32 {
    i32::from(operand == Rounding::Bf16)
}

impl CudaDevice {
    /// Where ranks leave their choices, and the bytes of each rank's place.
    pub(super) fn choices(&self) -> Result<(u64, usize), super::GpuError> {
        Ok((self.group.pairs()?, super::group::PAIRS))
    }

    /// The sum of all ranks' rows, to all of them.
    pub(super) fn sum_ranks(&self, addresses: &[u64], row: i64, width: usize, n: usize) -> Done {
        let mut ranks = Ranks { at: [0; MOST_RANKS] };
        ranks.at[..addresses.len()].copy_from_slice(addresses);
        let (tp, wide, rows) = (addresses.len() as i32, width as i32, n as i32);
        self.each("sum_ranks", n * width, &[&ranks, &tp, &row, &wide, &rows])
    }

    /// One part times `n` rows of `groups` groups: matrix `g` of the stack for group `g`.
    pub(super) fn product(&self, part: &Part, x: Rows, y: Rows, operand: Rounding, n: usize, groups: usize) -> Done {
        if n == 0 || part.rows == 0 || groups == 0 {
            return Ok(());
        }
        let x = self.widened(part, x, n, groups)?;
        let (matrix, rows, recipe) = (part.matrix(), n as i32, rounds(operand));
        let kernel = match n {
            1 => "gemv_1",
            2 => "gemv_2",
            3..=4 => "gemv_4",
            5..=GEMV_ROWS => "gemv_8",
            _ => "gemm",
        };
        let launch = match n {
            ..=GEMV_ROWS => geometry::gemv(part.rows, groups),
            _ => geometry::gemm(part.rows, n, groups),
        };
        let bytes = groups * part.matrix_bytes();
        self.launch("matmul", Some(part.format), kernel, launch, bytes, &[&matrix, &x, &y, &rows, &recipe])
    }

    /// Rows as a part's covering blocks want them: the rank's own columns, zeros around them.
    pub(super) fn widened(&self, part: &Part, x: Rows, n: usize, groups: usize) -> Result<Rows, DeviceError> {
        if part.is_aligned() {
            return Ok(x);
        }
        let wide = n * groups * part.covered;
        let at = self.scratch("wide", 4 * wide)?;
        let (width, from, covered) = (part.cols.len() as i32, part.cols.start as i32, part.covered as i32);
        let (g, rows) = (groups as i32, n as i32);
        self.each("widen", wide, &[&x.at, &x.row, &x.group, &g, &width, &from, &at, &covered, &rows])?;
        Ok(Rows { at, row: (groups * part.covered) as i64, group: part.covered as i64 })
    }

    /// One part times the rows of the slots' experts; many slots are sorted by expert first, see [`CudaDevice::sorted`].
    #[allow(clippy::too_many_arguments)] // as the kernels
    pub(super) fn slots(
        &self,
        part: &Part,
        ids: &CudaIndex,
        sorted: Option<(u64, u64, usize)>,
        operand: Rounding,
        slots: usize,
        x: Rows,
        y: Rows,
        n: usize,
    ) -> Done {
        let (matrix, stack, count, recipe) = (part.matrix(), part.stack as i32, slots as i32, rounds(operand));
        let bytes = n * slots * part.matrix_bytes();
        match sorted {
            None => {
                let (ids, launch) = (ids.memory.address(), geometry::gemv(part.rows, n * slots));
                let args: [&dyn Arg; 7] = [&matrix, &stack, &ids, &count, &x, &y, &recipe];
                self.launch("matmul", Some(part.format), "gemv_slots", launch, bytes, &args)
            }
            Some((tiles, order, most)) => {
                let launch = Launch { grid: (part.rows.div_ceil(TILE) as u32, most as u32, 1), block: 256, shared: 0 };
                let args: [&dyn Arg; 7] = [&matrix, &tiles, &order, &count, &x, &y, &recipe];
                let bytes = bytes.min(part.stack * part.matrix_bytes());
                self.launch("matmul", Some(part.format), "gemm_slots", launch, bytes, &args)
            }
        }
    }

    /// Slots by expert, where there are many: addresses of the tiles and of the order, and the most tiles there can be.
    pub(super) fn sorted(
        &self,
        ids: &CudaIndex,
        slots: usize,
        n: usize,
        experts: usize,
    ) -> Result<Option<(u64, u64, usize)>, DeviceError> {
        if n <= GEMV_ROWS {
            return Ok(None);
        }
        let most = geometry::most_tiles(n * slots, experts);
        let order = self.scratch("order", 4 * n * slots)?;
        let tiles = self.scratch("tiles", 12 * most)?;
        let launch = Launch { grid: (1, 1, 1), block: 1024, shared: 8 * (experts as u32 + 1) };
        let (ids, count, e) = (ids.memory.address(), (n * slots) as i32, experts as i32);
        let (tile, most_tiles) = (TILE as i32, most as i32);
        self.launch("router", None, "group", launch, 0, &[&ids, &count, &e, &tile, &order, &tiles, &most_tiles])?;
        Ok(Some((tiles, order, most)))
    }

    /// Reads the table of angles, made at its first use for every position that the cache can hold.
    pub(super) fn angles(&self, base: f64, width: usize, positions: usize) -> Result<u64, DeviceError> {
        let made_for = (base.to_bits(), width, positions);
        let mut rope = self.rope.borrow_mut();
        if let Some(table) = rope.as_ref().filter(|t| t.made_for == made_for) {
            return Ok(table.memory.address());
        }
        let count = positions * width / 2;
        let memory = Memory::new(&self.gpu, 8 * count).map_err(|e| self.error(e))?;
        let address = memory.address();
        let (p, w) = (positions as i32, width as i32);
        self.each("rope_table", count, &[&address, &p, &w, &base])?;
        if let Some(old) = rope.replace(RopeTable { made_for, memory }) {
            self.outgrown.borrow_mut().push(old.memory);
        }
        Ok(address)
    }

    /// SwiGLU of groups side by side.
    pub(super) fn gated(&self, x: Rows, groups: usize, width: usize, out: View, n: usize) -> Done {
        let (g, w, (to, row, _), rows) = (groups as i32, width as i32, self.cols(out)?, n as i32);
        self.each("swiglu", n * groups * width, &[&x.at, &x.row, &x.group, &g, &w, &to, &row, &rows])
    }
}
