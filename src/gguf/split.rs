//! Finding the files of a split set from any of them or from a folder, and checking that they belong together.
//!
//! Shards are called `<prefix>-00002-of-00011.gguf` (1-based); inside they carry `split.no` (0-based), `split.count`
//! and `split.tensors.count`. A missing, doubled or foreign shard is named, never skipped.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{GgufError, Header};

/// A shard's file name, taken apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardName {
    /// Everything before `-00001-of-00002.gguf`.
    pub prefix: String,
    /// 1-based number.
    pub number: u32,
    /// How many there are.
    pub count: u32,
}

impl ShardName {
    /// Takes a file name apart; `None` if it does not follow the pattern.
    pub fn parse(file_name: &str) -> Option<Self> {
        let stem = file_name.strip_suffix(".gguf")?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (prefix, number) = rest.rsplit_once('-')?;
        let five = |s: &str| (s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit())).then(|| s.parse().ok()).flatten();
        Some(ShardName { prefix: prefix.into(), number: five(number)?, count: five(count)? })
    }

    /// The file name of shard `number` of the same set.
    pub fn sibling(&self, number: u32) -> String {
        format!("{}-{number:05}-of-{:05}.gguf", self.prefix, self.count)
    }
}

/// ggml's split.count is a u16.
const MAX_SHARDS: u32 = u16::MAX as u32;

/// The files to open for `path`, in shard order.
///
/// # Errors
/// A folder without exactly one set, a shard without its siblings, an unreadable folder.
pub fn locate(path: &Path) -> Result<Vec<PathBuf>, GgufError> {
    let meta = std::fs::metadata(path).map_err(|source| GgufError::Io { path: path.into(), source })?;
    let first = if meta.is_dir() { only_set_in(path)? } else { path.to_path_buf() };
    if !first.is_file() {
        let problem = "expected a regular file or a folder, found something else (a pipe or a device)".into();
        return Err(GgufError::Set { path: first, problem });
    }
    let Some(name) = first.file_name().and_then(|n| n.to_str()).and_then(ShardName::parse) else {
        return Ok(vec![first]);
    };
    let set = |problem| GgufError::Set { path: first.clone(), problem };
    if name.count == 0 || name.count > MAX_SHARDS || name.number == 0 || name.number > name.count {
        return Err(set(format!(
            "expected a number from 1 to the count (at most {MAX_SHARDS}) in the file name, found {} of {}",
            name.number, name.count
        )));
    }
    let siblings: Vec<PathBuf> = (1..=name.count).map(|n| first.with_file_name(name.sibling(n))).collect();
    let missing: Vec<u32> = (1..=name.count).filter(|n| !siblings[*n as usize - 1].is_file()).collect();
    if !missing.is_empty() {
        let found = name.count as usize - missing.len();
        return Err(set(format!(
            "shards {} are missing: expected {} files ({} to {}), found {found}",
            ranges(&missing),
            name.count,
            name.sibling(1),
            name.sibling(name.count)
        )));
    }
    Ok(siblings)
}

/// `3, 5-7` for [3, 5, 6, 7].
fn ranges(numbers: &[u32]) -> String {
    let mut out: Vec<(u32, u32)> = Vec::new();
    for &n in numbers {
        match out.last_mut() {
            Some((_, end)) if *end + 1 == n => *end = n,
            _ => out.push((n, n)),
        }
    }
    let text: Vec<String> = out.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") }).collect();
    text.join(", ")
}

/// The one set of a folder, by any of its files.
fn only_set_in(folder: &Path) -> Result<PathBuf, GgufError> {
    let set = |problem: String| GgufError::Set { path: folder.into(), problem };
    let mut sets: BTreeMap<String, PathBuf> = BTreeMap::new();
    let (mut nested, mut huggingface) = (None, false);
    let entries = std::fs::read_dir(folder).map_err(|source| GgufError::Io { path: folder.into(), source })?;
    for entry in entries {
        let path = entry.map_err(|source| GgufError::Io { path: folder.into(), source })?.path();
        let Some(name) = path.file_name().and_then(|n| n.to_str()).map(str::to_owned) else { continue };
        huggingface |= name.ends_with(".safetensors");
        if path.is_dir() && nested.is_none() && has_gguf(&path) {
            nested = Some(path);
        } else if name.ends_with(".gguf") {
            let key = ShardName::parse(&name).map_or(name.clone(), |s| format!("{} ({} shards)", s.prefix, s.count));
            sets.entry(key).or_insert(path);
        }
    }
    match sets.len() {
        1 => sets.into_values().next().ok_or_else(|| set("empty".into())),
        0 => Err(set(match (nested, huggingface) {
            (Some(sub), _) => {
                format!("expected a GGUF file in this folder, found none here but some in {}: name that", sub.display())
            }
            (None, true) => {
                "expected a GGUF file, or safetensors with a config.json beside them, found safetensors alone: \
                             fetch the config.json, too"
                    .into()
            }
            (None, false) => "expected a GGUF file or a Hugging Face model in this folder, found neither".into(),
        })),
        n => {
            let names: Vec<&str> = sets.keys().map(String::as_str).collect();
            Err(set(format!("expected one model, found {n}; name one of: {}", names.join(", "))))
        }
    }
}

fn has_gguf(folder: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(folder) else { return false };
    entries.flatten().any(|e| e.path().extension().is_some_and(|x| x == "gguf"))
}

/// Checks that headers, in shard order, belong to one set.
pub(super) fn check(shards: &[(&Path, &Header)]) -> Result<(), GgufError> {
    let number = |h: &Header, key: &str| h.metadata.iter().find(|(k, _)| k == key).and_then(|(_, v)| v.as_u64());
    for (i, (path, header)) in shards.iter().enumerate() {
        let set = |problem: String| GgufError::Set { path: path.to_path_buf(), problem };
        let count = number(header, "split.count");
        if shards.len() == 1 && count.unwrap_or(1) <= 1 {
            break;
        }
        let Some(count) = count else {
            return Err(set(format!("expected shard {} of {}, found a file without split.count", i + 1, shards.len())));
        };
        if shards.len() == 1 {
            return Err(set(format!(
                "expected the name <prefix>-{:05}-of-{count:05}.gguf, as split.no and split.count say, found another: its \
                 siblings cannot be found without it. Restore the name",
                number(header, "split.no").map_or(0, |n| n.saturating_add(1))
            )));
        }
        if count != shards.len() as u64 {
            return Err(set(format!("split.count: expected {} (from the file name), found {count}", shards.len())));
        }
        match number(header, "split.no") {
            Some(no) if no == i as u64 => {}
            no => {
                let found = no.map_or("none".into(), |n| n.to_string());
                return Err(set(format!(
                    "split.no: expected {i} (from the file name), found {found}: this file holds another shard's bytes"
                )));
            }
        }
        same_model(shards[0], (path, header))?;
    }
    let total: u64 = shards.iter().map(|(_, h)| h.tensors.len() as u64).sum();
    for (path, header) in shards {
        if let Some(expected) = number(header, "split.tensors.count").filter(|e| *e != total) {
            return Err(GgufError::Set {
                path: path.to_path_buf(),
                problem: format!(
                    "split.tensors.count: expected {expected} tensors over all shards, found {total}: a shard \
                     is from another set, or was rewritten"
                ),
            });
        }
    }
    Ok(())
}

/// Later shards may repeat metadata of the first; where they do, it must agree.
fn same_model(first: (&Path, &Header), other: (&Path, &Header)) -> Result<(), GgufError> {
    for (key, value) in &other.1.metadata {
        let expected = first.1.metadata.iter().find(|(k, _)| k == key).map(|(_, v)| v);
        if key != "split.no" && expected.is_some_and(|e| e != value) {
            return Err(GgufError::Set {
                path: other.0.into(),
                problem: format!(
                    "{key}: expected {} as in {}, found {value}: the shard is from another set",
                    expected.map_or(String::new(), |e| e.to_string()),
                    first.0.display()
                ),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_names() {
        let name = ShardName::parse("a-b-00002-of-00011.gguf").expect("a shard");
        assert_eq!(name, ShardName { prefix: "a-b".into(), number: 2, count: 11 });
        assert_eq!(name.sibling(11), "a-b-00011-of-00011.gguf");
        for other in ["a.gguf", "a-2-of-3.gguf", "a-00002-of-00003.bin", "a-0000x-of-00003.gguf"] {
            assert_eq!(ShardName::parse(other), None, "{other}");
        }
    }

    #[test]
    fn missing_numbers_are_grouped() {
        assert_eq!(ranges(&[3, 5, 6, 7]), "3, 5-7");
    }
}
