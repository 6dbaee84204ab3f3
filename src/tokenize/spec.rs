//! What a tokenizer is made of, independent of where it was read: the fields of GGUF's `tokenizer.*` keys, filled
//! from GGUF metadata or from the files of a Hugging Face folder.

/// The raw description of a byte-level BPE tokenizer. Nothing here is checked; [`super::Tokenizer::new`] does that.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenizerSpec {
    /// `tokenizer.ggml.model`; only "gpt2" (byte-level BPE) can be built.
    pub model: String,
    /// `tokenizer.ggml.pre`: the name of the rule that splits text before BPE.
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`, by id: ordinary tokens in the byte-level alphabet, others as plain text.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.token_type`, by id: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused.
    pub types: Vec<i32>,
    /// `tokenizer.ggml.merges`, by rank: "left right".
    pub merges: Vec<String>,
    /// `tokenizer.chat_template`: Jinja source.
    pub chat_template: Option<String>,
    /// Chat templates that are there, too, and are not used.
    pub other_templates: Vec<OtherTemplate>,
    /// Beginning of sequence.
    pub bos: Option<u32>,
    /// End of sequence.
    pub eos: Option<u32>,
    /// End of turn.
    pub eot: Option<u32>,
    /// End of message (a tool call waits for its result).
    pub eom: Option<u32>,
    /// Unknown.
    pub unk: Option<u32>,
    /// Padding.
    pub pad: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`: whether the tokenizer itself puts a BOS first. Absent means no.
    pub add_bos: Option<bool>,
    /// generation_config.json's `eos_token_id` (one or several).
    pub extra_eos: Vec<u32>,
}

/// A chat template beside the one that is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherTemplate {
    /// Its name, as "tool_use", or the file that it stands in.
    pub name: String,
    /// Whether it claims the same place, and differs.
    pub is_rival: bool,
}

impl OtherTemplate {
    /// One that is asked for by name.
    pub fn named(name: &str) -> Self {
        OtherTemplate { name: name.into(), is_rival: false }
    }
}
