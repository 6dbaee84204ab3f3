//! The files of goldens/: numbers that lockstep did not compute.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use ndarray::ArrayD;
use safetensors::{Dtype, SafeTensors};

/// Activations of glm5-nano on its short prompt.
pub const OF_NANO_SHORT: &str = "glm5-nano/Q4_K_M_short_ggufeps.safetensors";
/// Activations of glm5-nano on its long prompt, beyond top-k.
pub const OF_NANO_LONG: &str = "glm5-nano/Q4_K_M_long_ggufeps.safetensors";
/// Activations of nano52.
pub const OF_NANO52: &str = "nano52/nano52-Q2_K_ggufeps.safetensors";
/// Activations of pico.
pub const OF_PICO: &str = "pico/pico-Q4_K_M_ggufeps.safetensors";

/// A file of goldens/.
pub fn file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens").join(path)
}

/// Activations by name.
pub struct Goldens {
    pub reals: HashMap<String, ArrayD<f32>>,
    pub indices: HashMap<String, ArrayD<i32>>,
}

impl Goldens {
    /// Reads a file of goldens/.
    pub fn read(path: &str) -> Self {
        let bytes = std::fs::read(file(path)).expect("a golden file");
        let mut all = Goldens { reals: HashMap::new(), indices: HashMap::new() };
        for (name, view) in SafeTensors::deserialize(&bytes).expect("safetensors").tensors() {
            let words = view.data().as_chunks::<4>().0.iter();
            match view.dtype() {
                Dtype::F32 => {
                    let values = words.map(|b| f32::from_le_bytes(*b)).collect();
                    all.reals.insert(name, ArrayD::from_shape_vec(view.shape(), values).expect("a shape"));
                }
                Dtype::I32 => {
                    let values = words.map(|b| i32::from_le_bytes(*b)).collect();
                    all.indices.insert(name, ArrayD::from_shape_vec(view.shape(), values).expect("a shape"));
                }
                other => panic!("{name}: {other:?}"),
            }
        }
        all
    }

    /// The prompt.
    pub fn ids(&self) -> Vec<u32> {
        self.indices["input_ids"].iter().map(|id| *id as u32).collect()
    }

    /// The rows that were kept of a tensor that was cut.
    pub fn rows_of(&self, name: &str) -> Vec<usize> {
        let list = if name.starts_with("mtp.") { "mtp.rows" } else { "rows" };
        let rows: Vec<usize> = self.indices[list].iter().map(|row| *row as usize).collect();
        assert!(rows.len() >= 3, "{name}: rows {rows:?}");
        rows
    }
}
