//! The probe points: every place of the forward pass where a value can be read or replaced, with its shape and how it
//! is spread over ranks.

use crate::model::Config;

/// How a point's values are spread over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Every rank holds all of it.
    Replicated,
    /// Each rank holds a range of this axis of a token's row (0 = slowest).
    Sharded {
        /// The axis.
        axis: usize,
    },
    /// Each rank holds an addend of the same shape.
    Partial,
}

impl Layout {
    /// The layout's name in dumps.
    pub fn name(self) -> &'static str {
        match self {
            Layout::Replicated => "replicated",
            Layout::Sharded { .. } => "sharded",
            Layout::Partial => "partial",
        }
    }
}

macro_rules! points {
    ($($variant:ident => $name:literal,)*) => {
        /// A probe point, without its layer.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(missing_docs)] // the names are their documentation
        pub enum Point { $($variant,)* }

        impl Point {
            /// Every point in the order of the forward pass.
            pub const ALL: &'static [Point] = &[$(Point::$variant,)*];

            /// The name, without the layer.
            pub fn name(self) -> &'static str {
                match self { $(Point::$variant => $name,)* }
            }
        }
    };
}

points! {
    Embed => "embed",
    Input => "input",
    AttnNorm => "attn.norm",
    QA => "attn.q_a",
    QANorm => "attn.q_a_norm",
    QRaw => "attn.q_raw",
    Q => "attn.q",
    KvA => "attn.kv_a",
    KvLatent => "attn.kv_latent",
    KRope => "attn.k_rope",
    QAbsorbed => "attn.q_absorbed",
    IndexQ => "attn.index_q",
    IndexK => "attn.index_k",
    IndexWeights => "attn.index_weights",
    IndexScores => "attn.index_scores",
    IndexTopk => "attn.index_topk",
    Latent => "attn.latent",
    Context => "attn.context",
    AttnOut => "attn.out",
    Residual => "residual",
    FfnNorm => "ffn.norm",
    RouterLogits => "ffn.router_logits",
    ChoiceScores => "ffn.choice_scores",
    ExpertIds => "ffn.expert_ids",
    ExpertWeights => "ffn.expert_weights",
    Hidden => "ffn.hidden",
    Routed => "ffn.routed",
    Shared => "ffn.shared",
    FfnOut => "ffn.out",
    Output => "output",
    FinalNorm => "final_norm",
    Logits => "logits",
}

impl Point {
    /// True for points outside the layers.
    pub fn is_global(self) -> bool {
        matches!(self, Point::Embed | Point::FinalNorm | Point::Logits)
    }

    /// True where the values are indices.
    pub fn is_choice(self) -> bool {
        matches!(self, Point::IndexTopk | Point::ExpertIds)
    }

    /// True for the points of the indexer.
    pub fn is_indexer(self) -> bool {
        matches!(self, Point::IndexQ | Point::IndexK | Point::IndexWeights | Point::IndexScores | Point::IndexTopk)
    }

    /// How the values are spread over ranks.
    pub fn layout(self) -> Layout {
        use Point::*;
        match self {
            QRaw | Q | QAbsorbed | Latent | Context => Layout::Sharded { axis: 0 },
            Logits => Layout::Sharded { axis: 0 },
            Hidden => Layout::Sharded { axis: 1 },
            Routed | Shared => Layout::Partial,
            _ => Layout::Replicated,
        }
    }

    /// Shape of one token's row on one of `tp` ranks, slowest axis first. The padded vocabulary is cut by the caller.
    pub fn shape(self, c: &Config, layer: usize, tp: usize) -> Vec<usize> {
        use Point::*;
        let heads = c.heads / tp;
        match self {
            Embed | Input | AttnNorm | AttnOut | Residual | FfnNorm | Routed | Shared | FfnOut | Output | FinalNorm => {
                vec![c.hidden]
            }
            QA | QANorm => vec![c.q_lora],
            QRaw | Q => vec![heads, c.qk_head()],
            KvA => vec![c.cache_width()],
            KvLatent => vec![c.kv_lora],
            KRope => vec![c.rope],
            QAbsorbed | Latent => vec![heads, c.kv_lora],
            IndexQ => vec![c.index_heads, c.index_dim],
            IndexK => vec![c.index_dim],
            IndexWeights => vec![c.index_heads],
            IndexScores => vec![0], // as wide as the longest sequence; the capture knows
            IndexTopk => vec![c.top_k],
            Context => vec![heads * c.v_head],
            RouterLogits | ChoiceScores => vec![c.experts],
            ExpertIds | ExpertWeights => vec![c.experts_used],
            Hidden if c.is_moe(layer) => vec![c.experts_used + usize::from(c.shared_experts > 0), c.expert_ffn / tp],
            Hidden => vec![1, c.ffn / tp],
            Logits => vec![c.padded_vocab(tp) / tp],
        }
    }

    /// The full name: `layers.3.attn.q_a`, or `logits`.
    pub fn full_name(self, layer: Option<usize>) -> String {
        match layer {
            Some(layer) => format!("layers.{layer}.{}", self.name()),
            None => self.name().into(),
        }
    }

    /// Takes a full name apart.
    pub fn parse(name: &str) -> Option<(Option<usize>, Point)> {
        let (layer, rest) = match name.strip_prefix("layers.").and_then(|r| r.split_once('.')) {
            Some((layer, rest)) => (Some(layer.parse().ok()?), rest),
            None => (None, name),
        };
        let point = *Point::ALL.iter().find(|p| p.name() == rest)?;
        (point.is_global() == layer.is_none()).then_some((layer, point))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for point in Point::ALL {
            let layer = (!point.is_global()).then_some(12);
            assert_eq!(Point::parse(&point.full_name(layer)), Some((layer, *point)));
        }
        for bad in ["layers.x.input", "layers.1.logits", "input", "layers.1.attn", ""] {
            assert_eq!(Point::parse(bad), None, "{bad}");
        }
    }
}
