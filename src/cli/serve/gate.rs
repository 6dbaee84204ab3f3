//! The gate: the engine that is going to serve is the one that is checked. It is lent to the stages; where they need
//! another one (another degree, less room) and there is no memory for it, their comparison does not apply here, and a
//! certificate can show it.

use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::time::Instant;

use serde_json::{Value as Json, json};

use super::preflight::Room;
use super::systemd::Told;
use crate::checkpoint::Checkpoint;
use crate::cli::stages::{STAGES, covered};
use crate::cli::subject::{prompt, sample_rows};
use crate::cli::{CliError, Exit};
use crate::engine::{Backend, Engine, EngineError, Engines, Lent, Options};
use crate::report::{StageReport, Verdict};
use crate::verify::param_map::recipe_of;
use crate::verify::{Subject, sense};

/// Rows that are judged.
pub(in crate::cli) const ROWS: usize = 16;
/// A model with more layers is looked at in some of them.
const FEW_LAYERS: usize = 8;

/// Lends the engine that runs.
struct Lender {
    makes: Arc<dyn Engines>,
    runs: Mutex<Engine>,
    /// Whether there is memory for another beside it.
    spare: bool,
}

struct Lending(Arc<Lender>);

impl Engines for Lending {
    fn engine(&self, checkpoint: &Arc<Checkpoint>, tp: usize, options: Options) -> Result<Engine, EngineError> {
        match self.0.spare {
            true => self.0.makes.engine(checkpoint, tp, options),
            false => Err(EngineError::NotLent(format!(
                "it needs an engine of its own (tp {tp}), and there is no memory for two"
            ))),
        }
    }

    fn lend<'a>(&'a self, checkpoint: &Arc<Checkpoint>, tp: usize, options: Options) -> Result<Lent<'a>, EngineError> {
        let free = match self.0.runs.try_lock() {
            Ok(engine) => Some(engine),
            Err(TryLockError::Poisoned(engine)) => Some(engine.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        let fits = |engine: &Engine| {
            let has = engine.options();
            let room = has.chunk >= options.chunk && has.cache_tokens >= options.cache_tokens;
            engine.tp() == tp && has.attention == options.attention && room && has.sequences >= options.sequences
        };
        match free {
            Some(mut engine) if fits(&engine) => {
                engine.forget();
                Ok(Box::new(engine))
            }
            _ => Ok(Box::new(Box::new(self.engine(checkpoint, tp, options)?))),
        }
    }

    fn backend(&self) -> &dyn Backend {
        self.0.makes.backend()
    }
}

/// What is asked of the gate.
pub struct Asked {
    /// The model.
    pub checkpoint: Arc<Checkpoint>,
    /// What makes engines like the one that runs.
    pub engines: Arc<dyn Engines>,
    /// The engine that is going to serve.
    pub engine: Engine,
    /// The weights are random on purpose.
    pub untrained: bool,
    /// What memory there is.
    pub room: Room,
}

/// What the gate found.
pub struct Passed {
    /// The engine, which is to serve.
    pub engine: Engine,
    /// What the stages said, for those who ask.
    pub verification: Json,
}

/// Runs the stages.
///
/// # Errors
/// A stage that did not pass, with what it found; engines that fail.
pub fn run(asked: Asked, told: &Told) -> Result<Passed, CliError> {
    let Asked { checkpoint, engines, engine, untrained, room } = asked;
    let options = *engine.options();
    let tp = engine.tp();
    let lender = Arc::new(Lender { makes: engines, runs: Mutex::new(engine), spare: room.holds_two });
    let (ids, from) = prompt(&checkpoint, None, 0)?;
    let layers = checkpoint.config().layers;
    let some = [0, checkpoint.config().dense_layers.min(layers - 1), layers / 2, layers - 1];
    let subject = Subject {
        recipe: recipe_of(lender.makes.backend().recipe()),
        guessed: false,
        engines: Box::new(Lending(lender.clone())),
        baseline: None,
        tp,
        attention: options.attention,
        rows: sample_rows(ids.len(), ROWS, 0),
        layers: (layers > FEW_LAYERS).then(|| some.to_vec()),
        ids,
        prompt: from,
        own_prompt: true,
        asks: Vec::new(),
        target: None,
        convention: None,
        server: None,
        seed: 0,
        sense: sense::SenseOptions { untrained, ..sense::SenseOptions::default() },
        checkpoint,
    };
    let mut reports: Vec<StageReport> = Vec::new();
    for (_, name, stage) in STAGES {
        let began = Instant::now();
        told.stage(name);
        let mut report = match stage(&subject, told) {
            Ok(report) => report,
            Err(crate::verify::VerifyError::Engine(e)) if e.is_not_lent() => {
                StageReport::not_applicable(name, e.to_string())
            }
            Err(e) if e.is_lack() => StageReport::unmeasured(name, e.to_string()),
            Err(e) => return Err(e.into()),
        };
        report.seconds = began.elapsed().as_secs_f64();
        let verdict = report.verdict();
        tracing::info!(stage = name, verdict = verdict.name(), seconds = report.seconds, "{}", report.summary);
        let stops = Exit::from(verdict) != Exit::Ok;
        reports.push(report);
        if stops {
            return Err(refused(&reports));
        }
    }
    let stages: Vec<Json> = reports.iter().map(StageReport::brief).collect();
    let covered = serde_json::to_value(covered(&subject, &reports)).unwrap_or_default();
    let verification = json!({
        "verified": true, "source": "checks at start", "verdict": worst(&reports).name(), "stages": stages,
        "covered": covered, "time": chrono::Utc::now().format("%Y-%m-%dT%H:%M:%SZ").to_string(),
    });
    drop(subject);
    let lender = Arc::into_inner(lender).ok_or_else(|| CliError::Refused("the engine was not given back".into()))?;
    let mut engine = lender.runs.into_inner().unwrap_or_else(PoisonError::into_inner);
    engine.forget();
    Ok(Passed { engine, verification })
}

fn worst(reports: &[StageReport]) -> Verdict {
    reports.iter().map(StageReport::verdict).max().unwrap_or(Verdict::Unmeasured)
}

/// What the stage that did not pass found, a line for each check.
fn refused(reports: &[StageReport]) -> CliError {
    let Some(report) = reports.last() else { return CliError::Refused("nothing was checked".into()) };
    let verdict = report.verdict();
    let mut text = format!("not served: stage {}: {}: {}", report.stage, verdict.name(), report.summary);
    let worst = report.checks.iter().filter(|c| Exit::from(c.verdict) != Exit::Ok);
    for check in worst.take(8) {
        text += &format!("\n{}: {}: {}", check.name, check.verdict.name(), check.detail);
    }
    let next = match verdict {
        Verdict::Divergent | Verdict::Nondeterministic => {
            "\n`lockstep verify` says more, `lockstep bisect` names the fault"
        }
        _ => "\n`lockstep verify` says more; --unverified serves nevertheless, and says so",
    };
    CliError::Refused(text + next)
}
