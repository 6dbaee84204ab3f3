//! Pipes in the place of files: nobody writes to them, and a reader would wait for ever.

use std::path::Path;
use std::process::Command;

use crate::common::{PICO, golden, lockstep, run};

fn pipe(at: &Path) {
    let _ = std::fs::remove_file(at);
    assert!(Command::new("mkfifo").arg(at).status().expect("mkfifo runs").success());
}

#[test]
fn a_pipe_in_a_dump_is_refused_and_a_link_is_read() {
    let dir = tempfile::tempdir().expect("a folder");
    let dump = dir.path().join("dump");
    run(lockstep().args(["dump", "--layers", "0", "--ids", "5,6,7,8", "-m"]).arg(golden(PICO)).arg("--out").arg(&dump))
        .exits(0);
    let judged = || run(lockstep().args(["verify", "activations", "-m"]).arg(golden(PICO)).arg("--target").arg(&dump));
    let whole = judged();
    for name in ["dump.json", "rank0.safetensors"] {
        let (file, kept) = (dump.join(name), dir.path().join(name));
        std::fs::rename(&file, &kept).expect("moves");
        pipe(&file);
        assert!(judged().exits(2).stderr.contains("regular file"), "{name}");
        std::fs::remove_file(&file).expect("goes");
        std::os::unix::fs::symlink(&kept, &file).expect("a link");
        assert_eq!(judged().code, whole.code, "{name}");
    }
}

#[test]
fn a_pipe_of_asks_is_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    let asks = dir.path().join("asks.json");
    pipe(&asks);
    let refused = run(lockstep().args(["verify", "logits", "-m"]).arg(golden(PICO)).arg("--asks").arg(&asks)).exits(2);
    assert!(refused.stderr.contains("regular file"), "{}", refused.stderr);
}
