//! Choices are sets with margins: everything chosen must reach the last score that the reference chooses less a band, and
//! nothing left out may exceed it by more. The band is 2 sigma of the row's scores, since two items trade places by two
//! errors.

use std::collections::BTreeSet;

use lockstep_reference::RefConfig;
use ndarray::ArrayView1;

use crate::model::Point;
use crate::probe::{Captured, Values};

/// What one row chose, beside what the reference's scores say.
#[derive(Debug)]
pub enum Chosen {
    /// So many members differ, all of them inside the band.
    Within(usize),
    /// Why it is no choice from these scores.
    Outside(String),
    /// The scores hold NaN, so there are no margins.
    Unmeasured,
}

/// How many members a model's choices have.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Keys of a token.
    pub top_k: usize,
    /// Experts of a token.
    pub experts_used: usize,
}

impl Sizes {
    /// Those of a model.
    pub fn of(config: &RefConfig) -> Self {
        Sizes { top_k: config.top_k, experts_used: config.experts_used }
    }

    /// The scores that a token may choose from, and how many of them it chooses.
    fn of_token(self, point: Point, token: usize, scores: ArrayView1<'_, f64>) -> (Vec<f64>, usize) {
        let (visible, k) = self.among(point, token, scores.len());
        (scores.iter().copied().take(visible).collect(), k)
    }

    /// Among how many a token chooses, of so many scores, and how many it chooses.
    fn among(self, point: Point, token: usize, scores: usize) -> (usize, usize) {
        let (visible, k) = match point {
            Point::IndexTopk => (scores.min(token + 1), self.top_k),
            _ => (scores, self.experts_used),
        };
        (visible, k.min(visible))
    }

    /// Why what a token chose among so many is no choice at all, whatever the scores are.
    pub fn illegal(self, point: Point, token: usize, among: usize, chosen: &[i32]) -> Option<String> {
        let (visible, k) = self.among(point, token, among);
        illegal(visible, k, chosen)
    }

    /// Judges what a token chose at a point.
    pub fn judge(self, point: Point, token: usize, scores: ArrayView1<'_, f64>, sigma: f64, chosen: &[i32]) -> Chosen {
        let (scores, k) = self.of_token(point, token, scores);
        choice(&scores, k, chosen, 2.0 * sigma)
    }

    /// True where a token's choice is so near a tie that another run may choose otherwise.
    pub fn near_tie(self, point: Point, token: usize, scores: ArrayView1<'_, f64>, sigma: f64) -> bool {
        let (scores, k) = self.of_token(point, token, scores);
        near_tie(scores, k, sigma)
    }
}

/// True where the `k` best scores are so near the next one, or so far from numbers, that another run may find others.
pub fn near_tie(mut scores: Vec<f64>, k: usize, sigma: f64) -> bool {
    let nan = scores.iter().any(|v| v.is_nan());
    if nan || k == 0 || scores.len() <= k {
        return nan;
    }
    let (best, next, _) = scores.select_nth_unstable_by(k, |a, b| b.total_cmp(a));
    best.iter().copied().min_by(f64::total_cmp).is_some_and(|last| above(last, *next) <= 2.0 * sigma)
}

/// By how much `a` exceeds `b`; equal infinities tie. Neither is NaN.
fn above(a: f64, b: f64) -> f64 {
    if a == b { 0.0 } else { a - b }
}

/// One row of captured indices.
pub fn row_of(captured: &Captured, token: usize) -> Option<&[i32]> {
    let width = captured.row_len();
    match &captured.values {
        Values::I32(v) => v.get(token * width..(token + 1) * width),
        Values::F32(_) => None,
    }
}

/// Why a list is not `k` different indices below `among`, with -1 for those that there are not.
fn illegal(among: usize, k: usize, chosen: &[i32]) -> Option<String> {
    let set: BTreeSet<usize> = chosen.iter().filter_map(|i| usize::try_from(*i).ok()).collect();
    let listed = chosen.iter().filter(|i| **i != -1).count();
    let wrong = set.len() != k || listed != k || set.last().is_some_and(|i| *i >= among);
    wrong.then(|| format!("expected {k} different indices below {among}, found {chosen:?}"))
}

fn choice(scores: &[f64], k: usize, chosen: &[i32], band: f64) -> Chosen {
    let k = k.min(scores.len());
    if let Some(why) = illegal(scores.len(), k, chosen) {
        return Chosen::Outside(why);
    }
    let set: BTreeSet<usize> = chosen.iter().filter_map(|i| usize::try_from(*i).ok()).collect();
    // NaN sorts before everything and compares with nothing: it would pass as the best and as a tie.
    if scores.iter().any(|s| s.is_nan()) || band.is_nan() {
        return Chosen::Unmeasured;
    }
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
    let Some(last) = order[..k].last().map(|i| scores[*i]) else { return Chosen::Within(0) };
    let gap = |i: &usize| if set.contains(i) { above(last, scores[*i]) } else { above(scores[*i], last) };
    match order.iter().max_by(|a, b| gap(a).total_cmp(&gap(b))) {
        Some(i) if gap(i) > band => {
            let (how, score) = (if set.contains(i) { "chosen" } else { "left out" }, scores[*i]);
            let margin = format!("a margin of {:.1e}, where noise explains {band:.1e}", gap(i));
            Chosen::Outside(format!("{i} is {how} with score {score:.6}, the boundary is {last:.6}: {margin}"))
        }
        _ => Chosen::Within(order[..k].iter().filter(|i| !set.contains(i)).count()),
    }
}

#[cfg(test)]
mod tests {
    use super::{Chosen, choice};

    #[test]
    fn choices_are_sets_with_margins() {
        let scores = [0.5, 0.9, 0.5 + 1e-9, 0.1];
        assert!(matches!(choice(&scores, 2, &[2, 1], 0.0), Chosen::Within(0)));
        assert!(matches!(choice(&scores, 2, &[0, 1], 1e-8), Chosen::Within(1)));
        assert!(matches!(choice(&scores, 2, &[0, 1], 1e-10), Chosen::Outside(_)));
        assert!(matches!(choice(&scores, 2, &[3, 1], 0.1), Chosen::Outside(_)));
        assert!(matches!(choice(&scores[..1], 2, &[0, -1], 0.0), Chosen::Within(0)), "fewer than k");
        assert!(matches!(choice(&[f64::NEG_INFINITY, 1.0], 1, &[0], 9.0), Chosen::Outside(_)), "masked");
        assert!(matches!(choice(&[f64::NEG_INFINITY, 1.0], 1, &[1, -1], 1e-6), Chosen::Within(0)));
    }

    #[test]
    fn choices_within_the_band_are_interchangeable() {
        let scores = [5.0, 4.0, 3.0, 3.0 - 1e-9, 1.0];
        assert!(matches!(choice(&scores, 3, &[0, 1, 2], 2e-6), Chosen::Within(0)));
        assert!(matches!(choice(&scores, 3, &[0, 1, 3], 2e-6), Chosen::Within(1)));
        for (chosen, band) in [([0, 1, 3], 2e-12), ([0, 1, 4], 2e-6), ([1, 2, 3], 2e-6)] {
            assert!(matches!(choice(&scores, 3, &chosen, band), Chosen::Outside(_)), "{chosen:?}");
        }
    }

    #[test]
    fn damaged_choices_are_named() {
        let scores = [5.0, 4.0, 3.0];
        for chosen in [&[0, 0][..], &[0, 7], &[0, -2], &[0, -1], &[0, 1, -2]] {
            assert!(matches!(choice(&scores, 2, chosen, 9.0), Chosen::Outside(_)), "{chosen:?}");
        }
    }

    #[test]
    fn choices_from_scores_with_nan_are_never_near_ties() {
        let scores = [0.5, f64::NAN, 0.4, 0.1];
        for chosen in [[1, 0], [0, 2], [3, 2]] {
            assert!(matches!(choice(&scores, 2, &chosen, 9.0), Chosen::Unmeasured), "{chosen:?}");
        }
        assert!(matches!(choice(&[f64::NAN; 4], 2, &[0, 3], 0.0), Chosen::Unmeasured));
        assert!(matches!(choice(&[0.1, 0.2], 1, &[0], f64::NAN), Chosen::Unmeasured));
        let masked = f64::NEG_INFINITY;
        assert!(matches!(choice(&[0.1, masked, masked], 2, &[0, 2], 0.0), Chosen::Within(1)), "equal infinities tie");
    }
}
