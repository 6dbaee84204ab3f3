//! What both endpoints' replies have in common: who answers, what it took, and tokens as clients read them.

use serde_json::{Map, Value as Json, json};

use super::error::ApiError;
use crate::serve::driver::Said;
use crate::serve::turn::{Ended, Spent, TokenLogprob};

/// Replies to one request, from what the driver says. Frames of a stream and whole replies come of the same calls.
pub trait Reply: Send {
    /// Writes the frames before anything is known.
    fn opening(&self, out: &mut Vec<u8>);

    /// Takes what is said. Of a stream, writes the frames that it makes.
    ///
    /// # Errors
    /// A request that can never run, or that left itself no token.
    fn take(&mut self, said: Said, out: &mut Vec<u8>) -> Result<(), ApiError>;

    /// Whether all answers have ended.
    fn is_done(&self) -> bool;

    /// Writes the frames behind the last answer.
    fn closing(&self, out: &mut Vec<u8>);

    /// The whole reply.
    fn whole(&self) -> Json;
}

/// What stands in every reply and every frame.
#[derive(Clone, Debug)]
pub struct Head {
    /// Of the request.
    pub id: String,
    /// Seconds since 1970.
    pub created: i64,
    /// The model's name.
    pub model: String,
    /// Build and recipe.
    pub fingerprint: String,
    /// What the seeds are derived from.
    pub seed: u64,
    /// Whether it is a stream.
    pub stream: bool,
    /// Whether a stream ends with what it took.
    pub include_usage: bool,
}

impl Head {
    /// A frame, or a whole reply.
    pub fn object(&self, object: &str, choices: Vec<Json>, usage: Option<Json>) -> Json {
        let Head { id, created, model, fingerprint, .. } = self;
        let mut all = json!({
            "id": id, "object": object, "created": created, "model": model, "system_fingerprint": fingerprint,
            "choices": choices,
        });
        // A seed is told as it was asked for, so that it can be sent again.
        all["lockstep"] = json!({ "seed": self.seed.cast_signed() });
        if self.stream {
            // Whoever asked for a last frame with numbers finds null before it; nobody else finds the name.
            if self.include_usage {
                all["usage"] = usage.unwrap_or(Json::Null);
            }
        } else {
            all["usage"] = usage.unwrap_or(Json::Null);
        }
        all
    }
}

/// What the answers took.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Tokens of all prompts, each counted once.
    pub prompt: usize,
    /// Those of them that were in the cache; of each prompt when it ran first.
    pub cached: usize,
    /// Tokens that were made.
    pub completion: usize,
    /// Those of them that were made inside reasoning.
    pub reasoning: usize,
}

impl Tally {
    /// Adds an answer.
    pub fn add(&mut self, spent: Spent) {
        self.completion += spent.completion;
        self.reasoning += spent.reasoning;
    }

    /// As clients read it.
    pub fn json(&self) -> Json {
        let Tally { prompt, cached, completion, reasoning } = self;
        json!({
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": { "cached_tokens": cached },
            "completion_tokens_details": { "reasoning_tokens": reasoning },
        })
    }
}

/// The word for an end.
///
/// # Errors
/// An answer whose own wishes left nothing to choose.
pub fn finish_reason(ended: Ended) -> Result<&'static str, ApiError> {
    match ended {
        Ended::Stop => Ok("stop"),
        Ended::Length => Ok("length"),
        Ended::Failed => {
            let message = "logit_bias and min_tokens leave no token that may come next";
            Err(ApiError::new(hyper::StatusCode::BAD_REQUEST, "no_token_allowed", message))
        }
    }
}

/// A logarithm that JSON can hold.
pub fn finite(ln: f64) -> f64 {
    ln.max(-9999.0)
}

/// A token's text where it has to be whole: its bytes where they are no text.
pub fn name(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.into(),
        Err(_) => "bytes:".to_string() + &bytes.iter().map(|b| format!("\\x{b:02x}")).collect::<String>(),
    }
}

/// Tokens of a chat answer.
pub fn chat_logprobs(tokens: &[TokenLogprob]) -> Vec<Json> {
    let one = |bytes: &[u8], ln: f64| json!({ "token": String::from_utf8_lossy(bytes), "bytes": bytes, "logprob": finite(ln) });
    let all = |t: &TokenLogprob| {
        let mut token = one(&t.bytes, t.logprob);
        token["top_logprobs"] = t.top.iter().map(|(bytes, ln)| one(bytes, *ln)).collect();
        token
    };
    tokens.iter().map(all).collect()
}

/// Tokens of a plain completion, as four lists.
#[derive(Clone, Debug, Default)]
pub struct Lists {
    tokens: Vec<Json>,
    logprobs: Vec<Json>,
    tops: Vec<Json>,
    offsets: Vec<Json>,
    /// Characters so far.
    at: usize,
}

impl Lists {
    /// Adds a token of which nothing is known but its bytes.
    pub fn unknown(&mut self, bytes: &[u8]) {
        self.push(bytes, Json::Null, Json::Null);
    }

    /// Adds a token.
    pub fn token(&mut self, token: &TokenLogprob) {
        let mut tops = Map::new();
        for (bytes, ln) in token.top.iter().map(|(b, ln)| (&b[..], *ln)).chain([(&token.bytes[..], token.logprob)]) {
            tops.entry(name(bytes)).or_insert(json!(finite(ln)));
        }
        self.push(&token.bytes, json!(finite(token.logprob)), Json::Object(tops));
    }

    fn push(&mut self, bytes: &[u8], logprob: Json, top: Json) {
        self.tokens.push(json!(name(bytes)));
        self.logprobs.push(logprob);
        self.tops.push(top);
        self.offsets.push(json!(self.at));
        self.at += bytes.iter().filter(|b| **b & 0xc0 != 0x80).count();
    }

    /// The lists since they were taken last; offsets go on.
    pub fn take(&mut self) -> Json {
        let Lists { tokens, logprobs, tops, offsets, at } = std::mem::take(self);
        self.at = at;
        json!({ "tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_that_are_no_text_stay_apart() {
        assert_eq!((name(b"a"), name(&[0xf0, 0x9f])), ("a".into(), "bytes:\\xf0\\x9f".into()));
        let mut lists = Lists::default();
        lists.unknown("é".as_bytes());
        lists.token(&TokenLogprob { bytes: vec![0xf0], logprob: f64::NEG_INFINITY, top: vec![(vec![0x9f], -1.0)] });
        lists.unknown(b"x");
        let found = lists.take();
        assert_eq!(found["text_offset"], json!([0, 1, 2]));
        assert_eq!(found["top_logprobs"][1], json!({ "bytes:\\x9f": -1.0, "bytes:\\xf0": -9999.0 }));
        assert_eq!(lists.take()["tokens"], json!([]));
    }
}
