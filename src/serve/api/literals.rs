//! Literals of the tokenizer in what clients say. A user who writes a role marker writes text: if it became the marker's
//! id, he would speak with another's voice. So literals in clients' strings are broken by a mark before the template is
//! rendered; behind it, marks are left out and what they broke is encoded as text.

use serde_json::{Map, Value as Json};

use crate::tokenize::Tokenizer;

/// A mark that breaks literals.
pub struct Marks<'a> {
    tokenizer: &'a Tokenizer,
    mark: char,
}

/// Characters for private use: one that no client's text has is the mark.
const PRIVATE: [std::ops::RangeInclusive<char>; 2] = ['\u{fdd0}'..='\u{fdef}', '\u{e000}'..='\u{f8ff}'];

impl<'a> Marks<'a> {
    /// With a mark that occurs in none of `values`. `None` if all do.
    pub fn new(tokenizer: &'a Tokenizer, values: &[&Json]) -> Option<Self> {
        let text = values.iter().map(|v| v.to_string()).collect::<String>();
        let lower = text.to_ascii_lowercase();
        let is_free = |c: &char| !text.contains(*c) && !lower.contains(&escaped(*c));
        let mark = PRIVATE.into_iter().flatten().find(is_free)?;
        Some(Marks { tokenizer, mark })
    }

    /// A text whose literals are broken, but for those of `kept`.
    pub fn text(&self, text: &str, kept: &[&str]) -> String {
        self.tokenizer.break_literals(text, self.mark, kept)
    }

    /// The same for every string in a value, names too.
    pub fn value(&self, value: &Json) -> Json {
        match value {
            Json::String(text) => Json::String(self.text(text, &[])),
            Json::Array(all) => all.iter().map(|v| self.value(v)).collect(),
            Json::Object(map) => Json::Object(self.map(map)),
            other => other.clone(),
        }
    }

    /// The same for every string in an object, names too.
    pub fn map(&self, map: &Map<String, Json>) -> Map<String, Json> {
        map.iter().map(|(name, value)| (self.text(name, &[]), self.value(value))).collect()
    }

    /// Ids to feed for a prompt that holds marked strings.
    ///
    /// # Errors
    /// Those of the tokenizer.
    pub fn ids(&self, prompt: &str) -> Result<Vec<u32>, crate::tokenize::TokenizeError> {
        // A template may have written the mark as JSON does for ASCII alone.
        let prompt = prompt.replace(&escaped(self.mark), &self.mark.to_string());
        self.tokenizer.marked_ids(&prompt, self.mark)
    }
}

fn escaped(mark: char) -> String {
    format!("\\u{:04x}", u32::from(mark))
}
