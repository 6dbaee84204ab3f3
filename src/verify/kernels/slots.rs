//! Products with the matrices of chosen experts: slot by slot, sorted by expert, and gate, up and SwiGLU in one. Ids are
//! hostile: none, behind the last expert, the same one many times.

use lockstep_kernels::geometry::{self, Launch, TILE};
use lockstep_reference::ndarray::{Array2, Axis};
use lockstep_reference::{Arith, ops};

use super::case::{Case, check, rows_of};
use super::lab::{Lab, View};
use super::products::{Floors, Shape};
use super::random::Random;
use super::weights::Stored;
use crate::device::cuda::Rows;
use crate::device::cuda::gpu::{Arg, GpuError};
use crate::report::Check;

/// Slots of a token.
const SLOTS: usize = 5;
/// Most tokens: enough for an expert to fill more than one tile.
const TOKENS: usize = 40;
/// Rows of W that the host multiplies.
const JUDGED: usize = 48;

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

/// One shape: a stack of experts and what the reference makes of the slots.
struct Bench<'a> {
    lab: &'a Lab<'a>,
    shape: &'a Shape,
    w: Stored,
    ids: Vec<i32>,
    x: Vec<f32>,
    floors: Floors,
}

/// The slot kernels on a shape, whose stack is the experts.
pub fn run(lab: &Lab<'_>, shape: &Shape, out: &mut Vec<Check>) {
    let name =
        |kernel: &str| format!("{kernel}<{}> {} experts of {} x {}", shape.ty, shape.stack, shape.rows, shape.cols);
    let mut made = None;
    let mut naive = Vec::new();
    out.push(check(name("slots_naive"), |case| {
        let bench = Bench::new(lab, shape)?;
        for recipe in [0, 1] {
            let all = bench.launch(case, "slots_naive", TOKENS, recipe, &bench.x)?;
            bench.floors.judge(case, TOKENS, recipe, &all);
            naive.push(all);
        }
        made = Some(bench);
        Ok(())
    }));
    if let Some(bench) = made {
        for (kernel, counts) in [("gemv_slots", &[1, 3, 8][..]), ("gemm_slots", &[9, TOKENS][..])] {
            out.push(check(name(kernel), |case| {
                for n in counts {
                    for recipe in [0, 1] {
                        let all = bench.launch(case, kernel, *n, recipe, &bench.x)?;
                        bench.floors.judge(case, *n, recipe, &all);
                        bench.floors.judge_twins(case, *n, recipe, &all, &naive[recipe as usize]);
                    }
                }
                bench.planted(case, kernel, counts[counts.len() - 1])
            }));
        }
    }
    out.push(check(name("gemv_gate_up"), |case| gate_up(lab, shape, case)));
}

impl<'a> Bench<'a> {
    fn new(lab: &'a Lab<'a>, shape: &'a Shape) -> Result<Self, GpuError> {
        let name = format!("slots {} {}", shape.ty, shape.name());
        let w = Stored::random(lab, &name, shape.ty, [shape.stack, shape.rows, shape.cols])?;
        let ids = hostile(shape.stack, TOKENS);
        let x = Random::of(&format!("x {name}")).values(TOKENS * SLOTS * shape.cols);
        let judged = w.sampled(JUDGED);
        let values: Vec<Array2<f32>> = (0..shape.stack).map(|e| w.values(e, &judged)).collect();
        let floors = Floors::new(lab.tp, &rows_of(&x, shape.cols), &judged, &|a, x| {
            by_expert(&ids, shape.stack, judged.len(), &|e, slots| {
                a.weigh(x.select(Axis(0), slots).view(), values[e].view())
            })
        });
        Ok(Bench { lab, shape, w, ids, x, floors })
    }

    /// All values of `[n][slots][rows]`, a row per slot; rows that the kernel leaves out are zeros here.
    fn launch(
        &self,
        case: &mut Case,
        kernel: &'static str,
        n: usize,
        recipe: i32,
        x: &[f32],
    ) -> Result<Array2<f64>, GpuError> {
        let Shape { ty, stack, rows, cols, odd, .. } = *self.shape;
        let (lab, slots) = (self.lab, SLOTS as i32);
        let (from, to) = (lay(n, SLOTS, cols, odd), lay(n, SLOTS, rows, odd));
        let (area, y) = (lab.placed(from, &x[..n * SLOTS * cols])?, lab.room(to)?);
        let (xs, ys) = (area.rows(), y.rows());
        let (matrix, experts, ids) = (self.w.matrix(), stack as i32, &self.ids[..n * SLOTS]);
        let what = format!("n = {n}, recipe {recipe}");
        let (tiles, order) = sorted(ids, stack, TILE);
        let most = geometry::most_tiles(ids.len(), stack);
        // Tiles behind the last hold no slots, whatever else they hold.
        let mut padded: Vec<i32> = tiles.iter().flatten().copied().collect();
        padded.resize(3 * most, i32::MAX);
        (tiles.len()..most).for_each(|b| padded[3 * b + 2] = 0);
        let (tile_area, order_area, id_area) = (lab.ints(&padded)?, lab.ints(&order)?, lab.ints(ids)?);
        let (tiles_at, order_at, ids_at) = (tile_area.at(0), order_area.at(0), id_area.at(0));
        let sorted: [&dyn Arg; 7] = [&matrix, &tiles_at, &order_at, &slots, &xs, &ys, &recipe];
        let single: [&dyn Arg; 7] = [&matrix, &experts, &ids_at, &slots, &xs, &ys, &recipe];
        let (launch, args) = match kernel {
            "gemm_slots" => {
                (Launch { grid: (rows.div_ceil(TILE) as u32, most as u32, 1), block: 256, shared: 0 }, &sorted)
            }
            "slots_naive" => (geometry::threads(rows, ids.len(), 1), &single),
            _ => (geometry::gemv(rows, ids.len()), &single),
        };
        let seen = lab.thrice(&[&y], &|| lab.launch("matmul", Some(ty), kernel, launch, args))?;
        // Sorted slots without an expert are left out: their places keep what they had.
        let all = to.words();
        let wanted = |s: usize| kernel != "gemm_slots" || expert(ids[s], stack).is_some();
        let words: Vec<usize> =
            all.chunks(rows).enumerate().filter(|(s, _)| wanted(*s)).flat_map(|(_, w)| w.iter().copied()).collect();
        let found = seen.floats(case, &what, 0, &y, &words);
        let idle = |s: usize| expert(ids[s], stack).is_none();
        let zero = words.iter().zip(&found).all(|(word, v)| *v == 0.0 || !idle(slot_of(&to, *word)));
        case.holds(zero, || format!("{what}: a slot without an expert is not zero"));
        let mut rest = found.chunks(rows);
        let mut values = Vec::with_capacity(all.len());
        for s in 0..ids.len() {
            match wanted(s).then(|| rest.next()).flatten() {
                Some(row) => values.extend_from_slice(row),
                None => values.extend(vec![0.0; rows]),
            }
        }
        Ok(rows_of(&values, rows))
    }

    /// A NaN in the x of a slot with an expert and one in a slot without: only the former's output is lost.
    fn planted(&self, case: &mut Case, kernel: &'static str, n: usize) -> Result<(), GpuError> {
        let (stack, cols) = (self.shape.stack, self.shape.cols);
        let ids = &self.ids[..n * SLOTS];
        let with = (0..ids.len()).rev().find(|s| expert(ids[*s], stack).is_some());
        let without = (0..ids.len()).find(|s| expert(ids[*s], stack).is_none());
        let mut x = self.x.clone();
        for s in with.iter().chain(&without) {
            x[s * cols + cols / 2] = f32::NAN;
        }
        let clean = self.launch(case, kernel, n, 0, &self.x)?;
        let found = self.launch(case, kernel, n, 0, &x)?;
        for (s, (found, clean)) in found.rows().into_iter().zip(clean.rows()).enumerate() {
            let good = if Some(s) == with { found.iter().all(|v| v.is_nan()) } else { found == clean };
            case.holds(good, || {
                format!("n = {n} with NaN in slots {with:?} and {without:?}: slot {s} found {found:.3}")
            });
        }
        Ok(())
    }
}

/// `[n][groups][width]` with a gap behind every group and row.
fn lay(n: usize, groups: usize, width: usize, odd: bool) -> View {
    let group = if odd { width + 3 } else { width.next_multiple_of(4) + 4 };
    View { start: 0, rows: n, row: groups * group + if odd { 2 } else { 8 }, groups, group, width }
}

/// The slot that a word belongs to.
fn slot_of(view: &View, word: usize) -> usize {
    word / view.row * view.groups + word % view.row / view.group
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
fn gate_up(lab: &Lab<'_>, shape: &Shape, case: &mut Case) -> Result<(), GpuError> {
    const MOST: usize = 8;
    let Shape { ty, stack, rows, cols, odd, .. } = *shape;
    let name = format!("gate {} {}", ty, shape.name());
    let gate = Stored::random(lab, &name, ty, [stack, rows, cols])?;
    let up = Stored::random(lab, &format!("up {name}"), ty, [stack, rows, cols])?;
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
    for n in [1, 2, MOST] {
        for recipe in [0i32, 1] {
            let area = lab.placed(lay(n, 1, cols, odd), &x[..n * cols])?;
            let (y, id_area) = (lab.room(lay(n, SLOTS, rows, odd))?, lab.ints(&ids[..n * SLOTS])?);
            let (xs, ys) = (Rows { group: 0, ..area.rows() }, y.rows());
            let (g, u, experts, slots, ids_at) =
                (gate.matrix(), up.matrix(), stack as i32, SLOTS as i32, id_area.at(0));
            let args: [&dyn Arg; 8] = [&g, &u, &experts, &ids_at, &slots, &xs, &ys, &recipe];
            let launch = geometry::gemv(rows, n * SLOTS);
            let what = format!("n = {n}, recipe {recipe}");
            let go = || lab.launch("matmul", Some(ty), "gemv_gate_up", launch, &args);
            let all = rows_of(&lab.values(case, &what, &y, &go)?, rows);
            floors.judge(case, n, recipe, &all);
            let mut slots = all.rows().into_iter().zip(&ids);
            let idle = slots.find(|(y, id)| expert(**id, stack).is_none() && y.iter().any(|v| *v != 0.0));
            case.holds(idle.is_none(), || format!("{what}: a slot without an expert is not zero"));
        }
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
