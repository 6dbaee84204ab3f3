//! What a request wants of the choice of its tokens beside a sampling rule: ids that it likes or bans, penalties, an end
//! not before its time, and how likely each token was to the model. A device that chooses by itself knows none of it.

use std::collections::HashMap;
use std::sync::Arc;

use super::sampler::Sampling;
use crate::device::Draw;

/// A bias that bans an id.
pub const BAN: f32 = -100.0;

/// Which ids a grammar allows next.
pub trait Mask: Send + Sync {
    /// Sets the logits of ids that may not follow `generated` to -inf.
    fn apply(&self, generated: &[u32], logits: &mut [f32]);
}

/// What a request wants beside its sampling; nothing by default.
#[derive(Clone, Default)]
pub struct Wishes {
    /// Added to the logits of ids; [`BAN`] and less bans.
    pub bias: Vec<(u32, f32)>,
    /// Taken off the logit of every id that was generated.
    pub presence: f32,
    /// Taken off for each time that it was.
    pub frequency: f32,
    /// No stop id comes before so many tokens.
    pub least: usize,
    /// Natural logarithms of the model's own probabilities, of the chosen token and so many of the likeliest.
    pub logprobs: Option<usize>,
    /// The same for the tokens of the prompt, from the second on.
    pub prompt_logprobs: Option<usize>,
    /// A grammar.
    pub mask: Option<Arc<dyn Mask>>,
}

impl std::fmt::Debug for Wishes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wishes").field("logprobs", &self.logprobs).finish_non_exhaustive()
    }
}

/// How likely a token was to the model, before bias, penalties, temperature and filters.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// ln of the token's probability.
    pub chosen: f64,
    /// The likeliest ids, the best first.
    pub top: Vec<(u32, f64)>,
}

impl Logprobs {
    /// Of token `id` where these are the logits, with the `top` likeliest.
    pub fn of(logits: &[f32], id: u32, top: usize) -> Self {
        let most = logits.iter().copied().filter(|v| !v.is_nan()).fold(f32::NEG_INFINITY, f32::max);
        let finite = logits.iter().filter(|v| !v.is_nan());
        let sum: f64 = finite.map(|v| (f64::from(*v) - f64::from(most)).exp()).sum();
        let ln = |v: f32| f64::from(v) - f64::from(most) - sum.ln();
        let mut all: Vec<(u32, f32)> = Vec::new();
        if top > 0 {
            let better = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
            all = (0..).zip(logits.iter().copied()).filter(|(_, v)| !v.is_nan()).collect();
            if all.len() > top {
                all.select_nth_unstable_by(top, better);
                all.truncate(top);
            }
            all.sort_by(better);
        }
        let chosen = logits.get(id as usize).map_or(f64::NEG_INFINITY, |v| ln(*v));
        Logprobs { chosen, top: all.into_iter().map(|(id, v)| (id, ln(v))).collect() }
    }
}

/// A choice on the host.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Choice {
    /// A token.
    Token(u32, Option<Logprobs>),
    /// The request's own wishes leave none.
    NoneAllowed,
    /// The model gave no number at all.
    NoNumbers,
}

/// Chooses the tokens of one sequence.
#[derive(Clone, Debug)]
pub(super) struct Chooser {
    sampling: Sampling,
    wishes: Wishes,
    /// How often each id was generated; kept only for penalties.
    counts: HashMap<u32, u32>,
}

impl Chooser {
    pub(super) fn new(sampling: Sampling, wishes: Wishes) -> Self {
        Chooser { sampling, wishes, counts: HashMap::new() }
    }

    /// How a device can choose in its place; `None` if it cannot.
    pub(super) fn draw(&self) -> Option<Draw> {
        let Wishes { bias, presence, frequency, least, logprobs, mask, .. } = &self.wishes;
        let plain = bias.is_empty() && *presence == 0.0 && *frequency == 0.0 && *least == 0;
        self.sampling.draw().filter(|_| plain && logprobs.is_none() && mask.is_none())
    }

    /// Chooses what follows the token at `position`, where `generated` tokens came already and `stop` ends the sequence.
    pub(super) fn choose(&self, position: u32, logits: &[f32], generated: &[u32], stop: &[u32]) -> Choice {
        if !logits.iter().any(|v| v.is_finite()) {
            return Choice::NoNumbers;
        }
        let Wishes { bias, presence, frequency, least, logprobs, mask, .. } = &self.wishes;
        let id = if self.draw().is_some() {
            self.sampling.choose(position, logits)
        } else {
            let mut altered = logits.to_vec();
            let mut add = |id: u32, more: f32| {
                if let Some(v) = altered.get_mut(id as usize) {
                    *v += more;
                }
            };
            bias.iter().for_each(|(id, v)| add(*id, if *v <= BAN { f32::NEG_INFINITY } else { *v }));
            self.counts.iter().for_each(|(id, n)| add(*id, -presence - frequency * *n as f32));
            if generated.len() < *least {
                stop.iter().for_each(|id| add(*id, f32::NEG_INFINITY));
            }
            if let Some(mask) = mask {
                mask.apply(generated, &mut altered);
            }
            if !altered.iter().any(|v| v.is_finite()) {
                return Choice::NoneAllowed;
            }
            self.sampling.choose(position, &altered)
        };
        Choice::Token(id, logprobs.map(|top| Logprobs::of(logits, id, top)))
    }

    /// Takes note of a token that was chosen, here or on a device.
    pub(super) fn note(&mut self, id: u32) {
        if self.wishes.presence != 0.0 || self.wishes.frequency != 0.0 {
            *self.counts.entry(id).or_insert(0) += 1;
        }
    }

    /// How many of the likeliest are wanted for each token of the prompt; `None` if nothing is.
    pub(super) fn of_prompt(&self) -> Option<usize> {
        self.wishes.prompt_logprobs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 4] = [1.0, 3.0, f32::NAN, 2.0];

    fn chosen(wishes: Wishes, generated: &[u32]) -> Choice {
        let mut chooser = Chooser::new(Sampling::default(), wishes);
        generated.iter().for_each(|id| chooser.note(*id));
        chooser.choose(7, &LOGITS, generated, &[1])
    }

    #[test]
    fn wishes_move_the_choice() {
        let token = |id| Choice::Token(id, None);
        assert_eq!(chosen(Wishes::default(), &[]), token(1));
        assert_eq!(chosen(Wishes { bias: vec![(1, BAN)], ..Wishes::default() }, &[]), token(3));
        assert_eq!(chosen(Wishes { bias: vec![(0, 2.5)], ..Wishes::default() }, &[]), token(0));
        assert_eq!(chosen(Wishes { least: 1, ..Wishes::default() }, &[]), token(3), "1 is a stop id");
        assert_eq!(chosen(Wishes { least: 1, ..Wishes::default() }, &[5]), token(1));
        assert_eq!(chosen(Wishes { presence: 1.5, ..Wishes::default() }, &[1]), token(3));
        assert_eq!(chosen(Wishes { frequency: 0.6, ..Wishes::default() }, &[1]), token(1));
        assert_eq!(chosen(Wishes { frequency: 0.6, ..Wishes::default() }, &[1, 1]), token(3));
        let all = (0..4).map(|id| (id, BAN)).collect();
        assert_eq!(chosen(Wishes { bias: all, ..Wishes::default() }, &[]), Choice::NoneAllowed);
        let none = Chooser::new(Sampling::default(), Wishes::default()).choose(0, &[f32::NAN; 3], &[], &[]);
        assert_eq!(none, Choice::NoNumbers);
    }

    #[test]
    fn logprobs_are_the_models_own() {
        let wishes = Wishes { bias: vec![(1, BAN)], logprobs: Some(2), ..Wishes::default() };
        let Choice::Token(3, Some(found)) = chosen(wishes, &[]) else { panic!("3, with logprobs") };
        let sum = 1f64.exp() + 3f64.exp() + 2f64.exp();
        let ln = |v: f64| v - sum.ln();
        assert!((found.chosen - ln(2.0)).abs() < 1e-12);
        assert_eq!(found.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 3]);
        assert!((found.top[0].1 - ln(3.0)).abs() < 1e-12);
    }

    #[test]
    fn a_device_chooses_only_for_who_wants_nothing_more() {
        let can = |wishes| Chooser::new(Sampling::default(), wishes).draw().is_some();
        assert!(can(Wishes::default()) && can(Wishes { prompt_logprobs: Some(0), ..Wishes::default() }));
        assert!(!can(Wishes { logprobs: Some(0), ..Wishes::default() }));
        assert!(!can(Wishes { least: 1, ..Wishes::default() }));
        assert!(!can(Wishes { bias: vec![(0, 0.0)], ..Wishes::default() }));
    }
}
