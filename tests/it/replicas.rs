//! Ranks' copies of a replicated value in a dump, at rows that nobody judges.

use crate::common::PICO;
use crate::common::subject::{Silent, show, subject};
use lockstep::model::{Place, Point};
use lockstep::probe::{Captured, Trace, Values};
use lockstep::report::{StageReport, Verdict};
use lockstep::verify::activations;
use lockstep::verify::subject::{points_of, run_prompt};

/// A row that is not among those that `subject` judges.
const ROW: usize = 33;

fn run() -> Trace {
    run_at(2)
}

fn run_at(tp: usize) -> Trace {
    let of = subject(PICO, tp, 40);
    run_prompt(&mut of.engine().expect("an engine"), &of.ids, points_of(None)).expect("runs").0
}

fn judged(target: Trace) -> StageReport {
    let of = subject(PICO, target.tp, 40);
    assert!(!of.rows.contains(&ROW));
    activations::run(&lockstep::verify::Subject { target: Some(target), ..of }, &Silent).expect("runs")
}

/// The run with one row of a place times a factor on some ranks.
fn altered(run: &Trace, place: Place, ranks: &[usize], factor: f32) -> Trace {
    let captured = (0..run.tp).map(|rank| {
        let all = run.places().into_iter().map(|p| run.ranks(p).expect("captured")[rank].clone());
        let alter = |mut one: Captured| {
            let width = one.row_len();
            if let (true, Values::F32(values)) = (one.place == place && ranks.contains(&rank), &mut one.values) {
                values[ROW * width..(ROW + 1) * width].iter_mut().for_each(|v| *v *= factor);
            }
            one
        };
        all.map(alter).collect()
    });
    Trace::new(run.producer.clone(), run.ids.clone(), run.attention, captured.collect())
}

#[test]
fn a_copy_that_differs_is_named_with_rank_row_and_values() {
    let run = run();
    for point in [Point::QANorm, Point::FfnNorm, Point::Residual] {
        let place = Place::trunk(2, point);
        let report = judged(altered(&run, place, &[1], 1.05));
        let bad: Vec<_> = report.checks.iter().filter(|c| c.verdict > Verdict::Match).collect();
        assert_eq!(bad.len(), 1, "{place}: {}", show(&report));
        assert_eq!((bad[0].name.as_str(), bad[0].verdict), (place.to_string().as_str(), Verdict::Divergent));
        let says = format!("COPIES: rank 1's copy differs from rank 0's at token {ROW}, value 0: ");
        assert!(bad[0].detail.contains(&says), "{}", bad[0].detail);
    }
    let clean = judged(altered(&run, Place::trunk(2, Point::QANorm), &[1], 1.0));
    assert_eq!(clean.verdict(), Verdict::Match, "{}", show(&clean));
}

/// Of four ranks the odd one is named, rank 0 as well as any other; of two pairs neither is.
#[test]
fn the_odd_one_of_several_ranks_is_named() {
    let (run, place) = (run_at(4), Place::trunk(2, Point::FfnNorm));
    for (damaged, first, than, says) in [
        (vec![0], 0, 1, "it is the odd one of 4"),
        (vec![2], 2, 0, "it is the odd one of 4"),
        (vec![1, 2], 1, 0, "neither has more ranks on its side"),
    ] {
        let report = judged(altered(&run, place, &damaged, 1.05));
        let check = report.checks.iter().find(|c| c.name == place.to_string()).expect("judged");
        let who = format!("COPIES: rank {first}'s copy differs from rank {than}'s at token {ROW}");
        assert!(check.verdict == Verdict::Divergent && check.detail.contains(&who), "{damaged:?}: {}", check.detail);
        assert!(check.detail.contains(says), "{damaged:?}: {}", check.detail);
    }
}

/// Another engine's dump may lack the scores that a choice is made from; what those are made from says as much.
#[test]
fn a_choice_that_differs_is_named_without_its_scores() {
    let run = run();
    for (choice, scores) in [(Point::IndexTopk, Point::IndexScores), (Point::ExpertIds, Point::ChoiceScores)] {
        let place = Place::trunk(2, choice);
        let found = |damaged: bool, with_scores: bool| {
            let exchange = |mut one: Captured, rank: usize| {
                let width = one.row_len();
                if let (true, 1, Values::I32(values)) = (damaged && one.place == place, rank, &mut one.values) {
                    values[ROW * width..(ROW + 1) * width].reverse();
                }
                one
            };
            let kept = |p: &Place| with_scores || p.point != scores;
            let of_rank = |rank: usize| {
                let all = run.places().into_iter().filter(kept).map(|p| run.ranks(p).expect("captured")[rank].clone());
                all.map(|one| exchange(one, rank)).collect()
            };
            let captured = (0..run.tp).map(of_rank).collect();
            let report = judged(Trace::new(run.producer.clone(), run.ids.clone(), run.attention, captured));
            let check = report.checks.iter().find(|c| c.name == place.to_string()).expect("judged");
            (check.verdict, check.detail.clone())
        };
        for with_scores in [true, false] {
            let (verdict, detail) = found(true, with_scores);
            let says = format!("COPIES: rank 1's copy differs from rank 0's at token {ROW}");
            assert!(verdict == Verdict::Divergent && detail.contains(&says), "{place}: {verdict:?}: {detail}");
            assert_eq!(found(false, with_scores).0, Verdict::Match, "{place}");
        }
    }
}

#[test]
fn a_bisection_of_it_blames_no_kind_of_fault() {
    let place = Place::trunk(2, Point::QANorm);
    let bisect = |target| {
        let of = lockstep::verify::Subject { target: Some(target), ..subject(PICO, 2, 40) };
        lockstep::diagnose::bisect::run(&of, &Silent).expect("runs")
    };
    let run = run();
    let culprit = bisect(altered(&run, place, &[1], 1.05)).culprit.expect("a culprit");
    assert_eq!(
        (culprit.place.as_str(), culprit.kind, culprit.ranks),
        (place.to_string().as_str(), "RANKS_DISAGREE", vec![1])
    );
    assert!(bisect(run).culprit.is_none());
}
