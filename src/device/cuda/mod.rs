//! The NVIDIA device: the forward pass's operations as launches of the kernels of `kernels/`. Virtual ranks of one card
//! share its context and stream; ranks of several cards have one each.
//!
//! Nothing is returned to the host inside a step, and no launch depends on a value of the step, so that a whole decode
//! step is recorded once per shape and replayed ([`group`]).

pub mod bandwidth;
pub mod cubin;
pub mod format;
pub mod gpu;
pub mod group;
mod inputs;
pub mod launches;
pub mod libraries;
mod load;
pub mod memory;
pub mod nccl;
mod ops;
mod params;
pub mod peer;
mod pieces;
pub mod profile;
mod store;
mod tiles;
pub mod virtual_ranks;
mod weight;

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use lockstep_kernels::geometry::{self, Launch};

use format::Format;
use gpu::{Arg, Gpu, GpuError, args};
use group::Group;
use inputs::{CudaInputs, MOST_RECORDED, Problem};
use memory::{Arena, Memory, Ring};
pub(crate) use params::{IndexQueries, Queries, Ranks, RouterArg};
use profile::Profile;
use store::{CudaBuf, CudaCache, CudaIndex};
pub(crate) use tiles::{Work, tile_product};
pub(crate) use weight::MatrixArg;
use weight::{CudaWeight, Part};

use super::{
    Batch, Call, Columns, Device, DeviceError, IndexId, Limits, Next, Op, PartSpec, ProgramId, StepShape, Stores, View,
    WeightId,
};
use crate::comm::{Collective, CommError};
use crate::model::Place;

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

/// Where ranks on GPUs meet inside a step.
pub trait Meet: Collective {
    /// Adds `n` whole rows over all ranks, in place, on the rank's stream.
    ///
    /// # Errors
    /// A rank that does not come in time, that gave up, or whose GPU refuses.
    fn all_reduce(&self, device: &CudaDevice, at: Place, x: View, n: usize) -> Result<(), CommError>;
    /// Lets every rank see what each has chosen.
    ///
    /// # Errors
    /// As [`Meet::all_reduce`].
    fn share(&self, device: &CudaDevice, at: Place) -> Result<(), CommError>;
}

type Done = Result<(), DeviceError>;

/// One rank on a GPU.
pub struct CudaDevice {
    rank: usize,
    gpu: Arc<Gpu>,
    group: Arc<Group>,
    bufs: Vec<CudaBuf>,
    indices: Vec<CudaIndex>,
    caches: Vec<CudaCache>,
    weights: Vec<CudaWeight>,
    inputs: Option<CudaInputs>,
    arena: RefCell<Arena>,
    ring: RefCell<Option<Ring>>,
    /// Bytes that did not come back as they were stored, counted on the GPU.
    wrong: Memory,
    scratch: RefCell<HashMap<&'static str, Memory>>,
    /// Scratch that was outgrown: recordings may still use it.
    outgrown: RefCell<Vec<Memory>>,
    rope: RefCell<Option<RopeTable>>,
    /// The last call of the step: its place, and the name under which its time is kept.
    now: Option<(Place, &'static str)>,
    profile: Option<Arc<Profile>>,
    /// Goes last: recordings hold collectives, which some libraries wait for when their end is asked for.
    meet: Arc<dyn Meet>,
}

/// cos and sin per position and pair.
struct RopeTable {
    made_for: (u64, usize, usize),
    memory: Memory,
}

impl CudaDevice {
    /// Rank `rank`, one of a group, which meets all others at `meet`.
    ///
    /// # Errors
    /// A GPU without any memory left.
    pub fn new(
        rank: usize,
        group: Arc<Group>,
        meet: Arc<dyn Meet>,
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
            bufs: Vec::new(),
            indices: Vec::new(),
            caches: Vec::new(),
            weights: Vec::new(),
            inputs: None,
            scratch: RefCell::default(),
            outgrown: RefCell::default(),
            rope: RefCell::default(),
            now: None,
            profile,
            meet,
        })
    }

    fn failed(&self, place: Option<Place>, problem: impl std::fmt::Display) -> DeviceError {
        DeviceError::Failed { rank: self.rank, place, problem: problem.to_string() }
    }

    /// The error of the call under way.
    fn error(&self, problem: impl std::fmt::Display) -> DeviceError {
        self.failed(self.now.map(|(place, _)| place), problem)
    }

    /// What was given to the stream last, should it hang.
    fn last(&self) -> String {
        self.now.map_or("a step".into(), |(place, _)| place.to_string())
    }

    /// Its place among the ranks that share its GPU.
    fn among(&self) -> usize {
        self.rank % self.group.meeting().tp()
    }

    /// Starts a kernel that moves `bytes` bytes of weights or keys.
    fn launch(
        &self,
        unit: &'static str,
        format: Option<Format>,
        kernel: &'static str,
        launch: Launch,
        bytes: usize,
        args: &[&dyn Arg],
    ) -> Done {
        let start = || self.gpu.launch(unit, format, kernel, launch, args);
        self.time(bytes, start).and_then(|done| done).map_err(|e| self.error(e))
    }

    /// Gives something to the stream; its time is kept if anyone keeps it.
    fn time<T>(&self, bytes: usize, start: impl FnOnce() -> T) -> Result<T, GpuError> {
        match &self.profile {
            None => Ok(start()),
            Some(profile) => profile.time(&self.gpu, self.now.map_or("load", |(_, label)| label), bytes, start),
        }
    }

    /// A kernel of rows.cu over `count` values.
    fn each(&self, kernel: &'static str, count: usize, args: &[&dyn Arg]) -> Done {
        if count == 0 {
            return Ok(());
        }
        self.launch("rows", None, kernel, geometry::each(count), 0, args)
    }

    /// At least `bytes` bytes of working memory for one use within a step.
    fn scratch(&self, name: &'static str, bytes: usize) -> Result<u64, DeviceError> {
        let mut scratch = self.scratch.borrow_mut();
        if let Some(memory) = scratch.get(name).filter(|m| m.bytes() >= bytes) {
            return Ok(memory.address());
        }
        // Twice what is needed, so that what is outgrown in all is no more than what is in use.
        let memory =
            Memory::new(&self.gpu, 2 * bytes).or_else(|_| Memory::new(&self.gpu, bytes)).map_err(|e| self.error(e))?;
        let address = memory.address();
        self.outgrown.borrow_mut().extend(scratch.insert(name, memory));
        Ok(address)
    }

    fn inputs(&self) -> Result<&CudaInputs, DeviceError> {
        self.inputs.as_ref().ok_or_else(|| self.error(inputs::NONE))
    }

    /// Does something with the inputs that changes them.
    fn with_inputs<T>(
        &mut self,
        place: Option<Place>,
        work: impl FnOnce(&mut CudaInputs) -> Result<T, Problem>,
    ) -> Result<T, DeviceError> {
        let done = self.inputs.as_mut().map_or_else(|| Err(Problem::Refused(inputs::NONE.into())), work);
        done.map_err(|e| self.failed(place, e))
    }
}

impl Device for CudaDevice {
    fn load(&mut self, parts: Vec<PartSpec<'_>>) -> Done {
        let parts = parts.into_iter().map(|p| self.upload(p)).collect::<Result<_, _>>()?;
        self.weights.push(CudaWeight { parts });
        Ok(())
    }

    fn alloc(&mut self, stores: &Stores, limits: Limits) -> Done {
        self.loaded()?; // weights come before the rest
        self.make(stores, limits)?;
        self.inputs = Some(CudaInputs::new(&self.gpu, limits).map_err(|e| self.error(e))?);
        Ok(())
    }

    fn read_weight(&mut self, weight: WeightId, part: usize) -> Result<(Vec<u8>, Columns), DeviceError> {
        self.now = None;
        self.unload(weight, part)
    }

    fn exchange(&mut self, a: (WeightId, usize), b: (WeightId, usize)) -> Done {
        let part = |(weight, part): (WeightId, usize)| self.weights.get(weight.0).and_then(|w| w.parts.get(part));
        let shape = |part: &Part| (part.stack, part.rows, part.cols.clone(), part.covered);
        let (of_a, of_b) = (part(a).map(shape), part(b).map(shape));
        if of_a.is_none() || of_a != of_b {
            return Err(self.error(format!("parts to exchange: expected {of_a:?} twice, found {of_b:?}")));
        }
        match self.weights.get_disjoint_mut([a.0.0, b.0.0]) {
            Ok([x, y]) => std::mem::swap(&mut x.parts[a.1], &mut y.parts[b.1]),
            Err(_) => self.weights[a.0.0].parts.swap(a.1, b.1), // two parts of one parameter
        }
        Ok(())
    }

    fn read(&mut self, view: View, n: usize) -> Result<Vec<f32>, DeviceError> {
        self.values(view, n)
    }

    fn write(&mut self, view: View, n: usize, values: &[f32]) -> Done {
        self.set_values(view, n, values)
    }

    fn read_index(&mut self, index: IndexId, n: usize) -> Result<Vec<i32>, DeviceError> {
        let index = &self.indices[index.0];
        let mut out = vec![0i32; n.min(index.rows) * index.width];
        index.memory.download(0, &mut out, &|| self.last()).map_err(|e| self.error(e))?;
        Ok(out)
    }

    fn write_index(&mut self, index: IndexId, n: usize, values: &[i32]) -> Done {
        let index = &self.indices[index.0];
        index.memory.upload(0, &values[..n * index.width]).map_err(|e| self.error(e))
    }

    fn set_inputs(&mut self, batch: &Batch, shape: StepShape) -> Done {
        self.now = None;
        self.with_inputs(None, |inputs| inputs.fill(batch, shape))?;
        if self.profile.is_some() {
            // Longer than the launches of a step take to be given.
            let nanoseconds = 8_000_000u64;
            let one = Launch { grid: (1, 1, 1), block: 1, shared: 0 };
            self.gpu.launch("doctor", None, "pause", one, &[&nanoseconds]).map_err(|e| self.error(e))?;
        }
        Ok(())
    }

    fn shape(&self, wanted: StepShape) -> StepShape {
        // Launches that are timed are given one by one, in the shape that would be recorded.
        let rounded = self.inputs.as_ref().and_then(|inputs| inputs.rounded(wanted));
        let recorded = rounded.is_some() && self.profile.is_none();
        StepShape { recorded, ..rounded.unwrap_or(wanted) }
    }

    fn begin(&mut self, shape: StepShape, program: ProgramId) -> Result<Next, DeviceError> {
        if !shape.recorded {
            return Ok(Next::Run);
        }
        Ok(self.group.begin(self.among(), (shape, program))?)
    }

    fn run(&mut self, call: &Call, shape: StepShape) -> Done {
        self.now = Some((call.at, call.label()));
        let n = shape.rows(call.rows);
        match call.op {
            Op::Embed { table, first_row, out } => self.embed(table, first_row, out, n),
            Op::Product { w, x, out, operand } => self.multiply(w, x, out, operand, n),
            Op::RmsNorm { x, w, eps, out } => self.rms_norm(x, w, eps, out, n),
            Op::LayerNorm { x, w, b, eps } => self.layer_norm(x, w, b, eps, n),
            Op::Rope { x, base } => self.rotate(x, base, n),
            Op::Scale { x, factor } => self.scale(x, factor, n),
            Op::Copy { x, out } => self.copy(x, out, n),
            Op::GatherRows { x, out } => self.gather_rows(x, out, n),
            Op::Add { x, y } => self.add(x, y, n),
            Op::AddNorm { x, y, w, eps, out } => self.add_norm(x, y, w, eps, out, n),
            Op::Append { x, cache, layer } => self.append(x, cache, layer, n),
            Op::IndexTopK { cache, layer, q, weights, top_k, chosen, scores } => {
                scores.map_or(Ok(()), |scores| self.fit(scores, shape))?;
                self.index_top_k(cache, layer, q, weights, top_k, chosen, scores, shape)
            }
            Op::Attend { cache, layer, q_latent, q_rope, scale, chosen, out } => {
                self.attend(cache, layer, q_latent, q_rope, scale, chosen, out, shape)
            }
            Op::Route { logits, bias, router, scores, ids } => self.route(logits, bias, router, scores, ids, n),
            Op::ExpertWeights { logits, ids, router, out } => self.expert_weights(logits, ids, router, out, n),
            Op::SwiGlu { x, out } => self.swiglu(x, out, n),
            Op::ExpertsHidden { w, x, ids, out, operand } => self.experts_hidden(w, x, ids, out, operand, n),
            Op::ExpertsDown { w, x, ids, weights, out, operand } => {
                self.experts_down(w, x, ids, weights, out, operand, n)
            }
            Op::AllReduce { x } => Ok(self.meet.all_reduce(self, call.at, x, n)?),
            Op::Sample { logits, first } => self.sample(logits, first, n),
            Op::Share { .. } => Ok(self.meet.share(self, call.at)?),
            Op::Commit { ranks } => self.commit(ranks, n),
        }
    }

    fn end(&mut self, shape: StepShape, program: ProgramId) -> Done {
        if shape.recorded {
            self.group.end(self.among(), (shape, program))?;
        }
        if shape.ahead && self.rank == 0 {
            self.with_inputs(Some(Place::NEXT_TOKEN), |inputs| inputs.post(shape.tokens))?;
        }
        Ok(())
    }

    fn posted(&mut self) -> Result<Vec<u32>, DeviceError> {
        self.with_inputs(Some(Place::NEXT_TOKEN), CudaInputs::posted)
    }

    fn runs_ahead(&self) -> usize {
        MOST_RECORDED
    }
}
