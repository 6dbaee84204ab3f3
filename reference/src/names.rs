//! What the unfused parameters are called. Two literal lists, one per convention, to be read beside the format's own
//! documents; they share nothing with the engine's name table, so that one wrong line cannot be wrong on both sides. An
//! MTP layer's own copies of the embedding and the head are not read: the trunk's serve both.

use crate::source::Format;

/// An unfused parameter of the model, whatever the file calls it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RefParam {
    /// Token embedding, \[vocab, hidden\].
    Embed,
    /// Language-model head, \[vocab, hidden\].
    Head,
    /// Norm before the head, \[hidden\].
    FinalNorm,
    /// Norm before attention, \[hidden\].
    AttnNorm,
    /// Query down-projection, \[q_rank, hidden\].
    QA,
    /// Norm of the query latent, \[q_rank\].
    QANorm,
    /// Query up-projection, \[heads * (nope + rope), q_rank\], per head nope first.
    QB,
    /// Key/value down-projection, \[kv_rank + rope, hidden\], latent first.
    KvA,
    /// Norm of the key/value latent, \[kv_rank\].
    KvANorm,
    /// Key up-projection, \[heads, kv_rank, nope\] (transposed, as GGUF stores it).
    KB,
    /// Value up-projection, \[heads, v, kv_rank\].
    VB,
    /// Attention output projection, \[hidden, heads * v\].
    O,
    /// Indexer query projection, \[index_heads * index_dim, q_rank\], per head rope first.
    IndexQB,
    /// Indexer key projection, \[index_dim, hidden\], rope first.
    IndexK,
    /// Weight of the indexer's key LayerNorm, \[index_dim\].
    IndexKNormW,
    /// Bias of the indexer's key LayerNorm, \[index_dim\].
    IndexKNormB,
    /// Indexer head weights, \[index_heads, hidden\].
    IndexProj,
    /// Norm before the feed-forward part, \[hidden\].
    FfnNorm,
    /// Dense gate projection, \[ffn, hidden\].
    Gate,
    /// Dense up projection, \[ffn, hidden\].
    Up,
    /// Dense down projection, \[hidden, ffn\].
    Down,
    /// Router, \[experts, hidden\].
    Router,
    /// Correction bias, which chooses and never weighs, \[experts\].
    RouterBias,
    /// Routed experts' gate, each \[moe_ffn, hidden\].
    GateExps,
    /// Routed experts' up, each \[moe_ffn, hidden\].
    UpExps,
    /// Routed experts' down, each \[hidden, moe_ffn\].
    DownExps,
    /// Shared expert's gate, \[shared_experts * moe_ffn, hidden\].
    GateShared,
    /// Shared expert's up, \[shared_experts * moe_ffn, hidden\].
    UpShared,
    /// Shared expert's down, \[hidden, shared_experts * moe_ffn\].
    DownShared,
    /// MTP input projection, \[hidden, 2 * hidden\], embedding half first.
    EhProj,
    /// MTP norm of the next token's embedding, \[hidden\].
    ENorm,
    /// MTP norm of the trunk's hidden state, \[hidden\].
    HNorm,
    /// MTP norm before the shared head, \[hidden\].
    MtpHeadNorm,
}

use RefParam::*;

/// Every parameter, in the order of the forward pass.
pub const ALL: [RefParam; 33] = [
    Embed,
    AttnNorm,
    QA,
    QANorm,
    QB,
    KvA,
    KvANorm,
    KB,
    VB,
    O,
    IndexQB,
    IndexK,
    IndexKNormW,
    IndexKNormB,
    IndexProj,
    FfnNorm,
    Gate,
    Up,
    Down,
    Router,
    RouterBias,
    GateExps,
    UpExps,
    DownExps,
    GateShared,
    UpShared,
    DownShared,
    FinalNorm,
    Head,
    EhProj,
    ENorm,
    HNorm,
    MtpHeadNorm,
];

/// GGUF tensor names; `{N}` is the block. A parameter listed twice has two accepted spellings, tried in order.
const GGUF: &[(RefParam, &str)] = &[
    (Embed, "token_embd.weight"),
    (Head, "output.weight"),
    (FinalNorm, "output_norm.weight"),
    (AttnNorm, "blk.{N}.attn_norm.weight"),
    (QA, "blk.{N}.attn_q_a.weight"),
    (QANorm, "blk.{N}.attn_q_a_norm.weight"),
    (QB, "blk.{N}.attn_q_b.weight"),
    (KvA, "blk.{N}.attn_kv_a_mqa.weight"),
    (KvANorm, "blk.{N}.attn_kv_a_norm.weight"),
    (KB, "blk.{N}.attn_k_b.weight"),
    (VB, "blk.{N}.attn_v_b.weight"),
    (O, "blk.{N}.attn_output.weight"),
    (IndexQB, "blk.{N}.indexer.attn_q_b.weight"),
    (IndexK, "blk.{N}.indexer.attn_k.weight"),
    (IndexKNormW, "blk.{N}.indexer.k_norm.weight"),
    (IndexKNormB, "blk.{N}.indexer.k_norm.bias"),
    (IndexProj, "blk.{N}.indexer.proj.weight"),
    (FfnNorm, "blk.{N}.ffn_norm.weight"),
    (Gate, "blk.{N}.ffn_gate.weight"),
    (Up, "blk.{N}.ffn_up.weight"),
    (Down, "blk.{N}.ffn_down.weight"),
    (Router, "blk.{N}.ffn_gate_inp.weight"),
    (RouterBias, "blk.{N}.exp_probs_b.bias"),
    (RouterBias, "blk.{N}.exp_probs_b"),
    (GateExps, "blk.{N}.ffn_gate_exps.weight"),
    (UpExps, "blk.{N}.ffn_up_exps.weight"),
    (DownExps, "blk.{N}.ffn_down_exps.weight"),
    (GateShared, "blk.{N}.ffn_gate_shexp.weight"),
    (UpShared, "blk.{N}.ffn_up_shexp.weight"),
    (DownShared, "blk.{N}.ffn_down_shexp.weight"),
    (EhProj, "blk.{N}.nextn.eh_proj.weight"),
    (ENorm, "blk.{N}.nextn.enorm.weight"),
    (HNorm, "blk.{N}.nextn.hnorm.weight"),
    (MtpHeadNorm, "blk.{N}.nextn.shared_head_norm.weight"),
];

/// Hugging Face tensor names; `{N}` is the layer, `{E}` the expert (one tensor per expert). `KB` and `VB` have none:
/// see [`whole_kv_b`].
const HF: &[(RefParam, &str)] = &[
    (Embed, "model.embed_tokens.weight"),
    (Head, "lm_head.weight"),
    (FinalNorm, "model.norm.weight"),
    (AttnNorm, "model.layers.{N}.input_layernorm.weight"),
    (QA, "model.layers.{N}.self_attn.q_a_proj.weight"),
    (QANorm, "model.layers.{N}.self_attn.q_a_layernorm.weight"),
    (QB, "model.layers.{N}.self_attn.q_b_proj.weight"),
    (KvA, "model.layers.{N}.self_attn.kv_a_proj_with_mqa.weight"),
    (KvANorm, "model.layers.{N}.self_attn.kv_a_layernorm.weight"),
    (O, "model.layers.{N}.self_attn.o_proj.weight"),
    (IndexQB, "model.layers.{N}.self_attn.indexer.wq_b.weight"),
    (IndexK, "model.layers.{N}.self_attn.indexer.wk.weight"),
    (IndexKNormW, "model.layers.{N}.self_attn.indexer.k_norm.weight"),
    (IndexKNormB, "model.layers.{N}.self_attn.indexer.k_norm.bias"),
    (IndexProj, "model.layers.{N}.self_attn.indexer.weights_proj.weight"),
    (FfnNorm, "model.layers.{N}.post_attention_layernorm.weight"),
    (Gate, "model.layers.{N}.mlp.gate_proj.weight"),
    (Up, "model.layers.{N}.mlp.up_proj.weight"),
    (Down, "model.layers.{N}.mlp.down_proj.weight"),
    (Router, "model.layers.{N}.mlp.gate.weight"),
    (RouterBias, "model.layers.{N}.mlp.gate.e_score_correction_bias"),
    (GateExps, "model.layers.{N}.mlp.experts.{E}.gate_proj.weight"),
    (UpExps, "model.layers.{N}.mlp.experts.{E}.up_proj.weight"),
    (DownExps, "model.layers.{N}.mlp.experts.{E}.down_proj.weight"),
    (GateShared, "model.layers.{N}.mlp.shared_experts.gate_proj.weight"),
    (UpShared, "model.layers.{N}.mlp.shared_experts.up_proj.weight"),
    (DownShared, "model.layers.{N}.mlp.shared_experts.down_proj.weight"),
    (EhProj, "model.layers.{N}.eh_proj.weight"),
    (ENorm, "model.layers.{N}.enorm.weight"),
    (HNorm, "model.layers.{N}.hnorm.weight"),
    (MtpHeadNorm, "model.layers.{N}.shared_head.norm.weight"),
];

/// The accepted file names of `param`, in the order in which to try them. `layer` counts MTP layers after the trunk;
/// `expert` matters only where the convention stores one tensor per expert.
pub fn file_names(format: Format, param: RefParam, layer: Option<usize>, expert: Option<usize>) -> Vec<String> {
    let list = match format {
        Format::Gguf => GGUF,
        Format::Hf => HF,
    };
    list.iter().filter(|(p, _)| *p == param).map(|(_, name)| fill(name, layer, expert)).collect()
}

/// The name of a whole `kv_b` projection, \[heads * (nope + v), kv_rank\], from which `KB` and `VB` are split where the
/// file has no separate tensors for them.
pub fn whole_kv_b(format: Format, layer: usize) -> String {
    let name = match format {
        Format::Gguf => "blk.{N}.attn_kv_b.weight",
        Format::Hf => "model.layers.{N}.self_attn.kv_b_proj.weight",
    };
    fill(name, Some(layer), None)
}

fn fill(name: &str, layer: Option<usize>, expert: Option<usize>) -> String {
    let number = |n: Option<usize>, mark: &str| n.map_or_else(|| mark.to_string(), |n| n.to_string());
    name.replace("{N}", &number(layer, "{N}")).replace("{E}", &number(expert, "{E}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_parameter_has_a_name_in_both_conventions() {
        for p in ALL {
            assert!(!file_names(Format::Gguf, p, Some(3), Some(1)).is_empty(), "{p:?}");
            assert_eq!(file_names(Format::Hf, p, Some(3), Some(1)).is_empty(), matches!(p, KB | VB), "{p:?}");
        }
        let mut all = ALL.to_vec();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), GGUF.len() - 1, "GGUF lists each parameter once, and RouterBias twice");
    }

    #[test]
    fn names_are_filled_in() {
        assert_eq!(
            file_names(Format::Gguf, RouterBias, Some(3), None),
            ["blk.3.exp_probs_b.bias", "blk.3.exp_probs_b"]
        );
        assert_eq!(
            file_names(Format::Hf, DownExps, Some(12), Some(7)),
            ["model.layers.12.mlp.experts.7.down_proj.weight"]
        );
        assert_eq!(whole_kv_b(Format::Hf, 2), "model.layers.2.self_attn.kv_b_proj.weight");
    }
}
