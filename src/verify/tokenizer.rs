//! Stage `tokenizer`: do template, special tokens, stop ids and pre-tokenizer agree, with each other and with a
//! tokenizer.json where there is one? A prompt that is cut into the wrong ids looks like a fault of the engine.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::{Subject, VerifyError};
use crate::checkpoint::{Checkpoint, Naming};
use crate::regular;
use crate::report::table::plural;
use crate::report::{Check, Progress, StageReport, Verdict};
use crate::tokenize::{ChatMessage, Finding, JsonTokenizer, TokenizeError, Tokenizer, TokenizerSpec, tool_turns};

const STAGE: &str = "tokenizer";

/// Runs the stage.
///
/// # Errors
/// A damaged file; what else is wrong with a tokenizer is a finding.
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
        Err(e) if e.is_damage() => return Err(e.into()),
        Err(e) => {
            let verdict = if e.is_lack() { Verdict::Unmeasured } else { Verdict::Divergent };
            let check = Check::new("built", verdict, e.to_string());
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
    let verdict = |finding| match finding {
        Finding::NotApplicable => Verdict::NotApplicable,
        Finding::Holds => Verdict::Match,
        Finding::Doubtful => Verdict::Drift,
        Finding::Unmeasured => Verdict::Unmeasured,
        Finding::Fails => Verdict::Divergent,
    };
    checks.extend(facts.into_iter().map(|f| Check::new(f.name, verdict(f.finding), f.detail)));
    if let Some(baseline) = subject.baseline.as_deref().filter(|b| has_tokenizer(b)) {
        checks.extend(against(&spec, baseline));
    }
    progress.at("tokenizers", 1, 1);
    let beside = match (&other, &json) {
        (Some(_), Some((path, _))) => format!("compared with {path}"),
        _ => "by itself: without a tokenizer.json beside it the pre-tokenizer, the special tokens and the chat template are taken on \
              trust"
            .into(),
    };
    Ok(StageReport::new(STAGE, format!("{} tokens, {beside}{}", spec.tokens.len(), templates(&spec)), checks))
}

/// What follows from the chat templates that there are, where it is not one.
fn templates(spec: &TokenizerSpec) -> String {
    let names: Vec<&str> = spec.other_templates.iter().map(|t| t.name.as_str()).collect();
    match (&spec.chat_template, names.is_empty()) {
        (None, _) => {
            "; there is no chat template, so no chat turn can be made: `generate` works with --raw only".into()
        }
        (Some(_), true) => String::new(),
        (Some(_), false) => format!("; {} chat templates, not used: {}", names.len() + 1, names.join(", ")),
    }
}

fn has_tokenizer(checkpoint: &Checkpoint) -> bool {
    match checkpoint.source().naming() {
        Naming::Gguf => {
            let keys = ["tokenizer.ggml.tokens", "tokenizer.ggml.model"];
            keys.iter().any(|key| checkpoint.source().metadata().get(key).is_some())
        }
        Naming::Hf => json_path(checkpoint).is_some_and(|path| path.is_file()),
    }
}

/// Where a tokenizer.json stands beside a model's files; nowhere for the built-in one.
fn json_path(checkpoint: &Checkpoint) -> Option<PathBuf> {
    let folder = match checkpoint.source().naming() {
        Naming::Gguf => checkpoint.files().first()?.parent()?.to_path_buf(),
        Naming::Hf => checkpoint.name().into(),
    };
    Some(folder.join("tokenizer.json"))
}

/// The tokenizer.json beside a model: its path and its text.
fn tokenizer_json(checkpoint: &Checkpoint) -> Option<(String, String)> {
    let path = json_path(checkpoint)?;
    let text = regular::read_text(&path).ok()?;
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
    checks.push(types(spec, &theirs));
    checks.push(prompt(spec, &theirs));
    checks.push(template(spec, &theirs));
    checks.push(stop_ids(spec, &theirs));
    checks
}

/// What text can become and what steers the model. Converters differ in which literals they call control and which
/// user-defined, and in how they fill ids without a token; never in which tokens are ordinary.
fn types(spec: &TokenizerSpec, theirs: &TokenizerSpec) -> Check {
    let name = "token types = baseline";
    let differ = || (0..).zip(spec.types.iter().zip(&theirs.types)).filter(|(_, (a, b))| a != b);
    let ordinary = |ty: &i32| matches!(ty, 0 | 1);
    let crossing = differ().find(|(_, (a, b))| ordinary(a) != ordinary(b));
    let Some((id, (here, there))) = crossing.or_else(|| differ().next()) else {
        return Check::exact(name, true, format!("{} equal", spec.types.len().min(theirs.types.len())));
    };
    let token = usize::try_from(id).ok().and_then(|i: usize| spec.tokens.get(i)).cloned().unwrap_or_default();
    let count = differ().count();
    let detail = format!("{count} differ, the first is id {id} {token:?}: type {here} here, {there} in the baseline");
    Check::new(name, if crossing.is_some() { Verdict::Divergent } else { Verdict::Drift }, detail)
}

/// The ids that a plain text is fed as: what is put in front of it differs where everything else is equal.
fn prompt(spec: &TokenizerSpec, theirs: &TokenizerSpec) -> Check {
    let name = "prompt = baseline";
    let ids = |s: &TokenizerSpec| Tokenizer::new(s).and_then(|t| t.prompt_ids("Why?"));
    match (ids(spec), ids(theirs)) {
        (Ok(here), Ok(there)) => Check::exact(name, here == there, sides(&format!("{here:?}"), &format!("{there:?}"))),
        _ => Check::new(name, Verdict::Unmeasured, "one of the tokenizers cannot be built"),
    }
}

/// Conversations as (role, text), each with whether the assistant's turn is to be opened.
const CONVERSATIONS: [(&[(&str, &str)], bool); 3] = [
    (&[("user", "Why?")], true),
    (&[("system", "Be brief."), ("user", "Who?"), ("assistant", "I."), ("user", "Why?")], true),
    (&[("user", "Who?"), ("assistant", "I.")], false),
];

/// Templates are edited after a conversion, often for the better; but what they make of plain turns is what the model was
/// trained on.
fn template(spec: &TokenizerSpec, theirs: &TokenizerSpec) -> Check {
    let name = "chat template = baseline";
    let size = |s: &TokenizerSpec| s.chat_template.as_ref().map_or("none".into(), |t| format!("{} bytes", t.len()));
    let sizes = sides(&size(spec), &size(theirs));
    if spec.chat_template == theirs.chat_template {
        return Check::exact(name, true, sizes);
    }
    let (Ok(own), Ok(other)) = (Tokenizer::new(spec), Tokenizer::new(theirs)) else {
        return Check::new(name, Verdict::Unmeasured, "one of the tokenizers cannot be built");
    };
    let mut only_here = String::new();
    for (turns, open) in CONVERSATIONS {
        let turns: Vec<ChatMessage> = turns.iter().map(|(role, text)| ChatMessage::new(*role, *text)).collect();
        let render = |tokenizer: &Tokenizer| tokenizer.render_chat(&turns, open, &serde_json::Map::new());
        let what = plural(turns.len(), if open { "turn" } else { "closed turn" });
        match (render(&own), render(&other)) {
            (Ok(here), Ok(there)) if here != there => {
                let at = here.chars().zip(there.chars()).take_while(|(a, b)| a == b).count();
                let rest = |text: &str| text.chars().skip(at).collect::<String>();
                let detail = format!(
                    "TEMPLATE: {what} become {here:?} here, {there:?} in the baseline; from character {at} on {:?} here, \
                     {:?} there",
                    rest(&here),
                    rest(&there)
                );
                return Check::exact(name, false, detail);
            }
            (Err(e), Ok(_)) => return refused(name, &what, &e, Verdict::Divergent),
            (Ok(_), Err(e)) if only_here.is_empty() => {
                only_here = format!("; {what} are refused by the baseline's: {e}")
            }
            _ => {}
        }
    }
    tools(name, &format!("{sizes}{only_here}"), [&own, &other])
}

/// What the baseline renders and the model's own template does not: an error that is shown to whoever asks, not a prompt
/// that nobody sees. What this build lacks says nothing.
fn refused(name: &str, what: &str, error: &TokenizeError, verdict: Verdict) -> Check {
    let verdict = if error.is_lack() { Verdict::Unmeasured } else { verdict };
    Check::new(name, verdict, format!("TEMPLATE: {what}: rendered by the baseline's, refused here: {error}"))
}

/// Templates that make the same of plain turns, by what they make of tools. How a call is written is what publishers and
/// converters mend after a release; that its words are lost is no mending.
fn tools(name: &str, sizes: &str, [own, other]: [&Tokenizer; 2]) -> Check {
    let (turns, words) = tool_turns();
    let render = |tokenizer: &Tokenizer, n: usize| tokenizer.render_chat(&turns[..n], true, &serde_json::Map::new());
    for n in 2..=turns.len() {
        let what = if n == 2 { "a tool call" } else { "a tool's answer" };
        match (render(own, n), render(other, n)) {
            (Ok(here), Ok(there)) if here != there => {
                let lost = words.iter().find(|word| there.contains(**word) && !here.contains(**word));
                let why = lost.map_or(String::new(), |word| format!(" without {word:?}, its words,"));
                let detail = format!("TEMPLATE: {what} becomes{why} {here:?} here, {there:?} in the baseline");
                return Check::new(name, if lost.is_some() { Verdict::Divergent } else { Verdict::Drift }, detail);
            }
            (Err(e), Ok(_)) => return refused(name, what, &e, Verdict::Drift),
            _ => {}
        }
    }
    let detail = format!("{sizes}; what both can render of plain turns, and of tools, is the same");
    Check::new(name, Verdict::Drift, detail)
}

/// What ends a turn must be the same on both sides: an id too few and the model runs on, one too many and it is cut off.
fn stop_ids(spec: &TokenizerSpec, theirs: &TokenizerSpec) -> Check {
    let name = "stop ids = baseline";
    let ids = |s: &TokenizerSpec| -> Option<BTreeSet<u32>> {
        Some(Tokenizer::new(s).ok()?.stop_ids().ids.iter().map(|s| s.id).collect())
    };
    let (Some(here), Some(there)) = (ids(spec), ids(theirs)) else {
        return Check::new(name, Verdict::Unmeasured, "one of the tokenizers cannot be built");
    };
    let said = |list: Vec<&u32>, what: &str| (!list.is_empty()).then(|| format!("{list:?} end a turn {what}"));
    let lost = said(there.difference(&here).collect(), "in the baseline and not here");
    let more = said(here.difference(&there).collect(), "here and not in the baseline");
    let differ: Vec<String> = lost.into_iter().chain(more).collect();
    let detail = match differ.is_empty() {
        true => format!("{here:?}"),
        false => format!("STOP_IDS: {}; {here:?} here, {there:?} in the baseline", differ.join(", ")),
    };
    Check::exact(name, differ.is_empty(), detail)
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
