//! How far long work is.

/// Where long work says how far it is.
pub trait Progress: Sync {
    /// `done` of `all` parts of `what`.
    fn at(&self, what: &str, done: usize, all: usize);
}
