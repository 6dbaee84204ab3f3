//! Serving: HTTP requests to sequences of the engine, and their ids to answers.
//!
//! Tasks read requests and write replies ([`http`]); one thread, the [`driver`], owns whatever makes tokens and a
//! [`turn`] per sequence. Orders go one way through a channel, pieces the other. What happens to the service as a whole
//! is its [`state`], which every task watches, so that nobody waits for a thread that hangs. Nothing here knows checks:
//! what they said is handed over as JSON.

mod answers;
pub mod api;
pub mod driver;
pub mod http;
pub mod keys;
pub mod listen;
pub mod metrics;
pub mod state;
pub mod turn;
