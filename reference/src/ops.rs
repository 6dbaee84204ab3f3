//! The operations of the paper, one function each, in its notation. All are written over [`Arith`], so the truth and
//! the noise floor come from the same lines. Activations are \[tokens, width\] or \[tokens, heads, width\]; weights are
//! exact f32.

use std::ops::Range;

use ndarray::{Array1, Array2, Array3, ArrayView2, ArrayView3, ArrayViewMut1, Axis, s};

use crate::arith::Arith;
use crate::config::{Gating, RopeStyle};
use crate::recipe::{Half, RefRecipe};

/// y = w x / sqrt(mean(x²) + eps), per row.
pub fn rms_norm(a: Arith, x: &Array2<f64>, w: &Array1<f32>, eps: f64) -> Array2<f64> {
    norm(a, x, w, eps, |v| a.store(v))
}

/// The norm of a latent: as [`rms_norm`], of what a product with weights gave. Under autocast that is stored more
/// narrowly than what the weight makes of it.
pub fn latent_norm(a: Arith, x: &Array2<f64>, w: &Array1<f32>, eps: f64) -> Array2<f64> {
    norm(a, x, w, eps, |v| a.product(v))
}

/// RMSNorm; `like_x` stores a value as x is stored, which the normed values are before they meet their weights.
fn norm(a: Arith, x: &Array2<f64>, w: &Array1<f32>, eps: f64, like_x: impl Fn(f64) -> f64) -> Array2<f64> {
    let mut y = x.clone();
    for mut row in y.rows_mut() {
        let squares: Vec<f64> = row.iter().map(|v| a.round(v * v)).collect();
        let mean = a.round(a.sum(&squares) / row.len() as f64);
        let scale = a.round(1.0 / a.round(mean + a.round(eps)).sqrt());
        row.zip_mut_with(w, |v, &w| *v = a.store(like_x(a.round(*v * scale)) * a.store(f64::from(w))));
    }
    y
}

/// y = w (x - mean(x)) / sqrt(mean((x - mean(x))²) + eps) + b, per row.
pub fn layer_norm(a: Arith, x: &Array2<f64>, w: &Array1<f32>, b: &Array1<f32>, eps: f64) -> Array2<f64> {
    let mut y = x.clone();
    for mut row in y.rows_mut() {
        let n = row.len() as f64;
        let mean = a.round(a.sum(&row.to_vec()) / n);
        row.mapv_inplace(|v| a.round(v - mean));
        let squares: Vec<f64> = row.iter().map(|v| a.round(v * v)).collect();
        let variance = a.round(a.sum(&squares) / n);
        let scale = a.round(1.0 / a.round(variance + a.round(eps)).sqrt());
        for ((v, &w), &b) in row.iter_mut().zip(w).zip(b) {
            *v = a.product(a.round(a.round(*v * scale) * a.store(f64::from(w))) + a.store(f64::from(b)));
        }
    }
    y
}

/// y = W x, per row of x. W is \[out, in\].
pub fn linear(a: Arith, x: &Array2<f64>, w: &Array2<f32>) -> Array2<f64> {
    a.weigh(x.view(), w.view())
}

/// The share of [`linear`] that the columns `cols` of W (and the same values of x) contribute.
pub fn linear_part(a: Arith, x: &Array2<f64>, w: &Array2<f32>, cols: Range<usize>) -> Array2<f64> {
    a.weigh(x.slice(s![.., cols.clone()]), w.slice(s![.., cols]))
}

/// x + y, element by element.
pub fn add(a: Arith, x: &Array2<f64>, y: &Array2<f64>) -> Array2<f64> {
    let mut sum = x + y;
    sum.mapv_inplace(|v| a.store(v));
    sum
}

/// Rotates pairs of the values `part` of every head by angle position * theta^(-2i / width), i the pair. The angle, its
/// cosine and its sine are f64, rounded once, but where the recipe makes angles in f32. `positions` has one entry per
/// token.
pub fn rope(
    a: Arith,
    x: &Array3<f64>,
    part: Range<usize>,
    positions: &[usize],
    theta: f64,
    style: RopeStyle,
) -> Array3<f64> {
    let width = part.len();
    let mut y = x.clone();
    for (t, &position) in positions.iter().enumerate() {
        for i in 0..width / 2 {
            let angle = angle(a, position as f64, theta, 2.0 * i as f64 / width as f64);
            let (cos, sin) = (a.store(angle.cos()), a.store(angle.sin()));
            let (first, second) = match style {
                RopeStyle::Interleaved => (part.start + 2 * i, part.start + 2 * i + 1),
                RopeStyle::HalfSplit => (part.start + i, part.start + i + width / 2),
            };
            for mut head in y.index_axis_mut(Axis(0), t).rows_mut() {
                let (x0, x1) = (head[first], head[second]);
                head[first] = a.store(a.store(x0 * cos) - a.store(x1 * sin));
                head[second] = a.store(a.store(x1 * cos) + a.store(x0 * sin));
            }
        }
    }
    y
}

/// Halves of the part put pair by pair: (i, i + width / 2) becomes (2i, 2i + 1).
pub fn paired(x: &Array3<f64>, part: Range<usize>) -> Array3<f64> {
    let half = part.len() / 2;
    let from = |i: usize| part.start + i / 2 + i % 2 * half;
    let place = |j: usize| if part.contains(&j) { from(j - part.start) } else { j };
    Array3::from_shape_fn(x.dim(), |(t, h, j)| x[[t, h, place(j)]])
}

/// position * theta^(-power). PyTorch makes it in f32: the power, its reciprocal and the product are rounded, and how well
/// the power is computed hangs on the device.
fn angle(a: Arith, position: f64, theta: f64, power: f64) -> f64 {
    match a.recipe() {
        Some((recipe, order)) if recipe.is_torch() => {
            let exact = theta.powf(f64::from(power as f32)) as f32;
            let raised = f32::from_bits(exact.to_bits().saturating_add_signed(order.power_ulps()));
            a.round(position * a.round(1.0 / f64::from(raised)))
        }
        _ => position * theta.powf(-power),
    }
}

/// One matrix per head: y\[t, h\] = W\[h\] x\[t, h\]. `absorb_q` (W = k_b: nope to latent) and `value_up` (W = v_b:
/// latent to value).
pub fn per_head(a: Arith, x: ArrayView3<'_, f64>, w: &Array3<f32>) -> Array3<f64> {
    let mut y = Array3::zeros((x.dim().0, w.dim().0, w.dim().1));
    for (h, w) in w.outer_iter().enumerate() {
        y.index_axis_mut(Axis(1), h).assign(&a.weigh(x.index_axis(Axis(1), h), w));
    }
    y
}

/// The query against the latent: q_absorbed\[t, h\] = k_b\[h\] q_nope\[t, h\], k_b \[heads, latent, nope\].
pub fn absorb_q(a: Arith, q_nope: ArrayView3<'_, f64>, k_b: &Array3<f32>) -> Array3<f64> {
    per_head(a, q_nope, k_b)
}

/// The value heads of an attended latent: context\[t, h\] = v_b\[h\] latent\[t, h\], v_b \[heads, value, latent\].
pub fn value_up(a: Arith, latent: ArrayView3<'_, f64>, v_b: &Array3<f32>) -> Array3<f64> {
    per_head(a, latent, v_b)
}

/// Indexer scores s\[t, u\] = sum over heads of w\[t, h\] relu(q\[t, h\] . k\[u\]), minus infinity where u is later
/// than the query. `rows` are the tokens that the rows of `q` and `w` belong to; the result is \[rows, keys\].
pub fn index_scores(a: Arith, q: &Array3<f64>, k: &Array2<f64>, w: &Array2<f64>, rows: &[usize]) -> Array2<f64> {
    scores(a, q, k, (w, |v| if v < 0.0 { 0.0 } else { v }), rows) // NaN stays NaN
}

/// The same without relu, as a mistake has it.
pub fn index_scores_without_relu(
    a: Arith,
    q: &Array3<f64>,
    k: &Array2<f64>,
    w: &Array2<f64>,
    rows: &[usize],
) -> Array2<f64> {
    scores(a, q, k, (w, |v| v), rows)
}

fn scores(
    a: Arith,
    q: &Array3<f64>,
    k: &Array2<f64>,
    (w, relu): (&Array2<f64>, fn(f64) -> f64),
    rows: &[usize],
) -> Array2<f64> {
    let mut scores = Array2::from_elem((rows.len(), k.nrows()), f64::NEG_INFINITY);
    // Autocast takes these products for ones with weights.
    let held = |v: f64| if is_autocast(a) { Half::Bf16.round(v) } else { v };
    let k = k.mapv(held);
    for (i, &t) in rows.iter().enumerate() {
        let visible = k.slice(s![..=t, ..]);
        let mut hits = a.dots(q.index_axis(Axis(0), i).mapv(held).view(), visible);
        hits.mapv_inplace(|v| held(relu(v)));
        let sums = a.dots(w.slice(s![i..=i, ..]).mapv(held).view(), hits.t());
        scores.slice_mut(s![i, ..=t]).assign(&sums.row(0).mapv(held));
    }
    scores
}

/// The places of the `k` largest values, largest first; of equal values the first place wins. NaN counts as minus
/// infinity.
pub fn top_k(values: &[f64], k: usize) -> Vec<usize> {
    // Adding 0.0 makes -0.0 equal to 0.0.
    let key = |i: usize| if values[i].is_nan() { f64::NEG_INFINITY } else { values[i] + 0.0 };
    let mut places: Vec<usize> = (0..values.len()).collect();
    places.sort_by(|&i, &j| key(j).total_cmp(&key(i)).then(i.cmp(&j)));
    places.truncate(k);
    places
}

/// Per row the keys with the `k` best scores among those up to the row's token, ascending, padded with -1: \[rows, k\].
pub fn index_top_k(scores: &Array2<f64>, rows: &[usize], k: usize) -> Array2<f64> {
    let mut chosen = Array2::from_elem((rows.len(), k), -1.0);
    for (i, &t) in rows.iter().enumerate() {
        let visible = scores.slice(s![i, ..=t]).to_vec();
        let mut keys = top_k(&visible, k);
        keys.sort_unstable();
        for (place, key) in chosen.row_mut(i).iter_mut().zip(keys) {
            *place = key as f64;
        }
    }
    chosen
}

/// Absorbed attention over chosen keys: softmax(scale q . k) applied to the latents. `q_absorbed` \[rows, heads,
/// latent\] and `q_rope` \[rows, heads, rope\] meet `latent` \[keys, latent\] and `k_rope` \[keys, rope\]; `keys` lists
/// the chosen ones per row (never none). The result is \[rows, heads, latent\].
pub fn attention(
    a: Arith,
    q_absorbed: ArrayView3<'_, f64>,
    q_rope: ArrayView3<'_, f64>,
    latent: &Array2<f64>,
    k_rope: ArrayView2<'_, f64>,
    keys: &[Vec<usize>],
    scale: f64,
) -> Array3<f64> {
    let mut out = Array3::zeros(q_absorbed.dim());
    for (i, keys) in keys.iter().enumerate() {
        let queries = joined(q_absorbed.index_axis(Axis(0), i), q_rope.index_axis(Axis(0), i));
        let values = latent.select(Axis(0), keys);
        let rows = joined(values.view(), k_rope.select(Axis(0), keys).view());
        out.index_axis_mut(Axis(0), i).assign(&attend(a, queries.view(), rows.view(), values.view(), scale));
    }
    out
}

/// Attention with keys and values of every head made from the latents, as engines do that do not absorb: `q` \[rows,
/// heads, nope + rope\], `k_b` \[heads, latent, nope\], `v_b` \[heads, value, latent\], the rest as for [`attention`]. The
/// result is \[rows, heads, value\].
pub fn expanded_attention(
    a: Arith,
    q: ArrayView3<'_, f64>,
    latent: &Array2<f64>,
    k_rope: ArrayView2<'_, f64>,
    (k_b, v_b): (&Array3<f32>, &Array3<f32>),
    keys: &[Vec<usize>],
    scale: f64,
) -> Array3<f64> {
    let mut out = Array3::zeros((q.dim().0, v_b.dim().0, v_b.dim().1));
    for (h, (k_b, v_b)) in k_b.outer_iter().zip(v_b.outer_iter()).enumerate() {
        let (nope, values) = (a.weigh(latent.view(), k_b.t()), a.weigh(latent.view(), v_b));
        let rows = joined(nope.view(), k_rope.mapv(|v| a.product(v)).view());
        for (i, keys) in keys.iter().enumerate() {
            let query = q.slice(s![i, h..=h, ..]).mapv(|v| a.product(v));
            let (rows, values) = (rows.select(Axis(0), keys), values.select(Axis(0), keys));
            let attended = attend(a, query.view(), rows.view(), values.view(), scale);
            out.slice_mut(s![i, h, ..]).assign(&attended.row(0));
        }
    }
    out
}

/// softmax(scale q . k) v: \[n, width\], \[keys, width\] and \[keys, value\] give \[n, value\]. Half types store scores and
/// probabilities, or, in one pass over the keys, the exponentials before they are divided by their sum.
fn attend(a: Arith, q: ArrayView2<'_, f64>, k: ArrayView2<'_, f64>, v: ArrayView2<'_, f64>, scale: f64) -> Array2<f64> {
    let scale = a.round(scale);
    let mut p = a.dots(q, k);
    let Some((half, order)) = a.recipe().and_then(|(recipe, order)| Some((recipe.narrow()?, order))) else {
        for mut head in p.rows_mut() {
            head.mapv_inplace(|v| a.round(v * scale));
            softmax(a, head);
        }
        return a.dots(p.view(), v.t());
    };
    let mut sums = vec![1.0; p.nrows()];
    for (mut head, sum) in p.rows_mut().into_iter().zip(&mut sums) {
        if order.is_plain() {
            head.mapv_inplace(|v| half.round(half.round(v) * scale));
            softmax(a, head.view_mut());
        } else {
            let max = head.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            head.mapv_inplace(|v| a.round(a.round(a.round(v * scale) - a.round(max * scale)).exp()));
            *sum = a.sum(&head.to_vec());
        }
        head.mapv_inplace(|v| half.round(v));
    }
    let mut out = a.dots(p.view(), v.t());
    for (mut row, sum) in out.rows_mut().into_iter().zip(sums) {
        row.mapv_inplace(|v| half.round(v / sum));
    }
    out
}

/// \[left | right\] along the last axis; both have the same number of rows.
pub fn joined(left: ArrayView2<'_, f64>, right: ArrayView2<'_, f64>) -> Array2<f64> {
    let mut both = Array2::zeros((left.nrows(), left.ncols() + right.ncols()));
    both.slice_mut(s![.., ..left.ncols()]).assign(&left);
    both.slice_mut(s![.., left.ncols()..]).assign(&right);
    both
}

/// exp(x - max) / sum of the same, in place.
pub fn softmax(a: Arith, mut x: ArrayViewMut1<'_, f64>) {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    x.mapv_inplace(|v| a.round(a.round(v - max).exp()));
    let sum = a.sum(&x.to_vec());
    x.mapv_inplace(|v| a.round(v / sum));
}

/// 1 / (1 + exp(-x))
pub fn sigmoid(a: Arith, x: f64) -> f64 {
    a.round(1.0 / a.round(1.0 + a.round((-x).exp())))
}

/// silu(gate x) * (up x): the inner activations of a gated unit, before its down projection.
pub fn swiglu(a: Arith, x: &Array2<f64>, gate: &Array2<f32>, up: &Array2<f32>) -> Array2<f64> {
    let mut hidden = linear(a, x, gate);
    hidden.zip_mut_with(&linear(a, x, up), |g, u| *g = a.product(a.product(*g * sigmoid(a, *g)) * u));
    hidden
}

/// Router logits: y = W x, per row of x. No recipe but autocast rounds x: a choice of experts hangs on small differences.
pub fn router_logits(a: Arith, x: &Array2<f64>, w: &Array2<f32>) -> Array2<f64> {
    if is_autocast(a) { linear(a, x, w) } else { a.dots(x.view(), w.view()) }
}

fn is_autocast(a: Arith) -> bool {
    a.recipe().is_some_and(|(recipe, _)| recipe == RefRecipe::TorchAutocast)
}

/// A number of the router, which autocast alone stores more narrowly than f32.
fn routing(a: Arith, v: f64) -> f64 {
    if is_autocast(a) { a.product(v) } else { a.round(v) }
}

/// Router probabilities from logits, \[tokens, experts\].
pub fn router_probabilities(a: Arith, logits: &Array2<f64>, gating: Gating) -> Array2<f64> {
    let mut p = logits.clone();
    match gating {
        Gating::Sigmoid => p.mapv_inplace(|v| routing(a, sigmoid(a, v))),
        Gating::SqrtSoftplus => p.mapv_inplace(|v| a.round(a.round(v.max(0.0) + (-v.abs()).exp().ln_1p()).sqrt())),
        Gating::Softmax => p.rows_mut().into_iter().for_each(|row| softmax(a, row)),
    }
    p
}

/// What experts are chosen by: probability plus correction bias, minus infinity outside the best `groups_used` of
/// `groups` groups. A group's score is the sum of its two best.
pub fn choice_scores(a: Arith, p: &Array2<f64>, bias: &Array1<f32>, groups: usize, groups_used: usize) -> Array2<f64> {
    let mut scores = p.clone();
    for mut row in scores.rows_mut() {
        row.zip_mut_with(bias, |v, &b| *v = a.round(*v + f64::from(b)));
        if groups_used < groups {
            let size = row.len() / groups;
            let members = |g: usize| row.slice(s![g * size..(g + 1) * size]).to_vec();
            let best_two = |g: usize| a.sum(&top_k(&members(g), 2).iter().map(|&i| members(g)[i]).collect::<Vec<_>>());
            let kept = top_k(&(0..groups).map(best_two).collect::<Vec<_>>(), groups_used);
            for (e, v) in row.iter_mut().enumerate() {
                if !kept.contains(&(e / size)) {
                    *v = f64::NEG_INFINITY;
                }
            }
        }
    }
    scores
}

/// The `k` experts of each token with the best choice scores, best first: \[tokens, k\].
pub fn choose_experts(scores: &Array2<f64>, k: usize) -> Array2<f64> {
    let mut ids = Array2::zeros((scores.nrows(), k));
    for (mut ids, scores) in ids.rows_mut().into_iter().zip(scores.rows()) {
        for (id, expert) in ids.iter_mut().zip(top_k(&scores.to_vec(), k)) {
            *id = expert as f64;
        }
    }
    ids
}

/// Weights of the chosen experts: their unbiased probabilities, divided by their sum + 1e-20 where `normalise`, times
/// `scale`.
pub fn expert_weights(a: Arith, p: &Array2<f64>, ids: &[Vec<usize>], normalise: bool, scale: f64) -> Array2<f64> {
    let mut weights = Array2::zeros((ids.len(), ids.first().map_or(0, Vec::len)));
    for (t, ids) in ids.iter().enumerate() {
        let chosen: Vec<f64> = ids.iter().map(|&e| p[[t, e]]).collect();
        let sum = if normalise { routing(a, routing(a, a.sum(&chosen)) + a.round(1e-20)) } else { 1.0 };
        for (w, v) in weights.row_mut(t).iter_mut().zip(chosen) {
            *w = routing(a, routing(a, v / sum) * a.round(scale));
        }
    }
    weights
}

/// sum over slots of weight\[t, j\] y\[t, j\]: \[tokens, slots\] and \[tokens, slots, width\] give \[tokens, width\]. Half
/// types store the sum, or every addend and every step of it.
pub fn mix_experts(a: Arith, weights: &Array2<f64>, y: &Array3<f64>) -> Array2<f64> {
    let mut out = Array2::zeros((y.dim().0, y.dim().2));
    let by_steps = a.recipe().is_some_and(|(recipe, order)| recipe.narrow().is_some() && order.is_plain());
    for (t, y) in y.outer_iter().enumerate() {
        if by_steps {
            for (weight, y) in weights.row(t).iter().zip(y.rows()) {
                out.row_mut(t).zip_mut_with(&y, |sum, v| *sum = a.store(*sum + a.product(weight * v)));
            }
        } else {
            let sum = a.dots(weights.slice(s![t..=t, ..]), y.t());
            out.slice_mut(s![t..=t, ..]).assign(&sum.mapv(|v| a.store(v)));
        }
    }
    out
}

#[cfg(test)]
#[path = "ops_tests.rs"]
mod tests;
