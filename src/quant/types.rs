//! The table of tensor types a GGUF file can name: id, block size and what this build can do with each.
//!
//! Ids and block sizes are the public GGUF format table (ggml at `0c1e57098`). Nothing here touches data.

/// How a type id found in a file is to be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TypeId {
    /// A type of the format; its size is known, though it may not be dequantised here ([`TypeInfo::quant`]).
    Known(&'static TypeInfo),
    /// An id that GGUF once had and has retired; the name it had.
    Removed(&'static str),
    /// An id that the format has never used.
    Unknown,
}

/// One row of the type table.
#[derive(Debug, PartialEq, Eq)]
pub struct TypeInfo {
    /// The id in the file.
    pub id: u32,
    /// The format's name, as `llama-quantize` prints it.
    pub name: &'static str,
    /// Values per block.
    pub block: usize,
    /// Bytes per block.
    pub bytes: usize,
    /// The dequantiser's key, where this build has one.
    pub quant: Option<QuantType>,
}

impl TypeInfo {
    /// Bytes of one row of `cols` values; `None` when `cols` is not a whole number of blocks or the size overflows.
    pub fn row_bytes(&self, cols: u64) -> Option<u64> {
        let block = self.block as u64;
        (cols.is_multiple_of(block)).then(|| (cols / block).checked_mul(self.bytes as u64)).flatten()
    }
}

/// A type that this build reads: plain floats and the block formats with a dequantiser.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, non_camel_case_types)]
pub enum QuantType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    NVFP4,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
}

impl QuantType {
    /// Every type with a dequantiser, in table order.
    pub fn all() -> impl Iterator<Item = QuantType> {
        TABLE.iter().filter_map(|t| t.quant)
    }

    /// The type's row of the table.
    pub fn info(self) -> &'static TypeInfo {
        // The table holds each QuantType exactly once; `tests::every_quant_type_has_a_row` keeps it so.
        match TABLE.iter().find(|t| t.quant == Some(self)) {
            Some(info) => info,
            None => unreachable!("{self:?} is missing from the type table"),
        }
    }

    /// The format's name.
    pub fn name(self) -> &'static str {
        self.info().name
    }

    /// Values per block (1 for plain floats).
    pub fn block(self) -> usize {
        self.info().block
    }

    /// Bytes of a row of `cols` values. `cols` must be a whole number of blocks.
    pub fn row_bytes(self, cols: usize) -> usize {
        let info = self.info();
        debug_assert!(cols.is_multiple_of(info.block), "{cols} columns are not whole {} blocks", info.name);
        cols / info.block * info.bytes
    }

    /// True for F32, F16 and BF16.
    pub fn is_plain(self) -> bool {
        matches!(self, QuantType::F32 | QuantType::F16 | QuantType::BF16)
    }
}

impl std::fmt::Display for QuantType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A type of safetensors files that GGUF has no id for, by its name there; this build dequantises none of them.
pub fn foreign(name: &str) -> Option<&'static TypeInfo> {
    FOREIGN.iter().find(|t| t.name == name)
}

/// Looks an id up.
pub fn lookup(id: u32) -> TypeId {
    if let Some(info) = TABLE.iter().find(|t| t.id == id) {
        return TypeId::Known(info);
    }
    match REMOVED.iter().find(|(removed, _)| *removed == id) {
        Some((_, name)) => TypeId::Removed(name),
        None => TypeId::Unknown,
    }
}

const fn row(id: u32, name: &'static str, block: usize, bytes: usize, quant: Option<QuantType>) -> TypeInfo {
    TypeInfo { id, name, block, bytes, quant }
}

use QuantType as Q;

static TABLE: [TypeInfo; 35] = [
    row(0, "F32", 1, 4, Some(Q::F32)),
    row(1, "F16", 1, 2, Some(Q::F16)),
    row(2, "Q4_0", 32, 18, Some(Q::Q4_0)),
    row(3, "Q4_1", 32, 20, Some(Q::Q4_1)),
    row(6, "Q5_0", 32, 22, Some(Q::Q5_0)),
    row(7, "Q5_1", 32, 24, Some(Q::Q5_1)),
    row(8, "Q8_0", 32, 34, Some(Q::Q8_0)),
    row(9, "Q8_1", 32, 36, None),
    row(10, "Q2_K", 256, 84, Some(Q::Q2_K)),
    row(11, "Q3_K", 256, 110, Some(Q::Q3_K)),
    row(12, "Q4_K", 256, 144, Some(Q::Q4_K)),
    row(13, "Q5_K", 256, 176, Some(Q::Q5_K)),
    row(14, "Q6_K", 256, 210, Some(Q::Q6_K)),
    row(15, "Q8_K", 256, 292, None),
    row(16, "IQ2_XXS", 256, 66, Some(Q::IQ2_XXS)),
    row(17, "IQ2_XS", 256, 74, Some(Q::IQ2_XS)),
    row(18, "IQ3_XXS", 256, 98, Some(Q::IQ3_XXS)),
    row(19, "IQ1_S", 256, 50, None),
    row(20, "IQ4_NL", 32, 18, Some(Q::IQ4_NL)),
    row(21, "IQ3_S", 256, 110, Some(Q::IQ3_S)),
    row(22, "IQ2_S", 256, 82, Some(Q::IQ2_S)),
    row(23, "IQ4_XS", 256, 136, Some(Q::IQ4_XS)),
    row(24, "I8", 1, 1, None),
    row(25, "I16", 1, 2, None),
    row(26, "I32", 1, 4, None),
    row(27, "I64", 1, 8, None),
    row(28, "F64", 1, 8, None),
    row(29, "IQ1_M", 256, 56, None),
    row(30, "BF16", 1, 2, Some(Q::BF16)),
    row(34, "TQ1_0", 256, 54, None),
    row(35, "TQ2_0", 256, 66, None),
    row(39, "MXFP4", 32, 17, Some(Q::MXFP4)),
    row(40, "NVFP4", 64, 36, Some(Q::NVFP4)),
    row(41, "Q1_0", 128, 18, None),
    row(42, "Q2_0", 64, 18, None),
];

/// Their ids are no file's: they count down from the largest.
static FOREIGN: [TypeInfo; 17] = [
    row(u32::MAX, "F8_E4M3", 1, 1, None),
    row(u32::MAX - 1, "F8_E5M2", 1, 1, None),
    row(u32::MAX - 2, "F8_E8M0", 1, 1, None),
    row(u32::MAX - 3, "F4", 2, 1, None),
    row(u32::MAX - 4, "F6_E2M3", 4, 3, None),
    row(u32::MAX - 5, "F6_E3M2", 4, 3, None),
    row(u32::MAX - 6, "I8", 1, 1, None),
    row(u32::MAX - 7, "U8", 1, 1, None),
    row(u32::MAX - 8, "F64", 1, 8, None),
    row(u32::MAX - 9, "BOOL", 1, 1, None),
    row(u32::MAX - 10, "I16", 1, 2, None),
    row(u32::MAX - 11, "U16", 1, 2, None),
    row(u32::MAX - 12, "I32", 1, 4, None),
    row(u32::MAX - 13, "U32", 1, 4, None),
    row(u32::MAX - 14, "I64", 1, 8, None),
    row(u32::MAX - 15, "U64", 1, 8, None),
    row(u32::MAX - 16, "C64", 1, 8, None),
];

const REMOVED: [(u32, &str); 8] = [
    (4, "Q4_2"),
    (5, "Q4_3"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (36, "IQ4_NL_4_4"),
    (37, "IQ4_NL_4_8"),
    (38, "IQ4_NL_8_8"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_quant_type_has_a_row() {
        for quant in QuantType::all() {
            assert_eq!(quant.info().quant, Some(quant));
        }
        assert_eq!(QuantType::all().count(), 22);
    }

    #[test]
    fn ids_are_unique_and_disjoint_from_the_removed_ones() {
        for (i, a) in TABLE.iter().enumerate() {
            assert!(TABLE[i + 1..].iter().all(|b| b.id != a.id), "{}", a.name);
            assert!(REMOVED.iter().all(|(id, _)| *id != a.id), "{}", a.name);
            assert!(FOREIGN.iter().all(|f| f.id != a.id && f.quant.is_none()), "{}", a.name);
        }
    }

    #[test]
    fn rows_must_be_whole_blocks() {
        let q4_k = QuantType::Q4_K.info();
        assert_eq!(q4_k.row_bytes(512), Some(288));
        assert_eq!(q4_k.row_bytes(384), None);
        assert_eq!(QuantType::F32.info().row_bytes(u64::MAX), None);
    }
}
