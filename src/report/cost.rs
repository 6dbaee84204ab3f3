//! What a stage took, where that depends on what it finds.

use serde::Serialize;

use super::json::Number;

/// Work of a stage that searches.
#[derive(Clone, Debug, Default)]
pub struct Cost {
    /// Texts that were run, each as often as it was.
    pub texts: usize,
    /// Their tokens.
    pub tokens: usize,
    /// The same, times the layers that each went through.
    pub token_layers: u64,
    /// Repairs that were tried.
    pub repairs: usize,
    /// Wall time.
    pub seconds: f64,
    /// What is tried by default, and what besides only if more is asked for.
    pub tries: String,
}

impl Cost {
    /// In one line.
    pub fn line(&self) -> String {
        let Cost { texts, tokens, token_layers, repairs, tries, .. } = self;
        let each = if *repairs > 0 { self.seconds / *repairs as f64 } else { 0.0 };
        let repairs = match repairs {
            0 => "no repair tried, since none could gain enough".into(),
            n => format!("{n} repairs tried, {each:.2} s each. {tries}"),
        };
        format!("{texts} texts, {tokens} tokens, {token_layers} tokens x layers; {repairs}")
    }
}

impl Serialize for Cost {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Cost { texts, tokens, token_layers, repairs, seconds, tries } = self;
        let seconds = Number(*seconds);
        serde_json::json!({
            "texts": texts, "tokens": tokens, "token_layers": token_layers, "repairs": repairs, "seconds": seconds,
            "tries": tries,
        })
        .serialize(serializer)
    }
}
