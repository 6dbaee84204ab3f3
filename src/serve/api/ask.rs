//! What chat and plain completions have in common: how to choose, when to end, how to reply.

use std::hash::{BuildHasher, Hasher, RandomState};

use serde_json::Value as Json;

use super::Model;
use super::error::ApiError;
use super::fields::{Fields, integer, kind};
use crate::engine::chooser::Wishes;
use crate::engine::prefix::Root;
use crate::engine::sampler::Sampling;
use crate::synth::Random;

/// Most stop strings, and bytes of each.
const STOPS: usize = 16;
const STOP_BYTES: usize = 256;
/// Most further ids that end an answer.
const STOP_IDS: usize = 1024;
/// Colder is greedy: the noise of a draw would drown in the spacing of f32.
const COLDEST: f64 = 1e-4;

/// Fields that would change the answer, and are not known here.
const REFUSED: [(&str, &str); 9] = [
    ("functions", "is not supported"),
    ("function_call", "is not supported"),
    ("audio", "is not supported: text only"),
    ("prediction", "is not supported"),
    ("suffix", "is not supported"),
    ("tools", "tool calls are not supported"),
    ("guided_json", "constrained output is not supported"),
    ("guided_regex", "constrained output is not supported"),
    ("guided_grammar", "constrained output is not supported"),
];

/// Fields that say nothing about the answer.
const TOLERATED: [&str; 7] =
    ["user", "metadata", "store", "service_tier", "safety_identifier", "verbosity", "parallel_tool_calls"];

/// How a request is to be answered.
#[derive(Clone, Debug)]
pub struct Ask {
    /// How to choose, but for the seed.
    pub sampling: Sampling,
    /// What the seeds are derived from.
    pub seed: u64,
    /// Answers to each prompt.
    pub n: usize,
    /// Most tokens of an answer; without it, what the context has room for.
    pub most: Option<usize>,
    /// What else it wants of the choice.
    pub wishes: Wishes,
    /// Strings that end an answer, and whether they are part of it.
    pub stops: Vec<String>,
    /// Whether a stop string is part of the answer.
    pub keep_stop: bool,
    /// Ids that end an answer.
    pub stop: Vec<u32>,
    /// Whether the answer comes piece by piece.
    pub stream: bool,
    /// Whether a last frame tells what it took.
    pub include_usage: bool,
    /// What parts its texts in the cache from others'.
    pub salt: [Option<String>; 2],
}

/// The seed of the answer with number `i`.
pub fn seed_of(seed: u64, i: usize) -> u64 {
    if i == 0 { seed } else { Random(seed.wrapping_add((i as u64) << 32)).next() }
}

/// A seed that nobody has had; every program that reads JSON can read it.
fn fresh_seed() -> u64 {
    RandomState::new().build_hasher().finish() >> 11
}

impl Ask {
    /// Reads the fields.
    ///
    /// # Errors
    /// Those that are wrong, and those that are not known here and would change the answer.
    pub fn read(fields: &mut Fields<'_>, model: &Model, defaults: &Sampling, least: i64) -> Result<Self, ApiError> {
        fields.refuse(&REFUSED)?;
        for name in TOLERATED {
            fields.any(name);
        }
        if let Some(choice) = fields.any("tool_choice")
            && !matches!(choice.as_str(), Some("none" | "auto"))
        {
            return Err(fields.error("tool_choice", "tool calls are not supported: expected none or auto"));
        }
        if let Some(format) = fields.any("response_format")
            && format.get("type").and_then(Json::as_str) != Some("text")
        {
            return Err(fields.error("response_format", "constrained output is not supported: expected type text"));
        }
        if let Some(kinds) = fields.any("modalities")
            && *kinds != serde_json::json!(["text"])
        {
            return Err(fields.error("modalities", "expected text alone"));
        }
        for name in ["repetition_penalty", "length_penalty"] {
            if fields.any(name).is_some_and(|v| v.as_f64() != Some(1.0)) {
                return Err(fields.error(name, "is not supported: expected 1"));
            }
        }
        if fields.integer("best_of", 0, i64::MAX)?.is_some_and(|n| n > 1) {
            return Err(fields.error("best_of", "expected at most 1"));
        }
        let temperature = fields.number("temperature", 0.0, 2.0)?.unwrap_or(f64::from(defaults.temperature));
        let top_k = fields.integer("top_k", -1, i64::MAX)?.map_or(defaults.top_k, |k| k.max(0) as usize);
        let sampling = Sampling {
            temperature: if temperature < COLDEST { 0.0 } else { temperature as f32 },
            top_k,
            // None at all would be the likeliest alone.
            top_p: fields.number("top_p", 0.0, 1.0)?.map_or(defaults.top_p, |p| (p as f32).max(f32::MIN_POSITIVE)),
            min_p: fields.number("min_p", 0.0, 1.0)?.map_or(defaults.min_p, |p| p as f32),
            seed: 0,
        };
        let seed = fields.integer("seed", i64::MIN, i64::MAX)?.map_or_else(fresh_seed, |seed| seed as u64);
        let n = fields.integer("n", 1, model.sequences as i64)?.unwrap_or(1) as usize;
        let old = fields.integer("max_tokens", least, i64::MAX)?;
        let most = fields.integer("max_completion_tokens", least, i64::MAX)?.or(old).map(|most| most as usize);
        let shortest = fields.integer("min_tokens", 0, i64::MAX)?.unwrap_or(0) as usize;
        if let Some(most) = most.filter(|most| *most < shortest) {
            return Err(fields.error("min_tokens", format!("expected at most max_tokens, {most}, found {shortest}")));
        }
        let (stops, keep_stop) = (stops(fields)?, fields.flag("include_stop_str_in_output")?.unwrap_or(false));
        let own = if fields.flag("ignore_eos")?.unwrap_or(false) { &[][..] } else { &model.stop };
        let stop = own.iter().copied().chain(ids(fields, "stop_token_ids", STOP_IDS, model.vocab)?).collect();
        let stream = fields.flag("stream")?.unwrap_or(false);
        let options = fields.any("stream_options").map(|v| Fields::of(v, "stream_options")).transpose()?;
        if options.is_some() && !stream {
            return Err(fields.error("stream_options", "expected only where stream is true"));
        }
        let usage = options.map(|mut options| options.flag("include_usage")).transpose()?.flatten();
        let wishes = Wishes {
            bias: bias(fields, model.vocab)?,
            presence: fields.number("presence_penalty", -2.0, 2.0)?.unwrap_or(0.0) as f32,
            frequency: fields.number("frequency_penalty", -2.0, 2.0)?.unwrap_or(0.0) as f32,
            least: shortest,
            ..Wishes::default()
        };
        let mut salt = |name| fields.string(name).map(|s| s.map(String::from));
        let salt = [salt("cache_salt")?, salt("prompt_cache_key")?];
        let include_usage = usage.unwrap_or(false);
        Ok(Ask { sampling, seed, n, most, wishes, stops, keep_stop, stop, stream, include_usage, salt })
    }

    /// Whose cached texts it may share, where `key` is how it was let in. Every part is quoted, so that none can be
    /// taken for another.
    pub fn root(&self, key: &str) -> Root {
        Root::new(format!("key {key:?} salt {:?} cache key {:?}", self.salt[0], self.salt[1]))
    }

    /// How many tokens an answer to a prompt of `tokens` can have.
    ///
    /// # Errors
    /// More than the context has room for.
    pub fn room(&self, tokens: usize, context: usize, param: &str) -> Result<usize, ApiError> {
        let left = context.saturating_sub(tokens);
        let wanted = self.most.unwrap_or(left.max(1));
        if wanted <= left {
            return Ok(wanted);
        }
        let answer = self.most.map_or("at least one of the answer".into(), |most| format!("{most} of the answer"));
        Err(over_context(param, context, &format!("{tokens} tokens of the prompt and {answer}")))
    }
}

/// More than the context has room for. Clients know it by these words.
pub fn over_context(param: &str, context: usize, found: &str) -> ApiError {
    let error =
        ApiError::field(param, format!("this model's maximum context length is {context} tokens; found {found}"));
    ApiError { code: "context_length_exceeded".into(), ..error }
}

fn stops(fields: &mut Fields<'_>) -> Result<Vec<String>, ApiError> {
    let value = match fields.any("stop") {
        None => return Ok(Vec::new()),
        Some(one @ Json::String(_)) => std::slice::from_ref(one),
        Some(Json::Array(all)) => all,
        Some(other) => {
            return Err(fields.error("stop", format!("expected a string or an array of them, found {}", kind(other))));
        }
    };
    if value.len() > STOPS {
        return Err(fields.error("stop", format!("expected at most {STOPS} strings, found {}", value.len())));
    }
    let one = |stop: &Json| match stop.as_str() {
        Some(text) if (1..=STOP_BYTES).contains(&text.len()) => Ok(text.to_string()),
        Some(text) => {
            Err(fields.error("stop", format!("expected strings of 1 to {STOP_BYTES} bytes, found {}", text.len())))
        }
        None => Err(fields.error("stop", format!("expected strings, found {}", kind(stop)))),
    };
    value.iter().map(one).collect()
}

fn ids(fields: &mut Fields<'_>, name: &'static str, most: usize, vocab: usize) -> Result<Vec<u32>, ApiError> {
    let Some(value) = fields.any(name) else { return Ok(Vec::new()) };
    let all = value.as_array().filter(|all| all.len() <= most);
    let all = all.ok_or_else(|| fields.error(name, format!("expected an array of at most {most} token ids")))?;
    let id = |v: &Json| integer(v).filter(|id| (0..vocab as i64).contains(id)).map(|id| id as u32);
    let wrong = |v: &Json| fields.error(name, format!("expected token ids from 0 to {}, found {v}", vocab - 1));
    all.iter().map(|v| id(v).ok_or_else(|| wrong(v))).collect()
}

fn bias(fields: &mut Fields<'_>, vocab: usize) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(map) = fields.object("logit_bias")? else { return Ok(Vec::new()) };
    let one = |(id, bias): (&String, &Json)| {
        let known = id.parse().ok().filter(|id: &u32| (*id as usize) < vocab);
        let known = known.ok_or_else(|| {
            fields.error("logit_bias", format!("expected token ids from 0 to {}, found {id:?}", vocab - 1))
        })?;
        let within = bias.as_f64().filter(|b| (-100.0..=100.0).contains(b));
        let bias = within
            .ok_or_else(|| fields.error("logit_bias", format!("expected numbers from -100 to 100, found {bias}")))?;
        Ok((known, bias as f32))
    };
    map.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_fresh_and_derived() {
        assert_ne!(fresh_seed(), fresh_seed());
        assert_eq!(seed_of(7, 0), 7);
        assert_ne!(seed_of(7, 1), seed_of(7, 2));
        assert_ne!(seed_of(7, 1), seed_of(8, 1));
    }
}
