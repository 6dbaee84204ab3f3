//! What people read. Text from files may hold anything, and a terminal obeys what it gets: every piece goes through
//! [`clean`] on its way out.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};

use textwrap::WordSeparator;
use textwrap::core::{Word, break_words};
use textwrap::wrap_algorithms::wrap_first_fit;

use super::table::Table;
use super::verdict::Verdict;

/// Columns where the output is no terminal.
const DEFAULT_WIDTH: usize = 120;

/// Narrower terminals get the same as one of this width.
const LEAST_WIDTH: usize = 40;

/// How the page is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// Columns.
    pub width: usize,
    /// Whether verdicts have colours; the word is always there.
    pub colour: bool,
}

impl Look {
    /// That of standard output: its terminal's width or `COLUMNS`, and colours unless `NO_COLOR` is set.
    pub fn of_stdout() -> Self {
        let set = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        let typed = set("COLUMNS").and_then(|v| v.parse().ok());
        let own = comfy_table::Table::new().width().map(usize::from);
        let dumb = set("TERM").is_none_or(|t| t == "dumb");
        Look {
            width: typed.or(own).map_or(DEFAULT_WIDTH, |w: usize| w.max(LEAST_WIDTH)),
            colour: io::stdout().is_terminal() && set("NO_COLOR").is_none() && !dumb,
        }
    }
}

/// True for characters that steer a terminal or the order of what it shows: control characters, line and paragraph
/// separators, and what changes the direction of writing or is not seen at all.
pub(super) fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{feff}')
        || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Text as it may reach a terminal: what steers it is written as `\u{1b}`, line ends too.
pub fn clean(text: &str) -> Cow<'_, str> {
    escape(text, is_unsafe)
}

/// As [`clean`], for text of many lines: line ends and tabs stay.
pub fn clean_lines(text: &str) -> Cow<'_, str> {
    escape(text, |c| is_unsafe(c) && c != '\n' && c != '\t')
}

fn escape(text: &str, bad: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&bad) {
        return text.into();
    }
    let mut safe = String::with_capacity(text.len() + 16);
    text.chars().for_each(|c| if bad(c) { safe.extend(c.escape_unicode()) } else { safe.push(c) });
    safe.into()
}

/// What a command found, as text.
pub struct Page<'a> {
    out: &'a mut dyn Write,
    look: Look,
}

impl<'a> Page<'a> {
    /// A page that goes to `out`.
    pub fn new(out: &'a mut dyn Write, look: Look) -> Self {
        Page { out, look }
    }

    /// A line, broken between words where the terminal is narrower; what follows stands further in.
    ///
    /// # Errors
    /// Those of the output, as for all that follow.
    pub fn line(&mut self, text: impl AsRef<str>) -> io::Result<()> {
        let text = clean(text.as_ref());
        writeln!(self.out, "{}", wrap(&text, self.look.width))
    }

    /// An empty line.
    pub fn gap(&mut self) -> io::Result<()> {
        writeln!(self.out)
    }

    /// A table.
    pub fn table(&mut self, table: &Table) -> io::Result<()> {
        writeln!(self.out, "{}", table.render(self.look))
    }

    /// The last line: the verdict, and what is to be said behind it.
    pub fn verdict(&mut self, verdict: Verdict, rest: &str) -> io::Result<()> {
        let line = wrap(&clean(&format!("verdict: {}{rest}", verdict.name())), self.look.width);
        let word = verdict.name();
        match self.look.colour {
            true => {
                let painted = format!("\u{1b}[38;5;{}m{word}\u{1b}[0m", verdict.colour());
                writeln!(self.out, "{}", line.replacen(word, &painted, 1))
            }
            false => writeln!(self.out, "{line}"),
        }
    }

    /// Sends what was written on its way.
    pub fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Breaks a line between words; what follows stands two columns further in than its beginning. A word that is wider than a
/// line is broken within, as the last resort: quoted text may have no spaces. Paths and addresses stay whole, to be copied.
pub(super) fn wrap(text: &str, width: usize) -> String {
    let indent = text.len() - text.trim_start().len();
    let room = [width.saturating_sub(indent).max(1), width.saturating_sub(indent + 2).max(1)];
    let mut words: Vec<Word<'_>> = Vec::new();
    for word in WordSeparator::AsciiSpace.find_words(text.trim()) {
        match is_path(&word) {
            true => words.push(word),
            false => words.extend(break_words([word], room[1])),
        }
    }
    let mut out = String::with_capacity(text.len() + 16);
    for (i, line) in wrap_first_fit(&words, &room.map(|n| n as f64)).into_iter().enumerate() {
        let before = if i == 0 { indent } else { indent + 2 };
        out.push_str(&" ".repeat(before));
        line.iter().for_each(|word| [word.word, word.whitespace].iter().for_each(|part| out.push_str(part)));
        out.truncate(out.trim_end_matches(' ').len());
        out.push('\n');
    }
    out.pop();
    out
}

/// True for what people copy: a path from the root, or an address.
fn is_path(word: &str) -> bool {
    word.trim_start_matches(['(', '"', '`']).starts_with('/') || word.contains("://")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_steers_a_terminal_or_forges_a_line() {
        let name = "blk.0\u{1b}[2K\rx\nverdict: MATCH\u{202e}";
        let mut out = Vec::new();
        Page::new(&mut out, Look { width: 120, colour: false }).line(name).expect("memory");
        let text = String::from_utf8(out).expect("UTF-8");
        assert_eq!(text, "blk.0\\u{1b}[2K\\u{d}x\\u{a}verdict: MATCH\\u{202e}\n");
        assert_eq!(clean_lines("a\n\tb\u{7}"), "a\n\tb\\u{7}");
        assert!(matches!(clean("plain é, ❤\u{fe0f}"), Cow::Borrowed(_)));
    }

    #[test]
    fn lines_are_broken_between_words() {
        assert_eq!(wrap("  one two three", 11), "  one two\n    three");
        assert_eq!(wrap("/a/long-path one", 8), "/a/long-path\n  one");
        assert_eq!(wrap("a \"quoted<|text|>\" b", 9), "a \"quoted\n  <|text|\n  >\" b", "a last resort");
        assert_eq!(wrap("", 9), "");
    }
}
