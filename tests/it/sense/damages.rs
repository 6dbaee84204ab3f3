//! Damages of glm5-nano: what is edited, and which repairs undo it, if any does.

use super::{Array, Model, QuantType, Value, dequantise};

/// A damage, and family and layer of every repair that undoes it.
pub struct Damage {
    /// What it is called in the table.
    pub name: &'static str,
    /// What it does to the model.
    pub edit: fn(&mut Model),
    /// Family and layer of each repair.
    pub repairs: &'static [(&'static str, Option<usize>)],
}

const LAYERS: std::ops::Range<usize> = 0..6;
const MOE: std::ops::Range<usize> = 1..6;
const HIDDEN: usize = 256;
const HEADS: usize = 8;
const NOPE: usize = 96;
const ROPE: usize = 32;
const QK: usize = NOPE + ROPE;
const V: usize = 128;
const LATENT: usize = 256;
const EXPERTS: usize = 8;

fn set(model: &mut Model, key: &str, value: Value) {
    *model = model.clone().set(&format!("glm-dsa.{key}"), value);
}

fn blk(layer: usize, name: &str) -> String {
    format!("blk.{layer}.{name}.weight")
}

/// Edits a tensor's values, and stores them as F32.
fn values(model: &mut Model, name: &str, edit: &dyn Fn(&mut Vec<f32>)) {
    let (tensor, data) = model.tensors.iter_mut().find(|(t, _)| t.name == name).unwrap_or_else(|| panic!("{name}"));
    let mut all = vec![0.0; tensor.ne.iter().product::<u64>() as usize];
    dequantise(tensor.ty.quant.unwrap(), data, &mut all).unwrap();
    edit(&mut all);
    tensor.ty = QuantType::F32.info();
    *data = all.iter().flat_map(|v| v.to_le_bytes()).collect();
}

/// Transposes a square matrix.
fn transpose(model: &mut Model, name: &str) {
    values(model, name, &|all| {
        let old = all.clone();
        all.iter_mut().enumerate().for_each(|(i, v)| *v = old[i % HIDDEN * HIDDEN + i / HIDDEN]);
    });
}

/// Gives two tensors each other's data.
fn exchange(model: &mut Model, a: &str, b: &str) {
    let at = |name: &str| model.tensors.iter().position(|(t, _)| t.name == name).unwrap_or_else(|| panic!("{name}"));
    let (a, b) = (at(a), at(b));
    let (of_a, of_b) = (model.tensors[a].clone(), model.tensors[b].clone());
    (model.tensors[a].0.ty, model.tensors[a].1) = (of_b.0.ty, of_b.1);
    (model.tensors[b].0.ty, model.tensors[b].1) = (of_a.0.ty, of_a.1);
}

/// Row `i` becomes row `from(i)`.
fn rows(model: &mut Model, name: &str, width: usize, from: &dyn Fn(usize) -> usize) {
    values(model, name, &|all| {
        let old = all.clone();
        all.chunks_exact_mut(width)
            .enumerate()
            .for_each(|(i, row)| row.copy_from_slice(&old[from(i) * width..][..width]));
    });
}

/// Column `i` becomes column `from(i)`.
fn cols(model: &mut Model, name: &str, width: usize, from: &dyn Fn(usize) -> usize) {
    values(model, name, &|all| {
        for row in all.chunks_exact_mut(width) {
            let old = row.to_vec();
            row.iter_mut().enumerate().for_each(|(i, v)| *v = old[from(i)]);
        }
    });
}

fn times(model: &mut Model, name: &str, factor: f32) {
    values(model, name, &|all| all.iter_mut().for_each(|v| *v *= factor));
}

/// Even noise of so many standard deviations.
fn noise(model: &mut Model, name: &str, size: f32, keep: f32) {
    values(model, name, &|all| {
        let spread = (all.iter().map(|v| v * v).sum::<f32>() / all.len() as f32).sqrt();
        let mut state = 1u64;
        for v in all.iter_mut() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let even = (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
            *v = keep * *v + size * spread * even * 1.73;
        }
    });
}

fn gate_up(model: &mut Model, layer: usize, of: &str) {
    exchange(model, &blk(layer, &format!("ffn_gate{of}")), &blk(layer, &format!("ffn_up{of}")));
}

fn up_down(model: &mut Model, layer: usize, of: &str) {
    exchange(model, &blk(layer, &format!("ffn_up{of}")), &blk(layer, &format!("ffn_down{of}")));
}

fn every_gate_up(model: &mut Model) {
    gate_up(model, 0, "");
    MOE.for_each(|layer| ["_exps", "_shexp"].iter().for_each(|of| gate_up(model, layer, of)));
}

fn qkv_order(model: &mut Model, layer: usize) {
    let (q, kv) = (blk(layer, "attn_q_a"), blk(layer, "attn_kv_a_mqa"));
    let mut joined = Vec::new();
    for name in [&kv, &q] {
        values(model, name, &|_| {});
        joined.extend(model.tensors.iter().find(|(t, _)| t.name == *name).unwrap().1.clone());
    }
    let cut = HIDDEN * LATENT * 4;
    for (name, bytes) in [(&q, &joined[..cut]), (&kv, &joined[cut..])] {
        model.tensors.iter_mut().find(|(t, _)| t.name == *name).unwrap().1 = bytes.to_vec();
    }
}

fn k_b(model: &mut Model, layer: usize) {
    values(model, &blk(layer, "attn_k_b"), &|all| {
        let old = all.clone();
        for (head, (all, old)) in all.chunks_exact_mut(NOPE * LATENT).zip(old.chunks_exact(NOPE * LATENT)).enumerate() {
            assert!(head < HEADS);
            (0..NOPE * LATENT).for_each(|i| all[i] = old[i % LATENT * NOPE + i / LATENT]);
        }
    });
}

/// Rotated rows of every head as halves.
fn rope_rows(model: &mut Model, layer: usize) {
    let half = |i: usize| i % (ROPE / 2) * 2 + i / (ROPE / 2);
    rows(model, &blk(layer, "attn_q_b"), LATENT, &|i| match i % QK {
        at if at >= NOPE => i - at + NOPE + half(at - NOPE),
        _ => i,
    });
    rows(model, &blk(layer, "attn_kv_a_mqa"), HIDDEN, &|i| if i >= LATENT { LATENT + half(i - LATENT) } else { i });
}

fn norms(model: &mut Model, layers: std::ops::Range<usize>, add: f32) {
    for layer in layers.clone() {
        for name in ["attn_norm", "ffn_norm", "attn_q_a_norm", "attn_kv_a_norm"] {
            values(model, &blk(layer, name), &|all| all.iter_mut().for_each(|v| *v += add));
        }
    }
    if layers == LAYERS {
        values(model, "output_norm.weight", &|all| all.iter_mut().for_each(|v| *v += add));
    }
}

fn layers(model: &mut Model, a: usize, b: usize) {
    let (of_a, of_b) = (format!("blk.{a}."), format!("blk.{b}."));
    let names = model.tensors.iter().filter_map(|(t, _)| t.name.strip_prefix(&of_a).map(String::from));
    for rest in names.collect::<Vec<_>>() {
        exchange(model, &format!("{of_a}{rest}"), &format!("{of_b}{rest}"));
    }
}

fn merges(model: &mut Model, change: fn(&[String]) -> Vec<String>) {
    let value = &mut model.metadata.iter_mut().find(|(k, _)| k == "tokenizer.ggml.merges").unwrap().1;
    let Value::Array(Array::Str(merges)) = value else { panic!("merges") };
    *merges = change(merges);
}

/// The same ranks backwards among merges of one length.
fn backwards(merges: &[String]) -> Vec<String> {
    let mut all: Vec<String> = merges.iter().rev().cloned().collect();
    all.sort_by_key(|merge| merge.chars().count());
    all
}

fn drop(model: &mut Model, keys: &[&str]) {
    for key in keys {
        *model = model.clone().unset(&format!("glm-dsa.{key}"));
    }
}

macro_rules! damages {
    ($($name:literal, |$m:ident| $edit:expr => [$($family:literal $layer:expr),*];)*) => {
        /// Every damage.
        pub const DAMAGES: &[Damage] = &[$(Damage {
            name: $name,
            edit: |$m| { $edit; },
            repairs: &[$(($family, $layer)),*],
        }),*];
    };
}

const ALL: Option<usize> = None;

damages! {
    // Metadata.
    "rope base 1e4", |m| set(m, "rope.freq_base", Value::F32(1e4)) => ["rope base" ALL];
    "rope base 100", |m| set(m, "rope.freq_base", Value::F32(100.0)) => ["rope base" ALL];
    "rope base 5e5", |m| set(m, "rope.freq_base", Value::F32(5e5)) => ["rope base" ALL];
    "expert scale 1", |m| set(m, "expert_weights_scale", Value::F32(1.0)) => ["expert scale" ALL];
    "expert scale 2", |m| set(m, "expert_weights_scale", Value::F32(2.0)) => ["expert scale" ALL];
    "experts used 1", |m| set(m, "expert_used_count", Value::U32(1)) => ["experts per token" ALL];
    "experts used 4", |m| set(m, "expert_used_count", Value::U32(4)) => ["experts per token" ALL];
    "gating softmax", |m| set(m, "expert_gating_func", Value::U32(1)) => ["gating" ALL];
    "no norm", |m| set(m, "expert_weights_norm", Value::Bool(false)) => ["normalised expert weights" ALL];
    "gating keys absent", |m| drop(m, &["expert_gating_func", "expert_weights_norm"])
        => ["normalised expert weights" ALL];
    "eps 1", |m| set(m, "attention.layer_norm_rms_epsilon", Value::F32(1.0)) => ["norm eps" ALL];
    "eps 1e-3", |m| set(m, "attention.layer_norm_rms_epsilon", Value::F32(1e-3)) => ["norm eps" ALL];
    "eps 1e-6", |m| set(m, "attention.layer_norm_rms_epsilon", Value::F32(1e-6)) => ["norm eps" ALL];
    "merges reversed", |m| merges(m, backwards) => ["merges" ALL];
    "merges empty", |m| merges(m, |_| Vec::new()) => ["merges" ALL];
    "top-k 16", |m| set(m, "attention.indexer.top_k", Value::U32(16)) => [];
    "no output", |m| *m = m.clone().drop(|name| name == "output.weight") => [];
    // Data, in every layer.
    "gate and up, all", |m| every_gate_up(m) => ["gate and up" ALL];
    "routed gate and up, all", |m| MOE.for_each(|l| gate_up(m, l, "_exps")) => ["gate and up" ALL];
    "shared gate and up, all", |m| MOE.for_each(|l| gate_up(m, l, "_shexp")) => ["gate and up" ALL];
    "routed up and down, all", |m| MOE.for_each(|l| up_down(m, l, "_exps")) => ["up and down" ALL];
    "q_a and kv_a, all", |m| LAYERS.for_each(|l| qkv_order(m, l)) => ["order of q_a and kv_a" ALL];
    "block norms, all", |m| LAYERS.for_each(|l| exchange(m, &blk(l, "attn_norm"), &blk(l, "ffn_norm")))
        => ["attention and ffn norms" ALL];
    "latent norms, all", |m| LAYERS.for_each(|l| exchange(m, &blk(l, "attn_q_a_norm"), &blk(l, "attn_kv_a_norm")))
        => ["latent norms" ALL];
    "norms - 1, all", |m| norms(m, LAYERS, -1.0) => ["norm offset" ALL];
    "norms + 1, all", |m| norms(m, LAYERS, 1.0) => ["norm offset" ALL];
    "k_b untransposed, all", |m| LAYERS.for_each(|l| k_b(m, l)) => ["k_b layout" ALL];
    "q_a transposed, all", |m| LAYERS.for_each(|l| transpose(m, &blk(l, "attn_q_a"))) => ["q_a layout" ALL];
    "o heads interleaved, all", |m| LAYERS.for_each(|l| cols(m, &blk(l, "attn_output"), HEADS * V,
        &|i| i % HEADS * V + i / HEADS)) => ["heads of attn_output" ALL];
    "o heads early, all", |m| LAYERS.for_each(|l| cols(m, &blk(l, "attn_output"), HEADS * V,
        &|i| (i + V) % (HEADS * V))) => ["heads of attn_output" ALL];
    "q heads interleaved, all", |m| LAYERS.for_each(|l| rows(m, &blk(l, "attn_q_b"), LATENT,
        &|i| i % HEADS * QK + i / HEADS)) => ["heads of q_b" ALL];
    "q heads late, all", |m| LAYERS.for_each(|l| rows(m, &blk(l, "attn_q_b"), LATENT,
        &|i| (i + (HEADS - 1) * QK) % (HEADS * QK))) => ["heads of q_b" ALL];
    "q halves, all", |m| LAYERS.for_each(|l| rows(m, &blk(l, "attn_q_b"), LATENT,
        &|i| i / QK * QK + (i % QK + NOPE) % QK)) => ["halves of q_b" ALL];
    "kv halves, all", |m| LAYERS.for_each(|l| rows(m, &blk(l, "attn_kv_a_mqa"), HIDDEN,
        &|i| (i + LATENT) % (LATENT + ROPE))) => ["halves of kv_a" ALL];
    "router rows early, all", |m| MOE.for_each(|l| rows(m, &blk(l, "ffn_gate_inp"), HIDDEN, &|i| (i + 1) % EXPERTS))
        => ["router rows" ALL];
    "router rows reversed, all", |m| MOE.for_each(|l| rows(m, &blk(l, "ffn_gate_inp"), HIDDEN, &|i| EXPERTS - 1 - i))
        => ["router rows" ALL];
    "rope rows as halves, all", |m| LAYERS.for_each(|l| rope_rows(m, l)) => ["rope order" ALL];
    "q_b x 1.5, all", |m| LAYERS.for_each(|l| times(m, &blk(l, "attn_q_b"), 1.5)) => ["softmax scale" ALL];
    "bias large, all", |m| MOE.for_each(|l| values(m, &format!("blk.{l}.exp_probs_b.bias"),
        &|all| all.iter_mut().enumerate().for_each(|(i, v)| *v = if i < 4 { 2.0 } else { -2.0 })))
        => ["correction bias" ALL];
    "bias zero, all", |m| MOE.for_each(|l| values(m, &format!("blk.{l}.exp_probs_b.bias"), &|all| all.fill(0.0))) => [];
    "head = embedding", |m| { let (_, e) = m.tensors.iter().find(|(t, _)| t.name == "token_embd.weight").unwrap().clone();
        let ty = m.tensors.iter().find(|(t, _)| t.name == "token_embd.weight").unwrap().0.ty;
        let (t, d) = m.tensors.iter_mut().find(|(t, _)| t.name == "output.weight").unwrap(); t.ty = ty; *d = e } => [];
    // Data, in one layer.
    "gate and up, 3", |m| ["_exps", "_shexp"].iter().for_each(|of| gate_up(m, 3, of)) => ["gate and up" Some(3)];
    "routed gate and up, 3", |m| gate_up(m, 3, "_exps") => ["gate and up" Some(3)];
    "shared gate and up, 3", |m| gate_up(m, 3, "_shexp") => ["gate and up" Some(3)];
    // One layer is dense, so that this one is all of them.
    "gate and up, 0", |m| gate_up(m, 0, "") => ["gate and up" ALL];
    "routed up and down, 4", |m| up_down(m, 4, "_exps") => ["up and down" Some(4)];
    "o heads early, 3", |m| cols(m, &blk(3, "attn_output"), HEADS * V, &|i| (i + V) % (HEADS * V))
        => ["heads of attn_output" Some(3)];
    "q heads late, 5", |m| rows(m, &blk(5, "attn_q_b"), LATENT, &|i| (i + (HEADS - 1) * QK) % (HEADS * QK))
        => ["heads of q_b" Some(5)];
    "router rows early, 3", |m| rows(m, &blk(3, "ffn_gate_inp"), HIDDEN, &|i| (i + 1) % EXPERTS)
        => ["router rows" Some(3)];
    "q_a and kv_a, 4", |m| qkv_order(m, 4) => ["order of q_a and kv_a" Some(4)];
    "latent norms, 3", |m| exchange(m, &blk(3, "attn_q_a_norm"), &blk(3, "attn_kv_a_norm"))
        => ["latent norms" Some(3)];
    "block norms, 2", |m| exchange(m, &blk(2, "attn_norm"), &blk(2, "ffn_norm"))
        => ["attention and ffn norms" Some(2)];
    "q_a transposed, 1", |m| transpose(m, &blk(1, "attn_q_a")) => ["q_a layout" Some(1)];
    "k_b untransposed, 2", |m| k_b(m, 2) => ["k_b layout" Some(2)];
    "rope rows as halves, 2", |m| rope_rows(m, 2) => ["rope order" Some(2)];
    "norms - 1, 3", |m| norms(m, 3..4, -1.0) => ["norm offset" Some(3)];
    "layers 2 and 3", |m| layers(m, 2, 3) => ["layers exchanged" ALL];
    "layers 1 and 4", |m| layers(m, 1, 4) => ["layers exchanged" ALL];
    // Without an inverse among the repairs.
    "down_exps scrambled, 3", |m| rows(m, &blk(3, "ffn_down_exps"), 256, &|i| i / 256 * 256 + i * 37 % 256) => [];
    "noise x 3 in down_exps 4", |m| noise(m, &blk(4, "ffn_down_exps"), 3.0, 1.0) => [];
    "attn_output x 8, 3", |m| times(m, &blk(3, "attn_output"), 8.0) => [];
    "attn_output zero, 3", |m| times(m, &blk(3, "attn_output"), 0.0) => [];
    "q_b random, 3", |m| noise(m, &blk(3, "attn_q_b"), 1.0, 0.0) => [];
    "q_b x 2, 2", |m| times(m, &blk(2, "attn_q_b"), 2.0) => [];
    "experts of down turned, 3", |m| rows(m, &blk(3, "ffn_down_exps"), 256, &|i| (i + 256) % (256 * EXPERTS)) => [];
    "noise of 30 % in kv_a 2", |m| noise(m, &blk(2, "attn_kv_a_mqa"), 0.3, 1.0) => [];
    // Pairs.
    "gate and up, all + no norm", |m| { every_gate_up(m); set(m, "expert_weights_norm", Value::Bool(false)) }
        => ["gate and up" ALL, "normalised expert weights" ALL];
    "rope base 1e4 + scale 1", |m| { set(m, "rope.freq_base", Value::F32(1e4));
        set(m, "expert_weights_scale", Value::F32(1.0)) } => ["rope base" ALL, "expert scale" ALL];
    "q_a and kv_a, all + gate and up, 3", |m| { LAYERS.for_each(|l| qkv_order(m, l)); gate_up(m, 3, "_exps");
        gate_up(m, 3, "_shexp") } => ["order of q_a and kv_a" ALL, "gate and up" Some(3)];
    "layers 2 and 3 + scale 1", |m| { layers(m, 2, 3); set(m, "expert_weights_scale", Value::F32(1.0)) }
        => ["layers exchanged" ALL, "expert scale" ALL];
    "block norms, all + router rows, 3", |m| {
        LAYERS.for_each(|l| exchange(m, &blk(l, "attn_norm"), &blk(l, "ffn_norm")));
        rows(m, &blk(3, "ffn_gate_inp"), HIDDEN, &|i| (i + 1) % EXPERTS) }
        => ["attention and ffn norms" ALL, "router rows" Some(3)];
    "o heads, 3 + gate and up, 0", |m| {
        cols(m, &blk(3, "attn_output"), HEADS * V, &|i| (i + V) % (HEADS * V)); gate_up(m, 0, "") }
        => ["heads of attn_output" Some(3), "gate and up" ALL];
    "merges reversed + rope base 1e4", |m| { merges(m, backwards); set(m, "rope.freq_base", Value::F32(1e4)) }
        => ["merges" ALL, "rope base" ALL];
    "q halves, all + eps 1", |m| { LAYERS.for_each(|l| rows(m, &blk(l, "attn_q_b"), LATENT,
        &|i| i / QK * QK + (i % QK + NOPE) % QK));
        set(m, "attention.layer_norm_rms_epsilon", Value::F32(1.0)) } => ["halves of q_b" ALL, "norm eps" ALL];
    "routed gate and up, 2 and 5", |m| { gate_up(m, 2, "_exps"); gate_up(m, 5, "_exps") }
        => ["gate and up" Some(2), "gate and up" Some(5)];
    "k_b, all + no norm", |m| { LAYERS.for_each(|l| k_b(m, l)); set(m, "expert_weights_norm", Value::Bool(false)) }
        => ["k_b layout" ALL, "normalised expert weights" ALL];
}
