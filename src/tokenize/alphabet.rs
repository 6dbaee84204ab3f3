//! GPT-2's byte-level alphabet: every byte is written as one printable character, so that a vocabulary of strings can
//! hold any bytes. The 188 printable Latin-1 bytes stand for themselves; the others follow from U+0100 in byte order.

use std::sync::LazyLock;

/// Whether a byte stands for itself: `!` to `~`, `¡` to `¬`, `®` to `ÿ`.
const fn is_itself(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
}

/// The 68 bytes that do not stand for themselves; the one at position i is written as U+0100 + i.
static SHIFTED: LazyLock<Vec<u8>> = LazyLock::new(|| (0..=255u8).filter(|&b| !is_itself(b)).collect());

/// The character of each byte.
static CHARS: LazyLock<[char; 256]> = LazyLock::new(|| {
    let mut chars: [char; 256] = std::array::from_fn(|byte| char::from(byte as u8));
    for (&byte, shifted) in SHIFTED.iter().zip('\u{100}'..) {
        chars[usize::from(byte)] = shifted;
    }
    chars
});

/// The character that stands for `byte`.
pub(crate) fn char_of(byte: u8) -> char {
    CHARS[usize::from(byte)]
}

/// The byte that `c` stands for, or `None` for a character outside the alphabet.
pub(super) fn byte_of(c: char) -> Option<u8> {
    let code = u32::from(c);
    match u8::try_from(code) {
        Ok(byte) => is_itself(byte).then_some(byte),
        Err(_) => SHIFTED.get(usize::try_from(code - 0x100).ok()?).copied(),
    }
}

/// `text` in the alphabet: one character per byte of its UTF-8 form.
pub(super) fn to_alphabet(text: &str) -> String {
    text.bytes().map(char_of).collect()
}

/// The bytes of a token written in the alphabet, or its first character that is not in it.
pub(super) fn to_bytes(token: &str) -> Result<Box<[u8]>, char> {
    token.chars().map(|c| byte_of(c).ok_or(c)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_character_and_back() {
        let chars: std::collections::BTreeSet<char> = (0..=255).map(char_of).collect();
        assert_eq!(chars.len(), 256);
        for b in 0..=255 {
            assert_eq!(byte_of(char_of(b)), Some(b));
        }
        // The last shifted byte is 0xad, at U+0143; the next character is outside.
        assert_eq!(byte_of('\u{143}'), Some(0xad));
        assert_eq!(byte_of('\u{144}'), None);
        assert_eq!(byte_of('🙂'), None);
    }

    #[test]
    fn known_characters() {
        assert_eq!(to_alphabet(" \n\t a"), "ĠĊĉĠa");
        assert_eq!(to_alphabet("é"), "Ã©");
        assert_eq!(to_bytes("Ġthe").as_deref(), Ok(b" the".as_slice()));
        assert_eq!(to_bytes("a b"), Err(' '));
    }
}
