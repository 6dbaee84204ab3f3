//! The tensor table and the values of every golden file against gguf-py: type, shape, offset, size, and hashes of the raw
//! bytes and of the dequantised values.

use std::path::{Path, PathBuf};

use crate::common::golden;
use lockstep::gguf::header;
use lockstep::quant::dequantise;
use serde_json::Value as Json;
use sha2::{Digest, Sha256};

/// Names a folder with the files that are not in goldens/models.
const MODELS: &str = "LOCKSTEP_MODELS";

/// The first 32 hex digits of a hash.
fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().take(16).map(|b| format!("{b:02x}")).collect()
}

fn find(name: &str) -> Option<PathBuf> {
    let here = golden(name);
    if here.is_file() {
        return Some(here);
    }
    let mut folders = vec![PathBuf::from(std::env::var_os(MODELS)?)];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).ok()?.flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.file_name().is_some_and(|n| n == name) {
                return Some(path);
            }
        }
    }
    None
}

fn check(path: &Path, golden: &Json) -> usize {
    let bytes = std::fs::read(path).unwrap();
    assert_eq!(bytes.len() as u64, golden["size"], "{}", path.display());
    let found = header::parse(path, &bytes).unwrap();
    let expected = golden["tensors"].as_object().unwrap();
    assert_eq!(found.tensors.len(), expected.len(), "{}", path.display());
    for (entry, (name, golden)) in found.tensors.iter().zip(expected) {
        assert_eq!(&entry.name, name, "{}: tensors are in file order", path.display());
        let what = format!("{} {name}", path.display());
        assert_eq!(entry.ty.name, golden["type"], "{what}");
        assert_eq!(serde_json::json!(entry.ne), golden["ne"], "{what}");
        assert_eq!(entry.start - found.data_start, golden["off"], "{what}");
        assert_eq!(entry.bytes, golden["nbytes"], "{what}");
        let raw = &bytes[entry.start as usize..(entry.start + entry.bytes) as usize];
        assert_eq!(hash(raw), golden["sha_raw"], "{what}: raw bytes");
        let ty = entry.ty.quant.unwrap_or_else(|| panic!("{what}: {} has no dequantiser", entry.ty.name));
        let mut values = vec![0.0f32; entry.ne.iter().product::<u64>() as usize];
        dequantise(ty, raw, &mut values).unwrap();
        let values: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(hash(&values), golden["sha_f32"], "{what}: dequantised values");
    }
    found.tensors.len()
}

#[test]
fn every_tensor_is_as_gguf_py_reads_it() {
    let text = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/quant/files.json")).unwrap();
    let golden: Json = serde_json::from_slice(&text).unwrap();
    let (mut files, mut tensors) = (0, 0);
    for (name, golden) in golden.as_object().unwrap() {
        match find(name) {
            Some(path) => {
                tensors += check(&path, golden);
                files += 1;
            }
            None => eprintln!("SKIPPED {name}: not in goldens/models; name a folder that has it in {MODELS}"),
        }
    }
    // The files in the repository: glm5-nano 163, nano52 153, pico's four shards 94.
    assert!(files >= 6 && tensors >= 163 + 153 + 94, "{files} files, {tensors} tensors");
    eprintln!("{tensors} tensors of {files} files compared");
}
