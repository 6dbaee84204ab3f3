//! ROUNDED: a parameter, or an operation, in fewer bits than the recipe of the run has: a correction bias in bf16, a router
//! in bf16.

use lockstep_reference::{Arith, Half, RefRecipe};

use crate::diagnose::hypothesis::{Alter, Hypothesis, OpContext};
use crate::verify::patched_weights::Value;

const HALVES: [(Half, &str); 2] = [(Half::Bf16, "bf16"), (Half::F16, "f16")];

/// Each parameter that rounding changes, and the operation itself if its results are of a half type.
pub(super) fn hypotheses<'a>(op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
    let mut all = Vec::new();
    for (half, name) in HALVES {
        for at in op.params() {
            let alter = op.altering(at, op.ranks.clone(), move |_, base| {
                let changes = |v: &f32| half.round(f64::from(*v)) as f32 != *v;
                let any = match base {
                    Value::Vector(v) => v.iter().any(changes),
                    Value::Matrix(m) => m.iter().any(changes),
                    Value::Heads(h) => h.iter().any(changes),
                };
                any.then(|| base.map(|v| half.round(f64::from(v)) as f32))
            });
            let statement = format!("the parameter is rounded to {name}");
            let overturn = "keep it as the file has it; if the operation still diverges, rounding was not at fault";
            all.push(Hypothesis {
                site: op.tensor(at.0, at.1),
                ..op.hypothesis("ROUNDED", statement, overturn, alter)
            });
        }
    }
    // A wider floor would fit what it is not: only results that have no more bits.
    if let Some(half) = op.stored_in().filter(|half| !op.stores(*half)) {
        let recipe = if half == Half::Bf16 { RefRecipe::TorchAutocast } else { RefRecipe::TorchHalf(half) };
        let statement =
            format!("the operation is computed in {}", HALVES.iter().find(|h| h.0 == half).map_or("", |h| h.1));
        let overturn = "compute it in f32; if it still diverges, the type was not at fault";
        let alter = Alter::Orders(Arith::orders(recipe, op.trace.tp));
        all.push(op.hypothesis("ROUNDED", statement, overturn, alter));
    }
    all
}
