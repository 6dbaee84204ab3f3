//! What any operation writes can be damaged, and the damage is found where it is first shown, never at another operation:
//! values and caches by replay, choices of tokens by what is drawn.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use crate::common::PICO;
use crate::common::subject::{Silent, check, show, subject, with};
use lockstep::device::program::{RULES, Want};
use lockstep::device::{Limits, Op, Operand, Program, ProgramId, Recipe};
use lockstep::engine::arch::Model;
use lockstep::engine::{Attention, CpuBackend};
use lockstep::faults::around::OpFault;
use lockstep::faults::decorate::{Decorations, FaultyEngines};
use lockstep::faults::{Injection, Target, inject};
use lockstep::model::Place;
use lockstep::report::Verdict;
use lockstep::shard::TpPlan;
use lockstep::verify::{Subject, invariants, operations};

const TP: usize = 2;

/// The forward pass of rank 0, as it is written and as it is fused.
fn programs(of: &Subject) -> [Program; 2] {
    let c = of.checkpoint.config();
    let plan = TpPlan::new(c, TP).expect("a legal degree");
    let limits = Limits { tokens: 64, sequences: 1, logits: 64, pages: 2, page: 32 };
    let model = Model::new(c, &plan, 0, Attention::Dsa, Recipe::Strict, limits);
    let written = model.program(ProgramId { head: true, ahead: true, expanded: true });
    let fused = written.fuse(RULES, &|_| Want::Read);
    [written, fused]
}

/// The places where a damage of the last thing that `calls` write is shown before another operation is judged by it, in
/// order: what is shown is what the next operations are replayed from.
fn shown(program: &Program, calls: &[usize]) -> Vec<Place> {
    let mut bad: HashSet<(String, usize)> = HashSet::new();
    let parts = |what: &Operand| -> Vec<(String, usize)> {
        match what {
            Operand::Values(view) => {
                view.ranges().flatten().map(|column| (format!("{:?}", view.buf), column)).collect()
            }
            other => vec![(format!("{other:?}"), 0)],
        }
    };
    let mut places = Vec::new();
    for at in 0..=program.calls.len() {
        for show in program.shows.iter().filter(|s| s.after == at) {
            let own = parts(&show.what);
            if own.iter().any(|p| bad.contains(p)) {
                places.push(show.place);
                bad.retain(|p| !own.contains(p));
            }
        }
        let Some(call) = program.calls.get(at) else { break };
        let tainted = call.op.reads().iter().flat_map(parts).any(|p| bad.contains(&p));
        for what in call.op.writes() {
            let written = parts(&what);
            bad.retain(|p| !written.contains(p));
            bad.extend(written.into_iter().filter(|_| tainted));
        }
        if calls.contains(&at) {
            bad.extend(call.op.writes().last().map(parts).unwrap_or_default());
        }
    }
    places
}

/// One place for each operation, deep enough that layers lie before and behind it.
fn sites(programs: &[Program; 2]) -> BTreeMap<&'static str, (usize, Place)> {
    let mut sites = BTreeMap::new();
    for (which, program) in programs.iter().enumerate() {
        for call in &program.calls {
            let deep = call.at.layer().is_none_or(|l| l <= 2);
            if deep && (which == 0 || !sites.contains_key(call.op.name()) || matches!(call.op, Op::AddNorm { .. })) {
                sites.insert(call.op.name(), (which, call.at));
            }
        }
    }
    sites
}

fn damaged(place: Place, op: &'static str) -> Decorations {
    Decorations { ops: vec![(None, place, OpFault::Damaged(Some(op)))], ..Decorations::default() }
}

#[test]
fn every_operation_can_be_damaged_and_is_found_where_it_is_shown() {
    let clean = subject(PICO, TP, 40);
    let programs = programs(&clean);
    let sites = sites(&programs);
    assert_eq!(sites.keys().copied().collect::<BTreeSet<_>>(), Op::NAMES.iter().copied().collect(), "all operations");
    for (op, (which, place)) in sites {
        let engines = FaultyEngines(CpuBackend::ahead(4), damaged(place, op));
        let of = with(PICO, TP, 40, engines);
        if matches!(op, "Sample" | "Share" | "Commit") {
            let report = invariants::run(&of, &Silent).expect("runs");
            let bad: Vec<&str> =
                report.checks.iter().filter(|c| c.verdict == Verdict::Divergent).map(|c| c.name.as_str()).collect();
            // Texts that are chosen otherwise part from those that were chosen alone, too.
            let scheduled =
                |name: &&str| ["together = alone", "= uninterrupted", "= none"].iter().any(|n| name.ends_with(n));
            assert_eq!(bad.first(), Some(&"device's choice = host's"), "{op}: {}", show(&report));
            assert!(bad[1..].iter().all(scheduled), "{op}: {}", show(&report));
            continue;
        }
        let program = &programs[which];
        let hit = |i: &usize| program.calls[*i].at == place && program.calls[*i].op.name() == op;
        let calls: Vec<usize> = (0..program.calls.len()).filter(hit).collect();
        let expected = shown(program, &calls);
        assert!(!expected.is_empty(), "{op} at {place} is shown nowhere");
        let findings = operations::findings(&of, &Silent).expect("runs");
        let bad: Vec<Place> = findings.iter().filter(|f| f.verdict == Verdict::Divergent).map(|f| f.place).collect();
        let first = expected.iter().min().copied();
        assert_eq!(bad.iter().min().copied(), first, "{op} at {place}: {bad:?}");
        assert!(bad.iter().all(|b| expected.contains(b)), "{op} at {place}: {bad:?}, expected {expected:?}");
    }
}

/// The twin: the same engines without a fault.
#[test]
fn without_damage_nothing_is_found() {
    let of = with(PICO, TP, 40, FaultyEngines(CpuBackend::ahead(4), Decorations::default()));
    let findings = operations::findings(&of, &Silent).expect("runs");
    let bad: Vec<Place> = findings.iter().filter(|f| f.verdict > Verdict::Match).map(|f| f.place).collect();
    assert!(bad.is_empty() && findings.len() > 60, "{bad:?} of {}", findings.len());
    let report = invariants::run(&of, &Silent).expect("runs");
    assert_eq!(check(&report, "device's choice = host's").0, Verdict::Match, "{}", show(&report));
}

#[test]
fn a_fault_that_changes_nothing_is_an_error() {
    let of = |faults| with(PICO, TP, 40, FaultyEngines(CpuBackend::default(), faults)).engine().err();
    let place = |name: &str| name.parse::<Place>().expect("a place");
    for (faults, says) in [
        (damaged(place("layers.2.attn.q_a"), "Rope"), "layers.2.attn.q_a"),
        (damaged(place("layers.99.attn.q_a"), "Product"), "layers.99.attn.q_a"),
        (
            Decorations { ops: vec![(None, place("logits"), OpFault::NoContribution)], ..Decorations::default() },
            "logits",
        ),
    ] {
        let error = of(faults).expect("refused").to_string();
        assert!(error.contains("changes nothing") && error.contains(says), "{error}");
    }
    assert!(of(damaged(place("layers.2.attn.q_a"), "Product")).is_none());
    // Where attention is dense by choice there is no choice to ignore, and rank 0's own range is right.
    let checkpoint = &subject(PICO, TP, 40).checkpoint;
    let parse = |typed: &str| Injection::parse(typed).expect("readable");
    let target = |attention| Target { checkpoint, tp: TP, attention };
    let (keys, mut into) = (parse("DSA_INACTIVE@layers.1.attn.latent"), Decorations::default());
    assert!(inject(&target(Attention::Dense), &keys, &mut into).is_err());
    inject(&target(Attention::Dsa), &keys, &mut into).expect("valid");
    assert!(of(into).is_none());
    let mut into = Decorations::default();
    inject(&target(Attention::Dsa), &parse("SHARD_PLACEMENT@blk.1.attn_output:rank=0"), &mut into).expect("valid");
    let error = of(into).expect("refused").to_string();
    assert!(error.contains("blk.1.attn_output changes nothing"), "{error}");
}
