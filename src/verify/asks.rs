//! Chat turns with known answers, greedy, many at once, on the engine under test and on the CPU engine. Texts may part
//! only where the two best tokens are closer than the floor; each turn that parts is therefore judged against the
//! reference, token by token.

use std::collections::HashMap;
use std::path::Path;

use serde::Deserialize;

use super::logits::{fed, judge};
use super::{Subject, VerifyError};
use crate::engine::kv::PAGE;
use crate::engine::sampler::Sampling;
use crate::engine::scheduler::{Request, Scheduler};
use crate::engine::{Engine, Recipe};
use crate::report::{Check, Progress, Verdict};
use crate::tokenize::{ChatMessage, Tokenizer};

/// A user's turn and what the model is known to answer.
#[derive(Clone, Debug, Deserialize)]
pub struct Ask {
    /// The turn.
    pub ask: String,
    /// The answer, to the letter.
    pub answer: String,
}

/// Most tokens of an answer.
const MOST: usize = 200;
/// Sequences that run at once.
const AT_ONCE: usize = 24;

/// Reads a JSON list of objects with `ask` and `answer`.
///
/// # Errors
/// What is wrong with the file, by its name.
pub fn read(path: &Path) -> Result<Vec<Ask>, String> {
    let bad = |problem: String| format!("{}: {problem}", path.display());
    let text = crate::regular::read_text(path).map_err(|e| bad(e.to_string()))?;
    let list: Vec<Ask> =
        serde_json::from_str(&text).map_err(|e| bad(format!("expected a list of {{ask, answer}}: {e}")))?;
    if list.is_empty() {
        return Err(bad("expected at least one turn, found an empty list".into()));
    }
    Ok(list)
}

/// The checks of the turns.
pub(super) fn run(
    subject: &Subject,
    asks: &[Ask],
    progress: &dyn Progress,
    checks: &mut Vec<Check>,
) -> Result<(), VerifyError> {
    let tokenizer = subject.checkpoint.tokenizer_spec().and_then(|spec| Tokenizer::new(&spec));
    let prompts = tokenizer.and_then(|tokenizer| {
        let ids = |a: &Ask| tokenizer.chat_ids(&[ChatMessage::new("user", &a.ask)], true, &serde_json::Map::new());
        Ok((asks.iter().map(ids).collect::<Result<Vec<_>, _>>()?, tokenizer))
    });
    let (prompts, tokenizer) = match prompts {
        Ok(found) => found,
        Err(e) => {
            checks.push(Check::new("chat turns", Verdict::Unmeasured, e.to_string()));
            return Ok(());
        }
    };
    let stop: Vec<u32> = tokenizer.stop_ids().ids.iter().map(|s| s.id).collect();
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0) + MOST + 1;
    let longest = longest.min(subject.checkpoint.config().context);
    let sequences = AT_ONCE.min(asks.len().max(1));
    let options = subject.options_for(longest.max(512), sequences * longest.next_multiple_of(PAGE), sequences);
    progress.at("chat turns", 0, 2);
    let mut engine = subject.engines.lend(&subject.checkpoint, subject.tp, options)?;
    let target = answers(&mut engine, &prompts, &stop)?;
    progress.at("chat turns on the CPU engine", 1, 2);
    let baseline = answers(&mut Engine::cpu(subject.checkpoint.clone(), 1, options)?, &prompts, &stop)?;
    let parted: Vec<usize> = (0..asks.len()).filter(|i| target[*i] != baseline[*i]).collect();
    let right = |answers: &[Vec<u32>]| -> Vec<usize> {
        let text = |ids: &Vec<u32>| {
            let ended = ids.last().is_some_and(|id| stop.contains(id));
            ended.then(|| tokenizer.decode(&ids[..ids.len() - 1], false))
        };
        (0..asks.len()).filter(|i| text(&answers[*i]).as_ref() == Some(&asks[*i].answer)).collect()
    };
    let (ours, theirs) = (right(&target), right(&baseline));
    let lost: Vec<&str> = (0..asks.len()).filter(|i| !ours.contains(i)).map(|i| asks[i].ask.as_str()).collect();
    let detail = format!(
        "{} of {} to the letter, the CPU engine {}; not: {}",
        ours.len(),
        asks.len(),
        theirs.len(),
        if lost.is_empty() { "none".into() } else { lost.join(", ") }
    );
    // A lost answer that the CPU engine gives is a text that parts, and is judged below; for the rest the model is to blame.
    checks.push(Check::information("chat turns, known answers", detail));
    let names: Vec<String> = parted
        .iter()
        .map(|i| {
            let at = target[*i].iter().zip(&baseline[*i]).take_while(|(a, b)| a == b).count();
            format!("{} at token {at}", asks[*i].ask)
        })
        .collect();
    let name = "chat turns = CPU engine";
    checks.push(match names.len() {
        0 if itself(subject) => Check::information(name, "it is the CPU engine, on one rank, that was asked"),
        0 => Check::exact(name, true, format!("all {} texts are equal", asks.len())),
        n => {
            let equal = asks.len() - n;
            Check::information(
                name,
                format!("{equal} texts are equal; {n} part and are judged below: {}", names.join(", ")),
            )
        }
    });
    for i in parted {
        let name = format!("turn {}", asks[i].ask);
        // The text that came, from a batch of many, is the one that is judged.
        let run = fed(&mut engine, name, &prompts[i], target[i].clone())?;
        judge(subject, &run, false, progress, checks)?;
    }
    Ok(())
}

/// Whether the engine under test is the one that it is compared with, so that nothing could be found.
fn itself(subject: &Subject) -> bool {
    let backend = subject.engines.backend();
    #[cfg(feature = "cuda")]
    let cpu = backend.cuda().is_none();
    #[cfg(not(feature = "cuda"))]
    let cpu = true;
    cpu && subject.tp == 1 && backend.recipe() == Recipe::Strict
}

/// The ids that follow each prompt, the stop id included.
fn answers(engine: &mut Engine, prompts: &[Vec<u32>], stop: &[u32]) -> Result<Vec<Vec<u32>>, VerifyError> {
    let mut scheduler = Scheduler::default();
    let mut places = HashMap::new();
    for (i, prompt) in prompts.iter().enumerate() {
        let (prompt, stop) = (prompt.clone(), stop.to_vec());
        let number = scheduler.add(engine, Request::plain(prompt, MOST, stop, Sampling::default()))?;
        places.insert(number, i);
    }
    let mut answers = vec![Vec::new(); prompts.len()];
    while scheduler.is_busy() {
        for event in scheduler.step(engine)? {
            if let Some(i) = places.get(&event.sequence) {
                answers[*i].push(event.token);
            }
        }
    }
    Ok(answers)
}
