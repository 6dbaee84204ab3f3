//! A forward pass as it would be with repairs: calls with other scalars and parameters, and what is done to values and
//! parameters around them. Nothing is loaded anew.

use std::collections::BTreeMap;

use super::repair::{Change, Ffn, Half, Repair};
use crate::checkpoint::Checkpoint;
use crate::device::cpu::ops;
use crate::device::{BufId, Call, Device, DeviceError, IndexId, Op, Router, View, WeightId};
use crate::model::{Config, Kind, Param, Point};
use crate::quant::{QuantType, dequantise};

/// A part of a parameter.
type Part = (WeightId, usize);

/// What is done around a call, beside running it.
#[derive(Clone, Debug)]
enum Extra {
    /// Values are put in another order first: place by place, where each comes from.
    Before(View, Vec<usize>),
    /// Values are put in another order afterwards.
    After(View, Vec<usize>),
    /// Zeros stand here afterwards.
    Zero(View),
    /// A vector of so many values is multiplied and added to, for this call.
    Vector(BufId, usize, f32, f32),
    /// Two parts are exchanged, for this call.
    Exchange(Part, Part),
    /// Afterwards, products with every matrix of a part, each read as its own transpose, stand here.
    Transposed(Part, QuantType, View, View),
    /// In place of the call: weights of the chosen experts with the correction bias in them.
    Biased { logits: View, bias: BufId, ids: IndexId, router: Router, out: View },
    /// In place of the call: so many experts per token, in as many rounds as it takes. Numbers of the calls that choose,
    /// weigh and begin them.
    Experts { used: usize, route: usize, weigh: usize, hidden: usize },
}

/// What is different in a pass.
#[derive(Clone, Debug, Default)]
pub(super) struct Altered {
    ops: BTreeMap<usize, Op>,
    extras: BTreeMap<usize, Vec<Extra>>,
}

/// Gives a field of an operation another value. False for another operation.
macro_rules! set {
    ($op:expr, $name:ident { $field:ident }, $new:expr) => {{
        let new = $new;
        if let Op::$name { $field, .. } = $op {
            *$field = new;
            true
        } else {
            false
        }
    }};
}

/// Repairs on their way into a pass.
struct Writer<'a> {
    calls: &'a [Call],
    checkpoint: &'a Checkpoint,
    tp: usize,
    altered: Altered,
}

impl Altered {
    /// The pass of `calls` with repairs; `None` where one of them changes nothing in it, or cannot be had on ranks that hold
    /// only a part of what it moves.
    pub(super) fn new(calls: &[Call], checkpoint: &Checkpoint, tp: usize, repairs: &[Repair]) -> Option<Self> {
        let mut writer = Writer { calls, checkpoint, tp, altered: Altered::default() };
        repairs.iter().all(|repair| writer.add(*repair)).then_some(writer.altered)
    }

    /// Call number `at`, `call` in the pass as it is, as it is to be.
    fn op(&self, at: usize, call: &Call) -> Op {
        self.ops.get(&at).copied().unwrap_or(call.op)
    }

    /// Runs call number `at` of `calls` on `n` rows.
    ///
    /// # Errors
    /// Those of the device.
    pub(super) fn run(
        &self,
        at: usize,
        calls: &[Call],
        n: usize,
        device: &mut dyn Device,
        run: &mut dyn FnMut(&Call, &mut dyn Device) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let call = Call { op: self.op(at, &calls[at]), ..calls[at] };
        let extras = self.extras.get(&at).map_or(&[][..], Vec::as_slice);
        let mut vectors = Vec::new();
        let mut replaced = false;
        for extra in extras {
            match extra {
                Extra::Before(view, places) => reorder(device, *view, n, places)?,
                Extra::Vector(buf, width, factor, add) => {
                    let view = View::cols(*buf, 0, *width);
                    let own = device.read(view, 1)?;
                    device.write(view, 1, &own.iter().map(|v| v * factor + add).collect::<Vec<_>>())?;
                    vectors.push((view, own));
                }
                Extra::Exchange(a, b) => device.exchange(*a, *b)?,
                Extra::Biased { logits, bias, ids, router, out } => {
                    biased(device, (*logits, *bias, *ids, *out), router, n)?;
                    replaced = true;
                }
                Extra::Experts { used, route, weigh, hidden } => {
                    let of = |at: usize| Call { op: self.op(at, &calls[at]), ..calls[at] };
                    let calls = [of(*route), of(*weigh), of(*hidden), call];
                    experts(device, *used, &calls, n, run)?;
                    replaced = true;
                }
                Extra::After(..) | Extra::Zero(_) | Extra::Transposed(..) => {}
            }
        }
        if !replaced {
            run(&call, device)?;
        }
        for extra in extras.iter().rev() {
            match extra {
                Extra::After(view, places) => reorder(device, *view, n, places)?,
                Extra::Zero(view) => device.write(*view, n, &vec![0.0; n * view.len()])?,
                Extra::Transposed(part, ty, x, out) => transposed(device, *part, *ty, *x, *out, n)?,
                Extra::Exchange(a, b) => device.exchange(*a, *b)?,
                _ => {}
            }
        }
        vectors.into_iter().rev().try_for_each(|(view, own)| device.write(view, 1, &own))
    }
}

/// Puts the values of a view in another order, row by row.
fn reorder(device: &mut dyn Device, view: View, n: usize, places: &[usize]) -> Result<(), DeviceError> {
    let values = device.read(view, n)?;
    let rows = values.chunks_exact(places.len().max(1));
    let moved: Vec<f32> = rows.flat_map(|row| places.iter().map(|from| row[*from])).collect();
    device.write(view, n, &moved)
}

/// Products of every head with its matrix of the stack, whose values lie in the order of its transpose.
fn transposed(
    device: &mut dyn Device,
    (w, part): Part,
    ty: QuantType,
    x: View,
    out: View,
    n: usize,
) -> Result<(), DeviceError> {
    let (heads, cols, rows) = (x.heads, x.width, out.width);
    let bytes = device.read_weight(w, part)?.0;
    let mut values = vec![0.0; heads * rows * cols];
    dequantise(ty, &bytes, &mut values).map_err(|e| DeviceError::Failed {
        rank: 0,
        place: None,
        problem: e.to_string(),
    })?;
    let input = device.read(x, n)?;
    let mut result = vec![0.0; n * out.len()];
    for (input, result) in input.chunks_exact(x.len()).zip(result.chunks_exact_mut(out.len())) {
        for head in 0..heads {
            let matrix = &values[head * rows * cols..][..rows * cols];
            let to = &mut result[head * rows..][..rows];
            for (x, row) in input[head * cols..][..cols].iter().zip(matrix.chunks_exact(rows)) {
                to.iter_mut().zip(row).for_each(|(to, w)| *to += x * w);
            }
        }
    }
    device.write(out, n, &result)
}

/// Weights of the chosen experts from scores with the bias in them.
fn biased(
    device: &mut dyn Device,
    (logits, bias, ids, out): (View, BufId, IndexId, View),
    router: &Router,
    n: usize,
) -> Result<(), DeviceError> {
    let bias = device.read(View::cols(bias, 0, router.experts), 1)?;
    let (logits, ids) = (device.read(logits, n)?, device.read_index(ids, n)?);
    let mut weights = Vec::with_capacity(n * out.len());
    let mut scores = vec![0.0; router.experts];
    for (logits, ids) in logits.chunks_exact(router.experts).zip(ids.chunks_exact(router.used)) {
        ops::choice_scores(router, logits, &bias, &mut scores);
        let own: Vec<f32> = ids.iter().map(|id| scores.get(*id as usize).copied().unwrap_or(0.0)).collect();
        let sum: f32 = if router.normalise { own.iter().sum() } else { 1.0 };
        weights.extend(own.iter().map(|w| w / sum * router.factor));
    }
    device.write(out, n, &weights)
}

/// The routed experts of more or fewer than the pass has room for: in rounds, whose results are added. What is there of the
/// calls: that which chooses, which weighs, which begins and which ends.
fn experts(
    device: &mut dyn Device,
    used: usize,
    [route, weigh, hidden, down]: &[Call; 4],
    n: usize,
    run: &mut dyn FnMut(&Call, &mut dyn Device) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    let (Op::Route { scores, .. }, Op::ExpertWeights { logits, ids, router, out }, Op::ExpertsDown { out: to, .. }) =
        (route.op, weigh.op, down.op)
    else {
        return Ok(());
    };
    let (scores, logits) = (device.read(scores, n)?, device.read(logits, n)?);
    let all = Router { used, ..router };
    let (mut chosen, mut weights) = (Vec::new(), Vec::new());
    for (scores, logits) in scores.chunks_exact(all.experts).zip(logits.chunks_exact(all.experts)) {
        let (mut own, mut weight) = (vec![-1; used], vec![0.0; used]);
        ops::best(scores, &mut own);
        ops::expert_weights(&all, logits, &own, &mut weight);
        chosen.push(own);
        weights.push(weight);
    }
    let (slots, mut sum) = (router.used, vec![0.0f32; n * to.len()]);
    for first in (0..used).step_by(slots) {
        // A slot that is left over has no weight.
        let slot = |of: usize| if first + of < used { first + of } else { 0 };
        let own: Vec<i32> = chosen.iter().flat_map(|row| (0..slots).map(|of| row[slot(of)])).collect();
        let weigh = |row: &Vec<f32>, of: usize| if first + of < used { row[first + of] } else { 0.0 };
        let weight: Vec<f32> = weights.iter().flat_map(|row| (0..slots).map(|of| weigh(row, of))).collect();
        device.write_index(ids, n, &own)?;
        device.write(out, n, &weight)?;
        run(hidden, device)?;
        run(down, device)?;
        sum.iter_mut().zip(device.read(to, n)?).for_each(|(sum, v)| *sum += v);
    }
    device.write(to, n, &sum)
}

/// Where a view's adjacent pairs lie, head by head, if they lie as halves; or the other way round.
fn rotated(view: View, halves: bool) -> Vec<usize> {
    let half = view.width / 2;
    let place = |to: usize| match halves {
        true => to % 2 * half + to / 2,
        false => to % half * 2 + to / half,
    };
    (0..view.len()).map(|to| to / view.width * view.width + place(to % view.width)).collect()
}

/// Where each head's values lie if they begin with the last `first` ones.
fn turned(heads: usize, width: usize, first: usize) -> Vec<usize> {
    (0..heads * width).map(|to| to / width * width + (to % width + first) % width).collect()
}

/// The places that a view's values have to go to, as places that they come from.
fn inverse(places: &[usize]) -> Vec<usize> {
    let mut inverse = vec![0; places.len()];
    places.iter().enumerate().for_each(|(to, from)| inverse[*from] = to);
    inverse
}

impl Writer<'_> {
    /// Adds a repair. False if it changes nothing.
    fn add(&mut self, Repair { change, layer }: Repair) -> bool {
        if let Change::Layers(a, b, half) = change {
            return self.layers(a, b, half);
        }
        let calls = self.calls;
        let mut hit = false;
        for (at, call) in calls.iter().enumerate() {
            if layer.is_none_or(|layer| call.at.layer() == Some(layer)) {
                hit |= self.one(change, at, call);
            }
        }
        // The tokenizer's business; calls stay as they are.
        hit || change == Change::Merges
    }

    fn config(&self) -> &Config {
        self.checkpoint.config()
    }

    fn op(&mut self, at: usize) -> &mut Op {
        self.altered.ops.entry(at).or_insert(self.calls[at].op)
    }

    fn extra(&mut self, at: usize, extra: Extra) -> bool {
        self.altered.extras.entry(at).or_default().push(extra);
        true
    }

    /// The number of the call of the same block at a point that `is` wanted.
    fn beside(&self, call: &Call, point: Point, is: impl Fn(&Op) -> bool) -> Option<usize> {
        self.calls.iter().position(|c| c.at == call.at.at(point) && is(&c.op))
    }

    /// Adds a change of one call. False if the call is not among those that it changes.
    fn one(&mut self, change: Change, at: usize, call: &Call) -> bool {
        match (change, call.op) {
            (Change::RopeBase(new), Op::Rope { .. }) => {
                set!(self.op(at), Rope { base }, new)
            }
            (Change::RopeOrder { halves, indexer }, Op::Rope { x, .. }) if call.at.point.is_indexer() == indexer => {
                self.extra(at, Extra::Before(x, rotated(x, halves)))
            }
            (Change::AllKeys, Op::Attend { chosen: Some(_), .. }) => {
                set!(self.op(at), Attend { chosen }, None)
            }
            (Change::HeadWidth(width), Op::Attend { .. }) => {
                let new = (1.0 / (width as f64).sqrt()) as f32;
                set!(self.op(at), Attend { scale }, new)
            }
            (Change::NormEps(new), Op::RmsNorm { .. }) => self.eps(at, new),
            (Change::LatentEps(new), Op::RmsNorm { .. }) if is_latent(call.at.point) => self.eps(at, new),
            (Change::NormOffset(add), Op::RmsNorm { w, out, .. }) => {
                self.extra(at, Extra::Vector(w, out.len(), 1.0, add))
            }
            (Change::BlockNorms, Op::RmsNorm { .. }) => {
                let other = match call.at.point {
                    Point::AttnNorm => Point::FfnNorm,
                    Point::FfnNorm => Point::AttnNorm,
                    _ => return false,
                };
                self.exchanged_norm(at, call, other)
            }
            (Change::LatentNorms, Op::RmsNorm { .. }) if self.config().q_lora == self.config().kv_lora => {
                let other = match call.at.point {
                    Point::QANorm => Point::KvLatent,
                    Point::KvLatent => Point::QANorm,
                    _ => return false,
                };
                self.exchanged_norm(at, call, other)
            }
            (Change::Skip(half), Op::AllReduce { x }) => {
                let ends = matches!(call.at.point, Point::AttnOut | Point::FfnOut);
                ends && half.has(call.at.point) && self.extra(at, Extra::Zero(x))
            }
            (Change::Tied, Op::Product { .. }) if call.at.point == Point::Logits => self.tied(at),
            (Change::GateUp(_) | Change::UpDown(_), _) => self.ffn(change, at, call),
            (_, Op::Product { w, x, out, .. }) => self.product(change, at, call, (w, x, out)),
            _ => self.routing(change, at, call),
        }
    }

    fn eps(&mut self, at: usize, new: f32) -> bool {
        set!(self.op(at), RmsNorm { eps }, new)
    }

    fn exchanged_norm(&mut self, at: usize, call: &Call, other: Point) -> bool {
        let is_norm = |op: &Op| matches!(op, Op::RmsNorm { .. });
        let other = self.beside(call, other, is_norm).map(|other| self.calls[other].op);
        match (other, self.op(at)) {
            (Some(Op::RmsNorm { w: new, .. }), Op::RmsNorm { w, .. }) => {
                *w = new;
                true
            }
            _ => false,
        }
    }

    fn tied(&mut self, at: usize) -> bool {
        let name = |kind| self.checkpoint.binding(Param { layer: None, kind }).map(|b| b.names().to_vec());
        let embedding = self.calls.iter().find_map(|c| match c.op {
            Op::Embed { table, .. } => Some(table),
            _ => None,
        });
        match embedding.filter(|_| name(Kind::TokenEmbd) != name(Kind::Output)) {
            Some(table) => set!(self.op(at), Product { w }, table),
            None => false,
        }
    }

    /// Gate and up, or up and down, of a feed-forward.
    fn ffn(&mut self, change: Change, at: usize, call: &Call) -> bool {
        let moe = call.at.layer().is_some_and(|layer| self.config().is_moe(layer));
        let (Change::GateUp(which) | Change::UpDown(which)) = change else { return false };
        // Whose call it is, its parameter, and whether it is the one with gate and up.
        let (ffn, w, first) = match (call.op, call.at.point) {
            (Op::ExpertsHidden { w, .. }, _) => (Ffn::Routed, w, true),
            (Op::ExpertsDown { w, .. }, _) => (Ffn::Routed, w, false),
            (Op::Product { w, .. }, Point::Hidden) => (if moe { Ffn::Shared } else { Ffn::Dense }, w, true),
            (Op::Product { w, .. }, Point::Shared) => (Ffn::Shared, w, false),
            (Op::Product { w, .. }, Point::FfnOut) => (Ffn::Dense, w, false),
            _ => return false,
        };
        if which != Ffn::All && which != ffn {
            return false;
        }
        if let Change::GateUp(_) = change {
            return first && self.extra(at, Extra::Exchange((w, 0), (w, 1)));
        }
        let c = self.config();
        let width = match ffn {
            Ffn::Routed => c.expert_ffn,
            Ffn::Shared => c.shared_ffn(),
            _ => c.ffn,
        };
        // Ranks hold rows of one and columns of the other.
        if self.tp > 1 || width != c.hidden {
            return false;
        }
        let is = |op: &Op| match ffn {
            Ffn::Routed if first => matches!(op, Op::ExpertsDown { .. }),
            Ffn::Routed => matches!(op, Op::ExpertsHidden { .. }),
            _ => matches!(op, Op::Product { .. }),
        };
        let point = match (ffn, first) {
            (Ffn::Routed, true) => Point::Routed,
            (Ffn::Shared, true) => Point::Shared,
            (_, true) => Point::FfnOut,
            (_, false) => Point::Hidden,
        };
        let other = self.beside(call, point, is).map(|other| self.calls[other].op);
        let Some(Op::Product { w: other, .. } | Op::ExpertsDown { w: other, .. } | Op::ExpertsHidden { w: other, .. }) =
            other
        else {
            return false;
        };
        let (up, down) = if first { ((w, 1), (other, 0)) } else { ((other, 1), (w, 0)) };
        self.extra(at, Extra::Exchange(up, down))
    }

    /// What lies in another order in the rows or columns of a product's parameter.
    fn product(&mut self, change: Change, at: usize, call: &Call, (w, x, out): (WeightId, View, View)) -> bool {
        let c = self.config();
        let (heads, qk, v) = (c.heads / self.tp, c.qk_head(), c.v_head);
        let (latents, kv) = (c.q_lora + c.cache_width(), c.cache_width());
        let (q_lora, rope, experts) = (c.q_lora, c.rope, c.experts);
        let cols = |from: usize, width: usize| View::cols(out.buf, out.start + from, width);
        match (change, call.at.point) {
            (Change::QkvOrder, Point::QA) => self.extra(at, Extra::After(cols(0, latents), turned(1, latents, kv))),
            (Change::KeyHalves, Point::QA) => self.extra(at, Extra::After(cols(q_lora, kv), turned(1, kv, rope))),
            (Change::QueryHalves, Point::QRaw) => {
                self.extra(at, Extra::After(cols(0, heads * qk), turned(heads, qk, rope)))
            }
            (Change::QueryHeads(shuffle), Point::QRaw) if self.tp == 1 => {
                self.extra(at, Extra::After(cols(0, heads * qk), shuffle.places(heads, qk)))
            }
            (Change::OutputHeads(shuffle), Point::AttnOut) if self.tp == 1 => {
                self.extra(at, Extra::Before(x, inverse(&shuffle.places(heads, v))))
            }
            (Change::RouterRows(shuffle), Point::RouterLogits) => {
                self.extra(at, Extra::After(out, shuffle.places(experts, 1)))
            }
            (Change::KbTransposed, Point::QAbsorbed) => self.transposed(at, call, Kind::KB, ((w, 0), x, out)),
            // Other shapes say which way they lie.
            (Change::QaTransposed, Point::QA) if q_lora == c.hidden => {
                self.transposed(at, call, Kind::QA, ((w, 0), x, cols(0, q_lora)))
            }
            _ => false,
        }
    }

    /// The products of a part, read as its transpose.
    fn transposed(&mut self, at: usize, call: &Call, kind: Kind, (part, x, out): (Part, View, View)) -> bool {
        let ty = self.checkpoint.type_of(Param { layer: call.at.layer(), kind });
        ty.is_ok_and(|ty| self.extra(at, Extra::Transposed(part, ty, x, out)))
    }

    /// How experts are chosen and weighed.
    fn routing(&mut self, change: Change, at: usize, call: &Call) -> bool {
        match (change, call.op) {
            (Change::Gating(new), Op::Route { .. } | Op::ExpertWeights { .. }) => {
                self.router(at, &|router| router.gating = new)
            }
            (Change::ExpertNorm(new), Op::ExpertWeights { .. }) => self.router(at, &|router| router.normalise = new),
            (Change::ExpertScale(new), Op::ExpertWeights { .. }) => self.router(at, &|router| router.factor = new),
            (Change::NoBias, Op::Route { bias, router, .. }) => {
                self.extra(at, Extra::Vector(bias, router.experts, 0.0, 0.0))
            }
            (Change::BiasInWeights, Op::ExpertWeights { logits, ids, out, .. }) => {
                let route = self.beside(call, Point::ExpertIds, |op| matches!(op, Op::Route { .. }));
                match (route.map(|at| self.calls[at].op), *self.op(at)) {
                    (Some(Op::Route { bias, .. }), Op::ExpertWeights { router, .. }) => {
                        self.extra(at, Extra::Biased { logits, bias, ids, router, out })
                    }
                    _ => false,
                }
            }
            (Change::ExpertsUsed(used), Op::ExpertsDown { .. }) => {
                let route = self.beside(call, Point::ExpertIds, |op| matches!(op, Op::Route { .. }));
                let weigh = self.beside(call, Point::ExpertWeights, |op| matches!(op, Op::ExpertWeights { .. }));
                let hidden = self.beside(call, Point::Hidden, |op| matches!(op, Op::ExpertsHidden { .. }));
                match (route, weigh, hidden) {
                    (Some(route), Some(weigh), Some(hidden)) => {
                        self.extra(at, Extra::Experts { used, route, weigh, hidden })
                    }
                    _ => false,
                }
            }
            _ => false,
        }
    }

    fn router(&mut self, at: usize, change: &dyn Fn(&mut Router)) -> bool {
        match self.op(at) {
            Op::Route { router, .. } | Op::ExpertWeights { router, .. } => {
                change(router);
                true
            }
            _ => false,
        }
    }

    /// Gives two layers, or the same halves of them, each other's parameters, where they have the same calls.
    fn layers(&mut self, a: usize, b: usize, half: Half) -> bool {
        let of = |layer: usize| -> Vec<usize> {
            let numbered = self.calls.iter().enumerate();
            numbered.filter(|(_, c)| c.at.layer() == Some(layer) && half.has(c.at.point)).map(|(at, _)| at).collect()
        };
        let (of_a, of_b) = (of(a), of(b));
        let like = |(x, y): (&usize, &usize)| self.calls[*x].op.name() == self.calls[*y].op.name();
        if of_a.is_empty() || of_a.len() != of_b.len() || !of_a.iter().zip(&of_b).all(like) {
            return false;
        }
        for (x, y) in of_a.into_iter().zip(of_b) {
            let (op_x, op_y) = (*self.op(x), *self.op(y));
            *self.op(x) = with_parameters(op_x, op_y);
            *self.op(y) = with_parameters(op_y, op_x);
        }
        true
    }
}

fn is_latent(point: Point) -> bool {
    matches!(point, Point::QANorm | Point::KvLatent)
}

/// An operation with the parameters of another of its kind.
fn with_parameters(mut op: Op, of: Op) -> Op {
    match (&mut op, of) {
        (Op::Product { w, .. }, Op::Product { w: new, .. })
        | (Op::ExpertsHidden { w, .. }, Op::ExpertsHidden { w: new, .. })
        | (Op::ExpertsDown { w, .. }, Op::ExpertsDown { w: new, .. }) => *w = new,
        (Op::RmsNorm { w, .. }, Op::RmsNorm { w: new, .. }) => *w = new,
        (Op::LayerNorm { w, b, .. }, Op::LayerNorm { w: new_w, b: new_b, .. }) => (*w, *b) = (new_w, new_b),
        (Op::Route { bias, .. }, Op::Route { bias: new, .. }) => *bias = new,
        _ => {}
    }
    op
}
