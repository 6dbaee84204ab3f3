//! When the loss speaks: what a change must do to be named, when two cannot be told apart, and what the loss of a file as it
//! is says of it.

/// What a repair must gain, in nats per token.
pub(super) const LEAST_GAIN: f64 = 0.05;
/// And as a share of the loss.
const LEAST_SHARE: f64 = 0.5;
/// The loss that it must reach, as a share of the unigram's.
const MOST_LEFT: f64 = 0.25;
/// Texts that must improve.
const LEAST_AGREE: f64 = 7.0 / 8.0;
/// Texts, and tokens in them, that a verdict takes.
const LEAST_TEXTS: usize = 8;
const LEAST_TOKENS: usize = 170;
/// Standard errors, and nats per token, between two repairs that can be told apart.
const LEAST_MARGIN: f64 = 2.0;
const LEAST_APART: f64 = 0.02;
/// A set counts where its loss is at most this share of the shuffled one.
const MOST_OF_SHUFFLED: f64 = 0.5;
/// A loss that a model has on text that it knows, in nats per token: ln(10 / 7), as of tokens that get seven tenths each. Damage of one layer of a model that has a
/// text by heart already costs 0.4 to 0.9, and other words come out.
pub(super) const PLAUSIBLE: f64 = 0.3567;
/// A set that is asked must cost less than so many times what it costs in a line, where it is known by heart.
const MOST_TO_ASK: f64 = 4.0;
/// What a repair may leave of the loss without the half of a layer that matters least.
pub(super) const LEAST_OVER_SKIP: f64 = 0.5;
/// A repair that gains so much of the loss leaves no better one to look for.
const ALL: f64 = 0.95;
/// Leaving half a layer out must gain this share of the loss; of a loss that is plausible as it is, what a repair must
/// gain: coarse weights everywhere make a layer that is better left out.
const LEAST_OF_SKIP: f64 = 0.05;

/// The texts of a set: tokens of each, and what a unigram model loses on them.
#[derive(Clone, Debug)]
pub(super) struct Scale {
    /// Scored tokens of each text.
    pub tokens: Vec<usize>,
    /// Nats per token of a unigram model.
    pub unigram: f64,
}

impl Scale {
    /// Nats per token.
    pub(super) fn loss(&self, nats: &[f64]) -> f64 {
        nats.iter().sum::<f64>() / self.tokens.iter().sum::<usize>().max(1) as f64
    }

    /// True if texts and tokens are enough for a verdict.
    pub(super) fn is_enough(&self) -> bool {
        self.tokens.len() >= LEAST_TEXTS && self.tokens.iter().sum::<usize>() >= LEAST_TOKENS
    }

    /// How many texts cost less afterwards, of how many that do not cost the same: merges, and choices of keys, leave some
    /// texts as they are.
    pub(super) fn agree(&self, before: &[f64], after: &[f64]) -> (usize, usize) {
        let differ = before.iter().zip(after).filter(|(before, after)| (*before - *after).abs() > 1e-6 * *before);
        differ.fold((0, 0), |(less, all), (before, after)| (less + usize::from(after < before), all + 1))
    }

    /// True if enough texts improve.
    fn agrees(&self, before: &[f64], after: &[f64]) -> bool {
        let (less, all) = self.agree(before, after);
        all >= LEAST_TEXTS / 2 && less as f64 >= LEAST_AGREE * all as f64
    }

    /// True if a change from `before` to `after` is to be named.
    pub(super) fn names(&self, before: &[f64], after: &[f64]) -> bool {
        let (loss, left) = (self.loss(before), self.loss(after));
        self.is_enough()
            && self.agrees(before, after)
            && loss - left >= LEAST_GAIN
            && loss - left >= LEAST_SHARE * loss
            && left <= MOST_LEFT * self.unigram
    }

    /// True if a change gains nearly all that there is.
    pub(super) fn is_all(&self, before: &[f64], after: &[f64]) -> bool {
        self.loss(after) <= (1.0 - ALL) * self.loss(before)
    }

    /// True if `after` cannot be told from a better one.
    pub(super) fn alike(&self, best: &[f64], after: &[f64]) -> bool {
        let apart = self.loss(after) - self.loss(best);
        let each: Vec<f64> = best.iter().zip(after).map(|(best, after)| after - best).collect();
        let n = each.len() as f64;
        let mean = each.iter().sum::<f64>() / n;
        let error = (each.iter().map(|d| (d - mean).powi(2)).sum::<f64>() / (n - 1.0).max(1.0) / n).sqrt();
        apart < LEAST_APART || mean < LEAST_MARGIN * error
    }

    /// True if leaving half a layer out says that the fault is there.
    pub(super) fn places(&self, before: &[f64], after: &[f64]) -> bool {
        let (loss, left) = (self.loss(before), self.loss(after));
        let share = if loss <= PLAUSIBLE { LEAST_SHARE } else { LEAST_OF_SKIP };
        self.is_enough()
            && self.agrees(before, after)
            && loss - left >= LEAST_GAIN.max(share * loss)
            && left < self.unigram
    }
}

/// What a loss says of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Band {
    /// As of text that it knows.
    Plausible,
    /// Better than counting words, worse than knowing the text.
    Doubtful,
    /// No language model, or not of these texts.
    None,
}

/// The band of a set's loss, beside the loss of the same tokens shuffled and that of a unigram model.
pub(super) fn band(loss: f64, shuffled: f64, unigram: f64) -> Band {
    match () {
        () if loss > MOST_OF_SHUFFLED * shuffled || loss >= unigram => Band::None,
        () if loss <= PLAUSIBLE && loss <= MOST_LEFT * unigram => Band::Plausible,
        () => Band::Doubtful,
    }
}

/// True if texts that are known in a line are lost where they are asked for.
pub(super) fn lost_when_asked(in_a_line: f64, asked: f64) -> bool {
    in_a_line <= PLAUSIBLE && asked > PLAUSIBLE && asked > MOST_TO_ASK * in_a_line
}

/// Nats per token of a model that only counts tokens: every token by its share of all others, with half a token for each
/// that was not seen.
pub(super) fn unigram(ids: &[u32], vocab: usize) -> f64 {
    let mut counts = std::collections::HashMap::new();
    ids.iter().for_each(|id| *counts.entry(*id).or_insert(0usize) += 1);
    let all = (ids.len().saturating_sub(1)) as f64 + 0.5 * vocab as f64;
    let cost = |id: &u32| -((counts.get(id).map_or(0, |n| n - 1) as f64 + 0.5) / all).ln();
    ids.iter().map(cost).sum::<f64>() / ids.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scale(texts: usize) -> Scale {
        Scale { tokens: vec![22; texts], unigram: 6.4 }
    }

    fn nats(per_token: f64, texts: usize) -> Vec<f64> {
        (0..texts).map(|i| per_token * 22.0 * (1.0 + 0.01 * i as f64)).collect()
    }

    /// Coarse weights make a layer that is better left out; the loss is plausible all the same.
    #[test]
    fn a_place_that_a_plausible_loss_hides_must_be_most_of_it() {
        let places = |before: f64, after: f64| scale(10).places(&nats(before, 10), &nats(after, 10));
        assert!(places(3.0, 2.7) && !places(3.0, 2.9));
        assert!(places(0.30, 0.01) && !places(0.29, 0.24) && !places(0.07, 0.06));
    }

    #[test]
    fn only_a_large_gain_on_enough_texts_is_named() {
        let names = |before, after, texts| scale(texts).names(&nats(before, texts), &nats(after, texts));
        assert!(names(3.4, 0.06, 8));
        assert!(!names(3.4, 0.06, 7), "too few texts");
        assert!(!names(0.08, 0.06, 8), "too small a gain");
        assert!(!names(7.6, 6.2, 8), "a ruined file that a wrong repair makes a little better");
        assert!(!names(14.8, 6.8, 8), "text that the model does not know");
        let (before, mut after) = (nats(3.4, 8), nats(0.3, 8));
        assert!(scale(8).names(&before, &after));
        (after[0], after[1]) = (before[0] + 1.0, before[1] + 1.0);
        assert!(!scale(8).names(&before, &after), "two texts of eight disagree");
    }

    #[test]
    fn repairs_close_to_the_best_are_its_like() {
        let best = nats(0.06, 8);
        assert!(scale(8).alike(&best, &nats(0.07, 8)));
        assert!(!scale(8).alike(&best, &nats(0.7, 8)));
        let mut noisy = best.clone();
        noisy[0] += 30.0;
        assert!(scale(8).alike(&best, &noisy), "one text alone says so");
    }

    #[test]
    fn bands() {
        assert_eq!(band(0.06, 23.0, 6.4), Band::Plausible);
        assert_eq!(band(2.3, 20.5, 6.4), Band::Doubtful);
        assert_eq!(band(9.3, 9.4, 6.4), Band::None, "random weights");
        assert_eq!(band(14.8, 24.0, 7.5), Band::None, "text that it never saw");
        assert_eq!(band(f64::INFINITY, f64::INFINITY, 6.4), Band::None);
    }

    #[test]
    fn turns_are_judged_where_lines_are_known() {
        assert!(lost_when_asked(0.3, 1.3) && !lost_when_asked(0.3, 1.1) && !lost_when_asked(0.02, 0.3));
        assert!(!lost_when_asked(0.6, 2.9), "not known either way");
    }

    #[test]
    fn a_unigram_model_counts() {
        assert!((unigram(&[1, 1, 1, 1], 2) - (3.5f64 / 4.0).ln().abs()).abs() < 1e-9);
        assert!(unigram(&(0..100).collect::<Vec<_>>(), 4096) > 8.0);
    }
}
