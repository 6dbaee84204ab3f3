//! `lockstep inspect`: the file, its parameters, the plan and the bytes per rank, from headers alone.

use std::collections::BTreeMap;
use std::io::Write;

use super::args::InspectArgs;
use super::{CliError, Exit, emit};
use crate::checkpoint::{Binding, Checkpoint, Mtp};
use crate::model::{self, Kind, Param};
use crate::report::inspection as record;
use crate::shard::budget::{Budget, Line};
use crate::shard::{Group, ShardPlan, TpPlan};

pub(super) fn run(args: &InspectArgs, out: &mut dyn Write) -> Result<Exit, CliError> {
    let checkpoint = Checkpoint::open(args.model.model.as_deref())?;
    let plan = TpPlan::new(checkpoint.config(), args.tp)?;
    let no_plan = why_no_plan(&checkpoint);
    let budget = if no_plan.is_none() { Some(Budget::new(&checkpoint, &plan)?) } else { None };
    if let Some(budget) = budget.as_ref().filter(|_| args.strict_blocks) {
        budget.strict_blocks(&plan)?;
    }
    let record = record::Inspection { all: args.all, ..inspection(&checkpoint, &plan, budget.as_ref()) };
    emit(&record, args.model.json, out)?;
    Ok(match (record.whole, no_plan) {
        (false, _) => Exit::Usage,
        (true, Some(_)) => Exit::Unmeasured,
        (true, None) => Exit::Ok,
    })
}

/// A plan needs shapes to cut and types to count.
fn why_no_plan(checkpoint: &Checkpoint) -> Option<&'static str> {
    let coverage = checkpoint.coverage();
    match (coverage.shapes.is_empty(), coverage.is_handled()) {
        (false, _) => Some("shapes contradict the metadata"),
        (true, false) => Some("this build cannot read the types or forms listed above, so it cannot run this file"),
        (true, true) => None,
    }
}

/// How the key-value up-projection is stored: a word for machines, and what follows from it.
fn kv_b(checkpoint: &Checkpoint) -> (&'static str, Vec<String>) {
    let c = checkpoint.config();
    let binding = |layer| checkpoint.binding(Param { layer: Some(layer), kind: Kind::KB });
    let whole = (0..c.layers).filter(|l| matches!(binding(*l), Some(Binding::KvB(_)))).count();
    let split = (0..c.layers).filter(|l| matches!(binding(*l), Some(Binding::Whole(_)))).count();
    let shapes = format!("k_b [head][latent {}][nope {}]", c.kv_lora, c.nope);
    let (word, text) = match (split, whole) {
        (0, 0) => ("absent", "absent".into()),
        (_, 0) if c.nope == c.kv_lora => {
            ("split", format!("split, {shapes}: by the metadata only, since both are equal; confirm with verify"))
        }
        (_, 0) => ("split", format!("split (attn_k_b, attn_v_b), {shapes} by metadata and shape: transposed")),
        (0, _) => {
            ("whole", "whole: value rows keep their bytes, key rows are dequantised and transposed on load".into())
        }
        _ => ("mixed", format!("mixed: split in {split} layers, whole in {whole}")),
    };
    let note = if whole > 0 { two_layouts(checkpoint) } else { Vec::new() };
    (word, [format!("kv_b: {text}")].into_iter().chain(note).collect())
}

/// A GGUF with a whole kv_b whose metadata describes the split form is the work of two converters.
fn two_layouts(checkpoint: &Checkpoint) -> Vec<String> {
    let keys = ["head_count_kv", "key_length", "value_length", "key_length_mla", "value_length_mla"];
    let prefix = model::key("attention.");
    let found = keys.map(|k| (k, checkpoint.source().metadata().get(&format!("{prefix}{k}"))));
    if found[3].1.is_none() {
        return Vec::new();
    }
    let values = found.iter().filter_map(|(k, v)| v.map(|v| format!("{k} {v}"))).collect::<Vec<_>>().join(", ");
    vec![
        format!("  note: tensors and metadata describe two layouts. attn_kv_b is whole, but under {prefix}"),
        format!("  {values} say split."),
        "  The tensor's shape is used; compare with a baseline before trusting it.".into(),
    ]
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

fn cut_name(line: &Line) -> &'static str {
    if line.covering { "row-covering" } else { line.cut.name() }
}

fn mtp_bytes(budget: &Budget, tp: usize) -> Vec<u64> {
    if budget.mtp.is_empty() { vec![0; tp] } else { budget.mtp_bytes() }
}

fn of(param: Param) -> record::Of {
    record::Of { kind: param.kind.name(), layer: param.layer }
}

fn inspection(checkpoint: &Checkpoint, plan: &TpPlan, budget: Option<&Budget>) -> record::Inspection {
    let (c, source) = (checkpoint.config(), checkpoint.source());
    let gguf = source.gguf();
    let file = |(path, bytes): (&std::path::Path, u64)| record::File { path: path.display().to_string(), bytes };
    let fact = |f: &model::Fact| record::Fact {
        name: f.name,
        value: f.value.clone(),
        source: f.source.clone(),
        origin: f.origin.name(),
    };
    let fused =
        |(group, parts, layers): (Group, String, Vec<usize>)| record::Fused { group: group.name(), parts, layers };
    let (kv_b, kv_b_text) = kv_b(checkpoint);
    let (state, text) = mtp(checkpoint.coverage().mtp);
    record::Inspection {
        model: checkpoint.name().into(),
        whole: checkpoint.coverage().is_whole(),
        notes: source.warnings(),
        name: c.name.clone(),
        files: gguf.map_or(Vec::new(), |g| g.files().map(file).collect()),
        config: c.facts.iter().map(fact).collect(),
        coverage: coverage(checkpoint),
        kv_b,
        tied: checkpoint.is_tied(),
        mtp: record::Mtp { state, missing: checkpoint.coverage().mtp_missing.clone(), text },
        fused_groups: groups(checkpoint, plan).into_iter().map(fused).collect(),
        plan: plan_of(checkpoint, plan, budget),
        gguf_version: gguf.map(|g| g.version()),
        kv_b_text,
        all: false,
    }
}

fn coverage(checkpoint: &Checkpoint) -> record::Coverage {
    let found = checkpoint.coverage();
    let owned = |(tensor, other): &(String, String)| (tensor.clone(), other.clone());
    let unused = found.unused.iter().map(|u| record::Unused { tensor: u.tensor.clone(), reason: u.reason.clone() });
    let unbound = found.unbound.iter().map(|u| record::Unbound {
        tensor: u.tensor.clone(),
        nearest: u.nearest.as_ref().map(|n| n.0.clone()),
        edits: u.nearest.as_ref().map(|n| n.1),
    });
    let missing = found.missing.iter().map(|(p, tensor)| record::Missing {
        parameter: p.to_string(),
        tensor: tensor.clone(),
        of: of(*p),
    });
    let shapes = found.shapes.iter().map(|s| record::WrongShape {
        tensor: s.tensor.clone(),
        file: checkpoint.source().file_of(&s.tensor),
        expected: s.expected.clone(),
        found: s.found.clone(),
        keys: s.keys.iter().map(ToString::to_string).collect(),
        of: of(s.param),
    });
    record::Coverage {
        tensors: found.tensors,
        bound: found.bound,
        known_unused: unused.collect(),
        unbound: unbound.collect(),
        missing: missing.collect(),
        wrong_shape: shapes.collect(),
        aliases: found.aliases.iter().map(owned).map(|(tensor, usual)| record::Alias { tensor, usual }).collect(),
        unreadable: found
            .unreadable
            .iter()
            .map(|(tensor, ty)| record::Unreadable { tensor: tensor.clone(), r#type: ty.to_string() })
            .collect(),
        unhandled: found
            .unhandled
            .iter()
            .map(|u| record::Unhandled { tensor: u.tensor.clone(), form: u.form })
            .collect(),
    }
}

fn plan_of(checkpoint: &Checkpoint, plan: &TpPlan, budget: Option<&Budget>) -> record::Plan {
    let c = checkpoint.config();
    let parameter = |l: &Line| record::Parameter {
        parameter: l.param.to_string(),
        r#type: l.ty.name(),
        cut: cut_name(l),
        dequantised_from: l.dequantised_from.map(|t| t.name()),
        tied: l.tied,
        bytes: l.whole,
        bytes_per_rank: l.per_rank.clone(),
        times: l.times(),
        of: of(l.param),
    };
    let full = (0..c.layers).filter(|l| c.is_full(*l)).count();
    record::Plan {
        tp: plan.tp(),
        vocabulary: record::Vocabulary { rows: c.vocab, padded: c.padded_vocab(plan.tp()) },
        parameters: budget.map(|b| b.trunk.iter().map(parameter).collect()),
        trunk_bytes_per_rank: budget.map(Budget::trunk_bytes),
        mtp_bytes_per_rank: budget.map(|b| mtp_bytes(b, plan.tp())),
        cache_per_token: (c.layers * c.cache_width() + full * c.index_dim) * 4,
        missing: why_no_plan(checkpoint),
    }
}
