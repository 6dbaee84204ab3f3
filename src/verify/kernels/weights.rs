//! Random stored matrices of every type: codes are random bytes, scales are written over them so that all values are
//! finite and of a size that sums do not overflow. Minima are random too, so that one of the wrong sign is seen.

use half::{bf16, f16};
use lockstep_kernels::geometry::{self, UNIT_COLS, UNIT_ROWS};
use lockstep_reference::ndarray::Array2;

use super::lab::{Area, Lab, given};
use super::random::Random;
use crate::device::cuda::MatrixArg;
use crate::device::cuda::format::Format;
use crate::device::cuda::gpu::GpuError;
use crate::device::cuda::memory::PLANE_ROOM;
use crate::quant::{QuantType, dequantise};

/// Where a block holds what gives its values their size.
enum Scale {
    /// f16 at a byte, of about 2^this; the f16 of its minimum, if it has one.
    Half(usize, i32, Option<usize>),
    /// A power of two in one byte.
    E8m0,
    /// Small floats in the first bytes, one per sub-block.
    Ue4m3(usize),
    /// Plain values.
    Plain,
}

/// The public block layouts of ggml at `0c1e57098`.
fn scale_of(ty: QuantType) -> Scale {
    use QuantType::*;
    match ty {
        F32 | F16 | BF16 => Scale::Plain,
        Q4_0 | Q5_0 | IQ4_NL => Scale::Half(0, -4, None),
        Q4_1 | Q5_1 => Scale::Half(0, -4, Some(2)),
        Q8_0 => Scale::Half(0, -7, None),
        Q2_K => Scale::Half(80, -5, Some(82)),
        Q3_K => Scale::Half(108, -7, None),
        Q4_K | Q5_K => Scale::Half(0, -9, Some(2)),
        Q6_K => Scale::Half(208, -11, None),
        IQ4_XS => Scale::Half(0, -11, None),
        IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S => Scale::Half(0, -7, None),
        MXFP4 => Scale::E8m0,
        NVFP4 => Scale::Ue4m3(4),
    }
}

/// `count` blocks of `ty`.
pub fn blocks(random: &mut Random, ty: QuantType, count: usize) -> Vec<u8> {
    let bytes = ty.info().bytes;
    let mut out = random.bytes(count * bytes);
    for block in out.chunks_exact_mut(bytes) {
        match scale_of(ty) {
            Scale::Plain => {
                let value = random.value();
                match ty {
                    QuantType::F16 => block.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
                    QuantType::BF16 => block.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
                    _ => block.copy_from_slice(&value.to_le_bytes()),
                }
            }
            Scale::Half(at, exponent, min) => {
                let mut half = |at: usize, size: f32| {
                    let bits = random.bits();
                    let factor = 0.5 + (bits & 0xffff) as f32 / 65_536.0;
                    let sign = if bits >> 63 == 1 { -1.0 } else { 1.0 };
                    block[at..at + 2].copy_from_slice(&f16::from_f32(sign * factor * size).to_le_bytes());
                };
                let size = 2f32.powi(exponent);
                half(at, size);
                if let Some(at) = min {
                    half(at, 4.0 * size);
                }
            }
            Scale::E8m0 => block[0] = 120 + (random.bits() % 6) as u8,
            Scale::Ue4m3(subs) => block[..subs].iter_mut().for_each(|b| *b = 0x20 + (random.bits() % 0x18) as u8),
        }
    }
    out
}

/// A stack of matrices on the GPU, and its bytes here.
pub struct Stored {
    /// Its type, and how it lies there.
    pub format: Format,
    /// Matrices.
    pub stack: usize,
    /// Rows of each.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// The file's bytes.
    pub bytes: Vec<u8>,
    area: Area,
}

impl Stored {
    /// Random matrices, repacked on the GPU by the kernel that loading uses.
    pub fn random(lab: &Lab<'_>, name: &str, format: Format, shape: [usize; 3]) -> Result<Self, GpuError> {
        let [stack, rows, cols] = shape;
        let ty = format.ty;
        let bytes = blocks(&mut Random::of(name), ty, stack * rows * cols / ty.block());
        let (file, area) = (lab.bytes(&bytes)?, lab.poisoned((bytes.len() + PLANE_ROOM).div_ceil(4))?);
        let stored = Stored { format, stack, rows, cols, bytes, area };
        if format.tiled {
            let (units, all) = (cols / UNIT_COLS, stack * rows / UNIT_ROWS * (cols / UNIT_COLS));
            let args = given![file, stored.area, 0i64, all as i64, units];
            lab.launch("tiles", Some(format), "tile_pack", geometry::tile_pack(all), &args)?;
        } else {
            let args = given![file, stored.area, 0i64, stored.bytes.len() as i64, stored.blocks()];
            lab.launch("pack", Some(format), "repack", geometry::each(stored.bytes.len()), &args)?;
        }
        lab.gpu.synchronise(&|| format!("repacking {format}"))?;
        Ok(stored)
    }

    /// Blocks of the whole stack.
    pub fn blocks(&self) -> i64 {
        (self.stack * self.rows * self.cols / self.format.ty.block()) as i64
    }

    /// As kernels take it.
    pub fn matrix(&self) -> MatrixArg {
        MatrixArg { planes: self.area.at(0), blocks: self.blocks(), rows: self.rows as i32, cols: self.cols as i32 }
    }

    /// Where row `row` of all starts, in tiles: it begins one.
    pub fn tile(&self, row: usize) -> u64 {
        self.area.at(0) + (row * self.format.ty.row_bytes(self.cols)) as u64
    }

    /// Values of some rows of matrix `index`, as the CPU expands them.
    pub fn values(&self, index: usize, rows: &[usize]) -> Array2<f32> {
        let each = self.format.ty.row_bytes(self.cols);
        let mut out = Array2::zeros((rows.len(), self.cols));
        for (mut values, row) in out.rows_mut().into_iter().zip(rows) {
            let at = (index * self.rows + row) * each;
            let mut expanded = vec![0.0; self.cols];
            if dequantise(self.format.ty, &self.bytes[at..at + each], &mut expanded).is_err() {
                expanded.fill(f32::NAN); // a row that cannot be expanded matches nothing
            }
            values.iter_mut().zip(expanded).for_each(|(to, v)| *to = v);
        }
        out
    }

    /// At most `most` rows: all where there are few, else the first, the last, and some between.
    pub fn sampled(&self, most: usize) -> Vec<usize> {
        if self.rows <= most {
            return (0..self.rows).collect();
        }
        let edge = most / 4;
        let mut random = Random::of("rows");
        let mut rows: Vec<usize> = (0..edge).chain(self.rows - edge..self.rows).collect();
        rows.extend((0..most - 2 * edge).map(|_| edge + random.below(self.rows - 2 * edge)));
        rows.sort_unstable();
        rows.dedup();
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_values_of_a_sane_size() {
        for ty in QuantType::all() {
            let bytes = blocks(&mut Random::of("sane"), ty, 65_536 / ty.block());
            let mut values = vec![0.0f32; 65_536];
            dequantise(ty, &bytes, &mut values).unwrap();
            let square = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / 65_536.0;
            let largest = values.iter().map(|v| v.abs()).fold(0.0, f32::max);
            assert!(values.iter().all(|v| v.is_finite()), "{ty}");
            assert!((0.02..30.0).contains(&square.sqrt()) && largest < 300.0, "{ty}: {} {largest}", square.sqrt());
        }
    }
}
