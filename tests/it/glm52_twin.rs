//! GLM-5.2 at its real shapes, without its weights: sparse files of the right length whose headers are those of a published
//! catalogue. Shows that inspect reads headers only, and that the plan of the real model is the known one.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::{Run, config, inspect, lockstep, table_of};
use lockstep::gguf::value::{Array, Value};
use lockstep::gguf::write::{self, NewTensor};
use lockstep::model::Kind;
use lockstep::quant::{TypeId, TypeInfo, lookup};

const LAYERS: usize = 78;
const SHARDS: usize = 6;
/// Peak memory that inspect may take, in KiB, and a limit on its computing time that only a reader of data would pass.
const PEAK_KIB: u64 = 200_000;
const SECONDS: f64 = 5.0;

/// The header of GLM-5.2: no indexer types, so the context decides which layers share; a tokenizer of the real size.
fn metadata() -> Vec<(String, Value)> {
    let mut all: Vec<(String, Value)> = vec![
        ("general.architecture".into(), Value::Str("glm-dsa".into())),
        ("general.name".into(), Value::Str("Glm-5.2".into())),
        ("general.quantization_version".into(), Value::U32(2)),
    ];
    for (key, value) in [
        ("block_count", 79),
        ("nextn_predict_layers", 1),
        ("context_length", 1_048_576),
        ("embedding_length", 6144),
        ("feed_forward_length", 12_288),
        ("attention.head_count", 64),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 576),
        ("attention.value_length", 512),
        ("attention.key_length_mla", 256),
        ("attention.value_length_mla", 256),
        ("attention.q_lora_rank", 2048),
        ("attention.kv_lora_rank", 512),
        ("rope.dimension_count", 64),
        ("leading_dense_block_count", 3),
        ("expert_count", 256),
        ("expert_used_count", 8),
        ("expert_shared_count", 1),
        ("expert_group_count", 1),
        ("expert_group_used_count", 1),
        ("expert_feed_forward_length", 2048),
        ("expert_gating_func", 2),
        ("attention.indexer.head_count", 32),
        ("attention.indexer.key_length", 128),
        ("attention.indexer.top_k", 2048),
        ("vocab_size", 154_880),
    ] {
        all.push((format!("glm-dsa.{key}"), Value::U32(value)));
    }
    for (key, value) in
        [("attention.layer_norm_rms_epsilon", 1e-5), ("expert_weights_scale", 2.5), ("rope.freq_base", 8e6)]
    {
        all.push((format!("glm-dsa.{key}"), Value::F32(value)));
    }
    all.push(("glm-dsa.expert_weights_norm".into(), Value::Bool(true)));
    let strings = |what: &str, n: usize| Value::Array(Array::Str((0..n).map(|i| format!("{what}{i}")).collect()));
    all.push(("tokenizer.ggml.model".into(), Value::Str("gpt2".into())));
    all.push(("tokenizer.ggml.tokens".into(), strings("token ", 154_880)));
    all.push(("tokenizer.ggml.token_type".into(), Value::Array(Array::I32(vec![1; 154_880]))));
    all.push(("tokenizer.ggml.merges".into(), strings("to ken", 321_649)));
    all
}

fn type_called(name: &str) -> &'static TypeInfo {
    let known = |id| if let TypeId::Known(info) = lookup(id) { Some(info) } else { None };
    (0..64).filter_map(known).find(|t| t.name == name).unwrap_or_else(|| panic!("no type {name}"))
}

/// The type of each tensor in the published UD-IQ2_XXS file.
fn iq2_xxs(layer: Option<usize>, kind: Kind) -> &'static str {
    use Kind::*;
    let last = layer == Some(LAYERS);
    let finer = layer == Some(8);
    match kind {
        TokenEmbd | Output => "Q4_K",
        QB | KvA | KB | VB | IndexK | IndexQB | EhProj => "Q8_0",
        QA | AttnOutput | GateShexp | UpShexp if finer => "Q6_K",
        QA | AttnOutput | FfnGate | FfnUp | GateShexp | UpShexp => "Q5_K",
        DownShexp if finer => "Q8_0",
        FfnDown | DownShexp => "Q6_K",
        GateExps | UpExps if last => "Q2_K",
        GateExps | UpExps if finer => "IQ2_S",
        GateExps | UpExps => "IQ2_XXS",
        DownExps if last => "Q3_K",
        DownExps if matches!(layer, Some(8 | 75..=77)) => "IQ4_XS",
        DownExps => "IQ3_XXS",
        _ => "F32",
    }
}

/// Everything Q4_K but what cannot be (rows of 192) and what is never quantised.
fn q4_k(_: Option<usize>, kind: Kind) -> &'static str {
    match kind {
        Kind::KB => "Q5_0",
        kind if kind.is_plain() => "F32",
        _ => "Q4_K",
    }
}

/// All 1,809 tensors in the order of the published shards: output first, blocks by number, alphabetical within a block.
/// Every block has an indexer, those of shared layers, too.
fn tensors(type_of: fn(Option<usize>, Kind) -> &'static str) -> Vec<NewTensor> {
    let all_full = Value::Array(Array::Bool(vec![true; 79]));
    let mut with_types = metadata();
    with_types.push(("glm-dsa.attention.indexer.types".into(), all_full));
    let mut table = table_of(&config(&with_types));
    table.sort_by_key(|(param, name, _)| (param.layer.map_or(0, |l| l + 1), name.clone()));
    let new = |(param, name, ne): (lockstep::model::Param, String, Vec<u64>)| NewTensor {
        name,
        ne,
        ty: type_called(type_of(param.layer, param.kind)),
    };
    table.into_iter().map(new).collect()
}

/// Writes the set: a first shard of metadata alone, the tensors in the others. Data is a hole.
fn write_twin(folder: &Path, tensors: &[NewTensor]) -> (PathBuf, u64) {
    let mut data = 0;
    let per_shard = tensors.len().div_ceil(SHARDS - 1);
    let name = |no: usize| folder.join(format!("GLM-5.2-{:05}-of-{SHARDS:05}.gguf", no + 1));
    for (no, part) in [&[][..]].into_iter().chain(tensors.chunks(per_shard)).enumerate() {
        let mut pairs = if no == 0 { metadata() } else { Vec::new() };
        pairs.push(("split.no".into(), Value::U16(no as u16)));
        pairs.push(("split.count".into(), Value::U16(SHARDS as u16)));
        pairs.push(("split.tensors.count".into(), Value::I32(tensors.len() as i32)));
        let mut head = Vec::new();
        write::header(&mut head, 32, &pairs, part).unwrap();
        let bytes: u64 = part.iter().map(|t| t.bytes().unwrap().next_multiple_of(32)).sum();
        let mut file = std::fs::File::create(name(no)).unwrap();
        file.write_all(&head).unwrap();
        file.set_len(head.len() as u64 + bytes).unwrap();
        data += bytes;
    }
    (name(0), data)
}

/// Runs a command to its end and measures its peak resident memory in KiB and the seconds that it computed, which do not
/// grow with what else the machine does. The kernel forgets both when the process ends, so they are read while it runs, and
/// last when it waits for its output to be taken: `command` must write more than a pipe holds (64 KiB).
fn measure(command: &mut Command) -> (Run, u64, f64) {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts");
    let proc = PathBuf::from(format!("/proc/{}", child.id()));
    let (mut peak, mut ticks, mut asleep) = (0, 0, 0);
    while asleep < 20 && child.try_wait().expect("a child").is_none() {
        let status = std::fs::read_to_string(proc.join("status")).unwrap_or_default();
        let field = |key: &str| status.lines().find_map(|l| l.strip_prefix(key)).map(str::trim).unwrap_or_default();
        peak = field("VmHWM:").trim_end_matches(" kB").parse().unwrap_or(peak);
        let stat = std::fs::read_to_string(proc.join("stat")).unwrap_or_default();
        // Behind the name in parentheses: time in user mode is the twelfth, in the kernel the thirteenth.
        let after = stat.rsplit(')').next().unwrap_or_default();
        let both: Option<u64> = after.split_whitespace().skip(11).take(2).map(|t| t.parse::<u64>().ok()).sum();
        ticks = both.filter(|t| *t > 0).unwrap_or(ticks);
        asleep = if field("State:").starts_with('S') { asleep + 1 } else { 0 };
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(asleep == 20, "it ended before its memory was read: too little output");
    (Run::from(child.wait_with_output().expect("a child")), peak, ticks as f64 / 100.0) // Linux: 100 ticks a second
}

/// Runs inspect under measurement: `--all --json` writes more than a pipe holds.
fn measured(path: &Path, args: &[&str]) -> Run {
    let (run, peak, seconds) = measure(lockstep().args(["inspect", "--all", "--json", "-m"]).arg(path).args(args));
    eprintln!("inspect {}: {seconds} s, peak {peak} KiB", args.join(" "));
    assert!(peak > 1000 && peak < PEAK_KIB, "{peak} KiB at the peak");
    assert!(seconds < SECONDS, "{seconds} s");
    run
}

fn number(json: &serde_json::Value) -> u64 {
    json.as_u64().unwrap()
}

#[test]
fn the_published_file_is_covered() {
    let tensors = tensors(iq2_xxs);
    assert_eq!(tensors.len(), 1809);
    assert_eq!(tensors[0].name, "output.weight");
    let place = |name: &str| tensors.iter().position(|t| t.name == name).unwrap();
    assert!(place("blk.3.attn_kv_a_mqa.weight") < place("blk.3.attn_q_a.weight"));
    let folder = tempfile::tempdir().unwrap();
    let (path, data) = write_twin(folder.path(), &tensors);
    // The published sum of shapes and block sizes; every tensor is a multiple of 32 bytes.
    assert_eq!(data, 238_449_091_584);

    let run = inspect(&path, &["--tp", "8"]).exits(0);
    // 57 shared layers hold an indexer of five tensors that they do not use.
    run.says(
        "1809 tensors: 1524 bound, 285 known-unused, 0 UNBOUND; 0 parameters without a source, 0 of the wrong shape.",
    )
    .says("285 x indexer of a shared layer")
    .says("GLM-5.2's pattern")
    .says("MTP: whole")
    .says("0-2, 6, 10, .., 74")
    .silent_on("cannot dequantise")
    .silent_on("row-covering");
    for line in run.stdout.lines().skip(1) {
        assert!(line.chars().count() <= 120, "{line}");
    }
    let found: serde_json::Value = serde_json::from_str(&measured(&path, &["--tp", "8"]).exits(0).stdout).unwrap();
    assert_eq!(found["coverage"]["unreadable"].as_array().unwrap().len(), 0);
    let parameters = found["plan"]["parameters"].as_array().unwrap();
    let of = |ty: &str| parameters.iter().filter(|p| p["type"] == ty).count();
    // Gate and up of 74 layers, and of block 8; down of 71 layers.
    assert_eq!((of("IQ2_XXS"), of("IQ2_S"), of("IQ3_XXS")), (148, 2, 71));
    // 256 experts, 2048 / 8 rows (or columns, one super-block) a rank, of 24 blocks (or 6144 rows).
    for (ty, block_bytes) in [("IQ2_XXS", 66), ("IQ2_S", 82), ("IQ3_XXS", 98)] {
        for p in parameters.iter().filter(|p| p["type"] == ty) {
            for rank in 0..8 {
                assert_eq!(number(&p["bytes_per_rank"][rank]), 256 * 256 * 24 * block_bytes, "{}", p["parameter"]);
            }
        }
    }
}

#[test]
fn the_plan_of_a_q4_k_file() {
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = write_twin(folder.path(), &tensors(q4_k));
    let run = measured(&path, &["--tp", "8"]).exits(0);
    let found: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    let parameters = found["plan"]["parameters"].as_array().unwrap();
    assert!(parameters.iter().all(|p| p["cut"] != "row-covering"), "aligned everywhere at 8");
    let cut_by_row = parameters.iter().filter(|p| p["cut"] == "row-parallel").count();
    assert_eq!(cut_by_row, 78 + 3 + 75 + 75, "o_proj, dense down, expert down, shared down");
    assert_eq!(parameters.iter().filter(|p| p["parameter"].as_str().unwrap().ends_with("indexer.proj")).count(), 21);

    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    for rank in 0..8 {
        let trunk = gib(number(&found["plan"]["trunk_bytes_per_rank"][rank]));
        assert!((trunk / 49.8 - 1.0).abs() < 0.005, "rank {rank}: {trunk} GiB");
        let mtp = gib(number(&found["plan"]["mtp_bytes_per_rank"][rank]));
        assert!((mtp - 0.7).abs() < 0.05, "rank {rank}: {mtp} GiB of MTP");
    }
    inspect(&path, &["--tp", "8", "--strict-blocks"]).exits(0).silent_on("row-covering").says("0-7 of 8");

    // At 16 an expert has 128 columns a rank: half a super-block, held whole, twice the bytes.
    let run = measured(&path, &["--tp", "16"]).exits(0);
    let found: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    let covering = found["plan"]["parameters"].as_array().unwrap().iter().filter(|p| p["cut"] == "row-covering");
    let mut seen = 0;
    for p in covering {
        let name = p["parameter"].as_str().unwrap();
        assert!(name.ends_with("ffn_down_exps") || name.ends_with("ffn_down_shexp"), "{name}");
        assert_eq!(p["times"].as_f64().unwrap(), 2.0);
        seen += 1;
    }
    assert_eq!(seen, 75 + 75);
    let strict = inspect(&path, &["--tp", "16", "--strict-blocks"]).exits(2);
    assert!(strict.stderr.contains("150 tensors") && strict.stderr.contains("without cutting: 1, 2, 4, 8\n"));
    let refused = inspect(&path, &["--tp", "128"]).exits(2);
    assert!(refused.stderr.contains("attention heads (64)"), "{}", refused.stderr);
}
