//! What the scheduler does with sequences may not change their texts: that others run beside them, that a beginning is in
//! the cache already, that they gave their pages back and were run again, that a neighbour went.

use super::Bench;
use crate::engine::prefix::Root;
use crate::engine::sampler::Sampling;
use crate::engine::scheduler::{Counts, Request, Scheduler};
use crate::engine::{Engine, EngineError, kv::PAGE};
use crate::report::{Check, Verdict};
use crate::verify::VerifyError;
use crate::verify::logits::{fed, judge};

/// Tokens of each text: so many that every sequence needs a page more than its prompt.
pub(super) const STEPS: usize = PAGE + 1;

/// A way to run sequences.
struct Way {
    name: &'static str,
    /// Whether they may share texts.
    root: Option<Root>,
    /// Pages that are left for them; `None` for all.
    pages: Option<usize>,
    /// The sequence that goes in the middle of its text.
    goes: Option<usize>,
}

/// Texts that came, and what the scheduler counted; the sequence that went has none.
struct Came {
    texts: Vec<Option<Vec<u32>>>,
    counts: Counts,
}

/// Pages of so many tokens.
fn pages(tokens: usize) -> usize {
    tokens.div_ceil(PAGE)
}

impl Bench<'_> {
    pub(super) fn scheduled(&mut self) -> Result<Vec<Check>, VerifyError> {
        let ids = &self.subject.ids;
        let all = "scheduled = alone";
        let each = ids.len().min(self.engine.config().context.saturating_sub(STEPS + 1));
        if each < PAGE + 2 {
            let detail = format!("the prompt of {} tokens has no page that could be shared", ids.len());
            return Ok(vec![Check::new(all, Verdict::NotApplicable, detail)]);
        }
        let prompts: Vec<Vec<u32>> =
            [each, each * 3 / 4, each * 2 / 3].map(|n| ids[ids.len() - n.max(2)..].to_vec()).to_vec();
        let alone = |name| Way { name, root: None, pages: None, goes: None };
        let mut texts = Vec::new();
        for prompt in &prompts {
            let came = run(&mut self.engine, std::slice::from_ref(prompt), &alone(all))?;
            texts.extend(came.texts.into_iter().flatten());
        }
        let most = self.engine.pool().free();
        let tight = pages(prompts[0].len() + 1) + pages(prompts[1].len() + 1);
        let root = Some(Root::new("invariants"));
        // Fills the cache.
        run(&mut self.engine, &prompts[..1], &Way { root: root.clone(), ..alone(all) })?;
        let ways = [
            (alone("scheduled together = alone"), &prompts[..]),
            (Way { root, ..alone("prefix hit = fresh") }, &prompts[..1]),
            (Way { pages: Some(tight.min(most)), ..alone("resumed after preemption = uninterrupted") }, &prompts[..2]),
            (Way { goes: Some(0), ..alone("cancelled neighbour = none") }, &prompts[..]),
        ];
        let mut checks = Vec::new();
        for (way, prompts) in ways {
            let came = run(&mut self.engine, prompts, &way)?;
            let active = match way.name {
                "prefix hit = fresh" => came.counts.shared > 0,
                "resumed after preemption = uninterrupted" => came.counts.preempted > 0,
                _ => true,
            };
            if active {
                checks.extend(self.compared(&way, prompts, &texts, came)?);
            } else {
                checks.push(Check::new(way.name, Verdict::Inactive, "the scheduler had no cause for it"));
            }
        }
        self.engine.forget();
        Ok(checks)
    }

    /// Texts beside those that came alone: the same where bits are promised, else judged by the noise floor.
    fn compared(
        &mut self,
        way: &Way,
        prompts: &[Vec<u32>],
        texts: &[Vec<u32>],
        came: Came,
    ) -> Result<Vec<Check>, VerifyError> {
        let parted = |i: &usize| came.texts[*i].as_ref().is_some_and(|text| *text != texts[*i]);
        let parted: Vec<usize> = (0..prompts.len()).filter(parted).collect();
        let tokens = came.texts.iter().flatten().map(Vec::len).sum::<usize>();
        let Some(first) = parted.first().copied() else {
            return Ok(vec![Check::exact(way.name, true, format!("{tokens} tokens: the same"))]);
        };
        let text = came.texts[first].clone().unwrap_or_default();
        let at = text.iter().zip(&texts[first]).take_while(|(a, b)| a == b).count();
        let detail = format!("sequence {first} of {} tokens parts at token {at}", prompts[first].len());
        if self.exact {
            return Ok(vec![Check::exact(way.name, false, format!("SCHEDULE_DEPENDENCE: {detail}"))]);
        }
        let detail = format!("{detail}; judged below by its margins");
        let mut checks = vec![Check::new(way.name, Verdict::NotApplicable, detail)];
        for i in parted {
            let name = format!("{}, sequence {i}", way.name);
            let text = came.texts[i].clone().unwrap_or_default();
            let run = fed(&mut self.engine, name, &prompts[i], text)?;
            judge(self.subject, &run, false, self.progress, &mut checks)?;
        }
        Ok(checks)
    }
}

/// Greedy texts of prompts.
fn run(engine: &mut Engine, prompts: &[Vec<u32>], way: &Way) -> Result<Came, VerifyError> {
    let mut held = Vec::new();
    if let Some(left) = way.pages {
        let others = engine.pool().free().saturating_sub(left);
        engine.pool().reserve(&mut held, others * PAGE).map_err(EngineError::from)?;
    }
    let mut scheduler = Scheduler::default();
    let mut numbers = Vec::new();
    for prompt in prompts {
        let plain = Request::plain(prompt.clone(), STEPS, Vec::new(), Sampling::default());
        numbers.push(scheduler.add(engine, Request { root: way.root.clone(), ..plain })?);
    }
    let mut texts = vec![Some(Vec::new()); prompts.len()];
    let mut counts = Counts::default();
    while scheduler.is_busy() {
        for event in scheduler.step(engine)? {
            let at = numbers.iter().position(|n| *n == event.sequence);
            if let Some(text) = at.and_then(|i| texts[i].as_mut()) {
                text.push(event.token);
            }
        }
        if let Some(i) = way.goes.filter(|i| texts[*i].as_ref().is_some_and(|text| text.len() >= STEPS / 3)) {
            scheduler.cancel(engine, numbers[i]);
            texts[i] = None;
        }
        counts = scheduler.counts();
    }
    engine.pool().release(&mut held);
    Ok(Came { texts, counts })
}
