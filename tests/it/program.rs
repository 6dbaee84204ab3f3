//! Programs: those of real models pass the check at every degree, on all ranks; each way to damage one is refused; and
//! fusing keeps what is shown, or what may be changed, apart.

use std::collections::BTreeSet;

use crate::common::running::open;
use crate::common::{GLM5_NANO, NANO52, PICO};
use lockstep::device::check::check;
use lockstep::device::program::{RULES, Want};
use lockstep::device::{BufId, Limits, Op, Operand, Program, ProgramId, Recipe, Stores, View};
use lockstep::engine::Attention;
use lockstep::engine::arch::{Model, Resident};
use lockstep::model::{Param, Place, Point, params};
use lockstep::shard::TpPlan;
use proptest::prelude::*;

const WHOLE: ProgramId = ProgramId { head: true, ahead: true, expanded: true };

fn models(model: &str, tp: usize, attention: Attention) -> Vec<Model> {
    let checkpoint = open(model);
    let plan = TpPlan::new(checkpoint.config(), tp).expect("a legal degree");
    let limits = Limits { tokens: 64, sequences: 2, logits: 64, pages: 4, page: 32 };
    (0..tp).map(|r| Model::new(checkpoint.config(), &plan, r, attention, Recipe::Fast, limits)).collect()
}

fn checked(programs: &[Program], models: &[Model]) -> Result<(), String> {
    let ranks: Vec<(&Program, &Stores)> = programs.iter().zip(models).map(|(p, m)| (p, &m.stores)).collect();
    check(&ranks).map_err(|e| e.to_string())
}

fn wants_nothing(_: Place) -> Want {
    Want::Nothing
}

#[test]
fn programs_of_real_models_pass() {
    for model in [GLM5_NANO, NANO52, PICO] {
        for tp in [1, 2, 8] {
            for attention in [Attention::Dsa, Attention::Dense] {
                let models = models(model, tp, attention);
                for (head, ahead) in [(false, false), (true, false), (true, true)] {
                    let id = ProgramId { head, ahead, expanded: true };
                    let written: Vec<Program> = models.iter().map(|m| m.program(id)).collect();
                    checked(&written, &models).expect("as it is written");
                    let fused: Vec<Program> = written.iter().map(|p| p.fuse(RULES, &wants_nothing)).collect();
                    checked(&fused, &models).expect("as it is fused");
                    assert!(fused[0].calls.len() < written[0].calls.len());
                    let has = |point| written[0].shows.iter().any(|s| s.place.point == point);
                    assert_eq!((has(Point::Logits), has(Point::NextToken)), (head, false));
                }
            }
        }
    }
}

/// What attention is chosen changes nothing of what a rank holds.
#[test]
fn every_parameter_of_the_trunk_is_held() {
    for model in [GLM5_NANO, NANO52, PICO] {
        let checkpoint = open(model);
        let c = checkpoint.config();
        let trunk: BTreeSet<Param> = params::of_trunk(c).into_iter().collect();
        for attention in [Attention::Dsa, Attention::Dense] {
            let model = models(model, 2, attention).remove(1);
            let resident = model.weights.iter().flat_map(|resident| match *resident {
                Resident::Single(param) => vec![param],
                Resident::Group(group, layer) => group.parts(c, layer),
            });
            let held: Vec<Param> = resident.chain(model.vectors.iter().map(|(_, param)| *param)).collect();
            assert_eq!(held.iter().copied().collect::<BTreeSet<_>>(), trunk, "{attention:?}");
            assert_eq!(held.len(), trunk.len(), "held twice");
        }
    }
}

#[test]
fn places_are_shown_in_the_order_of_the_pass() {
    let program = models(NANO52, 2, Attention::Dsa)[1].program(WHOLE);
    let places: Vec<Place> = program.shows.iter().map(|s| s.place).collect();
    let mut once = places.clone();
    once.dedup();
    assert_eq!(places.len(), once.len(), "a place is shown twice");
    // kv_a comes from the same product as q_a, and is shown with it.
    let ordered: Vec<Place> = places.iter().copied().filter(|p| p.point != Point::KvA).collect();
    let mut sorted = ordered.clone();
    sorted.sort();
    assert_eq!(ordered, sorted);
}

#[test]
fn a_point_inside_a_fused_call_is_looked_at_there_and_changed_only_apart() {
    let written = models(PICO, 1, Attention::Dsa)[0].program(WHOLE);
    let residual = Place::trunk(2, Point::Residual);
    let with = |want: Want| written.fuse(RULES, &move |place| if place == residual { want } else { Want::Nothing });
    let norms = |p: &Program| p.calls.iter().filter(|c| matches!(c.op, Op::AddNorm { .. })).count();
    let shown = |p: &Program| p.shows.iter().find(|s| s.place == residual).map(|s| p.calls[s.after - 1].op.name());
    let (silent, read, changed) = (with(Want::Nothing), with(Want::Read), with(Want::Change));
    assert_eq!((norms(&silent), norms(&read), norms(&changed)), (norms(&silent), norms(&silent), norms(&silent) - 1));
    assert_eq!((shown(&read), shown(&changed)), (Some("AddNorm"), Some("Add")));
    // A tap is on only where somebody looks.
    let taps = |p: &Program| p.calls.iter().filter(|c| matches!(c.op, Op::IndexTopK { scores: Some(_), .. })).count();
    let scores = Place::trunk(1, Point::IndexScores);
    let tapped = written.fuse(RULES, &|place| if place == scores { Want::Read } else { Want::Nothing });
    assert_eq!((taps(&silent), taps(&tapped)), (0, 1));
    assert!(tapped.shows.iter().any(|s| s.place == scores) && silent.shows.iter().all(|s| s.place != scores));
    assert!(silent.shows.iter().any(|s| s.place == residual), "what the call stores is still shown");
}

#[test]
fn a_rank_that_skips_a_meeting_is_found_before_anything_runs() {
    let models = models(PICO, 2, Attention::Dsa);
    let mut programs: Vec<Program> = models.iter().map(|m| m.program(WHOLE)).collect();
    let at = programs[1].calls.iter().rposition(|c| c.op.is_collective()).expect("a meeting");
    programs[1].calls.remove(at);
    let error = checked(&programs, &models).expect_err("rank 1 would not come");
    assert!(error.contains("rank 1") && error.contains("would not meet") && error.contains("Share"), "{error}");
}

/// Every view of an operation, to be changed.
fn views(op: &mut Op) -> Vec<&mut View> {
    match op {
        Op::Embed { out, .. } => vec![out],
        Op::Product { x, out, .. } | Op::RmsNorm { x, out, .. } | Op::Copy { x, out } => vec![x, out],
        Op::GatherRows { x, out } | Op::SwiGlu { x, out } => vec![x, out],
        Op::ExpertsHidden { x, out, .. } => vec![x, out],
        Op::LayerNorm { x, .. } | Op::Rope { x, .. } | Op::Scale { x, .. } | Op::Append { x, .. } => vec![x],
        Op::AllReduce { x } => vec![x],
        Op::Add { x, y } => vec![x, y],
        Op::AddNorm { x, y, out, .. } => vec![x, y, out],
        Op::IndexTopK { q, weights, .. } => vec![q, weights],
        Op::Attend { q_latent, q_rope, out, .. } => vec![q_latent, q_rope, out],
        Op::Route { logits, scores, .. } => vec![logits, scores],
        Op::ExpertWeights { logits, out, .. } => vec![logits, out],
        Op::ExpertsDown { x, weights, out, .. } => vec![x, weights, out],
        Op::Sample { logits, .. } => vec![logits],
        Op::Share { .. } | Op::Commit { .. } => vec![],
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// A view that is moved behind the end of its buffer, points at no buffer, or at one of other rows.
    #[test]
    fn views_outside_their_buffers_are_refused(
        call in any::<prop::sample::Index>(), which in any::<prop::sample::Index>(), how in 0..3usize
    ) {
        let models = models(PICO, 1, Attention::Dsa);
        let mut program = models[0].program(WHOLE);
        let at = call.index(program.calls.len());
        let rows_of = |view: &View| models[0].stores.bufs[view.buf.0].rows;
        let mut all = views(&mut program.calls[at].op);
        prop_assume!(!all.is_empty());
        let which = which.index(all.len());
        let view = &mut all[which];
        match how {
            0 => view.start = models[0].stores.bufs[view.buf.0].width - view.width + 1,
            1 => view.buf = BufId(models[0].stores.bufs.len()),
            _ => {
                let own = rows_of(view);
                view.buf = BufId(models[0].stores.bufs.iter().position(|b| b.rows != own).expect("other rows"));
            }
        }
        prop_assert!(checked(&[program], &models).is_err());
    }

    /// A call that is left out, where nothing else writes what it writes before somebody reads it.
    #[test]
    fn what_was_never_written_is_not_read(call in any::<prop::sample::Index>()) {
        let models = models(PICO, 1, Attention::Dsa);
        let whole = models[0].program(WHOLE);
        let at = call.index(whole.calls.len());
        let mut program = whole.clone();
        program.calls.remove(at);
        program.shows.retain(|s| s.after <= at);
        let meets = |a: &[Operand], b: &[Operand]| a.iter().any(|x| b.iter().any(|y| x.meets(y)));
        let written = whole.calls[at].op.writes();
        let first = !whole.calls[..at].iter().any(|c| meets(&c.op.writes(), &written));
        let next = whole.calls[at + 1..].iter().find(|c| meets(&c.op.reads(), &written) || meets(&c.op.writes(), &written));
        let read = next.is_some_and(|c| meets(&c.op.reads(), &written));
        // Inputs are there from the beginning, and so is what is filled.
        let there = |w: &Operand| match w {
            Operand::Values(view) => models[0].stores.bufs[view.buf.0].fill.is_some(),
            other => *other == Operand::Inputs,
        };
        let needed = first && read && !written.iter().any(there);
        let found = checked(&[program], &models);
        prop_assert_eq!(found.is_err(), needed, "{:?}: {:?}", whole.calls[at], found);
    }

    /// A result that overlaps what is read, but for those that work in place.
    #[test]
    fn results_over_their_own_operands_are_refused(call in any::<prop::sample::Index>()) {
        let models = models(PICO, 1, Attention::Dsa);
        let mut program = models[0].program(WHOLE);
        let at = call.index(program.calls.len());
        let mut all = views(&mut program.calls[at].op);
        prop_assume!(all.len() > 1);
        let first = *all[0];
        **all.last_mut().expect("two views") = first;
        prop_assert!(checked(&[program], &models).is_err());
    }

    /// A width that is one more or one less than the parameters, heads or partners say.
    #[test]
    fn widths_that_do_not_go_together_are_refused(
        call in any::<prop::sample::Index>(), which in any::<prop::sample::Index>(), more in any::<bool>()
    ) {
        let models = models(PICO, 1, Attention::Dsa);
        let mut program = models[0].program(WHOLE);
        let at = call.index(program.calls.len());
        // Their one operand may have any width.
        prop_assume!(!matches!(
            program.calls[at].op,
            Op::Scale { .. } | Op::AllReduce { .. } | Op::Sample { .. }
        ));
        let mut all = views(&mut program.calls[at].op);
        prop_assume!(!all.is_empty());
        let which = which.index(all.len());
        all[which].width = if more { all[which].width + 1 } else { all[which].width - 1 };
        prop_assert!(checked(&[program], &models).is_err());
    }
}
