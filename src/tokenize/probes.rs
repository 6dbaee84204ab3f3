//! What a chat template makes of conversations whose every text can be told from all others. A template that drops what
//! somebody says renders without an error, and the model answers something else.

use serde_json::{Map, json};

use super::bpe::Tokenizer;
use super::checks::{Fact, Finding, Problem};
use super::error::TokenizeError;
use super::template::ChatMessage;

/// Words that no template has of its own, and that none rewrites.
const ALONE: &str = "Elderberry";
const TURNS: [(&str, &str); 4] =
    [("system", "Alfalfa"), ("user", "Buckwheat"), ("assistant", "Chicory"), ("user", "Dandelion")];
/// The argument of a tool call, and the tool's answer.
const TOOL: [&str; 2] = ["Fennel", "Ginger"];

/// A conversation in which a tool is called and answers, and the words of call and answer.
pub fn tool_turns() -> (Vec<ChatMessage>, [&'static str; 2]) {
    let message = |value| serde_json::from_value(value).unwrap_or_else(|_| ChatMessage::new("user", ""));
    let call = json!({
        "role": "assistant", "content": "", "tool_calls": [
            {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": {"word": TOOL[0]}}}
        ]
    });
    let answer = json!({"role": "tool", "content": TOOL[1], "tool_call_id": "call00000", "name": "look_up"});
    (vec![ChatMessage::new("user", ALONE), message(call), message(answer)], TOOL)
}

impl Tokenizer {
    /// Every text of a conversation is in the prompt once. What users say must be; a template may fold a system's words, or
    /// shorten the assistant's; and many know no tools, which shows in that a tool's turn changes nothing.
    pub(super) fn template_text(&self) -> Fact {
        let turns: Vec<ChatMessage> = TURNS.iter().map(|(role, text)| ChatMessage::new(*role, *text)).collect();
        let alone = [ChatMessage::new("user", ALONE)];
        let single = self.rendered(&alone).map(|text| (text, &[("user", ALONE)][..]))?;
        // Some refuse a system's turn.
        let whole = self.rendered(&turns).map(|text| (text, &TURNS[..]));
        let whole = whole.or_else(|_| self.rendered(&turns[1..]).map(|text| (text, &TURNS[1..])))?;
        let (mut lost, mut doubtful, mut seen) = (Vec::new(), Vec::new(), Vec::new());
        for (prompt, texts) in [single, whole] {
            for (role, text) in texts {
                let said = match prompt.matches(text).count() {
                    1 => {
                        seen.push(*role);
                        continue;
                    }
                    0 => format!("the {role}'s {text:?} is not in it"),
                    n => format!("the {role}'s {text:?} is in it {n} times"),
                };
                let list = if *role == "user" { &mut lost } else { &mut doubtful };
                list.push(format!("{said}: {prompt:?}"));
            }
        }
        let tools = self.tool_text(&mut doubtful);
        let finding = if lost.is_empty() { Finding::Doubtful } else { Finding::Fails };
        if let Some(first) = lost.first().or(doubtful.first()) {
            let more = lost.len() + doubtful.len() - 1;
            let more = if more > 0 { format!("; and {more} more texts") } else { String::new() };
            let detail = format!(
                "TEMPLATE_TEXT: the prompt that the template makes must have what is said once, and {first}{more}. The model \
                 is never asked what was typed: take the publisher's template"
            );
            return Err(Problem(finding, detail));
        }
        seen.sort_unstable();
        seen.dedup();
        Ok(format!("the words of {} are in the prompt once; {tools}", seen.join(", ")))
    }

    /// What is said of tools, in words. A turn that shows, but not what was said in it, is put to `doubtful`.
    fn tool_text(&self, doubtful: &mut Vec<String>) -> String {
        let (turns, [call, answer]) = tool_turns();
        let mut plain = turns.clone();
        plain[1].other.clear();
        let pairs = [
            ("tool call", call, self.rendered(&plain[..2]), self.rendered(&turns[..2])),
            ("tool answer", answer, self.rendered(&turns[..2]), self.rendered(&turns)),
        ];
        let known = pairs.map(|(what, text, without, with)| match (without, with) {
            (Ok(without), Ok(with)) if without != with => {
                if !with.contains(text) {
                    doubtful.push(format!("the {what}'s {text:?} is not in it: {with:?}"));
                }
                format!("{what}s shown")
            }
            _ => format!("{what}s not known"),
        });
        known.join(", ")
    }

    fn rendered(&self, turns: &[ChatMessage]) -> Result<String, TokenizeError> {
        self.render_chat(turns, true, &Map::new())
    }
}
