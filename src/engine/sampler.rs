//! From logits to a token: greedy, or sampled with temperature, top-k, top-p, min-p and a seed.

/// How to choose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the k most likely; 0 keeps all.
    pub top_k: usize,
    /// Keep the most likely until their probabilities reach p; 1 keeps all.
    pub top_p: f32,
    /// Drop what is less likely than this share of the most likely; 0 keeps all.
    pub min_p: f32,
    /// Start of the random sequence.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 }
    }
}

/// A sampler with its random state. The n-th draw of a seed is the same everywhere.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    state: u64,
}

impl Sampler {
    /// A sampler at the start of its sequence.
    pub fn new(sampling: Sampling) -> Self {
        Sampler { sampling, state: sampling.seed }
    }

    /// Chooses an id. Greedy ties go to the lowest id; NaN never wins.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        if self.sampling.temperature <= 0.0 {
            return greedy(logits);
        }
        let mut candidates: Vec<(u32, f32)> =
            logits.iter().enumerate().filter(|(_, l)| l.is_finite()).map(|(i, l)| (i as u32, *l)).collect();
        candidates.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if self.sampling.top_k > 0 {
            candidates.truncate(self.sampling.top_k);
        }
        let Some(most) = candidates.first().map(|c| c.1) else { return greedy(logits) };
        let weights: Vec<f64> =
            candidates.iter().map(|c| f64::from((c.1 - most) / self.sampling.temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut kept = 0;
        let mut mass = 0.0;
        for w in &weights {
            let enough = mass >= f64::from(self.sampling.top_p) * total;
            if kept > 0 && (enough || *w < f64::from(self.sampling.min_p)) {
                break;
            }
            mass += w;
            kept += 1;
        }
        let mut left = self.uniform() * mass;
        for (c, w) in candidates.iter().zip(&weights).take(kept) {
            left -= w;
            if left <= 0.0 {
                return c.0;
            }
        }
        candidates[kept - 1].0
    }

    /// A number from [0, 1): splitmix64 (Steele, Lea and Flood 2014), whose stream is fixed by its definition.
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// The most likely id, ties to the lowest.
pub fn greedy(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, l) in logits.iter().enumerate() {
        if *l > logits[best] || (logits[best].is_nan() && !l.is_nan()) {
            best = i;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_lowest_of_equals_and_never_nan() {
        assert_eq!(greedy(&[f32::NAN, 1.0, 3.0, 3.0]), 2);
        assert_eq!(greedy(&[f32::NEG_INFINITY, f32::NEG_INFINITY]), 0);
    }

    #[test]
    fn filters_keep_what_they_say() {
        let logits = [0.0, 2.0, 1.9, -1.0];
        let draws = |s: Sampling| -> Vec<u32> {
            let mut sampler = Sampler::new(s);
            let mut seen: Vec<u32> = (0..2000).map(|_| sampler.sample(&logits)).collect();
            seen.sort_unstable();
            seen.dedup();
            seen
        };
        let base = Sampling { temperature: 1.0, seed: 7, ..Sampling::default() };
        assert_eq!(draws(base), [0, 1, 2, 3]);
        assert_eq!(draws(Sampling { top_k: 2, ..base }), [1, 2]);
        assert_eq!(draws(Sampling { top_p: 0.5, ..base }), [1, 2]);
        assert_eq!(draws(Sampling { min_p: 0.1, ..base }), [0, 1, 2]);
        assert_eq!(draws(Sampling { temperature: 0.0, ..base }), [1]);
    }

    #[test]
    fn shares_follow_the_distribution_and_the_seed() {
        let sampling = Sampling { temperature: 1.0, seed: 3, ..Sampling::default() };
        let logits = [0.0, (3.0f32).ln()];
        let mut a = Sampler::new(sampling);
        let ones = (0..20_000).filter(|_| a.sample(&logits) == 1).count() as f64;
        // 20,000 draws of p = 0.75: four standard deviations are 4 sqrt(20000 * 0.75 * 0.25) = 245.
        assert!((ones - 15_000.0).abs() < 245.0, "{ones}");
        let (mut b, mut c) = (Sampler::new(sampling), Sampler::new(sampling));
        assert!((0..100).all(|_| b.sample(&logits) == c.sample(&logits)));
    }
}
