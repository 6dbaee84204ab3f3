//! Norms: the model's widths and ragged ones, against f64 and the naive kernels.

use lockstep_kernels::geometry;
use lockstep_reference::ndarray::{Array1, Array2, s};
use lockstep_reference::{RefRecipe, ops};

use super::case::{Case, check, rows_of};
use super::lab::{Lab, View, given};
use super::random::Random;
use crate::device::cuda::gpu::{Arg, GpuError};
use crate::model::Config;
use crate::report::Check;
use crate::verify::floor::Floored;

/// Rows at once.
const COUNTS: [usize; 3] = [1, 3, 9];
/// Widths that fill no warp, no block, and more than one.
const RAGGED: [usize; 7] = [1, 31, 33, 511, 513, 1000, 2049];
const EPS: f32 = 1e-5;

/// Every norm.
pub fn run(lab: &Lab<'_>, c: &Config, out: &mut Vec<Check>) {
    let mut own = vec![c.hidden, c.q_lora, c.kv_lora, c.index_dim];
    own.sort_unstable();
    own.dedup();
    for (class, widths) in [("ragged widths", &RAGGED[..]), ("this model's widths", &own)] {
        for kernel in ["rms_norm", "rms_norm_naive", "add_rms_norm", "layer_norm", "layer_norm_naive"] {
            out.push(check(format!("{kernel} {class}"), |case| {
                for width in widths {
                    one(lab, case, kernel, *width)?;
                }
                Ok(())
            }));
        }
    }
}

/// One width: clean rows, then rows with a NaN and an infinity among them.
fn one(lab: &Lab<'_>, case: &mut Case, kernel: &'static str, width: usize) -> Result<(), GpuError> {
    let most = COUNTS[COUNTS.len() - 1];
    let mut random = Random::of(&format!("norm {width}"));
    // A mean of its own for every row, so that LayerNorm has something to take away.
    let mut x = random.values(most * width);
    x.iter_mut().enumerate().for_each(|(i, v)| *v += (i / width) as f32 * 0.3);
    let delta = random.values(most * width);
    let w: Vec<f32> = random.values(width).into_iter().map(|v| 1.0 + 0.2 * v).collect();
    let b = random.values(width);
    for planted in [false, true] {
        if planted {
            x[2 * width + width / 2] = f32::NAN;
            x[8 * width + width - 1] = f32::NEG_INFINITY;
        }
        let adds = kernel == "add_rms_norm";
        let summed: Vec<f32> = if adds { x.iter().zip(&delta).map(|(a, b)| a + b).collect() } else { x.clone() };
        let (weights, bias) = (Array1::from(w.clone()), Array1::from(b.clone()));
        let truth = rows_of(&summed, width);
        let floor = Floored::of(RefRecipe::Strict, lab.tp, &|a| match kernel {
            "layer_norm" | "layer_norm_naive" => ops::layer_norm(a, &truth, &weights, &bias, f64::from(EPS)),
            _ => ops::rms_norm(a, &truth, &weights, f64::from(EPS)),
        });
        for n in COUNTS {
            let what = format!("{n} x {width}{}", if planted { " with NaN and infinity" } else { "" });
            let found = launch(lab, case, kernel, &what, n, [&x, &delta, &summed], [&w, &b])?;
            if planted {
                // LayerNorm of a row with an infinity is NaN or infinite throughout, in whichever way.
                let places = |m: &Array2<f64>| m.mapv(|v| v.is_finite());
                let expected = places(&floor.exact.slice(s![..n, ..]).to_owned());
                case.holds(places(&found) == expected, || format!("{what}: other places are finite than should be"));
            } else {
                case.judge(&what, &found, &floor);
            }
        }
    }
    Ok(())
}

fn launch(
    lab: &Lab<'_>,
    case: &mut Case,
    kernel: &'static str,
    what: &str,
    n: usize,
    [x, delta, summed]: [&[f32]; 3],
    [w, b]: [&[f32]; 2],
) -> Result<Array2<f64>, GpuError> {
    let width = w.len();
    let x = lab.placed(View::plain(n, width, width + 3), &x[..n * width])?;
    let (w, b, y) = (lab.floats(w)?, lab.floats(b)?, lab.room(View::plain(n, width, width + 5))?);
    let (blocks, one_each) = (geometry::per_row(n, 512), geometry::threads(n, 1, 1));
    let run = |launch, args: &[Box<dyn Arg>]| lab.launch("norm", None, kernel, launch, args);
    let found = match kernel {
        "rms_norm" | "rms_norm_naive" => {
            let args = given![x, x.row(), w, EPS, width, y, y.row(), n];
            let (launch, args) = if kernel == "rms_norm" { (blocks, &args[..7]) } else { (one_each, &args[..]) };
            lab.values(case, what, &y, &|| run(launch, args))?
        }
        "add_rms_norm" => {
            let delta = lab.placed(View::plain(n, width, width + 1), &delta[..n * width])?;
            let args = given![x, x.row(), delta, delta.row(), w, EPS, width, y, y.row()];
            let seen = lab.thrice(&[&y, &x], &|| run(blocks, &args))?;
            let residual = seen.floats(case, what, 1, &x, &x.words());
            case.same(&format!("{what}: residual"), &residual, &summed[..n * width]);
            seen.floats(case, what, 0, &y, &y.words())
        }
        in_place => {
            let (block, naive) = (geometry::per_row(n, 128), in_place == "layer_norm_naive");
            let args = given![x, x.row(), w, b, EPS, width, n];
            let (launch, args) = if naive { (one_each, &args[..]) } else { (block, &args[..6]) };
            lab.values(case, what, &x, &|| run(launch, args))?
        }
    };
    Ok(rows_of(&found, width))
}
