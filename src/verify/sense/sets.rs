//! The texts in a file's own ids, as sets; and the tokenizer that a file would have if its merges were in order.

use std::collections::HashMap;

use super::scorer::Text;
use super::texts::KINDS;
use crate::model::Config;
use crate::tokenize::{ChatMessage, TokenizeError, Tokenizer, TokenizerSpec};

/// Texts of one kind in one form.
#[derive(Clone, Debug)]
pub(super) struct Set {
    /// What they are.
    pub name: String,
    /// The same, whatever their form.
    pub kind: &'static str,
    /// Whether each is the answer to a chat turn.
    pub asked: bool,
    /// Their ids, in order.
    pub texts: Vec<Text>,
}

/// Every set that the file's vocabulary, template and context have room for. Errors of the template leave out those that
/// are asked.
pub(super) fn sets(tokenizer: &Tokenizer, c: &Config) -> Vec<Set> {
    let fits = |text: &Text| {
        let known = text.ids.iter().all(|id| (*id as usize) < c.vocab);
        known && text.ids.len() <= c.context && (1..text.ids.len()).contains(&text.from)
    };
    let mut all = Vec::new();
    for kind in &KINDS {
        for asked in [true, false] {
            let one = |known: &super::texts::Known| -> Result<Text, TokenizeError> {
                let (mut ids, answer) = match asked {
                    true => {
                        let turn = [ChatMessage::new("user", known.name)];
                        let prompt = tokenizer.chat_ids(&turn, true, &serde_json::Map::new())?;
                        (prompt, tokenizer.encode(known.text, false)?)
                    }
                    false => (tokenizer.prompt_ids(known.name)?, tokenizer.encode(&format!(" {}", known.text), false)?),
                };
                let from = ids.len();
                ids.extend(answer);
                Ok(Text { ids, from })
            };
            let texts: Vec<Text> = kind.texts.iter().filter_map(|known| one(known).ok().filter(fits)).collect();
            if texts.len() == kind.texts.len() {
                let form = if asked { "asked" } else { "in a line" };
                all.push(Set { name: format!("{}, {form}", kind.name), kind: kind.name, asked, texts });
            }
        }
    }
    all
}

/// The same with merges in the order of the ids of the tokens that they make, if they are in another one.
pub(super) fn with_merges_by_id(spec: &TokenizerSpec) -> Option<Tokenizer> {
    let merges = merges_by_id(spec);
    (merges != spec.merges).then(|| Tokenizer::new(&TokenizerSpec { merges, ..spec.clone() }).ok()).flatten()
}

/// A merge for every ordinary token that is made of two others with lower ids, as byte pairs are merged in this order.
fn merges_by_id(spec: &TokenizerSpec) -> Vec<String> {
    let ordinary = |id: &usize| matches!(spec.types.get(*id), Some(0 | 1));
    let tokens = spec.tokens.iter().enumerate().filter(|(id, _)| ordinary(id));
    let ranks: HashMap<&str, usize> = tokens.map(|(id, token)| (token.as_str(), id)).collect();
    let mut merges = Vec::new();
    for (id, token) in spec.tokens.iter().enumerate().filter(|(id, _)| ordinary(id)) {
        // Where the parts begin and end.
        let mut cuts: Vec<usize> = token.char_indices().map(|(at, _)| at).chain([token.len()]).collect();
        while cuts.len() > 3 {
            let rank = |i: &usize| ranks.get(&token[cuts[*i]..cuts[*i + 2]]).copied().filter(|rank| *rank < id);
            let best = (0..cuts.len() - 2).filter_map(|i| Some((rank(&i)?, i))).min();
            let Some((_, first)) = best else { break };
            cuts.remove(first + 1);
        }
        if let [start, cut, end] = cuts[..] {
            merges.push(format!("{} {}", &token[start..cut], &token[cut..end]));
        }
    }
    merges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_follow_from_ids() {
        let tokens: Vec<String> = ["a", "b", "c", "ab", "abc", "<x>", "bc", "abcab"].map(String::from).into();
        let types = vec![1, 1, 1, 1, 1, 3, 1, 1];
        let spec = TokenizerSpec { tokens, types, ..TokenizerSpec::default() };
        assert_eq!(merges_by_id(&spec), ["a b", "ab c", "b c", "abc ab"]);
    }
}
