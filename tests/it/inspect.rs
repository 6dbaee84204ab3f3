//! `lockstep inspect` as a user runs it: numbers, refusals, faults of names and shapes, JSON, a closed pipe.

use std::path::Path;
use std::process::Stdio;

use crate::common::{GLM5_NANO, Model, NANO52, Run, golden, inspect, lockstep, pico_shard, put, run, schema, tiny};
use lockstep::gguf::value::{Array, Value};
use lockstep::quant::QuantType;
use serde_json::Value as Json;

/// Writes `model` and inspects it.
fn inspect_model(model: &Model, args: &[&str]) -> Run {
    let folder = tempfile::tempdir().unwrap();
    inspect(&model.write(folder.path(), "model.gguf"), args)
}

/// The `--json` document, checked against the schema.
fn json_of(run: &Run) -> Json {
    let text = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/schemas/inspect.json")).unwrap();
    let schema: Json = serde_json::from_slice(&text).unwrap();
    let found: Json = serde_json::from_str(&run.stdout).unwrap_or_else(|e| panic!("{e}: {}", run.stdout));
    assert_eq!(schema::violations(&schema, &found), Vec::<String>::new());
    found
}

fn columns_fit(run: &Run) {
    for line in run.stdout.lines().filter(|l| !l.contains('/')) {
        assert!(line.chars().count() <= 120, "{} columns: {line}", line.chars().count());
    }
}

#[test]
#[cfg(feature = "builtin-model")]
fn the_built_in_model_is_the_golden_one() {
    let built_in = run(lockstep().args(["inspect", "--tp", "8"])).exits(0);
    built_in.says("built-in glm5-nano").says("163 tensors: 163 bound, 0 known-unused, 0 UNBOUND");
    let file = inspect(&golden(GLM5_NANO), &["--tp", "8"]).exits(0);
    let body = |r: &Run| r.stdout.lines().skip(1).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(body(&built_in), body(&file));
}

#[test]
#[cfg(not(feature = "builtin-model"))]
fn without_a_built_in_model_the_flag_is_named() {
    let run = run(lockstep().arg("inspect")).exits(2);
    assert!(run.stdout.is_empty() && run.stderr.contains("-m/--model"), "{}", run.stderr);
}

#[test]
fn a_model_with_its_own_indexers() {
    let run = inspect(&golden(GLM5_NANO), &[]).exits(0);
    run.says("163 tensors: 163 bound, 0 known-unused, 0 UNBOUND; 0 parameters without a source, 0 of the wrong shape.")
        .says("kv_b: split (attn_k_b, attn_v_b), k_b [head][latent 256][nope 96] by metadata and shape: transposed")
        .says("MTP: whole")
        .says("attn_q_a Q4_K + attn_kv_a_mqa Q4_K + indexer.attn_k Q8_0 + indexer.proj Q4_K   0-5")
        .says("Whole: every tensor has a home");
    columns_fit(&run);
    let every = inspect(&golden(GLM5_NANO), &["--all"]).exits(0);
    every.says("blk.5.indexer.k_norm.bias");
    columns_fit(&every);
}

/// 8 ranks of glm5-nano, worked out by hand from the shapes: what is cut, what is replicated, what covers.
#[test]
fn bytes_per_rank() {
    let run = inspect(&golden(GLM5_NANO), &["--tp", "8", "--json"]).exits(0);
    let found = json_of(&run);
    let of = |name: &str| {
        let all = found["plan"]["parameters"].as_array().unwrap();
        all.iter().find(|p| p["parameter"] == name).unwrap_or_else(|| panic!("no {name}")).clone()
    };
    let ranks =
        |p: &Json| p["bytes_per_rank"].as_array().unwrap().iter().map(|b| b.as_u64().unwrap()).collect::<Vec<_>>();
    // q_b: 8 heads of 128 rows, rows of 256 values = one 144-byte super-block.
    assert_eq!(ranks(&of("blk.0.attn_q_b")), [128 * 144; 8]);
    // k_b: one head of [256][96], rows of three 22-byte Q5_0 blocks.
    assert_eq!(ranks(&of("blk.0.attn_k_b")), [256 * 3 * 22; 8]);
    // q_a is replicated whole.
    assert_eq!(ranks(&of("blk.0.attn_q_a")), [256 * 144; 8]);
    // Dense down: 768 columns, 96 a rank, blocks of 256: ranks 2 and 5 (columns 192..288 and 480..576) touch two.
    let down = of("blk.0.ffn_down");
    let two = 2 * 256 * 144;
    assert_eq!(ranks(&down), [two / 2, two / 2, two, two / 2, two / 2, two, two / 2, two / 2]);
    assert_eq!((&down["cut"], down["times"].as_f64().unwrap()), (&"row-covering".into(), 10.0 / 3.0));
    // attn_output: 1024 columns, 128 a rank: half a block each, so twice the bytes.
    let out = of("blk.0.attn_output");
    assert_eq!((ranks(&out), out["times"].as_f64().unwrap()), (vec![256 * 176; 8], 2.0));
    // The head: 4096 rows in 8 of 512.
    assert_eq!(ranks(&of("output")), [512 * 210; 8]);
    let totals = found["plan"]["trunk_bytes_per_rank"].as_array().unwrap();
    for (rank, total) in totals.iter().enumerate() {
        let all = found["plan"]["parameters"].as_array().unwrap();
        assert_eq!(total.as_u64().unwrap(), all.iter().map(|p| ranks(p)[rank]).sum::<u64>());
    }
    inspect(&golden(GLM5_NANO), &["--tp", "8"])
        .exits(0)
        .says("0-1, 3-4, 6-7 of 8")
        .says("2, 5 of 8")
        .says("row-covering");
}

#[test]
fn a_split_set_opens_by_any_shard_and_by_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    for number in 1..=4 {
        let shard = pico_shard(number);
        std::fs::copy(&shard, folder.path().join(shard.file_name().unwrap())).unwrap();
    }
    let whole = inspect(folder.path(), &[]).exits(0);
    whole.says("94 tensors: 94 bound, 0 known-unused, 0 UNBOUND").says("in 4 files");
    for number in 1..=4 {
        let run = inspect(&pico_shard(number), &[]).exits(0);
        let body = |r: &Run| r.stdout.lines().skip(1).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(body(&run), body(&whole), "shard {number}");
    }
}

#[test]
fn degrees_are_decided_by_heads() {
    for tp in ["3", "16", "0", "4096"] {
        let run = inspect(&golden(GLM5_NANO), &["--tp", tp]).exits(2);
        assert!(run.stdout.is_empty() && run.stderr.contains(&format!("--tp {tp}: ")), "{}", run.stderr);
    }
    let run = inspect(&golden(GLM5_NANO), &["--tp", "16"]);
    assert!(run.stderr.contains("attention heads (8)") && run.stderr.contains("1, 2, 4, 8"), "{}", run.stderr);
    for tp in ["1", "2", "4", "8"] {
        inspect(&golden(GLM5_NANO), &["--tp", tp]).exits(0);
    }
}

#[test]
fn strict_blocks_list_what_is_cut_and_what_is_legal() {
    let run = inspect(&golden(GLM5_NANO), &["--strict-blocks", "--tp", "2"]).exits(2);
    assert!(run.stdout.is_empty());
    for text in ["11 tensors are cut inside a block", "blk.0.ffn_down", "blk.5.ffn_down_shexp", "without cutting: 1\n"]
    {
        assert!(run.stderr.contains(text), "no {text:?} in {}", run.stderr);
    }
    inspect(&golden(GLM5_NANO), &["--strict-blocks", "--tp", "1"]).exits(0);
    // F32 has no blocks to cut: every degree that the heads allow.
    inspect_model(&tiny(), &["--strict-blocks", "--tp", "2"]).exits(0);
}

#[test]
fn shared_layers_have_no_indexer() {
    let run = inspect(&golden(NANO52), &["--all"]).exits(0);
    run.says("153 tensors: 153 bound, 0 known-unused").says("full indexer layers");
    for layer in 0..6 {
        let name = format!("blk.{layer}.indexer.proj");
        if [3, 4].contains(&layer) {
            run.silent_on(&name)
        } else {
            run.says(&name)
        };
    }
    run.says("attn_q_a Q2_K + attn_kv_a_mqa Q2_K                                             3-4");
    // Files of other converters hold indexers on shared layers: known, unused, and not counted in the budget.
    let mut model = Model::read(&golden(NANO52));
    for (name, ne) in [("proj.weight", &[256, 16][..]), ("k_norm.weight", &[64]), ("k_norm.bias", &[64])] {
        model = model.add(&format!("blk.3.indexer.{name}"), ne, QuantType::F32);
    }
    let more = inspect_model(&model, &["--all"]).exits(0);
    more.says("156 tensors: 153 bound, 3 known-unused, 0 UNBOUND")
        .says("3 x indexer of a shared layer (it reuses an earlier top-k) (first: blk.3.indexer.proj.weight)")
        .silent_on("blk.3.indexer.proj  ");
}

#[test]
fn the_bias_of_the_router_goes_by_two_names() {
    let mut model = Model::read(&golden(NANO52));
    for layer in 1..=6 {
        model = model.rename(&format!("blk.{layer}.exp_probs_b.bias"), &format!("blk.{layer}.exp_probs_b"));
    }
    let run = inspect_model(&model, &[]).exits(0);
    run.says("153 bound").says("alias: blk.1.exp_probs_b read as blk.1.exp_probs_b.bias and 5 more");
    let found = json_of(&inspect_model(&model, &["--json"]));
    assert_eq!(found["coverage"]["aliases"].as_array().unwrap().len(), 6);
    inspect(&golden(NANO52), &[]).exits(0).silent_on("alias");
}

#[test]
fn mtp_blocks_whole_partial_absent() {
    let whole = Model::read(&golden(NANO52));
    let state = |model: &Model, code: i32| json_of(&inspect_model(model, &["--json"]).exits(code))["mtp"].clone();
    assert_eq!(state(&whole, 0), serde_json::json!({"state": "whole", "missing": []}));
    // The head of the block only, as some quantisers leave it.
    let partial = whole.clone().drop(|n| n.starts_with("blk.6.") && !n.contains("nextn"));
    let run = inspect_model(&partial, &[]).exits(0);
    run.says("MTP: incomplete in this file; not run").says("lacks 18 tensors: blk.6.attn_norm.weight");
    assert_eq!(state(&partial, 0)["state"], "partial");
    let absent = whole.clone().drop(|n| n.starts_with("blk.6."));
    inspect_model(&absent, &[]).exits(0).says("MTP: declared, but not in this file; not run");
    assert_eq!(state(&absent, 0)["state"], "absent");
    // Without the key the block count is the trunk's, and its last block lacks everything.
    let types = Value::Array(Array::Bool(vec![true, true, true, false, false, true, true]));
    let trunk = absent.unset("glm-dsa.nextn_predict_layers").set("glm-dsa.attention.indexer.types", types);
    inspect_model(&trunk, &[]).exits(2).says("MISSING attn_q_a in layer 6");
    let trunk = trunk.set("glm-dsa.block_count", Value::U32(6));
    inspect_model(&trunk, &[]).exits(0).says("MTP: none declared");
    // An MTP block without an indexer runs: it attends densely.
    let dense = whole.drop(|n| n.starts_with("blk.6.indexer."));
    assert_eq!(state(&dense, 0)["state"], "whole");
}

#[test]
fn a_missing_tensor_is_named() {
    let run = inspect_model(&tiny().drop(|n| n == "blk.1.ffn_norm.weight"), &[]).exits(2);
    run.says("1 parameters without a source").says("MISSING ffn_norm in layer 1: no tensor blk.1.ffn_norm.weight");
    run.says("NOT whole (exit 2)");
    // A head that is not there is the embedding, tied.
    inspect_model(&tiny().drop(|n| n == "output.weight"), &[]).exits(0).says("0 parameters without a source");
}

#[test]
fn a_misnamed_tensor_is_unbound_with_the_nearest_name() {
    for (wrong, edits) in [("blk.1.attn_qb.weight", "1 edit"), ("blk.1.attn_q_b.qweight", "1 edit")] {
        let run = inspect_model(&tiny().rename("blk.1.attn_q_b.weight", wrong), &[]).exits(2);
        run.says(&format!("UNBOUND {wrong} (nearest: blk.1.attn_q_b.weight, {edits}"))
            .says("MISSING attn_q_b in layer 1: no tensor blk.1.attn_q_b.weight");
    }
    // Known to be of no use here is not unknown, and one letter's difference is.
    let aux = tiny().add("rope_freqs.weight", &[4], QuantType::F32);
    inspect_model(&aux, &[]).exits(0).says("1 known-unused").says("rope frequencies");
    let aux = tiny().add("rope_freq.weight", &[4], QuantType::F32);
    inspect_model(&aux, &[]).exits(2).says("UNBOUND rope_freq.weight");
    // Another model part is told by family, not tensor by tensor.
    let many = (0..300).fold(tiny(), |m, i| m.add(&format!("v.blk.{i}.attn_k.weight"), &[4], QuantType::F32));
    let run = inspect_model(&many, &[]).exits(2);
    run.says("UNBOUND 300 tensors under v.* (first: v.blk.0.attn_k.weight");
    assert_eq!(run.stdout.matches("UNBOUND 300").count(), 1);
}

#[test]
fn a_wrong_shape_names_the_key_and_every_tensor() {
    let model = Model::read(&golden(NANO52)).set("glm-dsa.expert_count", Value::U32(6));
    let run = inspect_model(&model, &[]).exits(2);
    run.says("SHAPE exp_probs_b in layers 1-6: expected [6] by glm-dsa.expert_count, found [8]")
        .says("SHAPE ffn_gate_inp in layers 1-6: expected [256, 6] by glm-dsa.expert_count, found [256, 8]")
        .says("SHAPE ffn_down_exps in layers 1-6: expected [256, 256, 6] by glm-dsa.expert_count, found [256, 256, 8]")
        .says("No plan, and no bytes per rank: shapes contradict the metadata.");
    columns_fit(&run);
    let found = json_of(&inspect_model(&model, &["--json"]).exits(2));
    // Bias, router and three stacks, in 5 layers and the MTP block.
    assert_eq!(found["coverage"]["wrong_shape"].as_array().unwrap().len(), 5 * 6);
    assert_eq!((&found["whole"], &found["plan"]["parameters"]), (&Json::Bool(false), &Json::Null));
    let run = inspect_model(&tiny().reshape("blk.0.attn_kv_a_mqa.weight", &[32, 48]), &[]).exits(2);
    run.says("expected [32, 40] by glm-dsa.rope.dimension_count, found [32, 48]");
    // A last axis of 1 is the converter's choice; a first one is not.
    inspect_model(&tiny().reshape("output_norm.weight", &[32, 1]), &[]).exits(0);
    inspect_model(&tiny().reshape("output_norm.weight", &[1, 32]), &[]).exits(2).says("found [1, 32]");
}

#[test]
fn types_without_a_dequantiser_are_listed() {
    let model =
        Model::read(&golden(NANO52)).retype("blk.1.ffn_gate_exps.weight", 19).retype("blk.2.ffn_up_exps.weight", 19);
    let run = inspect_model(&model, &["--strict-blocks"]).exits(3);
    run.says("type IQ1_S: 2 tensors that this build cannot dequantise (first: blk.1.ffn_gate_exps.weight)")
        .says("ffn_gate_exps IQ1_S + ffn_up_exps Q2_K")
        .says("No plan, and no bytes per rank")
        .says("Whole, but not runnable by this build (exit 3)");
    let found = json_of(&inspect_model(&model, &["--json"]).exits(3));
    assert_eq!(found["coverage"]["unreadable"].as_array().unwrap().len(), 2);
    // A quantised router is dequantised, and said to be.
    let router = Model::read(&golden(NANO52)).retype("blk.1.ffn_gate_inp.weight", 8);
    inspect_model(&router, &[]).exits(0).says("F32 (from Q8_0)").says("ffn_gate_inp (1 x Q8_0)");
}

#[test]
fn a_whole_kv_b_beside_split_metadata_is_pointed_out() {
    // nano: 8 heads of (96 nope + 128 value) rows of 256.
    let mut model =
        Model::read(&golden(NANO52)).drop(|n| n.ends_with("attn_k_b.weight") || n.ends_with("attn_v_b.weight"));
    for layer in 0..=6 {
        model = model.add(&format!("blk.{layer}.attn_kv_b.weight"), &[256, 8 * 224], QuantType::Q8_0);
    }
    let run = inspect_model(&model, &[]).exits(0);
    run.says("kv_b: whole: value rows keep their bytes, key rows are dequantised")
        .says("tensors and metadata describe two layouts")
        .says("head_count_kv 1, key_length 288, value_length 256, key_length_mla 128, value_length_mla 128");
    columns_fit(&run);
    // Older metadata states the real sizes alone and agrees with a whole kv_b.
    let old = model
        .set("glm-dsa.attention.key_length", Value::U32(128))
        .set("glm-dsa.attention.value_length", Value::U32(128));
    let old = old.unset("glm-dsa.attention.key_length_mla").unset("glm-dsa.attention.value_length_mla");
    inspect_model(&old, &[]).exits(0).says("kv_b: whole").silent_on("two layouts");
    let both = Model::read(&golden(NANO52)).add("blk.0.attn_kv_b.weight", &[256, 8 * 224], QuantType::Q8_0);
    inspect_model(&both, &[]).exits(0).says("1 x the whole kv_b beside its parts").says("kv_b: split");
}

#[test]
fn json_follows_its_schema() {
    for (path, tp) in [(golden(GLM5_NANO), "8"), (golden(NANO52), "1"), (pico_shard(1), "4")] {
        let run = inspect(&path, &["--json", "--tp", tp]).exits(0);
        let found = json_of(&run);
        assert_eq!(found["plan"]["tp"], tp.parse::<u64>().unwrap());
        assert!(run.stderr.is_empty());
    }
    // The check itself: a wrong type, a missing and an unknown key are seen.
    let schema = serde_json::json!({"type": "object", "required": ["a"], "additionalProperties": false,
        "properties": {"a": {"type": "array", "items": {"type": "integer", "minimum": 0}}}});
    for wrong in [serde_json::json!({"a": [-1]}), serde_json::json!({"a": ["x"]}), serde_json::json!({"a": [], "b": 1})]
    {
        assert_eq!(schema::violations(&schema, &wrong).len(), 1, "{wrong}");
    }
    assert_eq!(schema::violations(&schema, &serde_json::json!({})).len(), 1);
}

#[test]
fn a_closed_pipe_is_no_fault() {
    for args in [&["--all"][..], &["--json"]] {
        let mut child = lockstep()
            .args(["inspect", "-m"])
            .arg(golden(GLM5_NANO))
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take()); // the reader goes before the first line
        Run::from(child.wait_with_output().unwrap()).exits(0);
    }
}

#[test]
fn warnings_are_shown() {
    let mut bytes = tiny().bytes();
    bytes.extend_from_slice(&[1; 4096]);
    let folder = tempfile::tempdir().unwrap();
    let path = put(folder.path(), "tail.gguf", &bytes);
    let run = inspect(&path, &[]).exits(0);
    run.says("note: ").says("4096 bytes behind the last tensor are not used");
    let text = tiny().set("note", Value::Array(Array::Str(vec!["fine".into()])));
    inspect_model(&text, &[]).exits(0).silent_on("note:");
}
