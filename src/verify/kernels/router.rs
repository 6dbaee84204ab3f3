//! The router: this model's configuration and others, exact ties, NaN logits, padding; then the experts' order and the sum
//! over a token's experts.

use lockstep_kernels::geometry::{self, Launch, TILE};
use lockstep_reference::config::Gating;
use lockstep_reference::ndarray::{Array1, Array2, Array3};
use lockstep_reference::{Arith, RefRecipe, ops};

use super::case::{Case, check, rows_of};
use super::lab::{Lab, View, given};
use super::random::Random;
use super::slots::sorted;
use crate::device::Router;
use crate::device::cuda::RouterArg;
use crate::device::cuda::gpu::GpuError;
use crate::model::Config;
use crate::report::Check;
use crate::verify::floor::Floored;

/// Every kernel of router.cu.
pub fn run(lab: &Lab<'_>, c: &Config, out: &mut Vec<Check>) {
    let of = |experts, used, groups, groups_used, softmax, normalise| RouterArg {
        experts,
        used,
        groups,
        groups_used,
        softmax,
        normalise,
        factor: 2.5,
    };
    let configs = [
        ("this model's", RouterArg::from(&Router::from(c))),
        ("64 in 8 groups", of(64, 6, 8, 3, 0, 1)),
        ("256 in 8 groups, softmax", of(256, 8, 8, 4, 1, 0)),
        ("softmax, not normalised", of(160, 6, 1, 1, 1, 0)),
        ("7 of 7", of(7, 7, 1, 1, 0, 1)),
        ("33, not normalised", of(33, 1, 1, 1, 0, 0)),
    ];
    for (name, r) in configs {
        out.push(check(format!("route {name}"), |case| route(lab, &r, "route", case)));
        out.push(check(format!("route_naive {name}"), |case| route(lab, &r, "route_naive", case)));
        out.push(check(format!("expert_weights {name}"), |case| expert_weights(lab, &r, case)));
    }
    out.push(check("group", |case| group(lab, c, case)));
    out.push(check("combine_slots", |case| combine_slots(lab, c, case)));
}

const TOKENS: usize = 9;
const PADDING: usize = 4;

/// Logits by row: random; all equal; few different values; a NaN among them; one that outweighs all; widely spread.
fn logits(r: &RouterArg) -> Vec<f32> {
    let experts = r.experts as usize;
    let mut x = Random::of(&format!("router {experts}")).values(TOKENS * experts);
    let row = |t: usize| t * experts..(t + 1) * experts;
    x[row(1)].fill(0.25);
    x[row(2)].iter_mut().for_each(|v| *v = (*v * 2.0).round() / 2.0);
    x[row(3)][experts / 2] = f32::NAN;
    x[row(5)][experts - 1] = 60.0;
    // Where groups are chosen, f32 must not make ties of what f64 tells apart.
    let spread = if r.groups_used < r.groups { 3.0 } else { 40.0 };
    x[row(6)].iter_mut().for_each(|v| *v *= spread);
    x
}

/// Biases of which many are equal, so that equal logits tie.
fn biases(experts: usize) -> Vec<f32> {
    (0..experts).map(|e| [0.0, 0.125, 0.125, 0.0625][e % 4]).collect()
}

fn gating(r: &RouterArg) -> Gating {
    if r.softmax == 1 { Gating::Softmax } else { Gating::Sigmoid }
}

/// The best `used` of a row's scores, best first: NaN never, the lowest of equals; -1 where there is none.
fn choice(scores: &[f32], used: usize) -> Vec<i32> {
    let mut order: Vec<usize> = (0..scores.len()).filter(|e| !scores[*e].is_nan()).collect();
    order.sort_by(|a, b| (scores[*b] + 0.0).total_cmp(&(scores[*a] + 0.0)).then(a.cmp(b)));
    (0..used).map(|i| order.get(i).map_or(-1, |e| *e as i32)).collect()
}

fn route(lab: &Lab<'_>, r: &RouterArg, kernel: &'static str, case: &mut Case) -> Result<(), GpuError> {
    let (experts, used) = (r.experts as usize, r.used as usize);
    let (x, bias) = (logits(r), biases(experts));
    let truth = rows_of(&x, experts);
    let biased = Array1::from(bias.clone());
    let floor = Floored::of(RefRecipe::Strict, lab.tp, &|a| {
        let p = ops::router_probabilities(a, &truth, gating(r));
        ops::choice_scores(a, &p, &biased, r.groups as usize, r.groups_used as usize)
    });
    for n in [1, 3, TOKENS] {
        let mut positions: Vec<i32> = (0..n as i32).collect();
        if n > PADDING {
            positions[PADDING] = -1;
        }
        let area = lab.placed(View::plain(n, experts, experts + 3), &x[..n * experts])?;
        let (bias_area, position, ids) = (lab.floats(&bias)?, lab.ints(&positions)?, lab.poisoned(n * used)?);
        let scores = lab.room(View::plain(n, experts, experts + 1))?;
        let weights = lab.room(View::plain(n, used, used + 3))?;
        let naive = kernel == "route_naive";
        let shared = 4 * (r.experts + r.groups + r.groups_used.max(r.used)) as u32;
        let mut fast = given![*r, area, area.row(), bias_area, position];
        let mut slow = given![*r, area, area.row(), bias_area, position, n];
        fast.extend(given![scores, scores.row(), ids]);
        slow.extend(given![scores, scores.row(), ids, weights, weights.row()]);
        let seen = lab.thrice(&[&scores, &ids, &weights], &|| match naive {
            true => lab.launch("router", None, kernel, geometry::threads(n, 1, 1), &slow),
            false => lab.launch("router", None, kernel, Launch { shared, ..geometry::per_row(n, 256) }, &fast),
        })?;
        let what = format!("n = {n}");
        let found = seen.floats(case, &what, 0, &scores, &scores.words());
        case.judge(&format!("{what}, choice scores"), &rows_of(&found, experts), &floor);
        let own = seen.ints(case, &what, 1, &ids, &ids.words());
        // What is chosen follows from the kernel's own scores, exactly.
        let expected: Vec<i32> = (0..n)
            .flat_map(|t| match positions[t] {
                -1 => vec![-1; used],
                _ => choice(&found[t * experts..(t + 1) * experts], used),
            })
            .collect();
        case.equal(&format!("{what}, chosen experts"), &own, &expected);
        if naive {
            let found = rows_of(&seen.floats(case, &what, 2, &weights, &weights.words()), used);
            case.judge(&format!("{what}, weights"), &found, &weights_floor(lab, r, &truth, &own));
        } else {
            seen.take(case, "weights are not its own", 2, &weights, &[]);
        }
    }
    Ok(())
}

/// Weights of chosen experts; an id that names none weighs nothing.
fn weights_floor(lab: &Lab<'_>, r: &RouterArg, logits: &Array2<f64>, ids: &[i32]) -> Floored {
    let (experts, used) = (r.experts as usize, r.used as usize);
    let known = |id: &i32| usize::try_from(*id).ok().filter(|e| *e < experts).unwrap_or(experts);
    let ids: Vec<Vec<usize>> = ids.chunks(used).map(|row| row.iter().map(known).collect()).collect();
    Floored::of(RefRecipe::Strict, lab.tp, &|a: Arith| {
        let p = ops::router_probabilities(a, logits, gating(r));
        let mut padded = Array2::zeros((p.nrows(), experts + 1));
        padded.slice_mut(lockstep_reference::ndarray::s![.., ..experts]).assign(&p);
        ops::expert_weights(a, &padded, &ids, r.normalise == 1, f64::from(r.factor))
    })
}

fn expert_weights(lab: &Lab<'_>, r: &RouterArg, case: &mut Case) -> Result<(), GpuError> {
    let (experts, used) = (r.experts as usize, r.used as usize);
    let x = logits(r);
    let mut random = Random::of("weights");
    let mut ids: Vec<i32> = (0..TOKENS * used).map(|_| random.below(experts) as i32).collect();
    ids[..used].fill(-1);
    ids[used] = r.experts;
    ids[3 * used..4 * used].fill(experts as i32 / 2); // the NaN
    let floor = weights_floor(lab, r, &rows_of(&x, experts), &ids);
    let (area, id_area) = (lab.placed(View::plain(TOKENS, experts, experts + 3), &x)?, lab.ints(&ids)?);
    let y = lab.room(View::plain(TOKENS, used, used + 2))?;
    let args = given![*r, area, area.row(), id_area, y, y.row()];
    let launch = Launch { shared: 4 * r.experts as u32, ..geometry::per_row(TOKENS, 256) };
    let found = lab.values(case, "weights", &y, &|| lab.launch("router", None, "expert_weights", launch, &args))?;
    case.judge("weights", &rows_of(&found, used), &floor);
    Ok(())
}

fn group(lab: &Lab<'_>, c: &Config, case: &mut Case) -> Result<(), GpuError> {
    let shapes =
        [(1usize, 1usize, TILE), (40, 4, 5), (33 * c.experts_used, c.experts, TILE), (4096, 256, TILE), (900, 1500, 3)];
    for (slots, experts, tile) in shapes {
        let mut random = Random::of(&format!("group {slots} {experts}"));
        let ids: Vec<i32> = (0..slots)
            .map(|_| match random.below(10) {
                0 => [-1, experts as i32, i32::MIN, i32::MAX][random.below(4)],
                1..4 => (experts / 2) as i32,
                _ => random.below(experts) as i32,
            })
            .collect();
        let most = slots.div_ceil(tile) + experts.min(slots);
        let (id_area, order, tiles) = (lab.ints(&ids)?, lab.poisoned(slots)?, lab.poisoned(3 * most)?);
        let launch = Launch { grid: (1, 1, 1), block: 1024, shared: 8 * (experts as u32 + 1) };
        let args = given![id_area, slots, experts, tile, order, tiles, most];
        let seen = lab.thrice(&[&order, &tiles], &|| lab.launch("router", None, "group", launch, &args))?;
        let (expected_tiles, expected_order) = sorted(&ids, experts, tile);
        let what = format!("{slots} slots, {experts} experts, tiles of {tile}");
        let words: Vec<usize> = (0..expected_order.len()).collect();
        let found = seen.ints(case, &what, 0, &order, &words);
        case.equal(&format!("{what}: order"), &found, &expected_order);
        // Behind the last tile only the counts are written.
        let held = 3 * expected_tiles.len();
        let words: Vec<usize> = (0..held).chain((expected_tiles.len()..most).map(|b| 3 * b + 2)).collect();
        let mut expected: Vec<i32> = expected_tiles.into_iter().flatten().collect();
        expected.resize(words.len(), 0);
        let found = seen.ints(case, &what, 1, &tiles, &words);
        case.equal(&format!("{what}: tiles"), &found, &expected);
    }
    Ok(())
}

fn combine_slots(lab: &Lab<'_>, c: &Config, case: &mut Case) -> Result<(), GpuError> {
    for (n, slots, width) in [(1usize, 1usize, 33usize), (3, 8, 300), (9, c.experts_used, c.hidden)] {
        let mut random = Random::of(&format!("combine {slots} {width}"));
        let experts = 7i32;
        let id = |s: usize| if s % 5 == 3 { [-1, experts][s % 2] } else { s as i32 % experts };
        let ids: Vec<i32> = (0..n * slots).map(id).collect();
        let none = |slot: usize| !(0..experts).contains(&ids[slot]);
        let rows = random.values(n * slots * width);
        // A slot without an expert holds anything at all.
        let image: Vec<u32> = rows
            .iter()
            .enumerate()
            .map(|(i, v)| if none(i / width) { super::lab::POISON } else { v.to_bits() })
            .collect();
        let weights = random.values(n * slots);
        let weigh = |i: usize| if none(i) { 0.0 } else { f64::from(weights[i]) };
        let w = Array2::from_shape_fn((n, slots), |(t, j)| weigh(t * slots + j));
        let y = Array3::from_shape_fn((n, slots, width), |(t, j, i)| f64::from(rows[(t * slots + j) * width + i]));
        let floor = Floored::of(RefRecipe::Strict, lab.tp, &|a| ops::mix_experts(a, &w, &y));
        let (row_area, id_area) = (lab.words(image)?, lab.ints(&ids)?);
        let w_area = lab.placed(View::plain(n, slots, slots + 2), &weights)?;
        let out = lab.room(View::plain(n, width, width + 3))?;
        let launch = Launch { grid: (width.div_ceil(256) as u32, n as u32, 1), block: 256, shared: 0 };
        let args = given![row_area, id_area, experts, slots, width, w_area, w_area.row(), out, out.row()];
        let what = format!("{n} x {slots} slots x {width}");
        let found = lab.values(case, &what, &out, &|| lab.launch("router", None, "combine_slots", launch, &args))?;
        case.judge(&what, &rows_of(&found, width), &floor);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_chooses_as_the_rule_says() {
        assert_eq!(choice(&[0.0, 2.0, f32::NAN, 2.0, -0.0], 4), [1, 3, 0, 4]);
        assert_eq!(choice(&[f32::NAN, f32::NEG_INFINITY], 2), [1, -1]);
    }
}
