//! The list of parameters: what must exist for a configuration, and in which shape.

use super::config::Config;

/// A kind of parameter. One per unfused tensor of a layer (expert stacks count as one), or of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // the names are the field's
pub enum Kind {
    TokenEmbd,
    Output,
    OutputNorm,
    AttnNorm,
    QA,
    QANorm,
    QB,
    KvA,
    KvANorm,
    KB,
    VB,
    AttnOutput,
    IndexQB,
    IndexK,
    IndexKNorm,
    IndexKNormBias,
    IndexProj,
    FfnNorm,
    FfnGate,
    FfnUp,
    FfnDown,
    Router,
    RouterBias,
    GateExps,
    UpExps,
    DownExps,
    GateShexp,
    UpShexp,
    DownShexp,
    EhProj,
    ENorm,
    HNorm,
    MtpHeadNorm,
}

impl Kind {
    /// The short name in reports, GGUF's own stem.
    pub fn name(self) -> &'static str {
        use Kind::*;
        match self {
            TokenEmbd => "token_embd",
            Output => "output",
            OutputNorm => "output_norm",
            AttnNorm => "attn_norm",
            QA => "attn_q_a",
            QANorm => "attn_q_a_norm",
            QB => "attn_q_b",
            KvA => "attn_kv_a_mqa",
            KvANorm => "attn_kv_a_norm",
            KB => "attn_k_b",
            VB => "attn_v_b",
            AttnOutput => "attn_output",
            IndexQB => "indexer.attn_q_b",
            IndexK => "indexer.attn_k",
            IndexKNorm => "indexer.k_norm",
            IndexKNormBias => "indexer.k_norm.bias",
            IndexProj => "indexer.proj",
            FfnNorm => "ffn_norm",
            FfnGate => "ffn_gate",
            FfnUp => "ffn_up",
            FfnDown => "ffn_down",
            Router => "ffn_gate_inp",
            RouterBias => "exp_probs_b",
            GateExps => "ffn_gate_exps",
            UpExps => "ffn_up_exps",
            DownExps => "ffn_down_exps",
            GateShexp => "ffn_gate_shexp",
            UpShexp => "ffn_up_shexp",
            DownShexp => "ffn_down_shexp",
            EhProj => "nextn.eh_proj",
            ENorm => "nextn.enorm",
            HNorm => "nextn.hnorm",
            MtpHeadNorm => "nextn.shared_head_norm",
        }
    }

    /// Parameters that the engine keeps as plain f32, whatever the file's type: vectors and the router, whose f32
    /// logits decide choices.
    pub fn is_plain(self) -> bool {
        use Kind::*;
        matches!(
            self,
            OutputNorm
                | AttnNorm
                | QANorm
                | KvANorm
                | IndexKNorm
                | IndexKNormBias
                | FfnNorm
                | Router
                | RouterBias
                | ENorm
                | HNorm
                | MtpHeadNorm
        )
    }

    /// The five tensors of an indexer.
    pub fn is_indexer(self) -> bool {
        use Kind::*;
        matches!(self, IndexQB | IndexK | IndexKNorm | IndexKNormBias | IndexProj)
    }

    /// Stacks of one matrix per expert.
    pub fn is_expert_stack(self) -> bool {
        matches!(self, Kind::GateExps | Kind::UpExps | Kind::DownExps)
    }

    /// Shape in ggml order: `[cols, rows, stack]`, ones where an axis is absent.
    pub fn shape(self, c: &Config) -> [usize; 3] {
        use Kind::*;
        let heads = c.heads;
        match self {
            TokenEmbd | Output => [c.hidden, c.vocab, 1],
            OutputNorm | AttnNorm | FfnNorm | ENorm | HNorm | MtpHeadNorm => [c.hidden, 1, 1],
            QA => [c.hidden, c.q_lora, 1],
            QANorm => [c.q_lora, 1, 1],
            QB => [c.q_lora, heads * c.qk_head(), 1],
            KvA => [c.hidden, c.cache_width(), 1],
            KvANorm => [c.kv_lora, 1, 1],
            KB => [c.nope, c.kv_lora, heads],
            VB => [c.kv_lora, c.v_head, heads],
            AttnOutput => [heads * c.v_head, c.hidden, 1],
            IndexQB => [c.q_lora, c.index_heads * c.index_dim, 1],
            IndexK => [c.hidden, c.index_dim, 1],
            IndexKNorm | IndexKNormBias => [c.index_dim, 1, 1],
            IndexProj => [c.hidden, c.index_heads, 1],
            FfnGate | FfnUp => [c.hidden, c.ffn, 1],
            FfnDown => [c.ffn, c.hidden, 1],
            Router => [c.hidden, c.experts, 1],
            RouterBias => [c.experts, 1, 1],
            GateExps | UpExps => [c.hidden, c.expert_ffn, c.experts],
            DownExps => [c.expert_ffn, c.hidden, c.experts],
            GateShexp | UpShexp => [c.hidden, c.shared_ffn(), 1],
            DownShexp => [c.shared_ffn(), c.hidden, 1],
            EhProj => [2 * c.hidden, c.hidden, 1],
        }
    }
}

impl Kind {
    /// The facts of [`Config::facts`] that each axis of [`Kind::shape`] is made of, for messages about shapes.
    pub fn axes(self) -> [&'static [&'static str]; 3] {
        use Kind::*;
        const ONE: &[&str] = &[];
        const HIDDEN: &[&str] = &["hidden"];
        const Q_LATENT: &[&str] = &["q latent"];
        const KV_LATENT: &[&str] = &["kv latent"];
        const INDEX_WIDTH: &[&str] = &["indexer width"];
        const FFN: &[&str] = &["dense ffn"];
        const EXPERTS: &[&str] = &["experts"];
        const EXPERT_FFN: &[&str] = &["expert ffn"];
        const SHARED_FFN: &[&str] = &["shared experts", "expert ffn"];
        match self {
            TokenEmbd | Output => [HIDDEN, &["vocabulary"], ONE],
            OutputNorm | AttnNorm | FfnNorm | ENorm | HNorm | MtpHeadNorm => [HIDDEN, ONE, ONE],
            QA => [HIDDEN, Q_LATENT, ONE],
            QANorm => [Q_LATENT, ONE, ONE],
            QB => [Q_LATENT, &["heads", "nope width", "rope width"], ONE],
            KvA => [HIDDEN, &["kv latent", "rope width"], ONE],
            KvANorm => [KV_LATENT, ONE, ONE],
            KB => [&["nope width"], KV_LATENT, &["heads"]],
            VB => [KV_LATENT, &["value width"], &["heads"]],
            AttnOutput => [&["heads", "value width"], HIDDEN, ONE],
            IndexQB => [Q_LATENT, &["indexer heads", "indexer width"], ONE],
            IndexK => [HIDDEN, INDEX_WIDTH, ONE],
            IndexKNorm | IndexKNormBias => [INDEX_WIDTH, ONE, ONE],
            IndexProj => [HIDDEN, &["indexer heads"], ONE],
            FfnGate | FfnUp => [HIDDEN, FFN, ONE],
            FfnDown => [FFN, HIDDEN, ONE],
            Router => [HIDDEN, EXPERTS, ONE],
            RouterBias => [EXPERTS, ONE, ONE],
            GateExps | UpExps => [HIDDEN, EXPERT_FFN, EXPERTS],
            DownExps => [EXPERT_FFN, HIDDEN, EXPERTS],
            GateShexp | UpShexp => [HIDDEN, SHARED_FFN, ONE],
            DownShexp => [SHARED_FFN, HIDDEN, ONE],
            EhProj => [HIDDEN, HIDDEN, ONE],
        }
    }
}

/// One parameter of a model: a kind, and the block it belongs to (MTP blocks count on from the trunk).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Param {
    /// Block number; `None` for parameters of the whole model.
    pub layer: Option<usize>,
    /// The kind.
    pub kind: Kind,
}

impl std::fmt::Display for Param {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.layer {
            Some(layer) => write!(f, "blk.{layer}.{}", self.kind.name()),
            None => f.write_str(self.kind.name()),
        }
    }
}

/// Attention and norms of every block.
const BLOCK: [Kind; 10] = {
    use Kind::*;
    [AttnNorm, QA, QANorm, QB, KvA, KvANorm, KB, VB, AttnOutput, FfnNorm]
};
/// The tensors of a layer's indexer.
pub const INDEXER: [Kind; 5] = {
    use Kind::*;
    [IndexQB, IndexK, IndexKNorm, IndexKNormBias, IndexProj]
};
const DENSE: [Kind; 3] = [Kind::FfnGate, Kind::FfnUp, Kind::FfnDown];
const MOE: [Kind; 5] = [Kind::Router, Kind::RouterBias, Kind::GateExps, Kind::UpExps, Kind::DownExps];
const SHARED: [Kind; 3] = [Kind::GateShexp, Kind::UpShexp, Kind::DownShexp];
const MTP: [Kind; 4] = [Kind::EhProj, Kind::ENorm, Kind::HNorm, Kind::MtpHeadNorm];

/// The parameters of block `layer` (trunk or MTP), in the order of the forward pass.
pub fn of_block(c: &Config, layer: usize) -> Vec<Param> {
    let mtp = layer >= c.layers;
    let mut kinds: Vec<Kind> = BLOCK.to_vec();
    // The MTP block runs dense attention; its indexer is loaded with it since files hold one.
    if mtp || c.is_full(layer) {
        kinds.extend(INDEXER);
    }
    if c.is_moe(layer) {
        kinds.extend(MOE);
        if c.shared_experts > 0 {
            kinds.extend(SHARED);
        }
    } else {
        kinds.extend(DENSE);
    }
    if mtp {
        kinds.extend(MTP);
    }
    kinds.into_iter().map(|kind| Param { layer: Some(layer), kind }).collect()
}

/// The parameters of the trunk: embedding, blocks, final norm, head.
pub fn of_trunk(c: &Config) -> Vec<Param> {
    let global = |kind| Param { layer: None, kind };
    let mut all = vec![global(Kind::TokenEmbd)];
    all.extend((0..c.layers).flat_map(|layer| of_block(c, layer)));
    all.extend([global(Kind::OutputNorm), global(Kind::Output)]);
    all
}

/// The parameters of the MTP blocks.
pub fn of_mtp(c: &Config) -> Vec<Param> {
    (c.layers..c.layers + c.mtp_layers).flat_map(|layer| of_block(c, layer)).collect()
}
