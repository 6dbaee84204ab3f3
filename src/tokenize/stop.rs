//! When to stop: the ids that end a turn, and stop strings asked for by a caller.
//!
//! GLM ends a turn with any of three ids, and converters have lost two of them, after which a model runs on into a
//! turn it invents for the user. So the stop set is the union of all that is stated, with its sources, never one
//! source in place of another. Stop strings must neither leak their beginning into a stream nor make it differ from
//! the text that a caller without streaming gets.

use std::fmt;

use serde::Serialize;

use super::spec::TokenizerSpec;

/// The literal that ends a sequence by its text alone, whatever ids are stated.
const END_OF_TEXT: &str = "<|endoftext|>";

/// What states that an id ends a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StopSource {
    /// `eos_token_id`.
    Eos,
    /// `eot_token_id`.
    Eot,
    /// `eom_token_id`.
    Eom,
    /// `eos_token_id` of generation_config.json.
    GenerationConfig,
    /// The token's literal is `<|endoftext|>`.
    Literal,
}

impl fmt::Display for StopSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Eos => "eos",
            Self::Eot => "eot",
            Self::Eom => "eom",
            Self::GenerationConfig => "generation config",
            Self::Literal => "literal",
        })
    }
}

/// One id that ends a turn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StopId {
    /// The id.
    pub id: u32,
    /// Its literal.
    pub literal: String,
    /// Everything that states it; at least one.
    pub sources: Vec<StopSource>,
}

/// All ids that end a turn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StopIds {
    /// In ascending order of id, each once.
    pub ids: Vec<StopId>,
    /// Set where generation may not stop at the end of a turn: nothing stated, or no end of turn beside eos.
    pub warning: Option<String>,
}

impl StopIds {
    /// The union of what `spec`, whose ids are checked, states.
    pub(super) fn collect(spec: &TokenizerSpec) -> Self {
        let mut ids: Vec<StopId> = Vec::new();
        let literal = spec.tokens.iter().position(|t| t == END_OF_TEXT);
        let stated = [(spec.eos, StopSource::Eos), (spec.eot, StopSource::Eot), (spec.eom, StopSource::Eom)];
        let extra = spec.extra_eos.iter().map(|&id| (Some(id), StopSource::GenerationConfig));
        let literal = (literal.and_then(|id| u32::try_from(id).ok()), StopSource::Literal);
        for (id, source) in stated.into_iter().chain(extra).chain([literal]) {
            let Some(id) = id else { continue };
            match ids.iter_mut().find(|s| s.id == id) {
                Some(known) if known.sources.contains(&source) => {}
                Some(known) => known.sources.push(source),
                None => {
                    let token = usize::try_from(id).ok().and_then(|i| spec.tokens.get(i));
                    ids.push(StopId { id, literal: token.cloned().unwrap_or_default(), sources: vec![source] });
                }
            }
        }
        ids.sort_by_key(|s| s.id);
        let warning = match ids.len() {
            0 => Some("the file states no stop id: generation ends only at its length limit".to_owned()),
            1 => {
                Some("the file states one stop id: a model that ends a turn otherwise runs on into the next".to_owned())
            }
            _ => None,
        };
        Self { ids, warning }
    }

    /// Whether `id` ends a turn.
    pub fn contains(&self, id: u32) -> bool {
        self.ids.iter().any(|s| s.id == id)
    }
}

impl fmt::Display for StopIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, stop) in self.ids.iter().enumerate() {
            let sources: Vec<String> = stop.sources.iter().map(StopSource::to_string).collect();
            let separator = if i == 0 { "" } else { ", " };
            write!(f, "{separator}{} {} ({})", stop.id, stop.literal, sources.join(", "))?;
        }
        match &self.warning {
            Some(warning) if self.ids.is_empty() => f.write_str(warning),
            Some(warning) => write!(f, "; {warning}"),
            None => Ok(()),
        }
    }
}

/// What one piece of text leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StopStep {
    /// Text that can be sent: it is no part of any stop string.
    pub text: String,
    /// Index of the stop string that was completed; nothing may follow.
    pub hit: Option<usize>,
}

/// Cuts a stream of text before the first stop string that is completed; of several completed by the same character,
/// before the longest. How the text was cut into pieces makes no difference.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: Vec<String>,
    /// The end of the text so far that may begin a stop string.
    held: String,
    /// Set once a stop string was completed.
    hit: Option<usize>,
}

impl StopMatcher {
    /// A matcher for `stops`; empty strings among them match nothing.
    pub fn new(stops: Vec<String>) -> Self {
        Self { stops, held: String::new(), hit: None }
    }

    /// Takes the next piece. After a hit everything is dropped.
    pub fn push(&mut self, text: &str) -> StopStep {
        if self.hit.is_some() {
            return StopStep { text: String::new(), hit: self.hit };
        }
        self.held.push_str(text);
        let found = self.stops.iter().enumerate().filter(|(_, stop)| !stop.is_empty());
        let found = found.filter_map(|(i, stop)| self.held.find(stop.as_str()).map(|at| (at + stop.len(), at, i)));
        if let Some((_, start, index)) = found.min() {
            self.hit = Some(index);
            let mut text = std::mem::take(&mut self.held);
            text.truncate(start);
            return StopStep { text, hit: self.hit };
        }
        let kept = self.stops.iter().map(|stop| begun(&self.held, stop)).max().unwrap_or_default();
        let kept = self.held.split_off(self.held.len() - kept);
        StopStep { text: std::mem::replace(&mut self.held, kept), hit: None }
    }

    /// The text still held back when generation ends without a hit.
    pub fn finish(self) -> String {
        self.held
    }
}

/// Bytes of the longest end of `text` that begins `stop` without completing it.
fn begun(text: &str, stop: &str) -> usize {
    stop.char_indices().rev().map(|(end, _)| end).find(|&end| text.ends_with(&stop[..end])).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, String, Option<usize>) {
        let mut matcher = StopMatcher::new(stops.iter().map(|s| s.to_string()).collect());
        let steps: Vec<StopStep> = pieces.iter().map(|p| matcher.push(p)).collect();
        let hit = steps.iter().find_map(|s| s.hit);
        let sent: Vec<String> = steps.into_iter().map(|s| s.text).collect();
        let whole = sent.concat() + &matcher.finish();
        (sent, whole, hit)
    }

    #[test]
    fn the_beginning_of_a_stop_string_never_leaks() {
        let (sent, whole, hit) = run(&["</end>"], &["text </", "en", "d> more"]);
        assert_eq!(sent, ["text ", "", ""]);
        assert_eq!((whole.as_str(), hit), ("text ", Some(0)));
        let (sent, whole, hit) = run(&["</end>"], &["text </", "en", "g> more"]);
        assert_eq!(sent, ["text ", "", "</eng> more"]);
        assert_eq!((whole.as_str(), hit), ("text </eng> more", None));
    }

    #[test]
    fn overlapping_and_multi_byte_stops() {
        assert_eq!(run(&["bcd", "c"], &["ab", "cd"]).1, "ab");
        assert_eq!(run(&["abc", "c"], &["xab", "cd"]), (vec!["x".into(), "".into()], "x".into(), Some(0)));
        assert_eq!(run(&["é🙂"], &["aé", "🙂b"]).0, ["a", ""]);
        assert_eq!(run(&["aab"], &["a", "a", "a", "b"]).0, ["", "", "a", ""]);
        assert_eq!(run(&["", "x"], &["a", "x"]).1, "a");
    }

    /// The definition, one character at a time.
    fn whole_text(text: &str, stops: &[String]) -> String {
        for (at, c) in text.char_indices() {
            let seen = &text[..at + c.len_utf8()];
            let longest = stops.iter().filter(|s| !s.is_empty() && seen.ends_with(s.as_str())).map(|s| s.len()).max();
            if let Some(longest) = longest {
                return seen[..seen.len() - longest].to_owned();
            }
        }
        text.to_owned()
    }

    proptest! {
        /// Sent pieces joined are the text that a caller without streaming gets, for any stops and any cuts.
        #[test]
        fn streamed_text_is_the_whole_text(
            pieces in proptest::collection::vec("[abé]{0,4}", 0..12),
            stops in proptest::collection::vec("[abé]{0,4}", 0..4),
        ) {
            let stop_refs: Vec<&str> = stops.iter().map(String::as_str).collect();
            let piece_refs: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(run(&stop_refs, &piece_refs).1, whole_text(&pieces.concat(), &stops));
        }
    }
}
