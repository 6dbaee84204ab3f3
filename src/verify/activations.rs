//! Stage `activations`: is every operation of every layer right? Judged by replay and the noise floor.

use lockstep_reference::{Eps, ModelWeights, RefConfig};

use super::floor::{Energy, LEAST_VALUES, limit, pools};
use super::replay::{Judge, Seen, Unjudged, classes, owner};
use super::subject::{points_of, run_prompt};
use super::{Check, Progress, StageReport, Subject, Verdict, VerifyError};
use crate::checkpoint::Naming;
use crate::checkpoint::oracle::Raw;
use crate::engine::Attention;
use crate::probe::{Captured, Layout, Point, Trace};

/// What was found at one operation.
#[derive(Clone, Debug)]
pub struct OpFinding {
    /// The point that the operation produces.
    pub point: Point,
    /// Its layer.
    pub layer: Option<usize>,
    /// The verdict.
    pub verdict: Verdict,
    /// rho and limit of the slice that decided (the worst one).
    pub rho: (f64, f64),
    /// Ranks whose own slice or copy diverges.
    pub ranks: Vec<usize>,
    /// Tokens whose row diverges.
    pub tokens: Vec<usize>,
    /// Evidence.
    pub detail: String,
}

impl OpFinding {
    /// The full name of the point.
    pub fn name(&self) -> String {
        self.point.full_name(self.layer)
    }

    fn unjudged(point: Point, layer: Option<usize>, verdict: Verdict, detail: String) -> Self {
        OpFinding { point, layer, verdict, rho: (0.0, 0.0), ranks: Vec::new(), tokens: Vec::new(), detail }
    }
}

/// The eps policy that the reference takes from the kind of file.
pub fn eps_of(subject: &Subject) -> Eps {
    match subject.checkpoint.source().naming() {
        Naming::Gguf => Eps::File,
        Naming::Hf => Eps::Hf,
    }
}

/// Runs the stage.
///
/// # Errors
/// An engine that cannot run, a reference that cannot read the model.
pub fn run(subject: &Subject, progress: &dyn Progress) -> Result<StageReport, VerifyError> {
    if subject.rows.is_empty() {
        return Ok(StageReport::unmeasured("activations", "no rows to judge"));
    }
    let findings = findings(subject, progress)?;
    let made = findings.iter().filter(|f| f.verdict != Verdict::NotApplicable).count();
    let mut checks: Vec<Check> = findings
        .iter()
        .map(|f| Check { name: f.name(), verdict: f.verdict, detail: f.detail.clone(), rho: Some(f.rho) })
        .collect();
    checks.push(sparse_activity(subject));
    let report = StageReport { stage: "activations", summary: String::new(), checks, made, seconds: 0.0 };
    let (worst, share) = match report.worst() {
        Some(c) => (c.name.clone(), c.rho.unwrap_or((0.0, 1.0))),
        None => ("none".into(), (0.0, 1.0)),
    };
    let summary = format!(
        "{made} operations replayed at {} of {} rows; worst {worst}: rho {:.2} of {:.2}",
        subject.rows.len(),
        subject.ids.len(),
        share.0,
        share.1
    );
    Ok(StageReport { summary, ..report })
}

/// Whether sparse attention ran at all: a prompt within top-k exercises nothing of it.
fn sparse_activity(subject: &Subject) -> Check {
    let (c, tokens) = (subject.checkpoint.config(), subject.ids.len());
    match subject.attention {
        Attention::Dense => Check::new(
            "sparse attention",
            Verdict::NotApplicable,
            format!("attention is dense by choice; exact up to {} tokens, another model beyond", c.top_k),
        ),
        Attention::Dsa if tokens <= c.top_k => Check::new(
            "sparse attention",
            Verdict::Inactive,
            format!("{tokens} tokens are no more than top-k {}: every key was chosen; use a longer prompt", c.top_k),
        ),
        Attention::Dsa => Check::new(
            "sparse attention",
            Verdict::Match,
            format!("active: {} of {tokens} positions see more than {} keys", tokens - c.top_k, c.top_k),
        ),
    }
}

/// Every operation's finding, in the order of the forward pass.
///
/// # Errors
/// As [`run`].
pub fn findings(subject: &Subject, progress: &dyn Progress) -> Result<Vec<OpFinding>, VerifyError> {
    let raw = Raw(subject.checkpoint.source());
    let config = RefConfig::from_raw(&raw, eps_of(subject))?;
    let weights = ModelWeights::new(&raw, &config);
    let mut all = Vec::new();
    let layers = config.layers;
    for_traces(subject, &mut |trace| {
        let tp = trace.tp;
        let judge = Judge::new(&config, &weights, trace.attention == Attention::Dense, tp, &subject.rows);
        for (point, layer) in trace.points() {
            if !subject.wants_layer(layer) {
                continue;
            }
            progress.at("activations: layers replayed", layer.map_or(0, |l| l + 1), layers);
            all.push(judge_op(&judge, trace, point, layer, subject)?);
        }
        Ok(())
    })?;
    Ok(all)
}

/// Hands out the traces to judge: the given one, or our own run, in groups of layers that fit in memory.
pub(crate) fn for_traces(
    subject: &Subject,
    each: &mut dyn FnMut(&Trace) -> Result<(), VerifyError>,
) -> Result<(), VerifyError> {
    if let Some(trace) = &subject.target {
        return each(trace);
    }
    let c = subject.checkpoint.config();
    let mut engine = subject.engine()?;
    let wanted: Vec<usize> = (0..c.layers).filter(|l| subject.wants_layer(Some(*l))).collect();
    let group = layers_at_once(subject);
    if wanted.len() <= group {
        let (trace, _) = run_prompt(&mut engine, &subject.ids, points_of(subject.layers.clone()))?;
        return each(&trace);
    }
    for (i, chunk) in wanted.chunks(group).enumerate() {
        let last = (i + 1) * group >= wanted.len();
        // A layer's inputs include the output of the one before and a shared layer's borrowed choice.
        let mut needed = chunk.to_vec();
        needed.extend(chunk.iter().filter_map(|l| l.checked_sub(1)));
        needed.extend(chunk.iter().filter_map(|l| (0..=*l).rev().find(|f| c.is_full(*f))));
        let (trace, _) = run_prompt(&mut engine, &subject.ids, points_of(Some(needed)))?;
        each(&trace.restricted(chunk, last))?;
    }
    Ok(())
}

/// Memory that captures of our own run may take.
const CAPTURE_BYTES: usize = 512 << 20;

fn layers_at_once(subject: &Subject) -> usize {
    let (c, n) = (subject.checkpoint.config(), subject.ids.len());
    let replicated: usize = Point::ALL
        .iter()
        .filter(|p| !p.is_global() && p.layout() == Layout::Replicated)
        .map(|p| p.shape(c, c.layers - 1, 1).iter().product::<usize>())
        .sum();
    let sharded = c.heads * (2 * c.qk_head() + 2 * c.kv_lora + c.v_head) + (c.experts_used + 1) * c.expert_ffn;
    let row = subject.tp * (replicated + n + 2 * c.hidden) + sharded;
    (CAPTURE_BYTES / (row * n * 4).max(1)).max(1)
}

/// Judges one operation.
pub(crate) fn judge_op(
    judge: &Judge<'_>,
    trace: &Trace,
    point: Point,
    layer: Option<usize>,
    subject: &Subject,
) -> Result<OpFinding, VerifyError> {
    let name = point.full_name(layer);
    let Some(inputs) = judge.inputs(&name) else {
        let detail = "no such point in this model and run".to_string();
        return Ok(OpFinding::unjudged(point, layer, Verdict::NotApplicable, detail));
    };
    let Some(captured) = trace.ranks(point, layer) else {
        let detail = "not captured on every rank".to_string();
        return Ok(OpFinding::unjudged(point, layer, Verdict::Unmeasured, detail));
    };
    if point.is_choice() {
        return judge_choice(judge, trace, point, layer);
    }
    let mut names = inputs;
    names.push(name.clone());
    let mut slices = Slices::default();
    for class in classes(trace, &names) {
        let seen = Seen::new(trace, class[0]);
        let (reference, sigma) = match judge.recompute(&name, &|n| seen.get(n))? {
            Ok(expected) => expected,
            Err(Unjudged::NoSuchPoint) => {
                let detail = "no such point in this model and run".to_string();
                return Ok(OpFinding::unjudged(point, layer, Verdict::NotApplicable, detail));
            }
            Err(Unjudged::NoData(why)) => return Ok(OpFinding::unjudged(point, layer, Verdict::Unmeasured, why)),
        };
        let width = reference.len() / judge.rows.len();
        let whole = match trace.seen_by(class[0], point, layer) {
            Ok(whole) => whole,
            Err(e) => return Ok(OpFinding::unjudged(point, layer, Verdict::Unmeasured, e.to_string())),
        };
        let Some(target) = judge.target_rows(&whole, width) else {
            let detail = format!("expected {width} values per row, found {} of {} rows", whole.row_len(), whole.rows);
            return Ok(OpFinding::unjudged(point, layer, Verdict::Divergent, detail));
        };
        let measured = judge.measured(target, reference, sigma);
        let own = |j: usize| owner(point, &whole.shape, trace.tp, j);
        let mine = |j: usize| own(j).is_none_or(|r| class.contains(&r));
        slices.whole.join(measured.energy(|_, j| mine(j)));
        for rank in &class {
            slices.ranks.push((*rank, measured.energy(|_, j| own(j).is_none_or(|r| r == *rank))));
        }
        let rows: Vec<Energy> = (0..judge.rows.len()).map(|i| measured.energy(|row, j| row == i && mine(j))).collect();
        slices.tokens.extend(pools(&rows).into_iter().map(|(a, b, e)| (judge.rows[a], judge.rows[b], e)));
        slices.note(&measured);
    }
    if point.layout() == Layout::Partial && trace.tp > 1 {
        let seen = Seen::new(trace, 0);
        let expected = judge.recompute_partials(&name, &|n| seen.get(n), trace.tp)?;
        for (rank, (reference, sigma)) in expected.into_iter().enumerate() {
            let width = reference.len() / judge.rows.len();
            if let Some(target) = judge.target_rows(&captured[rank], width) {
                slices.ranks[rank] = (rank, judge.measured(target, reference, sigma).whole());
            }
        }
    }
    let mut finding = slices.finding(point, layer);
    if finding.verdict == Verdict::Divergent {
        if let Some(who) = documented_disagreement(judge, trace, point, layer, subject)? {
            finding.verdict = Verdict::Drift;
            finding.detail = format!("{}; {who}", finding.detail);
        }
    }
    Ok(finding)
}

/// Energies of an operation by slice.
#[derive(Default)]
struct Slices {
    whole: Energy,
    ranks: Vec<(usize, Energy)>,
    tokens: Vec<(usize, usize, Energy)>,
    cosine: f64,
    worst: Option<(usize, usize, f64, f64)>,
}

impl Slices {
    fn note(&mut self, measured: &super::replay::Measured) {
        self.cosine = if self.worst.is_some() { self.cosine.min(measured.cosine()) } else { measured.cosine() };
        self.worst = measured.worst().or(self.worst);
    }

    fn finding(self, point: Point, layer: Option<usize>) -> OpFinding {
        let decides = |e: &Energy| e.m + e.misplaced >= LEAST_VALUES;
        let mut decisive = vec![self.whole];
        decisive.extend(self.ranks.iter().map(|(_, e)| *e).filter(decides));
        decisive.extend(self.tokens.iter().map(|(_, _, e)| *e).filter(decides));
        let worst = decisive.iter().max_by(|a, b| a.share().total_cmp(&b.share())).copied().unwrap_or(self.whole);
        let (rho, most) = (worst.rho(), limit(worst.m));
        let bad = |e: &Energy| decides(e) && e.share() > 1.0;
        let ranks: Vec<usize> = self.ranks.iter().filter(|(_, e)| bad(e)).map(|(r, _)| *r).collect();
        let tokens: Vec<usize> = self
            .tokens
            .iter()
            .filter(|(_, _, e)| bad(e))
            .flat_map(|(a, b, _)| if a == b { vec![*a] } else { vec![*a, *b] })
            .collect();
        let verdict = if rho > most {
            Verdict::Divergent
        } else if self.whole.m == 0 && self.whole.misplaced == 0 {
            Verdict::Unmeasured
        } else {
            Verdict::Match
        };
        let mut detail = format!(
            "rho {:.2} of {:.2} (worst slice {rho:.2} of {most:.2}), relative L2 {:.1e}, cosine {:.6}",
            self.whole.rho(),
            limit(self.whole.m),
            self.whole.relative(),
            self.cosine
        );
        if self.whole.m < LEAST_VALUES {
            detail.push_str(&format!("; only {} values, decided as a whole", self.whole.m));
        }
        if verdict == Verdict::Divergent {
            if let Some((token, column, t, r)) = self.worst {
                detail.push_str(&format!("; token {token}, column {column}: {t:e}, expected {r:e}"));
            }
        }
        OpFinding { point, layer, verdict, rho: (rho, most), ranks, tokens, detail }
    }
}

/// Whether a diverging norm agrees with another engine's documented eps instead of the file's.
fn documented_disagreement(
    judge: &Judge<'_>,
    trace: &Trace,
    point: Point,
    layer: Option<usize>,
    subject: &Subject,
) -> Result<Option<String>, VerifyError> {
    if !matches!(point, Point::QANorm | Point::KvLatent | Point::IndexK) {
        return Ok(None);
    }
    let raw = Raw(subject.checkpoint.source());
    let name = point.full_name(layer);
    for (eps, who) in [
        (Eps::Hf, "agrees with transformers (eps 1e-6 for the latent norms)"),
        (Eps::File, "agrees with engines that take the file's eps for the latent norms"),
        (Eps::LlamaCpp, "agrees with llama.cpp (eps 0 for the indexer's LayerNorm)"),
    ] {
        let config = RefConfig::from_raw(&raw, eps)?;
        let other = Judge { config: &config, orders: judge.orders.clone(), ..*judge };
        let seen = Seen::new(trace, 0);
        let Ok((reference, sigma)) = other.recompute(&name, &|n| seen.get(n))? else { continue };
        let Ok(whole) = trace.seen_by(0, point, layer) else { continue };
        let Some(target) = other.target_rows(&whole, reference.len() / judge.rows.len()) else { continue };
        if other.measured(target, reference, sigma).whole().share() <= 1.0 {
            return Ok(Some(format!("{who}: the references themselves disagree here")));
        }
    }
    Ok(None)
}

/// Choices are compared as sets with margins: what was chosen instead must lie within a band of the boundary.
fn judge_choice(
    judge: &Judge<'_>,
    trace: &Trace,
    point: Point,
    layer: Option<usize>,
) -> Result<OpFinding, VerifyError> {
    let name = point.full_name(layer);
    let scores_point = if point == Point::IndexTopk { Point::IndexScores } else { Point::ChoiceScores };
    let scores_name = scores_point.full_name(layer);
    let most = |t: usize| match point {
        Point::IndexTopk => judge.config.top_k.min(t + 1),
        _ => judge.config.experts_used,
    };
    let mut bad: Vec<String> = Vec::new();
    let (mut bad_ranks, mut bad_tokens, mut swapped) = (Vec::new(), Vec::new(), 0);
    for class in classes(trace, &[judge.inputs(&name).unwrap_or_default(), vec![name.clone()]].concat()) {
        let seen = Seen::new(trace, class[0]);
        let (scores, floors) = match judge.recompute(&scores_name, &|n| seen.get(n))? {
            Ok(expected) => expected,
            Err(Unjudged::NoSuchPoint) => {
                let detail = "no such point in this model and run".to_string();
                return Ok(OpFinding::unjudged(point, layer, Verdict::NotApplicable, detail));
            }
            Err(Unjudged::NoData(why)) => return Ok(OpFinding::unjudged(point, layer, Verdict::Unmeasured, why)),
        };
        let Ok(chosen) = trace.seen_by(class[0], point, layer) else {
            let detail = "not captured on every rank".to_string();
            return Ok(OpFinding::unjudged(point, layer, Verdict::Unmeasured, detail));
        };
        let width = scores.len() / judge.rows.len();
        for (i, t) in judge.rows.iter().enumerate() {
            let row = &scores[i * width..(i + 1) * width];
            match judge_set(row, floors[i], &row_of(&chosen, *t), most(*t)) {
                Ok(differences) => swapped += differences,
                Err(why) => {
                    bad.push(format!("token {t}: {why}"));
                    bad_tokens.push(*t);
                    bad_ranks.extend(&class);
                }
            }
        }
    }
    bad_ranks.sort_unstable();
    bad_ranks.dedup();
    let verdict = if bad.is_empty() { Verdict::Match } else { Verdict::Divergent };
    let detail = match bad.first() {
        None => format!("sets equal at {} rows but for {swapped} choices inside their band", judge.rows.len()),
        Some(first) => format!("{} of {} rows chose wrongly; {first}", bad.len(), judge.rows.len()),
    };
    let rho = (if bad.is_empty() { 0.0 } else { f64::INFINITY }, 1.0); // sets agree or they do not
    Ok(OpFinding { point, layer, verdict, rho, ranks: bad_ranks, tokens: bad_tokens, detail })
}

fn row_of(captured: &Captured, t: usize) -> Vec<i64> {
    let width = captured.row_len();
    captured.as_f32()[t * width..(t + 1) * width].iter().map(|v| *v as i64).collect()
}

/// Compares one row's choice with the reference's scores. Returns how many members differ (all inside the band).
fn judge_set(scores: &[f64], sigma: f64, chosen: &[i64], most: usize) -> Result<usize, String> {
    let mut order: Vec<usize> = (0..scores.len()).filter(|i| scores[*i].is_finite()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
    let expected = &order[..most.min(order.len())];
    let mut set: Vec<usize> = Vec::new();
    for id in chosen.iter().filter(|id| **id != -1) {
        match usize::try_from(*id) {
            Ok(i) if i < scores.len() && !set.contains(&i) => set.push(i),
            Ok(i) if set.contains(&i) => return Err(format!("{i} is chosen twice")),
            _ => return Err(format!("index {id} is out of range (0 to {})", scores.len() - 1)),
        }
    }
    if set.len() != expected.len() {
        return Err(format!("expected {} chosen, found {}", expected.len(), set.len()));
    }
    let Some(boundary) = expected.last().map(|i| scores[*i]) else { return Ok(0) };
    let band = 2.0 * sigma;
    let mut differences = 0;
    for i in set.iter().filter(|i| !expected.contains(i)) {
        if scores[*i].is_nan() || scores[*i] < boundary - band {
            return Err(format!(
                "{i} is chosen with score {:.6}, the boundary is {boundary:.6} -+ {band:.1e}",
                scores[*i]
            ));
        }
        differences += 1;
    }
    for i in expected.iter().filter(|i| !set.contains(i)) {
        if scores[*i] > boundary + band {
            return Err(format!(
                "{i} is left out with score {:.6}, the boundary is {boundary:.6} +- {band:.1e}",
                scores[*i]
            ));
        }
    }
    Ok(differences)
}

#[cfg(test)]
mod tests {
    use super::judge_set;

    #[test]
    fn choices_within_the_band_are_interchangeable() {
        let scores = [5.0, 4.0, 3.0, 3.0 - 1e-9, 1.0];
        assert_eq!(judge_set(&scores, 1e-6, &[0, 1, 2], 3), Ok(0));
        assert_eq!(judge_set(&scores, 1e-6, &[0, 1, 3], 3), Ok(1));
        assert!(judge_set(&scores, 1e-12, &[0, 1, 3], 3).is_err());
        assert!(judge_set(&scores, 1e-6, &[0, 1, 4], 3).is_err());
        assert!(judge_set(&scores, 1e-6, &[1, 2, 3], 3).is_err());
    }

    #[test]
    fn damaged_choices_are_named() {
        let scores = [5.0, 4.0, 3.0];
        for chosen in [&[0i64, 0][..], &[0, 7], &[0, -2], &[0, -1]] {
            assert!(judge_set(&scores, 1e-6, chosen, 2).is_err(), "{chosen:?}");
        }
        assert_eq!(judge_set(&[f64::NEG_INFINITY, 1.0], 1e-6, &[1, -1], 1), Ok(0));
    }
}
