//! Serving: what becomes of a sequence's ids on their way to a client.

pub mod turn;
