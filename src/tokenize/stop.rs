//! When to stop: the ids that end a turn.
//!
//! GLM ends a turn with any of three ids, and converters have lost two of them, after which a model runs on into a
//! turn it invents for the user. So the stop set is the union of all that is stated, with its sources, never one
//! source in place of another.

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

impl StopSource {
    /// The key, or what stands in for one.
    pub(super) fn key(&self) -> &'static str {
        match self {
            Self::Eos => "eos_token_id",
            Self::Eot => "eot_token_id",
            Self::Eom => "eom_token_id",
            Self::GenerationConfig => "eos_token_id of generation_config.json",
            Self::Literal => "the token that ends a text by its name",
        }
    }
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
