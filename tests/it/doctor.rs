//! `lockstep doctor` as a user runs it on a machine without a GPU; with one, the same commands check it.

use crate::common::{Run, golden, lockstep, run};
use serde_json::Value as Json;

fn doctor(args: &[&str]) -> Run {
    run(lockstep().arg("doctor").args(args))
}

fn has_gpu() -> bool {
    std::path::Path::new("/proc/driver/nvidia/version").exists()
}

#[test]
fn a_machine_without_gpus_is_described_and_says_why_they_are_not_checked() {
    if has_gpu() {
        return;
    }
    let run = doctor(&[]).exits(0);
    run.says("/dev/shm").says("main memory").says("GPUs").says("N/A").says("verdict: ");
    let json: Json = serde_json::from_str(&doctor(&["--json", "--quick"]).exits(0).stdout).expect("JSON");
    assert_eq!((&json["exit"], &json["quick"]), (&0.into(), &true.into()));
    let check = |name: &str| {
        let checks = json["checks"].as_array().expect("checks");
        checks.iter().find(|c| c["name"] == name).unwrap_or_else(|| panic!("no {name} in {checks:?}"))
    };
    assert_eq!(check("GPUs")["verdict"], "N/A");
    let reason = check("GPUs")["detail"].as_str().expect("a reason");
    assert!(reason.contains("driver") || reason.contains("feature cuda"), "{reason}");
    assert!(check("main memory")["data"]["bytes"].as_u64().is_some_and(|b| b > 1 << 20));
    let shared = &check("shared memory")["data"];
    assert!(shared["free_bytes"].as_u64() <= shared["bytes"].as_u64());
}

#[test]
#[cfg(feature = "cuda")]
fn what_is_missing_is_named_with_how_to_get_it() {
    if has_gpu() {
        return;
    }
    let nowhere = tempfile::tempdir().expect("a folder");
    let run = run(lockstep().args(["doctor"]).env("LD_LIBRARY_PATH", nowhere.path())).exits(0);
    for word in ["libnvrtc.so", "lockstep kernels build", "libnccl.so.2", "kernel cache"] {
        run.says(word);
    }
}

#[test]
fn gpus_that_were_asked_for_and_are_not_there_are_no_pass() {
    if has_gpu() {
        return;
    }
    for device in ["cuda", "cuda:0,1"] {
        let run = doctor(&["--device", device]).exits(2);
        assert!(run.stderr.contains("--device cuda"), "{}", run.stderr);
        run.says("main memory").says("none is checked").says("no GPU was checked");
        let json: Json = serde_json::from_str(&doctor(&["--device", device, "--json"]).exits(2).stdout).expect("JSON");
        assert_eq!(json["exit"], 2);
    }
    assert!(doctor(&["--device", "gpu"]).exits(2).stderr.contains("cuda:0,1"));
}

#[test]
fn the_cpu_has_no_links() {
    doctor(&["--device", "cpu"]).exits(0).says("--device cpu").says("N/A");
    let verify = run(lockstep().args(["verify", "host", "-m"]).arg(golden("glm5-nano-Q4_K_M.gguf"))).exits(3);
    verify.says("the ranks are CPU threads");
}

#[test]
#[cfg(feature = "cuda")]
fn libraries_without_the_functions_are_named() {
    use std::process::Command;

    let folder = tempfile::tempdir().expect("a folder");
    let source = folder.path().join("empty.rs");
    std::fs::write(&source, "").expect("written");
    let empty = |name: &str| {
        let library = folder.path().join(name);
        let mut rustc = Command::new("rustc");
        rustc.args(["--crate-type", "cdylib", "--crate-name", "empty", "-o"]).arg(&library).arg(&source);
        assert!(rustc.status().expect("rustc runs").success());
    };
    let with = |args: &[&str]| run(lockstep().args(args).env("LD_LIBRARY_PATH", folder.path())).exits(2);
    empty("libnvrtc.so");
    let cache = folder.path().join("cubins");
    let cache = cache.to_str().expect("UTF-8");
    let build = with(&["kernels", "build", "--arch", "sm_90a", "--cache", cache]);
    assert!(build.stderr.contains("the libnvrtc.so that was loaded lacks the function nvrtc"), "{}", build.stderr);
    let said = |bytes: &[u8], words: &[&str]| {
        std::fs::write(folder.path().join("libcuda.so"), bytes).expect("written");
        let doctor = run(lockstep().args(["doctor", "--json"]).env("LD_LIBRARY_PATH", folder.path()));
        words.iter().for_each(|word| assert!(doctor.stdout.contains(word), "{}", doctor.stdout));
    };
    std::fs::remove_file(folder.path().join("libnvrtc.so")).expect("there");
    said(b"no library", &["libcuda.so cannot be loaded", "file too short"]);
    empty("libcuda.so");
    for args in [&["doctor", "--device", "cuda"][..], &["bench", "--device", "cuda"]] {
        let run = with(args);
        let named = run.stderr.contains("the libcuda.so that was loaded lacks the function cuDriverGetVersion");
        assert!(named && run.stdout.is_empty(), "{}", run.stderr);
    }
}
