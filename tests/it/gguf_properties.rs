//! Random damage and random content: whatever bytes a file holds, it opens or is refused by name, and what the writer
//! writes the reader reads back.

use std::path::Path;
use std::sync::LazyLock;

use crate::common::{Model, parse, put, tiny};
use lockstep::checkpoint::Checkpoint;
use lockstep::gguf::value::{Array, Value};
use lockstep::gguf::write::NewTensor;
use lockstep::gguf::{Gguf, header};
use lockstep::quant::{QuantType, TypeId, TypeInfo, lookup};
use proptest::collection::vec;
use proptest::prelude::*;

static VALID: LazyLock<Vec<u8>> = LazyLock::new(|| tiny().bytes());

/// One change to a file.
#[derive(Clone, Debug)]
enum Damage {
    Flip(usize, u8),
    Cut(usize),
    Insert(usize, Vec<u8>),
    Remove(usize, usize),
    /// Eight bytes replaced by a number that lengths are made of.
    Number(usize, u64),
}

impl Damage {
    fn apply(&self, bytes: &mut Vec<u8>) {
        let at = |i: usize, n: usize| i % n.max(1);
        let n = bytes.len();
        match self {
            _ if n == 0 => {}
            Damage::Flip(i, mask) => bytes[at(*i, n)] ^= mask,
            Damage::Cut(i) => bytes.truncate(at(*i, n)),
            Damage::Insert(i, what) => _ = bytes.splice(at(*i, n)..at(*i, n), what.iter().copied()),
            Damage::Remove(i, many) => _ = bytes.drain(at(*i, n)..(at(*i, n) + many).min(n)),
            Damage::Number(i, v) => {
                let start = at(*i, n);
                let end = (start + 8).min(n);
                bytes[start..end].copy_from_slice(&v.to_le_bytes()[..end - start]);
            }
        }
    }
}

/// Damage anywhere, but mostly in the header, where it matters: the data of the fixture is zeros.
fn damage() -> impl Strategy<Value = Damage> {
    let header = parse(Path::new("valid"), &VALID).unwrap().data_start as usize;
    let at = prop_oneof![4 => 0..header, 1 => 0..VALID.len()];
    let number = prop_oneof![any::<u64>(), 0..100u64, Just(u64::MAX), Just(1 << 63), (0..63u32).prop_map(|s| 1 << s)];
    prop_oneof![
        (at.clone(), 1..=255u8).prop_map(|(i, mask)| Damage::Flip(i, mask)),
        at.clone().prop_map(Damage::Cut),
        (at.clone(), vec(any::<u8>(), 1..40)).prop_map(|(i, what)| Damage::Insert(i, what)),
        (at.clone(), 1..40usize).prop_map(|(i, many)| Damage::Remove(i, many)),
        (at, number).prop_map(|(i, v)| Damage::Number(i, v)),
    ]
}

/// Opens bytes as a model; a refusal must name the file.
fn open_or_name(bytes: Vec<u8>) -> Result<(), TestCaseError> {
    const NAME: &str = "damaged.gguf";
    // The parser alone first: its tensors must lie in the file, whatever it accepts.
    match parse(Path::new(NAME), &bytes) {
        Ok(found) => {
            for t in &found.tensors {
                prop_assert!(t.start >= found.data_start && t.start + t.bytes <= bytes.len() as u64, "{t:?}");
            }
        }
        Err(e) => prop_assert!(e.to_string().contains(NAME), "{e}"),
    }
    let folder = tempfile::tempdir().unwrap();
    let path = put(folder.path(), NAME, &bytes);
    if let Err(e) = Checkpoint::open(Some(&path)) {
        prop_assert!(e.to_string().contains(NAME), "{e}");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_files_open_or_are_refused_by_name(changes in vec(damage(), 1..4)) {
        let mut bytes = VALID.clone();
        changes.iter().for_each(|c| c.apply(&mut bytes));
        open_or_name(bytes)?;
    }

    #[test]
    fn noise_behind_a_magic_is_refused_by_name(noise in vec(any::<u8>(), 0..400)) {
        open_or_name([&b"GGUF\x03\0\0\0"[..], &noise].concat())?;
    }
}

/// A scalar or array strategy per element type.
fn arrays() -> BoxedStrategy<Array> {
    prop_oneof![
        vec(any::<u8>(), 0..9).prop_map(Array::U8),
        vec(any::<i8>(), 0..9).prop_map(Array::I8),
        vec(any::<u16>(), 0..9).prop_map(Array::U16),
        vec(any::<i16>(), 0..9).prop_map(Array::I16),
        vec(any::<u32>(), 0..9).prop_map(Array::U32),
        vec(any::<i32>(), 0..9).prop_map(Array::I32),
        vec(any::<f32>(), 0..9).prop_map(Array::F32),
        vec(any::<bool>(), 0..9).prop_map(Array::Bool),
        vec(any::<String>(), 0..9).prop_map(Array::Str),
        vec(any::<u64>(), 0..9).prop_map(Array::U64),
        vec(any::<i64>(), 0..9).prop_map(Array::I64),
        vec(any::<f64>(), 0..9).prop_map(Array::F64),
    ]
    .boxed()
}

fn value() -> impl Strategy<Value = Value> {
    // Up to 4 levels, as the reader allows.
    let nested = arrays().prop_recursive(3, 24, 4, |inner| vec(inner, 0..4).prop_map(Array::Array));
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        any::<f32>().prop_map(Value::F32),
        any::<bool>().prop_map(Value::Bool),
        any::<String>().prop_map(Value::Str),
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        any::<f64>().prop_map(Value::F64),
        nested.prop_map(Value::Array),
    ]
}

/// Every type of the format's table.
fn types() -> Vec<&'static TypeInfo> {
    let known = |id| if let TypeId::Known(info) = lookup(id) { Some(info) } else { None };
    (0..256).filter_map(known).collect()
}

fn tensor() -> impl Strategy<Value = NewTensor> {
    let rest = vec(1..4u64, 0..4);
    ("[a-z.0-9]{1,40}", prop::sample::select(types()), 1..5u64, rest).prop_map(|(name, ty, blocks, rest)| {
        let ne = [blocks * ty.block as u64].into_iter().chain(rest).take(4).collect();
        NewTensor { name, ne, ty }
    })
}

fn unique<T>(items: Vec<(String, T)>) -> Vec<(String, T)> {
    let mut seen = std::collections::HashSet::new();
    items.into_iter().filter(|(name, _)| seen.insert(name.clone())).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_written_is_read_back(
        metadata in vec(("[a-z.]{1,20}", value()), 0..12),
        tensors in vec((tensor(), any::<u8>()), 0..12),
        alignment in prop::option::of(prop::sample::select(vec![1u32, 8, 32, 64, 4096])),
    ) {
        let mut metadata = unique(metadata);
        metadata.extend(alignment.map(|a| ("general.alignment".to_string(), Value::U32(a))));
        let tensors = unique(tensors.into_iter().map(|(t, fill)| (t.name.clone(), (t, fill))).collect());
        let filled = |(_, (t, fill)): (String, (NewTensor, u8))| {
            let bytes = vec![fill; t.bytes().unwrap() as usize];
            (t, bytes)
        };
        let model = Model { metadata, tensors: tensors.into_iter().map(filled).collect() };
        let folder = tempfile::tempdir().unwrap();
        let gguf = Gguf::open(&model.write(folder.path(), "random.gguf")).unwrap();
        let found: Vec<_> = gguf.metadata().collect();
        prop_assert_eq!(found.len(), model.metadata.len());
        for ((key, value), (expected_key, expected)) in found.into_iter().zip(&model.metadata) {
            prop_assert_eq!(key, expected_key);
            prop_assert_eq!(bits(value), bits(expected)); // NaN equals itself here
        }
        prop_assert_eq!(gguf.tensors().len(), model.tensors.len());
        for (found, (expected, data)) in gguf.tensors().iter().zip(&model.tensors) {
            prop_assert_eq!((&found.name, &found.ne, found.ty), (&expected.name, &expected.ne, expected.ty));
            prop_assert_eq!(gguf.data(found), &data[..]);
            prop_assert_eq!(found.start % u64::from(alignment.unwrap_or(32)), 0);
        }
        prop_assert_eq!(gguf.warnings().count(), 0);
    }
}

/// A value as the bytes that a file of it alone has: exact, and NaN is equal to itself.
fn bits(value: &Value) -> Vec<u8> {
    Model { metadata: vec![("k".into(), value.clone())], tensors: Vec::new() }.bytes()
}

#[test]
fn version_2_reads_as_version_3_does() {
    let mut old = VALID.clone();
    old[4] = 2;
    let path = Path::new("old.gguf");
    let (new, old): (header::Header, header::Header) = (parse(path, &VALID).unwrap(), parse(path, &old).unwrap());
    assert_eq!((old.version, new.version), (2, 3));
    assert_eq!(old.metadata, new.metadata);
    assert_eq!(old.tensors.len(), new.tensors.len());
    assert!(QuantType::all().all(|t| types().contains(&t.info())));
}
