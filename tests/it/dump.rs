//! Dumps: what is written is what is read, nothing half-written is left, and every way in which somebody else's dump can
//! be wrong is refused with the file, the point, what was expected and what was found.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::common::running::open;
use crate::common::{NANO52, golden, lockstep, run};
use lockstep::engine::{Engine, Options};
use lockstep::model::{Block, Place, Point};
use lockstep::probe::Trace;
use lockstep::probe::dump::{self, Meta};
use lockstep::verify::subject::{points_of, run_prompt};
use serde_json::{Value, json};

const IDS: [u32; 5] = [7, 100, 3, 2000, 9];

/// A run on this many ranks; each is made once.
fn trace(tp: usize) -> &'static Trace {
    static RUNS: [OnceLock<Trace>; 3] = [const { OnceLock::new() }; 3];
    RUNS[tp.ilog2() as usize].get_or_init(|| {
        let checkpoint = open(NANO52);
        let options = Options { chunk: 8, cache_tokens: 64, ..Options::for_one(checkpoint.config()) };
        let mut engine = Engine::cpu(checkpoint, tp, options).unwrap();
        run_prompt(&mut engine, &IDS, points_of(None)).unwrap().0
    })
}

fn meta() -> Meta {
    Meta {
        model: "nano52".into(),
        digest: String::new(),
        recipe: "strict".into(),
        device: Some("cpu".into()),
        rms_eps: Some(1e-5),
        latent_eps: None,
        index_eps: Some(1e-6),
    }
}

fn written(folder: &Path, tp: usize) -> PathBuf {
    let dir = folder.join("dump");
    dump::write(&dir, trace(tp), &meta()).unwrap();
    dir
}

fn entries(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_is_written_is_read() {
    let folder = tempfile::tempdir().unwrap();
    for tp in [1, 4] {
        let (dir, original) = (folder.path().join(format!("tp{tp}")), trace(tp));
        dump::write(&dir, original, &meta()).unwrap();
        let back = dump::read(&dir).unwrap();
        assert_eq!((back.meta, back.notes), (meta(), vec![]));
        assert_eq!((&back.trace.ids, back.trace.tp, back.trace.attention), (&original.ids, tp, original.attention));
        assert_eq!(back.trace.places(), original.places());
        assert!(original.places().len() > 100, "{} points", original.places().len());
        for place in original.places() {
            assert_eq!(back.trace.ranks(place), original.ranks(place), "{place}");
        }
        assert!(matches!(dump::write(&dir, original, &meta()), Err(dump::DumpError::Exists { .. })));
    }
    assert_eq!(entries(folder.path()), ["tp1", "tp4"], "no partial folder is left");
    let nowhere = Path::new("/dev/null/dump");
    assert!(matches!(dump::write(nowhere, trace(1), &meta()), Err(dump::DumpError::Io { .. })));
}

/// Edits dump.json.
fn edit(dir: &Path, change: impl FnOnce(&mut Value)) {
    let path = dir.join("dump.json");
    let mut index: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut index);
    std::fs::write(path, index.to_string()).unwrap();
}

/// Asserts that a changed dump is refused with a message that has every part.
fn refused(what: &str, change: impl FnOnce(&mut Value), says: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let dir = written(folder.path(), 2);
    edit(&dir, change);
    let message = dump::read(&dir).unwrap_err().to_string();
    for part in says {
        assert!(message.contains(part), "{what}: no {part:?} in {message:?}");
    }
}

/// The entry of a point on a rank.
fn entry<'a>(index: &'a mut Value, name: &str, rank: u64) -> &'a mut Value {
    let all = index["points"].as_array_mut().unwrap();
    all.iter_mut().find(|e| e["name"] == name && e["rank"] == rank).unwrap()
}

#[test]
fn hostile_descriptions_are_refused() {
    let at = "layers.1.attn.q_a";
    refused("format", |i| i["format"] = json!("x"), &["dump.json", "format", "lockstep-dump", "x"]);
    refused("version", |i| i["version"] = json!(2), &["version: expected 1, found 2"]);
    refused("tp", |i| i["tp"] = json!(1u64 << 40), &["tp: expected 1 to 1024"]);
    refused("no ids", |i| i["token_ids"] = json!([]), &["token_ids"]);
    refused("positions", |i| i["positions"] = json!([0, 1, 2, 3, 5]), &["positions", "4 at place 4", "found 5"]);
    refused("positions", |i| i["positions"] = json!([0]), &["positions", "5, one per token"]);
    refused("attention", |i| i["settings"]["attention"] = json!("flash"), &["settings.attention", "flash"]);
    refused("no points", |i| drop(i.as_object_mut().unwrap().remove("points")), &["dump.json", "points"]);
    refused("rank", |i| entry(i, at, 1)["rank"] = json!(2), &[at, "rank: expected below 2, found 2"]);
    refused("twice", |i| entry(i, at, 1)["rank"] = json!(0), &[at, "one per rank", "two of rank 0"]);
    refused("layout", |i| entry(i, at, 0)["layout"] = json!("partial"), &[at, "expected replicated, found partial"]);
    refused("axis", |i| entry(i, "logits", 0)["axis"] = json!(1), &["logits", "axis"]);
    refused("dtype", |i| entry(i, "layers.1.ffn.expert_ids", 0)["dtype"] = json!("F32"), &["expected I32, found F32"]);
    refused("rows", |i| entry(i, at, 0)["shape"][0] = json!(6), &[at, "5 rows", "[6, "]);
    refused(
        "width",
        |i| entry(i, at, 0)["shape"][1] = json!(17),
        &["rank0.safetensors", at, "shape: expected [5, 17]"],
    );
    let head = "layers.1.attn.q_raw";
    for shape in [json!([5, 1u64 << 60, 0]), json!([5, 0, 0]), json!([5, 1u64 << 40, 1u64 << 40])] {
        refused("size", |i| entry(i, head, 0)["shape"] = shape, &["dump.json", head, "axes of at least 1", "[5, "]);
    }
    refused("axes", |i| entry(i, at, 0)["shape"] = json!([5]), &[at, "1 axes"]);
    for path in ["../rank0.safetensors", "/etc/passwd", "..", "", "a/b"] {
        refused("file", |i| entry(i, at, 0)["file"] = json!(path), &[at, "file of the dump's own folder"]);
    }
    refused("absent file", |i| entry(i, at, 0)["file"] = json!("rank9.safetensors"), &["rank9.safetensors"]);
    refused("not safetensors", |i| entry(i, at, 0)["file"] = json!("dump.json"), &["not safetensors"]);
    let remove = |i: &mut Value| {
        i["points"].as_array_mut().unwrap().retain(|e| !(e["name"] == at && e["rank"] == 1));
    };
    refused("a missing rank", remove, &[at, "ranks: expected all 2, found none of 1"]);
    let rename = |i: &mut Value| {
        for rank in [0, 1] {
            entry(i, "layers.1.attn.q_a", rank)["name"] = json!("layers.99.attn.q_a");
        }
    };
    refused("a tensor that is not there", rename, &["rank0.safetensors", "layers.99.attn.q_a", "tensor: expected one"]);
}

#[test]
fn unknown_points_are_left_out_with_a_note() {
    let folder = tempfile::tempdir().unwrap();
    let dir = written(folder.path(), 1);
    edit(&dir, |i| entry(i, "layers.1.attn.q_a", 0)["name"] = json!("layers.1.attn.magic"));
    let back = dump::read(&dir).unwrap();
    assert_eq!(back.notes.len(), 1);
    assert!(back.notes[0].contains("layers.1.attn.magic"), "{:?}", back.notes);
    let q_a = |layer| back.trace.ranks(Place::trunk(layer, Point::QA));
    assert!(q_a(1).is_none() && q_a(2).is_some());
}

#[test]
fn what_no_engine_shows_here_is_left_out_like_unknown_points() {
    let folder = tempfile::tempdir().unwrap();
    let dir = written(folder.path(), 1);
    edit(&dir, |i| {
        entry(i, "layers.1.attn.q_a", 0)["name"] = json!("mtp.0.attn.q_a");
        entry(i, "logits", 0)["name"] = json!("mtp.0.logits");
        entry(i, "final_norm", 0)["name"] = json!("next_token");
    });
    let back = dump::read(&dir).unwrap();
    assert_eq!(back.notes.len(), 3, "{:?}", back.notes);
    let shown = |place: &Place| matches!(place.block, Block::Front | Block::Trunk(_));
    assert!(back.trace.places().iter().all(shown), "{:?}", back.trace.places());
}

#[test]
fn a_truncated_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let dir = written(folder.path(), 1);
    let path = dir.join("rank0.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    for keep in [0, 7, 100, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..keep]).unwrap();
        assert!(matches!(dump::read(&dir), Err(dump::DumpError::Safetensors { .. })), "{keep} bytes");
    }
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(dump::read(&dir), Err(dump::DumpError::Io { .. })));
}

/// The schema names every key that is written, and requires none that is not.
#[test]
fn the_schema_describes_what_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let dir = written(folder.path(), 2);
    let index: Value = serde_json::from_slice(&std::fs::read(dir.join("dump.json")).unwrap()).unwrap();
    let schema: Value = serde_json::from_str(dump::SCHEMA).unwrap();
    fits(&schema, &index, "dump.json");
}

fn fits(schema: &Value, value: &Value, at: &str) {
    if let Some(constant) = schema.get("const") {
        assert_eq!(constant, value, "{at}");
    }
    if let Some(allowed) = schema.get("enum") {
        assert!(allowed.as_array().unwrap().contains(value), "{at}: {value}");
    }
    let is = match schema["type"].as_str() {
        None => true,
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("integer") => value.is_u64(),
        Some("number") => value.is_number(),
        Some(other) => panic!("{other}"),
    };
    assert!(is, "{at}: {value}");
    for required in schema["required"].as_array().into_iter().flatten() {
        assert!(value.get(required.as_str().unwrap()).is_some(), "{at} lacks {required}");
    }
    if let (Some(object), Some(properties)) = (value.as_object(), schema.get("properties")) {
        for (key, value) in object {
            assert!(properties.get(key).is_some(), "the schema does not know {at}.{key}");
            fits(&properties[key], value, &format!("{at}.{key}"));
        }
    }
    for (i, value) in value.as_array().into_iter().flatten().enumerate() {
        fits(&schema["items"], value, &format!("{at}[{i}]"));
    }
}

#[test]
fn the_command_writes_what_was_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("out");
    let model = golden(NANO52);
    let command = |extra: &[&str]| {
        run(lockstep().arg("dump").arg("-m").arg(&model).arg("--out").arg(&dir).args(["--tp", "2"]).args(extra))
    };
    command(&["--ids", "7,x"]).exits(2);
    command(&["--ids", "7,99999"]).exits(2);
    command(&["--filter", "("]).exits(2);
    command(&["--ids", "7,8", "--filter", "no such point"]).exits(2);
    assert!(entries(folder.path()).is_empty());
    command(&["--ids", "7,8,9", "--layers", "1,3-4", "--filter", r"attn\.q_a$|output$"]).exits(0).says("9 points of 3");
    let back = dump::read(&dir).unwrap();
    let names: Vec<String> = back.trace.places().iter().map(Place::to_string).collect();
    let layer = |l: usize| [format!("layers.{l}.attn.q_a"), format!("layers.{l}.output")];
    // With what the chosen layers and the head read from others: the outputs of layers 0, 2 and 5.
    let output = |l: usize| vec![format!("layers.{l}.output")];
    let all = [output(0), layer(1).to_vec(), output(2), layer(3).to_vec(), layer(4).to_vec(), output(5)];
    assert_eq!(names, all.concat());
    assert_eq!((back.trace.tp, back.trace.ids), (2, vec![7, 8, 9]));
    assert!(back.meta.digest.starts_with("sha256-sampled:"));
    let again = command(&["--ids", "7,8,9"]).exits(2);
    assert!(again.stderr.contains("something there already"), "{}", again.stderr);
}
