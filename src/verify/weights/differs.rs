//! What a parameter that differs from a baseline's holds instead: zeros, the baseline plus a constant, times a factor,
//! another parameter or expert, the axes exchanged, rows in another order. A name is given only where the change brings
//! the part that decided within its limit, so that none of them fits by fitting nothing.

use lockstep_reference::RefError;
use lockstep_reference::weights::shape;
use ndarray::{Array2, ArrayView1};

use super::distance::{Found, Part, matrix, relative, stack};
use super::expected::Oracle;
use crate::model::{Kind, Param};
use crate::verify::param_map::reference_of;

/// A parameter of a model, and what it is compared with.
pub(super) struct Differs<'a> {
    /// The model.
    pub target: &'a Oracle<'a>,
    /// What it should be.
    pub baseline: &'a Oracle<'a>,
    /// Every parameter of it.
    pub all: &'a [Param],
    /// The parameter.
    pub param: Param,
    /// Where it differs.
    pub found: Found,
}

impl Differs<'_> {
    /// The kind of difference, and the evidence.
    pub fn explain(&self) -> Result<String, RefError> {
        let (part, limit) = (self.found.part, self.found.limit);
        let (t_all, b_all) = (self.theirs(self.target, self.param)?, self.theirs(self.baseline, self.param)?);
        let (t, b) = (part.of(&t_all), part.of(&b_all));
        if t.iter().all(|v| *v == 0.0) {
            return Ok("ALL_ZERO: all zero, where the baseline has values".into());
        }
        if t.iter().any(|v| !v.is_finite()) {
            return Ok("NOT_FINITE: values that are no numbers, where the baseline has numbers".into());
        }
        let pairs = || t.iter().zip(&b).map(|(t, b)| (f64::from(*t), f64::from(*b)));
        let offset = pairs().map(|(t, b)| t - b).sum::<f64>() / t.len() as f64;
        if is_changed(&t, &b, limit, |b| b + offset) {
            let kind = if self.param.kind.is_plain() { "NORM_OFFSET" } else { "OFFSET" };
            return Ok(format!("{kind}: the baseline plus a constant {offset:+.3}"));
        }
        let size: f64 = pairs().map(|(_, b)| b * b).sum();
        let factor = pairs().map(|(t, b)| t * b).sum::<f64>() / size.max(f64::MIN_POSITIVE);
        if factor != 0.0 && is_changed(&t, &b, limit * factor.abs().min(1.0), |b| b * factor) {
            return Ok(format!("SCALE: the baseline times {factor:.4}"));
        }
        if matches!(part, Part::Whole(_) | Part::Matrix(_)) {
            if let Some(held) = self.held(&t)? {
                return Ok(format!("WRONG_TENSOR: {held}"));
            }
            if t.is_square() && relative(&t, &b.t().to_owned()) <= limit {
                return Ok("TRANSPOSED: the baseline with its axes exchanged".into());
            }
            if let Some((row, from)) = moved_row(&t, &b, limit) {
                return Ok(format!(
                    "PERMUTED_ROWS: the baseline's rows in another order, row {from} stands at row {row}"
                ));
            }
        }
        if let Part::Row(_, row) = part {
            let same = |from: &usize| relative(&t, &b_all.slice(ndarray::s![*from..*from + 1, ..]).to_owned()) <= limit;
            if let Some(from) = (0..b_all.nrows()).filter(|from| *from != row).find(same) {
                return Ok(format!("PERMUTED_ROWS: the baseline's row {from} stands at row {row}"));
            }
        }
        Ok("DIFFERS: beyond what the type costs, and none of zeros, constant offset, factor, other tensor, order of rows"
            .into())
    }

    /// The part's matrix of a parameter.
    fn theirs(&self, model: &Oracle<'_>, param: Param) -> Result<Array2<f32>, RefError> {
        matrix(model, param, self.found.part.matrix())
    }

    /// What of the baseline `t` holds in its place: another matrix of its stack, another parameter, or either of another
    /// layer. One row tells nearly all of them apart, so only what it leaves is expanded whole.
    fn held(&self, t: &Array2<f32>) -> Result<Option<String>, RefError> {
        let (own, limit) = (self.found.part.matrix(), self.found.limit);
        let size = |row: &ArrayView1<'_, f32>| row.iter().map(|v| v * v).sum::<f32>();
        let rows = t.rows().into_iter().enumerate();
        let Some((row, values)) = rows.max_by(|a, b| size(&a.1).total_cmp(&size(&b.1))) else { return Ok(None) };
        for other in self.lookalikes() {
            // The MTP block may be missing in the baseline.
            let Ok(theirs) = self.baseline.row_of_each(other, row) else { continue };
            // The matrix of the same number is the likeliest.
            let numbers = (0..theirs.len()).filter(|m| *m == own).chain((0..theirs.len()).filter(|m| *m != own));
            for number in numbers.filter(|m| (other, *m) != (self.param, own)) {
                if near(values, ArrayView1::from(&theirs[number]), limit)
                    && relative(t, &matrix(self.baseline, other, number)?) <= limit
                {
                    return Ok(Some(self.holds(other, number)));
                }
            }
        }
        Ok(None)
    }

    /// That the part holds matrix `number` of the baseline's parameter `other`.
    fn holds(&self, other: Param, number: usize) -> String {
        let own = self.found.part.matrix();
        let unit = if matches!(other.kind, Kind::KB | Kind::VB) { "head" } else { "expert" };
        let whole =
            stack(self.baseline, other.kind) == 1 || (number == own && matches!(self.found.part, Part::Whole(_)));
        let layer = other.layer.map_or(String::new(), |layer| format!(" of layer {layer}"));
        match (whole, self.found.part) {
            (true, _) => format!("holds the baseline's {other}"),
            (false, Part::Whole(_)) => format!("{unit} {own} holds the baseline's {unit} {number}{layer} ({other})"),
            (false, _) => format!("holds the baseline's {unit} {number}{layer} ({other})"),
        }
    }

    /// Parameters that a converter may have taken for this one: itself, of which another matrix may stand here; those of the
    /// same shape in its layer; the same of other layers, the nearest first.
    fn lookalikes(&self) -> Vec<Param> {
        let of = |kind| shape(&self.baseline.config, reference_of(kind));
        let (own, others): (Vec<Param>, Vec<Param>) = self.all.iter().partition(|p| p.layer == self.param.layer);
        let alike = own.into_iter().filter(|p| p.kind != self.param.kind && of(p.kind) == of(self.param.kind));
        let mut same: Vec<Param> = others.into_iter().filter(|p| p.kind == self.param.kind).collect();
        same.sort_by_key(|p| p.layer.zip(self.param.layer).map(|(a, b)| a.abs_diff(b)));
        [self.param].into_iter().chain(alike).chain(same).collect()
    }
}

/// True where the target is what a change makes of the baseline. What f32 rounds into every value leaves up to half an ulp.
fn is_changed(t: &Array2<f32>, b: &Array2<f32>, limit: f64, change: impl Fn(f64) -> f64) -> bool {
    t.len() >= 8 && relative(t, &b.mapv(|b| change(f64::from(b)) as f32)) <= limit + 1e-6
}

/// True if a row may be another one. A single row scatters more than the whole of which `limit` is.
fn near(row: ArrayView1<'_, f32>, other: ArrayView1<'_, f32>, limit: f64) -> bool {
    let as_matrix = |row: ArrayView1<'_, f32>| row.insert_axis(ndarray::Axis(0)).to_owned();
    relative(&as_matrix(row), &as_matrix(other)) <= 2.0 * limit
}

/// Rows looked for; if every one of them is somewhere else in the baseline, the rows were permuted.
const SAMPLED_ROWS: usize = 8;

/// The first sampled row that stands elsewhere in the baseline, and where, provided that all sampled rows are found.
fn moved_row(t: &Array2<f32>, b: &Array2<f32>, limit: f64) -> Option<(usize, usize)> {
    let rows = t.nrows();
    if rows < 2 {
        return None;
    }
    let mut moved = None;
    for i in 0..SAMPLED_ROWS.min(rows) {
        let row = i * rows / SAMPLED_ROWS.min(rows);
        if near(t.row(row), b.row(row), limit) {
            continue;
        }
        let from = (0..rows).find(|r| near(t.row(row), b.row(*r), limit))?;
        moved = moved.or(Some((row, from)));
    }
    moved
}
