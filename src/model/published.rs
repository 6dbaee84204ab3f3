//! What publishers state of their models, for whoever has a file of the same widths. Only what a published configuration
//! says stands here.

use super::config::{Config, Gating, Indexer};

/// A published configuration.
pub struct Published {
    /// The models that it is of.
    pub models: &'static str,
    /// Where it was read.
    pub source: &'static str,
    /// Widths and counts that tensors confirm, by which a file is recognised.
    widths: [usize; 13],
    layers: usize,
    dense_layers: usize,
    context: usize,
    experts_used: usize,
    gating: Gating,
    expert_norm: bool,
    expert_scale: f32,
    rms_eps: f32,
    rope_base: f64,
    top_k: usize,
    /// Layers with an indexer of their own: all, or those before the first number and every so many behind.
    shared_indexers: Option<(usize, usize)>,
}

const SOURCE: &str = "config.json, from published transcriptions that agree";

const GLM_5: Published = Published {
    models: "GLM-5 and 5.1",
    source: SOURCE,
    widths: [6144, 64, 2048, 512, 192, 64, 256, 12_288, 256, 2048, 32, 128, 154_880],
    layers: 78,
    dense_layers: 3,
    context: 202_752,
    experts_used: 8,
    gating: Gating::Sigmoid,
    expert_norm: true,
    expert_scale: 2.5,
    rms_eps: 1e-5,
    rope_base: 1e6,
    top_k: 2048,
    shared_indexers: None,
};

/// Every configuration.
const ALL: [Published; 2] = [
    GLM_5,
    Published { models: "GLM-5.2 and 5.3", context: 1_048_576, rope_base: 8e6, shared_indexers: Some((3, 4)), ..GLM_5 },
];

/// A fact that a file states otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Differing {
    /// Its name.
    pub fact: &'static str,
    /// What the publisher states.
    pub published: String,
    /// What the file states.
    pub found: String,
    /// True where the model computes something else with it; false where it only reaches less or more far.
    pub computes: bool,
}

/// The published configuration whose widths a file has, and the facts that the file states otherwise. Of several, the one
/// with the fewest such facts; `None` where no such widths are known.
pub fn recognise(c: &Config) -> Option<(&'static Published, Vec<Differing>)> {
    const { &ALL }.iter().filter(|p| p.widths == widths(c)).map(|p| (p, p.differing(c))).min_by_key(|(_, d)| d.len())
}

fn widths(c: &Config) -> [usize; 13] {
    let experts = [c.ffn, c.experts, c.expert_ffn, c.index_heads, c.index_dim, c.vocab];
    let [ffn, count, expert, index_heads, index_dim, vocab] = experts;
    [
        c.hidden,
        c.heads,
        c.q_lora,
        c.kv_lora,
        c.nope,
        c.rope,
        c.v_head,
        ffn,
        count,
        expert,
        index_heads,
        index_dim,
        vocab,
    ]
}

impl Published {
    fn differing(&self, c: &Config) -> Vec<Differing> {
        let full = |layer: usize| match self.shared_indexers {
            None => true,
            Some((offset, period)) => (layer + 1).saturating_sub(offset).is_multiple_of(period),
        };
        let pattern = |full: &dyn Fn(usize) -> bool| -> String {
            (0..c.layers).map(|layer| if full(layer) { 'F' } else { 'S' }).collect()
        };
        let of_file = |layer: usize| c.indexer.get(layer) == Some(&Indexer::Full);
        let facts: [(&'static str, String, String, bool); 11] = [
            ("rope base", self.rope_base.to_string(), c.rope_base.to_string(), true),
            ("expert scale", self.expert_scale.to_string(), c.expert_scale.to_string(), true),
            ("gating", self.gating.name().into(), c.gating.name().into(), true),
            ("normalised weights", self.expert_norm.to_string(), c.expert_norm.to_string(), true),
            ("experts per token", self.experts_used.to_string(), c.experts_used.to_string(), true),
            ("dense layers", self.dense_layers.to_string(), c.dense_layers.to_string(), true),
            ("RMSNorm eps", format!("{:e}", self.rms_eps), format!("{:e}", c.rms_eps), true),
            ("layers with an indexer of their own", pattern(&full), pattern(&of_file), true),
            ("indexer top-k", self.top_k.to_string(), c.top_k.to_string(), true),
            ("trunk layers", self.layers.to_string(), c.layers.to_string(), false),
            ("context", self.context.to_string(), c.context.to_string(), false),
        ];
        let differs = facts.into_iter().filter(|(_, published, found, _)| published != found);
        differs.map(|(fact, published, found, computes)| Differing { fact, published, found, computes }).collect()
    }
}
