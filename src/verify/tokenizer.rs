//! Stage `tokenizer`: do template, special tokens, stop ids and pre-tokenizer agree, with each other and with a
//! tokenizer.json where there is one? A prompt that is cut into the wrong ids looks like a fault of the engine.

use std::collections::BTreeSet;
use std::path::Path;

use super::{Subject, VerifyError};
use crate::checkpoint::{Checkpoint, Naming};
use crate::report::{Check, Progress, StageReport, Verdict};
use crate::tokenize::{JsonTokenizer, Tokenizer, TokenizerSpec};

const STAGE: &str = "tokenizer";

/// Runs the stage.
///
/// # Errors
/// None of its own: what is wrong with a tokenizer is a finding.
pub fn run(subject: &Subject, progress: &dyn Progress) -> Result<StageReport, VerifyError> {
    let checkpoint = subject.checkpoint.as_ref();
    progress.at("tokenizers", 0, 1);
    if !has_tokenizer(checkpoint) {
        let reason = match checkpoint.source().naming() {
            Naming::Gguf => "the metadata has no tokenizer.ggml keys: ids go in and come out",
            Naming::Hf => "the folder has no tokenizer.json: ids go in and come out",
        };
        return Ok(StageReport::not_applicable(STAGE, reason));
    }
    let spec = match checkpoint.tokenizer_spec() {
        Ok(spec) => spec,
        Err(e) => {
            let check = Check::exact("built", false, e.to_string());
            return Ok(StageReport::new(STAGE, "the tokenizer cannot be read", vec![check]));
        }
    };
    let mut checks = Vec::new();
    let sides = [Some(checkpoint), subject.baseline.as_deref()];
    let json = sides.into_iter().flatten().find_map(tokenizer_json);
    let other = json.as_ref().and_then(|(_, text)| {
        let unread = |e: String| Check::new("tokenizer.json", Verdict::Unmeasured, format!("it cannot be run: {e}"));
        JsonTokenizer::new(text).inspect_err(|e| checks.push(unread(e.to_string()))).ok()
    });
    let facts = spec.checks(Some(checkpoint.config().vocab), other.as_ref());
    checks.extend(facts.into_iter().map(|f| Check::exact(f.name, f.ok, f.detail)));
    if let Some(baseline) = subject.baseline.as_deref().filter(|b| has_tokenizer(b)) {
        checks.extend(against(&spec, baseline));
    }
    progress.at("tokenizers", 1, 1);
    let beside = match (&other, &json) {
        (Some(_), Some((path, _))) => format!("compared with {path}"),
        _ => "by itself: there is no tokenizer.json to compare with".into(),
    };
    Ok(StageReport::new(STAGE, format!("{} tokens, {beside}", spec.tokens.len()), checks))
}

fn has_tokenizer(checkpoint: &Checkpoint) -> bool {
    match checkpoint.source().naming() {
        Naming::Gguf => {
            let keys = ["tokenizer.ggml.tokens", "tokenizer.ggml.model"];
            keys.iter().any(|key| checkpoint.source().metadata().get(key).is_some())
        }
        Naming::Hf => json_path(checkpoint).is_file(),
    }
}

fn json_path(checkpoint: &Checkpoint) -> std::path::PathBuf {
    Path::new(checkpoint.name()).join("tokenizer.json")
}

/// The tokenizer.json of a Hugging Face folder: its path and its text.
fn tokenizer_json(checkpoint: &Checkpoint) -> Option<(String, String)> {
    let path = (checkpoint.source().naming() == Naming::Hf).then(|| json_path(checkpoint))?;
    let text = std::fs::read_to_string(&path).ok()?;
    Some((path.display().to_string(), text))
}

/// What the baseline states beside its tokens.
fn against(spec: &TokenizerSpec, baseline: &Checkpoint) -> Vec<Check> {
    let theirs = match baseline.tokenizer_spec() {
        Ok(theirs) => theirs,
        Err(e) => {
            let detail = format!("the baseline's tokenizer cannot be read: {e}");
            return vec![Check::new("tokenizer = baseline", Verdict::Unmeasured, detail)];
        }
    };
    let pre = |s: &TokenizerSpec| s.pre.clone().unwrap_or_else(|| "none".into());
    let mut checks = vec![
        Check::exact("pre-tokenizer = baseline", spec.pre == theirs.pre, sides(&pre(spec), &pre(&theirs))),
        first_difference("tokens = baseline", &spec.tokens, &theirs.tokens),
        first_difference("merges = baseline", &spec.merges, &theirs.merges),
    ];
    let same = spec.chat_template == theirs.chat_template;
    let size = |s: &TokenizerSpec| s.chat_template.as_ref().map_or("none".into(), |t| format!("{} bytes", t.len()));
    // Templates are edited after a conversion, often for the better.
    let verdict = if same { Verdict::Match } else { Verdict::Drift };
    checks.push(Check::new("chat template = baseline", verdict, sides(&size(spec), &size(&theirs))));
    checks.push(stop_ids(spec, &theirs));
    checks
}

/// The baseline's stop ids must all stop here; more do no harm.
fn stop_ids(spec: &TokenizerSpec, theirs: &TokenizerSpec) -> Check {
    let name = "stop ids = baseline";
    let ids = |s: &TokenizerSpec| -> Option<BTreeSet<u32>> {
        Some(Tokenizer::new(s).ok()?.stop_ids().ids.iter().map(|s| s.id).collect())
    };
    let (Some(here), Some(there)) = (ids(spec), ids(theirs)) else {
        return Check::new(name, Verdict::Unmeasured, "one of the tokenizers cannot be built");
    };
    let lost: Vec<&u32> = there.difference(&here).collect();
    let detail = match lost.as_slice() {
        [] => format!("{here:?}"),
        lost => format!("STOP_IDS: {lost:?} end a turn in the baseline and not here: {here:?} against {there:?}"),
    };
    Check::exact(name, lost.is_empty(), detail)
}

fn sides(here: &str, there: &str) -> String {
    if here == there { here.into() } else { format!("{here} here, {there} in the baseline") }
}

fn first_difference(name: &'static str, here: &[String], there: &[String]) -> Check {
    let at = here.iter().zip(there).position(|(a, b)| a != b);
    let detail = match at {
        Some(i) => format!("first difference at {i}: {:?} here, {:?} in the baseline", here[i], there[i]),
        None if here.len() != there.len() => format!("{} here, {} in the baseline", here.len(), there.len()),
        None => format!("{} equal", here.len()),
    };
    Check::exact(name, here == there, detail)
}
