//! The engine behind the API: the texts are those of the scheduler alone, whatever runs beside, is cached, or gives way.

use std::sync::Arc;

use lockstep::engine::{Attention, Engine, Options};
use lockstep::serve::driver::Serving;
use serde_json::{Value as Json, json};

use super::client::{CHAT, JSON, ask, get, post};
use super::script::{Running, Setup, over};
use crate::common::GLM5_NANO;
use crate::common::goldens;
use crate::common::running::open;

/// Verses with their answers.
fn verses(step: usize) -> Vec<(String, String)> {
    let text = std::fs::read_to_string(goldens::file("glm5-nano/recall.json")).unwrap();
    let all: Vec<Json> = serde_json::from_str(&text).unwrap();
    let word = |v: &Json, key: &str| v[key].as_str().unwrap().to_string();
    all.iter().step_by(step).map(|v| (word(v, "ask"), word(v, "answer"))).collect()
}

fn serving(sequences: usize, cache_tokens: usize, keys: &'static str) -> Running {
    let options = Options { attention: Attention::Dsa, chunk: 64, cache_tokens, sequences };
    let engine = Engine::cpu(open(GLM5_NANO), 1, options).unwrap();
    over(&Setup { sequences, keys, context: cache_tokens.min(384), ..Setup::default() }, Serving::new(engine))
}

fn content(running: &Running, verse: &str, stream: bool) -> String {
    let body = json!({ "messages": [{ "role": "user", "content": verse }], "temperature": 0, "stream": stream });
    let reply = post(running.port, CHAT, &body);
    match stream {
        true => reply.frames().iter().filter_map(|f| f["choices"][0]["delta"]["content"].as_str()).collect(),
        false => reply.json()["choices"][0]["message"]["content"].as_str().unwrap().into(),
    }
}

/// The same texts, asked many at a time.
fn together(running: &Arc<Running>, verses: &[(String, String)], stream: bool) -> Vec<String> {
    let ask = |verse: String| {
        let running = running.clone();
        std::thread::spawn(move || content(&running, &verse, stream))
    };
    let all: Vec<_> = verses.iter().map(|(verse, _)| ask(verse.clone())).collect();
    all.into_iter().map(|thread| thread.join().unwrap()).collect()
}

fn metric(running: &Running, name: &str) -> f64 {
    let text = get(running.port, "/metrics").body;
    let line = text.lines().find_map(|l| l.strip_prefix(name)).unwrap_or_else(|| panic!("no {name} in {text}"));
    line.trim().parse().unwrap()
}

#[test]
fn verses_are_quoted_whatever_runs_beside() {
    let verses = verses(6);
    let alone = Arc::new(serving(1, 384, ""));
    let texts: Vec<String> = verses.iter().map(|(verse, _)| content(&alone, verse, false)).collect();
    let right = texts.iter().zip(&verses).filter(|(text, (_, answer))| *text == answer).count();
    assert!(right >= verses.len() - 1, "{right} of {}", verses.len());
    // Less room than all of them need, and the same prompts once more: texts give way, and prompts are in the cache.
    let tight = Arc::new(serving(16, 224, ""));
    for stream in [false, true] {
        assert_eq!(together(&tight, &verses, stream), texts);
    }
    assert!(metric(&tight, "lockstep_preemptions_total") > 0.0);
    let owned = metric(&tight, "lockstep_pages{state=\"owned\"}");
    assert_eq!(owned, 0.0, "all come back");
}

/// Whoever has another key finds nothing of a text in the cache.
#[test]
fn texts_are_shared_by_one_key_alone() {
    let running = serving(4, 1536, "one\ntwo\n");
    let text = "Genesis 1:1 ".repeat(8);
    let cached = |key: &str, salt: Json| {
        let body = json!({ "messages": [{ "role": "user", "content": text }], "max_tokens": 1, "temperature": 0, "cache_salt": salt });
        let reply = ask(running.port, "POST", CHAT, &[JSON, ("x-api-key", key)], &body.to_string());
        let usage = &reply.json()["usage"];
        usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!(cached("one", Json::Null), 0);
    let whole = cached("one", Json::Null);
    assert!(whole >= 32 && whole % 32 == 0, "whole pages: {whole}");
    assert_eq!(cached("two", Json::Null), 0);
    assert_eq!(cached("one", json!("salt")), 0);
    assert_eq!(cached("two", Json::Null), whole);
}

/// `echo` tells what the prompt's tokens cost: the logarithms of a whole step.
#[test]
fn echoed_prompts_have_the_models_logprobs() {
    let running = serving(2, 768, "");
    let told = |body: Json| post(running.port, "/v1/completions", &body).json()["choices"][0]["logprobs"].clone();
    let prompt = "In the beginning God created";
    let found = told(json!({ "prompt": prompt, "echo": true, "logprobs": 2, "max_tokens": 0 }));
    let of =
        |l: &Json| -> Vec<f64> { l["token_logprobs"].as_array().unwrap().iter().filter_map(Json::as_f64).collect() };
    // Token by token: each prefix generates the next one's logarithm.
    let ids =
        post(running.port, "/tokenize", &json!({ "prompt": prompt })).json()["tokens"].as_array().unwrap().clone();
    assert_eq!(of(&found).len(), ids.len() - 1);
    for at in 1..ids.len() {
        let bias: serde_json::Map<String, Json> = [(ids[at].to_string(), json!(100))].into_iter().collect();
        let one =
            told(json!({ "prompt": ids[..at], "logprobs": 0, "max_tokens": 1, "temperature": 0, "logit_bias": bias }));
        let (chunked, whole) = (of(&one)[0], of(&found)[at - 1]);
        assert_eq!(chunked, whole, "token {at}, forced by a bias that the logarithm does not know");
    }
}
