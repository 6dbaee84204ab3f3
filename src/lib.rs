//! Verifies a GGUF mixture-of-experts model against a reference, layer by layer, on any number of ranks, names the
//! fault it finds, and runs the model with the same engine.

pub mod checkpoint;
pub mod cli;
pub mod comm;
pub mod device;
pub mod diagnose;
pub mod doctor;
pub mod engine;
pub mod faults;
pub mod gguf;
pub mod model;
pub mod partial;
pub mod probe;
pub mod quant;
pub mod regular;
pub mod report;
#[cfg(feature = "serve")]
pub mod serve;
pub mod shard;
pub mod synth;
pub mod tokenize;
pub mod verify;
