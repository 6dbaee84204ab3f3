//! Numbers that contradict nothing, and those that contradict each other or the tensors: what the file stage says of them,
//! and their twins, of which it says nothing.

use std::path::Path;

use crate::common::binary::{Run, inspect, lockstep, run};
use crate::common::folder::{Entry, FIRST, Folder, SECOND, folder};
use crate::common::subject::Silent;
use crate::common::{Model, NANO52, golden, put};
use crate::stages::{data, edited, failures, matches, nano, only, seeded, subject};
use lockstep::checkpoint::{Checkpoint, Standing};
use lockstep::gguf::Value;
use lockstep::gguf::value::Array;
use lockstep::quant::QuantType;
use lockstep::report::{StageReport, Verdict};
use lockstep::tokenize::OtherTemplate;
use lockstep::verify::file;
use serde_json::json;

fn judged(model: &Model) -> StageReport {
    file::run(&subject(edited(model), 1), &Silent).unwrap()
}

fn drifts(model: &Model, says: &[&str]) {
    let report = judged(model);
    let bad = failures(&report);
    assert_eq!(report.verdict(), Verdict::Drift, "{bad:?}");
    for part in says {
        assert!(bad.iter().any(|(_, d)| d.contains(part)), "no {part:?} in {bad:?}");
    }
}

// ---- metadata

#[test]
fn an_absent_key_whose_default_matters_is_a_warning() {
    let (gating, norm) = ("glm-dsa.expert_gating_func", "glm-dsa.expert_weights_norm");
    drifts(&nano().unset(gating), &[&format!("ABSENT_KEY: {gating} absent: sigmoid")]);
    drifts(&nano().unset(norm), &[&format!("ABSENT_KEY: {norm} absent: false")]);
    assert_eq!(failures(&judged(&nano().unset(gating).unset(norm))).len(), 2);
    // Absent with a default that is what absence means.
    for key in ["expert_group_count", "expert_group_used_count", "attention.indexer.types", "vocab_size"] {
        let key = format!("glm-dsa.{key}");
        let model = nano();
        if model.metadata.iter().any(|(k, _)| *k == key) {
            matches(&judged(&model.unset(&key)), 150);
        }
    }
}

#[test]
fn numbers_far_from_all_models_are_a_warning() {
    let eps = "glm-dsa.attention.layer_norm_rms_epsilon";
    for far in [1.0, 1e-3, 1e-10] {
        drifts(&nano().set(eps, Value::F32(far)), &["UNUSUAL", eps]);
    }
    drifts(&nano().set("glm-dsa.rope.freq_base", Value::F32(100.0)), &["UNUSUAL", "glm-dsa.rope.freq_base is 100"]);
    for (key, usual) in [(eps, 1e-6), ("glm-dsa.rope.freq_base", 1e4)] {
        matches(&judged(&nano().set(key, Value::F32(usual))), 150);
    }
}

#[test]
fn every_number_says_what_stands_behind_it() {
    let checkpoint = edited(&nano().unset("glm-dsa.expert_gating_func"));
    let standing = |name: &str| checkpoint.facts().into_iter().find(|t| t.fact.name == name).unwrap().standing;
    assert_eq!(standing("experts"), Standing::BorneOut("blk.1.exp_probs_b.bias".into()));
    assert_eq!(standing("rope base"), Standing::Stated);
    assert_eq!(standing("expert scale"), Standing::Stated);
    assert_eq!(standing("gating"), Standing::Assumed);
    assert_eq!(standing("indexer LayerNorm eps"), Standing::Derived);
    let wrong = edited(&nano().set("glm-dsa.expert_count", Value::U32(6)));
    let said = wrong.facts().into_iter().find(|t| t.fact.name == "experts").unwrap().standing;
    assert!(matches!(&said, Standing::Contradicted(by) if by.contains("the tensors say 8")), "{said:?}");
}

/// `inspect`, which must refuse and name all of this.
fn refused(model: &Model, says: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let found = inspect(&model.write(folder.path(), "edited.gguf"), &[]).exits(2);
    for part in says {
        assert!(found.stderr.contains(part), "no {part:?} in {}", found.stderr);
    }
}

#[test]
fn keys_that_contradict_each_other_are_both_named_with_what_tensors_say() {
    let set = |key: &str, n| nano().set(&format!("glm-dsa.{key}"), Value::U32(n));
    let (used, all) = ("glm-dsa.expert_used_count", "glm-dsa.expert_count");
    let says = |a: u32, b: u32| [format!("{used} = {a}"), format!("{all} = {b}"), "the tensors say 8".to_string()];
    let borrowed = |list: &[String; 3], model: &Model| refused(model, &list.each_ref().map(String::as_str));
    borrowed(&says(9, 8), &set("expert_used_count", 9));
    borrowed(&says(2, 1), &set("expert_count", 1));
    refused(&set("leading_dense_block_count", 9), &["glm-dsa.leading_dense_block_count = 9", "the tensors say 1 for"]);
    let cached =
        ["glm-dsa.attention.key_length = 288", "glm-dsa.attention.kv_lora_rank", "= 160", "the tensors say 256"];
    refused(&set("attention.kv_lora_rank", 128), &cached);
    refused(&set("nextn_predict_layers", 7), &["glm-dsa.nextn_predict_layers = 7", "glm-dsa.block_count = 7"]);
}

#[test]
fn of_several_keys_of_an_axis_the_innocent_are_not_blamed() {
    let model = nano().set("glm-dsa.attention.head_count", Value::U32(4));
    let bad = failures(&judged(&model));
    let q_b = &bad.iter().find(|(n, _)| n == "blk.0.attn_q_b.weight").unwrap().1;
    assert!(q_b.contains("from glm-dsa.attention.head_count = 4, found"), "{q_b}");
    let said = &bad.iter().find(|(n, _)| n == "heads").unwrap().1;
    assert!(said.contains("head_count = 4, and the tensors say 8 (blk.0.attn_k_b.weight)"), "{said}");
    let o = &bad.iter().find(|(n, _)| n == "blk.0.attn_output.weight").unwrap().1;
    assert!(o.contains("from glm-dsa.attention.head_count = 4, found"), "{o}");
}

#[test]
fn what_tensors_say_of_a_count_is_said_beside_what_is_missing() {
    let says = |key: &str, n, check: &str, says: &str| {
        let key = format!("glm-dsa.{key}");
        let bad = failures(&judged(&nano().set(&key, Value::U32(n))));
        let found = bad.iter().find(|(n, d)| n == check && d.contains("CONTRADICTION"));
        let found = found.unwrap_or_else(|| panic!("{check}: {bad:#?}"));
        assert!(found.1.contains(&format!("{key} = {n}, and the tensors say {says}")), "{found:?}");
    };
    says("leading_dense_block_count", 3, "dense layers", "1 (blk.1.ffn_gate_inp.weight)");
    // The list of indexers is right, and so is not blamed alone.
    let set = |model: Model, n| model.set("glm-dsa.block_count", Value::U32(n));
    let difference = "glm-dsa.block_count - glm-dsa.nextn_predict_layers = 9 - 1 = 8";
    let both =
        ["glm-dsa.attention.indexer.types = 6 entries", difference, "say 6 for trunk layers", "say 1 for MTP blocks"];
    refused(&set(nano(), 9), &both);
    let bad = failures(&judged(&set(nano().unset("glm-dsa.attention.indexer.types"), 9)));
    assert!(bad.iter().any(|(n, d)| n == "blocks" && d.contains("= 9, and the tensors say 7 (blk.6.")), "{bad:?}");
    says("block_count", 6, "blocks", "7 (blk.6.");
    says("nextn_predict_layers", 2, "MTP blocks", "1 (blk.6.nextn.");
    // Fewer layers than the file holds leave a model that is whole in itself.
    let short = set(nano().set("glm-dsa.nextn_predict_layers", Value::U32(0)), 5);
    let bad = failures(&judged(&short));
    assert!(bad.iter().any(|(n, d)| n == "blocks" && d.contains("= 5, and the tensors say 7 (blk.6.")), "{bad:?}");
    // What a file leaves out with all its tensors is no contradiction.
    let without = nano().drop(|n| n.starts_with("blk.6."));
    let bad = failures(&judged(&without));
    assert!(bad.len() == 1 && bad[0].0 == "mtp", "{bad:?}");
    says("expert_count", 16, "experts", "8 (blk.1.exp_probs_b.bias)");
    says("embedding_length", 512, "hidden", "256 (");
}

#[test]
fn a_whole_kv_b_without_mla_keys_is_one_answer() {
    // Real head sizes under the plain keys, as older converters wrote them with a whole kv_b.
    let whole = |key_length: u32| {
        let mut model = seeded(5)
            .unset("glm-dsa.attention.key_length_mla")
            .unset("glm-dsa.attention.value_length_mla")
            .set("glm-dsa.attention.key_length", Value::U32(key_length))
            .set("glm-dsa.attention.value_length", Value::U32(16))
            .drop(|n| n.ends_with("attn_k_b.weight") || n.ends_with("attn_v_b.weight"));
        for layer in 0..3 {
            let name = format!("blk.{layer}.attn_kv_b.weight");
            model = model.add(&name, &[32, 2 * (16 + 16)], QuantType::F32);
            data(&mut model, &name).chunks_mut(4).for_each(|v| v.copy_from_slice(&0.25f32.to_le_bytes()));
        }
        model
    };
    let folder = tempfile::tempdir().unwrap();
    inspect(&whole(24).write(folder.path(), "whole.gguf"), &[]).exits(0).says("kv_b: whole").silent_on("two layouts");
    matches(&judged(&whole(24)), 50);
    // The cached row's width tells nothing of the heads.
    refused(&whole(40), &["key_length_mla", "older converter"]);
}

/// Files say "no groups" by 0, by 1 and by no key, and truth by any integer but 0; engine and reference read them alike.
#[test]
fn zero_groups_and_integers_that_are_true_are_read_alike() {
    let groups = |all, used| {
        let set = |model: Model, key: &str, n| model.set(&format!("glm-dsa.{key}"), Value::U32(n));
        set(set(nano(), "expert_group_count", all), "expert_group_used_count", used)
    };
    for (all, used) in [(0, 0), (1, 0), (0, 1)] {
        matches(&judged(&groups(all, used)), 150);
    }
    let (all, used) = ("glm-dsa.expert_used_count = 2", "glm-dsa.expert_group_used_count = 0");
    refused(&groups(4, 0), &[all, used]);
    matches(&judged(&groups(4, 2)), 150);

    let types = |list| nano().set("glm-dsa.attention.indexer.types", Value::Array(list));
    matches(&judged(&types(Array::U8(vec![255; 7]))), 150);
    matches(&judged(&types(Array::I8(vec![-1; 7]))), 150);
    let shared = judged(&types(Array::U8(vec![255, 255, 255, 255, 0, 0, 255])));
    let bad = failures(&shared);
    assert!(bad.len() == 2 && bad[0].1.contains("says that layer 4 shares the choice of layer 3"), "{bad:?}");
}

// ---- indexers

/// nano52, whose pattern is FFFSSF, without the key that says so and with copies of layer 2's indexer.
fn unstated(context: u32, copies: &[usize]) -> Model {
    let mut model = Model::read(&golden(NANO52))
        .unset("glm-dsa.attention.indexer.types")
        .set("glm-dsa.context_length", Value::U32(context));
    for layer in copies {
        let prefix = format!("blk.{layer}.indexer.");
        model.tensors.retain(|(t, _)| !t.name.starts_with(&prefix));
        for (mut tensor, bytes) in model.tensors.clone() {
            if let Some(rest) = tensor.name.strip_prefix("blk.2.indexer.") {
                tensor.name = format!("{prefix}{rest}");
                model.tensors.push((tensor, bytes));
            }
        }
    }
    model
}

#[test]
fn a_pattern_that_is_inferred_must_fit_the_indexers() {
    let pattern = "FFFSSS (F full, S shared) is inferred: glm-dsa.attention.indexer.types absent";
    let certain = |model: &Model, says: &[&str]| {
        let report = judged(model);
        let bad = failures(&report);
        let found = bad.iter().find(|(n, _)| n == "full indexer layers").unwrap_or_else(|| panic!("{bad:?}"));
        assert!(says.iter().all(|s| found.1.contains(s)), "{found:?}");
        assert_eq!(report.verdict(), Verdict::Divergent);
    };
    certain(&unstated(1 << 20, &[]), &["blk.5.indexer present, unused, and no copy of blk.2.indexer", pattern]);
    // Every layer has its own, and a key that nobody reads says so.
    let types = "glm-dsa.attention.indexer.types";
    let own = nano().unset(types).set("glm-dsa.context_length", Value::U32(1 << 20));
    certain(&own, &["blk.3.indexer, blk.4.indexer, blk.5.indexer present, unused"]);
    certain(&unstated(4096, &[]), &["blk.3.indexer, blk.4.indexer absent", "4096 is below 2^20"]);
    let copies = ["blk.3.indexer, blk.4.indexer equal to blk.2.indexer byte for byte, so probably shared"];
    drifts(&unstated(4096, &[3, 4]), &copies);
    // Twins: copies where the pattern says shared; all different where it says full; a key that says it.
    matches(&judged(&unstated(1 << 20, &[3, 4, 5])), 60);
    matches(&judged(&nano().unset(types)), 150);
    matches(&judged(&Model::read(&golden(NANO52))), 60);
}

#[test]
fn an_indexer_that_a_stated_pattern_passes_over_is_a_warning() {
    // Every layer of nano has an indexer of its own; the key says that layers 4 and 5 share layer 3's.
    let key = "glm-dsa.attention.indexer.types";
    let shared = |copies: bool| {
        let types = [true, true, true, true, false, false];
        let mut model = nano().set(key, Value::Array(Array::Bool(types.to_vec())));
        for layer in [4, 5] {
            let prefix = format!("blk.{layer}.indexer.");
            for (tensor, bytes) in model.tensors.clone() {
                let Some(rest) = tensor.name.strip_prefix("blk.3.indexer.") else { continue };
                if copies {
                    *data(&mut model, &format!("{prefix}{rest}")) = bytes;
                }
            }
        }
        model
    };
    let found = judged(&shared(false));
    let bad = failures(&found);
    assert_eq!((bad.len(), found.verdict()), (2, Verdict::Drift), "{bad:?}");
    for ((name, detail), layer) in bad.iter().zip([4, 5]) {
        let says = [
            format!("{key} says that layer {layer} shares the choice of layer 3"),
            format!("blk.{layer}.indexer."),
            "and 4 more is there and no copy of blk.3.indexer's".to_string(),
        ];
        assert!(name == "full indexer layers" && says.iter().all(|s| detail.contains(s)), "{detail}");
    }
    matches(&judged(&shared(true)), 150);
    let none = shared(false).drop(|n| n.starts_with("blk.4.indexer.") || n.starts_with("blk.5.indexer."));
    matches(&judged(&none), 140);
    // A folder says it by another key.
    let types = |second: &'static str| {
        move |f: &mut Folder| {
            f.config["indexer_types"] = json!(["full", second]);
        }
    };
    let found = of_folder(types("shared"), &["file"]).exits(0);
    found.says("DRIFT").says("indexer_types says that layer 1 shares the choice of layer 0");
    found.says("model.layers.1.self_attn.indexer.");
    of_folder(types("full"), &["file"]).exits(0).silent_on("DRIFT");
}

// ---- output matrix

#[test]
fn an_output_that_no_file_holds_is_tied_and_counts_nothing() {
    let at = tempfile::tempdir().unwrap();
    let tied = nano().drop(|n| n == "output.weight");
    let path = tied.write(at.path(), "tied.gguf");
    let found = inspect(&path, &[]).exits(0);
    found.says("output: tied").says("(tied: the embedding's)").says("162 tensors: 162 bound");
    let found: serde_json::Value = serde_json::from_str(&inspect(&path, &["--json"]).exits(0).stdout).unwrap();
    assert_eq!(found["tied"], true);
    let output = found["plan"]["parameters"].as_array().unwrap().iter().find(|p| p["parameter"] == "output").unwrap();
    assert_eq!((&output["tied"], &output["bytes"]), (&true.into(), &0.into()));
    verify(&path, &["file", "weights", "--all"]).exits(0).says("tied: the files hold no output matrix");
    // Against a baseline that has one.
    let mut subject = subject(edited(&tied), 1);
    subject.baseline = Some(edited(&nano()));
    only(
        &file::run(&subject, &Silent).unwrap(),
        "output = baseline",
        &["tied to the embedding here", "of its own in the"],
    );
    inspect(&nano().write(at.path(), "own.gguf"), &[]).exits(0).silent_on("tied");
}

fn verify(path: &Path, args: &[&str]) -> Run {
    run(lockstep().args(["verify", "-q", "-m"]).arg(path).args(args))
}

/// A folder after an edit, judged.
fn of_folder(edit: impl FnOnce(&mut Folder), stages: &[&str]) -> Run {
    let at = tempfile::tempdir().unwrap();
    let mut model = folder();
    edit(&mut model);
    model.write(at.path());
    verify(at.path(), stages)
}

#[test]
fn the_flag_that_ties_and_the_tensor_must_agree() {
    let flag = |on: bool| move |f: &mut Folder| f.config["tie_word_embeddings"] = json!(on);
    let both = ["file", "weights"];
    let found = of_folder(flag(true), &both).exits(1);
    found.says("tie_word_embeddings is true").says("lm_head.weight is there and differs").silent_on("BYTES");
    let lost = |f: &mut Folder| drop(f.take("lm_head.weight"));
    of_folder(lost, &["file"]).exits(1).says("tie_word_embeddings is false").says("no lm_head.weight");
    // Legal: the flag and no tensor, or the same tensor twice.
    let legal = |f: &mut Folder| (flag(true)(f), lost(f)).0;
    of_folder(legal, &both).exits(0).silent_on("DRIFT");
    of_folder(legal, &["file", "--all"]).exits(0).says("tied");
    let twice = |f: &mut Folder| {
        flag(true)(f);
        f.tensors.get_mut("lm_head.weight").unwrap().bytes = f.tensors["model.embed_tokens.weight"].bytes.clone();
    };
    of_folder(twice, &both).exits(0);
}

// ---- folders

/// `folder()` with an MTP block behind its two layers.
fn with_mtp(f: &mut Folder) {
    f.config["num_nextn_predict_layers"] = json!(1);
    let layer: Vec<_> = f.tensors.iter().filter(|(n, _)| n.starts_with("model.layers.1.")).collect();
    let copies = layer.into_iter().map(|(n, e)| (n.replacen("layers.1.", "layers.2.", 1), e.clone()));
    let copies: Vec<_> = copies.collect();
    copies.into_iter().for_each(|(name, entry)| f.insert(&name, entry));
    let norm = f.tensors["model.norm.weight"].clone();
    for name in ["enorm.weight", "hnorm.weight", "shared_head.norm.weight"] {
        f.insert(&format!("model.layers.2.{name}"), norm.clone());
    }
    let wide = f.tensors["model.layers.0.self_attn.q_a_proj.weight"].clone();
    let eh = Entry { shape: vec![32, 64], bytes: [&wide.bytes[..], &wide.bytes].concat(), ..wide };
    f.insert("model.layers.2.eh_proj.weight", eh);
}

#[test]
fn counts_of_a_folder_that_its_tensors_contradict_are_named() {
    let says = |key: &'static str, value: u32, says: &str| {
        let edit = move |f: &mut Folder| (with_mtp(f), f.config[key] = json!(value)).0;
        let found = of_folder(edit, &["file"]).exits(1);
        found.says(&format!("{key} = {value}, and the tensors say {says}")).silent_on("(0 off)");
    };
    says("n_routed_experts", 8, "4 (model.layers.");
    says("n_routed_experts", 2, "4 (model.layers.");
    says("first_k_dense_replace", 2, "1 (model.layers.1.mlp.gate.");
    says("first_k_dense_replace", 0, "1 (model.layers.1.mlp.gate.");
    says("num_hidden_layers", 1, "2 (model.layers.1.");
    says("num_hidden_layers", 3, "2 (model.layers.1.");
    says("num_nextn_predict_layers", 2, "1 (model.layers.2.");
    let none = |f: &mut Folder| (with_mtp(f), f.config["num_nextn_predict_layers"] = json!(0)).0;
    let found = of_folder(none, &["file"]).exits(0);
    found.says("DRIFT").says("UNDECLARED: num_nextn_predict_layers = 0, and the tensors say 1 (model.layers.2.");
    of_folder(with_mtp, &["file"]).exits(0).says("MATCH").silent_on("DRIFT");
}

#[test]
fn flags_that_decide_nothing_here_are_held_against_the_tensors() {
    let flag = |key: &'static str, value: serde_json::Value| move |f: &mut Folder| f.config[key] = value.clone();
    let lost = of_folder(flag("attention_bias", json!(true)), &["file"]).exits(1);
    lost.says("FLAG: attention_bias is true, and the files hold no bias of attention");
    of_folder(flag("attention_bias", json!(false)), &["file"]).exits(0).silent_on("FLAG");
    let bias = |stated: bool| {
        move |f: &mut Folder| {
            f.config["attention_bias"] = json!(stated);
            let norm = f.tensors["model.norm.weight"].clone();
            f.insert("model.layers.0.self_attn.o_proj.bias", norm);
        }
    };
    let more = of_folder(bias(false), &["file"]).exits(1);
    more.says("attention_bias is false, and the files hold 1 bias of attention (model.layers.0.self_attn.o_proj.bias)");
    // A model that this build lacks.
    of_folder(bias(true), &["file"]).exits(3).says("biases of attention").silent_on("DIVERGENT");
    of_folder(bias(true), &["weights"]).exits(3);

    let method = json!({"quant_method": "gptq", "bits": 4});
    let stale = of_folder(flag("quantization_config", method.clone()), &["file"]).exits(0);
    stale.says("DRIFT").says("quantization_config.quant_method is").says("every tensor is of a plain type");
    let packed = |f: &mut Folder| {
        flag("quantization_config", json!({"quant_method": "fp8"}))(f);
        f.make_fp8("model.layers.0.self_attn.o_proj.weight");
        f.insert("model.layers.0.self_attn.o_proj.weight_scale_inv", Folder::factor());
    };
    of_folder(packed, &["file"]).exits(3).silent_on("FLAG");

    let class = |name: &'static str| flag("architectures", json!([name]));
    of_folder(class("LlamaForCausalLM"), &["file"]).exits(1).says("architectures names LlamaForCausalLM");
    of_folder(class("DeepseekV32ForCausalLM"), &["file"]).exits(0).says("DRIFT").says("names DeepseekV32ForCausalLM");
    of_folder(class("GlmMoeDsaForCausalLM"), &["file"]).exits(0).silent_on("FLAG").silent_on("DRIFT");
}

#[test]
fn an_index_that_the_shards_contradict_is_named() {
    let o = "model.layers.0.self_attn.o_proj.weight";
    let index = |edit: fn(&mut std::collections::BTreeMap<String, String>)| {
        of_folder(|f| edit(f.index.as_mut().unwrap()), &["file"]).exits(0)
    };
    let deleted = index(|i| _ = i.remove("model.layers.0.self_attn.o_proj.weight"));
    deleted.says("DRIFT").says("index does not list").says(&format!("{o} ({FIRST})"));
    let renamed = index(|i| {
        let file = i.remove("model.layers.0.self_attn.o_proj.weight").unwrap();
        i.insert("model.layers.0.self_attn.out_proj.weight".into(), file);
    });
    renamed.says("DRIFT").says("self_attn.out_proj.weight where the shards have").says(o);
    let wrong = index(|i| _ = i.insert("model.layers.0.self_attn.o_proj.weight".into(), SECOND.into()));
    wrong.says("DRIFT").says(&format!("{o} in {SECOND}, and {FIRST} holds it"));
    let more = index(|i| _ = i.insert("model.layers.9.x.weight".into(), SECOND.into()));
    more.says("DRIFT").says("no shard holds: model.layers.9.x.weight");
    of_folder(|f| f.index = None, &["file"]).exits(0).says("verdict: MATCH");
    of_folder(|_| {}, &["file"]).exits(0).says("verdict: MATCH");
}

#[test]
fn a_list_of_layers_is_read_and_must_agree_with_the_count() {
    let list = |list: &'static [&str], count: bool| {
        move |f: &mut Folder| {
            f.config["mlp_layer_types"] = json!(list);
            if !count {
                f.config.as_object_mut().unwrap().remove("first_k_dense_replace");
            }
        }
    };
    let both = ["file", "weights"];
    of_folder(list(&["dense", "sparse"], false), &both).exits(0).says("verdict: MATCH");
    of_folder(list(&["dense", "sparse"], true), &both).exits(0).says("verdict: MATCH");
    let conflict = of_folder(list(&["dense", "dense"], true), &both).exits(2);
    for part in ["first_k_dense_replace = 1", "mlp_layer_types = 2 x dense", "the tensors say 1 for dense layers"] {
        assert!(conflict.stderr.contains(part), "no {part:?} in {}", conflict.stderr);
    }
    let head = of_folder(|f| f.config["qk_head_dim"] = json!(32), &both).exits(2);
    let says = "qk_head_dim = 32 and qk_nope_head_dim + qk_rope_head_dim = 16 + 8 = 24, which contradict";
    assert!(head.stderr.contains(says), "{}", head.stderr);
    of_folder(|f| f.config["qk_head_dim"] = json!(24), &both).exits(0);
    // Another order is another model, which this build does not run.
    let other = of_folder(list(&["sparse", "dense"], false), &both).exits(3);
    assert!(other.stderr.contains("mlp_layer_types"), "{}", other.stderr);
    of_folder(list(&["dense", "thick"], false), &both).exits(2);
}

#[test]
fn a_template_in_a_file_of_its_own_is_read() {
    let at = tempfile::tempdir().unwrap();
    folder().write(at.path());
    let tokenizer = std::fs::read(golden("../tokenizer/tok/tokenizer.json")).unwrap();
    put(at.path(), "tokenizer.json", &tokenizer);
    let read = || Checkpoint::open(Some(at.path())).unwrap().tokenizer_spec().map(|s| s.chat_template);
    assert_eq!(read().unwrap(), None);
    put(at.path(), "chat_template.json", b"{\"chat_template\": \"<|user|>\"}");
    assert_eq!(read().unwrap().as_deref(), Some("<|user|>"));
    put(at.path(), "chat_template.json", b"[]");
    assert!(read().is_err());
    // A file of its own goes before the config, and an equal one is no rival.
    let spec = || Checkpoint::open(Some(at.path())).unwrap().tokenizer_spec().unwrap();
    put(at.path(), "tokenizer_config.json", b"{\"chat_template\": \"<|user|>\"}");
    put(at.path(), "chat_template.jinja", b"<|system|>");
    assert_eq!(spec().chat_template.as_deref(), Some("<|system|>"));
    assert_eq!(spec().other_templates, [OtherTemplate { name: "tokenizer_config.json".into(), is_rival: true }]);
    put(at.path(), "chat_template.jinja", b"<|user|>");
    assert!(spec().other_templates.is_empty());
}
