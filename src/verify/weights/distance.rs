//! How far a parameter's values are from a baseline's, at every level of detail: a norm over a whole tensor drowns what is
//! wrong in one expert, one row or one block of it.

use lockstep_reference::weights::shape;
use lockstep_reference::{RefError, Weights};
use ndarray::{Array2, ArrayView1, Axis};

use super::expected::{Oracle, is_expert_stack};
use crate::model::{Kind, Param};
use crate::quant::QuantType;
use crate::verify::param_map::reference_of;

/// How much more than on Gaussian weights a type may cost. Trained rows have heavier tails, so that fewer of the codes
/// carry most values, and files made with an importance matrix trade plain error for weighted error. The most that the
/// trained test model costs is 1.14 times the Gaussian figure (Q4_K 0.083), random ones 1.05.
const MARGIN: f64 = 1.5;
/// What plain f32 may differ by: nothing but the arithmetic of a conversion.
const PLAIN: f64 = 1e-6;
/// How much more than the whole one row may cost, and one block: the fewer values, the more they scatter.
const OF_ROW: f64 = 2.0;
const OF_BLOCK: f64 = 3.0;
/// No type costs a row or a block this much; what does is something else.
const NEVER: f64 = 0.8;
/// A row or block smaller than this share of its matrix's mean energy is measured against that: where nearly nothing is,
/// a type keeps nothing, and that is no error that anyone could feel.
const FAINT: f64 = 0.05;
/// Values of a block, where a type has none of its own.
pub(super) const LEAST_BLOCK: usize = 32;

/// Relative L2 error that a type costs on Gaussian weights, measured with ggml's own quantisers (the goldens' README);
/// for formats with a minimum of 32 values, the range of 32 Gaussian values (4.14 sigma) over the codes and sqrt(12).
fn cost(ty: QuantType) -> f64 {
    match ty {
        QuantType::F32 => 0.0,
        QuantType::F16 => 1.0 / 2048.0, // half an ulp at worst
        QuantType::BF16 => 1.0 / 256.0,
        QuantType::Q8_0 => 0.005,
        QuantType::Q6_K => 0.018,
        QuantType::Q5_K => 0.037,
        QuantType::Q5_0 => 0.041,
        QuantType::Q5_1 => 0.039,
        QuantType::Q4_K => 0.073,
        QuantType::Q4_0 => 0.086,
        QuantType::Q4_1 => 0.080,
        QuantType::IQ4_XS | QuantType::IQ4_NL => 0.077,
        QuantType::MXFP4 => 0.112,
        QuantType::NVFP4 => 0.113,
        QuantType::Q3_K => 0.159,
        QuantType::Q2_K => 0.292,
        QuantType::IQ2_XXS => 0.360,
        QuantType::IQ2_XS => 0.314,
        QuantType::IQ2_S => 0.273,
        QuantType::IQ3_XXS => 0.228,
        QuantType::IQ3_S => 0.166,
    }
}

/// The largest relative L2 distance of values stored as `target` from those of a baseline stored as `baseline`. Plain
/// baselines are what files are made from, so theirs is no error, and a copy has none; two block formats each have their
/// own.
pub(super) fn limit(target: QuantType, baseline: QuantType) -> f64 {
    if target == baseline && target.is_plain() {
        return PLAIN;
    }
    let other = if baseline.is_plain() { 0.0 } else { cost(baseline) };
    PLAIN + MARGIN * cost(target).hypot(other)
}

/// A part of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// All of it; the matrix that is furthest off.
    Whole(usize),
    /// One matrix of its stack.
    Matrix(usize),
    /// One row of a matrix.
    Row(usize, usize),
    /// One block of a row of a matrix: its first column, and its values.
    Block(usize, usize, usize, usize),
}

impl Part {
    /// The matrix that it is of.
    pub fn matrix(self) -> usize {
        match self {
            Part::Whole(m) | Part::Matrix(m) | Part::Row(m, _) | Part::Block(m, ..) => m,
        }
    }

    /// 0 for the whole, 3 for a block.
    fn level(self) -> usize {
        match self {
            Part::Whole(_) => 0,
            Part::Matrix(_) => 1,
            Part::Row(..) => 2,
            Part::Block(..) => 3,
        }
    }

    /// This part of its matrix.
    pub fn of(self, matrix: &Array2<f32>) -> Array2<f32> {
        match self {
            Part::Whole(_) | Part::Matrix(_) => matrix.clone(),
            Part::Row(_, row) => matrix.slice(ndarray::s![row..row + 1, ..]).to_owned(),
            Part::Block(_, row, from, n) => matrix.slice(ndarray::s![row..row + 1, from..from + n]).to_owned(),
        }
    }
}

/// Sums of squares: of the errors, and of the baseline.
#[derive(Clone, Copy, Debug, Default)]
struct Squares {
    error: f64,
    size: f64,
}

impl Squares {
    fn of<'a>(t: impl IntoIterator<Item = &'a f32>, b: impl IntoIterator<Item = &'a f32>) -> Self {
        t.into_iter().zip(b).fold(Squares::default(), |s, (t, b)| {
            let (t, b) = (f64::from(*t), f64::from(*b));
            Squares { error: s.error + (t - b).powi(2), size: s.size + b * b }
        })
    }

    /// ||t - b|| / ||b||, of a baseline that counts as no smaller than `least`; infinite where an error is no number.
    fn ratio(self, least: f64) -> f64 {
        match self.error {
            e if !e.is_finite() => f64::INFINITY,
            0.0 => 0.0,
            e => (e / self.size.max(least).max(f64::MIN_POSITIVE)).sqrt(),
        }
    }
}

impl std::iter::Sum for Squares {
    fn sum<I: Iterator<Item = Squares>>(all: I) -> Self {
        all.fold(Squares::default(), |a, b| Squares { error: a.error + b.error, size: a.size + b.size })
    }
}

/// ||t - b|| / ||b||.
pub(super) fn relative(t: &Array2<f32>, b: &Array2<f32>) -> f64 {
    Squares::of(t, b).ratio(0.0)
}

/// A parameter's distances.
#[derive(Clone, Debug)]
pub(super) struct Distance {
    /// Of all values.
    pub whole: f64,
    /// The part that decides, with its distance and limit: where anything is beyond its limit the one part that is, or the
    /// largest; else the one that is nearest to its limit.
    pub decides: Found,
    /// Parts beyond their limits: matrices, rows, blocks.
    pub beyond: [usize; 3],
}

impl Distance {
    /// True where every part is within its limit.
    pub fn is_right(&self) -> bool {
        self.decides.share() <= 1.0
    }
}

/// A part with its distance and limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    /// The part.
    pub part: Part,
    /// Its relative L2 distance.
    pub relative: f64,
    /// The limit of that.
    pub limit: f64,
}

impl Found {
    fn share(&self) -> f64 {
        self.relative / self.limit
    }
}

/// Of each level, largest parts first: the worst part, how many are beyond their limits, and how many there are.
#[derive(Default)]
struct Levels([(Option<Found>, usize, usize); 4]);

impl Levels {
    fn see(&mut self, part: Part, relative: f64, limit: f64) {
        let (worst, beyond, all) = &mut self.0[part.level()];
        let found = Found { part, relative, limit };
        *all += 1;
        *beyond += usize::from(found.share() > 1.0);
        if worst.is_none_or(|old| found.share() > old.share()) {
            *worst = Some(found);
        }
    }

    /// What is wrong in few parts is told by the worst of them, what is wrong in most by the whole.
    fn decides(&self) -> Option<Found> {
        let mut decides: Option<(Found, usize, usize)> = None;
        for (worst, beyond, all) in self.0.iter().filter(|(_, beyond, _)| *beyond > 0) {
            let few = decides.is_none_or(|(_, larger, of)| 2 * beyond * of < larger * all);
            if let Some(worst) = worst.filter(|_| few) {
                decides = Some((worst, *beyond, *all));
            }
        }
        let most = || self.0.iter().filter_map(|(worst, ..)| *worst).max_by(|a, b| a.share().total_cmp(&b.share()));
        decides.map(|(worst, ..)| worst).or_else(most)
    }
}

/// The distance of a parameter stored as `ty` from a baseline's, stored as `theirs`.
pub(super) fn distance(
    target: &Oracle<'_>,
    baseline: &Oracle<'_>,
    param: Param,
    (ty, theirs): (QuantType, QuantType),
) -> Result<Distance, RefError> {
    let all = stack(target, param.kind);
    let limit = limit(ty, theirs);
    let block = ty.block().max(theirs.block()).max(LEAST_BLOCK);
    let small = |times: f64| (times * limit).min(limit.max(NEVER));
    let (mut levels, mut whole) = (Levels::default(), Squares::default());
    for index in 0..all {
        let (t, b) = (matrix(target, param, index)?, matrix(baseline, param, index)?);
        let (rows, cols) = t.dim();
        let blocks = |(t, b): (ArrayView1<'_, f32>, ArrayView1<'_, f32>)| -> Vec<Squares> {
            let (t, b) = (t.to_vec(), b.to_vec());
            t.chunks(block).zip(b.chunks(block)).map(|(t, b)| Squares::of(t, b)).collect()
        };
        let squares: Vec<Vec<Squares>> = t.rows().into_iter().zip(b.rows()).map(blocks).collect();
        let of_rows: Vec<Squares> = squares.iter().map(|blocks| blocks.iter().copied().sum()).collect();
        let of_matrix: Squares = of_rows.iter().copied().sum();
        let faint = |values: usize| FAINT * of_matrix.size * values as f64 / (rows * cols).max(1) as f64;
        for (row, (blocks, sum)) in squares.iter().zip(of_rows).enumerate() {
            if rows > 1 {
                levels.see(Part::Row(index, row), sum.ratio(faint(cols)), small(OF_ROW));
            }
            for (i, s) in blocks.iter().enumerate().filter(|_| blocks.len() > 1) {
                let (from, n) = (i * block, block.min(cols - i * block));
                levels.see(Part::Block(index, row, from, n), s.ratio(faint(n)), small(OF_BLOCK));
            }
        }
        if all > 1 {
            levels.see(Part::Matrix(index), of_matrix.ratio(0.0), limit);
        }
        whole = [whole, of_matrix].into_iter().sum();
    }
    let relative = whole.ratio(0.0);
    let furthest = Part::Whole(levels.0[1].0.map_or(0, |found| found.part.matrix()));
    levels.see(furthest, relative, limit);
    let decides = levels.decides().unwrap_or(Found { part: furthest, relative, limit });
    Ok(Distance { whole: relative, decides, beyond: [1, 2, 3].map(|level| levels.0[level].1) })
}

/// Matrix `index` of a parameter as plain values: vectors as one row.
pub(super) fn matrix(model: &Oracle<'_>, param: Param, index: usize) -> Result<Array2<f32>, RefError> {
    let (weights, name) = (model.weights(), reference_of(param.kind));
    Ok(match (param.kind, shape(&model.config, name).len()) {
        (Kind::KB | Kind::VB, _) => weights.heads(param.layer, name)?.index_axis(Axis(0), index).to_owned(),
        _ if is_expert_stack(name) => (*weights.expert(param.layer, name, index)?).clone(),
        (_, 1) => weights.vector(param.layer, name)?.view().insert_axis(Axis(0)).to_owned(),
        _ => (*weights.matrix(param.layer, name)?).clone(),
    })
}

/// Matrices of a parameter: experts, heads, or one.
pub(super) fn stack(model: &Oracle<'_>, kind: Kind) -> usize {
    match kind {
        Kind::KB | Kind::VB => model.config.heads,
        kind if is_expert_stack(reference_of(kind)) => model.config.experts,
        _ => 1,
    }
}
