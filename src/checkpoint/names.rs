//! The one table between GGUF names, Hugging Face names and parameters. Names are only ever looked up here, never made
//! by editing another name.

use crate::model::{Kind, Param};

/// A row: a kind and its names. Block parameters get their block's prefix in front; `{e}` is an expert's number.
struct Row {
    kind: Kind,
    gguf: &'static str,
    /// Exact other spellings that converters have written.
    aliases: &'static [&'static str],
    hf: &'static str,
}

const fn row(kind: Kind, gguf: &'static str, hf: &'static str) -> Row {
    Row { kind, gguf, aliases: &[], hf }
}

#[rustfmt::skip]
static TABLE: [Row; 33] = [
    row(Kind::TokenEmbd, "token_embd.weight", "model.embed_tokens.weight"),
    row(Kind::Output, "output.weight", "lm_head.weight"),
    row(Kind::OutputNorm, "output_norm.weight", "model.norm.weight"),
    row(Kind::AttnNorm, "attn_norm.weight", "input_layernorm.weight"),
    row(Kind::QA, "attn_q_a.weight", "self_attn.q_a_proj.weight"),
    row(Kind::QANorm, "attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight"),
    row(Kind::QB, "attn_q_b.weight", "self_attn.q_b_proj.weight"),
    row(Kind::KvA, "attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    row(Kind::KvANorm, "attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight"),
    row(Kind::KB, "attn_k_b.weight", KV_B_HF),
    row(Kind::VB, "attn_v_b.weight", KV_B_HF),
    row(Kind::AttnOutput, "attn_output.weight", "self_attn.o_proj.weight"),
    row(Kind::IndexQB, "indexer.attn_q_b.weight", "self_attn.indexer.wq_b.weight"),
    row(Kind::IndexK, "indexer.attn_k.weight", "self_attn.indexer.wk.weight"),
    row(Kind::IndexKNorm, "indexer.k_norm.weight", "self_attn.indexer.k_norm.weight"),
    row(Kind::IndexKNormBias, "indexer.k_norm.bias", "self_attn.indexer.k_norm.bias"),
    row(Kind::IndexProj, "indexer.proj.weight", "self_attn.indexer.weights_proj.weight"),
    row(Kind::FfnNorm, "ffn_norm.weight", "post_attention_layernorm.weight"),
    row(Kind::FfnGate, "ffn_gate.weight", "mlp.gate_proj.weight"),
    row(Kind::FfnUp, "ffn_up.weight", "mlp.up_proj.weight"),
    row(Kind::FfnDown, "ffn_down.weight", "mlp.down_proj.weight"),
    row(Kind::Router, "ffn_gate_inp.weight", "mlp.gate.weight"),
    Row { kind: Kind::RouterBias, gguf: "exp_probs_b.bias", aliases: &["exp_probs_b"],
          hf: "mlp.gate.e_score_correction_bias" },
    row(Kind::GateExps, "ffn_gate_exps.weight", "mlp.experts.{e}.gate_proj.weight"),
    row(Kind::UpExps, "ffn_up_exps.weight", "mlp.experts.{e}.up_proj.weight"),
    row(Kind::DownExps, "ffn_down_exps.weight", "mlp.experts.{e}.down_proj.weight"),
    row(Kind::GateShexp, "ffn_gate_shexp.weight", "mlp.shared_experts.gate_proj.weight"),
    row(Kind::UpShexp, "ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight"),
    row(Kind::DownShexp, "ffn_down_shexp.weight", "mlp.shared_experts.down_proj.weight"),
    row(Kind::EhProj, "nextn.eh_proj.weight", "eh_proj.weight"),
    row(Kind::ENorm, "nextn.enorm.weight", "enorm.weight"),
    row(Kind::HNorm, "nextn.hnorm.weight", "hnorm.weight"),
    row(Kind::MtpHeadNorm, "nextn.shared_head_norm.weight", "shared_head.norm.weight"),
];

/// The whole key-value projection: always so in Hugging Face form, in GGUF only in files of older converters.
const KV_B_HF: &str = "self_attn.kv_b_proj.weight";
const KV_B_GGUF: &str = "attn_kv_b.weight";

/// Forms in which files keep the experts' matrices that this build cannot read: without the block's prefix, with what is in
/// it. Behind `.` may stand `weight`.
const FUSED: [(Naming, &str, &[Kind], &str); 3] = [
    (Naming::Hf, "mlp.experts.gate_up_proj", &[Kind::GateExps, Kind::UpExps], GATE_AND_UP),
    (Naming::Hf, "mlp.experts.down_proj", &[Kind::DownExps], "down of all experts in one tensor"),
    (Naming::Gguf, "ffn_gate_up_exps", &[Kind::GateExps, Kind::UpExps], GATE_AND_UP),
];
const GATE_AND_UP: &str = "gate and up of all experts in one tensor";

/// What to do about such a form.
pub(super) fn advice(form: &str) -> &'static str {
    match FUSED.iter().any(|(.., fused)| *fused == form) {
        true => ". Convert it to one tensor for each expert (Hugging Face) or for each of gate, up and down (GGUF)",
        false => "",
    }
}

/// What stands behind the name of an FP8 tensor in the name of its factors.
pub(super) const FP8_FACTORS: [&str; 2] = ["_scale_inv", "_scale"];

/// Tensors that files are known to carry and that this architecture does not use, with the reason.
pub(super) const KNOWN_UNUSED: [(&str, &str); 4] = [
    ("rope_freqs.weight", "rope frequencies, written for other engines; computed here from the rope base"),
    ("nextn.embed_tokens.weight", "the MTP block uses the trunk's embedding"),
    ("nextn.shared_head_head.weight", "the MTP block uses the trunk's head"),
    ("shared_head.head.weight", "the MTP block uses the trunk's head"),
];

/// What a tensor is that [`Naming::biased`] knows.
pub(super) const BIASES: &str = "biases of attention";

/// How tensors are named on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// ggml's names.
    Gguf,
    /// Hugging Face's names.
    Hf,
}

impl Naming {
    /// What stands before a block's number.
    fn lead(self) -> &'static str {
        match self {
            Naming::Gguf => "blk.",
            Naming::Hf => "model.layers.",
        }
    }

    /// What stands before the names of block `layer`.
    pub fn prefix(self, layer: usize) -> String {
        format!("{}{layer}.", self.lead())
    }

    /// Takes a block's name apart into block and the rest.
    pub(super) fn split(self, name: &str) -> (Option<usize>, &str) {
        let parts = name.strip_prefix(self.lead()).and_then(|rest| rest.split_once('.'));
        match parts.and_then(|(n, rest)| n.parse().ok().map(|n| (n, rest))) {
            Some((layer, rest)) => (Some(layer), rest),
            None => (None, name),
        }
    }

    /// True for the name, without its block prefix, of a whole key-value projection.
    pub(super) fn is_whole_kv_b(self, rest: &str) -> bool {
        rest == match self {
            Naming::Gguf => KV_B_GGUF,
            Naming::Hf => KV_B_HF,
        }
    }

    /// The parameter whose products a bias of attention is added to, if `name` is one. The engine has none.
    pub(super) fn biased(self, name: &str) -> Option<Param> {
        let (layer, rest) = self.split(name);
        let module = rest.strip_suffix(".bias").filter(|m| self == Naming::Hf && m.starts_with("self_attn."))?;
        let kind = self.kind_of(&format!("{module}.weight")).filter(|kind| !kind.is_indexer() && !kind.is_plain())?;
        Some(Param { layer: Some(layer?), kind })
    }

    /// The kind that a name without its block prefix stands for, if any (experts' numbers are not looked at).
    pub(super) fn kind_of(self, rest: &str) -> Option<Kind> {
        let matches = |r: &Row| match self {
            Naming::Gguf => r.gguf == rest || r.aliases.contains(&rest),
            Naming::Hf => match r.hf.split_once("{e}") {
                None => r.hf == rest,
                Some((head, tail)) => rest.starts_with(head) && rest.ends_with(tail),
            },
        };
        TABLE.iter().find(|r| matches(r)).map(|r| r.kind)
    }
}

/// Where a parameter's values come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Binding {
    /// One tensor of the parameter's own shape.
    Whole(String),
    /// One tensor per expert.
    PerExpert(Vec<String>),
    /// A part of the whole key-value projection `[kv_lora][heads * (nope + v)]`.
    KvB(String),
}

impl Binding {
    /// The tensors' names.
    pub fn names(&self) -> &[String] {
        match self {
            Binding::Whole(name) | Binding::KvB(name) => std::slice::from_ref(name),
            Binding::PerExpert(names) => names,
        }
    }
}

/// A tensor that holds `param` in a form that this build cannot read, if there is one, and what the form is.
pub(super) fn unhandled(
    naming: Naming,
    param: Param,
    present: impl Fn(&str) -> bool,
) -> Option<(String, &'static str)> {
    let prefix = naming.prefix(param.layer?);
    let fused = FUSED.iter().filter(|(of, _, kinds, _)| *of == naming && kinds.contains(&param.kind));
    let spelled =
        fused.flat_map(|(_, stem, _, form)| ["", ".weight"].map(|end| (format!("{prefix}{stem}{end}"), *form)));
    spelled.into_iter().find(|(name, _)| present(name))
}

/// Everything that `param` may be called, the usual form first. `experts` is the size of a stack.
pub fn candidates(naming: Naming, param: Param, experts: usize) -> Vec<Binding> {
    let Some(row) = TABLE.iter().find(|r| r.kind == param.kind) else { return Vec::new() };
    let prefix = param.layer.map_or(String::new(), |layer| naming.prefix(layer));
    let name = |stem: &str| format!("{prefix}{stem}");
    let is_kv_b = matches!(param.kind, Kind::KB | Kind::VB);
    match naming {
        Naming::Gguf => {
            let mut all = vec![Binding::Whole(name(row.gguf))];
            all.extend(row.aliases.iter().map(|a| Binding::Whole(name(a))));
            if is_kv_b {
                all.push(Binding::KvB(name(KV_B_GGUF))); // last: beside its parts it is not used
            }
            all
        }
        Naming::Hf if is_kv_b => vec![Binding::KvB(name(row.hf))],
        Naming::Hf => match row.hf.split_once("{e}") {
            None => vec![Binding::Whole(name(row.hf))],
            Some((head, tail)) => {
                vec![Binding::PerExpert((0..experts).map(|e| format!("{prefix}{head}{e}{tail}")).collect())]
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_in_both_namings() {
        for (i, a) in TABLE.iter().enumerate() {
            for b in &TABLE[i + 1..] {
                assert_ne!(a.kind, b.kind);
                assert_ne!(a.gguf, b.gguf);
                assert!(a.hf != b.hf || a.hf == KV_B_HF, "{}", a.hf);
            }
        }
    }

    #[test]
    fn every_name_leads_back_to_its_parameter() {
        for row in &TABLE {
            let layer = (!matches!(row.kind, Kind::TokenEmbd | Kind::Output | Kind::OutputNorm)).then_some(7);
            let param = Param { layer, kind: row.kind };
            for naming in [Naming::Gguf, Naming::Hf] {
                for name in candidates(naming, param, 3).iter().flat_map(|b| b.names().to_vec()) {
                    let (block, rest) = naming.split(&name);
                    assert_eq!(block, layer, "{name}");
                    let kv_b = rest == KV_B_HF || rest == KV_B_GGUF;
                    assert!(kv_b || naming.kind_of(rest) == Some(row.kind), "{name}");
                }
            }
        }
    }
}
