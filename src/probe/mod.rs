//! Reading and replacing activations while the forward pass runs. A step without a listener pays nothing.

pub mod capture;
pub mod digest;
pub mod dump;
pub mod parting;
pub mod replace;
pub mod trace;

pub use capture::{Capture, Captured, Values};
pub use digest::Digest;
pub use parting::{Difference, Parting};
pub use replace::{Replace, Replacements};
pub use trace::Trace;

use crate::model::Place;

/// What a listener sees at a point: one rank's values of the step's tokens.
pub struct Visit<'a> {
    /// The place.
    pub place: Place,
    /// Tokens.
    pub rows: usize,
    /// Shape of one token's row on this rank, slowest axis first.
    pub shape: &'a [usize],
    /// The values, `[rows][shape]`.
    pub values: Data<'a>,
}

/// Values or indices, open for replacement.
pub enum Data<'a> {
    /// f32 activations.
    Values(&'a mut [f32]),
    /// Chosen indices, -1 where there is none.
    Indices(&'a mut [i32]),
}

/// What the forward pass does after a visit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// Go on; the values were only read.
    Continue,
    /// Go on with the values as they now are.
    Replaced,
    /// End the step here. Every rank must say so at the same point.
    Stop,
}

/// A listener of one rank.
pub trait Probe: Send {
    /// True if the values of this place are to be shown.
    fn wants(&self, place: Place) -> bool;
    /// True if it may put other values there, or end the step: what runs behind the place must wait for it.
    fn changes(&self, _place: Place) -> bool {
        false
    }
    /// Shows one rank's values.
    fn visit(&mut self, visit: Visit<'_>) -> Then;
    /// What was captured, at the end of the step.
    fn take(&mut self) -> Vec<Captured> {
        Vec::new()
    }
}
