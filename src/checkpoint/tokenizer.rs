//! The tokenizer's keys of a GGUF file as a [`TokenizerSpec`].

use crate::gguf::{Array, Gguf, Value};
use crate::tokenize::{OtherTemplate, TokenizeError, TokenizerSpec};

impl TokenizerSpec {
    /// Reads the `tokenizer.*` keys. Errors: an absent or wrongly typed `tokens` or `token_type`, a key of another type
    /// than its meaning has, an id that is no 32-bit number, a family of tokenizers that this build lacks.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, TokenizeError> {
        let typed = |key: &str, expected: &str, found: Option<&Value>| TokenizeError::Metadata {
            key: key.to_owned(),
            expected: expected.to_owned(),
            found: found.map_or("nothing", Value::type_name).to_owned(),
        };
        let text = |key: &str| match gguf.meta(key) {
            None => Ok(None),
            Some(Value::Str(s)) => Ok(Some(s.clone())),
            other => Err(typed(key, "a string", other)),
        };
        let strings = |key: &str| match gguf.meta(key) {
            Some(Value::Array(Array::Str(list))) => Ok(list.clone()),
            other => Err(typed(key, "an array of strings", other)),
        };
        let id = |name: &str| {
            let key = format!("tokenizer.ggml.{name}_token_id");
            let Some(value) = gguf.meta(&key) else { return Ok(None) };
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            id.map(Some).ok_or_else(|| typed(&key, "a 32-bit id", Some(value)))
        };
        let model = text("tokenizer.ggml.model")?.unwrap_or_default();
        // Other families have other keys, and no merges.
        if let Some(lack) = TokenizeError::of_model(&model) {
            return Err(lack);
        }
        let types = match gguf.meta("tokenizer.ggml.token_type") {
            Some(Value::Array(Array::I32(list))) => list.clone(),
            other => return Err(typed("tokenizer.ggml.token_type", "an array of i32", other)),
        };
        Ok(Self {
            model,
            pre: text("tokenizer.ggml.pre")?,
            tokens: strings("tokenizer.ggml.tokens")?,
            types,
            merges: strings("tokenizer.ggml.merges")?,
            chat_template: text("tokenizer.chat_template")?,
            other_templates: gguf
                .metadata()
                .filter_map(|(key, _)| key.strip_prefix("tokenizer.chat_template."))
                .map(OtherTemplate::named)
                .collect(),
            bos: id("bos")?,
            eos: id("eos")?,
            eot: id("eot")?,
            eom: id("eom")?,
            unk: id("unknown")?,
            pad: id("padding")?,
            add_bos: gguf.meta("tokenizer.ggml.add_bos_token").and_then(Value::as_bool),
            extra_eos: Vec::new(),
        })
    }
}
