//! Where public engines disagree, or a release of one is known to be wrong. A value that diverges from the file's word, and is
//! what another engine documents, says whose it is: of two references that disagree neither is accused. What a release got
//! wrong stays wrong, but whoever takes that release for the truth is told.

use lockstep_reference::config::RopeStyle;
use lockstep_reference::{Eps, RefConfig, RefOptions, Variant};

use super::op::{OpFinding, fits};
use super::replay::{Judge, Unjudged};
use super::{Subject, VerifyError};
use crate::checkpoint::oracle::Raw;
use crate::model::{Place, Point};
use crate::probe::Trace;
use crate::report::Verdict;

/// A finding that diverges, with what is known of such a difference.
///
/// # Errors
/// Weights that cannot be read.
pub(super) fn weighed(
    judge: &Judge<'_>,
    trace: &Trace,
    finding: OpFinding,
    subject: &Subject,
) -> Result<OpFinding, Unjudged> {
    if let Some(who) = documented(judge, trace, finding.place, subject)? {
        let detail = format!("{}; {who}", finding.detail);
        return Ok(OpFinding { verdict: Verdict::Drift, detail, ..finding });
    }
    if let Some(what) = known_wrong(judge, trace, finding.place)? {
        let suspect = format!("reference suspect: {} made this dump, and {what}", trace.producer);
        return Ok(OpFinding { detail: format!("{}; {suspect}", finding.detail), ..finding });
    }
    Ok(finding)
}

/// Whether a diverging norm agrees, in every slice, with another engine's documented eps instead of the file's.
fn documented(
    judge: &Judge<'_>,
    trace: &Trace,
    place: Place,
    subject: &Subject,
) -> Result<Option<String>, VerifyError> {
    if !matches!(place.point, Point::QANorm | Point::KvLatent | Point::IndexK) {
        return Ok(None);
    }
    let raw = Raw(subject.checkpoint.source());
    for (eps, who) in [
        (Eps::Hf, "agrees with transformers (eps 1e-6 for the latent norms)"),
        (Eps::File, "agrees with engines that take the file's eps for the latent norms"),
        (Eps::LlamaCpp, "agrees with llama.cpp (eps 0 for the indexer's LayerNorm)"),
    ] {
        let config = RefConfig::from_raw(&raw, eps)?;
        let same = match place.point {
            Point::IndexK => config.index_eps == judge.config.index_eps,
            _ => config.latent_eps == judge.config.latent_eps,
        };
        // The policy that it was judged by says nothing new.
        if !same && fits(&Judge { config: &config, ..*judge }, trace, place)? {
            return Ok(Some(format!("{who}: the references themselves disagree here")));
        }
    }
    Ok(None)
}

/// The first release of transformers that turns the indexer's vectors as the model was trained, and the main ones.
const INDEXER_ROPE: (u32, u32) = (5, 13);
const MAIN_ROPE: (u32, u32) = (5, 11);

/// What the release that made the dump is known to get wrong, if the values are just that.
fn known_wrong(judge: &Judge<'_>, trace: &Trace, place: Place) -> Result<Option<String>, VerifyError> {
    let ((major, minor), vectors) = match place.point {
        Point::IndexQ | Point::IndexK => (INDEXER_ROPE, "the indexer's"),
        Point::Q | Point::KRope => (MAIN_ROPE, "all"),
        _ => return Ok(None),
    };
    if release(&trace.producer).is_none_or(|release| release >= (major, minor)) {
        return Ok(None);
    }
    let halves =
        RefConfig { rope_style: RopeStyle::HalfSplit, index_rope_style: RopeStyle::HalfSplit, ..judge.config.clone() };
    let stored = RefOptions { variant: Some(Variant::HalvesPaired), ..judge.options };
    // Whoever captures it may store what was turned by halves in either order.
    let so = fits(&Judge { config: &halves, ..*judge }, trace, place)?
        || fits(&Judge { options: stored, ..*judge }, trace, place)?;
    let known =
        format!("transformers before {major}.{minor} is known to turn {vectors} vectors by halves, as it does here");
    Ok(so.then_some(known))
}

/// Which release of transformers made a dump, by its own word.
fn release(producer: &str) -> Option<(u32, u32)> {
    let mut numbers = producer.strip_prefix("transformers ")?.split(['.', '+', '-', ' ']).map(|n| n.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

#[cfg(test)]
mod tests {
    use super::release;

    #[test]
    fn releases_are_read_or_not() {
        for (producer, found) in [
            ("transformers 5.12.1", Some((5, 12))),
            ("transformers 5.13.0.dev0", Some((5, 13))),
            ("transformers 4.57", Some((4, 57))),
            ("transformers ", None),
            ("transformers main", None),
            ("vllm 0.11.0", None),
        ] {
            assert_eq!(release(producer), found, "{producer}");
        }
    }
}
