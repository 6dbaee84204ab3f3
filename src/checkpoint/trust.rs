//! What each number of the configuration rests on: a tensor that bears it out, a key alone, or nothing. Numbers that no
//! tensor can tell are obeyed by every engine and by the reference alike, so no comparison of the two finds a wrong one.

use super::witness::Witness;
use super::{Checkpoint, Mtp, Naming};
use crate::model::{Fact, Kind, Origin, Param, TIE};

/// What stands behind a number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// A tensor's shape says the same: its name.
    BorneOut(String),
    /// Its key alone says it: taken on trust.
    Stated,
    /// Its key is absent, and a default took over that matters: taken on trust, with less reason.
    Assumed,
    /// Its key is absent, and the default is what absence means.
    Absent,
    /// It follows from others, or from the architecture.
    Derived,
    /// A tensor, or another key, says otherwise: what.
    Contradicted(String),
}

/// A number of the configuration, and what stands behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trusted {
    /// The number.
    pub fact: Fact,
    /// What stands behind it.
    pub standing: Standing,
}

impl Checkpoint {
    /// Every number of the configuration with what stands behind it. Reads the indexers' bytes, no others.
    pub fn facts(&self) -> Vec<Trusted> {
        let witness = Witness::new(self.source());
        let doubts = self.indexer_doubts();
        let coverage = self.coverage();
        let behind = witness.of("trunk layers").is_some_and(|(_, n)| n > self.config().layers as u64);
        let fits = coverage.is_whole() && coverage.mtp != Mtp::Partial && !behind;
        let standing = |fact: &Fact| {
            let shape = self.coverage().shapes.iter().find(|f| f.keys.contains(&fact.source));
            let shape = shape.map(|f| format!("{} is {:?}, expected {:?}", f.tensor, f.found, f.expected));
            // Where every tensor has its place, none can say otherwise: what is missing then is missing on purpose. The sum
            // of two keys is contradicted by each alone, and a file may leave its MTP blocks out.
            let said = witness.of(fact.name);
            let sum = fact.name == "trunk layers" && fact.origin == Origin::Derived;
            let left_out = |n: u64| fact.name == "blocks" && n == self.config().layers as u64;
            let other = said.as_ref().filter(|(_, n)| !fits && !sum && !left_out(*n) && n.to_string() != fact.value);
            let contradicted = match fact.name {
                "full indexer layers" => doubts.first().map(|d| d.detail.clone()),
                "output may be tied" => self.tie_contradiction(),
                _ => other.map(|(tensor, n)| format!("the tensors say {n} ({tensor})")).or(shape),
            };
            match (contradicted, said, fact.origin) {
                (Some(by), ..) => Standing::Contradicted(by),
                (None, Some((tensor, n)), _) if n.to_string() == fact.value => Standing::BorneOut(tensor),
                (None, _, Origin::Stated) => Standing::Stated,
                (None, _, Origin::Assumed) => Standing::Assumed,
                (None, _, Origin::Absent) => Standing::Absent,
                (None, _, Origin::Derived) => Standing::Derived,
            }
        };
        self.config().facts.iter().map(|fact| Trusted { fact: fact.clone(), standing: standing(fact) }).collect()
    }

    /// What is to be said of MTP blocks that the files hold and a key denies. The trunk is not touched by it.
    pub fn undeclared_mtp(&self) -> Option<String> {
        let fact = self.config().facts.iter().find(|fact| fact.name == "MTP blocks")?;
        let (tensor, found) = Witness::new(self.source()).of(fact.name)?;
        (found > self.config().mtp_layers as u64)
            .then(|| format!("{} = {}, and the tensors say {found} ({tensor})", fact.source, fact.value))
    }

    /// Where the flag that ties the output matrix to the embedding contradicts the tensors of a Hugging Face folder.
    pub fn tie_contradiction(&self) -> Option<String> {
        if self.source().naming() != Naming::Hf {
            return None;
        }
        let of = |kind| self.binding(Param { layer: None, kind }).and_then(|b| b.names().first());
        let view = |name: Option<&String>| name.and_then(|n| self.source().tensor(n));
        let stated = match self.source().metadata().get(TIE) {
            Some(_) => format!("{TIE} is {}", self.config().may_tie),
            None => format!("{TIE} is absent, which means false"),
        };
        match (self.config().may_tie, view(of(Kind::Output)), view(of(Kind::TokenEmbd))) {
            (true, Some(own), Some(embedding)) if !self.is_tied() && own.bytes != embedding.bytes => Some(format!(
                "{stated}, and lm_head.weight is there and differs from model.embed_tokens.weight: here the tensor is \
                 used, other engines take the embedding"
            )),
            (false, None, Some(_)) => Some(format!("{stated}, and there is no lm_head.weight")),
            _ => None,
        }
    }
}
