//! What an architecture is made of: its configuration, derived from a file's metadata, and the list of parameters
//! with their shapes. Knows nothing of names on disk, of ranks or of devices.

pub mod config;
mod glm_dsa;
pub mod params;
pub mod place;
pub mod published;

pub use config::{Attention, Config, ConfigError, Fact, Gating, Indexer, Metadata, Origin, Stated};
pub use glm_dsa::{ARCHITECTURE, ATTENTION_BIAS, CLASS, TIE, key};
pub use params::{Kind, Param};
pub use place::{Block, Layout, Place, Point};
