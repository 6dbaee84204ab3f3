//! A run is judged by the floors of its own recipe. The fast recipe's runs come from the reference in an order of
//! summation that no floor is made of; the strict one's come from the CPU device, which has no other recipe.

use crate::common::subject::{Silent, run_of_reference, show, subject};
use crate::common::{GLM5_NANO, PICO, golden, lockstep, run};
use lockstep::checkpoint::oracle::Raw;
use lockstep::model::{Place, Point};
use lockstep::probe::dump::{self, Meta};
use lockstep::probe::{Captured, Trace, Values};
use lockstep::report::{StageReport, Verdict};
use lockstep::verify::subject::{points_of, run_prompt};
use lockstep::verify::{Subject, activations, logits};
use lockstep_reference::{Arith, Eps, ModelWeights, Order, RefConfig, RefOptions, RefRecipe};

/// A run of one rank in the fast recipe, as an engine would show it.
fn fast(of: &Subject) -> Trace {
    run_of_reference(of, Arith::F32(RefRecipe::Fast, Order::Blocks(7)), RefOptions::default())
}

fn strict(of: &Subject) -> Trace {
    run_prompt(&mut of.engine().expect("an engine"), &of.ids, points_of(None)).expect("runs").0
}

fn judged(target: Trace, recipe: RefRecipe, of: Subject) -> (Subject, StageReport) {
    let of = Subject { target: Some(target), recipe, ..of };
    let report = activations::run(&of, &Silent).expect("runs");
    (of, report)
}

#[test]
fn a_run_is_judged_by_its_own_recipe() {
    for (model, tokens) in [(GLM5_NANO, 72), (PICO, 40)] {
        let plain = || subject(model, 1, tokens);
        let (of, report) = judged(fast(&plain()), RefRecipe::Fast, plain());
        assert_eq!(report.verdict(), Verdict::Match, "{model}: {}", show(&report));
        let report = logits::run(&of, &Silent).expect("runs");
        assert_eq!(report.verdict(), Verdict::Match, "{model}: {}", show(&report));
        let (rho, limit) = report.worst().and_then(|c| c.rho).expect("judged by the floor");
        assert!(rho < 0.8 * limit, "far from its limit, in its columns too: {rho} of {limit}");
        // bf16 keeps 8 bits where f32 keeps 24: far outside the strict floors, at every product with weights.
        let (_, report) = judged(fast(&plain()), RefRecipe::Strict, plain());
        let bad = bad(&report);
        for op in ["attn.q_a", "attn.q_absorbed", "attn.context", "attn.out", "ffn.hidden", "ffn.out"] {
            assert!(bad.contains(&format!("layers.0.{op}").as_str()), "{model}: {op} in {bad:?}");
        }
        let left_alone = ["norm", "attn.latent", "index_scores", "router_logits", "residual", "layers.0.output"];
        assert!(!bad.iter().any(|b| left_alone.iter().any(|l| b.ends_with(l))), "{model}: {bad:?}");
        let (_, report) = judged(strict(&plain()), RefRecipe::Strict, plain());
        assert_eq!(report.verdict(), Verdict::Match, "{model}: {}", show(&report));
    }
}

#[test]
fn a_rounded_router_is_a_fault_of_the_fast_recipe() {
    let of = subject(PICO, 1, 40);
    let target = fast(&of);
    let c = of.checkpoint.config();
    let mut routers = (0..c.layers).map(|l| Place::trunk(l, Point::RouterLogits));
    let place = routers.find(|place| target.ranks(*place).is_some()).expect("a router");
    let mut damaged = target.ranks(place).expect("captured")[0].clone();
    let norms = target.ranks(place.at(Point::FfnNorm)).expect("a norm")[0].as_f32();
    let raw = Raw(of.checkpoint.source());
    let config = RefConfig::from_raw(&raw, Eps::File).expect("a configuration");
    let weights = ModelWeights::new(&raw, &config);
    let router = lockstep_reference::Weights::matrix(&weights, place.layer(), lockstep_reference::RefParam::Router)
        .expect("read");
    let x =
        ndarray::Array2::from_shape_vec((40, c.hidden), norms.iter().map(|v| f64::from(*v)).collect()).expect("rows");
    let rounding = Arith::F32(RefRecipe::Fast, Order::Sequential);
    let rounded = lockstep_reference::ops::linear(rounding, &x, &router);
    damaged.values = Values::F32(rounded.iter().map(|v| *v as f32).collect());
    let mut whole = Trace::new("a fast engine".into(), of.ids.clone(), of.attention, vec![vec![damaged]]);
    let rest = places_but(&target, place);
    whole.extend(Trace::new(String::new(), of.ids.clone(), of.attention, vec![rest]));
    let (_, report) = judged(whole, RefRecipe::Fast, of);
    let check = report.checks.iter().find(|c| c.name == place.to_string()).expect("judged");
    assert_eq!(check.verdict, Verdict::Divergent, "{}", show(&report));
}

/// The same run with the values of a place changed, by column.
fn altered(run: &Trace, place: Place, change: impl Fn(usize, f32) -> f32) -> Trace {
    let mut one = run.ranks(place).expect("captured")[0].clone();
    let width = one.row_len();
    one.values = Values::F32(one.as_f32().iter().enumerate().map(|(i, v)| change(i % width, *v)).collect());
    let mut whole = Trace::new(run.producer.clone(), run.ids.clone(), run.attention, vec![vec![one]]);
    whole.extend(Trace::new(String::new(), run.ids.clone(), run.attention, vec![places_but(run, place)]));
    whole
}

/// Columns are judged by themselves where there are rows enough.
fn many_rows() -> Subject {
    Subject { rows: (0..40).step_by(2).collect(), ..subject(PICO, 1, 40) }
}

fn bad(report: &StageReport) -> Vec<&str> {
    report.checks.iter().filter(|c| c.verdict > Verdict::Match).map(|c| c.name.as_str()).collect()
}

/// What is wrong in one column drowns in a norm over rows, whose floor is the row's largest.
#[test]
fn one_column_is_found_among_many() {
    let of = many_rows;
    let run = fast(&of());
    let sigma = |change: f32| {
        let target = altered(&run, Place::LOGITS, |j, v| if j == 1000 { v + change } else { v });
        let (_, report) = judged(target, RefRecipe::Fast, of());
        let found: Vec<String> = bad(&report).iter().map(ToString::to_string).collect();
        (found, report)
    };
    let (found, report) = sigma(0.5);
    assert_eq!(found, ["logits"], "{}", show(&report));
    let detail = &report.checks.iter().find(|c| c.name == "logits").expect("judged").detail;
    assert!(detail.contains("column 1000") && detail.contains("columns by themselves"), "{detail}");
    assert!(sigma(0.0).0.is_empty());
}

/// A dump's word chooses its floors, and the wider ones would excuse a factor on one head.
#[test]
fn a_strict_run_that_claims_to_be_fast_is_held_to_what_it_can() {
    let of = many_rows;
    let (run, place) = (strict(&of()), Place::trunk(1, Point::Context));
    let (_, clean) = judged(run.clone(), RefRecipe::Fast, of());
    assert_eq!(clean.verdict(), Verdict::Match, "{}", show(&clean));
    assert!(clean.summary.contains("the dump says fast, but holds strict's floors"), "{}", clean.summary);
    let head = run.ranks(place).expect("captured")[0].row_len() / of().checkpoint.config().heads;
    let target = altered(&run, place, |j, v| if j / head == 1 { 1.01 * v } else { v });
    let (altered_subject, report) = judged(target, RefRecipe::Fast, of());
    // The next operation was made from the right values: it does not fit the altered ones, but is not to blame.
    assert_eq!(bad(&report), ["layers.1.attn.context"], "{}", show(&report));
    let next = report.checks.iter().find(|c| c.name == "layers.1.attn.out").expect("judged");
    assert!(next.detail.contains("right from what layers.1.attn.context should be"), "{}", next.detail);
    let found = lockstep::diagnose::bisect::run(&altered_subject, &Silent).expect("runs");
    let culprit = found.culprit.expect("a culprit");
    assert_eq!((culprit.place.as_str(), culprit.kind), ("layers.1.attn.context", "UNKNOWN"));
    assert!(culprit.region.contains("head 1 of") && culprit.region.contains("1.0100"), "{}", culprit.region);
    assert!(found.others.is_empty(), "{:?}", found.others);
    // Where the next operation is wrong as well, nothing acquits it.
    let target = altered_subject.target.as_ref().expect("a dump");
    let both = altered(target, Place::trunk(1, Point::AttnOut), |j, v| if j < 64 { 1.01 * v } else { v });
    let (_, report) = judged(both, RefRecipe::Fast, of());
    assert_eq!(bad(&report), ["layers.1.attn.context", "layers.1.attn.out"], "{}", show(&report));
}

fn places_but(trace: &Trace, but: Place) -> Vec<Captured> {
    let kept = trace.places().into_iter().filter(|p| *p != but);
    kept.map(|place| trace.ranks(place).expect("captured")[0].clone()).collect()
}

#[test]
fn a_dump_says_its_recipe_and_is_judged_by_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let of = subject(PICO, 1, 40);
    let target = fast(&of);
    let dumped = |recipe: &str| {
        let dir = folder.path().join(recipe);
        let digest = of.checkpoint.digest();
        let (recipe, device) = (recipe.to_string(), None);
        let meta =
            Meta { model: PICO.into(), digest, recipe, device, rms_eps: None, latent_eps: None, index_eps: None };
        dump::write(&dir, &target, &meta).expect("writes");
        run(lockstep().args(["verify", "activations", "--json", "-m"]).arg(golden(PICO)).arg("--target").arg(dir))
    };
    dumped("fast").exits(0).says(r#""recipe": "fast""#);
    dumped("strict").exits(1).says(r#""recipe": "strict""#);
    let unknown = dumped("bf16-everywhere").exits(3);
    unknown.says(r#""recipe": "torch-f32""#);
    let said = "is \"bf16-everywhere\", which is unknown here; its values are those of torch-f32";
    assert!(unknown.stderr.contains(said), "{}", unknown.stderr);
}

#[test]
fn every_command_says_device_and_recipe_and_refuses_what_is_not_there() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("out").to_string_lossy().into_owned();
    let model = golden(PICO).to_string_lossy().into_owned();
    for command in
        [&["verify", "file"][..], &["bisect"], &["dump", "--out", &out], &["bench"], &["generate", "--raw", "x"]]
    {
        let with = |extra: &[&str]| run(lockstep().args(command).args(["-m", &model]).args(extra));
        let fast = with(&["--recipe", "fast"]).exits(2);
        assert!(fast.stderr.contains("--recipe fast: expected strict"), "{command:?}: {}", fast.stderr);
        assert!(with(&["--device", "cpu", "--recipe", "bf16"]).exits(2).stderr.contains("bf16"));
        assert!(with(&["--device", "gpu"]).exits(2).stderr.contains("expected cpu, cuda or cuda:0,1"));
        let three = with(&["--device", "cuda:0,1", "--tp", "3"]).exits(2);
        assert!(three.stderr.contains("expected one GPU or 3, found 2"), "{}", three.stderr);
        if cfg!(not(feature = "cuda")) {
            let cuda = with(&["--device", "cuda:1,0", "--recipe", "fast"]).exits(2);
            assert!(cuda.stderr.contains("--device cuda:1,0: this build has no CUDA device"), "{}", cuda.stderr);
        }
    }
    assert!(std::fs::read_dir(folder.path()).expect("a folder").next().is_none(), "nothing was dumped");
    let with = |command: &[&str]| run(lockstep().args(command).args(["-m", &model, "--device", "cpu"])).exits(0);
    with(&["verify", "file"]).says("cpu, recipe strict");
    with(&["verify", "file", "--json"]).says(r#""device": "cpu""#).says(r#""recipe": "strict""#);
    with(&["dump", "--out", &out, "--json"]).says(r#""device": "cpu""#).says(r#""recipe": "strict""#);
    let meta = dump::read(std::path::Path::new(&out)).expect("a dump").meta;
    assert_eq!((meta.device.as_deref(), meta.recipe.as_str()), (Some("cpu"), "strict"));
    with(&["generate", "--raw", "x", "-n", "2", "--json"]).says(r#""device": "cpu""#).says(r#""recipe": "strict""#);
    with(&["bench", "--prompt", "4", "--steps", "2", "--repeat", "1"]).says("cpu, recipe strict");
    // A dump's device and recipe are its own.
    let target = run(lockstep().args(["verify", "-m", &model, "--target", &out, "--recipe", "strict"])).exits(2);
    assert!(target.stderr.contains("--recipe"), "{}", target.stderr);
    let judged = |how: &[&str]| run(lockstep().args(["verify", "logits", "-m", &model, "--target", &out]).args(how));
    let other = judged(&["--attention", "dense"]).exits(2);
    assert!(other.stderr.contains("--attention dense: the dump states dsa"), "{}", other.stderr);
    judged(&["--attention", "dsa"]).exits(0);
}
