//! Whole runs of the reference, and the noise floor of what comes out at the end.
//!
//! A free-running comparison needs a floor that says how far errors travel through all layers. It is measured, not
//! derived: the reference runs the same ids once in f64 and k >= 4 times in the target's recipe, each time with other
//! legitimate orders of summation in *every* operation, so each run carries its own rounding from the first layer to the
//! last. sigma of a row is the largest distance of any of these runs from the f64 one, as for a single operation; and the
//! logits' columns have floors of their own, as there, so that one logit of 154,880 cannot hide in a row.
//!
//! Choices would make such a floor meaningless: one near tie that falls the other way changes a row by as much as a
//! fault does. So all runs go on with the choices that the judged run made, and the choices themselves are judged
//! against the f64 scores of the very same run, with a band of 2 sigma of the scores' own floor.

use std::collections::{BTreeMap, BTreeSet};

use lockstep_reference::model::forward_choosing;
use lockstep_reference::{Arith, Eps, ModelWeights, RefConfig, RefError, RefOptions, RefRecipe, Weights};
use ndarray::{Array2, ArrayD, ArrayView1};

use super::VerifyError;
use super::choice::{Chosen, Sizes, row_of};
use super::feed::Fed;
use super::floor::{self, Energy, Floored, limit};
use super::patched_weights::{Change, PatchedWeights};
use crate::checkpoint::oracle::Raw;
use crate::checkpoint::{Checkpoint, Naming};
use crate::engine::Attention;
use crate::model::{Place, Point};
use crate::probe::{Replacements, Trace};
use crate::report::{Check, Progress, Verdict};

/// Share of the rows that must be comparable.
pub const LEAST_ROWS: f64 = 0.9;

/// How far two rows of logits are from each other, by their number.
pub type Divergence<'a> = dyn Fn(usize, &[f64], &[f64]) -> f64 + Sync + 'a;
/// Whether a point is kept.
pub type Keep<'a> = dyn Fn(Point) -> bool + Sync + 'a;

/// What to run.
pub struct Plan<'a> {
    /// The model.
    pub checkpoint: &'a Checkpoint,
    /// Token ids, from position 0.
    pub ids: &'a [u32],
    /// What queries attend to.
    pub attention: Attention,
    /// Choices to go on with.
    pub choices: &'a Replacements,
    /// The eps of the norms that engines disagree about.
    pub eps: Eps,
    /// What parameters become; nothing leaves them as they are.
    pub change: Option<&'a Change<'a>>,
    /// The runs that make the floor.
    pub variants: &'a [Arith],
    /// How far a row of logits is from the f64 run's: by its number, that row, and the variant's.
    pub divergence: &'a Divergence<'a>,
    /// Points to keep beside logits and the scores behind choices.
    pub keep: &'a Keep<'a>,
    /// Rows of those other points.
    pub rows: &'a [usize],
}

impl<'a> Plan<'a> {
    /// A model over a run's ids, with these choices and variants, keeping nothing else.
    pub fn new(
        checkpoint: &'a Checkpoint,
        run: &'a Trace,
        choices: &'a Replacements,
        variants: &'a [Arith],
    ) -> Plan<'a> {
        let (ids, attention, eps) = (&run.ids, run.attention, own_eps(checkpoint));
        let (divergence, keep): (&Divergence<'_>, &Keep<'_>) = (&|_, p, q| divergence(p, q), &|_| false);
        Plan { checkpoint, ids, attention, choices, eps, change: None, variants, divergence, keep, rows: &[] }
    }
}

/// The reference's whole runs.
#[derive(Clone, Debug)]
pub struct ReferenceRuns {
    points: BTreeMap<Place, Floored>,
    /// Per variant and row, the divergence KL(f64 run, variant) of the logits, in nats.
    pub kl: Vec<Vec<f64>>,
    sizes: Sizes,
}

/// The variants that make the floor of a recipe at a tensor-parallel degree.
pub fn recipe(recipe: RefRecipe, tp: usize) -> Vec<Arith> {
    Arith::orders(recipe, tp)
}

/// The eps that a checkpoint's own format implies: transformers fixes those of the latent norms for its checkpoints.
pub fn own_eps(checkpoint: &Checkpoint) -> Eps {
    match checkpoint.source().naming() {
        Naming::Gguf => Eps::File,
        Naming::Hf => Eps::Hf,
    }
}

/// Multiplications of one projection from which the reference shares it out among threads by itself.
const THREADED: usize = 1 << 24;

/// Runs the reference in f64 and once per variant. Small models run several variants at the same time.
///
/// # Errors
/// A model that the reference cannot read, and choices that do not fit it.
pub fn measure(plan: &Plan<'_>, progress: &dyn Progress) -> Result<ReferenceRuns, VerifyError> {
    let config = RefConfig::from_raw(&Raw(plan.checkpoint.source()), plan.eps)?;
    let mut points = BTreeMap::new();
    let runs = plan.variants.len() + 1;
    progress.at("reference runs", 0, runs);
    run(plan, &config, Arith::Exact, &mut |place, exact| {
        points.insert(place, Floored::new(exact, std::iter::empty()));
    })?;
    let mut found = ReferenceRuns { points, kl: Vec::new(), sizes: Sizes::of(&config) };
    let small = plan.ids.len() * config.hidden * config.hidden < THREADED;
    let workers = if small { std::thread::available_parallelism().map_or(1, |c| c.get()) } else { 1 };
    for (i, variants) in plan.variants.chunks(workers).enumerate() {
        progress.at("reference runs", 1 + i * workers, runs);
        let (points, config) = (&found.points, &config);
        let distances: Vec<Result<Distance, VerifyError>> = std::thread::scope(|scope| {
            let started: Vec<_> =
                variants.iter().map(|v| scope.spawn(move || distance(plan, config, *v, points))).collect();
            let gone = |_| Err(VerifyError::Reference("a run of the reference ended in a panic".into()));
            started.into_iter().map(|run| run.join().unwrap_or_else(gone)).collect()
        });
        for distance in distances {
            let distance = distance?;
            for (place, sigma) in distance.sigma {
                if let Some(floored) = found.points.get_mut(&place) {
                    floored.sigma.iter_mut().zip(sigma).for_each(|(s, other)| *s = s.max(other));
                }
            }
            if let (Some(logits), Some(run)) = (found.points.get_mut(&Place::LOGITS), distance.logits) {
                let squares = logits.spread.get_or_insert_with(|| Array2::zeros(logits.exact.dim()));
                floor::add_squares(squares, &logits.exact, &run, plan.variants.len());
            }
            found.kl.push(distance.kl);
        }
    }
    if let Some(logits) = found.points.get_mut(&Place::LOGITS) {
        logits.spread = logits.spread.take().map(|squares| floor::spread(squares, &logits.exact));
    }
    progress.at("reference runs", runs, runs);
    Ok(found)
}

/// How far one variant is from the f64 run.
#[derive(Default)]
struct Distance {
    sigma: BTreeMap<Place, Vec<f64>>,
    kl: Vec<f64>,
    logits: Option<Array2<f64>>,
}

fn distance(
    plan: &Plan<'_>,
    config: &RefConfig,
    variant: Arith,
    points: &BTreeMap<Place, Floored>,
) -> Result<Distance, VerifyError> {
    let mut found = Distance::default();
    run(plan, config, variant, &mut |place, values| {
        let Some(floored) = points.get(&place) else { return };
        found.sigma.insert(place, floor::sigmas(&floored.exact, std::iter::once(&values)));
        if place == Place::LOGITS {
            let rows = floored.exact.rows().into_iter().zip(values.rows());
            let apart = |(t, (exact, value)): (usize, (ArrayView1<'_, f64>, ArrayView1<'_, f64>))| {
                (plan.divergence)(t, &exact.to_vec(), &value.to_vec())
            };
            found.kl = rows.enumerate().map(apart).collect();
            found.logits = Some(values);
        }
    })?;
    Ok(found)
}

/// One run; `found` receives the points that are kept, rows already taken.
fn run(
    plan: &Plan<'_>,
    config: &RefConfig,
    arith: Arith,
    found: &mut dyn FnMut(Place, Array2<f64>),
) -> Result<(), VerifyError> {
    let raw = Raw(plan.checkpoint.source());
    let own = ModelWeights::new(&raw, config);
    let patched = plan.change.map(|change| PatchedWeights::new(&own, change));
    let weights: &dyn Weights = patched.as_ref().map_or(&own, |patched| patched);
    // PyTorch's engines make keys and values of every head before attention.
    let expanded = plan.variants.iter().any(|arith| matches!(arith, Arith::F32(recipe, _) if recipe.is_torch()));
    let options = RefOptions { dense: plan.attention == Attention::Dense, mtp: false, expanded, variant: None };
    let choices = |name: &str| -> Option<ArrayD<f32>> {
        let forced = plan.choices.get(&name.parse().ok()?)?;
        ArrayD::from_shape_vec(vec![forced.rows, forced.row_len()], forced.as_f32()).ok()
    };
    let mut sink = |name: &str, values: ArrayD<f64>| {
        let Ok(place) = name.parse::<Place>() else { return };
        let whole = place == Place::LOGITS || place.point.choice().is_some();
        if !whole && !(plan.keep)(place.point) {
            return;
        }
        let rows = plan.ids.len();
        let width = values.len() / rows.max(1);
        if let Ok(values) = values.into_shape_with_order((rows, width)) {
            let values = if whole { values } else { values.select(ndarray::Axis(0), plan.rows) };
            found(place, values);
        }
    };
    match forward_choosing(config, weights, plan.ids, arith, options, &choices, &mut sink) {
        Err(e @ RefError::Choice { .. }) => Err(VerifyError::Choice(e.to_string())),
        other => Ok(other?),
    }
}

/// KL(softmax p, softmax q) in nats.
pub fn divergence(p: &[f64], q: &[f64]) -> f64 {
    let log_sum = |x: &[f64]| {
        let most = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        most + x.iter().map(|v| (v - most).exp()).sum::<f64>().ln()
    };
    let (p_sum, q_sum) = (log_sum(p), log_sum(q));
    // Both sides sum to one, so q - p adds nothing, but makes every term non-negative: a sum of tiny differences would
    // otherwise drown in the rounding of terms that cancel.
    let term = |(p, q): (&f64, &f64)| {
        let (log_p, log_q) = (p - p_sum, q - q_sum);
        let d = log_q - log_p;
        log_p.exp() * (d.exp_m1() - d)
    };
    p.iter().zip(q).map(term).sum()
}

/// What judging a run's choices found.
#[derive(Default)]
struct Choices {
    /// Rows that chose otherwise than the reference somewhere, each time inside the band.
    near_ties: BTreeSet<usize>,
    /// The first choice outside its band, and how far.
    outside: Option<String>,
    /// The first choice that could not be judged, and why: never a pass.
    unjudged: Option<String>,
}

impl ReferenceRuns {
    /// A kept point of the f64 run.
    pub fn point(&self, place: Place) -> Option<&Floored> {
        self.points.get(&place)
    }

    /// The scores that a choice is made from.
    fn scores(&self, choice: Place) -> Option<&Floored> {
        self.points.get(&choice.at(choice.point.scores()?))
    }

    /// The logits; empty if the run has none.
    pub fn logits(&self) -> Option<&Floored> {
        self.points.get(&Place::LOGITS)
    }

    /// Judges what every rank chose in the first `rows` rows against the f64 scores. With a baseline only choices that
    /// differ from its own are judged, and then both sides. Choices without scores, scores without choices and missing rows
    /// are unjudged; the places of `absent` are not asked for.
    fn judge(&self, run: &Trace, baseline: Option<&Replacements>, rows: usize, absent: &[Place]) -> Choices {
        let mut found = Choices::default();
        let scored = self.points.keys().filter_map(|p| Some(p.at(p.point.choice()?)));
        let made = run.held().into_iter().filter(|place| place.point.is_choice());
        let places: BTreeSet<Place> = scored.chain(made).filter(|place| !absent.contains(place)).collect();
        for rank in 0..run.tp {
            let made = run.choices(rank);
            for place in &places {
                if let Err(why) = self.judge_place(*place, &made, baseline, rows, &mut found) {
                    let what = || format!("choices of rank {rank} not judged: {place}: {why}");
                    found.unjudged.get_or_insert_with(what);
                }
            }
        }
        found
    }

    fn judge_place(
        &self,
        place: Place,
        made: &Replacements,
        baseline: Option<&Replacements>,
        rows: usize,
        found: &mut Choices,
    ) -> Result<(), &'static str> {
        let scores = self.scores(place).ok_or("there are no scores")?;
        let made = made.get(&place).ok_or("the run shows no choice")?;
        if rows > scores.exact.nrows() {
            return Err("fewer rows of scores than tokens");
        }
        for t in 0..rows {
            let chosen = row_of(made, t).ok_or("fewer rows of choices than tokens")?;
            let other = match baseline {
                None => None,
                Some(b) => {
                    let theirs = b.get(&place).and_then(|c| row_of(c, t));
                    Some(theirs.ok_or("the baseline shows no choice")?)
                }
            };
            if other.is_some_and(|other| as_set(other) == as_set(chosen)) {
                continue;
            }
            let sides = [("target", Some(chosen)), ("baseline", other)];
            for (side, chosen) in sides.into_iter().filter_map(|(s, c)| Some((s, c?))) {
                match self.sizes.judge(place.point, t, scores.exact.row(t), scores.sigma[t], chosen) {
                    Chosen::Within(0) => {}
                    Chosen::Within(_) => drop(found.near_ties.insert(t)),
                    Chosen::Outside(why) => {
                        found.outside.get_or_insert_with(|| format!("{place}, token {t}, {side}: {why}"));
                    }
                    Chosen::Unmeasured => return Err("scores that are not numbers"),
                }
            }
        }
        Ok(())
    }

    /// Judges a target's logits against a baseline's, row by row, column by column and all together, and its choices by
    /// their margins: those that differ from `chosen`, which are another run's, or all. Every token of the target should be
    /// comparable, and every value of the baseline a number. Choices at the places of `absent` are not asked for.
    pub fn compare(
        &self,
        name: &str,
        target: &Fed,
        baseline: &dyn Fn(usize, usize) -> f64,
        chosen: Option<&Replacements>,
        absent: &[Place],
    ) -> Check {
        let Some(floored) = self.logits() else {
            return Check::new(name, Verdict::Unmeasured, "the reference gave no logits");
        };
        let width = floored.exact.ncols().max(1);
        let found = || target.logits.chunks_exact(width);
        let rows = floored.energies(found(), |t, i| Some(baseline(t, i)));
        // A column's floor is no more than its own, and another run has an error of its own beside the target's.
        let sides = if chosen.is_some() { 2f64.sqrt() } else { 1.0 };
        let spread = floored.spread.as_ref().map(|spread| spread * sides);
        let columns = spread.map_or(Vec::new(), |spread| floor::columns(found(), baseline, &spread));
        let column = columns.iter().max_by(|a, b| a.2.share().total_cmp(&b.2.share()));
        let Choices { near_ties: replayed, outside, unjudged } = self.judge(&target.trace, chosen, rows.len(), absent);
        let tokens = target.trace.ids.len();
        let compared = rows.iter().filter(|e| e.m + e.misplaced > 0).count();
        let all: Energy = rows.iter().sum();
        let worst = rows.iter().enumerate().max_by(|a, b| a.1.share().total_cmp(&b.1.share()));
        let Some((token, worst)) = worst else { return Check::new(name, Verdict::Unmeasured, "no rows") };
        let slices = [Some(all), Some(*worst), column.map(|c| c.2)].into_iter().flatten();
        let shown = slices.max_by(|a, b| a.share().total_cmp(&b.share())).unwrap_or(all);
        let by_column = match column {
            Some((from, to, energy)) if from == to => format!("{:.3} in column {from}", energy.rho()),
            Some((from, to, energy)) => format!("{:.3} in columns {from} to {to}", energy.rho()),
            None => format!("columns not judged by {} rows", rows.len()),
        };
        let figures = format!(
            "rho {:.3} over all rows, {:.3} at token {token}, {by_column}; {} rows free, {} replayed",
            all.rho(),
            worst.rho(),
            compared.saturating_sub(replayed.len()),
            replayed.len()
        );
        let unsaid = rows.len() * width - rows.iter().map(|e| e.m + e.misplaced).sum::<usize>();
        let (verdict, detail) = if let Some(outside) = outside {
            (Verdict::Divergent, format!("{outside}; {figures}"))
        } else if shown.share() > 1.0 {
            (Verdict::Divergent, figures)
        } else if unsaid > 0 {
            (Verdict::Unmeasured, format!("{unsaid} values of the other side are no numbers; {figures}"))
        } else if let Some(unjudged) = unjudged {
            (Verdict::Unmeasured, format!("{unjudged}; {figures}"))
        } else if tokens == 0 || (compared as f64) < LEAST_ROWS * tokens as f64 {
            (Verdict::Unmeasured, format!("{compared} of {tokens} rows could be compared; {figures}"))
        } else {
            (Verdict::Match, figures)
        };
        Check::new(name, verdict, detail).of_floor((shown.rho(), limit(shown.m)))
    }

    /// Rows of the run.
    pub fn rows(&self) -> usize {
        self.logits().map_or(0, |l| l.exact.nrows())
    }

    /// The first row where the f64 run's own choice at a place is so near a tie that another run may choose otherwise, or
    /// where nothing says that it is not: without scores that is the first row.
    pub fn first_near_tie(&self, place: Place) -> Option<usize> {
        let Some(scores) = self.scores(place) else { return Some(0) };
        self.near_ties_of(place, scores).next()
    }

    fn near_ties_of<'a>(&'a self, place: Place, scores: &'a Floored) -> impl Iterator<Item = usize> + 'a {
        let near = move |t: &usize| self.sizes.near_tie(place.point, *t, scores.exact.row(*t), scores.sigma[*t]);
        (0..scores.exact.nrows()).filter(near)
    }

    /// The rows where another run may choose otherwise somewhere.
    pub fn near_ties(&self) -> BTreeSet<usize> {
        let scored = self.points.iter().filter_map(|(p, scores)| Some((p.at(p.point.choice()?), scores)));
        scored.flat_map(|(place, scores)| self.near_ties_of(place, scores)).collect()
    }
}

fn as_set(row: &[i32]) -> BTreeSet<i32> {
    row.iter().copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::{Captured, Values};

    #[test]
    fn divergence_is_zero_on_itself_exact_on_known_values_and_keeps_tiny_ones() {
        let p = [0.0, 3f64.ln()]; // 1/4, 3/4
        let q = [0.0, 0.0];
        let expected = 0.25 * (0.25f64 / 0.5).ln() + 0.75 * (0.75f64 / 0.5).ln();
        assert!((divergence(&p, &q) - expected).abs() < 1e-15);
        assert_eq!(divergence(&p, &p), 0.0);
        // Second order: variance of the difference under p, halved: 1/4 * 3/4 * 1e-16 / 2.
        let tiny = divergence(&p, &[0.0, 3f64.ln() + 1e-8]);
        assert!((tiny / (0.25 * 0.75 * 0.5e-16) - 1.0).abs() < 1e-5, "{tiny:e}");
    }

    /// A run with scores of two experts of which one is used, in two rows, and logits.
    fn reference(scores: [f64; 4]) -> ReferenceRuns {
        let floored = |exact: [f64; 4]| {
            let exact = Array2::from_shape_vec((2, 2), exact.to_vec()).expect("two by two");
            Floored { exact, sigma: vec![1e-3; 2], spread: None }
        };
        let points = [(Place::trunk(0, Point::ChoiceScores), floored(scores)), (Place::LOGITS, floored([1.0; 4]))];
        ReferenceRuns { points: points.into(), kl: Vec::new(), sizes: Sizes { top_k: 1, experts_used: 1 } }
    }

    /// A target with those logits that chose these experts.
    fn target(chosen: &[i32]) -> Fed {
        let ids = Captured::of_test(Point::ExpertIds, &[1], Values::I32(chosen.to_vec()));
        Fed { trace: Trace::new("a run".into(), vec![0; 2], Attention::Dsa, vec![vec![ids]]), logits: vec![1.0; 4] }
    }

    fn judged(reference: &ReferenceRuns, target: &Fed, absent: &[Place]) -> (Verdict, String) {
        let check = reference.compare("logits", target, &|_, _| 1.0, None, absent);
        (check.verdict, check.detail)
    }

    /// One column of many that is off in every row, by less than the rows' floors can tell.
    #[test]
    fn a_column_is_judged_by_its_own_floor() {
        const WIDTH: usize = 4096;
        let rows = |count: usize, sides: Option<&Replacements>, off: f32| {
            let exact = Array2::from_elem((count, WIDTH), 1.0);
            let floored =
                Floored { sigma: vec![4e-3; count], spread: Some(Array2::from_elem(exact.dim(), 1e-3)), exact };
            let sizes = Sizes { top_k: 1, experts_used: 1 };
            let reference = ReferenceRuns { points: [(Place::LOGITS, floored)].into(), kl: Vec::new(), sizes };
            let logits = (0..count * WIDTH).map(|i| if i % WIDTH == 7 { 1.0 + off } else { 1.0 }).collect();
            let trace = Trace::new("a run".into(), vec![0; count], Attention::Dsa, vec![Vec::new()]);
            let check = reference.compare("logits", &Fed { trace, logits }, &|_, _| 1.0, sides, &[]);
            (check.verdict, check.detail)
        };
        let none = Replacements::new();
        let (verdict, detail) = rows(32, None, 3e-3);
        assert!(verdict == Verdict::Divergent && detail.contains("3.000 in column 7;"), "{detail}");
        assert_eq!(rows(32, None, 1e-3).0, Verdict::Match);
        // Of two runs each has an error.
        assert_eq!(rows(32, Some(&none), 3e-3).0, Verdict::Match);
        assert_eq!(rows(32, Some(&none), 4e-3).0, Verdict::Divergent);
        // Fewer rows are pooled by columns, and still fewer say that they are too few.
        assert!(rows(8, None, 8e-3).1.contains("in columns 4 to 7;"));
        let (verdict, detail) = rows(7, None, 3e-3);
        assert!(verdict == Verdict::Match && detail.contains("columns not judged by 7 rows"), "{detail}");
    }

    #[test]
    fn what_cannot_be_judged_is_never_a_match() {
        let clear = reference([1.0, 0.0, 0.0, 1.0]);
        assert_eq!(judged(&clear, &target(&[0, 1]), &[]).0, Verdict::Match);
        assert_eq!(judged(&clear, &target(&[0, 0]), &[]).0, Verdict::Divergent);
        let unmeasured = |reference: &ReferenceRuns, target: &Fed, says: &str| {
            let (verdict, detail) = judged(reference, target, &[]);
            assert!(verdict == Verdict::Unmeasured && detail.contains(says), "{verdict:?}: {detail}");
        };
        unmeasured(&reference([f64::NAN, 0.0, 0.0, 1.0]), &target(&[0, 1]), "not numbers");
        unmeasured(&clear, &target(&[0]), "fewer rows of choices");
        let place = Place::trunk(0, Point::ExpertIds);
        let mut silent = target(&[0, 1]);
        silent.trace = silent.trace.only(|_| false);
        unmeasured(&clear, &silent, "shows no choice");
        assert_eq!(judged(&clear, &silent, &[place]).0, Verdict::Match, "known to be missing");
        let mut unscored = clear.clone();
        unscored.points.remove(&Place::trunk(0, Point::ChoiceScores));
        unmeasured(&unscored, &target(&[0, 1]), "no scores");
        unmeasured(&clear, &Fed { logits: vec![1.0; 2], ..target(&[0, 1]) }, "1 of 2 rows");
        // A value that the other side cannot say, whatever the target holds there.
        for (unsaid, own) in [(f64::NAN, 1.0), (f64::NAN, f32::NAN), (f64::INFINITY, f32::INFINITY)] {
            let run = Fed { logits: vec![own, 1.0, 1.0, 1.0], ..target(&[0, 1]) };
            let other = |t: usize, i: usize| if (t, i) == (0, 0) { unsaid } else { 1.0 };
            let check = clear.compare("logits", &run, &other, None, &[]);
            assert!(check.verdict == Verdict::Unmeasured && check.detail.starts_with("1 values"), "{check:?}");
        }
        let lost = Fed { logits: vec![f32::NAN, 1.0, 1.0, 1.0], ..target(&[0, 1]) };
        assert_eq!(judged(&clear, &lost, &[]).0, Verdict::Divergent, "a number that the target has lost");
        assert_eq!(unscored.first_near_tie(place), Some(0));
        assert_eq!(clear.first_near_tie(place), None);
        assert_eq!(reference([1.0, 0.0, f64::NAN, 0.0]).first_near_tie(place), Some(1));
    }
}
