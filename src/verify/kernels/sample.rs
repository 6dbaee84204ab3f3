//! The choice of a token, against the host's own: greedy exactly, with a temperature up to the rounding of a key.

use lockstep_kernels::geometry::{self, Launch};

use super::case::{Case, check};
use super::lab::{Lab, View, given};
use super::random::Random;
use crate::device::Draw;
use crate::device::cuda::gpu::GpuError;
use crate::device::draw::NO_NUMBER;
use crate::report::Check;

/// Both kernels.
pub fn run(lab: &Lab<'_>, out: &mut Vec<Check>) {
    out.push(check("sample", |case| sample(lab, case)));
    out.push(check("commit", |case| commit(lab, case)));
}

fn sample(lab: &Lab<'_>, case: &mut Case) -> Result<(), GpuError> {
    for (width, block) in [(1usize, 32u32), (31, 64), (1000, 256), (9691, 1024)] {
        let n = 14;
        let mut x = Random::of(&format!("logits {width}")).values(n * width);
        let row = |i: usize| i * width..(i + 1) * width;
        // The first seven rows choose greedily, the others with a temperature.
        for half in [0, 7] {
            x[row(half + 1)].fill(f32::NAN);
            x[row(half + 2)].fill(-3.5);
            x[row(half + 3)].iter_mut().step_by(2).for_each(|v| *v = f32::NAN);
            x[row(half + 4)].iter_mut().for_each(|v| *v = (*v * 2.0).round()); // many equals
            x[row(half + 5)].fill(f32::NEG_INFINITY);
            x[row(half + 6)][width / 2] = f32::INFINITY;
        }
        let draw = |i: usize| Draw {
            temperature: if i < 7 { 0.0 } else { [0.3, 1.0, 4.0][i % 3] },
            seed: [0, 1, u64::MAX, 0x0123_4567_89ab_cdef][i % 4],
        };
        let positions: Vec<i32> = (0..n as i32).map(|i| [0, 1, 77, 131_071, i32::MAX - 1][i as usize % 5]).collect();
        let first = 64i32;
        let (area, out) = (lab.placed(View::plain(n, width, width + 3), &x)?, lab.poisoned(2 * n)?);
        let temperatures = lab.words((0..n).map(|i| draw(i).temperature.to_bits()).collect())?;
        let seeds = lab.words((0..n).flat_map(|i| [draw(i).seed as u32, (draw(i).seed >> 32) as u32]).collect())?;
        let position = lab.ints(&positions)?;
        let args = given![area, area.row(), width, first, temperatures, seeds, position, out];
        let launch = geometry::per_row(n, block);
        let seen = lab.thrice(&[&out], &|| lab.launch("sample", None, "sample", launch, &args))?;
        let found = seen.take(case, "pairs", 0, &out, &out.words());
        for (i, pair) in found.chunks_exact(2).enumerate() {
            let at = positions[i] as u32;
            let tokens = x[row(i)].iter().enumerate().map(|(j, logit)| (first as u32 + j as u32, *logit));
            let expected = draw(i).sample(at, tokens);
            let (key, id) = (f32::from_bits(pair[0]), pair[1] as i32);
            let same = match expected {
                None => id == -1,
                // The noise's logarithms are the machine's own: their last bits may round a key the other way.
                Some((most, _)) if i >= 7 && most.is_finite() => {
                    let near = |v: f32| (v - most).abs() <= 2.0 * f32::EPSILON * most.abs();
                    let own = usize::try_from(id - first).ok().and_then(|j| x[row(i)].get(j));
                    near(key) && own.is_some_and(|logit| near(draw(i).key(at, id as u32, *logit)))
                }
                Some(best) => (key, id as u32) == best,
            };
            case.holds(same, || format!("{width} logits, row {i}: expected {expected:?}, found {:?}", (key, id)));
        }
    }
    Ok(())
}

fn commit(lab: &Lab<'_>, case: &mut Case) -> Result<(), GpuError> {
    for (ranks, n, step) in [(1usize, 1usize, 0u32), (3, 9, 5), (8, 70, 2)] {
        let (row, ring) = (n + 2, 3usize);
        let mut random = Random::of(&format!("commit {ranks} {n}"));
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
        let args = given![pairs_area, ranks, row, n, ids, position, tokens, ring, count];
        let launch = Launch { grid: (1, 1, 1), block: 32, shared: 0 };
        let outs = [&ids, &position, &tokens, &count];
        let seen = lab.thrice(&outs, &|| lab.launch("sample", None, "commit", launch, &args))?;
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
            chosen[t] = if top.1 < 0 { NO_NUMBER as i32 } else { top.1 };
        }
        let place = step as usize % ring * n;
        let slots: Vec<usize> = (place..place + n).collect();
        let what = format!("{ranks} ranks, {n} rows");
        for (index, area, words, expected) in [
            (0, &ids, ids.words(), &new_ids),
            (1, &position, position.words(), &new_positions),
            (2, &tokens, slots, &chosen),
        ] {
            let found = seen.ints(case, &what, index, area, &words);
            case.equal(&format!("{what}, {}", ["ids", "positions", "tokens"][index]), &found, expected);
        }
        let found = seen.take(case, &what, 3, &count, &[0]);
        case.equal("step", &found, &[step + 1]);
    }
    Ok(())
}
