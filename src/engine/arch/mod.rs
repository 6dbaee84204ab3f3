//! The families of models: each writes down, in one go, what a rank keeps and how the forward pass runs over it. One file
//! per family, beside its file in `model`; nothing else of the engine knows one.

mod glm_dsa;

use std::collections::HashMap;

use crate::device::{
    BufId, BufRows, BufSpec, CacheId, CacheShape, Call, IndexId, Limits, Op, Operand, Program, ProgramId, Recipe, Rows,
    Show, Stores, View, WeightId,
};
use crate::model::{Attention, Block, Config, Kind, Param, Place, Point};
use crate::shard::{Group, ShardPlan};

/// A model as one rank runs it.
pub struct Model {
    /// Buffers, indices, caches and the shapes of parameters.
    pub stores: Stores,
    /// Vectors to load, by their buffer.
    pub vectors: Vec<(BufId, Param)>,
    /// Parameters to load, by [`WeightId`].
    pub weights: Vec<Resident>,
    /// This rank's part of the logits, padding included.
    pub logits: View,
    /// The forward pass as it is written, with every point that it has, to the choice of next tokens.
    program: Program,
}

/// A parameter that is to be resident.
#[derive(Clone, Copy, Debug)]
pub enum Resident {
    /// By itself.
    Single(Param),
    /// The parts of a fused group of a layer, in the plan's order.
    Group(Group, usize),
}

impl Model {
    /// What `rank` runs of a model, in steps within `limits`.
    pub fn new(
        config: &Config,
        plan: &dyn ShardPlan,
        rank: usize,
        attention: Attention,
        recipe: Recipe,
        limits: Limits,
    ) -> Self {
        let mut writer = Writer {
            config,
            plan,
            rank,
            limits,
            stores: Stores::default(),
            vectors: Vec::new(),
            weights: Vec::new(),
            named: HashMap::new(),
            program: Program::default(),
            block: Block::Front,
            rows: Rows::Tokens,
        };
        let logits = glm_dsa::write(&mut writer, attention, recipe);
        let Writer { stores, vectors, weights, program, .. } = writer;
        Model { stores, vectors, weights, logits, program }
    }

    /// The forward pass as far as a program goes.
    pub fn program(&self, id: ProgramId) -> Program {
        let end = match id {
            ProgramId { head: false, .. } => Point::Logits,
            ProgramId { ahead: false, .. } => Point::NextToken,
            _ => return self.program.clone(),
        };
        self.program.until(end)
    }
}

/// Writes a model down, block by block.
struct Writer<'a> {
    config: &'a Config,
    plan: &'a dyn ShardPlan,
    rank: usize,
    limits: Limits,
    stores: Stores,
    vectors: Vec<(BufId, Param)>,
    weights: Vec<Resident>,
    /// Buffers of a step, which hold nothing between steps: every layer uses the same ones.
    named: HashMap<&'static str, BufId>,
    program: Program,
    block: Block,
    rows: Rows,
}

impl Writer<'_> {
    fn buf(&mut self, rows: BufRows, width: usize, fill: Option<f32>) -> BufId {
        self.stores.bufs.push(BufSpec { rows, width, fill });
        BufId(self.stores.bufs.len() - 1)
    }

    /// The first `width` columns of the buffer of that name, which is as wide as any that asks for it.
    fn work(&mut self, name: &'static str, width: usize) -> View {
        let id = match self.named.get(name) {
            Some(id) => *id,
            None => self.buf(BufRows::Step(self.rows), 0, None),
        };
        self.named.insert(name, id);
        let widest = &mut self.stores.bufs[id.0].width;
        *widest = width.max(*widest);
        View::cols(id, 0, width)
    }

    /// The same as `heads` heads of `width` columns.
    fn heads(&mut self, name: &'static str, width: usize, heads: usize) -> View {
        View::heads(self.work(name, heads * width).buf, 0, width, heads)
    }

    fn index(&mut self, width: usize) -> IndexId {
        self.stores.indices.push(width);
        IndexId(self.stores.indices.len() - 1)
    }

    fn cache(&mut self, width: usize) -> CacheId {
        let Limits { page, pages, .. } = self.limits;
        self.stores.caches.push(CacheShape { layers: self.config.layers, page, pages, width });
        CacheId(self.stores.caches.len() - 1)
    }

    /// A parameter of the block that is being written, or of the whole model.
    fn param(&self, kind: Kind) -> Param {
        Param { layer: self.block.index(self.config), kind }
    }

    fn vector(&mut self, kind: Kind) -> BufId {
        let id = self.buf(BufRows::Vector, kind.shape(self.config)[0], None);
        self.vectors.push((id, self.param(kind)));
        id
    }

    fn resident(&mut self, resident: Resident, parts: Vec<Param>) -> WeightId {
        let shape = |param: Param| {
            let slice = self.plan.slice(param, 1, self.rank);
            (slice.rows.len(), slice.cols.len())
        };
        self.stores.weights.push(parts.into_iter().map(shape).collect());
        self.weights.push(resident);
        WeightId(self.weights.len() - 1)
    }

    fn single(&mut self, kind: Kind) -> WeightId {
        let param = self.param(kind);
        self.resident(Resident::Single(param), vec![param])
    }

    fn group(&mut self, group: Group, layer: usize) -> WeightId {
        self.resident(Resident::Group(group, layer), self.plan.parts(group, layer, self.rank))
    }

    fn call(&mut self, point: Point, op: Op) {
        self.program.calls.push(Call { at: Place { block: self.block, point }, op, rows: self.rows });
    }

    fn show(&mut self, point: Point, what: Operand) {
        let place = Place { block: self.block, point };
        self.program.shows.push(Show { after: self.program.calls.len(), place, what, rows: self.rows });
    }

    fn values(&mut self, point: Point, view: View) {
        self.show(point, Operand::Values(view));
    }
}
