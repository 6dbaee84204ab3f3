//! A forward pass as data: what a rank keeps, the calls of a step in order, and what is shown behind which. It is checked
//! before anything runs, and rewritten where a device has one operation for several.

use std::ops::Range;

use super::CacheShape;
use super::call::{BufId, Call, Op, Operand, Rows};
use crate::model::{Place, Point};

/// How much a rank can hold at once.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Tokens of one step.
    pub tokens: usize,
    /// Sequences of one step.
    pub sequences: usize,
    /// Rows of logits of one step.
    pub logits: usize,
    /// Cache pages.
    pub pages: usize,
    /// Tokens per page.
    pub page: usize,
}

/// What a rank keeps, by the numbers that calls name it by.
#[derive(Clone, Debug, Default)]
pub struct Stores {
    /// Activations and vectors.
    pub bufs: Vec<BufSpec>,
    /// Indices; a row per token.
    pub indices: Vec<usize>,
    /// Caches.
    pub caches: Vec<CacheShape>,
    /// Outputs (rows) and inputs (columns) of every part of every resident parameter.
    pub weights: Vec<Vec<(usize, usize)>>,
}

/// A buffer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BufSpec {
    /// What its rows stand for.
    pub rows: BufRows,
    /// Values per row; 0 for those of [`BufRows::Context`].
    pub width: usize,
    /// What it holds from the beginning, for good where nothing is written.
    pub fill: Option<f32>,
}

/// What the rows of a buffer stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufRows {
    /// Rows of the step.
    Step(Rows),
    /// A vector that is loaded once.
    Vector,
    /// Tokens of the step, each as wide as the step's context: made when it is first written, never sized by limits.
    Context,
}

/// Which program of a model: all ranks run the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProgramId {
    /// Ends with logits.
    pub head: bool,
    /// The device chooses the next tokens.
    pub ahead: bool,
    /// As it is written, without fusing.
    pub expanded: bool,
}

/// Something shown.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Show {
    /// Behind how many calls.
    pub after: usize,
    /// The place.
    pub place: Place,
    /// What holds its values.
    pub what: Operand,
    /// Its rows.
    pub rows: Rows,
}

/// What a listener does at a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// Nothing.
    Nothing,
    /// Looks.
    Read,
    /// May put other values there, or end the step: what runs behind the place must not have run yet.
    Change,
}

/// One operation for several: looks at the calls from one on, and returns how many it replaces and by what.
pub type Rule = fn(&[Call]) -> Option<(usize, Call)>;

/// Every rule.
pub const RULES: &[Rule] = &[add_norm];

/// A sum and the norm of it.
fn add_norm(calls: &[Call]) -> Option<(usize, Call)> {
    let [Call { op: Op::Add { x, y }, rows, .. }, Call { at, op: Op::RmsNorm { x: of, w, eps, out }, rows: same }, ..] =
        calls
    else {
        return None;
    };
    let op = Op::AddNorm { x: *x, y: *y, w: *w, eps: *eps, out: *out };
    (x == of && rows == same).then_some((2, Call { at: *at, op, rows: *rows }))
}

/// A forward pass of one rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Program {
    /// The calls, in order.
    pub calls: Vec<Call>,
    /// What is shown, by [`Show::after`].
    pub shows: Vec<Show>,
}

impl Program {
    /// The same pass with runs of calls replaced by fused ones. A point inside a fused call can still be looked at if the
    /// call stores it; where someone may change it, or the call does not store it, the run stays as it is. Scores that
    /// nobody looks at are not stored.
    pub fn fuse(&self, rules: &[Rule], wants: &dyn Fn(Place) -> Want) -> Program {
        let mut fused = Program::default();
        let mut shows = self.shows.iter().copied().peekable();
        let mut at = 0;
        loop {
            // What was inside the run before comes right behind it.
            while let Some(show) = shows.next_if(|s| s.after <= at) {
                let last = fused.calls.last();
                let must_be_stored = show.after < at || matches!(show.what, Operand::Context(_));
                if !must_be_stored || last.is_some_and(|call| call.op.writes().contains(&show.what)) {
                    fused.shows.push(Show { after: fused.calls.len(), ..show });
                }
            }
            let Some(call) = self.calls.get(at) else { break };
            let shown = |range: Range<usize>| self.shows.iter().filter(move |s| range.contains(&s.after));
            let run = rules.iter().find_map(|rule| rule(&self.calls[at..])).filter(|(n, fused)| {
                shown(at + 1..at + n).all(|s| match wants(s.place) {
                    Want::Nothing => true,
                    Want::Read => fused.op.writes().contains(&s.what),
                    Want::Change => false,
                })
            });
            let (n, mut call) = run.unwrap_or((1, *call));
            if let Op::IndexTopK { scores, .. } = &mut call.op {
                let wanted = |scores: &BufId| {
                    shown(at + 1..at + 2)
                        .any(|s| s.what == Operand::Context(*scores) && wants(s.place) != Want::Nothing)
                };
                *scores = scores.filter(wanted);
            }
            fused.calls.push(call);
            at += n;
        }
        fused
    }

    /// As far as the first call at a point of any block.
    pub fn until(&self, point: Point) -> Program {
        let calls: Vec<Call> = self.calls.iter().take_while(|c| c.at.point != point).copied().collect();
        let shows = self.shows.iter().take_while(|s| s.after <= calls.len()).copied().collect();
        Program { calls, shows }
    }
}
