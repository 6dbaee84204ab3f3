//! Whether programs can run: widths, aliasing, what is read before it is written, and that every rank meets every
//! collective.

use std::collections::HashMap;
use std::ops::Range;

use super::call::{BufId, Call, Op, Operand, Rows, View, WeightId};
use super::program::{BufRows, Program, Stores};

/// A program that cannot run.
#[derive(Clone, Debug, thiserror::Error)]
#[error("program of rank {rank}, call {call} ({at}): {problem}")]
pub struct ProgramError {
    /// The rank.
    pub rank: usize,
    /// The call's number.
    pub call: usize,
    /// Its place and operation.
    pub at: String,
    /// What does not fit.
    pub problem: String,
}

/// Checks the programs of all ranks, each with what the rank keeps.
///
/// # Errors
/// The first call that does not fit.
pub fn check(ranks: &[(&Program, &Stores)]) -> Result<(), ProgramError> {
    for (rank, (program, stores)) in ranks.iter().enumerate() {
        let failed = |call: usize, problem: String| {
            let at = program.calls.get(call).map_or("end".into(), |c| format!("{}, {:?}", c.at, c.op));
            ProgramError { rank, call, at, problem }
        };
        let mut written = Written::default();
        let mut shows = program.shows.iter().peekable();
        for at in 0..=program.calls.len() {
            while let Some(show) = shows.next_if(|s| s.after == at) {
                let known = bounds(stores, &show.what, show.rows).and_then(|()| written.has(stores, &show.what));
                known.map_err(|problem| failed(at, format!("{} is shown: {problem}", show.place)))?;
            }
            let Some(call) = program.calls.get(at) else { break };
            one(call, stores, &mut written).map_err(|problem| failed(at, problem))?;
        }
        if let Some(show) = shows.next() {
            return Err(failed(program.calls.len(), format!("{} is shown out of order", show.place)));
        }
        met(ranks[0].0, program).map_err(|(call, problem)| failed(call, problem))?;
    }
    Ok(())
}

/// Every collective of the first rank is met by another, in the same order.
fn met(first: &Program, own: &Program) -> Result<(), (usize, String)> {
    let meetings = |program: &Program| -> Vec<(usize, String)> {
        let all = program.calls.iter().enumerate().filter(|(_, call)| call.op.is_collective());
        all.map(|(i, call)| (i, format!("{} {:?} {:?}", call.at, call.op, call.rows))).collect()
    };
    let (theirs, ours) = (meetings(first), meetings(own));
    for i in 0..theirs.len().max(ours.len()) {
        let text = |m: Option<&(usize, String)>| m.map_or("nothing".to_string(), |(_, text)| text.clone());
        let (expected, found) = (text(theirs.get(i)), text(ours.get(i)));
        if expected != found {
            let at = ours.get(i).map_or(own.calls.len(), |(at, _)| *at);
            return Err((at, format!("ranks would not meet: expected {expected} as rank 0, found {found}")));
        }
    }
    Ok(())
}

/// What calls have written so far.
#[derive(Default)]
struct Written {
    columns: HashMap<BufId, Vec<Range<usize>>>,
    others: Vec<Operand>,
}

impl Written {
    fn add(&mut self, what: &Operand) {
        let Operand::Values(view) = what else {
            if !self.others.contains(what) {
                self.others.push(*what);
            }
            return;
        };
        let columns = self.columns.entry(view.buf).or_default();
        for new in view.ranges() {
            // Ranges that touch the new one become one with it.
            let touches = |r: &Range<usize>| r.start <= new.end && new.start <= r.end;
            let (touching, mut apart): (Vec<_>, Vec<_>) = columns.drain(..).partition(touches);
            let start = touching.iter().map(|r| r.start).min().map_or(new.start, |s| s.min(new.start));
            let end = touching.iter().map(|r| r.end).max().map_or(new.end, |e| e.max(new.end));
            apart.push(start..end);
            *columns = apart;
        }
    }

    /// Whether all of it has been written; inputs are there from the beginning, and every step adds keys before it reads any.
    fn has(&self, stores: &Stores, what: &Operand) -> Result<(), String> {
        let known = match what {
            Operand::Inputs => true,
            Operand::Values(view) => {
                let columns = self.columns.get(&view.buf).map(Vec::as_slice).unwrap_or_default();
                let filled = stores.bufs[view.buf.0].fill.is_some();
                filled || view.ranges().all(|r| columns.iter().any(|c| c.start <= r.start && r.end <= c.end))
            }
            other => self.others.contains(other),
        };
        if known { Ok(()) } else { Err(format!("{what:?} is read before it is written")) }
    }
}

/// One call, behind those that have `written`.
fn one(call: &Call, stores: &Stores, written: &mut Written) -> Result<(), String> {
    let (reads, writes) = (call.op.reads(), call.op.writes());
    let gathers = matches!(call.op, Op::GatherRows { .. });
    for what in &reads {
        bounds(stores, what, if gathers { Rows::Tokens } else { call.rows })?;
        written.has(stores, what)?;
    }
    for what in &writes {
        bounds(stores, what, call.rows)?;
        if let Operand::Values(view) = what
            && view.heads > 1
            && view.stride < view.width
        {
            return Err(format!("{view:?}: heads that are written overlap"));
        }
    }
    let in_place = matches!(
        call.op,
        Op::LayerNorm { .. }
            | Op::Rope { .. }
            | Op::Scale { .. }
            | Op::Add { .. }
            | Op::AddNorm { .. }
            | Op::AllReduce { .. }
    );
    for (i, write) in writes.iter().enumerate() {
        let Operand::Values(_) = write else { continue };
        let own = usize::from(in_place && i == 0); // the first that is read is the one that is written
        if let Some(read) = reads.iter().skip(own).find(|read| read.meets(write)) {
            return Err(format!("it reads {read:?} while it writes {write:?}"));
        }
        if writes[..i].iter().any(|other| other.meets(write)) {
            return Err(format!("it writes {write:?} twice"));
        }
    }
    widths(&call.op, stores)?;
    writes.iter().for_each(|what| written.add(what));
    Ok(())
}

/// Whether an operand lies in what the rank keeps, in rows of the right kind.
fn bounds(stores: &Stores, what: &Operand, rows: Rows) -> Result<(), String> {
    let buf = |id: &BufId| stores.bufs.get(id.0).ok_or_else(|| format!("there is no buffer {id:?}"));
    match what {
        Operand::Values(view) => {
            let spec = buf(&view.buf)?;
            if view.end() > spec.width {
                return Err(format!("{view:?} ends outside the buffer's {} columns", spec.width));
            }
            if spec.rows != BufRows::Step(rows) {
                return Err(format!("{view:?} has rows of {:?}, expected {rows:?}", spec.rows));
            }
        }
        Operand::Context(id) if buf(id)?.rows != BufRows::Context => {
            return Err(format!("{id:?} is not as wide as the context"));
        }
        Operand::Indices(id) if id.0 >= stores.indices.len() => return Err(format!("there are no indices {id:?}")),
        Operand::Keys(id, layer) if stores.caches.get(id.0).is_none_or(|c| *layer >= c.layers) => {
            return Err(format!("there is no layer {layer} in {id:?}"));
        }
        _ => {}
    }
    Ok(())
}

/// Whether the widths of an operation's operands go together.
fn widths(op: &Op, stores: &Stores) -> Result<(), String> {
    let same = |what: &str, found: usize, expected: usize| match found == expected {
        true => Ok(()),
        false => Err(format!("{what}: expected {expected} values, found {found}")),
    };
    let weight = |w: &WeightId| stores.weights.get(w.0).ok_or_else(|| format!("there is no parameter {w:?}"));
    let vector = |what: &str, id: &BufId, expected: usize| match stores.bufs.get(id.0) {
        Some(spec) if spec.rows == BufRows::Vector => same(what, spec.width, expected),
        _ => Err(format!("{what}: {id:?} is no vector")),
    };
    let cols = |w: &WeightId, x: &View| weight(w)?.iter().try_for_each(|(_, cols)| same("x", x.width, *cols));
    match op {
        Op::Embed { table, out, .. } => weight(table)?.iter().try_for_each(|(_, cols)| same("out", out.len(), *cols)),
        Op::Product { w, x, out, .. } => {
            cols(w, x)?;
            let rows: usize = weight(w)?.iter().map(|(rows, _)| rows).sum();
            if x.heads > 1 {
                same("heads of out", out.heads, x.heads)?;
                same("parts of a stack", weight(w)?.len(), 1)?;
                return same("a head of out", out.width, rows);
            }
            same("out", out.len(), rows)
        }
        Op::RmsNorm { x, w, out, .. } => {
            same("out", out.len(), x.len())?;
            vector("w", w, x.len())
        }
        Op::LayerNorm { x, w, b, .. } => {
            vector("w", w, x.len())?;
            vector("b", b, x.len())
        }
        Op::Rope { x, .. } => same("the odd value of a pair", x.width % 2, 0),
        Op::Copy { x, out } | Op::GatherRows { x, out } => same("out", out.len(), x.len()),
        Op::Add { x, y } => same("y", y.len(), x.len()),
        Op::AddNorm { x, y, w, out, .. } => {
            same("y", y.len(), x.len())?;
            same("out", out.len(), x.len())?;
            vector("w", w, x.len())
        }
        Op::Append { x, cache, .. } => same("x", x.len(), stores.caches[cache.0].width),
        Op::IndexTopK { cache, q, weights, top_k, chosen, .. } => {
            same("a head of q", q.width, stores.caches[cache.0].width)?;
            same("weights", weights.len(), q.heads)?;
            same("chosen", stores.indices[chosen.0], *top_k)
        }
        Op::Attend { cache, q_latent, q_rope, out, .. } => {
            same("a row of keys", q_latent.width + q_rope.width, stores.caches[cache.0].width)?;
            same("heads of q_rope", q_rope.heads, q_latent.heads)?;
            same("heads of out", out.heads, q_latent.heads)?;
            same("a head of out", out.width, q_latent.width)
        }
        Op::Route { logits, bias, router, scores, ids } => {
            same("logits", logits.len(), router.experts)?;
            same("scores", scores.len(), router.experts)?;
            vector("bias", bias, router.experts)?;
            same("ids", stores.indices[ids.0], router.used)
        }
        Op::ExpertWeights { logits, ids, router, out } => {
            same("logits", logits.len(), router.experts)?;
            same("ids", stores.indices[ids.0], router.used)?;
            same("out", out.len(), router.used)
        }
        Op::SwiGlu { x, out } => same("gate and up", x.len(), 2 * out.len()),
        Op::ExpertsHidden { w, x, ids, out, .. } => {
            cols(w, x)?;
            same("parts (gate and up)", weight(w)?.len(), 2)?;
            weight(w)?.iter().try_for_each(|(rows, _)| same("a slot of out", out.width, *rows))?;
            same("slots", out.heads, stores.indices[ids.0])
        }
        Op::ExpertsDown { w, x, ids, weights, out, .. } => {
            cols(w, x)?;
            same("parts (down)", weight(w)?.len(), 1)?;
            weight(w)?.iter().try_for_each(|(rows, _)| same("out", out.len(), *rows))?;
            same("slots", x.heads, stores.indices[ids.0])?;
            same("weights of slots", weights.len(), x.heads)
        }
        // Ranks add up whole rows, padding and all.
        Op::AllReduce { x } => {
            same("the first value of a row", x.start, 0)?;
            same("a row", x.len(), stores.bufs[x.buf.0].width)
        }
        Op::Scale { .. } | Op::Sample { .. } | Op::Share { .. } | Op::Commit { .. } => Ok(()),
    }
}
