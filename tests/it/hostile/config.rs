//! Whole containers whose metadata no model can be made of.

use super::Cases;
use crate::common::{tiny, tiny_metadata};
use lockstep::gguf::value::{Array, Value};

/// Keys that may be absent, each with a value that is accepted.
const OPTIONAL: [&str; 8] = [
    "general.name",
    "glm-dsa.nextn_predict_layers",
    "glm-dsa.attention.head_count_kv",
    "glm-dsa.expert_group_count",
    "glm-dsa.expert_group_used_count",
    "glm-dsa.expert_gating_func",
    "glm-dsa.expert_weights_norm",
    "glm-dsa.attention.indexer.types",
];
/// Keys that are not read.
const UNREAD: [&str; 2] = ["general.name", "glm-dsa.attention.head_count_kv"];

/// Adds the cases of metadata.
pub fn add(cases: &mut Cases) {
    for (key, value) in tiny_metadata() {
        let mut put = |what: &str, v: Value, want: &[&str]| {
            let want: Vec<&str> = want.iter().copied().chain([key.as_str()]).collect();
            let bytes = tiny().set(&key, v).bytes();
            cases.file(format!("{key} {what}"), "key.gguf", &bytes, &want);
        };
        if UNREAD.contains(&key.as_str()) {
            continue;
        }
        put("as an empty array", Value::Array(Array::U32(Vec::new())), &[]);
        if key != "general.architecture" {
            put("as text", Value::Str("many".into()), &["\"many\" (string)"]);
        }
        match value {
            Value::U32(_) => {
                put("2^64 - 1", Value::U64(u64::MAX), &["18446744073709551615"]);
                put("2^40", Value::U64(1 << 40), &["1099511627776"]);
                put("negative", Value::I32(-1), &["-1"]);
                put("as a float", Value::F32(3.5), &["3.5 (f32)"]);
                // A dense width may differ where no layer uses it.
                if key != "glm-dsa.feed_forward_length" {
                    put("different by layer", Value::Array(Array::U32(vec![1, 2, 3])), &["array of 3"]);
                }
            }
            Value::F32(_) => {
                for v in [0.0, -1.0, f32::NAN, f32::INFINITY] {
                    put(&format!("{v}"), Value::F32(v), &[]);
                }
                put("beyond f32", Value::F64(1e300), &[]);
                put("below f32", Value::F64(1e-300), &[]);
            }
            _ => {}
        }
        if !OPTIONAL.contains(&key.as_str()) && key != "glm-dsa.vocab_size" {
            let bytes = tiny().unset(&key).bytes();
            // Without one of the pair of real head sizes the other one alone must not be believed.
            cases.file(format!("no {key}"), "key.gguf", &bytes, &[&key]);
        }
    }
    let text = |s: &str| Value::Str(s.into());
    let edits: [(&str, &str, Value, &[&str]); 31] = [
        ("an architecture of others", "general.architecture", Value::Str("llama".into()), &["\"llama\"", "glm-dsa"]),
        ("no blocks", "block_count", Value::U32(0), &["block_count"]),
        ("MTP blocks only", "nextn_predict_layers", Value::U32(3), &["nextn_predict_layers"]),
        ("a million blocks", "block_count", Value::U32(1_000_000), &["1000000"]),
        ("a billion heads", "attention.head_count", Value::U32(1 << 30), &["head_count"]),
        ("a billion experts", "expert_count", Value::U32(1 << 30), &["expert_count"]),
        ("fewer experts than used", "expert_count", Value::U32(1), &["experts per token"]),
        ("no experts", "expert_count", Value::U32(0), &["expert_count"]),
        ("odd rope", "rope.dimension_count", Value::U32(7), &["key_length"]),
        ("rope wider than the cached row says", "rope.dimension_count", Value::U32(24), &["key_length", "56", "40"]),
        ("more dense layers than layers", "leading_dense_block_count", Value::U32(3), &["dense layers"]),
        ("groups that do not divide", "expert_group_count", Value::U32(3), &["expert groups"]),
        ("more groups used than there are", "expert_group_used_count", Value::U32(2), &["expert groups"]),
        ("gating 3", "expert_gating_func", Value::U32(3), &["expert_gating_func", "3"]),
        ("indexer narrower than rope", "attention.indexer.key_length", Value::U32(4), &["indexer width", "4"]),
        ("cached key of another width", "attention.key_length", Value::U32(48), &["key_length", "40", "48"]),
        ("cached value of another width", "attention.value_length", Value::U32(16), &["value_length", "16"]),
        ("too few indexer types", "attention.indexer.types", Value::Array(Array::Bool(vec![true])), &["types"]),
        ("a shared first layer", "attention.indexer.types", Value::Array(Array::Bool(vec![false; 3])), &["full first"]),
        ("indexer types as text", "attention.indexer.types", Value::Str("full".into()), &["types"]),
        ("no vocabulary", "vocab_size", Value::U32(0), &["vocab_size"]),
        ("no top-k", "attention.indexer.top_k", Value::U32(0), &["top_k"]),
        ("a top-k of gigabytes", "attention.indexer.top_k", Value::U32(1 << 16), &["top_k", "below 65536", "65536"]),
        ("a width of gigabytes", "feed_forward_length", Value::U32(1 << 24), &["feed_forward_length", "16777216"]),
        ("no dense width", "feed_forward_length", Value::Array(Array::U32(vec![0, 64, 64])), &["feed_forward_length"]),
        (
            "a dense width of no layer",
            "feed_forward_length",
            Value::Array(Array::U32(vec![])),
            &["feed_forward_length"],
        ),
        ("no shared expert", "expert_shared_count", Value::U32(0), &["shared experts", "expected 1", "found 0"]),
        ("two shared experts", "expert_shared_count", Value::U32(2), &["shared experts", "expected 1", "found 2"]),
        ("scaled rope", "rope.scaling.type", text("yarn"), &["glm-dsa.rope.scaling.type", "none", "yarn"]),
        ("rope scaled by no type", "rope.scaling.factor", Value::F32(4.0), &["glm-dsa.rope.scaling.factor", "4"]),
        ("scaled scores", "rope.scaling.attn_factor", Value::F32(0.5), &["glm-dsa.rope.scaling.attn_factor", "0.5"]),
    ];
    for (what, key, value, want) in edits {
        let key = if key.starts_with("general.") { key.to_string() } else { format!("glm-dsa.{key}") };
        cases.file(what, "config.gguf", &tiny().set(&key, value).bytes(), want);
    }
    let bytes = tiny().unset("glm-dsa.attention.key_length_mla").unset("glm-dsa.attention.value_length_mla").bytes();
    cases.file("no *_mla keys", "config.gguf", &bytes, &["key_length_mla", "older converter"]);
    let wide = tiny().set("glm-dsa.rope.dimension_count", Value::U32(24));
    let bytes = wide.set("glm-dsa.attention.key_length", Value::U32(56)).bytes();
    cases.file("rope as wide as a head", "config.gguf", &bytes, &["rope.dimension_count", "below 24", "24"]);
    let bytes = tiny().unset("glm-dsa.vocab_size").bytes();
    cases.file("no vocabulary at all", "config.gguf", &bytes, &["vocab"]);
}
