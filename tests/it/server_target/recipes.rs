//! Right servers that round as engines do, in an order of summation that no floor is made of: they match.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use lockstep::checkpoint::oracle::Raw;
use lockstep::report::Verdict;
use lockstep::verify::Subject;
use lockstep::verify::logits::server::http::Limits;
use lockstep_reference::{Arith, Eps, Half, ModelWeights, Order, RefConfig, RefOptions, RefRecipe, forward};
use serde_json::{Value as Json, json};

use super::{quick, send, stub, subject, verify};
use crate::common::GLM5_NANO;
use crate::common::running::open;
use crate::common::subject::show;

/// Log-probabilities of every row of a run in a recipe.
fn rows(ids: &[u32], recipe: RefRecipe) -> Vec<Vec<f64>> {
    let checkpoint = open(GLM5_NANO);
    let raw = Raw(checkpoint.source());
    let config = RefConfig::from_raw(&raw, Eps::File).unwrap();
    let weights = ModelWeights::new(&raw, &config);
    let mut rows = Vec::new();
    let mut sink = |name: &str, value: ndarray::ArrayD<f64>| {
        if name == "logits" {
            let width = value.len() / ids.len();
            let values: Vec<f64> = value.iter().copied().collect();
            rows = values
                .chunks_exact(width)
                .map(|row| {
                    let sum: f64 = row.iter().map(|v| v.exp()).sum();
                    row.iter().map(|v| v - sum.ln()).collect()
                })
                .collect();
        }
    };
    let options = RefOptions { dense: false, mtp: false, expanded: recipe.is_torch(), variant: None };
    forward(&config, &weights, ids, Arith::F32(recipe, Order::Blocks(7)), options, &mut sink).unwrap();
    rows
}

/// What vLLM would say of a prompt.
fn prompt_logprobs(ids: &[u32], top: usize, rows: &[Vec<f64>]) -> Json {
    let one = |(t, row): (usize, &Vec<f64>)| {
        let mut all: Vec<usize> = (0..row.len()).collect();
        all.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
        let tops = all.into_iter().take(top).chain([ids[t + 1] as usize]);
        Json::Object(tops.map(|id| (id.to_string(), json!({ "logprob": row[id] as f32 }))).collect())
    };
    let behind = rows[..ids.len() - 1].iter().enumerate().map(one);
    [Json::Null].into_iter().chain(behind).collect()
}

#[test]
fn right_servers_of_other_recipes_match() {
    for recipe in [RefRecipe::TorchHalf(Half::Bf16), RefRecipe::TorchAutocast, RefRecipe::TorchHalf(Half::F16)] {
        let known: Mutex<HashMap<Vec<u32>, Json>> = Mutex::default();
        let server = stub(move |heard, stream| {
            let Ok(ids) = serde_json::from_value::<Vec<u32>>(heard.body["prompt"].clone()) else {
                return send(stream, 404, "{}");
            };
            let mut choice = json!({ "text": "", "logprobs": null, "finish_reason": "length" });
            if let Some(top) = heard.body["prompt_logprobs"].as_u64() {
                let mut known = known.lock().unwrap();
                let told = known.entry(ids.clone());
                let told = told.or_insert_with(|| prompt_logprobs(&ids, top as usize, &rows(&ids, recipe)));
                choice["prompt_logprobs"] = told.clone();
            }
            send(stream, 200, &json!({ "choices": [choice] }).to_string());
        });
        let limits = Limits { answer: Duration::from_secs(60), ..quick() };
        let of = Subject { own_prompt: false, ..subject(GLM5_NANO, server.port, limits) };
        let checkpoint = open(GLM5_NANO);
        let tokenizer = lockstep::tokenize::Tokenizer::new(&checkpoint.tokenizer_spec().unwrap()).unwrap();
        let text = "And God said, Let there be light: and there was light. And God saw the light, that it was good: and God \
                    divided the light from the darkness. And God called the light Day, and the darkness he called Night. \
                    And the evening and the morning were the first day.";
        let of = Subject { ids: tokenizer.prompt_ids(text).unwrap(), ..of };
        let report = verify(&of).unwrap();
        assert_eq!(report.verdict(), Verdict::Match, "{}: {}", recipe.name(), show(&report));
    }
}
