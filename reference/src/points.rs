//! The places of the forward pass that have a name: which exist in a given model and run, what each row of them holds,
//! and which of them an operation reads. The names are the ones that dumps use; row shapes are what the oracle emits
//! and expects.

use crate::config::RefConfig;

/// How the model is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Attend to every earlier key instead of the indexer's choice; the indexer does not run.
    pub dense: bool,
    /// Run the first MTP layer after the trunk (it always attends densely).
    pub mtp: bool,
}

macro_rules! ops {
    ($c:ident $tokens:ident $($op:ident $name:literal [$($axis:expr),*] [$($input:ident),*])*) => {
        /// A point without its site, or the operation behind it.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[allow(missing_docs)] // the names are their documentation
        pub enum Op { $($op),* }

        impl Op {
            /// In the order of the forward pass.
            const ALL: &[Op] = &[$(Op::$op),*];

            /// The name in dumps, without what says the site.
            pub fn name(self) -> &'static str {
                match self { $(Op::$op => $name),* }
            }

            fn row(self, $c: &RefConfig, $tokens: usize) -> Vec<usize> {
                match self { $(Op::$op => vec![$($axis),*]),* }
            }

            fn inputs(self) -> &'static [Op] {
                match self { $(Op::$op => &[$(Op::$input),*]),* }
            }
        }
    };
}

// As in a layer without experts, and of inputs only those from the same site; `row_shape` and `inputs` know the rest.
ops! { c tokens
    // point      name                 row                              inputs
    Ids           "ids"                []                               []
    Embed         "embed"              [c.hidden]                       [Ids]
    ENorm         "enorm"              [c.hidden]                       []
    HNorm         "hnorm"              [c.hidden]                       []
    EhProj        "eh_proj"            [c.hidden]                       [ENorm, HNorm]
    Input         "input"              [c.hidden]                       []
    AttnNorm      "attn.norm"          [c.hidden]                       [Input]
    QA            "attn.q_a"           [c.q_rank]                       [AttnNorm]
    QANorm        "attn.q_a_norm"      [c.q_rank]                       [QA]
    QRaw          "attn.q_raw"         [c.heads, c.nope + c.rope]       [QANorm]
    Q             "attn.q"             [c.heads, c.nope + c.rope]       [QRaw]
    KvA           "attn.kv_a"          [c.kv_rank + c.rope]             [AttnNorm]
    KvLatent      "attn.kv_latent"     [c.kv_rank]                      [KvA]
    KRope         "attn.k_rope"        [c.rope]                         [KvA]
    QAbsorbed     "attn.q_absorbed"    [c.heads, c.kv_rank]             [QRaw]
    IndexQ        "attn.index_q"       [c.index_heads, c.index_dim]     [QANorm]
    IndexK        "attn.index_k"       [c.index_dim]                    [AttnNorm]
    IndexWeights  "attn.index_weights" [c.index_heads]                  [AttnNorm]
    IndexScores   "attn.index_scores"  [tokens]                         [IndexQ, IndexK, IndexWeights]
    IndexTopk     "attn.index_topk"    [c.top_k]                        [IndexScores]
    Latent        "attn.latent"        [c.heads, c.kv_rank]             [QAbsorbed, Q, KvLatent, KRope]
    Context       "attn.context"       [c.heads, c.value]               [Latent]
    AttnOut       "attn.out"           [c.hidden]                       [Context]
    Residual      "residual"           [c.hidden]                       [Input, AttnOut]
    FfnNorm       "ffn.norm"           [c.hidden]                       [Residual]
    RouterLogits  "ffn.router_logits"  [c.experts]                      [FfnNorm]
    ChoiceScores  "ffn.choice_scores"  [c.experts]                      [RouterLogits]
    ExpertIds     "ffn.expert_ids"     [c.experts_used]                 [ChoiceScores]
    ExpertWeights "ffn.expert_weights" [c.experts_used]                 [RouterLogits, ExpertIds]
    Hidden        "ffn.hidden"         [c.ffn]                          [FfnNorm]
    Routed        "ffn.routed"         [c.hidden]                       [Hidden, ExpertWeights, ExpertIds]
    Shared        "ffn.shared"         [c.hidden]                       [Hidden]
    FfnOut        "ffn.out"            [c.hidden]                       [Hidden]
    Output        "output"             [c.hidden]                       [Residual, FfnOut]
    FinalNorm     "final_norm"         [c.hidden]                       [Output]
    Logits        "logits"             [c.vocab]                        [FinalNorm]
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
    /// The name in dumps of this site's `op`.
    pub fn name(self, op: Op) -> String {
        let op = op.name();
        match self {
            Site::Model => op.to_string(),
            Site::Trunk(n) => format!("layers.{n}.{op}"),
            Site::Mtp => format!("mtp.0.{op}"),
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

    /// True for a layer with experts.
    pub fn is_moe(self, c: &RefConfig) -> bool {
        self.layer(c).is_some_and(|n| c.is_moe(n))
    }

    /// The point whose rows enter this site: for a layer, its input; for the model's end, the input of the last norm.
    pub(crate) fn entry(self, c: &RefConfig) -> (Site, Op) {
        match self {
            Site::Model => (Site::Trunk(c.layers - 1), Op::Output),
            Site::Trunk(0) => (Site::Model, Op::Embed),
            Site::Trunk(n) => (Site::Trunk(n - 1), Op::Output),
            Site::Mtp => (Site::Mtp, Op::EhProj),
        }
    }

    /// The site whose indexer chooses the keys that this one attends to; `None` where it attends to all.
    pub(crate) fn chooser(self, c: &RefConfig, options: Options) -> Option<Site> {
        match self {
            Site::Trunk(n) if !options.dense => Some(Site::Trunk(c.index_source(n))),
            _ => None,
        }
    }

    fn has(self, c: &RefConfig, options: Options, op: Op) -> bool {
        use Op::*;
        match op {
            Ids => false, // given, not computed
            Embed => self == Site::Model,
            ENorm | HNorm | EhProj => self == Site::Mtp,
            IndexQ | IndexK | IndexWeights | IndexScores | IndexTopk => {
                matches!(self, Site::Trunk(n) if !options.dense && c.index_full[n])
            }
            RouterLogits | ChoiceScores | ExpertIds | ExpertWeights | Routed | Shared => self.is_moe(c),
            FinalNorm | Logits => !matches!(self, Site::Trunk(_)),
            Input | AttnNorm | QA | QANorm | QRaw | Q | KvA | KvLatent | KRope | QAbsorbed | Latent | Context
            | AttnOut | Residual | FfnNorm | Hidden | FfnOut | Output => self != Site::Model,
        }
    }
}

/// All points of a run, in the order in which the forward pass emits them.
pub fn points(c: &RefConfig, options: Options) -> Vec<String> {
    let named = |site: Site| Op::ALL.iter().filter(move |&&op| site.has(c, options, op)).map(move |&op| site.name(op));
    let mut all = vec![Site::Model.name(Op::Embed)];
    all.extend((0..c.layers).flat_map(|n| named(Site::Trunk(n))));
    all.extend([Op::FinalNorm, Op::Logits].map(|op| Site::Model.name(op)));
    if options.mtp && c.mtp_layers > 0 {
        all.extend(named(Site::Mtp));
    }
    all
}

/// The site of a point and its operation, or `None` where this model and run have no such point.
pub fn parse(c: &RefConfig, options: Options, point: &str) -> Option<(Site, Op)> {
    let (site, name) = if let Some(name) = point.strip_prefix("mtp.0.") {
        (options.mtp && c.mtp_layers > 0).then_some((Site::Mtp, name))?
    } else if let Some(rest) = point.strip_prefix("layers.") {
        let (number, name) = rest.split_once('.')?;
        (Site::Trunk(number.parse().ok().filter(|&n| n < c.layers)?), name)
    } else {
        (Site::Model, point)
    };
    let op = *Op::ALL.iter().find(|op| op.name() == name)?;
    site.has(c, options, op).then_some((site, op))
}

/// The axes of one row (token) of a point, for `tokens` tokens in the run. The shared expert's inner activations follow
/// the chosen experts' in `ffn.hidden`; several shared experts take one slot each, in the order of their columns.
pub fn row_shape(c: &RefConfig, site: Site, op: Op, tokens: usize) -> Vec<usize> {
    match op {
        Op::Hidden if site.is_moe(c) => vec![c.experts_used + c.shared_experts, c.moe_ffn],
        _ => op.row(c, tokens),
    }
}

/// The points that the operation behind `point` reads, in the order of its arguments; `ids` stands for the token ids.
/// `None` where this model and run have no such point.
pub fn inputs_of(c: &RefConfig, options: Options, point: &str) -> Option<Vec<String>> {
    let (site, op) = parse(c, options, point)?;
    Some(inputs(c, options, site, op))
}

/// The points from which per-rank partial sums of `point` are recomputed: as [`inputs_of`], but the sum of experts goes
/// back to their inner activations. `None` where `point` is not a sum over ranks.
pub fn partial_inputs_of(c: &RefConfig, options: Options, point: &str) -> Option<Vec<String>> {
    let (site, op) = parse(c, options, point)?;
    match op {
        Op::FfnOut if site.is_moe(c) => Some(inputs(c, options, site, Op::Routed)),
        Op::Embed | Op::AttnOut | Op::FfnOut | Op::Routed | Op::Shared => Some(inputs(c, options, site, op)),
        _ => None,
    }
}

fn inputs(c: &RefConfig, options: Options, site: Site, op: Op) -> Vec<String> {
    let own = |ops: &[Op]| ops.iter().map(|&op| (site, op)).collect();
    let mut inputs: Vec<(Site, Op)> = match (op, site) {
        (Op::ENorm, _) => vec![(Site::Model, Op::Embed)],
        (Op::HNorm, _) => vec![(Site::Model, Op::FinalNorm)],
        (Op::Input, _) | (Op::FinalNorm, Site::Model) => vec![site.entry(c)],
        (Op::Hidden, _) if site.is_moe(c) => own(&[Op::FfnNorm, Op::ExpertIds]),
        (Op::FfnOut, _) if site.is_moe(c) => own(&[Op::Routed, Op::Shared]),
        _ => own(op.inputs()),
    };
    if op == Op::Latent {
        inputs.extend(site.chooser(c, options).map(|chooser| (chooser, Op::IndexTopk)));
    }
    inputs.into_iter().map(|(site, op)| site.name(op)).collect()
}
