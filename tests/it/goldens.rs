//! The goldens are what their list says: a changed or unlisted file is an error.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

fn files(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { files(&path, out) } else { out.push(path) }
    }
}

#[test]
fn every_golden_has_its_listed_hash() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens");
    let list = std::fs::read_to_string(root.join("SHA256SUMS")).unwrap();
    let listed: BTreeMap<PathBuf, &str> = list
        .lines()
        .map(|line| line.split_once("  ").unwrap())
        .map(|(hash, name)| (root.join(name.trim_start_matches("./")), hash))
        .collect();
    let mut found = Vec::new();
    files(&root, &mut found);
    found.retain(|p| !p.ends_with("SHA256SUMS"));
    found.sort();
    assert_eq!(found, listed.keys().cloned().collect::<Vec<_>>());
    assert!(found.len() >= 20, "only {} goldens", found.len());
    for (path, hash) in listed {
        let digest = Sha256::digest(std::fs::read(&path).unwrap());
        let hex: String = digest.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, hash, "{}", path.display());
    }
}
