//! How stored weights lie on a GPU.

use std::fmt;

use lockstep_kernels::{TILED, geometry};

use super::memory::SLOT;
use crate::quant::QuantType;

/// A tensor type, in planes or in tiles: what a typed kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Format {
    /// The type.
    pub ty: QuantType,
    /// In the order of tensor cores (`kernels/cu/common/tiles.cuh`); else in planes, a field of a block in each.
    pub tiled: bool,
}

impl Format {
    /// In planes.
    pub fn planes(ty: QuantType) -> Self {
        Format { ty, tiled: false }
    }

    /// In tiles.
    pub fn tiles(ty: QuantType) -> Self {
        Format { ty, tiled: true }
    }

    /// Those of a type.
    pub fn all(ty: QuantType) -> impl Iterator<Item = Format> {
        let tiles = TILED.contains(&ty.name()).then_some(Format::tiles(ty));
        std::iter::once(Format::planes(ty)).chain(tiles)
    }

    /// In tiles where the type has them, the GPU can take them and the matrix is whole tiles.
    pub fn of(ty: QuantType, rows: usize, cols: usize, arch: &str) -> Self {
        let whole =
            rows.is_multiple_of(geometry::UNIT_ROWS) && cols.is_multiple_of(geometry::UNIT_COLS) && rows * cols > 0;
        // A tile's rows pass the ring of loading in one piece.
        let fits = geometry::UNIT_ROWS * ty.row_bytes(cols) <= SLOT;
        Format { ty, tiled: TILED.contains(&ty.name()) && geometry::has_tiles(arch) && whole && fits }
    }

    /// As kernels know it.
    pub fn name(self) -> String {
        if self.tiled { format!("Tiles<{}>", self.ty) } else { self.ty.to_string() }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.ty, if self.tiled { " tiles" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_tiles_of_known_types_on_new_gpus_are_tiled() {
        let tiled = |ty, rows, cols, arch| Format::of(ty, rows, cols, arch).tiled;
        assert!(tiled(QuantType::Q4_K, 32, 512, "sm_90a") && tiled(QuantType::Q6_K, 16, 256, "sm_120a"));
        assert!(!tiled(QuantType::Q4_K, 33, 512, "sm_90a") && !tiled(QuantType::Q4_K, 0, 512, "sm_90a"));
        assert!(!tiled(QuantType::Q8_0, 32, 512, "sm_90a") && !tiled(QuantType::Q4_K, 32, 512, "sm_80"));
        assert_eq!(Format::all(QuantType::Q4_K).count(), 2);
        assert_eq!(Format::tiles(QuantType::Q4_K).name(), "Tiles<Q4_K>");
    }
}
