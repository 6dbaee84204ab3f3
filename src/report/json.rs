//! JSON for machines: numbers that JSON does not have, and characters that a terminal must not get.

use std::fmt::Write as _;
use std::io;

use serde::{Serialize, Serializer};

use super::page::is_unsafe;

/// A number that may be infinite or none, which JSON does not have: then it is a string, `"inf"` or `"NaN"`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Number(pub f64);

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_finite() { serializer.serialize_f64(self.0) } else { serializer.collect_str(&self.0) }
    }
}

/// Writes a document and a line end. Text from files may hold anything: what steers a terminal is escaped.
///
/// # Errors
/// Those of `out`.
pub fn write(out: &mut dyn io::Write, document: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_string_pretty(document)?;
    let mut safe = String::with_capacity(text.len() + 1);
    for c in text.chars() {
        // Outside strings JSON is ASCII without control characters but for line ends, so this stands in a string.
        if is_unsafe(c) && c != '\n' {
            let mut units = [0; 2];
            for unit in c.encode_utf16(&mut units) {
                let _ = write!(safe, "\\u{unit:04x}"); // a String takes everything
            }
        } else {
            safe.push(c);
        }
    }
    safe.push('\n');
    out.write_all(safe.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_steers_a_terminal_and_everything_reads_back() {
        let names = "a\u{1b}[2J\u{9b}31m\u{202e}\u{7f}\n\r é\u{1f600}\u{e0041}";
        let mut out = Vec::new();
        write(&mut out, &serde_json::json!({ "name": names, "worst": Number(f64::INFINITY) })).expect("memory");
        let text = String::from_utf8(out).expect("UTF-8");
        assert!(text.chars().all(|c| c == '\n' || !is_unsafe(c)), "{text:?}");
        let read: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!((&read["name"], &read["worst"]), (&names.into(), &"inf".into()));
    }
}
