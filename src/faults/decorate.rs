//! The decorators through which faults enter: sources (bytes, types), plans (order, rank, range) and what stands around
//! devices. Whoever generates or serves constructs undecorated types only.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use super::around::{Faults, OpFault};
use super::config_value::Setting;
use super::{Site, Target};
use crate::checkpoint::{Checkpoint, CheckpointError, Naming, TensorSource, View};
use crate::device::Around;
use crate::engine::{Attention, Backend, Engine, EngineError, Engines, Options, Ranks};
use crate::gguf::Gguf;
use crate::model::{Metadata, Param, Place};
use crate::quant::TypeInfo;
use crate::shard::{Group, ShardPlan, Slice, TpPlan};
use crate::tokenize::{TokenizeError, TokenizerSpec};

/// A tensor that replaces another.
#[derive(Clone, Debug)]
pub struct Replaced {
    /// Type as the faulty loader believes it.
    pub ty: &'static TypeInfo,
    /// Bytes as it reads them.
    pub bytes: Arc<Vec<u8>>,
}

/// All faults of a run, by where they enter. An entry's rank is one rank, or all.
#[derive(Clone, Debug, Default)]
pub struct Decorations {
    /// Tensors that a rank reads wrongly.
    pub tensors: Vec<(Option<usize>, String, Replaced)>,
    /// Fused groups joined in another order.
    pub orders: Vec<(Option<usize>, Group, usize, Vec<usize>)>,
    /// Parameters whose range is rank 0's.
    pub placements: Vec<(Option<usize>, Param)>,
    /// Settings that the engine has otherwise than the file.
    pub settings: Vec<(Option<usize>, Setting)>,
    /// Operations that compute something else.
    pub ops: Vec<(Option<usize>, Place, OpFault)>,
}

fn hits(rank: Option<usize>, of: usize) -> bool {
    rank.is_none_or(|r| r == of)
}

/// A source in which some tensors are read wrongly.
struct FaultySource {
    inner: Arc<Checkpoint>,
    tensors: HashMap<String, Replaced>,
}

impl TensorSource for FaultySource {
    fn names(&self) -> Vec<&str> {
        self.inner.source().names()
    }
    fn tensor(&self, name: &str) -> Option<View<'_>> {
        let view = self.inner.source().tensor(name)?;
        Some(match self.tensors.get(name) {
            None => view,
            Some(r) => View { ty: r.ty, ne: view.ne, bytes: Cow::Owned(r.bytes.to_vec()) },
        })
    }
    fn file_of(&self, name: &str) -> String {
        self.inner.source().file_of(name)
    }
    fn offset_of(&self, name: &str) -> Option<u64> {
        self.inner.source().offset_of(name)
    }
    fn warnings(&self) -> Vec<String> {
        self.inner.source().warnings()
    }
    fn metadata(&self) -> &dyn Metadata {
        self.inner.source().metadata()
    }
    fn naming(&self) -> Naming {
        self.inner.source().naming()
    }
    fn tokenizer_spec(&self) -> Result<TokenizerSpec, TokenizeError> {
        self.inner.source().tokenizer_spec()
    }
    fn gguf(&self) -> Option<&Gguf> {
        self.inner.source().gguf()
    }
}

/// A plan with faults.
struct FaultyPlan {
    inner: TpPlan,
    faults: Decorations,
}

impl ShardPlan for FaultyPlan {
    fn tp(&self) -> usize {
        self.inner.tp()
    }

    fn slice(&self, param: Param, block: usize, rank: usize) -> Slice {
        let misplaced = self.faults.placements.iter().any(|(r, p)| *p == param && hits(*r, rank));
        self.inner.slice(param, block, if misplaced { 0 } else { rank })
    }

    fn parts(&self, group: Group, layer: usize, rank: usize) -> Vec<Param> {
        let parts = self.inner.parts(group, layer, rank);
        let order = self.faults.orders.iter().find(|(r, g, l, _)| (*g, *l) == (group, layer) && hits(*r, rank));
        match order {
            Some((.., order)) if order.len() == parts.len() => order.iter().map(|i| parts[*i]).collect(),
            _ => parts,
        }
    }
}

/// Engines of a kind of device, with the faults of [`Decorations`].
pub struct FaultyEngines<B>(pub B, pub Decorations);

impl<B: Backend> Engines for FaultyEngines<B> {
    fn engine(&self, checkpoint: &Arc<Checkpoint>, tp: usize, options: Options) -> Result<Engine, EngineError> {
        let FaultyEngines(backend, faults) = self;
        let plan = Arc::new(FaultyPlan { inner: TpPlan::new(checkpoint.config(), tp)?, faults: faults.clone() });
        faults.check(checkpoint, &plan)?;
        let views = (0..tp).map(|rank| faults.view(checkpoint, rank)).collect::<Result<Vec<_>, _>>()?;
        let ranks: Ranks = backend.ranks(tp, checkpoint.config())?;
        let around = |rank| -> Option<Box<dyn Around>> {
            let own = faults.ops.iter().filter(|(r, ..)| hits(*r, rank)).map(|(_, place, fault)| (*place, *fault));
            // On every rank or on none: a step that is altered anywhere is recorded nowhere.
            (!faults.ops.is_empty()).then(|| Box::new(Faults::new(own.collect())) as Box<dyn Around>)
        };
        Engine::start(&|rank| views[rank].clone(), plan, ranks, options, &around)
    }

    fn backend(&self) -> &dyn Backend {
        &self.0
    }
}

impl Decorations {
    /// Adds a fault of the operations at a place.
    pub(super) fn add_op(&mut self, rank: Option<usize>, site: Site, fault: OpFault) {
        if let Site::Place(place) = site {
            self.ops.push((rank, place, fault));
        }
    }

    /// The model as a rank reads it.
    fn view(&self, checkpoint: &Arc<Checkpoint>, rank: usize) -> Result<Arc<Checkpoint>, CheckpointError> {
        let faults = self.tensors.iter().filter(|(r, ..)| hits(*r, rank));
        let tensors: HashMap<String, Replaced> = faults.map(|(_, n, t)| (n.clone(), t.clone())).collect();
        let settings: Vec<_> = self.settings.iter().filter(|(r, _)| hits(*r, rank)).collect();
        if tensors.is_empty() && settings.is_empty() {
            return Ok(checkpoint.clone());
        }
        let source = FaultySource { inner: checkpoint.clone(), tensors };
        let view = Checkpoint::from_source(Box::new(source), checkpoint.name().into())?;
        Ok(Arc::new(settings.into_iter().fold(view, |view, (_, s)| view.with_config(|c| s.set(c)))))
    }

    /// Every fault must hit something, or a run would look clean that was never damaged. Left out are ranks beyond the
    /// degree, and a degree of one: a run to compare with does not have what the fault is about.
    fn check(&self, checkpoint: &Checkpoint, plan: &FaultyPlan) -> Result<(), EngineError> {
        let (c, tp) = (checkpoint.config(), plan.tp());
        let ranks = |rank: &Option<usize>| rank.map_or(0..tp, |r| r..tp.min(r + 1));
        let tensors = self.tensors.iter().filter(|(_, name, altered)| {
            let view = checkpoint.source().tensor(name);
            view.is_none_or(|v| v.ty.id == altered.ty.id && *v.bytes == **altered.bytes)
        });
        let orders = self.orders.iter().filter(|(rank, group, layer, _)| {
            let there = *layer < c.layers && Group::of_layer(c, *layer).contains(group);
            !there || ranks(rank).all(|r| plan.parts(*group, *layer, r) == group.parts(c, *layer))
        });
        let placements = self.placements.iter().filter(|(rank, param)| {
            tp > 1 && ranks(rank).all(|r| plan.slice(*param, 1, r) == plan.inner.slice(*param, 1, r))
        });
        let settings = self.settings.iter().filter(|(_, setting)| !setting.differs(c));
        // Another attention is another run to compare with.
        let calls = match self.ops.is_empty() {
            true => Vec::new(),
            false => [Attention::Dsa, Attention::Dense]
                .map(|attention| Target { checkpoint, tp, attention }.calls().concat())
                .concat(),
        };
        let ops = self.ops.iter().filter(|(rank, place, fault)| {
            !ranks(rank).is_empty() && !calls.iter().any(|call| call.at == *place && fault.hits(call))
        });
        let missed = tensors
            .map(|(_, name, _)| name.clone())
            .chain(orders.map(|(_, group, layer, _)| format!("{} of layer {layer}", group.name())))
            .chain(placements.map(|(_, param)| param.to_string()))
            .chain(settings.map(|(_, setting)| setting.to_string()))
            .chain(ops.map(|(_, place, fault)| format!("{place} ({fault:?})")))
            .next();
        missed.map_or(Ok(()), |what| {
            Err(EngineError::Refused(format!("a fault at {what} changes nothing in this model")))
        })
    }
}
