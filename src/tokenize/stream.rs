//! Text from ids one at a time. A character can be cut between tokens, so bytes are held back until the character is
//! whole; otherwise a stream would show replacement marks that the whole text does not have.

use std::sync::Arc;

use super::bpe::Pieces;

/// Decodes one stream of ids. The pieces joined, [`Self::finish`] included, equal [`super::Tokenizer::decode`] of all ids
/// without special ones.
#[derive(Debug)]
pub struct StreamDecoder {
    pieces: Arc<Pieces>,
    /// The beginning of a character: at most three bytes between calls.
    pending: Vec<u8>,
}

impl StreamDecoder {
    pub(super) fn new(pieces: Arc<Pieces>) -> Self {
        Self { pieces, pending: Vec::new() }
    }

    /// Takes the next id; returns the text that is now whole, or `None` where there is none yet. Special ids add
    /// nothing. Bytes that no continuation can make UTF-8 become one U+FFFD.
    pub fn push(&mut self, id: u32) -> Option<String> {
        self.pending.extend_from_slice(self.pieces.content(id));
        let mut text = String::new();
        let mut at = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            at += chunk.valid().len();
            let rest = &self.pending[at..];
            if rest.len() == chunk.invalid().len() && may_continue(rest) {
                break;
            }
            if !chunk.invalid().is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
                at += chunk.invalid().len();
            }
        }
        self.pending.drain(..at);
        (!text.is_empty()).then_some(text)
    }

    /// What is left when the stream ends: one U+FFFD where it ends inside a character (a limit on tokens can cut
    /// there), otherwise nothing.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

/// Whether `bytes` are the beginning of a character.
fn may_continue(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|e| e.valid_up_to() == 0 && e.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::super::{Tokenizer, TokenizerSpec, alphabet};
    use proptest::prelude::*;

    /// Ids 0 to 255 are the bytes; then tokens that cut 🙂 (f0 9f 99 82) in all ways, a control, a user-defined token.
    fn tokenizer() -> Tokenizer {
        let mut tokens: Vec<String> = (0..=255).map(|b| alphabet::char_of(b).to_string()).collect();
        for bytes in [&[0xf0, 0x9f][..], &[0x99, 0x82], &[0xf0, 0x9f, 0x99], &[0x9f, 0x99, 0x82]] {
            tokens.push(bytes.iter().map(|&b| alphabet::char_of(b)).collect());
        }
        let mut types = vec![1; tokens.len()];
        tokens.extend(["<|end|>".to_owned(), "<think>".to_owned()]);
        types.extend([3, 4]);
        let spec =
            TokenizerSpec { model: "gpt2".into(), pre: Some("glm4".into()), tokens, types, ..Default::default() };
        Tokenizer::new(&spec).unwrap()
    }

    fn run(ids: &[u32]) -> (Vec<Option<String>>, String) {
        let mut stream = tokenizer().stream();
        let pushed = ids.iter().map(|&id| stream.push(id)).collect();
        (pushed, stream.finish())
    }

    #[test]
    fn an_emoji_over_two_three_and_four_tokens_comes_whole() {
        let smile = Some("🙂".to_owned());
        assert_eq!(run(&[256, 257]), (vec![None, smile.clone()], String::new()));
        assert_eq!(run(&[258, 0x82]), (vec![None, smile.clone()], String::new()));
        assert_eq!(run(&[256, 0x99, 0x82]), (vec![None, None, smile.clone()], String::new()));
        assert_eq!(run(&[0xf0, 0x9f, 0x99, 0x82]), (vec![None, None, None, smile], String::new()));
    }

    #[test]
    fn a_stream_cut_inside_a_character_ends_with_one_mark() {
        assert_eq!(run(&[97, 0xf0, 0x9f, 0x99]).1, "\u{fffd}");
        assert_eq!(run(&[97]).1, "");
    }

    #[test]
    fn bytes_that_can_never_complete_become_one_mark_at_once() {
        assert_eq!(run(&[0x82]).0, [Some("\u{fffd}".to_owned())]);
        // f0 9f, then a letter: the beginning is lost as one mark, the letter follows.
        assert_eq!(run(&[256, 98]).0, [None, Some("\u{fffd}b".to_owned())]);
        // ed a0 would be a surrogate: two bytes that begin nothing.
        assert_eq!(run(&[0xed, 0xa0]).0, [None, Some("\u{fffd}\u{fffd}".to_owned())]);
    }

    #[test]
    fn control_tokens_never_show_and_do_not_cut_a_character() {
        assert_eq!(run(&[260, 97, 260]).0, [None, Some("a".to_owned()), None]);
        assert_eq!(run(&[256, 260, 257]).0, [None, None, Some("🙂".to_owned())]);
        assert_eq!(run(&[261]).0, [Some("<think>".to_owned())]);
        assert_eq!(run(&[u32::MAX]).0, [None]);
    }

    proptest! {
        /// Joined pieces are the text of all ids, for any ids; and no mark comes early: what was sent is a prefix.
        #[test]
        fn pieces_joined_are_the_whole_text(ids in proptest::collection::vec(prop_oneof![0u32..270, 0x80u32..0xff, 256u32..262], 0..24)) {
            let tokenizer = tokenizer();
            let mut stream = tokenizer.stream();
            let mut sent = String::new();
            for &id in &ids {
                sent.extend(stream.push(id));
                prop_assert!(stream.pending.len() < 4);
            }
            sent += &stream.finish();
            prop_assert_eq!(sent, tokenizer.decode(&ids, true));
        }

        /// Text cut anywhere never shows a mark.
        #[test]
        fn text_by_bytes_never_shows_a_mark(text in "[a-z🙂你é\\x{10ffff}]{0,12}") {
            let mut stream = tokenizer().stream();
            let sent: String = text.bytes().filter_map(|b| stream.push(u32::from(b))).collect();
            prop_assert_eq!(sent, text);
        }
    }
}
