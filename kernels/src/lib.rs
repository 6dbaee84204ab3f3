//! The CUDA sources of the NVIDIA device, their manifest and their launch geometry.
//!
//! The crate is separate so that all of it stays testable on a machine without a GPU: it depends on no CUDA binding. A
//! source is compiled by NVRTC as one text ([`Unit::source`]) with the options that [`options`] names; a unit that is
//! typed is compiled once per tensor type.

pub mod geometry;

use std::collections::BTreeSet;

/// One compiled module.
#[derive(Debug)]
pub struct Unit {
    /// File name without `.cu`.
    pub name: &'static str,
    /// What the source is compiled for, each of which it knows as `TYPE`.
    pub types: Types,
    /// True if its kernels wait for the one in front by themselves, and so may be started before that has ended.
    pub early: bool,
    /// Its kernels.
    pub kernels: &'static [&'static str],
}

/// What a unit is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Types {
    /// Once: it reads no stored weights.
    None,
    /// Every tensor type, in planes.
    Planes,
    /// The types that have tiles, in these.
    Tiles,
    /// Both.
    All,
}

/// All modules.
pub const UNITS: [Unit; 10] = [
    Unit {
        name: "matmul",
        types: Types::All,
        early: true,
        kernels: &[
            "gemv_1",
            "gemv_2",
            "gemv_4",
            "gemv_8",
            "gemv_slots",
            "gemv_gate_up",
            "gemm",
            "gemm_slots",
            "matmul_naive",
            "slots_naive",
            "embed",
        ],
    },
    Unit {
        name: "pack",
        types: Types::Planes,
        early: false,
        kernels: &["repack", "unpack", "repack_check", "dequantise"],
    },
    Unit {
        name: "tiles",
        types: Types::Tiles,
        early: true,
        kernels: &[
            "tile_pack",
            "tile_unpack",
            "tile_check",
            "tile_parts_fast",
            "tile_parts_strict",
            "tile_gate_up_fast",
            "tile_gate_up_strict",
            "tile_down_fast",
            "tile_down_strict",
        ],
    },
    Unit {
        name: "norm",
        types: Types::None,
        early: true,
        kernels: &["rms_norm", "add_rms_norm", "layer_norm", "rms_norm_naive", "layer_norm_naive"],
    },
    Unit {
        name: "rows",
        types: Types::None,
        early: true,
        kernels: &[
            "rope_table",
            "rope",
            "scale",
            "copy",
            "widen",
            "gather_rows",
            "add",
            "swiglu",
            "append",
            "sum_ranks",
            "fill",
            "count_nonfinite",
            "to_bf16",
            "from_bf16",
        ],
    },
    Unit {
        name: "attention",
        types: Types::None,
        early: true,
        kernels: &["attend", "combine", "scores_naive", "softmax_naive", "weighted_naive"],
    },
    Unit {
        name: "indexer",
        types: Types::None,
        early: true,
        kernels: &["index_scores", "index_scores_naive", "top_k", "top_k_naive", "list_naive"],
    },
    Unit {
        name: "router",
        types: Types::None,
        early: true,
        kernels: &["route", "expert_weights", "route_naive", "group", "combine_slots"],
    },
    Unit { name: "sample", types: Types::None, early: true, kernels: &["sample", "commit"] },
    Unit {
        name: "doctor",
        types: Types::None,
        early: false,
        kernels: &[
            "pattern_fill",
            "pattern_check",
            "integers_fill",
            "integers_check",
            "read_sweep",
            "copy_sweep",
            "pause",
        ],
    },
];

/// The tensor types that typed units are compiled for, by ggml's names.
pub const TYPES: [&str; 22] = [
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4", "NVFP4", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S",
];

/// Those that have tiles: `kernels/cu/common/tiles.cuh`.
pub const TILED: [&str; 2] = ["Q4_K", "Q6_K"];

/// Architectures that every kernel compiles for: A100 to RTX 40 (one code for all of 8.x), H100/H200, B200, RTX 50.
pub const ARCHS: [&str; 4] = ["sm_80", "sm_90a", "sm_100a", "sm_120a"];

/// Kernels that may use a stack frame (f64 trigonometry reduces large arguments through one); all others must neither
/// spill nor use local memory.
pub const LOCAL_MEMORY: [&str; 1] = ["rope_table"];

const FILES: [(&str, &str); 18] = [
    ("matmul.cu", include_str!("../cu/matmul.cu")),
    ("pack.cu", include_str!("../cu/pack.cu")),
    ("tiles.cu", include_str!("../cu/tiles.cu")),
    ("norm.cu", include_str!("../cu/norm.cu")),
    ("rows.cu", include_str!("../cu/rows.cu")),
    ("attention.cu", include_str!("../cu/attention.cu")),
    ("indexer.cu", include_str!("../cu/indexer.cu")),
    ("router.cu", include_str!("../cu/router.cu")),
    ("sample.cu", include_str!("../cu/sample.cu")),
    ("doctor.cu", include_str!("../cu/doctor.cu")),
    ("common/async.cuh", include_str!("../cu/common/async.cuh")),
    ("common/tiles.cuh", include_str!("../cu/common/tiles.cuh")),
    ("common/ptx.cuh", include_str!("../cu/common/ptx.cuh")),
    ("common/block.cuh", include_str!("../cu/common/block.cuh")),
    ("common/tokens.cuh", include_str!("../cu/common/tokens.cuh")),
    ("common/weights.cuh", include_str!("../cu/common/weights.cuh")),
    ("common/unpack.cuh", include_str!("../cu/common/unpack.cuh")),
    ("common/codebooks.cuh", include_str!("../cu/common/codebooks.cuh")),
];

/// The embedded text of a file of `cu/`.
pub fn embedded(path: &str) -> Option<String> {
    FILES.iter().find(|(name, _)| *name == path).map(|(_, text)| (*text).to_string())
}

impl Unit {
    /// The unit called `name`.
    pub fn named(name: &str) -> Option<&'static Unit> {
        UNITS.iter().find(|u| u.name == name)
    }

    /// The whole text of the unit, every include put in its place once. `read` gives the text of a file of `cu/`.
    ///
    /// # Errors
    /// The path of a file that `read` does not have.
    pub fn source(&self, read: &dyn Fn(&str) -> Option<String>) -> Result<String, String> {
        let mut out = String::new();
        put(&format!("{}.cu", self.name), read, &mut BTreeSet::new(), &mut out)?;
        Ok(out)
    }
}

/// Appends a file, its includes first met put in place.
fn put(
    path: &str,
    read: &dyn Fn(&str) -> Option<String>,
    seen: &mut BTreeSet<String>,
    out: &mut String,
) -> Result<(), String> {
    if !seen.insert(path.to_string()) {
        return Ok(());
    }
    let text = read(path).ok_or_else(|| path.to_string())?;
    out.push_str(&format!("#line 1 \"{path}\"\n"));
    for (i, line) in text.lines().enumerate() {
        match line.strip_prefix("#include \"").and_then(|rest| rest.split('"').next()) {
            Some(name) => {
                let folder = path.rsplit_once('/').map_or(String::new(), |(folder, _)| format!("{folder}/"));
                put(&format!("{folder}{name}"), read, seen, out)?;
                out.push_str(&format!("#line {} \"{path}\"\n", i + 2));
            }
            None if line.trim() == "#pragma once" => out.push('\n'),
            None => {
                out.push_str(line);
                out.push('\n');
            }
        }
    }
    Ok(())
}

/// NVRTC's options for a module. No product is fused with a sum but where the source says so, and no function is the fast
/// one: the numerics of a kernel are what its text says.
pub fn options(arch: &str, ty: Option<&str>) -> Vec<String> {
    let mut options = vec![format!("--gpu-architecture={arch}"), "-std=c++17".into(), "-fmad=false".into()];
    options.push("--ptxas-options=-v".into());
    options.extend(ty.map(|ty| format!("-DTYPE={ty}")));
    options
}

/// What ptxas reported of one kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The kernel.
    pub kernel: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of local memory: the stack frame.
    pub stack: u32,
    /// Bytes of spills, stores and loads.
    pub spills: u32,
}

impl Usage {
    /// Reads ptxas' report.
    pub fn parse(log: &str) -> Vec<Usage> {
        let mut found: Vec<Usage> = Vec::new();
        let number = |line: &str, unit: &str| -> Option<u32> {
            let before = line.split(unit).next().filter(|b| b.len() < line.len())?;
            before.split_whitespace().next_back()?.parse().ok()
        };
        let mut function = String::new();
        for line in log.lines() {
            if let Some(name) = line.split("Compiling entry function '").nth(1).and_then(|r| r.split('\'').next()) {
                found.push(Usage { kernel: name.into(), ..Usage::default() });
            } else if let Some(name) = line.split("Function properties for ").nth(1) {
                function = name.trim().to_string();
            } else if let Some(usage) = found.last_mut() {
                if let Some(spills) = number(line, " bytes spill stores") {
                    let loads = number(line, " bytes spill loads").unwrap_or(0);
                    if function == usage.kernel {
                        usage.stack = number(line, " bytes stack frame").unwrap_or(0);
                    }
                    usage.spills += spills + loads;
                }
                if let Some(registers) = number(line, " registers") {
                    usage.registers = registers;
                }
            }
        }
        found
    }

    /// True if the kernel uses local memory that the manifest does not allow it.
    pub fn is_too_large(&self) -> bool {
        self.spills > 0 || (self.stack > 0 && !LOCAL_MEMORY.contains(&self.kernel.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_is_whole_and_holds_the_kernels_that_the_manifest_names() {
        for unit in &UNITS {
            let text = unit.source(&embedded).unwrap();
            assert!(!text.contains("#include"), "{}", unit.name);
            // A macro's kernels are declared where it is used.
            let plain = text.matches("extern \"C\" __global__").count() - text.matches("NAME(const").count();
            let declared = plain + text.matches("\nPRODUCT(").count();
            assert_eq!(declared, unit.kernels.len(), "{}", unit.name);
            for kernel in unit.kernels {
                let named = [format!(" {kernel}("), format!("PRODUCT({kernel},")];
                assert!(named.iter().any(|name| text.contains(name)), "{}: {kernel}", unit.name);
            }
            let reads = text.contains("<TYPE>") || text.contains("= TYPE;");
            assert_eq!(unit.types != Types::None, reads, "{}", unit.name);
        }
    }

    #[test]
    fn kernels_that_start_early_wait_first() {
        for unit in UNITS.iter().filter(|unit| unit.early) {
            let text = unit.source(&embedded).unwrap();
            for kernel in unit.kernels.iter().filter(|kernel| !text.contains(&format!("PRODUCT({kernel},"))) {
                let body = text.split(&format!(" {kernel}(")).nth(1).and_then(|rest| rest.split_once(") {")).unwrap().1;
                assert!(body.trim_start().starts_with("begin();"), "{kernel} reads before it waits");
            }
        }
    }

    #[test]
    fn no_kernel_reads_an_environment_variable_or_a_header() {
        for (name, text) in FILES {
            assert!(!text.contains("getenv") && !text.contains("#include <"), "{name}");
        }
    }

    #[test]
    fn a_missing_include_is_named() {
        let read = |path: &str| (path == "norm.cu").then(|| "#include \"common/lost.cuh\"\n".to_string());
        assert_eq!(Unit::named("norm").unwrap().source(&read), Err("common/lost.cuh".into()));
    }

    #[test]
    fn reports_of_ptxas_are_read() {
        let log = "ptxas info    : Compiling entry function 'rope_table' for 'sm_90a'\n\
                   ptxas info    : Function properties for rope_table\n\
                   ptxas         .     40 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
                   ptxas info    : Used 37 registers, used 0 barriers\n\
                   ptxas info    : Compiling entry function 'gemm' for 'sm_90a'\n\
                   ptxas info    : Function properties for gemm\n\
                   ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n\
                   ptxas info    : Used 255 registers, used 1 barriers\n";
        let usage = Usage::parse(log);
        assert_eq!(usage.len(), 2);
        assert_eq!((usage[0].registers, usage[0].stack, usage[0].spills), (37, 40, 0));
        assert_eq!((usage[1].registers, usage[1].stack, usage[1].spills), (255, 8, 16));
        assert!(!usage[0].is_too_large() && usage[1].is_too_large());
    }
}
