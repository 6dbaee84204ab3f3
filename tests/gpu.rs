//! The NVIDIA device as a user runs it: the binary with `--device cuda:0` on the golden models, its ranks sharing one GPU.
//! On a machine without one these tests say that they were skipped; what such a machine is told is tested there too.

#[path = "it/common/binary.rs"]
#[allow(dead_code)] // what the other tests need
mod binary;

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use binary::{GLM5_NANO, NANO52, PICO, Run, golden, lockstep, run};
use serde_json::Value as Json;

fn json(run: &Run) -> Json {
    serde_json::from_str(&run.stdout).expect("JSON and nothing else on stdout")
}

/// `lockstep COMMAND -m MODEL ARGS`.
fn with_model(command: &str, model: &str, args: &[&str]) -> Command {
    let mut all = lockstep();
    all.arg(command).arg("-m").arg(golden(model)).args(args);
    all
}

/// True if the tool itself finds a GPU; it is asked once.
fn has_gpu() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let doctor = json(&run(lockstep().args(["doctor", "--json", "--quick"])));
        let checks = doctor["checks"].as_array().expect("checks");
        checks.iter().any(|c| c["name"].as_str().is_some_and(|name| name.starts_with("GPU 0")))
    })
}

/// Says that this test was skipped, and why. The test harness keeps what a passing test prints with `eprintln!` to itself.
fn skipped(why: &str) {
    let test = std::thread::current().name().unwrap_or_default().to_string();
    let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: {why}"); // a closed stderr hears nothing
}

/// The GPU, one test at a time; None, said aloud, where there is none.
fn gpu() -> Option<MutexGuard<'static, ()>> {
    static IN_USE: Mutex<()> = Mutex::new(());
    if !has_gpu() {
        skipped("no NVIDIA GPU");
        return None;
    }
    Some(IN_USE.lock().unwrap_or_else(PoisonError::into_inner)) // a test that failed left nothing behind
}

/// Asserts that a `verify` on the GPU passed and that its stages ran and were not N/A.
fn assert_verified(model: &str, args: &[&str], stages: &[&str]) {
    let mut command = with_model("verify", model, args);
    let document = json(&run(command.args(["--device", "cuda:0", "--json"])).exits(0));
    let reports = document["stages"].as_array().expect("stages");
    for stage in stages {
        let report = reports.iter().find(|r| r["stage"] == *stage).unwrap_or_else(|| panic!("no stage {stage}"));
        assert!(report["verdict"] == "MATCH" || report["verdict"] == "DRIFT", "{stage}: {}", report["verdict"]);
        assert!(report["checks_made"].as_u64().is_some_and(|n| n > 0), "{stage} made no check");
    }
}

#[test]
fn gpu_every_kernel_is_right() {
    let Some(_gpu) = gpu() else { return };
    for model in [GLM5_NANO, NANO52] {
        assert_verified(model, &["kernels", "--tp", "8"], &["kernels"]);
    }
}

#[test]
fn gpu_every_stage_passes_at_both_degrees_and_recipes() {
    let Some(_gpu) = gpu() else { return };
    let stages = ["host", "file", "tokenizer", "weights", "activations", "invariants", "logits"];
    let named = |tp: &'static str, recipe: &'static str| [&stages[..], &["--tp", tp, "--recipe", recipe]].concat();
    for recipe in ["strict", "fast"] {
        for tp in ["1", "8"] {
            assert_verified(GLM5_NANO, &named(tp, recipe), &stages);
            assert_verified(GLM5_NANO, &["sense", "--tp", tp, "--recipe", recipe], &["sense"]);
        }
        assert_verified(NANO52, &named("4", recipe), &stages);
        assert_verified(PICO, &named("2", recipe), &stages);
    }
}

#[test]
fn gpu_every_fault_is_named() {
    let Some(_gpu) = gpu() else { return };
    for (kind, site) in [
        ("SHARD_ORDER", "blk.2.attn_qkv_a"),
        ("KV_B_LAYOUT", "blk.1.attn_k_b"),
        ("NAME_MAP", "blk.1.attn_q_a_norm"),
        ("DTYPE_REINTERPRET", "blk.2.ffn_down_exps"),
        ("DSA_INACTIVE", "layers.2.attn.latent"),
        ("SHARD_PLACEMENT", "blk.1.attn_output"),
        ("REDUCE_MISSED", "layers.1.attn.out"),
        ("CONFIG_VALUE", "rope_base=10000"),
    ] {
        let fault = format!("{kind}@{site}");
        let args = ["--device", "cuda:0", "--tp", "2", "--inject", &fault, "--json"];
        let document = json(&run(&mut with_model("bisect", GLM5_NANO, &args)).exits(1));
        assert_eq!(document["culprit"]["kind"], kind, "{document:#}");
    }
    let clean = run(&mut with_model("bisect", GLM5_NANO, &["--device", "cuda:0", "--tp", "2", "--json"])).exits(0);
    assert_eq!((&json(&clean)["verdict"], &json(&clean)["culprit"]), (&"MATCH".into(), &Json::Null));
}

#[test]
fn gpu_chat_turns_are_those_of_the_cpu_engine() {
    let Some(_gpu) = gpu() else { return };
    let asks = Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/glm5-nano/recall.json");
    let asks = asks.to_str().expect("a UTF-8 path");
    for recipe in ["strict", "fast"] {
        assert_verified(GLM5_NANO, &["logits", "--tp", "1", "--recipe", recipe, "--asks", asks], &["logits"]);
    }
}

#[test]
fn gpu_text_is_that_of_the_cpu() {
    let Some(_gpu) = gpu() else { return };
    for (tp, temperature) in [("1", "0"), ("8", "0"), ("1", "1.5"), ("8", "1.5")] {
        let generate = |device: &str| {
            let args = ["Genesis 1:1", "--tp", tp, "--temperature", temperature, "--device", device, "--json"];
            json(&run(&mut with_model("generate", GLM5_NANO, &args)).exits(0))
        };
        let (ours, theirs) = (generate("cuda:0"), generate("cpu"));
        assert_eq!((&ours["ids"], &ours["text"]), (&theirs["ids"], &theirs["text"]));
        assert_eq!(ours["device"], "cuda:0");
    }
}

#[test]
fn a_gpu_that_is_asked_for_and_not_there_is_an_error_that_says_what_to_do() {
    if has_gpu() {
        return skipped("there is a GPU");
    }
    let expected = if cfg!(feature = "cuda") { "run with --device cpu" } else { "feature cuda" };
    for (command, args) in [
        ("verify", &["--device", "cuda"][..]),
        ("verify", &["kernels", "--device", "cuda:0,1", "--tp", "2"]),
        ("bisect", &["--device", "cuda"]),
        ("generate", &["Genesis 1:1", "--device", "cuda"]),
        ("bench", &["--device", "cuda"]),
    ] {
        let run = run(&mut with_model(command, GLM5_NANO, args)).exits(2);
        assert!(run.stderr.contains(expected) && run.stdout.is_empty(), "{command}: {}", run.stderr);
    }
}

#[test]
fn the_cpu_has_one_recipe() {
    let run = run(&mut with_model("verify", GLM5_NANO, &["--device", "cpu", "--recipe", "fast"])).exits(2);
    assert!(run.stderr.contains("expected strict"), "{}", run.stderr);
}

#[cfg(feature = "cuda")]
mod kernels {
    use super::*;

    fn kernels(args: &[&str]) -> Command {
        let mut all = lockstep();
        all.arg("kernels").args(args);
        all
    }

    #[test]
    fn are_listed_without_a_driver() {
        run(&mut kernels(&["list"]))
            .exits(0)
            .says("matmul<type>")
            .says("tiles<type tiles>")
            .says("gemv_1")
            .says("sm_90a");
        let document = json(&run(&mut kernels(&["list", "--json"])).exits(0));
        let count = |key: &str| document[key].as_array().map_or(0, Vec::len);
        assert_eq!((count("archs"), count("types"), count("tiled"), count("units")), (4, 22, 2, 10));
    }

    #[test]
    fn need_nvrtc_or_a_filled_cache() {
        let cache = tempfile::tempdir().expect("a folder");
        let mut build = kernels(&["build", "--arch", "sm_90a", "--filter", "^sample$", "--json", "--cache"]);
        let run = run(build.arg(cache.path()).env("LD_LIBRARY_PATH", ""));
        if run.code == Some(0) {
            skipped("NVRTC is installed where every program finds it");
            assert!(json(&run)["nvrtc"].is_string());
            return;
        }
        let run = run.exits(2);
        let folder = cache.path().display().to_string();
        for part in ["libnvrtc.so was not found", "sample for sm_90a", "LD_LIBRARY_PATH", &folder] {
            assert!(run.stderr.contains(part), "no {part:?} in {}", run.stderr);
        }
    }

    #[test]
    fn a_filter_that_nothing_matches_builds_nothing_and_is_an_error() {
        let run = run(&mut kernels(&["build", "--filter", "^matmul<Q9_K>$"])).exits(2);
        assert!(run.stderr.contains("matmul<Q9_K>") && run.stderr.contains("kernels list"), "{}", run.stderr);
    }
}
