//! Losses of texts, with repairs or without: an engine whose calls are altered from step to step, and the texts as one step.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rayon::prelude::*;

use super::altered::Altered;
use super::repair::Repair;
use crate::checkpoint::Checkpoint;
use crate::device::{Around, Batch, Call, Device, DeviceError, Op, StepShape, Token};
use crate::engine::kv::PAGE;
use crate::engine::{Engine, EngineError};
use crate::model::{Config, Point};
use crate::report::Cost;
use crate::shard::TpPlan;
use crate::verify::Subject;

/// What a token costs whose logits are no numbers.
const NO_NUMBER: f64 = 100.0;

/// Ids of a text, those from `from` on to be predicted.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Text {
    /// Its token ids.
    pub ids: Vec<u32>,
    /// The first one that is to be predicted.
    pub from: usize,
}

impl Text {
    /// Tokens to be predicted.
    pub(super) fn scored(&self) -> usize {
        self.ids.len() - self.from
    }
}

/// Texts that are run together, each as a sequence of its own.
#[derive(Clone, Debug)]
pub(super) struct Deck {
    /// The texts.
    pub texts: Vec<Text>,
}

impl Deck {
    /// Tokens of all texts.
    fn tokens(&self) -> usize {
        self.texts.iter().map(|text| text.ids.len()).sum()
    }

    /// Pages of all texts.
    fn pages(&self) -> usize {
        self.texts.iter().map(|text| text.ids.len().div_ceil(PAGE)).sum()
    }
}

/// What an engine must have room for in one step.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Room {
    tokens: usize,
    pages: usize,
    sequences: usize,
}

impl Room {
    /// Room for these texts, too.
    pub(super) fn and(self, texts: &[Text]) -> Room {
        let deck = Deck { texts: texts.to_vec() };
        Room {
            tokens: self.tokens.max(deck.tokens()),
            pages: self.pages.max(deck.pages()),
            sequences: self.sequences.max(texts.len()),
        }
    }
}

/// The residual at the beginning of every layer of a run.
pub(super) type Kept = Vec<Arc<Vec<f32>>>;

/// What the next step is to be.
#[derive(Clone, Default)]
struct Order {
    repairs: Vec<Repair>,
    /// The first layer to run, and the residual there.
    start: Option<(usize, Arc<Vec<f32>>)>,
    /// Whether residuals are kept.
    keep: bool,
}

/// What the host and those who stand around devices share.
#[derive(Default)]
struct Shared {
    order: Mutex<Order>,
    kept: Mutex<Kept>,
    /// The calls of rank 0, once a step has run.
    calls: Mutex<Vec<Call>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Stands around one rank.
struct Repairing {
    rank: usize,
    tp: usize,
    checkpoint: Arc<Checkpoint>,
    shared: Arc<Shared>,
    /// The rank's calls, once a step has run.
    calls: Vec<Call>,
    known: bool,
    order: Order,
    altered: Altered,
    /// The number of the next call.
    at: usize,
}

impl Around for Repairing {
    fn inputs(&mut self, _: &mut Batch) {
        if !self.calls.is_empty() {
            self.known = true;
        }
        self.order = lock(&self.shared.order).clone();
        let altered = Altered::new(&self.calls, &self.checkpoint, self.tp, &self.order.repairs);
        // The host asks before it orders.
        self.altered = altered.unwrap_or_default();
        self.at = 0;
    }

    fn run(&mut self, call: &Call, shape: StepShape, device: &mut dyn Device) -> Result<(), DeviceError> {
        let at = self.at;
        self.at += 1;
        if !self.known {
            self.calls.push(*call);
            if self.rank == 0 {
                lock(&self.shared.calls).push(*call);
            }
        }
        let n = shape.rows(call.rows);
        if let Some((first, residual)) = &self.order.start {
            match call.at.layer() {
                None if call.at.point == Point::Embed => return Ok(()),
                Some(layer) if layer < *first => return Ok(()),
                Some(layer) if layer == *first => {
                    if let Some(view) = residual_of(call) {
                        device.write(view, n, residual)?;
                    }
                }
                _ => {}
            }
        }
        if self.order.keep
            && self.rank == 0
            && let Some(view) = residual_of(call)
        {
            lock(&self.shared.kept).push(Arc::new(device.read(view, n)?));
        }
        self.altered.run(at, &self.calls, n, device, &mut |call, device| device.run(call, shape))
    }
}

/// The residual, for the call with which a layer begins.
fn residual_of(call: &Call) -> Option<crate::device::View> {
    match call.op {
        Op::RmsNorm { x, .. } if call.at.point == Point::AttnNorm && call.at.layer().is_some() => Some(x),
        _ => None,
    }
}

/// Runs texts with repairs.
pub(super) struct Scorer {
    engine: Engine,
    checkpoint: Arc<Checkpoint>,
    shared: Arc<Shared>,
    /// What was run so far.
    pub cost: Cost,
}

impl Scorer {
    /// An engine of the file as it is, whatever faults are injected elsewhere, with that room. On the CPU one
    /// rank suffices, since the question is the file's.
    ///
    /// # Errors
    /// Everything that loading refuses.
    pub(super) fn new(subject: &Subject, room: Room) -> Result<Self, EngineError> {
        let backend = subject.engines.backend();
        let tp = if backend.sums_in_one_order() { 1 } else { subject.tp };
        let (checkpoint, shared) = (subject.checkpoint.clone(), Arc::new(Shared::default()));
        let plan = Arc::new(TpPlan::new(checkpoint.config(), tp)?);
        let ranks = backend.ranks(tp, checkpoint.config())?;
        let options = subject.options_for(room.tokens, room.pages * PAGE, room.sequences);
        let around = |rank| {
            let (checkpoint, shared, order) = (checkpoint.clone(), shared.clone(), Order::default());
            let (calls, altered) = (Vec::new(), Altered::default());
            let repairing = Repairing { rank, tp, checkpoint, shared, calls, known: false, order, altered, at: 0 };
            Some(Box::new(repairing) as Box<dyn Around>)
        };
        let engine = Engine::start(&|_| checkpoint.clone(), plan, ranks, options, &around)?;
        Ok(Scorer { engine, checkpoint, shared, cost: Cost::default() })
    }

    /// The configuration.
    pub(super) fn config(&self) -> &Config {
        self.engine.config()
    }

    /// True if the repairs change something in the pass, once a step has run.
    pub(super) fn can(&self, repairs: &[Repair]) -> bool {
        Altered::new(&lock(&self.shared.calls), &self.checkpoint, self.engine.tp(), repairs).is_some()
    }

    /// The nats that each text costs.
    ///
    /// # Errors
    /// Those of the engine.
    pub(super) fn nats(&mut self, deck: &Deck, repairs: &[Repair]) -> Result<Vec<f64>, EngineError> {
        self.step(deck, Order { repairs: repairs.to_vec(), ..Order::default() })
    }

    /// The same, keeping the residual at the beginning of every layer.
    ///
    /// # Errors
    /// Those of the engine.
    pub(super) fn keep(&mut self, deck: &Deck, repairs: &[Repair]) -> Result<(Vec<f64>, Kept), EngineError> {
        lock(&self.shared.kept).clear();
        let nats = self.step(deck, Order { repairs: repairs.to_vec(), start: None, keep: true })?;
        Ok((nats, std::mem::take(&mut *lock(&self.shared.kept))))
    }

    /// The same as [`Scorer::nats`], where nothing differs before a layer from the run whose residuals were kept.
    ///
    /// # Errors
    /// Those of the engine.
    pub(super) fn nats_from(
        &mut self,
        deck: &Deck,
        repairs: &[Repair],
        layer: usize,
        kept: &Kept,
    ) -> Result<Vec<f64>, EngineError> {
        // A shared layer takes the choice of a full one below it, which so must run, too.
        let first = (0..=layer).rev().find(|l| self.config().is_full(*l)).unwrap_or(0);
        let start = kept.get(first).map(|residual| (first, residual.clone()));
        self.step(deck, Order { repairs: repairs.to_vec(), start, keep: false })
    }

    fn step(&mut self, deck: &Deck, order: Order) -> Result<Vec<f64>, EngineError> {
        let layers = self.config().layers - order.start.as_ref().map_or(0, |(layer, _)| *layer);
        self.cost.texts += deck.texts.len();
        self.cost.tokens += deck.tokens();
        self.cost.token_layers += (deck.tokens() * layers) as u64;
        *lock(&self.shared.order) = order;
        let mut batch = Batch { expanded: true, ..Batch::default() };
        let mut wanted = Vec::new();
        for (number, text) in deck.texts.iter().enumerate() {
            let mut table = Vec::new();
            self.engine.pool().reserve(&mut table, text.ids.len())?;
            batch.tables.push(table);
            for (position, id) in text.ids.iter().enumerate() {
                if position + 1 >= text.from && position + 1 < text.ids.len() {
                    batch.logits.push(batch.tokens.len() as u32);
                    wanted.push((number, text.ids[position + 1]));
                }
                batch.tokens.push(Token { id: *id, position: position as u32, sequence: number as u32 });
            }
        }
        let mut tables = batch.tables.clone();
        let output = self.engine.step(batch, Vec::new());
        tables.iter_mut().for_each(|table| self.engine.pool().release(table));
        let logits = output?.logits;
        let vocab = self.engine.config().vocab;
        let rows: Vec<&[f32]> = logits.chunks_exact(vocab).collect();
        let costs: Vec<f64> = rows.par_iter().zip(&wanted).map(|(row, (_, id))| cost(row, *id)).collect();
        let mut nats = vec![0.0; deck.texts.len()];
        costs.iter().zip(&wanted).for_each(|(cost, (number, _))| nats[*number] += cost);
        Ok(nats)
    }
}

/// What a token costs where these are the logits.
fn cost(row: &[f32], id: u32) -> f64 {
    let most = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = row.iter().map(|v| (f64::from(*v) - most).exp()).sum();
    let own = row.get(id as usize).map_or(f64::NEG_INFINITY, |v| f64::from(*v));
    let nats = most + sum.ln() - own;
    if nats.is_finite() { nats.min(NO_NUMBER) } else { NO_NUMBER }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_costs_what_its_share_says() {
        let even = vec![0.5f32; 8];
        assert!((cost(&even, 3) - 8f64.ln()).abs() < 1e-6);
        assert!(cost(&[9.0, 0.0], 0) < 1e-3 && cost(&[9.0, 0.0], 1) > 8.9);
        assert_eq!(cost(&[f32::NAN, 0.0], 1), NO_NUMBER);
        assert_eq!(cost(&[0.0, 1e9], 0), NO_NUMBER);
    }
}
