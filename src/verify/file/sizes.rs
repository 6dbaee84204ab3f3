//! Whole tensors out of scale. Every value of such a one is finite and in proportion to its neighbours, so that only its
//! kin tell: the same parameter in other layers, and an expert's fellows.
//!
//! What is compared is the root mean square of rows, and of a matrix's rows the median, so that one damaged row does not
//! count as the whole. In the sound files that this was measured on (31, of a dozen trained models and two of random values)
//! kin are within a factor of 9 of each other; norms of first layers are known to be a few hundred times smaller than later
//! ones. A factor of 10^4 is no training. A bias may be next to nothing in most layers, so one must also be larger than any
//! score that it is added to. What is 10^6 times smaller than its kin may be a part that died, so that is a warning only.

use std::collections::BTreeMap;

use crate::checkpoint::View;
use crate::model::Kind;
use crate::quant::{QuantType, dequantise};
use crate::report::{Check, Verdict};

/// Times the median of its kin.
const LARGE: f32 = 1e4;
/// The median of its kin is so many times larger.
const SMALL: f32 = 1e6;
/// Scores of the router are between 0 and 1, and an indexer's key is normed: a bias of this size leaves nothing of either.
const ABSURD_BIAS: f32 = 1e3;
/// Fewer others have no median.
const LEAST_KIN: usize = 2;
/// Rows of each matrix that are looked at.
const SAMPLE: usize = 16;

/// A tensor that fills a parameter, and how large the values of each of its matrices are.
pub(super) struct Sizes {
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// A root mean square for each matrix.
    pub of: Vec<f32>,
}

/// How large the values of each matrix of a tensor are.
pub(super) fn of(ty: QuantType, view: &View<'_>) -> Vec<f32> {
    let columns = view.ne.first().map_or(0, |n| *n as usize);
    let row = ty.row_bytes(columns);
    if row == 0 {
        return Vec::new();
    }
    let stack = view.ne.get(2).map_or(1, |n| *n as usize).max(1);
    let rows = view.bytes.len() / row / stack;
    let mut values = vec![0.0; columns];
    let mut size = |r: usize| -> Option<f32> {
        dequantise(ty, view.bytes.get(r * row..(r + 1) * row)?, &mut values).ok()?;
        let sum: f64 = values.iter().map(|v| f64::from(*v).powi(2)).sum();
        Some((sum / columns as f64).sqrt() as f32)
    };
    let step = (rows / SAMPLE).max(1);
    let matrix = |m: usize| {
        let mut sizes: Vec<f32> = (0..rows).step_by(step).filter_map(|r| size(m * rows + r)).collect();
        sizes.sort_unstable_by(f32::total_cmp);
        sizes.get(sizes.len() / 2).copied().unwrap_or(0.0)
    };
    (0..stack).map(matrix).collect()
}

/// A check for each tensor that is out of scale, but for those of which something is known to be wrong.
pub(super) fn checks(all: &[Sizes], is_bad: impl Fn(&str) -> bool) -> Vec<Check> {
    let mut kin: BTreeMap<Kind, Vec<f32>> = BTreeMap::new();
    for tensor in all {
        kin.entry(tensor.kind).or_default().extend(tensor.of.iter().filter(|size| size.is_finite()));
    }
    kin.values_mut().for_each(|sizes| sizes.sort_unstable_by(f32::total_cmp));
    let check = |tensor: &Sizes| {
        let kin = kin.get(&tensor.kind).filter(|kin| kin.len() > LEAST_KIN)?;
        let finite = tensor.of.iter().enumerate().filter(|(_, size)| size.is_finite());
        let odd = finite.filter_map(|(m, size)| Some((m, *size, verdict(tensor.kind, *size, median(kin, *size))?)));
        let (m, size, verdict) = odd.max_by(|a, b| a.2.cmp(&b.2).then(a.1.total_cmp(&b.1)))?;
        let median = median(kin, size);
        let which = if tensor.of.len() > 1 { format!("matrix {m} of {}: ", tensor.of.len()) } else { String::new() };
        let (factor, than) = match size > median {
            true => (size / median, "large"),
            false => (median / size, "small"),
        };
        let detail = format!(
            "OUT_OF_SCALE: {which}values are {factor:.1e} times as {than} as the median of the {} others of {}: root mean \
             square {size:.3e}, theirs {median:.3e}",
            kin.len() - 1,
            tensor.kind.name()
        );
        let advice = if verdict == Verdict::Divergent { ". A factor was lost or put in: convert it again" } else { "" };
        Some(Check::new(&tensor.name, verdict, format!("{detail}{advice}")))
    };
    all.iter().filter(|tensor| !is_bad(&tensor.name)).filter_map(check).collect()
}

fn verdict(kind: Kind, size: f32, median: f32) -> Option<Verdict> {
    let is_bias = super::zeros::may_be_zero(kind);
    match median > 0.0 && size > 0.0 {
        true if size > LARGE * median && (!is_bias || size > ABSURD_BIAS) => Some(Verdict::Divergent),
        true if size * SMALL < median && !is_bias => Some(Verdict::Drift),
        _ => None,
    }
}

/// The median, the lower one of two, of all but one, which is among them.
fn median(sorted: &[f32], but: f32) -> f32 {
    let middle = (sorted.len() - 2) / 2;
    let at = sorted.partition_point(|size| *size < but);
    sorted[if middle < at { middle } else { middle + 1 }]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(kind: Kind, sizes: &[f32]) -> Vec<(String, Verdict)> {
        let tensor = |(i, size): (usize, &f32)| Sizes { name: i.to_string(), kind, of: vec![*size] };
        let all: Vec<Sizes> = sizes.iter().enumerate().map(tensor).collect();
        checks(&all, |_| false).into_iter().map(|c| (c.name, c.verdict)).collect()
    }

    #[test]
    fn what_is_far_from_its_kin_is_named() {
        assert_eq!(found(Kind::QB, &[0.02, 0.03, 600.0, 0.02]), [("2".into(), Verdict::Divergent)]);
        assert_eq!(found(Kind::QB, &[0.02, 0.03, 1e-9, 0.02]), [("2".into(), Verdict::Drift)]);
        assert_eq!(found(Kind::RouterBias, &[0.1, 3e8, 0.1]), [("1".into(), Verdict::Divergent)]);
        // Two of two kin cannot tell which is wrong.
        assert!(found(Kind::QB, &[0.02, 600.0]).is_empty());
        for sound in [&[0.02, 0.03, 100.0, 0.02][..], &[0.02, 0.03, 1e-7, 0.02], &[0.0, 0.0, 600.0, 0.0]] {
            assert!(found(Kind::QB, sound).is_empty(), "{sound:?}");
        }
        assert!(found(Kind::RouterBias, &[1e-6, 0.5, 1e-6]).is_empty());
    }

    #[test]
    fn one_row_is_not_the_whole() {
        let mut bytes: Vec<u8> = (0..64 * 32).flat_map(|_| 0.5f32.to_le_bytes()).collect();
        bytes[..128].chunks_mut(4).for_each(|v| v.copy_from_slice(&1e9f32.to_le_bytes()));
        let view = View { ty: QuantType::F32.info(), ne: vec![32, 64], bytes: bytes.into() };
        assert_eq!(of(QuantType::F32, &view), [0.5]);
    }
}
