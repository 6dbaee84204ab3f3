//! The tokenizer of a Hugging Face folder: read into the same [`TokenizerSpec`] as GGUF metadata, and, separately, run
//! as it is by the library that defines it ([`JsonTokenizer`]), as the other side of the comparison.

use std::collections::HashMap;
use std::str::FromStr;

use serde::Deserialize;
use serde_json::{Map, Value as Json};

use super::error::{TokenizeError, clip};
use super::lacks;
use super::pretok::GLM4_PATTERN;
use super::spec::{OtherTemplate, TokenizerSpec};

const TOKENIZER: &str = "tokenizer.json";
const CONFIG: &str = "tokenizer_config.json";
const TEMPLATE: &str = "chat_template.json";
const GENERATION: &str = "generation_config.json";

#[derive(Deserialize)]
struct File {
    model: Model,
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Json,
    #[serde(default)]
    pre_tokenizer: Json,
    #[serde(default)]
    post_processor: Json,
}

impl File {
    /// Reads it. A vocabulary of another family has another form, and so is asked for its family first.
    fn of(tokenizer_json: &str) -> Result<Self, TokenizeError> {
        let damage = |e: serde_json::Error| unread(TOKENIZER, "a BPE tokenizer", &e);
        let whole: Family = serde_json::from_str(tokenizer_json).map_err(damage)?;
        match whole.model.and_then(|model| model.kind).filter(|kind| lacks::JSON_MODELS.contains(&kind.as_str())) {
            Some(found) => Err(TokenizeError::Lacking { what: "tokenizer.json: model.type", found }),
            None => serde_json::from_str(tokenizer_json).map_err(damage),
        }
    }
}

/// What tells a tokenizer's family.
#[derive(Deserialize)]
struct Family {
    model: Option<Named>,
}

#[derive(Deserialize)]
struct Named {
    #[serde(rename = "type", default)]
    kind: Option<String>,
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type")]
    kind: Option<String>,
    vocab: HashMap<String, u32>,
    merges: Vec<Merge>,
}

/// Both forms that tokenizer.json has had.
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Joined(String),
    Pair(String, String),
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    special: bool,
}

fn json_error(file: &'static str, field: &str, expected: &str, found: impl ToString) -> TokenizeError {
    let found = clip(&found.to_string());
    TokenizeError::Json { file, field: field.into(), expected: expected.into(), found }
}

/// What is no JSON at all is damage; what is, and has another form, is stated so.
fn unread(file: &'static str, expected: &str, e: &serde_json::Error) -> TokenizeError {
    match e.is_syntax() || e.is_eof() {
        true => TokenizeError::Damaged { file, found: clip(&e.to_string()) },
        false => json_error(file, "the file", expected, e),
    }
}

fn object(file: &'static str, text: Option<&str>) -> Result<Map<String, Json>, TokenizeError> {
    let Some(text) = text else { return Ok(Map::new()) };
    serde_json::from_str(text).map_err(|e| unread(file, "a JSON object", &e))
}

impl TokenizerSpec {
    /// From the texts of tokenizer.json, tokenizer_config.json and generation_config.json. Ids without a token become
    /// unused ones named `[PADn]`, as converters to GGUF do. Errors: not JSON, not BPE, a normaliser, ids far outside
    /// the vocabulary, a special token that does not exist.
    pub fn from_hf(
        tokenizer_json: &str,
        tokenizer_config: Option<&str>,
        generation_config: Option<&str>,
    ) -> Result<Self, TokenizeError> {
        let file = File::of(tokenizer_json)?;
        let config = object(CONFIG, tokenizer_config)?;
        let generation = object(GENERATION, generation_config)?;
        // Old files leave the type out; vocabulary and merges together mean BPE.
        if let Some(kind) = file.model.kind.as_deref().filter(|k| *k != "BPE") {
            return Err(json_error(TOKENIZER, "model.type", "BPE", kind));
        }
        if let Some(steps) = lacks::normalizer(&file.normalizer) {
            return Err(TokenizeError::Lacking { what: "tokenizer.json: normalizer", found: clip(&steps) });
        }
        if !file.normalizer.is_null() {
            return Err(json_error(TOKENIZER, "normalizer", "null", &file.normalizer));
        }
        let pre = pre_tokenizer(&file.pre_tokenizer);
        let (tokens, types) = tokens(&file)?;
        let id_of = |key: &str| special_id(&config, key, &tokens);
        let spec = Self {
            model: "gpt2".into(),
            pre,
            merges: file.model.merges.iter().map(Merge::joined).collect(),
            chat_template: chat_template(CONFIG, &config)?,
            other_templates: named_templates(&config),
            bos: id_of("bos_token")?,
            eos: id_of("eos_token")?,
            unk: id_of("unk_token")?,
            pad: id_of("pad_token")?,
            eot: None,
            eom: None,
            add_bos: match config.get("add_bos_token").and_then(Json::as_bool) {
                Some(stated) => Some(stated),
                None => begins_with_special(&file.post_processor).then_some(true),
            },
            extra_eos: generation_eos(&generation)?,
            tokens,
            types,
        };
        Ok(spec)
    }

    /// The chat template of the text of a chat_template.json, which holds nothing else. Errors: not JSON, no text.
    pub fn template_of_json(text: &str) -> Result<Option<String>, TokenizeError> {
        chat_template(TEMPLATE, &object(TEMPLATE, Some(text))?)
    }
}

impl Merge {
    fn joined(&self) -> String {
        match self {
            Self::Joined(text) => text.clone(),
            Self::Pair(left, right) => format!("{left} {right}"),
        }
    }
}

/// "glm4" where the file splits by that rule; otherwise its own pattern, so that the refusal names it.
fn pre_tokenizer(value: &Json) -> Option<String> {
    if value.is_null() {
        return None;
    }
    let steps: Vec<&Json> = match value.get("pretokenizers").and_then(Json::as_array) {
        Some(steps) => steps.iter().collect(),
        None => vec![value],
    };
    let is = |step: &Json, kind: &str| step.get("type").and_then(Json::as_str) == Some(kind);
    let off = |step: &Json, flag: &str| step.get(flag).and_then(Json::as_bool) == Some(false);
    let known = match steps.as_slice() {
        [split, bytes] => {
            is(split, "Split")
                && split.pointer("/pattern/Regex").and_then(Json::as_str) == Some(GLM4_PATTERN)
                && split.get("behavior").and_then(Json::as_str) == Some("Isolated")
                && off(split, "invert")
                && is(bytes, "ByteLevel")
                && off(bytes, "add_prefix_space")
                && off(bytes, "use_regex")
        }
        _ => false,
    };
    Some(if known { "glm4".into() } else { value.to_string() })
}

/// Literals and types by id.
fn tokens(file: &File) -> Result<(Vec<String>, Vec<i32>), TokenizeError> {
    let vocab = file.model.vocab.iter().map(|(token, &id)| (id, token, 1));
    let added = file.added_tokens.iter().map(|a| (a.id, &a.content, if a.special { 3 } else { 4 }));
    // Gaps exist (reserved ids), but a file cannot make us allocate more than a small multiple of its own size.
    let limit = 2 * (file.model.vocab.len() + file.added_tokens.len()) + 1024;
    let mut by_id: Vec<Option<(&str, i32)>> = Vec::new();
    for (id, token, kind) in vocab.chain(added) {
        let at = usize::try_from(id).ok().filter(|&at| at < limit).ok_or(TokenizeError::IdOutOfRange {
            key: "an id of tokenizer.json",
            id: id.into(),
            last: limit as u64 - 1,
        })?;
        if at >= by_id.len() {
            by_id.resize(at + 1, None);
        }
        if let Some((other, _)) = by_id[at].filter(|(other, _)| *other != token.as_str()) {
            let found = format!("{:?} and {:?}", clip(other), clip(token));
            return Err(json_error(TOKENIZER, &format!("id {id}"), "one token", found));
        }
        by_id[at] = Some((token, kind));
    }
    let named = by_id.into_iter().enumerate();
    Ok(named.map(|(id, t)| t.map_or_else(|| (format!("[PAD{id}]"), 5), |(s, k)| (s.to_owned(), k))).unzip())
}

/// Id of a special token that the config names, as a string or as an object with `content`.
fn special_id(config: &Map<String, Json>, key: &str, tokens: &[String]) -> Result<Option<u32>, TokenizeError> {
    let Some(value) = config.get(key).filter(|v| !v.is_null()) else { return Ok(None) };
    let literal = value.as_str().or_else(|| value.get("content").and_then(Json::as_str));
    let id = literal.and_then(|l| tokens.iter().position(|t| t == l)).and_then(|at| u32::try_from(at).ok());
    match id {
        Some(id) => Ok(Some(id)),
        None => Err(json_error(CONFIG, key, "a token of tokenizer.json", value)),
    }
}

/// A string, or a list of named templates of which "default" counts.
fn chat_template(file: &'static str, config: &Map<String, Json>) -> Result<Option<String>, TokenizeError> {
    match config.get("chat_template") {
        None | Some(Json::Null) => Ok(None),
        Some(Json::String(source)) => Ok(Some(source.clone())),
        Some(other) => {
            let named = other.as_array().and_then(|list| list.iter().find(|t| t["name"] == "default"));
            match named.and_then(|t| t["template"].as_str()) {
                Some(source) => Ok(Some(source.to_owned())),
                None => Err(json_error(file, "chat_template", "a string or a list with \"default\"", other)),
            }
        }
    }
}

/// The names of such a list but for "default".
fn named_templates(config: &Map<String, Json>) -> Vec<OtherTemplate> {
    let list = config.get("chat_template").and_then(Json::as_array).map(Vec::as_slice).unwrap_or_default();
    let names = list.iter().filter_map(|t| t["name"].as_str()).filter(|name| *name != "default");
    names.map(OtherTemplate::named).collect()
}

fn generation_eos(generation: &Map<String, Json>) -> Result<Vec<u32>, TokenizeError> {
    let id = |v: &Json| v.as_u64().and_then(|id| u32::try_from(id).ok());
    let Some(value) = generation.get("eos_token_id").filter(|v| !v.is_null()) else { return Ok(Vec::new()) };
    let ids = match value.as_array() {
        Some(list) => list.iter().map(id).collect(),
        None => id(value).map(|id| vec![id]),
    };
    ids.ok_or_else(|| json_error(GENERATION, "eos_token_id", "an id or a list of ids", value))
}

/// Whether the file's own template for one text begins with a special token, which is how tokenizer.json adds a BOS.
fn begins_with_special(processor: &Json) -> bool {
    let inner = processor.get("processors").and_then(Json::as_array).map(Vec::as_slice).unwrap_or_default();
    processor.pointer("/single/0/SpecialToken").is_some()
        || inner.iter().any(|p| p.pointer("/single/0/SpecialToken").is_some())
}

/// tokenizer.json run as it is by the `tokenizers` library: the baseline for [`super::Tokenizer::checks`].
#[derive(Debug)]
pub struct JsonTokenizer {
    inner: tokenizers::Tokenizer,
}

impl JsonTokenizer {
    /// From the text of tokenizer.json. Errors: what the library refuses, and merges that it would not survive.
    pub fn new(tokenizer_json: &str) -> Result<Self, TokenizeError> {
        let file = File::of(tokenizer_json)?;
        for (index, merge) in file.model.merges.iter().map(Merge::joined).enumerate() {
            // The library joins both parts in a buffer as long as the longest token, without looking.
            let whole = merge.replacen(' ', "", 1);
            if !file.model.vocab.contains_key(&whole) {
                return Err(TokenizeError::MergeUnknown { index, merge: clip(&merge), missing: clip(&whole) });
            }
        }
        let inner = tokenizers::Tokenizer::from_str(tokenizer_json);
        Ok(Self { inner: inner.map_err(|e| json_error(TOKENIZER, "the file", "a tokenizer", e))? })
    }

    /// Ids of `text` with special tokens parsed and none added. Errors: the library's.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizeError> {
        let encoding = self.inner.encode(text, false);
        let encoding = encoding.map_err(|e| TokenizeError::Library { what: TOKENIZER, message: e.to_string() })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The literal at `id`, in the byte-level alphabet for ordinary tokens.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Number of tokens, added ones included.
    pub fn len(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
