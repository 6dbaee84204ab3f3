use ndarray::{Array, array};

use super::*;
use crate::arith::Order;
use crate::recipe::RefRecipe;

const EXACT: Arith = Arith::Exact;

fn close(a: f64, b: f64) {
    assert!((a - b).abs() <= 1e-12 * b.abs().max(1.0), "{a} is not {b}");
}

#[test]
fn rms_norm_scales_to_unit_mean_square() {
    let y = rms_norm(EXACT, &array![[3.0, 4.0]], &array![1.0, 2.0], 0.0);
    close(y[[0, 0]], 3.0 / 12.5f64.sqrt());
    close(y[[0, 1]], 8.0 / 12.5f64.sqrt());
    close(rms_norm(EXACT, &array![[3.0, 4.0]], &array![1.0, 1.0], 12.5)[[0, 0]], 0.6);
}

#[test]
fn layer_norm_removes_the_mean_and_adds_the_bias() {
    let y = layer_norm(EXACT, &array![[1.0, 5.0]], &array![1.0, 3.0], &array![10.0, 0.0], 0.0);
    close(y[[0, 0]], 9.0);
    close(y[[0, 1]], 3.0);
}

#[test]
fn rope_turns_pairs_of_the_stated_part_only() {
    let x = array![[[7.0, 1.0, 0.0, 0.0, 1.0]], [[7.0, 1.0, 0.0, 0.0, 1.0]]];
    let y = rope(EXACT, &x, 1..5, &[0, 3], 100.0, RopeStyle::Interleaved);
    assert_eq!(y.index_axis(Axis(0), 0), x.index_axis(Axis(0), 0));
    let row: Vec<f64> = y.index_axis(Axis(0), 1).iter().copied().collect();
    assert_eq!(row[0], 7.0);
    close(row[1], 3f64.cos());
    close(row[2], 3f64.sin());
    close(row[3], -0.3f64.sin()); // the second pair turns by 3 * 100^(-2/4)
    close(row[4], 0.3f64.cos());
    let y = rope(EXACT, &x, 1..5, &[0, 3], 100.0, RopeStyle::HalfSplit);
    close(y[[1, 0, 1]], 3f64.cos());
    close(y[[1, 0, 3]], 3f64.sin());
}

#[test]
fn rope_in_f32_rounds_cos_and_sin_once() {
    let f32s = Arith::F32(RefRecipe::Strict, Order::Sequential);
    let y = rope(f32s, &array![[[1.0, 0.0]]], 0..2, &[383], 1e6, RopeStyle::Interleaved);
    assert_eq!((y[[0, 0, 0]], y[[0, 0, 1]]), (f64::from(383f64.cos() as f32), f64::from(383f64.sin() as f32)));
}

#[test]
fn absorbed_attention_equals_attention_over_keys_and_values() {
    // One head: nope 2, latent 3, rope 2, value 2. Plain form: k = k_b^T latent, v = v_b latent.
    let k_b = Array::from_shape_fn((1, 3, 2), |(_, c, j)| (c as f32 - 1.0) * 0.5 + j as f32);
    let v_b = Array::from_shape_fn((1, 2, 3), |(_, d, c)| (d * 3 + c) as f32 * 0.25);
    let latent = array![[0.3, -1.0, 0.7], [1.1, 0.4, -0.2], [9.0, 9.0, 9.0]];
    let k_rope = array![[0.5, -0.5], [0.1, 0.9], [9.0, 9.0]];
    let (q_nope, q_rope) = (array![[[0.6, -0.8]]], array![[[0.2, 0.4]]]);
    let absorbed = absorb_q(EXACT, q_nope.view(), &k_b);
    let out = attention(EXACT, absorbed.view(), q_rope.view(), &latent, k_rope.view(), &[vec![0, 1]], 0.5);
    let context = value_up(EXACT, out.view(), &v_b);

    let score = |s: usize| {
        let k = |j: usize| (0..3).map(|c| f64::from(k_b[[0, c, j]]) * latent[[s, c]]).sum::<f64>();
        0.5 * (0.6 * k(0) - 0.8 * k(1) + 0.2 * k_rope[[s, 0]] + 0.4 * k_rope[[s, 1]])
    };
    let p0 = 1.0 / (1.0 + (score(1) - score(0)).exp());
    for d in 0..2 {
        let v = |s: usize| (0..3).map(|c| f64::from(v_b[[0, d, c]]) * latent[[s, c]]).sum::<f64>();
        close(context[[0, 0, d]], p0 * v(0) + (1.0 - p0) * v(1));
    }
}

#[test]
fn index_scores_hide_the_future_and_drop_negative_hits() {
    let q = array![[[1.0, 0.0], [0.0, 1.0]]];
    let k = array![[2.0, 3.0], [-4.0, 5.0], [1.0, 1.0]];
    let scores = index_scores(EXACT, &q, &k, &array![[10.0, -1.0]], &[1]);
    assert_eq!(scores, array![[20.0 - 3.0, -5.0, f64::NEG_INFINITY]]);
}

#[test]
fn top_k_breaks_ties_by_place_and_puts_nan_last() {
    assert_eq!(top_k(&[1.0, 3.0, 3.0, f64::NAN, -0.0, 0.0], 3), [1, 2, 0]);
    assert_eq!(top_k(&[0.0, -0.0, 0.0], 2), [0, 1]);
    assert_eq!(top_k(&[-0.0, 0.0], 1), [0]);
    assert_eq!(top_k(&[1.0], 4), [0]);
}

#[test]
fn index_top_k_is_ascending_and_padded() {
    let scores = array![[5.0, 9.0, 9.0], [1.0, 2.0, 0.0], [1.0, 0.0, 2.0]];
    assert_eq!(index_top_k(&scores, &[0, 1, 2], 2), array![[0.0, -1.0], [0.0, 1.0], [0.0, 2.0]]);
}

#[test]
fn swiglu_gates_with_silu() {
    let h = swiglu(EXACT, &array![[2.0]], &array![[1.5f32]], &array![[0.5f32]]);
    close(h[[0, 0]], 3.0 / (1.0 + (-3f64).exp()));
}

#[test]
fn gating_functions() {
    let logits = array![[0.0, 1.0]];
    close(router_probabilities(EXACT, &logits, Gating::Sigmoid)[[0, 1]], 1.0 / (1.0 + (-1f64).exp()));
    close(router_probabilities(EXACT, &logits, Gating::Softmax)[[0, 1]], 1f64.exp() / (1.0 + 1f64.exp()));
    close(router_probabilities(EXACT, &logits, Gating::SqrtSoftplus)[[0, 0]], 2f64.ln().sqrt());
}

#[test]
fn bias_chooses_but_does_not_weigh() {
    let p = array![[0.9, 0.5, 0.1]];
    let scores = choice_scores(EXACT, &p, &array![0.0, 0.0, 1.0], 1, 1);
    let ids = choose_experts(&scores, 2);
    assert_eq!(ids, array![[2.0, 0.0]]);
    let weights = expert_weights(EXACT, &p, &[vec![2, 0]], true, 2.5);
    close(weights[[0, 0]], 0.25);
    close(weights[[0, 1]], 2.25);
    assert_eq!(expert_weights(EXACT, &p, &[vec![2, 0]], false, 1.0), array![[0.1, 0.9]]);
}

#[test]
fn groups_compete_by_their_two_best() {
    // Group sums of two: 1.0, 1.2, 0.6; the single best expert is in a group that loses.
    let p = array![[1.0, 0.0, 0.0, 0.6, 0.6, 0.0, 0.3, 0.3, 0.3]];
    let scores = choice_scores(EXACT, &p, &Array1::zeros(9), 3, 1);
    assert_eq!(choose_experts(&scores, 2), array![[3.0, 4.0]]);
    assert!(scores.iter().enumerate().all(|(i, v)| v.is_infinite() != (3..6).contains(&i)));
}

#[test]
fn experts_mix_by_weight() {
    let y = array![[[1.0, 2.0], [10.0, 20.0]]];
    assert_eq!(mix_experts(EXACT, &array![[0.5, 2.0]], &y), array![[20.5, 41.0]]);
}

/// A value of f32 that bf16 rounds to 1.
const FINE: f64 = 1.0 + 1.0 / 1024.0;
const FAST: Arith = Arith::F32(RefRecipe::Fast, Order::Sequential);
const STRICT: Arith = Arith::F32(RefRecipe::Strict, Order::Sequential);

#[test]
fn the_fast_recipe_rounds_what_meets_weights() {
    let (x, w) = (array![[FINE, 3.0]], array![[1f32, 0.0]]);
    assert_eq!(linear(FAST, &x, &w), array![[1.0]]);
    assert_eq!(linear(STRICT, &x, &w), array![[FINE]]);
    assert_eq!(linear_part(FAST, &x, &w, 0..1), array![[1.0]]);
    let (heads, per) = (array![[[FINE, 3.0]]], array![[[1f32, 0.0]]]);
    assert_eq!(absorb_q(FAST, heads.view(), &per), array![[[1.0]]]);
    assert_eq!(value_up(FAST, heads.view(), &per), array![[[1.0]]]);
    let gated = |a: Arith, x: f64| swiglu(a, &array![[x]], &array![[1f32]], &array![[1f32]]);
    assert_eq!(gated(FAST, FINE), gated(STRICT, 1.0));
    assert_ne!(gated(FAST, FINE), gated(STRICT, FINE));
}

#[test]
fn the_fast_recipe_leaves_attention_and_indexer_alone() {
    let q = array![[[FINE, -0.3]], [[0.7, 2.0 * FINE]]];
    let (latent, k) = (array![[FINE, 0.2], [-0.4, 3.0 * FINE]], array![[FINE], [0.1 * FINE]]);
    let q_rope = array![[[FINE]], [[-0.9]]];
    let attend =
        |a: Arith| attention(a, q.view(), q_rope.view(), &latent, k.view(), &[vec![0], vec![0, 1]], 0.5 * FINE);
    assert_eq!(attend(FAST), attend(STRICT));
    assert_eq!(attend(FAST)[[0, 0, 0]], FINE); // one key: its latent, unrounded
    // FINE is 1 + 2^-10, and its square has 21 bits: exact in f32.
    let scores = |a: Arith| index_scores(a, &array![[[FINE]]], &array![[FINE]], &array![[1.0]], &[0]);
    assert_eq!(scores(FAST), array![[FINE * FINE]]);
    assert_eq!(index_scores(FAST, &array![[[1.0]]], &array![[1.0]], &array![[FINE]], &[0]), array![[FINE]]);
}

#[test]
fn the_fast_recipe_leaves_router_and_mixing_alone() {
    let logits = |a: Arith| router_logits(a, &array![[FINE]], &array![[1f32]]);
    assert_eq!(logits(FAST), array![[FINE]]);
    assert_eq!(logits(FAST), logits(STRICT));
    assert_eq!(mix_experts(FAST, &array![[FINE]], &array![[[1.0]]]), array![[FINE]]);
}
