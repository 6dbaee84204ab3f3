//! Bridging: operations whose inputs were not captured are recomputed from what was, as far back as it takes, down to the
//! token ids. The floor is that of all operations on the way, since every one of them runs in the same arithmetic.
//!
//! Choices on the way are the trouble: a near tie that falls the other way changes a row by as much as a fault does. So
//! runs in a recipe go on with the choices of the exact one, and whoever judges is told these, to leave out the rows that
//! hang on a choice inside its band.

use std::cell::RefCell;
use std::collections::BTreeMap;

use ndarray::Array2;

/// A point and rows of it.
type Rows = (String, Vec<usize>);

/// What one run computed in place of captured values.
#[derive(Debug, Default)]
pub struct Bridge(RefCell<BTreeMap<Rows, Array2<f64>>>);

impl Bridge {
    /// One for another arithmetic, which goes on with the choices made here.
    pub fn choosing_alike(&self) -> Bridge {
        let all = self.0.borrow();
        let choices =
            all.iter().filter(|((point, _), _)| is_choice(point)).map(|(at, values)| (at.clone(), values.clone()));
        Bridge(RefCell::new(choices.collect()))
    }

    /// The choices that were made here: point and rows.
    pub fn choices(&self) -> Vec<Rows> {
        self.0.borrow().keys().filter(|(point, _)| is_choice(point)).cloned().collect()
    }

    pub(crate) fn get(&self, point: &str, rows: &[usize]) -> Option<Array2<f64>> {
        self.0.borrow().get(&(point.to_string(), rows.to_vec())).cloned()
    }

    pub(crate) fn keep(&self, point: &str, rows: &[usize], values: &Array2<f64>) {
        self.0.borrow_mut().insert((point.to_string(), rows.to_vec()), values.clone());
    }
}

fn is_choice(point: &str) -> bool {
    point.ends_with("attn.index_topk") || point.ends_with("ffn.expert_ids")
}
