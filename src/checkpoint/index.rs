//! The index of a Hugging Face folder: which shard holds which tensor. The shards know better, so a wrong index keeps
//! nobody from reading them; but whoever reads by the index loads nothing, or the wrong thing, where it is wrong.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use super::CheckpointError;
use super::hf::{read_json, refuse};

/// The index's file name.
pub(super) const NAME: &str = "model.safetensors.index.json";
/// Names that a warning shows; the rest is counted.
const SHOWN: usize = 3;

/// File names by tensor.
pub(super) struct Index(BTreeMap<String, String>);

impl Index {
    /// The index of `folder`, if it has one.
    ///
    /// # Errors
    /// A file without a map from tensors to names of files.
    pub fn read(folder: &Path) -> Result<Option<Self>, CheckpointError> {
        let path = folder.join(NAME);
        if !path.is_file() {
            return Ok(None);
        }
        let json = read_json(&path)?;
        let map = json.get("weight_map").and_then(|m| m.as_object());
        let map = map.ok_or_else(|| refuse(&path, "expected an object weight_map, found none"))?;
        let entry = |(tensor, v): (&String, &serde_json::Value)| {
            let name = v.as_str().filter(|n| !n.contains(['/', '\\']));
            let problem = || format!("weight_map, tensor {tensor}: expected a file name, found {v}");
            Ok((tensor.clone(), name.ok_or_else(|| refuse(&path, problem()))?.to_owned()))
        };
        Ok(Some(Index(map.iter().map(entry).collect::<Result<_, CheckpointError>>()?)))
    }

    /// The files that it names, each once, in order.
    pub fn files(&self) -> Vec<String> {
        self.0.values().collect::<BTreeSet<_>>().into_iter().cloned().collect()
    }

    /// Where it contradicts the shards, given the file of every stored tensor: a line for each way of being wrong.
    pub fn contradictions(&self, stored: &HashMap<&str, String>) -> Vec<String> {
        let absent: Vec<&str> = self.0.keys().map(String::as_str).filter(|n| !stored.contains_key(n)).collect();
        let mut unlisted: Vec<&str> = stored.keys().filter(|n| !self.0.contains_key(**n)).copied().collect();
        unlisted.sort_unstable();
        let elsewhere: Vec<String> = (self.0.iter())
            .filter_map(|(name, file)| Some((name, file, stored.get(name.as_str()).filter(|f| *f != file)?)))
            .map(|(name, file, found)| format!("{name} in {file}, and {found} holds it"))
            .collect();
        let held = |name: &&str| format!("{name} ({})", stored.get(name).map_or("", String::as_str));
        let mut lines = Vec::new();
        let mut say = |what: &str, names: Vec<String>| match names.len() {
            0 => {}
            n => {
                let more = if n > SHOWN { format!(" and {} more", n - SHOWN) } else { String::new() };
                lines.push(format!("{NAME}: the index {what}: {}{more}", names[..n.min(SHOWN)].join("; ")));
            }
        };
        let names = |list: &[&str]| list.iter().map(|n| n.to_string()).collect();
        if absent.len() == unlisted.len() && !absent.is_empty() {
            let pair = |(a, b): (&&str, &&str)| format!("{a} where the shards have {}", held(b));
            say("has names that no shard has", absent.iter().zip(&unlisted).map(pair).collect());
        } else {
            say("lists tensors that no shard holds", names(&absent));
            say("does not list tensors that shards hold", unlisted.iter().map(held).collect());
        }
        say("gives the wrong shard", elsewhere);
        lines
    }
}
