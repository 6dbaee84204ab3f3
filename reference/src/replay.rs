//! One operation at a time, from the inputs that a target captured. The target runs once, untouched; each of its
//! operations is then judged on its own inputs, so that errors do not travel. The same door gives the partial sums that
//! each rank should have contributed.

use std::fmt;

use ndarray::{Array2, Array3, ArrayD, Axis, s};

use crate::arith::Arith;
use crate::bridge::Bridge;
use crate::config::{RefConfig, RopeStyle};
use crate::error::RefError;
use crate::experts;
use crate::model::{flat, heads, index_weights};
use crate::names::RefParam;
use crate::ops;
use crate::points::{RefOptions, Site, parse, partial_inputs_of, row_shape};
use crate::slice::{ExpertSplit, Placement, Split, placement};
use crate::variant::Variant;
use crate::weights::Weights;

/// Why an operation cannot be recomputed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplayError {
    /// This model and run have no such point, or (for partial sums) it is not a sum over ranks.
    Point(String),
    /// An input was not captured.
    Missing {
        /// The point asked for.
        point: String,
        /// The input that it needs.
        input: String,
    },
    /// A captured input has the wrong shape, or holds an index that points nowhere.
    Input {
        /// The captured input.
        input: String,
        /// What would have been right.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A row was asked for that the run does not have.
    Row {
        /// The row.
        row: usize,
        /// How many there are.
        rows: usize,
    },
    /// The weights could not be read.
    Weights(RefError),
}

impl fmt::Display for ReplayError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReplayError::Point(point) => write!(f, "`{point}` is not a point that can be replayed in this run"),
            ReplayError::Missing { point, input } => write!(f, "`{point}` needs `{input}`, which was not captured"),
            ReplayError::Input { input, expected, found } => {
                write!(f, "captured `{input}`: expected {expected}, found {found}")
            }
            ReplayError::Row { row, rows } => write!(f, "row {row} of {rows} was asked for"),
            ReplayError::Weights(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ReplayError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ReplayError::Weights(error) => Some(error),
            _ => None,
        }
    }
}

impl From<RefError> for ReplayError {
    fn from(error: RefError) -> Self {
        ReplayError::Weights(error)
    }
}

/// Captured values of a point, all tokens of the run, first axis tokens; the other axes may be merged. `ids` are the
/// token ids.
pub type Captured<'a> = &'a dyn Fn(&str) -> Option<ArrayD<f32>>;

/// What operations are recomputed from, and how.
#[derive(Clone, Copy)]
pub struct Replay<'a> {
    /// The configuration.
    pub config: &'a RefConfig,
    /// The weights.
    pub weights: &'a dyn Weights,
    /// The arithmetic.
    pub arith: Arith,
    /// How the run was made.
    pub options: RefOptions,
    /// What was captured of it.
    pub inputs: Captured<'a>,
    /// Inputs that were not captured are recomputed in the same arithmetic, and kept here; without a bridge they are missing.
    pub bridge: Option<&'a Bridge>,
}

impl Replay<'_> {
    /// Recomputes `point` for the rows (tokens) `rows` from the captured inputs that
    /// [`inputs_of`](crate::points::inputs_of) names. The result is \[rows, ..\] with the axes of [`row_shape`]. Choices
    /// (`index_topk`, `expert_ids`) are the exact ones for the captured scores.
    ///
    /// # Errors
    /// [`ReplayError`]: an unknown point, an input that is missing or malformed, a row out of range, or unreadable weights.
    pub fn point(&self, point: &str, rows: &[usize]) -> Result<ArrayD<f64>, ReplayError> {
        let (operation, op) = self.operation(point, rows)?;
        operation.run(op)
    }

    /// The partial sums of `point` that ranks 0 .. `tp` should contribute, each \[rows, hidden\], by the rules of
    /// [`slice`](crate::slice), from the captured inputs that [`partial_inputs_of`] names. Their sum is the result of
    /// [`Replay::point`], but for rounding.
    ///
    /// # Errors
    /// As for [`Replay::point`]; a point that is not a sum over ranks; a degree that does not divide the axis.
    pub fn partials(
        &self,
        point: &str,
        rows: &[usize],
        tp: usize,
        experts: ExpertSplit,
    ) -> Result<Vec<ArrayD<f64>>, ReplayError> {
        let (operation, op) = self.operation(point, rows)?;
        partial_inputs_of(self.config, self.options, point).ok_or_else(|| ReplayError::Point(point.to_string()))?;
        (0..tp).map(|rank| Ok(operation.partial(op, Split { tp, rank, experts })?.into_dyn())).collect()
    }

    fn operation<'a>(&'a self, point: &'a str, rows: &'a [usize]) -> Result<(Operation<'a>, &'a str), ReplayError> {
        let found = parse(self.config, self.options, point);
        let (site, op) = found.ok_or_else(|| ReplayError::Point(point.to_string()))?;
        Ok((Operation { of: *self, point, site, rows }, op))
    }
}

/// Latents and rotated keys of all tokens, and the keys of each row asked for.
type Cached = (Array2<f64>, Array2<f64>, Vec<Vec<usize>>);

/// One point at some rows.
struct Operation<'a> {
    of: Replay<'a>,
    point: &'a str,
    site: Site,
    rows: &'a [usize],
}

impl Operation<'_> {
    fn run(&self, op: &str) -> Result<ArrayD<f64>, ReplayError> {
        let (c, w, a, at) = (self.of.config, self.of.weights, self.of.arith, self.site.layer(self.of.config));
        let linear =
            |input: &str, p: RefParam| Ok::<_, ReplayError>(ops::linear(a, &self.own(input)?, &*w.matrix(at, p)?));
        let norm =
            |x: Array2<f64>, p: RefParam, eps: f64| Ok::<_, ReplayError>(ops::rms_norm(a, &x, &*w.vector(at, p)?, eps));
        let latent_norm = |x: Array2<f64>, p: RefParam| {
            Ok::<_, ReplayError>(ops::latent_norm(a, &x, &*w.vector(at, p)?, c.latent_eps).into_dyn())
        };
        let rope = |x: Array3<f64>, start: usize| {
            let style = if op.starts_with("attn.index") { c.index_rope_style } else { c.rope_style };
            let (part, theta) = (start..start + c.rope, c.rope_theta);
            match self.of.options.variant {
                Some(Variant::Unrotated) => x,
                Some(Variant::HalvesPaired) => {
                    let turned = ops::rope(a, &x, part.clone(), &self.positions(), theta, RopeStyle::HalfSplit);
                    ops::paired(&turned, part)
                }
                _ => ops::rope(a, &x, part, &self.positions(), theta, style),
            }
        };
        let times = |x: Array2<f64>, variant: fn(Variant) -> Option<f64>| {
            let factor = self.of.options.variant.and_then(variant);
            factor.map_or(x.clone(), |factor| x.mapv(|v| a.store(v * factor)))
        };
        let addend = |x| times(x, |v| if let Variant::Addend(factor) = v { Some(factor) } else { None });
        let wide = |x: Array2<f64>| Ok(x.into_dyn());
        match op {
            "embed" => wide(self.embedding(&(0..c.vocab))?),
            "enorm" => {
                let next: Vec<usize> = self.rows.iter().map(|t| t + 1).collect();
                wide(norm(self.at("embed", &next)?, RefParam::ENorm, c.eps)?)
            }
            "hnorm" => wide(norm(self.at("final_norm", self.rows)?, RefParam::HNorm, c.eps)?),
            "eh_proj" => {
                let x = ops::joined(self.own("enorm")?.view(), self.own("hnorm")?.view());
                wide(ops::linear(a, &x, &*w.matrix(at, RefParam::EhProj)?))
            }
            "input" => match self.site {
                Site::Mtp => wide(self.own("eh_proj")?),
                Site::Trunk(n) if n > 0 => wide(self.at(&format!("layers.{}.output", n - 1), self.rows)?),
                _ => wide(self.at("embed", self.rows)?),
            },
            "attn.norm" => wide(norm(self.own("input")?, RefParam::AttnNorm, c.eps)?),
            "attn.q_a" => wide(linear("attn.norm", RefParam::QA)?),
            "attn.q_a_norm" => latent_norm(self.own("attn.q_a")?, RefParam::QANorm),
            "attn.q_raw" => Ok(heads(linear("attn.q_a_norm", RefParam::QB)?, c.heads).into_dyn()),
            "attn.q" => Ok(rope(heads(self.own("attn.q_raw")?, c.heads), c.nope).into_dyn()),
            "attn.kv_a" => wide(linear("attn.norm", RefParam::KvA)?),
            "attn.kv_latent" => {
                let latent = self.own("attn.kv_a")?.slice(s![.., ..c.kv_rank]).to_owned();
                latent_norm(latent, RefParam::KvANorm)
            }
            "attn.k_rope" => {
                let k = self.own("attn.kv_a")?.slice(s![.., c.kv_rank..]).to_owned();
                wide(flat(rope(heads(k, 1), 0)))
            }
            "attn.q_absorbed" => {
                let q = heads(self.own("attn.q_raw")?, c.heads);
                Ok(ops::absorb_q(a, q.slice(s![.., .., ..c.nope]), &*w.heads(at, RefParam::KB)?).into_dyn())
            }
            "attn.index_q" => {
                let before_norm = self.of.options.variant == Some(Variant::IndexBeforeNorm);
                let input = if before_norm { "attn.q_a" } else { "attn.q_a_norm" };
                let q = heads(linear(input, RefParam::IndexQB)?, c.index_heads);
                Ok(rope(q, 0).into_dyn())
            }
            "attn.index_k" => {
                let (weight, bias) = (w.vector(at, RefParam::IndexKNormW)?, w.vector(at, RefParam::IndexKNormB)?);
                let k = ops::layer_norm(a, &linear("attn.norm", RefParam::IndexK)?, &weight, &bias, c.index_eps);
                wide(flat(rope(heads(k, 1), 0)))
            }
            "attn.index_weights" => wide(index_weights(a, c, &linear("attn.norm", RefParam::IndexProj)?)),
            "attn.index_scores" => {
                let q = heads(self.own("attn.index_q")?, c.index_heads);
                let k = self.whole(&self.name("attn.index_k"))?;
                self.check_rows(k.nrows())?;
                let score = match self.of.options.variant {
                    Some(Variant::IndexWithoutRelu) => ops::index_scores_without_relu,
                    _ => ops::index_scores,
                };
                wide(score(a, &q, &k, &self.own("attn.index_weights")?, self.rows))
            }
            "attn.index_topk" => wide(ops::index_top_k(&self.own("attn.index_scores")?, self.rows, c.top_k)),
            "attn.latent" => self.latent(),
            "attn.context" if self.of.options.expanded => self.expanded_context(),
            "attn.context" => {
                let latent = heads(self.own("attn.latent")?, c.heads);
                Ok(ops::value_up(a, latent.view(), &*w.heads(at, RefParam::VB)?).into_dyn())
            }
            "attn.out" => wide(linear("attn.context", RefParam::O)?),
            "residual" => wide(ops::add(a, &self.own("input")?, &addend(self.own("attn.out")?))),
            "ffn.norm" => wide(norm(self.own("residual")?, RefParam::FfnNorm, c.eps)?),
            "ffn.router_logits" => {
                wide(ops::router_logits(a, &self.own("ffn.norm")?, &*w.matrix(at, RefParam::Router)?))
            }
            "ffn.choice_scores" => {
                let p = ops::router_probabilities(a, &self.own("ffn.router_logits")?, c.gating);
                wide(ops::choice_scores(a, &p, &*w.vector(at, RefParam::RouterBias)?, c.groups, c.groups_used))
            }
            "ffn.expert_ids" => wide(ops::choose_experts(&self.own("ffn.choice_scores")?, c.experts_used)),
            "ffn.expert_weights" => {
                let mut p = ops::router_probabilities(a, &self.own("ffn.router_logits")?, c.gating);
                if self.of.options.variant == Some(Variant::BiasInWeights) {
                    p = ops::choice_scores(a, &p, &*w.vector(at, RefParam::RouterBias)?, 1, 1);
                }
                wide(ops::expert_weights(a, &p, &self.expert_ids()?, c.normalise_weights, c.routed_scale))
            }
            "ffn.hidden" => match at.filter(|&n| c.is_moe(n)) {
                Some(n) => Ok(experts::hidden(a, c, w, n, &self.own("ffn.norm")?, &self.expert_ids()?)?.into_dyn()),
                None => {
                    let (gate, up) = (w.matrix(at, RefParam::Gate)?, w.matrix(at, RefParam::Up)?);
                    wide(ops::swiglu(a, &self.own("ffn.norm")?, &gate, &up))
                }
            },
            "ffn.routed" => {
                let routed = |v| if let Variant::Routed(factor) = v { Some(factor) } else { None };
                wide(times(self.routed(|_| 0..c.moe_ffn)?, routed))
            }
            "ffn.shared" => wide(self.shared(0..c.shared_experts * c.moe_ffn)?),
            "ffn.out" if at.is_some_and(|n| c.is_moe(n)) => match self.reduced()? {
                Some(sum) => wide(self.of_captured(sum)?),
                None => {
                    let times = if let Some(Variant::Shared(times)) = self.of.options.variant { times } else { 1 };
                    let shared = self.own("ffn.shared")?;
                    wide((0..times).fold(self.own("ffn.routed")?, |sum, _| ops::add(a, &sum, &shared)))
                }
            },
            "ffn.out" => wide(linear("ffn.hidden", RefParam::Down)?),
            "output" => wide(ops::add(a, &self.own("residual")?, &addend(self.own("ffn.out")?))),
            "final_norm" => match self.site {
                Site::Mtp => wide(norm(self.own("output")?, RefParam::MtpHeadNorm, c.eps)?),
                _ => {
                    let x = self.at(&format!("layers.{}.output", c.layers - 1), self.rows)?;
                    wide(norm(x, RefParam::FinalNorm, c.eps)?)
                }
            },
            "logits" => wide(ops::linear(a, &self.own("final_norm")?, &*w.matrix(None, RefParam::Head)?)),
            _ => Err(ReplayError::Point(self.point.to_string())),
        }
    }

    /// The feed-forward's output as ranks make it that round their addends, if there is what these are made from.
    fn reduced(&self) -> Result<Option<Array2<f64>>, ReplayError> {
        let found = |found: Result<Array2<f64>, ReplayError>| match found {
            Err(ReplayError::Missing { .. }) => Ok(None),
            found => found.map(Some),
        };
        let as_usual = !matches!(self.of.options.variant, Some(Variant::Shared(_)));
        let Some(layer) = self.site.layer(self.of.config).filter(|_| self.of.arith.reduces() && as_usual) else {
            return Ok(None);
        };
        let (hidden, weights) = (found(self.own("ffn.hidden"))?, found(self.own("ffn.expert_weights"))?);
        let (Some(hidden), Some(weights)) = (hidden, weights) else { return Ok(None) };
        let hidden = heads(hidden, self.of.config.experts_used + self.of.config.shared_experts);
        Ok(experts::reduced(
            self.of.arith,
            self.of.config,
            self.of.weights,
            layer,
            &hidden,
            &weights,
            &self.expert_ids()?,
        )?)
    }

    /// The output of ranks that round their addends, where these were captured: their sum, and by how much what ranks make
    /// of the same differs from what one makes. What the addends are made from says how much that is, and nothing else: a
    /// captured addend may be another.
    fn of_captured(&self, sum: Array2<f64>) -> Result<Array2<f64>, ReplayError> {
        let (c, a) = (self.of.config, self.of.arith);
        let captured = |op: &str| self.captured(&self.name(op))?.map(|values| pick(&values, self.rows)).transpose();
        let (routed, shared) = (captured("ffn.routed")?, captured("ffn.shared")?);
        if routed.is_none() && shared.is_none() {
            return Ok(sum);
        }
        let (own_routed, own_shared) = (self.routed(|_| 0..c.moe_ffn)?, self.shared(0..c.shared_experts * c.moe_ffn)?);
        let noise = sum - ops::add(a, &own_routed, &own_shared);
        Ok(ops::add(a, &routed.unwrap_or(own_routed), &shared.unwrap_or(own_shared)) + noise)
    }

    fn partial(&self, op: &str, split: Split) -> Result<Array2<f64>, ReplayError> {
        let (c, w, a, at) = (self.of.config, self.of.weights, self.of.arith, self.site.layer(self.of.config));
        let moe = at.is_some_and(|n| c.is_moe(n));
        let columns = |p: RefParam| match placement(c, p, split)? {
            Placement::Cols(range) => Ok::<_, ReplayError>(range),
            _ => Err(ReplayError::Point(self.point.to_string())),
        };
        let linear = |input: &str, p: RefParam| {
            Ok::<_, ReplayError>(ops::linear_part(a, &self.own(input)?, &*w.matrix(at, p)?, columns(p)?))
        };
        let routed = || {
            let held = placement(c, RefParam::DownExps, split)?;
            self.routed(|expert| match &held {
                Placement::Cols(range) => range.clone(),
                Placement::Experts(range) if range.contains(&expert) => 0..c.moe_ffn,
                _ => 0..0,
            })
        };
        match op {
            "embed" => match placement(c, RefParam::Embed, split)? {
                Placement::Vocab { rows, .. } => self.embedding(&rows),
                _ => Err(ReplayError::Point(self.point.to_string())),
            },
            "attn.out" => linear("attn.context", RefParam::O),
            "ffn.out" if !moe => linear("ffn.hidden", RefParam::Down),
            "ffn.routed" => routed(),
            "ffn.shared" => self.shared(columns(RefParam::DownShared)?),
            "ffn.out" => Ok(ops::add(a, &routed()?, &self.shared(columns(RefParam::DownShared)?)?)),
            _ => Err(ReplayError::Point(self.point.to_string())),
        }
    }

    /// Embedding rows of the ids that `held` contains; zero for the others.
    fn embedding(&self, held: &std::ops::Range<usize>) -> Result<Array2<f64>, ReplayError> {
        let ids = self.at("ids", self.rows)?;
        let mut x = Array2::zeros((ids.nrows(), self.of.config.hidden));
        for (mut row, &id) in x.rows_mut().into_iter().zip(&ids) {
            let id = place(id, self.of.config.vocab)
                .ok_or_else(|| wrong("ids", format!("ids below {}", self.of.config.vocab), id))?;
            if held.contains(&id) {
                row.assign(&self.of.weights.embedding_row(id)?.mapv(|v| self.of.arith.store(f64::from(v))));
            }
        }
        Ok(x)
    }

    fn latent(&self) -> Result<ArrayD<f64>, ReplayError> {
        let (c, (latent, k_rope, keys)) = (self.of.config, self.cached()?);
        let (q, q_absorbed) = (heads(self.own("attn.q")?, c.heads), heads(self.own("attn.q_absorbed")?, c.heads));
        let q_rope = q.slice(s![.., .., c.nope..]);
        let scale = self.softmax_scale();
        Ok(ops::attention(self.of.arith, q_absorbed.view(), q_rope, &latent, k_rope.view(), &keys, scale).into_dyn())
    }

    fn expanded_context(&self) -> Result<ArrayD<f64>, ReplayError> {
        let (c, w, at, (latent, k_rope, keys)) =
            (self.of.config, self.of.weights, self.site.layer(self.of.config), self.cached()?);
        let (k_b, v_b) = (w.heads(at, RefParam::KB)?, w.heads(at, RefParam::VB)?);
        let (q, scale) = (heads(self.own("attn.q")?, c.heads), self.softmax_scale());
        let context =
            ops::expanded_attention(self.of.arith, q.view(), &latent, k_rope.view(), (&k_b, &v_b), &keys, scale);
        Ok(context.into_dyn())
    }

    fn softmax_scale(&self) -> f64 {
        match self.of.options.variant {
            Some(Variant::SoftmaxScale(scale)) => scale,
            _ => ((self.of.config.nope + self.of.config.rope) as f64).powf(-0.5),
        }
    }

    /// The cache's rows, latents and rotated keys, and which of them each row asked for attends to.
    fn cached(&self) -> Result<Cached, ReplayError> {
        let c = self.of.config;
        let (latent, k_rope) = (self.whole(&self.name("attn.kv_latent"))?, self.whole(&self.name("attn.k_rope"))?);
        self.check_rows(latent.nrows().min(k_rope.nrows()))?;
        let mut keys: Vec<Vec<usize>> = self.rows.iter().map(|&t| (0..=t).collect()).collect();
        if let (Site::Trunk(n), false) = (self.site, self.of.options.dense) {
            let name = format!("layers.{}.attn.index_topk", c.index_source(n));
            let chosen = self.at(&name, self.rows)?;
            for ((keys, chosen), &t) in keys.iter_mut().zip(chosen.rows()).zip(self.rows) {
                keys.clear();
                for &v in chosen.iter().filter(|&&v| v != -1.0) {
                    let key = place(v, latent.nrows());
                    keys.push(key.ok_or_else(|| wrong(&name, format!("keys below {}, or -1", latent.nrows()), v))?);
                }
                keys.retain(|&key| key <= t); // a later key may be listed, but the causal mask still hides it
                if keys.is_empty() {
                    return Err(wrong(&name, format!("at least one key up to token {t}"), -1.0));
                }
            }
        }
        Ok((latent, k_rope, keys))
    }

    fn routed(&self, columns: impl Fn(usize) -> std::ops::Range<usize>) -> Result<Array2<f64>, ReplayError> {
        let layer = self.site.layer(self.of.config).ok_or_else(|| ReplayError::Point(self.point.to_string()))?;
        let (hidden, weights) = (self.expert_hidden()?, self.own("ffn.expert_weights")?);
        Ok(experts::routed(self.of.arith, self.of.weights, layer, &hidden, &weights, &self.expert_ids()?, columns)?)
    }

    fn shared(&self, columns: std::ops::Range<usize>) -> Result<Array2<f64>, ReplayError> {
        let layer = self.site.layer(self.of.config).ok_or_else(|| ReplayError::Point(self.point.to_string()))?;
        Ok(experts::shared(self.of.arith, self.of.config, self.of.weights, layer, &self.expert_hidden()?, columns)?)
    }

    fn expert_hidden(&self) -> Result<Array3<f64>, ReplayError> {
        Ok(heads(self.own("ffn.hidden")?, self.of.config.experts_used + self.of.config.shared_experts))
    }

    fn expert_ids(&self) -> Result<Vec<Vec<usize>>, ReplayError> {
        let experts = self.of.config.experts;
        let id = |&v: &f64| {
            place(v, experts).ok_or_else(|| wrong(&self.name("ffn.expert_ids"), format!("ids below {experts}"), v))
        };
        self.own("ffn.expert_ids")?.rows().into_iter().map(|row| row.iter().map(id).collect()).collect()
    }

    fn name(&self, op: &str) -> String {
        format!("{}{op}", self.site.prefix())
    }

    /// Positions of the rows asked for: MTP row t stands at position t + 1.
    fn positions(&self) -> Vec<usize> {
        let off = if let Some(Variant::Position(off)) = self.of.options.variant { off } else { 0 };
        let off = off + i64::from(self.site == Site::Mtp);
        self.rows.iter().map(|t| t.saturating_add_signed(off as isize)).collect()
    }

    fn check_rows(&self, rows: usize) -> Result<(), ReplayError> {
        self.rows.iter().find(|&&row| row >= rows).map_or(Ok(()), |&row| Err(ReplayError::Row { row, rows }))
    }

    /// The rows asked for of a point of the same site, other axes merged.
    fn own(&self, op: &str) -> Result<Array2<f64>, ReplayError> {
        self.at(&self.name(op), self.rows)
    }

    /// All rows of a point, other axes merged.
    fn whole(&self, name: &str) -> Result<Array2<f64>, ReplayError> {
        match self.captured(name)? {
            Some(values) => Ok(values),
            None => {
                // The last token has nobody behind it for an MTP layer to pair it with.
                let tokens = (self.of.inputs)("ids").map_or(0, |ids| ids.len());
                self.at(name, &(0..tokens - usize::from(self.site == Site::Mtp && tokens > 0)).collect::<Vec<_>>())
            }
        }
    }

    /// Rows of a point, captured or made up for, other axes merged.
    fn at(&self, name: &str, rows: &[usize]) -> Result<Array2<f64>, ReplayError> {
        if let Some(values) = self.captured(name)? {
            return pick(&values, rows);
        }
        let missing = || ReplayError::Missing { point: self.point.to_string(), input: name.to_string() };
        let bridge = self.of.bridge.ok_or_else(missing)?;
        if let Some(known) = bridge.get(name, rows) {
            return Ok(known);
        }
        let (site, op) = parse(self.of.config, self.of.options, name).ok_or_else(missing)?;
        let values = Operation { of: self.of, point: name, site, rows }.run(op)?;
        let width = values.len() / rows.len().max(1);
        let values =
            Array2::from_shape_vec((rows.len(), width), values.into_iter().collect()).map_err(|_| missing())?;
        bridge.keep(name, rows, &values);
        Ok(values)
    }

    /// All rows of a captured point, other axes merged.
    fn captured(&self, name: &str) -> Result<Option<Array2<f64>>, ReplayError> {
        let Some(captured) = (self.of.inputs)(name) else { return Ok(None) };
        let tokens = captured.shape().first().copied().unwrap_or(0);
        let (site, op) = parse(self.of.config, self.of.options, name).unwrap_or((Site::Model, name));
        let width: usize = row_shape(self.of.config, site, op, tokens).iter().product();
        let fits = Array2::from_shape_vec((tokens, width), captured.iter().map(|&v| f64::from(v)).collect());
        fits.map(Some).map_err(|_| ReplayError::Input {
            input: name.to_string(),
            expected: format!("{tokens} rows of {width}"),
            found: format!("shape {:?}", captured.shape()),
        })
    }
}

fn pick(x: &Array2<f64>, rows: &[usize]) -> Result<Array2<f64>, ReplayError> {
    match rows.iter().find(|&&row| row >= x.nrows()) {
        Some(&row) => Err(ReplayError::Row { row, rows: x.nrows() }),
        None => Ok(x.select(Axis(0), rows)),
    }
}

/// A captured number as an index below `limit`.
fn place(v: f64, limit: usize) -> Option<usize> {
    (v >= 0.0 && v < limit as f64 && v.fract() == 0.0).then_some(v as usize)
}

fn wrong(input: &str, expected: String, found: f64) -> ReplayError {
    ReplayError::Input { input: input.to_string(), expected, found: found.to_string() }
}

#[cfg(test)]
#[path = "replay_tests.rs"]
pub(crate) mod tests;
