//! A device that chooses tokens itself, and runs ahead of the host, chooses what the host would: greedily or with a
//! temperature, each sequence with a seed of its own.

use super::super::VerifyError;
use super::super::subject::Subject;
use crate::device::{Batch, Draw, Token};
use crate::engine::sampler::greedy;
use crate::engine::{Engine, EngineError};
use crate::report::{Check, Verdict};

/// How the three sequences choose. The hot one leaves the likeliest token soon; its seed fills both halves of 64 bits.
const DRAWS: [Draw; 3] =
    [Draw::GREEDY, Draw { temperature: 0.8, seed: 7 }, Draw { temperature: 4.0, seed: 0x0123_4567_89ab_cdef }];
const STEPS: usize = 12;

/// Runs three parts of the prompt on, first as the device chooses, then step by step with the host's choice from the
/// logits of the same steps.
pub(super) fn check(subject: &Subject, engine: &mut Engine) -> Result<Check, VerifyError> {
    let name = "device's choice = host's";
    let ids = &subject.ids;
    let steps = STEPS.min(ids.len() / 2);
    let end = ids.len() - steps;
    let prompts = [&ids[..end], &ids[end / 2..end], &ids[..end / 2 + 1]];
    if !engine.runs_ahead(prompts.len()) {
        return Ok(Check::new(name, Verdict::NotApplicable, "the device chooses no tokens"));
    }
    let mut tables = vec![Vec::new(); prompts.len()];
    for (table, prompt) in tables.iter_mut().zip(prompts) {
        engine.pool().reserve(table, prompt.len() + steps).map_err(EngineError::from)?;
    }
    let mut read = Batch { tables: tables.clone(), ..Batch::default() };
    for (s, prompt) in prompts.iter().enumerate() {
        let before = prompt.iter().take(prompt.len() - 1).enumerate();
        read.tokens.extend(before.map(|(p, id)| Token { id: *id, position: p as u32, sequence: s as u32 }));
    }
    if !read.tokens.is_empty() {
        engine.step(read, Vec::new())?;
    }
    let last = |s: usize| prompts[s].len() - 1;
    let batch = |i: usize, ids: &[u32], ahead: &[Draw]| Batch {
        tokens: (0..ids.len())
            .map(|s| Token { id: ids[s], position: (last(s) + i) as u32, sequence: s as u32 })
            .collect(),
        tables: tables.clone(),
        logits: (0..ids.len() as u32).collect(),
        ahead: ahead.to_vec(),
        expanded: false,
    };
    let first: Vec<u32> = prompts.iter().enumerate().map(|(s, prompt)| prompt[last(s)]).collect();
    engine.step(batch(0, &first, &DRAWS), Vec::new())?;
    let longest = prompts.iter().map(|p| p.len()).max().unwrap_or(0);
    let mut chosen = (1..steps).map(|i| engine.follow(longest + i)).collect::<Result<Vec<_>, _>>()?;
    chosen.push(engine.chosen()?);

    let vocab = engine.config().vocab;
    let (mut now, mut hot) = (first, 0);
    for (i, tokens) in chosen.into_iter().enumerate() {
        let logits = engine.step(batch(i, &now, &[]), Vec::new())?.logits;
        for (s, (row, draw)) in logits.chunks_exact(vocab).zip(DRAWS).enumerate() {
            let position = (last(s) + i) as u32;
            let best = draw.sample(position, row.iter().enumerate().map(|(id, logit)| (id as u32, *logit)));
            let Some((most, expected)) = best else {
                return Ok(Check::exact(name, false, format!("sequence {s}, step {i}: no logit is a number")));
            };
            let found = tokens.get(s).copied();
            let key = found.and_then(|id| Some(draw.key(position, id, *row.get(id as usize)?)));
            // The noise's logarithms are each machine's own: their last bits may round a key the other way.
            let spacing = if draw.temperature > 0.0 { 2.0 * f32::EPSILON * most.abs() } else { 0.0 };
            if found != Some(expected) && key.is_none_or(|key| most - key > spacing) {
                let detail = format!(
                    "sequence {s}, step {i}, {draw:?}: expected token {expected} (key {most}), found {found:?} (key {key:?})"
                );
                return Ok(Check::exact(name, false, detail));
            }
            hot += usize::from(draw.temperature > 0.0 && greedy(row) != expected);
        }
        now = tokens;
    }
    let rows = steps * DRAWS.len();
    Ok(match hot {
        0 => Check::new(name, Verdict::Unmeasured, "every token that was drawn is the likeliest"),
        _ => Check::exact(name, true, format!("{rows} tokens, {hot} of them drawn against the odds: the same")),
    })
}
