//! REDUCE_MISSED: a rank's partial sum never enters the all-reduce, though the rank comes to the meeting and its
//! parameters are right. Zeros in place of the rank's part of the parameter look the same in values; the bytes on the
//! device tell the two apart where there is an engine to ask.

use super::Fault;
use super::decorate::{Decorations, OpFault};
use crate::checkpoint::Checkpoint;
use crate::diagnose::hypothesis::{Alter, Hypothesis, OpContext};
use crate::model::{Block, Place, Point};

/// See the module.
pub struct ReduceMissed;

/// The rank that contributes nothing where none was typed; every degree with a reduction has it.
const USUAL_RANK: usize = 1;

impl Fault for ReduceMissed {
    fn kind(&self) -> &'static str {
        "REDUCE_MISSED"
    }

    fn about(&self) -> &'static str {
        "one rank (1 unless typed) contributes zeros to an all-reduce in place of its partial sum"
    }

    fn sites(&self, checkpoint: &Checkpoint, tp: usize) -> Vec<String> {
        if tp == 1 {
            return Vec::new();
        }
        let blocks = std::iter::once(Block::Front).chain((0..checkpoint.config().layers).map(Block::Trunk));
        let of_block = |block| {
            let reduced = Point::ALL.iter().filter(move |point| point.is_reduced() && point.is_in(block));
            reduced.map(move |point| Place { block, point: *point }.to_string())
        };
        blocks.flat_map(of_block).collect()
    }

    fn inject(&self, _: &Checkpoint, site: &str, rank: Option<usize>, into: &mut Decorations) {
        if let Ok(place) = site.parse() {
            into.ops.push((rank.or(Some(USUAL_RANK)), place, OpFault::NoContribution));
        }
    }

    fn hypotheses<'a>(&self, op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
        let tp = op.trace.tp;
        if tp == 1 || !op.place.point.is_reduced() {
            return Vec::new();
        }
        let lost = |rank: usize| Hypothesis {
            kind: self.kind(),
            site: op.place.to_string(),
            statement: format!("the sum of all ranks' partial sums but rank {rank}'s: its contribution is lost"),
            overturn: format!(
                "add rank {rank}'s partial sum by hand; if the operation still diverges, the reduction was not at fault"
            ),
            ranks: vec![rank],
            also: Vec::new(),
            reads: None,
            alter: Alter::Missing(vec![rank]),
        };
        (0..tp).map(lost).collect()
    }
}
