//! Two whole runs side by side, by the noise floor. The baseline is the engine at one rank. The reference measures, with
//! the baseline's choices, how far errors of the recipe travel; the target goes on with the same choices, and its own
//! ones are judged by their margins. Where they are the baseline's anyway the target runs free: putting equal values in
//! their place changes nothing. Rows where a near tie fell the other way are replayed, and counted.
//!
//! What this separates, on glm5-nano at tp 8 with 112 tokens: a clean engine has rho 0.08 over all rows and 0.13 at the
//! worst token; with one rank's shared-expert partial lost in one layer rho is 10,000 and 28,000.

use std::sync::Arc;

use super::Bench;
use crate::engine::Engine;
use crate::model::{Place, Point};
use crate::probe::Replacements;
use crate::probe::capture::{Captured, Filter};
use crate::report::{Check, Verdict};
use crate::verify::VerifyError;
use crate::verify::feed::{Fed, Feed, Listen, choices, feed};
use crate::verify::floor;
use crate::verify::reference_run::{self, Plan, ReferenceRuns};

/// The baseline's run and the floor around it.
pub struct Free {
    /// The reference's runs with the baseline's choices.
    pub reference: ReferenceRuns,
    /// The baseline's choices.
    pub choices: Arc<Replacements>,
    /// The baseline's logits.
    pub logits: Vec<f32>,
}

impl Bench<'_> {
    /// The floor and the baseline's run, made once.
    fn floor(&self) -> Result<&Free, VerifyError> {
        if let Some(floor) = self.floor.get() {
            return Ok(floor);
        }
        let subject = self.subject;
        let mut engine = subject.engines.lend(&subject.checkpoint, 1, *self.engine.options())?;
        let run = feed(&mut engine, &Feed::whole(&subject.ids), &Listen::Capture(choices()))?;
        drop(engine);
        let choices = Arc::new(run.trace.choices(0));
        let variants = reference_run::recipe(subject.recipe, subject.tp);
        let plan = Plan::new(&subject.checkpoint, &run.trace, &choices, &variants);
        let reference = reference_run::measure(&plan, self.progress)?;
        Ok(self.floor.get_or_init(|| Free { reference, choices, logits: run.logits }))
    }

    /// Compares the prompt fed in another way with the prompt in one step, both with the baseline's choices. Choices at
    /// the places of `absent` are not judged.
    pub(super) fn freely(
        &mut self,
        name: &str,
        absent: &[Place],
        run: impl FnOnce(&mut Engine, &Listen) -> Result<Fed, VerifyError>,
    ) -> Result<Check, VerifyError> {
        let listen = Listen::Replace(self.floor()?.choices.clone(), choices());
        let plain = feed(&mut self.engine, &Feed::whole(&self.subject.ids), &listen)?;
        let target = run(&mut self.engine, &listen)?;
        let (free, vocab) = (self.floor()?, self.vocab());
        let baseline = against(&plain.logits, vocab);
        Ok(free.reference.compare(name, &target, &baseline, Some(&free.choices), absent))
    }

    /// TP 1 = TP N.
    pub(super) fn degrees(&mut self) -> Result<Vec<Check>, VerifyError> {
        let tp = self.subject.tp;
        let name = format!("TP 1 = TP {tp}");
        if tp == 1 {
            return Ok(vec![Check::new("TP 1 = TP N", Verdict::NotApplicable, "one rank")]);
        }
        let listen = match self.floor() {
            Ok(free) => Listen::Replace(free.choices.clone(), choices()),
            Err(VerifyError::Choice(why)) => {
                return Ok(vec![Check::new(name, Verdict::Divergent, format!("at one rank: {why}"))]);
            }
            Err(other) => return Err(other),
        };
        let target = feed(&mut self.engine, &Feed::whole(&self.subject.ids), &listen)?;
        let free = self.floor()?;
        let (reference, chosen, vocab) = (&free.reference, Some(&*free.choices), self.vocab());
        let mut check = reference.compare(&name, &target, &against(&free.logits, vocab), chosen, &[]);
        if check.verdict == Verdict::Divergent
            && let Some(op) = self.first_bad()?
        {
            check.detail = format!("{op}; {}", check.detail);
        }
        Ok(vec![check])
    }

    /// The first op, in the order of the forward pass, whose values at the sampled rows lie outside the floor of whole
    /// runs, if there is one: a bad choice alone is replaced and leaves no trace. Only run when something is wrong, as
    /// it keeps every point.
    fn first_bad(&mut self) -> Result<Option<String>, VerifyError> {
        let subject = self.subject;
        let rows: Vec<usize> = match subject.rows.is_empty() {
            true => (0..subject.ids.len()).collect(),
            false => subject.rows.iter().copied().filter(|r| *r < subject.ids.len()).collect(),
        };
        let keep = |point: Point| !point.is_choice() && !matches!(point, Point::IndexScores | Point::Logits);
        let filter: Filter = Arc::new(move |place| keep(place.point));
        let forced = self.floor()?.choices.clone();
        let variants = reference_run::recipe(subject.recipe, subject.tp);
        let plan = Plan::new(&subject.checkpoint, &self.base.trace, &forced, &variants);
        let reference = reference_run::measure(&Plan { keep: &keep, rows: &rows, ..plan }, self.progress)?;
        let listen = Listen::Replace(forced, filter);
        let all = Feed::whole(&subject.ids);
        let mut one = subject.engines.lend(&subject.checkpoint, 1, *self.engine.options())?;
        let (baseline, target) = (feed(&mut one, &all, &listen)?.trace, feed(&mut self.engine, &all, &listen)?.trace);
        for place in baseline.held().union(&target.held()) {
            // Where the reference has no such point there is no floor to name it by.
            let Some(floored) = reference.point(*place) else { continue };
            let (baseline, target) = match (baseline.whole(*place), target.whole(*place)) {
                (Ok(baseline), Ok(target)) => (baseline, target),
                (Err(why), _) => return Ok(Some(format!("first op {place}: at one rank: {why}"))),
                (_, Err(why)) => return Ok(Some(format!("first op {place}: {why}"))),
            };
            let width = floored.exact.ncols().max(1);
            let at = |captured: &Captured| -> Option<Vec<f32>> {
                let values = captured.as_f32();
                let row = |r: &usize| Some(values.get(r * width..(r + 1) * width)?.to_vec());
                Some(rows.iter().map(row).collect::<Option<Vec<_>>>()?.concat())
            };
            let (Some(baseline), Some(target)) = (at(&baseline), at(&target)) else {
                return Ok(Some(format!("first op {place}: fewer rows than tokens")));
            };
            let energies = floored.energies(target.chunks_exact(width), |t, i| Some(baseline[t * width + i].into()));
            let bad = floor::pools(&energies).into_iter().find(|(_, _, energy)| energy.share() > 1.0);
            if let Some((first, _, energy)) = bad {
                let at = format!("first op {place}, token {}, rho {:.3e}", rows[first], energy.rho());
                return Ok(Some(at));
            }
        }
        Ok(None)
    }
}

/// Values of a run's logits by row and column.
fn against(logits: &[f32], vocab: usize) -> impl Fn(usize, usize) -> f64 {
    move |t, i| logits.get(t * vocab + i).map_or(f64::NAN, |v| f64::from(*v))
}
