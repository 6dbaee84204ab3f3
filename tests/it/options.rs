//! Options of `verify` that would ask less than they say, or be passed over; and what a run says that it covered.

use std::path::Path;

use crate::common::binary::{Run, lockstep, run};
use crate::common::{GLM5_NANO, Model, NANO52, golden, put};
use crate::stages::{nano, seeded};
use serde_json::Value as Json;

fn verify(args: &[&str]) -> Run {
    run(lockstep().args(["verify", "-q"]).args(args))
}

fn refused(args: &[&str], says: &str) {
    let found = verify(args).exits(2);
    assert!(found.stderr.contains(says), "no {says:?} in {}", found.stderr);
}

/// What the run on a model covered.
fn covered(model: &Path, args: &[&str]) -> Json {
    let model = model.to_str().unwrap();
    let found = verify(&[&["-m", model, "--tp", "1", "--json"], args].concat());
    let whole: Json = serde_json::from_str(&found.stdout).unwrap_or_else(|e| panic!("{e}: {}", found.stderr));
    whole["covered"].clone()
}

#[test]
fn what_a_stage_would_be_told_is_refused_without_the_stage() {
    let folder = tempfile::tempdir().unwrap();
    let asks = put(folder.path(), "asks.json", b"[{\"ask\": \"Genesis 1:1\", \"answer\": \"In\"}]");
    let asks = asks.to_str().unwrap();
    refused(&["file", "--asks", asks], "--asks is for stage logits");
    refused(&["--asks", asks, "--target", "a-dump"], "cannot be used with");
    for option in ["--thorough", "--repair-plan"] {
        refused(&["file", "logits", option], &format!("{option} is for stage sense"));
    }
    verify(&["sense", "--repair-plan"]).exits(0);
    // On one rank of the CPU it is the CPU engine that is asked.
    let found = verify(&["logits", "--tp", "1", "--prompt", "In the beginning", "--asks", asks, "--all"]).exits(0);
    found.says("for information: it is the CPU engine");
    verify(&["logits", "--tp", "2", "--prompt", "In the beginning", "--asks", asks, "--all"])
        .exits(0)
        .says("all 1 texts are equal");
}

#[cfg(feature = "serve")]
#[test]
fn nothing_less_than_everything_is_certified() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("certificate.json");
    let certificate = ["--tp", "1", "--certificate", path.to_str().unwrap()];
    for (less, says) in [
        (&["file"][..], "stages by name"),
        (&["--layers", "0"], "--layers"),
        (&["--prompt", "In the beginning"], "--prompt"),
        (&["--rows", "15"], "--rows 15, and at least 16 are judged"),
        (&["--untrained"], "--untrained"),
        (&["--no-published-facts"], "--no-published-facts"),
        (&["--inject", "OP_NOISE@layers.1.attn.q_a"], "--inject"),
    ] {
        refused(&[less, &certificate[..]].concat(), &format!("expected a run of everything, found {says}"));
        assert!(!path.exists());
    }
    refused(&[&["--target", "a-dump"], &certificate[2..]].concat(), "found --target");
    // Twin: `it::serve` makes a certificate by a run of everything.
}

#[test]
fn few_rows_say_that_columns_were_not_judged() {
    let model = golden(NANO52);
    let stage = ["activations", "-m", model.to_str().unwrap(), "--tp", "1", "--rows"];
    let says = "too few to judge single columns by";
    verify(&[&stage[..], &["7"]].concat()).exits(0).says(says);
    verify(&[&stage[..], &["8"]].concat()).exits(0).silent_on(says);
}

#[test]
fn a_dump_covers_its_tokens() {
    let (folder, model) = (tempfile::tempdir().unwrap(), golden(NANO52));
    let (dump, model) = (folder.path().join("dump"), model.to_str().unwrap());
    let ids = (0..24).map(|i| (i * 61 % 1000).to_string()).collect::<Vec<_>>().join(",");
    let points = "^logits$|index_topk$|expert_ids$";
    let made = ["dump", "-q", "-m", model, "--tp", "1", "--ids", &ids, "--filter", points, "--out"];
    run(lockstep().args(made).arg(&dump)).exits(0);
    let found = verify(&["logits", "-m", model, "--target", dump.to_str().unwrap()]).exits(0);
    found.says("Covered: 24 of ").silent_on("the file alone");
}

/// On trust is what was compared with nothing, whatever was asked for.
#[test]
fn what_was_not_compared_stays_on_trust() {
    let folder = tempfile::tempdir().unwrap();
    let (nano52, glm5) = (golden(NANO52), golden(GLM5_NANO));
    let on_trust = |model: &Path, baseline: &Path, args: &[&str]| {
        let baseline = ["--baseline", baseline.to_str().unwrap()];
        let covered = covered(model, &[&baseline[..], args].concat());
        (covered["parameters_on_trust"].as_u64().unwrap(), covered["mtp"].as_str().unwrap().to_string())
    };
    let (all, _) = on_trust(&nano52, &nano52, &["file"]);
    assert_eq!(on_trust(&nano52, &nano52, &["weights"]).0, 0);
    assert_eq!(on_trust(&nano52, &nano52, &["weights", "--layers", "1"]).0, all - 26);
    // Nothing of another model is compared.
    let other = seeded(3).write(folder.path(), "other.gguf");
    assert_eq!(on_trust(&nano52, &other, &["weights"]).0, all);
    // The MTP block: in both, and in one.
    let (rest, mtp) = on_trust(&glm5, &glm5, &["weights"]);
    assert_eq!((rest, mtp.as_str()), (0, "not run; its data was compared with the baseline's"));
    let block = |model: &Model| model.tensors.iter().filter(|(t, _)| t.name.starts_with("blk.6.")).count() as u64;
    let without = nano().drop(|name| name.starts_with("blk.6.")).write(folder.path(), "without.gguf");
    let (rest, mtp) = on_trust(&glm5, &without, &["weights"]);
    assert_eq!((rest, mtp.as_str()), (block(&nano()), "not run; its data is taken on trust"));
}
