//! Faults of operations: attention that drops the indexer's choice, a partial sum that never enters the all-reduce though
//! the rank comes to the meeting and its parameters are right, and results that are off in a way that no kind explains,
//! so that the tool can be seen to say UNKNOWN instead of a wrong name.

use super::Fault;
use super::around::OpFault;
use crate::device::Op;
use crate::model::Point;

/// Sparse attention was dropped.
pub const DSA_INACTIVE: Fault = Fault {
    kind: "DSA_INACTIVE",
    about: "attention silently runs over all keys instead of the indexer's choice",
    sites: |target| target.places(|call| matches!(call.op, Op::Attend { chosen: Some(_), .. })),
    inject: |_, site, rank, into| into.add_op(rank, site, OpFault::AllKeys),
};

/// The rank that contributes nothing where none was typed; every degree with a reduction has it.
const USUAL_RANK: usize = 1;

/// A partial sum was lost.
pub const REDUCE_MISSED: Fault = Fault {
    kind: "REDUCE_MISSED",
    about: "one rank (1 unless typed) contributes zeros to an all-reduce in place of its partial sum",
    sites: |target| target.places(|call| target.tp > 1 && matches!(call.op, Op::AllReduce { .. })),
    inject: |_, site, rank, into| into.add_op(rank.or(Some(USUAL_RANK)), site, OpFault::NoContribution),
};

/// Results are off.
pub const OP_NOISE: Fault = Fault {
    kind: "OP_NOISE",
    about: "results of an operation off by 1 %, or choices exchanged; explained by nothing, so bisect must say UNKNOWN",
    sites: |target| target.places(|call| call.at.point != Point::NextToken),
    inject: |_, site, rank, into| into.add_op(rank, site, OpFault::Damaged(None)),
};
