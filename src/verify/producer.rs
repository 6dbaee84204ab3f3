//! In which recipe another engine's dump was computed: what it says, checked against what its values can hold. A value in
//! bf16 has eight significant bits, and a point whose every value has no more was stored so; no word changes that.

use lockstep_reference::{Half, RefRecipe};

use crate::model::{Place, Point};
use crate::probe::{Captured, Trace, Values};

/// Points of products with weights, in every layer.
const PRODUCTS: [Point; 5] = [Point::QA, Point::KvA, Point::QRaw, Point::AttnOut, Point::Shared];
/// Points of the residual stream behind a sum.
const STREAM: [Point; 2] = [Point::Residual, Point::Output];
/// Values that must be there to decide on a dump's recipe, and on one operation's.
const LEAST_VALUES: usize = 256;
const LEAST_OF_ONE: usize = 32;

/// True for words that say how an engine computes; without one, the recipe is a guess from the values.
pub fn knows(stated: &str) -> bool {
    RefRecipe::named(stated).is_some()
}

/// The recipe that a dump is judged in, and what is to be said of it.
pub fn recipe_of(stated: &str, trace: &Trace) -> (RefRecipe, Option<String>) {
    let (known, found) = (RefRecipe::named(stated), of_values(trace));
    match (known, found) {
        (Some(known), None) => (known, None),
        (None, None) => {
            let note = format!("the dump's recipe {stated:?} is unknown here, and its values are too few to tell; ");
            (RefRecipe::TorchF32, Some(note + "judged as torch-f32"))
        }
        // Our own words, and values that may be theirs.
        (Some(known), Some(RefRecipe::TorchF32)) if !known.is_torch() => (known, None),
        (Some(known), Some(found)) if known == found => (known, None),
        (known, Some(found)) => {
            let said = if known.is_some() { "but" } else { "which is unknown here;" };
            let note = format!("the dump's recipe is {stated:?}, {said} its values are those of {}", found.name());
            (found, Some(format!("{note}: judged so")))
        }
    }
}

/// The recipe whose storage the values have.
fn of_values(trace: &Trace) -> Option<RefRecipe> {
    let (products, stream) = (narrowest(trace, &PRODUCTS), narrowest(trace, &STREAM));
    let logits = trace.ranks(Place::LOGITS).and_then(|ranks| storage(ranks.into_iter(), LEAST_VALUES));
    match (stream, products.or(logits)) {
        (Some(Storage::Half(half)), _) | (None, Some(Storage::Half(half))) => Some(RefRecipe::TorchHalf(half)),
        (Some(Storage::F32), Some(Storage::Half(_))) => Some(RefRecipe::TorchAutocast),
        (Some(Storage::F32), _) | (None, Some(Storage::F32)) => Some(RefRecipe::TorchF32),
        (None, None) => None,
    }
}

/// What values were stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Storage {
    Half(Half),
    F32,
}

/// The half type that every one of these values has; of f32 values each has one by a chance of 2^-13 at most.
pub fn half_of<'a>(all: impl Iterator<Item = &'a Captured>) -> Option<Half> {
    match storage(all, LEAST_OF_ONE)? {
        Storage::Half(half) => Some(half),
        Storage::F32 => None,
    }
}

fn narrowest(trace: &Trace, points: &[Point]) -> Option<Storage> {
    let places = trace.places().into_iter().filter(|place| points.contains(&place.point) && place.layer().is_some());
    storage(places.filter_map(|place| trace.ranks(place)).flatten(), LEAST_VALUES)
}

fn storage<'a>(all: impl Iterator<Item = &'a Captured>, least: usize) -> Option<Storage> {
    let (mut count, mut bf16, mut f16) = (0usize, true, true);
    for captured in all {
        let Values::F32(values) = &captured.values else { continue };
        for v in values.iter().filter(|v| v.is_finite() && **v != 0.0) {
            let v = f64::from(*v);
            count += 1;
            bf16 &= Half::Bf16.round(v) == v;
            f16 &= Half::F16.round(v) == v;
        }
    }
    match (count >= least, bf16, f16) {
        (false, ..) => None,
        (_, true, _) => Some(Storage::Half(Half::Bf16)),
        (_, _, true) => Some(Storage::Half(Half::F16)),
        _ => Some(Storage::F32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Attention;

    /// A trace of one layer's product and stream, stored so.
    fn trace(product: Option<Half>, stream: Option<Half>) -> Trace {
        let rows = 8;
        let one = |point: Point, half: Option<Half>| {
            let value = |i: usize| f64::from((i as f32 * 0.37).sin());
            let values = (0..rows * 64).map(|i| half.map_or(value(i), |half| half.round(value(i))) as f32);
            Captured { place: Place::trunk(1, point), rows, shape: vec![64], values: Values::F32(values.collect()) }
        };
        let all = vec![one(Point::QA, product), one(Point::Output, stream)];
        Trace::new("x 1".into(), vec![1; rows], Attention::Dsa, vec![all])
    }

    #[test]
    fn values_say_how_they_were_stored() {
        let (bf16, f16) = (Some(Half::Bf16), Some(Half::F16));
        for (product, stream, found) in [
            (None, None, RefRecipe::TorchF32),
            (bf16, None, RefRecipe::TorchAutocast),
            (bf16, bf16, RefRecipe::TorchHalf(Half::Bf16)),
            (f16, f16, RefRecipe::TorchHalf(Half::F16)),
        ] {
            assert_eq!(of_values(&trace(product, stream)), Some(found));
        }
    }

    #[test]
    fn a_word_is_checked_against_the_values() {
        let (plain, half) = (trace(None, None), trace(Some(Half::Bf16), Some(Half::Bf16)));
        assert_eq!(recipe_of("strict", &plain), (RefRecipe::Strict, None));
        assert_eq!(recipe_of("torch-f32", &plain), (RefRecipe::TorchF32, None));
        for (word, trace, found) in [
            ("torch-bf16", &plain, RefRecipe::TorchF32),
            ("torch-f32", &half, RefRecipe::TorchHalf(Half::Bf16)),
            ("vllm", &half, RefRecipe::TorchHalf(Half::Bf16)),
            ("strict", &half, RefRecipe::TorchHalf(Half::Bf16)),
        ] {
            let (recipe, note) = recipe_of(word, trace);
            assert_eq!(recipe, found, "{word}");
            assert!(note.is_some_and(|note| note.contains(found.name())), "{word}");
        }
        let few = Trace::new("x 1".into(), vec![1], Attention::Dsa, vec![Vec::new()]);
        assert_eq!(recipe_of("fast", &few), (RefRecipe::Fast, None));
        assert!(recipe_of("vllm", &few).1.is_some());
    }
}
