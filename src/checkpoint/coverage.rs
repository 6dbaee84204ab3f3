//! Which tensors fill which parameters, and what is left over on either side. Nothing is skipped silently: a tensor is
//! bound, known to be unused for a stated reason, or UNBOUND.

use std::collections::{HashMap, HashSet};

use super::names::{self, Binding, Naming};
use super::packed::{self, Packed};
use super::witness::Witness;
use super::{TensorSource, View};
use crate::gguf::Value;
use crate::model::{ATTENTION_BIAS, Config, Fact, Kind, Param, params};

/// A tensor that nothing uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unused {
    /// Its name.
    pub tensor: String,
    /// Why that is right.
    pub reason: String,
}

/// A tensor that nothing is known about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unbound {
    /// Its name.
    pub tensor: String,
    /// The expected name that comes nearest, with its edit distance.
    pub nearest: Option<(String, usize)>,
}

/// A tensor whose shape contradicts the metadata. Axes are fastest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShapeFault {
    /// The parameter.
    pub param: Param,
    /// The tensor.
    pub tensor: String,
    /// From the metadata.
    pub expected: Vec<u64>,
    /// In the file.
    pub found: Vec<u64>,
    /// The metadata keys, or rules, that the axes in question come from.
    pub keys: Vec<String>,
}

/// A parameter that the file holds in a form that this build cannot read. That says nothing against the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unhandled {
    /// The parameter; none for a tensor that belongs to another one.
    pub param: Option<Param>,
    /// The tensor.
    pub tensor: String,
    /// What it holds, and how.
    pub form: &'static str,
}

/// What the file holds of the MTP blocks that its metadata declares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mtp {
    /// None declared.
    None,
    /// All of their tensors.
    Whole,
    /// Some tensors; the block cannot run.
    Partial,
    /// Not one tensor.
    Absent,
}

/// The full account.
#[derive(Clone, Debug)]
pub struct Coverage {
    /// Tensors in the file.
    pub tensors: usize,
    /// Tensors that fill parameters.
    pub bound: usize,
    /// Tensors left out for a known reason.
    pub unused: Vec<Unused>,
    /// Tensors without a home.
    pub unbound: Vec<Unbound>,
    /// Trunk parameters without a tensor, with the name that was looked for.
    pub missing: Vec<(Param, String)>,
    /// Tensors of the wrong shape.
    pub shapes: Vec<ShapeFault>,
    /// Other spellings that were accepted: (tensor, usual name).
    pub aliases: Vec<(String, String)>,
    /// The MTP blocks.
    pub mtp: Mtp,
    /// Tensors that the MTP blocks lack, by their usual names.
    pub mtp_missing: Vec<String>,
    /// Tensors of a type that this build cannot dequantise: (tensor, type).
    pub unreadable: Vec<(String, &'static str)>,
    /// Parameters in a form that this build cannot read.
    pub unhandled: Vec<Unhandled>,
}

impl Coverage {
    /// True when every tensor has a home, every parameter a source, and every shape fits.
    pub fn is_whole(&self) -> bool {
        self.unbound.is_empty() && self.missing.is_empty() && self.shapes.is_empty()
    }

    /// True when this build can read every tensor that is there.
    pub fn is_handled(&self) -> bool {
        self.unreadable.is_empty() && self.unhandled.is_empty()
    }
}

/// Binds the tensors of `source` to the parameters of `config`.
pub(super) fn bind(source: &dyn TensorSource, config: &Config) -> (Coverage, HashMap<Param, Binding>) {
    let naming = source.naming();
    let file_names = source.names();
    let present: HashSet<&str> = file_names.iter().copied().collect();
    let mut used: HashSet<String> = HashSet::new();
    let mut bound = HashMap::new();
    let mut expected_names = Vec::new();
    let (mut missing, mut shapes, mut aliases) = (Vec::new(), Vec::new(), Vec::new());
    let (mut mtp_found, mut mtp_missing, mut unhandled) = (0usize, Vec::new(), Vec::new());
    let witness = Witness::new(source);
    let packed = Packed::of(source, &file_names);
    // More experts than tensors cannot all be there; their names need not be made to know that.
    let experts = config.experts.min(file_names.len() + 1);
    for param in params::of_trunk(config).into_iter().chain(params::of_mtp(config)) {
        let of_mtp = param.layer.is_some_and(|l| l >= config.layers);
        let candidates = names::candidates(naming, param, experts);
        let usual = candidates.first().and_then(|b| b.names().first().cloned()).unwrap_or_default();
        let found = candidates.into_iter().find(|b| b.names().iter().all(|n| present.contains(n.as_str())));
        let other = || -> Vec<(String, &'static str)> {
            let has = |name: &str| present.contains(name);
            let fused = names::unhandled(naming, param, has);
            let packed = || packed.other(&names::candidates(naming, param, experts), has);
            fused.map_or_else(|| packed().into_iter().map(|name| (name, packed::SEVERAL)).collect(), |one| vec![one])
        };
        let other = if found.is_none() { other() } else { Vec::new() };
        if !other.is_empty() {
            mtp_found += usize::from(of_mtp);
            for (tensor, form) in other {
                used.insert(tensor.clone());
                unhandled.push(Unhandled { param: Some(param), tensor, form });
            }
            continue;
        }
        let tied = || tied_head(param, naming, &present).filter(|_| config.may_tie);
        let Some(binding) = found.or_else(tied) else {
            // Of a stack that is there in part, the part has a home.
            let usual_names = names::candidates(naming, param, experts).into_iter().next();
            let own = usual_names.iter().flat_map(|b| b.names()).partition(|n| present.contains(n.as_str()));
            let (there, absent): (Vec<&String>, Vec<&String>) = own;
            used.extend(there.into_iter().cloned());
            expected_names.extend(absent.iter().map(|name| (name.to_string(), false)));
            let first = absent.first().map_or(usual, |name| name.to_string());
            match of_mtp {
                true if param.kind.is_indexer() => {} // runs without one
                true => mtp_missing.push(first),
                false => missing.push((param, first)),
            }
            continue;
        };
        expected_names.push((usual.clone(), true));
        mtp_found += usize::from(of_mtp);
        if matches!(&binding, Binding::Whole(name) if *name != usual && param.kind != Kind::Output) {
            aliases.push((binding.names()[0].clone(), usual));
        }
        for name in binding.names() {
            used.insert(name.clone());
            let Some(view) = source.tensor(name) else { continue };
            let Some(fault) = wrong_shape(config, param, &binding, name, &view, &witness) else { continue };
            match packed.several(view.ty, &fault) {
                Some(form) => unhandled.push(Unhandled { param: Some(param), tensor: name.clone(), form }),
                None => shapes.push(fault),
            }
        }
        bound.insert(param, binding);
    }
    let mtp = match (config.mtp_layers, mtp_found, mtp_missing.len()) {
        (0, ..) => Mtp::None,
        (_, 0, _) => Mtp::Absent,
        (_, _, 0) => Mtp::Whole,
        _ => Mtp::Partial,
    };
    missing.extend(packed.lost(&bound));
    let nearest_to = Nearest(expected_names);
    let (mut unused, mut unbound, mut unreadable) = (Vec::new(), Vec::new(), Vec::new());
    for name in &file_names {
        if let Some(view) = source.tensor(name).filter(|v| v.ty.quant.is_none()) {
            unreadable.push((name.to_string(), view.ty.name));
        }
        if used.contains(*name) {
            continue;
        }
        if let Some(form) = packed.form(name) {
            unhandled.push(Unhandled { param: None, tensor: name.to_string(), form });
            continue;
        }
        // Legal where the key says so, and lacking here.
        let stated = || source.metadata().get(ATTENTION_BIAS).and_then(Value::as_bool) == Some(true);
        if let Some(param) = naming.biased(name).filter(|_| stated()) {
            unhandled.push(Unhandled { param: Some(param), tensor: name.to_string(), form: names::BIASES });
            continue;
        }
        match why_unused(naming, config, name, &bound) {
            Some(reason) => unused.push(Unused { tensor: name.to_string(), reason: reason.into() }),
            None => {
                let near = (unbound.len() < MOST_NEAREST).then(|| nearest_to.find(name)).flatten();
                unbound.push(Unbound { tensor: name.to_string(), nearest: near });
            }
        }
    }
    let coverage = Coverage {
        tensors: file_names.len(),
        bound: used.len(),
        unused,
        unbound,
        missing,
        shapes,
        aliases,
        mtp,
        mtp_missing,
        unreadable,
        unhandled,
    };
    (coverage, bound)
}

/// A file without an output matrix ties it to the embedding.
fn tied_head(param: Param, naming: Naming, present: &HashSet<&str>) -> Option<Binding> {
    let embedding = Param { layer: None, kind: Kind::TokenEmbd };
    (param.kind == Kind::Output)
        .then(|| names::candidates(naming, embedding, 1).into_iter().next())
        .flatten()
        .filter(|b| b.names().iter().all(|n| present.contains(n.as_str())))
}

fn wrong_shape(
    c: &Config,
    param: Param,
    binding: &Binding,
    tensor: &str,
    view: &View<'_>,
    witness: &Witness<'_>,
) -> Option<ShapeFault> {
    let [cols, rows, stack] = param.kind.shape(c);
    let axes = param.kind.axes();
    let (expected, axes) = match binding {
        Binding::Whole(_) => ([cols, rows, stack], axes),
        Binding::PerExpert(_) => ([cols, rows, 1], axes),
        Binding::KvB(_) => (
            [c.kv_lora, c.heads * (c.nope + c.v_head), 1],
            [&["kv latent"][..], &["heads", "nope width", "value width"], &[]],
        ),
    };
    // Axes of extent 1 at the end are written or left out as converters please.
    let trim = |axes: &[u64]| {
        let last = axes.iter().rposition(|n| *n != 1).map_or(1, |i| i + 1);
        axes[..last.min(axes.len())].to_vec()
    };
    let expected = trim(&expected.map(|n| n as u64));
    let found = trim(&view.ne);
    if expected == found {
        return None;
    }
    let differs = |axis: &usize| expected.get(*axis).unwrap_or(&1) != found.get(*axis).unwrap_or(&1);
    let facts: Vec<&str> = (0..3).filter(differs).flat_map(|axis| axes[axis].iter().copied()).collect();
    let stated: Vec<&Fact> = c.facts.iter().filter(|f| facts.contains(&f.name)).collect();
    // Of several keys those are guilty that other tensors contradict, or else those that no tensor bears out.
    let said = |f: &Fact| witness.of(f.name).map(|(_, n)| n.to_string() == f.value);
    let of = |wanted: Option<bool>| -> Vec<&Fact> { stated.iter().filter(|f| said(f) == wanted).copied().collect() };
    let blamed =
        [of(Some(false)), of(None), stated.clone()].into_iter().find(|list| !list.is_empty()).unwrap_or_default();
    let keys = blamed.iter().map(|f| f.source.clone()).collect();
    Some(ShapeFault { param, tensor: tensor.into(), expected, found, keys })
}

fn why_unused(naming: Naming, c: &Config, name: &str, bound: &HashMap<Param, Binding>) -> Option<&'static str> {
    let (layer, rest) = naming.split(name);
    if let Some((_, reason)) = names::KNOWN_UNUSED.iter().find(|(known, _)| *known == rest) {
        return Some(reason);
    }
    let layer = layer?;
    let parts = [Kind::KB, Kind::VB].map(|kind| bound.get(&Param { layer: Some(layer), kind }));
    if naming.is_whole_kv_b(rest) && parts.iter().all(|b| matches!(b, Some(Binding::Whole(_)))) {
        return Some("the whole kv_b beside its parts k_b and v_b: the parts are used");
    }
    let kind = naming.kind_of(rest)?;
    if layer < c.layers && kind.is_indexer() && !c.is_full(layer) {
        return Some("indexer of a shared layer (it reuses an earlier top-k)");
    }
    (layer >= c.layers + c.mtp_layers).then_some("a block behind those that the metadata declares")
}

/// A file of another model can hold thousands of foreign tensors; a hint is worth making for the first ones.
const MOST_NEAREST: usize = 64;

/// Expected names, each with whether a tensor fills it, to find the one that a foreign name was probably meant to be.
struct Nearest(Vec<(String, bool)>);

impl Nearest {
    /// The name with the smallest edit distance, among those that differ by at most half the length of `name`; of
    /// equally near ones one that nothing fills.
    fn find(&self, name: &str) -> Option<(String, usize)> {
        let most = name.len().max(4) / 2;
        let near = self.0.iter().filter(|(e, _)| e.len().abs_diff(name.len()) <= most); // the distance is no smaller
        let bytes = |text: &str| text.as_bytes().to_vec();
        let distance = |e: &str| strsim::generic_levenshtein(&bytes(name), &bytes(e));
        let best = near.map(|(e, filled)| (distance(e), *filled, e)).min()?;
        (best.0 <= most).then(|| (best.2.clone(), best.0))
    }
}
