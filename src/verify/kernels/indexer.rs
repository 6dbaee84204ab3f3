//! The indexer: scores over a paged cache, against f64 at sampled keys and against the naive kernel at all; the choice of
//! keys, exactly, from given scores: random ones, ties, NaN.

use lockstep_kernels::geometry;
use lockstep_reference::ndarray::{Array2, Array3};
use lockstep_reference::{RefRecipe, ops};

use super::cache::Cache;
use super::case::{Case, check};
use super::lab::{Lab, POISON, View, bytes_of, given};
use super::random::Random;
use crate::device::cuda::IndexQueries;
use crate::device::cuda::gpu::GpuError;
use crate::engine::kv::PAGE;
use crate::model::Config;
use crate::report::Check;
use crate::verify::floor::{Floored, LEAST_VALUES};

/// Keys that the host scores per token.
const JUDGED: usize = 256;

/// Scores of some tokens over some sequences.
struct Scores {
    heads: usize,
    width: usize,
    page: usize,
    contexts: Vec<usize>,
    tokens: Vec<(usize, i32)>,
}

/// Every kernel of indexer.cu.
pub fn run(lab: &Lab<'_>, c: &Config, out: &mut Vec<Check>) {
    let (heads, width) = (c.index_heads, c.index_dim);
    let of = |contexts: &[usize], tokens: &[(usize, i32)]| Scores {
        heads,
        width,
        page: PAGE,
        contexts: contexts.to_vec(),
        tokens: tokens.to_vec(),
    };
    let small = of(&[70, 33], &[(0, 69), (1, 32), (0, -1), (1, 0), (0, 31)]);
    let cases = [
        ("3 heads of 40", Scores { heads: 3, width: 40, page: 7, ..small }),
        ("33 heads of 64", Scores { heads: 33, width: 64, ..of(&[130], &[(0, 129)]) }),
        ("2,049 keys", of(&[2049], &[(0, 2048), (0, 2047), (0, -1)])),
        ("8,192 keys", of(&[8192], &[(0, 8191), (0, 100)])),
        ("65,536 keys", of(&[65_536], &[(0, 65_535), (0, -1), (0, 40_000)])),
    ];
    for (name, scores) in &cases {
        for kernel in ["index_scores", "index_scores_naive"] {
            out.push(check(format!("{kernel} {name}"), |case| scores.run(lab, kernel, case)));
        }
    }
    for kernel in ["top_k", "top_k_naive, list_naive"] {
        let naive = kernel != "top_k";
        out.push(check(format!("{kernel} small"), |case| {
            for (most, row) in [(1, 1), (7, 12), (64, 64)] {
                for width in [most - 1, most, most + 1, 300, 1025] {
                    select(lab, case, naive, width.max(1), most, row)?;
                }
            }
            Ok(())
        }));
        for keys in [2049usize, 8192, 65_536] {
            out.push(check(format!("{kernel} 2,048 of {keys}"), |case| select(lab, case, naive, keys, 2048, 2048)));
        }
        let own = c.top_k;
        out.push(check(format!("{kernel} this model's {own}"), |case| select(lab, case, naive, 2 * own + 1, own, own)));
    }
}

/// What is scored: keys and queries.
struct Inputs {
    cache: Cache,
    q: Vec<f32>,
    weights: Vec<f32>,
}

impl Scores {
    fn run(&self, lab: &Lab<'_>, kernel: &'static str, case: &mut Case) -> Result<(), GpuError> {
        let Scores { heads, width, page, contexts, tokens } = self;
        let name = format!("index {contexts:?} {width}");
        let cache = Cache::random(lab, &name, *width, *page, contexts)?;
        let mut random = Random::of(&format!("queries {name}"));
        let n = tokens.len();
        let (q, weights) = (random.values(n * heads * width), random.values(n * heads));
        let inputs = Inputs { cache, q, weights };
        let Inputs { cache, q, weights } = &inputs;
        let context = contexts.iter().max().map_or(0, |c| c + 17);
        let clean = self.launch(lab, kernel, case, &inputs, context, 0)?;
        // Sampled keys of every token, padding left out.
        let mut judged: Vec<(usize, Vec<usize>, Floored)> = Vec::new();
        for (t, (sequence, position)) in tokens.iter().enumerate().filter(|(_, t)| t.1 >= 0) {
            let visible = *position as usize + 1;
            let mut keys: Vec<usize> = (0..visible.min(16)).chain(visible.saturating_sub(16)..visible).collect();
            keys.extend((0..JUDGED.min(visible)).map(|_| random.below(visible)));
            keys.sort_unstable();
            keys.dedup();
            let k = Array2::from_shape_fn((keys.len(), *width), |(i, j)| f64::from(cache.key(*sequence, keys[i])[j]));
            let query = |h: usize, i: usize| f64::from(q[(t * heads + h) * width + i]);
            let queries = Array3::from_shape_fn((1, *heads, *width), |(_, h, i)| query(h, i));
            let w = Array2::from_shape_fn((1, *heads), |(_, h)| f64::from(weights[t * heads + h]));
            let of = |a| ops::index_scores(a, &queries, &k, &w, &[keys.len() - 1]);
            let floor = Floored::of(RefRecipe::Strict, lab.tp, &of);
            judged.push((t, keys, floor));
        }
        // A token that sees few keys has the floor of those that see many.
        let largest = judged.iter().map(|j| j.2.largest()).fold(0.0, f64::max);
        judged.iter_mut().filter(|j| j.1.len() < LEAST_VALUES).for_each(|j| j.2.widen(largest));
        let naive = match kernel {
            "index_scores" => Some(self.launch(lab, "index_scores_naive", case, &inputs, context, 0)?),
            _ => None,
        };
        for (t, keys, floor) in &judged {
            let found = Array2::from_shape_fn((1, keys.len()), |(_, i)| f64::from(clean[t * context + keys[i]]));
            case.judge(&format!("token {t}"), &found, floor);
            let row = |all: &[f32]| Array2::from_shape_fn((1, context), |(_, u)| f64::from(all[t * context + u]));
            if let Some(naive) = &naive {
                let twin = floor.around(row(naive));
                case.judge(&format!("token {t} against the naive kernel"), &row(&clean), &twin);
            }
        }
        if kernel == "index_scores" {
            // Rows that need no scores, and only those, are left out; a wider context changes nothing.
            let least = tokens.iter().map(|t| t.1).max().map_or(0, |p| p as usize);
            let partly = self.launch(lab, kernel, case, &inputs, context, least)?;
            for t in (0..n).filter(|t| tokens[*t].1 + 1 > least as i32) {
                let row = t * context..(t + 1) * context;
                case.same("with rows left out", &partly[row.clone()], &clean[row]);
            }
            let wide = self.launch(lab, kernel, case, &inputs, context + 1000, 0)?;
            for t in (0..n).filter(|t| tokens[*t].1 >= 0) {
                let row = &wide[t * (context + 1000)..];
                case.same("in a wider context", &row[..context], &clean[t * context..(t + 1) * context]);
            }
        }
        self.planted(lab, kernel, case, inputs, context, &clean)
    }

    /// A NaN in one key and in one token's queries: their scores are NaN, and no other changes.
    fn planted(
        &self,
        lab: &Lab<'_>,
        kernel: &'static str,
        case: &mut Case,
        Inputs { cache, mut q, weights }: Inputs,
        context: usize,
        clean: &[f32],
    ) -> Result<(), GpuError> {
        let (mut rows, key) = (cache.rows, 3usize);
        rows[0][key * self.width + self.width - 1] = f32::NAN;
        q[self.heads * self.width - 1] = f32::NAN;
        let cache = Cache::of(lab, "planted", self.width, self.page, rows)?;
        let found = self.launch(lab, kernel, case, &Inputs { cache, q, weights }, context, 0)?;
        let mut expected = clean.to_vec();
        for (t, (sequence, position)) in self.tokens.iter().enumerate() {
            for u in 0..(position + 1) as usize {
                if t == 0 || (*sequence == 0 && u == key) {
                    expected[t * context + u] = f32::NAN;
                }
            }
        }
        case.same("with NaN in a key and a query", &found, &expected);
        Ok(())
    }

    /// Scores `[tokens][context]`; rows that the kernel leaves out are -inf here.
    fn launch(
        &self,
        lab: &Lab<'_>,
        kernel: &'static str,
        case: &mut Case,
        Inputs { cache, q, weights }: &Inputs,
        context: usize,
        unscored: usize,
    ) -> Result<Vec<f32>, GpuError> {
        let Scores { heads, width, tokens, .. } = self;
        let n = tokens.len();
        let view = View { start: 5, ..View::groups(n, *heads, *width, 3, 9) };
        let (q_area, w_area) = (lab.placed(view, q)?, lab.placed(View::plain(n, *heads, heads + 2), weights)?);
        let (step, y) = (cache.step(lab, tokens)?, lab.poisoned(n * context)?);
        let queries = IndexQueries {
            q: q_area.at(0),
            q_row: q_area.row(),
            start: view.start as i32,
            stride: view.group as i32,
            width: *width as i32,
            heads: *heads as i32,
            weights: w_area.at(0),
            w_row: w_area.row(),
        };
        let naive = kernel == "index_scores_naive";
        let (launch, args) = match naive {
            true => (geometry::threads(context, n, 1), given![cache.area, queries, step.tokens, context, y]),
            false => (
                geometry::index_scores(context, n, *heads, *width),
                given![cache.area, queries, step.tokens, unscored, context, y],
            ),
        };
        let seen = lab.thrice(&[&y], &|| lab.launch("indexer", None, kernel, launch, &args))?;
        let skips = |t: usize| !naive && tokens[t].1 < unscored as i32;
        let words: Vec<usize> = (0..n).filter(|t| !skips(*t)).flat_map(|t| t * context..(t + 1) * context).collect();
        let found = seen.floats(case, kernel, 0, &y, &words);
        let mut out = vec![f32::NEG_INFINITY; n * context];
        words.into_iter().zip(found).for_each(|(word, v)| out[word] = v);
        for (t, token) in tokens.iter().enumerate() {
            let hidden = &out[t * context + (token.1 + 1) as usize..(t + 1) * context];
            let masked = hidden.iter().all(|v| *v == f32::NEG_INFINITY);
            case.holds(masked, || format!("token {t}: a key behind position {} has a score", token.1));
        }
        Ok(out)
    }
}

/// The `most` best of a token's visible scores, ascending: ties to the lowest position, NaN first.
fn best(scores: &[f32], most: usize) -> Vec<i32> {
    let key = |s: f32| if s.is_nan() { f32::INFINITY } else { s + 0.0 };
    let mut order: Vec<usize> = (0..scores.len()).collect();
    let before = |a: &usize, b: &usize| {
        let (x, y) = (scores[*a], scores[*b]);
        y.is_nan().cmp(&x.is_nan()).then(key(y).total_cmp(&key(x))).then(a.cmp(b))
    };
    order.sort_by(before);
    order.truncate(most);
    order.sort_unstable();
    order.into_iter().map(|u| u as i32).collect()
}

/// Rows of scores: random, few different, all equal, with NaN, mostly masked, signed zeros, too short to choose, padding.
fn select(lab: &Lab<'_>, case: &mut Case, naive: bool, width: usize, most: usize, row: usize) -> Result<(), GpuError> {
    let last = width as i32 - 1;
    let positions = [last, last, last, last, last, last, last / 2, -1];
    let n = positions.len();
    let mut x = Random::of(&format!("scores {width}")).values(n * width);
    let of = |t: usize| t * width..(t + 1) * width;
    x[of(1)].iter_mut().for_each(|v| *v = (*v * 2.0).round());
    x[of(2)].fill(-0.75);
    x[of(3)].iter_mut().step_by(11).for_each(|v| *v = f32::NAN);
    x[of(4)].iter_mut().enumerate().filter(|(i, _)| i % 9 != 0).for_each(|(_, v)| *v = f32::NEG_INFINITY);
    x[of(5)].iter_mut().enumerate().for_each(|(i, v)| *v = [0.0, -0.0, 0.0, 1e-40, -1e-40][i % 5]);
    // What no token can see is poison.
    let mut image: Vec<u32> = x.iter().map(|v| v.to_bits()).collect();
    for (t, position) in positions.iter().enumerate() {
        image[t * width + (position + 1) as usize..(t + 1) * width].fill(POISON);
    }
    let step = lab.step(&positions, &vec![0; n], &[0], 1, PAGE)?;
    let (scores, chosen) = (lab.words(image)?, lab.poisoned(n * row)?);
    let taken = lab.poisoned((n * width).div_ceil(4))?;
    let seen = lab.thrice(&[&chosen, &taken], &|| {
        if !naive {
            let args = given![scores, width, step.tokens, most, chosen, row];
            return lab.launch("indexer", None, "top_k", geometry::per_row(n, 1024), &args);
        }
        let args = given![scores, width, step.tokens, most, taken];
        lab.launch("indexer", None, "top_k_naive", geometry::threads(width, n, 1), &args)?;
        let args = given![taken, width, chosen, row, n];
        lab.launch("indexer", None, "list_naive", geometry::threads(n, 1, 1), &args)
    })?;
    let what = format!("{most} of {width}");
    let found = seen.ints(case, &what, 0, &chosen, &chosen.words());
    let mut expected = vec![-1i32; n * row];
    let mut marked = vec![0u8; n * width];
    for (t, position) in positions.iter().enumerate() {
        let visible = &x[t * width..t * width + (position + 1) as usize];
        for (place, u) in best(visible, most).into_iter().enumerate() {
            expected[t * row + place] = u;
            marked[t * width + u as usize] = 1;
        }
    }
    for t in 0..n {
        case.equal(&format!("{what}, row {t}"), &found[t * row..(t + 1) * row], &expected[t * row..(t + 1) * row]);
    }
    if naive {
        let found = bytes_of(&seen.take(case, "marks", 1, &taken, &taken.words()));
        case.equal(&format!("{what}, marks"), &found[..n * width], &marked);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_selects_as_the_rule_says() {
        let s = [0.0, -0.0, f32::NAN, f32::NEG_INFINITY, 2.0, f32::INFINITY, -f32::NAN];
        assert_eq!(best(&s, 3), [2, 5, 6]);
        assert_eq!(best(&s, 5), [0, 2, 4, 5, 6]);
        assert_eq!(best(&s, 9), [0, 1, 2, 3, 4, 5, 6]);
    }
}
