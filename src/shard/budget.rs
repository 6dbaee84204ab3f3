//! Bytes per rank, from the plan and the types alone.

use super::{Cut, ShardError, ShardPlan, TpPlan, legal_degrees};
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::model::{Config, Kind, Param, params};
use crate::quant::QuantType;

/// What one parameter costs.
#[derive(Clone, Debug)]
pub struct Line {
    /// The parameter.
    pub param: Param,
    /// Its type on the device: the file's, or F32 where the engine wants it plain.
    pub ty: QuantType,
    /// Its type in the file, when the engine dequantises it on load.
    pub dequantised_from: Option<QuantType>,
    /// How it is cut.
    pub cut: Cut,
    /// Bytes of the whole parameter in the files: none where the embedding serves as output matrix.
    pub whole: u64,
    /// Whether the parameter is another one's tensor.
    pub tied: bool,
    /// Bytes per rank.
    pub per_rank: Vec<u64>,
    /// True when some rank stores covering blocks beyond its range.
    pub covering: bool,
}

impl Line {
    /// Bytes over all ranks, as a multiple of the bytes of the whole; above 1 for replicated and covering parameters, and 0
    /// for one that no file holds.
    pub fn times(&self) -> f64 {
        if self.whole == 0 { 0.0 } else { self.per_rank.iter().sum::<u64>() as f64 / self.whole as f64 }
    }
}

/// The cost of a model on every rank.
#[derive(Clone, Debug)]
pub struct Budget {
    /// Trunk parameters.
    pub trunk: Vec<Line>,
    /// MTP parameters; the engine does not load them yet.
    pub mtp: Vec<Line>,
}

impl Budget {
    /// Works out the cost of every parameter that the file holds and this build can read.
    ///
    /// # Errors
    /// Types without a dequantiser.
    pub fn new(checkpoint: &Checkpoint, plan: &TpPlan) -> Result<Self, CheckpointError> {
        let c = checkpoint.config();
        let lines = |all: Vec<Param>| -> Result<Vec<Line>, CheckpointError> {
            all.into_iter().filter(|p| checkpoint.binding(*p).is_some()).map(|p| line(checkpoint, plan, p)).collect()
        };
        Ok(Budget { trunk: lines(params::of_trunk(c))?, mtp: lines(params::of_mtp(c))? })
    }

    /// Bytes of the trunk on each rank.
    pub fn trunk_bytes(&self) -> Vec<u64> {
        per_rank(&self.trunk)
    }

    /// Bytes of the MTP blocks on each rank.
    pub fn mtp_bytes(&self) -> Vec<u64> {
        per_rank(&self.mtp)
    }

    /// Bytes that all ranks together read for one decoded token: of an expert stack only as many experts as are used, of
    /// the embedding one row, everything else whole.
    pub fn token_bytes(&self, c: &Config) -> u64 {
        let of = |line: &Line| {
            let held: u64 = line.per_rank.iter().sum();
            match line.param.kind {
                kind if kind.is_expert_stack() => held / c.experts as u64 * c.experts_used as u64,
                Kind::TokenEmbd => line.ty.row_bytes(c.hidden) as u64,
                _ => held,
            }
        };
        self.trunk.iter().map(of).sum()
    }

    /// Refuses a plan in which a rank's range cuts a block.
    ///
    /// # Errors
    /// The tensors that are cut, and the degrees at which none is.
    pub fn strict_blocks(&self, plan: &TpPlan) -> Result<(), ShardError> {
        let tensors: Vec<String> = self.trunk.iter().filter(|l| l.covering).map(|l| l.param.to_string()).collect();
        if tensors.is_empty() {
            return Ok(());
        }
        let aligned = |tp: &usize| {
            TpPlan::new(plan.config(), *tp).is_ok_and(|p| self.trunk.iter().all(|l| !is_covering(&p, l.param, l.ty)))
        };
        let legal = legal_degrees(plan.config()).into_iter().filter(aligned).collect();
        Err(ShardError::CutInsideBlock { tp: plan.tp(), tensors, legal })
    }
}

fn per_rank(lines: &[Line]) -> Vec<u64> {
    let ranks = lines.first().map_or(0, |l| l.per_rank.len());
    (0..ranks).map(|r| lines.iter().map(|l| l.per_rank[r]).sum()).collect()
}

fn is_covering(plan: &TpPlan, param: Param, ty: QuantType) -> bool {
    (0..plan.tp()).any(|r| plan.slice(param, ty.block(), r).is_covering())
}

fn line(checkpoint: &Checkpoint, plan: &TpPlan, param: Param) -> Result<Line, CheckpointError> {
    let in_file = checkpoint.type_of(param)?;
    let ty = if param.kind.is_plain() { QuantType::F32 } else { in_file };
    let per_rank = (0..plan.tp()).map(|r| plan.slice(param, ty.block(), r).bytes(ty) as u64).collect();
    let [cols, rows, stack] = param.kind.shape(checkpoint.config());
    let tied = param.kind == Kind::Output && checkpoint.is_tied();
    Ok(Line {
        param,
        ty,
        dequantised_from: (param.kind.is_plain() && in_file != QuantType::F32).then_some(in_file),
        cut: Cut::of(param.kind),
        whole: if tied { 0 } else { (stack * rows * ty.row_bytes(cols)) as u64 },
        tied,
        per_rank,
        covering: is_covering(plan, param, ty),
    })
}
