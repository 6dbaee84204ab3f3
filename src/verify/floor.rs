//! The noise floor: what a correct run of the recipe may differ from the truth, measured on the very same inputs.
//!
//! Per operation, r is the reference in f64 and b_1..b_k are runs of the target's recipe in legitimate orders. sigma is
//! one number per token row: the largest |b - r| over the row and all b, at least 2 ulp of the row's largest |r|. For a
//! slice S of values, phi(S) = sqrt(sum of sigma_i^2) and rho(S) = ||t - r||_S / phi(S). A slice of m values diverges
//! when rho exceeds 1.5 (1 + 4 / sqrt(2 m)): 1.5 floors, and four standard deviations of a chi distribution for slices
//! that are small.
//!
//! sigma is a row's largest, so a norm over rows drowns what is wrong in a few columns: one logit of 154,880, one channel.
//! Columns are therefore judged by a floor of their own: s of a value is the root mean square of b - r over all b, at
//! least that of its row (which says what is ordinary) and 2 ulp. Rounding may shift a whole row together, so that a
//! column's values are worth no more than its rows: of m rows, m decides the limit, and fewer than eight never decide.

use ndarray::{Array2, ArrayView1, Axis};

/// Slices smaller than this are shown and never decide.
pub const LEAST_VALUES: usize = 32;

/// Columns of fewer rows are not judged alone.
pub const LEAST_ROWS: usize = 8;

/// The largest rho that a slice of `m` values may have.
pub fn limit(m: usize) -> f64 {
    1.5 * (1.0 + 4.0 / (2.0 * m.max(1) as f64).sqrt())
}

/// One unit in the last place of an f32 of this size.
pub fn ulp_f32(x: f64) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return f64::from(f32::from_bits(1));
    }
    let exponent = x.abs().log2().floor().clamp(-126.0, 127.0);
    (exponent - 23.0).exp2()
}

/// sigma of every row: its reference and the same row of every recipe run. Places where the reference is not finite do
/// not count.
pub fn sigmas<'a>(exact: &Array2<f64>, runs: impl Iterator<Item = &'a Array2<f64>> + Clone) -> Vec<f64> {
    let sigma = |(i, row): (usize, ArrayView1<'_, f64>)| {
        let finite = || row.iter().enumerate().filter(|(_, r)| r.is_finite());
        let largest = finite().map(|(_, r)| r.abs()).fold(0.0, f64::max);
        let spread = runs.clone().flat_map(|run| finite().map(move |(j, r)| (run[[i, j]] - r).abs()));
        spread.filter(|d| d.is_finite()).fold(2.0 * ulp_f32(largest), f64::max)
    };
    exact.rows().into_iter().enumerate().map(sigma).collect()
}

/// The floor of every value by itself: see the module.
fn spreads<'a>(exact: &Array2<f64>, runs: impl Iterator<Item = &'a Array2<f64>> + Clone) -> Array2<f64> {
    let count = runs.clone().count().max(1);
    let mut squares = Array2::zeros(exact.dim());
    runs.for_each(|run| add_squares(&mut squares, exact, run, count));
    spread(squares, exact)
}

/// Adds a run's share, as one of `count`, to the mean squares of b - r.
pub fn add_squares(squares: &mut Array2<f64>, exact: &Array2<f64>, run: &Array2<f64>, count: usize) {
    let errors = squares.iter_mut().zip(run.iter().zip(exact)).filter(|(_, (b, r))| b.is_finite() && r.is_finite());
    errors.for_each(|(sum, (b, r))| *sum += (b - r).powi(2) / count as f64);
}

/// s of every value from the mean squares of b - r.
pub fn spread(mut spread: Array2<f64>, exact: &Array2<f64>) -> Array2<f64> {
    for (mut row, exact) in spread.rows_mut().into_iter().zip(exact.rows()) {
        let largest = exact.iter().filter(|r| r.is_finite()).fold(0.0, |most: f64, r| most.max(r.abs()));
        let least = row.mean().unwrap_or(0.0).max((2.0 * ulp_f32(largest)).powi(2));
        row.mapv_inplace(|s| s.max(least).sqrt());
    }
    spread
}

/// Energy of every block of adjacent columns that has enough values to decide, by the floor `spread` of its values, with
/// its first and last column. `found` is the target's rows, `expected` what a value should be. None where the rows are too
/// few to judge columns by.
pub fn columns<'a, T: Copy + Into<f64> + 'a, R: IntoIterator<Item = &'a T>>(
    found: impl ExactSizeIterator<Item = R>,
    expected: impl Fn(usize, usize) -> f64,
    spread: &Array2<f64>,
) -> Vec<(usize, usize, Energy)> {
    let (rows, width) = (found.len(), spread.ncols());
    if rows < LEAST_ROWS {
        return Vec::new();
    }
    let block = LEAST_VALUES.div_ceil(rows);
    let mut blocks = vec![Energy::default(); width.div_ceil(block)];
    for ((i, row), floors) in found.enumerate().zip(spread.rows()) {
        for ((j, value), s) in row.into_iter().enumerate().zip(floors) {
            blocks[j / block].add((*value).into(), expected(i, j), *s);
        }
    }
    let ends = |(i, e): (usize, Energy)| (i * block, ((i + 1) * block).min(width) - 1, Energy { m: rows, ..e });
    blocks.into_iter().enumerate().map(ends).collect()
}

/// What values should be, `[rows][values]`, and how far a legitimate run may be from them.
#[derive(Clone, Debug)]
pub struct Floored {
    /// The f64 values, or another run's.
    pub exact: Array2<f64>,
    /// sigma per row.
    pub sigma: Vec<f64>,
    /// s per value, where runs were made for it.
    pub spread: Option<Array2<f64>>,
}

impl Floored {
    /// The truth, and the floor that runs make.
    pub fn new<'a>(exact: Array2<f64>, runs: impl Iterator<Item = &'a Array2<f64>> + Clone) -> Self {
        Floored { sigma: sigmas(&exact, runs), exact, spread: None }
    }

    /// The same, with the floor of every value by itself.
    pub fn by_value<'a>(exact: Array2<f64>, runs: impl Iterator<Item = &'a Array2<f64>> + Clone) -> Self {
        Floored { spread: Some(spreads(&exact, runs.clone())), ..Floored::new(exact, runs) }
    }

    /// The same of some rows alone.
    #[must_use]
    pub fn rows(&self, rows: &[usize]) -> Self {
        let of = |values: &Array2<f64>| values.select(Axis(0), rows);
        let sigma = rows.iter().map(|row| self.sigma[*row]).collect();
        Floored { exact: of(&self.exact), sigma, spread: self.spread.as_ref().map(of) }
    }

    /// Error and floor of the first rows: each value against what is `expected` at its row and column, if anything.
    pub fn energies<'a, T: Copy + Into<f64> + 'a, R: IntoIterator<Item = &'a T>>(
        &self,
        found: impl IntoIterator<Item = R>,
        expected: impl Fn(usize, usize) -> Option<f64>,
    ) -> Vec<Energy> {
        let energy = |(i, (row, sigma)): (usize, (R, &f64))| {
            let mut energy = Energy::default();
            for (j, value) in row.into_iter().enumerate() {
                expected(i, j).into_iter().for_each(|r| energy.add((*value).into(), r, *sigma));
            }
            energy
        };
        found.into_iter().zip(&self.sigma).enumerate().map(energy).collect()
    }
}

/// Squared error and squared floor of a set of values; slices are added up from these.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Energy {
    /// Sum of (t - r)^2.
    pub error: f64,
    /// Sum of sigma_i^2.
    pub floor: f64,
    /// Sum of r^2, for the relative distance that people know.
    pub reference: f64,
    /// Values.
    pub m: usize,
    /// Values that are finite on one side only, or infinite with different signs.
    pub misplaced: usize,
    /// Values that even the reference cannot say: neither finite nor masked (-inf). They are never a pass.
    pub undefined: usize,
}

impl Energy {
    /// Adds one value.
    pub fn add(&mut self, target: f64, reference: f64, sigma: f64) {
        if !target.is_finite() || !reference.is_finite() {
            let masked = target == f64::NEG_INFINITY && reference == f64::NEG_INFINITY;
            let undefined = !reference.is_finite() && reference != f64::NEG_INFINITY;
            self.undefined += usize::from(undefined);
            self.misplaced += usize::from(!masked && !undefined);
            return;
        }
        self.error += (target - reference).powi(2);
        self.floor += sigma * sigma;
        self.reference += reference * reference;
        self.m += 1;
    }

    /// Adds another set.
    pub fn join(&mut self, other: Energy) {
        self.error += other.error;
        self.floor += other.floor;
        self.reference += other.reference;
        self.m += other.m;
        self.misplaced += other.misplaced;
        self.undefined += other.undefined;
    }

    /// rho; infinite when a value is not finite where it should be.
    pub fn rho(&self) -> f64 {
        if self.misplaced > 0 {
            return f64::INFINITY;
        }
        if self.error == 0.0 { 0.0 } else { (self.error / self.floor).sqrt() }
    }

    /// rho over its limit: above 1 it diverges.
    pub fn share(&self) -> f64 {
        self.rho() / limit(self.m)
    }

    /// Relative L2 distance.
    pub fn relative(&self) -> f64 {
        if self.misplaced > 0 { f64::INFINITY } else { (self.error / self.reference.max(f64::MIN_POSITIVE)).sqrt() }
    }
}

impl<'a> std::iter::Sum<&'a Energy> for Energy {
    fn sum<I: Iterator<Item = &'a Energy>>(all: I) -> Energy {
        let mut sum = Energy::default();
        all.for_each(|energy| sum.join(*energy));
        sum
    }
}

/// Pools consecutive rows until each pool has enough values to decide; a rest too small joins the last pool. Returns
/// (first row, last row, energy).
pub fn pools(rows: &[Energy]) -> Vec<(usize, usize, Energy)> {
    let mut pools: Vec<(usize, usize, Energy)> = Vec::new();
    let mut open: Option<(usize, Energy)> = None;
    for (i, row) in rows.iter().enumerate() {
        let (first, mut energy) = open.take().unwrap_or((i, Energy::default()));
        energy.join(*row);
        if energy.m + energy.misplaced >= LEAST_VALUES {
            pools.push((first, i, energy));
        } else {
            open = Some((first, energy));
        }
    }
    if let Some((first, rest)) = open {
        match pools.last_mut() {
            Some((_, last, energy)) => {
                energy.join(rest);
                *last = rows.len() - 1;
            }
            None => pools.push((first, rows.len() - 1, rest)),
        }
    }
    pools
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ulps() {
        assert_eq!(ulp_f32(1.0), f64::from(f32::EPSILON));
        assert_eq!(ulp_f32(1.9), f64::from(f32::EPSILON));
        assert_eq!(ulp_f32(-2.0), 2.0 * f64::from(f32::EPSILON));
        assert_eq!(ulp_f32(0.0), f64::from(f32::from_bits(1)));
    }

    #[test]
    fn rho_counts_floors() {
        let mut e = Energy::default();
        for _ in 0..100 {
            e.add(1.0 + 3e-6, 1.0, 1e-6);
        }
        assert!((e.rho() - 3.0).abs() < 1e-6);
        assert!(e.share() > 1.0);
        e.add(f64::NAN, 1.0, 1e-6);
        assert_eq!(e.rho(), f64::INFINITY);
        let mut same = Energy::default();
        same.add(f64::NEG_INFINITY, f64::NEG_INFINITY, 1.0);
        assert_eq!((same.rho(), same.m), (0.0, 0));
    }

    /// The floor of a value is its own, no less than what is ordinary in its row, and no less than two ulp.
    #[test]
    fn a_value_has_a_floor_of_its_own() {
        let exact = Array2::from_shape_fn((1, 4), |_| 1.0);
        let run = |error: f64| Array2::from_shape_fn((1, 4), |(_, j)| if j == 0 { 1.0 + error } else { 1.0 });
        let runs = [run(3e-3), run(-4e-3)];
        let floored = Floored::by_value(exact.clone(), runs.iter());
        let spread = floored.spread.expect("made by value");
        let own = (12.5e-6f64).sqrt(); // of 3e-3 and 4e-3
        assert!((spread[[0, 0]] - own).abs() < 1e-9, "{spread}");
        assert!((spread[[0, 1]] - own / 2.0).abs() < 1e-9, "the root mean square of the row: {spread}");
        let same = [exact.clone()];
        let exactly = Floored::by_value(exact, same.iter()).spread.expect("made by value");
        assert_eq!(exactly[[0, 2]], 2.0 * f64::from(f32::EPSILON));
    }

    #[test]
    fn small_rows_are_pooled() {
        let row = |m| Energy { m, floor: m as f64, ..Energy::default() };
        let pooled: Vec<(usize, usize, usize)> =
            pools(&[row(16), row(16), row(16), row(40), row(8)]).iter().map(|(a, b, e)| (*a, *b, e.m)).collect();
        assert_eq!(pooled, [(0, 1, 32), (2, 4, 64)]);
        assert_eq!(pools(&[row(3)]).len(), 1);
    }
}
