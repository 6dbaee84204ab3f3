//! Our own service as the server: its engine sound, damaged, of another model, or behind another template.

use std::sync::Arc;

use lockstep::checkpoint::Checkpoint;
use lockstep::engine::{Attention, CpuBackend, Engine, Engines, Options};
use lockstep::faults::decorate::{Decorations, FaultyEngines};
use lockstep::faults::{Injection, Target, inject};
use lockstep::report::Verdict;
use lockstep::serve::driver::Serving;
use lockstep::verify::Subject;

use super::{quick, said, subject, verify};
use crate::common::subject::show;
use crate::common::{GLM5_NANO, Model, golden};
use crate::serve::script::{Running, Setup, over};

fn options(checkpoint: &Checkpoint) -> Options {
    let one = Options::for_one(checkpoint.config());
    Options { sequences: 4, cache_tokens: 4 * one.cache_tokens, ..one }
}

/// A service whose engine has these faults.
fn serve(template: Option<&'static str>, faults: &[&str]) -> Running {
    let checkpoint = crate::common::running::open(GLM5_NANO);
    let mut all = Decorations::default();
    let target = Target { checkpoint: &checkpoint, tp: 1, attention: Attention::Dsa };
    faults.iter().for_each(|f| inject(&target, &Injection::parse(f).unwrap(), &mut all).unwrap());
    let engines: Box<dyn Engines> = match faults {
        [] => Box::new(CpuBackend::default()),
        _ => Box::new(FaultyEngines(CpuBackend::default(), all)),
    };
    let engine: Engine = engines.engine(&checkpoint, 1, options(&checkpoint)).unwrap();
    over(&Setup { template, ..Setup::default() }, Serving::new(engine))
}

fn of(running: &Running) -> Subject {
    let limits =
        lockstep::verify::logits::server::http::Limits { answer: std::time::Duration::from_secs(60), ..quick() };
    // The built-in prompts beside the subject's own, for rows enough.
    Subject { own_prompt: false, ..subject(GLM5_NANO, running.port, limits) }
}

#[test]
fn a_sound_server_matches() {
    let report = verify(&of(&serve(None, &[]))).unwrap();
    assert_eq!(report.verdict(), Verdict::Match, "{}", show(&report));
    let all = report.checks.iter().find(|c| c.name == "KL, plain texts").unwrap();
    let (rho, limit) = all.rho.unwrap();
    assert!(rho < limit / 2.0, "{rho} of {limit}");
    for name in ["tokens", "chat, a turn, rendered", "greedy text, chat, with a past"] {
        assert!(report.checks.iter().any(|c| c.name == name && c.verdict == Verdict::Match), "{}", show(&report));
    }
    assert!(
        report.summary.contains("log-probabilities of") && report.summary.contains("torch-bf16"),
        "{}",
        report.summary
    );
}

#[test]
fn another_template_is_told_from_another_model() {
    let other = "[gMASK]<sop>{%- for m in messages -%}<|user|>\n{{ m.content }}{%- endfor -%}<|assistant|>\n";
    let report = verify(&of(&serve(Some(other), &[]))).unwrap();
    let said = said(&report);
    assert_eq!(report.verdict(), Verdict::Divergent, "{said}");
    assert!(said.contains("DIVERGENT chat template") && said.contains("DIVERGENT chat, a turn, rendered"), "{said}");
    assert!(!said.contains("ANOTHER MODEL") && !said.contains("DIVERGENT KL, plain texts"), "{said}");
}

/// One layer of the served model is damaged: moderate, and not another model.
#[test]
fn a_damaged_layer_is_not_another_model() {
    for fault in ["KV_B_LAYOUT@blk.3.attn_k_b", "NAME_MAP@blk.3.attn_output"] {
        let report = verify(&of(&serve(None, &[fault]))).unwrap();
        let said = said(&report);
        assert_eq!(report.verdict(), Verdict::Divergent, "{fault}: {said}");
        assert!(
            said.contains("DIVERGENT KL, plain texts: it looks like the same model, with a part of it damaged"),
            "{fault}: {said}"
        );
        assert!(!said.contains("DIVERGENT chat template"), "{fault}: {said}");
    }
}

/// The layers in another order are another model of the same vocabulary.
#[test]
fn another_model_is_named_as_such() {
    let mut other = Model::read(&golden(GLM5_NANO));
    let named = |model: &Model, name: &str| model.tensors.iter().position(|(t, _)| t.name == name);
    for layer in 1..3 {
        for i in 0..other.tensors.len() {
            let Some(rest) = other.tensors[i].0.name.strip_prefix(&format!("blk.{layer}.")).map(String::from) else {
                continue;
            };
            let Some(j) = named(&other, &format!("blk.{}.{rest}", 6 - layer)) else { continue };
            let same =
                other.tensors[i].0.ne == other.tensors[j].0.ne && other.tensors[i].1.len() == other.tensors[j].1.len();
            if same {
                let (a, b) = (other.tensors[i].1.clone(), other.tensors[j].1.clone());
                (other.tensors[i].1, other.tensors[j].1) = (b, a);
            }
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let path = other.write(folder.path(), "other.gguf");
    let running = serve(None, &[]);
    let of = Subject { checkpoint: Arc::new(Checkpoint::open(Some(&path)).unwrap()), ..of(&running) };
    let report = verify(&of).unwrap();
    let said = said(&report);
    assert_eq!(report.verdict(), Verdict::Divergent, "{said}");
    assert!(said.contains("ANOTHER MODEL"), "{said}");
}
