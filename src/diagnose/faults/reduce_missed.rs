//! REDUCE_MISSED: a rank's partial sum never enters the all-reduce, though the rank comes to the meeting and its
//! parameters are right. Zeros in place of the rank's part of the parameter look the same in values; the bytes on the
//! device tell the two apart where there is an engine to ask.

use super::Fault;
use super::decorate::{Decorations, OpFault};
use crate::checkpoint::Checkpoint;
use crate::device::Site;
use crate::diagnose::hypothesis::{Alter, Hypothesis, OpContext};
use crate::probe::Point;

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
        let layers = 0..checkpoint.config().layers;
        let of_layers = layers.flat_map(|l| [Point::AttnOut, Point::FfnOut].map(|p| p.full_name(Some(l))));
        std::iter::once(Point::Embed.full_name(None)).chain(of_layers).collect()
    }

    fn inject(&self, _: &Checkpoint, site: &str, rank: Option<usize>, into: &mut Decorations) {
        if let Some((layer, point)) = Point::parse(site) {
            let site = Site { layer, op: point.name() };
            into.ops.push((rank.or(Some(USUAL_RANK)), site, OpFault::NoContribution));
        }
    }

    fn hypotheses<'a>(&self, op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
        let tp = op.trace.tp;
        if tp == 1 || !matches!(op.point, Point::Embed | Point::AttnOut | Point::FfnOut) {
            return Vec::new();
        }
        let lost = |rank: usize| Hypothesis {
            kind: self.kind(),
            site: op.point.full_name(op.layer),
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
