//! What was found of one kernel: errors in units of the noise floor, things that are exactly right or wrong, repeats that
//! differ. One case becomes one check.

use lockstep_reference::ndarray::Array2;
use lockstep_reference::{Arith, RefRecipe};
use rayon::prelude::*;

use crate::device::cuda::cubin::CubinError;
use crate::device::cuda::gpu::GpuError;
use crate::report::{Check, Verdict};
use crate::verify::floor::{Floored, LEAST_VALUES, limit, pools};

/// Problems that are printed; a broken kernel has thousands.
const SHOWN: usize = 3;

impl Floored {
    /// The floor of an operation: once in f64, and in every legitimate order of the recipe.
    pub fn of(recipe: RefRecipe, tp: usize, op: &(dyn Fn(Arith) -> Array2<f64> + Sync)) -> Self {
        let arithmetics = [vec![Arith::Exact], Arith::orders(recipe, tp)].concat();
        let mut runs: Vec<Array2<f64>> = arithmetics.into_par_iter().map(op).collect();
        let mut floor = Floored::new(runs.remove(0), runs.iter());
        if floor.exact.ncols() < LEAST_VALUES {
            // Few values may all be near the truth by chance; all rows together are not.
            floor.widen(floor.largest());
        }
        floor
    }

    /// The largest sigma.
    pub fn largest(&self) -> f64 {
        self.sigma.iter().copied().fold(0.0, f64::max)
    }

    /// No sigma is less than this.
    pub fn widen(&mut self, least: f64) {
        self.sigma.iter_mut().for_each(|s| *s = s.max(least));
    }

    /// The floor of the distance to another kernel's values. These carry an error of their own, as large as the floor
    /// since a naive kernel adds in one of the floor's orders: two independent errors make one of sqrt(2) sigma.
    pub fn around(&self, exact: Array2<f64>) -> Self {
        let sigma = self.sigma[..exact.nrows()].iter().map(|s| s * std::f64::consts::SQRT_2).collect();
        Floored { exact, sigma, spread: None }
    }
}

/// Whether a value is what lost ones are.
pub type Gone = fn(f64) -> bool;

/// What was found so far.
pub struct Case {
    name: String,
    worst: Option<(f64, f64, String)>,
    problems: Vec<String>,
    count: usize,
    unstable: Option<String>,
    judged: usize,
}

/// Runs a case. A launch that fails is a divergence, and the stage goes on; what could not be tried is unmeasured.
pub fn check(name: impl Into<String>, run: impl FnOnce(&mut Case) -> Result<(), GpuError>) -> Check {
    let mut case = Case { name: name.into(), worst: None, problems: Vec::new(), count: 0, unstable: None, judged: 0 };
    match run(&mut case) {
        Ok(()) => case.done(),
        // Nothing is known of the kernel then, and nothing is said against it.
        Err(e @ (GpuError::Cubin(CubinError::NoNvrtc { .. }) | GpuError::Memory { .. } | GpuError::NoDriver)) => {
            Check::new(case.name, Verdict::Unmeasured, e.to_string())
        }
        Err(e) => {
            case.problem(e.to_string());
            case.done()
        }
    }
}

impl Case {
    /// Something is wrong.
    pub fn problem(&mut self, text: String) {
        self.count += 1;
        if self.problems.len() < SHOWN {
            self.problems.push(text);
        }
    }

    /// Repeats differ.
    pub fn unstable(&mut self, text: String) {
        self.unstable.get_or_insert(text);
    }

    /// Exact values: equal bit for bit, or both NaN.
    pub fn same(&mut self, what: &str, found: &[f32], expected: &[f32]) {
        self.each(what, found, expected, |a, b| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()));
    }

    /// Exact words.
    pub fn equal<T: PartialEq + std::fmt::Debug>(&mut self, what: &str, found: &[T], expected: &[T]) {
        self.each(what, found, expected, |a, b| a == b);
    }

    fn each<T: std::fmt::Debug>(&mut self, what: &str, found: &[T], expected: &[T], equal: fn(&T, &T) -> bool) {
        self.judged += found.len();
        if found.len() != expected.len() {
            return self.problem(format!("{what}: expected {} values, found {}", expected.len(), found.len()));
        }
        if let Some(i) = found.iter().zip(expected).position(|(a, b)| !equal(a, b)) {
            self.problem(format!("{what}: value {i}: expected {:?}, found {:?}", expected[i], found[i]));
        }
    }

    /// Something that holds or does not.
    pub fn holds(&mut self, good: bool, problem: impl FnOnce() -> String) {
        self.judged += 1;
        if !good {
            self.problem(problem());
        }
    }

    /// Rows that are lost hold only what is `gone`, the others what they held in a clean run.
    pub fn lost(&mut self, what: &str, found: &Array2<f64>, clean: &Array2<f64>, gone: &dyn Fn(usize) -> Option<Gone>) {
        for (i, (found, clean)) in found.rows().into_iter().zip(clean.rows()).enumerate() {
            let good = gone(i).map_or(found == clean, |gone| found.iter().all(|v| gone(*v)));
            let expected = if gone(i).is_some() { "nothing" } else { "the values" };
            self.holds(good, || format!("{what}: row {i}: expected {expected} of the clean run, found {found:.3}"));
        }
    }

    /// Values against the first rows of a floor: every row (pooled where rows are small) and the whole; and the same
    /// places that are not finite.
    pub fn judge(&mut self, what: &str, found: &Array2<f64>, floor: &Floored) {
        if found.nrows() > floor.exact.nrows() || found.ncols() != floor.exact.ncols() {
            return self.problem(format!("{what}: expected {:?} values, found {:?}", floor.exact.dim(), found.dim()));
        }
        if found.is_empty() {
            return;
        }
        self.judged += found.len();
        let rows = floor.energies(found.rows(), |i, j| Some(floor.exact[[i, j]]));
        let misplaced = found.indexed_iter().find(|((i, j), t)| {
            let r = floor.exact[[*i, *j]];
            t.is_finite() != r.is_finite() || (r == f64::NEG_INFINITY) != (**t == f64::NEG_INFINITY)
        });
        if let Some(((i, j), t)) = misplaced {
            self.problem(format!("{what}: row {i}, value {j}: expected {:e}, found {t:e}", floor.exact[[i, j]]));
            return;
        }
        let whole = (0, rows.len() - 1, rows.iter().sum());
        for (first, last, energy) in pools(&rows).into_iter().chain([whole]) {
            let (rho, most) = (energy.rho(), limit(energy.m));
            let share = rho / most;
            if self.worst.as_ref().is_none_or(|w| share > w.0 / w.1) {
                self.worst = Some((rho, most, format!("{what}, rows {first} to {last}")));
            }
            if share > 1.0 {
                self.problem(format!("{what}: rows {first} to {last}: rho {rho:.2} of {most:.2}"));
            }
        }
    }

    fn done(self) -> Check {
        let verdict = match () {
            () if self.count > 0 => Verdict::Divergent,
            () if self.unstable.is_some() => Verdict::Nondeterministic,
            () if self.judged == 0 => Verdict::Unmeasured,
            () => Verdict::Match,
        };
        let mut detail: Vec<String> = self.unstable.iter().map(|u| format!("repeats differ: {u}")).collect();
        detail.extend(self.problems.iter().cloned());
        if self.count > self.problems.len() {
            detail.push(format!("and {} more", self.count - self.problems.len()));
        }
        match &self.worst {
            Some((rho, most, site)) => {
                detail.push(format!("{} values; worst rho {rho:.2} of {most:.2} at {site}", self.judged));
            }
            None => detail.push(format!("{} values, exactly", self.judged)),
        }
        let rho = self.worst.map(|(rho, most, _)| (rho, most));
        let check = Check::new(self.name, verdict, detail.join("; "));
        rho.map_or(check.clone(), |rho| check.of_floor(rho))
    }
}

/// Values as rows of `width`.
pub fn rows_of(values: &[f32], width: usize) -> Array2<f64> {
    Array2::from_shape_fn((values.len() / width.max(1), width), |(i, j)| f64::from(values[i * width + j]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floor() -> Floored {
        Floored { exact: Array2::from_elem((2, 40), 1.0), sigma: vec![1e-6; 2], spread: None }
    }

    fn of(look: impl FnOnce(&mut Case)) -> Check {
        check("x", |case| {
            look(case);
            Ok(())
        })
    }

    #[test]
    fn a_case_counts_floors_and_places() {
        let judge = |found: Array2<f64>| of(|case| case.judge("y", &found, &floor()));
        let near = judge(Array2::from_elem((2, 40), 1.0 + 1e-6));
        assert_eq!(near.verdict, Verdict::Match, "{}", near.detail);
        // One row of two is far: its own pool says so.
        let mut far = Array2::from_elem((2, 40), 1.0);
        far.row_mut(1).fill(1.0 + 3e-6);
        assert_eq!(judge(far).verdict, Verdict::Divergent);
        let mut lost = Array2::from_elem((1, 40), 1.0);
        lost[[0, 3]] = f64::NAN;
        let lost = judge(lost);
        assert!(lost.verdict == Verdict::Divergent && lost.detail.contains("row 0, value 3"), "{}", lost.detail);
        assert_eq!(judge(Array2::zeros((1, 39))).verdict, Verdict::Divergent);
    }

    #[test]
    fn a_case_that_looked_at_nothing_is_no_pass() {
        assert_eq!(check("x", |_| Ok(())).verdict, Verdict::Unmeasured);
        assert_eq!(check("x", |_| Err(GpuError::NoDriver)).verdict, Verdict::Unmeasured);
        let failed = check("x", |_| Err(GpuError::Driver { what: "y".into(), error: "broke".into() }));
        assert!(failed.verdict == Verdict::Divergent && failed.detail.contains("broke"));
        let unstable = of(|case| case.unstable("word 3".into()));
        assert_eq!(unstable.verdict, Verdict::Nondeterministic);
    }

    #[test]
    fn exact_values_know_nan_and_the_sign_of_zero() {
        let same = |a: f32, b: f32| of(|case| case.same("y", &[a], &[b]));
        assert_eq!(same(f32::NAN, f32::from_bits(0x7fff_ffff)).verdict, Verdict::Match);
        assert_eq!(same(0.0, -0.0).verdict, Verdict::Divergent);
    }
}
