//! Products with stored matrices: every type on ragged shapes, the model's types on its own shapes. The few-row and the
//! many-row kernels against f64 and against the naive one, in both operand roundings.

use lockstep_kernels::geometry::{self, Launch, UNIT_COLS, UNIT_ROWS};
use lockstep_reference::ndarray::{Array2, Axis, s};
use lockstep_reference::{Arith, RefRecipe};

use super::case::{Case, Gone, check, rows_of};
use super::lab::{Area, Lab, View, given};
use super::random::Random;
use super::weights::Stored;
use crate::device::cuda::format::Format;
use crate::device::cuda::gpu::GpuError;
use crate::device::cuda::{Rows, Work, tile_product};
use crate::report::Check;
use crate::verify::floor::Floored;

/// Rows of W that the host multiplies.
const JUDGED: usize = 64;

/// Kernels and the numbers of rows that they take.
const KERNELS: [(&str, &[usize]); 5] =
    [("gemv_1", &[1]), ("gemv_2", &[1, 2]), ("gemv_4", &[3, 4]), ("gemv_8", &[5, 6, 7, 8]), ("gemm", &[1, 9, 33, 70])];

/// The kernels of parts in tiles, which are one for each operand rounding.
const PARTS: &str = "tile_parts";

/// A shape to multiply.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shape {
    /// The type, and how it lies.
    pub format: Format,
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

/// Ragged shapes of a format: rows that fill no tile, columns that fill no chunk, heads at a stride, covering blocks.
pub fn ragged(format: Format) -> Vec<Shape> {
    let block = format.ty.block();
    let shape = |stack, rows, cols, odd| Shape { format, stack, rows, cols, own: (0, cols), odd, most: 70 };
    if format.tiled {
        // One unit; chunks of units that are not full, and more parts than warps; heads; covering blocks.
        let covering = Shape { own: (block / 2, 3 * block - block / 4), ..shape(1, 48, 3 * block, false) };
        return vec![
            shape(1, 16, block, false),
            shape(1, 2208, 9 * block, false),
            shape(3, 32, 2 * block, true),
            covering,
        ];
    }
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

/// A stack of experts of a format; where it can, with rows that fill no tile.
pub fn experts(format: Format) -> Shape {
    let block = format.ty.block();
    let (rows, cols) = match format.tiled {
        true => (80, 3 * block),
        false => (70, if block == 1 { 37 } else { 2 * block }),
    };
    Shape { format, stack: 4, rows, cols, own: (0, cols), odd: format.ty.is_plain(), most: 0 }
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
            strict: Floored::of(RefRecipe::Strict, tp, &|a| op(a, x)),
            fast: Floored::of(RefRecipe::Fast, tp, &|a| op(a, x)),
            rounded: Floored::of(RefRecipe::Strict, tp, &|a| op(a, &rounded)),
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

/// A launch of a kernel over the first tokens of activations, at an operand rounding: all that it gives, a row per row
/// of the activations.
pub type Run<'a> = dyn Fn(&mut Case, &'static str, usize, i32, &[f32]) -> Result<Array2<f64>, GpuError> + 'a;

/// Kernels that multiply the same activations, on one shape.
pub struct Product<'a> {
    /// The shape.
    pub shape: &'a Shape,
    /// The activations, rows of the shape's columns.
    pub x: Vec<f32>,
    /// Rows of a token.
    pub groups: usize,
    /// Whether something is multiplied with a row.
    pub used: Box<dyn Fn(usize) -> bool + 'a>,
    /// What the reference makes of them.
    pub floors: Floors,
    /// Runs a kernel.
    pub run: Box<Run<'a>>,
}

impl<'a> Product<'a> {
    /// Tries the naive kernel over `most` tokens, then each fast one over so many, at both operand roundings: against the
    /// truth, against the naive one, and with values planted.
    pub fn check(
        made: impl FnOnce() -> Result<Product<'a>, GpuError>,
        name: &dyn Fn(&str) -> String,
        (naive, most): (&'static str, usize),
        fast: &[(&'static str, &[usize])],
        out: &mut Vec<Check>,
    ) {
        let (mut product, mut twins) = (None, Vec::new());
        out.push(check(name(naive), |case| {
            let made = made()?;
            for recipe in [0, 1] {
                let all = (made.run)(case, naive, most, recipe, &made.x)?;
                made.floors.judge(case, most, recipe, &all);
                twins.push(all);
            }
            product = Some(made);
            Ok(())
        }));
        let Some(Product { x, floors, run, .. }) = &product else { return };
        for (kernel, counts) in fast {
            out.push(check(name(kernel), |case| {
                for n in counts.iter().copied().filter(|n| *n <= most) {
                    for recipe in [0, 1] {
                        let all = run(case, kernel, n, recipe, x)?;
                        floors.judge(case, n, recipe, &all);
                        floors.judge_twins(case, n, recipe, &all, &twins[recipe as usize]);
                    }
                }
                let n = counts[counts.len() - 1].min(most);
                product.as_ref().map_or(Ok(()), |product| product.planted(case, kernel, n))
            }));
        }
    }

    /// A NaN in the rows of one token, an infinity in those of another, and a NaN in a row that is not used: what is used
    /// of them is lost, and nothing else changes by a bit.
    fn planted(&self, case: &mut Case, kernel: &'static str, n: usize) -> Result<(), GpuError> {
        let (cols, groups) = (self.shape.cols, self.groups);
        let idle = (0..n * groups).find(|row| !(self.used)(*row));
        let value = |row: usize| match row / groups {
            t if t == n / 2 || Some(row) == idle => Some(f32::NAN),
            t if t == n - 1 && n > 2 => Some(f32::INFINITY),
            _ => None,
        };
        let mut x = self.x.clone();
        for row in 0..n * groups {
            value(row).into_iter().for_each(|v| x[row * cols + self.shape.own.1 - 1] = v);
        }
        let clean = (self.run)(case, kernel, n, 0, &self.x)?;
        let found = (self.run)(case, kernel, n, 0, &x)?;
        case.lost(&format!("n = {n} with NaN and infinity"), &found, &clean, &|row| {
            value(row).filter(|_| (self.used)(row)).map(|v| if v.is_nan() { f64::is_nan } else { not_finite as Gone })
        });
        Ok(())
    }
}

fn not_finite(v: f64) -> bool {
    !v.is_finite()
}

/// Every product kernel on one shape.
pub fn run(lab: &Lab<'_>, shape: &Shape, out: &mut Vec<Check>) {
    let name = |kernel: &str| format!("{kernel}<{}> {}", shape.format, shape.name());
    // Tiles have kernels of their own for one row that starts at a whole load.
    let tiled = shape.format.tiled && shape.stack == 1 && !shape.odd;
    let kernels: Vec<_> = KERNELS.into_iter().chain(tiled.then_some((PARTS, &[1usize][..]))).collect();
    Product::check(|| product(lab, shape), &name, ("matmul_naive", shape.most), &kernels, out);
}

/// `[n][groups][width]` with a gap behind every group and row; `odd` if neither starts at a whole load.
pub fn lay(n: usize, groups: usize, width: usize, odd: bool) -> View {
    match odd {
        true => View::groups(n, groups, width, 3, 2),
        false => View::groups(n, groups, width, width.next_multiple_of(4) + 4 - width, 8),
    }
}

/// Rows of x per token and matrix of the stack.
fn product<'a>(lab: &'a Lab<'a>, shape: &'a Shape) -> Result<Product<'a>, GpuError> {
    let Shape { format, stack, rows, cols, own, odd, most } = *shape;
    let name = format!("{} {}", format.ty, shape.name());
    let w = Stored::random(lab, &name, format, [stack, rows, cols])?;
    let mut x = Random::of(&format!("x {name}")).values(most * stack * cols);
    for group in x.chunks_exact_mut(cols) {
        group[..own.0].fill(0.0);
        group[own.1..].fill(0.0);
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
    let run: Box<Run<'a>> = Box::new(move |case, kernel, n, recipe, x| {
        let (from, y) = (lay(n, stack, cols, odd), lab.room(lay(n, stack, rows, odd))?);
        // Behind the last row of x, and between rows, lies poison; the covering columns' zeros come from `widen`.
        let x = &x[..n * stack * cols];
        let area = if own == (0, cols) { lab.placed(from, x)? } else { widened(lab, shape, case, from, x)? };
        let what = format!("n = {n}, recipe {recipe}");
        if kernel == PARTS {
            let kernel = ["tile_parts_strict", "tile_parts_fast"][recipe as usize];
            let (work, launch) = in_parts(lab, &w, area.rows(), y.rows(), recipe)?;
            let go = || lab.launch("tiles", Some(format), kernel, launch, &[Box::new(work)]);
            return Ok(rows_of(&lab.values(case, &what, &y, &go)?, rows));
        }
        let launch: Launch = match kernel {
            "gemm" => geometry::gemm(rows, n, stack),
            "matmul_naive" => geometry::threads(rows, n, stack),
            _ => geometry::gemv(rows, stack),
        };
        let args = given![w.matrix(), area.rows(), y.rows(), n, recipe];
        let go = || lab.launch("matmul", Some(format), kernel, launch, &args);
        Ok(rows_of(&lab.values(case, &what, &y, &go)?, rows))
    });
    Ok(Product { shape, x, groups: stack, used: Box::new(|_| true), floors, run })
}

/// A matrix as parts side by side that are not equally tall, and the launch that the engine would choose.
fn in_parts(lab: &Lab<'_>, w: &Stored, x: Rows, y: Rows, recipe: i32) -> Result<(Work, Launch), GpuError> {
    let (tiles, units) = (w.rows / UNIT_ROWS, w.cols / UNIT_COLS);
    let cuts = [0, tiles / 2, tiles / 2, tiles - tiles / 8, tiles];
    let mut work = Work { units: units as i32, stack: 1, slots: 1, x: x.at, y: y.at, ..Work::default() };
    for (part, ends) in cuts.windows(2).enumerate() {
        (work.at[part], work.tiles[part]) = (w.tile(ends[0] * UNIT_ROWS), (ends[1] - ends[0]) as i32);
    }
    Ok((work, tile_launch(lab, w, units, tiles, recipe)?))
}

/// The launch of a product with tiles.
pub fn tile_launch(lab: &Lab<'_>, w: &Stored, units: usize, jobs: usize, recipe: i32) -> Result<Launch, GpuError> {
    let launch = tile_product(w.format.ty, units, recipe == 1).launch(jobs, lab.gpu.multiprocessors()?);
    launch
        .ok_or_else(|| GpuError::Driver { what: "a product with tiles".into(), error: "x does not fit a block".into() })
}

/// The rank's own columns, put between zeros by the kernel that the engine uses for it.
fn widened(lab: &Lab<'_>, shape: &Shape, case: &mut Case, view: View, x: &[f32]) -> Result<Area, GpuError> {
    let ((first, end), cols) = (shape.own, shape.cols);
    let narrow: Vec<f32> = x.chunks_exact(cols).flat_map(|row| row[first..end].iter().copied()).collect();
    let source = lab.placed(View::plain(view.rows, end - first, end - first + 2), &narrow)?;
    let wide = lab.poisoned(view.rows * cols)?;
    let Rows { at, row, group } = source.rows();
    let args = given![at, row, group, 1usize, end - first, first, wide, cols, view.rows];
    let found = lab.values(case, "widen", &wide, &|| lab.each("widen", view.rows * cols, &args))?;
    case.same("widen", &found, x);
    lab.placed(view, &found)
}
