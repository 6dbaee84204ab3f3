//! DSA_INACTIVE: sparse attention was dropped and every visible key attended to. Clean up to top-k tokens, wrong beyond.

use lockstep_reference::RefOptions;

use crate::diagnose::hypothesis::{Alter, Hypothesis, OpContext};
use crate::faults::operations::DSA_INACTIVE;

use super::operation::attends;

/// Attention over all keys.
pub(super) fn hypotheses<'a>(op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
    if !attends(op) || op.judge.options.dense {
        return Vec::new();
    }
    let top_k = op.judge.config.top_k;
    vec![op.hypothesis(
        DSA_INACTIVE.kind,
        format!(
            "every visible key is attended to: exact up to {top_k} tokens, wrong beyond; the indexer's choice is not used"
        ),
        format!("run at most {top_k} tokens: if the operation diverges there too, the choice is not at fault"),
        Alter::Options(RefOptions { dense: true, ..op.judge.options }),
    )]
}
