//! Text to ids and back, from what the model file states and nothing else.
//!
//! A model whose weights are perfect still answers badly when its prompt is cut into the wrong ids, so the tokenizer
//! is a thing to check, not a given: a wrong pre-tokenizer, control tokens cut into pieces, a doubled BOS and a lost
//! stop id all look like faults of the engine. This module builds a byte-level BPE tokenizer from a plain
//! [`TokenizerSpec`] (GGUF metadata or a Hugging Face folder), refuses what it does not know instead of guessing,
//! renders chat templates as transformers does, streams whole characters only, and lists facts ([`Check`]) for
//! the tokenizer stage of `verify`. It knows neither containers nor wire formats.

mod alphabet;
mod bpe;
mod checks;
mod error;
mod hf;
mod lacks;
mod pretok;
mod probes;
mod pyvalue;
mod spec;
mod stop;
mod stream;
mod template;

#[cfg(all(test, feature = "serve"))]
pub(crate) use alphabet::char_of;
pub use bpe::Tokenizer;
pub use checks::{Check, Finding, PROBE};
pub use error::TokenizeError;
pub use hf::JsonTokenizer;
pub use pretok::KNOWN_PRE_TOKENIZERS;
pub use probes::tool_turns;
pub use spec::{OtherTemplate, TokenizerSpec};
pub use stop::{StopId, StopIds, StopSource};
pub use stream::StreamDecoder;
pub use template::ChatMessage;
