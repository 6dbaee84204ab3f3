//! Hugging Face folders with defects.

use std::path::Path;

use serde_json::{Value as Json, json};

use super::Cases;
use crate::common::folder::{ATTENTION, DENSE, GLOBAL};
use crate::common::put;

fn config() -> Json {
    json!({
        "model_type": "glm_moe_dsa", "num_hidden_layers": 1, "num_nextn_predict_layers": 0, "hidden_size": 32,
        "first_k_dense_replace": 1, "vocab_size": 64, "max_position_embeddings": 64, "num_attention_heads": 2,
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "intermediate_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "norm_topk_prob": true,
        "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8, "indexer_types": ["full"], "hidden_act": "silu",
        "rope_interleave": true, "indexer_rope_interleave": true
    })
}

/// The two files of weights, by name.
fn weights(dtype: &str) -> [(&'static str, Vec<u8>); 2] {
    let layer = ATTENTION.iter().chain(&DENSE).map(|(n, s)| (format!("model.layers.0.{n}"), s.to_vec()));
    let global = GLOBAL.iter().map(|(n, s)| (n.to_string(), s.to_vec()));
    [("a.safetensors", safetensors(dtype, layer)), ("b.safetensors", safetensors(dtype, global))]
}

/// Zeros in the safetensors format: header length, JSON header, data.
fn safetensors(dtype: &str, tensors: impl Iterator<Item = (String, Vec<usize>)>) -> Vec<u8> {
    let (mut header, mut at) = (serde_json::Map::new(), 0);
    let width = 2;
    for (name, shape) in tensors {
        let end = at + shape.iter().product::<usize>() * width;
        header.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]}));
        at = end;
    }
    let mut text = Json::Object(header).to_string();
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(text.as_bytes());
    out.resize(out.len() + at, 0);
    out
}

/// A valid folder.
pub fn write_valid(folder: &Path) {
    put(folder, "config.json", config().to_string().as_bytes());
    for (name, bytes) in weights("BF16") {
        put(folder, name, &bytes);
    }
}

/// Forms of the same model: each is accepted, and read as the same by the reference.
pub fn harmless() -> Vec<(&'static str, Json)> {
    let mut older = config();
    older.as_object_mut().unwrap().remove("rope_parameters");
    older["rope_theta"] = json!(1_000_000);
    let with = |key: &str, value: Json| {
        let mut config = config();
        config[key] = value;
        config
    };
    vec![
        ("the older place of theta", older),
        ("both places of theta", with("rope_theta", json!(1_000_000))),
        ("no pattern", with("index_topk_pattern", Json::Null)),
        ("no scaling", with("rope_scaling", Json::Null)),
        ("noaux_tc", with("topk_method", json!("noaux_tc"))),
        ("every layer", with("moe_layer_freq", json!(1))),
    ]
}

fn folder(cases: &mut Cases, what: &str, culprit: &str, want: &[&str], harm: impl Fn(&Path)) {
    let folder = cases.folder();
    write_valid(&folder);
    harm(&folder);
    cases.path(what, folder, want, culprit);
}

/// Adds the cases of folders.
pub fn add(cases: &mut Cases) {
    let text = config().to_string();
    for (what, bytes) in [
        ("config.json cut", &text.as_bytes()[..text.len() / 2]),
        ("config.json empty", b""),
        ("config.json a page", b"<html>"),
        ("config.json not UTF-8", &[0xff, 0xfe, 0x00]),
        ("config.json a list", b"[1, 2]"),
    ] {
        folder(cases, what, "", &[], |f| _ = put(f, "config.json", bytes));
    }
    let optional = ["scoring_func", "norm_topk_prob", "indexer_types", "hidden_act", "rope_interleave"];
    let optional = [&optional[..], &["indexer_rope_interleave", "n_group", "topk_group", "num_nextn_predict_layers"]];
    for (key, value) in config().as_object().unwrap() {
        let place = if key == "rope_parameters" { "rope_parameters.rope_theta" } else { key };
        let mut put_config = |what: &str, v: Option<Json>| {
            folder(cases, &format!("config.json, {key} {what}"), place, &[], |f| {
                let mut config = config();
                match &v {
                    Some(v) => config[key] = v.clone(),
                    None => _ = config.as_object_mut().unwrap().remove(key),
                }
                put(f, "config.json", config.to_string().as_bytes());
            });
        };
        put_config("a list of odd things", Some(json!([1, "x", 2.5])));
        if !optional.concat().contains(&key.as_str()) {
            put_config("absent", None);
        }
        if value.is_u64() {
            put_config("negative", Some(json!(-3)));
            put_config("10^18", Some(json!(1_000_000_000_000_000_000u64)));
        }
    }
    for (key, value, want) in [
        ("scoring_func", json!("relu"), "relu"),
        ("hidden_act", json!("gelu"), "gelu"),
        ("rope_interleave", json!(false), "half-split"),
        ("indexer_rope_interleave", json!(false), "half-split"),
        ("indexer_types", json!(["shared"]), "full first layer"),
        ("indexer_types", json!(["full", "full"]), "array of 1"),
        ("indexer_types", json!(["half"]), "indexer_types[0]"),
        ("rope_parameters", json!({"rope_theta": 1e6, "rope_type": "yarn"}), "yarn"),
        ("rope_parameters", json!({"rope_theta": 1e6, "type": "yarn"}), "yarn"),
        ("rope_scaling", json!("yarn"), "rope_scaling"),
        ("rope_scaling", json!({"type": "linear", "factor": 4.0}), "rope_scaling.type"),
        ("rope_scaling", json!({"rope_type": "yarn"}), "rope_scaling.rope_type"),
        ("rope_theta", json!(10000), "1000000"),
        ("topk_method", json!("greedy"), "greedy"),
        ("moe_layer_freq", json!(2), "moe_layer_freq"),
        ("index_topk_pattern", json!("FSSS"), "FSSS"),
        ("n_shared_experts", json!(2), "shared experts"),
        ("model_type", json!("glm4_moe_lite"), "glm4_moe_lite"),
    ] {
        folder(cases, &format!("config.json, {key} {value}"), want, &[], |f| {
            let mut config = config();
            config[key] = value.clone();
            put(f, "config.json", config.to_string().as_bytes());
        });
    }

    let [(name, bytes), _] = weights("BF16");
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for at in [0, 4, 8, header / 2, header, header + 100, bytes.len() - 1] {
        let size = format!("expected {} bytes, found {at}", bytes.len());
        let words: &[&str] = if at < header { &["safetensors"] } else { &[&size, "first in the tensor model."] };
        folder(cases, &format!("safetensors cut at {at}"), name, words, |f| _ = put(f, name, &bytes[..at]));
    }
    let lie = |length: u64| [&length.to_le_bytes()[..], &bytes[8..]].concat();
    for length in [0, 1, 1 << 20, 1 << 40, u64::MAX] {
        folder(cases, &format!("safetensors header of {length}"), name, &[], |f| _ = put(f, name, &lie(length)));
    }
    folder(cases, "safetensors a page", name, &[], |f| _ = put(f, name, b"<!DOCTYPE html><html></html>"));
    folder(cases, "a type that no format has", name, &["BF16", "QQ"], |f| _ = put(f, name, &weights("QQ")[0].1));
    folder(cases, "a tensor in two files", "c.safetensors", &["model.", name], |f| _ = put(f, "c.safetensors", &bytes));
    folder(cases, "no weights", "config.json", &["weights are missing"], |f| {
        for (name, _) in weights("BF16") {
            std::fs::remove_file(f.join(name)).unwrap();
        }
    });
    let index = "model.safetensors.index.json";
    for (what, text, want) in [
        ("index not JSON", "{\"weight_map\": ".to_string(), "JSON"),
        ("index without a map", json!({"metadata": {}}).to_string(), "weight_map"),
        ("index with a list", json!({"weight_map": ["a.safetensors"]}).to_string(), "weight_map"),
        ("index with a number", json!({"weight_map": {"x": 3}}).to_string(), "tensor x"),
        ("index out of the folder", json!({"weight_map": {"x": "../a.safetensors"}}).to_string(), "tensor x"),
    ] {
        folder(cases, what, index, &[want], |f| _ = put(f, index, text.as_bytes()));
    }
    let map = json!({"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "gone.safetensors"}}).to_string();
    folder(cases, "a file of the index missing", "gone.safetensors", &["3", "found 2"], |f| {
        _ = put(f, index, map.as_bytes());
    });
}
