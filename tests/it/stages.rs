//! The exact stages of verification on the golden models, and their negative twins: each fault is named with its kind,
//! its rank and its parameter, and the same run without it reports nothing.

use std::path::Path;
use std::sync::{Arc, LazyLock};

use crate::common::running::open;
use crate::common::subject::{Silent, over};
use crate::common::{GLM5_NANO, Model, NANO52, golden, pico_shard, put, tiny};
use lockstep::checkpoint::Checkpoint;
use lockstep::engine::{Backend, CpuBackend, Engine, EngineError, Engines, Options};
use lockstep::gguf::Value;
use lockstep::model::{Kind, Param};
use lockstep::quant::QuantType;
use lockstep::report::{StageReport, Verdict};
use lockstep::shard::{Group, ShardPlan, Slice, TpPlan};
use lockstep::verify::{Subject, file, tokenizer, weights};

/// A subject of a short prompt.
pub fn subject(checkpoint: Arc<Checkpoint>, tp: usize) -> Subject {
    over(checkpoint, tp, vec![1, 2, 3], vec![2])
}

fn open_path(path: &Path) -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open(Some(path)).unwrap())
}

/// A model after edits, opened as a file.
pub fn edited(model: &Model) -> Arc<Checkpoint> {
    let folder = tempfile::tempdir().unwrap();
    open_path(&model.write(folder.path(), "edited.gguf"))
}

/// glm5-nano, to be edited.
pub fn nano() -> Model {
    static READ: LazyLock<Model> = LazyLock::new(|| Model::read(&golden(GLM5_NANO)));
    READ.clone()
}

/// The bytes of a tensor that must be there.
pub fn data<'a>(model: &'a mut Model, name: &str) -> &'a mut Vec<u8> {
    &mut model.tensors.iter_mut().find(|(t, _)| t.name == name).unwrap().1
}

/// Names and details of checks that did not match.
pub fn failures(report: &StageReport) -> Vec<(String, String)> {
    let bad = report.checks.iter().filter(|c| c.verdict > Verdict::Match);
    bad.map(|c| (c.name.clone(), c.detail.clone())).collect()
}

/// Asserts that exactly one thing is wrong, and that its line has every part of `says`.
pub fn only(report: &StageReport, name: &str, says: &[&str]) {
    let bad = failures(report);
    assert_eq!(bad.len(), 1, "{bad:#?}");
    assert_eq!(bad[0].0, name, "{bad:?}");
    for part in says {
        assert!(bad[0].1.contains(part), "no {part:?} in {:?}", bad[0].1);
    }
}

/// Asserts that everything matched, of at least so many checks.
pub fn matches(report: &StageReport, least: usize) {
    assert_eq!(report.verdict(), Verdict::Match, "{:#?}", failures(report));
    assert!(report.made >= least, "only {} checks in {}", report.made, report.summary);
}

#[test]
fn the_golden_models_are_whole_and_every_rank_holds_the_right_bytes() {
    for path in [golden(GLM5_NANO), golden(NANO52), pico_shard(3)] {
        let checkpoint = open_path(&path);
        let tensors = checkpoint.coverage().tensors;
        matches(&file::run(&subject(checkpoint.clone(), 1), &Silent).unwrap(), tensors + 31);
        matches(&tokenizer::run(&subject(checkpoint.clone(), 1), &Silent).unwrap(), 7);
        for tp in [1, 2, 4, 8] {
            let report = weights::run(&subject(checkpoint.clone(), tp), &Silent).unwrap();
            matches(&report, 60 * (2 * tp + 1));
        }
    }
}

// ---- file

#[test]
fn nan_in_a_block_is_named_by_tensor_block_row_and_count() {
    let mut model = nano();
    // Q4_K rows of 256 values are one block of 144 bytes that begins with its scale.
    data(&mut model, "blk.2.attn_q_a.weight")[40 * 144..40 * 144 + 2].copy_from_slice(&[0x00, 0x7e]);
    let report = file::run(&subject(edited(&model), 1), &Silent).unwrap();
    only(
        &report,
        "blk.2.attn_q_a.weight",
        &["NAN_IN_FILE", "1 of 256 Q4_K blocks", "block 40", "row 40", "edited.gguf"],
    );
    assert_eq!(report.verdict(), Verdict::Divergent);
}

#[test]
fn nan_in_an_expert_stack_names_the_matrix() {
    let mut model = nano();
    let name = "blk.3.ffn_gate_exps.weight";
    let at = 144 * (256 * 5 + 7); // expert 5, row 7
    data(&mut model, name)[at..at + 2].copy_from_slice(&[0x00, 0xfc]); // -inf
    only(&file::run(&subject(edited(&model), 1), &Silent).unwrap(), name, &["NAN_IN_FILE", "matrix 5, row 7"]);
}

#[test]
fn an_outlier_block_is_damage_and_many_are_a_warning() {
    let mut model = nano();
    let name = "blk.2.attn_q_a.weight";
    data(&mut model, name)[9 * 144..9 * 144 + 2].copy_from_slice(&[0xff, 0x7b]); // the largest f16
    let report = file::run(&subject(edited(&model), 1), &Silent).unwrap();
    only(&report, name, &["OUTLIER_BLOCK", "block 9", "row 9", "fetch it again"]);
    assert_eq!(report.verdict(), Verdict::Divergent);
    // A scale's exponent with its top bit set, of a size that could be a weight's; twice as many would still be few.
    let mut model = nano();
    data(&mut model, name)[40 * 144 + 1] |= 0x40;
    let report = file::run(&subject(edited(&model), 1), &Silent).unwrap();
    only(&report, name, &["OUTLIER_BLOCK", "block 40"]);
    assert_eq!(report.verdict(), Verdict::Divergent);
    // Most units as good as dead, and the rest as they were.
    let mut model = nano();
    for row in 0..200 {
        let scales = &mut data(&mut model, name)[row * 144..row * 144 + 4];
        scales.copy_from_slice(&[1, 0, 1, 0]); // 6e-8
    }
    let report = file::run(&subject(edited(&model), 1), &Silent).unwrap();
    assert!(report.verdict() <= Verdict::Drift, "{:?}", failures(&report));
}

#[test]
fn a_renamed_tensor_leaves_two_traces() {
    let model = tiny().rename("blk.1.ffn_gate_shexp.weight", "blk.1.ffn_gate_shexpert.weight");
    let report = file::run(&subject(edited(&model), 1), &Silent).unwrap();
    let bad = failures(&report);
    let has = |name: &str, what: &str| bad.iter().any(|(n, d)| n == name && d.contains(what));
    assert!(has("blk.1.ffn_gate_shexpert.weight", "UNBOUND"), "{bad:?}");
    assert!(has("blk.1.ffn_gate_shexp", "MISSING"), "{bad:?}");
    assert_eq!(report.verdict(), Verdict::Divergent);
}

#[test]
fn a_baseline_with_another_eps_is_named_by_its_key() {
    let model = tiny();
    let changed = model.clone().set("glm-dsa.attention.layer_norm_rms_epsilon", Value::F32(1e-6));
    let mut subject = subject(edited(&model), 1);
    subject.baseline = Some(edited(&model));
    let settled = |report: StageReport| -> Vec<(String, String)> {
        let zeros = |(_, detail): &(String, String)| !detail.starts_with("ALL_ZERO"); // the fixture holds nothing else
        failures(&report).into_iter().filter(zeros).collect()
    };
    assert!(settled(file::run(&subject, &Silent).unwrap()).is_empty());
    subject.baseline = Some(edited(&changed));
    let bad = settled(file::run(&subject, &Silent).unwrap());
    let (name, detail) = &bad[0];
    assert_eq!(name, "RMSNorm eps = baseline");
    for part in ["1e-5 here", "1e-6 in the baseline", "attention.layer_norm_rms_epsilon"] {
        assert!(detail.contains(part), "{detail}");
    }
}

// ---- tokenizer

#[test]
fn a_tokenizer_is_judged_and_its_absence_is_neutral() {
    let report = tokenizer::run(&subject(edited(&tiny()), 1), &Silent).unwrap();
    assert_eq!(report.verdict(), Verdict::NotApplicable);
    let model = nano();
    let wrong = model.clone().set("tokenizer.ggml.pre", Value::Str("llama-bpe".into()));
    let report = tokenizer::run(&subject(edited(&wrong), 1), &Silent).unwrap();
    only(&report, "built", &["llama-bpe"]);
    let mut subject = subject(edited(&model.clone().unset("tokenizer.ggml.eot_token_id")), 1);
    subject.baseline = Some(open(GLM5_NANO));
    let report = tokenizer::run(&subject, &Silent).unwrap();
    assert!(failures(&report).iter().any(|(n, d)| n == "stop ids = baseline" && d.contains("STOP_IDS")), "{report:?}");
}

fn tokenizers(model: &Model, baseline: Option<&Model>) -> StageReport {
    let mut subject = subject(edited(model), 1);
    subject.baseline = baseline.map(edited);
    tokenizer::run(&subject, &Silent).unwrap()
}

#[test]
fn a_stop_id_too_many_is_no_match() {
    let model = nano();
    // A control token that ends no turn in the baseline: nothing is wrong with it alone.
    let more = model.clone().set("tokenizer.ggml.eom_token_id", Value::U32(4078));
    matches(&tokenizers(&more, None), 9);
    let says = ["STOP_IDS", "[4078] end a turn here and not", "4072, 4079, 4081} in the baseline"];
    let report = tokenizers(&more, Some(&model));
    let bad = failures(&report);
    assert!(bad.iter().all(|(n, d)| n == "stop ids = baseline" && says.iter().all(|s| d.contains(s))), "{bad:?}");
    assert_eq!(report.verdict(), Verdict::Divergent);
    matches(&tokenizers(&model, Some(&model)), 15);
}

#[test]
fn a_template_is_compared_by_what_it_renders() {
    let key = "tokenizer.chat_template";
    let model = nano();
    let source = model.metadata.iter().find(|(k, _)| k == key).and_then(|(_, v)| v.as_str()).unwrap().to_owned();
    let with = |text: String| model.clone().set(key, Value::Str(text));
    let prompt = "{%- if add_generation_prompt -%}<|assistant|></think>{%- endif -%}";
    assert!(source.contains(prompt));
    // Alone a warning, since some templates need none.
    let lost = with(source.replace(prompt, ""));
    let report = tokenizers(&lost, None);
    only(&report, "generation prompt", &["GENERATION_PROMPT", "<|user|>Why?", "nothing opens"]);
    assert_eq!(report.verdict(), Verdict::Drift);
    let report = tokenizers(&lost, Some(&model));
    let bad = failures(&report);
    let differs = &bad.iter().find(|(n, _)| n == "chat template = baseline").unwrap().1;
    for part in ["TEMPLATE", "\"[gMASK]<sop><|user|>Why?\" here", "\"<|assistant|></think>\" there"] {
        assert!(differs.contains(part), "no {part:?} in {differs}");
    }
    assert_eq!(report.verdict(), Verdict::Divergent);
    // Another source that renders the same.
    let report = tokenizers(&with(format!("{source}{{# edited #}}")), Some(&model));
    only(&report, "chat template = baseline", &["plain turns, and of tools, is the same"]);
    assert_eq!(report.verdict(), Verdict::Drift);
    // What the baseline renders and this one refuses is no prompt at all; the other way round it is told.
    let refusing =
        |when: &str| with(format!("{{% if {when} %}}{{{{ raise_exception('not so') }}}}{{% endif %}}{source}"));
    for (when, what) in [
        ("messages[0].role == 'system'", "4 turns: rendered"),
        ("not add_generation_prompt", "2 closed turns: rendered"),
        ("messages | length == 1", "1 turn: rendered"),
    ] {
        let report = tokenizers(&refusing(when), Some(&model));
        let found = report.checks.iter().find(|c| c.name == "chat template = baseline").unwrap();
        assert!(found.detail.contains(what) && found.detail.contains("not so"), "{}", found.detail);
        assert_eq!(found.verdict, Verdict::Divergent, "{when}");
        let back = tokenizers(&model, Some(&refusing(when)));
        only(&back, "chat template = baseline", &["are refused by the baseline's", "not so"]);
        assert_eq!(back.verdict(), Verdict::Drift, "{when}");
    }
    let lacking = with(format!("{{% generation %}}{{% endgeneration %}}{source}"));
    let report = tokenizers(&lacking, Some(&model));
    assert_eq!(report.verdict(), Verdict::Unmeasured, "{:?}", failures(&report));
    // A tool's answer that is written otherwise may be mended; one without its words is lost.
    let tool = "<|observation|>{{ m.content }}";
    let mended = tokenizers(&with(source.replace(tool, &tool.replacen("|>", "|> ", 1))), Some(&model));
    only(&mended, "chat template = baseline", &["a tool's answer becomes", "<|observation|> Ginger"]);
    assert_eq!(mended.verdict(), Verdict::Drift);
    let lost = tokenizers(&with(source.replace(tool, "<|observation|>")), Some(&model));
    let bad = failures(&lost);
    let differs = bad.iter().find(|(n, _)| n == "chat template = baseline").map(|(_, d)| d.as_str());
    assert!(differs.is_some_and(|d| d.contains("a tool's answer becomes without \"Ginger\"")), "{bad:?}");
    assert_eq!(lost.verdict(), Verdict::Divergent);
}

#[test]
fn without_a_template_it_is_said_what_cannot_be_done() {
    let report = tokenizers(&nano().unset("tokenizer.chat_template"), None);
    matches(&report, 5);
    assert_eq!(report.made, 5, "what needs a template is not made");
    assert!(
        report.summary.contains("no chat turn can be made: `generate` works with --raw only"),
        "{}",
        report.summary
    );
    let named = tokenizers(&nano().set("tokenizer.chat_template.tool_use", Value::Str("x".into())), None);
    matches(&named, 10);
    assert!(named.summary.contains("2 chat templates, not used: tool_use"), "{}", named.summary);
    assert!(!tokenizers(&nano(), None).summary.contains("chat templates, not used"));
}

/// A tokenizer.json is read where it stands: beside a GGUF as in a folder of Hugging Face's.
#[test]
fn a_tokenizer_json_beside_a_gguf_is_compared() {
    let folder = tempfile::tempdir().unwrap();
    let source = std::fs::read_to_string(golden("../tokenizer/tok/tokenizer.json")).unwrap();
    let path = Model::read(&golden(NANO52)).write(folder.path(), "model.gguf");
    let judged = || tokenizer::run(&subject(open_path(&path), 1), &Silent).unwrap();
    let alone = judged();
    matches(&alone, 9);
    assert!(alone.summary.contains("by itself: without a tokenizer.json beside it"), "{}", alone.summary);
    put(folder.path(), "tokenizer.json", source.as_bytes());
    let both = judged();
    matches(&both, alone.made + 2);
    assert!(both.summary.contains("compared with "), "{}", both.summary);
    put(folder.path(), "tokenizer.json", source.replacen("{1,3}", "", 1).as_bytes());
    only(&judged(), "ids equal tokenizer.json's", &["first difference at"]);
    put(folder.path(), "tokenizer.json", b"{}");
    only(&judged(), "tokenizer.json", &["it cannot be run"]);
}

// ---- weights

/// Engines that load other files than the ones under test.
struct Loads(Arc<Checkpoint>);

impl Engines for Loads {
    fn engine(&self, _: &Arc<Checkpoint>, tp: usize, options: Options) -> Result<Engine, EngineError> {
        Engine::cpu(self.0.clone(), tp, options)
    }

    fn backend(&self) -> &dyn Backend {
        static CPU: CpuBackend = CpuBackend::ahead(0);
        &CPU
    }
}

fn loading(other: &Model, tp: usize) -> StageReport {
    let mut subject = subject(open(GLM5_NANO), tp);
    subject.engines = Box::new(Loads(edited(other)));
    weights::run(&subject, &Silent).unwrap()
}

#[test]
fn a_changed_byte_is_found_on_the_one_rank_that_holds_it() {
    let mut model = nano();
    // 1024 rows of one block, 256 a rank: row 300 is row 44 of rank 1.
    data(&mut model, "blk.4.attn_q_b.weight")[300 * 144 + 17] ^= 0x10;
    only(&loading(&model, 4), "blk.4.attn_q_b rank 1", &["BYTES", "1 of", "byte 17 of row 44"]);
}

#[test]
fn zeros_and_permuted_rows_have_names() {
    let model = nano();
    let mut zeroed = model.clone();
    data(&mut zeroed, "blk.4.attn_kv_a_mqa.weight").fill(0);
    only(&loading(&zeroed, 1), "blk.4.attn_kv_a_mqa rank 0", &["UNFILLED"]);
    let mut permuted = model.clone();
    data(&mut permuted, "blk.4.attn_q_b.weight")[..1024 * 144].rotate_left(144);
    only(
        &loading(&permuted, 1),
        "blk.4.attn_q_b rank 0",
        &["SHARD_ORDER", "1024 of 1024 moved", "row 1 stands at row 0"],
    );
    let report = loading(&permuted, 2);
    assert_eq!(failures(&report).len(), 2);
    assert!(failures(&report).iter().all(|(_, d)| d.contains("SHARD_PLACEMENT")), "{report:?}");
}

type Altered = fn(&TpPlan, Param, usize, usize) -> Slice;
type Order = fn(Vec<Param>, Group, usize) -> Vec<Param>;

/// A plan with a fault.
struct Plan {
    plan: TpPlan,
    slice: Altered,
    order: Order,
}

impl ShardPlan for Plan {
    fn tp(&self) -> usize {
        self.plan.tp()
    }
    fn slice(&self, param: Param, block: usize, rank: usize) -> Slice {
        (self.slice)(&self.plan, param, block, rank)
    }
    fn parts(&self, group: Group, layer: usize, rank: usize) -> Vec<Param> {
        (self.order)(self.plan.parts(group, layer, rank), group, layer)
    }
}

struct Planned(Altered, Order);

impl Engines for Planned {
    fn engine(&self, checkpoint: &Arc<Checkpoint>, tp: usize, options: Options) -> Result<Engine, EngineError> {
        let plan = Plan { plan: TpPlan::new(checkpoint.config(), tp)?, slice: self.0, order: self.1 };
        let ranks = self.backend().ranks(tp, checkpoint.config())?;
        Engine::start(&|_| checkpoint.clone(), Arc::new(plan), ranks, options, &|_| None)
    }

    fn backend(&self) -> &dyn Backend {
        static CPU: CpuBackend = CpuBackend::ahead(0);
        &CPU
    }
}

fn planned(tp: usize, slice: Altered, order: Order) -> StageReport {
    let mut subject = subject(open(GLM5_NANO), tp);
    subject.engines = Box::new(Planned(slice, order));
    weights::run(&subject, &Silent).unwrap()
}

const RIGHT: Altered = |plan, param, block, rank| plan.slice(param, block, rank);
const IN_ORDER: Order = |parts, _, _| parts;

fn is(param: Param, layer: usize, kind: Kind) -> bool {
    param == Param { layer: Some(layer), kind }
}

#[test]
fn a_decorated_plan_without_a_fault_matches() {
    matches(&planned(4, RIGHT, IN_ORDER), 100);
}

#[test]
fn rank_0s_slice_of_a_fused_group_is_a_placement() {
    let slice: Altered = |plan, param, block, rank| {
        let fused = is(param, 0, Kind::FfnGate) || is(param, 0, Kind::FfnUp);
        plan.slice(param, block, if fused && rank == 2 { 0 } else { rank })
    };
    let report = planned(4, slice, IN_ORDER);
    let bad = failures(&report);
    assert_eq!(bad.len(), 2, "{bad:?}");
    for ((name, detail), param) in bad.iter().zip(["blk.0.ffn_gate", "blk.0.ffn_up"]) {
        assert_eq!(name, &format!("{param} rank 2"));
        assert!(detail.starts_with("SHARD_PLACEMENT: rank 2 holds rank 0's part"), "{detail}");
        assert!(detail.contains("rows 0..192") && detail.contains("rows 384..576"), "{detail}");
    }
}

#[test]
fn rank_0s_columns_show_although_covering_ranks_hold_equal_bytes() {
    let slice: Altered = |plan, param, block, rank| {
        plan.slice(param, block, if is(param, 2, Kind::DownExps) && rank == 5 { 0 } else { rank })
    };
    // One block of 256 columns, of which eight ranks own 32 each: all hold the same bytes.
    let says = ["SHARD_PLACEMENT: rank 5 multiplies columns 0..32, which are rank 0's, expected 160..192"];
    only(&planned(8, slice, IN_ORDER), "blk.2.ffn_down_exps rank 5 columns", &says);
}

#[test]
fn swapped_parts_of_a_fused_group_are_an_order() {
    let order: Order = |mut parts, group, layer| {
        if (group, layer) == (Group::GateUpShexp, 3) {
            parts.reverse();
        }
        parts
    };
    let bad = failures(&planned(2, RIGHT, order));
    assert_eq!(bad.len(), 4, "{bad:?}"); // two parts on two ranks
    for (name, detail) in &bad {
        assert!(name.starts_with("blk.3.ffn_gate_shexp") || name.starts_with("blk.3.ffn_up_shexp"), "{name}");
        assert!(detail.starts_with("SHARD_ORDER: in the fused ffn_gate_up_shexp"), "{detail}");
    }
    // Parts of unequal size: kv_a where q_a belongs.
    let order: Order = |mut parts, group, layer| {
        if (group, layer) == (Group::QkvA, 1) {
            parts.swap(0, 1);
        }
        parts
    };
    let bad = failures(&planned(2, RIGHT, order));
    let detail = &bad.iter().find(|(n, _)| n == "blk.1.attn_q_a rank 1").unwrap().1;
    assert!(detail.starts_with("SHARD_ORDER") && detail.contains("blk.1.attn_kv_a_mqa stands where"), "{detail}");
}

#[test]
fn a_whole_tensor_where_a_shard_belongs() {
    let slice: Altered = |plan, param, block, rank| {
        let right = plan.slice(param, block, rank);
        let whole = plan.config().heads * plan.config().qk_head();
        if is(param, 1, Kind::QB) && rank == 1 { Slice { rows: 0..whole, ..right } } else { right }
    };
    only(&planned(2, slice, IN_ORDER), "blk.1.attn_q_b rank 1", &["FULL_TENSOR", "rows 512..1024"]);
}

// ---- weights against a baseline

fn against(target: &Model, baseline: &Model) -> StageReport {
    let mut subject = subject(edited(target), 1);
    subject.baseline = Some(edited(baseline));
    weights::run(&subject, &Silent).unwrap()
}

/// A tiny model with values from a seed.
pub fn seeded(seed: u64) -> Model {
    let mut model = tiny();
    let mut state = seed;
    for (_, bytes) in &mut model.tensors {
        for value in bytes.chunks_exact_mut(4) {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let x = (state >> 40) as f32 / (1 << 24) as f32 - 0.5;
            value.copy_from_slice(&x.to_le_bytes());
        }
    }
    model
}

fn map(model: &mut Model, name: &str, f: impl Fn(f32) -> f32) {
    for value in data(model, name).chunks_exact_mut(4) {
        let x = f32::from_le_bytes(value.try_into().unwrap());
        value.copy_from_slice(&f(x).to_le_bytes());
    }
}

#[test]
fn against_a_baseline_faults_are_named_by_content() {
    let model = seeded(1);
    matches(&against(&model, &model), 60);
    let mut norms = model.clone();
    for name in ["blk.0.attn_norm.weight", "blk.1.ffn_norm.weight", "output_norm.weight"] {
        map(&mut norms, name, |x| x + 1.0);
    }
    let bad = failures(&against(&norms, &model));
    assert_eq!(bad.len(), 4, "{bad:?}");
    assert!(bad[..3].iter().all(|(_, d)| d.starts_with("NORM_OFFSET: the baseline plus a constant +1.000")), "{bad:?}");
    assert!(bad[3].1.contains("on 3 of "), "{bad:?}");

    let mut scaled = model.clone();
    map(&mut scaled, "blk.0.attn_q_a.weight", |x| 0.5 * x);
    only(&against(&scaled, &model), "blk.0.attn_q_a = baseline", &["SCALE: the baseline times 0.5000"]);

    let (gate, up) = ("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight");
    let swapped = model.clone().rename(gate, "x").rename(up, gate).rename("x", up);
    let bad = failures(&against(&swapped, &model));
    assert_eq!(bad.len(), 2, "{bad:?}");
    assert!(
        bad.iter().any(|(n, d)| n == "blk.0.ffn_gate = baseline" && d.contains("holds the baseline's blk.0.ffn_up"))
    );

    let mut permuted = model.clone();
    data(&mut permuted, "blk.0.attn_q_b.weight").rotate_left(3 * 32 * 4);
    only(&against(&permuted, &model), "blk.0.attn_q_b = baseline", &["PERMUTED_ROWS", "row 3 stands at row 0"]);

    let mut damaged = model.clone();
    data(&mut damaged, "blk.0.attn_q_b.weight")[..400].fill(0x3f);
    only(&against(&damaged, &model), "blk.0.attn_q_b = baseline", &["DIFFERS"]);
}

#[test]
fn two_checkpoints_are_not_called_corrupt() {
    let report = against(&seeded(2), &seeded(1));
    only(&report, "baseline", &["DIFFERENT_CHECKPOINT", "embeddings included", "not a damaged copy"]);
}

#[test]
fn rows_of_a_quantised_tensor_are_recognised() {
    let model = nano();
    let mut subject = subject(open(GLM5_NANO), 1);
    subject.baseline = Some(edited(&model));
    matches(&weights::run(&subject, &Silent).unwrap(), 100);
    let mut other = model.clone();
    data(&mut other, "blk.2.attn_q_a.weight")[..200 * 144].rotate_left(144);
    subject.baseline = Some(edited(&other));
    let bad = failures(&weights::run(&subject, &Silent).unwrap());
    assert_eq!(bad.len(), 1, "{bad:?}");
    assert!(bad[0].1.contains("PERMUTED_ROWS") && bad[0].1.contains("for Q4_K"), "{bad:?}");
}

/// What is wrong in one expert, row or block drowns in a norm over the tensor.
#[test]
fn a_part_that_differs_is_found_and_named_where_it_is() {
    let model = nano();
    let mut subject = subject(edited(&model), 1);
    let experts = subject.checkpoint.config().experts;
    let mut against = |damage: &dyn Fn(&mut Model)| {
        let mut other = model.clone();
        damage(&mut other);
        subject.baseline = Some(edited(&other));
        failures(&weights::run(&subject, &Silent).unwrap())
    };
    let named = |bad: Vec<(String, String)>, param: &str, words: &[&str]| {
        assert!(!bad.is_empty() && bad.iter().all(|(n, _)| *n == format!("{param} = baseline")), "{bad:?}");
        assert!(words.iter().all(|w| bad[0].1.contains(w)), "{words:?} in {bad:?}");
    };
    let up = "blk.2.ffn_up_exps.weight";
    let expert = |m: &mut Model| data(m, up).len() / experts;
    // Two experts of a stack exchanged.
    let bad = against(&|m| {
        let size = expert(m);
        let (a, b) = data(m, up).split_at_mut(7 * size);
        a[3 * size..4 * size].swap_with_slice(&mut b[..size]);
    });
    named(bad, "blk.2.ffn_up_exps", &["WRONG_TENSOR", "matrix 7", "expert 3 of layer 2", "of 2 that differ"]);
    // One super-block with twice its scale, in one expert.
    let bad = against(&|m| {
        let at = 5 * expert(m) + 9 * Q4_K;
        let scale = half::f16::from_le_bytes(data(m, up)[at..at + 2].try_into().unwrap()).to_f32();
        let least = half::f16::from_le_bytes(data(m, up)[at + 2..at + 4].try_into().unwrap()).to_f32();
        data(m, up)[at..at + 2].copy_from_slice(&half::f16::from_f32(2.0 * scale).to_le_bytes());
        data(m, up)[at + 2..at + 4].copy_from_slice(&half::f16::from_f32(2.0 * least).to_le_bytes());
    });
    named(bad, "blk.2.ffn_up_exps", &["SCALE: the baseline times 0.5", "matrix 5"]);
    // A bit that costs less than the type does.
    let bad = against(&|m| data(m, "blk.2.attn_q_a.weight")[5 * Q4_K + 20] ^= 1);
    named(bad, "blk.2.attn_q_a", &["BYTES: 1 of", "all others are, byte for byte"]);
    assert!(against(&|_| ()).is_empty());
}

/// The bytes of a Q4_K block.
const Q4_K: usize = 144;

/// nano with the scales of head 3 in every layer a quarter too large: far less than what the type costs.
pub fn of_a_head_too_large() -> Model {
    let mut model = nano();
    let queries = |name: &str| name.ends_with(".attn_q_b.weight") && !name.contains("indexer");
    for (_, bytes) in model.tensors.iter_mut().filter(|(t, _)| queries(&t.name) && t.ty == QuantType::Q4_K.info()) {
        let head = bytes.len() / 8;
        for block in bytes[3 * head..4 * head].chunks_exact_mut(Q4_K) {
            for at in [0, 2] {
                let scale = half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
                block[at..at + 2].copy_from_slice(&half::f16::from_f32(1.25 * scale).to_le_bytes());
            }
        }
    }
    model
}

/// nano with one code of each block changed by one, as who quantises again would, in a share of the blocks.
pub fn quantised_again(share: usize) -> Model {
    let mut model = nano();
    for (_, bytes) in model.tensors.iter_mut().filter(|(t, _)| t.ty == QuantType::Q4_K.info()) {
        bytes.chunks_exact_mut(Q4_K).enumerate().filter(|(i, _)| i % 10 < share).for_each(|(_, block)| block[20] ^= 1);
    }
    model
}

/// A type excuses what quantising costs. Where nobody quantised anything, since most bytes are the baseline's, it excuses
/// nothing.
#[test]
fn a_part_of_a_kept_tensor_has_no_room() {
    let found = |model: &Model| against(model, &nano());
    let bad = failures(&found(&of_a_head_too_large()));
    assert!(bad.len() >= 4, "{bad:?}");
    for (name, detail) in &bad {
        let layer = name.strip_suffix(".attn_q_b = baseline").unwrap();
        let [from, to] = [384, 511].map(|row| format!("row {row} of {layer}.attn_q_b.weight (head 3)"));
        assert!(detail.starts_with("BYTES: ") && detail.contains(&format!("in 128 rows, {from} to {to};")), "{detail}");
    }
    let clean = found(&nano());
    matches(&clean, 160);
    assert!(clean.summary.contains("163 of 163 parameters within what their types cost, 163 of them equal"));
    // Twin: all blocks, and most.
    for share in [10, 6] {
        let again = found(&quantised_again(share));
        matches(&again, 160);
        assert!(again.summary.contains("163 of 163 parameters within"), "{}", again.summary);
        assert!(!again.summary.contains("163 of them equal"), "{}", again.summary);
    }
    assert!(failures(&found(&quantised_again(4))).iter().all(|(_, d)| d.starts_with("BYTES: ")));
    assert!(failures(&found(&quantised_again(4))).len() > 20);
}

/// What was read from another layer is named by that layer, however far it is.
#[test]
fn data_of_another_layer_are_named_by_their_place() {
    let found = |damage: &dyn Fn(&mut Model)| {
        let mut model = nano();
        damage(&mut model);
        let mut subject = subject(edited(&model), 1);
        subject.baseline = Some(edited(&nano()));
        failures(&weights::run(&subject, &Silent).unwrap())
    };
    let named = |bad: Vec<(String, String)>, param: &str, holds: &str| {
        assert_eq!(bad.len(), 1, "{bad:?}");
        assert!(bad[0].0 == format!("{param} = baseline") && bad[0].1.contains(holds), "{holds} in {bad:?}");
    };
    let copy = |m: &mut Model, [from, to]: [&str; 2], [source, target]: [usize; 2], parts: usize| {
        let size = data(m, from).len() / parts;
        let bytes = data(m, from)[source * size..(source + 1) * size].to_vec();
        data(m, to)[target * size..(target + 1) * size].copy_from_slice(&bytes);
    };
    let ups = ["blk.5.ffn_up_exps.weight", "blk.2.ffn_up_exps.weight"];
    let bad = found(&|m| copy(m, ups, [3, 1], 8));
    named(
        bad,
        "blk.2.ffn_up_exps",
        "WRONG_TENSOR: holds the baseline's expert 3 of layer 5 (blk.5.ffn_up_exps) (matrix 1",
    );
    let bad = found(&|m| copy(m, ups, [0, 0], 1));
    named(bad, "blk.2.ffn_up_exps", "WRONG_TENSOR: holds the baseline's blk.5.ffn_up_exps");
    let bad = found(&|m| copy(m, ["blk.5.attn_q_a.weight", "blk.1.attn_q_a.weight"], [0, 0], 1));
    named(bad, "blk.1.attn_q_a", "WRONG_TENSOR: holds the baseline's blk.5.attn_q_a");
    let bad = found(&|m| copy(m, ["blk.4.attn_k_b.weight", "blk.1.attn_k_b.weight"], [6, 2], 8));
    named(bad, "blk.1.attn_k_b", "WRONG_TENSOR: holds the baseline's head 6 of layer 4 (blk.4.attn_k_b)");
    assert!(found(&|_| ()).is_empty());
}

/// Norms are kept as they are, so a bf16 baseline leaves them no room at all; blocks have the room that their type needs.
#[test]
fn a_type_may_cost_what_it_must_and_no_more() {
    let target = seeded(1);
    let mut baseline = target.clone();
    for (tensor, bytes) in &mut baseline.tensors {
        if tensor.ne.len() > 1 {
            continue;
        }
        tensor.ty = QuantType::BF16.info();
        *bytes = bytes.chunks_exact(4).flat_map(|v| [v[2], v[3]]).collect(); // truncated: off by up to 2^-8
    }
    let bad = failures(&against(&target, &baseline));
    let vectors = target.tensors.iter().filter(|(t, _)| t.ne.len() == 1).count();
    assert_eq!(bad.len(), vectors, "{bad:#?}");
    let mut exact = target.clone();
    for (tensor, bytes) in &mut exact.tensors {
        if tensor.ne.len() == 1 {
            bytes.chunks_exact_mut(4).for_each(|v| v[..2].fill(0));
        }
    }
    matches(&against(&exact, &baseline), 60);
}
