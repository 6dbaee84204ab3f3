//! Stage `weights`: does each rank hold the right bytes, and do they agree with a baseline checkpoint?
//!
//! Bytes are read back from the device and compared, bit for bit, with what the reference cuts from the raw file by its
//! own rules. Covering ranks may hold equal bytes and still multiply different columns, so the column range that the
//! device uses is compared too. What the ranks should hold must partition the parameter, or else an axis that nobody
//! holds would never be missed.

mod baseline;
mod expected;
mod explain;

use std::collections::BTreeMap;
use std::time::Instant;

use lockstep_reference::slice::Placement;

use self::expected::{Expected, Oracle};
use super::verdict::{Check, StageReport};
use super::{Progress, Subject, VerifyError};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::oracle::Raw;
use crate::device::Columns;
use crate::engine::Engine;
use crate::model::{Kind, Param, params};

const STAGE: &str = "weights";

/// Runs the stage.
///
/// # Errors
/// An engine that does not load, a model that the reference cannot read.
pub fn run(subject: &Subject, progress: &dyn Progress) -> Result<StageReport, VerifyError> {
    let start = Instant::now();
    let raw = Raw(subject.checkpoint.source());
    let oracle = Oracle::new(&raw)?;
    let engine = subject.engine()?;
    let wanted = |p: &Param| subject.wants_layer(p.layer);
    let all: Vec<Param> = params::of_trunk(subject.checkpoint.config()).into_iter().filter(wanted).collect();
    let mut tally = Tally::default();
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
        summary = format!("{} of {} parts are wrong on {} ranks", tally.faults.len(), tally.made, engine.tp());
    }
    let mut made = tally.made;
    let mut checks = tally.checks();
    if let Some(other) = &subject.baseline {
        let compared = baseline::compare(subject, &oracle, other, progress)?;
        summary = format!("{summary}; against the baseline: {}", compared.summary);
        made += compared.made;
        checks.extend(compared.checks);
    }
    let report =
        StageReport { made, seconds: start.elapsed().as_secs_f64(), ..StageReport::new(STAGE, summary, checks) };
    Ok(report)
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
            let found = engine.read_weight(rank, param)?;
            let columns = engine.read_cols(rank, param)?;
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
            let noun = if count == 1 { "parameter" } else { "parameters" };
            let detail = format!("{count} {noun}, {cut}, {}{covering}", formats.join(" "));
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

/// Parts that leave something out, or that overlap: the ranges must follow each other from the first to the last, and
/// their bytes must add up to the file's.
fn no_partition(oracle: &Oracle<'_>, param: Param, parts: &[Expected]) -> Result<Option<String>, VerifyError> {
    let axis = |e: &Expected| match &e.placement {
        Placement::Replicated => None,
        Placement::Rows(r) | Placement::Cols(r) | Placement::Heads(r) | Placement::Experts(r) => Some(r.clone()),
        Placement::Vocab { rows, .. } => Some(rows.clone()),
    };
    let mut next = 0;
    for (rank, part) in parts.iter().enumerate() {
        let Some(range) = axis(part) else { continue };
        if range.start != next {
            return Ok(Some(format!("rank {rank} begins at {}, expected {next}", range.start)));
        }
        next = range.end;
    }
    // Without covering blocks and derivation, the parts are the file, byte for byte.
    let file: usize = oracle.tensors(param)?.iter().map(|(_, t)| t.bytes.len()).sum();
    let sum: usize = parts.iter().map(|p| p.bytes.len()).sum();
    let cut = parts.iter().all(|p| axis(p).is_some());
    let covers = parts.iter().any(|p| p.own != p.stored);
    if cut && !covers && file > 0 && sum != file {
        return Ok(Some(format!("the parts have {sum} bytes together, the file {file}")));
    }
    Ok(None)
}
