//! REDUCE_MISSED: a rank's partial sum never enters the all-reduce, though the rank comes to the meeting and its
//! parameters are right. Zeros in place of the rank's part of the parameter look the same in values; the bytes on the
//! device tell the two apart where there is an engine to ask.

use crate::diagnose::hypothesis::{Alter, Hypothesis, OpContext};
use crate::faults::operations::REDUCE_MISSED;

/// A sum without each rank's part in turn.
pub(super) fn hypotheses<'a>(op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
    let tp = op.trace.tp;
    if tp == 1 || !op.place.point.is_reduced() {
        return Vec::new();
    }
    let lost = |rank: usize| {
        let statement = format!("the sum of all ranks' partial sums but rank {rank}'s: its contribution is lost");
        let by_hand = format!("add rank {rank}'s partial sum by hand");
        let overturn = format!("{by_hand}; if the operation still diverges, the reduction was not at fault");
        let alter = Alter::Missing(vec![rank]);
        Hypothesis { ranks: vec![rank], ..op.hypothesis(REDUCE_MISSED.kind, statement, overturn, alter) }
    };
    (0..tp).map(lost).collect()
}
