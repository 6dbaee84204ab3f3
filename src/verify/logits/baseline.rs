//! A target's distributions against those of a checkpoint that is trusted. Quantisation moves them, and how far it must
//! is measured: the baseline itself, run with noise on every parameter as large as the target's types may cost.

use std::collections::BTreeMap;

use lockstep_reference::config::RefConfig;
use lockstep_reference::{ModelWeights, ParamKey};

use super::{Run, best, divergences, mean};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::oracle::Raw;
use crate::probe::Replacements;
use crate::report::{Check, Progress, Verdict};
use crate::synth::Random;
use crate::verify::patched_weights::{Value, value_of};
use crate::verify::reference_run::{self, Plan, own_eps};
use crate::verify::weights::may_cost;
use crate::verify::{Subject, VerifyError};

/// Runs with noise; the larger distance counts.
const DRAWS: u64 = 2;

/// Compares the rows of `target` with the baseline's. `recipe` is the divergence that its arithmetic alone may have.
pub(super) fn against(
    subject: &Subject,
    baseline: &Checkpoint,
    run: &Run,
    (target, recipe): (&[Vec<f64>], f64),
    progress: &dyn Progress,
) -> Result<Check, VerifyError> {
    let name = format!("baseline {}", baseline.name());
    let costs = may_cost(&subject.checkpoint, baseline)?;
    let costs: BTreeMap<_, _> = costs.into_iter().filter(|(_, cost)| *cost > 0.0).collect();
    // Of the same parameters the target's choices are as good as the baseline's own, and judged by their margins; where
    // parameters differ, other choices are part of what they cost.
    let choices = if costs.is_empty() { run.fed.trace.choices(0) } else { Replacements::new() };
    let plan = Plan::new(baseline, &run.fed.trace, &choices, &[]);
    progress.at("baseline", 0, 1 + DRAWS as usize);
    let exact = match reference_run::measure(&plan, progress) {
        Err(VerifyError::Choice(why)) => return Ok(Check::new(name, Verdict::Divergent, why)),
        exact => exact?,
    };
    let Some(floored) = exact.logits().filter(|l| target.first().is_some_and(|row| row.len() == l.exact.ncols()))
    else {
        return Ok(Check::new(name, Verdict::NotApplicable, "its vocabulary has another size"));
    };
    if floored.exact.iter().any(|v| !v.is_finite()) {
        return Ok(Check::new(name, Verdict::Unmeasured, "the baseline's own logits are not all numbers"));
    }
    let raw = Raw(baseline.source());
    let config = RefConfig::from_raw(&raw, own_eps(baseline))?;
    let weights = ModelWeights::new(&raw, &config);
    let mut noise = 0.0f64;
    for draw in (0..DRAWS).filter(|_| !costs.is_empty()) {
        progress.at("baseline", 1 + draw as usize, 1 + DRAWS as usize);
        let change = |key: ParamKey| match costs.get(&(key.0, key.1)) {
            Some(cost) => Ok(Some(noisy(&value_of(&weights, key)?, *cost, seed(key, draw)))),
            None => Ok(None),
        };
        let moved = reference_run::measure(&Plan { change: Some(&change), ..plan }, progress)?;
        if let Some(moved) = moved.logits() {
            let rows: Vec<Vec<f64>> = moved.exact.rows().into_iter().take(target.len()).map(|r| r.to_vec()).collect();
            noise = noise.max(mean(divergences(&floored.exact, &rows).into_iter()));
        }
    }
    // Divergences are quadratic in errors, and errors add up.
    let limit = (noise.sqrt() + recipe.sqrt()).powi(2).max(LEAST);
    let found = mean(divergences(&floored.exact, target).into_iter());
    let same = floored.exact.rows().into_iter().zip(target).filter(|(e, t)| best(&e.to_vec()) == best(t)).count();
    // Each row against the next one's distribution: as far apart as two things that have nothing to do with each other.
    let mut others = target.to_vec();
    others.rotate_left(1);
    let unrelated = mean(divergences(&floored.exact, &others).into_iter());
    let source = match costs.len() {
        0 => "that of the recipe, as every parameter is the baseline's".to_string(),
        n => format!("from noise on {n} parameters, as large as their types may cost"),
    };
    let (verdict, says) = match found <= limit {
        false => (Verdict::Divergent, source),
        true if limit > unrelated / 2.0 => {
            (Verdict::Drift, "which says little: types this coarse may cost everything".to_string())
        }
        true => (Verdict::Match, source),
    };
    let rows = target.len();
    let detail = format!(
        "mean KL {found:.2e} nats, limit {limit:.2e}, {says}; the same most likely token in {same} of {rows} rows"
    );
    Ok(Check::new(name, verdict, detail))
}

/// Nats that are nobody's concern: f32 arithmetic moves distributions by less.
const LEAST: f64 = 1e-6;

fn seed((layer, param, part): ParamKey, draw: u64) -> u64 {
    let number = |n: Option<usize>| n.map_or(0, |n| n as u64 + 1);
    let mixed = number(layer).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number(part).wrapping_mul(0xc2b2_ae3d_27d4_eb4f);
    mixed ^ (param as u64).wrapping_mul(0x1656_67b1_9e37_79f9) ^ draw.wrapping_mul(0x27d4_eb2f_1656_67c5)
}

/// A value with uniform noise whose relative L2 size is `cost`.
fn noisy(value: &Value, cost: f64, seed: u64) -> Value {
    let (mut sum, mut count) = (0.0f64, 0usize);
    value.map(|v| {
        sum += f64::from(v).powi(2);
        count += 1;
        v
    });
    let width = 12f64.sqrt() * cost * (sum / count.max(1) as f64).sqrt();
    let mut random = Random(seed);
    value.map(|v| {
        let uniform = (random.next() >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
        (f64::from(v) + width * uniform) as f32
    })
}
