//! Where in the forward pass: a block of it and a probe point in that block. This is the only vocabulary for "where": calls
//! of a program, captures, dumps, findings, faults and errors all name places, and everything that is to be known of a
//! point stands once, in the table of [`Point`].

use std::fmt;
use std::str::FromStr;

use super::config::Config;
use super::params::{Kind, Param, of_block};

/// A block of the forward pass. Sorts in the order of the pass: MTP layers start from what the trunk ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Block {
    /// Before the layers.
    Front,
    /// A trunk layer.
    Trunk(usize),
    /// Behind the layers.
    Back,
    /// A layer that predicts a token further ahead.
    Mtp(usize),
}

impl Block {
    /// The trunk layer, if it is one.
    pub fn layer(self) -> Option<usize> {
        if let Block::Trunk(layer) = self { Some(layer) } else { None }
    }

    /// The number under which the file keeps its parameters: MTP layers count on from the trunk.
    pub fn index(self, c: &Config) -> Option<usize> {
        match self {
            Block::Front | Block::Back => None,
            Block::Trunk(layer) => Some(layer),
            Block::Mtp(layer) => Some(c.layers + layer),
        }
    }
}

/// A place of the forward pass. Sorts in its order; prints and parses as in dumps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// The block.
    pub block: Block,
    /// The point in it.
    pub point: Point,
}

impl Place {
    /// Behind the embedding.
    pub const EMBED: Place = Place { block: Block::Front, point: Point::Embed };
    /// Behind the last norm.
    pub const FINAL_NORM: Place = Place { block: Block::Back, point: Point::FinalNorm };
    /// The logits.
    pub const LOGITS: Place = Place { block: Block::Back, point: Point::Logits };
    /// Where next tokens are chosen.
    pub const NEXT_TOKEN: Place = Place { block: Block::Back, point: Point::NextToken };

    /// A point of a trunk layer.
    pub const fn trunk(layer: usize, point: Point) -> Self {
        Place { block: Block::Trunk(layer), point }
    }

    /// The trunk layer; `None` outside the trunk.
    pub fn layer(self) -> Option<usize> {
        self.block.layer()
    }

    /// Another point of the same block.
    pub fn at(self, point: Point) -> Self {
        Place { point, ..self }
    }

    /// Shape of one token's row on one of `tp` ranks, slowest axis first. The padded vocabulary is cut by the caller.
    pub fn shape(self, c: &Config, tp: usize) -> Vec<usize> {
        use Point::*;
        let heads = c.heads / tp;
        let moe = self.block.index(c).is_some_and(|l| c.is_moe(l));
        match self.point {
            Embed | ENorm | HNorm | EhProj | Input | AttnNorm | AttnOut | Residual | FfnNorm | Routed | Shared
            | FfnOut | Output | FinalNorm => vec![c.hidden],
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
            Hidden if moe => vec![c.experts_used + usize::from(c.shared_experts > 0), c.expert_ffn / tp],
            Hidden => vec![1, c.ffn / tp],
            Logits => vec![c.padded_vocab(tp) / tp],
            NextToken => vec![1],
        }
    }

    /// The parameters that its operation multiplies with, or adds.
    pub fn params(self, c: &Config) -> Vec<Param> {
        let kinds = self.point.params().iter();
        match self.block.index(c) {
            None => kinds.map(|kind| Param { layer: None, kind: *kind }).collect(),
            Some(layer) => {
                let held = of_block(c, layer);
                kinds.map(|kind| Param { layer: Some(layer), kind: *kind }).filter(|p| held.contains(p)).collect()
            }
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.block {
            Block::Front | Block::Back => {}
            Block::Trunk(layer) => write!(f, "layers.{layer}.")?,
            Block::Mtp(layer) => write!(f, "mtp.{layer}.")?,
        }
        f.write_str(self.point.name())
    }
}

/// A text that names no place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} names no place of a forward pass, such as layers.3.attn.q_a or logits")]
pub struct NoSuchPlace(String);

impl FromStr for Place {
    type Err = NoSuchPlace;

    fn from_str(text: &str) -> Result<Self, NoSuchPlace> {
        let numbered = |prefix: &str| {
            let (number, name) = text.strip_prefix(prefix)?.split_once('.')?;
            Some((number.parse::<usize>().ok()?, name))
        };
        let found = if let Some((layer, name)) = numbered("layers.") {
            Point::named(name).map(|point| Place::trunk(layer, point))
        } else if let Some((layer, name)) = numbered("mtp.") {
            Point::named(name).map(|point| Place { block: Block::Mtp(layer), point })
        } else {
            let block = if text == Point::Embed.name() { Block::Front } else { Block::Back };
            Point::named(text).map(|point| Place { block, point })
        };
        // One spelling each: a number with a sign or zeros before it is another text.
        let exact = |place: &Place| place.point.is_in(place.block) && place.to_string() == text;
        found.filter(exact).ok_or_else(|| NoSuchPlace(text.into()))
    }
}

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
    /// The axis that is cut.
    pub fn axis(self) -> Option<usize> {
        if let Layout::Sharded { axis } = self { Some(axis) } else { None }
    }

    /// The layout's name in dumps.
    pub fn name(self) -> &'static str {
        match self {
            Layout::Replicated => "replicated",
            Layout::Sharded { .. } => "sharded",
            Layout::Partial => "partial",
        }
    }
}

/// Which blocks have a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The front alone.
    Front,
    /// Trunk layers alone: MTP layers attend to all keys.
    Trunk,
    /// Trunk and MTP layers.
    Layers,
    /// MTP layers alone.
    Mtp,
    /// The back alone.
    Back,
    /// The back and the end of MTP layers.
    Ends,
}

/// What a part of a point's row is, for saying where in a row something is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Channels side by side.
    Channel,
    /// Attention heads.
    Head,
    /// Heads of the indexer.
    IndexHead,
    /// Slots of chosen experts, in layers that have experts.
    Slot,
}

/// What else a point is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    /// Every token's row becomes a key of others, or is read by everything behind it.
    Key,
    /// The sum of all ranks' addends.
    Reduced,
    /// -inf marks what takes no part.
    Masked,
    /// A set of indices, chosen by the scores of another point.
    Choice(Point),
}

macro_rules! points {
    ($($point:ident $name:literal $scope:ident $layout:ident $(($axis:literal))? $unit:ident [$($mark:expr),*] [$($kind:ident),*])*) => {
        /// A probe point, without its block.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(missing_docs)] // the names are their documentation
        pub enum Point { $($point,)* }

        impl Point {
            /// Every point in the order of the forward pass.
            pub const ALL: &'static [Point] = &[$(Point::$point,)*];

            /// The name, without the block.
            pub fn name(self) -> &'static str {
                match self { $(Point::$point => $name,)* }
            }

            /// Which blocks have it.
            pub fn scope(self) -> Scope {
                match self { $(Point::$point => Scope::$scope,)* }
            }

            /// How the values are spread over ranks.
            pub fn layout(self) -> Layout {
                match self { $(Point::$point => Layout::$layout $({ axis: $axis })?,)* }
            }

            /// What a part of its row is.
            pub fn unit(self) -> Unit {
                match self { $(Point::$point => Unit::$unit,)* }
            }

            /// Kinds of parameters that make it; a block has those of its own list ([`Place::params`]).
            fn params(self) -> &'static [Kind] {
                match self { $(Point::$point => &[$(Kind::$kind),*],)* }
            }

            fn marks(self) -> &'static [Mark] {
                use Mark::*;
                match self { $(Point::$point => &[$($mark),*],)* }
            }
        }
    };
}

points! {
    // point      name                 scope  layout      unit      marks                       parameters
    Embed         "embed"              Front  Replicated  Channel   [Key, Reduced]              [TokenEmbd]
    ENorm         "enorm"              Mtp    Replicated  Channel   []                          [ENorm]
    HNorm         "hnorm"              Mtp    Replicated  Channel   []                          [HNorm]
    EhProj        "eh_proj"            Mtp    Replicated  Channel   []                          [EhProj]
    Input         "input"              Layers Replicated  Channel   []                          []
    AttnNorm      "attn.norm"          Layers Replicated  Channel   []                          [AttnNorm]
    QA            "attn.q_a"           Layers Replicated  Channel   []                          [QA]
    QANorm        "attn.q_a_norm"      Layers Replicated  Channel   []                          [QANorm]
    QRaw          "attn.q_raw"         Layers Sharded(0)  Head      []                          [QB]
    Q             "attn.q"             Layers Sharded(0)  Head      []                          []
    KvA           "attn.kv_a"          Layers Replicated  Channel   [Key]                       [KvA]
    KvLatent      "attn.kv_latent"     Layers Replicated  Channel   [Key]                       [KvANorm]
    KRope         "attn.k_rope"        Layers Replicated  Channel   [Key]                       []
    QAbsorbed     "attn.q_absorbed"    Layers Sharded(0)  Head      []                          [KB]
    IndexQ        "attn.index_q"       Trunk  Replicated  IndexHead []                          [IndexQB]
    IndexK        "attn.index_k"       Trunk  Replicated  Channel   [Key]                       [IndexK, IndexKNorm, IndexKNormBias]
    IndexWeights  "attn.index_weights" Trunk  Replicated  Channel   []                          [IndexProj]
    IndexScores   "attn.index_scores"  Trunk  Replicated  Channel   [Masked]                    []
    IndexTopk     "attn.index_topk"    Trunk  Replicated  Channel   [Choice(Point::IndexScores)] []
    Latent        "attn.latent"        Layers Sharded(0)  Head      []                          []
    Context       "attn.context"       Layers Sharded(0)  Head      []                          [VB]
    AttnOut       "attn.out"           Layers Replicated  Channel   [Reduced]                   [AttnOutput]
    Residual      "residual"           Layers Replicated  Channel   []                          []
    FfnNorm       "ffn.norm"           Layers Replicated  Channel   []                          [FfnNorm]
    RouterLogits  "ffn.router_logits"  Layers Replicated  Channel   []                          [Router]
    ChoiceScores  "ffn.choice_scores"  Layers Replicated  Channel   [Masked]                    [RouterBias]
    ExpertIds     "ffn.expert_ids"     Layers Replicated  Channel   [Choice(Point::ChoiceScores)] [RouterBias]
    ExpertWeights "ffn.expert_weights" Layers Replicated  Channel   []                          []
    Hidden        "ffn.hidden"         Layers Sharded(1)  Slot      []                          [FfnGate, FfnUp, GateExps, UpExps, GateShexp, UpShexp]
    Routed        "ffn.routed"         Layers Partial     Channel   []                          [DownExps]
    Shared        "ffn.shared"         Layers Partial     Channel   []                          [DownShexp]
    FfnOut        "ffn.out"            Layers Replicated  Channel   [Reduced]                   [FfnDown]
    Output        "output"             Layers Replicated  Channel   []                          []
    FinalNorm     "final_norm"         Ends   Replicated  Channel   []                          [OutputNorm]
    Logits        "logits"             Ends   Sharded(0)  Channel   [Masked]                    [Output]
    NextToken     "next_token"         Back   Replicated  Channel   []                          []
}

impl Point {
    /// The point of that name.
    pub fn named(name: &str) -> Option<Self> {
        Point::ALL.iter().copied().find(|p| p.name() == name)
    }

    /// True if blocks of this kind can have it.
    pub fn is_in(self, block: Block) -> bool {
        match self.scope() {
            Scope::Front => block == Block::Front,
            Scope::Trunk => matches!(block, Block::Trunk(_)),
            Scope::Layers => matches!(block, Block::Trunk(_) | Block::Mtp(_)),
            Scope::Mtp => matches!(block, Block::Mtp(_)),
            Scope::Back => block == Block::Back,
            Scope::Ends => matches!(block, Block::Back | Block::Mtp(_)),
        }
    }

    /// True where the values are indices, chosen by [`Point::scores`].
    pub fn is_choice(self) -> bool {
        self.scores().is_some()
    }

    /// The scores that a choice is made from.
    pub fn scores(self) -> Option<Point> {
        let scores = |mark: &Mark| if let Mark::Choice(scores) = mark { Some(*scores) } else { None };
        self.marks().iter().find_map(scores)
    }

    /// The choice that is made from scores.
    pub fn choice(self) -> Option<Point> {
        Point::ALL.iter().copied().find(|p| p.scores() == Some(self))
    }

    /// True for the points of the indexer: the trunk's alone, since MTP layers attend to all keys.
    pub fn is_indexer(self) -> bool {
        self.scope() == Scope::Trunk
    }

    /// True where every token's row is read by others.
    pub fn is_key(self) -> bool {
        self.marks().contains(&Mark::Key)
    }

    /// True where all ranks hold the sum of their addends.
    pub fn is_reduced(self) -> bool {
        self.marks().contains(&Mark::Reduced)
    }

    /// True where -inf marks what takes no part.
    pub fn is_masked(self) -> bool {
        self.marks().contains(&Mark::Masked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for point in Point::ALL.iter().copied() {
            for block in [Block::Front, Block::Trunk(12), Block::Back, Block::Mtp(0)] {
                let place = Place { block, point };
                let parsed = place.to_string().parse();
                if point.is_in(block) {
                    assert_eq!(parsed, Ok(place));
                } else {
                    assert_ne!(parsed, Ok(place), "{place:?}");
                }
            }
        }
        for bad in [
            "layers.x.input",
            "layers.1.logits",
            "input",
            "layers.1.attn",
            "",
            "layers.+1.input",
            "layers.01.input",
            "mtp.0.embed",
        ] {
            assert!(bad.parse::<Place>().is_err(), "{bad}");
        }
    }

    #[test]
    fn places_sort_in_the_order_of_the_forward_pass() {
        let order = [
            "embed",
            "layers.0.attn.norm",
            "layers.0.output",
            "layers.1.input",
            "layers.10.input",
            "final_norm",
            "logits",
            "mtp.0.enorm",
            "mtp.0.logits",
        ];
        let mut places: Vec<Place> = order.iter().rev().map(|name| name.parse().expect("a place")).collect();
        places.sort();
        assert_eq!(places.iter().map(Place::to_string).collect::<Vec<_>>(), order);
    }

    #[test]
    fn choices_have_scores_and_scores_their_choice() {
        assert_eq!(Point::IndexTopk.scores(), Some(Point::IndexScores));
        assert_eq!(Point::ChoiceScores.choice(), Some(Point::ExpertIds));
        assert_eq!(Point::Logits.choice(), None);
    }
}
