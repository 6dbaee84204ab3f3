//! What this build cannot read is UNMEASURED, exit 3, from every command, and never called wrong; what nobody can read is.

use std::path::{Path, PathBuf};

use crate::common::binary::{Run, lockstep, run};
use crate::common::folder::{Entry, Folder, folder};
use crate::common::{Model, put};
use crate::stages::nano;
use lockstep::gguf::Value;

fn of(command: &str, model: &Path, args: &[&str]) -> Run {
    run(lockstep().args([command, "-q", "-m"]).arg(model).args(args))
}

fn written(folder: &Folder, at: &Path) -> PathBuf {
    folder.write(at);
    at.into()
}

#[test]
fn types_that_this_build_lacks() {
    let at = tempfile::tempdir().unwrap();
    for (id, name) in [(19, "IQ1_S"), (29, "IQ1_M"), (34, "TQ1_0"), (35, "TQ2_0")] {
        let model = nano().retype("blk.3.ffn_up_exps.weight", id).write(at.path(), "model.gguf");
        of("inspect", &model, &[]).exits(3).says(name);
        let found = of("verify", &model, &["file", "weights"]).exits(3);
        found.says("UNMEASURED").says(name).says("blk.3.ffn_up_exps.weight").silent_on("DIVERGENT");
        if id != 19 {
            continue; // the rest is the same path
        }
        of("verify", &model, &["weights"]).exits(3).says("UNMEASURED");
        for command in ["generate", "bisect"] {
            let text: &[&str] = if command == "generate" { &["Genesis 1:1"] } else { &[] };
            let refused = of(command, &model, text).exits(3);
            assert!(refused.stderr.contains(name), "{}", refused.stderr);
            let refused = of(command, &model, &[text, &["--json"]].concat()).exits(3);
            refused.says("\"exit\": 3");
        }
    }
    // A number that is no type of the format.
    let mut bytes = nano().retype("blk.3.ffn_up_exps.weight", 19).bytes();
    let name = b"blk.3.ffn_up_exps.weight";
    let end = bytes.windows(name.len()).position(|w| w == name).unwrap() + name.len();
    let ty = end + 4 + 3 * 8;
    assert_eq!(bytes[ty..ty + 4], 19u32.to_le_bytes());
    bytes[ty..ty + 4].copy_from_slice(&99u32.to_le_bytes());
    let unknown = put(at.path(), "unknown.gguf", &bytes);
    for command in ["inspect", "verify", "bisect"] {
        of(command, &unknown, &[]).exits(2);
    }
}

#[test]
fn folders_in_fp8() {
    let at = tempfile::tempdir().unwrap();
    let wk = "model.layers.0.self_attn.indexer.wk.weight";
    let (wq, scale) = ("model.layers.0.self_attn.indexer.wq_b.weight", format!("{wk}_scale_inv"));
    let mut fp8 = folder();
    for name in [wk, wq] {
        fp8.make_fp8(name);
        fp8.insert(&format!("{name}_scale_inv"), Folder::factor());
    }
    let path = written(&fp8, at.path());
    for _ in 0..2 {
        of("inspect", &path, &[]).exits(3).says("F8_E4M3").says(&format!("first: {wk}"));
    }
    for stages in [&["file"][..], &["file", "weights"], &["weights"]] {
        of("verify", &path, stages).exits(3).says("UNMEASURED").says("F8_E4M3").silent_on("DIVERGENT");
    }
    of("bisect", &path, &[]).exits(3);
    // Packed as integers: the config says by what.
    let mut packed = folder();
    packed.tensors.get_mut(wk).unwrap().dtype = "I16";
    let lacks = of("inspect", &written(&packed, at.path()), &[]).exits(3);
    lacks.says("I16").says(wk);
    packed.config["quantization_config"] = serde_json::json!({"quant_method": "gptq"});
    let refused = of("verify", &written(&packed, at.path()), &["file"]).exits(3);
    assert!(refused.stderr.contains("gptq") && refused.stderr.contains(wk), "{}", refused.stderr);
    // A factor too few, and one that belongs to nothing.
    let mut lost = fp8.clone();
    lost.take(&scale);
    of("verify", &written(&lost, at.path()), &["file"]).exits(1).says("MISSING").says(&scale);
    let mut orphan = fp8.clone();
    orphan.insert("lm_head.weight_scale_inv", Folder::factor());
    of("verify", &written(&orphan, at.path()), &["file"]).exits(1).says("UNBOUND").says("lm_head.weight_scale_inv");
}

/// Every command's answer to a folder of which this build lacks something, and nothing else is wrong.
fn lacking(folder: &Folder, says: &[&str]) {
    let at = tempfile::tempdir().unwrap();
    let path = written(folder, at.path());
    let found = of("inspect", &path, &[]).exits(3);
    says.iter().for_each(|part| _ = found.says(part));
    let found = of("verify", &path, &["file", "tokenizer", "weights"]).exits(3);
    found.says("UNMEASURED").silent_on("DIVERGENT").silent_on("UNBOUND").silent_on("SHAPE").silent_on("MISSING");
    says.iter().for_each(|part| _ = found.says(part));
    of("verify", &path, &["weights"]).exits(3);
    of("bisect", &path, &[]).exits(3);
}

/// Packs a matrix as a tool would: the payload and what stands beside it, as (end of the name, type, shape, bytes a value).
fn pack(folder: &mut Folder, parts: &[(&str, &'static str, &[usize], usize)]) -> Vec<String> {
    let modules =
        (0..4).flat_map(|e| ["gate", "up", "down"].map(|p| format!("model.layers.1.mlp.experts.{e}.{p}_proj")));
    let modules: Vec<String> = modules.collect();
    for module in &modules {
        folder.take(&format!("{module}.weight"));
        for (end, dtype, shape, width) in parts {
            let bytes = [0x11, 0x3d].into_iter().cycle().take(shape.iter().product::<usize>() * width).collect();
            folder.insert(&format!("{module}.{end}"), Entry { dtype, shape: shape.to_vec(), bytes });
        }
    }
    modules
}

#[test]
fn packed_folders() {
    let scalar: &[usize] = &[];
    let nvfp4: &[(&str, &'static str, &[usize], usize)] = &[
        ("weight", "U8", &[32, 16], 1),
        ("weight_scale", "F8_E4M3", &[32, 2], 1),
        ("weight_scale_2", "F32", scalar, 4),
        ("input_scale", "F32", scalar, 4),
    ];
    let int8: &[(&str, &'static str, &[usize], usize)] =
        &[("weight", "I8", &[32, 32], 1), ("weight_scale", "BF16", &[32, 1], 2)];
    let int4: &[(&str, &'static str, &[usize], usize)] = &[
        ("weight_packed", "I32", &[32, 4], 4),
        ("weight_scale", "BF16", &[32, 1], 2),
        ("weight_shape", "I64", &[2], 8),
    ];
    let gptq: &[(&str, &'static str, &[usize], usize)] = &[
        ("qweight", "I32", &[4, 32], 4),
        ("qzeros", "I32", &[1, 4], 4),
        ("scales", "F16", &[1, 32], 2),
        ("g_idx", "I32", &[32], 4),
    ];
    let methods = [("modelopt", nvfp4, "U8"), ("compressed-tensors", int8, "I8")];
    for (method, parts, ty) in methods {
        let mut model = folder();
        pack(&mut model, parts);
        lacking(&model, &[ty]);
        model.config["quantization_config"] = serde_json::json!({"quant_method": method});
        lacking(&model, &[ty]);
    }
    for (method, parts) in [("compressed-tensors", int4), ("gptq", gptq)] {
        let mut model = folder();
        pack(&mut model, parts);
        lacking(&model, &["I32"]);
        model.config["quantization_config"] = serde_json::json!({"quant_method": method});
        let at = tempfile::tempdir().unwrap();
        let path = written(&model, at.path());
        for (command, args) in [("inspect", &[][..]), ("verify", &["file", "tokenizer", "weights"]), ("bisect", &[])] {
            let refused = of(command, &path, args).exits(3);
            assert!(refused.stderr.contains(method), "{}", refused.stderr);
        }
    }
    // The layer is named once, however many of its experts lack a factor.
    let mut lost = folder();
    let modules = pack(&mut lost, nvfp4);
    for m in [0, 3, 6] {
        lost.take(&format!("{}.weight_scale", modules[m]));
    }
    let at = tempfile::tempdir().unwrap();
    of("inspect", &written(&lost, at.path()), &[]).exits(2).says("ffn_gate_exps in layer 1").silent_on("1, 1");
    // A factor too few, one that belongs to nothing, and a shape that no packing makes.
    let edited = |edit: fn(&mut Folder, &[String])| {
        let at = tempfile::tempdir().unwrap();
        let mut model = folder();
        let modules = pack(&mut model, nvfp4);
        edit(&mut model, &modules);
        of("verify", &written(&model, at.path()), &["file"]).exits(1)
    };
    let lost = edited(|m, modules| drop(m.take(&format!("{}.weight_scale", modules[3]))));
    lost.says("MISSING").says("experts.1.gate_proj.weight_scale");
    edited(|m, _| m.insert("lm_head.weight_scale_2", Folder::factor())).says("UNBOUND").says("lm_head.weight_scale_2");
    let odd = edited(|m, modules| {
        let entry = m.tensors.get_mut(&format!("{}.weight", modules[3])).unwrap();
        (entry.shape, entry.bytes) = (vec![32, 11], vec![0x11; 32 * 11]);
    });
    odd.says("SHAPE").says("experts.1.gate_proj.weight");
}

#[test]
fn types_of_folders_that_this_build_lacks() {
    let o = "model.layers.0.self_attn.o_proj.weight";
    for (dtype, width) in [("I8", 1), ("U8", 1), ("BOOL", 1), ("I16", 2), ("I32", 4), ("I64", 8), ("F64", 8)] {
        let mut model = folder();
        let entry = model.tensors.get_mut(o).unwrap();
        entry.dtype = dtype;
        entry.bytes = vec![1; entry.bytes.len() / 2 * width];
        lacking(&model, &[dtype, o]);
    }
    // What is no type of the format.
    let at = tempfile::tempdir().unwrap();
    let mut model = folder();
    model.tensors.get_mut(o).unwrap().dtype = "QQ";
    of("verify", &written(&model, at.path()), &["file"]).exits(2);
}

#[test]
fn tokenizers_that_this_build_lacks() {
    let at = tempfile::tempdir().unwrap();
    let with = |key: &str, name: &str| {
        nano().set(&format!("tokenizer.ggml.{key}"), Value::Str(name.into())).write(at.path(), "model.gguf")
    };
    let known = [("pre", "gpt-2"), ("pre", "llama-bpe"), ("pre", "qwen2"), ("pre", "deepseek-v3"), ("model", "llama")];
    for (key, name) in known.into_iter().chain([("model", "bert"), ("model", "t5")]) {
        let model = with(key, name);
        let found = of("verify", &model, &["tokenizer"]).exits(3);
        found.says("UNMEASURED").says(&format!("tokenizer.ggml.{key} \"{name}\" is known")).silent_on("DIVERGENT");
        let refused = of("generate", &model, &["Genesis 1:1"]).exits(3);
        assert!(refused.stderr.contains(name), "{}", refused.stderr);
    }
    // Files of other families have no merges.
    let spm = nano().set("tokenizer.ggml.model", Value::Str("llama".into())).unset("tokenizer.ggml.merges");
    of("verify", &spm.write(at.path(), "model.gguf"), &["tokenizer"]).exits(3).says("UNMEASURED");
    for (key, name) in [("pre", "frobnicate"), ("pre", "gpt2"), ("model", "lama")] {
        let model = with(key, name);
        of("verify", &model, &["tokenizer"]).exits(1).says("DIVERGENT").says(name);
        of("generate", &model, &["Genesis 1:1"]).exits(2);
    }
}

#[test]
fn steps_of_tokenizer_json_that_this_build_lacks() {
    let at = tempfile::tempdir().unwrap();
    let path = written(&folder(), at.path());
    let text = std::fs::read(crate::common::golden("../tokenizer/tok/tokenizer.json")).unwrap();
    let whole: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let with = |edit: &dyn Fn(&mut serde_json::Value)| {
        let mut json = whole.clone();
        edit(&mut json);
        put(at.path(), "tokenizer.json", json.to_string().as_bytes());
        of("verify", &path, &["tokenizer"])
    };
    let normalizer = |value: serde_json::Value| with(&|json| json["normalizer"] = value.clone());
    for kind in ["NFC", "Lowercase"] {
        normalizer(serde_json::json!({"type": kind})).exits(3).says("UNMEASURED").says(kind).silent_on("DIVERGENT");
    }
    let steps = [serde_json::json!({"type": "NFD"}), serde_json::json!({"type": "StripAccents"})];
    normalizer(serde_json::json!({"type": "Sequence", "normalizers": steps})).exits(3).says("UNMEASURED");
    let regex = |json: &mut serde_json::Value| {
        json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "\\p{L}+|[^\\p{L}]+".into();
    };
    with(&regex).exits(3).says("UNMEASURED").says("pre_tokenizer");
    of("generate", &path, &["Genesis 1:1"]).exits(3);
    with(&|json| json["model"]["type"] = "Unigram".into()).exits(3).says("Unigram");
    // What nobody knows, and the file as it is, which has more tokens than this folder's embedding.
    normalizer(serde_json::json!({"type": "Frob"})).exits(1).says("Frob");
    with(&|json| json["pre_tokenizer"] = serde_json::json!({"type": "Frob"})).exits(1).says("Frob");
    with(&|_| {}).silent_on("UNMEASURED");
    // A damaged file is neither lacked nor wrong, as everywhere.
    put(at.path(), "tokenizer.json", &text[..text.len() / 2]);
    let refused = of("verify", &path, &["tokenizer"]).exits(2);
    assert!(refused.stderr.contains("tokenizer.json: expected JSON, found damage"), "{}", refused.stderr);
    of("verify", &path, &["file", "tokenizer"]).exits(2);
}

#[test]
fn experts_that_are_fused() {
    let at = tempfile::tempdir().unwrap();
    let mut fused = folder();
    let mlp = "model.layers.1.mlp.experts";
    for e in 0..4 {
        for part in ["gate", "up", "down"] {
            fused.take(&format!("{mlp}.{e}.{part}_proj.weight"));
        }
    }
    let entry = |shape: [usize; 3]| Entry {
        dtype: "BF16",
        shape: shape.into(),
        bytes: [0x11, 0x3d].repeat(shape.iter().product()),
    };
    fused.insert(&format!("{mlp}.gate_up_proj"), entry([4, 64, 32]));
    fused.insert(&format!("{mlp}.down_proj"), entry([4, 32, 32]));
    let path = written(&fused, at.path());
    of("inspect", &path, &[]).exits(3).says("gate and up of all experts in one tensor").says("gate_up_proj");
    for stages in [&["file"][..], &["file", "weights"], &["activations"]] {
        of("verify", &path, stages).exits(3).says("UNMEASURED").silent_on("DIVERGENT").silent_on("UNBOUND");
    }
    of("bisect", &path, &[]).exits(3);
    // One of the two is no form of anything.
    fused.take(&format!("{mlp}.down_proj"));
    of("verify", &written(&fused, at.path()), &["file"]).exits(1).says("MISSING");
    of("inspect", &written(&folder(), at.path()), &[]).exits(0);
    of("verify", &written(&folder(), at.path()), &["file", "weights"]).exits(0);
}

#[test]
fn statements_of_templates() {
    let at = tempfile::tempdir().unwrap();
    let key = "tokenizer.chat_template";
    let with = |word: &str| -> Model {
        let model = nano();
        let source = model.metadata.iter().find(|(k, _)| k == key).and_then(|(_, v)| v.as_str()).unwrap();
        let marked = format!("</think>{{% {word} %}}{{{{ m.content }}}}{{% end{word} %}}");
        let marked = source.replace("</think>{{ m.content }}", &marked);
        model.set(key, Value::Str(marked))
    };
    let known = with("generation").write(at.path(), "known.gguf");
    of("verify", &known, &["tokenizer"]).exits(3).says("UNMEASURED").says("\"generation\" is known");
    let refused = of("generate", &known, &["Genesis 1:1"]).exits(3);
    assert!(refused.stderr.contains("--raw"), "{}", refused.stderr);
    of("generate", &known, &["--raw", "-n", "2", "Genesis 1:1"]).exits(0);
    let unknown = with("narration").write(at.path(), "unknown.gguf");
    of("verify", &unknown, &["tokenizer"]).exits(1).says("narration");
    of("generate", &unknown, &["Genesis 1:1"]).exits(2);
}
