//! One operation of a forward pass as data: which, where, over what. Programs are lists of these ([`super::program`]), a
//! device runs them one by one, and whoever stands around a device sees each of them ([`super::around`]).

use std::ops::Range;

use self::Operand::{Choices, Context, Indices, Inputs, Keys, Values};
use crate::model::{Config, Gating, Place};

macro_rules! ids {
    ($($(#[$about:meta])* $name:ident)*) => {
        $($(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub usize);)*
    };
}

ids! {
    /// Activations `[rows][width]` in f32, or a vector: place in [`Stores::bufs`](super::program::Stores::bufs).
    BufId
    /// Indices `[rows][width]`, -1 where there is none: place in [`Stores::indices`](super::program::Stores::indices).
    IndexId
    /// Rows per token position, by layer and page: place in [`Stores::caches`](super::program::Stores::caches).
    CacheId
    /// A resident (fused) parameter: place in [`Stores::weights`](super::program::Stores::weights).
    WeightId
}

/// Columns of a buffer, in heads: head `h` of a row starts at `start + h * stride` and is `width` wide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct View {
    /// The buffer.
    pub buf: BufId,
    /// First value of head 0.
    pub start: usize,
    /// Values per head.
    pub width: usize,
    /// Heads.
    pub heads: usize,
    /// From one head to the next.
    pub stride: usize,
}

impl View {
    /// `width` columns from `start` on, as one head.
    pub fn cols(buf: BufId, start: usize, width: usize) -> Self {
        View { buf, start, width, heads: 1, stride: width }
    }

    /// `heads` heads of `width` columns side by side, from `start` on.
    pub fn heads(buf: BufId, start: usize, width: usize, heads: usize) -> Self {
        View { buf, start, width, heads, stride: width }
    }

    /// `width` values of every head, from value `from` of each on.
    pub fn part(self, from: usize, width: usize) -> Self {
        View { start: self.start + from, width, ..self }
    }

    /// Values of a row.
    pub fn len(&self) -> usize {
        self.heads * self.width
    }

    /// True without values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The column behind its last.
    pub fn end(&self) -> usize {
        self.start + self.heads.saturating_sub(1) * self.stride + self.width
    }

    /// The columns of each head.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let View { start, width, stride, .. } = *self;
        (0..self.heads).map(move |h| start + h * stride..start + h * stride + width)
    }

    /// True if the two share a column.
    pub fn meets(&self, other: &View) -> bool {
        let apart = self.buf != other.buf || self.start >= other.end() || other.start >= self.end();
        !apart && self.ranges().any(|a| other.ranges().any(|b| a.start < b.end && b.start < a.end))
    }

    /// True if its columns are a range.
    pub fn is_dense(&self) -> bool {
        self.heads <= 1 || self.stride == self.width
    }
}

/// What the activation operand of a product is rounded to before it is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// Not at all: f32.
    Exact,
    /// bf16, to nearest, ties to even.
    Bf16,
}

/// How router logits become chosen experts and their weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Router {
    /// Routed experts.
    pub experts: usize,
    /// Of them used per token.
    pub used: usize,
    /// Groups that experts are chosen by.
    pub groups: usize,
    /// Groups kept.
    pub groups_used: usize,
    /// Scores.
    pub gating: Gating,
    /// Divide the chosen weights by their sum.
    pub normalise: bool,
    /// Factor on the weights.
    pub factor: f32,
}

impl From<&Config> for Router {
    fn from(c: &Config) -> Self {
        Router {
            experts: c.experts,
            used: c.experts_used,
            groups: c.groups,
            groups_used: c.groups_used,
            gating: c.gating,
            normalise: c.expert_norm,
            factor: c.expert_scale,
        }
    }
}

/// Which rows of the step a call runs over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rows {
    /// All tokens.
    Tokens,
    /// The rows whose logits are wanted.
    Logits,
}

/// A call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// The place that it produces, or helps to.
    pub at: Place,
    /// What is done.
    pub op: Op,
    /// To which rows.
    pub rows: Rows,
}

impl Call {
    /// The name under which its time is kept.
    pub fn label(&self) -> &'static str {
        if let Op::AllReduce { .. } = self.op { ALL_REDUCE } else { self.at.point.name() }
    }
}

/// The name under which the time of sums over ranks is kept.
pub const ALL_REDUCE: &str = "all-reduce";

macro_rules! ops {
    ($($(#[$about:meta])* $op:ident { $($field:ident: $ty:ty),* } [$($read:expr),*] => [$($write:expr),*])*) => {
        /// The operations. `x`, `y` and the like are what is read, `out` what is written, `w` and `b` parameters.
        #[derive(Clone, Copy, Debug, PartialEq)]
        #[allow(missing_docs)] // the fields are said above, and in each operation's own words
        pub enum Op { $($(#[$about])* $op { $($field: $ty),* },)* }

        #[allow(unused_variables)] // an operation's list uses those that it names
        impl Op {
            /// Every name.
            pub const NAMES: &[&str] = &[$(stringify!($op)),*];

            /// Its name.
            pub fn name(&self) -> &'static str {
                match self { $(Op::$op { .. } => stringify!($op),)* }
            }

            /// What it reads of what changes: parameters are not among it.
            pub fn reads(&self) -> Vec<Operand> {
                match *self { $(Op::$op { $($field),* } => [$(Option::<Operand>::from($read)),*].into_iter().flatten().collect(),)* }
            }

            /// What it writes.
            pub fn writes(&self) -> Vec<Operand> {
                match *self { $(Op::$op { $($field),* } => [$(Option::<Operand>::from($write)),*].into_iter().flatten().collect(),)* }
            }
        }
    };
}

// Each with what it reads => what it writes.
ops! {
    /// Rows `first_row..` of a vocabulary-parallel embedding; ids of other ranks give zeros.
    Embed { table: WeightId, first_row: usize, out: View } [Inputs] => [Values(out)]
    /// `out = x W^T`, all parts of `w` side by side; of a stack, matrix `h` for head `h`.
    Product { w: WeightId, x: View, out: View, operand: Rounding } [Values(x)] => [Values(out)]
    /// `out = w * x / sqrt(mean(x^2) + eps)`.
    RmsNorm { x: View, w: BufId, eps: f32, out: View } [Values(x)] => [Values(out)]
    /// `x = w * (x - mean) / sqrt(variance + eps) + b`.
    LayerNorm { x: View, w: BufId, b: BufId, eps: f32 } [Values(x)] => [Values(x)]
    /// Rotates adjacent pairs of every head by position, in place.
    Rope { x: View, base: f64 } [Values(x), Inputs] => [Values(x)]
    /// `x *= factor`.
    Scale { x: View, factor: f32 } [Values(x)] => [Values(x)]
    /// `out = x`.
    Copy { x: View, out: View } [Values(x)] => [Values(out)]
    /// The rows whose logits are wanted, in order.
    GatherRows { x: View, out: View } [Values(x), Inputs] => [Values(out)]
    /// `x += y`.
    Add { x: View, y: View } [Values(x), Values(y)] => [Values(x)]
    /// `x += y`, then `out = rms_norm(x)`.
    AddNorm { x: View, y: View, w: BufId, eps: f32, out: View } [Values(x), Values(y)] => [Values(x), Values(out)]
    /// Writes rows to each token's place in a layer of a cache.
    Append { x: View, cache: CacheId, layer: usize } [Values(x), Inputs] => [Keys(cache, layer)]
    /// Indexer: scores of every visible key and the `top_k` best, ascending, -1 behind the last; ties go to the lowest
    /// position. `scores` receives `[rows][context]`, -inf where masked.
    IndexTopK {
        cache: CacheId, layer: usize, q: View, weights: View, top_k: usize, chosen: IndexId, scores: Option<BufId>
    } [Keys(cache, layer), Values(q), Values(weights), Inputs] => [scores.map(Context), Indices(chosen)]
    /// Absorbed MLA over cached `[latent | rope key]` rows: softmax over the chosen keys (all visible ones without a
    /// choice) and the sum of their latents, per head.
    Attend {
        cache: CacheId, layer: usize, q_latent: View, q_rope: View, scale: f32, chosen: Option<IndexId>, out: View
    } [Keys(cache, layer), Values(q_latent), Values(q_rope), Inputs, chosen.map(Indices)] => [Values(out)]
    /// From logits to choice scores and the chosen experts, best first, ties to the lowest.
    Route { logits: View, bias: BufId, router: Router, scores: View, ids: IndexId }
        [Values(logits), Inputs] => [Values(scores), Indices(ids)]
    /// The chosen experts' weights.
    ExpertWeights { logits: View, ids: IndexId, router: Router, out: View }
        [Values(logits), Indices(ids)] => [Values(out)]
    /// `out = silu(gate) * up`; `x` holds gate and up side by side.
    SwiGlu { x: View, out: View } [Values(x)] => [Values(out)]
    /// The chosen experts' gate, up and SwiGLU, a head of `out` for each slot.
    ExpertsHidden { w: WeightId, x: View, ids: IndexId, out: View, operand: Rounding }
        [Values(x), Indices(ids)] => [Values(out)]
    /// The chosen experts' down projections of the heads of `x`, weighted and added in slot order.
    ExpertsDown { w: WeightId, x: View, ids: IndexId, weights: View, out: View, operand: Rounding }
        [Values(x), Indices(ids), Values(weights)] => [Values(out)]
    /// The sum of all ranks' values, to all of them.
    AllReduce { x: View } [Values(x)] => [Values(x)]
    /// This rank's choice in each row, as the inputs say ([`Draw`](super::Draw)); the first logit is token `first`'s.
    Sample { logits: View, first: usize } [Values(logits), Inputs] => [Choices]
    /// Every rank's choices, to all of them.
    Share { ranks: usize } [Choices] => [Choices]
    /// The best of all ranks' choices becomes each row's next token, in the inputs.
    Commit { ranks: usize } [Choices, Inputs] => [Inputs]
}

/// What a call reads or writes, or a program shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operand {
    /// Columns of activations.
    Values(View),
    /// Activations as wide as the step's context.
    Context(BufId),
    /// Indices.
    Indices(IndexId),
    /// A layer of a cache.
    Keys(CacheId, usize),
    /// The step's inputs: ids, positions, block tables.
    Inputs,
    /// What ranks have chosen.
    Choices,
}

impl Operand {
    /// True if the two share a value.
    pub fn meets(&self, other: &Operand) -> bool {
        match (self, other) {
            (Operand::Values(a), Operand::Values(b)) => a.meets(b),
            (a, b) => a == b,
        }
    }
}

impl Op {
    /// True if ranks meet in it.
    pub fn is_collective(&self) -> bool {
        matches!(self, Op::AllReduce { .. } | Op::Share { .. })
    }
}
