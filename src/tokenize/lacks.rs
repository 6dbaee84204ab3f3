//! Names of tokenizers, and of their parts, that other programs have and this build does not. A file that states one may
//! well be right, so nothing is said against it; a name that nobody knows is a fault.

use serde_json::Value as Json;

/// Values of `tokenizer.ggml.model` that llama.cpp reads, beside "gpt2".
pub(super) const MODELS: [&str; 11] =
    ["llama", "bert", "t5", "rwkv", "plamo2", "gemma4", "hybriddna", "whitespace", "replit", "no_vocab", "none"];

/// Values of `tokenizer.ggml.pre` that llama.cpp reads, beside those that this build has.
pub(super) const PRE_TOKENIZERS: [&str; 88] = [
    "default",
    "minicpm5",
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
    "deepseek-llm",
    "deepseek-coder",
    "deepseek-v3",
    "spark2_5",
    "youtu",
    "falcon",
    "mpt",
    "starcoder",
    "gpt-2",
    "phi-2",
    "jina-es",
    "jina-de",
    "gigachat",
    "jina-v1-en",
    "jina-v2-es",
    "jina-v2-de",
    "jina-v2-code",
    "a.x-4.0",
    "mellum",
    "mellum2",
    "modern-bert",
    "jais",
    "jais-2",
    "gemma4",
    "granite-embed-multi-311m",
    "granite-embed-multi-97m",
    "sarvam-moe",
    "roberta-bpe",
    "whitespace",
    "refact",
    "command-r",
    "qwen2",
    "deepseek-r1-qwen",
    "kormo",
    "f2llmv2",
    "qwen35",
    "stablelm2",
    "olmo",
    "dbrx",
    "smaug-bpe",
    "poro-chat",
    "chatglm-bpe",
    "viking",
    "tekken",
    "smollm",
    "codeshell",
    "bloom",
    "gpt3-finnish",
    "exaone",
    "exaone4",
    "exaone-moe",
    "chameleon",
    "minerva-7b",
    "megrez",
    "gpt-4o",
    "llama4",
    "kanana2",
    "talkie",
    "tiny_aya",
    "cohere2moe",
    "superbpe",
    "trillion",
    "granite-docling",
    "bailingmoe",
    "bailingmoe2",
    "llada-moe",
    "seed-coder",
    "hunyuan",
    "hunyuan-dense",
    "joyai-llm",
    "kimi-k2",
    "grok-2",
    "afmoe",
    "laguna",
    "minimax-m2",
    "solar-open",
    "k2-horizon",
];

/// Values of `model.type` in tokenizer.json, beside "BPE".
pub(super) const JSON_MODELS: [&str; 3] = ["WordPiece", "WordLevel", "Unigram"];

/// Types of steps in `normalizer` and `pre_tokenizer` of tokenizer.json.
const NORMALIZERS: [&str; 14] = [
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Lowercase",
    "Strip",
    "StripAccents",
    "Replace",
    "Prepend",
    "Append",
    "BertNormalizer",
    "Precompiled",
    "ByteLevel",
    "Nmt",
];
const STEPS: [&str; 11] = [
    "Split",
    "ByteLevel",
    "Whitespace",
    "WhitespaceSplit",
    "Punctuation",
    "Digits",
    "Metaspace",
    "BertPreTokenizer",
    "UnicodeScripts",
    "CharDelimiterSplit",
    "FixedLength",
];

/// The steps of a `normalizer`, where the library of tokenizer.json has all of them.
pub(super) fn normalizer(value: &Json) -> Option<String> {
    steps(value, &NORMALIZERS, "normalizers")
}

/// The steps of the text of a `pre_tokenizer`, where the library of tokenizer.json has all of them.
pub(super) fn pre_tokenizer(text: &str) -> Option<String> {
    let value = text.starts_with('{').then(|| serde_json::from_str(text).ok()).flatten()?;
    steps(&value, &STEPS, "pretokenizers")
}

/// The types of a step, or of the steps of a sequence, if all are known.
fn steps(value: &Json, known: &[&str], list: &str) -> Option<String> {
    let one = |step: &Json| -> Option<String> {
        let name = step.get("type").and_then(Json::as_str)?;
        known.contains(&name).then(|| name.to_owned())
    };
    match value.get(list).and_then(Json::as_array).filter(|steps| !steps.is_empty()) {
        Some(steps) if value.get("type").and_then(Json::as_str) == Some("Sequence") => {
            Some(steps.iter().map(one).collect::<Option<Vec<_>>>()?.join(", "))
        }
        _ => one(value),
    }
}
