//! The stage `logits`: what comes out at the end, against the reference, over real prompts and the text that the engine
//! goes on with.
//!
//! The engine generates greedily, and the reference reads prompt and continuation once, teacher-forced, with the
//! target's choices of experts and keys (each judged by its margin). Four questions per prompt: is the divergence of the
//! distributions within its limit; is every token's row of logits within its floor; is the most likely token the
//! reference's; is each generated token the one that the reference would choose after the same prefix.
//!
//! The limit is the spread of runs of the target's recipe in other orders of summation, row by row. A divergence is
//! quadratic in the error, so its rho is the root of (sum of KL / sum of limits). A most likely token may
//! be another where the reference's own is no further ahead of it than two errors (2 sigma of that row). Engines disagree about the eps of some
//! norms: a target that is wrong by the checkpoint's own, but right by another documented one, is DRIFT.

mod baseline;
pub mod server;

use lockstep_reference::Eps;
use ndarray::Array2;

use super::feed::{Fed, Feed, Listen, choices, feed};
use super::floor::{Floored, limit};
use super::reference_run::{self, LEAST_ROWS, Plan, ReferenceRuns, divergence, own_eps};
use super::{Subject, VerifyError, asks};
use crate::engine::generate::generate;
use crate::engine::kv::PAGE;
use crate::engine::sampler::{Sampling, greedy};
use crate::engine::scheduler::Request;
use crate::engine::{Attention, Engine};
use crate::model::{Place, Point};
use crate::probe::{Replacements, Trace};
use crate::report::{Check, Progress, Reach, StageReport, Verdict};
use crate::tokenize::Tokenizer;

/// Tokens that the engine goes on with behind the subject's prompt, and behind a built-in one.
const CONTINUED: (usize, usize) = (24, 8);

/// Prompts of every run, beside the subject's own: prose, figures, and code with other alphabets.
const BUILT_IN: [(&str, &str); 3] = [
    ("prose", "In the beginning God created the heaven and the"),
    ("figures", "1 + 1 = 2, 2 + 2 = 4, 3 + 3 ="),
    ("code", "fn main() { let s = \"größe 大小\"; println!("),
];

/// Runs the stage.
///
/// # Errors
/// Engines that cannot be made, steps that fail, a model that the reference cannot read.
pub fn run(subject: &Subject, progress: &dyn Progress) -> Result<StageReport, VerifyError> {
    if subject.ids.is_empty() {
        return Ok(StageReport::unmeasured("logits", "the prompt has no tokens"));
    }
    let mut checks = Vec::new();
    let mut reach = Reach { sequences: 1, ..Reach::default() };
    let summary = match (&subject.server, &subject.target) {
        (Some(server), _) => server::run(subject, server, progress, &mut checks, &mut reach)?,
        (None, Some(trace)) => of_dump(subject, trace, progress, &mut checks, &mut reach)?,
        (None, None) => of_engine(subject, progress, &mut checks, &mut reach)?,
    };
    if subject.checkpoint.config().mtp_layers > 0 {
        checks.push(Check::new("MTP", Verdict::NotApplicable, "the engine does not run the MTP block"));
    }
    Ok(StageReport { reach, ..StageReport::new("logits", summary, checks) })
}

/// A run to be judged.
pub(super) struct Run {
    name: String,
    /// Choices and logits of every row.
    fed: Fed,
    /// The generated ids; the first stands behind the prompt, so its row is `ids.len() - generated.len()`.
    generated: Vec<u32>,
    /// Rows from here on cannot be compared.
    until: usize,
    /// Choices that the target does not show.
    missing: Vec<Place>,
}

fn of_engine(
    subject: &Subject,
    progress: &dyn Progress,
    checks: &mut Vec<Check>,
    reach: &mut Reach,
) -> Result<String, VerifyError> {
    let context = subject.checkpoint.config().context;
    let more = if subject.own_prompt { CONTINUED.1 } else { CONTINUED.0 };
    let mut prompts = vec![(subject.prompt.clone(), subject.ids.clone(), more)];
    let tokenizer = subject.checkpoint.tokenizer_spec().and_then(|spec| Tokenizer::new(&spec));
    let mut texts = String::new();
    match &tokenizer {
        // Who gives a text wants that one judged, on a model whose reference runs may take minutes each.
        Ok(_) if subject.own_prompt => {}
        Ok(tokenizer) => {
            // A text that this vocabulary cannot spell is the tokenizer stage's business.
            let ids = |text| tokenizer.prompt_ids(text).ok().filter(|ids| !ids.is_empty());
            prompts.extend(BUILT_IN.iter().filter_map(|(name, text)| Some(((*name).into(), ids(text)?, CONTINUED.1))));
        }
        Err(e) => texts = format!("; no built-in prompts, since there is no tokenizer ({e})"),
    }
    let longest = prompts.iter().map(|(_, ids, more)| ids.len() + more).max().unwrap_or(0).min(context);
    let options = subject.options_for(longest, longest.next_multiple_of(PAGE), 1);
    let mut engine = subject.engines.lend(&subject.checkpoint, subject.tp, options)?;
    let mut rows = 0;
    let count = prompts.len();
    for (i, (name, ids, more)) in prompts.into_iter().enumerate() {
        progress.at("prompts compared", i, count);
        let more = more.min(context.saturating_sub(ids.len()));
        let run = continued(&mut engine, name, ids, more, checks)?;
        rows += run.until;
        reach.positions = reach.positions.max(run.until);
        let own = i == 0;
        judge(subject, &run, own, progress, checks)?;
    }
    if !subject.asks.is_empty() {
        asks::run(subject, &subject.asks, progress, checks)?;
    }
    Ok(format!("{rows} rows of {count} prompts at tp {}{texts}", subject.tp))
}

/// Feeds a prompt and what was generated behind it, as it would be decoded, while listening.
pub(super) fn fed(engine: &mut Engine, name: String, prompt: &[u32], generated: Vec<u32>) -> Result<Run, VerifyError> {
    let mut ids = prompt.to_vec();
    ids.extend(generated.iter().take(generated.len().saturating_sub(1)));
    let fed = feed(engine, &Feed::chunked(&ids, vec![prompt.len(), 1]), &Listen::Capture(choices()))?;
    Ok(Run { name, fed, generated, until: ids.len(), missing: Vec::new() })
}

/// Generates greedily as a user would, then feeds prompt and continuation along the same way while listening.
fn continued(
    engine: &mut Engine,
    name: String,
    prompt: Vec<u32>,
    more: usize,
    checks: &mut Vec<Check>,
) -> Result<Run, VerifyError> {
    let mut generated = Vec::new();
    if more > 0 {
        let sampling = Sampling::default();
        let request = Request::plain(prompt.clone(), more, Vec::new(), sampling);
        generate(engine, request, &mut |id| generated.push(id))?;
    }
    let run = fed(engine, name, &prompt, generated)?;
    let (name, generated, vocab) = (&run.name, &run.generated, engine.config().vocab);
    let again = run.fed.logits.chunks_exact(vocab).skip(prompt.len() - 1).map(greedy);
    if let Some(step) = again.zip(generated).position(|(again, id)| again != *id) {
        let detail = format!("step {step}: the generated token is not the most likely one of the same step's logits");
        checks.push(Check::new(format!("greedy sampling, {name}"), Verdict::Divergent, detail));
    }
    if generated.len() != more {
        let detail = format!("asked for {more} tokens, {} came", generated.len());
        checks.push(Check::new(format!("greedy sampling, {name}"), Verdict::Unmeasured, detail));
    }
    Ok(run)
}

fn of_dump(
    subject: &Subject,
    trace: &Trace,
    progress: &dyn Progress,
    checks: &mut Vec<Check>,
    reach: &mut Reach,
) -> Result<String, VerifyError> {
    let c = subject.checkpoint.config();
    let unmeasured = |why: String, checks: &mut Vec<Check>| {
        checks.push(Check::new("logits", Verdict::Unmeasured, why.clone()));
        Ok(why)
    };
    if trace.ranks(Place::LOGITS).is_none() {
        return unmeasured(format!("the dump of {} holds no logits", trace.producer), checks);
    }
    let whole = match trace.whole(Place::LOGITS) {
        Ok(whole) => whole,
        Err(e) => return unmeasured(format!("the dump's logits do not fit together: {e}"), checks),
    };
    let width = whole.row_len();
    if whole.rows != trace.ids.len() || width < c.vocab {
        let expected = format!("{} rows of at least {}", trace.ids.len(), c.vocab);
        return unmeasured(format!("the dump's logits: expected {expected}, found {} of {width}", whole.rows), checks);
    }
    let logits = whole.as_f32().chunks_exact(width).flat_map(|row| row[..c.vocab].to_vec()).collect();
    let chooses = |place: &Place| {
        place.layer().is_some_and(|layer| match place.point {
            Point::ExpertIds => c.is_moe(layer),
            Point::IndexTopk => c.is_full(layer) && trace.attention == Attention::Dsa,
            _ => false,
        })
    };
    let choices = (0..c.layers).flat_map(|l| [Point::ExpertIds, Point::IndexTopk].map(|point| Place::trunk(l, point)));
    let rows = trace.ids.len();
    let is_whole = |place: &Place| trace.ranks(*place).is_some_and(|ranks| ranks.iter().all(|r| r.rows == rows));
    let (made, missing): (Vec<Place>, Vec<Place>) = choices.filter(chooses).partition(is_whole);
    let fed = Fed { trace: trace.only(|place| made.contains(&place)), logits };
    let run = Run { name: format!("dump of {}", trace.producer), until: rows, fed, generated: Vec::new(), missing };
    let run = if run.missing.is_empty() { run } else { up_to_a_tie(subject, run, progress)? };
    judge(subject, &run, true, progress, checks)?;
    reach.positions = run.until;
    let reason = "a dump holds no continuation";
    checks.push(Check::new("greedy text", Verdict::NotApplicable, reason));
    Ok(format!("{rows} rows of a dump by {}, {} choices missing", trace.producer, run.missing.len()))
}

/// Without the target's choice, a row is comparable only while nothing before it was a near tie.
fn up_to_a_tie(subject: &Subject, run: Run, progress: &dyn Progress) -> Result<Run, VerifyError> {
    let choices = run.fed.trace.choices(0);
    let reference = measure(subject, &run, &choices, own_eps(&subject.checkpoint), progress)?;
    let first = run.missing.iter().filter_map(|place| reference.first_near_tie(*place)).min();
    Ok(Run { until: first.unwrap_or(run.until), ..run })
}

fn measure(
    subject: &Subject,
    run: &Run,
    choices: &Replacements,
    eps: Eps,
    progress: &dyn Progress,
) -> Result<ReferenceRuns, VerifyError> {
    let variants = reference_run::recipe(subject.recipe, subject.tp);
    let plan = Plan::new(&subject.checkpoint, &run.fed.trace, choices, &variants);
    reference_run::measure(&Plan { eps, ..plan }, progress)
}

/// What engines make of the eps of some norms, beside what the checkpoint's format implies.
const OTHER_EPS: [(Eps, &str); 3] = [
    (Eps::Hf, "transformers (eps 1e-6 for the latent norms)"),
    (Eps::LlamaCpp, "llama.cpp (eps 0 for the indexer's LayerNorm)"),
    (Eps::File, "engines that take the file's eps for the latent norms"),
];

/// The four questions about one run.
pub(super) fn judge(
    subject: &Subject,
    run: &Run,
    baseline: bool,
    progress: &dyn Progress,
    checks: &mut Vec<Check>,
) -> Result<(), VerifyError> {
    let mut target = None;
    let mut found = by_eps(subject, &mut |eps| {
        let (checks, own) = by_reference(subject, run, eps, progress)?;
        target = target.take().or(own);
        Ok(checks)
    })?;
    checks.append(&mut found);
    if let (Some(other), Some((target, recipe))) = (subject.baseline.as_ref().filter(|_| baseline), target) {
        checks.push(baseline::against(subject, other, run, (&target, recipe), progress)?);
    }
    Ok(())
}

/// The checks by the checkpoint's own eps, and by others where these find something: who is right by one of them is only
/// where the references disagree.
fn by_eps(
    subject: &Subject,
    checks: &mut dyn FnMut(Eps) -> Result<Vec<Check>, VerifyError>,
) -> Result<Vec<Check>, VerifyError> {
    let own = own_eps(&subject.checkpoint);
    let mut found = checks(own)?;
    let wrong = |checks: &[Check]| checks.iter().any(|c| c.verdict == Verdict::Divergent);
    for (eps, who) in OTHER_EPS.into_iter().filter(|(eps, _)| *eps != own) {
        if wrong(&found) && !wrong(&checks(eps)?) {
            for check in found.iter_mut().filter(|c| c.verdict == Verdict::Divergent) {
                check.verdict = Verdict::Drift;
                check.detail = format!("agrees with {who}: the references themselves disagree here; {}", check.detail);
            }
        }
    }
    Ok(found)
}

/// Logits of every row, and the divergence that the run's recipe alone may have, in the mean.
type Rows = (Vec<Vec<f64>>, f64);

/// The checks by the reference with an eps, and the target's rows if there is anything to compare them with.
fn by_reference(
    subject: &Subject,
    run: &Run,
    eps: Eps,
    progress: &dyn Progress,
) -> Result<(Vec<Check>, Option<Rows>), VerifyError> {
    let name = &run.name;
    let choices = run.fed.trace.choices(0);
    let reference = match measure(subject, run, &choices, eps, progress) {
        Ok(reference) => reference,
        Err(VerifyError::Choice(why)) => {
            return Ok((vec![Check::new(format!("choices, {name}"), Verdict::Divergent, why)], None));
        }
        Err(other) => return Err(other),
    };
    let Some(floored) = reference.logits() else {
        let why = "the reference gave no logits";
        return Ok((vec![Check::new(format!("logits, {name}"), Verdict::Unmeasured, why)], None));
    };
    let vocab = floored.exact.ncols();
    let mut fed = run.fed.clone();
    fed.logits.truncate(run.until * vocab);
    let target: Vec<Vec<f64>> =
        fed.logits.chunks_exact(vocab).map(|r| r.iter().map(|v| f64::from(*v)).collect()).collect();
    let mut checks = vec![
        kl(&format!("KL, {name}"), &reference, floored, &target),
        reference.compare(&format!("logits, {name}"), &fed, &|t, i| floored.exact[[t, i]], None, &run.missing),
    ];
    let own: Vec<u32> = fed.logits.chunks_exact(vocab).map(greedy).collect();
    let own: Vec<(usize, u32)> = own.into_iter().enumerate().collect();
    checks.push(top_one(&format!("top-1, {name}"), floored, &own, &|_| false));
    if !run.generated.is_empty() {
        let first = run.fed.trace.ids.len() + 1 - run.generated.len();
        let text: Vec<(usize, u32)> = (first - 1..).zip(run.generated.iter().copied()).collect();
        checks.push(top_one(&format!("greedy text, {name}"), floored, &text, &|_| false));
    }
    let most = mean(limits(&reference).into_iter().take(target.len()));
    let recipe = limit(target.len()).powi(2) * most;
    Ok((checks, Some((target, recipe))))
}

/// The largest divergence that any variant has at each row.
fn limits(reference: &ReferenceRuns) -> Vec<f64> {
    let worst = |t: usize| reference.kl.iter().filter_map(|kl| kl.get(t)).copied().fold(0.0, f64::max);
    (0..reference.rows()).map(worst).collect()
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let n = values.len().max(1) as f64;
    values.sum::<f64>() / n
}

/// Of each row of a target from a reference's.
fn divergences(exact: &Array2<f64>, target: &[Vec<f64>]) -> Vec<f64> {
    exact.rows().into_iter().zip(target).map(|(e, t)| divergence(&e.to_vec(), t)).collect()
}

fn kl(name: &str, reference: &ReferenceRuns, floored: &Floored, target: &[Vec<f64>]) -> Check {
    kl_check(name, &divergences(&floored.exact, target), &limits(reference), reference.rows())
}

/// The check of rows' divergences, each with its limit, of which so many should be there.
fn kl_check(name: &str, found: &[f64], limits: &[f64], all: usize) -> Check {
    let rows = found.len().min(limits.len());
    let (sum, most) = (found.iter().sum::<f64>(), limits.iter().take(rows).sum::<f64>());
    if rows == 0 || most.is_nan() || most <= 0.0 {
        return Check::new(name, Verdict::Unmeasured, "there is no spread to measure against");
    }
    let rho = if sum.is_nan() { f64::INFINITY } else { (sum.max(0.0) / most).sqrt() };
    let detail = format!(
        "mean {:.2e} nats from the reference, limit {:.2e}; {rows} rows",
        sum / rows as f64,
        limit(rows).powi(2) * most / rows as f64
    );
    let verdict = if rho > limit(rows) {
        Verdict::Divergent
    } else if (rows as f64) < LEAST_ROWS * all as f64 {
        Verdict::Unmeasured
    } else {
        Verdict::Match
    };
    Check::new(name, verdict, detail).of_floor((rho, limit(rows)))
}

/// Compares a target's tokens, each with its row, with the most likely ones: every one must be likely enough, but for the
/// band that two near ones may trade places in. Of rows that are `free`, since the target may have chosen other experts or
/// keys there, another token says nothing.
fn top_one(name: &str, floored: &Floored, target: &[(usize, u32)], free: &dyn Fn(usize) -> bool) -> Check {
    let (mut same, mut near, mut wrong, mut unknown, mut freely) = (0, Vec::new(), Vec::new(), 0, 0);
    for (t, token) in target {
        let t = *t;
        let (Some(row), Some(sigma)) = (floored.exact.rows().into_iter().nth(t), floored.sigma.get(t)) else {
            return Check::new(name, Verdict::Unmeasured, format!("the reference has no row for token {t}"));
        };
        let row = row.to_vec();
        let (likely, found) = (best(&row).unwrap_or(0), *token as usize);
        match row.get(found).map(|score| row[likely] - score) {
            _ if row.iter().any(|v| !v.is_finite()) => unknown += 1,
            _ if likely == found => same += 1,
            Some(less) if less <= 2.0 * sigma => near.push(t),
            Some(_) if free(t) => freely += 1,
            _ => wrong.push(format!("token {t}: expected {likely}, found {token}")),
        }
    }
    let mut detail = format!("{same} of {} agree", target.len());
    if !near.is_empty() {
        detail += &format!("; at tokens {near:?} another is as likely, within two errors");
    }
    if freely > 0 {
        detail += &format!("; {freely} do not where experts or keys are near a tie");
    }
    if unknown > 0 {
        detail += &format!("; {unknown} rows of the reference are no numbers");
    }
    if let Some(worst) = wrong.first() {
        detail = format!("{worst} ({} in all); {detail}", wrong.len());
    }
    let judged = (target.len() - unknown - freely) as f64;
    match wrong.is_empty() {
        false => Check::exact(name, false, detail),
        true if unknown > 0 || judged == 0.0 || judged < LEAST_ROWS * target.len() as f64 => {
            Check::new(name, Verdict::Unmeasured, detail)
        }
        true => Check::exact(name, true, detail),
    }
}

/// The index of the largest value.
fn best(row: &[f64]) -> Option<usize> {
    row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(i, _)| i)
}
