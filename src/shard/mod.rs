//! The tensor-parallel plan: which rows, columns, heads and vocabulary rows of every parameter each rank holds, in
//! which order fused parameters are joined, and what that costs in bytes, before anything is loaded.
//!
//! Column-parallel parameters are cut by row, row-parallel ones by column, key/value up-projections by head, the
//! vocabulary by row after padding; the rest is replicated. A column range that does not end on block boundaries is held
//! as the covering blocks, bytes unchanged: the activations that meet them are zero outside the range, so the partial
//! sum is that of the range alone.

pub mod budget;

use std::ops::Range;

use crate::model::{Config, Kind, Param};
use crate::quant::QuantType;

/// How a parameter is divided among ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Whole on every rank.
    Replicated,
    /// Column-parallel: a range of rows (of every expert, for stacks).
    Rows,
    /// Row-parallel: a range of columns (of every expert, for stacks).
    Cols,
    /// A range of heads.
    Heads,
    /// A range of vocabulary rows, padded to a multiple of 64 per rank.
    Vocab,
}

impl Cut {
    /// The cut of a kind.
    pub fn of(kind: Kind) -> Cut {
        use Kind::*;
        match kind {
            TokenEmbd | Output => Cut::Vocab,
            QB | FfnGate | FfnUp | GateExps | UpExps | GateShexp | UpShexp => Cut::Rows,
            AttnOutput | FfnDown | DownExps | DownShexp => Cut::Cols,
            KB | VB => Cut::Heads,
            _ => Cut::Replicated,
        }
    }

    /// The word for it in tables.
    pub fn name(self) -> &'static str {
        match self {
            Cut::Replicated => "replicated",
            Cut::Rows => "column-parallel",
            Cut::Cols => "row-parallel",
            Cut::Heads => "by head",
            Cut::Vocab => "vocabulary",
        }
    }
}

/// What one rank holds of a parameter of shape `[cols, rows, stack]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Matrices of the stack (heads, experts).
    pub stack: Range<usize>,
    /// Rows of each matrix.
    pub rows: Range<usize>,
    /// Columns that belong to the rank.
    pub cols: Range<usize>,
    /// Columns that are stored: `cols`, extended to whole blocks.
    pub covered: Range<usize>,
}

impl Slice {
    /// Bytes held, in blocks of `ty`.
    pub fn bytes(&self, ty: QuantType) -> usize {
        self.stack.len() * self.rows.len() * ty.row_bytes(self.covered.len())
    }

    /// True when more columns are stored than belong to the rank.
    pub fn is_covering(&self) -> bool {
        self.cols != self.covered
    }
}

/// Parameters that are joined row-wise into one matrix, because they multiply the same activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Group {
    /// q_a, kv_a and, on full layers, the indexer's key and weights projections.
    QkvA,
    /// q_b and, on full layers, the indexer's query projection.
    QB,
    /// Dense gate and up.
    GateUp,
    /// Per expert gate and up.
    GateUpExps,
    /// Shared expert's gate and up.
    GateUpShexp,
}

impl Group {
    /// The group's name in reports and in `--inject`.
    pub fn name(self) -> &'static str {
        match self {
            Group::QkvA => "attn_qkv_a",
            Group::QB => "attn_q_b_indexer",
            Group::GateUp => "ffn_gate_up",
            Group::GateUpExps => "ffn_gate_up_exps",
            Group::GateUpShexp => "ffn_gate_up_shexp",
        }
    }

    /// The groups of block `layer`.
    pub fn of_layer(c: &Config, layer: usize) -> Vec<Group> {
        let mut groups = vec![Group::QkvA, Group::QB];
        if c.is_moe(layer) {
            groups.push(Group::GateUpExps);
            if c.shared_experts > 0 {
                groups.push(Group::GateUpShexp);
            }
        } else {
            groups.push(Group::GateUp);
        }
        groups
    }

    /// The parts in canonical order: placement is by index in this list, never by order of arrival.
    pub fn parts(self, c: &Config, layer: usize) -> Vec<Param> {
        let indexer = c.is_full(layer);
        let kinds: &[Kind] = match (self, indexer) {
            (Group::QkvA, true) => &[Kind::QA, Kind::KvA, Kind::IndexK, Kind::IndexProj],
            (Group::QkvA, false) => &[Kind::QA, Kind::KvA],
            (Group::QB, true) => &[Kind::QB, Kind::IndexQB],
            (Group::QB, false) => &[Kind::QB],
            (Group::GateUp, _) => &[Kind::FfnGate, Kind::FfnUp],
            (Group::GateUpExps, _) => &[Kind::GateExps, Kind::UpExps],
            (Group::GateUpShexp, _) => &[Kind::GateShexp, Kind::UpShexp],
        };
        kinds.iter().map(|kind| Param { layer: Some(layer), kind: *kind }).collect()
    }
}

/// A plan that cannot be.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ShardError {
    #[error("--tp {tp}: {what} ({count}) expected to divide by {tp}, found a remainder of {}; legal here: {}",
        count % tp, list(legal))]
    Illegal { tp: usize, what: &'static str, count: usize, legal: Vec<usize> },
    #[error(
        "--strict-blocks --tp {tp}: {} tensors are cut inside a block: {}. Legal without cutting: {}",
        tensors.len(), some(tensors), list(legal)
    )]
    CutInsideBlock { tp: usize, tensors: Vec<String>, legal: Vec<usize> },
    #[error("--tp {found}: expected 1 to {most}")]
    Range { found: usize, most: usize },
}

fn list(values: &[usize]) -> String {
    values.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

fn some(names: &[String]) -> String {
    let shown = names.iter().take(12).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > 12 { format!("{shown} and {} more", names.len() - 12) } else { shown }
}

/// More ranks than any host has.
const MOST_RANKS: usize = 1024;

/// What must divide for `tp` ranks.
fn divisors(c: &Config) -> [(&'static str, usize); 4] {
    [
        ("attention heads", c.heads),
        ("dense feed-forward width", c.ffn),
        ("expert feed-forward width", c.expert_ffn),
        ("shared expert width", c.shared_ffn()),
    ]
}

/// The degrees that divide everything that must divide.
pub fn legal_degrees(c: &Config) -> Vec<usize> {
    (1..=c.heads).filter(|tp| divisors(c).iter().all(|(_, n)| n.is_multiple_of(*tp))).collect()
}

/// Where the pieces of a model go. Decorated by fault injection.
pub trait ShardPlan: Send + Sync {
    /// Number of ranks.
    fn tp(&self) -> usize;
    /// What `rank` holds of `param`, whose blocks hold `block` values.
    fn slice(&self, param: Param, block: usize, rank: usize) -> Slice;
    /// The order in which `rank` joins the parts of a fused group.
    fn parts(&self, group: Group, layer: usize, rank: usize) -> Vec<Param>;
}

/// The plan that ARCHITECTURE.md describes under tensor parallelism: every cut by the rules of [`Cut::of`].
#[derive(Clone, Debug)]
pub struct TpPlan {
    config: Config,
    tp: usize,
}

impl TpPlan {
    /// A plan for `tp` ranks.
    ///
    /// # Errors
    /// A degree that heads or widths do not divide by, with the legal ones.
    pub fn new(config: &Config, tp: usize) -> Result<Self, ShardError> {
        if tp == 0 || tp > MOST_RANKS {
            return Err(ShardError::Range { found: tp, most: MOST_RANKS });
        }
        if let Some((what, count)) = divisors(config).into_iter().find(|(_, n)| !n.is_multiple_of(tp)) {
            return Err(ShardError::Illegal { tp, what, count, legal: legal_degrees(config) });
        }
        Ok(TpPlan { config: config.clone(), tp })
    }

    /// The configuration it was made for.
    pub fn config(&self) -> &Config {
        &self.config
    }
}

/// Part `rank` of `tp` of `0..n`, where `n` divides by `tp`.
fn share(n: usize, tp: usize, rank: usize) -> Range<usize> {
    let each = n / tp;
    each * rank..each * (rank + 1)
}

impl ShardPlan for TpPlan {
    fn tp(&self) -> usize {
        self.tp
    }

    fn slice(&self, param: Param, block: usize, rank: usize) -> Slice {
        let [cols, rows, stack] = param.kind.shape(&self.config);
        let mut slice = Slice { stack: 0..stack, rows: 0..rows, cols: 0..cols, covered: 0..cols };
        match Cut::of(param.kind) {
            Cut::Replicated => {}
            Cut::Rows => slice.rows = share(rows, self.tp, rank),
            Cut::Heads => slice.stack = share(stack, self.tp, rank),
            Cut::Cols => {
                slice.cols = share(cols, self.tp, rank);
                slice.covered = slice.cols.start / block * block..slice.cols.end.next_multiple_of(block).min(cols);
            }
            Cut::Vocab => {
                let each = self.config.padded_vocab(self.tp) / self.tp;
                slice.rows = (each * rank).min(rows)..(each * (rank + 1)).min(rows);
            }
        }
        slice
    }

    fn parts(&self, group: Group, layer: usize, _: usize) -> Vec<Param> {
        group.parts(&self.config, layer)
    }
}
