//! Dumps of other engines: every recipe that is known, whatever part of the points was captured; what such engines get
//! wrong, by name; and captures that are wrong where the engine is right. The runs are the reference's, in an order of
//! summation that no floor is made of, with keys and values of every head made before attention.

mod conventions;
mod weights;

use crate::common;

use common::PICO;
use common::subject::{Silent, check, run_of_reference, show, subject};
use lockstep::checkpoint::oracle::Raw;
use lockstep::diagnose::bisect;
use lockstep::engine::Attention;
use lockstep::model::{Place, Point};
use lockstep::probe::{Captured, Trace, Values};
use lockstep::report::{StageReport, Verdict};
use lockstep::verify::{Subject, activations};
use lockstep_reference::{
    Arith, Eps, Half, ModelWeights, Order, RefConfig, RefOptions, RefRecipe, Replay, Variant, Weights,
};

const HALF: RefRecipe = RefRecipe::TorchHalf(Half::Bf16);
const TORCH: [RefRecipe; 4] = [RefRecipe::TorchF32, HALF, RefRecipe::TorchHalf(Half::F16), RefRecipe::TorchAutocast];
const EXPANDED: RefOptions = RefOptions { dense: false, mtp: false, expanded: true, variant: None };
const TOKENS: usize = 40;

fn of() -> Subject {
    Subject { rows: (0..TOKENS).step_by(2).chain([TOKENS - 1]).collect(), ..subject(PICO, 1, TOKENS) }
}

fn dump(recipe: RefRecipe) -> Trace {
    run_of_reference(&of(), Arith::F32(recipe, Order::Blocks(7)), EXPANDED)
}

fn judged(target: Trace, recipe: RefRecipe) -> StageReport {
    activations::run(&Subject { target: Some(target), recipe, ..of() }, &Silent).expect("runs")
}

fn bad(report: &StageReport) -> Vec<&str> {
    report.checks.iter().filter(|c| c.verdict == Verdict::Divergent).map(|c| c.name.as_str()).collect()
}

/// Captures as people make them: everything, what hooks on modules see, what models hand out by themselves.
fn parts(place: Place) -> [bool; 3] {
    use Point::*;
    let hidden = matches!(place.point, Embed | Output | FinalNorm | Logits);
    let hooks = hidden
        || matches!(place.point, Input | AttnNorm | QA | QANorm | QRaw | KvA | KvLatent | Context | AttnOut | FfnNorm)
        || matches!(place.point, RouterLogits | FfnOut);
    [true, hooks, hidden]
}

#[test]
fn clean_dumps_of_every_recipe_are_clean_whatever_part_was_captured() {
    for recipe in TORCH {
        let whole = dump(recipe);
        for part in 0..3 {
            let report = judged(whole.only(|place| parts(place)[part]), recipe);
            assert_eq!(report.verdict(), Verdict::Match, "{recipe:?} {part}: {}", show(&report));
        }
    }
}

/// What a point lacks in every layer is one line, and not a reason against the rest.
#[test]
fn what_was_not_captured_is_said_once() {
    let report = judged(dump(RefRecipe::TorchF32).only(|place| parts(place)[1]), RefRecipe::TorchF32);
    let (verdict, detail) = check(&report, "ffn.hidden");
    assert_eq!(
        (verdict, detail.contains("not captured in 3 places: judged as part of spans")),
        (Verdict::NotApplicable, true)
    );
    let (_, detail) = check(&report, "layers.2.ffn.out");
    assert!(detail.contains("a span of") && detail.contains("from layers.2.ffn.norm"), "{detail}");
    let cut = dump(RefRecipe::TorchF32).only(|place| parts(place)[1] && place.point != Point::Logits);
    let report = judged(cut, RefRecipe::TorchF32);
    let (verdict, detail) = check(&report, "logits");
    assert_eq!(verdict, Verdict::Unmeasured, "{detail}");
}

/// Within top-k nothing is left unjudged but the choice, and that is said; the twins are a dump beyond top-k that attended to
/// all keys, and a run of our own, whose prompt could have been longer.
#[test]
fn a_dump_within_top_k_is_whole_and_says_what_it_cannot_show() {
    let (recipe, short) = (RefRecipe::TorchF32, 16);
    let within = |tp| Subject { rows: (0..short).collect(), ..subject(PICO, tp, short) };
    let target = run_of_reference(&within(1), Arith::F32(recipe, Order::Blocks(7)), EXPANDED);
    let dump = Subject { target: Some(target), recipe, ..within(1) };
    let report = activations::run(&dump, &Silent).expect("runs");
    let (verdict, detail) = check(&report, "sparse attention");
    assert_eq!((report.verdict(), verdict), (Verdict::Match, Verdict::NotApplicable), "{}", show(&report));
    assert!(detail.contains("nothing of the indexer's choice") && detail.contains("at least 17 tokens"), "{detail}");
    let found = bisect::operations(&dump, &Silent).expect("runs");
    assert_eq!((found.verdict, found.sparse_attention.as_deref()), (Verdict::Match, Some(detail)));

    let all_keys = Subject { attention: Attention::Dense, ..of() };
    let options = RefOptions { dense: true, ..EXPANDED };
    let dense = run_of_reference(&all_keys, Arith::F32(recipe, Order::Blocks(7)), options);
    assert_eq!(check(&judged(dense, recipe), "sparse attention").0, Verdict::Inactive);
    let own = activations::run(&within(1), &Silent).expect("runs");
    assert_eq!(check(&own, "sparse attention").0, Verdict::Inactive);
}

/// A recipe's dump is no other one's.
#[test]
fn a_looser_recipe_is_a_fault_of_a_tighter_one() {
    for (made, judge) in [(HALF, RefRecipe::TorchF32), (RefRecipe::TorchAutocast, RefRecipe::TorchF32)] {
        let report = judged(dump(made), judge);
        assert!(bad(&report).contains(&"layers.0.attn.q_a"), "{made:?}: {}", show(&report));
    }
    // Angles in f32 are seen where all else is the same.
    let report = judged(dump(RefRecipe::TorchF32), RefRecipe::Strict);
    assert!(
        bad(&report).iter().all(|b| b.contains("attn.q") || b.contains("k_rope") || b.contains("index_")),
        "{}",
        show(&report)
    );
}

/// The same dump with one place as a mistake makes it.
fn mistaken(
    whole: &Trace,
    recipe: RefRecipe,
    place: Place,
    options: RefOptions,
    change: &dyn Fn(&mut RefConfig),
) -> Trace {
    let of = of();
    let raw = Raw(of.checkpoint.source());
    let mut config = RefConfig::from_raw(&raw, Eps::File).expect("a configuration");
    change(&mut config);
    let weights = ModelWeights::new(&raw, &config);
    with_values(whole, place, &made(&config, &weights, whole, recipe, place, options))
}

fn made(
    config: &RefConfig,
    weights: &dyn Weights,
    whole: &Trace,
    recipe: RefRecipe,
    place: Place,
    options: RefOptions,
) -> Vec<f32> {
    let seen = |name: &str| {
        let (ids, rows) = (&whole.ids, whole.ids.len());
        let of = |values: Vec<f32>| ndarray::ArrayD::from_shape_vec(vec![rows, values.len() / rows], values).ok();
        if name == "ids" {
            return of(ids.iter().map(|id| *id as f32).collect());
        }
        of(whole.ranks(name.parse().ok()?)?[0].as_f32())
    };
    let (rows, bridge): (Vec<usize>, _) = ((0..whole.ids.len()).collect(), lockstep_reference::Bridge::default());
    let arith = Arith::F32(recipe, Order::Blocks(7));
    let replay = Replay { config, weights, arith, options, inputs: &seen, bridge: Some(&bridge) };
    let values = replay.point(&place.to_string(), &rows);
    values.expect("replays").iter().map(|v| *v as f32).collect()
}

fn with_values(whole: &Trace, place: Place, values: &[f32]) -> Trace {
    let captures = whole.places().into_iter().map(|at| {
        let own = whole.ranks(at).expect("captured")[0].clone();
        if at == place { Captured { values: Values::F32(values.to_vec()), ..own } } else { own }
    });
    Trace::new(whole.producer.clone(), whole.ids.clone(), whole.attention, vec![captures.collect()])
}

fn named(target: Trace, recipe: RefRecipe) -> (String, String, &'static str) {
    let found = bisect::run(&Subject { target: Some(target), recipe, ..of() }, &Silent).expect("runs");
    let culprit = found.culprit.expect("a culprit");
    (culprit.place, culprit.explanation.map_or_else(String::new, |e| e.site), culprit.kind)
}

#[test]
fn mistakes_of_other_engines_are_named() {
    let unchanged = |_: &mut RefConfig| {};
    for recipe in [RefRecipe::TorchF32, HALF] {
        let whole = dump(recipe);
        for (point, variant, kind) in [
            (Point::Q, Variant::Position(1), "ROPE_POSITION"),
            (Point::KRope, Variant::Unrotated, "ROPE_MISSING"),
            (Point::IndexQ, Variant::IndexBeforeNorm, "INDEXER_INPUT"),
            (Point::ExpertWeights, Variant::BiasInWeights, "BIAS_IN_WEIGHTS"),
            (Point::FfnOut, Variant::Shared(0), "SHARED_EXPERT"),
            (Point::FfnOut, Variant::Shared(2), "SHARED_EXPERT"),
            (Point::Routed, Variant::Routed(2.0), "ROUTED_SCALE"),
            (Point::Output, Variant::Addend(1.1), "RESIDUAL_FACTOR"),
            (Point::Context, Variant::SoftmaxScale(96f64.powf(-0.5)), "SOFTMAX_SCALE"),
        ] {
            let (place, options) = (Place::trunk(2, point), RefOptions { variant: Some(variant), ..EXPANDED });
            let (at, _, found) = named(mistaken(&whole, recipe, place, options, &unchanged), recipe);
            assert_eq!((at, found), (place.to_string(), kind), "{recipe:?} {variant:?}");
        }
        let place = Place::trunk(2, Point::KRope);
        let halves = |c: &mut RefConfig| c.rope_style = lockstep_reference::config::RopeStyle::HalfSplit;
        let (at, site, kind) = named(mistaken(&whole, recipe, place, EXPANDED, &halves), recipe);
        assert_eq!((at, site.as_str(), kind), (place.to_string(), "rope_style=half-split", "CONFIG_VALUE"));
    }
}

/// What no kind explains stays UNKNOWN, and is placed on its span where little was captured.
#[test]
fn a_span_is_named_where_little_was_captured() {
    let whole = dump(RefRecipe::TorchF32);
    let place = Place::trunk(1, Point::Output);
    let noise = |i: usize, v: f32| if i.is_multiple_of(7) { v * 1.05 } else { v };
    let values = whole.ranks(place).expect("captured")[0].as_f32();
    let odd: Vec<f32> = values.iter().enumerate().map(|(i, v)| noise(i, *v)).collect();
    let hidden = with_values(&whole, place, &odd).only(|place| parts(place)[2]);
    let report = judged(hidden.clone(), RefRecipe::TorchF32);
    let (verdict, detail) = check(&report, "layers.1.output");
    assert!(verdict == Verdict::Divergent && detail.contains("from layers.0.output"), "{verdict:?} {detail}");
    assert_eq!(bad(&report)[0], "layers.1.output", "{}", show(&report));
    assert_eq!(named(hidden, RefRecipe::TorchF32).2, "UNKNOWN");
}

/// The dump with other values at every place of a point.
fn other(whole: &Trace, point: Point, of: impl Fn(&Trace, Place) -> Option<Vec<f32>>) -> Trace {
    let places: Vec<Place> = whole.places().into_iter().filter(|place| place.point == point).collect();
    places.into_iter().fold(whole.clone(), |trace, place| match of(whole, place) {
        Some(values) => with_values(&trace, place, &values),
        None => trace.only(|at| at != place),
    })
}

fn values(trace: &Trace, place: Place) -> Option<Vec<f32>> {
    trace.ranks(place).map(|ranks| ranks[0].as_f32())
}

/// The dump with rotated vectors stored as halves.
fn halves_stored(whole: &Trace) -> Trace {
    let c = of().checkpoint.config().clone();
    let halves = |start: usize, width: usize| {
        move |v: Vec<f32>| -> Vec<f32> {
            let from = |i: usize| match (i % width).checked_sub(start).filter(|j| *j < c.rope) {
                Some(j) => i - i % width + start + j % (c.rope / 2) * 2 + j / (c.rope / 2),
                None => i,
            };
            (0..v.len()).map(|i| v[from(i)]).collect()
        }
    };
    let turned = [
        (Point::Q, c.nope, c.qk_head()),
        (Point::KRope, 0, c.rope),
        (Point::IndexQ, 0, c.index_dim),
        (Point::IndexK, 0, c.index_dim),
    ];
    turned
        .into_iter()
        .fold(whole.clone(), |t, (point, start, width)| other(&t, point, |t, p| values(t, p).map(halves(start, width))))
}

#[test]
fn captures_that_are_wrong_are_not_laid_on_the_engine() {
    let c = of().checkpoint.config().clone();
    for recipe in [RefRecipe::TorchF32, HALF] {
        let whole = dump(recipe);
        let holds = |point: Point, other_point: Point| other(&whole, point, |t, p| values(t, p.at(other_point)));
        let reversed = {
            let rows = whole.ids.len();
            let flip = |v: Vec<f32>| {
                (0..v.len())
                    .map(|i| v[(rows - 1 - i / (v.len() / rows)) * (v.len() / rows) + i % (v.len() / rows)])
                    .collect()
            };
            Point::ALL
                .iter()
                .filter(|p| !p.is_choice())
                .fold(whole.clone(), |t, p| other(&t, *p, |t, p| values(t, p).map(flip)))
        };
        let last = Place::trunk(c.layers - 1, Point::Output);
        for (what, target, words) in [
            ("halves", halves_stored(&whole), "stored as halves"),
            ("residual apart", holds(Point::Output, Point::FfnOut), "without the residual"),
            ("one layer off", holds(Point::Output, Point::Input), "one too high"),
            ("written over", holds(Point::Input, Point::AttnNorm), "written over later"),
            (
                "normed",
                with_values(&whole, last, &values(&whole, Place::FINAL_NORM).expect("there")),
                "behind the final norm",
            ),
            (
                "reversed",
                reversed.only(|place| !place.point.is_choice() && !place.point.is_masked() || place == Place::LOGITS),
                "in reverse order",
            ),
        ] {
            let report = judged(target, recipe);
            let said = report.checks.iter().any(|c| c.detail.contains("CAPTURE") && c.detail.contains(words));
            assert!(bad(&report).is_empty() && said, "{what} {recipe:?}: {}", show(&report));
            assert_eq!(report.verdict(), Verdict::Drift, "{what} {recipe:?}");
        }
    }
}

/// The twin: an engine that goes on with such a value made it, and is accused.
#[test]
fn an_engine_that_goes_on_with_it_is_accused() {
    let recipe = RefRecipe::TorchF32;
    let whole = dump(recipe);
    let (at, lost) = (Place::trunk(1, Point::Output), values(&whole, Place::trunk(1, Point::FfnOut)).expect("there"));
    let mut run = with_values(&whole, at, &lost);
    run = with_values(&run, Place::trunk(2, Point::Input), &lost);
    // What follows is made from it.
    let norm = mistaken(&run, recipe, Place::trunk(2, Point::AttnNorm), EXPANDED, &|_| {});
    let report = judged(norm, recipe);
    assert!(bad(&report).contains(&"layers.1.output"), "{}", show(&report));
}

#[test]
fn sequences_written_one_behind_the_other_are_said_to_be() {
    let recipe = RefRecipe::TorchF32;
    let (whole, cut) = (dump(recipe), 15);
    let point = Place::trunk(0, Point::KRope);
    let moved = RefOptions { variant: Some(Variant::Position(-(cut as i64))), ..EXPANDED };
    let (first, behind) = (values(&whole, point).expect("there"), mistaken(&whole, recipe, point, moved, &|_| {}));
    let width = first.len() / TOKENS;
    let both = [&first[..cut * width], &values(&behind, point).expect("there")[cut * width..]].concat();
    let report = judged(with_values(&whole, point, &both), recipe);
    let (verdict, detail) = check(&report, "layers.0.attn.k_rope");
    assert!(verdict == Verdict::Unmeasured && detail.contains("begin again at token 15"), "{verdict:?} {detail}");
}
