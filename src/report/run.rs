//! The head of every record about a model that ran.

use serde::Serialize;

/// What ran, and on what.
#[derive(Clone, Debug, Serialize)]
pub struct Run {
    /// Path of the model as given, or that it is built in.
    pub model: String,
    /// Tensor-parallel degree.
    pub tp: usize,
    /// What the ranks ran on, as typed.
    pub device: String,
    /// How activations met weights.
    pub recipe: &'static str,
    /// What queries attended to.
    pub attention: &'static str,
    /// Where the token ids come from, in words.
    pub prompt: String,
}

impl Run {
    /// In one line.
    pub fn line(&self) -> String {
        let Run { model, tp, device, recipe, attention, prompt } = self;
        format!("{model}: tp {tp}, {device}, recipe {recipe}, attention {attention}, {prompt}")
    }
}
