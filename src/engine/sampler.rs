//! From logits to a token: greedy, or sampled with temperature, top-k, top-p, min-p and a seed.

use crate::device::Draw;

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
    /// Of the noise.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 }
    }
}

impl Sampling {
    /// How a device can choose with it from the logits of its own part of the vocabulary; `None` if a filter needs all.
    pub fn draw(&self) -> Option<Draw> {
        let filters = self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0;
        let greedy = self.temperature <= 0.0;
        (greedy || !filters).then_some(Draw { temperature: self.temperature, seed: self.seed })
    }

    /// Chooses an id from the logits of the token at `position`. The same seed, position and logits give the same id,
    /// whatever was chosen before. Ties go to the lowest id; NaN never wins.
    pub fn choose(&self, position: u32, logits: &[f32]) -> u32 {
        let draw = Draw { temperature: self.temperature, seed: self.seed };
        let all = logits.iter().enumerate().map(|(id, logit)| (id as u32, *logit));
        let choice =
            if self.draw().is_some() { draw.sample(position, all) } else { draw.sample(position, self.kept(all)) };
        choice.map_or(0, |(_, id)| id)
    }

    /// What the filters keep, the most likely first.
    fn kept(&self, all: impl Iterator<Item = (u32, f32)>) -> impl Iterator<Item = (u32, f32)> {
        let mut candidates: Vec<(u32, f32)> = all.filter(|(_, logit)| !logit.is_nan()).collect();
        candidates.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if self.top_k > 0 {
            candidates.truncate(self.top_k);
        }
        let most = candidates.first().map_or(0.0, |c| c.1);
        let weights: Vec<f64> = candidates.iter().map(|c| f64::from((c.1 - most) / self.temperature).exp()).collect();
        let enough = f64::from(self.top_p) * weights.iter().sum::<f64>();
        let (mut kept, mut mass) = (0, 0.0);
        for w in &weights {
            if kept > 0 && (mass >= enough || *w < f64::from(self.min_p)) {
                break;
            }
            mass += w;
            kept += 1;
        }
        candidates.into_iter().take(kept)
    }
}

/// The most likely id, ties to the lowest.
pub fn greedy(logits: &[f32]) -> u32 {
    Sampling::default().choose(0, logits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_lowest_of_equals_and_never_nan() {
        assert_eq!(greedy(&[f32::NAN, 1.0, 3.0, 3.0]), 2);
        assert_eq!(greedy(&[f32::NEG_INFINITY, f32::NEG_INFINITY]), 0);
        assert_eq!(greedy(&[f32::NAN, f32::NAN]), 0);
    }

    #[test]
    fn filters_keep_what_they_say() {
        let logits = [0.0, 2.0, 1.9, -1.0];
        let draws = |s: Sampling| -> Vec<u32> {
            let mut seen: Vec<u32> = (0..2000).map(|position| s.choose(position, &logits)).collect();
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
        assert_eq!(draws(Sampling { temperature: 0.0, top_k: 3, ..base }), [1]);
        // Numbers or not, filters choose as the plain path does.
        for logits in [[f32::NEG_INFINITY; 3], [f32::NAN; 3], [1.0, f32::INFINITY, f32::NAN]] {
            for filters in [(0, 1.0, 0.0), (2, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1)] {
                let s = Sampling { top_k: filters.0, top_p: filters.1, min_p: filters.2, ..base };
                assert_eq!(s.choose(5, &logits), base.choose(5, &logits), "{logits:?} {filters:?}");
            }
        }
    }

    #[test]
    fn shares_follow_the_softmax() {
        let logits = [0.0, 2.0 * (3.0f32).ln(), f32::NAN, f32::NEG_INFINITY, 2.0 * (4.0f32).ln()];
        let shares: [f64; 5] = [0.125, 0.375, 0.0, 0.0, 0.5]; // of exp(logit / 2)
        for (seed, filter) in [(0, 0), (1, 0), (u64::MAX, 0), (3, 3)] {
            let sampling = Sampling { temperature: 2.0, seed, top_k: filter, ..Sampling::default() };
            let mut counts = [0.0f64; 5];
            (0..20_000).for_each(|position| counts[sampling.choose(position, &logits) as usize] += 1.0);
            for (count, share) in counts.iter().zip(shares) {
                // Four standard deviations of 20,000 draws.
                let (mean, far) = (20_000.0 * share, 4.0 * (20_000.0 * share * (1.0 - share)).sqrt());
                assert!((count - mean).abs() <= far, "seed {seed}: {counts:?}");
            }
        }
    }

    #[test]
    fn parts_of_the_vocabulary_choose_as_the_whole() {
        let logits: Vec<f32> = (0..1000).map(|i| (i * 7 % 31) as f32 / 4.0).collect();
        let sampling = Sampling { temperature: 0.7, seed: 5, ..Sampling::default() };
        let draw = sampling.draw().expect("no filter");
        let part = |position: u32, ids: std::ops::Range<usize>| {
            draw.sample(position, ids.map(|id| (id as u32, logits[id]))).expect("numbers")
        };
        for position in 0..200 {
            let (low, high) = (part(position, 0..333), part(position, 333..1000));
            let best = if high.0 > low.0 { high.1 } else { low.1 };
            assert_eq!(sampling.choose(position, &logits), best);
        }
        assert!(Sampling { top_p: 0.9, ..sampling }.draw().is_none(), "a filter needs the whole");
        assert!(Sampling { top_p: 0.9, temperature: 0.0, ..sampling }.draw().is_some(), "greedy needs none");
    }
}
