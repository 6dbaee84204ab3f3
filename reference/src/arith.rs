//! The arithmetic under the oracle's operations. Each operation is written once; [`Arith`] decides whether it is the
//! truth (f64 over exact weights) or a plain, legitimate run of an engine's f32 recipe in a stated order of summation.
//! The distance between the two is the noise floor that verdicts stand on, so every rounding here is one that a correct
//! engine may make, and none is larger.

use std::ops::{Add, Mul};

use half::bf16;
use ndarray::{Array2, ArrayView2, s};

use crate::recipe::RefRecipe;

/// In which order the terms of a sum are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// First to last.
    Sequential,
    /// Last to first.
    Reversed,
    /// In consecutive blocks of so many terms, then the blocks' sums first to last.
    Blocks(usize),
    /// In so many consecutive parts of equal length, one per rank, then the parts' sums first to last.
    Ranks(usize),
}

/// How numbers are computed. Values travel as f64 in every mode; in `F32` each of them is an f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arith {
    /// f64 throughout.
    Exact,
    /// Every product, sum, quotient and function value is rounded to f32; functions are correctly rounded; sums run in
    /// the given order. The recipe says what is rounded further.
    F32(RefRecipe, Order),
}

/// Activation rows that are multiplied side by side, so that a strictly ordered sum still fills the vector unit.
const LANES: usize = 16;
/// Multiplications below which a second thread costs more than it brings.
const WORTH_A_THREAD: usize = 1 << 22;

impl Arith {
    /// Legitimate runs of a recipe for a noise floor at tensor-parallel degree `tp`: at least four, exact ones not among
    /// them.
    pub fn orders(recipe: RefRecipe, tp: usize) -> Vec<Arith> {
        let orders = [Order::Sequential, Order::Reversed, Order::Blocks(32), Order::Ranks(tp.max(2))];
        orders.map(|order| Arith::F32(recipe, order)).to_vec()
    }

    /// The value as this arithmetic holds it.
    pub fn round(self, v: f64) -> f64 {
        match self {
            Arith::Exact => v,
            Arith::F32(..) => f64::from(v as f32),
        }
    }

    /// The sum of `terms`, in order, each partial sum rounded.
    pub fn sum(self, terms: &[f64]) -> f64 {
        match self {
            Arith::Exact => ordered(terms.len(), Order::Sequential, |i| [terms[i]])[0],
            Arith::F32(_, order) => f64::from(ordered(terms.len(), order, |i| [terms[i] as f32])[0]),
        }
    }

    /// A result as the recipe stores it between operations.
    pub fn store(self, v: f64) -> f64 {
        match self {
            Arith::Exact => v,
            Arith::F32(recipe, _) => recipe.store(self.round(v)),
        }
    }

    /// A result of a product with weights, or of what is made of nothing else, as the recipe stores it.
    pub(crate) fn product(self, v: f64) -> f64 {
        match self {
            Arith::Exact => v,
            Arith::F32(recipe, _) => recipe.product(self.round(v)),
        }
    }

    /// The recipe and the order, where numbers are rounded at all.
    pub(crate) fn recipe(self) -> Option<(RefRecipe, Order)> {
        match self {
            Arith::Exact => None,
            Arith::F32(recipe, order) => Some((recipe, order)),
        }
    }

    /// True where ranks round their addends, and every step of their sum.
    pub(crate) fn reduces(self) -> bool {
        matches!(self, Arith::F32(RefRecipe::TorchHalf(_), Order::Ranks(_)))
    }

    /// The arithmetic of routed experts: see [`RefRecipe::of_experts`].
    pub(crate) fn of_experts(self) -> Self {
        match self {
            Arith::Exact => self,
            Arith::F32(recipe, order) => Arith::F32(recipe.of_experts(order), order),
        }
    }

    /// A product of activations `x` with stored weights `w`: as [`dots`](Self::dots), with operands and results rounded as
    /// the recipe says. Where parts of a sum are made on several ranks, each is stored before they are added.
    pub fn weigh(self, x: ArrayView2<'_, f64>, w: ArrayView2<'_, f32>) -> Array2<f64> {
        let Some((recipe, order)) = self.recipe() else { return self.dots(x, w) };
        if recipe == RefRecipe::Fast {
            return self.dots(x.mapv(|v| bf16::from_f32(v as f32).to_f64()).view(), w);
        }
        let Some(half) = recipe.narrow() else { return self.dots(x, w) };
        let (x, w) = (x.mapv(|v| half.round(v)), w.mapv(|v| half.round(f64::from(v)) as f32));
        let stored = |x: ArrayView2<'_, f64>, w: ArrayView2<'_, f32>| self.dots(x, w).mapv(|v| half.round(v));
        let Order::Ranks(ranks) = order else { return stored(x.view(), w.view()) };
        let (n, part) = (x.ncols(), x.ncols().div_ceil(ranks.max(1)).max(1));
        let parts = (0..n).step_by(part).map(|i| s![.., i..n.min(i + part)]);
        let mut sum = Array2::zeros((x.nrows(), w.nrows()));
        for part in parts {
            sum.zip_mut_with(&stored(x.slice(part), w.slice(part)), |sum: &mut f64, v| *sum = half.round(*sum + v));
        }
        sum
    }

    /// All dot products of rows of `x` with rows of `w`: \[rows of x, n\] and \[rows of w, n\] give \[rows of x, rows
    /// of w\]. No recipe rounds its operands: for activations with activations, and for the router.
    pub fn dots<W: Copy + Into<f64> + Sync>(self, x: ArrayView2<'_, f64>, w: ArrayView2<'_, W>) -> Array2<f64> {
        match self {
            Arith::Exact => dots::<f64, W>(x, w, Order::Sequential),
            Arith::F32(_, order) => dots::<f32, W>(x, w, order),
        }
    }
}

/// The two number types that sums run in.
trait Real: Copy + Send + Sync + Add<Output = Self> + Mul<Output = Self> {
    const ZERO: Self;
    fn of(v: f64) -> Self;
    fn wide(self) -> f64;
}

impl Real for f64 {
    const ZERO: f64 = 0.0;
    fn of(v: f64) -> f64 {
        v
    }
    fn wide(self) -> f64 {
        self
    }
}

impl Real for f32 {
    const ZERO: f32 = 0.0;
    fn of(v: f64) -> f32 {
        v as f32
    }
    fn wide(self) -> f64 {
        f64::from(self)
    }
}

/// The sum of `n` terms in order, for L independent sums at once.
fn ordered<F: Real, const L: usize>(n: usize, order: Order, term: impl Fn(usize) -> [F; L]) -> [F; L] {
    let plus = |mut sum: [F; L], more: [F; L]| {
        for (s, m) in sum.iter_mut().zip(more) {
            *s = *s + m;
        }
        sum
    };
    let zero = [F::ZERO; L];
    let chunk = match order {
        Order::Sequential => return (0..n).fold(zero, |sum, i| plus(sum, term(i))),
        Order::Reversed => return (0..n).rev().fold(zero, |sum, i| plus(sum, term(i))),
        Order::Blocks(width) => width,
        Order::Ranks(ranks) => n.div_ceil(ranks.max(1)),
    };
    let starts = (0..n).step_by(chunk.max(1));
    starts.map(|i| (i..n.min(i + chunk)).fold(zero, |sum, i| plus(sum, term(i)))).fold(zero, plus)
}

/// Each row of `w` is read once, for all rows of `x`; rows of `w` are shared out among threads, which changes no
/// result.
fn dots<F: Real, W: Copy + Into<f64> + Sync>(
    x: ArrayView2<'_, f64>,
    w: ArrayView2<'_, W>,
    order: Order,
) -> Array2<f64> {
    let (rows, n) = x.dim();
    let outputs = w.nrows();
    debug_assert_eq!(n, w.ncols());
    let tiles = rows.div_ceil(LANES);
    let mut packed = vec![[F::ZERO; LANES]; tiles * n];
    for ((row, i), &v) in x.indexed_iter() {
        packed[row / LANES * n + i][row % LANES] = F::of(v);
    }
    let mut sums = vec![[F::ZERO; LANES]; outputs * tiles];
    let compute = |first: usize, sums: &mut [[F; LANES]]| {
        let mut weights = vec![F::ZERO; n];
        for (o, sums) in sums.chunks_exact_mut(tiles).enumerate() {
            for (weight, &v) in weights.iter_mut().zip(w.row(first + o)) {
                *weight = F::of(v.into());
            }
            for (sum, x) in sums.iter_mut().zip(packed.chunks_exact(n)) {
                *sum = ordered(n, order, |i| x[i].map(|x| weights[i] * x));
            }
        }
    };
    if tiles > 0 && n > 0 && outputs > 0 {
        let work = outputs * tiles * LANES * n;
        let cores = std::thread::available_parallelism().map_or(1, |c| c.get());
        let threads = (work / WORTH_A_THREAD).clamp(1, cores);
        let share = outputs.div_ceil(threads);
        std::thread::scope(|scope| {
            let mut shares = sums.chunks_mut(share * tiles).enumerate();
            let own = shares.next();
            for (i, sums) in shares {
                let compute = &compute;
                scope.spawn(move || compute(i * share, sums));
            }
            if let Some((_, sums)) = own {
                compute(0, sums);
            }
        });
    }
    Array2::from_shape_fn((rows, outputs), |(row, o)| sums[o * tiles + row / LANES][row % LANES].wide())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array, array};

    fn strict(order: Order) -> Arith {
        Arith::F32(RefRecipe::Strict, order)
    }

    #[test]
    fn orders_round_differently_and_exact_does_not_round() {
        // In f32, 2^24 swallows single ones; each order loses other ones.
        let big = f64::from(1 << 24);
        let terms = [big, 1.0, 1.0, 1.0, 1.0];
        assert_eq!(Arith::Exact.sum(&terms), big + 4.0);
        assert_eq!(strict(Order::Sequential).sum(&terms), big);
        assert_eq!(strict(Order::Reversed).sum(&terms), big + 4.0);
        assert_eq!(strict(Order::Blocks(3)).sum(&terms), big + 2.0);
        assert_eq!(strict(Order::Ranks(5)).sum(&terms), big);
        assert_eq!(strict(Order::Ranks(2)).sum(&terms), big + 2.0);
    }

    #[test]
    fn dots_agree_with_sums_of_products_in_every_order() {
        let x = Array::from_shape_fn((19, 70), |(i, j)| f64::from(((i * 31 + j * 7) % 13) as f32 * 0.37 - 2.1));
        let w = Array::from_shape_fn((5, 70), |(i, j)| ((i * 17 + j * 3) % 11) as f32 * 0.13 - 0.7);
        for arith in Arith::orders(RefRecipe::Strict, 4).into_iter().chain([Arith::Exact]) {
            let y = arith.dots(x.view(), w.view());
            for ((i, o), &v) in y.indexed_iter() {
                let terms: Vec<f64> = (0..70).map(|j| arith.round(x[[i, j]] * f64::from(w[[o, j]]))).collect();
                assert_eq!(v, arith.sum(&terms), "{arith:?} row {i} output {o}");
            }
        }
    }

    #[test]
    fn the_fast_recipe_rounds_activations_to_bf16_and_ties_to_even() {
        // bf16 has 8 significant bits: between 1 and 2 its step is 2^-7, and every tie lies at an odd multiple of 2^-8.
        let tie = 2f64.powi(-8);
        let above = f64::from(1.0f32 + f32::EPSILON); // f32's least step breaks a tie
        for (x, rounded) in [
            (1.0, 1.0),
            (1.0 + tie, 1.0),
            (1.0 + 3.0 * tie, 1.0 + 4.0 * tie),
            (above + tie, 1.0 + 2.0 * tie),
            (-1.0 - tie, -1.0),
            (-1.0 - 3.0 * tie, -1.0 - 4.0 * tie),
            (2.0 - tie, 2.0),
            (256.0 + 1.0, 256.0),
            (256.0 + 3.0, 260.0),
            (f64::from(f32::MAX), f64::INFINITY),
        ] {
            for arith in Arith::orders(RefRecipe::Fast, 2) {
                assert_eq!(arith.weigh(array![[x]].view(), array![[1f32]].view()), array![[rounded]], "{arith:?} {x}");
                assert_eq!(arith.dots(array![[x]].view(), array![[1f32]].view()), array![[x]], "{arith:?} {x}");
            }
            for arith in Arith::orders(RefRecipe::Strict, 2).into_iter().chain([Arith::Exact]) {
                assert_eq!(arith.weigh(array![[x]].view(), array![[1f32]].view()), array![[x]], "{arith:?} {x}");
            }
        }
        let fast = Arith::F32(RefRecipe::Fast, Order::Sequential);
        assert!(fast.weigh(array![[f64::NAN]].view(), array![[1f32]].view())[[0, 0]].is_nan());
    }

    #[test]
    fn the_fast_recipe_leaves_weights_and_sums_in_f32() {
        let fine = 1.0 + 2f32.powi(-20);
        let fast = Arith::F32(RefRecipe::Fast, Order::Sequential);
        assert_eq!(fast.weigh(array![[2.0]].view(), array![[fine]].view()), array![[2.0 * f64::from(fine)]]);
        assert_eq!(
            fast.weigh(array![[1.0, 2f64.powi(-20)]].view(), array![[1f32, 1.0]].view())[[0, 0]],
            f64::from(fine)
        );
        assert_eq!(fast.round(f64::from(fine)), f64::from(fine));
    }

    #[test]
    fn threads_change_nothing() {
        let x = Array::from_shape_fn((16, 1024), |(i, j)| ((i + j) % 7) as f64 * 0.3 - 1.0);
        let w = Array::from_shape_fn((1100, 1024), |(i, j)| ((i * j) % 5) as f32 - 2.0);
        let whole = Arith::Exact.dots(x.view(), w.view());
        let part = Arith::Exact.dots(x.view(), w.slice(ndarray::s![1090.., ..]));
        assert_eq!(whole.slice(ndarray::s![.., 1090..]), part);
    }

    #[test]
    fn empty_sides_give_empty_results() {
        let none = Array2::<f64>::zeros((0, 3));
        assert_eq!(Arith::Exact.dots(none.view(), array![[1f32, 2.0, 3.0]].view()).dim(), (0, 1));
        assert_eq!(Arith::Exact.dots(array![[1.0, 2.0, 3.0]].view(), none.view()).dim(), (1, 0));
        assert_eq!(strict(Order::Ranks(3)).sum(&[]), 0.0);
    }
}
