//! What a search tries, in words, from the lists of repairs themselves: so that nobody takes what was not tried for what
//! was ruled out.

use super::repair::Repair;
use super::search::{MOST, MOST_THOROUGH, SEARCHED};
use crate::model::Config;

/// What is tried of a model by default, and what besides only with `--thorough`.
pub(super) fn of(c: &Config) -> String {
    let (whole, layer) = (Repair::of_model(c, false), Repair::of_layer(0));
    let more: Vec<Repair> = Repair::of_model(c, true).into_iter().filter(|repair| !whole.contains(repair)).collect();
    let more = match more.len() {
        0 => String::new(),
        n => format!("{n} more of the model ({}), ", families(&more).join(", ")),
    };
    format!(
        "Tried by default: {} repairs of the model ({}), {} of each of {} layers (from {} of these kinds), up to {MOST} at \
         once, on {SEARCHED} sets of texts at most; only with --thorough: {more}up to {MOST_THOROUGH} at once, every set of \
         texts",
        whole.len(),
        families(&whole).join(", "),
        layer.len(),
        c.layers,
        families(&layer).len(),
    )
}

/// The families of a list, each once, in its order.
fn families(list: &[Repair]) -> Vec<&'static str> {
    let mut names = Vec::new();
    for repair in list {
        if !names.contains(&repair.family()) {
            names.push(repair.family());
        }
    }
    names
}
