//! Damages of glm5-nano: what is edited, and which repairs undo it, if any does.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use lockstep::model::Config;

use super::{Array, Model, QuantType, Value, config, dequantise};

/// A damage, and family and layer of every repair that undoes it.
pub struct Damage {
    /// What it is called in the table.
    pub name: &'static str,
    /// What it does to a model of these widths.
    edit: fn(&mut Model, &Widths),
    /// Family and layer of each repair.
    pub repairs: &'static [(&'static str, Option<usize>)],
}

impl Damage {
    /// Damages a model. False where it is none for a model of these widths: an edit panics over what it misses.
    pub fn apply(&self, model: &mut Model) -> bool {
        let widths = Widths::of(model);
        catch_unwind(AssertUnwindSafe(|| (self.edit)(model, &widths))).is_ok()
    }
}

/// The widths of a model that its damages need.
struct Widths {
    hidden: usize,
    heads: usize,
    /// Of a query head: the part that is not rotated, and the one that is.
    nope: usize,
    rope: usize,
    v: usize,
    q_lora: usize,
    kv_lora: usize,
    experts: usize,
    expert_ffn: usize,
    layers: Range<usize>,
    /// The layers with experts.
    moe: Range<usize>,
}

impl Widths {
    fn of(model: &Model) -> Self {
        let c = config(&model.metadata);
        let moe = (0..c.layers).find(|layer| c.is_moe(*layer)).unwrap()..c.layers;
        let Config { hidden, heads, nope, rope, v_head: v, q_lora, kv_lora, experts, expert_ffn, layers, .. } = c;
        Widths { hidden, heads, nope, rope, v, q_lora, kv_lora, experts, expert_ffn, layers: 0..layers, moe }
    }

    fn qk(&self) -> usize {
        self.nope + self.rope
    }

    fn layers(&self) -> Range<usize> {
        self.layers.clone()
    }

    fn moe(&self) -> Range<usize> {
        self.moe.clone()
    }
}

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
fn transpose(model: &mut Model, w: &Widths, name: &str) {
    assert_eq!(w.hidden, w.q_lora);
    values(model, name, &|all| {
        let old = all.clone();
        all.iter_mut().enumerate().for_each(|(i, v)| *v = old[i % w.hidden * w.hidden + i / w.hidden]);
    });
}

/// Gives two tensors each other's data.
fn exchange(model: &mut Model, a: &str, b: &str) {
    let at = |name: &str| model.tensors.iter().position(|(t, _)| t.name == name).unwrap_or_else(|| panic!("{name}"));
    let (a, b) = (at(a), at(b));
    let (of_a, of_b) = (model.tensors[a].clone(), model.tensors[b].clone());
    assert_eq!(of_a.0.ne, of_b.0.ne);
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

fn every_gate_up(model: &mut Model, w: &Widths) {
    (0..w.moe.start).for_each(|layer| gate_up(model, layer, ""));
    w.moe().for_each(|layer| ["_exps", "_shexp"].iter().for_each(|of| gate_up(model, layer, of)));
}

fn qkv_order(model: &mut Model, w: &Widths, layer: usize) {
    let (q, kv) = (blk(layer, "attn_q_a"), blk(layer, "attn_kv_a_mqa"));
    let mut joined = Vec::new();
    for name in [&kv, &q] {
        values(model, name, &|_| {});
        joined.extend(model.tensors.iter().find(|(t, _)| t.name == *name).unwrap().1.clone());
    }
    let cut = w.hidden * w.q_lora * 4;
    for (name, bytes) in [(&q, &joined[..cut]), (&kv, &joined[cut..])] {
        model.tensors.iter_mut().find(|(t, _)| t.name == *name).unwrap().1 = bytes.to_vec();
    }
}

fn k_b(model: &mut Model, w: &Widths, layer: usize) {
    values(model, &blk(layer, "attn_k_b"), &|all| {
        let old = all.clone();
        for (head, (all, old)) in
            all.chunks_exact_mut(w.nope * w.kv_lora).zip(old.chunks_exact(w.nope * w.kv_lora)).enumerate()
        {
            assert!(head < w.heads);
            (0..w.nope * w.kv_lora).for_each(|i| all[i] = old[i % w.kv_lora * w.nope + i / w.kv_lora]);
        }
    });
}

/// Rotated rows of every head as halves.
fn rope_rows(model: &mut Model, w: &Widths, layer: usize) {
    let half = |i: usize| i % (w.rope / 2) * 2 + i / (w.rope / 2);
    rows(model, &blk(layer, "attn_q_b"), w.q_lora, &|i| match i % w.qk() {
        at if at >= w.nope => i - at + w.nope + half(at - w.nope),
        _ => i,
    });
    rows(model, &blk(layer, "attn_kv_a_mqa"), w.hidden, &|i| {
        if i >= w.kv_lora { w.kv_lora + half(i - w.kv_lora) } else { i }
    });
}

fn norms(model: &mut Model, w: &Widths, layers: Range<usize>, add: f32) {
    for layer in layers.clone() {
        for name in ["attn_norm", "ffn_norm", "attn_q_a_norm", "attn_kv_a_norm"] {
            values(model, &blk(layer, name), &|all| all.iter_mut().for_each(|v| *v += add));
        }
    }
    if layers == w.layers {
        values(model, "output_norm.weight", &|all| all.iter_mut().for_each(|v| *v += add));
    }
}

fn layers(model: &mut Model, a: usize, b: usize) {
    parts(model, a, b, "");
}

/// Exchanges what begins with this name between two layers.
fn parts(model: &mut Model, a: usize, b: usize, begins: &str) {
    let (of_a, of_b) = (format!("blk.{a}."), format!("blk.{b}."));
    let names = model.tensors.iter().filter_map(|(t, _)| t.name.strip_prefix(&of_a).map(String::from));
    let names = names.filter(|name| name.starts_with(begins));
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
    ($($name:literal, |$m:ident, $w:ident| $edit:expr => [$($family:literal $layer:expr),*];)*) => {
        /// Every damage.
        pub const DAMAGES: &[Damage] = &[$(Damage {
            name: $name,
            edit: |$m, $w| { $edit; },
            repairs: &[$(($family, $layer)),*],
        }),*];
    };
}

const ALL: Option<usize> = None;

damages! {
    // Metadata.
    "rope base 1e4", |m, _w| set(m, "rope.freq_base", Value::F32(1e4)) => ["rope base" ALL];
    "rope base 100", |m, _w| set(m, "rope.freq_base", Value::F32(100.0)) => ["rope base" ALL];
    "rope base 5e5", |m, _w| set(m, "rope.freq_base", Value::F32(5e5)) => ["rope base" ALL];
    "expert scale 1", |m, _w| set(m, "expert_weights_scale", Value::F32(1.0)) => ["expert scale" ALL];
    "expert scale 2", |m, _w| set(m, "expert_weights_scale", Value::F32(2.0)) => ["expert scale" ALL];
    "experts used 1", |m, _w| set(m, "expert_used_count", Value::U32(1)) => ["experts per token" ALL];
    "experts used 4", |m, _w| set(m, "expert_used_count", Value::U32(4)) => ["experts per token" ALL];
    "gating softmax", |m, _w| set(m, "expert_gating_func", Value::U32(1)) => ["gating" ALL];
    "no norm", |m, _w| set(m, "expert_weights_norm", Value::Bool(false)) => ["normalised expert weights" ALL];
    "gating keys absent", |m, _w| drop(m, &["expert_gating_func", "expert_weights_norm"])
        => ["normalised expert weights" ALL];
    "eps 1", |m, _w| set(m, "attention.layer_norm_rms_epsilon", Value::F32(1.0)) => ["norm eps" ALL];
    "eps 1e-3", |m, _w| set(m, "attention.layer_norm_rms_epsilon", Value::F32(1e-3)) => ["norm eps" ALL];
    "eps 1e-6", |m, _w| set(m, "attention.layer_norm_rms_epsilon", Value::F32(1e-6)) => ["norm eps" ALL];
    "merges reversed", |m, _w| merges(m, backwards) => ["merges" ALL];
    "merges empty", |m, _w| merges(m, |_| Vec::new()) => ["merges" ALL];
    "top-k 16", |m, _w| set(m, "attention.indexer.top_k", Value::U32(16)) => [];
    "no output", |m, _w| *m = m.clone().drop(|name| name == "output.weight") => [];
    // Data, in every layer.
    "gate and up, all", |m, w| every_gate_up(m, w) => ["gate and up" ALL];
    "routed gate and up, all", |m, w| w.moe().for_each(|l| gate_up(m, l, "_exps")) => ["gate and up" ALL];
    "shared gate and up, all", |m, w| w.moe().for_each(|l| gate_up(m, l, "_shexp")) => ["gate and up" ALL];
    "routed up and down, all", |m, w| w.moe().for_each(|l| up_down(m, l, "_exps")) => ["up and down" ALL];
    "q_a and kv_a, all", |m, w| w.layers().for_each(|l| qkv_order(m, w, l)) => ["order of q_a and kv_a" ALL];
    "block norms, all", |m, w| w.layers().for_each(|l| exchange(m, &blk(l, "attn_norm"), &blk(l, "ffn_norm")))
        => ["attention and ffn norms" ALL];
    "latent norms, all", |m, w| w.layers().for_each(|l| exchange(m, &blk(l, "attn_q_a_norm"), &blk(l, "attn_kv_a_norm")))
        => ["latent norms" ALL];
    "norms - 1, all", |m, w| norms(m, w, w.layers(), -1.0) => ["norm offset" ALL];
    "norms + 1, all", |m, w| norms(m, w, w.layers(), 1.0) => ["norm offset" ALL];
    "k_b untransposed, all", |m, w| w.layers().for_each(|l| k_b(m, w, l)) => ["k_b layout" ALL];
    "q_a transposed, all", |m, w| w.layers().for_each(|l| transpose(m, w, &blk(l, "attn_q_a"))) => ["q_a layout" ALL];
    "o heads interleaved, all", |m, w| w.layers().for_each(|l| cols(m, &blk(l, "attn_output"), w.heads * w.v,
        &|i| i % w.heads * w.v + i / w.heads)) => ["heads of attn_output" ALL];
    "o heads early, all", |m, w| w.layers().for_each(|l| cols(m, &blk(l, "attn_output"), w.heads * w.v,
        &|i| (i + w.v) % (w.heads * w.v))) => ["heads of attn_output" ALL];
    "q heads interleaved, all", |m, w| w.layers().for_each(|l| rows(m, &blk(l, "attn_q_b"), w.q_lora,
        &|i| i % w.heads * w.qk() + i / w.heads)) => ["heads of q_b" ALL];
    "q heads late, all", |m, w| w.layers().for_each(|l| rows(m, &blk(l, "attn_q_b"), w.q_lora,
        &|i| (i + (w.heads - 1) * w.qk()) % (w.heads * w.qk()))) => ["heads of q_b" ALL];
    "q halves, all", |m, w| w.layers().for_each(|l| rows(m, &blk(l, "attn_q_b"), w.q_lora,
        &|i| i / w.qk() * w.qk() + (i % w.qk() + w.nope) % w.qk())) => ["halves of q_b" ALL];
    "kv halves, all", |m, w| w.layers().for_each(|l| rows(m, &blk(l, "attn_kv_a_mqa"), w.hidden,
        &|i| (i + w.kv_lora) % (w.kv_lora + w.rope))) => ["halves of kv_a" ALL];
    "router rows early, all", |m, w| w.moe().for_each(|l| rows(m, &blk(l, "ffn_gate_inp"), w.hidden, &|i| (i + 1) % w.experts))
        => ["router rows" ALL];
    "router rows reversed, all", |m, w| w.moe().for_each(|l| rows(m, &blk(l, "ffn_gate_inp"), w.hidden, &|i| w.experts - 1 - i))
        => ["router rows" ALL];
    "rope rows as halves, all", |m, w| w.layers().for_each(|l| rope_rows(m, w, l)) => ["rope order" ALL];
    "q_b x 1.5, all", |m, w| w.layers().for_each(|l| times(m, &blk(l, "attn_q_b"), 1.5)) => ["softmax scale" ALL];
    "bias large, all", |m, w| w.moe().for_each(|l| values(m, &format!("blk.{l}.exp_probs_b.bias"),
        &|all| all.iter_mut().enumerate().for_each(|(i, v)| *v = if i < 4 { 2.0 } else { -2.0 })))
        => ["correction bias" ALL];
    "bias zero, all", |m, w| w.moe().for_each(|l| values(m, &format!("blk.{l}.exp_probs_b.bias"), &|all| all.fill(0.0))) => [];
    "head = embedding", |m, _w| { let (_, e) = m.tensors.iter().find(|(t, _)| t.name == "token_embd.weight").unwrap().clone();
        let ty = m.tensors.iter().find(|(t, _)| t.name == "token_embd.weight").unwrap().0.ty;
        let (t, d) = m.tensors.iter_mut().find(|(t, _)| t.name == "output.weight").unwrap(); t.ty = ty; *d = e } => [];
    // Data, in one layer.
    "gate and up, 3", |m, _w| ["_exps", "_shexp"].iter().for_each(|of| gate_up(m, 3, of)) => ["gate and up" Some(3)];
    "routed gate and up, 3", |m, _w| gate_up(m, 3, "_exps") => ["gate and up" Some(3)];
    "shared gate and up, 3", |m, _w| gate_up(m, 3, "_shexp") => ["gate and up" Some(3)];
    // One layer is dense, so that this one is all of them.
    "gate and up, 0", |m, _w| gate_up(m, 0, "") => ["gate and up" ALL];
    "routed up and down, 4", |m, _w| up_down(m, 4, "_exps") => ["up and down" Some(4)];
    "o heads early, 3", |m, w| cols(m, &blk(3, "attn_output"), w.heads * w.v, &|i| (i + w.v) % (w.heads * w.v))
        => ["heads of attn_output" Some(3)];
    "q heads late, 5", |m, w| rows(m, &blk(5, "attn_q_b"), w.q_lora, &|i| (i + (w.heads - 1) * w.qk()) % (w.heads * w.qk()))
        => ["heads of q_b" Some(5)];
    "router rows early, 3", |m, w| rows(m, &blk(3, "ffn_gate_inp"), w.hidden, &|i| (i + 1) % w.experts)
        => ["router rows" Some(3)];
    "q_a and kv_a, 4", |m, w| qkv_order(m, w, 4) => ["order of q_a and kv_a" Some(4)];
    "latent norms, 3", |m, _w| exchange(m, &blk(3, "attn_q_a_norm"), &blk(3, "attn_kv_a_norm"))
        => ["latent norms" Some(3)];
    "block norms, 2", |m, _w| exchange(m, &blk(2, "attn_norm"), &blk(2, "ffn_norm"))
        => ["attention and ffn norms" Some(2)];
    "q_a transposed, 1", |m, w| transpose(m, w, &blk(1, "attn_q_a")) => ["q_a layout" Some(1)];
    "k_b untransposed, 2", |m, w| k_b(m, w, 2) => ["k_b layout" Some(2)];
    "rope rows as halves, 2", |m, w| rope_rows(m, w, 2) => ["rope order" Some(2)];
    "norms - 1, 3", |m, w| norms(m, w, 3..4, -1.0) => ["norm offset" Some(3)];
    "layers 2 and 3", |m, _w| layers(m, 2, 3) => ["layers exchanged" ALL];
    "layers 1 and 4", |m, _w| layers(m, 1, 4) => ["layers exchanged" ALL];
    "feed-forwards of layers 2 and 3", |m, _w| { parts(m, 2, 3, "ffn_"); parts(m, 2, 3, "exp_") }
        => ["layers exchanged" ALL];
    // Without an inverse among the repairs.
    "down_exps scrambled, 3", |m, w| rows(m, &blk(3, "ffn_down_exps"), w.expert_ffn,
        &|i| i / w.hidden * w.hidden + i * 37 % w.hidden) => [];
    "noise x 3 in down_exps 4", |m, _w| noise(m, &blk(4, "ffn_down_exps"), 3.0, 1.0) => [];
    "attn_output x 8, 3", |m, _w| times(m, &blk(3, "attn_output"), 8.0) => [];
    "attn_output zero, 3", |m, _w| times(m, &blk(3, "attn_output"), 0.0) => [];
    "q_b random, 3", |m, _w| noise(m, &blk(3, "attn_q_b"), 1.0, 0.0) => [];
    "attn_output negated, 2", |m, _w| times(m, &blk(2, "attn_output"), -1.0) => [];
    "q_b x 2, 2", |m, _w| times(m, &blk(2, "attn_q_b"), 2.0) => [];
    "experts of down turned, 3", |m, w| rows(m, &blk(3, "ffn_down_exps"), w.expert_ffn,
        &|i| (i + w.hidden) % (w.hidden * w.experts)) => [];
    "noise of 30 % in kv_a 2", |m, _w| noise(m, &blk(2, "attn_kv_a_mqa"), 0.3, 1.0) => [];
    // Pairs.
    "gate and up, all + no norm", |m, w| { every_gate_up(m, w); set(m, "expert_weights_norm", Value::Bool(false)) }
        => ["gate and up" ALL, "normalised expert weights" ALL];
    "rope base 1e4 + scale 1", |m, _w| { set(m, "rope.freq_base", Value::F32(1e4));
        set(m, "expert_weights_scale", Value::F32(1.0)) } => ["rope base" ALL, "expert scale" ALL];
    "q_a and kv_a, all + gate and up, 3", |m, w| { w.layers().for_each(|l| qkv_order(m, w, l)); gate_up(m, 3, "_exps");
        gate_up(m, 3, "_shexp") } => ["order of q_a and kv_a" ALL, "gate and up" Some(3)];
    "layers 2 and 3 + scale 1", |m, _w| { layers(m, 2, 3); set(m, "expert_weights_scale", Value::F32(1.0)) }
        => ["layers exchanged" ALL, "expert scale" ALL];
    "block norms, all + router rows, 3", |m, w| {
        w.layers().for_each(|l| exchange(m, &blk(l, "attn_norm"), &blk(l, "ffn_norm")));
        rows(m, &blk(3, "ffn_gate_inp"), w.hidden, &|i| (i + 1) % w.experts) }
        => ["attention and ffn norms" ALL, "router rows" Some(3)];
    "o heads, 3 + gate and up, 0", |m, w| {
        cols(m, &blk(3, "attn_output"), w.heads * w.v, &|i| (i + w.v) % (w.heads * w.v)); gate_up(m, 0, "") }
        => ["heads of attn_output" Some(3), "gate and up" ALL];
    "merges reversed + rope base 1e4", |m, _w| { merges(m, backwards); set(m, "rope.freq_base", Value::F32(1e4)) }
        => ["merges" ALL, "rope base" ALL];
    "q halves, all + eps 1", |m, w| { w.layers().for_each(|l| rows(m, &blk(l, "attn_q_b"), w.q_lora,
        &|i| i / w.qk() * w.qk() + (i % w.qk() + w.nope) % w.qk()));
        set(m, "attention.layer_norm_rms_epsilon", Value::F32(1.0)) } => ["halves of q_b" ALL, "norm eps" ALL];
    "routed gate and up, 2 and 5", |m, _w| { gate_up(m, 2, "_exps"); gate_up(m, 5, "_exps") }
        => ["gate and up" Some(2), "gate and up" Some(5)];
    "k_b, all + no norm", |m, w| { w.layers().for_each(|l| k_b(m, w, l)); set(m, "expert_weights_norm", Value::Bool(false)) }
        => ["k_b layout" ALL, "normalised expert weights" ALL];
}
