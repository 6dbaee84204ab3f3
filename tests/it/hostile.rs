//! Hostile files: cut, flipped, swapped, mislabelled. Each must be refused with the file, the place, what was expected and
//! what was found; none may panic, take memory by an unchecked number, or write to stdout.

mod config;
mod container;
mod folders;
mod sets;

use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{Run, inspect, pico_shard, put, run, tiny, write_set};
use lockstep::checkpoint::Checkpoint;
use lockstep::checkpoint::oracle::Raw;
use lockstep::comm::Threads;
use lockstep::device::cpu::CpuDevice;
use lockstep::device::{BufId, BufRows, BufSpec, CacheShape, Device, IndexId, Limits, Rows, Stores, View};
use lockstep::gguf::value::{Array, Value};
use lockstep_reference::config::{Eps, RefConfig};

/// One hostile file or folder.
pub struct Case {
    /// What was done to it.
    name: String,
    /// What is opened.
    path: PathBuf,
    /// What the message must name: the file or shard at fault, and the place in it.
    want: Vec<String>,
}

/// Cases as they are made: each gets its own folder, since shards are found by name.
pub struct Cases {
    root: tempfile::TempDir,
    all: Vec<Case>,
}

impl Cases {
    fn new() -> Self {
        Cases { root: tempfile::tempdir().unwrap(), all: Vec::new() }
    }

    /// A new empty folder.
    fn folder(&self) -> PathBuf {
        let folder = self.root.path().join(format!("{:03}", self.all.len()));
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    /// A case that is one file with these bytes.
    fn file(&mut self, name: impl Into<String>, file: &str, bytes: &[u8], want: &[&str]) {
        let path = put(&self.folder(), file, bytes);
        self.path(name, path, want, file);
    }

    /// A case of files that stand already; the message must name `culprit`.
    fn path(&mut self, name: impl Into<String>, path: PathBuf, want: &[&str], culprit: &str) {
        let want = want.iter().copied().chain([culprit]).map(str::to_string).collect();
        self.all.push(Case { name: name.into(), path, want });
    }
}

/// Runs the binary with at most `limit_kib` of private memory (heap, stacks, private maps; file maps do not count).
fn inspect_within(limit_kib: u64, model: &Path) -> Run {
    let script = format!("ulimit -d {limit_kib} && exec \"$0\" inspect -m \"$1\"");
    run(Command::new("sh").arg("-c").arg(script).arg(env!("CARGO_BIN_EXE_lockstep")).arg(model))
}

const LIMIT_KIB: u64 = 200 * 1000;

fn faults_of(case: &Case, message: &str) -> Vec<String> {
    let mut faults: Vec<String> =
        case.want.iter().filter(|w| !message.contains(w.as_str())).map(|w| format!("does not name {w:?}")).collect();
    // What the operating system refuses is told in its own words.
    if !message.contains("(os error") {
        faults.extend(["expected", "found"].iter().filter(|w| !message.contains(*w)).map(|w| format!("no {w:?}")));
    }
    faults
}

#[test]
fn every_hostile_file_is_refused_with_its_place() {
    let mut cases = Cases::new();
    container::cuts(&mut cases);
    container::lengths(&mut cases);
    container::entries(&mut cases);
    container::magics(&mut cases);
    container::huge(&mut cases);
    sets::add(&mut cases);
    config::add(&mut cases);
    folders::add(&mut cases);
    let mut failures = Vec::new();
    let started = Instant::now();
    for case in &cases.all {
        let mut fail = |what: String| failures.push(format!("{}: {what}", case.name));
        let opened = catch_unwind(|| Checkpoint::open(Some(&case.path)).map(|_| ()).map_err(|e| e.to_string()));
        match opened {
            Err(_) => fail("panicked".into()),
            Ok(Ok(())) => fail("was accepted".into()),
            Ok(Err(message)) => {
                for fault in faults_of(case, &message) {
                    fail(format!("{fault} in: {message}"));
                }
            }
        }
    }
    let in_process = started.elapsed();
    for case in &cases.all {
        let mut fail = |what: String| failures.push(format!("{}: binary: {what}", case.name));
        let run = inspect_within(LIMIT_KIB, &case.path);
        if run.code != Some(2) {
            fail(format!("exit {:?} within {LIMIT_KIB} KiB: {}", run.code, run.stderr));
        }
        if !run.stdout.is_empty() {
            fail(format!("wrote to stdout: {}", run.stdout));
        }
        if run.stderr.contains("panicked") || !run.stderr.starts_with("lockstep: ") {
            fail(format!("stderr: {}", run.stderr));
        }
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    let total = started.elapsed();
    eprintln!("{} hostile cases; in process {in_process:?}, the binary {:?}", cases.all.len(), total - in_process);
    assert!(cases.all.len() >= 200, "only {} cases", cases.all.len());
}

/// The negative twin: the files that the cases were made from are accepted, under the same limit.
#[test]
fn unharmed_files_open() {
    let folder = tempfile::tempdir().unwrap();
    let single = tiny().write(folder.path(), "tiny.gguf");
    let set = tempfile::tempdir().unwrap();
    let shards = write_set(set.path(), "tiny", &tiny().shards(30));
    let hf = tempfile::tempdir().unwrap();
    folders::write_valid(hf.path());
    let all = [single, shards[0].clone(), shards[2].clone(), set.path().into(), hf.path().into()];
    for path in all.into_iter().chain((1..=4).map(pico_shard)) {
        inspect_within(LIMIT_KIB, &path).exits(0).says("Whole: ");
    }
}

/// What two readings of a model's rope base and dense width say, which must be the same.
fn both_read(path: &Path) -> (f64, usize) {
    let checkpoint = Checkpoint::open(Some(path)).unwrap();
    let (engine, reference) = (checkpoint.config(), RefConfig::from_raw(&Raw(checkpoint.source()), Eps::File).unwrap());
    assert_eq!((engine.rope_base, engine.ffn), (reference.rope_theta, reference.ffn));
    assert_eq!((engine.expert_ffn, engine.heads), (reference.moe_ffn, reference.heads));
    (engine.rope_base, engine.ffn)
}

/// Numbers may stand once per layer, and where no layer uses one it may be any.
#[test]
fn numbers_by_layer_are_read_alike() {
    let folder = tempfile::tempdir().unwrap();
    for (key, list) in [
        ("feed_forward_length", [64, 0, 7]),
        ("expert_feed_forward_length", [0, 32, 32]),
        ("attention.head_count", [2, 2, 2]),
        ("attention.key_length", [40, 40, 40]),
        ("expert_used_count", [2, 2, 2]),
    ] {
        let model = tiny().set(&format!("glm-dsa.{key}"), Value::Array(Array::U32(list.to_vec())));
        assert_eq!(both_read(&model.write(folder.path(), "layers.gguf")), (1e6, 64), "{key}");
    }
    let unscaled = tiny().set("glm-dsa.rope.scaling.type", Value::Str("none".into()));
    let unscaled = unscaled.set("glm-dsa.rope.scaling.factor", Value::F32(1.0));
    assert_eq!(both_read(&unscaled.write(folder.path(), "unscaled.gguf")), (1e6, 64));
}

#[test]
fn forms_of_the_same_config_are_read_alike() {
    for (what, config) in folders::harmless() {
        let folder = tempfile::tempdir().unwrap();
        folders::write_valid(folder.path());
        put(folder.path(), "config.json", config.to_string().as_bytes());
        assert_eq!(both_read(folder.path()), (1e6, 64), "{what}");
    }
}

/// A buffer of a size that no file confirmed ends in an error that names it, not in an abort.
#[test]
fn absurd_buffers_are_errors() {
    let alloc = |stores: &Stores, tokens: usize| {
        let limits = Limits { tokens, sequences: 1, logits: 1, pages: 1, page: 1 };
        let mut device = CpuDevice::new(3, Arc::new(Threads::new(4, Duration::ZERO)), 0);
        device.alloc(stores, limits).map(|()| device)
    };
    let buf = |width| {
        let spec = BufSpec { rows: BufRows::Step(Rows::Tokens), width, fill: None };
        Stores { bufs: vec![spec], ..Stores::default() }
    };
    let index = |width| Stores { indices: vec![width], ..Stores::default() };
    let cache = |width| CacheShape { layers: 1, page: 1, pages: 2, width };
    for (rows, width) in [(usize::MAX, 2), (1 << 32, 1 << 32), (1, 1 << 39), (512, 1 << 31)] {
        let wanted = [format!("{rows} rows of {width} values"), "rank 3".into()];
        for stores in [buf(width), index(width)] {
            let message = alloc(&stores, rows).err().unwrap().to_string();
            assert!(wanted.iter().all(|w| message.contains(w.as_str())), "{message}");
        }
    }
    assert!(alloc(&Stores { caches: vec![cache(usize::MAX)], ..Stores::default() }, 1).is_err());
    assert_eq!(alloc(&index(3), 2).unwrap().read_index(IndexId(0), 2).unwrap(), [-1; 6]);
    assert_eq!(alloc(&buf(3), 2).unwrap().read(View::cols(BufId(0), 0, 3), 2).unwrap(), [0.0; 6]);
}

/// The memory limit of the cases is a real one: a fraction of it stops the same binary on a good file.
#[test]
fn the_memory_limit_bites() {
    let folder = tempfile::tempdir().unwrap();
    let path = tiny().write(folder.path(), "tiny.gguf");
    let run = inspect_within(64, &path);
    assert_ne!(run.code, Some(0), "{}", run.stdout);
    inspect(&path, &[]).exits(0);
}
