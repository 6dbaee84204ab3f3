//! What is verified: a model, the engines made from it, and the prompt.

use std::sync::Arc;

use lockstep_reference::RefRecipe;

use super::VerifyError;
use super::asks::Ask;
use super::conventions::Convention;
use super::feed::{Fed, Feed, Listen, feed};
use super::logits::server::Server;
use super::sense;
use crate::checkpoint::Checkpoint;
use crate::engine::kv::PAGE;
use crate::engine::{Attention, Engine, EngineError, Engines, Lent, Options};
use crate::probe::Trace;
use crate::probe::capture::Filter;

/// Everything the stages need.
pub struct Subject {
    /// The model, as its files are.
    pub checkpoint: Arc<Checkpoint>,
    /// A model trusted as the other side.
    pub baseline: Option<Arc<Checkpoint>>,
    /// Makes the engines under test.
    pub engines: Box<dyn Engines>,
    /// How the run under judgement computes: the engines' recipe, or a dump's. Floors are those of this recipe.
    pub recipe: RefRecipe,
    /// The recipe was guessed, since a dump's word for it says nothing here.
    pub guessed: bool,
    /// Ranks.
    pub tp: usize,
    /// What queries attend to.
    pub attention: Attention,
    /// The prompt: longer than top-k where the context allows it, so that sparse attention is active.
    pub ids: Vec<u32>,
    /// Where the prompt came from, for the report.
    pub prompt: String,
    /// True if the user gave the prompt: then no other one is run.
    pub own_prompt: bool,
    /// Chat turns with known answers.
    pub asks: Vec<Ask>,
    /// Query rows that attention, router and experts are judged at; the last is always among them.
    pub rows: Vec<usize>,
    /// Layers to look at; `None` is all.
    pub layers: Option<Vec<usize>>,
    /// A trace judged instead of our own run.
    pub target: Option<Trace>,
    /// What is said of how the target was captured.
    pub convention: Option<Convention>,
    /// A running server judged instead of our own run.
    pub server: Option<Server>,
    /// Seed of sampled rows and prompts.
    pub seed: u64,
    /// How the stage `sense` is run.
    pub sense: sense::SenseOptions,
}

impl Subject {
    /// Options that hold the whole prompt in one step.
    pub fn options(&self) -> Options {
        self.options_for(self.ids.len(), self.ids.len() + 2 * PAGE, 1)
    }

    /// Options for steps of `chunk` tokens, with so many tokens in the cache.
    pub fn options_for(&self, chunk: usize, cache_tokens: usize, sequences: usize) -> Options {
        Options { attention: self.attention, chunk, cache_tokens, sequences }
    }

    /// An engine under test with the subject's own degree and options.
    ///
    /// # Errors
    /// Everything that loading refuses.
    pub fn engine(&self) -> Result<Lent<'_>, EngineError> {
        self.engines.lend(&self.checkpoint, self.tp, self.options())
    }

    /// True if the layer is to be looked at; what is outside the layers always is.
    pub fn wants_layer(&self, layer: Option<usize>) -> bool {
        layer.is_none_or(|l| self.layers.as_ref().is_none_or(|all| all.contains(&l)))
    }
}

/// Runs `ids` as one sequence from position 0 in one step, capturing what `filter` accepts, with logits of every row.
///
/// # Errors
/// Failures of the engine.
pub fn run_prompt(engine: &mut Engine, ids: &[u32], filter: Filter) -> Result<(Trace, Vec<f32>), VerifyError> {
    let Fed { trace, logits } = feed(engine, &Feed::whole(ids), &Listen::Capture(filter))?;
    Ok((trace, logits))
}

/// Accepts every point of the given layers (all without a list).
pub fn points_of(layers: Option<Vec<usize>>) -> Filter {
    Arc::new(move |place| place.layer().is_none_or(|l| layers.as_ref().is_none_or(|all| all.contains(&l))))
}
