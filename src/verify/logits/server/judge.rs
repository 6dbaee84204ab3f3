//! What a server said, against the reference. Nothing is known of how it computes, so the floor is that of the loosest
//! recipe that is stated here, and every run of it makes its own choices of experts and keys, as the server did.
//!
//! A server lists few tokens of a row. Distributions are compared over these and one bucket that holds the rest, on all
//! sides alike: the server, the f64 run, and the runs that make the floor.

use lockstep_reference::{Arith, Eps};

use super::super::{best, kl_check, limits, mean, top_one};
use super::reply::Row;
use crate::probe::Replacements;
use crate::report::{Check, Progress, Verdict};
use crate::tokenize::Tokenizer;
use crate::verify::floor::{Floored, LEAST_VALUES};
use crate::verify::reference_run::{self, Plan, divergence};
use crate::verify::{Subject, VerifyError};

/// The least share that a token or the rest counts with: servers write numbers with few digits, and a remainder of them
/// has fewer.
const LEAST_SHARE: f64 = 1e-5;

/// What a server said of one text.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// For reports.
    pub name: String,
    /// The prompt, as it was read.
    pub prompt: Vec<u32>,
    /// By position: what may stand behind it.
    pub rows: Vec<Option<Row>>,
    /// What the server went on with.
    pub generated: Vec<u32>,
    /// Whether it ended there by itself.
    pub ended: bool,
    /// Whether the ids were made from a text.
    pub from_text: bool,
}

/// Distances of rows, to be added up.
#[derive(Clone, Debug, Default)]
pub struct Distances {
    /// Of each row from the reference's, in nats.
    pub found: Vec<f64>,
    /// How far a right run may be.
    pub limits: Vec<f64>,
    /// Of each row from the reference's of another position: what things that have nothing to do with each other have.
    pub unrelated: Vec<f64>,
    /// Rows whose most likely token is the reference's, of how many, and of another position's.
    pub same: (usize, usize, usize),
}

impl Distances {
    /// Adds another text's.
    pub fn join(&mut self, other: &Distances) {
        self.found.extend(&other.found);
        self.limits.extend(&other.limits);
        self.unrelated.extend(&other.unrelated);
        let (same, all, chance) = other.same;
        self.same = (self.same.0 + same, self.same.1 + all, self.same.2 + chance);
    }

    /// Mean over rows.
    pub fn mean(&self) -> f64 {
        mean(self.found.iter().copied())
    }

    /// Mean over rows of what has nothing to do with each other.
    pub fn mean_unrelated(&self) -> f64 {
        mean(self.unrelated.iter().copied())
    }

    /// The check of these rows.
    pub fn check(&self, name: &str) -> Check {
        kl_check(name, &self.found, &self.limits, self.found.len())
    }

    /// The check of one text's rows. Where a server chose other experts or keys than any run of the floor, a row may be far
    /// off: few rows are shown, and decide together with those of other texts.
    fn check_of_text(&self, name: &str) -> Check {
        let mut check = self.check(name);
        if self.found.len() < LEAST_VALUES && check.verdict != Verdict::Unmeasured {
            (check.verdict, check.rho) = (Verdict::NotApplicable, None);
            check.detail += ", too few to decide alone";
        }
        check
    }
}

/// Judges one text by the reference with an eps.
pub fn judge(
    subject: &Subject,
    seen: &Seen,
    tokenizer: &Tokenizer,
    eps: Eps,
    progress: &dyn Progress,
) -> Result<(Vec<Check>, Distances), VerifyError> {
    let name = &seen.name;
    let (choices, variants) = (Replacements::new(), Arith::orders(subject.recipe, subject.tp));
    let ids: Vec<u32> = seen.prompt.iter().chain(&seen.generated).copied().collect();
    let row = |t: usize| seen.rows.get(t).and_then(Option::as_ref);
    let apart = |t: usize, exact: &[f64], run: &[f64]| {
        row(t).map_or(0.0, |row| distance(&shares(exact, row), &shares(run, row)))
    };
    let plan = Plan {
        checkpoint: &subject.checkpoint,
        ids: &ids,
        attention: subject.attention,
        choices: &choices,
        eps,
        change: None,
        variants: &variants,
        divergence: &apart,
        keep: &|_| false,
        rows: &[],
    };
    let reference = reference_run::measure(&plan, progress)?;
    let Some(floored) = reference.logits() else {
        let why = "the reference gave no logits";
        return Ok((vec![Check::new(format!("logits, {name}"), Verdict::Unmeasured, why)], Distances::default()));
    };
    let exact: Vec<Vec<f64>> = floored.exact.rows().into_iter().map(|row| row.to_vec()).collect();
    let rows: Vec<(usize, &Row)> = (0..exact.len()).filter_map(|t| Some((t, row(t)?))).collect();
    let limits = limits(&reference);
    let mut distances = Distances {
        found: rows.iter().map(|(t, row)| distance(&shares(&exact[*t], row), &told(row))).collect(),
        limits: rows.iter().map(|(t, _)| limits[*t]).collect(),
        ..Distances::default()
    };
    // Each row's neighbour, round the end.
    let others = rows.iter().cycle().skip(1).map(|(_, row)| *row);
    for ((t, own), other) in rows.iter().zip(others) {
        distances.unrelated.push(distance(&shares(&exact[*t], other), &told(other)));
        let likely = best(&exact[*t]).map(|id| id as u32);
        let is = |row: &Row| usize::from(row.best.is_some() && row.best == likely);
        let (same, all, chance) = &mut distances.same;
        (*same, *all, *chance) = (*same + is(own), *all + usize::from(own.best.is_some()), *chance + is(other));
    }
    let mut checks = Vec::new();
    if !rows.is_empty() {
        checks.push(distances.check_of_text(&format!("KL, {name}")));
    }
    let near = reference.near_ties();
    let free = |t: usize| near.contains(&t);
    let tops: Vec<(usize, u32)> = rows.iter().filter_map(|(t, row)| Some((*t, row.best?))).collect();
    if !tops.is_empty() {
        checks.push(top_one(&format!("top-1, {name}"), floored, &tops, &free));
    }
    checks.extend(text(seen, tokenizer, floored, &exact, &free));
    Ok((checks, distances))
}

/// The checks of the greedy text.
fn text(
    seen: &Seen,
    tokenizer: &Tokenizer,
    floored: &Floored,
    exact: &[Vec<f64>],
    free: &dyn Fn(usize) -> bool,
) -> Vec<Check> {
    let name = format!("greedy text, {}", seen.name);
    let first = seen.prompt.len() - 1;
    let mut target: Vec<(usize, u32)> = seen.generated.iter().enumerate().map(|(i, id)| (first + i, *id)).collect();
    let score = |t: usize, id: u32| exact.get(t).and_then(|row| row.get(id as usize)).copied();
    if seen.ended {
        // What came behind the last token is an end, and any will do.
        let at = first + seen.generated.len();
        let ends = tokenizer.stop_ids().ids.iter().filter_map(|stop| Some((stop.id, score(at, stop.id)?)));
        target.extend(ends.max_by(|a, b| a.1.total_cmp(&b.1)).map(|(id, _)| (at, id)));
    }
    let mut note = String::new();
    let parts = |target: &[(usize, u32)]| {
        let likely = |t: usize| exact.get(t).and_then(|row| best(row)).map(|id| id as u32);
        target.iter().position(|(t, id)| likely(*t) != Some(*id)).and_then(|i| Some((i, likely(target[i].0)?)))
    };
    if seen.from_text {
        // A text does not tell how it was cut into tokens, nor what was left out of it.
        if let Some((i, likely)) = parts(&target)
            && may_read_so(tokenizer, likely, &target[i..])
        {
            note = format!("; from token {i} on the text may have been cut into other tokens, and is not judged");
            target.truncate(i);
        }
    }
    if target.is_empty() {
        let none = match note.is_empty() {
            true => return Vec::new(),
            false => format!("no token can be judged{note}"),
        };
        return vec![Check::new(name, Verdict::Unmeasured, none)];
    }
    let mut check = top_one(&name, floored, &target, free);
    if let Some((i, likely)) = parts(&target) {
        let (t, found) = target[i];
        let behind = score(t, likely).zip(score(t, found)).map_or(f64::NAN, |(a, b)| a - b);
        let word =
            |id: u32| format!("{id} {:?}", String::from_utf8_lossy(tokenizer.token_bytes(id).unwrap_or_default()));
        let band = 2.0 * floored.sigma.get(t).copied().unwrap_or(0.0);
        let fault = if behind <= band { "within" } else { "outside" };
        note = format!(
            "; parts at token {i}: expected {}, found {}, its logit {behind:.3} less, {fault} two errors ({band:.3}){note}",
            word(likely),
            word(found)
        );
    }
    check.detail += &note;
    let mut checks = vec![check];
    // A server's own list says whether it took its likeliest token.
    let own = |(i, id): (usize, &u32)| {
        let row = seen.rows.get(first + i)?.as_ref()?;
        let (_, ln) = row.listed.iter().find(|(known, _)| known == id)?;
        (*ln < row.top && row.best.is_some_and(|best| best != *id)).then_some(i)
    };
    if let Some(i) = seen.generated.iter().enumerate().find_map(own) {
        let detail = format!(
            "token {i} is not the likeliest of the server's own list: it does not choose greedily at temperature 0 (a \
             penalty, a bias, another default)"
        );
        checks.push(Check::new(format!("greedy sampling, {}", seen.name), Verdict::Divergent, detail));
    }
    checks
}

/// Whether a text that goes on with these tokens may stand for another token's: one that reads as the same beginning, or
/// that servers leave out of texts, such as a marker, or white space beside one.
fn may_read_so(tokenizer: &Tokenizer, likely: u32, rest: &[(usize, u32)]) -> bool {
    let bytes = |id: u32| tokenizer.token_bytes(id).unwrap_or_default();
    let own = bytes(likely);
    let text: Vec<u8> = rest.iter().flat_map(|(_, id)| bytes(*id)).copied().collect();
    let literal = std::str::from_utf8(own).is_ok_and(|own| tokenizer.literal_id(own) == Some(likely));
    literal || own.iter().all(u8::is_ascii_whitespace) || text.starts_with(own) || own.starts_with(&text)
}

/// The shares of a row's tokens by these logits, the rest last.
fn shares(logits: &[f64], row: &Row) -> Vec<f64> {
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|v| (v - most).exp()).sum();
    with_rest(row.listed.iter().map(|(id, _)| logits.get(*id as usize).map_or(f64::NAN, |v| (v - most).exp() / sum)))
}

/// The same as the server told them.
fn told(row: &Row) -> Vec<f64> {
    with_rest(row.listed.iter().map(|(_, ln)| ln.exp()))
}

fn with_rest(shares: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut all: Vec<f64> = shares.collect();
    all.push(1.0 - all.iter().sum::<f64>());
    all
}

/// KL(p, q) of shares, in nats.
fn distance(p: &[f64], q: &[f64]) -> f64 {
    if p.iter().chain(q).any(|share| share.is_nan()) {
        return f64::NAN;
    }
    let logarithms = |shares: &[f64]| shares.iter().map(|share| share.max(LEAST_SHARE).ln()).collect::<Vec<f64>>();
    divergence(&logarithms(p), &logarithms(q))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_over_what_was_listed_and_the_rest() {
        let logits: Vec<f64> = [0.5f64, 0.25, 0.125, 0.125].iter().map(|share| share.ln() + 3.0).collect();
        let row = |listed: Vec<(u32, f64)>| Row { listed, ..Row::default() };
        let right = row(vec![(0, 0.5f64.ln()), (2, 0.125f64.ln())]);
        assert!(distance(&shares(&logits, &right), &told(&right)).abs() < 1e-12);
        let wrong = row(vec![(0, 0.25f64.ln())]);
        let expected = 0.5 * 2f64.ln() + 0.5 * (0.5f64 / 0.75).ln();
        assert!((distance(&shares(&logits, &wrong), &told(&wrong)) - expected).abs() < 1e-12);
        assert!(distance(&[f64::NAN, 0.5], &[0.5, 0.5]).is_nan());
        // Digits that a server does not write are no distance.
        assert!(distance(&[1.0, 0.0], &[1.0 - 1e-6, 1e-6]).abs() < 1e-12);
        assert!(distance(&[0.5, 0.5], &[1.0, 0.0]) > 4.0);
    }
}
