//! The engine against itself: a clean engine passes at every degree, and each broken promise is found and named.

mod common;
#[path = "common/subject.rs"]
mod subjects;

use lockstep::verify::{Verdict, invariants};
use subjects::{NANO, NANO52, PICO, Silent, show, subject};

#[test]
fn clean_engines_keep_every_promise() {
    for (model, tokens) in [(NANO, 80), (PICO, 40), (NANO52, 40)] {
        for tp in [1, 2, 8] {
            let report = invariants::run(&subject(model, tp, tokens), &Silent).expect("runs");
            assert_eq!(report.verdict(), Verdict::Match, "{model} at tp {tp}: {}", show(&report));
        }
    }
}

#[test]
fn timing() {
    let report = invariants::run(&subject(NANO, 8, 112), &Silent).expect("runs");
    panic!("{}", show(&report));
}
