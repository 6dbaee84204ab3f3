//! All tests of the library and of the binary that need no GPU, in one program, since each program links everything again.
#![allow(clippy::unwrap_used)] // a test ends at the first surprise

mod common;

mod ahead;
mod architecture;
mod bisect;
mod damage;
mod doctor;
mod documents;
mod dump;
mod engine;
mod foreign;
mod generate;
mod gguf_properties;
mod glm52_twin;
mod goldens;
mod hostile;
mod inspect;
mod invariants;
mod logits;
mod options;
mod oracle;
mod pipes;
mod program;
mod quantvec;
mod recall;
mod recipes;
mod replicas;
mod scale;
mod scheduler;
mod sense;
#[cfg(feature = "serve")]
mod serve;
mod server_target;
mod stages;
mod synth;
mod terminal;
mod tokenizer;
mod trust;
mod types;
mod unsupported;
mod zeros;
