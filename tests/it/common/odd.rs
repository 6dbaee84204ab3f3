//! Engines that break one promise each: somebody stands around the plain CPU devices.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lockstep::checkpoint::Checkpoint;
use lockstep::device::{Around, Batch, Call, Device, DeviceError, IndexId, Op, Recipe, StepShape, View};
use lockstep::engine::{Backend, CpuBackend, Engine, EngineError, Engines, Options, Ranks};
use lockstep::model::{Config, Place, Point};
use lockstep::shard::TpPlan;

/// What is broken. Layers and ranks count from 0; a fault of rank 1 does not exist at tp 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    None,
    /// Nothing: the device chooses the next tokens itself and runs ahead of the host, as GPUs do.
    RunsAhead,
    /// It runs ahead, and draws every sequence's token as the first sequence's.
    DrawsAsTheFirst,
    /// q_a of layer 2 is larger by this share in steps of more than 8 tokens.
    DependsOnRows(f32),
    /// attn.out of layer 1 on rank 0: the first value is a little larger in every second call.
    Flips,
    /// Queries of layer 0 turn by one position more in every sequence but the first.
    DependsOnSlot,
    /// The norm behind the residual of layer 1 has another eps where it is fused.
    FusedEps,
    /// All keys are attended to, whatever was chosen.
    AttendsToAll,
    /// Layer 2, rank 1: the shared expert's partial sum is missing.
    SharedLost,
    /// Layer 2, rank 1, token 5: the last expert is the worst one.
    ChoosesWorst,
    /// Layer 3, ffn.out: what rank 1 contributes, times this.
    Contributes(f32),
}

/// Engines with a fault.
pub struct OddEngines {
    pub fault: Fault,
    /// What the device promises.
    pub one_order: bool,
    /// Rows for which devices have chosen the token.
    pub chosen: Arc<AtomicUsize>,
}

/// Engines with one oddity.
pub fn odd(fault: Fault) -> OddEngines {
    OddEngines { fault, one_order: true, chosen: Arc::default() }
}

impl Engines for OddEngines {
    fn engine(&self, checkpoint: &Arc<Checkpoint>, tp: usize, options: Options) -> Result<Engine, EngineError> {
        let plan = Arc::new(TpPlan::new(checkpoint.config(), tp)?);
        let ranks = self.backend().ranks(tp, checkpoint.config())?;
        let around = |rank| {
            let (fault, chosen) = (self.fault, self.chosen.clone());
            Some(Box::new(Odd { rank, fault, calls: 0, inputs: Batch::default(), chosen }) as Box<dyn Around>)
        };
        Engine::start(&|_| checkpoint.clone(), plan, ranks, options, &around)
    }

    fn backend(&self) -> &dyn Backend {
        static AHEAD: CpuBackend = CpuBackend::ahead(4);
        static BEHIND: CpuBackend = CpuBackend::ahead(0);
        let ahead = matches!(self.fault, Fault::RunsAhead | Fault::DrawsAsTheFirst);
        match (ahead, self.one_order) {
            (true, _) => &AHEAD,
            (false, true) => &BEHIND,
            (false, false) => &Vague,
        }
    }
}

/// The CPU, promising no bits.
struct Vague;

impl Backend for Vague {
    fn ranks(&self, tp: usize, config: &Config) -> Result<Ranks, EngineError> {
        CpuBackend::default().ranks(tp, config)
    }
    fn recipe(&self) -> Recipe {
        Recipe::Strict
    }
    fn sums_in_one_order(&self) -> bool {
        false
    }
}

/// Stands around one rank.
struct Odd {
    rank: usize,
    fault: Fault,
    calls: usize,
    inputs: Batch,
    chosen: Arc<AtomicUsize>,
}

type Done = Result<(), DeviceError>;

fn times(device: &mut dyn Device, view: View, n: usize, factor: f32) -> Done {
    let values: Vec<f32> = device.read(view, n)?.iter().map(|v| v * factor).collect();
    device.write(view, n, &values)
}

impl Odd {
    /// The call as the fault has it.
    fn altered(&self, call: &Call) -> Call {
        let mut altered = *call;
        match (self.fault, &mut altered.op) {
            (Fault::FusedEps, Op::AddNorm { eps, .. }) if call.at == Place::trunk(1, Point::FfnNorm) => *eps *= 10.0,
            (Fault::AttendsToAll, Op::Attend { chosen, .. }) => *chosen = None,
            _ => {}
        }
        altered
    }

    /// Puts the worst expert in place of token 5's last one.
    fn choose_worst(&self, device: &mut dyn Device, scores: View, ids: IndexId, used: usize, n: usize) -> Done {
        let all = device.read(scores, n)?;
        let row = &all[5 * scores.width..6 * scores.width];
        let worst = (0..row.len()).min_by(|a, b| row[*a].total_cmp(&row[*b])).expect("experts");
        let mut chosen = device.read_index(ids, n)?;
        chosen[6 * used - 1] = worst as i32;
        device.write_index(ids, n, &chosen)
    }
}

impl Around for Odd {
    fn inputs(&mut self, batch: &mut Batch) {
        if self.fault == Fault::DrawsAsTheFirst
            && let Some(first) = batch.ahead.first().copied()
        {
            batch.ahead.fill(first);
        }
        self.inputs.clone_from(batch);
    }

    fn run(&mut self, call: &Call, shape: StepShape, device: &mut dyn Device) -> Done {
        let n = shape.rows(call.rows);
        let is = |layer, point| call.at == Place::trunk(layer, point);
        match (self.fault, &call.op) {
            (Fault::Contributes(factor), Op::AllReduce { x }) if self.rank == 1 && is(3, Point::FfnOut) => {
                times(device, *x, n, factor)?;
            }
            (Fault::DependsOnSlot, Op::Rope { .. }) if is(0, Point::Q) => {
                let mut turned = self.inputs.clone();
                turned.tokens.iter_mut().filter(|t| t.sequence > 0).for_each(|t| t.position += 1);
                device.set_inputs(&turned, shape)?;
                device.run(call, shape)?;
                return device.set_inputs(&self.inputs, shape);
            }
            _ => {}
        }
        device.run(&self.altered(call), shape)?;
        match (self.fault, &call.op) {
            (_, Op::Sample { .. }) => drop(self.chosen.fetch_add(n, Ordering::Relaxed)),
            (Fault::DependsOnRows(share), Op::Product { out, .. }) if is(2, Point::QA) && n > 8 => {
                times(device, View { width: 64, ..*out }, n, 1.0 + share)?;
            }
            (Fault::Flips, Op::Product { out, .. }) if is(1, Point::AttnOut) && self.rank == 0 => {
                self.calls += 1;
                times(device, View { width: 1, ..*out }, 1, 1.0 + 1e-4 * (self.calls % 2) as f32)?;
            }
            (Fault::SharedLost, Op::Product { out, .. }) if is(2, Point::Shared) && self.rank == 1 => {
                times(device, *out, n, 0.0)?;
            }
            (Fault::ChoosesWorst, Op::Route { scores, ids, router, .. })
                if is(2, Point::ExpertIds) && self.rank == 1 && n > 5 =>
            {
                self.choose_worst(device, *scores, *ids, router.used, n)?;
            }
            _ => {}
        }
        Ok(())
    }
}
