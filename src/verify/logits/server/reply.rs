//! What servers say of tokens, read into rows: the log-probabilities of the tokens that may stand at a position. Three
//! forms are known: OpenAI's four lists, its list of `content`, and vLLM's `prompt_logprobs`. A token is known by its id
//! where the server says it, by its bytes, or by its text where exactly one token reads so; what stays unknown is part of
//! the rest.

use std::collections::HashMap;

use serde_json::{Map, Value as Json};

use crate::tokenize::Tokenizer;

/// By so much a log-probability may exceed 0, and probabilities 1: what roundings of f32 come to.
const EXCESS: f64 = 1e-3;

/// What a server says of the token behind a position.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// Known tokens and their log-probabilities, each once.
    pub listed: Vec<(u32, f64)>,
    /// The most likely token, where alternatives came and it is a known one.
    pub best: Option<u32>,
    /// The largest log-probability of all that came.
    pub top: f64,
}

/// Which token an entry is of, as far as it can be known.
pub struct Tokens<'a> {
    /// The model's own.
    pub tokenizer: &'a Tokenizer,
    vocab: usize,
    /// The ids of texts that one token reads as; `None` where several do.
    by_bytes: HashMap<&'a [u8], Option<u32>>,
}

impl<'a> Tokens<'a> {
    /// Those of a model with so many rows in its vocabulary.
    pub fn new(tokenizer: &'a Tokenizer, vocab: usize) -> Self {
        let mut by_bytes = HashMap::new();
        for id in 0..tokenizer.len().min(vocab) as u32 {
            if let Some(bytes) = tokenizer.token_bytes(id).filter(|bytes| !bytes.is_empty()) {
                by_bytes.entry(bytes).and_modify(|known| *known = None).or_insert(Some(id));
            }
        }
        Tokens { tokenizer, vocab, by_bytes }
    }

    /// An id that a server states.
    ///
    /// # Errors
    /// What is no id of this vocabulary.
    pub fn id(&self, value: &Json) -> Result<u32, String> {
        let id = value.as_u64().filter(|id| *id < self.vocab as u64);
        id.map(|id| id as u32).ok_or_else(|| format!("expected an id below {}, found {}", self.vocab, short(value)))
    }

    /// The token of a text as servers write it: `token_id:7`, `bytes:\xf0\x9f`, or what it reads as.
    fn of_text(&self, text: &str) -> Result<Option<u32>, String> {
        if let Some(id) = text.strip_prefix("token_id:") {
            return self.id(&id.parse::<u64>().map_or(Json::Null, Json::from)).map(Some);
        }
        let escaped = text.strip_prefix("bytes:").map(|rest| {
            rest.split("\\x").skip(1).map(|hex| u8::from_str_radix(hex, 16).ok()).collect::<Option<Vec<u8>>>()
        });
        let bytes = escaped.flatten().unwrap_or_else(|| text.as_bytes().to_vec());
        Ok(self.by_bytes.get(&bytes[..]).copied().flatten())
    }

    /// The token of an entry with `id`, `bytes` or `token`.
    fn of_entry(&self, entry: &Json) -> Result<Option<u32>, String> {
        if let Some(id) = entry.get("id").filter(|id| !id.is_null()) {
            return self.id(id).map(Some);
        }
        let text = entry.get("token").and_then(Json::as_str).ok_or("an entry without a token")?;
        if text.starts_with("token_id:") {
            return self.of_text(text);
        }
        match entry.get("bytes").and_then(Json::as_array) {
            Some(bytes) => {
                let byte = |b: &Json| b.as_u64().and_then(|b| u8::try_from(b).ok()).ok_or("bytes that are none");
                let bytes = bytes.iter().map(byte).collect::<Result<Vec<u8>, _>>()?;
                Ok(self.by_bytes.get(&bytes[..]).copied().flatten())
            }
            None => self.of_text(text),
        }
    }
}

/// A value in few words.
fn short(value: &Json) -> String {
    let text = value.to_string();
    text.chars().take(40).collect()
}

fn logarithm(value: &Json) -> Result<f64, String> {
    let found = value.as_f64().filter(|ln| *ln <= EXCESS);
    found.ok_or_else(|| format!("expected a log-probability, found {}", short(value)))
}

/// A row of what was listed; `chosen` is the token that stands there, whose alternatives `others` are.
fn row(chosen: (Option<u32>, f64), others: Option<Vec<(Option<u32>, f64)>>) -> Result<Row, String> {
    let mut row = Row { top: chosen.1, ..Row::default() };
    let alternatives = others.as_ref().is_some_and(|others| !others.is_empty());
    let mut best = chosen;
    for (id, ln) in others.into_iter().flatten().chain([chosen]) {
        if ln > best.1 {
            best = (id, ln);
        }
        row.top = row.top.max(ln);
        if let Some(id) = id.filter(|id| row.listed.iter().all(|(known, _)| known != id)) {
            row.listed.push((id, ln));
        }
    }
    let sum: f64 = row.listed.iter().map(|(_, ln)| ln.exp()).sum();
    if sum > 1.0 + EXCESS {
        return Err(format!("probabilities of one row that add up to {sum:.3}"));
    }
    row.best = best.0.filter(|_| alternatives);
    Ok(row)
}

/// Tokens in a row, as a server tells them: which each is, where that is known, and what was likely there.
pub type Told = Vec<(Option<u32>, Option<Row>)>;

/// What `logprobs` of a choice says, in either form. A token that its text does not tell is that of `own`, where the
/// prompt stands before the answer.
///
/// # Errors
/// What is neither, with lists that do not fit together or numbers that are none.
pub fn told(logprobs: &Json, own: &[u32], tokens: &Tokens<'_>) -> Result<Told, String> {
    match logprobs.get("content") {
        Some(content) => of_content(content, tokens),
        None => of_lists(logprobs, own, tokens),
    }
}

fn list<'a>(value: &'a Json, name: &str) -> Result<&'a Vec<Json>, String> {
    let found = value.get(name).ok_or_else(|| format!("no logprobs.{name}"))?;
    found.as_array().ok_or_else(|| format!("logprobs.{name}: expected a list, found {}", short(found)))
}

fn of_lists(logprobs: &Json, own: &[u32], tokens: &Tokens<'_>) -> Result<Told, String> {
    let (texts, chosen) = (list(logprobs, "tokens")?, list(logprobs, "token_logprobs")?);
    let tops = match logprobs.get("top_logprobs") {
        None | Some(Json::Null) => None,
        Some(_) => Some(list(logprobs, "top_logprobs")?),
    };
    let lengths = [chosen.len(), tops.map_or(texts.len(), Vec::len)];
    if lengths.iter().any(|n| *n != texts.len()) {
        return Err(format!(
            "{} tokens, {} log-probabilities and {} of their tops",
            texts.len(),
            lengths[0],
            lengths[1]
        ));
    }
    let one = |i: usize| {
        let text = texts[i].as_str().ok_or_else(|| format!("expected a token, found {}", short(&texts[i])))?;
        let id = tokens.of_text(text)?.or(own.get(i).copied());
        if chosen[i].is_null() {
            return Ok((id, None));
        }
        let others = match tops.map(|tops| &tops[i]) {
            None | Some(Json::Null) => None,
            Some(Json::Object(map)) => Some(of_map(map, tokens)?),
            Some(other) => return Err(format!("expected tops of a token, found {}", short(other))),
        };
        Ok((id, Some(row((id, logarithm(&chosen[i])?), others)?)))
    };
    (0..texts.len()).map(one).collect()
}

fn of_map(map: &Map<String, Json>, tokens: &Tokens<'_>) -> Result<Vec<(Option<u32>, f64)>, String> {
    map.iter().map(|(text, ln)| Ok((tokens.of_text(text)?, logarithm(ln)?))).collect()
}

fn of_content(content: &Json, tokens: &Tokens<'_>) -> Result<Told, String> {
    let entry = |entry: &Json| -> Result<(Option<u32>, f64), String> {
        let ln = entry.get("logprob").ok_or("an entry without a log-probability")?;
        Ok((tokens.of_entry(entry)?, logarithm(ln)?))
    };
    let one = |of: &Json| {
        let chosen = entry(of)?;
        let others = match of.get("top_logprobs") {
            None | Some(Json::Null) => None,
            Some(Json::Array(all)) => Some(all.iter().map(entry).collect::<Result<Vec<_>, _>>()?),
            Some(other) => return Err(format!("expected tops of a token, found {}", short(other))),
        };
        Ok((chosen.0, Some(row(chosen, others)?)))
    };
    match content {
        Json::Array(all) => all.iter().map(one).collect(),
        other => Err(format!("logprobs.content: expected a list, found {}", short(other))),
    }
}

/// What vLLM's `prompt_logprobs` says of a prompt: for each of its tokens an object from ids to what is said of them.
///
/// # Errors
/// As for [`told`]; a token of the prompt of which nothing is said.
pub fn of_prompt(all: &Json, prompt: &[u32], tokens: &Tokens<'_>) -> Result<Told, String> {
    let all = all.as_array().ok_or_else(|| format!("prompt_logprobs: expected a list, found {}", short(all)))?;
    if all.len() != prompt.len() {
        return Err(format!("prompt_logprobs: expected {} of them, found {}", prompt.len(), all.len()));
    }
    let one = |(said, own): (&Json, &u32)| {
        let map = match said {
            Json::Null => return Ok((Some(*own), None)),
            said => said.as_object().ok_or_else(|| format!("expected an object of ids, found {}", short(said)))?,
        };
        let entry = |(id, said): (&String, &Json)| {
            let id = tokens.id(&id.parse::<u64>().map_or_else(|_| Json::from(id.as_str()), Json::from))?;
            let ln = said.get("logprob").unwrap_or(said);
            Ok((Some(id), logarithm(ln)?))
        };
        let listed = map.iter().map(entry).collect::<Result<Vec<_>, String>>()?;
        let chosen = listed.iter().find(|(id, _)| *id == Some(*own)).copied();
        let chosen = chosen.ok_or_else(|| format!("nothing is said of the prompt's own token {own}"))?;
        // Of one entry alone it is not known to be the most likely.
        let others = (listed.len() > 1).then_some(listed);
        Ok((Some(*own), Some(row(chosen, others)?)))
    };
    all.iter().zip(prompt).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_keeps_what_is_known_and_says_what_is_likeliest() {
        let known = row((Some(3), -2.0), Some(vec![(Some(1), -0.5), (None, -1.5), (Some(3), -2.0)])).expect("a row");
        assert_eq!(known, Row { listed: vec![(1, -0.5), (3, -2.0)], best: Some(1), top: -0.5 });
        assert_eq!(row((Some(3), -2.0), Some(vec![(None, -0.5)])).expect("a row").best, None, "an unknown one");
        assert_eq!(row((Some(3), -0.1), None).expect("a row").best, None, "no alternatives");
        assert!(row((Some(1), -0.1), Some(vec![(Some(2), -0.1)])).is_err(), "more than all");
    }

    #[test]
    fn numbers_are_log_probabilities() {
        for bad in [Json::Null, Json::from("x"), Json::from(0.5), serde_json::json!([])] {
            assert!(logarithm(&bad).is_err(), "{bad}");
        }
        assert_eq!(logarithm(&Json::from(-9999)), Ok(-9999.0));
    }
}
