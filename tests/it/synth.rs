//! `lockstep synth`: what it makes is a whole model that the other commands take for one.

use std::path::{Path, PathBuf};

use crate::common::{Run, inspect, lockstep, run};

fn synth(out: &Path, args: &[&str]) -> Run {
    run(lockstep().arg("synth").arg("--out").arg(out).args(args))
}

/// A dense and an expert layer, top-k far below the prompt.
const SMALL: [&str; 5] = ["--small", "--layers", "2", "--index-top-k", "8"];

fn small(folder: &Path, name: &str, more: &[&str]) -> PathBuf {
    let path = folder.join(name);
    synth(&path, &[&SMALL[..], more].concat()).exits(0);
    path
}

fn files(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[test]
fn everything_is_bound_at_every_degree() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    synth(&path, &["--small", "--layers", "3"]).exits(0);
    assert!(std::fs::metadata(&path).unwrap().len() < 40 << 20);
    for tp in ["1", "2", "4", "8"] {
        let run = inspect(&path, &["--tp", tp, "--strict-blocks"]).exits(0);
        // 18 tensors of a dense layer, 23 of each other, 3 of the model.
        run.says(
            "67 tensors: 67 bound, 0 known-unused, 0 UNBOUND; 0 parameters without a source, 0 of the wrong shape.",
        );
        run.silent_on("row-covering");
    }
    let all: serde_json::Value = serde_json::from_str(&inspect(&path, &["--json", "--all"]).exits(0).stdout).unwrap();
    let of = |name: &str| {
        let rows = all["plan"]["parameters"].as_array().unwrap();
        let row = rows.iter().find(|p| p["parameter"] == name).unwrap_or_else(|| panic!("no {name}"));
        row["type"].as_str().unwrap().to_string()
    };
    for (name, ty) in [
        ("token_embd", "Q4_K"),
        ("output", "Q6_K"),
        ("blk.0.ffn_down", "Q4_K"),
        ("blk.1.ffn_down_exps", "Q6_K"),
        ("blk.1.ffn_down_shexp", "Q6_K"),
        ("blk.2.ffn_down_exps", "Q4_K"),
        ("blk.1.ffn_gate_exps", "Q4_K"),
        ("blk.0.attn_k_b", "Q5_0"),
        ("blk.0.attn_v_b", "Q4_K"),
        ("blk.1.indexer.proj", "F32"),
        ("blk.1.ffn_gate_inp", "F32"),
        ("blk.1.attn_norm", "F32"),
    ] {
        assert_eq!(of(name), ty, "{name}");
    }
}

#[test]
fn the_seed_decides_every_byte() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = |name: &str, more: &[&str]| std::fs::read(small(folder.path(), name, more)).unwrap();
    let first = bytes("a", &[]);
    let alone = {
        let path = folder.path().join("b");
        run(lockstep().env("RAYON_NUM_THREADS", "1").arg("synth").arg("--out").arg(&path).args(SMALL)).exits(0);
        std::fs::read(path).unwrap()
    };
    assert!(first == alone, "the number of threads decides, too");
    let other = bytes("c", &["--seed", "1"]);
    assert_eq!(first.len(), other.len());
    let same = first.iter().zip(&other).filter(|(a, b)| a == b).count();
    // The header, and of random bytes one in 256; scales and F32 exponents agree more often.
    assert!(same < first.len() / 8, "{same} of {} bytes are the same", first.len());
}

#[test]
fn the_checks_pass() {
    let folder = tempfile::tempdir().unwrap();
    let path = small(folder.path(), "m.gguf", &[]);
    for (tp, last) in [("1", "activations"), ("2", "logits")] {
        let stages = ["verify", "file", "tokenizer", "weights", last, "--strict", "--tp", tp, "-m"];
        let run = run(lockstep().args(stages).arg(&path)).exits(0);
        run.says("verdict: MATCH").says("64 tokens of built-in text");
    }
}

/// Among them those whose blocks do not divide the rows of k_b.
#[test]
fn one_type_throughout() {
    let folder = tempfile::tempdir().unwrap();
    for ty in ["Q8_0", "Q3_K", "bf16", "IQ4_XS"] {
        let path = small(folder.path(), ty, &["--experts", "4", "--type", ty]);
        let stages = ["verify", "file", "weights", "activations", "--strict", "--rows", "2", "-m"];
        run(lockstep().args(stages).arg(&path)).exits(0).says("verdict: MATCH");
    }
}

#[test]
fn text_comes_out_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = small(folder.path(), "m.gguf", &[]);
    let run = run(lockstep().args(["generate", "hello", "-n", "24", "-m"]).arg(&path)).exits(0);
    assert!(!run.stdout.trim().is_empty());
}

#[test]
fn json_says_what_was_made() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let run = synth(&path, &["--small", "--layers", "1", "--json"]).exits(0);
    let json: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(json["path"], path.to_str().unwrap());
    assert_eq!(json["bytes"], std::fs::metadata(&path).unwrap().len());
    assert_eq!((json["layers"].as_u64(), json["tensors"].as_u64()), (Some(1), Some(21)));
    assert!(json["seconds"].as_f64().unwrap() > 0.0);
}

#[test]
fn what_is_there_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    std::fs::write(&path, "mine").unwrap();
    let refused = synth(&path, &["--small"]).exits(2);
    assert!(refused.stderr.contains("m.gguf: expected a path where nothing is yet"), "{}", refused.stderr);
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    let refused = synth(folder.path(), &["--small"]).exits(2);
    assert!(refused.stderr.contains("nothing is yet"), "{}", refused.stderr);
    assert_eq!(files(folder.path()), ["m.gguf"]);
}

#[test]
fn what_cannot_be_written_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("absent/m.gguf");
    let refused = synth(&path, &["--small"]).exits(2);
    assert!(refused.stderr.contains("absent/m.gguf.part: cannot create"), "{}", refused.stderr);
    assert!(files(folder.path()).is_empty());
}

#[test]
fn what_no_disk_holds_is_refused_before_anything_is_made_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let refused = synth(&folder.path().join("m.gguf"), &["--layers", "1023", "--experts", "16383"]).exits(2);
    assert!(refused.stderr.contains("m.gguf.part: the model takes ") && refused.stderr.contains("free there"));
    assert!(files(folder.path()).is_empty());
}

#[test]
fn a_finished_model_leaves_nothing_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    small(folder.path(), "m.gguf", &[]);
    assert_eq!(files(folder.path()), ["m.gguf"]);
}

#[test]
fn impossible_models_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    for (args, message) in [
        (&["--layers", "0"][..], "--layers"),
        (&["--layers", "2", "--dense-layers", "3"], "dense layers: expected at most the 2 layers, found 3"),
        (&["--experts", "0"], "--experts"),
        (&["--vocab", "323"], "--vocab"),
        (&["--index-top-k", "0"], "--index-top-k"),
        (&["--index-top-k", "65536"], "--index-top-k"),
        (&["--type", "Q9_K"], "--type Q9_K: expected one of F32, F16, Q4_0"),
        (&["--type", "MXFP4"], "--type MXFP4: expected one of"),
    ] {
        let refused = synth(&path, args).exits(2);
        assert!(refused.stderr.contains(message), "{args:?}: {}", refused.stderr);
        assert!(files(folder.path()).is_empty());
    }
}
