//! What the parts of the project do not know. ARCHITECTURE.md states these rules; this keeps them true.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The rooms of `src/` in layers, lowest first. A room knows those of lower layers only: the rooms of one layer do not
/// know each other, and no circle leads through two rooms.
const LAYERS: [&[&str]; 10] = [
    &["quant", "tokenize", "comm", "report", "partial", "regular"],
    &["gguf"],
    &["model"],
    &["checkpoint"],
    &["shard", "probe", "device", "synth"],
    &["engine"],
    &["faults", "serve"],
    &["doctor", "verify"],
    &["diagnose"],
    &["cli"],
];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Rust sources below a folder of the project, with what stands before their tests.
fn sources(folder: &str) -> Vec<(PathBuf, String)> {
    fn walk(folder: &Path, out: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, out);
            } else if path.extension().is_some_and(|e| e == "rs") {
                out.push(path);
            }
        }
    }
    let mut paths = Vec::new();
    walk(&root().join(folder), &mut paths);
    assert!(!paths.is_empty(), "{folder} holds no sources");
    let read = |p: PathBuf| {
        let text = std::fs::read_to_string(&p).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap().to_string();
        let code: String =
            code.lines().filter(|l| !l.trim_start().starts_with("//")).map(|l| format!("{l}\n")).collect();
        (p, code)
    };
    paths.into_iter().map(read).collect()
}

fn assert_absent(folder: &str, words: &[&str]) {
    for (path, code) in sources(folder) {
        for word in words {
            assert!(!code.contains(word), "{} must not know {word}", path.display());
        }
    }
}

/// The names under [dependencies] of a manifest.
fn dependencies(manifest: &str) -> Vec<String> {
    let text = std::fs::read_to_string(root().join(manifest)).unwrap();
    let section = text.split("\n[dependencies]\n").nth(1).unwrap_or_default();
    let lines = section.lines().take_while(|l| !l.starts_with('['));
    let name = |l: &str| l.split(['=', '.', ' ']).next().unwrap_or_default().to_string();
    lines.filter(|l| !l.trim().is_empty() && !l.starts_with('#')).map(name).collect()
}

#[test]
fn the_reference_depends_on_nothing_that_it_judges() {
    assert_eq!(dependencies("reference/Cargo.toml"), ["half", "ndarray"]);
    assert!(!std::fs::read_to_string(root().join("reference/Cargo.toml")).unwrap().contains("dev-dependencies"));
    assert_absent("reference/src", &["lockstep::", "serde_json", "memmap"]);
}

#[test]
fn kernels_know_no_cuda_binding() {
    assert_eq!(dependencies("kernels/Cargo.toml"), [""; 0]);
}

/// The modules that lead from the root of the crate to a file of `src/`.
fn modules(path: &Path) -> Vec<String> {
    let path = path.strip_prefix(root().join("src")).unwrap().with_extension("");
    path.iter().map(|m| m.to_str().unwrap().to_string()).filter(|m| m != "mod").collect()
}

#[test]
fn imports_go_down_only() {
    let mut rooms = BTreeSet::new();
    for (path, code) in sources("src") {
        let modules = modules(&path);
        let room = &modules[0];
        if ["lib", "main"].contains(&room.as_str()) {
            continue;
        }
        let layer = |room: &str| LAYERS.iter().position(|rooms| rooms.contains(&room));
        let text = std::fs::read_to_string(&path).unwrap();
        for name in text.split("crate::").skip(1).map(|t| t.split(|c: char| !c.is_alphanumeric() && c != '_').next()) {
            let name = name.unwrap();
            assert!(name == room || layer(name) < layer(room), "{} must not know crate::{name}", path.display());
            assert!(layer(name).is_some(), "{}: `crate::{name}` names no room", path.display());
        }
        let over_the_root = "super::".repeat(modules.len());
        assert!(!code.contains(&over_the_root), "{} goes over the root of the crate", path.display());
        rooms.insert(room.clone());
    }
    let mut ordered = LAYERS.concat();
    ordered.sort_unstable();
    assert_eq!(ordered, Vec::from_iter(rooms), "every room has one place");
}

#[test]
fn a_family_of_models_has_one_file_in_the_model_and_one_in_the_engine() {
    for (path, _) in sources("src/engine/arch") {
        match &modules(&path)[2..] {
            [] => {}
            [family] => assert!(root().join(format!("src/model/{family}.rs")).exists(), "{family} has no keys"),
            deeper => panic!("{deeper:?} is no family"),
        }
    }
    let knowing = |words: &[&str]| -> BTreeSet<Vec<String>> {
        let knows = |(path, code): (PathBuf, String)| words.iter().any(|w| code.contains(w)).then(|| modules(&path));
        sources("src").into_iter().filter_map(knows).collect()
    };
    assert_eq!(Vec::from_iter(knowing(&["glm-dsa", "glm_moe_dsa"])), [["model", "glm_dsa"]]);
    for modules in knowing(&["GlmDsa", "arch::glm_dsa"]) {
        assert!(modules.starts_with(&["engine".into(), "arch".into()]), "{modules:?} must not know a family's program");
    }
}

#[test]
fn the_engine_knows_neither_the_reference_nor_the_checks_nor_faults() {
    let words =
        ["lockstep_reference", "crate::verify", "crate::diagnose", "crate::cli", "crate::faults", "Faulty", "inject"];
    for folder in ["src/engine", "src/device", "src/comm", "src/probe", "src/shard", "src/model", "src/quant"] {
        assert_absent(folder, &words);
    }
    assert_absent("src/engine", &["tokio", "serde_json", "Json", "llguidance", "hyper"]);
}

#[test]
fn serving_knows_no_checks() {
    assert_absent("src/serve", &["crate::verify", "crate::diagnose", "crate::cli", "crate::faults"]);
}

#[test]
fn errors_are_typed() {
    for folder in ["src", "kernels/src", "reference/src"] {
        assert_absent(folder, &["anyhow", "Box<dyn std::error::Error", "Box<dyn Error"]);
    }
}

#[test]
fn there_is_no_unwrap_outside_tests() {
    for folder in ["src", "kernels/src", "reference/src"] {
        for (path, code) in sources(folder) {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if !name.ends_with("_tests.rs") && !name.ends_with("tests.rs") {
                assert!(!code.contains(".unwrap()") && !code.contains(".expect("), "{}", path.display());
            }
        }
    }
}
