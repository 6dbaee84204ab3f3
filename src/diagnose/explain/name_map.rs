//! NAME_MAP: a name was altered on the way from file to parameter, so the parameter was never filled and holds zeros.

use crate::diagnose::hypothesis::{Hypothesis, OpContext};
use crate::faults::name_map::FAULT;

/// Each parameter of the operation, never filled.
pub(super) fn hypotheses<'a>(op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
    let statement = "the parameter was never filled: it holds zeros";
    let overturn = "fill it by hand; if the operation still diverges, the name was not at fault";
    let mut all = Vec::new();
    for at in op.params() {
        for ranks in op.scopes() {
            let alter = op.altering(at, ranks.clone(), |_, base| Some(base.map(|_| 0.0)));
            let site = op.tensor(at.0, at.1);
            all.push(Hypothesis { site, ranks, ..op.hypothesis(FAULT.kind, statement, overturn, alter) });
        }
    }
    all
}
