//! What reaches a terminal, a pipe and a machine: nothing raw from files, tables that hold, documents that follow their
//! schemas, and an orderly end when a run is stopped.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use lockstep::gguf::value::{Array, Value};
use proptest::prelude::*;
use serde_json::Value as Json;

use crate::common::schema::violations;
use crate::common::{GLM5_NANO, Model, PICO, Run, golden, lockstep, run, tiny};

fn schema(name: &str) -> Json {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/schemas").join(name).with_extension("json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn follows(name: &str, document: &str) -> Json {
    let found: Json = serde_json::from_str(document).unwrap_or_else(|e| panic!("{e}: {document}"));
    assert_eq!(violations(&schema(name), &found), Vec::<String>::new(), "{name}");
    found
}

/// `lockstep COMMAND -m MODEL ARGS`, where nothing of the environment decides how it looks.
fn on(model: &str, command: &str, args: &[&str]) -> Command {
    let mut all = plain();
    all.arg(command).arg("-m").arg(golden(model)).args(args);
    all
}

fn nano(command: &str, args: &[&str]) -> Command {
    on(GLM5_NANO, command, args)
}

fn plain() -> Command {
    let mut command = lockstep();
    command.env_remove("COLUMNS").env_remove("NO_COLOR");
    command
}

// ---- documents

#[test]
fn documents_follow_their_schemas() {
    let json = |command: &str, args: &[&str], code| run(nano(command, args).arg("--json")).exits(code).stdout;
    let verify = follows("verify", &json("verify", &["file", "tokenizer", "weights", "--tp", "2"], 0));
    assert_eq!((&verify["exit"], &verify["incomplete"]), (&0.into(), &Json::Null));
    assert_eq!(verify["stages"][0]["cost"], Json::Null);
    let sense = follows("verify", &json("verify", &["sense"], 0));
    assert!(sense["stages"][0]["cost"]["token_layers"].as_u64().unwrap() > 1000);
    let faulty = ["weights", "activations", "--layers", "1", "--inject", "REDUCE_MISSED@layers.1.attn.out:rank=1"];
    let found = follows("verify", &json("verify", &[&faulty[..], &["--tp", "2"]].concat(), 1));
    let checks = found["stages"][1]["checks"].as_array().unwrap();
    let bad = checks.iter().find(|c| c["verdict"] == "DIVERGENT").unwrap();
    assert_eq!((&bad["data"]["layer"], &bad["data"]["operation"]), (&1.into(), &"attn.out".into()));
    let named = ["--tp", "2", "--layers", "1", "--inject", "REDUCE_MISSED@layers.1.attn.out:rank=1"];
    let found = follows("bisect", &json("bisect", &named, 1));
    assert_eq!((&found["culprit"]["kind"], &found["culprit"]["layer"]), (&"REDUCE_MISSED".into(), &1.into()));
    let unknown = ["--tp", "2", "--layers", "1", "--inject", "OP_NOISE@layers.1.attn.out"];
    let found = follows("bisect", &json("bisect", &unknown, 1));
    assert!(found["culprit"]["explanation"].is_null() && found["culprit"]["kind"] == "UNKNOWN");
    follows("bench", &json("bench", &["--prompt", "8", "--steps", "2", "--repeat", "2"], 0));
    follows("doctor", &run(plain().args(["doctor", "--device", "cpu", "--json"])).exits(0).stdout);
    assert!(!violations(&schema("doctor"), &found).is_empty(), "another command's document is refused");
}

#[test]
fn failures_are_documents_too() {
    let wrong: [&[&str]; 4] = [
        &["inspect", "-m", "/no/such.gguf", "--json"],
        &["verify", "-m", "/no/such.gguf", "--json"],
        &["bench", "--json", "--no-such-flag"],
        &["generate", "--json", "x", "-m", "/no/such.gguf"],
    ];
    for args in wrong {
        let run = run(plain().args(args)).exits(2);
        let document: Json = serde_json::from_str(&run.stdout).unwrap();
        assert_eq!(document["error"]["exit"], 2, "{args:?}");
        assert!(!document["error"]["message"].as_str().unwrap().is_empty() && !run.stderr.is_empty(), "{args:?}");
    }
}

// ---- what is printed

/// Characters that steer a terminal or the order of what it shows.
fn steers(c: char) -> bool {
    c.is_control() && c != '\n' && c != '\t'
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn assert_safe(run: &Run, what: &str) {
    for (name, text) in [("stdout", &run.stdout), ("stderr", &run.stderr)] {
        assert!(!text.contains(steers), "{what}: {name} {text:?}");
        let forged = text.lines().find(|l| *l == "verdict: FORGED");
        assert_eq!(forged, None, "{what}: {name} {text}");
    }
}

/// A model that says `text` wherever it can, in a file whose name says so too.
fn hostile(folder: &Path, text: &str) -> std::path::PathBuf {
    let mut model = Model::read(&golden(GLM5_NANO)).set("general.name", Value::Str(text.into()));
    for (key, value) in &mut model.metadata {
        match (key.as_str(), value) {
            ("tokenizer.ggml.tokens", Value::Array(Array::Str(tokens))) => tokens[300] = text.into(),
            ("tokenizer.chat_template", value) => *value = Value::Str(format!("{{{{ raise_exception({text:?}) }}}}")),
            _ => {}
        }
    }
    let model = model.rename("blk.1.attn_q_a.weight", &format!("blk.1.{text}")).add(
        text,
        &[32],
        lockstep::quant::QuantType::F32,
    );
    // A file name holds neither.
    model.write(folder, &format!("{}.gguf", text.replace(['/', '\0'], "_")))
}

#[test]
fn nothing_from_a_file_reaches_the_terminal_raw() {
    let folder = tempfile::tempdir().unwrap();
    let text = "\u{1b}[2J\u{1b}]0;x\u{7}\u{9b}31m\r\nverdict: FORGED\n\u{202e}\u{8}";
    let path = hostile(folder.path(), text);
    let out = folder.path().join("out");
    let out = out.to_str().unwrap();
    let commands: [&[&str]; 9] = [
        &["inspect"],
        &["inspect", "--all", "--tp", "2"],
        &["verify", "file", "tokenizer", "weights"],
        &["verify", "--all", "file"],
        &["bisect"],
        &["generate", "x"],
        &["generate", "x", "--raw"],
        &["dump", "--out", out],
        &["bench"],
    ];
    for args in commands {
        for json in [&[][..], &["--json"]] {
            let run = run(plain().args(args).args(json).arg("-m").arg(&path));
            assert_safe(&run, &format!("{args:?} {json:?}"));
        }
    }
    for args in [["inspect", "-m"], ["verify", "--inject"], ["doctor", "--device"], ["synth", "--out"]] {
        assert_safe(&run(plain().args(args).arg(format!("/no/{text}"))), &format!("{args:?}"));
    }
    // The same text in a model that runs: its name and a token that it may say.
    let runs = Model::read(&golden(GLM5_NANO))
        .set("general.name", Value::Str(text.into()))
        .write(folder.path(), "\u{1b}[1m\n.gguf");
    for args in [
        &["verify", "file", "weights"][..],
        &["bisect", "--layers", "0"],
        &["generate", "Genesis 1:1"],
        &["bench", "--steps", "2"],
    ] {
        assert_safe(&run(plain().args(args).arg("-m").arg(&runs)).exits(0), &format!("{args:?}"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn no_name_steers_a_terminal(name in r"[\x00-\x1f\x7f-\x9fa-z\u{200e}-\u{202e}\u{2066}-\u{2069}\n]{1,24}") {
        let folder = tempfile::tempdir().unwrap();
        let model = tiny().set("general.name", Value::Str(name.clone()));
        let path = model.rename("blk.0.attn_q_a.weight", &name).write(folder.path(), "m.gguf");
        for args in [&["inspect"][..], &["inspect", "--json"], &["verify", "file"], &["verify", "file", "--json"]] {
            assert_safe(&run(plain().args(args).arg("-m").arg(&path)), &format!("{args:?} {name:?}"));
        }
    }
}

#[test]
fn tables_hold_from_60_columns_on() {
    let commands: [&[&str]; 4] = [
        &["verify", "file", "tokenizer", "weights", "--tp", "2", "--all"],
        &["inspect", "--tp", "8"],
        &["bench", "--prompt", "8", "--steps", "2", "--repeat", "1"],
        &["bisect", "--layers", "1", "--tp", "2", "--inject", "REDUCE_MISSED@layers.1.attn.out:rank=1"],
    ];
    for args in commands {
        for columns in [60, 80, 120] {
            let run = run(on(PICO, args[0], &args[1..]).env("COLUMNS", columns.to_string()));
            assert!(run.stdout.lines().count() > 5);
            for line in run.stdout.lines() {
                let width = line.chars().count();
                // A path is never broken.
                let whole = line.split_whitespace().any(|word| word.starts_with('/') && word.len() + 6 > columns);
                assert!(width <= columns || whole, "{args:?} at {columns}: {width} columns: {line}");
                assert_eq!(line.trim_end(), line, "{args:?} at {columns}: trailing spaces");
            }
        }
    }
}

#[test]
fn quiet_silences_notes_and_progress_but_no_error() {
    let loud = run(&mut nano("generate", &["Genesis 1:1"])).exits(0);
    assert!(loud.stderr.starts_with("lockstep: note: "), "{}", loud.stderr);
    let quiet = run(&mut nano("generate", &["Genesis 1:1", "-q"])).exits(0);
    assert_eq!((quiet.stderr.as_str(), quiet.stdout), ("", loud.stdout));
    assert!(run(plain().args(["-q", "inspect", "-m", "/no/such.gguf"])).exits(2).stderr.contains("such.gguf"));
}

// ---- the end

/// Starts `command`, sends `signal` after `wait`, and returns how it ended; `None` if the signal came before its first
/// line ran, so that the system ended it.
fn stopped(command: &mut Command, signal: &str, wait: Duration) -> Option<Run> {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(wait);
    let sent = Command::new("kill").args([signal, &child.id().to_string()]).stderr(Stdio::null()).status();
    assert!(sent.is_ok());
    let began = Instant::now();
    let output = child.wait_with_output().unwrap();
    assert!(began.elapsed() < Duration::from_secs(60), "it went on for {:?}", began.elapsed());
    if output.status.signal().is_some() {
        assert!(wait < Duration::from_secs(1) && output.stdout.is_empty(), "it ends by itself, with a code");
        return None;
    }
    Some(Run::from(output))
}

/// Ten moments spread over the first seconds.
fn moments() -> impl Iterator<Item = (usize, Duration)> {
    (0..10).map(|i| (i, Duration::from_millis(40 + 37 * (i * i) as u64)))
}

#[test]
fn a_stopped_run_keeps_what_it_found() {
    for (i, wait) in moments() {
        let (signal, code) = [("-INT", 130), ("-TERM", 143)][i % 2];
        let mut command = nano("verify", &["--tp", "2", "--json"]);
        let Some(run) = stopped(&mut command, signal, wait) else { continue };
        let run = run.exits(code);
        let found: Json = serde_json::from_str(&run.stdout).unwrap_or_else(|e| panic!("{e}: {}", run.stdout));
        if found.get("error").is_some() {
            assert_eq!(found["error"]["exit"], code, "nothing was found yet");
            continue;
        }
        assert_eq!(violations(&schema("verify"), &found), Vec::<String>::new());
        assert_eq!((&found["exit"], &found["verdict"]), (&code.into(), &"UNMEASURED".into()), "no pass");
        assert!(found["incomplete"].as_str().unwrap().contains("SIG"));
        assert!(found["stages"].as_array().unwrap().len() < 8);
    }
    let text = stopped(&mut nano("verify", &["--tp", "2"]), "-INT", Duration::from_secs(2));
    let text = text.expect("it had begun").exits(130);
    text.says("verdict: UNMEASURED, INCOMPLETE: stopped by SIGINT").says("MATCH");
}

#[test]
fn a_stopped_run_leaves_no_file() {
    for (i, wait) in moments() {
        let folder = tempfile::tempdir().unwrap();
        let (signal, code) = [("-INT", 130), ("-TERM", 143)][i % 2];
        let out = folder.path().join("out");
        for args in [&["dump", "--tp", "4"][..], &["synth", "--layers", "1"]] {
            let mut command = plain();
            command.args(args).arg("--out").arg(&out);
            if args[0] == "dump" {
                command.arg("-m").arg(golden(GLM5_NANO));
            }
            let run = stopped(&mut command, signal, wait);
            let ended = run.as_ref().and_then(|run| run.code);
            let whole = ended == Some(0);
            assert!(run.is_none() || whole || ended == Some(code), "{args:?}: {ended:?}");
            let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|f| f.unwrap().file_name()).collect();
            // What was whole when the signal came may stay: it is moved to its place at once.
            assert!(left.iter().all(|name| name == "out") && left.len() >= usize::from(whole), "{args:?}: {left:?}");
            if !left.is_empty() {
                let _ = std::fs::remove_dir_all(&out).or_else(|_| std::fs::remove_file(&out));
            }
        }
    }
}

/// A file that may not grow and a disk that is full are errors with a name, and leave nothing.
#[test]
fn what_cannot_be_written_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let binary = lockstep();
    let program = binary.get_program().to_str().unwrap();
    let (out, model) = (folder.path().join("out"), golden(GLM5_NANO));
    for args in [
        format!("synth --small --out {}", out.display()),
        format!("dump --out {} -m {}", out.display(), model.display()),
    ] {
        let mut shell = Command::new("bash");
        shell.arg("-c").arg(format!("ulimit -f 64; exec {program} {args}"));
        let run = run(&mut shell).exits(2);
        assert!(run.stderr.contains("out") && run.stderr.contains("too large"), "{}", run.stderr);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "{args}");
    }
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = nano("inspect", &[]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot write the output"));
}
