//! Judging operations one by one: the reference recomputes each from the target's own captured inputs, so errors do not
//! travel, and the noise floor comes from runs of the recipe on the very same inputs.

use std::cell::RefCell;
use std::collections::HashMap;

use lockstep_reference::ndarray::{Array2, ArrayD, IxDyn};
use lockstep_reference::slice::ExpertSplit;
use lockstep_reference::{Arith, RefConfig, RefOptions, ReplayError, Weights, inputs_of, partials, replay};

use super::VerifyError;
use super::floor::{Energy, Floored, LEAST_ROWS, LEAST_VALUES};
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
        let (rows, width) = self.target.dim();
        let Some(spread) = self.floored.spread.as_ref().filter(|_| rows >= LEAST_ROWS) else { return Vec::new() };
        let block = LEAST_VALUES.div_ceil(rows);
        let mut blocks = vec![Energy::default(); width.div_ceil(block)];
        for (((i, j), t), r) in self.target.indexed_iter().zip(&self.floored.exact) {
            blocks[j / block].add(*t, *r, spread[[i, j]]);
        }
        let ends = |(i, e): (usize, Energy)| (i * block, ((i + 1) * block).min(width) - 1, Energy { m: rows, ..e });
        blocks.into_iter().enumerate().map(ends).collect()
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

    /// The reference's values and floors for `place`, from what one rank sees.
    ///
    /// # Errors
    /// [`Unjudged`].
    pub fn recompute(&self, place: Place, seen: &dyn Fn(&str) -> Option<ArrayD<f32>>) -> Result<Floored, Unjudged> {
        for input in self.inputs(place).ok_or(Unjudged::NoSuchPoint)? {
            let array = seen(&input.to_string());
            let array = array.ok_or_else(|| Unjudged::NoData(format!("its input {input} was not captured")))?;
            // Masked scores are -inf by design; anything else that is not finite makes the operation unjudgeable.
            let masked = input.point.is_masked();
            let bad = |v: &f32| v.is_nan() || *v == f32::INFINITY || (*v == f32::NEG_INFINITY && !masked);
            if array.iter().any(bad) {
                return Err(Unjudged::NoData(format!("its input {input} is not finite")));
            }
            // Zeros in give zeros out whatever the weights: such a match would say nothing.
            if !input.point.is_choice() && !array.is_empty() && array.iter().all(|v| *v == 0.0) {
                return Err(Unjudged::NoData(format!("its input {input} is all zeros")));
            }
        }
        let name = &place.to_string();
        let run = |arith| {
            let values = replay(self.config, self.weights, arith, self.options, name, seen, self.rows)?;
            Ok(vec![values])
        };
        Ok(self.floored(name, run)?.remove(0))
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
    ) -> Result<Vec<Floored>, Unjudged> {
        let name = &place.to_string();
        let split = ExpertSplit::Tensor;
        let run = |arith| partials(self.config, self.weights, arith, self.options, name, seen, self.rows, tp, split);
        self.floored(name, run)
    }

    /// Every array that `run` gives in f64, with its floors from the runs in the recipe's orders.
    fn floored(
        &self,
        name: &str,
        run: impl Fn(Arith) -> Result<Vec<ArrayD<f64>>, ReplayError>,
    ) -> Result<Vec<Floored>, Unjudged> {
        let rows = |a: ArrayD<f64>| {
            let shape = (self.rows.len(), a.len() / self.rows.len().max(1));
            Array2::from_shape_vec(shape, a.into_iter().collect()).map_err(|e| Unjudged::NoData(e.to_string()))
        };
        let run = |arith| match run(arith) {
            Ok(arrays) => arrays.into_iter().map(rows).collect::<Result<Vec<_>, _>>(),
            Err(ReplayError::Weights(e)) => Err(VerifyError::Reference(format!("{name}: {e}")).into()),
            Err(e) => Err(Unjudged::NoData(e.to_string())),
        };
        let exact = run(Arith::Exact)?;
        let runs = self.orders.iter().map(|arith| run(*arith)).collect::<Result<Vec<_>, _>>()?;
        let floored = |(at, exact)| Floored::by_value(exact, runs.iter().map(|arrays| &arrays[at]));
        Ok(exact.into_iter().enumerate().map(floored).collect())
    }

    /// Puts target and reference side by side at the judged rows; the target's are cut to the reference's width.
    ///
    /// # Errors
    /// [`Unjudged::WrongShape`].
    pub fn measured(&self, found: &Captured, floored: Floored) -> Result<Measured, Unjudged> {
        let (values, stride, width) = (found.as_f32(), found.row_len(), floored.exact.ncols());
        // Only a padded vocabulary may be wider than the reference's row.
        let fits = stride == width || (found.place == Place::LOGITS && stride > width);
        if !fits || self.rows.iter().any(|r| *r >= found.rows) {
            let found = format!("found {stride} in {} rows", found.rows);
            return Err(Unjudged::WrongShape(format!("expected {width} values per row, {found}")));
        }
        let target = |(i, j)| f64::from(values[self.rows[i] * stride + j]);
        let target = Array2::from_shape_fn((self.rows.len(), width), target);
        Ok(Measured { rows: self.rows.to_vec(), target, floored })
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
