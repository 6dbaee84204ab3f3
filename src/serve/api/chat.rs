//! `/v1/chat/completions`.

use serde::Serialize;
use serde_json::{Map, Value as Json, json};

use super::Model;
use super::ask::Ask;
use super::error::ApiError;
use super::fields::{Fields, kind};
use super::frame::{Envelope, event};
use super::literals::Marks;
use super::reply::{Head, Reply, Tally, chat_logprobs, finish_reason};
use crate::engine::sampler::Sampling;
use crate::serve::driver::{Said, What};
use crate::serve::turn::{Piece, TokenLogprob};
use crate::tokenize::{ChatMessage, TokenizeError};

/// Variables of the template that are the request's own.
const RESERVED: [&str; 3] = ["messages", "tools", "add_generation_prompt"];

/// What frames say that they are.
const CHUNK: &str = "chat.completion.chunk";

/// Literals that the assistant's past content may hold.
const THINK: [&str; 2] = ["<think>", "</think>"];

/// A conversation to be continued.
#[derive(Debug)]
pub struct ChatAsk {
    /// How.
    pub ask: Ask,
    /// Ids of the prompt.
    pub prompt: Vec<u32>,
}

/// Reads a request and renders its conversation.
///
/// # Errors
/// Fields that are wrong; what the template says is wrong.
pub fn read(fields: &mut Fields<'_>, model: &Model, defaults: &Sampling) -> Result<ChatAsk, ApiError> {
    let mut ask = Ask::read(fields, model, defaults, 1)?;
    let told = fields.flag("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0, 20)?;
    if top.is_some() && !told {
        return Err(fields.error("top_logprobs", "expected only where logprobs is true"));
    }
    ask.wishes.logprobs = told.then_some(top.unwrap_or(0) as usize);
    let prompt = prompt(fields, model)?;
    Ok(ChatAsk { ask, prompt })
}

/// The ids of a conversation.
///
/// # Errors
/// As [`read`].
pub fn prompt(fields: &mut Fields<'_>, model: &Model) -> Result<Vec<u32>, ApiError> {
    let messages = fields.any("messages").ok_or_else(|| fields.error("messages", "expected at least one message"))?;
    let all = messages.as_array().filter(|all| !all.is_empty()).ok_or_else(|| {
        let found = if messages.is_array() { "an empty one" } else { kind(messages) };
        fields.error("messages", format!("expected an array of at least one message, found {found}"))
    })?;
    let extra = variables(fields)?;
    let seen = Json::Object(extra.clone());
    let marks = Marks::new(&model.tokenizer, &[messages, &seen]).ok_or_else(|| {
        ApiError::field("messages", "expected a text that leaves one character for private use, found all of them")
    })?;
    let messages = all.iter().enumerate().map(|(i, m)| message(m, &format!("messages[{i}]"), &marks));
    let messages: Vec<ChatMessage> = messages.collect::<Result<_, _>>()?;
    // An answer that was begun is gone on with.
    let begins = messages.last().is_none_or(|last| last.role != "assistant");
    let template = |e: TokenizeError| ApiError {
        code: "template_error".into(),
        ..ApiError::field("messages", format!("the chat template: {e}"))
    };
    let text = model.tokenizer.render_chat(&messages, begins, &marks.map(&extra)).map_err(template)?;
    model.holds(&text, "messages")?;
    let ids = marks.ids(&text).map_err(|e| ApiError::internal(e.to_string()))?;
    match ids.is_empty() {
        false => Ok(ids),
        true => Err(fields.error("messages", "expected a conversation, found one that the template makes nothing of")),
    }
}

/// Further variables of the template.
fn variables(fields: &mut Fields<'_>) -> Result<Map<String, Json>, ApiError> {
    let mut extra = Map::new();
    if let Some(thinking) = fields.any("thinking") {
        let enabled = match Fields::of(thinking, "thinking")?.string("type")? {
            Some("enabled") => true,
            Some("disabled") => false,
            _ => return Err(fields.error("thinking.type", "expected enabled or disabled")),
        };
        extra.insert("enable_thinking".into(), json!(enabled));
    }
    if let Some(flag) = fields.flag("enable_thinking")? {
        extra.insert("enable_thinking".into(), json!(flag));
    }
    if let Some(effort) = fields.string("reasoning_effort")? {
        extra.insert("reasoning_effort".into(), json!(effort));
    }
    for (name, value) in fields.object("chat_template_kwargs")?.into_iter().flatten() {
        if RESERVED.contains(&name.as_str()) {
            return Err(ApiError::field(format!("chat_template_kwargs.{name}"), "cannot be replaced"));
        }
        extra.insert(name.clone(), value.clone());
    }
    Ok(extra)
}

/// A message as the template reads it, its texts marked.
fn message(value: &Json, path: &str, marks: &Marks<'_>) -> Result<ChatMessage, ApiError> {
    let mut fields = Fields::of(value, path)?;
    let role = match fields.string("role")? {
        Some("developer") => "system",
        Some(role @ ("system" | "user" | "assistant" | "tool")) => role,
        found => {
            let found = found.map_or("none".into(), |role| format!("{role:?}"));
            let message = format!("expected system, developer, user, assistant or tool, found {found}");
            return Err(fields.error("role", message));
        }
    };
    fields.refuse(&[("function_call", "is not supported: expected tool_calls"), ("audio", "is not supported")])?;
    let is_own = role == "assistant";
    let kept = if is_own { &THINK[..] } else { &[] };
    let content = content(&mut fields)?;
    let mut other = Map::new();
    if is_own {
        let reasoning = fields.string("reasoning_content")?;
        if let Some(reasoning) = reasoning.or(fields.string("reasoning")?) {
            other.insert("reasoning_content".into(), marks.text(reasoning, &[]).into());
        }
        if let Some(calls) = fields.any("tool_calls") {
            other.insert("tool_calls".into(), marks.value(&tool_calls(calls, path)?));
        }
    }
    for name in ["name", "tool_call_id"] {
        if let Some(text) = fields.string(name)? {
            other.insert(name.into(), marks.text(text, &[]).into());
        }
    }
    Ok(ChatMessage { role: role.into(), content: marks.text(&content, kept).into(), other })
}

/// A message's text: a string, or parts of text joined.
fn content(fields: &mut Fields<'_>) -> Result<String, ApiError> {
    let parts = match fields.any("content") {
        None => return Ok(String::new()),
        Some(Json::String(text)) => return Ok(text.clone()),
        Some(Json::Array(parts)) => parts,
        Some(other) => {
            let message = format!("expected a string or an array of text parts, found {}", kind(other));
            return Err(fields.error("content", message));
        }
    };
    let text = |(i, part): (usize, &Json)| match (part.get("type").and_then(Json::as_str), part.get("text")) {
        (Some("text"), Some(Json::String(text))) => Ok(text.clone()),
        (Some("text"), _) => Err(fields.error(&format!("content[{i}].text"), "expected a string")),
        (Some(other), _) => {
            Err(fields.error(&format!("content[{i}]"), format!("expected type text, found {other:?}: text only")))
        }
        (None, _) => Err(fields.error(&format!("content[{i}].type"), "expected text")),
    };
    parts.iter().enumerate().map(text).collect()
}

/// Past tool calls: clients send arguments as JSON in a string, templates look into the object.
fn tool_calls(calls: &Json, path: &str) -> Result<Json, ApiError> {
    let path = format!("{path}.tool_calls");
    let all =
        calls.as_array().ok_or_else(|| ApiError::field(&path, format!("expected an array, found {}", kind(calls))))?;
    let one = |(i, call): (usize, &Json)| {
        let path = format!("{path}[{i}].function");
        let mut call = call.clone();
        let function = call.get_mut("function").and_then(Json::as_object_mut);
        let function = function.ok_or_else(|| ApiError::field(&path, "expected an object"))?;
        let path = format!("{path}.arguments");
        let parsed = match function.get("arguments") {
            None | Some(Json::Null) => json!({}),
            Some(Json::String(text)) if text.trim().is_empty() || text.trim() == "null" => json!({}),
            Some(Json::String(text)) => serde_json::from_str(text)
                .map_err(|e| ApiError::field(&path, format!("expected a JSON object in a string: {e}")))?,
            Some(other) => other.clone(),
        };
        if !parsed.is_object() {
            return Err(ApiError::field(&path, format!("expected a JSON object, found {}", kind(&parsed))));
        }
        function.insert("arguments".into(), parsed);
        Ok(call)
    };
    all.iter().enumerate().map(one).collect()
}

/// An answer of a whole reply.
#[derive(Clone, Debug, Default)]
struct Answer {
    content: String,
    reasoning: String,
    logprobs: Vec<Json>,
    finish: Option<&'static str>,
}

/// What a frame tells of an answer.
#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    delta: Delta<'a>,
    logprobs: Option<Json>,
    finish_reason: Option<&'static str>,
}

/// What it adds to the answer.
#[derive(Serialize)]
#[serde(untagged)]
enum Delta<'a> {
    Role {
        role: &'static str,
        content: &'static str,
    },
    Content {
        content: &'a str,
    },
    Reasoning {
        reasoning_content: &'a str,
    },
    /// Reasoning under both of its names.
    Twice {
        reasoning_content: &'a str,
        reasoning: &'a str,
    },
    Nothing {},
}

/// Replies of a chat.
#[derive(Debug)]
pub struct ChatReply {
    head: Head,
    envelope: Envelope,
    /// Whether logprobs were asked for.
    logprobs: bool,
    /// Whether reasoning is told under a second name, too.
    also: bool,
    answers: Vec<Answer>,
    tally: Tally,
}

impl ChatReply {
    /// To a request for `n` answers to a prompt of `tokens`.
    pub fn new(head: Head, (n, tokens): (usize, usize), logprobs: bool, also: bool) -> Self {
        let tally = Tally { prompt: tokens, ..Tally::default() };
        let envelope = Envelope::new(&head, CHUNK);
        ChatReply { head, envelope, logprobs, also, answers: vec![Answer::default(); n], tally }
    }

    /// A frame of an answer that has not ended.
    fn frame(&self, out: &mut Vec<u8>, index: usize, delta: Delta<'_>, tokens: Option<&[TokenLogprob]>) {
        let logprobs = tokens.filter(|_| self.logprobs).map(|tokens| told(chat_logprobs(tokens)));
        self.envelope.write(out, &Choice { index, delta, logprobs, finish_reason: None });
    }
}

/// Tokens and how likely they were, as clients read them.
fn told(content: Vec<Json>) -> Json {
    json!({ "content": content, "refusal": null })
}

impl Reply for ChatReply {
    fn opening(&self, out: &mut Vec<u8>) {
        for choice in 0..self.answers.len() {
            self.frame(out, choice, Delta::Role { role: "assistant", content: "" }, None);
        }
    }

    fn take(&mut self, said: Said, out: &mut Vec<u8>) -> Result<(), ApiError> {
        let Said { choice, what } = said;
        let stream = self.head.stream;
        match what {
            What::Read { cached, .. } => {
                if choice == 0 {
                    self.tally.cached = cached;
                }
            }
            What::Refused(why) => return Err(ApiError::field("messages", why)),
            What::Piece(Piece::Reasoning(text)) if stream => {
                let (reasoning_content, reasoning) = (&*text, &*text);
                let delta = match self.also {
                    true => Delta::Twice { reasoning_content, reasoning },
                    false => Delta::Reasoning { reasoning_content },
                };
                self.frame(out, choice, delta, None);
            }
            What::Piece(Piece::Content(text, tokens)) if stream => {
                self.frame(out, choice, Delta::Content { content: &text }, Some(&tokens));
            }
            What::Piece(piece) => {
                let Some(answer) = self.answers.get_mut(choice) else { return Ok(()) };
                match piece {
                    Piece::Reasoning(text) => answer.reasoning += &text,
                    Piece::Content(text, tokens) => {
                        answer.content += &text;
                        answer.logprobs.extend(chat_logprobs(&tokens));
                    }
                }
            }
            What::Ended(ended, spent) => {
                let finish_reason = Some(finish_reason(ended)?);
                self.tally.add(spent);
                if let Some(answer) = self.answers.get_mut(choice) {
                    answer.finish = finish_reason;
                }
                if stream {
                    let delta = Delta::Nothing {};
                    self.envelope.write(out, &Choice { index: choice, delta, logprobs: None, finish_reason });
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
            event(out, &self.head.object(CHUNK, Vec::new(), Some(self.tally.json())));
        }
    }

    fn whole(&self) -> Json {
        let one = |(i, answer): (usize, &Answer)| {
            let mut message = json!({ "role": "assistant", "content": answer.content });
            if !answer.reasoning.is_empty() {
                message["reasoning_content"] = answer.reasoning.as_str().into();
                if self.also {
                    message["reasoning"] = answer.reasoning.as_str().into();
                }
            }
            let logprobs = self.logprobs.then(|| told(answer.logprobs.clone()));
            json!({ "index": i, "message": message, "logprobs": logprobs, "finish_reason": answer.finish })
        };
        let choices = self.answers.iter().enumerate().map(one).collect();
        self.head.object("chat.completion", choices, Some(self.tally.json()))
    }
}
