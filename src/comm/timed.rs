//! A collective that keeps time: waiting and adding count together, since a rank that waits does nothing else.

use std::sync::Arc;

use super::{Collective, CommError};
use crate::device::Device;
use crate::device::timed::{Clock, Timed};
use crate::model::Place;

/// The operation under which meetings are counted.
pub const ALL_REDUCE: &str = "all-reduce";

/// A collective of devices whose time is kept, and one clock per rank.
pub struct TimedCollective<D> {
    inner: Arc<dyn Collective<D>>,
    clocks: Vec<Arc<Clock>>,
}

impl<D: Device> TimedCollective<D> {
    /// Lets `clocks[rank]` count the meetings of each rank.
    pub fn new(inner: Arc<dyn Collective<D>>, clocks: Vec<Arc<Clock>>) -> Self {
        TimedCollective { inner, clocks }
    }
}

impl<D: Device> Collective<Timed<D>> for TimedCollective<D> {
    fn tp(&self) -> usize {
        self.inner.tp()
    }

    fn all_reduce(
        &self,
        rank: usize,
        site: Place,
        device: &Timed<D>,
        buf: &mut D::Buf,
        n: usize,
        width: usize,
    ) -> Result<(), CommError> {
        let mut meet = || self.inner.all_reduce(rank, site, device.inner(), buf, n, width);
        match self.clocks.get(rank) {
            Some(clock) => clock.time(ALL_REDUCE, meet),
            None => meet(),
        }
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }
}
