//! The innermost loops of the CPU device: products of f32 rows, in one order of summation.
//!
//! A sum over columns is kept in 32 lanes: lane l takes columns l, l + 32, l + 64, ... in ascending order, one fused
//! multiply-add each, and `Vector::total` folds the lanes in a fixed tree. That order does not depend on how rows and
//! tokens are grouped into tiles, on where a row is cut into chunks (at multiples of 32), or on the vector width, so a
//! product has the same bits for one token or many, on any thread and at any instruction level. It also keeps the
//! rounding error of a sum of n terms near n / 32 units instead of n.
//!
//! The bodies are generic over a vector (`Vector`) and compiled once per level. The baseline body uses
//! `f32::mul_add`, which a target without fused multiply-add computes in software: slow there, but the same bits.

use crate::quant::{Isa, Level};

/// Columns summed side by side.
pub const LANES: usize = 32;

/// Rows of a full tile; the weights of a tile stay in the first-level cache while all tokens pass over them.
pub const TILE_ROWS: usize = 4;

/// Tokens of a full tile: with four rows and two vectors for 32 lanes, 24 of AVX-512's 32 registers accumulate.
pub const TILE_TOKENS: usize = 3;

/// The partial sums of one (row, token) pair.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(align(64))]
pub struct Lanes([f32; LANES]);

impl Lanes {
    /// The empty sum.
    pub const ZERO: Lanes = Lanes([0.0; LANES]);

    /// A buffer's values, one after the other; a buffer of lanes is one of f32 that starts on a cache line, without
    /// which every wide load and store would touch two.
    pub fn flat(buffer: &mut [Lanes]) -> &mut [f32] {
        // SAFETY: `Lanes` is 32 f32 and nothing else: its alignment of 64 divides its size of 128.
        unsafe { std::slice::from_raw_parts_mut(buffer.as_mut_ptr().cast(), buffer.len() * LANES) }
    }
}

/// The kernels of one instruction level.
#[derive(Clone, Copy)]
pub struct Kernels {
    tiles: [[Tile; TILE_TOKENS]; 2],
    dot: unsafe fn(&[f32], &[f32]) -> f32,
    axpy: unsafe fn(f32, &[f32], &mut [f32]),
    axpy_four: unsafe fn([f32; 4], [&[f32]; 4], &mut [f32]),
    totals: unsafe fn(&[Lanes], &mut [f32]),
}

type Tile = unsafe fn(&[f32], &[&[f32]], &mut [Lanes], bool);

impl Kernels {
    /// The kernels of a level.
    pub fn new(isa: Isa) -> Self {
        match isa.level() {
            Level::Baseline => baseline::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => avx512::KERNELS,
        }
    }

    /// Adds the products of a chunk of columns to a tile's sums, which begin with the `first` chunk, whatever they held:
    /// `w` is `[rows][n]` with 1 or [`TILE_ROWS`] rows, `x` is 1 to [`TILE_TOKENS`] rows of n, `sums` is
    /// `[rows][tokens]`. A chunk that is not the last of its row must be a multiple of [`LANES`] columns. Panics when the
    /// sizes do not fit one another; the callers derive them from each other.
    #[inline]
    pub fn tile(&self, w: &[f32], x: &[&[f32]], sums: &mut [Lanes], first: bool) {
        let (tokens, columns) = (x.len(), x[0].len());
        let rows = sums.len() / tokens;
        assert!((rows == 1 || rows == TILE_ROWS) && rows * tokens == sums.len() && w.len() == rows * columns);
        assert!(x.iter().all(|x| x.len() == columns));
        let tile = self.tiles[usize::from(rows == TILE_ROWS)][tokens - 1];
        // SAFETY: the tile was compiled for a level this machine has, and the sizes were checked above.
        unsafe { tile(w, x, sums, first) };
    }

    /// Four [`axpy`] one after the other, with the same bits, that read and write `y` once: the four rows are as long as
    /// `y`.
    #[inline]
    pub fn axpy_four(&self, alpha: [f32; 4], x: [&[f32]; 4], y: &mut [f32]) {
        assert!(x.iter().all(|x| x.len() == y.len()));
        // SAFETY: compiled for a level this machine has.
        unsafe { (self.axpy_four)(alpha, x, y) };
    }

    /// The total of each sum, over the shorter of the two.
    #[inline]
    pub fn totals(&self, sums: &[Lanes], out: &mut [f32]) {
        // SAFETY: compiled for a level this machine has.
        unsafe { (self.totals)(sums, out) };
    }
}

/// The sum of `a[i] b[i]` over the shorter of the two. Same order, and so the same bits, as a matrix product of that
/// row.
#[inline]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let n = a.len().min(b.len());
    // SAFETY: `Isa::best` is a level this machine has.
    unsafe { (Kernels::new(Isa::best()).dot)(&a[..n], &b[..n]) }
}

/// `y[i] += alpha x[i]`, fused, over the shorter of the two.
#[inline]
pub fn axpy(alpha: f32, x: &[f32], y: &mut [f32]) {
    let n = x.len().min(y.len());
    // SAFETY: `Isa::best` is a level this machine has.
    unsafe { (Kernels::new(Isa::best()).axpy)(alpha, &x[..n], &mut y[..n]) }
}

/// A machine vector of f32. Methods are `inline(always)`, so they take on the instructions of the function that uses
/// them.
trait Vector: Copy {
    const WIDTH: usize;
    /// # Safety
    /// The machine must have the vector's instructions.
    unsafe fn zero() -> Self;
    /// # Safety
    /// `at` must be valid for reading WIDTH values; the machine must have the vector's instructions.
    unsafe fn load(at: *const f32) -> Self;
    /// # Safety
    /// `at` must be valid for writing WIDTH values; the machine must have the vector's instructions.
    unsafe fn store(self, at: *mut f32);
    /// self + a b, rounded once.
    /// # Safety
    /// The machine must have the vector's instructions.
    unsafe fn fma(self, a: Self, b: Self) -> Self;
    /// The sum of all lanes, by halving: lanes i and i + 16 are added, then i and i + 8, and so on.
    /// # Safety
    /// The machine must have the vector's instructions.
    unsafe fn total(lanes: &Lanes) -> f32;
}

/// One tile of R rows and T tokens, P vectors holding the lanes of a pair.
///
/// Plain loops over known bounds, so that every sum stays in a register. A closure over vectors that the compiler does
/// not inline would lack the level's instructions, and each of its loads would be a call.
///
/// # Safety
/// `w` holds R rows of n, `x` T rows of n, `sums` R * T; WIDTH * P = LANES; the machine has V's instructions.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn tile<V: Vector, const P: usize, const R: usize, const T: usize>(
    w: &[f32],
    x: &[&[f32]],
    sums: &mut [Lanes],
    first: bool,
) {
    const { assert!(V::WIDTH * P == LANES) };
    let n = w.len() / R;
    let whole = n / LANES * LANES;
    let w = w.as_ptr();
    // SAFETY: the caller's promise of T rows; columns stay below n within each row, and lanes below LANES within each
    // sum.
    unsafe {
        let x = &*x.as_ptr().cast::<[&[f32]; T]>();
        let mut acc = [[[V::zero(); P]; T]; R];
        for r in 0..if first { 0 } else { R } {
            for t in 0..T {
                for p in 0..P {
                    acc[r][t][p] = V::load(sums[r * T + t].0.as_ptr().add(p * V::WIDTH));
                }
            }
        }
        let mut column = 0;
        while column < whole {
            for p in 0..P {
                let at = column + p * V::WIDTH;
                let mut token = [V::zero(); T];
                for t in 0..T {
                    token[t] = V::load(x[t].as_ptr().add(at));
                }
                for r in 0..R {
                    let weight = V::load(w.add(r * n + at));
                    for t in 0..T {
                        acc[r][t][p] = acc[r][t][p].fma(weight, token[t]);
                    }
                }
            }
            column += LANES;
        }
        for r in 0..R {
            for t in 0..T {
                let lanes = &mut sums[r * T + t].0;
                for p in 0..P {
                    acc[r][t][p].store(lanes.as_mut_ptr().add(p * V::WIDTH));
                }
                for column in whole..n {
                    let lane = &mut lanes[column - whole];
                    *lane = (*w.add(r * n + column)).mul_add(*x[t].as_ptr().add(column), *lane);
                }
            }
        }
    }
}

/// A full tile where registers hold one row only: row by row, which changes no sum.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn rows<V: Vector, const P: usize, const R: usize, const T: usize>(
    w: &[f32],
    x: &[&[f32]],
    sums: &mut [Lanes],
    first: bool,
) {
    let n = w.len() / R;
    for r in 0..R {
        // SAFETY: passed on.
        unsafe { tile::<V, P, 1, T>(&w[r * n..(r + 1) * n], x, &mut sums[r * T..(r + 1) * T], first) };
    }
}

/// The kernels of one level: name, vector, vectors per 32 lanes, how a full tile is walked, the instructions to compile
/// for.
macro_rules! level {
    ($level:ident, $vector:ty, $parts:literal, $full:ident, $(#[$attribute:meta])?) => {
        mod $level {
            use super::*;

            pub(super) const KERNELS: Kernels = Kernels {
                tiles: [
                    [single::<1>, single::<2>, single::<3>],
                    [full::<1>, full::<2>, full::<3>],
                ],
                dot,
                axpy,
                axpy_four,
                totals,
            };

            $(#[$attribute])?
            unsafe fn single<const T: usize>(w: &[f32], x: &[&[f32]], sums: &mut [Lanes], first: bool) {
                // SAFETY: passed on.
                unsafe { tile::<$vector, $parts, 1, T>(w, x, sums, first) };
            }

            $(#[$attribute])?
            unsafe fn full<const T: usize>(w: &[f32], x: &[&[f32]], sums: &mut [Lanes], first: bool) {
                // SAFETY: passed on.
                unsafe { super::$full::<$vector, $parts, TILE_ROWS, T>(w, x, sums, first) };
            }

            $(#[$attribute])?
            unsafe fn dot(a: &[f32], b: &[f32]) -> f32 {
                let mut sums = [Lanes::ZERO];
                // SAFETY: both slices have the same length; the level is the caller's promise.
                unsafe {
                    tile::<$vector, $parts, 1, 1>(a, &[b], &mut sums, true);
                    <$vector>::total(&sums[0])
                }
            }

            $(#[$attribute])?
            unsafe fn totals(sums: &[Lanes], out: &mut [f32]) {
                for (out, sum) in out.iter_mut().zip(sums) {
                    // SAFETY: the level is the caller's promise.
                    *out = unsafe { <$vector>::total(sum) };
                }
            }

            $(#[$attribute])?
            unsafe fn axpy(alpha: f32, x: &[f32], y: &mut [f32]) {
                for (y, x) in y.iter_mut().zip(x) {
                    *y = alpha.mul_add(*x, *y);
                }
            }

            $(#[$attribute])?
            unsafe fn axpy_four(alpha: [f32; 4], [a, b, c, d]: [&[f32]; 4], y: &mut [f32]) {
                for ((((y, a), b), c), d) in y.iter_mut().zip(a).zip(b).zip(c).zip(d) {
                    let two = alpha[1].mul_add(*b, alpha[0].mul_add(*a, *y));
                    *y = alpha[3].mul_add(*d, alpha[2].mul_add(*c, two));
                }
            }
        }
    };
}

level! { baseline, [f32; 8], 4, rows, }
#[cfg(target_arch = "x86_64")]
level! { avx2, std::arch::x86_64::__m256, 4, rows, #[target_feature(enable = "avx2,fma")] }
#[cfg(target_arch = "x86_64")]
level! {
    avx512, std::arch::x86_64::__m512, 2, tile,
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
}

impl Vector for [f32; 8] {
    const WIDTH: usize = 8;

    #[inline(always)]
    unsafe fn zero() -> Self {
        [0.0; 8]
    }

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { at.cast::<Self>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { at.cast::<Self>().write_unaligned(self) };
    }

    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        std::array::from_fn(|i| a[i].mul_add(b[i], self[i]))
    }

    #[inline(always)]
    unsafe fn total(lanes: &Lanes) -> f32 {
        let mut s = lanes.0;
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                s[i] += s[i + width];
            }
            width /= 2;
        }
        s[0]
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Lanes, Vector};
    use std::arch::x86_64::*;

    macro_rules! vector {
        ($vector:ty, $width:literal, $zero:ident, $load:ident, $store:ident, $fma:ident, $total:ident) => {
            impl Vector for $vector {
                const WIDTH: usize = $width;

                #[inline(always)]
                unsafe fn zero() -> Self {
                    // SAFETY: the caller's promise.
                    unsafe { $zero() }
                }

                #[inline(always)]
                unsafe fn load(at: *const f32) -> Self {
                    // SAFETY: the caller's promise.
                    unsafe { $load(at) }
                }

                #[inline(always)]
                unsafe fn store(self, at: *mut f32) {
                    // SAFETY: the caller's promise.
                    unsafe { $store(at, self) };
                }

                #[inline(always)]
                unsafe fn fma(self, a: Self, b: Self) -> Self {
                    // SAFETY: the caller's promise.
                    unsafe { $fma(a, b, self) }
                }

                #[inline(always)]
                unsafe fn total(lanes: &Lanes) -> f32 {
                    // SAFETY: the caller's promise.
                    unsafe { $total(lanes.0.as_ptr()) }
                }
            }
        };
    }

    vector! { __m256, 8, _mm256_setzero_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps, total_avx2 }
    vector! { __m512, 16, _mm512_setzero_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps, total_avx512 }

    /// # Safety
    /// `at` must be valid for reading 32 values; the machine must have AVX2.
    #[inline(always)]
    unsafe fn total_avx2(at: *const f32) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            let even = _mm256_add_ps(_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(16)));
            let odd = _mm256_add_ps(_mm256_loadu_ps(at.add(8)), _mm256_loadu_ps(at.add(24)));
            total_of_eight(_mm256_add_ps(even, odd))
        }
    }

    /// # Safety
    /// `at` must be valid for reading 32 values; the machine must have AVX-512 F and DQ.
    #[inline(always)]
    unsafe fn total_avx512(at: *const f32) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            let sixteen = _mm512_add_ps(_mm512_loadu_ps(at), _mm512_loadu_ps(at.add(16)));
            total_of_eight(_mm256_add_ps(_mm512_castps512_ps256(sixteen), _mm512_extractf32x8_ps::<1>(sixteen)))
        }
    }

    /// # Safety
    /// The machine must have AVX2.
    #[inline(always)]
    unsafe fn total_of_eight(eight: __m256) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A small generator; the matrix products' tests use it too.
    pub(in super::super) struct Random(pub u64);

    impl Random {
        /// The next 32 bits.
        pub fn next(&mut self) -> u32 {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 32) as u32
        }

        /// Values in [-1, 1).
        pub fn values(&mut self, n: usize) -> Vec<f32> {
            (0..n).map(|_| (self.next() >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
        }
    }

    fn values(n: usize, seed: u64) -> Vec<f32> {
        Random(seed).values(n)
    }

    /// The order of summation as the module states it, written out.
    fn by_definition(a: &[f32], b: &[f32]) -> f32 {
        let mut lanes = [0.0f32; 32];
        for (i, (a, b)) in a.iter().zip(b).enumerate() {
            lanes[i % 32] = a.mul_add(*b, lanes[i % 32]);
        }
        for width in [16, 8, 4, 2, 1] {
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
        }
        lanes[0]
    }

    #[test]
    fn every_level_and_tile_sums_in_the_stated_order() {
        for isa in Isa::available() {
            let kernels = Kernels::new(isa);
            for n in [1, 2, 31, 32, 33, 64, 100, 256, 257, 1000] {
                for rows in [1, TILE_ROWS] {
                    for tokens in 1..=TILE_TOKENS {
                        let w = values(rows * n, 7);
                        let x: Vec<Vec<f32>> = (0..tokens).map(|t| values(n, 100 + t as u64)).collect();
                        let x: Vec<&[f32]> = x.iter().map(Vec::as_slice).collect();
                        let mut sums = vec![Lanes::ZERO; rows * tokens];
                        kernels.tile(&w, &x, &mut sums, true);
                        let mut totals = vec![0.0; rows * tokens];
                        kernels.totals(&sums, &mut totals);
                        for r in 0..rows {
                            for t in 0..tokens {
                                let expected = by_definition(&w[r * n..(r + 1) * n], x[t]);
                                let found = totals[r * tokens + t];
                                assert_eq!(found.to_bits(), expected.to_bits(), "{isa:?} {n} {rows}x{tokens}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn chunks_of_whole_lanes_change_nothing() {
        let (w, x) = (values(300, 1), values(300, 2));
        let kernels = Kernels::new(Isa::best());
        let mut sums = [Lanes::ZERO];
        for range in [0..64, 64..96, 96..300] {
            kernels.tile(&w[range.clone()], &[&x[range.clone()]], &mut sums, range.start == 0);
        }
        let mut total = [0.0];
        kernels.totals(&sums, &mut total);
        assert_eq!(total[0].to_bits(), dot(&w, &x).to_bits());
    }

    #[test]
    fn axpy_is_fused_at_every_level() {
        let (x, y) = (values(77, 3), values(77, 4));
        let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| 0.3f32.mul_add(*x, *y)).collect();
        for isa in Isa::available() {
            let mut out = y.clone();
            // SAFETY: the level is one of this machine's, the lengths are equal.
            unsafe { (Kernels::new(isa).axpy)(0.3, &x, &mut out) };
            assert_eq!(out, expected, "{isa:?}");
        }
        let mut out = y.clone();
        axpy(0.3, &x, &mut out);
        assert_eq!(out, expected);
    }

    #[test]
    fn four_axpy_at_once_have_the_bits_of_one_after_the_other() {
        let rows: Vec<Vec<f32>> = (0..4).map(|seed| values(77, 5 + seed)).collect();
        let x: [&[f32]; 4] = std::array::from_fn(|i| rows[i].as_slice());
        let (alpha, y) = ([0.5, -1.25, 3.0, 1e-3], values(77, 9));
        let mut expected = y.clone();
        alpha.iter().zip(x).for_each(|(alpha, x)| axpy(*alpha, x, &mut expected));
        for isa in Isa::available() {
            let kernels = Kernels::new(isa);
            let mut out = y.clone();
            kernels.axpy_four(alpha, x, &mut out);
            assert_eq!(out, expected, "{isa:?}");
        }
    }
}
