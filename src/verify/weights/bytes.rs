//! A parameter's bytes beside a baseline's of the same type. Who quantises a tensor again changes blocks nearly everywhere.
//! Where most are the baseline's, byte for byte, nobody did: what differs is damage, however little of it a type may cost.

use lockstep_reference::weights::shape;
use lockstep_reference::{RawTensor, RefError};

use super::distance::LEAST_BLOCK;
use super::expected::{Oracle, is_expert_stack};
use crate::model::{Kind, Param};
use crate::quant::QuantType;
use crate::verify::param_map::reference_of;

/// The share of its blocks that may differ in what nobody quantised again.
const MOST: f64 = 0.5;

/// A parameter's blocks.
pub(super) struct Blocks {
    ty: QuantType,
    all: usize,
    differ: usize,
    /// Rows in which any does.
    rows: usize,
    /// The first and the last of these, in words.
    ends: Option<(String, String)>,
}

impl Blocks {
    /// Of two sides that hold a parameter in the same type and as many bytes.
    ///
    /// # Errors
    /// Tensors that are not as the configuration has them.
    pub fn of(
        target: &Oracle<'_>,
        baseline: &Oracle<'_>,
        param: Param,
        ty: QuantType,
    ) -> Result<Option<Self>, RefError> {
        let (ours, theirs) = (target.kept(param)?, baseline.kept(param)?);
        let alike = |((_, a), (_, b)): (&(_, RawTensor<'_>), &(_, RawTensor<'_>))| {
            a.type_id == b.type_id && a.ne == b.ne && a.bytes.len() == b.bytes.len()
        };
        if ours.len() != theirs.len() || !ours.iter().zip(&theirs).all(alike) {
            return Ok(None);
        }
        let units = Units::of(target, param, &ours);
        let size = ty.row_bytes(ty.block().max(LEAST_BLOCK));
        let mut found = Blocks { ty, all: 0, differ: 0, rows: 0, ends: None };
        for ((name, a), (_, b)) in ours.iter().zip(&theirs) {
            let width = ty.row_bytes(a.ne.first().copied().unwrap_or(1)).max(1);
            let rows = a.bytes.chunks(width).zip(b.bytes.chunks(width)).enumerate();
            for (row, (a, b)) in rows.filter(|(row, _)| units.has(*row)) {
                found.all += a.len().div_ceil(size);
                if a == b {
                    continue;
                }
                found.differ += a.chunks(size).zip(b.chunks(size)).filter(|(a, b)| a != b).count();
                found.rows += 1;
                let place = format!("row {row} of {name}{}", units.name(row));
                match &mut found.ends {
                    Some((_, last)) => *last = place,
                    None => found.ends = Some((place.clone(), place)),
                }
            }
        }
        Ok(Some(found))
    }

    /// True where every byte is the baseline's.
    pub fn are_equal(&self) -> bool {
        self.differ == 0
    }

    /// True where nobody quantised the values again, so that nothing may differ.
    pub fn are_kept(&self) -> bool {
        self.differ as f64 <= MOST * self.all as f64
    }

    /// What is wrong with them, if anything is.
    pub fn damage(&self) -> Option<String> {
        let Blocks { ty, all, differ, rows, ends } = self;
        let (first, last) = ends.as_ref().filter(|_| self.are_kept())?;
        let place = if first == last { format!("in {first}") } else { format!("in {rows} rows, {first} to {last}") };
        Some(format!(
            "BYTES: {differ} of {all} {ty} blocks are not the baseline's, {place}; all others are, byte for byte"
        ))
    }
}

/// What the rows of a tensor belong to: heads, experts, or nothing smaller than the parameter.
struct Units {
    name: &'static str,
    /// Rows of each; 0 where there are none.
    rows: usize,
    /// Rows of each that are the parameter's.
    own: std::ops::Range<usize>,
}

impl Units {
    fn of(model: &Oracle<'_>, param: Param, tensors: &[(String, RawTensor<'_>)]) -> Self {
        let (c, whole) = (&model.config, |name, rows| Units { name, rows, own: 0..rows });
        let in_one = tensors.iter().all(|(_, t)| t.ne.len() < 3);
        match param.kind {
            Kind::KB if in_one => Units { own: 0..c.nope, ..whole("head", c.nope + c.value) },
            Kind::VB if in_one => Units { own: c.nope..c.nope + c.value, ..whole("head", c.nope + c.value) },
            Kind::QB => whole("head", c.nope + c.rope),
            Kind::IndexQB => whole("indexer head", c.index_dim),
            kind => {
                let name = reference_of(kind);
                let stack = is_expert_stack(name) && tensors.len() == 1;
                match (kind, &shape(c, name)[..]) {
                    (Kind::KB | Kind::VB, [_, rows, _]) => whole("head", *rows),
                    (_, [rows, _]) if stack => whole("expert", *rows),
                    _ => whole("", 0),
                }
            }
        }
    }

    fn has(&self, row: usize) -> bool {
        self.rows == 0 || self.own.contains(&(row % self.rows))
    }

    fn name(&self, row: usize) -> String {
        match self.rows {
            0 => String::new(),
            rows => format!(" ({} {})", self.name, row / rows),
        }
    }
}
