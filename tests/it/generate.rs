//! `lockstep generate` and `lockstep bench` as a user runs them.

use crate::common::{GLM5_NANO, Run, golden, lockstep, run};
use serde_json::Value as Json;

const VERSE: &str = "In the beginning God created the heaven and the earth.";

/// `lockstep COMMAND -m MODEL ARGS`.
fn with_model(command: &str, args: &[&str]) -> Run {
    run(lockstep().arg(command).arg("-m").arg(golden(GLM5_NANO)).args(args))
}

fn json(run: &Run) -> Json {
    serde_json::from_str(&run.stdout).expect("JSON and nothing else on stdout")
}

#[test]
fn a_reference_is_answered_with_its_verse() {
    for tp in ["1", "8"] {
        let run = with_model("generate", &["Genesis 1:1", "--tp", tp]).exits(0);
        assert_eq!(run.stdout, format!("{VERSE}\n"));
        assert!(run.stderr.contains("finish: stop") && run.stderr.contains(&format!("tp {tp}")), "{}", run.stderr);
    }
}

#[test]
fn json_holds_text_ids_and_how_it_was_made() {
    let document = json(&with_model("generate", &["Genesis 1:1", "--json", "--tp", "2"]).exits(0));
    assert_eq!(document["text"], VERSE);
    assert_eq!(document["finish"], "stop");
    assert_eq!((&document["tp"], &document["attention"]), (&2.into(), &"dsa".into()));
    assert!(document["ids"].as_array().is_some_and(|ids| ids.len() > 5));
    assert!(document["prompt_tokens"].as_u64().is_some_and(|n| n > 5));
}

#[test]
fn a_limit_cuts_the_text_and_says_so() {
    let document = json(&with_model("generate", &["Genesis 1:1", "--json", "-n", "3"]).exits(0));
    assert_eq!(document["finish"], "length");
    assert_eq!(document["ids"].as_array().map(Vec::len), Some(3));
    assert!(VERSE.starts_with(document["text"].as_str().expect("text")));
}

#[test]
fn raw_continues_the_text() {
    let run = with_model("generate", &["--raw", "Psalm 23:1 The LORD is my", "-n", "8"]).exits(0);
    assert!(run.stdout.starts_with(" shepherd; I shall not want"), "{:?}", run.stdout);
    // In a chat turn the same words are a question, and the answer is another.
    let chat = with_model("generate", &["Psalm 23:1 The LORD is my", "-n", "8"]).exits(0);
    assert_ne!(run.stdout, chat.stdout);
    with_model("generate", &["--raw", "--system", "x", "y"]).exits(2);
}

#[test]
fn a_seed_repeats_and_another_differs() {
    let sample = |seed: &str| {
        let sampled = ["--raw", "And it came to pass", "-n", "24", "--temperature", "1.5", "--seed", seed, "--json"];
        json(&with_model("generate", &sampled).exits(0))["ids"].clone()
    };
    let first = sample("7");
    assert_eq!(first, sample("7"));
    assert_ne!(first, sample("8"));
}

#[test]
fn what_cannot_be_run_exits_2_and_says_why() {
    let run_tp = with_model("generate", &["x", "--tp", "3"]).exits(2);
    assert!(run_tp.stderr.contains("attention heads (8)") && run_tp.stderr.contains("1, 2, 4, 8"), "{}", run_tp.stderr);
    assert!(with_model("generate", &["x", "--tp", "0"]).exits(2).stderr.contains("--tp 0"));
    assert!(with_model("generate", &["x", "--chunk", "0"]).exits(2).stderr.contains("--chunk"));
    for (flag, value) in [("--temperature", "0.00001"), ("--temperature", "-1"), ("--top-p", "0"), ("--min-p", "1.5")] {
        let warm: &[&str] = if flag == "--temperature" { &[] } else { &["--temperature", "1"] };
        let refused = with_model("generate", &[&["x", flag, value], warm].concat()).exits(2);
        assert!(refused.stderr.contains(&format!("{flag}: expected")), "{}", refused.stderr);
    }
    let cold = with_model("generate", &["x", "--seed", "4"]).exits(2);
    assert!(cold.stderr.contains("--temperature"), "a seed that does nothing: {}", cold.stderr);
    let missing = run(lockstep().args(["generate", "x", "-m", "/nowhere/model.gguf"])).exits(2);
    assert!(missing.stderr.contains("/nowhere/model.gguf") && missing.stdout.is_empty(), "{}", missing.stderr);
    let long = "word ".repeat(2000);
    let long = with_model("generate", &["--raw", &long]).exits(2);
    assert!(long.stderr.contains("prompt tokens: expected at most 383"), "{}", long.stderr);
    assert!(with_model("generate", &["--raw", ""]).exits(2).stdout.is_empty());
}

#[test]
fn bench_measures_and_memory_shows_that_weights_are_never_expanded() {
    let run = with_model("bench", &["--json", "--prompt", "32", "--steps", "8", "--repeat", "2"]).exits(0);
    let document = json(&run);
    for speed in ["prefill_tokens_per_second", "decode_tokens_per_second"] {
        assert_eq!(document[speed]["all"].as_array().map(Vec::len), Some(2));
        assert!(document[speed]["median"].as_f64().is_some_and(|v| v > 0.0));
    }
    for phase in ["prefill", "decode"] {
        let ops = document[phase]["ops"].as_array().expect("operations");
        assert!(ops.iter().any(|o| o["op"] == "attn.q_a") && ops.iter().any(|o| o["op"] == "host"));
        let sum: f64 = ops.iter().filter_map(|o| o["share"].as_f64()).sum();
        // Shares are of wall time, and one rank does one thing at a time.
        assert!((sum - 1.0).abs() < 1e-6, "{phase}: {sum}");
    }
    // Two of eight routed experts are read: fewer bytes than are held.
    let memory = &document["memory"];
    let held = memory["weights_per_rank"][0].as_u64().expect("bytes");
    assert!(document["weight_bytes_per_token"].as_u64().is_some_and(|read| 0 < read && read < held));
    if let Some(peak) = memory["peak_bytes"].as_u64() {
        let expanded = memory["weights_as_f32_bytes"].as_u64().expect("bytes");
        assert!(peak < expanded, "peak {peak}, weights in f32 {expanded}");
    }
}

#[test]
fn bench_prints_a_table_and_refuses_what_does_not_fit() {
    let run = with_model("bench", &["--prompt", "16", "--steps", "4", "--repeat", "1", "--tp", "2"]).exits(0);
    run.says("prefill").says("decode").says("all-reduce").says("tp 2").says("GB/s");
    assert!(with_model("bench", &["--prompt", "384"]).exits(2).stderr.contains("found 512"));
    assert!(with_model("bench", &["--repeat", "0"]).exits(2).stderr.contains("--repeat"));
}
