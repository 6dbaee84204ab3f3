//! How a device chooses a next token from its own part of the vocabulary.

/// The id that a device posts for a row none of whose logits is a number.
pub const NO_NUMBER: u32 = u32::MAX - 1;

/// A choice without filters: the largest of `logit / temperature` plus Gumbel noise of its own for every token (Maddison,
/// Tarlow and Minka 2014), which follows the softmax. It needs no sum over the vocabulary, so ranks choose among their
/// own tokens and compare.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// 0 is greedy.
    pub temperature: f32,
    /// Of the noise.
    pub seed: u64,
}

impl Draw {
    /// The most likely token.
    pub const GREEDY: Draw = Draw { temperature: 0.0, seed: 0 };

    /// What is compared: the logit itself where the choice is greedy.
    pub fn key(&self, position: u32, id: u32, logit: f32) -> f32 {
        if self.temperature <= 0.0 {
            return logit;
        }
        (f64::from(logit) / f64::from(self.temperature) + noise(self.seed, position, id)) as f32
    }

    /// The choice among `tokens`: the largest key and its id. Ties go to the lowest id, NaN never wins.
    pub fn sample(&self, position: u32, tokens: impl Iterator<Item = (u32, f32)>) -> Option<(f32, u32)> {
        let keys = tokens.map(|(id, logit)| (self.key(position, id, logit), id)).filter(|(key, _)| !key.is_nan());
        keys.fold(None, |top, (key, id)| match top {
            Some((most, lowest)) if most > key || (most == key && lowest < id) => top,
            _ => Some((key, id)),
        })
    }
}

/// Gumbel noise: draw `position * 2^32 + id` of splitmix64 (Steele, Lea and Flood 2014), whose stream is fixed by its
/// definition, taken as the middle of one of 2^52 parts of (0, 1).
fn noise(seed: u64, position: u32, id: u32) -> f64 {
    let draw = ((u64::from(position) << 32) | u64::from(id)).wrapping_add(1);
    let mut z = seed.wrapping_add(draw.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let uniform = (((z ^ (z >> 31)) >> 12) as f64 + 0.5) / (1u64 << 52) as f64;
    -(-uniform.ln()).ln()
}
