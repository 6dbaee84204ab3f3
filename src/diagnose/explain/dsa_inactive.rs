//! DSA_INACTIVE: sparse attention was dropped and every visible key attended to. Clean up to top-k tokens, wrong beyond.

use lockstep_reference::Options;

use crate::diagnose::hypothesis::{Alter, Hypothesis, OpContext};
use crate::faults::dsa_inactive::FAULT;
use crate::model::Point;

pub(super) fn hypotheses<'a>(op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
    if op.place.point != Point::Latent || op.judge.options.dense {
        return Vec::new();
    }
    vec![Hypothesis {
        kind: FAULT.kind,
        site: op.place.to_string(),
        statement: format!(
            "every visible key is attended to: exact up to {} tokens, wrong beyond; the indexer's choice is not used",
            op.config.top_k
        ),
        overturn: format!(
            "run at most {} tokens: if the operation diverges there too, the choice is not at fault",
            op.config.top_k
        ),
        ranks: op.ranks.clone(),
        also: Vec::new(),
        reads: None,
        alter: Alter::Options(Options { dense: true, ..op.judge.options }),
    }]
}
