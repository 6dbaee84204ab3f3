//! `serve`: what clients see. A script makes the tokens where the engine does not matter.

mod client;
mod faults;
mod gate;
mod process;
pub mod script;
mod verses;
mod watchdog;
mod wire;
