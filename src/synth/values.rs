//! Random tensors of a given spread, in any order and on any number of threads: the bytes of a piece depend on the seed,
//! the tensor's name and the piece's number alone.
//!
//! Codes of block formats are random bytes as they are; what gives a block its size is its scale, which is written over
//! them, with a minimum that brings the mean to 0. Which scale gives a spread of 1 is measured for each format on blocks
//! expanded by this build's dequantiser, so that no format needs arithmetic of its own. Scales differ from block to block
//! and, where the format allows, in sign, so that exchanged blocks do not go unseen.

use std::collections::BTreeMap;

use half::{bf16, f16};

use super::SynthError;
use crate::quant::{QuantType, dequantise};

/// Bytes of a piece at most: large against the cost of a task, small against a buffer.
const PIECE: usize = 1 << 20;
/// Scales of a tensor; a random byte chooses.
const SCALES: usize = 256;
/// Values expanded to measure a format.
const MEASURED: usize = 1 << 20;

/// Where a block format holds its f16 scale.
#[derive(Clone, Copy)]
struct Layout {
    scale: usize,
    /// The f16 that shifts every value, if any.
    min: Option<usize>,
    /// Bytes `.0` to `.1` hold sub-block scales, of which the bits of `.2` are set: none is small beside the others.
    set: (usize, usize, u8),
}

/// The public block layouts of ggml at `0c1e57098`; `None` for plain types and for formats without an f16 scale.
fn layout_of(ty: QuantType) -> Option<Layout> {
    use QuantType::*;
    let (scale, min, set) = match ty {
        F32 | F16 | BF16 | MXFP4 | NVFP4 => return None,
        Q4_0 | Q5_0 | Q8_0 | IQ4_NL | IQ4_XS | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S => (0, None, (0, 0, 0)),
        Q4_1 | Q5_1 => (0, Some(2), (0, 0, 0)),
        Q2_K => (80, Some(82), (0, 16, 0x88)),
        Q3_K => (108, None, (0, 0, 0)),
        Q4_K | Q5_K => (0, Some(2), (4, 12, 0xa0)),
        Q6_K => (208, None, (0, 0, 0)),
    };
    Some(Layout { scale, min, set })
}

/// Whether tensors of `ty` can be made.
pub fn makes(ty: QuantType) -> bool {
    ty.is_plain() || layout_of(ty).is_some()
}

/// Scale and minimum of each format at which random blocks have mean 0 and standard deviation 1, measured once.
#[derive(Default)]
pub(super) struct Units(BTreeMap<QuantType, (f64, f64)>);

impl Units {
    fn of(&mut self, ty: QuantType, layout: Layout) -> Result<(f64, f64), SynthError> {
        if let Some(unit) = self.0.get(&ty) {
            return Ok(*unit);
        }
        let unit = unit(ty, layout)?;
        self.0.insert(ty, unit);
        Ok(unit)
    }
}

/// What fills one tensor.
pub(super) struct Fill {
    seed: u64,
    ty: QuantType,
    values: Values,
}

enum Values {
    /// Uniform around a mean, at most this far from it.
    Plain { mean: f32, reach: f32 },
    /// Scale and minimum as f16 bytes.
    Blocks { layout: Layout, scales: Vec<[[u8; 2]; 2]> },
}

impl Fill {
    /// What fills the tensor called `name`, with values of this mean and standard deviation (block formats: mean 0).
    /// Errors: a format whose scale is no f16.
    pub(super) fn new(
        units: &mut Units,
        seed: u64,
        name: &str,
        ty: QuantType,
        (mean, deviation): (f32, f32),
    ) -> Result<Self, SynthError> {
        // FNV-1a over the name, from a basis that the seed moves.
        let basis = Random(seed ^ 0xcbf2_9ce4_8422_2325).next();
        let seed = name.bytes().fold(basis, |hash, b| (hash ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3));
        if ty.is_plain() {
            let reach = deviation * 3f32.sqrt();
            return Ok(Fill { seed, ty, values: Values::Plain { mean, reach } });
        }
        let layout = layout_of(ty).ok_or_else(|| SynthError::Spec {
            what: "the type of matrices",
            expected: "a plain one, or one whose blocks have an f16 scale".into(),
            found: ty.name().into(),
        })?;
        let (scale, min) = units.of(ty, layout)?;
        Ok(Fill { seed, ty, values: Values::Blocks { layout, scales: scales(layout, scale, min, deviation) } })
    }

    /// Bytes of every piece but the last.
    pub(super) fn piece_bytes(&self) -> usize {
        let block = self.ty.info().bytes;
        PIECE / block * block
    }

    /// Fills piece number `piece`, whole blocks.
    pub(super) fn fill(&self, piece: u64, out: &mut [u8]) {
        let mut random = Random(Random(self.seed ^ piece.wrapping_mul(0xd6e8_feb8_6659_fd93)).next());
        match &self.values {
            Values::Plain { mean, reach } => {
                // 24 bits, so that every value is exact on the way: from -1 up to, not including, 1.
                let mut value = || mean + reach * ((random.next() >> 40) as f32 / (1 << 23) as f32 - 1.0);
                match self.ty {
                    QuantType::F16 => store(out, || f16::from_f32(value()).to_le_bytes()),
                    QuantType::BF16 => store(out, || bf16::from_f32(value()).to_le_bytes()),
                    _ => store(out, || value().to_le_bytes()),
                }
            }
            Values::Blocks { layout, scales } => {
                random.bytes(out);
                scale_blocks(self.ty, *layout, scales, out);
            }
        }
    }
}

fn store<const N: usize>(out: &mut [u8], mut value: impl FnMut() -> [u8; N]) {
    for place in out.as_chunks_mut::<N>().0 {
        *place = value();
    }
}

/// Writes a scale, chosen by the random byte that it replaces, and minimum into every block.
fn scale_blocks(ty: QuantType, layout: Layout, scales: &[[[u8; 2]; 2]], out: &mut [u8]) {
    let (from, to, bits) = layout.set;
    for block in out.chunks_exact_mut(ty.info().bytes) {
        let [scale, min] = scales[usize::from(block[layout.scale]) % scales.len()];
        block[layout.scale..layout.scale + 2].copy_from_slice(&scale);
        if let Some(at) = layout.min {
            block[at..at + 2].copy_from_slice(&min);
        }
        block[from..to].iter_mut().for_each(|b| *b |= bits);
    }
}

/// Scale and minimum at which random blocks of a format have mean 0 and standard deviation 1.
fn unit(ty: QuantType, layout: Layout) -> Result<(f64, f64), SynthError> {
    let moments = |scale: f64, min: f64| -> Result<(f64, f64), SynthError> {
        let mut blocks = vec![0; MEASURED / ty.block() * ty.info().bytes];
        Random(1).bytes(&mut blocks);
        scale_blocks(ty, layout, &[[scale, min].map(half)], &mut blocks);
        let mut values = vec![0.0; MEASURED];
        dequantise(ty, &blocks, &mut values).map_err(|e| SynthError::Spec {
            what: "the type of matrices",
            expected: "whole blocks".into(),
            found: e.to_string(),
        })?;
        let n = values.len() as f64;
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
        let square = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n;
        Ok((mean, square.sqrt()))
    };
    // Values are linear in scale and minimum.
    let min = match layout.min {
        Some(_) => -moments(1.0, 0.0)?.0 / moments(0.0, 1.0)?.0,
        None => 0.0,
    };
    let (_, deviation) = moments(1.0, min)?;
    Ok((1.0 / deviation, min / deviation))
}

/// Scales from 3/4 to 5/4 of the one that gives `deviation`, with their minima. Codes of formats without a minimum lie
/// around -1/2 or so; scales of both signs cancel that.
fn scales(layout: Layout, scale: f64, min: f64, deviation: f32) -> Vec<[[u8; 2]; 2]> {
    let factor = |i: usize| 0.75 + 0.5 * (i / 2) as f64 / (SCALES / 2 - 1) as f64;
    let mean_square = (0..SCALES).map(|i| factor(i).powi(2)).sum::<f64>() / SCALES as f64;
    let to_deviation = f64::from(deviation) / mean_square.sqrt();
    let one = |i: usize| {
        let sign = if layout.min.is_none() && i % 2 == 1 { -1.0 } else { 1.0 };
        let factor = sign * factor(i) * to_deviation;
        [factor * scale, factor * min].map(half)
    };
    (0..SCALES).map(one).collect()
}

fn half(value: f64) -> [u8; 2] {
    f16::from_f64(value).to_le_bytes()
}

/// splitmix64: the state only counts, so the multiplications of neighbouring numbers overlap.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    #[inline]
    /// The next 64 random bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn bytes(&mut self, out: &mut [u8]) {
        let (words, rest) = out.as_chunks_mut::<8>();
        for word in words {
            *word = self.next().to_le_bytes();
        }
        let last = self.next().to_le_bytes();
        rest.iter_mut().zip(last).for_each(|(to, from)| *to = from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mean and standard deviation of `n` pieces.
    fn moments(ty: QuantType, mean: f32, deviation: f32) -> (f64, f64) {
        let fill = Fill::new(&mut Units::default(), 7, "blk.0.some.weight", ty, (mean, deviation)).expect("a fill");
        let mut bytes = vec![0; fill.piece_bytes()];
        let mut values = vec![0.0; bytes.len() / ty.info().bytes * ty.block()];
        let (mut sum, mut square, mut n) = (0.0, 0.0, 0.0);
        for piece in 0..4 {
            fill.fill(piece, &mut bytes);
            dequantise(ty, &bytes, &mut values).expect("whole blocks");
            assert!(values.iter().all(|v| v.is_finite()), "{ty}");
            sum += values.iter().map(|v| f64::from(*v)).sum::<f64>();
            square += values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
            n += values.len() as f64;
        }
        let mean = sum / n;
        (mean, (square / n - mean * mean).sqrt())
    }

    /// At the deviations of GLM-5's narrowest and widest rows, whose scales are subnormal halves.
    #[test]
    fn every_type_has_the_spread_that_was_asked_for() {
        for ty in QuantType::all().filter(|ty| makes(*ty)) {
            for deviation in [1.0f32, 1.0 / 512f32.sqrt(), 1.0 / 16_384f32.sqrt()] {
                let (mean, found) = moments(ty, 0.0, deviation);
                let relative = found / f64::from(deviation);
                // Pieces hold at least a million values in sub-blocks of 16 or more: 1 % is four standard errors. The
                // coarsest subnormal scale has some fifty steps, so its rounding errors average to less.
                assert!((relative - 1.0).abs() < 0.01, "{ty}: {relative} of {deviation}");
                assert!(mean.abs() < 0.01 * f64::from(deviation), "{ty}: mean {mean} at {deviation}");
            }
        }
    }

    #[test]
    fn norms_lie_around_one() {
        let (mean, deviation) = moments(QuantType::F32, 1.0, 0.1);
        assert!((mean - 1.0).abs() < 1e-3 && (deviation - 0.1).abs() < 1e-3, "{mean} {deviation}");
    }

    #[test]
    fn pieces_names_and_seeds_give_other_bytes() {
        let bytes = |seed, name, piece| {
            let fill = Fill::new(&mut Units::default(), seed, name, QuantType::Q4_K, (0.0, 1.0)).expect("a fill");
            let mut bytes = vec![0; 144 * 4];
            fill.fill(piece, &mut bytes);
            bytes
        };
        let all = [bytes(0, "a", 0), bytes(0, "a", 1), bytes(0, "b", 0), bytes(1, "a", 0)];
        assert_eq!(all[0], bytes(0, "a", 0));
        for (i, a) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|b| a != b), "{i}");
        }
    }
}
