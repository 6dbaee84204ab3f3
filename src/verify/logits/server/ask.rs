//! What a server is asked, and what of it can be used. What it offers is found out by asking: prompts as ids or as text,
//! log-probabilities of the prompt or of what it goes on with, twenty of them or five. What it does not offer is told, and
//! the next thing is tried.

use serde_json::{Map, Value as Json, json};

use super::http::{Client, HttpError, Reply};
use super::reply::{Row, Tokens, Told, of_prompt, told};
use crate::report::clean;
use crate::tokenize::ChatMessage;

/// How many alternatives are asked for: as many as most servers give, else as many as OpenAI's did.
const TOPS: [usize; 2] = [20, 5];

/// A prompt, as ids and as the text that they are of.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// For reports.
    pub name: String,
    /// Its ids.
    pub ids: Vec<u32>,
    /// Its text, and the ids that our tokenizer makes of it.
    pub text: Option<(String, Vec<u32>)>,
}

/// What came behind a prompt.
#[derive(Clone, Debug, Default)]
pub struct Continued {
    /// Ids, as far as they are known.
    pub ids: Vec<u32>,
    /// What was likely at each of them.
    pub rows: Vec<Option<Row>>,
    /// Whether it ended by itself, and all of it is known.
    pub ended: bool,
    /// Whether the ids were made from the text, which may have been cut into other ones.
    pub from_text: bool,
}

/// How a prompt's log-probabilities are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Way {
    as_ids: bool,
    echo: bool,
    top: usize,
}

impl Way {
    fn all() -> impl Iterator<Item = Way> {
        let forms = [(true, true), (false, true), (true, false), (false, false)];
        forms.into_iter().flat_map(|(echo, as_ids)| TOPS.map(|top| Way { as_ids, echo, top }))
    }

    fn words(self) -> String {
        let (form, prompt) = (if self.echo { "echo and logprobs" } else { "prompt_logprobs" }, form_of(self.as_ids));
        format!("{form} {} of {prompt}", self.top)
    }
}

fn form_of(as_ids: bool) -> &'static str {
    if as_ids { "ids" } else { "text" }
}

/// Why an answer is of no use.
enum Useless {
    /// The server refuses what it was asked, or does not do it.
    Refused(String),
    /// It answers something else.
    Absent(String),
    /// What it says is no answer at all.
    Malformed(String),
    /// It read another prompt than was sent.
    Misread(String),
}

/// Asks one server.
pub struct Asker<'a> {
    client: Client<'a>,
    tokens: &'a Tokens<'a>,
    /// The model to ask for.
    pub model: Option<String>,
    /// What was tried in vain, and what was answered.
    pub tried: Vec<String>,
    /// Answers that were none.
    pub malformed: Vec<String>,
    /// Prompts that the server read otherwise than they were sent.
    pub misread: Vec<String>,
    way: Option<Way>,
    /// Forms that it does not do, whatever the prompt: with echo, without.
    not: Vec<bool>,
    /// Whether ids are taken, once that is known.
    as_ids: Option<bool>,
    /// How many alternatives it gives, once that is known.
    top: Option<Option<usize>>,
}

impl<'a> Asker<'a> {
    /// Asks for the model first.
    ///
    /// # Errors
    /// A server that cannot be reached or asked on.
    pub fn new(client: Client<'a>, tokens: &'a Tokens<'a>) -> Result<Self, HttpError> {
        let (tried, malformed, misread) = (Vec::new(), Vec::new(), Vec::new());
        let (model, way, not, as_ids, top) = (None, None, Vec::new(), None, None);
        let mut asker = Asker { client, tokens, model, tried, malformed, misread, way, not, as_ids, top };
        let reply = asker.client.get("/v1/models")?;
        let named = reply.json().and_then(|models| {
            let name = models.pointer("/data/0/id").and_then(Json::as_str).map(str::to_string);
            name.ok_or_else(|| format!("no model is named: {}", reply.excerpt()))
        });
        match named {
            Ok(name) => asker.model = Some(name),
            Err(why) => asker.tried.push(format!("/v1/models: {why}")),
        }
        Ok(asker)
    }

    fn post(&self, route: &str, mut body: Json) -> Result<Reply, HttpError> {
        if let (Some(model), Json::Object(body)) = (&self.model, &mut body) {
            body.insert("model".into(), json!(model));
        }
        self.client.post(route, &body)
    }

    fn note(&mut self, what: &str, useless: Useless) {
        let (list, why) = match useless {
            Useless::Refused(why) | Useless::Absent(why) => (&mut self.tried, why),
            Useless::Malformed(why) => (&mut self.malformed, why),
            Useless::Misread(why) => (&mut self.misread, why),
        };
        let line = format!("{what}: {why}");
        if !list.contains(&line) {
            list.push(line);
        }
    }

    /// What the server makes of a text; `None` where it does not say.
    ///
    /// # Errors
    /// As for [`Asker::new`], for all that follow.
    pub fn tokenize(&mut self, body: Map<String, Json>) -> Result<Option<Vec<u32>>, HttpError> {
        let reply = self.post("/tokenize", Json::Object(body))?;
        if reply.status != 200 {
            return Ok(None);
        }
        let ids = reply.json().ok().and_then(|said| {
            let all = said.get("tokens")?.as_array()?.iter();
            // Ids of another vocabulary are ids all the same.
            all.map(|id| id.get("id").unwrap_or(id).as_u64().and_then(|id| u32::try_from(id).ok())).collect()
        });
        match ids {
            Some(ids) => Ok(Some(ids).filter(|ids: &Vec<u32>| !ids.is_empty())),
            None => {
                self.note("/tokenize", Useless::Absent(reply.excerpt()));
                Ok(None)
            }
        }
    }

    /// The ids of a text, by the forms that vLLM and llama.cpp have.
    ///
    /// # Errors
    /// As for [`Asker::new`].
    pub fn ids_of(&mut self, text: &str) -> Result<Option<Vec<u32>>, HttpError> {
        for body in [json!({ "prompt": text }), json!({ "content": text, "add_special": true })] {
            let Json::Object(body) = body else { continue };
            if let Some(ids) = self.tokenize(body)? {
                return Ok(Some(ids));
            }
        }
        Ok(None)
    }

    /// What is likely at every position of a prompt, with the prompt's ids as they were read.
    ///
    /// # Errors
    /// As for [`Asker::new`].
    pub fn of_prompt(&mut self, prompt: &Prompt) -> Result<Option<(Vec<u32>, Told)>, HttpError> {
        let known = self.way;
        for way in Way::all().filter(|way| known.is_none_or(|known| known == *way)) {
            let Some(ids) = ids_as(prompt, way.as_ids).filter(|_| !self.not.contains(&way.echo)) else { continue };
            match self.prompt_by(prompt, ids, way)? {
                Ok(told) => {
                    (self.way, self.as_ids) = (Some(way), Some(way.as_ids));
                    return Ok(Some((ids.to_vec(), told)));
                }
                Err(useless) => {
                    // What does not do it at all does it for no other prompt and number either.
                    if matches!(useless, Useless::Absent(_) | Useless::Malformed(_)) {
                        self.not.push(way.echo);
                    }
                    self.note(&way.words(), useless);
                }
            }
        }
        Ok(None)
    }

    fn prompt_by(&self, prompt: &Prompt, ids: &[u32], way: Way) -> Result<Result<Told, Useless>, HttpError> {
        let mut body = json!({ "prompt": sent(prompt, way.as_ids), "max_tokens": 1, "temperature": 0 });
        match way.echo {
            true => (body["echo"], body["logprobs"]) = (json!(true), json!(way.top)),
            false => body["prompt_logprobs"] = json!(way.top),
        }
        let reply = self.post("/v1/completions", body)?;
        Ok(self.read_prompt(&reply, ids, way))
    }

    fn read_prompt(&self, reply: &Reply, ids: &[u32], way: Way) -> Result<Told, Useless> {
        let (whole, choice) = choice(reply)?;
        counted(&whole, ids.len())?;
        let found = match way.echo {
            true => choice.get("logprobs"),
            false => choice.get("prompt_logprobs").or(whole.get("prompt_logprobs")),
        };
        let Some(found) = found.filter(|found| !found.is_null()) else {
            return Err(Useless::Absent("answered without them".into()));
        };
        if !way.echo {
            return of_prompt(found, ids, self.tokens).map_err(Useless::Malformed);
        }
        let mut told = told(found, ids, self.tokens).map_err(Useless::Malformed)?;
        // The one token that was made stands behind the prompt.
        if told.len() < ids.len() && told.len() <= 1 {
            return Err(Useless::Absent("the prompt is not among the answer".into()));
        }
        if told.len() < ids.len() || told.len() > ids.len() + 1 {
            return Err(Useless::Malformed(format!("expected {} tokens, found {}", ids.len(), told.len())));
        }
        told.truncate(ids.len());
        match told.iter().zip(ids).position(|((found, _), own)| *found != Some(*own)) {
            None => Ok(told),
            Some(at) => {
                let found = told[at].0.map_or("none that is known".into(), |id| id.to_string());
                Err(Useless::Misread(format!("token {at}: expected {}, found {found}", ids[at])))
            }
        }
    }

    /// What the server goes on with, greedily.
    ///
    /// # Errors
    /// As for [`Asker::new`].
    pub fn go_on(&mut self, prompt: &Prompt, most: usize) -> Result<Option<(Vec<u32>, Continued)>, HttpError> {
        let tops = TOPS.map(Some).into_iter().chain([None]);
        let known = (self.as_ids, self.top);
        let ways = [true, false].into_iter().flat_map(|as_ids| tops.clone().map(move |top| (as_ids, top)));
        let ways =
            ways.filter(|(as_ids, top)| known.0.is_none_or(|k| k == *as_ids) && known.1.is_none_or(|k| k == *top));
        let mut malformed = false;
        for (as_ids, top) in ways {
            let Some(ids) = ids_as(prompt, as_ids).filter(|_| !malformed) else { continue };
            let mut body = json!({ "prompt": sent(prompt, as_ids), "max_tokens": most, "temperature": 0 });
            if let Some(top) = top {
                body["logprobs"] = json!(top);
            }
            let reply = self.post("/v1/completions", body)?;
            let read = choice(&reply).and_then(|(whole, choice)| {
                counted(&whole, ids.len())?;
                let text = choice.get("text").and_then(Json::as_str);
                let text = text.ok_or_else(|| Useless::Malformed("a choice without a text".into()))?;
                self.continued(&choice, text, true).and_then(|continued| most_of(continued, most))
            });
            match read {
                Ok(continued) => {
                    (self.as_ids, self.top) = (Some(as_ids), Some(top));
                    return Ok(Some((ids.to_vec(), continued)));
                }
                Err(useless) => {
                    malformed = matches!(useless, Useless::Malformed(_));
                    self.note(&format!("greedy text behind {}, logprobs {top:?}", form_of(as_ids)), useless);
                }
            }
        }
        Ok(None)
    }

    /// The answer to a conversation, and how many tokens the server counted in it.
    ///
    /// # Errors
    /// As for [`Asker::new`].
    pub fn chat(&mut self, messages: &[ChatMessage], most: usize) -> Result<Answered, HttpError> {
        let mut why = String::new();
        for top in TOPS.map(Some).into_iter().chain([None]) {
            let mut body = json!({ "messages": messages, "max_tokens": most, "temperature": 0 });
            if let Some(top) = top {
                (body["logprobs"], body["top_logprobs"]) = (json!(true), json!(top));
            }
            let reply = self.post("/v1/chat/completions", body)?;
            if matches!(reply.status, 404 | 405 | 501) {
                return Ok(Answered::Unknown(format!("HTTP {}: {}", reply.status, reply.excerpt())));
            }
            let read = choice(&reply).and_then(|(whole, choice)| {
                let said = |name: &str| {
                    let text = choice.get("message").and_then(|m| m.get(name)).and_then(Json::as_str);
                    text.filter(|text| !text.is_empty())
                };
                let message = choice.get("message").is_some_and(Json::is_object);
                let thought = said("reasoning_content").or(said("reasoning"));
                let text = match message {
                    true => thought.or(said("content")).unwrap_or_default(),
                    false => return Err(Useless::Malformed("a choice without a message".into())),
                };
                // Some list what is content alone, so that behind a thought it is not known what stood where.
                let mut continued = most_of(self.continued(&choice, text, thought.is_none())?, most)?;
                continued.ended &= thought.is_none();
                let count = whole.pointer("/usage/prompt_tokens").and_then(Json::as_u64);
                Ok(Answered::Said { count, continued })
            });
            match read {
                Ok(answered) => return Ok(answered),
                Err(Useless::Malformed(found)) => {
                    self.note("/v1/chat/completions", Useless::Malformed(found.clone()));
                    return Ok(Answered::Nothing(found));
                }
                Err(Useless::Refused(found) | Useless::Absent(found) | Useless::Misread(found)) => why = found,
            }
        }
        Ok(Answered::Nothing(why))
    }

    /// The prompt that the server renders of a conversation, where it says so: its ids, or its text.
    ///
    /// # Errors
    /// As for [`Asker::new`].
    pub fn rendered(&mut self, messages: &[ChatMessage]) -> Result<Option<Rendered>, HttpError> {
        let body = json!({ "messages": messages, "add_generation_prompt": true });
        if let Json::Object(body) = body.clone()
            && let Some(ids) = self.tokenize(body)?
        {
            return Ok(Some(Rendered::Ids(ids)));
        }
        let reply = self.post("/apply-template", body)?;
        let text = reply.json().ok().and_then(|said| said.get("prompt")?.as_str().map(str::to_string));
        Ok(text.map(Rendered::Text))
    }

    /// What a choice goes on with.
    fn continued(&self, choice: &Json, text: &str, listed: bool) -> Result<Continued, Useless> {
        let stopped = choice.get("finish_reason").and_then(Json::as_str) == Some("stop");
        match choice
            .get("logprobs")
            .filter(|found| listed && !found.is_null() && found.get("content") != Some(&Json::Null))
        {
            Some(found) => {
                let told = told(found, &[], self.tokens).map_err(Useless::Malformed)?;
                let all = told.len();
                let (mut ids, mut rows) = (Vec::new(), Vec::new());
                for (id, row) in told {
                    rows.push(row);
                    let Some(id) = id else { break };
                    ids.push(id);
                }
                // An end token among the list ends it as well.
                let stop = self.tokens.tokenizer.stop_ids();
                if ids.last().is_some_and(|id| stop.contains(*id)) && stopped {
                    return Ok(Continued { ids, rows, ended: false, from_text: false });
                }
                let ended = stopped && ids.len() == all;
                Ok(Continued { ids, rows, ended, from_text: false })
            }
            None => {
                let whole = !text.contains('\u{fffd}');
                let known = text.split('\u{fffd}').next().unwrap_or_default();
                let ids = self.tokens.tokenizer.encode(known, true).map_err(|e| Useless::Absent(e.to_string()))?;
                Ok(Continued { ended: stopped && whole, ids, rows: Vec::new(), from_text: true })
            }
        }
    }
}

/// How a chat turn was answered.
pub enum Answered {
    /// With so many tokens before the answer, where the server says that.
    Said {
        /// Tokens of the prompt.
        count: Option<u64>,
        /// The answer.
        continued: Continued,
    },
    /// The server knows no such route.
    Unknown(String),
    /// With nothing that can be used.
    Nothing(String),
}

/// A conversation as the server renders it.
pub enum Rendered {
    /// As ids.
    Ids(Vec<u32>),
    /// As text.
    Text(String),
}

fn ids_as(prompt: &Prompt, as_ids: bool) -> Option<&[u32]> {
    match as_ids {
        true => Some(&prompt.ids),
        false => prompt.text.as_ref().map(|(_, ids)| &ids[..]),
    }
}

fn sent(prompt: &Prompt, as_ids: bool) -> Json {
    match &prompt.text {
        Some((text, _)) if !as_ids => json!(text),
        _ => json!(prompt.ids),
    }
}

/// The whole answer, and its first choice.
fn choice(reply: &Reply) -> Result<(Json, Json), Useless> {
    let mut whole = match (reply.status, reply.json()) {
        (200, Err(why)) => return Err(Useless::Malformed(why)),
        (_, Err(why)) => return Err(Useless::Refused(why)),
        (_, Ok(whole)) => whole,
    };
    let first = whole.get_mut("choices").and_then(Json::as_array_mut).and_then(|all| all.first_mut()).map(Json::take);
    match first.filter(Json::is_object) {
        Some(first) => Ok((whole, first)),
        None => Err(Useless::Malformed(format!("no choice in the answer: {}", reply.excerpt()))),
    }
}

/// More tokens than were asked for are no answer; where a text was cut otherwise, there may be a few.
fn most_of(continued: Continued, most: usize) -> Result<Continued, Useless> {
    match continued.from_text || continued.ids.len() <= most {
        true => Ok(continued),
        false => Err(Useless::Malformed(format!("asked for {most} tokens, found {}", continued.ids.len()))),
    }
}

/// A server that counts other tokens than were sent read another prompt.
fn counted(whole: &Json, sent: usize) -> Result<(), Useless> {
    match whole.pointer("/usage/prompt_tokens") {
        None | Some(Json::Null) => Ok(()),
        Some(found) if found.as_u64() == Some(sent as u64) => Ok(()),
        Some(found) if found.is_u64() => {
            Err(Useless::Misread(format!("expected {sent} tokens in the prompt, the server counts {found}")))
        }
        Some(found) => Err(Useless::Malformed(format!("usage.prompt_tokens is {}", clean(&found.to_string())))),
    }
}
