//! Element-wise kernels. Most are exact: one rounding, or none, that the host repeats.

use half::bf16;
use lockstep_reference::config::RopeStyle;
use lockstep_reference::ndarray::{Array2, Array3};
use lockstep_reference::{RefRecipe, ops};

use super::case::{Case, check, rows_of};
use super::lab::{Lab, View, bytes_of, given};
use super::random::Random;
use crate::device::cuda::gpu::GpuError;
use crate::device::cuda::virtual_ranks::MOST_RANKS;
use crate::device::cuda::{Ranks, Rows};
use crate::model::Config;
use crate::report::Check;
use crate::verify::floor::{Floored, ulp_f32};

/// Every kernel of rows.cu but `append`, which belongs to the cache.
pub fn run(lab: &Lab<'_>, c: &Config, out: &mut Vec<Check>) {
    let mut one = |name: &str, f: &dyn Fn(&mut Case) -> Result<(), GpuError>| out.push(check(name, f));
    one("rope_table", &|case| rope_table(lab, c, case));
    one("rope", &|case| rope(lab, c, case));
    one("scale, copy, add", &|case| moved(lab, case));
    one("widen", &|case| widen(lab, case));
    one("gather_rows", &|case| gather_rows(lab, case));
    one("swiglu", &|case| swiglu(lab, c, case));
    one("sum_ranks", &|case| sum_ranks(lab, case));
    one("fill", &|case| fill(lab, case));
    one("count_nonfinite", &|case| count_nonfinite(lab, case));
    one("to_bf16, from_bf16", &|case| halves(lab, case));
}

/// Values that no rounding may lose: signed zeros, subnormals, the largest, infinities, NaN.
fn special() -> Vec<f32> {
    let mut values = vec![0.0, -0.0, 1.0, -1.0, f32::MAX, f32::MIN, f32::MIN_POSITIVE, f32::from_bits(1), 1e-40];
    values.extend([f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 88.0, -88.0, 104.0, -104.0]);
    values
}

fn rope_table(lab: &Lab<'_>, c: &Config, case: &mut Case) -> Result<(), GpuError> {
    for (positions, width, base) in [(5000usize, c.rope, c.rope_base), (70_001, 8, 1e6), (3, 2, 10_000.0)] {
        let pairs = width / 2;
        let table = lab.poisoned(positions * width)?;
        let args = given![table, positions, width, base];
        let found = lab.values(case, "table", &table, &|| lab.each("rope_table", positions * pairs, &args))?;
        for (i, pair) in found.chunks_exact(2).enumerate() {
            let (position, i) = ((i / pairs) as f64, (i % pairs) as f64);
            let angle = position * base.powf(-2.0 * i / width as f64);
            for (v, r) in [(pair[0], angle.cos()), (pair[1], angle.sin())] {
                // One rounding to f32, and the angle's own error: a few f64 roundings of a power and a product.
                let most = ulp_f32(r) + angle * 8.0 * f64::EPSILON;
                let good = (f64::from(v) - r).abs() <= most;
                case.holds(good, || {
                    format!("position {position}, pair {i} of width {width}: expected {r:e}, found {v:e}")
                });
            }
        }
    }
    Ok(())
}

fn rope(lab: &Lab<'_>, c: &Config, case: &mut Case) -> Result<(), GpuError> {
    let positions = [0i32, 1, -1, 4099, 17, 3000, -1, 2, 5];
    for (heads, width, gap) in [(1usize, c.rope, 0usize), (c.heads, c.rope, c.nope), (3, 6, 5)] {
        for n in [1, 3, positions.len()] {
            let view = View { start: gap, ..View::groups(n, heads, width, gap, 7) };
            let x = Random::of(&format!("rope {heads} {width}")).values(n * heads * width);
            let known: Vec<usize> = positions[..n].iter().map(|p| (*p).max(0) as usize).collect();
            let truth = Array3::from_shape_fn((n, heads, width), |(t, h, i)| f64::from(x[(t * heads + h) * width + i]));
            let floor = Floored::of(RefRecipe::Strict, lab.tp, &|a| {
                let y = ops::rope(a, &truth, 0..width, &known, c.rope_base, RopeStyle::Interleaved);
                let values: Vec<f64> = y.iter().copied().collect();
                Array2::from_shape_fn((n * heads, width), |(i, j)| values[i * width + j])
            });
            let table: Vec<f32> = (0..5000 * width / 2)
                .flat_map(|i| {
                    let angle =
                        (i / (width / 2)) as f64 * c.rope_base.powf(-2.0 * (i % (width / 2)) as f64 / width as f64);
                    [angle.cos() as f32, angle.sin() as f32]
                })
                .collect();
            let (table, area) = (lab.floats(&table)?, lab.placed(view, &x)?);
            let step = lab.step(&positions[..n], &vec![0; n], &[0], 1, 32)?;
            let args = given![area, area.row(), gap, view.group, width, heads, table, step.tokens, n];
            let what = format!("{n} x {heads} heads of {width}");
            let found = lab.values(case, &what, &area, &|| lab.each("rope", n * heads * width / 2, &args))?;
            // Padding stays as it is; the rest turns.
            for t in (0..n).filter(|t| positions[*t] < 0) {
                let own = t * heads * width..(t + 1) * heads * width;
                case.same(&format!("{what}, padding"), &found[own.clone()], &x[own]);
            }
            let mut turned = rows_of(&found, width);
            for (i, mut row) in turned.rows_mut().into_iter().enumerate() {
                if positions[i / heads] < 0 {
                    row.assign(&floor.exact.row(i)); // judged above
                }
            }
            case.judge(&what, &turned, &floor);
        }
    }
    Ok(())
}

fn moved(lab: &Lab<'_>, case: &mut Case) -> Result<(), GpuError> {
    for (n, width) in [(1usize, 1usize), (3, 37), (9, 257), (70, 20_000)] {
        let mut x = Random::of("moved").values(n * width);
        x.iter_mut().zip(special()).for_each(|(to, v)| *to = v);
        let y = Random::of("other").values(n * width);
        let (from, to) = (View::plain(n, width, width + 3), View::plain(n, width, width + 1));
        let (x_area, y_area, z) = (lab.placed(from, &x)?, lab.placed(to, &y)?, lab.room(to)?);
        let factor = 0.3f32;
        let scaled: Vec<f32> = x.iter().map(|v| v * factor).collect();
        let added: Vec<f32> = x.iter().zip(&y).map(|(a, b)| a + b).collect();
        let copy = given![x_area, x_area.row(), width, z, z.row(), n];
        let scale = given![x_area, x_area.row(), width, factor, n];
        // From where `scale` left x: put back first, as every repeat does.
        let add = given![x_area, x_area.row(), y_area, y_area.row(), width, n];
        let what = format!("{n} x {width}");
        for (kernel, args, out, expected) in
            [("copy", copy, &z, &x), ("scale", scale, &x_area, &scaled), ("add", add, &x_area, &added)]
        {
            let found = lab.values(case, &what, out, &|| lab.each(kernel, x.len(), &args))?;
            case.same(&format!("{kernel} {what}"), &found, expected);
        }
    }
    Ok(())
}

fn widen(lab: &Lab<'_>, case: &mut Case) -> Result<(), GpuError> {
    for (n, groups, width, from, wide) in
        [(1usize, 1usize, 5usize, 0usize, 5usize), (3, 4, 37, 11, 64), (9, 2, 200, 56, 256)]
    {
        let view = View { start: 2, ..View::groups(n, groups, width, 3, 4) };
        let x = Random::of("widen").values(n * groups * width);
        let (x_area, y) = (lab.placed(view, &x)?, lab.poisoned(n * groups * wide)?);
        let Rows { at, row, group } = x_area.rows();
        let args = given![at, row, group, groups, width, from, y, wide, n];
        let found = lab.values(case, "widen", &y, &|| lab.each("widen", n * groups * wide, &args))?;
        let mut expected = vec![0.0; n * groups * wide];
        for (to, x) in expected.chunks_exact_mut(wide).zip(x.chunks_exact(width)) {
            to[from..from + width].copy_from_slice(x);
        }
        case.same(&format!("{n} x {groups} x {width} in {wide}"), &found, &expected);
    }
    Ok(())
}

fn gather_rows(lab: &Lab<'_>, case: &mut Case) -> Result<(), GpuError> {
    let (rows, width) = (9usize, 133usize);
    let wanted = [8i32, 0, -1, 3, 3, -1, 7];
    let x = Random::of("take").values(rows * width);
    let (x_area, ids) = (lab.placed(View::plain(rows, width, width + 2), &x)?, lab.ints(&wanted)?);
    let y = lab.room(View::plain(wanted.len(), width, width + 1))?;
    let args = given![x_area, x_area.row(), width, ids, y, y.row(), wanted.len()];
    let found = lab.values(case, "rows", &y, &|| lab.each("gather_rows", wanted.len() * width, &args))?;
    let expected: Vec<f32> = wanted
        .iter()
        .flat_map(|r| usize::try_from(*r).map_or(vec![0.0; width], |r| x[r * width..(r + 1) * width].to_vec()))
        .collect();
    case.same("rows", &found, &expected);
    Ok(())
}

fn swiglu(lab: &Lab<'_>, c: &Config, case: &mut Case) -> Result<(), GpuError> {
    let shapes = [(1usize, 1usize, c.shared_ffn().max(32)), (9, 1, 333), (3, 5, c.expert_ffn / lab.tp), (2, 3, 40)];
    for (n, groups, width) in shapes {
        let view = View::groups(n, groups, 2 * width, 3, 1);
        let mut x = Random::of("swiglu").values(n * groups * 2 * width);
        x.iter_mut().enumerate().for_each(|(i, v)| *v *= if i % 7 == 0 { 30.0 } else { 2.0 });
        // exp overflows and vanishes; what is left is 0 or the gate itself.
        x.iter_mut().step_by(2 * width).for_each(|v| *v = -200.0);
        x.iter_mut().skip(1).step_by(2 * width).for_each(|v| *v = 200.0);
        let pairs = x.chunks_exact(2 * width).map(|group| group.split_at(width));
        let pairs: Vec<(f64, f64)> =
            pairs.flat_map(|(g, u)| g.iter().zip(u)).map(|(g, u)| (f64::from(*g), f64::from(*u))).collect();
        let floor = Floored::of(RefRecipe::Strict, lab.tp, &|a| {
            Array2::from_shape_fn((n * groups, width), |(i, j)| {
                let (g, u) = pairs[i * width + j];
                a.round(a.round(g * ops::sigmoid(a, g)) * u)
            })
        });
        let (area, y) = (lab.placed(view, &x)?, lab.room(View::plain(n, groups * width, groups * width + 3))?);
        let Rows { at, row, group } = area.rows();
        let args = given![at, row, group, groups, width, y, y.row(), n];
        let what = format!("{n} x {groups} x {width}");
        let found = lab.values(case, &what, &y, &|| lab.each("swiglu", n * groups * width, &args))?;
        let found = rows_of(&found, width);
        case.judge(&what, &found, &floor);
        // Each value by itself, too: a large one must not hide a small one. exp, sum, quotient and product cost a few ulp;
        // where exp overflows, the gate is taken as shut, which loses less than its size times the smallest number.
        let least = |g: f64, u: f64| (1.0 + (g * u).abs()) * f64::from(f32::MIN_POSITIVE);
        let far = found.iter().zip(&floor.exact).zip(&pairs);
        let far = far.filter(|((v, r), (g, u))| (*v - *r).abs() > 8.0 * ulp_f32(**r) + least(*g, *u)).count();
        case.holds(far == 0, || format!("{what}: {far} values are more than 8 ulp from the truth"));
    }
    Ok(())
}

fn sum_ranks(lab: &Lab<'_>, case: &mut Case) -> Result<(), GpuError> {
    for (tp, n, width) in [(1usize, 3usize, 37usize), (2, 9, 64), (8, 1, 3000), (MOST_RANKS, 2, 33)] {
        let view = View::plain(n, width, width + 3);
        let values: Vec<Vec<f32>> = (0..tp).map(|r| Random::of(&format!("rank {r}")).values(n * width)).collect();
        let areas = values.iter().map(|v| lab.placed(view, v)).collect::<Result<Vec<_>, _>>()?;
        let mut ranks = Ranks { at: [0; MOST_RANKS] };
        ranks.at.iter_mut().zip(&areas).for_each(|(to, area)| *to = area.at(0));
        let (args, outs) = (given![ranks, tp, view.row as i64, width, n], areas.iter().collect::<Vec<_>>());
        let seen = lab.thrice(&outs, &|| lab.each("sum_ranks", n * width, &args))?;
        let expected: Vec<f32> = (0..n * width).map(|i| values.iter().fold(0.0f32, |sum, v| sum + v[i])).collect();
        for (r, area) in areas.iter().enumerate() {
            let found = seen.floats(case, &format!("rank {r}"), r, area, &view.words());
            case.same(&format!("rank {r} of {tp}"), &found, &expected);
        }
    }
    Ok(())
}

fn fill(lab: &Lab<'_>, case: &mut Case) -> Result<(), GpuError> {
    // The last count is more than one value per thread of the largest grid.
    for count in [1usize, 255, 257, 4096 * 256 + 3] {
        let area = lab.room(View { start: 2, ..View::plain(1, count, count + 3) })?;
        let args = given![area.at(2), count as i64, -1.5f32];
        let found = lab.values(case, "fill", &area, &|| lab.each("fill", count, &args))?;
        case.same(&format!("{count} values"), &found, &vec![-1.5; count]);
    }
    Ok(())
}

fn count_nonfinite(lab: &Lab<'_>, case: &mut Case) -> Result<(), GpuError> {
    for (n, width, wrong) in [(1usize, 1usize, 0usize), (1, 1, 1), (3, 1000, 0), (9, 333, 41)] {
        let mut x = Random::of("count").values(n * width);
        let places = Random::of("places").shuffled(n * width);
        for (i, place) in places.into_iter().take(wrong).enumerate() {
            x[place] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][i % 3];
        }
        // Poison, which is no number, lies between the rows.
        let (area, found) = (lab.placed(View::plain(n, width, width + 3), &x)?, lab.ints(&[7])?);
        let args = given![area, area.row(), width, n, found];
        let seen = lab.thrice(&[&found], &|| lab.each("count_nonfinite", n * width, &args))?;
        let count = seen.take(case, "count", 0, &found, &[0]);
        case.equal(&format!("{n} x {width}"), &count, &[7 + wrong as u32]);
    }
    Ok(())
}

fn halves(lab: &Lab<'_>, case: &mut Case) -> Result<(), GpuError> {
    // Numbers of every size, the special ones, and exact ties between two neighbours.
    let mut x: Vec<f32> = (0..5000).map(|i| f32::from_bits(Random::of(&format!("half {i}")).bits() as u32)).collect();
    x.extend(special());
    x.extend((0..64u32).map(|i| f32::from_bits(0x3f80_8000 + (i << 15))));
    let expected: Vec<bf16> = x.iter().map(|v| bf16::from_f32(*v)).collect();
    let (from, to) = (lab.floats(&x)?, lab.poisoned(x.len().div_ceil(2))?);
    let args = given![from, to, x.len() as i64];
    let seen = lab.thrice(&[&to], &|| lab.each("to_bf16", x.len(), &args))?;
    let words: Vec<usize> = (0..x.len() / 2).collect();
    seen.take(case, "bf16", 0, &to, &words);
    let wide = |bits: u16| bf16::from_bits(bits).to_f32();
    let found: Vec<f32> =
        bytes_of(seen.words(0)).chunks_exact(2).take(x.len()).map(|b| wide(u16::from_le_bytes([b[0], b[1]]))).collect();
    let expected_wide: Vec<f32> = expected.iter().map(|h| h.to_f32()).collect();
    case.same("to_bf16", &found, &expected_wide);
    let bytes: Vec<u8> = expected.iter().flat_map(|h| h.to_le_bytes()).collect();
    let (halves, back) = (lab.bytes(&bytes)?, lab.poisoned(x.len())?);
    let args = given![halves, back, x.len() as i64];
    let found = lab.values(case, "f32", &back, &|| lab.each("from_bf16", x.len(), &args))?;
    case.same("from_bf16", &found, &expected_wide);
    Ok(())
}
