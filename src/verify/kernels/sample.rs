//! The greedy choice: exact, against the host's own.

use lockstep_kernels::geometry::{self, Launch};

use super::case::{Case, check};
use super::lab::{Lab, View};
use super::random::Random;
use crate::device::cuda::gpu::{Arg, GpuError};
use crate::verify::Check;

/// Both kernels.
pub fn run(lab: &Lab<'_>, out: &mut Vec<Check>) {
    out.push(check("best_logit", |case| best_logit(lab, case)));
    out.push(check("advance", |case| advance(lab, case)));
}

/// The best of a row: NaN never, the lowest of equals; -1 where there is none.
fn best(row: &[f32], first: i32) -> (f32, i32) {
    let better = |top: (f32, i32), (i, v): (usize, &f32)| match () {
        () if v.is_nan() || (top.1 >= 0 && *v <= top.0) => top,
        () => (*v, first + i as i32),
    };
    row.iter().enumerate().fold((0.0, -1), better)
}

fn best_logit(lab: &Lab<'_>, case: &mut Case) -> Result<(), GpuError> {
    for (width, block) in [(1usize, 32u32), (31, 64), (1000, 256), (9691, 1024)] {
        let n = 7;
        let mut x = Random::of(&format!("logits {width}")).values(n * width);
        let row = |i: usize| i * width..(i + 1) * width;
        x[row(1)].fill(f32::NAN);
        x[row(2)].fill(-3.5);
        x[row(3)].iter_mut().step_by(2).for_each(|v| *v = f32::NAN);
        x[row(4)].iter_mut().for_each(|v| *v = (*v * 2.0).round()); // many equals
        x[row(5)].fill(f32::NEG_INFINITY);
        x[row(6)][width / 2] = f32::INFINITY;
        let view = View::plain(n, width, width + 3);
        let first = 64i32;
        let (area, out) = (lab.words(view.place(&x))?, lab.poisoned(2 * n)?);
        let (at, stride, w, to) = (area.at(0), view.row as i64, width as i32, out.at(0));
        let seen = lab.thrice(&[&out], &|| {
            lab.launch("sample", "best_logit", geometry::per_row(n, block), &[&at, &stride, &w, &first, &to])
        })?;
        let words: Vec<usize> = (0..2 * n).collect();
        let found = seen.take(case, "pairs", 0, &out, &words);
        for (i, pair) in found.chunks_exact(2).enumerate() {
            let (logit, id) = best(&x[row(i)], first);
            let same = pair[1] as i32 == id && (id < 0 || f32::from_bits(pair[0]) == logit);
            let got = (f32::from_bits(pair[0]), pair[1] as i32);
            case.holds(same, || format!("{width} logits, row {i}: expected {:?}, found {got:?}", (logit, id)));
        }
    }
    Ok(())
}

fn advance(lab: &Lab<'_>, case: &mut Case) -> Result<(), GpuError> {
    for (ranks, n, step) in [(1usize, 1usize, 0u32), (3, 9, 5), (8, 70, 2)] {
        let (row, ring) = (n + 2, 3usize);
        let mut random = Random::of(&format!("advance {ranks} {n}"));
        // Few different logits, so that ranks tie; some ranks have none.
        let pairs: Vec<(f32, i32)> = (0..ranks * row)
            .map(|i| {
                ((random.below(4) as f32) - 1.5, if random.below(5) == 0 { -1 } else { 100 * (i / row) as i32 + 7 })
            })
            .collect();
        let positions: Vec<i32> = (0..n).map(|r| if r % 4 == 2 { -1 } else { 10 * r as i32 }).collect();
        let words: Vec<u32> = pairs.iter().flat_map(|(v, id)| [v.to_bits(), *id as u32]).collect();
        let (pairs_area, ids) = (lab.words(words)?, lab.ints(&vec![3; n])?);
        let (position, tokens, count) = (lab.ints(&positions)?, lab.poisoned(ring * n)?, lab.words(vec![step])?);
        let (p, r, stride, rows, id) = (pairs_area.at(0), ranks as i32, row as i32, n as i32, ids.at(0));
        let (at, to, places, steps) = (position.at(0), tokens.at(0), ring as i32, count.at(0));
        let args: [&dyn Arg; 9] = [&p, &r, &stride, &rows, &id, &at, &to, &places, &steps];
        let launch = Launch { grid: (1, 1, 1), block: 32, shared: 0 };
        let outs = [&ids, &position, &tokens, &count];
        let seen = lab.thrice(&outs, &|| lab.launch("sample", "advance", launch, &args))?;
        let (mut new_ids, mut new_positions, mut chosen) = (vec![3i32; n], positions.clone(), vec![-1i32; n]);
        for t in (0..n).filter(|t| positions[*t] >= 0) {
            let mut top = (0.0, -1);
            for rank in 0..ranks {
                let (v, id) = pairs[rank * row + t];
                if id >= 0 && (top.1 < 0 || v > top.0 || (v == top.0 && id < top.1)) {
                    top = (v, id);
                }
            }
            new_ids[t] = top.1.max(0);
            new_positions[t] += 1;
            chosen[t] = top.1.max(0);
        }
        let all: Vec<usize> = (0..n).collect();
        let place = step as usize % ring * n;
        let slots: Vec<usize> = (place..place + n).collect();
        let what = format!("{ranks} ranks, {n} rows");
        for (index, area, words, expected) in
            [(0, &ids, &all, &new_ids), (1, &position, &all, &new_positions), (2, &tokens, &slots, &chosen)]
        {
            let found: Vec<i32> = seen.take(case, &what, index, area, words).into_iter().map(|w| w as i32).collect();
            case.equal(&format!("{what}, {}", ["ids", "positions", "tokens"][index]), &found, expected);
        }
        let found = seen.take(case, &what, 3, &count, &[0]);
        case.equal("step", &found, &[step + 1]);
    }
    Ok(())
}
