//! Random inputs that depend on nothing but a name, so that every run sees the same ones.

use crate::synth;

/// splitmix64, from the name's FNV-1a.
pub struct Random(synth::Random);

impl Random {
    /// Numbers of their own for every name.
    pub fn of(name: &str) -> Self {
        let fold = |hash: u64, b: u8| (hash ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3);
        Random(synth::Random(name.bytes().fold(0xcbf2_9ce4_8422_2325, fold)))
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0.next()
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n.max(1) as u64) as usize
    }

    /// A bell of mean 0 and standard deviation 1: the sum of four uniform numbers.
    pub fn value(&mut self) -> f32 {
        let bits = self.bits();
        let sum: u64 = (0..4).map(|i| (bits >> (16 * i)) & 0xffff).sum();
        // Four of width 1 and variance 1/12 each.
        ((sum as f64 / 65_536.0 - 2.0) * 3f64.sqrt()) as f32
    }

    /// `n` values.
    pub fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.value()).collect()
    }

    /// `n` bytes.
    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        let mut out: Vec<u8> = (0..n.div_ceil(8)).flat_map(|_| self.bits().to_le_bytes()).collect();
        out.truncate(n);
        out
    }

    /// The numbers below `n` in random order.
    pub fn shuffled(&mut self, n: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            all.swap(i, self.below(i + 1));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_values_are_a_bell() {
        let values = Random::of("bell").values(100_000);
        let n = values.len() as f64;
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
        let square = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n;
        // Standard errors: 0.003 of the mean, less of the square.
        assert!(mean.abs() < 0.02 && (square - 1.0).abs() < 0.02, "{mean} {square}");
        let mut order = Random::of("order").shuffled(100);
        order.sort_unstable();
        assert!(order.iter().enumerate().all(|(i, v)| i == *v));
    }
}
