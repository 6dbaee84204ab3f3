//! Weights that a Hugging Face folder keeps packed: values of a byte or less, with factors and other small tensors beside
//! them under names made from theirs. This build reads none of these forms, and so says nothing against them; but what
//! belongs to no packed tensor has no home, and of factors that some tensors have none may be lost.

use std::collections::HashMap;

use super::TensorSource;
use super::coverage::ShapeFault;
use super::names::{Binding, FP8_FACTORS, Naming};
use crate::model::Param;
use crate::quant::TypeInfo;

/// Names of packed weights where they are not `weight`: compressed-tensors', and those of GPTQ and AWQ.
const OTHER_NAMES: [&str; 2] = ["weight_packed", "qweight"];
/// What the names of tensors beside a packed one hold: factors, zero points, the order of columns, the shape unpacked.
const BESIDE: [&str; 4] = ["scale", "zero", "g_idx", "weight_shape"];
/// Types of which one may hold several values.
pub(super) const INTEGERS: [&str; 9] = ["I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64", "F4"];
/// What a tensor of integers holds.
pub(super) const SEVERAL: &str = "several values packed into one";

/// The tensors of types that hold packed weights, by name, each with its type and whether factors stand beside it.
pub(super) struct Packed<'a>(HashMap<&'a str, (&'static str, bool)>);

impl<'a> Packed<'a> {
    pub(super) fn of(source: &dyn TensorSource, names: &[&'a str]) -> Self {
        if source.naming() != Naming::Hf {
            return Packed(HashMap::new());
        }
        let ty = |name: &str| source.tensor(name).filter(|v| v.ty.quant.is_none()).map(|v| v.ty.name);
        let has = |name: &str| FP8_FACTORS.iter().any(|end| source.tensor(&format!("{name}{end}")).is_some());
        Packed(names.iter().filter_map(|n| Some((*n, (ty(n)?, has(n))))).collect())
    }

    /// What a tensor is that stands beside a packed one.
    pub(super) fn form(&self, name: &str) -> Option<&'static str> {
        let (module, what) = name.rsplit_once('.')?;
        let of = |end: &str| self.0.get(format!("{module}.{end}").as_str());
        let beside = BESIDE.iter().any(|part| what.contains(part)) && what != "weight";
        let base = of("weight").or_else(|| OTHER_NAMES.iter().find_map(|end| of(end))).filter(|_| beside);
        // Tables of bitsandbytes stand behind the whole name.
        let base = base.or_else(|| {
            let behind = name.match_indices(".weight.").map(|(at, _)| at + ".weight".len());
            behind.into_iter().find_map(|end| self.0.get(&name[..end]))
        });
        base.map(
            |(ty, _)| if ty.starts_with("F8_") { "factors of an FP8 tensor" } else { "factors of a packed tensor" },
        )
    }

    /// The tensors that hold a parameter's values, where some stand under other names than the usual ones.
    pub(super) fn other(&self, candidates: &[Binding], present: impl Fn(&str) -> bool) -> Vec<String> {
        let spelled = |name: &String| -> Option<String> {
            let module = name.strip_suffix(".weight")?;
            let other = OTHER_NAMES.map(|end| format!("{module}.{end}"));
            other.into_iter().find(|name| self.0.contains_key(name.as_str()))
        };
        let found = |b: &Binding| -> Option<Vec<String>> {
            let one = |name: &String| if present(name) { Some(name.clone()) } else { spelled(name) };
            b.names().iter().map(one).collect()
        };
        candidates.iter().find_map(found).unwrap_or_default()
    }

    /// What a tensor holds whose shape does not fit because each of its elements is several values.
    pub(super) fn several(&self, ty: &TypeInfo, fault: &ShapeFault) -> Option<&'static str> {
        let count = |axes: &[u64]| axes.iter().product::<u64>();
        let (found, expected) = (count(&fault.found), count(&fault.expected));
        let packed = self.0.get(fault.tensor.as_str()).is_some_and(|(_, has)| *has)
            || self.0.keys().any(|name| name.starts_with(&format!("{}.", fault.tensor)));
        (packed && INTEGERS.contains(&ty.name) && [2, 4, 8, 16].iter().any(|n| found * n == expected))
            .then_some(SEVERAL)
    }

    /// Where some of a type have factors all must: the others' values are known up to a factor only.
    pub(super) fn lost(&self, bound: &HashMap<Param, Binding>) -> Vec<(Param, String)> {
        let all = bound.iter().flat_map(|(param, binding)| binding.names().iter().map(move |name| (*param, name)));
        let with: Vec<&str> = self.0.values().filter(|(_, has)| *has).map(|(ty, _)| *ty).collect();
        let without = |name: &String| self.0.get(name.as_str()).filter(|(ty, has)| !has && with.contains(ty));
        // A name that exists for this type somewhere.
        let end = |ty: &str| if ty.starts_with("F8_") { FP8_FACTORS[0] } else { FP8_FACTORS[1] };
        let mut lost: Vec<(Param, String)> =
            all.filter_map(|(p, n)| without(n).map(|(ty, _)| (p, format!("{n}{}", end(ty))))).collect();
        lost.sort();
        lost
    }
}
