//! Attention over a paged cache, dense and over chosen keys: `attend` and `combine` together against f64 at some heads and
//! against the naive kernels at all; `-1` behind short lists, chosen positions that a token cannot see yet, padding.

use lockstep_kernels::geometry::{self, Launch, MOST_LATENT, MOST_ROPE};
use lockstep_reference::ndarray::{Array2, Array3, s};
use lockstep_reference::{RefRecipe, ops};

use super::cache::Cache;
use super::case::{Case, check, rows_of};
use super::lab::{Area, Lab, Step, View, given};
use super::random::Random;
use crate::device::cuda::Queries;
use crate::device::cuda::gpu::GpuError;
use crate::engine::kv::PAGE;
use crate::model::Config;
use crate::report::Check;
use crate::verify::floor::Floored;

/// A set-up: sizes, sequences, tokens, and how many keys are chosen, if any.
#[derive(Clone)]
struct Setup {
    heads: usize,
    latent: usize,
    rope: usize,
    page: usize,
    contexts: Vec<usize>,
    tokens: Vec<(usize, i32)>,
    most: Option<usize>,
}

/// Every kernel of attention.cu.
pub fn run(lab: &Lab<'_>, c: &Config, out: &mut Vec<Check>) {
    if c.kv_lora > MOST_LATENT || c.rope > MOST_ROPE {
        let sizes = format!("{} and {}", c.kv_lora, c.rope);
        out.push(check("attend this model's widths", |case| {
            case.problem(format!("latents of {MOST_LATENT} and rope parts of {MOST_ROPE} fit, found {sizes}"));
            Ok(())
        }));
        return;
    }
    let own = Setup {
        heads: (c.heads / lab.tp).max(1),
        latent: c.kv_lora,
        rope: c.rope,
        page: PAGE,
        contexts: vec![1],
        tokens: vec![(0, 0)],
        most: None,
    };
    let over =
        |contexts: &[usize], tokens: Vec<(usize, i32)>| Setup { contexts: contexts.to_vec(), tokens, ..own.clone() };
    let odd = |setup: Setup| Setup { heads: 9, latent: 40, rope: 6, page: 5, ..setup };
    let few = || over(&[300, 129], vec![(0, 299), (1, 128), (0, -1), (1, 127), (0, 16), (1, 0)]);
    let prefill = |n: usize| {
        let token = |i: usize| if i % 8 == 5 { (0, -1) } else { (i % 2, (i / 2 * 7 % 90) as i32) };
        over(&[150, 90], (0..n).map(token).collect())
    };
    let long = |keys: usize| {
        let last = keys as i32 - 1;
        over(&[keys], vec![(0, last), (0, last / 2), (0, last - 1)])
    };
    let chosen = |setup: Setup, most: usize| Setup { most: Some(most), ..setup };
    let cases = [
        ("dense, 1 key", own.clone()),
        ("dense, 1 head, decode", Setup { heads: 1, ..few() }),
        ("dense, decode", few()),
        ("dense, odd widths, decode", odd(few())),
        ("dense, widest, 64 heads", Setup { heads: 64, latent: MOST_LATENT, rope: MOST_ROPE, ..few() }),
        ("dense, prefill 9", prefill(9)),
        ("dense, prefill 33", prefill(33)),
        ("dense, odd widths, prefill 33", odd(prefill(33))),
        ("dense, 2,049 keys", long(2049)),
        ("dense, 8,192 keys", Setup { tokens: vec![(0, 8191)], ..long(8192) }),
        ("24 chosen, decode", chosen(few(), 24)),
        ("200 chosen, odd widths, decode", chosen(odd(few()), 200)),
        ("24 chosen, prefill 9", chosen(prefill(9), 24)),
        ("24 chosen, prefill 33", chosen(prefill(33), 24)),
        ("2,048 chosen of 2,049", chosen(long(2049), 2048)),
        ("2,048 chosen of 8,192", chosen(long(8192), 2048)),
        ("2,048 chosen of 65,536", chosen(long(65_536), 2048)),
    ];
    for (name, setup) in &cases {
        let mut naive = None;
        out.push(check(format!("scores, softmax, weighted_naive {name}"), |case| {
            let bench = Bench::new(lab, setup, name)?;
            let values = bench.naive(case, &bench.q)?;
            case.judge("against f64", &bench.sampled(&values), &bench.floor);
            naive = Some((bench, values));
            Ok(())
        }));
        if let Some((bench, naive)) = naive {
            out.push(check(format!("attend, combine {name}"), |case| bench.check(case, &naive)));
        }
    }
}

/// A set-up on the GPU, and the truth at some heads.
struct Bench<'a> {
    lab: &'a Lab<'a>,
    setup: &'a Setup,
    cache: Cache,
    step: Step,
    q: [Vec<f32>; 2],
    chosen: Option<(Area, Vec<i32>)>,
    judged: Vec<usize>,
    floor: Floored,
}

/// What a token may attend to, ascending, with a position that it cannot see where there is room, and a
/// short list now and then.
fn choose(random: &mut Random, position: i32, most: usize, token: usize) -> Vec<i32> {
    let visible = (position + 1).max(0) as usize;
    let mut list: Vec<i32> = match visible <= most {
        true => (0..visible as i32).collect(),
        false => {
            let mut all = random.shuffled(visible);
            all.truncate([most - 1, most / 2, most][token % 3]);
            all.into_iter().map(|u| u as i32).collect()
        }
    };
    list.sort_unstable();
    if visible > most && list.len() < most {
        list.push(position + 1); // in the cache perhaps, but later than the token
    }
    list.resize(most, -1);
    list
}

impl<'a> Bench<'a> {
    fn new(lab: &'a Lab<'a>, setup: &'a Setup, name: &str) -> Result<Self, GpuError> {
        let Setup { heads, latent, rope, page, contexts, tokens, most } = setup;
        let n = tokens.len();
        let cache = Cache::random(lab, name, latent + rope, *page, contexts)?;
        let mut random = Random::of(&format!("queries {name}"));
        let q = [random.values(n * heads * latent), random.values(n * heads * rope)];
        let lists: Option<Vec<Vec<i32>>> =
            most.map(|most| tokens.iter().enumerate().map(|(t, (_, p))| choose(&mut random, *p, most, t)).collect());
        // Over long contexts two heads are enough for the truth; the naive kernels look at all.
        let judged: Vec<usize> = match contexts.iter().any(|c| *c > 1000) {
            true if *heads > 2 => vec![0, heads / 2],
            _ => (0..*heads).collect(),
        };
        let keys: Vec<Vec<usize>> = (0..n)
            .map(|t| {
                let position = tokens[t].1;
                let all = || (0..=position).collect::<Vec<i32>>();
                let list = lists.as_ref().map_or_else(all, |lists| lists[t].clone());
                list.into_iter().filter(|u| *u >= 0 && *u <= position).map(|u| u as usize).collect()
            })
            .collect();
        let of_token: Vec<[Array2<f64>; 2]> = (0..n)
            .map(|t| {
                let row = |i: usize, j: usize| f64::from(cache.key(tokens[t].0, keys[t][i])[j]);
                [
                    Array2::from_shape_fn((keys[t].len(), *latent), |(i, j)| row(i, j)),
                    Array2::from_shape_fn((keys[t].len(), *rope), |(i, j)| row(i, latent + j)),
                ]
            })
            .collect();
        let scale = f64::from(scale(setup));
        let floor = Floored::of(RefRecipe::Strict, lab.tp, &|a| {
            let mut y = Array2::zeros((n * judged.len(), *latent));
            for t in (0..n).filter(|t| !keys[*t].is_empty()) {
                let part = |q: &[f32], w: usize| {
                    Array3::from_shape_fn((1, judged.len(), w), |(_, h, i)| {
                        f64::from(q[(t * heads + judged[h]) * w + i])
                    })
                };
                let (ql, qr) = (part(&q[0], *latent), part(&q[1], *rope));
                let [values, ropes] = &of_token[t];
                let every = [(0..keys[t].len()).collect::<Vec<usize>>()];
                let found = ops::attention(a, ql.view(), qr.view(), values, ropes.view(), &every, scale);
                y.slice_mut(s![t * judged.len()..(t + 1) * judged.len(), ..]).assign(&found.slice(s![0, .., ..]));
            }
            y
        });
        let step = cache.step(lab, tokens)?;
        let chosen = match lists.map(|l| l.concat()) {
            Some(flat) => Some((lab.ints(&flat)?, flat)),
            None => None,
        };
        Ok(Bench { lab, setup, cache, step, q, chosen, judged, floor })
    }

    /// The judged heads of `[token][head]` rows.
    fn sampled(&self, all: &Array2<f64>) -> Array2<f64> {
        let (k, heads) = (self.judged.len(), self.setup.heads);
        Array2::from_shape_fn((self.setup.tokens.len() * k, all.ncols()), |(i, j)| {
            all[[i / k * heads + self.judged[i % k], j]]
        })
    }

    fn queries(&self, q: &[Vec<f32>; 2]) -> Result<(Queries, [Area; 2]), GpuError> {
        let Setup { heads, latent, rope, tokens, .. } = self.setup;
        let view = |width: usize, start| View { start, ..View::groups(tokens.len(), *heads, width, 3, 11) };
        let (l, r) = (view(*latent, 5), view(*rope, 2));
        let areas = [self.lab.placed(l, &q[0])?, self.lab.placed(r, &q[1])?];
        let queries = Queries {
            latent: areas[0].at(0),
            latent_row: areas[0].row(),
            latent_start: l.start as i32,
            latent_stride: l.group as i32,
            latent_width: *latent as i32,
            rope: areas[1].at(0),
            rope_row: areas[1].row(),
            rope_start: r.start as i32,
            rope_stride: r.group as i32,
            rope_width: *rope as i32,
            heads: *heads as i32,
        };
        Ok((queries, areas))
    }

    /// Where the lists of chosen keys lie, and how long they are; nowhere where all keys are seen.
    fn lists(&self) -> (u64, usize) {
        (self.chosen.as_ref().map_or(0, |c| c.0.at(0)), self.setup.most.unwrap_or(0))
    }

    fn out(&self) -> Result<Area, GpuError> {
        let Setup { heads, latent, tokens, .. } = self.setup;
        self.lab.room(View::plain(tokens.len(), heads * latent, heads * latent + 7))
    }

    fn context(&self) -> usize {
        self.setup.tokens.iter().map(|t| (t.1 + 1) as usize).max().unwrap_or(0)
    }

    /// What a recorded step may say that it sees.
    fn widest(&self) -> usize {
        (2 * self.context()).next_power_of_two()
    }

    /// `[token][head]` rows of latents, for a step that says it sees `context` keys at most.
    fn fast(
        &self,
        case: &mut Case,
        (cache, step): (&Cache, &Step),
        q: &[Vec<f32>; 2],
        context: usize,
    ) -> Result<Array2<f64>, GpuError> {
        let Setup { heads, latent, tokens, most, .. } = self.setup;
        let (lab, n) = (self.lab, tokens.len());
        let keys = most.map_or(context, |most| context.min(most));
        // The size of a split is that of the widest context that may come, not of this one's.
        let ever = most.map_or(self.widest(), |most| self.widest().min(most));
        let (per_split, splits) = geometry::splits(n, keys, ever);
        let parts = n * heads * splits;
        let (peaks, sums, partial) = (lab.poisoned(parts)?, lab.poisoned(parts)?, lab.poisoned(parts * latent)?);
        let (queries, _kept) = self.queries(q)?;
        let y = self.out()?;
        let (factor, (ids, k)) = (scale(self.setup), self.lists());
        let seen = lab.thrice(&[&y, &peaks, &sums, &partial], &|| {
            let mut args = given![cache.area, queries, factor, ids, k, step.tokens, splits, per_split];
            args.extend(given![peaks, sums, partial]);
            lab.launch("attention", None, "attend", geometry::attend(splits, *heads, n), &args)?;
            let mut args = given![peaks, sums, partial, *heads, *latent, ids, k, step.tokens, splits, per_split];
            args.extend(given![y, y.row()]);
            let launch = Launch { grid: (*heads as u32, n as u32, 1), block: 128, shared: 0 };
            lab.launch("attention", None, "combine", launch, &args)
        })?;
        // Scratch may be written in part, but not behind its end.
        for (index, area) in [(1, &peaks), (2, &sums), (3, &partial)] {
            let written: Vec<usize> =
                seen.words(index).iter().enumerate().filter(|(i, w)| **w != area.image()[*i]).map(|(i, _)| i).collect();
            seen.take(case, "scratch", index, area, &written);
        }
        Ok(rows_of(&seen.floats(case, "latents", 0, &y, &y.words()), *latent))
    }

    fn naive(&self, case: &mut Case, q: &[Vec<f32>; 2]) -> Result<Array2<f64>, GpuError> {
        let Setup { heads, latent, rope, tokens, most, .. } = self.setup;
        let (lab, n) = (self.lab, tokens.len());
        let width = most.map_or(self.context(), |most| self.context().min(most));
        let (queries, _kept) = self.queries(q)?;
        let (scores, y) = (lab.poisoned(n * heads * width)?, self.out()?);
        let (rows, factor, (ids, k)) = (&self.cache.area, scale(self.setup), self.lists());
        let tokens = self.step.tokens;
        let seen = lab.thrice(&[&y, &scores], &|| {
            let args = given![*rows, queries, factor, ids, k, tokens, width, scores];
            lab.launch("attention", None, "scores_naive", geometry::threads(width, *heads, n), &args)?;
            let (launch, args) = (geometry::threads(n * heads, 1, 1), given![scores, width, n * heads]);
            lab.launch("attention", None, "softmax_naive", launch, &args)?;
            let mut args = given![*rows, latent + rope, scores, width, *heads, *latent, ids, k, tokens];
            args.extend(given![y, y.row()]);
            lab.launch("attention", None, "weighted_naive", geometry::threads(*latent, *heads, n), &args)
        })?;
        seen.take(case, "weights of keys", 1, &scores, &scores.words());
        Ok(rows_of(&seen.floats(case, "latents", 0, &y, &y.words()), *latent))
    }

    fn check(&self, case: &mut Case, naive: &Array2<f64>) -> Result<(), GpuError> {
        let (heads, n) = (self.setup.heads, self.setup.tokens.len());
        let clean = self.fast(case, (&self.cache, &self.step), &self.q, self.context())?;
        case.judge("against f64", &self.sampled(&clean), &self.floor);
        // All heads: those that were not judged have the largest sigma of their token's judged ones.
        let k = self.judged.len();
        let own =
            |t: usize, head: usize| self.judged.iter().position(|h| *h == head).map(|j| self.floor.sigma[t * k + j]);
        let of_token = |t: usize| self.floor.sigma[t * k..(t + 1) * k].iter().copied().fold(0.0, f64::max);
        let sigma = (0..n * heads).map(|i| own(i / heads, i % heads).unwrap_or_else(|| of_token(i / heads)));
        let twin =
            Floored { sigma: sigma.collect(), exact: Array2::zeros(clean.dim()), spread: None }.around(naive.clone());
        case.judge("against the naive kernels", &clean, &twin);
        for t in (0..n).filter(|t| self.setup.tokens[*t].1 < 0) {
            let zero = clean.slice(s![t * heads..(t + 1) * heads, ..]).iter().all(|v| *v == 0.0);
            case.holds(zero, || format!("token {t} is padding, and its latents are not zero"));
        }
        // A recorded step is rounded up to a larger context, and must not differ by a bit.
        let wide = self.fast(case, (&self.cache, &self.step), &self.q, self.widest())?;
        case.holds(wide == clean, || "with splits to spare the latents are others".into());
        self.planted(case, &clean)
    }

    /// A NaN in one head's query, then one in a key: what sees them is lost, and nothing else changes.
    fn planted(&self, case: &mut Case, clean: &Array2<f64>) -> Result<(), GpuError> {
        let Setup { heads, latent, rope, page, tokens, .. } = self.setup;
        let mut q = self.q.clone();
        let head = heads - 1;
        q[1][head * rope] = f32::NAN;
        let found = self.fast(case, (&self.cache, &self.step), &q, self.context())?;
        case.lost("NaN in a query", &found, clean, &|i| (i == head).then_some(f64::is_nan));
        let (sequence, position) = tokens[0];
        let key = self.chosen.as_ref().map_or(position, |(_, list)| list[0]).max(0);
        let mut rows = self.cache.rows.clone();
        rows[sequence][key as usize * (latent + rope) + latent / 2] = f32::NAN;
        let cache = Cache::of(self.lab, "planted", latent + rope, *page, rows)?;
        let step = cache.step(self.lab, tokens)?;
        let sees = |t: usize| {
            let (own, last) = tokens[t];
            let listed = self.chosen.as_ref().is_none_or(|(_, list)| {
                let most = list.len() / tokens.len();
                list[t * most..(t + 1) * most].contains(&key)
            });
            last >= key && own == sequence && listed
        };
        let found = self.fast(case, (&cache, &step), &self.q, self.context())?;
        case.lost("NaN in a key", &found, clean, &|i| sees(i / heads).then_some(f64::is_nan));
        Ok(())
    }
}

/// Scores of some spread, so that no key has all the weight.
fn scale(setup: &Setup) -> f32 {
    1.5 / ((setup.latent + setup.rope) as f32).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chosen_lists_are_hostile_where_they_may_be() {
        let mut random = Random::of("lists");
        assert_eq!(choose(&mut random, 3, 6, 0), [0, 1, 2, 3, -1, -1]);
        assert_eq!(choose(&mut random, -1, 2, 0), [-1, -1]);
        let short = choose(&mut random, 99, 8, 1);
        assert_eq!((short.len(), short[4], short[5..].iter().all(|u| *u == -1)), (8, 100, true));
        assert!(choose(&mut random, 99, 8, 0).ends_with(&[100]));
    }
}
