//! Which parameter of the reference stands for which of the engine, and which recipe. The two lists share nothing but this table, which
//! is therefore the only place where a check could be pointed at the wrong pair.

use lockstep_reference::{RefParam, RefRecipe};

use crate::engine::Recipe;
use crate::model::Kind;

/// The reference's name of a recipe.
pub fn recipe_of(recipe: Recipe) -> RefRecipe {
    match recipe {
        Recipe::Strict => RefRecipe::Strict,
        Recipe::Fast => RefRecipe::Fast,
    }
}

/// The reference's name of a kind.
pub fn reference_of(kind: Kind) -> RefParam {
    match kind {
        Kind::TokenEmbd => RefParam::Embed,
        Kind::Output => RefParam::Head,
        Kind::OutputNorm => RefParam::FinalNorm,
        Kind::AttnNorm => RefParam::AttnNorm,
        Kind::QA => RefParam::QA,
        Kind::QANorm => RefParam::QANorm,
        Kind::QB => RefParam::QB,
        Kind::KvA => RefParam::KvA,
        Kind::KvANorm => RefParam::KvANorm,
        Kind::KB => RefParam::KB,
        Kind::VB => RefParam::VB,
        Kind::AttnOutput => RefParam::O,
        Kind::IndexQB => RefParam::IndexQB,
        Kind::IndexK => RefParam::IndexK,
        Kind::IndexKNorm => RefParam::IndexKNormW,
        Kind::IndexKNormBias => RefParam::IndexKNormB,
        Kind::IndexProj => RefParam::IndexProj,
        Kind::FfnNorm => RefParam::FfnNorm,
        Kind::FfnGate => RefParam::Gate,
        Kind::FfnUp => RefParam::Up,
        Kind::FfnDown => RefParam::Down,
        Kind::Router => RefParam::Router,
        Kind::RouterBias => RefParam::RouterBias,
        Kind::GateExps => RefParam::GateExps,
        Kind::UpExps => RefParam::UpExps,
        Kind::DownExps => RefParam::DownExps,
        Kind::GateShexp => RefParam::GateShared,
        Kind::UpShexp => RefParam::UpShared,
        Kind::DownShexp => RefParam::DownShared,
        Kind::EhProj => RefParam::EhProj,
        Kind::ENorm => RefParam::ENorm,
        Kind::HNorm => RefParam::HNorm,
        Kind::MtpHeadNorm => RefParam::MtpHeadNorm,
    }
}
