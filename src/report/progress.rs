//! How far long work is.

/// Where long work says how far it is. Several threads may speak at once, and not in order.
pub trait Progress: Sync {
    /// `done` of `all` parts; `what` names the work and what is counted: `layers replayed`.
    fn at(&self, what: &str, done: usize, all: usize);

    /// `done` of `all` parts that are not alike: `share` of the work is done, by which the time left is told.
    fn uneven(&self, what: &str, (done, all): (usize, usize), share: f64) {
        let _ = share;
        self.at(what, done, all);
    }

    /// `done` of `all` bytes.
    fn bytes(&self, what: &str, done: u64, all: u64) {
        self.at(what, done as usize, all as usize);
    }
}
