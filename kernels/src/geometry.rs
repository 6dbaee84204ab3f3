//! Launch geometry: how many blocks of how many threads a piece of work becomes. Pure functions, so that coverage is
//! tested on a CPU.

/// Rows and columns of a tile of `gemm`.
pub const TILE: usize = 64;
/// Fewest keys per split of decode attention: two tiles.
pub const SPLIT: usize = 32;
/// Most splits of decode attention.
pub const MOST_SPLITS: usize = 64;
/// Heads per block of `attend`.
pub const HEADS: usize = 8;
/// Keys per block of `index_scores`.
pub const INDEX_KEYS: usize = 64;
/// Rows that `gemv` takes at once.
pub const GEMV_ROWS: usize = 8;
/// Warps, and so rows of the matrix, of a block of `gemv`.
pub const GEMV_WARPS: usize = 8;
/// Rows and columns of a unit of tiles.
pub const UNIT_ROWS: usize = 16;
/// See [`UNIT_ROWS`].
pub const UNIT_COLS: usize = 256;
/// Parts that a product with tiles takes side by side.
pub const TILE_PARTS: usize = 4;
/// Warps of a block that multiply units.
const TILE_WARPS: usize = 8;
/// Shared memory of a block, and of a multiprocessor, which also keeps 1 KiB of its own for each block.
const BLOCK_SHARED: usize = 227 << 10;
const SHARED: usize = 228 << 10;
/// Widest latent and rope part that `attend` holds in registers.
pub const MOST_LATENT: usize = 512;
/// See [`MOST_LATENT`].
pub const MOST_ROPE: usize = 64;

/// A launch: blocks, threads of a block, bytes of dynamic shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks by axis.
    pub grid: (u32, u32, u32),
    /// Threads of a block.
    pub block: u32,
    /// Dynamic shared memory in bytes.
    pub shared: u32,
}

/// Saturates: a grid that large is refused by the driver with a clear error.
fn axis(n: usize) -> u32 {
    u32::try_from(n.max(1)).unwrap_or(u32::MAX)
}

/// A grid-stride loop over `count` values.
pub fn each(count: usize) -> Launch {
    Launch { grid: (axis(count.div_ceil(256).min(4096)), 1, 1), block: 256, shared: 0 }
}

/// A block of `block` threads per row.
pub fn per_row(rows: usize, block: u32) -> Launch {
    Launch { grid: (axis(rows), 1, 1), block, shared: 0 }
}

/// Threads over `width`, a second axis over `rows`, a third over `groups`.
pub fn threads(width: usize, rows: usize, groups: usize) -> Launch {
    Launch { grid: (axis(width.div_ceil(128)), axis(rows), axis(groups)), block: 128, shared: 0 }
}

/// `gemv`: a warp per row of the matrix.
pub fn gemv(rows: usize, groups: usize) -> Launch {
    Launch { grid: (axis(rows.div_ceil(GEMV_WARPS)), axis(groups), 1), block: 32 * GEMV_WARPS as u32, shared: 0 }
}

/// `gemm`: tiles of the matrix's rows by tiles of `n` rows, per group.
pub fn gemm(rows: usize, n: usize, groups: usize) -> Launch {
    Launch { grid: (axis(rows.div_ceil(TILE)), axis(n.div_ceil(TILE)), axis(groups)), block: 256, shared: 0 }
}

/// True if a GPU has what kernels of tiles are made of: copies that run by themselves.
pub fn has_tiles(arch: &str) -> bool {
    let version: String = arch.chars().filter(char::is_ascii_digit).collect();
    version.parse().is_ok_and(|v: u32| v >= 90)
}

/// A product of a row of `units` units with tiles: bytes of a unit, columns that share a scale, planes of x.
#[derive(Clone, Copy, Debug)]
pub struct TileProduct {
    /// Bytes of a unit.
    pub unit: usize,
    /// Columns that share a scale.
    pub group: usize,
    /// Units of a row of x.
    pub units: usize,
    /// Parts that x is split into.
    pub planes: usize,
}

impl TileProduct {
    /// Bytes of shared memory: the ring and what belongs to it, x, the sums of its groups. As `tiles.cu` has it.
    fn shared(&self) -> usize {
        let (cols, stages) = (self.units * UNIT_COLS, if self.unit < 3000 { 4 } else { 3 });
        let ring = stages * (TILE_WARPS * self.unit + 16) + 4 * 2 * 2 * TILE_WARPS * UNIT_ROWS + 128;
        ring + 2 * self.planes * cols + 4 * cols / self.group
    }

    /// `jobs` tiles of output on `processors` multiprocessors; none if x is too long. Blocks walk over the tiles, so that
    /// two on a multiprocessor are no better than one where they end no sooner.
    pub fn launch(&self, jobs: usize, processors: usize) -> Option<Launch> {
        let (shared, one) = (self.shared(), processors.max(1));
        let two = 2 * (shared + 1024) <= SHARED;
        let rounds = |blocks: usize| jobs.div_ceil(blocks);
        let blocks = if two && 20 * rounds(2 * one) <= 11 * rounds(one) { 2 * one } else { one };
        let block = 32 * (TILE_WARPS as u32 + 1);
        (shared <= BLOCK_SHARED).then(|| Launch { grid: (axis(blocks.min(jobs)), 1, 1), block, shared: axis(shared) })
    }
}

/// `tile_pack`: a warp per unit.
pub fn tile_pack(units: usize) -> Launch {
    Launch { grid: (axis(units.div_ceil(8).min(4096)), 1, 1), block: 256, shared: 0 }
}

/// Most tiles that `slots` slots of `experts` experts can fill: each expert may have one that is not full.
pub fn most_tiles(slots: usize, experts: usize) -> usize {
    slots.div_ceil(TILE) + experts.min(slots)
}

/// Keys per split, and splits, for `n` tokens that see at most `keys` of the `most` keys that there ever can be. Many
/// tokens fill the device without splitting. The size of a split depends on no length of the step, so that a recorded step
/// adds as an unrecorded one.
pub fn splits(n: usize, keys: usize, most: usize) -> (usize, usize) {
    let few = most.max(keys).div_ceil(MOST_SPLITS).next_multiple_of(SPLIT).max(SPLIT);
    let per_split = if n <= GEMV_ROWS { few } else { keys.max(1) };
    (per_split, keys.max(1).div_ceil(per_split))
}

/// `attend`: splits by groups of heads by tokens.
pub fn attend(splits: usize, heads: usize, n: usize) -> Launch {
    Launch { grid: (axis(splits), axis(heads.div_ceil(HEADS)), axis(n)), block: 32 * HEADS as u32, shared: 0 }
}

/// `index_scores`: queries with padded rows, and one key per warp, in shared memory.
pub fn index_scores(context: usize, n: usize, heads: usize, width: usize) -> Launch {
    let shared = 4 * (heads * (width + 1) + 8 * width);
    Launch { grid: (axis(context.div_ceil(INDEX_KEYS)), axis(n), 1), block: 256, shared: axis(shared) }
}

/// The bucket of a number: the next power of two, at least `least`.
pub fn bucket(n: usize, least: usize) -> usize {
    n.max(least).next_power_of_two()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_a_warp_and_every_tile_a_block() {
        for rows in 1..2000 {
            let g = gemv(rows, 3);
            let warps = g.grid.0 as usize * g.block as usize / 32;
            assert!(warps >= rows && warps - rows < GEMV_WARPS, "{rows}");
            let m = gemm(rows, rows / 3 + 1, 2);
            assert!(m.grid.0 as usize * TILE >= rows && m.grid.1 as usize * TILE > rows / 3);
            assert!((m.grid.0 as usize - 1) * TILE < rows);
        }
    }

    #[test]
    fn tiles_are_enough_for_any_spread_of_slots() {
        // The worst spread gives as many experts as possible one slot more than whole tiles hold.
        for slots in [1usize, 7, 8, 64, 65, 512, 4096] {
            for experts in [1usize, 2, 7, 64, 256] {
                let used = experts.min(slots);
                let even: usize =
                    (0..used).map(|e| (slots / used + usize::from(e < slots % used)).div_ceil(TILE)).sum();
                let skewed = (slots - (used - 1)).div_ceil(TILE) + used - 1;
                assert!(even.max(skewed) <= most_tiles(slots, experts), "{slots} slots, {experts} experts");
            }
        }
    }

    #[test]
    fn splits_cover_the_keys_and_do_not_depend_on_a_bucket() {
        for n in [1, 8, 9, 512] {
            for keys in [1, 127, 128, 129, 2048, 65_536] {
                let (per_split, count) = splits(n, keys, 65_536);
                assert!(per_split * count >= keys && per_split * (count - 1) < keys);
                assert!(count <= MOST_SPLITS);
            }
        }
        assert_eq!(splits(1, 100, 4096).0, splits(8, 4096, 4096).0);
    }

    #[test]
    fn a_product_with_tiles_has_blocks_as_long_as_x_fits() {
        let glm = TileProduct { unit: 2304, group: 32, units: 24, planes: 1 };
        let launch = glm.launch(2304, 132).unwrap();
        assert_eq!((launch.grid.0, launch.block), (264, 288));
        assert_eq!(glm.launch(174, 132).unwrap().grid.0, 132 * 2 - 90, "every tile has a block of its own");
        assert_eq!(TileProduct { planes: 3, units: 64, ..glm }.launch(384, 132).unwrap().grid.0, 132);
        assert!(TileProduct { planes: 3, units: 200, ..glm }.launch(384, 132).is_none());
        assert!(has_tiles("sm_90a") && has_tiles("sm_120a") && !has_tiles("sm_80"));
    }

    #[test]
    fn buckets_hold_what_they_are_for() {
        for n in 1..1000 {
            assert!(bucket(n, 1) >= n && bucket(n, 1) < 2 * n && bucket(n, 256) >= 256);
        }
    }
}
