//! Values that a dump reports otherwise than the run had them. What reads them ran on the true ones, and would be blamed
//! for the report: it is judged again from what its inputs should have been.

use std::collections::BTreeSet;

use super::op::{OpFinding, judge_op};
use super::replay::{Judge, Seen, Unjudged, owner};
use super::{Subject, VerifyError};
use crate::model::{Layout, Place};
use crate::probe::Trace;
use crate::report::Verdict;

/// A dump beside which stands what it should hold at the places that diverged so far.
#[derive(Default)]
pub(super) struct Misreported {
    bad: BTreeSet<Place>,
    mended: Option<Trace>,
}

impl Misreported {
    /// Takes the finding of the next operation. Where it diverges from its inputs as they were captured, but some of these
    /// diverged themselves, and it is right from what they should have been, it is acquitted.
    ///
    /// # Errors
    /// Weights that cannot be read.
    pub(super) fn next(
        &mut self,
        judge: &Judge<'_>,
        trace: &Trace,
        finding: OpFinding,
        subject: &Subject,
    ) -> Result<OpFinding, VerifyError> {
        if finding.verdict != Verdict::Divergent {
            return Ok(finding);
        }
        let place = finding.place;
        let reads = judge.reads(place, &|input| trace.ranks(input).is_some()).unwrap_or_default();
        let suspects = reads.from.into_iter().filter(|input| self.bad.contains(input));
        let suspects: Vec<String> = suspects.map(|input| input.to_string()).collect();
        if let Some(mended) = self.mended.as_ref().filter(|_| !suspects.is_empty()) {
            let again = judge_op(judge, mended, place, subject)?;
            if again.verdict == Verdict::Match {
                let inputs = suspects.join(" and ");
                let detail = format!("right from what {inputs} should be: only the capture of that differs");
                return Ok(OpFinding { detail: format!("{detail}; {}", again.detail), ..again });
            }
        }
        let mut mended = self.mended.take().unwrap_or_else(|| trace.clone());
        if Unjudged::or_none(mend(judge, &mut mended, place))?.is_some() {
            self.bad.insert(place);
        }
        self.mended = Some(mended);
        Ok(finding)
    }
}

/// Puts into a trace, at the judged rows of a place, what the reference computes from the place's own inputs.
fn mend(judge: &Judge<'_>, trace: &mut Trace, place: Place) -> Result<(), Unjudged> {
    let judge = judge.at(place.point);
    let no_data = |why: &str| Unjudged::NoData(why.into());
    if place.point.is_choice() || place.point.layout() == Layout::Partial && trace.tp > 1 {
        return Err(no_data("a choice, and an addend, are not what one rank sees alone"));
    }
    let whole = trace.whole(place).map_err(|e| Unjudged::NoData(e.to_string()))?;
    let exact = {
        let seen = Seen::new(trace, 0);
        judge.recompute(place, &|n| seen.get(n))?.floored.exact
    };
    let own = |rank: usize| -> Vec<usize> {
        let mine = |j: &usize| owner(place.point, &whole.shape, trace.tp, *j).is_none_or(|r| r == rank);
        (0..exact.ncols()).filter(mine).collect()
    };
    let own: Vec<Vec<usize>> = (0..trace.tp).map(own).collect();
    let row = |rank: usize, i: usize| own[rank].iter().map(|j| exact[[i, *j]] as f32).collect();
    trace.set_rows(place, judge.rows, &row).ok_or_else(|| no_data("captured in another shape"))
}
