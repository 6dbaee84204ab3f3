//! The gate: what is wrong is not served, and what was certified is known again.

use std::sync::Arc;

use lockstep::cli::CliError;
use lockstep::cli::serve::gate::{Asked, Passed, run};
use lockstep::cli::serve::preflight::Room;
use lockstep::cli::serve::systemd::Told;
use lockstep::engine::{Attention, CpuBackend, Engines, Options};
use lockstep::faults::decorate::{Decorations, FaultyEngines};
use lockstep::faults::{Injection, Target, inject};

use crate::common::running::open;
use crate::common::{golden, lockstep as lockstep_binary};

const MODEL: &str = "pico-Q4_K_M-split-00001-of-00004.gguf";

fn gate(engines: Arc<dyn Engines>, holds_two: bool) -> Result<Passed, CliError> {
    let checkpoint = open(MODEL);
    let options = Options { attention: Attention::Dsa, chunk: 512, cache_tokens: 4096, sequences: 8 };
    let engine = engines.engine(&checkpoint, 1, options).unwrap();
    run(Asked { checkpoint, engines, engine, untrained: true, room: Room { holds_two } }, &Told::new())
}

#[test]
fn a_sound_model_passes_with_one_engine_alone() {
    let passed = gate(Arc::new(CpuBackend::default()), false).unwrap();
    assert_eq!(passed.verification["verified"], true);
    let stages = passed.verification["stages"].as_array().unwrap();
    assert_eq!(stages.len(), 9, "all are told");
    assert_eq!(passed.engine.options().sequences, 8, "the engine that was checked is the one that serves");
}

#[test]
fn an_engine_that_computes_otherwise_does_not_pass() {
    let checkpoint = open(MODEL);
    for fault in [
        "OP_NOISE@layers.1.attn.q_a",
        "KV_B_LAYOUT@blk.0.attn_k_b",
        "NAME_MAP@token_embd",
        "DSA_INACTIVE@layers.0.attn.latent",
        "CONFIG_VALUE@rms_eps=1e-6",
    ] {
        let mut faults = Decorations::default();
        let target = Target { checkpoint: &checkpoint, tp: 1, attention: Attention::Dsa };
        inject(&target, &Injection::parse(fault).unwrap(), &mut faults).unwrap();
        for holds_two in [true, false] {
            let refused = gate(Arc::new(FaultyEngines(CpuBackend::default(), faults.clone())), holds_two).err();
            let text = refused.unwrap_or_else(|| panic!("{fault} passed")).to_string();
            assert!(text.contains("not served: stage"), "{text}");
        }
    }
}

/// Runs the program and returns its exit code and what it said.
fn lockstep(args: &[&str]) -> (i32, String) {
    let out = lockstep_binary().args(args).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned() + &String::from_utf8_lossy(&out.stdout);
    (out.status.code().unwrap_or(-1), said)
}

/// What can be known before loading is said at once, with the code that nobody starts again for.
#[test]
fn what_cannot_be_served_is_refused_at_once() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let (code, said) = lockstep(&["serve", "--port", &port]);
    assert!(code == 78 && said.contains("held by process"), "{code}: {said}");
    let free = |args: &[&str]| {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
        lockstep(&[&["serve", "--port", &port][..], args].concat())
    };
    let model = golden("glm5-nano-Q4_K_M.gguf").display().to_string();
    let (code, said) = free(&["-m", &model, "--tp", "3"]);
    assert!(code == 78 && said.contains("1, 2, 4"), "{code}: {said}");
    let (code, said) = free(&["-m", &model, "--cache-tokens", "900000000000"]);
    assert!(code == 78 && said.contains("--cache-tokens"), "{code}: {said}");
    let (code, said) = free(&["-m", "/nowhere.gguf"]);
    assert!(code == 78 && said.contains("/nowhere.gguf"), "{code}: {said}");
    let (code, _) = free(&["--temperature", "7"]);
    assert_eq!(code, 2, "a wrong flag");
}

#[test]
fn a_unit_holds_the_flags_of_the_run() {
    let (code, unit) = lockstep(&["serve", "--print-unit", "--drain", "60", "-m", "/models/a b%.gguf"]);
    assert_eq!(code, 0);
    for line in ["Type=notify", "RestartPreventExitStatus=2 78", "TimeoutStopSec=75", "KillMode=mixed"] {
        assert!(unit.lines().any(|l| l == line), "{line}: {unit}");
    }
    assert!(unit.contains("serve --drain 60 -m \"/models/a b%%.gguf\"\n"), "{unit}");
}
