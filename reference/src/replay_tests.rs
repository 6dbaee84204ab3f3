use std::collections::HashMap;
use std::sync::Arc;

use ndarray::{Array1, Array2, Array3, ArrayD, Axis};

use super::*;
use crate::arith::Order;
use crate::config::{Gating, RopeStyle};
use crate::model::{forward, forward_choosing};
use crate::points::{inputs_of, points};
use crate::recipe::RefRecipe;
use crate::weights::shape;

/// Three trunk layers (dense, sparse full, sparse shared) and one MTP layer, every size different from its neighbours.
pub(crate) fn tiny_config() -> RefConfig {
    RefConfig {
        layers: 3,
        mtp_layers: 1,
        dense_layers: 1,
        hidden: 16,
        vocab: 96,
        heads: 2,
        nope: 6,
        rope: 4,
        value: 5,
        q_rank: 12,
        kv_rank: 7,
        ffn: 20,
        moe_ffn: 8,
        experts: 4,
        experts_used: 2,
        shared_experts: 2,
        groups: 2,
        groups_used: 1,
        gating: Gating::Sigmoid,
        normalise_weights: true,
        routed_scale: 2.5,
        index_heads: 3,
        index_dim: 6,
        top_k: 4,
        index_full: vec![true, true, false],
        rope_theta: 100.0,
        rope_style: RopeStyle::Interleaved,
        index_rope_style: RopeStyle::Interleaved,
        eps: 1e-5,
        latent_eps: 1e-6,
        index_eps: 1e-6,
        tied_head: false,
    }
}

/// Weights that depend on every index and look random.
struct Hashed(RefConfig);

impl Hashed {
    fn values(&self, layer: Option<usize>, param: RefParam, expert: usize) -> Vec<f32> {
        let seed = (layer.map_or(97, |n| n + 1) * 1009 + param as usize * 31 + expert * 7919) as u64;
        let n: usize = shape(&self.0, param).iter().product();
        let value = |i: usize| {
            let mut h = (seed << 32 | i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            h = (h ^ h >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            ((h >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * 1.2
        };
        (0..n).map(value).collect()
    }

    fn two(&self, layer: Option<usize>, param: RefParam, expert: usize) -> Arc<Array2<f32>> {
        let s = shape(&self.0, param);
        Arc::new(Array2::from_shape_vec((s[0], s[1]), self.values(layer, param, expert)).expect("shape"))
    }
}

impl Weights for Hashed {
    fn vector(&self, layer: Option<usize>, param: RefParam) -> Result<Arc<Array1<f32>>, RefError> {
        Ok(Arc::new(Array1::from(self.values(layer, param, 0))))
    }
    fn matrix(&self, layer: Option<usize>, param: RefParam) -> Result<Arc<Array2<f32>>, RefError> {
        Ok(self.two(layer, param, 0))
    }
    fn heads(&self, layer: Option<usize>, param: RefParam) -> Result<Arc<Array3<f32>>, RefError> {
        let s = shape(&self.0, param);
        Ok(Arc::new(Array3::from_shape_vec((s[0], s[1], s[2]), self.values(layer, param, 0)).expect("shape")))
    }
    fn expert(&self, layer: Option<usize>, param: RefParam, expert: usize) -> Result<Arc<Array2<f32>>, RefError> {
        Ok(self.two(layer, param, expert + 1))
    }
    fn embedding_row(&self, id: usize) -> Result<Array1<f32>, RefError> {
        Ok(self.two(None, RefParam::Embed, 0).row(id).to_owned())
    }
}

const IDS: [u32; 9] = [5, 80, 2, 2, 61, 7, 33, 90, 12];
const SPARSE: RefOptions = RefOptions { dense: false, mtp: true, expanded: false, variant: None };

fn run(c: &RefConfig, a: Arith, options: RefOptions) -> (Vec<String>, HashMap<String, ArrayD<f64>>) {
    let (mut names, mut values) = (Vec::new(), HashMap::new());
    let mut sink = |name: &str, value: ArrayD<f64>| {
        names.push(name.to_string());
        values.insert(name.to_string(), value);
    };
    forward(c, &Hashed(c.clone()), &IDS, a, options, &mut sink).expect("runs");
    values.insert("ids".into(), Array1::from_iter(IDS.map(f64::from)).into_dyn());
    (names, values)
}

fn captured(values: &HashMap<String, ArrayD<f64>>) -> impl Fn(&str) -> Option<ArrayD<f32>> {
    move |name: &str| values.get(name).map(|v| v.mapv(|v| v as f32))
}

/// A replay that bridges nothing.
fn of<'a>(
    config: &'a RefConfig,
    weights: &'a dyn Weights,
    arith: Arith,
    options: RefOptions,
    inputs: Captured<'a>,
) -> Replay<'a> {
    Replay { config, weights, arith, options, inputs, bridge: None }
}

#[test]
fn every_point_is_emitted_in_order_and_shape() {
    let c = tiny_config();
    let (dense, expanded) =
        (RefOptions { dense: true, ..RefOptions::default() }, RefOptions { expanded: true, ..SPARSE });
    for options in [SPARSE, dense, expanded] {
        let (names, values) = run(&c, Arith::Exact, options);
        assert_eq!(names, points(&c, options));
        for name in names {
            let (site, op) = parse(&c, options, &name).expect("a point");
            let tokens = IDS.len() - usize::from(site == Site::Mtp);
            let expected = [vec![tokens], row_shape(&c, site, op, tokens)].concat();
            assert_eq!(values[&name].shape(), expected, "{name}");
        }
    }
}

#[test]
fn replay_in_f32_repeats_an_f32_run_bit_for_bit() {
    // Captured f32 values lose nothing of a run that holds f32 values, so each operation must give exactly what the run
    // had.
    let c = tiny_config();
    for options in [SPARSE, RefOptions { dense: true, mtp: true, expanded: false, variant: None }] {
        for a in [RefRecipe::Strict, RefRecipe::Fast].into_iter().flat_map(|recipe| Arith::orders(recipe, 2)) {
            let (names, values) = run(&c, a, options);
            for name in names {
                let tokens = values[&name].shape()[0];
                let rows = [tokens - 1, 0, 4];
                let again =
                    of(&c, &Hashed(c.clone()), a, options, &captured(&values)).point(&name, &rows).expect("replays");
                assert_eq!(again, values[&name].select(Axis(0), &rows), "{name} {a:?}");
                for input in inputs_of(&c, options, &name).expect("a point") {
                    assert!(values.contains_key(&input), "{name} reads {input}, which no run emits");
                }
            }
        }
    }
}

#[test]
fn replay_reads_exactly_the_inputs_it_names() {
    let c = tiny_config();
    let (names, values) = run(&c, Arith::Exact, SPARSE);
    for name in names {
        let read = std::cell::RefCell::new(Vec::new());
        let spy = |input: &str| {
            read.borrow_mut().push(input.to_string());
            captured(&values)(input)
        };
        of(&c, &Hashed(c.clone()), Arith::Exact, SPARSE, &spy).point(&name, &[3]).expect("replays");
        let (mut read, mut named) = (read.into_inner(), inputs_of(&c, SPARSE, &name).expect("a point"));
        read.sort();
        read.dedup();
        named.sort();
        assert_eq!(read, named, "{name}");
    }
}

#[test]
fn f32_orders_differ_and_stay_near_the_truth() {
    let c = tiny_config();
    let dense = RefOptions { dense: true, mtp: false, expanded: false, variant: None };
    let truth = &run(&c, Arith::Exact, dense).1["layers.0.output"];
    let runs: Vec<_> = Arith::orders(RefRecipe::Strict, 2)
        .into_iter()
        .map(|a| run(&c, a, dense).1["layers.0.output"].clone())
        .collect();
    for y in &runs {
        let error = (y - truth).mapv(f64::abs).fold(0.0, |m: f64, &v| m.max(v));
        let size = truth.mapv(f64::abs).fold(0.0, |m: f64, &v| m.max(v));
        // Some twenty operations of sums of up to twenty terms, each within 2^-24.
        assert!(error > 0.0 && error < 400.0 * size * 2f64.powi(-24), "{error} of {size}");
    }
    assert!(runs.iter().skip(1).any(|y| *y != runs[0]));
}

#[test]
fn shared_layers_reuse_the_last_full_choice() {
    let c = tiny_config();
    let (names, values) = run(&c, Arith::Exact, SPARSE);
    assert!(names.iter().all(|n| !n.starts_with("layers.2.attn.index") && !n.starts_with("mtp.0.attn.index")));
    let moved = |name: &str| {
        let value = captured(&values)(name)?;
        Some(if name == "layers.1.attn.index_topk" { value.mapv(|v| if v == 0.0 { 8.0 } else { v }) } else { value })
    };
    let at = |inputs: Captured<'_>| {
        of(&c, &Hashed(c.clone()), Arith::Exact, SPARSE, inputs).point("layers.2.attn.latent", &[2]).expect("replays")
    };
    let whole = at(&captured(&values));
    assert_ne!(whole, at(&moved), "key 0 was in use, and key 8 lies in the future and stays hidden");
}

#[test]
fn dense_equals_sparse_while_all_keys_fit() {
    let c = RefConfig { top_k: IDS.len(), ..tiny_config() };
    let sparse = run(&c, Arith::Exact, SPARSE).1;
    let dense = run(&c, Arith::Exact, RefOptions { dense: true, mtp: true, expanded: false, variant: None }).1;
    assert_eq!(sparse["logits"], dense["logits"]);
    let short = run(&tiny_config(), Arith::Exact, SPARSE).1;
    assert_ne!(short["logits"], dense["logits"]);
}

#[test]
fn partial_sums_add_up() {
    let c = tiny_config();
    let (_, values) = run(&c, Arith::Exact, SPARSE);
    let sums = [
        "embed",
        "layers.0.attn.out",
        "layers.0.ffn.out",
        "layers.1.ffn.out",
        "layers.1.ffn.routed",
        "mtp.0.ffn.shared",
    ];
    for point in sums {
        for experts in [ExpertSplit::Tensor, ExpertSplit::Expert] {
            let rows = [0, 5];
            let w = Hashed(c.clone());
            let seen = captured(&values);
            let replay = of(&c, &w, Arith::Exact, SPARSE, &seen);
            let parts = replay.partials(point, &rows, 2, experts).expect("splits");
            let whole = replay.point(point, &rows).expect("replays");
            assert_eq!(parts.len(), 2);
            assert_ne!(parts[0], parts[1]);
            let error = (&parts[0] + &parts[1] - &whole).mapv(f64::abs).fold(0.0, |m: f64, &v| m.max(v));
            // The sum over experts reads captured hidden values; `ffn.out` reads its captured, f32-rounded parts.
            assert!(error < if point == "layers.1.ffn.out" { 1e-5 } else { 1e-13 }, "{point} {experts:?}: {error}");
        }
    }
    let seen = captured(&values);
    let refused = of(&c, &Hashed(c.clone()), Arith::Exact, SPARSE, &seen).partials(
        "layers.0.attn.q_a",
        &[0],
        2,
        ExpertSplit::Tensor,
    );
    assert_eq!(refused, Err(ReplayError::Point("layers.0.attn.q_a".into())));
}

#[test]
fn malformed_captures_are_refused() {
    let c = tiny_config();
    let (_, values) = run(&c, Arith::Exact, SPARSE);
    let w = Hashed(c.clone());
    let with = |name: &'static str, change: fn(f32) -> f32| {
        let values = values.clone();
        move |asked: &str| {
            let value = values.get(asked)?.mapv(|v| v as f32);
            Some(if asked == name { value.mapv(change) } else { value })
        }
    };
    let at =
        |point: &str, inputs: Captured<'_>, row: usize| of(&c, &w, Arith::Exact, SPARSE, inputs).point(point, &[row]);
    let good = captured(&values);
    assert!(matches!(at("layers.7.attn.q", &good, 0), Err(ReplayError::Point(_))));
    assert!(matches!(at("layers.2.attn.index_k", &good, 0), Err(ReplayError::Point(_))));
    assert!(matches!(at("layers.0.attn.q", &good, 9), Err(ReplayError::Row { row: 9, rows: 9 })));
    assert!(matches!(at("layers.0.attn.index_scores", &good, 9), Err(ReplayError::Row { .. })));
    assert!(matches!(at("layers.0.attn.latent", &good, 9), Err(ReplayError::Row { .. })));
    assert!(matches!(at("mtp.0.enorm", &good, 8), Err(ReplayError::Row { .. })));
    assert!(matches!(at("layers.0.attn.q", &|_| None, 0), Err(ReplayError::Missing { .. })));
    let narrow = |_: &str| Some(ArrayD::zeros(vec![9, 3]));
    assert!(matches!(at("layers.0.attn.q", &narrow, 0), Err(ReplayError::Input { .. })));
    for change in [|_| 0.5, |_| f32::NAN, |_| -2.0, |_| -1.0, |_| 9.0] {
        let bad = with("layers.1.attn.index_topk", change);
        assert!(matches!(at("layers.2.attn.latent", &bad, 3), Err(ReplayError::Input { .. })));
    }
    for change in [|_| 0.5, |_| f32::INFINITY, |_| -1.0, |_| 4.0] {
        let bad = with("layers.1.ffn.expert_ids", change);
        assert!(matches!(at("layers.1.ffn.hidden", &bad, 3), Err(ReplayError::Input { .. })));
    }
}

#[test]
fn f32_order_reaches_the_sums() {
    let c = tiny_config();
    let w = Hashed(c.clone());
    let values = run(&c, Arith::Exact, SPARSE).1;
    let at = |order| {
        let a = Arith::F32(RefRecipe::Strict, order);
        of(&c, &w, a, SPARSE, &captured(&values)).point("logits", &[0, 1, 2, 3]).expect("replays")
    };
    assert_ne!(at(Order::Sequential), at(Order::Reversed));
}

#[test]
fn the_fast_recipe_rounds_products_with_weights_and_nothing_else() {
    let c = tiny_config();
    let w = Hashed(c.clone());
    let (names, values) = run(&c, Arith::Exact, SPARSE);
    let products = [
        "attn.q_a",
        "attn.q_raw",
        "attn.q_absorbed",
        "attn.kv_a",
        "attn.index_q",
        "attn.index_k",
        "attn.index_weights",
        "attn.context",
        "attn.out",
        "ffn.hidden",
        "ffn.routed",
        "ffn.shared",
        "ffn.out",
        "eh_proj",
        "logits",
    ];
    for name in names {
        let (site, op) = parse(&c, SPARSE, &name).expect("a point");
        // A mixture's output is the sum of two that were captured.
        let sums = op == "ffn.out" && site.layer(&c).is_some_and(|n| c.is_moe(n));
        let at = |recipe| {
            let a = Arith::F32(recipe, Order::Sequential);
            of(&c, &w, a, SPARSE, &captured(&values)).point(&name, &[0, 1, 5]).expect("replays")
        };
        assert_eq!(at(RefRecipe::Strict) != at(RefRecipe::Fast), products.contains(&op) && !sums, "{name}");
    }
}

#[test]
fn forced_choices_are_gone_on_with_and_own_ones_are_shown() {
    let c = tiny_config();
    let options = RefOptions { dense: false, mtp: false, expanded: false, variant: None };
    let (_, own) = run(&c, Arith::Exact, options);
    let force = |choices: &dyn Fn(&str) -> Option<ArrayD<f32>>| {
        let mut values = HashMap::new();
        let mut sink = |name: &str, value: ArrayD<f64>| {
            values.insert(name.to_string(), value);
        };
        forward_choosing(&c, &Hashed(c.clone()), &IDS, Arith::Exact, options, choices, &mut sink).map(|()| values)
    };
    let choice = |name: &str| name.ends_with("index_topk") || name.ends_with("expert_ids");
    let same = force(&|name| own.get(name).filter(|_| choice(name)).map(|v| v.mapv(|v| v as f32))).expect("runs");
    assert!(same.iter().all(|(name, value)| own[name] == value), "its own choices change nothing");

    let point = "layers.1.ffn.expert_ids";
    let others = own[point].mapv(|e| ((e as usize + 1) % c.experts) as f32);
    let forced = force(&|name| (name == point).then(|| others.clone())).expect("runs");
    assert_eq!(forced[point], own[point], "the sink sees the model's own choice");
    assert_eq!(forced["layers.1.ffn.norm"], own["layers.1.ffn.norm"]);
    assert_ne!(forced["layers.1.ffn.out"], own["layers.1.ffn.out"]);

    for bad in [others.mapv(|_| c.experts as f32), others.mapv(|_| -1.0), ArrayD::zeros(vec![IDS.len(), 1])] {
        let error = force(&|name| (name == point).then(|| bad.clone())).expect_err("does not fit");
        assert!(matches!(&error, RefError::Choice { point: p, .. } if p == point), "{error}");
    }
}

/// Whatever is missing is made again from what is there, down to the token ids, with the very bits of the whole run.
#[test]
fn bridging_is_the_whole_run() {
    let c = tiny_config();
    let rows = [1, 4, 6];
    for options in [SPARSE, RefOptions { expanded: true, ..SPARSE }, RefOptions { dense: true, ..SPARSE }] {
        let recipes = RefRecipe::ALL.into_iter().flat_map(|recipe| Arith::orders(recipe, 2));
        for a in recipes.chain([Arith::Exact]) {
            let (names, values) = run(&c, a, options);
            let ids = |name: &str| (name == "ids").then(|| values["ids"].mapv(|v| v as f32));
            // Layers as they are captured where only hidden states are.
            let states = |name: &str| {
                let shown = name == "ids" || name.ends_with(".output") || name == "embed";
                shown.then(|| values.get(name).map(|v| v.mapv(|v| v as f32)))?
            };
            let (from_ids, w) = (Bridge::default(), Hashed(c.clone()));
            for name in names {
                let bridged = |seen: Captured<'_>, bridge: &Bridge| {
                    Replay { bridge: Some(bridge), ..of(&c, &w, a, options, seen) }.point(&name, &rows)
                };
                let whole = values[&name].select(Axis(0), &rows);
                let error = |y: ArrayD<f64>| {
                    (y - &whole).iter().filter(|v| v.is_finite()).fold(0.0, |m: f64, v| m.max(v.abs()))
                };
                let made = bridged(&ids, &from_ids).expect("bridges");
                assert_eq!(error(made), 0.0, "{name} {a:?} {options:?}");
                if a == Arith::Exact {
                    let near = error(bridged(&states, &Bridge::default()).expect("bridges"));
                    assert!(near < 1e-4, "{name}: {near}");
                } else {
                    assert_eq!(error(bridged(&states, &Bridge::default()).expect("bridges")), 0.0, "{name} {a:?}");
                }
            }
        }
    }
}

/// Runs in a recipe go on with the choices of another run; nothing is bridged where nobody asked for it.
#[test]
fn bridges_choose_alike() {
    let (c, w) = (tiny_config(), Hashed(tiny_config()));
    let (_, values) = run(&c, Arith::Exact, SPARSE);
    let ids = |name: &str| (name == "ids").then(|| values["ids"].mapv(|v| v as f32));
    let (point, rows) = ("layers.1.ffn.routed", [2, 5]);
    let exact = Bridge::default();
    let alone = || of(&c, &w, Arith::Exact, SPARSE, &ids);
    let bridged = |bridge: &Bridge| Replay { bridge: Some(bridge), ..alone() }.point(point, &rows);
    let first = bridged(&exact).expect("bridges");
    let chosen = exact.choices();
    assert!(chosen.contains(&("layers.1.ffn.expert_ids".into(), rows.to_vec())), "{chosen:?}");
    let alike = exact.choosing_alike();
    assert_eq!(bridged(&alike).expect("bridges"), first);
    let other = exact.choosing_alike();
    let ids_of = other.get("layers.1.ffn.expert_ids", &rows).expect("a choice");
    other.keep("layers.1.ffn.expert_ids", &rows, &ids_of.mapv(|e| (e + 1.0) % c.experts as f64));
    assert_ne!(bridged(&other).expect("bridges"), first);
    let refused = alone().point(point, &rows);
    assert!(matches!(refused, Err(ReplayError::Missing { .. })));
}

/// Keys and values made before attention, or absorbed into queries and results: the same numbers.
#[test]
fn expanded_attention_is_absorbed_attention() {
    let c = tiny_config();
    let (_, absorbed) = run(&c, Arith::Exact, SPARSE);
    let (_, expanded) = run(&c, Arith::Exact, RefOptions { expanded: true, ..SPARSE });
    let error = (&absorbed["logits"] - &expanded["logits"]).mapv(f64::abs).fold(0.0, |m: f64, &v| m.max(v));
    assert!(error < 1e-12, "{error}");
    assert!(!expanded.contains_key("layers.0.attn.latent") && absorbed.contains_key("layers.0.attn.latent"));
}

/// Captured addends are what is added, whatever they hold; ranks that round add their rounding alone.
#[test]
fn ranks_round_what_was_captured() {
    let (c, rows) = (tiny_config(), [0, 3, 5]);
    let half = |order| Arith::F32(RefRecipe::TorchHalf(crate::recipe::Half::Bf16), order);
    let (_, mut values) = run(&c, half(Order::Ranks(2)), SPARSE);
    let point = "layers.1.ffn.out";
    let out = |values: &HashMap<String, ArrayD<f64>>, a| {
        of(&c, &Hashed(c.clone()), a, SPARSE, &captured(values)).point(point, &rows).expect("replays")
    };
    let rms = |x: &ArrayD<f64>| (x.mapv(|v| v * v).sum() / x.len() as f64).sqrt();
    for by in [1.0, 50.0] {
        values.insert("layers.1.ffn.routed".into(), values["layers.1.ffn.routed"].mapv(|v| v * by));
        let (exact, ranks) = (out(&values, Arith::Exact), out(&values, half(Order::Ranks(2))));
        // Roundings of half a unit of 2^-8 at most, of what the addends truly are and of what they are said to be.
        let (noise, size) = (rms(&(&ranks - &exact)), rms(&exact));
        assert!(noise > 0.0 && noise < 3.0 * size * 2f64.powi(-8), "{by}: {noise:e} of {size:e}");
    }
}
