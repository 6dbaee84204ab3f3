//! A rank's steps: its program on its device, whoever stands around it, and whoever listens.

use std::collections::HashMap;
use std::sync::Arc;

use super::arch::Model;
use super::weights::Weights;
use super::{EngineError, limits};
use crate::checkpoint::Checkpoint;
use crate::device::program::{RULES, Want};
use crate::device::{Around, Batch, Columns, Device, Limits, Next, Operand, Program, ProgramId, Show, StepShape, View};
use crate::model::{Config, Param, Place};
use crate::probe::{Data, Probe, Then, Visit};
use crate::shard::ShardPlan;

/// One rank's state.
pub(super) struct Forward {
    config: Config,
    tp: usize,
    rank: usize,
    limits: Limits,
    model: Model,
    device: Box<dyn Device>,
    around: Option<Box<dyn Around>>,
    weights: Weights,
    /// Programs of steps that nobody listens to.
    programs: HashMap<ProgramId, Arc<Program>>,
    /// What was wanted of the step given last, while the device runs ahead.
    ahead: StepShape,
}

/// How a step ended.
pub(super) enum Ended {
    /// With this rank's logits, `[rows][padded_vocab / tp]`; padding is -inf.
    Logits(Vec<f32>),
    /// At a probe point, because the listener said so.
    Stopped,
    /// With the next tokens on the device: see [`Forward::follow`].
    Ahead,
}

/// A listener, if there is one.
type Listener<'a> = Option<&'a mut (dyn Probe + 'static)>;

impl Forward {
    /// Loads what a rank holds and makes all it needs for steps within `limits`.
    ///
    /// # Errors
    /// Parameters that cannot be loaded, a device without enough memory.
    pub(super) fn new(
        checkpoint: &Checkpoint,
        plan: &dyn ShardPlan,
        rank: usize,
        model: Model,
        limits: Limits,
        mut device: Box<dyn Device>,
        loaded: &dyn Fn(),
    ) -> Result<Self, EngineError> {
        let mut weights = Weights::load(checkpoint, plan, &model, device.as_mut(), rank, loaded)?;
        device.alloc(&model.stores, limits)?;
        weights.fill(checkpoint, &model, device.as_mut())?;
        let ahead = StepShape::exact(&Batch::default());
        let (config, tp, programs) = (checkpoint.config().clone(), plan.tp(), HashMap::new());
        Ok(Forward { config, tp, rank, limits, model, device, around: None, weights, programs, ahead })
    }

    /// With somebody around the device, if anybody.
    pub(super) fn within(self, around: Option<Box<dyn Around>>) -> Self {
        Forward { around, ..self }
    }

    /// Runs a batch through all layers.
    ///
    /// # Errors
    /// A batch beyond the limits, and failures of the device or of a collective.
    pub(super) fn run(&mut self, batch: &Batch, probe: Listener<'_>) -> Result<Ended, EngineError> {
        let altered = self.around.as_mut().map(|around| {
            let mut batch = batch.clone();
            around.inputs(&mut batch);
            batch
        });
        let batch = altered.as_ref().unwrap_or(batch);
        limits::check(&self.limits, &self.config, batch)?;
        let (found, most) = (batch.ahead.len(), self.device.runs_ahead());
        if found > most {
            return Err(EngineError::Limit { what: "choices to make ahead on this device", most, found });
        }
        let exact = StepShape::exact(batch);
        let recorded = exact.recorded && probe.is_none() && self.around.is_none() && !batch.expanded;
        let wanted = StepShape { recorded, ..exact };
        let shape = self.device.shape(wanted);
        self.device.set_inputs(batch, shape)?;
        if !self.give(shape, batch.expanded, probe)? {
            return Ok(Ended::Stopped);
        }
        if shape.ahead {
            self.ahead = wanted;
            return Ok(Ended::Ahead);
        }
        Ok(Ended::Logits(self.device.read(self.model.logits, batch.logits.len())?))
    }

    /// Gives a step to the device, from its recording if there is one. False if the listener stopped it.
    fn give(&mut self, shape: StepShape, expanded: bool, probe: Listener<'_>) -> Result<bool, EngineError> {
        let id = ProgramId { head: shape.logits > 0, ahead: shape.ahead, expanded };
        if self.device.begin(shape, id)? == Next::Run && !self.pass(shape, id, probe)? {
            return Ok(false);
        }
        self.device.end(shape, id)?;
        Ok(true)
    }

    /// The calls of a program, one by one. False if the listener ended the step.
    fn pass(&mut self, shape: StepShape, id: ProgramId, mut probe: Listener<'_>) -> Result<bool, EngineError> {
        let program = match &probe {
            Some(probe) => Arc::new(fused(&self.model, id, &|place| match probe.wants(place) {
                true if probe.changes(place) => Want::Change,
                true => Want::Read,
                false => Want::Nothing,
            })),
            None => {
                let silent = || Arc::new(fused(&self.model, id, &|_| Want::Nothing));
                self.programs.entry(id).or_insert_with(silent).clone()
            }
        };
        let mut shows = program.shows.iter().peekable();
        for at in 0..=program.calls.len() {
            while let Some(show) = shows.next_if(|s| s.after == at) {
                if let Some(probe) = &mut probe
                    && probe.wants(show.place)
                    && !self.show(show, shape, *probe)?
                {
                    return Ok(false);
                }
            }
            let Some(call) = program.calls.get(at) else { break };
            match &mut self.around {
                None => self.device.run(call, shape)?,
                Some(around) => around.run(call, shape, self.device.as_mut())?,
            }
        }
        Ok(true)
    }

    /// Shows what lies at a place and takes replacements back. False if the listener ends the step.
    fn show(&mut self, show: &Show, shape: StepShape, probe: &mut dyn Probe) -> Result<bool, EngineError> {
        let (place, rows) = (show.place, shape.rows(show.rows));
        let own = place.shape(&self.config, self.tp);
        let (view, row) = match show.what {
            Operand::Indices(index) => {
                let mut values = self.device.read_index(index, rows)?;
                let then = probe.visit(Visit { place, rows, shape: &own, values: Data::Indices(&mut values) });
                if declared(place, probe, then)? == Then::Replaced {
                    self.device.write_index(index, rows, &values)?;
                }
                return Ok(then != Then::Stop);
            }
            Operand::Values(view) => (view, own),
            Operand::Context(buf) => (View::cols(buf, 0, shape.context), vec![shape.context]),
            Operand::Keys(..) | Operand::Inputs | Operand::Choices => return Ok(true), // no program shows these
        };
        let mut values = self.device.read(view, rows)?;
        let then = probe.visit(Visit { place, rows, shape: &row, values: Data::Values(&mut values) });
        if declared(place, probe, then)? == Then::Replaced {
            self.device.write(view, rows, &values)?;
        }
        Ok(then != Then::Stop)
    }

    /// Gives the step behind the one given last, whose tokens the host has not seen; the longest sequence then has
    /// `longest` keys. Returns the tokens of the step before it, on rank 0.
    ///
    /// # Errors
    /// Failures of the device or of a collective.
    pub(super) fn follow(&mut self, longest: usize) -> Result<Vec<u32>, EngineError> {
        let shape = self.device.shape(StepShape { context: longest, ..self.ahead });
        self.give(shape, false, None)?;
        self.chosen()
    }

    /// The tokens of the oldest step given ahead that were not returned yet, on rank 0.
    ///
    /// # Errors
    /// Failures of the device.
    pub(super) fn chosen(&mut self) -> Result<Vec<u32>, EngineError> {
        if self.rank > 0 {
            return Ok(Vec::new());
        }
        Ok(self.device.posted()?)
    }

    /// Most rows with which the device runs ahead of the host.
    pub(super) fn runs_ahead(&self) -> usize {
        self.device.runs_ahead()
    }

    /// The bytes that stand where `param` belongs, and its columns, read back from the device.
    ///
    /// # Errors
    /// A parameter that the rank does not hold.
    pub(super) fn read_weight(&mut self, param: Param) -> Result<(Vec<u8>, Columns), EngineError> {
        self.weights.read(self.device.as_mut(), param)
    }
}

/// Who changes something must have said so: what runs behind the place may have run already.
fn declared(place: Place, probe: &dyn Probe, then: Then) -> Result<Then, EngineError> {
    match then {
        Then::Replaced if !probe.changes(place) => {
            Err(EngineError::Refused(format!("a listener replaced {place} without having said that it would")))
        }
        then => Ok(then),
    }
}

/// The program that runs for who wants what.
pub(super) fn fused(model: &Model, id: ProgramId, wants: &dyn Fn(Place) -> Want) -> Program {
    model.program(id).fuse(if id.expanded { &[] } else { RULES }, wants)
}
