//! `/v1/completions`.

use serde::Serialize;
use serde_json::{Value as Json, json};

use super::Model;
use super::ask::Ask;
use super::error::ApiError;
use super::fields::{Fields, integer, kind};
use super::frame::{Envelope, event};
use super::reply::{Head, Lists, Reply, Tally, finish_reason};
use crate::engine::chooser::Logprobs;
use crate::engine::sampler::Sampling;
use crate::serve::driver::{Said, What};
use crate::serve::turn::{Piece, TokenLogprob};
use crate::tokenize::Tokenizer;
use std::sync::Arc;

/// What replies and frames say that they are.
const OBJECT: &str = "text_completion";

/// A prompt of a plain completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Its ids; at least one.
    pub ids: Vec<u32>,
    /// Its text, as it came or as its ids read.
    pub text: String,
}

/// Texts to be continued.
#[derive(Debug)]
pub struct CompletionAsk {
    /// How.
    pub ask: Ask,
    /// Each with as many answers as are wanted.
    pub prompts: Vec<Prompt>,
    /// Whether the prompts stand before their answers.
    pub echo: bool,
}

/// Reads a request.
///
/// # Errors
/// Fields that are wrong.
pub fn read(fields: &mut Fields<'_>, model: &Model, defaults: &Sampling) -> Result<CompletionAsk, ApiError> {
    let echo = fields.flag("echo")?.unwrap_or(false);
    let mut ask = Ask::read(fields, model, defaults, if echo { 0 } else { 1 })?;
    ask.wishes.logprobs = match fields.any("logprobs") {
        Some(Json::Bool(told)) => told.then_some(0),
        _ => fields.integer("logprobs", 0, 20)?.map(|top| top as usize),
    };
    ask.wishes.prompt_logprobs = ask.wishes.logprobs.filter(|_| echo);
    let prompts = prompts(fields, model)?;
    Ok(CompletionAsk { ask, prompts, echo })
}

/// The prompts of a request: a text, ids, or several of one of these.
///
/// # Errors
/// Something else, a prompt without tokens, ids that are none.
pub fn prompts(fields: &mut Fields<'_>, model: &Model) -> Result<Vec<Prompt>, ApiError> {
    let special = fields.flag("parse_special")?.unwrap_or(true);
    let Some(value) = fields.any("prompt") else {
        return Err(fields.error("prompt", "expected a string, an array of strings, of ids, or of arrays of ids"));
    };
    let one = |value: &Json, path: &str| match value {
        Json::String(text) => of_text(text, special, model, path),
        Json::Array(ids) => of_ids(ids, model, path),
        other => Err(ApiError::field(path, format!("expected a string or an array of ids, found {}", kind(other)))),
    };
    match value {
        Json::Array(all) if all.first().is_some_and(|v| v.is_string() || v.is_array()) => {
            all.iter().enumerate().map(|(i, v)| one(v, &format!("prompt[{i}]"))).collect()
        }
        one_alone => Ok(vec![one(one_alone, "prompt")?]),
    }
}

fn of_text(text: &str, special: bool, model: &Model, path: &str) -> Result<Prompt, ApiError> {
    let tokenizer = &model.tokenizer;
    model.holds(text, path)?;
    let ids = if special { tokenizer.prompt_ids(text) } else { tokenizer.plain_ids(text) };
    let ids = ids.map_err(|e| ApiError::internal(e.to_string()))?;
    match ids.is_empty() {
        false => Ok(Prompt { ids, text: text.into() }),
        true => Err(ApiError::field(path, "expected at least one token, found an empty text")),
    }
}

/// The text of an array of ids.
///
/// # Errors
/// Something else.
pub fn text_of(ids: &Json, model: &Model, path: &str) -> Result<String, ApiError> {
    match ids {
        Json::Array(ids) => Ok(of_ids(ids, model, path)?.text),
        other => Err(ApiError::field(path, format!("expected an array of token ids, found {}", kind(other)))),
    }
}

fn of_ids(ids: &[Json], model: &Model, path: &str) -> Result<Prompt, ApiError> {
    let id = |(i, v): (usize, &Json)| {
        let known = integer(v).filter(|id| (0..model.vocab as i64).contains(id)).map(|id| id as u32);
        let wrong = || format!("expected token ids from 0 to {}, found {}", model.vocab - 1, short(v));
        known.ok_or_else(|| ApiError::field(format!("{path}[{i}]"), wrong()))
    };
    let ids: Vec<u32> = ids.iter().enumerate().map(id).collect::<Result<_, _>>()?;
    if ids.is_empty() {
        return Err(ApiError::field(path, "expected at least one token, found an empty array"));
    }
    let text = model.tokenizer.decode(&ids, false);
    Ok(Prompt { ids, text })
}

/// A value that is no id, in few words.
fn short(value: &Json) -> String {
    match value {
        Json::Number(n) => n.to_string(),
        other => kind(other).into(),
    }
}

/// An answer.
#[derive(Debug, Default)]
struct Answer {
    text: String,
    lists: Lists,
    finish: Option<&'static str>,
}

/// What a frame tells of an answer.
#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    text: &'a str,
    logprobs: Option<Json>,
    finish_reason: Option<&'static str>,
}

/// Replies of plain completions.
pub struct CompletionReply {
    head: Head,
    envelope: Envelope,
    tokenizer: Arc<Tokenizer>,
    prompts: Vec<Prompt>,
    n: usize,
    echo: bool,
    logprobs: bool,
    /// What was said of each prompt's tokens.
    of_prompts: Vec<Vec<TokenLogprob>>,
    answers: Vec<Answer>,
    tally: Tally,
}

impl CompletionReply {
    /// To a request.
    pub fn new(head: Head, tokenizer: Arc<Tokenizer>, asked: &CompletionAsk) -> Self {
        let CompletionAsk { ask, prompts, echo } = asked;
        let tally = Tally { prompt: prompts.iter().map(|p| p.ids.len()).sum(), ..Tally::default() };
        CompletionReply {
            envelope: Envelope::new(&head, OBJECT),
            head,
            tokenizer,
            n: ask.n,
            echo: *echo,
            logprobs: ask.wishes.logprobs.is_some(),
            of_prompts: vec![Vec::new(); prompts.len()],
            answers: (0..prompts.len() * ask.n).map(|_| Answer::default()).collect(),
            prompts: prompts.clone(),
            tally,
        }
    }

    /// A prompt has run: where it is wanted, it stands before the answer.
    fn read(&mut self, out: &mut Vec<u8>, choice: usize, cached: usize, logprobs: Vec<Logprobs>) {
        let group = choice / self.n;
        let (Some(prompt), Some(answer)) = (self.prompts.get(group), self.answers.get_mut(choice)) else { return };
        if choice.is_multiple_of(self.n) {
            self.tally.cached += cached;
            let bytes = |id: u32| self.tokenizer.token_bytes(id).unwrap_or_default().to_vec();
            let tokens = prompt.ids.iter().skip(1).zip(logprobs).map(|(id, found)| TokenLogprob {
                bytes: bytes(*id),
                logprob: found.chosen,
                top: found.top.into_iter().map(|(id, ln)| (bytes(id), ln)).collect(),
            });
            self.of_prompts[group] = tokens.collect();
        }
        if !self.echo {
            return;
        }
        if self.logprobs {
            answer.lists.unknown(self.tokenizer.token_bytes(prompt.ids[0]).unwrap_or_default());
            self.of_prompts[group].iter().for_each(|token| answer.lists.token(token));
        }
        let text = prompt.text.clone();
        self.text(out, choice, &text);
    }

    /// More text of an answer: a frame, or a part of the whole.
    fn text(&mut self, out: &mut Vec<u8>, index: usize, text: &str) {
        let Some(answer) = self.answers.get_mut(index) else { return };
        if !self.head.stream {
            answer.text += text;
            return;
        }
        let logprobs = self.logprobs.then(|| answer.lists.take());
        self.envelope.write(out, &Choice { index, text, logprobs, finish_reason: None });
    }
}

impl Reply for CompletionReply {
    fn opening(&self, _: &mut Vec<u8>) {}

    fn take(&mut self, said: Said, out: &mut Vec<u8>) -> Result<(), ApiError> {
        let Said { choice, what } = said;
        match what {
            What::Read { cached, logprobs } => self.read(out, choice, cached, logprobs),
            What::Refused(why) => return Err(ApiError::field("prompt", why)),
            What::Piece(Piece::Reasoning(text)) => self.text(out, choice, &text),
            What::Piece(Piece::Content(text, tokens)) => {
                if let Some(answer) = self.answers.get_mut(choice) {
                    tokens.iter().for_each(|token| answer.lists.token(token));
                }
                self.text(out, choice, &text);
            }
            What::Ended(ended, spent) => {
                let finish_reason = Some(finish_reason(ended)?);
                self.tally.add(spent);
                if let Some(answer) = self.answers.get_mut(choice) {
                    answer.finish = finish_reason;
                }
                if self.head.stream {
                    self.envelope.write(out, &Choice { index: choice, text: "", logprobs: None, finish_reason });
                }
            }
        }
        Ok(())
    }

    fn is_done(&self) -> bool {
        self.answers.iter().all(|answer| answer.finish.is_some())
    }

    fn closing(&self, out: &mut Vec<u8>) {
        if self.head.include_usage {
            event(out, &self.head.object(OBJECT, Vec::new(), Some(self.tally.json())));
        }
    }

    fn whole(&self) -> Json {
        let one = |(i, answer): (usize, &Answer)| {
            let logprobs = self.logprobs.then(|| answer.lists.clone().take());
            json!({ "index": i, "text": answer.text, "logprobs": logprobs, "finish_reason": answer.finish })
        };
        let choices = self.answers.iter().enumerate().map(one).collect();
        self.head.object(OBJECT, choices, Some(self.tally.json()))
    }
}
