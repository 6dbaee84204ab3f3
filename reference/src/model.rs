//! The forward pass, in the order of the paper, one layer in memory at a time. Every place that has a name is handed to
//! the caller as it is computed; nothing is kept.

use ndarray::{Array2, Array3, ArrayD, Axis, Dimension, s};

use crate::arith::Arith;
use crate::config::RefConfig;
use crate::error::RefError;
use crate::experts;
use crate::names::RefParam;
use crate::ops;
use crate::points::{RefOptions, Site};
use crate::weights::Weights;

/// Receives the name and the value of each probe point, first axis tokens.
pub type Sink<'a> = &'a mut dyn FnMut(&str, ArrayD<f64>);

/// Choices that another run made, by the name of the point (`index_topk` with -1 behind the last key, `expert_ids`),
/// first axis tokens; the model goes on with these in place of its own.
pub type Choices<'a> = &'a dyn Fn(&str) -> Option<ArrayD<f32>>;

/// Runs the model over the token ids `ids` at positions 0, 1, 2, .. and hands every probe point of
/// [`points`](crate::points::points) to `sink`, in that order. MTP row t pairs the trunk's normed hidden state of token
/// t with token t + 1, at position t + 1; it has one row less.
///
/// # Errors
/// A token id outside the vocabulary, or a tensor that is missing or does not fit.
pub fn forward(
    c: &RefConfig,
    w: &dyn Weights,
    ids: &[u32],
    a: Arith,
    options: RefOptions,
    sink: Sink<'_>,
) -> Result<(), RefError> {
    forward_choosing(c, w, ids, a, options, &|_| None, sink)
}

/// As [`forward`], but goes on with the choices that `choices` gives where it gives any. The sink still receives the
/// model's own ones, and the scores they were made from, so that a reader can tell how near the two are.
///
/// # Errors
/// As for [`forward`], and a forced choice that does not fit: another number of rows or columns, an expert that does
/// not exist, a token without a key.
pub fn forward_choosing(
    c: &RefConfig,
    w: &dyn Weights,
    ids: &[u32],
    a: Arith,
    options: RefOptions,
    choices: Choices<'_>,
    sink: Sink<'_>,
) -> Result<(), RefError> {
    let mut x = Array2::zeros((ids.len(), c.hidden));
    for (mut row, &id) in x.rows_mut().into_iter().zip(ids) {
        row.assign(&w.embedding_row(id as usize)?.mapv(|v| a.store(f64::from(v))));
    }
    let embed = x.clone();
    let positions: Vec<usize> = (0..ids.len()).collect();
    let mut run = Run { c, w, a, options, choices, sink, site: Site::Model };
    run.emit("embed", &x);

    let mut keys = Vec::new();
    for n in 0..c.layers {
        run.site = Site::Trunk(n);
        x = run.layer(x, n, &positions, &mut keys)?;
    }

    run.site = Site::Model;
    let x = ops::rms_norm(a, &x, &*w.vector(None, RefParam::FinalNorm)?, c.eps);
    run.emit("final_norm", &x);
    run.emit("logits", &ops::linear(a, &x, &*w.matrix(None, RefParam::Head)?));

    if options.mtp && c.mtp_layers > 0 && ids.len() > 1 {
        run.site = Site::Mtp;
        run.mtp(&embed, &x, &positions)?;
    }
    Ok(())
}

struct Run<'a, 's> {
    c: &'a RefConfig,
    w: &'a dyn Weights,
    a: Arith,
    options: RefOptions,
    choices: Choices<'s>,
    sink: Sink<'s>,
    site: Site,
}

impl Run<'_, '_> {
    fn emit<D: Dimension>(&mut self, op: &str, value: &ndarray::Array<f64, D>) {
        (self.sink)(&format!("{}{op}", self.site.prefix()), value.clone().into_dyn());
    }

    /// The model's own choice, or the one forced on it: per row the indices, all below `below(row)`, without
    /// padding.
    fn choice(&self, op: &str, own: &Array2<f64>, below: impl Fn(usize) -> usize) -> Result<Vec<Vec<usize>>, RefError> {
        let point = format!("{}{op}", self.site.prefix());
        let (rows, width) = own.dim();
        let forced = (self.choices)(&point);
        let wrong = |expected: String, found: String| RefError::Choice { point: point.clone(), expected, found };
        let chosen = match forced {
            None => own.clone(),
            Some(forced) if forced.len() != rows * width || forced.shape().first() != Some(&rows) => {
                return Err(wrong(format!("[{rows}, {width}]"), format!("{:?}", forced.shape())));
            }
            Some(forced) => Array2::from_shape_vec((rows, width), forced.iter().map(|&v| f64::from(v)).collect())
                .map_err(|e| wrong(format!("[{rows}, {width}]"), e.to_string()))?,
        };
        let row = |(t, row): (usize, ndarray::ArrayView1<'_, f64>)| {
            let limit = below(t);
            let index = |&v: &f64| match v >= 0.0 && v < limit as f64 && v.fract() == 0.0 {
                true => Ok(v as usize),
                false => Err(wrong(format!("indices below {limit} at token {t}"), v.to_string())),
            };
            let row: Vec<usize> = row.iter().filter(|&&v| v != -1.0).map(index).collect::<Result<_, _>>()?;
            let whole = width.min(limit);
            if row.len() == whole {
                Ok(row)
            } else {
                Err(wrong(format!("{whole} indices at token {t}"), row.len().to_string()))
            }
        };
        chosen.rows().into_iter().enumerate().map(row).collect()
    }

    fn layer(
        &mut self,
        x: Array2<f64>,
        n: usize,
        positions: &[usize],
        keys: &mut Vec<Vec<usize>>,
    ) -> Result<Array2<f64>, RefError> {
        self.emit("input", &x);
        let attended = self.attention(&x, n, positions, keys)?;
        let x = ops::add(self.a, &x, &attended);
        self.emit("residual", &x);
        let h = ops::rms_norm(self.a, &x, &*self.w.vector(Some(n), RefParam::FfnNorm)?, self.c.eps);
        self.emit("ffn.norm", &h);
        let fed = if self.c.is_moe(n) { self.moe(&h, n)? } else { self.dense_ffn(&h, n)? };
        self.emit("ffn.out", &fed);
        let x = ops::add(self.a, &x, &fed);
        self.emit("output", &x);
        Ok(x)
    }

    /// Multi-head latent attention, absorbed unless the options say otherwise. `keys` holds, per token, the keys that the last full layer chose.
    fn attention(
        &mut self,
        x: &Array2<f64>,
        n: usize,
        positions: &[usize],
        keys: &mut Vec<Vec<usize>>,
    ) -> Result<Array2<f64>, RefError> {
        let (c, w, a, at) = (self.c, self.w, self.a, Some(n));
        let h = ops::rms_norm(a, x, &*w.vector(at, RefParam::AttnNorm)?, c.eps);
        self.emit("attn.norm", &h);

        let q_a = ops::linear(a, &h, &*w.matrix(at, RefParam::QA)?);
        self.emit("attn.q_a", &q_a);
        let q_latent = ops::latent_norm(a, &q_a, &*w.vector(at, RefParam::QANorm)?, c.latent_eps);
        self.emit("attn.q_a_norm", &q_latent);
        let q_raw = heads(ops::linear(a, &q_latent, &*w.matrix(at, RefParam::QB)?), c.heads);
        self.emit("attn.q_raw", &q_raw);
        let q = ops::rope(a, &q_raw, c.nope..c.nope + c.rope, positions, c.rope_theta, c.rope_style);
        self.emit("attn.q", &q);

        let kv_a = ops::linear(a, &h, &*w.matrix(at, RefParam::KvA)?);
        self.emit("attn.kv_a", &kv_a);
        let (latent, k_rope) = (kv_a.slice(s![.., ..c.kv_rank]).to_owned(), kv_a.slice(s![.., c.kv_rank..]).to_owned());
        let latent = ops::latent_norm(a, &latent, &*w.vector(at, RefParam::KvANorm)?, c.latent_eps);
        self.emit("attn.kv_latent", &latent);
        let k_rope =
            ops::rope(a, &heads(k_rope, 1), 0..c.rope, positions, c.rope_theta, c.rope_style).remove_axis(Axis(1));
        self.emit("attn.k_rope", &k_rope);

        let (k_b, v_b) = (w.heads(at, RefParam::KB)?, w.heads(at, RefParam::VB)?);
        let q_absorbed = match self.options.expanded {
            true => None,
            false => Some(ops::absorb_q(a, q.slice(s![.., .., ..c.nope]), &k_b)),
        };
        q_absorbed.iter().for_each(|q| self.emit("attn.q_absorbed", q));
        if self.site == Site::Mtp || self.options.dense {
            *keys = (0..positions.len()).map(|t| (0..=t).collect()).collect();
        } else if c.index_full[n] {
            *keys = self.index(&h, &q_latent, n, positions)?;
        }
        let scale = ((c.nope + c.rope) as f64).powf(-0.5);
        let context = match q_absorbed {
            None => ops::expanded_attention(a, q.view(), &latent, k_rope.view(), (&k_b, &v_b), keys, scale),
            Some(absorbed) => {
                let q_rope = q.slice(s![.., .., c.nope..]);
                let attended = ops::attention(a, absorbed.view(), q_rope, &latent, k_rope.view(), keys, scale);
                self.emit("attn.latent", &attended);
                ops::value_up(a, attended.view(), &v_b)
            }
        };
        self.emit("attn.context", &context);
        let out = ops::linear(a, &flat(context), &*w.matrix(at, RefParam::O)?);
        self.emit("attn.out", &out);
        Ok(out)
    }

    /// The indexer of a full layer: the keys that each token may attend to.
    fn index(
        &mut self,
        h: &Array2<f64>,
        q_latent: &Array2<f64>,
        n: usize,
        positions: &[usize],
    ) -> Result<Vec<Vec<usize>>, RefError> {
        let (c, w, a, at) = (self.c, self.w, self.a, Some(n));
        let q = heads(ops::linear(a, q_latent, &*w.matrix(at, RefParam::IndexQB)?), c.index_heads);
        let q = ops::rope(a, &q, 0..c.rope, positions, c.rope_theta, c.index_rope_style);
        self.emit("attn.index_q", &q);

        let k = ops::linear(a, h, &*w.matrix(at, RefParam::IndexK)?);
        let (weight, bias) = (w.vector(at, RefParam::IndexKNormW)?, w.vector(at, RefParam::IndexKNormB)?);
        let k = ops::layer_norm(a, &k, &weight, &bias, c.index_eps);
        let k = ops::rope(a, &heads(k, 1), 0..c.rope, positions, c.rope_theta, c.index_rope_style).remove_axis(Axis(1));
        self.emit("attn.index_k", &k);

        let weights = index_weights(a, c, &ops::linear(a, h, &*w.matrix(at, RefParam::IndexProj)?));
        self.emit("attn.index_weights", &weights);

        let tokens: Vec<usize> = (0..positions.len()).collect();
        let scores = ops::index_scores(a, &q, &k, &weights, &tokens);
        self.emit("attn.index_scores", &scores);
        let chosen = ops::index_top_k(&scores, &tokens, c.top_k);
        self.emit("attn.index_topk", &chosen);
        self.choice("attn.index_topk", &chosen, |t| t + 1)
    }

    fn dense_ffn(&mut self, h: &Array2<f64>, n: usize) -> Result<Array2<f64>, RefError> {
        let (w, a, at) = (self.w, self.a, Some(n));
        let hidden = ops::swiglu(a, h, &*w.matrix(at, RefParam::Gate)?, &*w.matrix(at, RefParam::Up)?);
        self.emit("ffn.hidden", &hidden);
        Ok(ops::linear(a, &hidden, &*w.matrix(at, RefParam::Down)?))
    }

    fn moe(&mut self, h: &Array2<f64>, n: usize) -> Result<Array2<f64>, RefError> {
        let (c, w, a, at) = (self.c, self.w, self.a, Some(n));
        let logits = ops::router_logits(a, h, &*w.matrix(at, RefParam::Router)?);
        self.emit("ffn.router_logits", &logits);
        let p = ops::router_probabilities(a, &logits, c.gating);
        let scores = ops::choice_scores(a, &p, &*w.vector(at, RefParam::RouterBias)?, c.groups, c.groups_used);
        self.emit("ffn.choice_scores", &scores);
        let ids = ops::choose_experts(&scores, c.experts_used);
        self.emit("ffn.expert_ids", &ids);
        let ids = self.choice("ffn.expert_ids", &ids, |_| c.experts)?;
        let weights = ops::expert_weights(a, &p, &ids, c.normalise_weights, c.routed_scale);
        self.emit("ffn.expert_weights", &weights);

        let hidden = experts::hidden(a, c, w, n, h, &ids)?;
        self.emit("ffn.hidden", &hidden);
        let routed = experts::routed(a, w, n, &hidden, &weights, &ids, |_| 0..c.moe_ffn)?;
        self.emit("ffn.routed", &routed);
        let shared = experts::shared(a, c, w, n, &hidden, 0..c.shared_experts * c.moe_ffn)?;
        self.emit("ffn.shared", &shared);
        let reduced = experts::reduced(a, c, w, n, &hidden, &weights, &ids)?;
        Ok(reduced.unwrap_or_else(|| ops::add(a, &routed, &shared)))
    }

    /// The first MTP layer: `embed` are the trunk's input rows, `hidden` its rows after the final norm.
    fn mtp(&mut self, embed: &Array2<f64>, hidden: &Array2<f64>, positions: &[usize]) -> Result<(), RefError> {
        let (c, w, a, n) = (self.c, self.w, self.a, self.c.layers);
        let e = ops::rms_norm(a, &embed.slice(s![1.., ..]).to_owned(), &*w.vector(Some(n), RefParam::ENorm)?, c.eps);
        self.emit("enorm", &e);
        let h = ops::rms_norm(a, &hidden.slice(s![..-1, ..]).to_owned(), &*w.vector(Some(n), RefParam::HNorm)?, c.eps);
        self.emit("hnorm", &h);
        let x = ops::linear(a, &ops::joined(e.view(), h.view()), &*w.matrix(Some(n), RefParam::EhProj)?);
        self.emit("eh_proj", &x);
        let x = self.layer(x, n, &positions[1..], &mut Vec::new())?;
        let x = ops::rms_norm(a, &x, &*w.vector(Some(n), RefParam::MtpHeadNorm)?, c.eps);
        self.emit("final_norm", &x);
        self.emit("logits", &ops::linear(a, &x, &*w.matrix(None, RefParam::Head)?));
        Ok(())
    }
}

/// The indexer's head weights with both of its scales, 1 / sqrt(index_heads * index_dim).
pub(crate) fn index_weights(a: Arith, c: &RefConfig, projected: &Array2<f64>) -> Array2<f64> {
    let scale = a.round(((c.index_heads * c.index_dim) as f64).powf(-0.5));
    projected.mapv(|v| a.round(v * scale))
}

/// \[tokens, heads * width\] as \[tokens, heads, width\].
pub(crate) fn heads(x: Array2<f64>, heads: usize) -> Array3<f64> {
    let width = x.ncols() / heads;
    Array3::from_shape_fn((x.nrows(), heads, width), |(t, h, i)| x[[t, h * width + i]])
}

/// \[tokens, heads, width\] as \[tokens, heads * width\].
pub(crate) fn flat(x: Array3<f64>) -> Array2<f64> {
    let (tokens, heads, width) = x.dim();
    Array2::from_shape_fn((tokens, heads * width), |(t, i)| x[[t, i / width, i % width]])
}
