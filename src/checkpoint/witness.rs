//! What tensors say of a number of the configuration: where keys contradict each other, or a shape, they know which one is
//! wrong.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};

use super::TensorSource;
use crate::model::Kind;

/// What was found of a number: a tensor, and what it says.
type Said = Option<(String, u64)>;

/// Looks for the axes of tensors that are one number alone.
pub(super) struct Witness<'a> {
    source: &'a dyn TensorSource,
    said: RefCell<HashMap<&'static str, Said>>,
}

impl<'a> Witness<'a> {
    /// Asks the tensors of `source`, each name once.
    pub(super) fn new(source: &'a dyn TensorSource) -> Self {
        Witness { source, said: RefCell::default() }
    }

    /// A tensor that tells the number of this name in [`crate::model::Config::facts`], and what it says: what most of them
    /// say, since one may be odd itself.
    pub(super) fn of(&self, name: &'static str) -> Said {
        self.said.borrow_mut().entry(name).or_insert_with(|| self.look(name)).clone()
    }

    fn look(&self, name: &'static str) -> Said {
        match name {
            "dense layers" => return self.first_sparse(),
            "blocks" => return self.last_block(),
            "trunk layers" => return self.last_of_trunk(),
            "MTP blocks" => return self.mtp_blocks(),
            _ => {}
        }
        let said = self.tensors().filter_map(|(tensor, _, kind)| {
            let axis = kind.axes().iter().position(|axis| *axis == [name])?;
            // Twice as wide as its fact says; and one expert's matrix where the other naming keeps a stack.
            let told = kind != Kind::EhProj && !(kind.is_expert_stack() && axis == 2 && !self.stacked(tensor));
            // Elements of a packed tensor are no values.
            let view = self.source.tensor(tensor).filter(|v| !super::packed::INTEGERS.contains(&v.ty.name))?;
            let extent = view.ne.get(axis).copied().unwrap_or(1);
            told.then_some((tensor, extent))
        });
        let mut votes: Vec<(&str, u64, usize)> = Vec::new();
        for (tensor, extent) in said {
            match votes.iter_mut().find(|(_, n, _)| *n == extent) {
                Some((.., count)) => *count += 1,
                None => votes.push((tensor, extent, 1)),
            }
        }
        let (tensor, extent, _) = votes.into_iter().rev().max_by_key(|(.., count)| *count)?;
        Some((tensor.to_string(), extent))
    }

    /// The last block that has a tensor: as many there are, and one more.
    fn last_block(&self) -> Said {
        let blocks = self.tensors().filter_map(|(tensor, layer, _)| Some((tensor, layer? as u64 + 1)));
        blocks.max_by_key(|(_, n)| *n).map(|(tensor, n)| (tensor.to_string(), n))
    }

    /// The last block without the tensors that only MTP blocks have: as many layers the trunk has, and one more.
    fn last_of_trunk(&self) -> Said {
        let mtp = self.of_mtp();
        let blocks = self.tensors().filter_map(|(tensor, layer, _)| Some((tensor, layer?)));
        let last = blocks.filter(|(_, layer)| !mtp.contains_key(layer)).max_by_key(|(_, layer)| *layer)?;
        Some((last.0.to_string(), last.1 as u64 + 1))
    }

    /// Blocks with such tensors, and the first of these.
    fn mtp_blocks(&self) -> Said {
        let mtp = self.of_mtp();
        Some((mtp.values().next()?.to_string(), mtp.len() as u64))
    }

    fn of_mtp(&self) -> BTreeMap<usize, &str> {
        let only = [Kind::EhProj, Kind::ENorm, Kind::HNorm, Kind::MtpHeadNorm];
        let found = self.tensors().filter(|(.., kind)| only.contains(kind));
        found.filter_map(|(tensor, layer, _)| Some((layer?, tensor))).collect()
    }

    /// The first layer with a router: as many are dense.
    fn first_sparse(&self) -> Said {
        let routers = self.tensors().filter(|(.., kind)| *kind == Kind::Router);
        routers.filter_map(|(tensor, layer, _)| Some((tensor.to_string(), layer? as u64))).min_by_key(|(_, n)| *n)
    }

    fn stacked(&self, tensor: &str) -> bool {
        self.source.tensor(tensor).is_some_and(|view| view.ne.len() > 2)
    }

    fn tensors(&self) -> impl Iterator<Item = (&str, Option<usize>, Kind)> {
        let naming = self.source.naming();
        self.source.names().into_iter().filter_map(move |name| {
            let (layer, rest) = naming.split(name);
            let kind = naming.kind_of(rest).filter(|_| !naming.is_whole_kv_b(rest))?;
            Some((name, layer, kind))
        })
    }
}
