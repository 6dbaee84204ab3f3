//! Reading a dump, ours or somebody's.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};

use super::{Dump, DumpError, Entry, FORMAT, INDEX, Index, Meta, VERSION, axes};
use crate::model::{Attention, Block, Place, Point};
use crate::probe::capture::{Captured, Values};
use crate::probe::trace::Trace;
use crate::regular;

/// More ranks than any host has.
const MOST_RANKS: usize = 1024;

/// Reads the dump in the folder `dir`. Points whose names are not known here are left out with a note.
///
/// # Errors
/// Unreadable files; a description that contradicts itself, the points or the tensors; ranks that are missing. Each names
/// the file, the point, what was expected and what was found.
pub fn read(dir: &Path) -> Result<Dump, DumpError> {
    let path = dir.join(INDEX);
    if !dir.is_dir() {
        let problem = "expected a dump folder (dump.json and a safetensors file per rank)".to_string();
        return Err(DumpError::Json { path: dir.into(), problem });
    }
    let text = regular::read(&path).map_err(|source| DumpError::Io { path: path.clone(), source })?;
    let index: Index =
        serde_json::from_slice(&text).map_err(|e| DumpError::Json { path: path.clone(), problem: e.to_string() })?;
    let attention = check(&path, &index)?;
    let mut notes = Vec::new();
    let mut by_file: BTreeMap<&str, Vec<(&Entry, Place)>> = BTreeMap::new();
    let mut seen: HashMap<Place, BTreeSet<usize>> = HashMap::new();
    let mut unknown = BTreeSet::new();
    for entry in &index.points {
        let Some(place) = known(&entry.name) else {
            if unknown.insert(entry.name.as_str()) {
                notes.push(format!("{}: point {} is not known here and was left out", path.display(), entry.name));
            }
            continue;
        };
        check_entry(&path, &index, entry, place.point)?;
        if !seen.entry(place).or_default().insert(entry.rank) {
            return Err(wrong(&path, entry, "entries", "one per rank", format!("two of rank {}", entry.rank)));
        }
        by_file.entry(&entry.file).or_default().push((entry, place));
    }
    for (place, ranks) in &seen {
        let missing: Vec<String> = (0..index.tp).filter(|r| !ranks.contains(r)).map(|r| r.to_string()).collect();
        if !missing.is_empty() {
            return Err(DumpError::Point {
                path,
                point: place.to_string(),
                what: "ranks",
                expected: format!("all {}", index.tp),
                found: format!("none of {}", missing.join(", ")),
            });
        }
    }
    let mut captured: Vec<Vec<Captured>> = (0..index.tp).map(|_| Vec::new()).collect();
    for (file, entries) in by_file {
        let path = dir.join(file);
        let bytes = regular::read(&path).map_err(|source| DumpError::Io { path: path.clone(), source })?;
        let tensors = SafeTensors::deserialize(&bytes)
            .map_err(|e| DumpError::Safetensors { path: path.clone(), problem: e.to_string() })?;
        for (entry, place) in entries {
            let (shape, values) = values(&path, entry, &tensors)?;
            captured[entry.rank].push(Captured { place, rows: index.token_ids.len(), shape, values });
        }
    }
    same_shapes(&path, &captured)?;
    let producer = format!("{} {}", index.producer.name, index.producer.version);
    let meta = Meta {
        model: index.model.name,
        digest: index.model.digest,
        recipe: index.recipe,
        device: index.settings.device,
        rms_eps: index.settings.rms_eps,
        latent_eps: index.settings.latent_eps,
        index_eps: index.settings.index_eps,
    };
    Ok(Dump { trace: Trace::new(producer, index.token_ids, attention, captured), meta, notes })
}

/// The place of that name, if it is one that engines show here: they neither run MTP layers nor show tokens.
fn known(name: &str) -> Option<Place> {
    let place: Place = name.parse().ok()?;
    (!matches!(place.block, Block::Mtp(_)) && place != Place::NEXT_TOKEN).then_some(place)
}

/// Everything in the description but its points.
fn check(path: &Path, index: &Index) -> Result<Attention, DumpError> {
    let field = |field: &str, expected: String, found: String| {
        Err(DumpError::Field { path: path.into(), field: field.into(), expected, found })
    };
    let n = index.token_ids.len();
    for (what, good, expected, found) in [
        ("format", index.format == FORMAT, FORMAT.into(), index.format.clone()),
        ("version", index.version == VERSION, VERSION.to_string(), index.version.to_string()),
        ("tp", (1..=MOST_RANKS).contains(&index.tp), format!("1 to {MOST_RANKS}"), index.tp.to_string()),
        ("dtype", index.dtype == "f32", "f32".into(), index.dtype.clone()),
        ("token_ids", n > 0, "at least one".into(), "none".into()),
        ("positions", index.positions.len() == n, format!("{n}, one per token"), index.positions.len().to_string()),
    ] {
        if !good {
            return field(what, expected, found);
        }
    }
    if let Some((i, p)) = (0u32..).zip(&index.positions).find(|(i, p)| i != *p) {
        return field("positions", format!("{i} at place {i} (one sequence from 0)"), p.to_string());
    }
    match index.settings.attention.as_str() {
        "dsa" => Ok(Attention::Dsa),
        "dense" => Ok(Attention::Dense),
        other => field("settings.attention", "dsa or dense".into(), other.into()),
    }
}

fn wrong(path: &Path, entry: &Entry, what: &'static str, expected: impl ToString, found: impl ToString) -> DumpError {
    let (expected, found) = (expected.to_string(), found.to_string());
    DumpError::Point { path: path.into(), point: entry.name.clone(), what, expected, found }
}

fn check_entry(path: &Path, index: &Index, entry: &Entry, point: Point) -> Result<(), DumpError> {
    let plain = PathBuf::from(&entry.file).file_name().is_some_and(|name| name == entry.file.as_str());
    let dtype = if point.is_choice() { "I32" } else { "F32" };
    let (layout, rows, axes) = (point.layout(), index.token_ids.len(), axes(point));
    // A tensor of no bytes confirms nothing: beside an axis of 0 the others may be any size, and loops run over them.
    let bytes = entry.shape.iter().try_fold(size_of::<f32>(), |n, axis| n.checked_mul(*axis));
    let shape = format!("{:?}", entry.shape);
    let fits = entry.shape.first() == Some(&rows) && entry.shape.len() == 1 + axes;
    let own_file = "a file of the dump's own folder".to_string();
    let countable = "axes of at least 1 whose product can be counted".to_string();
    for (what, good, expected, found) in [
        ("rank", entry.rank < index.tp, format!("below {}", index.tp), entry.rank.to_string()),
        ("file", plain && !entry.file.contains(['/', '\\']), own_file, entry.file.clone()),
        ("dtype", entry.dtype == dtype, dtype.into(), entry.dtype.clone()),
        ("layout", entry.layout == layout.name(), layout.name().into(), entry.layout.clone()),
        ("axis", entry.axis == layout.axis(), format!("{:?}", layout.axis()), format!("{:?}", entry.axis)),
        ("shape", fits, format!("{rows} rows and {axes} axes behind them"), shape.clone()),
        ("shape", bytes.is_some_and(|n| n > 0), countable, shape),
    ] {
        if !good {
            return Err(wrong(path, entry, what, expected, found));
        }
    }
    Ok(())
}

/// One tensor's values, with the shape of one row.
fn values(path: &Path, entry: &Entry, tensors: &SafeTensors<'_>) -> Result<(Vec<usize>, Values), DumpError> {
    let view = tensors.tensor(&entry.name).map_err(|_| wrong(path, entry, "tensor", "one", "none"))?;
    let dtype = if entry.dtype == "I32" { Dtype::I32 } else { Dtype::F32 };
    if view.dtype() != dtype {
        return Err(wrong(path, entry, "dtype", &entry.dtype, format!("{:?}", view.dtype())));
    }
    if view.shape() != entry.shape.as_slice() {
        return Err(wrong(path, entry, "shape", format!("{:?}", entry.shape), format!("{:?}", view.shape())));
    }
    let words = view.data().as_chunks().0;
    let values = match dtype {
        Dtype::I32 => Values::I32(words.iter().map(|w| i32::from_le_bytes(*w)).collect()),
        _ => Values::F32(words.iter().map(|w| f32::from_le_bytes(*w)).collect()),
    };
    Ok((entry.shape[1..].to_vec(), values))
}

/// Ranks hold equally large parts.
fn same_shapes(path: &Path, captured: &[Vec<Captured>]) -> Result<(), DumpError> {
    let mut first: HashMap<Place, &[usize]> = HashMap::new();
    for (rank, all) in captured.iter().enumerate() {
        for c in all {
            let shape = first.entry(c.place).or_insert(&c.shape);
            if *shape != c.shape.as_slice() {
                return Err(DumpError::Point {
                    path: path.into(),
                    point: c.place.to_string(),
                    what: "shape",
                    expected: format!("{shape:?} as on rank 0"),
                    found: format!("{:?} on rank {rank}", c.shape),
                });
            }
        }
    }
    Ok(())
}
