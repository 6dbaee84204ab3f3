//! Every fault of the catalogue at three sites and two degrees is named: kind, layer, operation, ranks. Every negative
//! twin reports nothing, and a fault outside the catalogue's explanations is UNKNOWN.

use crate::common::PICO;
use crate::common::running::open;
use crate::common::subject::{Silent, over};
use lockstep::checkpoint::Checkpoint;
use lockstep::diagnose::bisect;
use lockstep::engine::{Attention, CpuBackend, Engines};
use lockstep::faults::decorate::{Decorations, FaultyEngines};
use lockstep::faults::{CATALOGUE, Injection, Target, inject};
use lockstep::report::Verdict;
use lockstep::report::bisection::Bisection;
use lockstep::verify::Subject;
use lockstep::verify::subject::{points_of, run_prompt};

/// 24 tokens of ordinary ids: top-k is 16, so sparse attention is active; two of the rows lie within it.
fn subject(tp: usize, engines: Box<dyn Engines>) -> Subject {
    let ids = (0..24).map(|i| 200 + i * 37 % 1700).collect();
    Subject { engines, ..over(open(PICO), tp, ids, vec![5, 12, 17, 19, 21, 23]) }
}

fn target(checkpoint: &Checkpoint, tp: usize) -> Target<'_> {
    Target { checkpoint, tp, attention: Attention::Dsa }
}

fn faulty(typed: &str, tp: usize) -> Box<dyn Engines> {
    let mut faults = Decorations::default();
    inject(&target(&open(PICO), tp), &Injection::parse(typed).expect("a fault"), &mut faults).expect("a valid site");
    Box::new(FaultyEngines(CpuBackend::default(), faults))
}

fn bisect(typed: &str, tp: usize) -> Bisection {
    bisect::run(&subject(tp, faulty(typed, tp)), &Silent).expect("runs")
}

/// Which ranks a fault shows on.
#[derive(Clone, Copy)]
enum Ranks {
    All,
    /// All but rank 0, whose own range is right.
    Others,
    One(usize),
}

/// Asserts kind, layer, operation and ranks at TP 2 and 8. Layers behind the fault are not judged: the first one counts.
fn assert_named(site: &str, kind: &str, layer: Option<usize>, op: &str, ranks: Ranks) {
    for tp in [2, 8] {
        let layers = layer.map(|last| (0..=last).collect());
        let of = Subject { layers, ..subject(tp, faulty(&format!("{kind}@{site}"), tp)) };
        let found = bisect::run(&of, &Silent).expect("runs");
        let at = format!("{kind}@{site} at tp {tp}");
        assert_eq!(found.verdict, Verdict::Divergent, "{at}");
        let culprit = found.culprit.expect("a culprit");
        let explained = culprit.explanation.unwrap_or_else(|| panic!("{at}: UNKNOWN, {:?}", culprit.ruled_out));
        assert_eq!(explained.kind, kind, "{at}: {}", explained.statement);
        if kind == "CONFIG_VALUE" {
            assert_eq!(explained.site, site.split(':').next().expect("a site"), "{at}: another setting");
        }
        assert_eq!((culprit.layer, culprit.operation), (layer, op), "{at}");
        let expected: Vec<usize> = match ranks {
            Ranks::All => (0..tp).collect(),
            Ranks::Others => (1..tp).collect(),
            Ranks::One(rank) => vec![rank],
        };
        assert_eq!(culprit.ranks, expected, "{at}");
        assert!(culprit.fits_as_well.iter().all(|e| e.kind == kind), "{at}: {:?}", culprit.fits_as_well);
    }
}

#[test]
fn fused_part_order() {
    let named = |site, layer, op, ranks| assert_named(site, "SHARD_ORDER", Some(layer), op, ranks);
    named("blk.2.attn_qkv_a", 2, "attn.q_a", Ranks::All);
    named("blk.0.ffn_gate_up", 0, "ffn.hidden", Ranks::All);
    named("blk.1.attn_q_b_indexer", 1, "attn.q_raw", Ranks::All);
    named("blk.2.ffn_gate_up_exps:rank=1", 2, "ffn.hidden", Ranks::One(1));
}

#[test]
fn k_b_read_in_the_other_layout() {
    let named = |site, layer, ranks| assert_named(site, "KV_B_LAYOUT", Some(layer), "attn.q_absorbed", ranks);
    named("blk.0.attn_k_b", 0, Ranks::All);
    named("blk.2.attn_k_b:rank=1", 2, Ranks::One(1));
    named("blk.1.attn_k_b", 1, Ranks::All);
}

#[test]
fn a_parameter_never_filled() {
    let named = |site, layer, op, ranks| assert_named(site, "NAME_MAP", layer, op, ranks);
    named("blk.1.ffn_down_exps", Some(1), "ffn.routed", Ranks::All);
    named("blk.2.indexer.proj:rank=1", Some(2), "attn.index_weights", Ranks::One(1));
    named("blk.1.attn_output:rank=1", Some(1), "attn.out", Ranks::One(1));
    named("output", None, "logits", Ranks::All);
}

#[test]
fn quantised_bytes_read_as_plain() {
    let named = |site, layer, op, ranks| assert_named(site, "DTYPE_REINTERPRET", layer, op, ranks);
    named("blk.2.indexer.attn_k", Some(2), "attn.index_k", Ranks::All);
    named("blk.1.attn_q_b", Some(1), "attn.q_raw", Ranks::All);
    named("blk.2.ffn_up_exps", Some(2), "ffn.hidden", Ranks::All);
    named("blk.2.attn_k_b:rank=1", Some(2), "attn.q_absorbed", Ranks::One(1));
}

#[test]
fn a_setting_that_the_file_does_not_state() {
    let named = |site, layer, op, ranks| assert_named(site, "CONFIG_VALUE", layer, op, ranks);
    named("rms_eps=1e-6", Some(0), "attn.norm", Ranks::All);
    named("rope_base=10000:rank=1", Some(0), "attn.q", Ranks::One(1));
    named("gating=softmax", Some(1), "ffn.choice_scores", Ranks::All);
    // Two weights a token: it takes every row to have enough of them.
    let of = Subject { rows: (0..24).collect(), ..subject(2, faulty("CONFIG_VALUE@expert_scale=1:rank=1", 2)) };
    let culprit = bisect::run(&of, &Silent).expect("runs").culprit.expect("a culprit");
    assert_eq!(culprit.place, "layers.1.ffn.expert_weights");
    let explained = culprit.explanation.expect("explained");
    assert_eq!(
        (explained.kind, explained.site.as_str(), &explained.ranks[..]),
        ("CONFIG_VALUE", "expert_scale=1", &[1][..])
    );
}

#[test]
fn sparse_attention_dropped() {
    let named = |site, layer, ranks| assert_named(site, "DSA_INACTIVE", Some(layer), "attn.latent", ranks);
    named("layers.0.attn.latent", 0, Ranks::All);
    named("layers.2.attn.latent:rank=1", 2, Ranks::One(1));
    named("layers.1.attn.latent", 1, Ranks::All);
}

#[test]
fn sparse_attention_dropped_is_clean_within_top_k() {
    let found = bisect("DSA_INACTIVE@layers.1.attn.latent", 2);
    let tokens = found.culprit.expect("a culprit").tokens;
    assert!(tokens.iter().all(|t| *t >= 16) && !tokens.is_empty(), "{tokens:?}");
    let mut short = subject(2, faulty("DSA_INACTIVE@layers.1.attn.latent", 2));
    short.ids.truncate(16);
    short.rows = vec![5, 12, 15];
    assert!(bisect::run(&short, &Silent).expect("runs").culprit.is_none(), "16 tokens see every key anyway");
}

#[test]
fn rank_zeros_range_everywhere() {
    let named = |site, layer, op, ranks| assert_named(site, "SHARD_PLACEMENT", layer, op, ranks);
    named("blk.0.ffn_down", Some(0), "ffn.out", Ranks::Others);
    named("blk.2.ffn_gate_up_exps", Some(2), "ffn.hidden", Ranks::Others);
    named("blk.2.attn_k_b", Some(2), "attn.q_absorbed", Ranks::Others);
    named("blk.1.ffn_down_exps:rank=1", Some(1), "ffn.routed", Ranks::One(1));
    named("token_embd", None, "embed", Ranks::Others);
}

#[test]
fn a_rank_that_adds_nothing() {
    let named = |site, layer, op, ranks| assert_named(site, "REDUCE_MISSED", layer, op, ranks);
    named("layers.2.attn.out:rank=1", Some(2), "attn.out", Ranks::One(1));
    named("layers.0.ffn.out:rank=0", Some(0), "ffn.out", Ranks::One(0)); // a dense layer
    named("layers.2.ffn.out", Some(2), "ffn.out", Ranks::One(1)); // a mixture: routed and shared parts together
    named("embed:rank=1", None, "embed", Ranks::One(1));
}

/// Zeros where a rank's part of the parameter should be, and a part that is never added, give the same values; only the
/// bytes on the devices tell them apart, and a dump has none.
#[test]
fn a_lost_part_of_the_sum_is_told_from_lost_data_by_bytes() {
    for (typed, kind) in
        [("REDUCE_MISSED@layers.1.attn.out:rank=1", "REDUCE_MISSED"), ("NAME_MAP@blk.1.attn_output:rank=1", "NAME_MAP")]
    {
        let mut subject = subject(2, faulty(typed, 2));
        let culprit = bisect::run(&subject, &Silent).expect("runs").culprit.expect("a culprit");
        assert_eq!(culprit.explanation.expect("explained").kind, kind);
        assert!(culprit.fits_as_well.is_empty(), "{typed}: {:?}", culprit.fits_as_well);
        let trace =
            run_prompt(&mut subject.engine().expect("an engine"), &subject.ids, points_of(None)).expect("runs").0;
        subject.target = Some(trace);
        let culprit = bisect::run(&subject, &Silent).expect("runs").culprit.expect("a culprit");
        let all = culprit.explanation.iter().chain(&culprit.fits_as_well);
        let both: Vec<&str> = all.map(|e| e.kind).collect();
        assert_eq!(both, ["REDUCE_MISSED", "NAME_MAP"], "{typed}");
    }
}

#[test]
fn one_rank_has_nothing_to_miss() {
    assert!(
        CATALOGUE.iter().filter(|f| f.kind == "REDUCE_MISSED").all(|f| (f.sites)(&target(&open(PICO), 1)).is_empty())
    );
}

#[test]
fn what_no_kind_explains_is_unknown() {
    for site in ["layers.2.ffn.norm", "layers.1.attn.latent", "layers.2.attn.q_absorbed:rank=1"] {
        let culprit = bisect(&format!("OP_NOISE@{site}"), 2).culprit.expect("a culprit");
        let site = site.split(':').next().expect("a site");
        assert_eq!(culprit.place, site);
        assert!(culprit.explanation.is_none(), "{site}: {:?}", culprit.explanation);
    }
}

/// The twin of every injection above: the same runs without a fault, also through the decorators.
#[test]
fn without_a_fault_nothing_is_reported() {
    for tp in [2, 8] {
        let decorated: Box<dyn Engines> = Box::new(FaultyEngines(CpuBackend::default(), Decorations::default()));
        for engines in [Box::new(CpuBackend::default()) as Box<dyn Engines>, decorated] {
            let found = bisect::run(&subject(tp, engines), &Silent).expect("runs");
            assert_eq!(found.verdict, Verdict::Match, "tp {tp}: {:?}", found.culprit);
            assert!(found.culprit.is_none() && found.others.is_empty() && found.judged > 75);
        }
    }
}

#[test]
fn every_listed_site_is_valid_and_nothing_else_is() {
    let checkpoint = open(PICO);
    for fault in CATALOGUE {
        assert!((fault.sites)(&target(&checkpoint, 2)).len() >= 3, "{}", fault.kind);
        for site in (fault.sites)(&target(&checkpoint, 2)) {
            let injection = Injection::parse(&format!("{}@{site}", fault.kind)).expect("readable");
            let mut into = Decorations::default();
            inject(&target(&checkpoint, 2), &injection, &mut into).expect("valid");
            let added =
                into.tensors.len() + into.orders.len() + into.placements.len() + into.ops.len() + into.settings.len();
            assert!(added > 0, "{}@{site} decorates nothing", fault.kind);
        }
    }
    for bad in ["NAME_MAP@blk.9.attn_q_b", "NOPE@blk.0.attn_q_b", "KV_B_LAYOUT@blk.0.attn_v_b"] {
        let injection = Injection::parse(bad).expect("readable");
        assert!(inject(&target(&checkpoint, 2), &injection, &mut Decorations::default()).is_err(), "{bad}");
    }
    let beyond = Injection::parse("NAME_MAP@blk.0.attn_q_b:rank=2").expect("readable");
    assert!(inject(&target(&checkpoint, 2), &beyond, &mut Decorations::default()).is_err());
}
