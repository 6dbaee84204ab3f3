//! The numbers of the metadata, read twice: by the engine and by the reference, independently. And, against a baseline,
//! every number that differs, by its key.

use lockstep_reference::config::{self as reference, RefConfig, RopeStyle};

use crate::checkpoint::Checkpoint;
use crate::checkpoint::oracle::Raw;
use crate::model::Config;
use crate::report::{Check, Verdict};
use crate::verify::reference_run::own_eps;

type Read<T> = Box<dyn Fn(&T) -> String>;

/// One number, as text that is equal exactly when the numbers are.
struct Number {
    name: &'static str,
    engine: Read<Checkpoint>,
    /// `None` where the reference does not know it.
    reference: Option<Read<RefConfig>>,
}

/// A check per number on which the two readings differ, or one that says that all agree; and how many were compared.
pub(super) fn readings(checkpoint: &Checkpoint) -> (Vec<Check>, usize) {
    let c = checkpoint.config();
    let r = match RefConfig::from_raw(&Raw(checkpoint.source()), own_eps(checkpoint)) {
        Ok(r) => r,
        Err(e) => return (vec![Check::exact("config", false, format!("CONFIG: the reference refuses it: {e}"))], 1),
    };
    let (mut checks, mut compared) = (Vec::new(), 0);
    for Number { name, engine, reference } in numbers() {
        let Some(reference) = reference else { continue };
        let (left, right) = (engine(checkpoint), reference(&r));
        compared += 1;
        if left != right {
            let source = key(c, name).map_or(String::new(), |key| format!(" (from {key})"));
            let detail = format!("CONFIG: the engine reads {left}, the reference {right}{source}");
            checks.push(Check::exact(name, false, detail));
        }
    }
    if checks.is_empty() {
        let detail = format!("two independent readings agree on all {compared} numbers");
        checks.push(Check::exact("config", true, detail));
    }
    (checks, compared)
}

/// Names of what the engine cannot read otherwise, so that no two files differ in it.
const FIXED: [&str; 2] = ["rope pairs adjacent", "indexer's too"];

#[rustfmt::skip]
fn numbers() -> Vec<Number> {
    fn text<E: ToString + 'static, R: ToString + 'static>(
        name: &'static str,
        engine: fn(&Config) -> E,
        reference: fn(&RefConfig) -> R,
    ) -> Number {
        let reference: Read<RefConfig> = Box::new(move |r| reference(r).to_string());
        Number { name, engine: Box::new(move |c| engine(c.config()).to_string()), reference: Some(reference) }
    }
    let n = text::<usize, usize>;
    // What engines hold as f32 is compared as f32.
    let f = |name, engine: fn(&Config) -> f32, reference: fn(&RefConfig) -> f64| Number {
        name,
        engine: Box::new(move |c| format!("{:e}", engine(c.config()))),
        reference: Some(Box::new(move |r| format!("{:e}", reference(r) as f32))),
    };
    fn indexer(full: impl Iterator<Item = bool>) -> String {
        full.map(|f| if f { 'F' } else { 'S' }).collect()
    }
    fn tied(yes: bool) -> &'static str {
        if yes { "tied to the embedding" } else { "a matrix of its own" }
    }
    fn style(s: RopeStyle) -> &'static str {
        if s == RopeStyle::Interleaved { "adjacent pairs" } else { "half-split" }
    }
    let gating = |r: &RefConfig| match r.gating {
        reference::Gating::Softmax => "softmax",
        reference::Gating::Sigmoid => "sigmoid",
        reference::Gating::SqrtSoftplus => "sqrt softplus",
    };
    vec![
        n("trunk layers", |c| c.layers, |r| r.layers),
        n("MTP blocks", |c| c.mtp_layers, |r| r.mtp_layers),
        n("dense layers", |c| c.dense_layers, |r| r.dense_layers),
        n("hidden", |c| c.hidden, |r| r.hidden),
        n("vocabulary", |c| c.vocab, |r| r.vocab),
        Number { reference: None, ..n("context", |c| c.context, |_| 0) },
        n("heads", |c| c.heads, |r| r.heads),
        n("nope width", |c| c.nope, |r| r.nope),
        n("rope width", |c| c.rope, |r| r.rope),
        n("value width", |c| c.v_head, |r| r.value),
        n("q latent", |c| c.q_lora, |r| r.q_rank),
        n("kv latent", |c| c.kv_lora, |r| r.kv_rank),
        n("dense ffn", |c| c.ffn, |r| r.ffn),
        n("expert ffn", |c| c.expert_ffn, |r| r.moe_ffn),
        n("experts", |c| c.experts, |r| r.experts),
        n("experts per token", |c| c.experts_used, |r| r.experts_used),
        n("shared experts", |c| c.shared_experts, |r| r.shared_experts),
        n("expert groups", |c| c.groups, |r| r.groups),
        n("expert groups used", |c| c.groups_used, |r| r.groups_used),
        text("gating", |c| c.gating.name(), gating),
        text("normalised weights", |c| c.expert_norm, |r| r.normalise_weights),
        f("expert scale", |c| c.expert_scale, |r| r.routed_scale),
        n("indexer heads", |c| c.index_heads, |r| r.index_heads),
        n("indexer width", |c| c.index_dim, |r| r.index_dim),
        n("indexer top-k", |c| c.top_k, |r| r.top_k),
        text("full indexer layers", |c| indexer((0..c.layers).map(|l| c.is_full(l))),
             |r| indexer(r.index_full.iter().copied())),
        text("rope base", |c| format!("{:e}", c.rope_base), |r| format!("{:e}", r.rope_theta)),
        text(FIXED[0], |_| style(RopeStyle::Interleaved), |r| style(r.rope_style)),
        text(FIXED[1], |_| style(RopeStyle::Interleaved), |r| style(r.index_rope_style)),
        f("RMSNorm eps", |c| c.rms_eps, |r| r.eps),
        f("q_a/kv_a norm eps", |c| c.latent_eps, |r| r.latent_eps),
        f("indexer LayerNorm eps", |c| c.index_eps, |r| r.index_eps),
        Number {
            name: "output",
            engine: Box::new(|c| tied(c.is_tied()).into()),
            reference: Some(Box::new(|r| tied(r.tied_head).into())),
        },
    ]
}

/// The key that a number came from.
fn key<'a>(c: &'a Config, name: &str) -> Option<&'a str> {
    c.facts.iter().find(|f| f.name == name).map(|f| f.source.as_str())
}

/// A check per number that differs from the baseline's, or one that says that none does; and how many were compared.
pub(super) fn differences(checkpoint: &Checkpoint, baseline: &Checkpoint) -> (Vec<Check>, usize) {
    let (c, b) = (checkpoint.config(), baseline.config());
    let mut numbers = numbers();
    numbers.retain(|n| !FIXED.contains(&n.name));
    let mut checks = Vec::new();
    for Number { name, engine, .. } in &numbers {
        let (left, right) = (engine(checkpoint), engine(baseline));
        if left == right {
            continue;
        }
        let keys = format!("{}, baseline {}", key(c, name).unwrap_or("derived"), key(b, name).unwrap_or("derived"));
        let detail = format!("CONFIG: {left} here, {right} in the baseline ({keys})");
        let verdict = match *name {
            // transformers fixes 1e-6 whatever its config says, other engines take the file's: neither is wrong.
            "q_a/kv_a norm eps" if checkpoint.source().naming() != baseline.source().naming() => Verdict::Drift,
            "MTP blocks" | "context" => Verdict::Drift,
            _ => Verdict::Divergent,
        };
        let disputed = match (verdict, *name) {
            (Verdict::Drift, "q_a/kv_a norm eps") => ": references disagree here, so this is nobody's fault",
            _ => "",
        };
        checks.push(Check::new(format!("{name} = baseline"), verdict, format!("{detail}{disputed}")));
    }
    if checks.is_empty() {
        checks.push(Check::exact("config = baseline", true, format!("all {} numbers are equal", numbers.len())));
    }
    (checks, numbers.len())
}
