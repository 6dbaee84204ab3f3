//! Faults of operations: what stands around a rank's device and alters its calls.

use crate::device::{Around, Call, Device, DeviceError, IndexId, Op, Operand, StepShape, View};
use crate::model::Place;

/// A change of the calls at a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpFault {
    /// Attention ignores the choice and attends to every visible key.
    AllKeys,
    /// Zeros enter the all-reduce in place of the rank's partial sum.
    NoContribution,
    /// What is written last is wrong: of every call, or of those of one operation ([`Op::name`]).
    Damaged(Option<&'static str>),
}

impl OpFault {
    /// True if it alters this call.
    pub fn hits(&self, call: &Call) -> bool {
        match (self, &call.op) {
            (OpFault::AllKeys, Op::Attend { chosen, .. }) => chosen.is_some(),
            (OpFault::NoContribution, Op::AllReduce { .. }) => true,
            (OpFault::Damaged(only), op) => only.is_none_or(|name| name == op.name()),
            _ => false,
        }
    }
}

/// Relative size of the damage: far above any floor, far below what shows in text at once.
const AMOUNT: f32 = 0.01;

/// The faults of one rank.
pub(super) struct Faults {
    ops: Vec<(Place, OpFault)>,
    /// The step's choice of tokens, made again wrongly where it is to be damaged later.
    sample: Option<Call>,
}

impl Faults {
    /// The faults of a rank, by the place of the calls that they hit.
    pub(super) fn new(ops: Vec<(Place, OpFault)>) -> Self {
        Faults { ops, sample: None }
    }

    /// Runs a call and damages what it writes last.
    fn damaged(&self, call: &Call, shape: StepShape, device: &mut dyn Device) -> Result<(), DeviceError> {
        let n = shape.rows(call.rows);
        let noise = |values: &mut [f32]| {
            for (i, v) in values.iter_mut().enumerate() {
                *v *= if i % 2 == 0 { 1.0 + AMOUNT } else { 1.0 - AMOUNT };
            }
        };
        match &call.op {
            // What cannot be written by itself is made from damaged values.
            Op::Append { x, .. } => from_damaged(*x, &noise, call, shape, device),
            Op::Sample { logits, .. } => from_damaged(*logits, &upside_down, call, shape, device),
            Op::Share { .. } | Op::Commit { .. } => {
                if let Some(sample) = &self.sample
                    && let Op::Sample { logits, .. } = sample.op
                {
                    from_damaged(logits, &upside_down, sample, shape, device)?;
                }
                device.run(call, shape)
            }
            op => {
                device.run(call, shape)?;
                match op.writes().last() {
                    Some(Operand::Indices(index)) => exchange(*index, n, op, device),
                    Some(Operand::Values(view)) => {
                        let mut values = device.read(*view, n)?;
                        noise(&mut values);
                        device.write(*view, n, &values)
                    }
                    _ => Ok(()),
                }
            }
        }
    }
}

fn upside_down(values: &mut [f32]) {
    values.iter_mut().for_each(|v| *v = -*v);
}

/// Runs a call on damaged values of `x`, which are as before afterwards.
fn from_damaged(
    x: View,
    damage: &dyn Fn(&mut [f32]),
    call: &Call,
    shape: StepShape,
    device: &mut dyn Device,
) -> Result<(), DeviceError> {
    let n = shape.rows(call.rows);
    let whole = device.read(x, n)?;
    let mut values = whole.clone();
    damage(&mut values);
    device.write(x, n, &values)?;
    device.run(call, shape)?;
    device.write(x, n, &whole)
}

/// Puts something in place of each row's last choice that was not chosen, where there is anything.
fn exchange(index: IndexId, n: usize, op: &Op, device: &mut dyn Device) -> Result<(), DeviceError> {
    let mut all = device.read_index(index, n)?;
    let width = (all.len() / n.max(1)).max(1);
    for row in all.chunks_exact_mut(width) {
        // What lies below the last key is visible as well.
        let most = match op {
            Op::Route { router, .. } => router.experts as i32,
            _ => row.iter().copied().max().unwrap_or(0),
        };
        let other = (0..most).find(|i| !row.contains(i));
        let last = row.iter().rposition(|i| *i >= 0);
        if let (Some(other), Some(last)) = (other, last) {
            row[last] = other;
        }
    }
    device.write_index(index, n, &all)
}

impl Around for Faults {
    fn run(&mut self, call: &Call, shape: StepShape, device: &mut dyn Device) -> Result<(), DeviceError> {
        if let Op::Sample { .. } = call.op {
            self.sample = Some(*call);
        }
        let hit = self.ops.iter().find(|(place, fault)| *place == call.at && fault.hits(call)).map(|(_, f)| *f);
        match (hit, &call.op) {
            (Some(OpFault::Damaged(_)), _) => self.damaged(call, shape, device),
            (Some(OpFault::NoContribution), Op::AllReduce { x }) => {
                let n = shape.rows(call.rows);
                device.write(*x, n, &vec![0.0; n * x.len()])?;
                device.run(call, shape)
            }
            (Some(OpFault::AllKeys), _) => {
                let mut altered = *call;
                if let Op::Attend { chosen, .. } = &mut altered.op {
                    *chosen = None;
                }
                device.run(&altered, shape)
            }
            _ => device.run(call, shape),
        }
    }
}
