//! Dumps of engines that read a checkpoint's tensors wrongly: keys and values that lie in one, another layer's, ranks that
//! hold each other's part, numbers rounded where the recipe keeps them.

use std::sync::Arc;

use lockstep::checkpoint::Checkpoint;
use lockstep::checkpoint::oracle::Raw;
use lockstep::diagnose::bisect;
use lockstep::model::{Place, Point};
use lockstep::probe::{Captured, Trace, Values};
use lockstep::verify::Subject;
use lockstep::verify::patched_weights::{PatchedWeights, Value, value_of};
use lockstep_reference::{
    Arith, Eps, Half, ModelWeights, Order, ParamKey, RefConfig, RefError, RefParam, RefRecipe, Weights,
};
use ndarray::{Array3, Axis};

use super::{EXPANDED, made, with_values};
use crate::common::folder::folder;
use crate::common::subject::{Silent, over, run_of_reference};

const TOKENS: usize = 40;
const ORDER: Order = Order::Blocks(7);

/// A checkpoint whose keys and values are one tensor.
fn joined() -> Subject {
    let at = tempfile::tempdir().expect("a folder");
    folder().write(at.path());
    let checkpoint = Arc::new(Checkpoint::open(Some(at.path())).expect("opens"));
    let ids = (0..TOKENS as u32).map(|i| (i * 37 + 5) % 64).collect();
    over(checkpoint, 1, ids, (0..TOKENS).collect())
}

fn dump(of: &Subject, recipe: RefRecipe) -> Trace {
    run_of_reference(of, Arith::F32(recipe, ORDER), EXPANDED)
}

type Change<'a> = dyn Fn(&dyn Weights, ParamKey) -> Result<Option<Value>, RefError> + Sync + 'a;

/// The dump with a place as an engine makes it that holds other weights.
fn with_weights(of: &Subject, whole: &Trace, recipe: RefRecipe, place: Place, change: &Change<'_>) -> Trace {
    let raw = Raw(of.checkpoint.source());
    let config = RefConfig::from_raw(&raw, Eps::File).expect("a configuration");
    let weights = ModelWeights::new(&raw, &config);
    let change = |key: ParamKey| change(&weights, key);
    let patched = PatchedWeights::new(&weights, &change);
    with_values(whole, place, &made(&config, &patched, whole, recipe, place, EXPANDED))
}

fn named(of: Subject, target: Trace, recipe: RefRecipe) -> (String, &'static str, String, String) {
    let tp = target.tp;
    let found = bisect::operations(&Subject { target: Some(target), recipe, tp, ..of }, &Silent).expect("runs");
    let culprit = found.culprit.expect("a culprit");
    let (site, statement) = culprit.explanation.map(|e| (e.site, e.statement)).unwrap_or_default();
    (culprit.place, culprit.kind, site, statement)
}

/// Rows of keys and values, `[head][row][latent]`.
fn rows(keys: &Array3<f32>, values: &Array3<f32>) -> Vec<Vec<f32>> {
    let heads = keys.outer_iter().zip(values.outer_iter());
    let rows = heads.flat_map(|(k, v)| {
        let keys: Vec<Vec<f32>> = k.axis_iter(Axis(1)).map(|row| row.to_vec()).collect();
        keys.into_iter().chain(v.outer_iter().map(|row| row.to_vec()).collect::<Vec<_>>()).collect::<Vec<_>>()
    });
    rows.collect()
}

#[test]
fn keys_and_values_that_lie_in_one_tensor_are_named_with_it() {
    let (layer, tensor) = (1, "model.layers.1.self_attn.kv_b_proj.weight");
    let place = Place::trunk(layer, Point::Context);
    let with = |recipe: RefRecipe, order: &(dyn Fn(usize) -> usize + Sync)| {
        let of = joined();
        let whole = dump(&of, recipe);
        let change = |weights: &dyn Weights, key: ParamKey| {
            let (RefParam::KB | RefParam::VB, Some(1)) = (key.1, key.0) else { return Ok(None) };
            let (keys, values) = (weights.heads(key.0, RefParam::KB)?, weights.heads(key.0, RefParam::VB)?);
            let ((_, _, nope), value, all) = (keys.dim(), values.dim().1, rows(&keys, &values));
            let of = |head: usize, row: usize| &all[order(head * (nope + value) + row)];
            let changed = match key.1 {
                RefParam::KB => Array3::from_shape_fn(keys.dim(), |(h, l, n)| of(h, n)[l]),
                _ => Array3::from_shape_fn(values.dim(), |(h, v, l)| of(h, nope + v)[l]),
            };
            Ok(Some(Value::Heads(Arc::new(changed))))
        };
        let target = with_weights(&of, &whole, recipe, place, &change);
        named(of, target, recipe)
    };
    // Two heads of 16 rows of keys and 16 of values: of two heads, either order read as the other moves the same rows.
    let keys_first = |i: usize| if i % 32 < 16 { i / 32 * 16 + i % 16 } else { 32 + i / 32 * 16 + i % 16 };
    let heads = |i: usize| (i + 32) % 64;
    let anyhow = |i: usize| (i * 27 + 5) % 64;
    for recipe in [RefRecipe::TorchF32, RefRecipe::TorchHalf(Half::Bf16)] {
        for (order, kind, words) in [
            (&keys_first as &(dyn Fn(usize) -> usize + Sync), "KV_B_LAYOUT", "all keys and then all values"),
            (&heads, "HEAD_ORDER", "heads"),
            (&anyhow, "UNKNOWN", ""),
        ] {
            let (at, found, site, statement) = with(recipe, order);
            assert_eq!((at, found), (place.to_string(), kind), "{recipe:?} {words}");
            assert_eq!(site, if kind == "UNKNOWN" { "" } else { tensor }, "{recipe:?} {words}");
            assert!(statement.contains(words), "{statement}");
        }
    }
}

#[test]
fn another_layers_keys_and_values_are_named() {
    let place = Place::trunk(1, Point::Context);
    for recipe in [RefRecipe::TorchF32, RefRecipe::TorchHalf(Half::Bf16)] {
        let with = |factor: f32| {
            let of = joined();
            let whole = dump(&of, recipe);
            let change = |weights: &dyn Weights, key: ParamKey| match (key.0, key.1) {
                (Some(1), RefParam::KB | RefParam::VB) => {
                    Ok(Some(value_of(weights, (Some(0), key.1, key.2))?.map(|v| v * factor)))
                }
                _ => Ok(None),
            };
            let target = with_weights(&of, &whole, recipe, place, &change);
            named(of, target, recipe)
        };
        let (at, kind, site, statement) = with(1.0);
        assert_eq!((at, kind), (place.to_string(), "OTHER_LAYER"), "{recipe:?}");
        assert_eq!(site, "model.layers.1.self_attn.kv_b_proj.weight");
        assert!(statement.contains("layer 0"), "{statement}");
        // The twin is no layer's.
        assert_eq!(with(1.1).1, "UNKNOWN", "{recipe:?}");
    }
}

/// A dump of several ranks: sharded rows are cut, everything else is every rank's; addends, which nobody captured, are left
/// out.
fn ranks(whole: &Trace, of: &Subject, tp: usize, change: &dyn Fn(usize, &Captured, &mut Captured)) -> Trace {
    let config = of.checkpoint.config();
    let cut = |rank: usize| {
        let kept =
            whole.places().into_iter().filter(|p| !matches!(p.point, Point::Routed | Point::Shared | Point::Hidden));
        let part = |place: Place| {
            let all = whole.ranks(place).expect("captured")[0].clone();
            let shape = place.shape(config, tp);
            let (own, width) = (shape.iter().product::<usize>(), all.row_len());
            let mut one = all.clone();
            if own != width && !place.point.is_masked() && place.point != Point::IndexTopk {
                let values = all.as_f32();
                let row = |r: usize| values[r * width + rank * own..r * width + (rank + 1) * own].to_vec();
                one = Captured { shape, values: Values::F32((0..all.rows).flat_map(row).collect()), ..one };
            }
            change(rank, &all, &mut one);
            one
        };
        kept.map(part).collect()
    };
    Trace::new(whole.producer.clone(), whole.ids.clone(), whole.attention, (0..tp).map(cut).collect())
}

#[test]
fn ranks_that_hold_each_others_part_are_named() {
    let recipe = RefRecipe::TorchF32;
    let of = || super::of();
    let (whole, tp, place) = (dump(&of(), recipe), 4, Place::trunk(2, Point::QRaw));
    let holding = |uses: &dyn Fn(usize) -> usize, factor: f32| {
        ranks(&whole, &of(), tp, &|rank, all, one| {
            if one.place == place {
                let (own, width, values) = (one.row_len(), all.row_len(), all.as_f32());
                let from = uses(rank) * own;
                let scale = if uses(rank) == rank { 1.0 } else { factor };
                let row =
                    |r: usize| values[r * width + from..][..own].iter().map(move |v| v * scale).collect::<Vec<_>>();
                one.values = Values::F32((0..one.rows).flat_map(row).collect());
            }
        })
    };
    let swapped = |rank: usize| [0, 2, 1, 3][rank];
    let another = |rank: usize| [0, 1, 3, 3][rank];
    for (uses, factor, kind, words) in [
        (&swapped as &dyn Fn(usize) -> usize, 1.0, "SHARD_PLACEMENT", "ranks 1 and 2 use each other's range"),
        (&another, 1.0, "SHARD_PLACEMENT", "rank 2 uses rank 3's range"),
        (&swapped, 1.1, "UNKNOWN", ""),
    ] {
        let (at, found, _, statement) = named(of(), holding(uses, factor), recipe);
        assert_eq!((at, found), (place.to_string(), kind), "{words}");
        assert!(statement.contains(words), "{statement}");
    }
}

/// A router in bf16 is seen in a model of bf16, too, whose router runs in f32; values that are no router's in bf16 are not.
#[test]
fn a_router_in_fewer_bits_is_named_in_every_recipe() {
    let place = Place::trunk(1, Point::RouterLogits);
    for recipe in [RefRecipe::TorchF32, RefRecipe::TorchHalf(Half::Bf16)] {
        let of = joined();
        let whole = dump(&of, recipe);
        let raw = Raw(of.checkpoint.source());
        let config = RefConfig::from_raw(&raw, Eps::File).expect("a configuration");
        let weights = ModelWeights::new(&raw, &config);
        let narrow = made(&config, &weights, &whole, RefRecipe::TorchAutocast, place, EXPANDED);
        let odd: Vec<f32> = narrow.iter().map(|v| Half::Bf16.round(f64::from(*v) * 1.02) as f32).collect();
        assert_eq!(named(joined(), with_values(&whole, place, &narrow), recipe).1, "ROUNDED", "{recipe:?}");
        assert_eq!(named(joined(), with_values(&whole, place, &odd), recipe).1, "UNKNOWN", "{recipe:?}");
    }
}
