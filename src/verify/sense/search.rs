//! The search for repairs: all of them on two texts, those that help on every text, and what helps most is kept while the
//! next is looked for. A repair shares what stands below the first layer that it alters.

use super::repair::{Change, Half, Repair};
use super::rule::{LEAST_GAIN, LEAST_OVER_SKIP, PLAUSIBLE, Scale};
use super::scorer::{Deck, Scorer, Text};
use crate::engine::EngineError;
use crate::report::Progress;

/// What a repair must gain of the loss on the first texts to be tried on all.
const RACE: f64 = 0.2;
const RACE_THOROUGH: f64 = 0.05;
/// Texts of the race.
const RACED: usize = 2;
/// Most repairs of a round that are tried on all texts.
const TRIED: usize = 8;
/// Sets of repairs that are taken on to the next round.
const BEAM: usize = 1;
const BEAM_THOROUGH: usize = 3;
/// What such a set must have gained of the file's loss.
const CARRIED: f64 = 0.2;
/// Most repairs at once.
pub(super) const MOST: usize = 2;
pub(super) const MOST_THOROUGH: usize = 3;
/// Sets that are searched: where the second says nothing, a third hardly does.
pub(super) const SEARCHED: usize = 2;

/// What runs a race.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Race {
    /// Changes that may repair.
    Repairs,
    /// Halves of layers, left out.
    Skips,
}

/// Repairs, and what each text costs with them.
#[derive(Clone, Debug)]
pub(super) struct Found {
    /// The repairs, in the order in which they were found.
    pub repairs: Vec<Repair>,
    /// Nats that each text costs with all of them.
    pub nats: Vec<f64>,
}

/// A repair that is named.
#[derive(Clone, Debug)]
pub(super) struct Step {
    /// It.
    pub repair: Repair,
    /// What each text costs without it, the others applied.
    pub before: Vec<f64>,
    /// Others that the loss cannot tell from it.
    pub alike: Vec<Repair>,
}

/// Repairs that are named together.
#[derive(Clone, Debug)]
pub(super) struct Named {
    /// Each of them.
    pub steps: Vec<Step>,
    /// What each text costs with all.
    pub nats: Vec<f64>,
}

/// How far a search goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Depth {
    /// Whether layers are repaired one by one, and several repairs tried at once.
    pub deep: bool,
    /// Whether more is tried than pays.
    pub thorough: bool,
}

/// A set's texts, whole and those of the race.
struct Decks {
    all: Deck,
    race: Deck,
}

impl Decks {
    fn new(texts: Vec<Text>, raced: &[usize]) -> Self {
        let race = Deck { texts: raced.iter().filter_map(|i| texts.get(*i).cloned()).collect() };
        Decks { all: Deck { texts }, race }
    }
}

/// A search over one set.
pub(super) struct Search<'a> {
    scorer: &'a mut Scorer,
    decks: Decks,
    /// With merges by ids, where those are others.
    merged: Option<Decks>,
    scale: Scale,
    depth: Depth,
    progress: &'a dyn Progress,
    /// What the file costs as it is.
    pub base: Vec<f64>,
    /// Repairs that were tried.
    pub tried: usize,
    rounds: Vec<(Vec<Repair>, Vec<Found>)>,
    /// What was left out, once that was tried.
    left_out: Option<Vec<(Repair, Vec<f64>)>>,
}

impl<'a> Search<'a> {
    /// Runs the file as it is.
    ///
    /// # Errors
    /// Those of the engine.
    pub(super) fn new(
        scorer: &'a mut Scorer,
        (texts, merged): (&[Text], Option<&[Text]>),
        scale: Scale,
        depth: Depth,
        progress: &'a dyn Progress,
    ) -> Result<Self, EngineError> {
        let base = scorer.nats(&Deck { texts: texts.to_vec() }, &[])?;
        let raced = raced(&base, &scale.tokens);
        let decks = Decks::new(texts.to_vec(), &raced);
        let merged = merged.map(|texts| Decks::new(texts.to_vec(), &raced));
        Ok(Search { scorer, decks, merged, scale, depth, progress, base, tried: 0, rounds: Vec::new(), left_out: None })
    }

    /// The texts' scale.
    pub(super) fn scale(&self) -> &Scale {
        &self.scale
    }

    /// True where so little is lost that no repair could gain what is to be gained.
    fn is_best(&self, nats: &[f64]) -> bool {
        self.scale.loss(nats) < LEAST_GAIN
    }

    /// The repairs that are to be named, if any.
    ///
    /// # Errors
    /// Those of the engine.
    pub(super) fn run(&mut self) -> Result<Option<Named>, EngineError> {
        if self.is_best(&self.base) {
            return Ok(None);
        }
        let start = Found { repairs: Vec::new(), nats: self.base.clone() };
        let (mut beam, mut best): (_, Option<Found>) = (vec![start], None);
        // Several at once are looked for where the file is far from plausible.
        let several = self.depth.thorough || self.depth.deep && self.scale.loss(&self.base) > PLAUSIBLE;
        let (most, beam_width) = if self.depth.thorough { (MOST_THOROUGH, BEAM_THOROUGH) } else { (MOST, BEAM) };
        for _ in 0..most {
            let mut next: Vec<Found> = Vec::new();
            for state in &beam {
                next.extend(self.round(state)?);
                if next.iter().any(|f| self.is_best(&f.nats)) {
                    break;
                }
            }
            next.sort_by(|a, b| self.scale.loss(&a.nats).total_cmp(&self.scale.loss(&b.nats)));
            let from = best.as_ref().map_or(&self.base, |best| &best.nats);
            let named =
                |found: &Found| self.scale.names(from, &found.nats) && self.scale.names(&self.base, &found.nats);
            let stands_out = next.first().is_some_and(named);
            if stands_out {
                best = next.first().cloned();
            }
            if stands_out && !self.is_best(&next[0].nats) && self.depth.deep {
                next.truncate(1);
            } else if !stands_out && best.is_none() && several {
                let most = (1.0 - CARRIED) * self.scale.loss(&self.base);
                next.retain(|found| self.scale.loss(&found.nats) <= most);
                next.truncate(beam_width);
            } else {
                break;
            }
            beam = next;
        }
        let Some(best) = best else { return Ok(None) };
        // What only dampens a harmful part is no repair: leaving the part out does better.
        if !self.beats_leaving_out(&best.nats)? {
            return Ok(None);
        }
        self.named(best)
    }

    /// What is to be said of a set of repairs: each by what it gains given the others. One that gains too little is left
    /// out.
    fn named(&mut self, mut found: Found) -> Result<Option<Named>, EngineError> {
        loop {
            let mut steps = Vec::new();
            let mut needless = None;
            for (i, repair) in found.repairs.iter().enumerate() {
                let mut others = found.repairs.clone();
                others.remove(i);
                let before = self.all(&others)?;
                if !self.scale.names(&before, &found.nats) {
                    needless = Some(others);
                    break;
                }
                // What was tried in its place, if that is known: it always is for the one that came last.
                let tried = self.rounds.iter().find(|(state, _)| *state == others).map(|(_, found)| found.clone());
                let rivals = tried.unwrap_or_default();
                let rivals = rivals.into_iter().filter(|rival| {
                    self.scale.names(&before, &rival.nats) && self.scale.alike(&found.nats, &rival.nats)
                });
                let own = |rival: Found| rival.repairs.last().copied().filter(|rival| rival != repair);
                steps.push(Step { repair: *repair, alike: rivals.filter_map(own).collect(), before });
            }
            match needless {
                None if steps.is_empty() => return Ok(None),
                None => return Ok(Some(Named { steps, nats: found.nats })),
                Some(repairs) => found = Found { nats: self.all(&repairs)?, repairs },
            }
        }
    }

    /// What each text costs where halves of layers, and whole layers, are left out: of those that matter least, by the race.
    ///
    /// # Errors
    /// Those of the engine.
    fn left_out(&mut self) -> Result<&[(Repair, Vec<f64>)], EngineError> {
        if self.left_out.is_none() {
            let layers = self.scorer.config().layers;
            let halves = (0..layers)
                .flat_map(|layer| Half::ALL.map(|half| Repair { change: Change::Skip(half), layer: Some(layer) }));
            let start = Found { repairs: Vec::new(), nats: self.base.clone() };
            let mut raced = self.race(&start, halves.collect(), Race::Skips, "layers left out")?;
            raced.truncate(TRIED);
            let mut all = Vec::new();
            for (i, (repair, _)) in raced.iter().copied().enumerate() {
                self.progress.at("layers left out, on every text", i, raced.len());
                all.push((repair, self.all(&[repair])?));
            }
            self.left_out = Some(all);
        }
        Ok(self.left_out.as_deref().unwrap_or_default())
    }

    /// True if texts cost clearly less than with any half of a layer left out.
    fn beats_leaving_out(&mut self, nats: &[f64]) -> Result<bool, EngineError> {
        let loss = self.scale.loss(nats);
        let scale = self.scale.clone();
        let least = self.left_out()?.iter().map(|(_, nats)| scale.loss(nats)).fold(f64::INFINITY, f64::min);
        Ok(loss <= LEAST_OVER_SKIP * least)
    }

    /// The half of a layer that the model is better without, or that does nothing at all, and what each text costs then.
    ///
    /// # Errors
    /// Those of the engine.
    pub(super) fn place(&mut self) -> Result<Option<(Repair, Vec<f64>)>, EngineError> {
        if self.is_best(&self.base) {
            return Ok(None);
        }
        let mut best: Option<(Repair, Vec<f64>)> = None;
        for (repair, nats) in self.left_out()?.to_vec() {
            if nats == self.base {
                return Ok(Some((repair, nats))); // a sound half changes something
            }
            let better = best.as_ref().is_none_or(|(_, best)| nats.iter().sum::<f64>() < best.iter().sum());
            if self.scale.places(&self.base, &nats) && better {
                best = Some((repair, nats));
            }
        }
        Ok(best)
    }

    fn all(&mut self, repairs: &[Repair]) -> Result<Vec<f64>, EngineError> {
        let decks = of(&self.decks, &self.merged, repairs);
        self.scorer.nats(&decks.all, repairs)
    }

    /// Every repair that helps on top of a state, best first.
    fn round(&mut self, state: &Found) -> Result<Vec<Found>, EngineError> {
        if let Some((_, found)) = self.rounds.iter().find(|(repairs, _)| *repairs == state.repairs) {
            return Ok(found.clone());
        }
        let c = self.scorer.config();
        let longest = self.decks.all.texts.iter().map(|t| t.ids.len()).max().unwrap_or(0);
        let sparse = longest > c.top_k;
        let layers = c.layers;
        let merged = self.merged.is_some();
        let possible = |repair: &Repair| match repair.change {
            Change::Merges => merged,
            Change::AllKeys | Change::RopeOrder { indexer: true, .. } => sparse,
            _ => true,
        };
        let whole = Repair::of_model(c, self.depth.thorough).into_iter().filter(possible).collect();
        let mut raced = self.race(state, whole, Race::Repairs, "repairs of the model")?;
        let mut found = Vec::new();
        let first = raced.first().copied();
        if let Some((repair, _)) = first {
            found.extend(self.found(state, repair)?);
            raced.remove(0);
        }
        let done = found.first().is_some_and(|f: &Found| self.scale.is_all(&state.nats, &f.nats));
        if self.depth.deep && !done {
            let each = (0..layers).flat_map(Repair::of_layer).collect();
            raced.extend(self.race(state, each, Race::Repairs, "repairs of layers")?);
            raced.sort_by(|a, b| a.1.total_cmp(&b.1));
        }
        raced.truncate(TRIED);
        for (i, (repair, _)) in raced.iter().enumerate() {
            self.progress.at("repairs on every text", i, raced.len());
            found.extend(self.found(state, *repair)?);
        }
        found.sort_by(|a, b| a.nats.iter().sum::<f64>().total_cmp(&b.nats.iter().sum()));
        self.rounds.push((state.repairs.clone(), found.clone()));
        Ok(found)
    }

    fn found(&mut self, state: &Found, repair: Repair) -> Result<Option<Found>, EngineError> {
        let repairs = [&state.repairs[..], &[repair]].concat();
        let nats = self.all(&repairs)?;
        Ok((self.scale.loss(&nats) < self.scale.loss(&state.nats)).then_some(Found { repairs, nats }))
    }

    /// The repairs that gain enough on the first texts, with their loss there, best first.
    fn race(
        &mut self,
        state: &Found,
        repairs: Vec<Repair>,
        kind: Race,
        what: &str,
    ) -> Result<Vec<(Repair, f64)>, EngineError> {
        let of_state = of(&self.decks, &self.merged, &state.repairs);
        let (nats, kept) = self.scorer.keep(&of_state.race, &state.repairs)?;
        let base: f64 = nats.iter().sum();
        let most = match kind {
            Race::Skips => base, // as good as nothing counts too
            Race::Repairs if self.depth.thorough => (1.0 - RACE_THOROUGH) * base,
            Race::Repairs => (1.0 - RACE) * base,
        };
        let (count, mut raced) = (repairs.len(), Vec::new());
        // Each runs from the first layer that it alters.
        let layers = |repair: &Repair| self.scorer.config().layers - repair.first_layer(self.scorer.config());
        let work: Vec<usize> = repairs.iter().map(layers).collect();
        let (all, mut done) = (work.iter().sum::<usize>().max(1), 0);
        for (i, (repair, work)) in repairs.into_iter().zip(work).enumerate() {
            self.progress.uneven(what, (i, count), done as f64 / all as f64);
            done += work;
            let clash = |other: &Repair| {
                other.family() == repair.family() && (other.layer == repair.layer || other.layer.is_none())
            };
            let all = [&state.repairs[..], &[repair]].concat();
            if state.repairs.iter().any(clash) || !self.scorer.can(&all) {
                continue;
            }
            self.tried += 1;
            let deck = &of(&self.decks, &self.merged, &all).race;
            let nats = match repair.first_layer(self.scorer.config()) {
                0 => self.scorer.nats(deck, &all)?,
                layer => self.scorer.nats_from(deck, &all, layer, &kept)?,
            };
            let loss: f64 = nats.iter().sum();
            if loss <= most {
                raced.push((repair, loss));
            }
        }
        raced.sort_by(|a, b| a.1.total_cmp(&b.1));
        Ok(raced)
    }
}

/// The decks that repairs run on.
fn of<'d>(decks: &'d Decks, merged: &'d Option<Decks>, repairs: &[Repair]) -> &'d Decks {
    let by_ids = repairs.iter().any(|repair| repair.change == Change::Merges);
    merged.as_ref().filter(|_| by_ids).unwrap_or(decks)
}

/// The texts of the race: short ones that cost as much as any.
fn raced(nats: &[f64], tokens: &[usize]) -> Vec<usize> {
    let mut lengths = tokens.to_vec();
    lengths.sort_unstable();
    let median = lengths.get(lengths.len() / 2).copied().unwrap_or(0);
    let mut short: Vec<usize> = (0..tokens.len()).filter(|i| tokens[*i] <= median).collect();
    let each = |i: &usize| nats[*i] / tokens[*i].max(1) as f64;
    short.sort_by(|a, b| each(b).total_cmp(&each(a)));
    short.truncate(RACED);
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_race_is_run_on_short_texts_that_suffer() {
        assert_eq!(raced(&[1.0, 20.0, 90.0, 30.0, 2.0], &[10, 10, 30, 40, 10]), [1, 4]);
        assert_eq!(raced(&[1.0], &[3]), [0]);
    }
}
