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
    let refused = of("inspect", &written(&packed, at.path()), &[]).exits(2);
    assert!(refused.stderr.contains("found I16"), "{}", refused.stderr);
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
