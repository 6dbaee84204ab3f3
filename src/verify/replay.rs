//! Judging operations one by one: the reference recomputes each from the target's own captured inputs, so errors do not
//! travel, and the noise floor comes from runs of the recipe on the very same inputs. What a foreign dump lacks is bridged:
//! the operation is recomputed from the nearest points that were captured, and stands for all between.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};

use lockstep_reference::ndarray::{Array2, ArrayD, Axis, IxDyn};
use lockstep_reference::replay::Captured as Inputs;
use lockstep_reference::slice::ExpertSplit;
use lockstep_reference::{Arith, Bridge, RefConfig, RefOptions, Replay, ReplayError, Weights, inputs_of};

use super::VerifyError;
use super::choice::Sizes;
use super::floor::{self, Energy, Floored};
use crate::model::{Layout, Place, Point};
use crate::probe::{Captured, Trace};

/// One operation's values at the judged rows.
pub struct Measured {
    /// Row indices (tokens).
    pub rows: Vec<usize>,
    /// The target's.
    pub target: Array2<f64>,
    /// The reference's, and the floor.
    pub floored: Floored,
}

impl Measured {
    /// Energy of every row, in the columns that `keep` accepts.
    pub fn energies(&self, keep: impl Fn(usize) -> bool) -> Vec<Energy> {
        self.floored.energies(self.target.rows(), |i, j| keep(j).then(|| self.floored.exact[[i, j]]))
    }

    /// Energy of every block of adjacent columns that has enough values to decide, by the floor of its own values, with its
    /// first and last column. None where the rows are too few to judge columns by.
    pub fn columns(&self) -> Vec<(usize, usize, Energy)> {
        let Some(spread) = &self.floored.spread else { return Vec::new() };
        floor::columns(self.target.rows().into_iter(), |i, j| self.floored.exact[[i, j]], spread)
    }

    /// Position and both values of the largest error in floors: (token, column, target, reference).
    pub fn worst(&self) -> Option<(usize, usize, f64, f64)> {
        let errors = self.target.indexed_iter().zip(&self.floored.exact).filter(|((_, t), r)| t != r);
        let floors = |((i, _), t): ((usize, usize), &f64), r: &f64| {
            let d = (t - r).abs() / self.floored.sigma[i].max(f64::MIN_POSITIVE);
            if d.is_finite() { d } else { f64::INFINITY }
        };
        let (((i, j), t), r) = errors.max_by(|a, b| floors(a.0, a.1).total_cmp(&floors(b.0, b.1)))?;
        Some((self.rows[i], j, *t, *r))
    }

    /// Cosine between target and reference, over finite values.
    pub fn cosine(&self) -> f64 {
        let (mut dot, mut tt, mut rr) = (0.0, 0.0, 0.0);
        let both = self.target.iter().zip(&self.floored.exact);
        for (t, r) in both.filter(|(t, r)| t.is_finite() && r.is_finite()) {
            dot += t * r;
            tt += t * t;
            rr += r * r;
        }
        if tt == 0.0 || rr == 0.0 { f64::from(u8::from(tt == rr)) } else { dot / (tt * rr).sqrt() }
    }
}

/// Captured arrays as one rank sees them, by the reference's point names.
pub struct Seen<'a> {
    trace: &'a Trace,
    rank: usize,
    cache: RefCell<HashMap<String, Option<ArrayD<f32>>>>,
}

impl<'a> Seen<'a> {
    /// What `rank` sees of a trace.
    pub fn new(trace: &'a Trace, rank: usize) -> Self {
        Seen { trace, rank, cache: RefCell::default() }
    }

    /// All tokens of a point, `[T][row]`; `ids` are the token ids.
    pub fn get(&self, name: &str) -> Option<ArrayD<f32>> {
        if let Some(known) = self.cache.borrow().get(name) {
            return known.clone();
        }
        let found = if name == "ids" {
            let ids = self.trace.ids.iter().map(|i| *i as f32).collect();
            ArrayD::from_shape_vec(IxDyn(&[self.trace.ids.len()]), ids).ok()
        } else {
            name.parse()
                .ok()
                .and_then(|place| self.trace.seen_by(self.rank, place).ok())
                .and_then(|c| ArrayD::from_shape_vec(IxDyn(&[c.rows, c.row_len()]), c.as_f32()).ok())
        };
        self.cache.borrow_mut().insert(name.into(), found.clone());
        found
    }
}

/// The reference and everything it needs to judge one target.
#[derive(Clone, Copy)]
pub struct Judge<'a> {
    /// The reference's configuration; a hypothesis may alter a copy.
    pub config: &'a RefConfig,
    /// The reference's weights; a hypothesis may wrap them.
    pub weights: &'a dyn Weights,
    /// How the target was run.
    pub options: RefOptions,
    /// Legitimate orders of the target's recipe.
    pub orders: &'a [Arith],
    /// Rows that are judged.
    pub rows: &'a [usize],
    /// All rows of the run: what becomes a key is judged at every one of them.
    pub every: &'a [usize],
    /// Inputs that were not captured are made from what was.
    pub bridges: bool,
}

/// What the reference makes of an operation's inputs.
#[derive(Clone, Debug)]
pub struct Recomputed {
    /// The values and their floors, `[judged rows][values]`.
    pub floored: Floored,
    /// Which of the judged rows hang on a choice inside its band that nobody captured: they say nothing.
    pub unsure: BTreeSet<usize>,
}

/// What an operation is recomputed from.
#[derive(Clone, Debug, Default)]
pub struct Reads {
    /// Captured places.
    pub from: BTreeSet<Place>,
    /// Places between these and the operation, which were not captured.
    pub over: BTreeSet<Place>,
}

/// Why an operation cannot be judged: no data is never a pass.
#[derive(Debug)]
pub enum Unjudged {
    /// The point does not exist in this model and run.
    NoSuchPoint,
    /// An input or the output was not captured, or inputs are not finite.
    NoData(String),
    /// What was captured has another width than the reference's row.
    WrongShape(String),
    /// It cannot even be tried: weights that cannot be read.
    Failed(VerifyError),
}

impl From<VerifyError> for Unjudged {
    fn from(e: VerifyError) -> Self {
        Unjudged::Failed(e)
    }
}

impl Unjudged {
    /// What was found, or nothing where there is nothing to judge by.
    ///
    /// # Errors
    /// Weights that cannot be read.
    pub fn or_none<T>(found: Result<T, Unjudged>) -> Result<Option<T>, VerifyError> {
        match found {
            Ok(found) => Ok(Some(found)),
            Err(Unjudged::Failed(e)) => Err(e),
            Err(_) => Ok(None),
        }
    }
}

impl Judge<'_> {
    /// The judge of one point: keys and the embedding are checked for all tokens, the rest for sampled rows.
    pub fn at(&self, point: Point) -> Judge<'_> {
        Judge { rows: if point.is_key() { self.every } else { self.rows }, ..*self }
    }

    /// The places that `place` is recomputed from, beside the token ids; `None` where this model and run have no such place.
    pub fn inputs(&self, place: Place) -> Option<Vec<Place>> {
        let names = inputs_of(self.config, self.options, &place.to_string())?;
        Some(names.iter().filter_map(|name| name.parse().ok()).collect())
    }

    /// The places that `place` is recomputed from where only some were captured: its inputs, or what those are made from, as
    /// far back as it takes. Beside them the ones between, which were not captured.
    pub fn reads(&self, place: Place, captured: &dyn Fn(Place) -> bool) -> Option<Reads> {
        let mut reads = Reads::default();
        let mut open = self.inputs(place)?;
        while let Some(input) = open.pop() {
            if captured(input) || !self.bridges {
                reads.from.insert(input);
            } else if reads.over.insert(input) {
                open.extend(self.inputs(input).unwrap_or_default());
            }
        }
        Some(reads)
    }

    /// The reference's values and floors for `place`, from what one rank sees.
    ///
    /// # Errors
    /// [`Unjudged`].
    pub fn recompute(&self, place: Place, seen: &dyn Fn(&str) -> Option<ArrayD<f32>>) -> Result<Recomputed, Unjudged> {
        let reads = self.reads(place, &|input| seen(&input.to_string()).is_some()).ok_or(Unjudged::NoSuchPoint)?;
        for input in reads.from {
            let array = seen(&input.to_string());
            let array = array.ok_or_else(|| Unjudged::NoData(format!("its input {input} was not captured")))?;
            // Masked scores are -inf by design; anything else that is not finite makes the operation unjudgeable.
            let masked = input.point.is_masked();
            let bad = |v: &f32| v.is_nan() || *v == f32::INFINITY || (*v == f32::NEG_INFINITY && !masked);
            if array.iter().any(bad) {
                return Err(Unjudged::NoData(format!("its input {input} is not finite")));
            }
            // Zeros in give zeros out whatever the weights: such a match would say nothing.
            let rows = if input.point.is_key() { self.every } else { self.rows };
            let judged =
                rows.iter().filter(|row| **row < array.len_of(Axis(0))).map(|row| array.index_axis(Axis(0), *row));
            if !input.point.is_choice() && !array.is_empty() && judged.flatten().all(|v| *v == 0.0) {
                return Err(Unjudged::NoData(format!("its input {input} is all zeros")));
            }
        }
        let name = &place.to_string();
        let run = |replay: &Replay<'_>| Ok(vec![replay.point(name, self.rows)?]);
        Ok(self.recomputed(place, seen, run)?.remove(0))
    }

    /// The reference's partial sums of every rank and their floors, for points that ranks add up.
    ///
    /// # Errors
    /// As [`Judge::recompute`].
    pub fn recompute_partials(
        &self,
        place: Place,
        seen: &dyn Fn(&str) -> Option<ArrayD<f32>>,
        tp: usize,
    ) -> Result<Vec<Recomputed>, Unjudged> {
        let (name, split) = (&place.to_string(), ExpertSplit::Tensor);
        let run = |replay: &Replay<'_>| {
            let bridge = replay.bridge.filter(|_| self.bridges);
            Replay { bridge, ..*replay }.partials(name, self.rows, tp, split)
        };
        self.recomputed(place, seen, run)
    }

    fn replay<'a>(&'a self, arith: Arith, inputs: Inputs<'a>, bridge: &'a Bridge) -> Replay<'a> {
        let Judge { config, weights, options, .. } = *self;
        Replay { config, weights, arith, options, inputs, bridge: Some(bridge) }
    }

    /// Every array that `run` gives in f64, with its floors from the runs in the recipe's orders.
    fn recomputed(
        &self,
        place: Place,
        seen: &dyn Fn(&str) -> Option<ArrayD<f32>>,
        run: impl Fn(&Replay<'_>) -> Result<Vec<ArrayD<f64>>, ReplayError>,
    ) -> Result<Vec<Recomputed>, Unjudged> {
        // An operation without data is no reason to stop; weights that cannot be read are.
        let known = |e| match e {
            ReplayError::Weights(e) => VerifyError::Reference(format!("{place}: {e}")).into(),
            e => Unjudged::NoData(e.to_string()),
        };
        // Only asked for inputs that `reads` found: what is to be bridged is not there.
        let run = |arith, bridge: &Bridge| {
            let arrays = run(&self.replay(arith, seen, bridge)).map_err(known)?;
            arrays.into_iter().map(|a| self.as_rows(a)).collect::<Result<Vec<_>, _>>()
        };
        let first = Bridge::default();
        let exact = run(Arith::Exact, &first)?;
        let bridges: Vec<Bridge> = self.orders.iter().map(|_| first.choosing_alike()).collect();
        let runs = self.orders.iter().zip(&bridges).map(|(arith, bridge)| run(*arith, bridge));
        let runs = runs.collect::<Result<Vec<_>, Unjudged>>()?;
        let mut unsure = BTreeSet::new();
        for (choice, rows) in first.choices() {
            let Ok(choice) = choice.parse::<Place>() else { continue };
            let Some(scores) = choice.point.scores().map(|scores| choice.at(scores).to_string()) else { continue };
            let of = |arith, bridge: &Bridge| {
                let values = self.replay(arith, seen, bridge).point(&scores, &rows).map_err(known)?;
                Judge { rows: &rows, ..*self }.as_rows(values)
            };
            let exact = of(Arith::Exact, &first)?;
            let runs = self.orders.iter().zip(&bridges).map(|(arith, bridge)| of(*arith, bridge));
            let scored = Floored::new(exact, runs.collect::<Result<Vec<_>, Unjudged>>()?.iter());
            // What a row of an earlier layer became is a key of all that follow.
            let spreads = choice.layer() < place.layer() && rows.len() == self.every.len();
            for (i, row) in rows.iter().enumerate() {
                let near = Sizes::of(self.config).near_tie(choice.point, *row, scored.exact.row(i), scored.sigma[i]);
                let hangs = |judged: &&usize| *judged == row || (spreads && *judged > row);
                unsure.extend(self.rows.iter().filter(hangs).filter(|_| near));
            }
        }
        let one = |(at, exact)| Recomputed {
            floored: Floored::by_value(exact, runs.iter().map(|arrays| &arrays[at])),
            unsure: unsure.clone(),
        };
        Ok(exact.into_iter().enumerate().map(one).collect())
    }

    /// Values of the judged rows as a matrix.
    fn as_rows(&self, values: ArrayD<f64>) -> Result<Array2<f64>, Unjudged> {
        let shape = (self.rows.len(), values.len() / self.rows.len().max(1));
        Array2::from_shape_vec(shape, values.into_iter().collect()).map_err(|e| Unjudged::NoData(e.to_string()))
    }

    /// Puts target and reference side by side at the judged rows that are sure; the target's are cut to the reference's
    /// width.
    ///
    /// # Errors
    /// [`Unjudged::WrongShape`]; no row that is sure.
    pub fn measured(&self, found: &Captured, recomputed: Recomputed) -> Result<Measured, Unjudged> {
        let Recomputed { floored, unsure } = recomputed;
        let (values, stride, width) = (found.as_f32(), found.row_len(), floored.exact.ncols());
        // Only a padded vocabulary may be wider than the reference's row.
        let fits = stride == width || (found.place == Place::LOGITS && stride > width);
        if !fits || self.rows.iter().any(|r| *r >= found.rows) {
            let found = format!("found {stride} in {} rows", found.rows);
            return Err(Unjudged::WrongShape(format!("expected {width} values per row, {found}")));
        }
        let sure: Vec<usize> = (0..self.rows.len()).filter(|i| !unsure.contains(&self.rows[*i])).collect();
        if sure.is_empty() {
            let why = "every judged row hangs on a choice that was not captured, and that is inside its band";
            return Err(Unjudged::NoData(why.into()));
        }
        let rows: Vec<usize> = sure.iter().map(|i| self.rows[*i]).collect();
        let target = Array2::from_shape_fn((rows.len(), width), |(i, j)| f64::from(values[rows[i] * stride + j]));
        let floored = if unsure.is_empty() { floored } else { floored.rows(&sure) };
        Ok(Measured { rows, target, floored })
    }
}

/// The rank that owns column `j` of a whole row of a sharded point, or `None` for other layouts.
pub fn owner(point: Point, whole_shape: &[usize], tp: usize, j: usize) -> Option<usize> {
    let Layout::Sharded { axis } = point.layout() else { return None };
    let inner: usize = whole_shape[axis + 1..].iter().product();
    let extent = whole_shape[axis];
    Some(j / inner % extent / (extent / tp))
}

/// Ranks whose replicated copies of a set of places are bit-equal, first rank of each class first.
pub fn classes(trace: &Trace, places: &[Place]) -> Vec<Vec<usize>> {
    let mut classes: Vec<Vec<usize>> = Vec::new();
    let replicated = places.iter().filter(|place| place.point.layout() == Layout::Replicated);
    let replicated: Vec<Vec<&Captured>> = replicated.filter_map(|place| trace.ranks(*place)).collect();
    for rank in 0..trace.tp {
        let same = |class: &&mut Vec<usize>| {
            replicated.iter().all(|ranks| ranks[class[0]].values.same_bits(&ranks[rank].values))
        };
        match classes.iter_mut().find(same) {
            Some(class) => class.push(rank),
            None => classes.push(vec![rank]),
        }
    }
    classes
}
