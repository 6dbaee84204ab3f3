//! Block formats, decoded to the exact f32 values that ggml's own arithmetic gives. Written from the layouts alone and
//! kept plain, so that the engine's fast decoders have something independent to be compared with, bit for bit.

mod codebook;
mod grid;
mod grids;
mod k_quants;
mod simple;

/// Values below which a second thread costs more than it brings.
const WORTH_A_THREAD: usize = 1 << 20;

/// Decodes one block into its values.
type Decode = fn(&[u8], &mut [f32]);

/// One block format.
#[derive(Debug, Clone, Copy)]
pub struct BlockFormat {
    /// ggml's name for it.
    pub name: &'static str,
    /// Values per block.
    pub values: usize,
    /// Bytes per block.
    pub bytes: usize,
    decode: Decode,
}

impl BlockFormat {
    /// Bytes of a row of `cols` values, or `None` where a row does not end on a block boundary.
    pub fn row_bytes(&self, cols: usize) -> Option<usize> {
        (cols.is_multiple_of(self.values)).then_some(())?;
        (cols / self.values).checked_mul(self.bytes)
    }

    /// The values of whole blocks, or `None` where `bytes` is not a whole number of them.
    pub fn decode(&self, bytes: &[u8]) -> Option<Vec<f32>> {
        (bytes.len().is_multiple_of(self.bytes)).then_some(())?;
        let mut out = vec![0f32; bytes.len() / self.bytes * self.values];
        let decode = |bytes: &[u8], out: &mut [f32]| {
            for (block, values) in bytes.chunks_exact(self.bytes).zip(out.chunks_exact_mut(self.values)) {
                (self.decode)(block, values);
            }
        };
        // Blocks do not depend on each other, so large tensors are shared out among threads.
        let cores = std::thread::available_parallelism().map_or(1, |c| c.get());
        let share = (bytes.len() / self.bytes).div_ceil(cores).max(WORTH_A_THREAD / self.values);
        std::thread::scope(|scope| {
            let mut shares = bytes.chunks(share * self.bytes).zip(out.chunks_mut(share * self.values));
            let own = shares.next();
            for (bytes, out) in shares {
                let decode = &decode;
                scope.spawn(move || decode(bytes, out));
            }
            if let Some((bytes, out)) = own {
                decode(bytes, out);
            }
        });
        Some(out)
    }
}

/// The block format of a ggml type id, or `None` for a type that the oracle does not decode.
pub fn block_format(type_id: u32) -> Option<BlockFormat> {
    let (name, values, bytes, decode): (_, _, _, Decode) = match type_id {
        0 => ("F32", 1, 4, simple::f32),
        1 => ("F16", 1, 2, simple::f16),
        2 => ("Q4_0", 32, 18, simple::q4_0),
        3 => ("Q4_1", 32, 20, simple::q4_1),
        6 => ("Q5_0", 32, 22, simple::q5_0),
        7 => ("Q5_1", 32, 24, simple::q5_1),
        8 => ("Q8_0", 32, 34, simple::q8_0),
        10 => ("Q2_K", 256, 84, k_quants::q2_k),
        11 => ("Q3_K", 256, 110, k_quants::q3_k),
        12 => ("Q4_K", 256, 144, k_quants::q4_k),
        13 => ("Q5_K", 256, 176, k_quants::q5_k),
        14 => ("Q6_K", 256, 210, k_quants::q6_k),
        16 => ("IQ2_XXS", 256, 66, grid::iq2_xxs),
        17 => ("IQ2_XS", 256, 74, grid::iq2_xs),
        18 => ("IQ3_XXS", 256, 98, grid::iq3_xxs),
        20 => ("IQ4_NL", 32, 18, codebook::iq4_nl),
        21 => ("IQ3_S", 256, 110, grid::iq3_s),
        22 => ("IQ2_S", 256, 82, grid::iq2_s),
        23 => ("IQ4_XS", 256, 136, codebook::iq4_xs),
        30 => ("BF16", 1, 2, simple::bf16),
        39 => ("MXFP4", 32, 17, codebook::mxfp4),
        40 => ("NVFP4", 64, 36, codebook::nvfp4),
        _ => return None,
    };
    Some(BlockFormat { name, values, bytes, decode })
}

/// The half-precision number at byte `at`.
fn half(b: &[u8], at: usize) -> f32 {
    half::f16::from_bits(u16::from_le_bytes([b[at], b[at + 1]])).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block of one format with the given bytes at the given places, zero elsewhere.
    fn decoded(type_id: u32, places: &[(usize, u8)]) -> Vec<f32> {
        let format = block_format(type_id).expect("known type");
        let mut block = vec![0u8; format.bytes];
        for &(at, byte) in places {
            block[at] = byte;
        }
        format.decode(&block).expect("one whole block")
    }

    /// Bytes of the half-precision 1.0 at `at`.
    fn one(at: usize) -> [(usize, u8); 2] {
        [(at, 0x00), (at + 1, 0x3c)]
    }

    #[test]
    fn q4_0_low_nibbles_are_the_first_half() {
        let y = decoded(2, &[one(0)[0], one(0)[1], (2, 0xf1)]);
        assert_eq!((y[0], y[16], y[1]), (1.0 - 8.0, 15.0 - 8.0, -8.0));
    }

    #[test]
    fn q5_0_takes_its_fifth_bit_from_qh() {
        let y = decoded(6, &[one(0)[0], one(0)[1], (2, 0b1), (4, 0b1), (6, 0x21)]);
        assert_eq!((y[0], y[16], y[1]), (17.0 - 16.0, 18.0 - 16.0, -16.0));
    }

    #[test]
    fn q4_k_reads_scales_and_mins_of_both_halves() {
        // d = 1, dmin = 1; sub-block 0: scale 3, min 2; sub-block 4: scale 5 | 1 << 4 (from the top of b[0]), min 7 | 2
        // << 4.
        let y = decoded(
            12,
            &[
                one(0)[0],
                one(0)[1],
                one(2)[0],
                one(2)[1],
                (4, 3 | 0x40),
                (8, 2 | 0x80),
                (12, 0x75),
                (16, 9),
                (16 + 64, 4),
            ],
        );
        assert_eq!(y[0], 3.0 * 9.0 - 2.0);
        assert_eq!(y[128], 21.0 * 4.0 - 39.0);
    }

    #[test]
    fn q6_k_keeps_d_last() {
        let y = decoded(14, &[one(208)[0], one(208)[1], (0, 0x21), (128, 0b11), (192, 2), (192 + 4, 0xff)]);
        assert_eq!(y[0], 2.0 * ((1 | 0x30) - 32) as f32);
        assert_eq!(y[64], -((2 - 32) as f32));
    }

    #[test]
    fn q3_k_subtracts_four_where_the_mask_is_clear() {
        // Scale 0 is (1 | 3 << 4) - 32 = 17.
        let y = decoded(11, &[one(108)[0], one(108)[1], (96, 1), (96 + 8, 3), (0, 1), (32, 0b10), (33, 0b10)]);
        assert_eq!((y[0], y[1]), (17.0 * 2.0, 17.0 * (2.0 - 4.0)));
    }

    #[test]
    fn mxfp4_has_subnormal_scales() {
        assert_eq!(decoded(39, &[(1, 0x01)])[0], 2f32.powi(-126) / 4.0);
        assert_eq!(decoded(39, &[(0, 128), (1, 0xf2)])[0], 2.0);
        assert_eq!(decoded(39, &[(0, 128), (1, 0xf2)])[16], -12.0);
    }

    #[test]
    fn iq2_xxs_gives_the_eighth_value_the_parity_of_the_other_signs() {
        // Entry 0 is eight times 8, and (1/2 + 0) / 4 of it is 1. Signs of the first eight values: 0000001.
        let y = decoded(16, &[one(0)[0], one(0)[1], (2 + 4, 1)]);
        assert_eq!(y[..9], [-1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -1.0, 1.0]);
    }

    #[test]
    fn iq3_s_takes_the_ninth_bit_of_an_index_from_qh() {
        // Entry 0 is 1 1 1 1, entry 256 is 7 5 9 5; scale 1 + 2 x 2 and, in the next 32 values, 1 + 2 x 3.
        let y = decoded(21, &[one(0)[0], one(0)[1], (66, 0b10), (74, 0b10), (106, 0x32)]);
        assert_eq!(y[..8], [5.0, -5.0, 5.0, 5.0, 35.0, 25.0, 45.0, 25.0]);
        assert_eq!(y[32], 7.0);
    }

    #[test]
    fn partial_blocks_and_unknown_types_are_refused() {
        assert!(block_format(8).expect("Q8_0").decode(&[0; 33]).is_none());
        assert!(block_format(8).expect("Q8_0").row_bytes(48).is_none());
        assert_eq!(block_format(12).expect("Q4_K").row_bytes(512), Some(288));
        assert!(block_format(19).is_none());
    }
}
