//! Operations as known mistakes make them: a suspicion that no altered weight or setting can state. Nothing here is ever the
//! truth; a replay under a variant says what an engine would have computed that makes this mistake.

/// A mistake in an operation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Variant {
    /// Rope turns by positions that are so much larger.
    Position(i64),
    /// Rope leaves its vectors as they are.
    Unrotated,
    /// Rope turns (i, i + width / 2), and the results are stored as if (2i, 2i + 1) had been turned.
    HalvesPaired,
    /// Scores of attention are multiplied with this.
    SoftmaxScale(f64),
    /// The indexer's queries come from the query latent before its norm.
    IndexBeforeNorm,
    /// The indexer's scores keep products below zero.
    IndexWithoutRelu,
    /// The experts' weights are made from the biased scores.
    BiasInWeights,
    /// The sum of routed experts comes out multiplied with this.
    Routed(f64),
    /// The shared experts are added so many times.
    Shared(usize),
    /// What is added to the residual stream is multiplied with this.
    Addend(f64),
}
