//! A whole byte-level tokenizer for a vocabulary of any size: all bytes, a few merges, words that fill it up, and GLM's
//! special tokens at the end, where GLM-5 has them.

use crate::gguf::{Array, Value};

/// Ids at the end that are kept for special tokens; GLM-5 has 154880 - 154820 of them.
const SPECIAL: usize = 60;

/// Control tokens in GLM's order, so that 154820 is `<|endoftext|>` at the real size.
const CONTROL: [&str; 10] = [
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
];

/// Literals that are part of the content.
const USER_DEFINED: [&str; 10] = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
];

/// Merges, each of tokens that stand before it.
const MERGES: [(&str, &str); 8] =
    [("Ġ", "t"), ("h", "e"), ("i", "n"), ("r", "e"), ("Ġ", "a"), ("n", "d"), ("Ġt", "he"), ("Ġa", "nd")];

/// Bytes, merges and special tokens: no vocabulary is smaller.
pub const LEAST_VOCAB: u32 = (256 + MERGES.len() + SPECIAL) as u32;

const TEMPLATE: &str = "[gMASK]<sop>{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\
                        {{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|><think></think>{% endif %}";

/// The `tokenizer.*` keys of a vocabulary of `vocab` tokens, at least [`LEAST_VOCAB`].
pub(super) fn metadata(vocab: usize) -> Vec<(String, Value)> {
    let first_special = vocab.saturating_sub(SPECIAL);
    // GPT-2's alphabet in its order: printable bytes as themselves, the other 68 from U+0100 on.
    let bytes = ('!'..='~').chain('¡'..='¬').chain('®'..='ÿ').chain('\u{100}'..='\u{143}');
    let mut tokens: Vec<String> = bytes.map(String::from).collect();
    tokens.extend(MERGES.iter().map(|(left, right)| format!("{left}{right}")));
    let mut types = vec![1; tokens.len()];
    // No merge makes these, so that no text is cut into them: unused, as the format calls it.
    tokens.extend((0..first_special.saturating_sub(tokens.len())).map(word));
    types.resize(tokens.len(), 5);
    for (literals, ty) in [(CONTROL, 3), (USER_DEFINED, 4)] {
        tokens.extend(literals.map(String::from));
        types.extend(literals.map(|_| ty));
    }
    tokens.extend((tokens.len()..vocab).map(|id| format!("[unused {id}]")));
    types.resize(tokens.len(), 5);

    let id = |literal: &str| CONTROL.iter().position(|c| *c == literal).map(|i| (first_special + i) as u32);
    let merges = MERGES.iter().map(|(left, right)| format!("{left} {right}")).collect();
    let mut all: Vec<(String, Value)> = vec![
        ("tokenizer.ggml.model".into(), Value::Str("gpt2".into())),
        ("tokenizer.ggml.pre".into(), Value::Str("glm4".into())),
        ("tokenizer.ggml.tokens".into(), Value::Array(Array::Str(tokens))),
        ("tokenizer.ggml.token_type".into(), Value::Array(Array::I32(types))),
        ("tokenizer.ggml.merges".into(), Value::Array(Array::Str(merges))),
        ("tokenizer.chat_template".into(), Value::Str(TEMPLATE.into())),
    ];
    let named = [
        ("eos", "<|endoftext|>"),
        ("padding", "<|endoftext|>"),
        ("unknown", "<|endoftext|>"),
        ("bos", "[gMASK]"),
        ("eot", "<|user|>"),
        ("eom", "<|observation|>"),
    ];
    let ids = named
        .iter()
        .filter_map(|(name, literal)| Some((format!("tokenizer.ggml.{name}_token_id"), Value::U32(id(literal)?))));
    all.extend(ids);
    all
}

/// A word of three syllables with a leading space; distinct below a million.
fn word(i: usize) -> String {
    let syllable = |n: usize| {
        let (consonants, vowels) = (b"bcdfghjklmnpqrstvwxz", b"aeiou");
        [consonants[n / vowels.len() % consonants.len()], vowels[n % vowels.len()]].map(char::from)
    };
    std::iter::once('Ġ').chain([i / 10_000, i / 100, i].into_iter().flat_map(|n| syllable(n % 100))).collect()
}
