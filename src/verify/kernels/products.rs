//! Products with stored matrices: every type on ragged shapes, the model's types on its own shapes. The few-row and the
//! many-row kernels against f64 and against the naive one, in both operand roundings.

use lockstep_kernels::geometry::{self, Launch};
use lockstep_reference::ndarray::{Array2, Axis, s};
use lockstep_reference::{Arith, Recipe};

use super::case::{Case, check, rows_of};
use super::lab::{Area, Lab, View};
use super::random::Random;
use super::weights::Stored;
use crate::device::cuda::Rows;
use crate::device::cuda::gpu::{Arg, GpuError};
use crate::quant::QuantType;
use crate::report::Check;
use crate::verify::floor::Floored;

/// Rows of W that the host multiplies.
const JUDGED: usize = 64;

/// Kernels and the numbers of rows that they take.
const KERNELS: [(&str, &[usize]); 5] =
    [("gemv_1", &[1]), ("gemv_2", &[1, 2]), ("gemv_4", &[3, 4]), ("gemv_8", &[5, 6, 7, 8]), ("gemm", &[1, 9, 33, 70])];

/// A shape to multiply.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shape {
    /// The type.
    pub ty: QuantType,
    /// Matrices, one per group of x.
    pub stack: usize,
    /// Rows of each.
    pub rows: usize,
    /// Stored columns.
    pub cols: usize,
    /// Columns that are multiplied; the rest of x is zero.
    pub own: (usize, usize),
    /// True if neither rows nor groups of x start at a whole load.
    pub odd: bool,
    /// Most rows of x.
    pub most: usize,
}

impl Shape {
    /// The name in reports.
    pub fn name(&self) -> String {
        let Shape { stack, rows, cols, own, .. } = self;
        let heads = if *stack > 1 { format!("{stack} x ") } else { String::new() };
        let part = if *own == (0, *cols) { String::new() } else { format!(", columns {} to {}", own.0, own.1) };
        format!("{heads}{rows} x {cols}{part}{}", if self.odd { ", odd strides" } else { "" })
    }
}

/// Ragged shapes of a type: rows that fill no tile, columns that fill no chunk, heads at a stride, covering blocks.
pub fn ragged(ty: QuantType) -> Vec<Shape> {
    let block = ty.block();
    let shape = |stack, rows, cols, odd| Shape { ty, stack, rows, cols, own: (0, cols), odd, most: 70 };
    let mut shapes = vec![shape(1, 77, if block == 1 { 37 } else { 3 * block }, false), shape(1, 1, block, true)];
    shapes.push(shape(3, 20, 192usize.next_multiple_of(block), true));
    if block == 1 {
        shapes.push(shape(2, 65, 48, false));
    } else {
        let covering = shape(1, 9, 3 * block, false);
        shapes.push(Shape { own: (block / 2, 3 * block - block / 4), ..covering });
    }
    shapes
}

/// A stack of experts of a type whose rows fill no tile.
pub fn experts(ty: QuantType) -> Shape {
    let cols = if ty.block() == 1 { 37 } else { 2 * ty.block() };
    Shape { ty, stack: 4, rows: 70, cols, own: (0, cols), odd: ty.is_plain(), most: 0 }
}

/// What products have at both operand roundings, as the reference has it.
pub struct Floors {
    strict: Floored,
    fast: Floored,
    /// Around the truth of the rounded operand: what is left when the rounding itself is taken as given.
    rounded: Floored,
    /// The rows of W that the reference has.
    judged: Vec<usize>,
}

/// What the reference makes of activations, at the judged rows of W.
type Truth<'a> = dyn Fn(Arith, &Array2<f64>) -> Array2<f64> + Sync + 'a;

impl Floors {
    /// From an operation on activations.
    pub fn new(tp: usize, x: &Array2<f64>, judged: &[usize], op: &Truth<'_>) -> Self {
        let rounded = x.mapv(|v| half::bf16::from_f32(v as f32).to_f64());
        Floors {
            judged: judged.to_vec(),
            strict: Floored::of(Recipe::Strict, tp, &|a| op(a, x)),
            fast: Floored::of(Recipe::Fast, tp, &|a| op(a, x)),
            rounded: Floored::of(Recipe::Strict, tp, &|a| op(a, &rounded)),
        }
    }

    /// The floor that two kernels of a recipe share.
    fn narrow(&self, recipe: i32) -> &Floored {
        if recipe == 0 { &self.strict } else { &self.rounded }
    }

    /// Judges a run of a recipe over `n` tokens.
    pub fn judge(&self, case: &mut Case, n: usize, recipe: i32, all: &Array2<f64>) {
        let found = all.select(Axis(1), &self.judged);
        if recipe == 1 {
            case.judge(&format!("n = {n}, fast"), &found, &self.fast);
        }
        let operand = if recipe == 0 { "strict" } else { "fast, operand as rounded" };
        case.judge(&format!("n = {n}, {operand}"), &found, self.narrow(recipe));
    }

    /// Judges a run against the naive kernel's of the same recipe, which may be over more tokens.
    pub fn judge_twins(&self, case: &mut Case, n: usize, recipe: i32, all: &Array2<f64>, naive: &Array2<f64>) {
        let twin = self.narrow(recipe).around(naive.slice(s![..all.nrows(), ..]).to_owned());
        case.judge(&format!("n = {n} against the naive kernel"), all, &twin);
    }
}

/// One shape: its matrices, activations, and what the reference makes of them.
struct Bench<'a> {
    lab: &'a Lab<'a>,
    shape: &'a Shape,
    w: Stored,
    x: Vec<f32>,
    floors: Floors,
}

/// Every product kernel on one shape.
pub fn run(lab: &Lab<'_>, shape: &Shape, out: &mut Vec<Check>) {
    let name = |kernel: &str| format!("{kernel}<{}> {}", shape.ty, shape.name());
    let mut bench = None;
    let mut naive = Vec::new();
    out.push(check(name("matmul_naive"), |case| {
        let made = Bench::new(lab, shape)?;
        for recipe in [0, 1] {
            let all = made.launch(case, "matmul_naive", shape.most, recipe, &made.x)?;
            made.floors.judge(case, shape.most, recipe, &all);
            naive.push(all);
        }
        bench = Some(made);
        Ok(())
    }));
    let Some(bench) = bench else { return };
    for (kernel, counts) in KERNELS {
        out.push(check(name(kernel), |case| {
            for n in counts.iter().copied().filter(|n| *n <= shape.most) {
                for recipe in [0, 1] {
                    let all = bench.launch(case, kernel, n, recipe, &bench.x)?;
                    bench.floors.judge(case, n, recipe, &all);
                    bench.floors.judge_twins(case, n, recipe, &all, &naive[recipe as usize]);
                }
            }
            bench.planted(case, kernel, counts[counts.len() - 1].min(shape.most))
        }));
    }
}

impl<'a> Bench<'a> {
    fn new(lab: &'a Lab<'a>, shape: &'a Shape) -> Result<Self, GpuError> {
        let name = format!("{} {}", shape.ty, shape.name());
        let w = Stored::random(lab, &name, shape.ty, [shape.stack, shape.rows, shape.cols])?;
        let (stack, cols) = (shape.stack, shape.cols);
        let mut x = Random::of(&format!("x {name}")).values(shape.most * stack * cols);
        for group in x.chunks_exact_mut(cols) {
            group[..shape.own.0].fill(0.0);
            group[shape.own.1..].fill(0.0);
        }
        let judged = w.sampled(JUDGED.div_ceil(stack).max(16));
        let values: Vec<Array2<f32>> = (0..stack).map(|g| w.values(g, &judged)).collect();
        let op = |a: Arith, x: &Array2<f64>| {
            let mut y = Array2::zeros((x.nrows(), judged.len()));
            for (g, w) in values.iter().enumerate() {
                let of_group = x.slice(s![g..;stack, ..]).to_owned();
                y.slice_mut(s![g..;stack, ..]).assign(&a.weigh(of_group.view(), w.view()));
            }
            y
        };
        let floors = Floors::new(lab.tp, &rows_of(&x, cols), &judged, &op);
        Ok(Bench { lab, shape, w, x, floors })
    }

    /// All values of `[n][groups][rows]`, a row per token and group.
    fn launch(
        &self,
        case: &mut Case,
        kernel: &'static str,
        n: usize,
        recipe: i32,
        x: &[f32],
    ) -> Result<Array2<f64>, GpuError> {
        let Shape { ty, stack, rows, cols, own, odd, .. } = *self.shape;
        let pad = if odd { 3 } else { 4 };
        let lay = |width: usize| {
            let group = if odd { width + pad } else { width.next_multiple_of(4) + pad };
            View { start: 0, rows: n, row: stack * group + pad, groups: stack, group, width }
        };
        let (from, to) = (lay(cols), lay(rows));
        // Behind the last row of x, and between rows, lies poison; the covering columns' zeros come from `widen`.
        let area = if own == (0, cols) {
            self.lab.placed(from, &x[..n * stack * cols])?
        } else {
            self.widened(case, from, &x[..n * stack * cols])?
        };
        let y = self.lab.room(to)?;
        let launch: Launch = match kernel {
            "gemm" => geometry::gemm(rows, n, stack),
            "matmul_naive" => geometry::threads(rows, n, stack),
            _ => geometry::gemv(rows, stack),
        };
        let args: [&dyn Arg; 5] = [&self.w.matrix(), &area.rows(), &y.rows(), &(n as i32), &recipe];
        let what = format!("n = {n}, recipe {recipe}");
        let go = || self.lab.launch("matmul", Some(ty), kernel, launch, &args);
        Ok(rows_of(&self.lab.values(case, &what, &y, &go)?, rows))
    }

    /// The rank's own columns, put between zeros by the kernel that the engine uses for it.
    fn widened(&self, case: &mut Case, view: View, x: &[f32]) -> Result<Area, GpuError> {
        let (lab, (first, end), cols) = (self.lab, self.shape.own, self.shape.cols);
        let narrow: Vec<f32> = x.chunks_exact(cols).flat_map(|row| row[first..end].iter().copied()).collect();
        let source = lab.placed(View::plain(view.rows, end - first, end - first + 2), &narrow)?;
        let wide = lab.poisoned(view.rows * cols)?;
        let (Rows { at: from, row, group }, groups, width) = (source.rows(), 1i32, (end - first) as i32);
        let (at, to, all, n) = (first as i32, wide.at(0), cols as i32, view.rows as i32);
        let args: [&dyn Arg; 9] = [&from, &row, &group, &groups, &width, &at, &to, &all, &n];
        let found = lab.values(case, "widen", &wide, &|| lab.each("widen", view.rows * cols, &args))?;
        case.same("widen", &found, x);
        lab.placed(view, &found)
    }

    /// A NaN in one row and an infinity in another: all of these rows are lost, and the others do not change by a bit.
    fn planted(&self, case: &mut Case, kernel: &'static str, n: usize) -> Result<(), GpuError> {
        let Shape { stack, cols, own, .. } = *self.shape;
        let mut x = self.x.clone();
        let plant = |x: &mut [f32], t: usize, v: f32| {
            for g in 0..stack {
                x[(t * stack + g) * cols + own.1 - 1] = v;
            }
        };
        plant(&mut x, n / 2, f32::NAN);
        if n > 2 {
            plant(&mut x, n - 1, f32::INFINITY);
        }
        let clean = self.launch(case, kernel, n, 0, &self.x)?;
        let found = self.launch(case, kernel, n, 0, &x)?;
        for (i, (found, clean)) in found.rows().into_iter().zip(clean.rows()).enumerate() {
            let t = i / stack;
            let lost = t == n / 2 || (n > 2 && t == n - 1);
            let good = if lost { found.iter().all(|v| !v.is_finite()) } else { found == clean };
            let expected = if lost { "nothing finite" } else { "the values of the clean run" };
            case.holds(good, || {
                format!("n = {n} with NaN and infinity: row {t}: expected {expected}, found {found:.3}")
            });
        }
        Ok(())
    }
}
