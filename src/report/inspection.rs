//! What `inspect` found in a model's headers: values, coverage, plan, bytes.
//!
//! Fields are those of `docs/schemas/inspect.json`, which says what each means and in which unit.
#![allow(missing_docs)]

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::io;

use serde::Serialize;

use super::table::{Table, bytes, plural, ranges};
use super::{Page, Record};

/// A file of the model.
#[derive(Clone, Debug, Serialize)]
pub struct File {
    pub path: String,
    pub bytes: u64,
}

/// A value of the configuration.
#[derive(Clone, Debug, Serialize)]
pub struct Fact {
    pub name: &'static str,
    pub value: String,
    pub source: String,
    /// Whether its key states it, or what took over.
    pub origin: &'static str,
}

/// A tensor that is known and has no use.
#[derive(Clone, Debug, Serialize)]
pub struct Unused {
    pub tensor: String,
    pub reason: String,
}

/// A tensor without a home.
#[derive(Clone, Debug, Serialize)]
pub struct Unbound {
    pub tensor: String,
    pub nearest: Option<String>,
    pub edits: Option<usize>,
}

/// A parameter of a layer or of the whole model.
#[derive(Clone, Debug)]
pub struct Of {
    pub kind: &'static str,
    pub layer: Option<usize>,
}

/// A parameter without a source.
#[derive(Clone, Debug, Serialize)]
pub struct Missing {
    pub parameter: String,
    pub tensor: String,
    #[serde(skip)]
    pub of: Of,
}

/// A tensor whose shape contradicts the metadata.
#[derive(Clone, Debug, Serialize)]
pub struct WrongShape {
    pub tensor: String,
    pub file: String,
    pub expected: Vec<u64>,
    pub found: Vec<u64>,
    pub keys: Vec<String>,
    #[serde(skip)]
    pub of: Of,
}

/// A tensor under another name than the usual one.
#[derive(Clone, Debug, Serialize)]
pub struct Alias {
    pub tensor: String,
    pub usual: String,
}

/// A tensor of a type that this build cannot dequantise.
#[derive(Clone, Debug, Serialize)]
pub struct Unreadable {
    pub tensor: String,
    pub r#type: String,
}

/// A tensor in a form that this build cannot read.
#[derive(Clone, Debug, Serialize)]
pub struct Unhandled {
    /// Its name.
    pub tensor: String,
    /// The form, in words.
    pub form: &'static str,
}

/// Which tensors have a home, and which parameters a source.
#[derive(Clone, Debug, Serialize)]
pub struct Coverage {
    pub tensors: usize,
    pub bound: usize,
    pub known_unused: Vec<Unused>,
    pub unbound: Vec<Unbound>,
    pub missing: Vec<Missing>,
    pub wrong_shape: Vec<WrongShape>,
    pub aliases: Vec<Alias>,
    pub unreadable: Vec<Unreadable>,
    /// Tensors in forms that this build cannot read.
    pub unhandled: Vec<Unhandled>,
}

/// The block that predicts further tokens.
#[derive(Clone, Debug, Serialize)]
pub struct Mtp {
    pub state: &'static str,
    pub missing: Vec<String>,
    #[serde(skip)]
    pub text: &'static str,
}

/// Parameters that are loaded as one.
#[derive(Clone, Debug, Serialize)]
pub struct Fused {
    pub group: &'static str,
    pub parts: String,
    pub layers: Vec<usize>,
}

/// What ranks hold of a parameter.
#[derive(Clone, Debug, Serialize)]
pub struct Parameter {
    pub parameter: String,
    pub r#type: &'static str,
    pub cut: &'static str,
    pub dequantised_from: Option<&'static str>,
    /// True for the output matrix where the embedding serves as it.
    pub tied: bool,
    pub bytes: u64,
    pub bytes_per_rank: Vec<u64>,
    pub times: f64,
    #[serde(skip)]
    pub of: Of,
}

/// The vocabulary's rows.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Vocabulary {
    pub rows: usize,
    pub padded: usize,
}

/// What each rank will hold; without bytes where shapes or types forbid a plan.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    pub tp: usize,
    pub vocabulary: Vocabulary,
    pub parameters: Option<Vec<Parameter>>,
    pub trunk_bytes_per_rank: Option<Vec<u64>>,
    pub mtp_bytes_per_rank: Option<Vec<u64>>,
    #[serde(skip)]
    pub cache_per_token: usize,
    #[serde(skip)]
    pub missing: Option<&'static str>,
}

/// What is in a model's files, how it maps to parameters, what ranks will hold.
#[derive(Clone, Debug, Serialize)]
pub struct Inspection {
    pub model: String,
    pub whole: bool,
    pub notes: Vec<String>,
    pub name: String,
    pub files: Vec<File>,
    pub config: Vec<Fact>,
    pub coverage: Coverage,
    pub kv_b: &'static str,
    /// True where the embedding serves as the output matrix.
    pub tied: bool,
    pub mtp: Mtp,
    pub fused_groups: Vec<Fused>,
    pub plan: Plan,
    #[serde(skip)]
    pub gguf_version: Option<u32>,
    #[serde(skip)]
    pub kv_b_text: Vec<String>,
    #[serde(skip)]
    pub all: bool,
}

fn more(all: usize, shown: usize) -> String {
    if all > shown { format!(" and {} more", all - shown) } else { String::new() }
}

/// Parts that are alike, in the order in which they come first.
fn alike<T, K: PartialEq>(all: &[T], key: impl Fn(&T) -> K) -> Vec<Vec<&T>> {
    let mut groups: Vec<Vec<&T>> = Vec::new();
    for one in all {
        match groups.iter_mut().find(|g| key(g[0]) == key(one)) {
            Some(group) => group.push(one),
            None => groups.push(vec![one]),
        }
    }
    groups
}

/// ` in layers 0-2, 5`, or nothing for parameters of the whole model.
fn layers<'a>(of: impl Iterator<Item = &'a Of>) -> String {
    // One matrix per expert names its layer many times.
    let layers: BTreeSet<usize> = of.filter_map(|p| p.layer).collect();
    let layers: Vec<usize> = layers.into_iter().collect();
    match layers.len() {
        0 => String::new(),
        n => format!(" in layer{} {}", if n == 1 { "" } else { "s" }, ranges(&layers)),
    }
}

/// What unbound tensors are grouped by: the name without its block number, or the first part of other names.
fn family(tensor: &str) -> String {
    match tensor.split_once('.') {
        Some(("blk", rest)) => format!("blk.*.{}", rest.split_once('.').map_or(rest, |(_, name)| name)),
        Some((first, _)) => format!("{first}.*"),
        None => tensor.into(),
    }
}

impl Record for Inspection {
    fn text(&self, page: &mut Page<'_>) -> io::Result<()> {
        let own_name = if self.name.is_empty() { String::new() } else { format!(" ({})", self.name) };
        page.line(format!("{}{own_name}", self.model))?;
        if let Some(version) = self.gguf_version {
            let total = self.files.iter().map(|f| f.bytes).sum();
            page.line(format!("GGUF version {version}, {} in {}", bytes(total), plural(self.files.len(), "file")))?;
        }
        self.notes.iter().try_for_each(|note| page.line(format!("note: {note}")))?;
        let mut config = Table::new(&["value", ">is", "from"]);
        self.config.iter().for_each(|fact| config.row([fact.name, &fact.value, &fact.source]));
        page.gap()?;
        page.table(&config)?;
        page.gap()?;
        self.coverage.text(page)?;
        self.kv_b_text.iter().try_for_each(|line| page.line(line))?;
        if self.tied {
            page.line("output: tied, so the embedding serves as output matrix; the files hold none")?;
        }
        page.line(format!("MTP: {}", self.mtp.text))?;
        let lacks = &self.mtp.missing;
        if self.mtp.state == "partial" {
            let first = lacks.iter().take(4).map(String::as_str).collect::<Vec<_>>().join(", ");
            page.line(format!("  lacks {}: {first}{}", plural(lacks.len(), "tensor"), more(lacks.len(), 4)))?;
        }
        let mut fused = Table::new(&["fused group", "parts in canonical order, with their types", "layers"]);
        self.fused_groups.iter().for_each(|g| fused.row([g.group, &g.parts, &ranges(&g.layers)]));
        page.gap()?;
        page.table(&fused)?;
        page.gap()?;
        self.plan.text(self.all, page)?;
        if let Some(why) = self.plan.missing {
            page.line(format!("No plan, and no bytes per rank: {why}."))?;
        }
        let readable = self.coverage.unreadable.is_empty() && self.coverage.unhandled.is_empty();
        page.line(match (self.whole, readable) {
            (true, true) => "Whole: every tensor has a home, every parameter a source, every shape fits.",
            (true, false) => {
                "Whole, but not runnable by this build (exit 3): fetch or make a file without those types and forms."
            }
            (false, _) => {
                "NOT whole (exit 2): see the lines marked UNBOUND, MISSING and SHAPE above. Rename or convert again; \
                 nothing is skipped."
            }
        })
    }
}

impl Coverage {
    fn text(&self, page: &mut Page<'_>) -> io::Result<()> {
        let Coverage { tensors, bound, known_unused, unbound, missing, wrong_shape, aliases, .. } = self;
        let (unreadable, unhandled) = (&self.unreadable, &self.unhandled);
        page.line(format!(
            "{tensors} tensors: {bound} bound, {} known-unused, {} UNBOUND; {} parameters without a source, {} of the \
             wrong shape.",
            known_unused.len(),
            unbound.len(),
            missing.len(),
            wrong_shape.len()
        ))?;
        for group in alike(known_unused, |u| u.reason.clone()) {
            let (n, first) = (group.len(), group[0]);
            page.line(format!("  known-unused: {n} x {} (first: {})", first.reason, first.tensor))?;
        }
        for group in alike(unbound, |u| family(&u.tensor)) {
            let first = group[0];
            let near = match (&first.nearest, first.edits) {
                (Some(name), Some(edits)) => format!("nearest: {name}, {}", plural(edits, "edit")),
                _ => "nothing is near".into(),
            };
            let (tensor, family) = (&first.tensor, family(&first.tensor));
            page.line(match group.len() {
                1 => format!("  UNBOUND {tensor} ({near})"),
                n => format!("  UNBOUND {n} tensors under {family} (first: {tensor}; {near})"),
            })?;
        }
        for group in alike(missing, |m| m.of.kind) {
            let (kind, layers) = (group[0].of.kind, layers(group.iter().map(|m| &m.of)));
            page.line(format!("  MISSING {kind}{layers}: no tensor {}{}", group[0].tensor, more(group.len(), 1)))?;
        }
        for group in alike(wrong_shape, |s| (s.of.kind, s.expected.clone(), s.found.clone())) {
            let (WrongShape { tensor, file, expected, found, keys, of }, n) = (group[0], group.len());
            let (kind, layers) = (of.kind, layers(group.iter().map(|m| &m.of)));
            page.line(format!(
                "  SHAPE {kind}{layers}: expected {expected:?} by {}, found {found:?}",
                keys.join(", ")
            ))?;
            page.line(format!("    in {tensor}{}, {file}", more(n, 1)))?;
        }
        if let Some(Alias { tensor, usual }) = aliases.first() {
            page.line(format!("  alias: {tensor} read as {usual}{}", more(aliases.len(), 1)))?;
        }
        for group in alike(unreadable, |u| u.r#type.clone()) {
            let (n, Unreadable { tensor, r#type }) = (group.len(), group[0]);
            let cannot = "tensors that this build cannot dequantise";
            page.line(format!("  type {type}: {n} {cannot} (first: {tensor})", type = r#type))?;
        }
        for group in alike(unhandled, |u| u.form) {
            let (n, Unhandled { tensor, form }) = (group.len(), group[0]);
            page.line(format!("  form: {n} x {form}, which this build cannot read (first: {tensor})"))?;
        }
        Ok(())
    }
}

impl Plan {
    fn text(&self, all: bool, page: &mut Page<'_>) -> io::Result<()> {
        let (Some(parameters), Some(trunk), Some(mtp)) =
            (&self.parameters, &self.trunk_bytes_per_rank, &self.mtp_bytes_per_rank)
        else {
            return Ok(());
        };
        page.table(&if all { each(parameters) } else { by_kind(parameters) })?;
        page.gap()?;
        let mut totals = Table::new(&["rank", ">trunk", ">MTP (not loaded)"]);
        let ranks: Vec<(usize, String, String)> =
            trunk.iter().zip(mtp).enumerate().map(|(rank, (t, m))| (rank, bytes(*t), bytes(*m))).collect();
        for group in alike(&ranks, |(_, trunk, mtp)| (trunk.clone(), mtp.clone())) {
            let numbers: Vec<usize> = group.iter().map(|g| g.0).collect();
            totals.row([&format!("{} of {}", ranges(&numbers), self.tp), &group[0].1, &group[0].2]);
        }
        page.table(&totals)?;
        page.gap()?;
        let (cache, Vocabulary { rows, padded }) = (self.cache_per_token, self.vocabulary);
        page.line(format!("Cache: {cache} B per token on every rank (f32 latent, rope key and index keys)."))?;
        page.line(format!("Vocabulary: {rows} rows, padded to {padded}: {} per rank.", padded / self.tp))?;
        let mut plain: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for p in parameters {
            if let Some(from) = p.dequantised_from {
                *plain.entry((p.of.kind, from)).or_default() += 1;
            }
        }
        if !plain.is_empty() {
            page.line("Dequantised to F32 on load, since the engine keeps them plain:")?;
            let each: Vec<String> = plain.iter().map(|((kind, from), n)| format!("{kind} ({n} x {from})")).collect();
            each.chunks(4).try_for_each(|line| page.line(format!("  {}", line.join(", "))))?;
        }
        Ok(())
    }
}

const PARAMETERS: [&str; 7] = ["parameter", "layers", "type", "cut", ">whole", ">per rank", ">x bytes"];

fn type_of(p: &Parameter) -> String {
    match p.dequantised_from {
        Some(from) => format!("{} (from {from})", p.r#type),
        None if p.tied => format!("{} (tied: the embedding's)", p.r#type),
        None => p.r#type.into(),
    }
}

/// Bytes on all ranks as a multiple of those in the file; what is in no file has none.
fn times(tied: bool, times: f64) -> String {
    if tied { "-".into() } else { format!("{times:.2}") }
}

fn most(p: &Parameter) -> u64 {
    p.bytes_per_rank.iter().max().copied().unwrap_or(0)
}

fn each(parameters: &[Parameter]) -> Table {
    let mut rows = Table::new(&PARAMETERS);
    for p in parameters {
        let (whole, most, times) = (bytes(p.bytes), bytes(most(p)), times(p.tied, p.times));
        rows.row([p.parameter.as_str(), "", &type_of(p), p.cut, &whole, &most, &times]);
    }
    rows
}

/// Parameters of one kind and type, added up.
fn by_kind(parameters: &[Parameter]) -> Table {
    let mut rows = Table::new(&PARAMETERS);
    for group in alike(parameters, |p| (p.of.kind, p.r#type, p.dequantised_from, p.cut)) {
        let (first, sum) = (group[0], |of: fn(&Parameter) -> u64| group.iter().map(|p| of(p)).sum::<u64>());
        let (whole, all) = (sum(|p| p.bytes), sum(|p| p.bytes_per_rank.iter().sum()));
        let layers: Vec<usize> = group.iter().filter_map(|p| p.of.layer).collect();
        let (layers, times) = (ranges(&layers), times(first.tied, all as f64 / whole.max(1) as f64));
        rows.row([first.of.kind, &layers, &type_of(first), first.cut, &bytes(whole), &bytes(sum(most)), &times]);
    }
    rows
}
