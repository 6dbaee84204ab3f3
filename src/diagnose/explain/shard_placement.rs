//! SHARD_PLACEMENT: ranks hold and use another rank's range of a parameter instead of their own: rank 0's, another one's, or
//! two ranks each other's.

use lockstep_reference::slice::Placement;
use lockstep_reference::{ParamKey, RefParam};

use crate::diagnose::hypothesis::{Alter, Hypothesis, OpContext, part};
use crate::faults::shard_placement::FAULT;
use crate::verify::patched_weights::{Value, value_of};

/// Which range ranks use, where it is not their own, and in words.
#[derive(Clone)]
struct Misplaced {
    /// Pairs of a rank and the rank whose range it uses.
    uses: Vec<(usize, usize)>,
    words: String,
}

impl Misplaced {
    fn ranks(&self) -> Vec<usize> {
        self.uses.iter().map(|(rank, _)| *rank).collect()
    }

    /// The rank whose range a rank uses.
    fn used(&self, rank: usize) -> usize {
        self.uses.iter().find(|(own, _)| *own == rank).map_or(rank, |(_, other)| *other)
    }
}

/// Each sharded parameter, alone and together, in each wrong place.
pub(super) fn hypotheses<'a>(op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
    let tp = op.trace.tp;
    let sharded: Vec<(Option<usize>, RefParam)> = op
        .params()
        .into_iter()
        .filter(|(_, p)| !matches!(op.placement(*p, 0), Ok(Placement::Replicated) | Err(_)))
        .collect();
    if tp == 1 || sharded.is_empty() {
        return Vec::new();
    }
    // Alone, or with the others of the same operation (a fused group).
    let mut sets: Vec<Vec<(Option<usize>, RefParam)>> = sharded.iter().map(|p| vec![*p]).collect();
    for pair in sharded.chunks(2).filter(|c| c.len() == 2 && sharded.len() > 2) {
        sets.push(pair.to_vec());
    }
    if sharded.len() > 1 {
        sets.push(sharded);
    }
    let mut all = Vec::new();
    for set in sets {
        for misplaced in places(op) {
            let (params, how, ranks) = (set.clone(), misplaced.clone(), misplaced.ranks());
            let change = move |_: usize, key: ParamKey| match params.contains(&(key.0, key.1)) {
                true => displaced(op, key, &how).map(Some),
                false => Ok(None),
            };
            let names: Vec<String> = set.iter().map(|(l, p)| op.tensor(*l, *p)).collect();
            let statement = format!("{} of {}", misplaced.words, names.join(" and "));
            let overturn = "run at --tp 1: if the operation diverges there too, placement is not at fault";
            let (site, alter) = (names.join(" + "), Alter::Weights(Box::new(change)));
            all.push(Hypothesis { site, ranks, ..op.hypothesis(FAULT.kind, statement, overturn, alter) });
        }
    }
    all
}

/// The wrong places that ranks may use. Behind a reduction any rank may be wrong, else those that diverge.
fn places(op: &OpContext<'_>) -> Vec<Misplaced> {
    let (tp, mut all) = (op.trace.tp, Vec::new());
    for ranks in op.scopes() {
        // Rank 0's own range is right, so it never diverges.
        let affected: Vec<usize> = ranks.iter().copied().filter(|r| *r != 0).collect();
        if affected.is_empty() {
            continue;
        }
        let who = if affected.len() + 1 == tp { "every rank".into() } else { format!("rank {affected:?}") };
        let uses = affected.into_iter().map(|rank| (rank, 0)).collect();
        all.push(Misplaced { uses, words: format!("{who} uses rank 0's range") });
    }
    let pairs: Vec<(usize, usize)> = match (op.is_reduced(), op.ranks.as_slice()) {
        (true, _) => (0..tp).flat_map(|a| (a + 1..tp).map(move |b| (a, b))).collect(),
        (false, [a, b]) => vec![(*a, *b)],
        (false, [rank]) => {
            for other in (1..tp).filter(|other| other != rank) {
                let words = format!("rank {rank} uses rank {other}'s range");
                all.push(Misplaced { uses: vec![(*rank, other)], words });
            }
            Vec::new()
        }
        _ => Vec::new(),
    };
    all.extend(pairs.into_iter().map(|(a, b)| {
        let words = format!("ranks {a} and {b} use each other's range");
        Misplaced { uses: vec![(a, b), (b, a)], words }
    }));
    all
}

/// The parameter as it acts when ranks use these ranges.
fn displaced(op: &OpContext<'_>, key: ParamKey, how: &Misplaced) -> Result<Value, lockstep_reference::RefError> {
    let base = value_of(op.judge.weights, key)?;
    if key.1 == RefParam::Embed {
        // Every rank answers for the ids of its range, and the answers are added.
        let (id, mut answers) = (key.2.unwrap_or(0), 0.0);
        for rank in 0..op.trace.tp {
            if let Placement::Vocab { rows, .. } = op.placement(key.1, how.used(rank))? {
                answers += f32::from(u8::from(rows.contains(&id)));
            }
        }
        return Ok(base.map(|x| x * answers));
    }
    let mut out = base.clone();
    for (rank, other) in &how.uses {
        if let (Some((axis, used)), Some((_, own))) =
            (part(op.placement(key.1, *other)?), part(op.placement(key.1, *rank)?))
        {
            out.copy(axis, own.clone(), &base, used.start..used.start + own.len());
        }
    }
    Ok(out)
}
