//! The numbers of the metadata, read twice: by the engine and by the reference, independently. And, against a baseline,
//! every number that differs, by its key.

use lockstep_reference::config::{self as reference, RefConfig, RopeStyle};

use crate::checkpoint::Checkpoint;
use crate::checkpoint::oracle::Raw;
use crate::model::Config;
use crate::report::{Check, Verdict};
use crate::verify::whole::own_eps;

/// One number on two sides, as text that is equal exactly when the numbers are.
struct Pair {
    name: &'static str,
    left: String,
    right: String,
}

/// A check per number on which the two readings differ, or one that says that all agree; and how many were compared.
pub(super) fn readings(checkpoint: &Checkpoint) -> (Vec<Check>, usize) {
    let c = checkpoint.config();
    let r = match RefConfig::from_raw(&Raw(checkpoint.source()), own_eps(checkpoint)) {
        Ok(r) => r,
        Err(e) => return (vec![Check::exact("config", false, format!("CONFIG: the reference refuses it: {e}"))], 1),
    };
    let pairs = both(c, &r);
    let differs = |p: &&Pair| p.left != p.right;
    let mut checks: Vec<Check> = pairs
        .iter()
        .filter(differs)
        .map(|p| {
            let detail = format!("CONFIG: the engine reads {}, the reference {}{}", p.left, p.right, source(c, p.name));
            Check::exact(p.name, false, detail)
        })
        .collect();
    if checks.is_empty() {
        let detail = format!("two independent readings agree on all {} numbers", pairs.len());
        checks.push(Check::exact("config", true, detail));
    }
    (checks, pairs.len())
}

#[rustfmt::skip]
fn both(c: &Config, r: &RefConfig) -> Vec<Pair> {
    let pair = |name, left: String, right: String| Pair { name, left, right };
    let n = |name, left: usize, right: usize| pair(name, left.to_string(), right.to_string());
    // What engines hold as f32 is compared as f32.
    let f = |name, left: f32, right: f64| pair(name, format!("{left:e}"), format!("{:e}", right as f32));
    let indexer = |full: &mut dyn Iterator<Item = bool>| full.map(|f| if f { 'F' } else { 'S' }).collect::<String>();
    let style = |s| if s == RopeStyle::Interleaved { "adjacent pairs" } else { "half-split" }.to_string();
    let gating = match r.gating {
        reference::Gating::Softmax => "softmax",
        reference::Gating::Sigmoid => "sigmoid",
        reference::Gating::SqrtSoftplus => "sqrt softplus",
    };
    vec![
        n("trunk layers", c.layers, r.layers),
        n("MTP blocks", c.mtp_layers, r.mtp_layers),
        n("dense layers", c.dense_layers, r.dense_layers),
        n("hidden", c.hidden, r.hidden),
        n("vocabulary", c.vocab, r.vocab),
        n("heads", c.heads, r.heads),
        n("nope width", c.nope, r.nope),
        n("rope width", c.rope, r.rope),
        n("value width", c.v_head, r.value),
        n("q latent", c.q_lora, r.q_rank),
        n("kv latent", c.kv_lora, r.kv_rank),
        n("dense ffn", c.ffn, r.ffn),
        n("expert ffn", c.expert_ffn, r.moe_ffn),
        n("experts", c.experts, r.experts),
        n("experts per token", c.experts_used, r.experts_used),
        n("shared experts", c.shared_experts, r.shared_experts),
        n("expert groups", c.groups, r.groups),
        n("expert groups used", c.groups_used, r.groups_used),
        pair("gating", c.gating.name().into(), gating.into()),
        pair("normalised weights", c.expert_norm.to_string(), r.normalise_weights.to_string()),
        f("expert scale", c.expert_scale, r.routed_scale),
        n("indexer heads", c.index_heads, r.index_heads),
        n("indexer width", c.index_dim, r.index_dim),
        n("indexer top-k", c.top_k, r.top_k),
        pair("full indexer layers", indexer(&mut (0..c.layers).map(|l| c.is_full(l))),
             indexer(&mut r.index_full.iter().copied())),
        pair("rope base", format!("{:e}", c.rope_base), format!("{:e}", r.rope_theta)),
        pair("rope pairs adjacent", style(RopeStyle::Interleaved), style(r.rope_style)),
        pair("indexer's too", style(RopeStyle::Interleaved), style(r.index_rope_style)),
        f("RMSNorm eps", c.rms_eps, r.eps),
        f("q_a/kv_a norm eps", c.latent_eps, r.latent_eps),
        f("indexer LayerNorm eps", c.index_eps, r.index_eps),
    ]
}

/// The key that a number came from.
fn key<'a>(c: &'a Config, name: &str) -> Option<&'a str> {
    c.facts.iter().find(|f| f.name == name).map(|f| f.source.as_str())
}

fn source(c: &Config, name: &str) -> String {
    key(c, name).map_or(String::new(), |key| format!(" (from {key})"))
}

/// A check per number that differs from the baseline's, or one that says that none does; and how many were compared.
pub(super) fn differences(checkpoint: &Checkpoint, baseline: &Checkpoint) -> (Vec<Check>, usize) {
    let (c, b) = (checkpoint.config(), baseline.config());
    let pairs = numbers(c, b);
    let mut checks = Vec::new();
    for p in pairs.iter().filter(|p| p.left != p.right) {
        let keys = format!("{}, baseline {}", key(c, p.name).unwrap_or("derived"), key(b, p.name).unwrap_or("derived"));
        let detail = format!("CONFIG: {} here, {} in the baseline ({keys})", p.left, p.right);
        let verdict = match p.name {
            // transformers fixes 1e-6 whatever its config says, other engines take the file's: neither is wrong.
            "q_a/kv_a norm eps" if checkpoint.source().naming() != baseline.source().naming() => Verdict::Drift,
            "MTP blocks" | "context" => Verdict::Drift,
            _ => Verdict::Divergent,
        };
        let disputed = match (verdict, p.name) {
            (Verdict::Drift, "q_a/kv_a norm eps") => ": references disagree here, so this is nobody's fault",
            _ => "",
        };
        checks.push(Check::new(format!("{} = baseline", p.name), verdict, format!("{detail}{disputed}")));
    }
    if checks.is_empty() {
        checks.push(Check::exact("config = baseline", true, format!("all {} numbers are equal", pairs.len())));
    }
    (checks, pairs.len())
}

#[rustfmt::skip]
fn numbers(c: &Config, b: &Config) -> Vec<Pair> {
    let pair = |name, left: String, right: String| Pair { name, left, right };
    let n = |name, left: usize, right: usize| pair(name, left.to_string(), right.to_string());
    let f = |name, left: f32, right: f32| pair(name, format!("{left:e}"), format!("{right:e}"));
    let indexer = |c: &Config| (0..c.layers).map(|l| if c.is_full(l) { 'F' } else { 'S' }).collect::<String>();
    vec![
        n("trunk layers", c.layers, b.layers),
        n("MTP blocks", c.mtp_layers, b.mtp_layers),
        n("dense layers", c.dense_layers, b.dense_layers),
        n("hidden", c.hidden, b.hidden),
        n("vocabulary", c.vocab, b.vocab),
        n("context", c.context, b.context),
        n("heads", c.heads, b.heads),
        n("nope width", c.nope, b.nope),
        n("rope width", c.rope, b.rope),
        n("value width", c.v_head, b.v_head),
        n("q latent", c.q_lora, b.q_lora),
        n("kv latent", c.kv_lora, b.kv_lora),
        n("dense ffn", c.ffn, b.ffn),
        n("expert ffn", c.expert_ffn, b.expert_ffn),
        n("experts", c.experts, b.experts),
        n("experts per token", c.experts_used, b.experts_used),
        n("shared experts", c.shared_experts, b.shared_experts),
        n("expert groups", c.groups, b.groups),
        n("expert groups used", c.groups_used, b.groups_used),
        pair("gating", c.gating.name().into(), b.gating.name().into()),
        pair("normalised weights", c.expert_norm.to_string(), b.expert_norm.to_string()),
        f("expert scale", c.expert_scale, b.expert_scale),
        n("indexer heads", c.index_heads, b.index_heads),
        n("indexer width", c.index_dim, b.index_dim),
        n("indexer top-k", c.top_k, b.top_k),
        pair("full indexer layers", indexer(c), indexer(b)),
        pair("rope base", format!("{:e}", c.rope_base), format!("{:e}", b.rope_base)),
        f("RMSNorm eps", c.rms_eps, b.rms_eps),
        f("q_a/kv_a norm eps", c.latent_eps, b.latent_eps),
        f("indexer LayerNorm eps", c.index_eps, b.index_eps),
    ]
}
