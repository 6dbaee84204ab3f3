//! Recipes: how engines hold numbers between operations, and inside them. Ours are `strict` and `fast`; the others are
//! what PyTorch does with a model of GlmMoeDsa (read in transformers 5.24 with torch 2.15): where values are rounded to a
//! half type is part of the recipe, and what implementations are free to choose is varied with the order of sums.

use half::{bf16, f16};

use crate::arith::Order;

/// A type of 16 bits that an engine stores activations in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    /// 8 bits of exponent, 8 significant ones.
    Bf16,
    /// 5 bits of exponent, 11 significant ones.
    F16,
}

impl Half {
    /// The nearest value of this type, ties to even, by way of f32 as engines have it.
    pub fn round(self, v: f64) -> f64 {
        match self {
            Half::Bf16 => bf16::from_f32(v as f32).to_f64(),
            Half::F16 => f16::from_f32(v as f32).to_f64(),
        }
    }
}

/// What an engine rounds beside the f32 of its sums and functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefRecipe {
    /// f32 throughout; rope angles are exact, and rounded once.
    Strict,
    /// As strict, but the activation operand of a product with stored weights is rounded to bf16, to nearest, ties to
    /// even; the router's operand stays as it is.
    Fast,
    /// PyTorch in f32: as strict, with rope angles made in f32.
    TorchF32,
    /// PyTorch with weights and activations of a half type: every operation's result is rounded to it. Statistics of
    /// norms, softmax, router, the experts' weights and the indexer's scores are f32.
    TorchHalf(Half),
    /// PyTorch in f32 under autocast to bf16: operands and results of products with weights are bf16, norms, rope and the
    /// residual stream f32, the router and the indexer's scores bf16.
    TorchAutocast,
}

impl RefRecipe {
    /// Every recipe.
    pub const ALL: [RefRecipe; 6] = [
        RefRecipe::Strict,
        RefRecipe::Fast,
        RefRecipe::TorchF32,
        RefRecipe::TorchHalf(Half::Bf16),
        RefRecipe::TorchHalf(Half::F16),
        RefRecipe::TorchAutocast,
    ];

    /// The word for it in dumps and reports.
    pub fn name(self) -> &'static str {
        match self {
            RefRecipe::Strict => "strict",
            RefRecipe::Fast => "fast",
            RefRecipe::TorchF32 => "torch-f32",
            RefRecipe::TorchHalf(Half::Bf16) => "torch-bf16",
            RefRecipe::TorchHalf(Half::F16) => "torch-f16",
            RefRecipe::TorchAutocast => "torch-autocast-bf16",
        }
    }

    /// The recipe of a word.
    pub fn named(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|recipe| recipe.name() == word)
    }

    /// True for PyTorch's.
    pub fn is_torch(self) -> bool {
        !matches!(self, RefRecipe::Strict | RefRecipe::Fast)
    }

    /// A result of an operation between the products with weights, as it is stored.
    pub(crate) fn store(self, v: f64) -> f64 {
        match self {
            RefRecipe::TorchHalf(half) => half.round(v),
            _ => v,
        }
    }

    /// A result of a product with weights, as it is stored.
    pub(crate) fn product(self, v: f64) -> f64 {
        self.narrow().map_or(v, |half| half.round(v))
    }

    /// The type that operands of products with weights have, where that is not f32.
    pub(crate) fn narrow(self) -> Option<Half> {
        match self {
            RefRecipe::TorchHalf(half) => Some(half),
            RefRecipe::TorchAutocast => Some(Half::Bf16),
            _ => None,
        }
    }

    /// What the routed experts are run in: under autocast the grouped product is left in f32, and the plain loop is not.
    pub(crate) fn of_experts(self, order: Order) -> Self {
        match self {
            RefRecipe::TorchAutocast if !order.is_plain() => RefRecipe::TorchF32,
            own => own,
        }
    }
}

impl Order {
    /// Half of the orders stand for implementations without fused kernels: attention with stored scores, experts one
    /// after the other.
    pub(crate) fn is_plain(self) -> bool {
        matches!(self, Order::Blocks(_) | Order::Ranks(_))
    }

    /// By how many units in the last place the powers in rope's frequencies may be off; devices differ.
    pub(crate) fn power_ulps(self) -> i32 {
        match self {
            Order::Sequential | Order::Ranks(_) => 0,
            Order::Reversed => 1,
            Order::Blocks(_) => -1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_recipes() {
        for recipe in RefRecipe::ALL {
            assert_eq!(RefRecipe::named(recipe.name()), Some(recipe));
        }
        assert_eq!(RefRecipe::named("bfloat16"), None);
    }

    #[test]
    fn halves_round_to_even_and_overflow() {
        assert_eq!(Half::Bf16.round(1.0 + 2f64.powi(-8)), 1.0);
        assert_eq!(Half::Bf16.round(1.0 + 3.0 * 2f64.powi(-8)), 1.0 + 2f64.powi(-6));
        assert_eq!(Half::F16.round(1.0 + 2f64.powi(-11)), 1.0);
        assert_eq!(Half::F16.round(70_000.0), f64::INFINITY);
        assert_eq!(Half::Bf16.round(70_000.0), 70_144.0);
    }

    /// Only what the recipe rounds is rounded.
    #[test]
    fn recipes_round_what_they_say() {
        let fine = 1.0 + 2f64.powi(-20);
        let half = RefRecipe::TorchHalf(Half::Bf16);
        assert_eq!((half.store(fine), half.product(fine)), (1.0, 1.0));
        assert_eq!((RefRecipe::TorchAutocast.store(fine), RefRecipe::TorchAutocast.product(fine)), (fine, 1.0));
        assert_eq!((RefRecipe::TorchF32.store(fine), RefRecipe::TorchF32.product(fine)), (fine, fine));
    }
}
