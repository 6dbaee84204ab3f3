//! The engine against itself: a clean engine passes at every degree, and each broken promise is found and named.

use crate::common::odd::{Fault, OddEngines, odd};
use crate::common::subject::{Silent, check, show, subject, with};
use crate::common::{GLM5_NANO, NANO52, PICO};
use lockstep::engine::Attention;
use lockstep::report::{StageReport, Verdict};
use lockstep::verify::{Subject, invariants};

fn run(subject: &Subject) -> StageReport {
    invariants::run(subject, &Silent).expect("runs")
}

/// The stage over pico, 40 tokens, with a fault. One rank needs no reference.
fn broken(fault: Fault, tp: usize) -> StageReport {
    run(&with(PICO, tp, 40, odd(fault)))
}

/// The named checks have the verdict and say each of the texts; the stage's verdict is theirs.
fn finds(report: &StageReport, verdict: Verdict, name: &str, texts: &[&str]) {
    let (found, detail) = check(report, name);
    assert_eq!((found, report.verdict()), (verdict, verdict), "{name}: {}", show(report));
    for text in texts {
        assert!(detail.contains(text), "{name} does not say {text:?}: {detail}");
    }
}

#[test]
fn devices_that_choose_are_held_to_the_hosts_choice() {
    let report = broken(Fault::RunsAhead, 1);
    let (verdict, detail) = check(&report, "device's choice = host's");
    assert_eq!(verdict, Verdict::Match, "{}", show(&report));
    assert!(detail.starts_with("36 tokens, "), "{detail}");
    let texts = ["sequence 1, step ", "expected token"];
    finds(&broken(Fault::DrawsAsTheFirst, 1), Verdict::Divergent, "device's choice = host's", &texts);
}

/// A clean engine at these degrees.
fn clean(model: &str, tokens: usize, degrees: &[usize]) {
    for &tp in degrees {
        let report = run(&subject(model, tp, tokens));
        assert_eq!(report.verdict(), Verdict::Match, "{model} at tp {tp}: {}", show(&report));
        let unasked = report.checks.iter().filter(|c| c.verdict == Verdict::NotApplicable).count();
        assert_eq!(unasked, if tp == 1 { 4 } else { 2 }, "{}", show(&report));
        if let Some(worst) = report.worst() {
            let (rho, limit) = worst.rho.expect("judged by the floor");
            assert!(rho < limit / 2.0, "a clean engine is far from its limit: {rho} of {limit}");
        }
    }
}

#[test]
fn glm5_nano_keeps_every_promise() {
    clean(GLM5_NANO, 68, &[8]);
}

#[test]
fn pico_keeps_every_promise() {
    clean(PICO, 40, &[1, 2, 8]);
}

#[test]
fn shared_indexer_layers_keep_every_promise() {
    clean(NANO52, 40, &[1, 2]);
}

#[test]
fn the_decorated_engine_without_a_fault_is_clean() {
    let report = broken(Fault::None, 2);
    assert_eq!(report.verdict(), Verdict::Match, "{}", show(&report));
}

#[test]
fn dense_subjects_and_short_prompts() {
    let report = run(&Subject { attention: Attention::Dense, ..subject(PICO, 1, 40) });
    assert_eq!(report.verdict(), Verdict::Match, "{}", show(&report));
    let report = run(&subject(PICO, 1, 16));
    finds(&report, Verdict::Inactive, "sparse attention is active", &["16 tokens", "top-k 16"]);
    assert_eq!(run(&subject(PICO, 1, 1)).verdict(), Verdict::Unmeasured);
}

#[test]
fn results_that_depend_on_the_chunk_are_named() {
    let report = broken(Fault::DependsOnRows(1e-6), 1);
    let texts = ["CHUNK_DEPENDENCE", "first op layers.2.attn.q_a", "token 0", "chunk 1 of 6"];
    finds(&report, Verdict::Divergent, "chunked = whole (7 tokens)", &texts);
    finds(&report, Verdict::Divergent, "prefill = decode", &["DECODE_DEPENDENCE", "layers.2.attn.q_a"]);
    finds(
        &report,
        Verdict::Divergent,
        "length sweep",
        &["LENGTH_DEPENDENCE", "first bad length 7", "layers.2.attn.q_a"],
    );
    // 16 tokens, then 5 at a time: the first chunk has enough rows to be like the whole.
    finds(&report, Verdict::Divergent, "chunked = whole (16, then 5 tokens)", &["token 16", "chunk 2 of 6"]);
}

#[test]
fn a_device_that_promises_no_bits_is_judged_by_the_floor() {
    let vague = |share: f32| {
        let engines = OddEngines { fault: Fault::DependsOnRows(share), one_order: false, ..odd(Fault::None) };
        run(&with(PICO, 2, 24, engines))
    };
    let report = vague(1e-7);
    assert_eq!(report.verdict(), Verdict::Match, "{}", show(&report));
    let report = vague(1e-3);
    finds(&report, Verdict::Divergent, "chunked = whole (7 tokens)", &["CHUNK_DEPENDENCE", "rho"]);
    finds(&report, Verdict::Divergent, "prefill = decode", &["DECODE_DEPENDENCE", "rho"]);
    assert_eq!(check(&report, "TP 1 = TP 2").0, Verdict::Match, "both are wrong in the same way: {}", show(&report));
}

#[test]
fn unequal_runs_stop_everything_and_name_the_op() {
    let report = broken(Fault::Flips, 1);
    finds(&report, Verdict::Nondeterministic, "three runs bit-equal", &["first op layers.1.attn.out", "token 0"]);
    assert_eq!(report.checks.len(), 1, "nothing else is judged");
}

#[test]
fn results_that_depend_on_the_batch_are_named() {
    let report = broken(Fault::DependsOnSlot, 1);
    let texts = ["BATCH_DEPENDENCE", "first op layers.0.attn.q,", "token 0"];
    finds(&report, Verdict::Divergent, "batch 1 = N (last of 3)", &texts);
    assert_eq!(check(&report, "chunked = whole (7 tokens)").0, Verdict::Match);
}

#[test]
fn a_fused_kernel_that_is_not_its_parts_is_named() {
    let report = broken(Fault::FusedEps, 1);
    finds(&report, Verdict::Divergent, "fused = composed", &["first op layers.1.ffn.norm"]);
    assert_eq!(check(&report, "dumps on = off").0, Verdict::Match, "{}", show(&report));
}

#[test]
fn sparse_attention_that_does_not_run_is_inactive() {
    let report = broken(Fault::AttendsToAll, 2);
    finds(
        &report,
        Verdict::Inactive,
        "sparse attention is active",
        &["layers.0.attn.latent", "24 tokens over top-k 16"],
    );
}

#[test]
fn a_lost_or_doubled_partial_sum_is_far_above_the_floor() {
    for (model, fault, op) in [
        (PICO, Fault::SharedLost, "first op layers.2.ffn.shared"),
        (NANO52, Fault::Contributes(0.0), "first op layers.3.ffn.out"),
        (NANO52, Fault::Contributes(2.0), "first op layers.3.ffn.out"),
    ] {
        let report = run(&with(model, 2, 24, odd(fault)));
        finds(&report, Verdict::Divergent, "TP 1 = TP 2", &[op, "token 0"]);
        let (rho, limit) = report.worst().and_then(|c| c.rho).expect("judged by the floor");
        assert!(rho > 100.0 * limit, "{fault:?}: {rho}");
    }
}

#[test]
fn a_choice_against_a_clear_margin_is_named() {
    let report = broken(Fault::ChoosesWorst, 2);
    finds(&report, Verdict::Divergent, "TP 1 = TP 2", &["layers.2.ffn.expert_ids, token 5, target", "margin"]);
    finds(&report, Verdict::Divergent, "replicated on every rank", &["layers.2.ffn.expert_ids", "rank 1"]);
}
