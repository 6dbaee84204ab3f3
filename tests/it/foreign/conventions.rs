//! What is said of a capture beforehand, and what is known of the release that made a dump.

use lockstep::model::{Place, Point};
use lockstep::probe::Trace;
use lockstep::report::{StageReport, Verdict};
use lockstep::verify::conventions::Convention;
use lockstep::verify::{Subject, activations};
use lockstep_reference::config::RopeStyle;
use lockstep_reference::{RefConfig, RefOptions, RefRecipe, Variant};

use super::{EXPANDED, bad, dump, halves_stored, judged, mistaken, named, of, values, with_values};
use crate::common::binary::{PICO, golden, lockstep, run};
use crate::common::subject::{Silent, check, show};

const RECIPE: RefRecipe = RefRecipe::TorchF32;

fn given(target: Trace, convention: Convention) -> StageReport {
    let of = Subject { target: Some(target), recipe: RECIPE, convention: Some(convention), ..of() };
    activations::run(&of, &Silent).expect("runs")
}

#[test]
fn a_convention_that_was_given_is_followed_or_contradicted() {
    let whole = dump(RECIPE);
    let halves = halves_stored(&whole);
    for (target, convention, verdict, words) in [
        (&halves, Convention::RopeHalves, Verdict::Match, "rope-halves, from layers.0.attn.q on"),
        (
            &halves,
            Convention::ResidualApart,
            Verdict::Drift,
            "contradict --convention residual-apart: they follow rope",
        ),
        (
            &whole,
            Convention::RopeHalves,
            Verdict::Drift,
            "rope-halves: every operation that was judged is right without it",
        ),
    ] {
        let report = given(target.clone(), convention);
        let (found, detail) = check(&report, "convention");
        assert!(found == verdict && detail.contains(words), "{found:?} {detail}");
        assert!(bad(&report).is_empty() && report.verdict() == Verdict::Drift, "{}", show(&report));
    }
}

/// Where nothing follows, nothing can bear witness: what was given is believed, and without a word the engine is accused.
/// What contradicts is heard.
#[test]
fn what_was_given_needs_no_witness_and_survives_no_contradiction() {
    let whole = dump(RECIPE);
    let last = of().checkpoint.config().layers - 1;
    let apart = |layer: usize| {
        let lost = values(&whole, Place::trunk(layer, Point::FfnOut)).expect("there");
        (with_values(&whole, Place::trunk(layer, Point::Output), &lost), lost)
    };
    let at = Place::trunk(last, Point::Output).to_string();
    let silent = apart(last).0.only(|place| place != Place::FINAL_NORM && place != Place::LOGITS);
    assert_eq!(bad(&judged(silent.clone(), RECIPE)), [at.as_str()]);
    let report = given(silent, Convention::ResidualApart);
    assert!(bad(&report).is_empty(), "{}", show(&report));
    let (verdict, detail) = check(&report, "convention");
    assert!(verdict == Verdict::Match && detail.contains("residual-apart, from layers.2.output on"), "{detail}");

    let (target, lost) = apart(1);
    let run = with_values(&target, Place::trunk(2, Point::Input), &lost);
    let went_on = mistaken(&run, RECIPE, Place::trunk(2, Point::AttnNorm), EXPANDED, &|_| {});
    let report = given(went_on, Convention::ResidualApart);
    assert!(bad(&report).contains(&"layers.1.output"), "{}", show(&report));
    let (verdict, detail) = check(&report, "convention");
    assert!(verdict == Verdict::Drift && detail.contains("what diverges is not right under it"), "{detail}");
}

#[test]
fn a_convention_that_is_none_is_refused_with_the_list() {
    for command in ["verify", "bisect"] {
        let typed = ["--target", "dump", "--convention", "backwards"];
        let found = run(lockstep().arg(command).arg("-m").arg(golden(PICO)).args(typed)).exits(2);
        let said = "--convention backwards: expected one of rope-halves, heads-first, layer-off";
        assert!(found.stderr.contains(said), "{}", found.stderr);
    }
    let alone = run(lockstep().args(["verify", "--convention", "rope-halves", "-m"]).arg(golden(PICO))).exits(2);
    assert!(alone.stderr.contains("--target"), "{}", alone.stderr);
}

/// A release that is known to turn the indexer's vectors by halves is suspect where the values are turned so: no later one
/// is, and not for another mistake.
#[test]
fn a_release_that_is_known_to_be_wrong_is_suspect() {
    let whole = dump(RECIPE);
    let place = Place::trunk(0, Point::IndexQ);
    let unchanged = |_: &mut RefConfig| {};
    let by_halves = mistaken(&whole, RECIPE, place, EXPANDED, &|c| c.index_rope_style = RopeStyle::HalfSplit);
    let stored = RefOptions { variant: Some(Variant::HalvesPaired), ..EXPANDED };
    let late = RefOptions { variant: Some(Variant::Position(1)), ..EXPANDED };
    let (as_is, late) =
        (mistaken(&whole, RECIPE, place, stored, &unchanged), mistaken(&whole, RECIPE, place, late, &unchanged));
    for (target, producer, suspect) in [
        (&by_halves, "transformers 5.12.1", true),
        (&as_is, "transformers 5.3.0", true),
        (&by_halves, "transformers 5.13.0", false),
        (&by_halves, "vllm 0.11.0", false),
        (&late, "transformers 5.12.1", false),
    ] {
        let mut target = target.clone();
        target.producer = producer.into();
        let report = judged(target, RECIPE);
        let (verdict, detail) = check(&report, &place.to_string());
        let said = format!("reference suspect: {producer} made this dump");
        assert!(verdict == Verdict::Divergent && detail.contains(&said) == suspect, "{producer}: {detail}");
    }
    assert_eq!(named(by_halves, RECIPE), (place.to_string(), "indexer_rope_style=half-split".into(), "CONFIG_VALUE"));
}
