//! What the tensors say of the pattern of full and shared indexers. A pattern that no key states is inferred from the
//! context's length alone, and a wrong one shows nowhere: a shared layer's own indexer is passed over, a full layer's copy
//! of another one's is run on inputs that it was not made for. A pattern that a key states may be wrong, too; but files may
//! carry what a trained model no longer uses, so that an indexer passed over is no more than a doubt then.

use super::{Checkpoint, names};
use crate::model::{Kind, Origin, Param, params};

/// A contradiction between the pattern and the tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexerDoubt {
    /// True where the tensors leave no choice; false where they only make the pattern improbable.
    pub certain: bool,
    /// Which layers, and why.
    pub detail: String,
}

impl Checkpoint {
    /// Where the pattern of full and shared layers contradicts the indexers that are stored.
    pub fn indexer_doubts(&self) -> Vec<IndexerDoubt> {
        let c = self.config();
        let Some(fact) = c.facts.iter().find(|f| f.name == "full indexer layers") else { return Vec::new() };
        let inferred = fact.origin == Origin::Absent;
        let (mut copies, mut own, mut lacking) = (Vec::new(), Vec::new(), Vec::new());
        let mut passed_over = Vec::new();
        for layer in 0..c.layers {
            let before = (0..layer).filter(|l| c.is_full(*l));
            match (c.is_full(layer), self.has_indexer(layer)) {
                (true, true) => {
                    copies.extend(before.filter(|l| self.same_indexer(*l, layer)).map(|l| (layer, l)).next())
                }
                (true, false) if inferred && !self.has_any(layer) => lacking.push(layer),
                (false, true) if inferred => {
                    own.extend(before.max().filter(|l| !self.same_indexer(*l, layer)).map(|l| (layer, l)));
                }
                (false, _) if !inferred => {
                    passed_over.extend(before.max().map(|l| (layer, l, self.own_tensors(layer, l))));
                }
                _ => {}
            }
        }
        let pattern: String = (0..c.layers).map(|l| if c.is_full(l) { 'F' } else { 'S' }).collect();
        let from = format!("the pattern {pattern} (F full, S shared) is inferred: {}", fact.source);
        let mut doubts = Vec::new();
        let mut doubt = |certain, detail| doubts.push(IndexerDoubt { certain, detail });
        let list = |layers: &[usize]| layers.iter().map(|l| self.indexer(*l)).collect::<Vec<_>>().join(", ");
        if let Some((_, first)) = own.first() {
            let layers: Vec<usize> = own.iter().map(|(l, _)| *l).collect();
            let before = self.indexer(*first);
            doubt(
                true,
                format!("{} present, unused, and no copy of {before}, so a layer's own; {from}", list(&layers)),
            );
        }
        if !lacking.is_empty() {
            doubt(true, format!("{} absent, so these layers share an earlier choice; {from}", list(&lacking)));
        }
        if let Some((_, first)) = copies.first() {
            let layers: Vec<usize> = copies.iter().map(|(l, _)| *l).collect();
            let stated = if inferred { from } else { format!("{} says that they are full", fact.source) };
            let before = self.indexer(*first);
            doubt(
                false,
                format!("{} equal to {before} byte for byte, so probably shared layers; {stated}", list(&layers)),
            );
        }
        for (layer, lender, tensors) in passed_over {
            let Some(first) = tensors.first() else { continue };
            let more = if tensors.len() > 1 { format!(" and {} more", tensors.len() - 1) } else { String::new() };
            let before = self.indexer(lender);
            doubt(
                false,
                format!(
                    "{} says that layer {layer} shares the choice of layer {lender}, but {first}{more} is there and no \
                     copy of {before}'s: expected none, or a full layer",
                    fact.source
                ),
            );
        }
        doubts
    }

    /// The tensors of a shared layer's indexer that hold something else than those of the layer it borrows from.
    fn own_tensors(&self, layer: usize, lender: usize) -> Vec<String> {
        let source = self.source();
        let (own, theirs) = (self.indexer(layer), self.indexer(lender));
        let differs = |name: &String| {
            let other = name.strip_prefix(&own).map(|rest| format!("{theirs}{rest}"));
            match (source.tensor(name), other.and_then(|other| source.tensor(&other))) {
                (Some(a), Some(b)) => a.ty != b.ty || a.ne != b.ne || a.bytes != b.bytes,
                _ => true,
            }
        };
        // Zeros stand for nothing.
        let holds = |name: &String| source.tensor(name).is_some_and(|v| v.bytes.iter().any(|b| *b != 0));
        self.indexer_names(layer).into_iter().filter(|name| holds(name) && differs(name)).collect()
    }

    /// The stored names of a layer's indexer that are there.
    fn indexer_names(&self, layer: usize) -> Vec<String> {
        let naming = self.source().naming();
        let name = |kind| {
            let all = names::candidates(naming, Param { layer: Some(layer), kind }, 1);
            all.into_iter().find_map(|b| b.names().first().filter(|n| self.source().tensor(n).is_some()).cloned())
        };
        params::INDEXER.into_iter().filter_map(name).collect()
    }

    fn has_indexer(&self, layer: usize) -> bool {
        self.indexer_names(layer).len() == params::INDEXER.len()
    }

    fn has_any(&self, layer: usize) -> bool {
        !self.indexer_names(layer).is_empty()
    }

    /// What all names of a layer's indexer begin with.
    fn indexer(&self, layer: usize) -> String {
        let param = Param { layer: Some(layer), kind: Kind::IndexK };
        let all = names::candidates(self.source().naming(), param, 1);
        let name = all.first().and_then(|b| b.names().first().cloned()).unwrap_or_default();
        name.split_once("indexer").map_or(name.clone(), |(prefix, _)| format!("{prefix}indexer"))
    }

    /// Whether two layers have the same indexer, byte for byte; indexers of zeros are no copies but damage.
    fn same_indexer(&self, a: usize, b: usize) -> bool {
        let (a, b) = (self.indexer_names(a), self.indexer_names(b));
        let source = self.source();
        let same = |(a, b): (&String, &String)| match (source.tensor(a), source.tensor(b)) {
            (Some(a), Some(b)) => a.ty == b.ty && a.ne == b.ne && a.bytes == b.bytes,
            _ => false,
        };
        let holds = |name: &String| source.tensor(name).is_some_and(|v| v.bytes.iter().any(|b| *b != 0));
        a.len() == b.len() && a.iter().zip(&b).all(same) && a.iter().any(holds)
    }
}
