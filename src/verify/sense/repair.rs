//! The repairs: single changes, each the inverse of something that goes wrong with files, by what they are, where, and how
//! a file would be edited to have them.

use crate::checkpoint::Checkpoint;
use crate::model::{Config, Gating, Kind, Param, Point};

/// An order in which groups of values may lie in place of the right one. Each undoes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shuffle {
    /// Each group stands one place too early.
    Early,
    /// Each group stands one place too late.
    Late,
    /// The groups stand in reverse.
    Reversed,
    /// The groups are interleaved: value by value, not group by group.
    Interleaved,
    /// What was interleaved was read group by group, and interleaved once too often.
    Deinterleaved,
}

impl Shuffle {
    const ALL: [Shuffle; 5] =
        [Shuffle::Early, Shuffle::Late, Shuffle::Reversed, Shuffle::Interleaved, Shuffle::Deinterleaved];

    /// For each of `groups * width` places, where its right value lies.
    pub(super) fn places(self, groups: usize, width: usize) -> Vec<usize> {
        let place = |to: usize| {
            let (group, at) = (to / width, to % width);
            match self {
                Shuffle::Early => (group + groups - 1) % groups * width + at,
                Shuffle::Late => (group + 1) % groups * width + at,
                Shuffle::Reversed => (groups - 1 - group) * width + at,
                Shuffle::Interleaved => at * groups + group,
                Shuffle::Deinterleaved => to % groups * width + to / groups,
            }
        };
        (0..groups * width).map(place).collect()
    }

    fn words(self) -> &'static str {
        match self {
            Shuffle::Early => "stand one place too early",
            Shuffle::Late => "stand one place too late",
            Shuffle::Reversed => "stand in reverse",
            Shuffle::Interleaved => "are interleaved",
            Shuffle::Deinterleaved => "were de-interleaved once too often",
        }
    }
}

/// Which feed-forwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ffn {
    /// All of them.
    All,
    /// Dense layers.
    Dense,
    /// Routed experts.
    Routed,
    /// Shared experts.
    Shared,
}

impl Ffn {
    const ALL: [Ffn; 4] = [Ffn::All, Ffn::Dense, Ffn::Routed, Ffn::Shared];

    fn words(self) -> &'static str {
        match self {
            Ffn::All => "",
            Ffn::Dense => " of the dense feed-forward",
            Ffn::Routed => " of the routed experts",
            Ffn::Shared => " of the shared expert",
        }
    }

    /// Gate, up and down of each that is meant.
    fn kinds(self) -> Vec<[Kind; 3]> {
        let all = [
            (Ffn::Dense, [Kind::FfnGate, Kind::FfnUp, Kind::FfnDown]),
            (Ffn::Routed, [Kind::GateExps, Kind::UpExps, Kind::DownExps]),
            (Ffn::Shared, [Kind::GateShexp, Kind::UpShexp, Kind::DownShexp]),
        ];
        all.into_iter().filter(|(ffn, _)| self == Ffn::All || *ffn == self).map(|(_, kinds)| kinds).collect()
    }
}

/// A half of a layer, or all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// Attention.
    Attn,
    /// The feed-forward.
    Ffn,
    /// Both.
    Both,
}

impl Half {
    pub(super) const ALL: [Half; 3] = [Half::Attn, Half::Ffn, Half::Both];

    /// True if what a point of a layer shows is made in it.
    pub(super) fn has(self, point: Point) -> bool {
        let ffn = point >= Point::FfnNorm;
        self == Half::Both || (self == Half::Ffn) == ffn
    }
}

/// What is changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    /// The rope base.
    RopeBase(f64),
    /// Rotated values lie as halves, or, without that, were brought from halves to pairs once too often; of attention or of
    /// the indexer.
    RopeOrder {
        /// Halves in place of pairs.
        halves: bool,
        /// The indexer's.
        indexer: bool,
    },
    /// Attention over all keys in place of the indexer's choice.
    AllKeys,
    /// The factor on the routed experts' weights.
    ExpertScale(f32),
    /// Routed experts per token.
    ExpertsUsed(usize),
    /// Router scores.
    Gating(Gating),
    /// Whether the chosen weights are divided by their sum.
    ExpertNorm(bool),
    /// No correction bias in the choice of experts.
    NoBias,
    /// The correction bias in the experts' weights, too.
    BiasInWeights,
    /// eps of every RMSNorm.
    NormEps(f32),
    /// eps of the latent norms.
    LatentEps(f32),
    /// The softmax scale as if heads were this wide.
    HeadWidth(usize),
    /// The head is the embedding.
    Tied,
    /// Gate and up exchanged.
    GateUp(Ffn),
    /// Up and down exchanged.
    UpDown(Ffn),
    /// The rows of q_a and kv_a, joined, stand with kv_a first.
    QkvOrder,
    /// The norms of attention and feed-forward exchanged.
    BlockNorms,
    /// The norms of the latents exchanged.
    LatentNorms,
    /// Weights of norms are off by this.
    NormOffset(f32),
    /// k_b is stored untransposed.
    KbTransposed,
    /// q_a is stored transposed, which a square one does not show.
    QaTransposed,
    /// Heads in the output projection's columns.
    OutputHeads(Shuffle),
    /// Heads in the query projection's rows.
    QueryHeads(Shuffle),
    /// The router's rows.
    RouterRows(Shuffle),
    /// Every query head has its rotated values first.
    QueryHalves,
    /// kv_a has its rotated values first.
    KeyHalves,
    /// Two layers exchanged.
    Layers(usize, usize, Half),
    /// Ranks of merges follow the ids of the tokens that they make.
    Merges,
    /// Half a layer left out: no repair, but a sign of where the fault is.
    Skip(Half),
}

/// A change, of one layer or wherever it can be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Repair {
    /// What.
    pub change: Change,
    /// The layer; `None` is all.
    pub layer: Option<usize>,
}

/// Values that publishers have given to settings.
const ROPE_BASES: [f64; 7] = [1e4, 1e5, 5e5, 1e6, 5e6, 8e6, 1e7];
const EXPERT_SCALES: [f32; 6] = [1.0, 1.8, 2.0, 2.5, 2.827, 16.0];
const EPS: [f32; 3] = [1e-6, 1e-5, 1e-12];
const EXPERTS_USED: [usize; 6] = [1, 2, 4, 6, 8, 10];
/// Models of so many layers have every pair of layers exchanged; longer ones, neighbours.
const PAIRS_UP_TO: usize = 12;

impl Repair {
    /// Every repair of the whole model that changes a number or a flag, or exchanges what stands everywhere.
    pub fn of_model(c: &Config, every_pair: bool) -> Vec<Repair> {
        let settings = ROPE_BASES
            .map(Change::RopeBase)
            .into_iter()
            .chain(EXPERT_SCALES.map(Change::ExpertScale))
            .chain(EXPERTS_USED.map(Change::ExpertsUsed))
            .chain([Gating::Softmax, Gating::Sigmoid].map(Change::Gating))
            .chain([true, false].map(Change::ExpertNorm))
            .chain([Change::NoBias, Change::BiasInWeights])
            .chain(EPS.map(Change::NormEps))
            .chain(EPS.map(Change::LatentEps))
            .chain([c.nope, c.kv_lora + c.rope].map(Change::HeadWidth))
            .chain([Change::Tied, Change::AllKeys, Change::Merges])
            .filter(|change| change.differs(c));
        let indexer = [true, false].map(|halves| Change::RopeOrder { halves, indexer: true });
        let far = |a: usize, b: usize| b - a > 1 && c.layers > PAIRS_UP_TO && !every_pair;
        let pairs = (0..c.layers).flat_map(|a| (a + 1..c.layers).map(move |b| (a, b))).filter(|(a, b)| !far(*a, *b));
        let pairs = pairs.flat_map(|(a, b)| Half::ALL.map(|half| Change::Layers(a, b, half)));
        let all = settings.chain(indexer).chain(data()).chain(pairs);
        all.map(|change| Repair { change, layer: None }).collect()
    }

    /// Every repair of one layer.
    pub fn of_layer(layer: usize) -> Vec<Repair> {
        // In one layer there is one dense feed-forward or there are experts, never both.
        let all = data().filter(|change| !matches!(change, Change::GateUp(Ffn::Dense) | Change::UpDown(Ffn::Dense)));
        all.map(|change| Repair { change, layer: Some(layer) }).collect()
    }

    /// The first layer that it alters: what stands below is as without it.
    pub(super) fn first_layer(&self, c: &Config) -> usize {
        let experts = |ffn: Ffn| matches!(ffn, Ffn::Routed | Ffn::Shared);
        let sparse = c.dense_layers.min(c.layers - 1);
        match (self.layer, self.change) {
            (Some(layer), _) => layer,
            (None, Change::Layers(a, b, _)) => a.min(b),
            (None, Change::Tied) => c.layers - 1,
            (None, Change::GateUp(ffn) | Change::UpDown(ffn)) if experts(ffn) => sparse,
            (None, Change::ExpertScale(_) | Change::ExpertsUsed(_) | Change::Gating(_) | Change::ExpertNorm(_)) => {
                sparse
            }
            (None, Change::NoBias | Change::BiasInWeights | Change::RouterRows(_)) => sparse,
            _ => 0,
        }
    }

    /// Its kind, whatever value and layer.
    pub fn family(&self) -> &'static str {
        match self.change {
            Change::RopeBase(_) => "rope base",
            Change::RopeOrder { indexer: false, .. } => "rope order",
            Change::RopeOrder { .. } => "indexer rope order",
            Change::AllKeys => "attention over all keys",
            Change::ExpertScale(_) => "expert scale",
            Change::ExpertsUsed(_) => "experts per token",
            Change::Gating(_) => "gating",
            Change::ExpertNorm(_) => "normalised expert weights",
            Change::NoBias | Change::BiasInWeights => "correction bias",
            Change::NormEps(_) => "norm eps",
            Change::LatentEps(_) => "latent norm eps",
            Change::HeadWidth(_) => "softmax scale",
            Change::Tied => "tied head",
            Change::GateUp(_) => "gate and up",
            Change::UpDown(_) => "up and down",
            Change::QkvOrder => "order of q_a and kv_a",
            Change::BlockNorms => "attention and ffn norms",
            Change::LatentNorms => "latent norms",
            Change::NormOffset(_) => "norm offset",
            Change::KbTransposed => "k_b layout",
            Change::QaTransposed => "q_a layout",
            Change::OutputHeads(_) => "heads of attn_output",
            Change::QueryHeads(_) => "heads of q_b",
            Change::RouterRows(_) => "router rows",
            Change::QueryHalves => "halves of q_b",
            Change::KeyHalves => "halves of kv_a",
            Change::Layers(..) => "layers exchanged",
            Change::Merges => "merges",
            Change::Skip(_) => "skipped",
        }
    }

    /// What it says of the file, in words.
    pub fn name(&self) -> String {
        let of = match (self.layer, self.change) {
            (Some(layer), _) => format!(", layer {layer}"),
            (None, Change::GateUp(_) | Change::UpDown(_)) => ", every layer".into(),
            (None, change) if data().any(|c| c == change) => ", every layer".into(),
            _ => String::new(),
        };
        match self.change {
            Change::RopeBase(base) => format!("rope base {base}"),
            Change::RopeOrder { halves, indexer } => {
                let whose = if indexer { "the indexer's rotated values" } else { "rotated values" };
                match halves {
                    true => format!("{whose} lie as halves, not as adjacent pairs (rope style, or rows){of}"),
                    false => format!("{whose} were brought from halves to pairs once too often{of}"),
                }
            }
            Change::AllKeys => "attention over all keys: the indexer chooses wrongly, or too few (top-k)".into(),
            Change::ExpertScale(scale) => format!("expert scale {scale}"),
            Change::ExpertsUsed(used) => format!("{used} experts per token"),
            Change::Gating(gating) => format!("gating {}", gating.name()),
            Change::ExpertNorm(true) => "expert weights divided by their sum".into(),
            Change::ExpertNorm(false) => "expert weights not divided by their sum".into(),
            Change::NoBias => "no correction bias in the choice of experts".into(),
            Change::BiasInWeights => "correction bias in the experts' weights, too".into(),
            Change::NormEps(eps) => format!("RMSNorm eps {eps:e}"),
            Change::LatentEps(eps) => format!("eps of the latent norms {eps:e}"),
            Change::HeadWidth(width) => format!("softmax scale of heads {width} wide"),
            Change::Tied => "head tied to the embedding".into(),
            Change::GateUp(ffn) => format!("gate and up{} exchanged{of}", ffn.words()),
            Change::UpDown(ffn) => format!("up and down{} exchanged{of}", ffn.words()),
            Change::QkvOrder => format!("q_a and kv_a cut from rows that have kv_a first{of}"),
            Change::BlockNorms => format!("norms of attention and feed-forward exchanged{of}"),
            Change::LatentNorms => format!("norms of the two latents exchanged{of}"),
            Change::NormOffset(off) if off > 0.0 => format!("weights of norms are too small by 1{of}"),
            Change::NormOffset(_) => format!("weights of norms are too large by 1{of}"),
            Change::KbTransposed => format!("k_b stored untransposed{of}"),
            Change::QaTransposed => format!("q_a stored transposed{of}"),
            Change::OutputHeads(shuffle) => format!("heads in the columns of attn_output {}{of}", shuffle.words()),
            Change::QueryHeads(shuffle) => format!("heads in the rows of q_b {}{of}", shuffle.words()),
            Change::RouterRows(shuffle) => format!("rows of the router {}{of}", shuffle.words()),
            Change::QueryHalves => format!("query heads have their rotated values first{of}"),
            Change::KeyHalves => format!("kv_a has its rotated values first{of}"),
            Change::Layers(a, b, Half::Both) => format!("layers {a} and {b} exchanged"),
            Change::Layers(a, b, Half::Attn) => format!("attention of layers {a} and {b} exchanged"),
            Change::Layers(a, b, Half::Ffn) => format!("feed-forwards of layers {a} and {b} exchanged"),
            Change::Merges => "ranks of merges by the ids of what they make".into(),
            Change::Skip(Half::Attn) => format!("attention left out{of}"),
            Change::Skip(Half::Ffn) => format!("feed-forward left out{of}"),
            Change::Skip(Half::Both) => format!("both halves left out{of}"),
        }
    }

    /// The edit of the file that makes it last.
    pub fn plan(&self, checkpoint: &Checkpoint) -> String {
        let c = checkpoint.config();
        let set = |fact: &str, value: String| {
            let found = c.facts.iter().find(|f| f.name == fact);
            let key = found.map_or(fact, |f| f.source.as_str());
            format!("set {key} to {value}{}", found.map_or(String::new(), |f| format!(" (now {})", f.value)))
        };
        let tensors = |kinds: &[Kind]| {
            let layers: Vec<usize> = self.layer.map_or_else(|| (0..c.layers).collect(), |l| vec![l]);
            let there = |layer: usize, kind: Kind| {
                let param = Param { layer: Some(layer), kind };
                checkpoint.binding(param).map(|binding| binding.names()[0].clone())
            };
            let of = |layer| kinds.iter().filter_map(move |kind| there(layer, *kind)).collect::<Vec<_>>();
            layers.into_iter().map(of).filter(|names| !names.is_empty()).map(|n| n.join(" and ")).collect::<Vec<_>>()
        };
        let list = |mut of: Vec<String>| {
            let more = of.len().saturating_sub(3);
            of.truncate(3);
            format!(
                "{}{}",
                of.join("; "),
                if more > 0 { format!("; and in {more} more layers") } else { String::new() }
            )
        };
        let exchange = |kinds: &[Kind]| format!("exchange the data of {}", list(tensors(kinds)));
        let reorder = |kind: Kind, how: &str| format!("in {}: {how}", list(tensors(&[kind])));
        let shuffled = |what: &str, shuffle: Shuffle| format!("put {what} in order: now they {}", shuffle.words());
        match self.change {
            Change::RopeBase(base) => set("rope base", base.to_string()),
            Change::ExpertScale(scale) => set("expert scale", scale.to_string()),
            Change::ExpertsUsed(used) => set("experts per token", used.to_string()),
            Change::Gating(gating) => set("gating", gating.name().into()),
            Change::ExpertNorm(norm) => set("normalised weights", norm.to_string()),
            Change::NormEps(eps) => set("RMSNorm eps", format!("{eps:e}")),
            Change::RopeOrder { indexer: true, .. } => reorder(
                Kind::IndexQB,
                "bring the rotated rows of every head to adjacent pairs, and those of indexer.attn_k",
            ),
            Change::RopeOrder { halves, .. } => {
                let how = if halves { "from halves to adjacent pairs" } else { "from adjacent pairs to halves" };
                format!(
                    "{}, and those of attn_kv_a",
                    reorder(Kind::QB, &format!("bring every head's rotated rows {how}"))
                )
            }
            Change::NoBias | Change::BiasInWeights => {
                reorder(Kind::RouterBias, "look at the bias: the model is better without it, or has it elsewhere")
            }
            Change::LatentEps(_) | Change::HeadWidth(_) | Change::AllKeys => {
                format!("no key of the file says it; run the model with {}", self.name())
            }
            Change::Tied => "remove output.weight, so that the head is tied to the embedding".into(),
            Change::GateUp(ffn) => {
                ffn.kinds().iter().map(|k| exchange(&k[..2])).filter(|e| e.contains('.')).collect::<Vec<_>>().join("; ")
            }
            Change::UpDown(ffn) => {
                ffn.kinds().iter().map(|k| exchange(&k[1..])).filter(|e| e.contains('.')).collect::<Vec<_>>().join("; ")
            }
            Change::QkvOrder => {
                format!("join the rows of {} and cut them with kv_a first", list(tensors(&[Kind::QA, Kind::KvA])))
            }
            Change::BlockNorms => exchange(&[Kind::AttnNorm, Kind::FfnNorm]),
            Change::LatentNorms => exchange(&[Kind::QANorm, Kind::KvANorm]),
            Change::NormOffset(off) => {
                format!("add {off} to every weight of {}, and of all other norms", list(tensors(&[Kind::AttnNorm])))
            }
            Change::KbTransposed => reorder(Kind::KB, "transpose every head's matrix"),
            Change::QaTransposed => reorder(Kind::QA, "transpose the matrix"),
            Change::OutputHeads(s) => reorder(Kind::AttnOutput, &shuffled("the heads' columns", s)),
            Change::QueryHeads(s) => reorder(Kind::QB, &shuffled("the heads' rows", s)),
            Change::RouterRows(s) => reorder(Kind::Router, &shuffled("the experts' rows", s)),
            Change::QueryHalves => reorder(Kind::QB, "put every head's rotated rows behind the others"),
            Change::KeyHalves => reorder(Kind::KvA, "put the rotated rows behind the latent's"),
            Change::Layers(a, b, half) => {
                let which = match half {
                    Half::Both => "all tensors",
                    Half::Attn => "all tensors of attention",
                    Half::Ffn => "all tensors of the feed-forward",
                };
                format!("exchange the data of {which} of layers {a} and {b}")
            }
            Change::Merges => "write the merges anew, in the order of the ids of the tokens that they make".into(),
            Change::Skip(_) => "none: this only says where".into(),
        }
    }
}

/// Changes of data, which a layer or all of them can have.
fn data() -> impl Iterator<Item = Change> {
    let experts = Shuffle::ALL.into_iter().filter(|s| !matches!(s, Shuffle::Interleaved | Shuffle::Deinterleaved));
    Ffn::ALL
        .map(Change::GateUp)
        .into_iter()
        .chain(Ffn::ALL.map(Change::UpDown))
        .chain([true, false].map(|halves| Change::RopeOrder { halves, indexer: false }))
        .chain([Change::QkvOrder, Change::BlockNorms, Change::LatentNorms])
        .chain([Change::KbTransposed, Change::QaTransposed])
        .chain([1.0, -1.0].map(Change::NormOffset))
        .chain(Shuffle::ALL.map(Change::OutputHeads))
        .chain(Shuffle::ALL.map(Change::QueryHeads))
        .chain(experts.map(Change::RouterRows))
        .chain([Change::QueryHalves, Change::KeyHalves])
}

impl Change {
    /// True if the file does not already say so.
    fn differs(self, c: &Config) -> bool {
        let same = |a: f32, b: f32| (a - b).abs() <= 1e-3 * b.abs();
        match self {
            Change::RopeBase(base) => !same(base as f32, c.rope_base as f32),
            Change::ExpertScale(scale) => !same(scale, c.expert_scale),
            Change::ExpertsUsed(used) => used != c.experts_used && used <= c.experts,
            Change::Gating(gating) => gating != c.gating,
            Change::ExpertNorm(norm) => norm != c.expert_norm,
            Change::NormEps(eps) => !same(eps, c.rms_eps) || !same(eps, c.latent_eps),
            Change::LatentEps(eps) => !same(eps, c.latent_eps),
            Change::HeadWidth(width) => width != c.qk_head(),
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a file with this damage holds at each place, as places of the right order.
    fn damaged(shuffle: Shuffle, groups: usize, width: usize) -> Vec<usize> {
        let right: Vec<usize> = (0..groups * width).collect();
        let at = |group: usize, i: usize| right[group % groups * width + i];
        (0..groups * width)
            .map(|to| match shuffle {
                Shuffle::Early => at(to / width + 1, to % width),
                Shuffle::Late => at(to / width + groups - 1, to % width),
                Shuffle::Reversed => at(groups - 1 - to / width, to % width),
                Shuffle::Interleaved => at(to % groups, to / groups),
                Shuffle::Deinterleaved => to % width * groups + to / width,
            })
            .collect()
    }

    #[test]
    fn every_shuffle_undoes_its_damage() {
        for shuffle in Shuffle::ALL {
            for (groups, width) in [(8, 4), (3, 5), (8, 1)] {
                let file = damaged(shuffle, groups, width);
                let repaired: Vec<usize> = shuffle.places(groups, width).iter().map(|from| file[*from]).collect();
                assert_eq!(repaired, Vec::from_iter(0..groups * width), "{shuffle:?} of {groups} x {width}");
            }
        }
    }
}
