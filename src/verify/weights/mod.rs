//! Stage `weights`: does each rank hold the right bytes, and do they agree with a baseline checkpoint?
//!
//! Bytes are read back from the device and compared, bit for bit, with what the reference cuts from the raw file by its
//! own rules. Covering ranks may hold equal bytes and still multiply different columns, so the column range that the
//! device uses is compared too. What the ranks should hold must partition the parameter, or else an axis that nobody
//! holds would never be missed; and the parameters must be those of the reference's own list, or else one that the
//! engine forgets would not be.

mod baseline;
mod bytes;
mod differs;
mod distance;
mod expected;
mod explain;

use std::collections::{BTreeMap, BTreeSet};

use lockstep_reference::RefParam;
use lockstep_reference::slice::Placement;
use lockstep_reference::weights::shape;

pub(super) use self::baseline::may_cost;
use self::expected::{Expected, Oracle};
use super::param_map::reference_of;
use super::{Subject, VerifyError};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::oracle::Raw;
use crate::device::Columns;
use crate::engine::Engine;
use crate::model::{Kind, Param, params};
use crate::report::table::plural;
use crate::report::{Check, Compared, Progress, StageReport};

const STAGE: &str = "weights";

/// Runs the stage.
///
/// # Errors
/// An engine that does not load, a model that the reference cannot read.
pub fn run(subject: &Subject, progress: &dyn Progress) -> Result<StageReport, VerifyError> {
    if subject.target.is_some() {
        return Ok(StageReport::not_applicable(STAGE, "a dump is judged, and it holds no weights"));
    }
    let raw = Raw(subject.checkpoint.source());
    let oracle = Oracle::new(&raw)?;
    let engine = subject.engine()?;
    let wanted = |p: &Param| subject.wants_layer(p.layer);
    let all: Vec<Param> = params::of_trunk(subject.checkpoint.config()).into_iter().filter(wanted).collect();
    let own = oracle.trunk().into_iter().filter(|(layer, _)| subject.wants_layer(*layer)).collect();
    let (all, faults) = listed(all, own);
    let mut tally = Tally { made: 1, faults, ..Tally::default() };
    for (done, param) in all.iter().enumerate() {
        progress.at("parameters read back", done, all.len());
        tally.parameter(&oracle, &engine, &subject.checkpoint, *param)?;
    }
    progress.at("parameters read back", all.len(), all.len());
    let mut summary = format!(
        "{} parameters on {} ranks, {} read back and equal to the file's, bit for bit",
        all.len(),
        engine.tp(),
        crate::report::table::bytes(tally.bytes)
    );
    if !tally.faults.is_empty() {
        summary = format!("{} of {} checks failed on {} ranks", tally.faults.len(), tally.made, engine.tp());
    }
    let (mut made, mut values) = (tally.made, Compared::default());
    let mut checks = tally.checks();
    if let Some(other) = &subject.baseline {
        let compared = baseline::compare(subject, &oracle, other, progress)?;
        summary = format!("{summary}; against the baseline: {}", compared.summary);
        made += compared.made;
        values = compared.compared;
        checks.extend(compared.checks);
    }
    Ok(StageReport { made, compared: values, ..StageReport::new(STAGE, summary, checks) })
}

/// The engine's parameters that the reference's list has too, each once, and a fault for every other one of either.
fn listed(engine: Vec<Param>, mut own: BTreeSet<(Option<usize>, RefParam)>) -> (Vec<Param>, Vec<Check>) {
    let mut faults = Vec::new();
    let mut both = Vec::with_capacity(engine.len());
    for param in engine {
        if own.remove(&(param.layer, reference_of(param.kind))) {
            both.push(param);
        } else {
            let detail = "UNEXPECTED: the engine's list has it more often than the reference's";
            faults.push(Check::exact(param.to_string(), false, detail));
        }
    }
    for (layer, param) in own {
        let name = layer.map_or_else(|| format!("{param:?}"), |layer| format!("layer {layer} {param:?}"));
        let detail = "FORGOTTEN: the reference's list has it, the engine's does not, so no rank was asked for it";
        faults.push(Check::exact(name, false, detail));
    }
    (both, faults)
}

/// What has been compared so far.
#[derive(Default)]
struct Tally {
    made: usize,
    bytes: u64,
    faults: Vec<Check>,
    /// Per kind: parameters that are right on every rank, the ways they are stored, and the ranks that cover.
    right: BTreeMap<Kind, (usize, Vec<&'static str>, usize)>,
}

impl Tally {
    fn parameter(
        &mut self,
        oracle: &Oracle<'_>,
        engine: &Engine,
        checkpoint: &Checkpoint,
        param: Param,
    ) -> Result<(), VerifyError> {
        let tp = engine.tp();
        let (mut parts, mut covering, before) = (Vec::with_capacity(tp), 0, self.faults.len());
        let mut format = "";
        for rank in 0..tp {
            let expected = oracle.expected(param, tp, rank)?;
            let (found, columns) = engine.read_weight(rank, param)?;
            self.made += 2;
            self.bytes += found.len() as u64;
            let name = format!("{param} rank {rank}");
            if found != expected.bytes {
                let at = (tp, rank);
                let (kind, evidence) = explain::explain(oracle, checkpoint.config(), param, at, &expected, &found)?;
                self.faults.push(Check::exact(&name, false, format!("{kind}: {evidence}")));
            }
            if let Some(fault) = wrong_columns(oracle, param, (tp, rank), &expected, &columns)? {
                self.faults.push(Check::exact(format!("{name} columns"), false, fault));
            }
            covering += usize::from(expected.own != expected.stored);
            format = expected.format;
            parts.push(expected);
        }
        self.made += 1;
        if let Some(fault) = no_partition(oracle, param, &parts)? {
            self.faults.push(Check::exact(format!("{param} partition"), false, fault));
        }
        if self.faults.len() == before {
            let (count, formats, covers) = self.right.entry(param.kind).or_default();
            *count += 1;
            *covers = covering.max(*covers);
            if !formats.contains(&format) {
                formats.push(format);
            }
        }
        Ok(())
    }

    fn checks(self) -> Vec<Check> {
        let mut checks = self.faults;
        for (kind, (count, formats, covering)) in self.right {
            let cut = crate::shard::Cut::of(kind).name();
            let covering = match covering {
                0 => String::new(),
                ranks => format!(", {ranks} ranks hold covering blocks"),
            };
            let detail = format!("{}, {cut}, {}{covering}", plural(count, "parameter"), formats.join(" "));
            checks.push(Check::exact(kind.name(), true, detail));
        }
        checks
    }
}

/// A device that multiplies other columns than its rank's, whatever bytes it holds.
fn wrong_columns(
    oracle: &Oracle<'_>,
    param: Param,
    (tp, rank): (usize, usize),
    expected: &Expected,
    found: &Columns,
) -> Result<Option<String>, VerifyError> {
    if (&found.own, &found.stored) == (&expected.own, &expected.stored) {
        return Ok(None);
    }
    let mut whose = String::new();
    for other in (0..tp).filter(|r| *r != rank) {
        if oracle.expected(param, tp, other)?.own == found.own {
            whose = format!(", which are rank {other}'s");
        }
    }
    let own = format!("columns {:?}{whose}, expected {:?}", found.own, expected.own);
    let stored = format!("stored {:?}, expected {:?}", found.stored, expected.stored);
    Ok(Some(format!("SHARD_PLACEMENT: rank {rank} multiplies {own} ({stored})")))
}

/// Parts that leave something out, or that overlap: the ranges must follow each other from the first to the last of
/// what the reference's shape has, the columns that are multiplied likewise, and the bytes must add up to the file's.
fn no_partition(oracle: &Oracle<'_>, param: Param, parts: &[Expected]) -> Result<Option<String>, VerifyError> {
    let name = reference_of(param.kind);
    if let Some(fault) = gap(&shape(&oracle.config, name), oracle.config.experts, parts) {
        return Ok(Some(fault));
    }
    // Without covering blocks and derivation, the parts are the file, byte for byte.
    let file: usize = oracle.tensors(param)?.iter().map(|(_, t)| t.bytes.len()).sum();
    let sum: usize = parts.iter().map(|p| p.bytes.len()).sum();
    let cut = parts.iter().all(|p| p.placement != Placement::Replicated);
    let covers = parts.iter().any(|p| p.own != p.stored);
    if cut && !covers && file > 0 && sum != file {
        return Ok(Some(format!("the parts have {sum} bytes together, the file {file}")));
    }
    Ok(None)
}

/// Where the parts of all ranks do not make a parameter of this shape (slowest axis first; of one of `experts`).
fn gap(shape: &[usize], experts: usize, parts: &[Expected]) -> Option<String> {
    let (rows, cols) = (shape.first().copied().unwrap_or(1), shape.last().copied().unwrap_or(1));
    let part = |e: &Expected| match &e.placement {
        Placement::Replicated => ("whole parameter", 0..rows, rows),
        Placement::Rows(r) | Placement::Vocab { rows: r, .. } => ("row", r.clone(), rows),
        Placement::Heads(r) => ("head", r.clone(), rows),
        Placement::Cols(r) => ("column", r.clone(), cols),
        Placement::Experts(r) => ("expert", r.clone(), experts),
    };
    let Some((unit, _, all)) = parts.first().map(part) else { return Some("no rank holds a part".into()) };
    let by_column = unit == "column";
    let mut next = 0;
    for (rank, expected) in parts.iter().enumerate() {
        let (own, range, _) = part(expected);
        if own != unit {
            return Some(format!("rank {rank} holds its part by {own}, rank 0 by {unit}"));
        }
        let replicated = expected.placement == Placement::Replicated;
        if !replicated && range.start != next {
            return Some(format!("rank {rank} begins at {unit} {}, expected {next}", range.start));
        }
        next = range.end;
        let columns = if by_column { range } else { 0..cols };
        let within = expected.stored.start <= expected.own.start && expected.own.end <= expected.stored.end;
        if expected.own != columns || !within {
            let (own, stored) = (&expected.own, &expected.stored);
            return Some(format!("rank {rank} multiplies columns {own:?} of {stored:?}, expected {columns:?}"));
        }
    }
    (next != all).then(|| format!("the last rank ends at {unit} {next}, expected {all}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A part as a rank of a four by six matrix would hold it.
    fn part(placement: Placement) -> Expected {
        let own = if let Placement::Cols(range) = &placement { range.clone() } else { 0..6 };
        Expected { bytes: Vec::new(), row_bytes: 0, stored: own.clone(), own, placement, format: "F32" }
    }

    fn gap_of(placements: &[Placement]) -> Option<String> {
        gap(&[4, 6], 8, &placements.iter().cloned().map(part).collect::<Vec<_>>())
    }

    #[test]
    fn parts_that_partition_have_no_gap() {
        use Placement::*;
        for parts in [
            [Rows(0..2), Rows(2..4)],
            [Heads(0..1), Heads(1..4)],
            [Cols(0..3), Cols(3..6)],
            [Experts(0..4), Experts(4..8)],
            [Vocab { rows: 0..4, padded: 0..8 }, Vocab { rows: 4..4, padded: 8..16 }],
            [Replicated, Replicated],
        ] {
            assert_eq!(gap_of(&parts), None, "{parts:?}");
        }
    }

    #[test]
    fn parts_that_do_not_reach_the_end_are_found_although_they_cover() {
        use Placement::*;
        let says = |parts: &[Placement], text: &str| {
            let found = gap_of(parts);
            assert!(found.as_ref().is_some_and(|found| found.contains(text)), "{parts:?}: {found:?}");
        };
        says(&[Rows(0..2), Rows(2..3)], "ends at row 3, expected 4");
        says(&[Cols(0..2), Cols(2..4)], "ends at column 4, expected 6");
        says(&[Experts(0..2), Experts(2..4)], "ends at expert 4, expected 8");
        says(&[Cols(0..3), Cols(2..6)], "rank 1 begins at column 2, expected 3");
        says(&[Rows(0..4), Replicated], "rank 1 holds its part by whole parameter");
        says(&[], "no rank");
        // Both store all the columns, as covering ranks do, and the second multiplies the first one's.
        let covering = |own: std::ops::Range<usize>, cols| Expected { own, stored: 0..6, ..part(Cols(cols)) };
        assert_eq!(gap(&[4, 6], 8, &[covering(0..3, 0..3), covering(3..6, 3..6)]), None);
        let found = gap(&[4, 6], 8, &[covering(0..3, 0..3), covering(0..3, 3..6)]);
        assert!(found.as_ref().is_some_and(|f| f.contains("rank 1 multiplies columns 0..3")), "{found:?}");
        let outside = Expected { stored: 0..5, ..covering(0..6, 0..6) };
        assert!(gap(&[4, 6], 8, &[outside]).is_some());
    }

    #[test]
    fn a_parameter_on_one_list_only_is_a_fault() {
        let param = |layer, kind| Param { layer, kind };
        let engine = vec![param(None, Kind::Output), param(Some(1), Kind::QA)];
        let own = BTreeSet::from([(None, RefParam::Head), (Some(1), RefParam::QA)]);
        assert!(listed(engine.clone(), own.clone()).1.is_empty());
        let (both, faults) = listed(engine[..1].to_vec(), own.clone());
        assert_eq!((both, faults.len()), (engine[..1].to_vec(), 1));
        assert!(faults[0].name == "layer 1 QA" && faults[0].detail.starts_with("FORGOTTEN"), "{faults:?}");
        for more in [param(Some(1), Kind::IndexQB), param(Some(1), Kind::QA), param(Some(2), Kind::QA)] {
            let (both, faults) = listed([&engine[..], &[more]].concat(), own.clone());
            assert_eq!((both, faults.len()), (engine.clone(), 1), "{more}");
            assert!(faults[0].detail.starts_with("UNEXPECTED"), "{faults:?}");
        }
    }
}
