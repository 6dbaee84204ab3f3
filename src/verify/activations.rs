//! Stage `activations`: is every operation of every layer right? Judged by replay and the noise floor.

use std::collections::{BTreeMap, BTreeSet};

use super::choice::row_of;
use super::op::OpFinding;
use super::operations::{Judged, judge_all};
use super::{Subject, VerifyError};
use crate::engine::Attention;
use crate::model::{Place, Point};
use crate::report::{Check, Progress, Reach, StageReport, Verdict};

/// Runs the stage.
///
/// # Errors
/// An engine that cannot run, a reference that cannot read the model.
pub fn run(subject: &Subject, progress: &dyn Progress) -> Result<StageReport, VerifyError> {
    if subject.rows.is_empty() {
        return Ok(StageReport::unmeasured("activations", "no rows to judge"));
    }
    let mut findings = Vec::new();
    let mut experts: BTreeSet<(Place, i32)> = BTreeSet::new();
    let mut captured = BTreeSet::new();
    let Judged { floors, given } = judge_all(subject, progress, &mut |judge, found, trace| {
        for finding in &found {
            let place = finding.place;
            captured.extend(trace.ranks(place).map(|_| place));
            if place.point == Point::Hidden && matches!(finding.verdict, Verdict::Match | Verdict::Divergent) {
                let chosen = trace.ranks(place.at(Point::ExpertIds)).and_then(|ranks| ranks.first().copied());
                let of_row = |row: &usize| chosen.and_then(|ids| row_of(ids, *row)).unwrap_or_default();
                experts.extend(judge.rows.iter().flat_map(of_row).map(|id| (place, *id)));
            }
        }
        findings.extend(found);
        Ok(())
    })?;
    let made = findings.iter().filter(|f| f.verdict != Verdict::NotApplicable).count();
    // What a dump lacks it mostly lacks in every layer: one line for each point.
    let mut lacking: BTreeMap<(Point, Verdict), usize> = BTreeMap::new();
    let captured =
        |f: &&OpFinding| subject.target.is_none() || captured.contains(&f.place) || f.verdict == Verdict::Drift;
    for finding in findings.iter().filter(|f| !captured(f)) {
        *lacking.entry((finding.place.point, finding.verdict)).or_default() += 1;
    }
    let mut checks: Vec<Check> = findings
        .iter()
        .filter(captured)
        .map(|f| Check::new(f.place.to_string(), f.verdict, f.detail.clone()).of_floor(f.rho).with(f.data()))
        .collect();
    checks.extend(lacking.into_iter().map(|((point, verdict), places)| {
        let detail = match verdict {
            Verdict::NotApplicable => format!("not captured in {places} places: judged as part of spans"),
            _ => {
                format!("not captured in {places} places, and nothing behind them was: capture it, or what follows it")
            }
        };
        Check::new(point.name(), verdict, detail)
    }));
    checks.push(sparse_activity(subject, &findings));
    checks.extend(given.map(|given| {
        let verdict = if given.followed { Verdict::Match } else { Verdict::Drift };
        Check::new("convention", verdict, given.detail)
    }));
    let (positions, rows) = (subject.ids.len(), subject.rows.len());
    let reach = Reach { positions, rows, experts: experts.len(), sequences: 1 };
    let report = StageReport { made, reach, ..StageReport::new("activations", "", checks) };
    let judged = findings.iter().filter(|f| f.verdict > Verdict::NotApplicable && f.verdict != Verdict::Unmeasured);
    let summary = match (judged.count(), report.worst()) {
        (0, _) | (_, None) => {
            format!("none of {made} operations could be replayed: their inputs or results are not there")
        }
        (judged, Some(c)) => {
            let (rho, limit) = c.rho.unwrap_or((0.0, 1.0));
            let of = if judged < made { format!(" of {made}") } else { String::new() };
            let (rows, all) = (subject.rows.len(), subject.ids.len());
            let worst = &c.name;
            let held = match floors {
                own if own == subject.recipe => String::new(),
                tighter => format!("; the dump says {}, but holds {}'s floors", subject.recipe.name(), tighter.name()),
            };
            format!(
                "{judged}{of} operations replayed at {rows} of {all} rows; worst {worst}: rho {rho:.2} of {limit:.2}{held}"
            )
        }
    };
    Ok(StageReport { summary, ..report })
}

/// The check that says whether sparse attention was judged.
pub(crate) const SPARSE: &str = "sparse attention";

/// Whether sparse attention ran at all, and was judged where it ran: a prompt within top-k exercises nothing of it. Our own
/// prompt could have been longer; a dump's text is not ours to lengthen, and within top-k sparse attention and dense are one
/// computation, which was judged: then the choice is what does not apply.
pub(crate) fn sparse_activity(subject: &Subject, findings: &[OpFinding]) -> Check {
    let (top_k, tokens) = (subject.checkpoint.config().top_k, subject.ids.len());
    let dense_dump = subject.target.as_ref().is_some_and(|t| t.attention == Attention::Dense);
    let sparse_rows = subject.rows.iter().filter(|t| **t >= top_k).count();
    let attends = |p: &Place| matches!(p.point, Point::Latent | Point::Context);
    let attended = findings.iter().filter(|f| matches!(f.verdict, Verdict::Match | Verdict::Divergent));
    let attended =
        attended.filter(|f| f.unsure.is_empty() || subject.rows.iter().any(|t| *t >= top_k && !f.unsure.contains(t)));
    let layers =
        attended.flat_map(|f| f.over.iter().chain([&f.place]).filter(|p| attends(p)).filter_map(|p| p.layer()));
    let judged = layers.collect::<BTreeSet<_>>().len();
    let (verdict, detail) = if subject.attention == Attention::Dense {
        let exact = format!("exact up to {top_k} tokens, another model beyond");
        (Verdict::NotApplicable, format!("attention is dense by choice; {exact}"))
    } else if tokens <= top_k && subject.target.is_some() {
        let (all, one) = ("every key was chosen", "sparse and dense are one computation");
        let needs = format!("a capture of at least {} tokens can judge it", top_k + 1);
        let why = format!("{tokens} tokens are no more than top-k {top_k}, so that {all} and {one}");
        (Verdict::NotApplicable, format!("nothing of the indexer's choice was judged: {why}; {needs}"))
    } else if tokens <= top_k {
        let all = "every key was chosen; use a longer prompt";
        (Verdict::Inactive, format!("{tokens} tokens are no more than top-k {top_k}: {all}"))
    } else if dense_dump {
        (Verdict::Inactive, "the dump attended to all keys; say --attention dense if that is meant".into())
    } else if judged == 0 || sparse_rows == 0 {
        let judged = format!("judged in {judged} layers at {sparse_rows} rows beyond top-k {top_k}");
        (Verdict::Unmeasured, format!("attention was {judged}"))
    } else {
        (Verdict::Match, format!("active: {judged} layers judged at {sparse_rows} rows beyond top-k {top_k}"))
    };
    Check::new(SPARSE, verdict, detail)
}
