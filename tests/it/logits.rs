//! What comes out at the end, against the reference: clean engines and dumps match, faults do not, and what is missing
//! is never a pass.

use std::sync::Arc;

use crate::common::odd::{Fault, odd};
use crate::common::subject::{Silent, check, over, show, subject, with};
use crate::common::{GLM5_NANO, Model, NANO52, PICO, golden};
use crate::stages::{edited, nano, of_a_head_too_large, quantised_again};
use lockstep::checkpoint::Checkpoint;
use lockstep::model::{Place, Point};
use lockstep::probe::{Captured, Trace, Values};
use lockstep::report::{StageReport, Verdict};
use lockstep::verify::subject::run_prompt;
use lockstep::verify::{Subject, logits};

fn run(subject: &Subject) -> StageReport {
    logits::run(subject, &Silent).expect("runs")
}

#[test]
fn clean_engines_say_what_the_reference_says() {
    for (model, tp, tokens) in [(PICO, 8, 40), (PICO, 2, 40), (NANO52, 1, 40)] {
        let report = run(&subject(model, tp, tokens));
        assert_eq!(report.verdict(), Verdict::Match, "{model} at tp {tp}: {}", show(&report));
        for part in ["KL", "logits", "top-1", "greedy text"] {
            let own = check(&report, &format!("{part}, a fixed sequence"));
            assert_eq!(own.0, Verdict::Match, "{}", show(&report));
        }
        assert_eq!(check(&report, "MTP").0, Verdict::NotApplicable);
        let (rho, limit) = report.worst().and_then(|c| c.rho).expect("judged by the floor");
        assert!(rho < limit / 2.0, "a clean engine is far from its limit: {rho} of {limit}");
    }
    assert!(run(&subject(PICO, 1, 20)).checks.iter().any(|c| c.name == "greedy text, prose"), "built-in prompts");
}

#[test]
fn a_lost_partial_sum_shows_in_every_measure_of_distance() {
    let report = run(&with(PICO, 2, 40, odd(Fault::SharedLost)));
    for part in ["KL", "logits"] {
        assert_eq!(check(&report, &format!("{part}, a fixed sequence")).0, Verdict::Divergent, "{}", show(&report));
    }
    let all_keys = run(&with(PICO, 1, 40, odd(Fault::AttendsToAll)));
    assert_eq!(check(&all_keys, "KL, a fixed sequence").0, Verdict::Divergent, "{}", show(&all_keys));
}

#[test]
fn a_dump_is_judged_by_what_it_holds() {
    let mut of = subject(PICO, 2, 40);
    let mut dump = |keep: fn(Point) -> bool| {
        let kept = Arc::new(move |place: Place| keep(place.point));
        let trace = run_prompt(&mut of.engine().expect("an engine"), &of.ids, kept).expect("runs").0;
        of.target = Some(trace);
        run(&of)
    };
    let whole = dump(|p| p == Point::Logits || p.is_choice());
    assert_eq!(whole.verdict(), Verdict::Match, "{}", show(&whole));
    assert_eq!(check(&whole, "greedy text").0, Verdict::NotApplicable);
    let silent = dump(|p| p != Point::Logits);
    assert_eq!(silent.verdict(), Verdict::Unmeasured, "{}", show(&silent));
    // Without the choices the reference's own serve, as far as no near tie makes them doubtful.
    let without = dump(|p| p == Point::Logits);
    assert!(matches!(without.verdict(), Verdict::Match | Verdict::Unmeasured), "{}", show(&without));
    assert!(without.summary.contains("choices missing"));
}

/// One logit of a row hides in it, and not in its column.
#[test]
fn a_column_that_is_off_is_found() {
    let of = subject(PICO, 1, 40);
    let kept = Arc::new(move |place: Place| place.point == Point::Logits || place.point.is_choice());
    let trace = run_prompt(&mut of.engine().expect("an engine"), &of.ids, kept).expect("runs").0;
    let judged = |off: f32| {
        let shift = |mut one: Captured| {
            let width = one.row_len();
            if let (Point::Logits, Values::F32(values)) = (one.place.point, &mut one.values) {
                values.iter_mut().skip(7).step_by(width).for_each(|v| *v += off);
            }
            one
        };
        let captured =
            trace.places().into_iter().map(|p| shift(trace.ranks(p).expect("captured")[0].clone())).collect();
        let target = Trace::new(trace.producer.clone(), trace.ids.clone(), trace.attention, vec![captured]);
        run(&Subject { target: Some(target), ..subject(PICO, 1, 40) })
    };
    let off = judged(1e-4);
    let logits = off.checks.iter().find(|c| c.name.starts_with("logits")).expect("judged");
    assert!(logits.verdict == Verdict::Divergent && logits.detail.contains(" in column 7;"), "{}", show(&off));
    let others = off.checks.iter().filter(|c| c.verdict > Verdict::Match).count();
    assert_eq!(others, 1, "nothing else sees it: {}", show(&off));
    let clean = judged(0.0);
    assert_eq!(clean.verdict(), Verdict::Match, "{}", show(&clean));
    assert_eq!(clean.reach.positions, 40, "a dump is run over its tokens");
}

/// Parameters that are the baseline's byte for byte cost nothing, so that the others cannot hide behind their types.
#[test]
fn only_what_was_quantised_again_may_cost() {
    let found = |model: &Model| {
        let of = Subject {
            baseline: Some(edited(&nano())),
            own_prompt: true,
            ..over(edited(model), 1, (1..33).map(|i| i * 37 % 4000).collect(), vec![31])
        };
        let report = run(&of);
        let check = report.checks.into_iter().find(|c| c.name.starts_with("baseline")).expect("compared");
        (check.verdict, check.detail)
    };
    let (verdict, detail) = found(&nano());
    assert!(verdict == Verdict::Match && detail.contains("every parameter is the baseline's"), "{detail}");
    let (verdict, detail) = found(&of_a_head_too_large());
    assert!(verdict == Verdict::Divergent, "{detail}");
    let (verdict, detail) = found(&quantised_again(10));
    assert!(verdict == Verdict::Match && detail.contains("from noise on "), "{detail}");
}

#[test]
fn another_checkpoint_is_told_from_the_cost_of_types() {
    let baseline = |model: &str| Some(Arc::new(Checkpoint::open(Some(&golden(model))).expect("a model")));
    let same = run(&Subject { baseline: baseline(PICO), ..subject(PICO, 1, 24) });
    assert_eq!(check(&same, "baseline").0, Verdict::Match, "{}", show(&same));
    let other = run(&Subject { baseline: baseline(NANO52), ..subject(PICO, 1, 24) });
    assert_eq!(check(&other, "baseline").0, Verdict::Divergent, "{}", show(&other));
    let foreign = run(&Subject { baseline: baseline(GLM5_NANO), ..subject(PICO, 1, 24) });
    assert_eq!(check(&foreign, "baseline").0, Verdict::NotApplicable, "{}", show(&foreign));
}
