//! Writing a dump: into a folder beside the wanted one, which is renamed when everything is in it.

use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::{DumpError, Entry, FORMAT, INDEX, Index, Meta, Model, Producer, Settings, VERSION};
use crate::partial::Partial;
use crate::probe::capture::Values;
use crate::probe::trace::Trace;

/// Writes the points that every rank captured as the new folder `dir`. A folder that is there already is refused.
///
/// # Errors
/// I/O errors; nothing is left behind then.
pub fn write(dir: &Path, trace: &Trace, meta: &Meta) -> Result<(), DumpError> {
    if dir.symlink_metadata().is_ok() {
        return Err(DumpError::Exists { path: dir.into() });
    }
    let path = partial(dir)?;
    let io = |path: &Path| {
        let path = path.to_path_buf();
        move |source| DumpError::Io { path, source }
    };
    let (part, ()) = Partial::create(path.clone(), |p| std::fs::create_dir_all(p)).map_err(io(&path))?;
    fill(part.path(), trace, meta)?;
    part.publish(dir).map_err(io(dir))
}

/// A name beside `dir`, on the same file system, that no other process uses.
fn partial(dir: &Path) -> Result<PathBuf, DumpError> {
    let found = || dir.display().to_string();
    let name = dir.file_name().ok_or_else(|| DumpError::Field {
        path: dir.into(),
        field: "folder".into(),
        expected: "a path that ends in a name".into(),
        found: found(),
    })?;
    let name = format!(".{}.{}.partial", name.to_string_lossy(), std::process::id());
    Ok(dir.with_file_name(name))
}

fn fill(folder: &Path, trace: &Trace, meta: &Meta) -> Result<(), DumpError> {
    let places = trace.places();
    let mut entries = Vec::with_capacity(places.len() * trace.tp);
    for rank in 0..trace.tp {
        let file = format!("rank{rank}.safetensors");
        let mut tensors = Vec::with_capacity(places.len());
        for place in &places {
            let Some(captured) = trace.ranks(*place).and_then(|all| all.get(rank).copied()) else { continue };
            let shape: Vec<usize> = std::iter::once(captured.rows).chain(captured.shape.iter().copied()).collect();
            let (dtype, bytes): (_, Vec<u8>) = match &captured.values {
                Values::F32(v) => (Dtype::F32, v.iter().flat_map(|x| x.to_le_bytes()).collect()),
                Values::I32(v) => (Dtype::I32, v.iter().flat_map(|x| x.to_le_bytes()).collect()),
            };
            entries.push(Entry {
                name: place.to_string(),
                file: file.clone(),
                rank,
                layout: place.point.layout().name().into(),
                axis: place.point.layout().axis(),
                shape: shape.clone(),
                dtype: if dtype == Dtype::I32 { "I32" } else { "F32" }.into(),
            });
            tensors.push((place.to_string(), dtype, shape, bytes));
        }
        let path = folder.join(&file);
        let refuse =
            |e: safetensors::SafeTensorError| DumpError::Safetensors { path: path.clone(), problem: e.to_string() };
        let views: Vec<(&String, TensorView<'_>)> = tensors
            .iter()
            .map(|(name, dtype, shape, bytes)| Ok((name, TensorView::new(*dtype, shape.clone(), bytes)?)))
            .collect::<Result<_, safetensors::SafeTensorError>>()
            .map_err(refuse)?;
        safetensors::serialize_to_file(views, None, &path).map_err(refuse)?;
    }
    let index = Index {
        format: FORMAT.into(),
        version: VERSION,
        producer: Producer { name: trace.producer.clone(), version: env!("CARGO_PKG_VERSION").into() },
        model: Model { name: meta.model.clone(), digest: meta.digest.clone() },
        token_ids: trace.ids.clone(),
        positions: (0u32..).take(trace.ids.len()).collect(),
        tp: trace.tp,
        dtype: "f32".into(),
        recipe: meta.recipe.clone(),
        settings: Settings {
            attention: trace.attention.name().into(),
            device: meta.device.clone(),
            rms_eps: meta.rms_eps,
            latent_eps: meta.latent_eps,
            index_eps: meta.index_eps,
        },
        points: entries,
    };
    let path = folder.join(INDEX);
    let text = serde_json::to_vec_pretty(&index)
        .map_err(|e| DumpError::Json { path: path.clone(), problem: e.to_string() })?;
    std::fs::write(&path, text).map_err(|source| DumpError::Io { path, source })
}
