//! Damage inside one GGUF file.

use super::Cases;
use crate::common::{self, Model, pico_shard, tiny, zeros};
use lockstep::gguf::value::{Array, Value};
use lockstep::quant::QuantType;

/// What stands at an offset of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    /// A u64 that says how many bytes or things follow.
    Count,
    /// A u32 that is a type id or a number of axes.
    Id,
    /// Bytes.
    Data,
}

/// An independent walk over a valid header: where each field stands. Scalars of 4 bytes, strings and one bool array are
/// all the values that [`micro`] has.
fn walk(bytes: &[u8]) -> Vec<(usize, Field)> {
    let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let (tensors, pairs) = (u64_at(8), u64_at(16));
    let mut fields = vec![(0, Field::Data), (4, Field::Id), (8, Field::Count), (16, Field::Count)];
    let mut at = 24;
    let string = |at: &mut usize, fields: &mut Vec<(usize, Field)>| {
        fields.extend([(*at, Field::Count), (*at + 8, Field::Data)]);
        *at += 8 + u64_at(*at);
    };
    for _ in 0..pairs {
        string(&mut at, &mut fields);
        let ty = u32_at(at);
        fields.push((at, Field::Id));
        at += 4;
        match ty {
            8 => string(&mut at, &mut fields),
            9 => {
                fields.extend([(at, Field::Id), (at + 4, Field::Count), (at + 12, Field::Data)]);
                at += 12 + u64_at(at + 4);
            }
            _ => {
                fields.push((at, Field::Data));
                at += 4;
            }
        }
    }
    for _ in 0..tensors {
        string(&mut at, &mut fields);
        let axes = u32_at(at) as usize;
        fields.push((at, Field::Id));
        at += 4;
        fields.extend((0..axes).map(|i| (at + 8 * i, Field::Data)));
        at += 8 * axes;
        fields.extend([(at, Field::Id), (at + 4, Field::Data)]);
        at += 12;
    }
    fields.push((at, Field::Data)); // the padding before the data
    fields
}

/// The smallest file that has every kind of field.
fn micro() -> Model {
    let metadata = vec![
        ("general.architecture".into(), Value::Str("glm-dsa".into())),
        ("glm-dsa.block_count".into(), Value::U32(3)),
        ("flags".into(), Value::Array(Array::Bool(vec![true, false, true]))),
    ];
    let tensors = vec![
        zeros("a.weight", &[32, 3], QuantType::Q8_0),
        zeros("b.weight", &[5], QuantType::F32),
        zeros("c.weight", &[256, 2, 2], QuantType::Q4_K),
    ];
    Model { metadata, tensors }
}

/// Cuts at every field of a header and through the data.
pub fn cuts(cases: &mut Cases) {
    let bytes = micro().bytes();
    let fields = walk(&bytes);
    for (at, _) in &fields[..fields.len() - 1] {
        let want = if *at == 0 { "an empty file" } else { "offset" };
        cases.file(format!("cut at {at}"), "cut.gguf", &bytes[..*at], &[want]);
    }
    let header = fields.last().unwrap().0;
    let data = header.next_multiple_of(32);
    // Tensors of 102, 20 and 576 bytes, each padded to 32.
    for (at, tensor) in [
        (header, "a.weight"),
        (data, "a.weight"),
        (data + 101, "a.weight"),
        (data + 102, "b.weight"),
        (data + 128, "b.weight"),
        (data + 147, "b.weight"),
        (data + 160, "c.weight"),
        (data + 735, "c.weight"),
    ] {
        cases.file(format!("cut at {at}"), "cut.gguf", &bytes[..at], &[tensor, "bytes are missing", &at.to_string()]);
    }
    // A real shard, from the magic to its last tensor's last byte.
    let real = std::fs::read(pico_shard(1)).unwrap();
    let name = pico_shard(1).file_name().unwrap().to_str().unwrap().to_string();
    for part in 0..10 {
        let at = if part == 9 { real.len() - 1 - 31 } else { 3 + real.len() * part / 10 };
        let folder = cases.folder();
        for number in 2..=4 {
            let shard = pico_shard(number);
            std::fs::copy(&shard, folder.join(shard.file_name().unwrap())).unwrap();
        }
        let path = common::put(&folder, &name, &real[..at]);
        cases.path(format!("pico shard cut at {at}"), path, &[], &name);
    }
}

/// Every count and id of a header, replaced.
pub fn lengths(cases: &mut Cases) {
    let bytes = micro().bytes();
    for (at, field) in walk(&bytes) {
        let mut put = |what: String, value: &[u8]| {
            let mut damaged = bytes.clone();
            damaged[at..at + value.len()].copy_from_slice(value);
            cases.file(what, "flip.gguf", &damaged, &[]);
        };
        match field {
            Field::Data => {}
            Field::Id => {
                for id in [0xffff_ffffu32, 0x0100_0000] {
                    put(format!("id {id:#x} at {at}"), &id.to_le_bytes());
                }
            }
            Field::Count => {
                let now = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
                for count in [now + 1, 1 << 32, 1 << 62, u64::MAX] {
                    put(format!("count {count} for {now} at {at}"), &count.to_le_bytes());
                }
            }
        }
    }
}

/// Raw bytes of a header.
#[derive(Default)]
struct Raw(Vec<u8>);

impl Raw {
    fn new(tensors: u64, pairs: u64) -> Self {
        Raw(b"GGUF".to_vec()).u32(3).u64(tensors).u64(pairs)
    }
    fn u32(mut self, v: u32) -> Self {
        self.0.extend_from_slice(&v.to_le_bytes());
        self
    }
    fn u64(mut self, v: u64) -> Self {
        self.0.extend_from_slice(&v.to_le_bytes());
        self
    }
    fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }
    fn text(self, bytes: &[u8]) -> Self {
        self.u64(bytes.len() as u64).raw(bytes)
    }
    fn tensor(self, name: &str, ne: &[u64], ty: u32, offset: u64) -> Self {
        let start = self.text(name.as_bytes()).u32(ne.len() as u32);
        ne.iter().fold(start, |raw, n| raw.u64(*n)).u32(ty).u64(offset)
    }
    /// Pads to the data and adds `bytes` zeros of it.
    fn data(mut self, bytes: usize) -> Vec<u8> {
        let end = self.0.len().next_multiple_of(32) + bytes;
        self.0.resize(end, 0);
        self.0
    }
}

/// Tensor entries and values that contradict the format.
pub fn entries(cases: &mut Cases) {
    let one = |name: &str, ne: &[u64], ty: u32, offset: u64| Raw::new(1, 0).tensor(name, ne, ty, offset).data(1 << 12);
    for id in [4, 5, 31, 32, 33, 36, 37, 38] {
        let want = ["tensor odd", "removed", "offset", &format!("type id {id}")];
        cases.file(format!("removed type {id}"), "type.gguf", &one("odd", &[256], id, 0), &want);
    }
    for id in [43, 200, 1 << 31, u32::MAX] {
        let want = ["tensor odd", "unknown", "offset", &format!("type id {id}")];
        cases.file(format!("unknown type {id}"), "type.gguf", &one("odd", &[256], id, 0), &want);
    }
    for ne in [&[][..], &[1; 5], &[1; 9], &[0], &[32, 0], &[32, 1, 0], &[1 << 62, 4], &[u64::MAX], &[1 << 63, 1]] {
        cases.file(format!("axes {ne:?}"), "axes.gguf", &one("odd", ne, 0, 0), &["odd", "offset"]);
    }
    for (ty, cols) in [(2, 31), (8, 16), (12, 255), (12, 128), (14, 300), (39, 1), (40, 32)] {
        let what = format!("type {ty} with {cols} columns");
        cases.file(what, "block.gguf", &one("odd", &[cols, 2], ty, 0), &["tensor odd", "blocks of", &cols.to_string()]);
    }
    // As many values as fit below 2^63, but more bytes than there are, or than a u64 counts.
    for ne in [&[1 << 61][..], &[1 << 20, 1 << 20, 1 << 20], &[(1 << 62) - 1]] {
        cases.file(format!("huge axes {ne:?}"), "axes.gguf", &one("odd", ne, 28, 0), &["tensor odd"]);
    }
    for offset in [1, 16, 31, 33] {
        let want = ["tensor odd", "a multiple of the alignment 32", &offset.to_string()];
        cases.file(format!("offset {offset}"), "offset.gguf", &one("odd", &[4], 0, offset), &want);
    }
    for offset in [1 << 12, 1 << 40, u64::MAX - 31, 1 << 63] {
        cases.file(format!("offset {offset}"), "offset.gguf", &one("odd", &[4], 0, offset), &["tensor odd"]);
    }
    for (second, bytes) in [(0, 128), (32, 128), (96, 128), (0, 32)] {
        let raw = Raw::new(2, 0).tensor("one", &[bytes / 4], 0, 0).tensor("two", &[8], 0, second).data(1 << 12);
        cases.file(format!("overlap at {second}"), "overlap.gguf", &raw, &["one", "two", "overlap"]);
    }
    let raw = Raw::new(2, 0).tensor("twin", &[8], 0, 0).tensor("twin", &[8], 0, 32).data(64);
    cases.file("duplicate tensor", "twice.gguf", &raw, &["tensor twin is named twice", "offset"]);
    let raw = Raw::new(1, 0).text(&[0xff, 0xfe]).u32(1).u64(8).u32(0).u64(0).data(64);
    cases.file("name not UTF-8", "name.gguf", &raw, &["the name of tensor 0", "UTF-8"]);
    let raw = one(&"n".repeat(1025), &[8], 0, 0);
    cases.file("name of a kilobyte", "name.gguf", &raw, &["the name of tensor 0", "1025"]);

    let key = |ty: u32, rest: &[u8]| Raw::new(0, 1).text(b"some.key").u32(ty).raw(rest).data(64);
    cases.file("bool of 2", "bool.gguf", &key(7, &[2]), &["some.key", "offset"]);
    cases.file("value type 13", "value.gguf", &key(13, &[]), &["some.key", "13", "offset"]);
    cases.file("array of type 99", "array.gguf", &key(9, &[99, 0, 0, 0]), &["some.key", "99", "offset"]);
    let nested: Vec<u8> = (0..5).flat_map(|_| [9u8, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]).collect();
    cases.file("arrays nested 5 deep", "nested.gguf", &key(9, &nested), &["some.key", "nested", "offset"]);
    for ty in 0..=12u8 {
        let lie: Vec<u8> = [ty, 0, 0, 0].into_iter().chain((1u64 << 40).to_le_bytes()).collect();
        let want = ["the length of some.key", "1099511627776", "offset"];
        cases.file(format!("array of 2^40 of type {ty}"), "array.gguf", &key(9, &lie), &want);
    }
    let raw = Raw::new(0, 1).text(&[0xc0, 0x80]).u32(4).u32(1).data(0);
    cases.file("key not UTF-8", "key.gguf", &raw, &["metadata key 0", "UTF-8", "offset"]);
    let raw = Raw::new(0, 2).text(b"k").u32(4).u32(1).text(b"k").u32(4).u32(2).data(0);
    cases.file("key twice", "key.gguf", &raw, &["metadata key k", "offset"]);
    let alignments = [Value::U32(0), Value::U32(3), Value::U32(48), Value::U64(1 << 21), Value::I32(-32)];
    for value in alignments.into_iter().chain([Value::Str("32".into()), Value::F32(32.0), Value::Bool(true)]) {
        let mut model = tiny();
        model.metadata.truncate(1);
        model.tensors.clear();
        model.metadata.insert(0, ("general.alignment.x".into(), value.clone()));
        // The writer would follow the alignment; so the key gets its name afterwards, two bytes shorter.
        let damaged = model.bytes();
        let at = damaged.windows(19).position(|w| w == b"general.alignment.x").unwrap();
        let damaged = [&damaged[..at - 8], &17u64.to_le_bytes(), &damaged[at..at + 17], &damaged[at + 19..]].concat();
        let want = ["general.alignment", "power of two", &value.to_string()];
        cases.file(format!("alignment {value}"), "align.gguf", &damaged, &want);
    }
}

/// Files that are something else.
pub fn magics(cases: &mut Cases) {
    let good = tiny().bytes();
    let lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 467289111904\n";
    let page = "<!DOCTYPE html>\n<html><head><title>model.gguf</title>";
    let swapped = [&b"GGUF"[..], &3u32.to_be_bytes(), &good[8..]].concat();
    let version = |v: u32| [&b"GGUF"[..], &v.to_le_bytes(), &good[8..]].concat();
    let all: [(&str, &[u8], &str); 12] = [
        ("empty file", b"", "an empty file"),
        ("two bytes", b"GG", "47 47"),
        ("GGML", b"GGML\x01\0\0\0", "47 47 4d 4c"),
        ("ggjt", b"tjgg\x03\0\0\0", "74 6a 67 67"),
        ("zip", b"PK\x03\x04", "50 4b 03 04"),
        ("web page", page.as_bytes(), "a web page"),
        ("web page, indented", b"\n  <HTML>", "a web page"),
        ("XML", b"<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code>", "a web page"),
        ("LFS pointer", lfs.as_bytes(), "467289111904 bytes"),
        ("big-endian magic", b"FUGG\0\0\0\x03", "big-endian"),
        ("big-endian version", &swapped, "big-endian"),
        ("JSON", b"{\"error\":\"Repository not found\"}", "7b 22 65 72"),
    ];
    for (name, bytes, want) in all {
        cases.file(name, "model.gguf", bytes, &[want, "offset"]);
    }
    for v in [0, 1, 4, 0xffff_ffff] {
        cases.file(format!("version {v}"), "v.gguf", &version(v), &["version", "offset 4", &v.to_string()]);
    }
    for name in ["big.gguf.part2of3", "big.gguf-split-b"] {
        cases.file(format!("byte part {name}"), name, &good[100..200], &["split by bytes", "join the parts"]);
    }
}

/// Sparse files of gigabytes whose headers claim most of them: honest about the size, hostile all the same.
pub fn huge(cases: &mut Cases) {
    const SIZE: u64 = 8 << 30;
    let claims = [
        ("strings", Raw::new(0, 1).text(b"k").u32(9).u32(8).u64(SIZE / 10)),
        ("bytes", Raw::new(0, 1).text(b"k").u32(9).u32(0).u64(SIZE / 2)),
        ("doubles", Raw::new(0, 1).text(b"k").u32(9).u32(12).u64(SIZE / 16)),
        ("arrays", Raw::new(0, 1).text(b"k").u32(9).u32(9).u64(SIZE / 16)),
        ("a string", Raw::new(0, 1).text(b"k").u32(8).u64(SIZE / 2)),
        ("pairs", Raw::new(0, SIZE / 16)),
        ("tensors", Raw::new(SIZE / 64, 0)),
        ("a name", Raw::new(1, 0).u64(SIZE / 2)),
    ];
    for (what, raw) in claims {
        let name = format!("huge {what}");
        cases.file(&name, "huge.gguf", &raw.0, &["offset"]);
        let path = &cases.all.last().unwrap().path;
        std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(SIZE).unwrap();
    }
}
