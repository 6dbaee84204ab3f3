//! The pre-tokenizer: how text is cut into pieces before BPE, named by `tokenizer.ggml.pre`. Two files with the same
//! vocabulary and merges and different rules here give different ids, with no error anywhere; so the name must be
//! known, and an unknown one is refused with the nearest known name.

use std::ops::Range;

use regex::Regex;

use super::error::{TokenizeError, clip};
use super::lacks;

/// The names accepted for `tokenizer.ggml.pre`. Both stand for the same rule, `GLM4_PATTERN`.
pub const KNOWN_PRE_TOKENIZERS: [&str; 2] = ["glm4", "glm5"];

/// The rule of glm4 as tokenizer.json writes it: contractions in any case, words with one leading other character,
/// groups of one to three digits, punctuation with its line ends, line ends, white space.
pub(super) const GLM4_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// [`GLM4_PATTERN`] without its look-ahead alternative, which [`PreTokenizer::split`] applies by hand: a backtracking
/// engine can give up on long white space, and its caller would not hear of it.
const GLM4_LINEAR: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";

/// The accepted names in one string, for messages.
fn known() -> String {
    KNOWN_PRE_TOKENIZERS.join(", ")
}

/// A compiled rule.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    regex: Regex,
}

impl PreTokenizer {
    /// The rule called `name`. Errors: absent, or not one of [`KNOWN_PRE_TOKENIZERS`].
    pub(super) fn new(name: Option<&str>) -> Result<Self, TokenizeError> {
        let Some(name) = name else {
            return Err(TokenizeError::PreTokenizerAbsent { known: known() });
        };
        if !KNOWN_PRE_TOKENIZERS.contains(&name) {
            let shown = clip(name);
            if lacks::PRE_TOKENIZERS.contains(&name) {
                return Err(TokenizeError::Lacking { what: "tokenizer.ggml.pre", found: shown });
            }
            if let Some(steps) = lacks::pre_tokenizer(name) {
                let found = clip(&steps);
                return Err(TokenizeError::Lacking { what: "tokenizer.json: pre_tokenizer of another rule,", found });
            }
            let nearest =
                KNOWN_PRE_TOKENIZERS.iter().min_by_key(|k| strsim::levenshtein(&shown, k)).copied().unwrap_or_default();
            return Err(TokenizeError::PreTokenizerUnknown { found: shown, nearest: nearest.into(), known: known() });
        }
        let regex = Regex::new(GLM4_LINEAR)
            .map_err(|e| TokenizeError::Library { what: "compiling the pre-tokenizer", message: e.to_string() })?;
        Ok(Self { regex })
    }

    /// Byte ranges of the pieces of `text`, in order; together they cover it.
    pub(super) fn split(&self, text: &str) -> Vec<Range<usize>> {
        let mut pieces = Vec::new();
        let mut at = 0;
        while let Some(found) = self.regex.find_at(text, at) {
            // Every character belongs to some alternative, so a match begins where the last one ended.
            let mut end = found.end();
            // `\s+(?!\S)` leaves the last white space before a word to that word. Only the last alternative can match
            // white space that does not end a line.
            let piece = &text[at..end];
            let mut backwards = piece.char_indices().rev();
            if let Some((last, c)) = backwards.next()
                && end < text.len()
                && last > 0
                && !matches!(c, '\r' | '\n')
                && c.is_whitespace()
                && piece.trim_start().is_empty()
            {
                end = at + last;
            }
            pieces.push(at..end);
            at = end;
        }
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _, SplitDelimiterBehavior};

    fn pieces(text: &str) -> Vec<String> {
        let rule = PreTokenizer::new(Some("glm4")).unwrap();
        rule.split(text).into_iter().map(|r| text[r].to_owned()).collect()
    }

    #[test]
    fn white_space_before_a_word_belongs_to_the_word() {
        assert_eq!(pieces("a   b"), ["a", "  ", " b"]);
        assert_eq!(pieces("a   "), ["a", "   "]);
        assert_eq!(pieces("a \n\n  b"), ["a", " \n\n", " ", " b"]);
        assert_eq!(pieces("a \t1"), ["a", " ", "\t", "1"]);
        assert_eq!(pieces("\u{2003}\u{2003}x"), ["\u{2003}", "\u{2003}x"]);
        assert!(pieces("").is_empty());
    }

    #[test]
    fn contractions_in_any_case_and_digits_in_threes() {
        assert_eq!(pieces("I'LL don't 1234567"), ["I", "'LL", " don", "'t", " ", "123", "456", "7"]);
    }

    #[test]
    fn a_million_spaces_are_one_piece_and_a_word() {
        let text = format!("{}x", " ".repeat(1 << 20));
        assert_eq!(pieces(&text).len(), 2);
    }

    #[test]
    fn rules_of_other_programs_are_no_fault() {
        let split = r#"{"type": "Split", "pattern": {"Regex": "\\p{L}+"}, "behavior": "Isolated", "invert": false}"#;
        let two = format!(r#"{{"type": "Sequence", "pretokenizers": [{split}, {{"type": "ByteLevel"}}]}}"#);
        for name in ["gpt-2", "llama-bpe", "qwen2", "deepseek-v3", split, &two] {
            let refused = PreTokenizer::new(Some(name)).unwrap_err();
            assert!(matches!(refused, TokenizeError::Lacking { .. }) && refused.is_lack(), "{name}: {refused}");
        }
        for name in ["gpt2", "", "{}", r#"{"type": "Splat"}"#, r#"{"type": "Sequence", "pretokenizers": [{}]}"#] {
            let refused = PreTokenizer::new(Some(name)).unwrap_err();
            assert!(!refused.is_lack(), "{name}: {refused}");
        }
    }

    #[test]
    fn unknown_and_absent_names_are_refused() {
        let unknown = PreTokenizer::new(Some("glm-5")).unwrap_err();
        assert!(matches!(&unknown, TokenizeError::PreTokenizerUnknown { nearest, .. } if nearest == "glm5"));
        assert!(matches!(PreTokenizer::new(None), Err(TokenizeError::PreTokenizerAbsent { .. })));
    }

    proptest! {
        /// The hand-applied look-ahead agrees with the published pattern run by a backtracking engine.
        #[test]
        fn agrees_with_the_published_pattern(text in r"([a-cA-C'sStTlL]|[0-9٣]|[ \t\r\n\x{a0}\x{2003}\x{85}]|[.!,_-]|[é你́🙂ǅſ]){0,40}") {
            let split = Split::new(SplitPattern::Regex(GLM4_PATTERN.into()), SplitDelimiterBehavior::Isolated, false).unwrap();
            let mut whole = PreTokenizedString::from(text.as_str());
            split.pre_tokenize(&mut whole).unwrap();
            let expected: Vec<String> = whole
                .get_splits(OffsetReferential::Original, OffsetType::Byte)
                .into_iter()
                .map(|(s, _, _)| s.to_owned())
                .filter(|s| !s.is_empty())
                .collect();
            prop_assert_eq!(pieces(&text), expected);
        }
    }
}
