//! Products with the matrices of chosen experts: slot by slot, sorted by expert, and gate, up and SwiGLU in one. Ids are
//! hostile: none, behind the last expert, the same one many times.

use lockstep_kernels::geometry::{self, Launch, TILE, UNIT_COLS, UNIT_ROWS};
use lockstep_reference::ndarray::{Array2, Axis};
use lockstep_reference::{Arith, ops};

use super::case::{Case, check, rows_of};
use super::lab::{Area, Lab, given};
use super::products::{Floors, Product, Run, Shape, lay, tile_launch};
use super::random::Random;
use super::weights::Stored;
use crate::device::cuda::gpu::GpuError;
use crate::device::cuda::{Rows, Work};
use crate::report::Check;

/// Slots of a token.
const SLOTS: usize = 5;
/// Most tokens: enough for an expert to fill more than one tile.
const TOKENS: usize = 40;
/// Rows of W that the host multiplies.
const JUDGED: usize = 48;
/// The kernels of gate and up in tiles, which are one for each operand rounding.
const GATE_UP: &str = "tile_gate_up";
/// Fast kernels and the numbers of tokens that they take.
const KERNELS: [(&str, &[usize]); 2] = [("gemv_slots", &[1, 3, 8]), ("gemm_slots", &[9, TOKENS])];

/// Ids of every slot. Three of four go to expert 0, so that it has more slots than a tile holds.
fn hostile(experts: usize, tokens: usize) -> Vec<i32> {
    let mut random = Random::of("ids");
    let mut id = |slot: usize| match random.below(8) {
        0 if slot.is_multiple_of(2) => -1,
        0 => experts as i32,
        1 => random.below(experts) as i32,
        2 => i32::MIN,
        3 => i32::MAX,
        _ => (slot % 7 / 6 * (experts - 1)) as i32,
    };
    (0..tokens * SLOTS).map(&mut id).collect()
}

fn expert(id: i32, experts: usize) -> Option<usize> {
    usize::try_from(id).ok().filter(|e| *e < experts)
}

/// Tiles as `gemm_slots` takes them: (expert, first place, slots) and the order of the slots.
pub fn sorted(ids: &[i32], experts: usize, tile: usize) -> (Vec<[i32; 3]>, Vec<i32>) {
    let (mut tiles, mut order) = (Vec::new(), Vec::new());
    for e in 0..experts {
        let own: Vec<i32> = (0..ids.len()).filter(|s| ids[*s] == e as i32).map(|s| s as i32).collect();
        for part in own.chunks(tile) {
            tiles.push([e as i32, order.len() as i32, part.len() as i32]);
            order.extend(part);
        }
    }
    (tiles, order)
}

/// The slot kernels on a shape, whose stack is the experts.
pub fn run(lab: &Lab<'_>, shape: &Shape, out: &mut Vec<Check>) {
    let name =
        |kernel: &str| format!("{kernel}<{}> {} experts of {} x {}", shape.format, shape.stack, shape.rows, shape.cols);
    Product::check(|| product(lab, shape), &name, ("slots_naive", TOKENS), &KERNELS, out);
    out.push(check(name("gemv_gate_up"), |case| gate_up(lab, shape, "gemv_gate_up", case)));
    if shape.format.tiled {
        out.push(check(name(GATE_UP), |case| gate_up(lab, shape, GATE_UP, case)));
        out.push(check(name("tile_down"), |case| down(lab, shape, case)));
    }
}

/// Rows of x per slot; rows of the result that a kernel leaves out are zeros here.
fn product<'a>(lab: &'a Lab<'a>, shape: &'a Shape) -> Result<Product<'a>, GpuError> {
    let Shape { format, stack, rows, cols, odd, .. } = *shape;
    let name = format!("slots {} {}", format.ty, shape.name());
    let w = Stored::random(lab, &name, format, [stack, rows, cols])?;
    let all_ids = hostile(stack, TOKENS);
    let x = Random::of(&format!("x {name}")).values(TOKENS * SLOTS * cols);
    let judged = w.sampled(JUDGED);
    let values: Vec<Array2<f32>> = (0..stack).map(|e| w.values(e, &judged)).collect();
    let floors = Floors::new(lab.tp, &rows_of(&x, cols), &judged, &|a, x| {
        by_expert(&all_ids, stack, judged.len(), &|e, slots| a.weigh(x.select(Axis(0), slots).view(), values[e].view()))
    });
    let has_expert: Vec<bool> = all_ids.iter().map(|id| expert(*id, stack).is_some()).collect();
    let used = has_expert.clone();
    let run: Box<Run<'a>> = Box::new(move |case, kernel, n, recipe, x| {
        let ids = &all_ids[..n * SLOTS];
        let (to, area) = (lay(n, SLOTS, rows, odd), lab.placed(lay(n, SLOTS, cols, odd), &x[..n * SLOTS * cols])?);
        let y = lab.room(to)?;
        let what = format!("n = {n}, recipe {recipe}");
        let (tiles, order) = sorted(ids, stack, TILE);
        let most = geometry::most_tiles(ids.len(), stack);
        // Tiles behind the last hold no slots, whatever else they hold.
        let mut padded: Vec<i32> = tiles.iter().flatten().copied().collect();
        padded.resize(3 * most, i32::MAX);
        (tiles.len()..most).for_each(|b| padded[3 * b + 2] = 0);
        let (tile_area, order_area, id_area) = (lab.ints(&padded)?, lab.ints(&order)?, lab.ints(ids)?);
        let mut args = match kernel {
            "gemm_slots" => given![w.matrix(), tile_area, order_area, SLOTS],
            _ => given![w.matrix(), stack, id_area, SLOTS],
        };
        args.extend(given![area.rows(), y.rows(), recipe]);
        let launch = match kernel {
            "gemm_slots" => Launch { grid: (rows.div_ceil(TILE) as u32, most as u32, 1), block: 256, shared: 0 },
            "slots_naive" => geometry::threads(rows, ids.len(), 1),
            _ => geometry::gemv(rows, ids.len()),
        };
        let seen = lab.thrice(&[&y], &|| lab.launch("matmul", Some(format), kernel, launch, &args))?;
        // Sorted slots without an expert are left out: their places keep what they had.
        let wanted = |s: usize| kernel != "gemm_slots" || has_expert[s];
        let words = to.words();
        let slots = words.chunks(rows).enumerate().filter(|(s, _)| wanted(*s));
        let found = seen.floats(case, &what, 0, &y, &slots.flat_map(|(_, w)| w.iter().copied()).collect::<Vec<_>>());
        let (mut rest, mut values) = (found.chunks(rows).peekable(), Vec::with_capacity(words.len()));
        for s in 0..ids.len() {
            match rest.next_if(|_| wanted(s)) {
                Some(row) => values.extend_from_slice(row),
                None => values.extend(vec![0.0; rows]),
            }
        }
        let all = rows_of(&values, rows);
        no_idle(case, &what, &all, ids, stack);
        Ok(all)
    });
    Ok(Product { shape, x, groups: SLOTS, used: Box::new(move |s| used[s]), floors, run })
}

/// Slots without an expert are zero.
fn no_idle(case: &mut Case, what: &str, all: &Array2<f64>, ids: &[i32], experts: usize) {
    let mut slots = all.rows().into_iter().zip(ids);
    let idle = slots.find(|(y, id)| expert(**id, experts).is_none() && y.iter().any(|v| *v != 0.0));
    case.holds(idle.is_none(), || format!("{what}: a slot without an expert is not zero"));
}

/// A result per slot, computed expert by expert; zeros for slots without one.
fn by_expert(ids: &[i32], experts: usize, width: usize, of: &dyn Fn(usize, &[usize]) -> Array2<f64>) -> Array2<f64> {
    let mut y = Array2::zeros((ids.len(), width));
    for e in 0..experts {
        let slots: Vec<usize> = (0..ids.len()).filter(|s| ids[*s] == e as i32).collect();
        for (row, slot) in of(e, &slots).rows().into_iter().zip(&slots) {
            y.row_mut(*slot).assign(&row);
        }
    }
    y
}

/// Gate, up and SwiGLU in one kernel; a token's slots share its x.
fn gate_up(lab: &Lab<'_>, shape: &Shape, kernel: &'static str, case: &mut Case) -> Result<(), GpuError> {
    const MOST: usize = 8;
    let Shape { format, stack, rows, cols, odd, .. } = *shape;
    let name = format!("gate {} {}", format.ty, shape.name());
    let gate = Stored::random(lab, &name, format, [stack, rows, cols])?;
    let up = Stored::random(lab, &format!("up {name}"), format, [stack, rows, cols])?;
    let ids = hostile(stack, MOST);
    // Scaled so that the gate is neither shut nor a straight line.
    let judged = gate.sampled(JUDGED);
    let x: Vec<f32> = Random::of(&format!("x {name}")).values(MOST * cols);
    let size = (cols as f32).sqrt();
    let x: Vec<f32> = x.into_iter().map(|v| v * 4.0 / size).collect();
    let values = |w: &Stored| -> Vec<Array2<f32>> { (0..stack).map(|e| w.values(e, &judged)).collect() };
    let (gates, ups) = (values(&gate), values(&up));
    let op = |a: Arith, x: &Array2<f64>| {
        by_expert(&ids, stack, judged.len(), &|e, slots| {
            let tokens: Vec<usize> = slots.iter().map(|s| s / SLOTS).collect();
            ops::swiglu(a, &x.select(Axis(0), &tokens), &gates[e], &ups[e])
        })
    };
    let floors = Floors::new(lab.tp, &rows_of(&x, cols), &judged, &op);
    for n in if kernel == GATE_UP { vec![1] } else { vec![1, 2, MOST] } {
        for recipe in [0i32, 1] {
            let area = lab.placed(lay(n, 1, cols, odd), &x[..n * cols])?;
            let (y, id_area) = (lab.room(lay(n, SLOTS, rows, odd))?, lab.ints(&ids[..n * SLOTS])?);
            let xs = Rows { group: 0, ..area.rows() };
            let what = format!("n = {n}, recipe {recipe}");
            let args = given![gate.matrix(), up.matrix(), stack, id_area, SLOTS, xs, y.rows(), recipe];
            let go = || {
                if kernel == GATE_UP {
                    let kernel = ["tile_gate_up_strict", "tile_gate_up_fast"][recipe as usize];
                    let (at, tiles) = ([gate.tile(0), up.tile(0), 0, 0], rows / UNIT_ROWS);
                    let work = Work { at, y_group: y.rows().group, ..slots_of(&gate, &id_area, xs, y.rows()) };
                    let launch = tile_launch(lab, &gate, cols / UNIT_COLS, SLOTS * tiles, recipe)?;
                    return lab.launch("tiles", Some(format), kernel, launch, &[Box::new(work)]);
                }
                lab.launch("matmul", Some(format), "gemv_gate_up", geometry::gemv(rows, n * SLOTS), &args)
            };
            let all = rows_of(&lab.values(case, &what, &y, &go)?, rows);
            floors.judge(case, n, recipe, &all);
            no_idle(case, &what, &all, &ids, stack);
        }
    }
    Ok(())
}

/// What the kernels of chosen experts in tiles are made of, of the first token's slots.
fn slots_of(w: &Stored, ids: &Area, x: Rows, y: Rows) -> Work {
    let tiles = [(w.rows / UNIT_ROWS) as i32, 0, 0, 0];
    let (units, stack) = ((w.cols / UNIT_COLS) as i32, w.stack as i32);
    let at = [w.tile(0), 0, 0, 0];
    Work { at, tiles, units, stack, slots: SLOTS as i32, x: x.at, ids: ids.at(0), y: y.at, ..Work::default() }
}

/// Down projections of one token's slots, weighted and added in one kernel: against the reference, with a slot's NaN that
/// is nobody's, and once without any expert.
fn down(lab: &Lab<'_>, shape: &Shape, case: &mut Case) -> Result<(), GpuError> {
    let Shape { format, stack, rows, cols, .. } = *shape;
    let name = format!("down {} {}", format.ty, shape.name());
    let w = Stored::random(lab, &name, format, [stack, rows, cols])?;
    let ids = [stack as i32 - 1, -1, 0, i32::MAX, 0];
    let mut random = Random::of(&format!("x {name}"));
    let (x, weights) = (random.values(SLOTS * cols), random.values(SLOTS));
    let judged = w.sampled(JUDGED);
    let values: Vec<Array2<f32>> = (0..stack).map(|e| w.values(e, &judged)).collect();
    let op = |a: Arith, x: &Array2<f64>| {
        let by_slot = by_expert(&ids, stack, judged.len(), &|e, slots| {
            a.weigh(x.select(Axis(0), slots).view(), values[e].view())
        });
        let weights = Array2::from_shape_fn((1, SLOTS), |(_, s)| f64::from(weights[s]));
        weights.dot(&by_slot)
    };
    let floors = Floors::new(lab.tp, &rows_of(&x, cols), &judged, &op);
    let by = lab.floats(&weights)?;
    let run = |case: &mut Case, what: &str, ids: &[i32], x: &[f32], recipe: i32| -> Result<Array2<f64>, GpuError> {
        let (area, id_area, y) = (lab.floats(x)?, lab.ints(ids)?, lab.room(lay(1, 1, rows, false))?);
        let work = Work { weights: by.at(0), ..slots_of(&w, &id_area, area.rows(), y.rows()) };
        let launch = tile_launch(lab, &w, SLOTS * cols / UNIT_COLS, rows / UNIT_ROWS, recipe)?;
        let kernel = ["tile_down_strict", "tile_down_fast"][recipe as usize];
        let go = || lab.launch("tiles", Some(format), kernel, launch, &[Box::new(work)]);
        Ok(rows_of(&lab.values(case, what, &y, &go)?, rows))
    };
    for recipe in [0i32, 1] {
        let clean = run(case, &format!("recipe {recipe}"), &ids, &x, recipe)?;
        floors.judge(case, 1, recipe, &clean);
        let mut planted = x.clone();
        planted[cols] = f32::NAN; // the second slot has no expert
        let found = run(case, &format!("recipe {recipe}, NaN in an idle slot"), &ids, &planted, recipe)?;
        case.holds(found == clean, || format!("recipe {recipe}: a slot without an expert changes the sum"));
        let none = run(case, &format!("recipe {recipe}, no expert"), &[-1; SLOTS], &x, recipe)?;
        case.holds(none.iter().all(|v| *v == 0.0), || format!("recipe {recipe}: without experts the sum is not zero"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_ids_fill_more_than_a_tile_and_hit_nobody() {
        for experts in [2, 3, 4, 64] {
            let ids = hostile(experts, TOKENS);
            assert!(ids.iter().filter(|id| **id == 0).count() > TILE, "{experts}");
            assert!(ids.contains(&-1) && ids.contains(&(experts as i32)) && ids.contains(&i32::MIN));
            let (tiles, order) = sorted(&ids, experts, TILE);
            assert_eq!(order.len(), ids.iter().filter(|id| expert(**id, experts).is_some()).count());
            assert_eq!(tiles.iter().map(|t| t[2] as usize).sum::<usize>(), order.len());
            assert!(tiles.len() <= geometry::most_tiles(ids.len(), experts));
        }
    }
}
