//! Frames of a stream as they go out. One is made for every token, so what is the same in all frames of a stream is written
//! once, and the rest goes straight to bytes.

use serde::Serialize;
use serde_json::{Value as Json, to_writer};

use super::reply::Head;

/// Room for a choice without log-probabilities.
const CHOICE: usize = 160;

/// What stands around the choice in every frame of a stream.
#[derive(Clone, Debug)]
pub struct Envelope {
    before: String,
    behind: String,
}

impl Envelope {
    /// Around choices of replies of this kind.
    pub fn new(head: &Head, object: &str) -> Self {
        let whole = head.object(object, vec![Json::Null], None).to_string();
        // No text within quotes has these, since its own quotes are escaped.
        let (before, behind) = whole.split_once("\"choices\":[null]").unwrap_or((&whole, ""));
        Envelope { before: format!("data: {before}\"choices\":["), behind: format!("]{behind}\n\n") }
    }

    /// A frame with one choice.
    pub fn write(&self, out: &mut Vec<u8>, choice: &impl Serialize) {
        out.reserve(self.before.len() + CHOICE + self.behind.len());
        out.extend_from_slice(self.before.as_bytes());
        // Memory takes everything, and all keys are text.
        let _ = to_writer(&mut *out, choice);
        out.extend_from_slice(self.behind.as_bytes());
    }
}

/// A frame of which nothing is written before.
pub fn event(out: &mut Vec<u8>, frame: &Json) {
    out.extend_from_slice(format!("data: {frame}\n\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// An envelope changes no byte, whatever stands in the model's name.
    #[test]
    fn a_frame_is_the_whole_object_with_its_choice() {
        for (name, include_usage) in [("nano", false), ("\"choices\":[null] \\ \u{1}", true)] {
            let (id, model, fingerprint) = ("id".into(), name.into(), "build".into());
            let head = Head { id, created: 7, model, fingerprint, seed: u64::MAX, stream: true, include_usage };
            let choice = json!({ "index": 0, "text": "\"\n🙂\u{7f}" });
            let (mut found, mut expected) = (Vec::new(), Vec::new());
            Envelope::new(&head, "kind").write(&mut found, &choice);
            event(&mut expected, &head.object("kind", vec![choice], None));
            assert_eq!(String::from_utf8(found).unwrap(), String::from_utf8(expected).unwrap());
        }
    }
}
