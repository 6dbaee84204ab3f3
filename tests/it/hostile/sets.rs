//! Sets of shards that are incomplete, mixed or mislabelled, and folders without exactly one model.

use std::path::{Path, PathBuf};

use super::Cases;
use crate::common::{Model, pico_shard, put, tiny, tiny_metadata, write_set, zeros};
use lockstep::gguf::value::Value;
use lockstep::quant::QuantType;

fn set() -> Vec<Model> {
    let shards = tiny().shards(27);
    assert_eq!(shards.len(), 3);
    shards
}

fn name(path: &Path) -> &str {
    path.file_name().unwrap().to_str().unwrap()
}

/// Copies the golden set and returns its paths.
fn pico(folder: &Path) -> Vec<PathBuf> {
    let copy = |number| {
        let (from, to) = (pico_shard(number), folder.join(name(&pico_shard(number))));
        std::fs::write(&to, std::fs::read(from).unwrap()).unwrap(); // not copy: goldens are read-only
        to
    };
    (1..=4).map(copy).collect()
}

fn edited(cases: &mut Cases, what: &str, want: &[&str], shard: usize, edit: impl Fn(Model) -> Model) {
    let folder = cases.folder();
    let mut shards = set();
    shards[shard] = edit(shards[shard].clone());
    let paths = write_set(&folder, "tiny", &shards);
    cases.path(what, paths[0].clone(), want, name(&paths[shard]));
}

/// Adds the cases of split sets.
pub fn add(cases: &mut Cases) {
    for missing in 1..=4 {
        for opened in (1..=4).filter(|o| *o != missing) {
            let paths = pico(&cases.folder());
            std::fs::remove_file(&paths[missing - 1]).unwrap();
            let want = [&format!("shards {missing} are missing")[..], "4 files", "found 3"];
            let what = format!("shard {missing} missing, opened by {opened}");
            cases.path(what, paths[opened - 1].clone(), &want, name(&paths[opened - 1]));
        }
        let folder = cases.folder();
        let paths = pico(&folder);
        std::fs::remove_file(&paths[missing - 1]).unwrap();
        cases.path(format!("shard {missing} missing, by folder"), folder, &[&format!("shards {missing} are")], "pico");

        // A shard's bytes in another's place: a copy too many, or a shell pattern that took a shard for the output.
        let paths = pico(&cases.folder());
        let other = missing % 4;
        std::fs::copy(&paths[other], &paths[missing - 1]).unwrap();
        let what = format!("shard {missing} holds the bytes of {}", other + 1);
        cases.path(what, paths[other].clone(), &["split.no", &other.to_string()], name(&paths[missing - 1]));
    }
    let paths = pico(&cases.folder());
    for gone in [&paths[1], &paths[2]] {
        std::fs::remove_file(gone).unwrap();
    }
    cases.path("two shards missing", paths[0].clone(), &["shards 2-3 are missing"], "pico");

    // Joined with cat, in any order and with a header-only first shard.
    let all: Vec<Vec<u8>> = (1..=4).map(|n| std::fs::read(pico_shard(n)).unwrap()).collect();
    for (what, order) in [("1 2 3 4", &[0, 1, 2, 3][..]), ("2 1", &[1, 0]), ("4 4", &[3, 3])] {
        let joined: Vec<u8> = order.iter().flat_map(|i| all[*i].clone()).collect();
        let at = all[order[0]].len().to_string();
        cases.file(format!("cat of {what}"), "joined.gguf", &joined, &["second GGUF header", "cat", &at]);
    }
    let header_only = Model { metadata: tiny_metadata(), tensors: Vec::new() }.bytes();
    let joined = [&header_only[..], &tiny().bytes()].concat();
    let at = header_only.len().to_string();
    cases.file("cat after a header-only shard", "joined.gguf", &joined, &["second GGUF header", "offset", &at]);

    // Names that do not lead to the siblings.
    for number in 1..=4 {
        let what = format!("shard {number} renamed");
        let want = [&format!("-{number:05}-of-00004.gguf")[..], "Restore the name"];
        cases.file(what, "model.gguf", &all[number - 1], &want);
    }
    for file in ["m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-00001-of-00000.gguf", "m-99999-of-99999.gguf"] {
        cases.file(format!("name {file}"), file, &tiny().bytes(), &["in the file name"]);
    }
    let folder = cases.folder();
    let paths: Vec<PathBuf> = [1, 2].map(|n| tiny().write(&folder, &format!("m-{n:05}-of-00002.gguf"))).into();
    cases.path("whole models named as shards", paths[0].clone(), &["split.count"], name(&paths[0]));

    // Keys that disagree.
    let number = |key: &'static str, value: Value| move |m: Model| m.set(key, value.clone());
    edited(cases, "split.count 4 in one", &["split.count", "3", "4"], 1, number("split.count", Value::U16(4)));
    edited(cases, "split.count as text", &["split.count"], 1, number("split.count", Value::Str("3".into())));
    edited(cases, "split.no 7", &["split.no", "7"], 2, number("split.no", Value::U16(7)));
    edited(cases, "split.no negative", &["split.no"], 2, number("split.no", Value::I32(-2)));
    edited(cases, "no split.no", &["split.no", "none"], 1, |m| m.unset("split.no"));
    edited(cases, "no split.count", &["split.count"], 2, |m| m.unset("split.count"));
    let other = number("split.tensors.count", Value::I32(99));
    edited(cases, "another total", &["split.tensors.count", "99"], 1, other);
    edited(cases, "another model", &["general.name"], 1, number("general.name", Value::Str("Other".into())));
    edited(cases, "another width", &["glm-dsa.embedding_length"], 2, number("glm-dsa.embedding_length", Value::U32(8)));
    edited(cases, "a tensor less", &["split.tensors.count"], 0, |mut m| {
        m.tensors.pop();
        m
    });
    let first = set()[0].tensors[3].0.name.clone();
    let twice = |mut m: Model| {
        m.tensors[5].0.name = first.clone();
        m.tensors[5] = zeros(&first, &[32], QuantType::F32);
        m
    };
    edited(cases, "a tensor in two shards", &[&first, "named twice", "offset"], 2, twice);
    let folder = cases.folder();
    let single = tiny().set("split.count", Value::U16(1)).set("split.tensors.count", Value::I32(7));
    let path = single.write(&folder, "one.gguf");
    cases.path("a set of one with another total", path, &["split.tensors.count", "7"], "one.gguf");
    for (what, bytes, want) in [
        ("a page", &b"<html>"[..], "a web page"),
        ("nothing", b"", "an empty file"),
        ("a pointer", b"version https://git-lfs.github.com/spec/v1\nsize 2690880\n", "2690880"),
    ] {
        let paths = pico(&cases.folder());
        std::fs::write(&paths[1], bytes).unwrap();
        cases.path(format!("shard 2 is {what}"), paths[0].clone(), &[want], name(&paths[1]));
    }
    let paths = pico(&cases.folder());
    std::fs::remove_file(&paths[2]).unwrap();
    std::fs::create_dir(&paths[2]).unwrap();
    cases.path("shard 3 is a folder", paths[0].clone(), &["shards 3 are missing"], "pico");

    // Folders.
    let folder = cases.folder();
    cases.path("empty folder", folder.clone(), &["GGUF"], folder.to_str().unwrap());
    let folder = cases.folder();
    for file in ["a.gguf", "b.gguf"] {
        tiny().write(&folder, file);
    }
    cases.path("two models in a folder", folder, &["one model", "2", "a.gguf, b.gguf"], "");
    let folder = cases.folder();
    pico(&folder);
    write_set(&folder, "tiny", &set());
    cases.path("two sets in a folder", folder, &["one model", "tiny (3 shards)", "(4 shards)"], "");
    let folder = cases.folder();
    std::fs::create_dir(folder.join("sub")).unwrap();
    tiny().write(&folder.join("sub"), "a.gguf");
    cases.path("model in a subfolder", folder, &["name that"], "sub");
    let folder = cases.folder();
    put(&folder, "model.safetensors", b"");
    cases.path("safetensors without config.json", folder, &["config.json"], "");
    let folder = cases.folder();
    cases.path("no such file", folder.join("none.gguf"), &["os error"], "none.gguf");
    cases.path("a device", "/dev/null".into(), &["regular file"], "/dev/null");
}
