//! Judging operations one by one: the reference recomputes each from the target's own captured inputs, so errors do not
//! travel, and the noise floor comes from runs of the recipe on the very same inputs.

use std::cell::RefCell;
use std::collections::HashMap;

use lockstep_reference::ndarray::{ArrayD, IxDyn};
use lockstep_reference::slice::ExpertSplit;
use lockstep_reference::{Arith, Options, RefConfig, ReplayError, Weights, inputs_of, partials, replay};

use super::VerifyError;
use super::floor::{Energy, sigma};
use crate::model::{Layout, Place, Point};
use crate::probe::{Captured, Trace};

/// One operation's values at the judged rows: the target's, the reference's, and a floor per row.
pub struct Measured {
    /// Row indices (tokens).
    pub rows: Vec<usize>,
    /// Values per row.
    pub width: usize,
    /// `[rows][width]` of the target.
    pub target: Vec<f64>,
    /// `[rows][width]` of the reference in f64.
    pub reference: Vec<f64>,
    /// One floor per row.
    pub sigma: Vec<f64>,
}

impl Measured {
    /// Energy of the values that `keep` accepts by (row, column).
    pub fn energy(&self, keep: impl Fn(usize, usize) -> bool) -> Energy {
        let mut energy = Energy::default();
        for (i, sigma) in self.sigma.iter().enumerate() {
            for j in (0..self.width).filter(|j| keep(i, *j)) {
                let at = i * self.width + j;
                energy.add(self.target[at], self.reference[at], *sigma);
            }
        }
        energy
    }

    /// Energy of everything.
    pub fn whole(&self) -> Energy {
        self.energy(|_, _| true)
    }

    /// Energy of each row.
    pub fn per_row(&self) -> Vec<Energy> {
        (0..self.rows.len()).map(|i| self.energy(|row, _| row == i)).collect()
    }

    /// Position and both values of the largest error in floors: (token, column, target, reference).
    pub fn worst(&self) -> Option<(usize, usize, f64, f64)> {
        let errors = self.target.iter().zip(&self.reference).enumerate().filter(|(_, (t, r))| t != r);
        let floors = |at: usize, t: f64, r: f64| {
            let d = (t - r).abs() / self.sigma[at / self.width].max(f64::MIN_POSITIVE);
            if d.is_finite() { d } else { f64::INFINITY }
        };
        let (at, (t, r)) = errors.max_by(|a, b| floors(a.0, *a.1.0, *a.1.1).total_cmp(&floors(b.0, *b.1.0, *b.1.1)))?;
        Some((self.rows[at / self.width], at % self.width, *t, *r))
    }

    /// Cosine between target and reference, over finite values.
    pub fn cosine(&self) -> f64 {
        let (mut dot, mut tt, mut rr) = (0.0, 0.0, 0.0);
        for (t, r) in self.target.iter().zip(&self.reference).filter(|(t, r)| t.is_finite() && r.is_finite()) {
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
pub struct Judge<'a> {
    /// The reference's configuration; a hypothesis may alter a copy.
    pub config: &'a RefConfig,
    /// The reference's weights; a hypothesis may wrap them.
    pub weights: &'a dyn Weights,
    /// How the target was run.
    pub options: Options,
    /// Legitimate orders of the target's recipe.
    pub orders: Vec<Arith>,
    /// Rows that are judged.
    pub rows: &'a [usize],
    /// All rows of the run: what becomes a key is judged at every one of them.
    pub every: &'a [usize],
}

/// The reference's values, `[rows][width]`, and one floor per row.
pub type Floored = (Vec<f64>, Vec<f64>);

/// Why an operation cannot be judged: no data is never a pass.
#[derive(Debug)]
pub enum Unjudged {
    /// The point does not exist in this model and run.
    NoSuchPoint,
    /// An input or the output was not captured, or inputs are not finite.
    NoData(String),
    /// What was captured has another width than the reference's row.
    WrongShape(String),
}

impl Judge<'_> {
    /// The judge of one point: keys and the embedding are checked for all tokens, the rest for sampled rows.
    pub fn at(&self, point: Point) -> Judge<'_> {
        let rows = if point.is_key() { self.every } else { self.rows };
        Judge { orders: self.orders.clone(), rows, ..*self }
    }

    /// The places that `place` is recomputed from, beside the token ids; `None` where this model and run have no such place.
    pub fn inputs(&self, place: Place) -> Option<Vec<Place>> {
        let names = inputs_of(self.config, self.options, &place.to_string())?;
        Some(names.iter().filter_map(|name| name.parse().ok()).collect())
    }

    /// The reference's values and floors for `place`, from what one rank sees.
    ///
    /// # Errors
    /// [`Unjudged`], or weights that cannot be read.
    pub fn recompute(
        &self,
        place: Place,
        seen: &dyn Fn(&str) -> Option<ArrayD<f32>>,
    ) -> Result<Result<Floored, Unjudged>, VerifyError> {
        let Some(inputs) = self.inputs(place) else { return Ok(Err(Unjudged::NoSuchPoint)) };
        for input in inputs {
            let Some(array) = seen(&input.to_string()) else {
                return Ok(Err(Unjudged::NoData(format!("its input {input} was not captured"))));
            };
            // Masked scores are -inf by design; anything else that is not finite makes the operation unjudgeable.
            let masked = input.point.is_masked();
            let bad = |v: &f32| v.is_nan() || *v == f32::INFINITY || (*v == f32::NEG_INFINITY && !masked);
            if array.iter().any(bad) {
                return Ok(Err(Unjudged::NoData(format!("its input {input} is not finite"))));
            }
            // Zeros in give zeros out whatever the weights: such a match would say nothing.
            if !input.point.is_choice() && !array.is_empty() && array.iter().all(|v| *v == 0.0) {
                return Ok(Err(Unjudged::NoData(format!("its input {input} is all zeros"))));
            }
        }
        let name = &place.to_string();
        let run = |arith: Arith| -> Result<Vec<f64>, ReplayError> {
            let values = replay(self.config, self.weights, arith, self.options, name, seen, self.rows)?;
            Ok(values.into_iter().collect())
        };
        let runs: Result<Vec<Vec<f64>>, ReplayError> =
            std::iter::once(Arith::Exact).chain(self.orders.iter().copied()).map(run).collect();
        match runs {
            Ok(mut runs) => {
                let exact = runs.remove(0);
                let floors = floors(&exact, &runs, self.rows.len());
                Ok(Ok((exact, floors)))
            }
            Err(ReplayError::Weights(e)) => Err(VerifyError::Reference(format!("{name}: {e}"))),
            Err(e) => Ok(Err(Unjudged::NoData(e.to_string()))),
        }
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
    ) -> Result<Result<Vec<Floored>, Unjudged>, VerifyError> {
        let name = &place.to_string();
        let split = ExpertSplit::Tensor;
        let run = |arith: Arith| -> Result<Vec<Vec<f64>>, ReplayError> {
            let ranks = partials(self.config, self.weights, arith, self.options, name, seen, self.rows, tp, split)?;
            Ok(ranks.into_iter().map(|a| a.into_iter().collect()).collect())
        };
        let runs: Result<Vec<Vec<Vec<f64>>>, ReplayError> =
            std::iter::once(Arith::Exact).chain(self.orders.iter().copied()).map(run).collect();
        let mut runs = match runs {
            Ok(runs) => runs,
            Err(ReplayError::Weights(e)) => return Err(VerifyError::Reference(format!("{name}: {e}"))),
            Err(e) => return Ok(Err(Unjudged::NoData(e.to_string()))),
        };
        let exact = runs.remove(0);
        let of_rank = |rank: usize| {
            let runs: Vec<Vec<f64>> = runs.iter().map(|r| r[rank].clone()).collect();
            (exact[rank].clone(), floors(&exact[rank], &runs, self.rows.len()))
        };
        Ok(Ok((0..tp).map(of_rank).collect()))
    }

    /// The target's values at the judged rows, `[rows][width]`, cut to the reference's width (a padded vocabulary).
    pub fn target_rows(&self, captured: &Captured, width: usize) -> Option<Vec<f64>> {
        let (values, stride) = (captured.as_f32(), captured.row_len());
        // Only a padded vocabulary may be wider than the reference's row.
        let fits = stride == width || (captured.place == Place::LOGITS && stride > width);
        if !fits || self.rows.iter().any(|r| *r >= captured.rows) {
            return None;
        }
        let row = |r: &usize| values[r * stride..r * stride + width].iter().map(|v| f64::from(*v)).collect::<Vec<_>>();
        Some(self.rows.iter().flat_map(row).collect())
    }

    /// Puts target and reference side by side.
    pub fn measured(&self, target: Vec<f64>, reference: Vec<f64>, sigma: Vec<f64>) -> Measured {
        let width = reference.len() / self.rows.len().max(1);
        Measured { rows: self.rows.to_vec(), width, target, reference, sigma }
    }
}

/// One floor per row.
fn floors(exact: &[f64], runs: &[Vec<f64>], rows: usize) -> Vec<f64> {
    let width = exact.len() / rows.max(1);
    let row = |v: &'_ [f64], i: usize| v[i * width..(i + 1) * width].to_vec();
    (0..rows)
        .map(|i| {
            let runs: Vec<Vec<f64>> = runs.iter().map(|b| row(b, i)).collect();
            let runs: Vec<&[f64]> = runs.iter().map(Vec::as_slice).collect();
            sigma(&row(exact, i), &runs)
        })
        .collect()
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
    let replicated: Vec<&[Captured]> = replicated.filter_map(|place| trace.ranks(*place)).collect();
    for rank in 0..trace.tp {
        let same = |class: &&mut Vec<usize>| {
            replicated.iter().all(|ranks| {
                let (a, b) = (&ranks[class[0]], &ranks[rank]);
                bits_equal(a, b)
            })
        };
        match classes.iter_mut().find(same) {
            Some(class) => class.push(rank),
            None => classes.push(vec![rank]),
        }
    }
    classes
}

fn bits_equal(a: &Captured, b: &Captured) -> bool {
    use crate::probe::Values::{F32, I32};
    match (&a.values, &b.values) {
        (F32(a), F32(b)) => a.len() == b.len() && a.iter().zip(b).all(|(x, y)| x.to_bits() == y.to_bits()),
        (I32(a), I32(b)) => a == b,
        _ => false,
    }
}
