//! Trying explanations: an operation that diverges is recomputed in the reference under a hypothesis, and the hypothesis
//! is accepted only if the residual falls back to its own noise floor.

use std::collections::BTreeSet;
use std::ops::Range;

use lockstep_reference::names::whole_kv_b;
use lockstep_reference::ndarray::{Array2, Axis};
use lockstep_reference::slice::{ExpertSplit, Placement, Split, cut, placement};
use lockstep_reference::weights::file_tensor;
use lockstep_reference::{
    Arith, Half, Order, ParamKey, RawModel, RawTensor, RefConfig, RefError, RefOptions, RefParam, RefRecipe, Variant,
};

use crate::checkpoint::oracle::Raw;
use crate::model::place::Unit;
use crate::model::{Config, Place, Point};
use crate::probe::Trace;
use crate::report::Verdict;
use crate::verify::choice::row_of;
use crate::verify::floor::Energy;
use crate::verify::op::{Slices, judge_choice};
use crate::verify::param_map::reference_of;
use crate::verify::patched_weights::{Value, value_of};
use crate::verify::replay::{Judge, Measured, Seen, Unjudged};
use crate::verify::{VerifyError, producer};

/// An operation that diverges, and everything to explain it with.
pub struct OpContext<'a> {
    /// The model's raw tensors, as the reference sees them.
    pub raw: &'a Raw<'a>,
    /// The model's configuration.
    pub model: &'a Config,
    /// The judge that found it diverging, with the reference's configuration and weights.
    pub judge: &'a Judge<'a>,
    /// The captures.
    pub trace: &'a Trace,
    /// The place of what the operation produces.
    pub place: Place,
    /// Operations that were bridged before it.
    pub over: BTreeSet<Place>,
    /// Ranks whose own slice or copy diverges; all of them where ranks cannot be told apart.
    pub ranks: Vec<usize>,
}

/// What a hypothesis changes.
pub enum Alter<'a> {
    /// Parameters, as the given rank has them.
    Weights(Box<dyn Fn(usize, ParamKey) -> Result<Option<Value>, RefError> + Sync + 'a>),
    /// How the model is run.
    Options(RefOptions),
    /// Its settings.
    Config(Box<RefConfig>),
    /// What these ranks add to the sum over ranks that the operation is: nothing.
    Missing(Vec<usize>),
    /// The arithmetic.
    Orders(Vec<Arith>),
}

/// An explanation.
pub struct Hypothesis<'a> {
    /// The kind of fault.
    pub kind: &'static str,
    /// Where: tensor, fused group or operation.
    pub site: String,
    /// Ranks that are affected if it is true.
    pub ranks: Vec<usize>,
    /// The explanation, in words.
    pub statement: String,
    /// The experiment that would overturn it.
    pub overturn: String,
    /// Other operations of the layer that it must explain as well, from their own inputs.
    pub also: Vec<Point>,
    /// The parameter whose bytes on the device it predicts, and what the faulty loader takes its tensor for: decides
    /// where nothing finite is left to compare.
    pub reads: Option<(RefParam, Misread<'a>)>,
    /// What it changes.
    pub alter: Alter<'a>,
}

/// Makes the tensor as a faulty loader takes it; only when asked, since it is as large as the tensor.
pub type Misread<'a> = Box<dyn Fn() -> Option<RawTensor<'a>> + Sync + 'a>;

/// The bytes that a rank holds where a parameter belongs; `None` where there is no engine to ask.
pub type Held<'a> = &'a dyn Fn(usize, Option<usize>, RefParam) -> Option<Vec<u8>>;

impl<'a> OpContext<'a> {
    /// An explanation of the operation on the ranks that diverge.
    pub fn hypothesis(
        &self,
        kind: &'static str,
        statement: impl Into<String>,
        overturn: impl Into<String>,
        alter: Alter<'a>,
    ) -> Hypothesis<'a> {
        let (site, ranks, also) = (self.place.to_string(), self.ranks.clone(), Vec::new());
        let (statement, overturn) = (statement.into(), overturn.into());
        Hypothesis { kind, site, ranks, statement, overturn, also, reads: None, alter }
    }

    /// One parameter altered where `ranks` hold it, as long as `alter` makes something of it.
    pub fn altering(
        &'a self,
        (layer, param): (Option<usize>, RefParam),
        ranks: Vec<usize>,
        alter: impl Fn(ParamKey, &Value) -> Option<Value> + Sync + 'a,
    ) -> Alter<'a> {
        Alter::Weights(Box::new(move |rank, key| {
            if (key.0, key.1) != (layer, param) {
                return Ok(None);
            }
            let base = value_of(self.judge.weights, key)?;
            alter(key, &base).map(|altered| self.on_ranks(&ranks, rank, key, &base, altered)).transpose()
        }))
    }

    /// True where all ranks hold the same sum, so that captures cannot tell which of them is wrong. Behind experts the
    /// addends have points of their own, and the sum has no parameters.
    pub fn is_reduced(&self) -> bool {
        self.place.point.is_reduced() && !self.params().is_empty()
    }

    /// The sets of ranks that a data fault may have hit: those that diverge, or, behind a reduction, all or any one.
    pub fn scopes(&self) -> Vec<Vec<usize>> {
        let all: Vec<usize> = (0..self.trace.tp).collect();
        if !self.is_reduced() || self.trace.tp == 1 {
            return vec![self.ranks.clone()];
        }
        let singles = all.iter().map(|r| vec![*r]);
        std::iter::once(all.clone()).chain(singles).collect()
    }

    /// The parameters that the operation multiplies with.
    pub fn params(&self) -> Vec<(Option<usize>, RefParam)> {
        let places = self.over.iter().chain([&self.place]);
        let params = places.flat_map(|place| place.params(self.model));
        let mut all: Vec<_> = params.map(|p| (p.layer, reference_of(p.kind))).collect();
        // Where nothing is absorbed, attention makes its keys of k_b, too.
        if self.judge.options.expanded && self.has(Point::Context) {
            all.push((self.place.layer(), RefParam::KB));
        }
        all
    }

    /// True where the operation, or one that is judged with it, is this one.
    pub fn has(&self, point: Point) -> bool {
        self.place.point == point || self.over.iter().any(|place| place.point == point)
    }

    /// The name of a parameter's tensor in the file, and which part of it the parameter is where it is only one.
    pub fn tensor(&self, layer: Option<usize>, param: RefParam) -> String {
        let found = file_tensor(self.raw, self.judge.config, layer, param, Some(0));
        match (found.ok().flatten(), self.joined(layer), param) {
            (Some((name, _)), ..) => name,
            (None, Some(whole), RefParam::KB) => format!("{whole} (keys)"),
            (None, Some(whole), RefParam::VB) => format!("{whole} (values)"),
            (None, ..) => format!("{param:?}"),
        }
    }

    /// The names of the tensors of several parameters of a layer: of keys and values that lie in one, that one's.
    pub fn tensors(&self, layer: Option<usize>, params: &[RefParam]) -> Vec<String> {
        let both = [RefParam::KB, RefParam::VB].iter().all(|part| params.contains(part));
        match self.joined(layer).filter(|_| both && params.len() == 2) {
            Some(whole) => vec![whole],
            None => params.iter().map(|param| self.tensor(layer, *param)).collect(),
        }
    }

    /// The file's one tensor of a layer's keys and values, where it has no two.
    fn joined(&self, layer: Option<usize>) -> Option<String> {
        let apart = file_tensor(self.raw, self.judge.config, layer, RefParam::KB, None).ok()?.is_some();
        layer.filter(|_| !apart).map(|layer| whole_kv_b(self.raw.format(), layer))
    }

    /// What `rank` of this run holds of a parameter, by the reference's own rules.
    ///
    /// # Errors
    /// A degree that does not divide the parameter.
    pub fn placement(&self, param: RefParam, rank: usize) -> Result<Placement, RefError> {
        placement(self.judge.config, param, self.split(rank))
    }

    fn split(&self, rank: usize) -> Split {
        Split { tp: self.trace.tp, rank, experts: ExpertSplit::Tensor }
    }

    /// The operation's values at the judged rows beside the truth, as the first rank that diverges sees them.
    ///
    /// # Errors
    /// [`Unjudged`].
    pub fn measured(&self) -> Result<Measured, Unjudged> {
        let (rank, judge) = (self.ranks.first().copied().unwrap_or(0), self.judge.at(self.place.point));
        let seen = Seen::new(self.trace, rank);
        let recomputed = judge.recompute(self.place, &|n| seen.get(n))?;
        let whole = self.trace.seen_by(rank, self.place).map_err(|e| Unjudged::NoData(e.to_string()))?;
        judge.measured(&whole, recomputed)
    }

    /// By what the addend of a sum of two is multiplied, if the sum is wrong by that alone, to four digits.
    pub fn addend_factor(&self) -> Option<f64> {
        let whole = self.measured().ok()?;
        let none = RefOptions { variant: Some(Variant::Addend(0.0)), ..self.judge.options };
        let judge = Judge { options: none, ..*self.judge };
        let rest =
            OpContext { judge: &judge, over: self.over.clone(), ranks: self.ranks.clone(), ..*self }.measured().ok()?;
        let (mut dot, mut size) = (0.0, 0.0);
        for ((t, e), x) in whole.target.iter().zip(&whole.floored.exact).zip(&rest.floored.exact) {
            dot += (t - x) * (e - x);
            size += (e - x).powi(2);
        }
        let factor = dot / size;
        let digits = 10f64.powi(3 - factor.abs().log10().floor() as i32);
        let rounded = (factor * digits).round() / digits;
        (rounded.is_finite() && rounded != 1.0).then_some(rounded)
    }

    /// Heads or experts that are not what they should be, where the result shows single ones: heads of a result that has
    /// them, experts by the tokens that use them.
    pub fn bad_units(&self, experts: bool, units: usize) -> Option<Vec<usize>> {
        let measured = self.measured().ok()?;
        let width = measured.target.ncols();
        if !experts {
            let headed = matches!(self.place.point.unit(), Unit::Head | Unit::IndexHead)
                || (self.place.point == Point::Context && width.is_multiple_of(units));
            let size = width / units.max(1);
            let bad = |u: &usize| measured.energies(|j| j / size == *u).iter().sum::<Energy>().share() > 1.0;
            return headed.then(|| (0..units).filter(bad).collect());
        }
        let chosen = self.trace.ranks(self.place.at(Point::ExpertIds))?;
        let rows: Vec<(usize, Energy)> = measured.rows.iter().copied().zip(measured.energies(|_| true)).collect();
        let uses = |row: usize, unit: usize| row_of(chosen[0], row).is_some_and(|ids| ids.contains(&(unit as i32)));
        let bad = |unit: &usize| {
            let mut of = rows.iter().filter(|(row, _)| uses(*row, *unit)).peekable();
            of.peek().is_some() && of.all(|(_, e)| e.share() > 1.0)
        };
        Some((0..units).filter(bad).collect())
    }

    /// How many were chosen at a choice, where no row chose more and it is not as many as should be.
    pub fn most_chosen(&self) -> Option<usize> {
        let captured = self.trace.ranks(self.place).filter(|_| self.place.point.is_choice())?;
        let count = |row: usize| row_of(captured[0], row).map(|ids| ids.iter().filter(|id| **id >= 0).count());
        (0..captured[0].rows).filter_map(count).max().filter(|k| *k > 0)
    }

    /// The half type that all of the operation's values have, if they have one.
    pub fn stored_in(&self) -> Option<Half> {
        producer::half_of(self.trace.ranks(self.place)?.into_iter())
    }

    /// True if the run's recipe stores what this operation gives in this type: in half types not the router's numbers, and
    /// not the indexer's scores.
    pub fn stores(&self, half: Half) -> bool {
        use Point::*;
        let wide = matches!(self.place.point, RouterLogits | ChoiceScores | ExpertWeights | IndexScores);
        !wide && self.judge.orders.contains(&Arith::F32(RefRecipe::TorchHalf(half), Order::Sequential))
    }

    /// The squared error that is left under a hypothesis, without its floor: a fifth of the cost of judging it. Not a number
    /// where that is not to be said.
    ///
    /// # Errors
    /// Weights that cannot be read.
    pub(crate) fn left(&self, hypothesis: &Hypothesis<'_>) -> Result<f64, VerifyError> {
        if self.place.point.is_choice() {
            return Ok(f64::NAN);
        }
        let judge = Judge { orders: &[], ..*self.judge };
        let (over, ranks) = (self.over.clone(), self.ranks.clone());
        let found = OpContext { judge: &judge, over, ranks, ..*self }.residual_at(self.place.point, hypothesis);
        let found = Unjudged::or_none(found)?.map(|slices| slices.whole);
        Ok(found.filter(|e| e.misplaced + e.undefined == 0).map_or(f64::NAN, |e| e.error))
    }

    /// Recomputes the operation, and the others that the hypothesis must explain, and compares what diverging ranks hold
    /// in the very slices that decided: the residual with the largest share of its limit. `None` without data.
    ///
    /// # Errors
    /// Weights that cannot be read.
    pub(crate) fn residual(&self, hypothesis: &Hypothesis<'_>) -> Result<Option<Slices>, VerifyError> {
        let found = self.residual_at(self.place.point, hypothesis);
        let Some(mut worst) = Unjudged::or_none(found)? else { return Ok(None) };
        for point in hypothesis.also.iter().filter(|p| **p != self.place.point) {
            if worst.deciding().share() > 1.0 {
                break;
            }
            match self.residual_at(*point, hypothesis) {
                Ok(other) if other.deciding().share() > worst.deciding().share() => worst = other,
                Ok(_) | Err(Unjudged::NoSuchPoint) => {}
                Err(Unjudged::Failed(e)) => return Err(e),
                Err(_) => return Ok(None), // not captured: it cannot be said to be explained
            }
        }
        Ok(Some(worst))
    }

    fn residual_at(&self, point: Point, hypothesis: &Hypothesis<'_>) -> Result<Slices, Unjudged> {
        let place = self.place.at(point);
        let change = |rank: usize, key: ParamKey| match &hypothesis.alter {
            Alter::Weights(change) => change(rank, key),
            // A row of the embedding when `ranks` do not answer for theirs.
            Alter::Missing(ranks) if key.1 == RefParam::Embed => {
                let base = value_of(self.judge.weights, key)?;
                self.on_ranks(ranks, rank, key, &base, base.map(|_| 0.0)).map(Some)
            }
            _ => Ok(None),
        };
        let mut judge = *self.judge;
        match &hypothesis.alter {
            Alter::Options(options) => judge.options = *options,
            Alter::Config(config) => judge.config = config,
            Alter::Orders(orders) => judge.orders = orders,
            Alter::Weights(_) | Alter::Missing(_) => {}
        }
        if place.point.is_choice() {
            let found = judge_choice(&judge, self.trace, place, &change)?;
            return Ok(Slices::of_choice(found.verdict == Verdict::Match));
        }
        let silent = match &hypothesis.alter {
            // Every rank's part of such a sum is linear in what the rank holds of the inputs.
            Alter::Missing(ranks) => {
                let reads = judge.reads(place, &|input| self.trace.ranks(input).is_some()).unwrap_or_default();
                Some(self.trace.without(ranks, &reads.from.into_iter().chain([place]).collect::<Vec<_>>()))
            }
            _ => None,
        };
        let trace = silent.as_ref().unwrap_or(self.trace);
        Slices::collect(&judge, trace, place, &change, Some(&self.ranks))
    }

    /// A parameter altered only where `ranks` hold it: the slices of these ranks are taken from `altered`, the rest from
    /// `base`. Replicated parameters are altered where `rank` is one of them, a row of the embedding where its owner is.
    ///
    /// # Errors
    /// A degree that does not divide the parameter.
    pub fn on_ranks(
        &self,
        ranks: &[usize],
        rank: usize,
        key: ParamKey,
        base: &Value,
        altered: Value,
    ) -> Result<Value, RefError> {
        let mut out = base.clone();
        if let (RefParam::Embed, Some(id)) = (key.1, key.2) {
            for r in ranks {
                if matches!(self.placement(key.1, *r)?, Placement::Vocab { rows, .. } if rows.contains(&id)) {
                    return Ok(altered);
                }
            }
            return Ok(out);
        }
        for r in ranks {
            let Some((axis, part)) = part(self.placement(key.1, *r)?) else {
                return Ok(if ranks.contains(&rank) { altered } else { out });
            };
            if !out.copy(axis, part.clone(), &altered, part) {
                return Ok(altered);
            }
        }
        Ok(out)
    }

    /// True when the devices of `ranks` hold what the file has of every parameter of the operation.
    pub fn is_as_in_file(&self, ranks: &[usize], held: Held<'_>) -> bool {
        let part = |layer, param, rank| {
            let (_, tensor) = file_tensor(self.raw, self.judge.config, layer, param, None).ok()??;
            cut(self.judge.config, param, &tensor, self.split(rank)).ok()
        };
        let right = |layer, param, rank| {
            let (part, held) = (part(layer, param, rank), held(rank, layer, param));
            // Behind the last row of the file a vocabulary may be padded.
            part.zip(held).is_some_and(|(part, held)| held.starts_with(&part.bytes))
        };
        self.params().iter().all(|(layer, param)| ranks.iter().all(|rank| right(*layer, *param, *rank)))
    }

    /// True when every affected rank's device holds exactly the bytes that the hypothesis predicts.
    pub fn is_held(&self, hypothesis: &Hypothesis<'_>, held: Held<'_>) -> bool {
        let Some((param, misread)) = &hypothesis.reads else { return false };
        let Some(tensor) = misread() else { return false };
        !hypothesis.ranks.is_empty()
            && hypothesis.ranks.iter().all(|rank| {
                let expected = cut(self.judge.config, *param, &tensor, self.split(*rank)).map(|c| c.bytes);
                expected.is_ok_and(|e| held(*rank, self.place.layer(), *param).is_some_and(|h| h == e))
            })
    }
}

/// The axis along which a rank holds a range of a matrix or of heads, and the range; `None` for whole matrices.
pub fn part(placement: Placement) -> Option<(usize, Range<usize>)> {
    match placement {
        Placement::Replicated | Placement::Experts(_) => None,
        Placement::Rows(range) | Placement::Heads(range) | Placement::Vocab { rows: range, .. } => Some((0, range)),
        Placement::Cols(range) => Some((1, range)),
    }
}

/// Rows of several matrices one below the other.
///
/// # Errors
/// Matrices of different widths.
pub fn stacked<'a>(parts: impl Iterator<Item = &'a Array2<f32>>) -> Result<Array2<f32>, RefError> {
    let views: Vec<_> = parts.map(|p| p.view()).collect();
    lockstep_reference::ndarray::concatenate(Axis(0), &views)
        .map_err(|e| RefError::tensor("fused group".to_string(), "parts of one width".to_string(), e.to_string()))
}
