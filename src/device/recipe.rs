//! How a device multiplies activations with stored weights. A recipe is part of what is verified: the noise floor that a
//! run is judged by is that of its own recipe.

/// What the activation operand of a product with a stored weight matrix is held in. Everything else (weights, sums,
/// residual, norms, rope, softmax, scores, the router's logits) is f32 in either recipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recipe {
    /// f32.
    Strict,
    /// Rounded to bf16, to nearest, ties to even.
    Fast,
}

impl Recipe {
    /// The word on the command line and in dumps.
    pub fn name(self) -> &'static str {
        match self {
            Recipe::Strict => "strict",
            Recipe::Fast => "fast",
        }
    }

    /// The recipe of that name, if there is one.
    pub fn named(name: &str) -> Option<Self> {
        [Recipe::Strict, Recipe::Fast].into_iter().find(|r| r.name() == name)
    }
}
