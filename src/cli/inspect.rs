//! `lockstep inspect`: the file, its parameters, the plan and the bytes per rank, from headers alone.

use std::collections::BTreeMap;
use std::io::Write;

use serde_json::{Value as Json, json};

use super::args::InspectArgs;
use super::{CliError, Exit, write_json};
use crate::checkpoint::coverage::{ShapeFault, Unbound};
use crate::checkpoint::{Binding, Checkpoint, Coverage, Mtp};
use crate::model::{self, Kind, Param};
use crate::report::table::{bytes, ranges, table};
use crate::shard::budget::{Budget, Line};
use crate::shard::{Group, ShardPlan, TpPlan};
use crate::verify::file::plural;

pub(super) fn run(args: &InspectArgs, out: &mut dyn Write) -> Result<Exit, CliError> {
    let checkpoint = Checkpoint::open(args.model.model.as_deref())?;
    let plan = TpPlan::new(checkpoint.config(), args.tp)?;
    let no_plan = why_no_plan(&checkpoint);
    let budget = if no_plan.is_none() { Some(Budget::new(&checkpoint, &plan)?) } else { None };
    if let Some(budget) = budget.as_ref().filter(|_| args.strict_blocks) {
        budget.strict_blocks(&plan)?;
    }
    if args.model.json {
        write_json(out, &document(&checkpoint, &plan, budget.as_ref()))?;
    } else {
        print(&checkpoint, &plan, budget.as_ref(), args.all, out)?;
        if let Some(why) = no_plan {
            writeln!(out, "No plan, and no bytes per rank: {why}.")?;
        }
        writeln!(out, "{}", conclusion(checkpoint.coverage()))?;
    }
    Ok(match (checkpoint.coverage().is_whole(), no_plan) {
        (false, _) => Exit::Usage,
        (true, Some(_)) => Exit::Unmeasured,
        (true, None) => Exit::Ok,
    })
}

/// A plan needs shapes to cut and types to count.
fn why_no_plan(checkpoint: &Checkpoint) -> Option<&'static str> {
    let coverage = checkpoint.coverage();
    match (coverage.shapes.is_empty(), coverage.unreadable.is_empty()) {
        (false, _) => Some("shapes contradict the metadata"),
        (true, false) => Some("this build cannot dequantise the types listed above, so it cannot run this file"),
        (true, true) => None,
    }
}

fn conclusion(coverage: &Coverage) -> &'static str {
    match (coverage.is_whole(), coverage.unreadable.is_empty()) {
        (true, true) => "Whole: every tensor has a home, every parameter a source, every shape fits.",
        (true, false) => {
            "Whole, but not runnable by this build (exit 3): fetch or make a quantisation without those types."
        }
        (false, _) => {
            "NOT whole (exit 2): see the lines marked UNBOUND, MISSING and SHAPE above. Rename or convert again; nothing \
             is skipped."
        }
    }
}

/// How the key-value up-projection is stored: a word for machines, and what follows from it.
fn kv_b(checkpoint: &Checkpoint) -> (&'static str, String) {
    let c = checkpoint.config();
    let binding = |layer| checkpoint.binding(Param { layer: Some(layer), kind: Kind::KB });
    let whole = (0..c.layers).filter(|l| matches!(binding(*l), Some(Binding::KvB(_)))).count();
    let split = (0..c.layers).filter(|l| matches!(binding(*l), Some(Binding::Whole(_)))).count();
    let shapes = format!("k_b [head][latent {}][nope {}]", c.kv_lora, c.nope);
    match (split, whole) {
        (0, 0) => ("absent", "absent".into()),
        (_, 0) if c.nope == c.kv_lora => {
            ("split", format!("split, {shapes}: by the metadata only, since both are equal; confirm with verify"))
        }
        (_, 0) => ("split", format!("split (attn_k_b, attn_v_b), {shapes} by metadata and shape: transposed")),
        (0, _) => {
            let whole = "whole: value rows keep their bytes, key rows are dequantised and transposed on load";
            ("whole", format!("{whole}{}", two_layouts(checkpoint)))
        }
        _ => ("mixed", format!("mixed: split in {split} layers, whole in {whole}{}", two_layouts(checkpoint))),
    }
}

/// A GGUF with a whole kv_b whose metadata describes the split form is the work of two converters.
fn two_layouts(checkpoint: &Checkpoint) -> String {
    let keys = ["head_count_kv", "key_length", "value_length", "key_length_mla", "value_length_mla"];
    let prefix = model::key("attention.");
    let found = keys.map(|k| (k, checkpoint.source().metadata().get(&format!("{prefix}{k}"))));
    if !matches!(found[3], (_, Some(_))) {
        return String::new();
    }
    let values = found.iter().filter_map(|(k, v)| v.map(|v| format!("{k} {v}"))).collect::<Vec<_>>();
    format!(
        "\n  note: tensors and metadata describe two layouts. attn_kv_b is whole, but under {prefix}\n  \
         {} say split.\n  The tensor's shape is used; compare with a baseline before trusting it.",
        values.join(", ")
    )
}

fn mtp(state: Mtp) -> (&'static str, &'static str) {
    match state {
        Mtp::None => ("none", "none declared"),
        Mtp::Whole => ("whole", "whole; the reference runs it, the engine does not yet"),
        Mtp::Partial => ("partial", "incomplete in this file; not run"),
        Mtp::Absent => ("absent", "declared, but not in this file; not run"),
    }
}

/// The type of `param` in the file, readable or not.
fn type_name(checkpoint: &Checkpoint, param: Param) -> &'static str {
    let name = checkpoint.binding(param).and_then(|b| b.names().first());
    name.and_then(|n| checkpoint.source().tensor(n)).map_or("-", |view| view.ty.name)
}

/// Fused groups with the types of their parts, layers of equal types together.
fn groups(checkpoint: &Checkpoint, plan: &TpPlan) -> Vec<(Group, String, Vec<usize>)> {
    let c = checkpoint.config();
    let mut rows: BTreeMap<(Group, String), Vec<usize>> = BTreeMap::new();
    for layer in 0..c.layers {
        for group in Group::of_layer(c, layer) {
            let parts: Vec<String> = plan
                .parts(group, layer, 0)
                .into_iter()
                .map(|p| format!("{} {}", p.kind.name(), type_name(checkpoint, p)))
                .collect();
            rows.entry((group, parts.join(" + "))).or_default().push(layer);
        }
    }
    rows.into_iter().map(|((group, parts), layers)| (group, parts, layers)).collect()
}

/// Budget lines of one kind and type, added up.
struct KindRow<'a> {
    first: &'a Line,
    layers: Vec<usize>,
    whole: u64,
    most: u64,
    all: u64,
}

fn by_kind(lines: &[Line]) -> Vec<KindRow<'_>> {
    let mut rows: Vec<KindRow<'_>> = Vec::new();
    for line in lines {
        let key = |l: &Line| (l.param.kind, l.ty, l.dequantised_from, l.covering);
        let same = |r: &KindRow<'_>| key(r.first) == key(line);
        let at = rows.iter().position(same).unwrap_or_else(|| {
            rows.push(KindRow { first: line, layers: Vec::new(), whole: 0, most: 0, all: 0 });
            rows.len() - 1
        });
        let row = &mut rows[at];
        row.layers.extend(line.param.layer);
        row.whole += line.whole;
        row.most += line.per_rank.iter().max().copied().unwrap_or(0);
        row.all += line.per_rank.iter().sum::<u64>();
    }
    rows
}

fn cut_name(line: &Line) -> String {
    if line.covering { "row-covering".into() } else { line.cut.name().into() }
}

fn print(
    checkpoint: &Checkpoint,
    plan: &TpPlan,
    budget: Option<&Budget>,
    all: bool,
    out: &mut dyn Write,
) -> std::io::Result<()> {
    let (c, coverage) = (checkpoint.config(), checkpoint.coverage());
    let own_name = if c.name.is_empty() { String::new() } else { format!(" ({})", c.name) };
    writeln!(out, "{}{own_name}", checkpoint.name())?;
    if let Some(gguf) = checkpoint.source().gguf() {
        let total: u64 = gguf.files().map(|(_, size)| size).sum();
        writeln!(out, "GGUF version {}, {} in {}", gguf.version(), bytes(total), plural(gguf.files().count(), "file"))?;
        for warning in gguf.warnings() {
            writeln!(out, "note: {warning}")?;
        }
    }
    let mut config = table(&["value", ">is", "from"]);
    for fact in &c.facts {
        config.add_row([fact.name, &fact.value, &fact.source]);
    }
    writeln!(out, "\n{config}\n")?;
    print_coverage(checkpoint, out)?;
    writeln!(out, "kv_b: {}", kv_b(checkpoint).1)?;
    writeln!(out, "MTP: {}", mtp(coverage.mtp).1)?;
    if coverage.mtp == Mtp::Partial {
        let lacks = coverage.mtp_missing.iter().take(4).map(String::as_str).collect::<Vec<_>>().join(", ");
        writeln!(
            out,
            "  lacks {}: {lacks}{}",
            plural(coverage.mtp_missing.len(), "tensor"),
            more(&coverage.mtp_missing, 4)
        )?;
    }
    let mut fused = table(&["fused group", "parts in canonical order, with their types", "layers"]);
    for (group, parts, layers) in groups(checkpoint, plan) {
        fused.add_row([group.name().to_string(), parts, ranges(&layers)]);
    }
    writeln!(out, "\n{fused}\n")?;
    match budget {
        Some(budget) => print_budget(checkpoint, plan, budget, all, out),
        None => Ok(()),
    }
}

fn more<T>(all: &[T], shown: usize) -> String {
    if all.len() > shown { format!(" and {} more", all.len() - shown) } else { String::new() }
}

fn print_budget(
    checkpoint: &Checkpoint,
    plan: &TpPlan,
    budget: &Budget,
    all: bool,
    out: &mut dyn Write,
) -> std::io::Result<()> {
    let c = checkpoint.config();
    let mut rows = table(&["parameter", "layers", "type", "cut", ">whole", ">per rank", ">x bytes"]);
    let add = |rows: &mut comfy_table::Table, name: String, layers: String, l: &Line, whole, most, times: f64| {
        let ty = l.dequantised_from.map_or(l.ty.to_string(), |from| format!("{} (from {from})", l.ty));
        rows.add_row([name, layers, ty, cut_name(l), bytes(whole), bytes(most), format!("{times:.2}")]);
    };
    if all {
        for l in &budget.trunk {
            let most = l.per_rank.iter().max().copied().unwrap_or(0);
            add(&mut rows, l.param.to_string(), String::new(), l, l.whole, most, l.times());
        }
    } else {
        for r in by_kind(&budget.trunk) {
            let times = r.all as f64 / r.whole.max(1) as f64;
            add(&mut rows, r.first.param.kind.name().into(), ranges(&r.layers), r.first, r.whole, r.most, times);
        }
    }
    writeln!(out, "{rows}\n")?;
    let mut totals = table(&["rank", ">trunk", ">MTP (not loaded)"]);
    let mut alike: Vec<([String; 2], Vec<usize>)> = Vec::new();
    for (rank, (trunk, mtp)) in budget.trunk_bytes().into_iter().zip(mtp_bytes(budget, plan.tp())).enumerate() {
        let both = [bytes(trunk), bytes(mtp)];
        match alike.iter_mut().find(|(b, _)| *b == both) {
            Some((_, ranks)) => ranks.push(rank),
            None => alike.push((both, vec![rank])),
        }
    }
    for ([trunk, mtp], ranks) in alike {
        totals.add_row([format!("{} of {}", ranges(&ranks), plan.tp()), trunk, mtp]);
    }
    writeln!(out, "{totals}\n")?;
    let full = (0..c.layers).filter(|l| c.is_full(*l)).count();
    let cache = (c.layers * c.cache_width() + full * c.index_dim) * 4;
    writeln!(out, "Cache: {cache} B per token on every rank (f32 latent, rope key and index keys).")?;
    let padded = c.padded_vocab(plan.tp());
    writeln!(out, "Vocabulary: {} rows, padded to {padded}: {} per rank.", c.vocab, padded / plan.tp())?;
    let mut plain: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for l in &budget.trunk {
        if let Some(from) = l.dequantised_from {
            *plain.entry((l.param.kind.name(), from.name())).or_default() += 1;
        }
    }
    if !plain.is_empty() {
        writeln!(out, "Dequantised to F32 on load, since the engine keeps them plain:")?;
        let each: Vec<String> = plain.iter().map(|((kind, from), n)| format!("{kind} ({n} x {from})")).collect();
        for line in each.chunks(4) {
            writeln!(out, "  {}", line.join(", "))?;
        }
    }
    Ok(())
}

fn mtp_bytes(budget: &Budget, tp: usize) -> Vec<u64> {
    if budget.mtp.is_empty() { vec![0; tp] } else { budget.mtp_bytes() }
}

fn print_coverage(checkpoint: &Checkpoint, out: &mut dyn Write) -> std::io::Result<()> {
    let coverage = checkpoint.coverage();
    writeln!(
        out,
        "{} tensors: {} bound, {} known-unused, {} UNBOUND; {} parameters without a source, {} of the wrong shape.",
        coverage.tensors,
        coverage.bound,
        coverage.unused.len(),
        coverage.unbound.len(),
        coverage.missing.len(),
        coverage.shapes.len()
    )?;
    let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for u in &coverage.unused {
        reasons.entry(&u.reason).or_default().push(&u.tensor);
    }
    for (reason, tensors) in reasons {
        writeln!(out, "  known-unused: {} x {reason} (first: {})", tensors.len(), tensors[0])?;
    }
    let mut families: BTreeMap<String, Vec<&Unbound>> = BTreeMap::new();
    for u in &coverage.unbound {
        families.entry(family(&u.tensor)).or_default().push(u);
    }
    for (family, members) in &families {
        let near = members[0].nearest.as_ref();
        let near = near.map_or("nothing is near".into(), |(n, d)| format!("nearest: {n}, {}", plural(*d, "edit")));
        match members.len() {
            1 => writeln!(out, "  UNBOUND {} ({near})", members[0].tensor)?,
            n => writeln!(out, "  UNBOUND {n} tensors under {family} (first: {}; {near})", members[0].tensor)?,
        }
    }
    let mut kinds: BTreeMap<Kind, Vec<&(Param, String)>> = BTreeMap::new();
    for m in &coverage.missing {
        kinds.entry(m.0.kind).or_default().push(m);
    }
    for members in kinds.values() {
        let layers = layers(members.iter().map(|m| m.0));
        writeln!(
            out,
            "  MISSING {}{layers}: no tensor {}{}",
            members[0].0.kind.name(),
            members[0].1,
            more(members, 1)
        )?;
    }
    let mut shapes: Vec<Vec<&ShapeFault>> = Vec::new();
    let alike = |s: &ShapeFault| (s.param.kind, s.expected.clone(), s.found.clone());
    for s in &coverage.shapes {
        match shapes.iter_mut().find(|members| alike(members[0]) == alike(s)) {
            Some(members) => members.push(s),
            None => shapes.push(vec![s]),
        }
    }
    for members in shapes {
        let (first, layers) = (members[0], layers(members.iter().map(|m| m.param)));
        let (kind, expected, found) = (first.param.kind, &first.expected, &first.found);
        let (file, keys) = (checkpoint.source().file_of(&first.tensor), first.keys.join(", "));
        writeln!(out, "  SHAPE {}{layers}: expected {expected:?} by {keys}, found {found:?}", kind.name())?;
        writeln!(out, "    in {}{}, {file}", first.tensor, more(&members, 1))?;
    }
    if let Some((alias, usual)) = coverage.aliases.first() {
        writeln!(out, "  alias: {alias} read as {usual}{}", more(&coverage.aliases, 1))?;
    }
    let mut types: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (tensor, ty) in &coverage.unreadable {
        types.entry(ty).or_default().push(tensor);
    }
    for (ty, tensors) in types {
        writeln!(
            out,
            "  type {ty}: {} tensors that this build cannot dequantise (first: {})",
            tensors.len(),
            tensors[0]
        )?;
    }
    Ok(())
}

/// What unbound tensors are grouped by: the name without its block number, or the first part of other names.
fn family(tensor: &str) -> String {
    match tensor.split_once('.') {
        Some(("blk", rest)) => format!("blk.*.{}", rest.split_once('.').map_or(rest, |(_, name)| name)),
        Some((first, _)) => format!("{first}.*"),
        None => tensor.into(),
    }
}

/// ` in layers 0-2, 5`, or nothing for parameters of the whole model.
fn layers(params: impl Iterator<Item = Param>) -> String {
    let layers: Vec<usize> = params.filter_map(|p| p.layer).collect();
    match layers.len() {
        0 => String::new(),
        n => format!(" in layer{} {}", if n == 1 { "" } else { "s" }, ranges(&layers)),
    }
}

/// The `--json` document; its schema is `docs/schemas/inspect.json`.
fn document(checkpoint: &Checkpoint, plan: &TpPlan, budget: Option<&Budget>) -> Json {
    let (c, coverage) = (checkpoint.config(), checkpoint.coverage());
    let files: Vec<Json> = checkpoint.source().gguf().map_or(Vec::new(), |g| {
        g.files().map(|(path, size)| json!({"path": path.display().to_string(), "bytes": size})).collect()
    });
    let facts: Vec<Json> =
        c.facts.iter().map(|f| json!({"name": f.name, "value": f.value, "source": f.source})).collect();
    let fused: Vec<Json> = groups(checkpoint, plan)
        .into_iter()
        .map(|(g, parts, layers)| json!({"group": g.name(), "parts": parts, "layers": layers}))
        .collect();
    let line = |l: &Line| {
        json!({
            "parameter": l.param.to_string(), "type": l.ty.name(), "cut": cut_name(l),
            "dequantised_from": l.dequantised_from.map(|t| t.name()), "bytes": l.whole,
            "bytes_per_rank": l.per_rank, "times": l.times(),
        })
    };
    json!({
        "model": checkpoint.name(),
        "whole": coverage.is_whole(),
        "notes": checkpoint.source().gguf().map_or(Vec::new(), |g| g.warnings().collect()),
        "name": c.name,
        "files": files,
        "config": facts,
        "coverage": {
            "tensors": coverage.tensors,
            "bound": coverage.bound,
            "known_unused": coverage.unused.iter()
                .map(|u| json!({"tensor": u.tensor, "reason": u.reason})).collect::<Vec<_>>(),
            "unbound": coverage.unbound.iter().map(|u| json!({
                "tensor": u.tensor, "nearest": u.nearest.as_ref().map(|n| &n.0), "edits": u.nearest.as_ref().map(|n| n.1),
            })).collect::<Vec<_>>(),
            "missing": coverage.missing.iter()
                .map(|(p, n)| json!({"parameter": p.to_string(), "tensor": n})).collect::<Vec<_>>(),
            "wrong_shape": coverage.shapes.iter()
                .map(|s| json!({
                    "tensor": s.tensor, "file": checkpoint.source().file_of(&s.tensor),
                    "expected": s.expected, "found": s.found, "keys": s.keys,
                })).collect::<Vec<_>>(),
            "aliases": coverage.aliases.iter()
                .map(|(a, u)| json!({"tensor": a, "usual": u})).collect::<Vec<_>>(),
            "unreadable": coverage.unreadable.iter()
                .map(|(t, ty)| json!({"tensor": t, "type": ty})).collect::<Vec<_>>(),
        },
        "kv_b": kv_b(checkpoint).0,
        "mtp": {"state": mtp(coverage.mtp).0, "missing": coverage.mtp_missing},
        "fused_groups": fused,
        "plan": {
            "tp": plan.tp(),
            "vocabulary": {"rows": c.vocab, "padded": c.padded_vocab(plan.tp())},
            "parameters": budget.map(|b| b.trunk.iter().map(line).collect::<Vec<_>>()),
            "trunk_bytes_per_rank": budget.map(Budget::trunk_bytes),
            "mtp_bytes_per_rank": budget.map(|b| mtp_bytes(b, plan.tp())),
        },
    })
}
