//! Which vector instructions this machine has. Every dequantiser and matrix kernel is one generic body compiled several
//! times, once per level; an [`Isa`] can only be obtained from detection, so holding one is the proof that calling the
//! code of its level is sound.

use std::sync::OnceLock;

/// A level of vector instructions that this machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Level);

/// The levels for which kernels are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// Whatever the compilation target guarantees.
    Baseline,
    /// AVX2 with FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, VL and DQ.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// The highest level this machine has; detected once.
    pub fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Isa::available().last().unwrap_or(Isa(Level::Baseline)))
    }

    /// Every level this machine has, lowest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        Self::detect().into_iter().flatten().map(Isa)
    }

    /// The level, for choosing among compiled bodies.
    pub(crate) fn level(self) -> Level {
        self.0
    }

    #[cfg(target_arch = "x86_64")]
    fn detect() -> [Option<Level>; 3] {
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let avx512 = avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq");
        [Some(Level::Baseline), avx2.then_some(Level::Avx2), avx512.then_some(Level::Avx512)]
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn detect() -> [Option<Level>; 1] {
        [Some(Level::Baseline)]
    }
}

/// Sixteen small codes, one a byte, and how they become floats. Left as loops over a whole block, compilers index
/// tables one value at a time and spread sub-blocks over scattered stores, up to ten times slower.
pub(crate) trait Codes: Copy {
    /// Sixteen bytes as they are.
    fn load(bytes: &[u8; 16]) -> Self;

    /// (byte >> shift) & mask; `mask` must fit the bits that are left.
    fn bits(self, shift: usize, mask: u8) -> Self;

    /// self | (upper << shift); the shifted codes must fit a byte.
    fn with(self, upper: Self, shift: usize) -> Self;

    /// self - offset, as signed bytes.
    fn less(self, offset: i8) -> Self;

    /// 16 where bit l of `bits` is set, else 0, for l in 0..16: the fifth bits of Q5 blocks.
    fn fifth(bits: u16) -> Self;

    /// table[code]; codes below 16.
    fn lookup(self, table: &[i8; 16]) -> Self;

    /// out = d * code - m with codes as signed bytes, the product rounded before the difference. With m = 0 the
    /// difference changes no bit, not even the sign of a zero.
    fn affine(self, d: f32, m: f32, out: &mut [f32; 16]);
}

/// Plain code.
impl Codes for [u8; 16] {
    #[inline(always)]
    fn load(bytes: &[u8; 16]) -> Self {
        *bytes
    }

    #[inline(always)]
    fn bits(self, shift: usize, mask: u8) -> Self {
        self.map(|byte| (byte >> shift) & mask)
    }

    #[inline(always)]
    fn with(self, upper: Self, shift: usize) -> Self {
        std::array::from_fn(|l| self[l] | (upper[l] << shift))
    }

    #[inline(always)]
    fn less(self, offset: i8) -> Self {
        self.map(|byte| byte.wrapping_sub(offset as u8))
    }

    #[inline(always)]
    fn fifth(bits: u16) -> Self {
        std::array::from_fn(|l| (((bits >> l) & 1) << 4) as u8)
    }

    #[inline(always)]
    fn lookup(self, table: &[i8; 16]) -> Self {
        self.map(|code| table[usize::from(code & 15)] as u8)
    }

    #[inline(always)]
    fn affine(self, d: f32, m: f32, out: &mut [f32; 16]) {
        for (value, code) in out.iter_mut().zip(self) {
            *value = d * f32::from(code as i8) - m;
        }
    }
}

/// Bodies for x86. [`x86::Avx2`] and [`x86::Avx512`] are used only in functions that are compiled for, and run on,
/// machines with those instructions; that is what makes the intrinsics below sound.
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86 {
    use super::Codes;
    use std::arch::x86_64::*;

    macro_rules! codes {
        ($level:ident, $affine:ident) => {
            /// Codes at the level of that name.
            #[derive(Clone, Copy)]
            pub(crate) struct $level(__m128i);

            impl Codes for $level {
                #[inline(always)]
                fn load(bytes: &[u8; 16]) -> Self {
                    // SAFETY: 16 bytes are read where there are as many.
                    Self(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) })
                }

                // There are no byte shifts: words are shifted, and what crosses bytes is masked out or zero.
                #[inline(always)]
                fn bits(self, shift: usize, mask: u8) -> Self {
                    // SAFETY: arithmetic of this level.
                    Self(unsafe {
                        let shifted = _mm_srl_epi16(self.0, _mm_cvtsi32_si128(shift as i32));
                        _mm_and_si128(shifted, _mm_set1_epi8(mask as i8))
                    })
                }

                #[inline(always)]
                fn with(self, upper: Self, shift: usize) -> Self {
                    // SAFETY: arithmetic of this level.
                    Self(unsafe { _mm_or_si128(self.0, _mm_sll_epi16(upper.0, _mm_cvtsi32_si128(shift as i32))) })
                }

                #[inline(always)]
                fn less(self, offset: i8) -> Self {
                    // SAFETY: arithmetic of this level.
                    Self(unsafe { _mm_sub_epi8(self.0, _mm_set1_epi8(offset)) })
                }

                #[inline(always)]
                fn fifth(bits: u16) -> Self {
                    // SAFETY: arithmetic of this level.
                    Self(unsafe {
                        let source = _mm_set_epi64x(0x0101_0101_0101_0101, 0);
                        let spread = _mm_shuffle_epi8(_mm_cvtsi32_si128(i32::from(bits)), source);
                        let single = _mm_set1_epi64x(0x8040_2010_0804_0201u64 as i64);
                        let set = _mm_cmpeq_epi8(_mm_and_si128(spread, single), single);
                        _mm_and_si128(set, _mm_set1_epi8(16))
                    })
                }

                #[inline(always)]
                fn lookup(self, table: &[i8; 16]) -> Self {
                    // SAFETY: 16 bytes are read where there are as many.
                    Self(unsafe { _mm_shuffle_epi8(_mm_loadu_si128(table.as_ptr().cast()), self.0) })
                }

                #[inline(always)]
                fn affine(self, d: f32, m: f32, out: &mut [f32; 16]) {
                    // SAFETY: the instructions are of this level.
                    unsafe { $affine(self.0, d, m, out) };
                }
            }
        };
    }

    codes! { Avx2, affine_avx2 }
    codes! { Avx512, affine_avx512 }

    /// # Safety
    /// The machine must have AVX2.
    #[inline(always)]
    unsafe fn affine_avx2(codes: __m128i, d: f32, m: f32, out: &mut [f32; 16]) {
        // SAFETY: the caller's promise; 16 floats are written where there are as many.
        unsafe {
            let (d, m) = (_mm256_set1_ps(d), _mm256_set1_ps(m));
            for (half, codes) in [codes, _mm_srli_si128::<8>(codes)].into_iter().enumerate() {
                let code = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
                _mm256_storeu_ps(out.as_mut_ptr().add(8 * half), _mm256_sub_ps(_mm256_mul_ps(d, code), m));
            }
        }
    }

    /// # Safety
    /// The machine must have AVX-512 F.
    #[inline(always)]
    unsafe fn affine_avx512(codes: __m128i, d: f32, m: f32, out: &mut [f32; 16]) {
        // SAFETY: the caller's promise; 16 floats are written where there are as many.
        unsafe {
            let code = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
            let value = _mm512_sub_ps(_mm512_mul_ps(_mm512_set1_ps(d), code), _mm512_set1_ps(m));
            _mm512_storeu_ps(out.as_mut_ptr(), value);
        }
    }
}
