//! DSA_INACTIVE: sparse attention was dropped and every visible key attended to. Clean up to top-k tokens, wrong beyond.

use lockstep_reference::Options;

use super::Fault;
use super::decorate::{Decorations, OpFault};
use crate::checkpoint::Checkpoint;
use crate::diagnose::hypothesis::{Alter, Hypothesis, OpContext};
use crate::model::{Place, Point};

/// See the module.
pub struct DsaInactive;

impl Fault for DsaInactive {
    fn kind(&self) -> &'static str {
        "DSA_INACTIVE"
    }

    fn about(&self) -> &'static str {
        "attention silently runs over all keys instead of the indexer's choice"
    }

    fn sites(&self, checkpoint: &Checkpoint, _: usize) -> Vec<String> {
        (0..checkpoint.config().layers).map(|l| Place::trunk(l, Point::Latent).to_string()).collect()
    }

    fn inject(&self, _: &Checkpoint, site: &str, rank: Option<usize>, into: &mut Decorations) {
        if let Ok(place) = site.parse() {
            into.ops.push((rank, place, OpFault::AllKeys));
        }
    }

    fn hypotheses<'a>(&self, op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
        if op.place.point != Point::Latent || op.judge.options.dense {
            return Vec::new();
        }
        vec![Hypothesis {
            kind: self.kind(),
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
}
