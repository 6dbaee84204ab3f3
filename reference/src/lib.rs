//! The oracle: a mixture-of-experts transformer with latent attention and a sparse-attention indexer, as plain
//! `ndarray` code in f64, one function per operation. It exists to judge an engine, so it shares nothing with one: it
//! reads raw metadata, names, blocks and shards by its own rules and depends on neither the engine nor its kernels.
//!
//! * [`model::forward`] runs a prompt and hands out every named place; [`replay::Replay`] recomputes one operation from
//!   captured inputs.
//! * [`arith::Arith`] chooses between the truth and a legitimate f32 run of a stated summation order.
//! * [`weights::Weights`] and [`config::RefConfig`] can be altered, which is how a suspected fault is tried out.
//! * [`mod@slice`] says which bytes of a parameter a rank must hold.

pub mod arith;
pub mod bridge;
pub mod config;
pub mod dequant;
pub mod error;
pub mod experts;
pub mod model;
pub mod names;
pub mod ops;
pub mod points;
pub mod recipe;
pub mod replay;
pub mod slice;
pub mod source;
pub mod variant;
pub mod weights;

/// The arrays that captured values and results travel in.
pub use ndarray;

pub use arith::{Arith, Order};
pub use bridge::Bridge;
pub use config::{Eps, RefConfig};
pub use error::RefError;
pub use model::{forward, forward_choosing};
pub use names::RefParam;
pub use points::{RefOptions, inputs_of, partial_inputs_of, points};
pub use recipe::{Half, RefRecipe};
pub use replay::{Replay, ReplayError};
pub use source::{Format, Meta, RawModel, RawTensor};
pub use variant::Variant;
pub use weights::{ModelWeights, ParamKey, Weights};
