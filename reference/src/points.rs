//! The places of the forward pass that have a name: which exist in a given model and run, what each row of them holds,
//! and which of them an operation reads. The names are the ones that dumps use; row shapes are what the oracle emits
//! and expects.

use crate::config::RefConfig;
use crate::variant::Variant;

/// How the model is run.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RefOptions {
    /// Attend to every earlier key instead of the indexer's choice; the indexer does not run.
    pub dense: bool,
    /// Run the first MTP layer after the trunk (it always attends densely).
    pub mtp: bool,
    /// Keys and values of every head are made from the latents before attention, as engines do that do not absorb.
    pub expanded: bool,
    /// A mistake that replays make; whole runs make none.
    pub variant: Option<Variant>,
}

/// Where a point lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Site {
    /// Before or after the layers.
    Model,
    /// In a trunk layer.
    Trunk(usize),
    /// In the first MTP layer.
    Mtp,
}

impl Site {
    /// What the names of this site's points begin with.
    pub fn prefix(self) -> String {
        match self {
            Site::Model => String::new(),
            Site::Trunk(n) => format!("layers.{n}."),
            Site::Mtp => "mtp.0.".to_string(),
        }
    }

    /// The layer under which this site's weights are found.
    pub fn layer(self, c: &RefConfig) -> Option<usize> {
        match self {
            Site::Model => None,
            Site::Trunk(n) => Some(n),
            Site::Mtp => Some(c.layers),
        }
    }

    /// The point names of this site, without prefix, in the order of the forward pass.
    fn ops(self, c: &RefConfig, options: RefOptions) -> Vec<&'static str> {
        let Some(layer) = self.layer(c) else { return vec!["embed", "final_norm", "logits"] };
        let mut ops = vec!["input", "attn.norm", "attn.q_a", "attn.q_a_norm", "attn.q_raw", "attn.q", "attn.kv_a"];
        ops.extend(["attn.kv_latent", "attn.k_rope"]);
        ops.extend((!options.expanded).then_some("attn.q_absorbed"));
        if self != Site::Mtp && !options.dense && c.index_full[layer] {
            ops.extend(["attn.index_q", "attn.index_k", "attn.index_weights", "attn.index_scores", "attn.index_topk"]);
        }
        ops.extend((!options.expanded).then_some("attn.latent"));
        ops.extend(["attn.context", "attn.out", "residual", "ffn.norm"]);
        if c.is_moe(layer) {
            ops.extend(["ffn.router_logits", "ffn.choice_scores", "ffn.expert_ids", "ffn.expert_weights"]);
            ops.extend(["ffn.hidden", "ffn.routed", "ffn.shared"]);
        } else {
            ops.push("ffn.hidden");
        }
        ops.extend(["ffn.out", "output"]);
        if self == Site::Mtp {
            ops.splice(0..0, ["enorm", "hnorm", "eh_proj"]);
            ops.extend(["final_norm", "logits"]);
        }
        ops
    }
}

/// All points of a run, in the order in which the forward pass emits them.
pub fn points(c: &RefConfig, options: RefOptions) -> Vec<String> {
    let named = |site: Site| site.ops(c, options).into_iter().map(move |op| format!("{}{op}", site.prefix()));
    let mut all = vec!["embed".to_string()];
    all.extend((0..c.layers).flat_map(|n| named(Site::Trunk(n))));
    all.extend(["final_norm".to_string(), "logits".to_string()]);
    if options.mtp && c.mtp_layers > 0 {
        all.extend(named(Site::Mtp));
    }
    all
}

/// The site of a point and its name there, or `None` where this model and run have no such point.
pub fn parse<'a>(c: &RefConfig, options: RefOptions, point: &'a str) -> Option<(Site, &'a str)> {
    let (site, op) = if let Some(op) = point.strip_prefix("mtp.0.") {
        (options.mtp && c.mtp_layers > 0).then_some((Site::Mtp, op))?
    } else if let Some(rest) = point.strip_prefix("layers.") {
        let (number, op) = rest.split_once('.')?;
        (Site::Trunk(number.parse().ok().filter(|&n| n < c.layers)?), op)
    } else {
        (Site::Model, point)
    };
    site.ops(c, options).contains(&op).then_some((site, op))
}

/// The axes of one row (token) of a point, for `tokens` tokens in the run. The shared expert's inner activations follow
/// the chosen experts' in `ffn.hidden`; several shared experts take one slot each, in the order of their columns.
pub fn row_shape(c: &RefConfig, site: Site, op: &str, tokens: usize) -> Vec<usize> {
    let moe = site.layer(c).is_some_and(|layer| c.is_moe(layer));
    match op {
        "logits" => vec![c.vocab],
        "attn.q_a" | "attn.q_a_norm" => vec![c.q_rank],
        "attn.q_raw" | "attn.q" => vec![c.heads, c.nope + c.rope],
        "attn.kv_a" => vec![c.kv_rank + c.rope],
        "attn.kv_latent" => vec![c.kv_rank],
        "attn.k_rope" => vec![c.rope],
        "attn.q_absorbed" | "attn.latent" => vec![c.heads, c.kv_rank],
        "attn.index_q" => vec![c.index_heads, c.index_dim],
        "attn.index_k" => vec![c.index_dim],
        "attn.index_weights" => vec![c.index_heads],
        "attn.index_scores" => vec![tokens],
        "attn.index_topk" => vec![c.top_k],
        "attn.context" => vec![c.heads, c.value],
        "ffn.router_logits" | "ffn.choice_scores" => vec![c.experts],
        "ffn.expert_ids" | "ffn.expert_weights" => vec![c.experts_used],
        "ffn.hidden" if moe => vec![c.experts_used + c.shared_experts, c.moe_ffn],
        "ffn.hidden" => vec![c.ffn],
        "ids" => vec![],
        _ => vec![c.hidden],
    }
}

/// The points that the operation behind `point` reads, in the order of its arguments; `ids` stands for the token ids.
/// `None` where this model and run have no such point.
pub fn inputs_of(c: &RefConfig, options: RefOptions, point: &str) -> Option<Vec<String>> {
    let (site, op) = parse(c, options, point)?;
    let moe = site.layer(c).is_some_and(|layer| c.is_moe(layer));
    let global = |name: &str| Some(vec![name.to_string()]);
    let names: &[&str] = match op {
        "embed" => return global("ids"),
        "enorm" => return global("embed"),
        "hnorm" => return global("final_norm"),
        "eh_proj" => &["enorm", "hnorm"],
        "input" => match site {
            Site::Mtp => &["eh_proj"],
            Site::Trunk(n) if n > 0 => return global(&format!("layers.{}.output", n - 1)),
            _ => return global("embed"),
        },
        "attn.norm" => &["input"],
        "attn.q_a" | "attn.kv_a" | "attn.index_k" | "attn.index_weights" => &["attn.norm"],
        "attn.q_a_norm" => &["attn.q_a"],
        "attn.q_raw" | "attn.index_q" => &["attn.q_a_norm"],
        "attn.q" | "attn.q_absorbed" => &["attn.q_raw"],
        "attn.kv_latent" | "attn.k_rope" => &["attn.kv_a"],
        "attn.index_scores" => &["attn.index_q", "attn.index_k", "attn.index_weights"],
        "attn.index_topk" => &["attn.index_scores"],
        "attn.context" if !options.expanded => &["attn.latent"],
        "attn.latent" | "attn.context" => {
            let absorbed = (!options.expanded).then_some("attn.q_absorbed");
            let mut names: Vec<String> = (absorbed.into_iter().chain(["attn.q", "attn.kv_latent", "attn.k_rope"]))
                .map(|name| format!("{}{name}", site.prefix()))
                .collect();
            if let (Site::Trunk(n), false) = (site, options.dense) {
                names.push(format!("layers.{}.attn.index_topk", c.index_source(n)));
            }
            return Some(names);
        }
        "attn.out" => &["attn.context"],
        "residual" => &["input", "attn.out"],
        "ffn.norm" => &["residual"],
        "ffn.router_logits" => &["ffn.norm"],
        "ffn.choice_scores" => &["ffn.router_logits"],
        "ffn.expert_ids" => &["ffn.choice_scores"],
        "ffn.expert_weights" => &["ffn.router_logits", "ffn.expert_ids"],
        "ffn.hidden" if moe => &["ffn.norm", "ffn.expert_ids"],
        "ffn.hidden" => &["ffn.norm"],
        "ffn.routed" => &["ffn.hidden", "ffn.expert_weights", "ffn.expert_ids"],
        "ffn.shared" => &["ffn.hidden"],
        "ffn.out" if moe => &["ffn.routed", "ffn.shared"],
        "ffn.out" => &["ffn.hidden"],
        "output" => &["residual", "ffn.out"],
        "final_norm" => match site {
            Site::Model => return global(&format!("layers.{}.output", c.layers - 1)),
            _ => &["output"],
        },
        "logits" => &["final_norm"],
        _ => return None,
    };
    Some(names.iter().map(|name| format!("{}{name}", site.prefix())).collect())
}

/// The points from which per-rank partial sums of `point` are recomputed: as [`inputs_of`], but the sum of experts goes
/// back to their inner activations. `None` where `point` is not a sum over ranks.
pub fn partial_inputs_of(c: &RefConfig, options: RefOptions, point: &str) -> Option<Vec<String>> {
    let (site, op) = parse(c, options, point)?;
    match op {
        "ffn.out" if site.layer(c).is_some_and(|layer| c.is_moe(layer)) => {
            inputs_of(c, options, &format!("{}ffn.routed", site.prefix()))
        }
        "embed" | "attn.out" | "ffn.out" | "ffn.routed" | "ffn.shared" => inputs_of(c, options, point),
        _ => None,
    }
}
