//! The NVIDIA device: the forward pass's operations as launches of the kernels of `kernels/`. Virtual ranks of one card
//! share its context and stream; ranks of several cards have one each.
//!
//! Nothing is returned to the host inside a step, and no launch depends on a value of the step, so that a whole decode
//! step is recorded once per shape and replayed ([`group`]).

pub mod backend;
pub mod bandwidth;
pub mod cubin;
pub mod gpu;
pub mod group;
mod inputs;
pub mod launches;
pub mod libraries;
mod load;
pub mod memory;
mod ops;
mod params;
pub mod peer;
mod pieces;
pub mod profile;
mod weight;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::Arc;

use lockstep_kernels::geometry::{self, Launch};

pub use backend::CudaBackend;
use gpu::{Arg, Gpu, GpuError, args};
use group::Group;
pub use inputs::CudaInputs;
use memory::{Arena, Memory, Ring};
pub(crate) use params::{IndexQueries, Queries, Ranks, Router, router};
use profile::Profile;
pub use weight::CudaWeight;
pub(crate) use weight::Matrix;

use super::recipe::Recipe;
use super::{CacheShape, DeviceError, Heads};
use crate::comm::timed::ALL_REDUCE;
use crate::model::{Place, Point};
use crate::quant::QuantType;

/// Activations `[rows][row]` on a GPU; rows are padded so that each starts at a whole load.
pub struct CudaBuf {
    memory: Memory,
    rows: usize,
    row: usize,
}

impl CudaBuf {
    /// Address of a column of the first row.
    fn at(&self, col: usize) -> u64 {
        self.memory.address() + 4 * col as u64
    }

    /// Values from one row to the next, as kernels take it.
    fn row(&self) -> i64 {
        self.row as i64
    }
}

/// Indices `[rows][width]` on a GPU.
pub struct CudaIndex {
    memory: Memory,
    rows: usize,
    width: usize,
}

/// Key rows by layer, page and place, all in one piece.
pub struct CudaCache {
    memory: Memory,
    shape: CacheShape,
}

impl CudaCache {
    fn layer(&self, layer: usize) -> u64 {
        self.memory.address() + (4 * layer * self.shape.pages * self.shape.page * self.shape.width) as u64
    }
}

/// Activations of groups, as the products take them: group `g` of row `t` starts at `at + t * row + g * group`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Rows {
    pub at: u64,
    pub row: i64,
    pub group: i64,
}

/// A step's inputs, as kernels take them.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Tokens {
    pub id: u64,
    pub position: u64,
    pub sequence: u64,
    pub tables: u64,
    pub pages: i32,
    pub page: i32,
}

args!(Rows, Tokens);

/// Where loading happens, for errors.
const LOADING: Option<Place> = None;

/// One rank on a GPU.
pub struct CudaDevice {
    rank: usize,
    gpu: Arc<Gpu>,
    group: Arc<Group>,
    recipe: Recipe,
    arena: RefCell<Arena>,
    ring: RefCell<Option<Ring>>,
    /// Bytes that did not come back as they were stored, counted on the GPU.
    wrong: Memory,
    scratch: RefCell<HashMap<&'static str, Memory>>,
    /// Scratch that was outgrown: recordings may still use it.
    outgrown: RefCell<Vec<Memory>>,
    rope: RefCell<Option<RopeTable>>,
    last: Cell<Option<Place>>,
    profile: Option<Arc<Profile>>,
}

/// cos and sin per position and pair.
struct RopeTable {
    made_for: (u64, usize, usize),
    memory: Memory,
}

impl CudaDevice {
    /// Rank `rank` of a group.
    ///
    /// # Errors
    /// A GPU without any memory left.
    pub fn new(
        rank: usize,
        group: Arc<Group>,
        recipe: Recipe,
        profile: Option<Arc<Profile>>,
    ) -> Result<Self, GpuError> {
        let gpu = group.gpu().clone();
        Ok(CudaDevice {
            rank,
            arena: RefCell::new(Arena::new(&gpu)),
            ring: RefCell::default(),
            wrong: Memory::new(&gpu, 4)?,
            gpu,
            group,
            recipe,
            scratch: RefCell::default(),
            outgrown: RefCell::default(),
            rope: RefCell::default(),
            last: Cell::new(LOADING),
            profile,
        })
    }

    fn error(&self, place: impl Into<Option<Place>>, problem: impl std::fmt::Display) -> DeviceError {
        DeviceError { rank: self.rank, place: place.into(), problem: problem.to_string() }
    }

    /// Starts a kernel that moves `bytes` bytes of weights or keys.
    #[allow(clippy::too_many_arguments)] // a launch names what it is
    fn launch(
        &self,
        site: impl Into<Option<Place>>,
        unit: &'static str,
        ty: Option<QuantType>,
        kernel: &'static str,
        launch: Launch,
        bytes: usize,
        args: &[&dyn Arg],
    ) -> Result<(), DeviceError> {
        let site = site.into();
        self.last.set(site);
        let start = || self.gpu.launch(unit, ty, kernel, launch, args);
        match &self.profile {
            None => start(),
            Some(profile) => {
                let op = match site {
                    _ if kernel == "sum_ranks" => ALL_REDUCE,
                    Some(place) => place.point.name(),
                    None => "load",
                };
                profile.time(&self.gpu, op, bytes, start).and_then(|done| done)
            }
        }
        .map_err(|e| self.error(site, e))
    }

    /// Gives a collective to the stream, its time kept like an operation's.
    pub(crate) fn meet<T>(&self, bytes: usize, start: impl FnOnce() -> T) -> Result<T, GpuError> {
        match &self.profile {
            None => Ok(start()),
            Some(profile) => profile.time(&self.gpu, ALL_REDUCE, bytes, start),
        }
    }

    /// A kernel of rows.cu over `count` values.
    fn each(
        &self,
        site: impl Into<Option<Place>>,
        kernel: &'static str,
        count: usize,
        args: &[&dyn Arg],
    ) -> Result<(), DeviceError> {
        if count == 0 {
            return Ok(());
        }
        self.launch(site, "rows", None, kernel, geometry::each(count), 0, args)
    }

    /// At least `bytes` bytes of working memory for one use within a step.
    fn scratch(&self, site: Place, name: &'static str, bytes: usize) -> Result<u64, DeviceError> {
        let mut scratch = self.scratch.borrow_mut();
        if let Some(memory) = scratch.get(name).filter(|m| m.bytes() >= bytes) {
            return Ok(memory.address());
        }
        // Twice what is needed, so that what is outgrown in all is no more than what is in use.
        let memory = Memory::new(&self.gpu, 2 * bytes)
            .or_else(|_| Memory::new(&self.gpu, bytes))
            .map_err(|e| self.error(site, e))?;
        let address = memory.address();
        self.outgrown.borrow_mut().extend(scratch.insert(name, memory));
        Ok(address)
    }

    /// 1 where the operand of products is rounded to bf16.
    fn rounds(&self, site: Place) -> i32 {
        // The router's choice is the one that a rounding can turn over: its operand stays as it is.
        i32::from(self.recipe == Recipe::Fast && site.point != Point::RouterLogits)
    }
}

/// Heads side by side, as columns of a buffer.
fn heads_at(buf: &CudaBuf, heads: Heads) -> Rows {
    Rows { at: buf.at(heads.start), row: buf.row(), group: heads.stride as i64 }
}
