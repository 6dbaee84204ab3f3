// Weights in the order in which tensor cores take them. A unit is 16 rows by 256 columns of a matrix, with not a byte more
// than the file has; the units of 16 rows lie side by side, 16 rows behind 16 rows, matrix behind matrix:
// unit (tile, i) of a stack starts at (tile * cols / 256 + i) * UNIT.
//
// A unit's 16 multiplications (mma.m16n8k16, weights as A) do not walk along a row: their 16 columns are two columns of each
// of 8 scale groups, so that a lane of the fragment has the codes of two groups alone. Lane 4 * (row % 8) + c holds groups
// c and c + 4 of rows row % 8 and row % 8 + 8. Word i of a lane holds columns 2 i and 2 i + 1 of its groups, a half each:
// from the lowest nibble on group c of the upper row, group c + 4 of it, and the same of the lower row.
#pragma once

#include "unpack.cuh"

template <class T> struct Tiles;

// Nibble i of word i: two columns of one row and group, as two bytes of `Codes`.
__device__ __forceinline__ u32 four_codes(u32 first, u32 second, u32 mask) {
    return __byte_perm(first & mask, second & mask, 0x6420u);
}

// Words 0 .. 15 of a lane lie in four planes of 16 bytes a lane.
__device__ __forceinline__ int word_at(int i, int lane) { return i / 4 * 512 + lane * 16 + i % 4 * 4; }

// 128 B of nibble words a row; then 8 bytes a lane: four scales of 6 bits (groups 2 c, 2 c + 1 of both rows), their
// minima, and a half: d and dmin of the upper row in the lanes 0 and 1 of a row, those of the lower in 2 and 3.
template <> struct Tiles<Q4_K> {
    using Block = Q4_K;
    static constexpr int UNIT = 2304, GROUP = 32;
    // The codes of groups 4 to 7 are multiplied where they lie, 16 times too large.
    static constexpr bool SHIFTED = true;

    static __device__ __forceinline__ u32 nibble(const u8 *block, int k) {
        return block[16 + k / 64 * 32 + k % 32] >> (k / 32 % 2 * 4) & 15;
    }
    static __device__ __forceinline__ u32 six(const u8 *block, int j, bool minimum) {
        const u8 *s = block + 4 + (minimum ? 4 : 0);
        if (j < 4) return s[j] & 63;
        const u32 low = minimum ? block[8 + j] >> 4 : block[8 + j] & 15;
        return low | u32(s[j - 4] >> 6) << 4;
    }

    // One lane's part of a unit, from its two rows' blocks.
    static __device__ __forceinline__ void pack(const u8 *upper, const u8 *lower, int lane, u8 *unit) {
        const int c = lane % 4;
        for (int i = 0; i < 16; ++i) {
            u32 word = 0;
            for (int e = 0; e < 2; ++e) {
                const int near = c * 32 + 2 * i + e, far = near + 128;
                const u32 both = nibble(upper, near) | nibble(upper, far) << 4 | nibble(lower, near) << 8 |
                                 nibble(lower, far) << 12;
                word |= both << (16 * e);
            }
            *(u32 *)(unit + word_at(i, lane)) = word;
        }
        u64 packed = 0;
        for (int n = 0; n < 4; ++n) {
            const u8 *row = n < 2 ? upper : lower;
            packed |= u64(six(row, 2 * c + n % 2, false)) << (6 * n) | u64(six(row, 2 * c + n % 2, true)) << (24 + 6 * n);
        }
        const u8 *half = (c < 2 ? upper : lower) + c % 2 * 2;
        *(u64 *)(unit + 2048 + lane * 8) = packed | u64(half[0] | half[1] << 8) << 48;
    }

    static __device__ __forceinline__ u32 code(const u8 *unit, int row, int k) {
        const int lane = row % 8 * 4 + k / 32 % 4, shift = 16 * (k % 2) + row / 8 * 8 + k / 128 * 4;
        return *(const u32 *)(unit + word_at(k % 32 / 2, lane)) >> shift & 15;
    }
    static __device__ __forceinline__ u32 scale(const u8 *unit, int row, int j, bool minimum) {
        const u64 packed = *(const u64 *)(unit + 2048 + (row % 8 * 4 + j / 2) * 8);
        return u32(packed >> (6 * (j % 2 + row / 8 * 2) + (minimum ? 24 : 0))) & 63;
    }
    // d, or dmin.
    static __device__ __forceinline__ u16 factor(const u8 *unit, int row, int which) {
        return *(const u16 *)(unit + 2048 + (row % 8 * 4 + row / 8 * 2 + which) * 8 + 6);
    }

    // Byte `b` of the block of a row, as the file has it.
    static __device__ __forceinline__ u8 byte(const u8 *unit, int row, int b) {
        if (b < 4) return u8(factor(unit, row, b / 2) >> (b % 2 * 8));
        if (b >= 16) {
            const int i = b - 16, k = i / 32 * 64 + i % 32;
            return u8(code(unit, row, k) | code(unit, row, k + 32) << 4);
        }
        const int j = b - 4;
        if (j < 8) return u8(scale(unit, row, j % 4, j >= 4) | scale(unit, row, j % 4 + 4, j >= 4) >> 4 << 6);
        return u8((scale(unit, row, j - 4, false) & 15) | scale(unit, row, j - 4, true) << 4);
    }

    // The 16 values of a row from column 16 * part on, as `Q4_K` has them.
    static __device__ __forceinline__ void unpack16(const u8 *unit, int row, int part, float *out) {
        const int sub = part / 2, lane = row % 8 * 4 + sub % 4, shift = row / 8 * 8 + sub / 4 * 4;
        const Quad a = load<Quad>(unit + part % 2 * 1024 + lane * 16), b = load<Quad>(unit + part % 2 * 1024 + 512 + lane * 16);
        Codes codes;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            codes.w[i] = four_codes(a.x[2 * i] >> shift, a.x[2 * i + 1] >> shift, 0x000f000fu);
            codes.w[i + 2] = four_codes(b.x[2 * i] >> shift, b.x[2 * i + 1] >> shift, 0x000f000fu);
        }
        const float d = f16_to_f32(factor(unit, row, 0)), m = f16_to_f32(factor(unit, row, 1));
        minus(codes, d * float(scale(unit, row, sub, false)), m * float(scale(unit, row, sub, true)), out);
    }
};

// 128 B of nibble words a row; the upper two bits of the codes of words 2 i and 2 i + 1 in a word each, in pairs of bits
// from the lowest on: group c of both rows, group c + 4 of both; 8 bytes a lane: scales of groups 2 c, 2 c + 1 of both rows,
// of both halves; d of both rows. A half is 128 columns in 8 groups.
template <> struct Tiles<Q6_K> {
    using Block = Q6_K;
    static constexpr int UNIT = 3360, GROUP = 16;
    static constexpr bool SHIFTED = false;

    static __device__ __forceinline__ u32 six(const u8 *block, int k) {
        const int half = k / 128, group = k % 128 / 32, l = k % 32;
        const u32 low = block[64 * half + 32 * (group % 2) + l] >> (group / 2 * 4) & 15;
        return low | (u32(block[128 + 32 * half + l]) >> (2 * group) & 3) << 4;
    }

    static __device__ __forceinline__ void pack(const u8 *upper, const u8 *lower, int lane, u8 *unit) {
        const int c = lane % 4;
        for (int i = 0; i < 8; ++i) {
            u32 bits = 0;
            for (int odd = 0; odd < 2; ++odd) {
                const int word_of = 2 * i + odd;
                u32 word = 0;
                for (int e = 0; e < 2; ++e) {
                    const int near = word_of / 8 * 128 + c * 16 + word_of % 8 * 2 + e, far = near + 64;
                    const u32 a = six(upper, near), b = six(upper, far), d = six(lower, near), f = six(lower, far);
                    word |= ((a & 15) | (b & 15) << 4 | (d & 15) << 8 | (f & 15) << 12) << (16 * e);
                    bits |= (a >> 4 | d >> 4 << 2 | b >> 4 << 4 | f >> 4 << 6) << (8 * odd + 16 * e);
                }
                *(u32 *)(unit + word_at(word_of, lane)) = word;
            }
            *(u32 *)(unit + 2048 + word_at(i, lane)) = bits;
        }
        for (int n = 0; n < 8; ++n) {
            unit[3072 + lane * 8 + n] = (n / 2 % 2 == 0 ? upper : lower)[192 + n / 4 * 8 + 2 * c + n % 2];
        }
        if (c == 0) *(u32 *)(unit + 3328 + lane) = upper[208] | upper[209] << 8 | lower[208] << 16 | u32(lower[209]) << 24;
    }

    static __device__ __forceinline__ u32 code(const u8 *unit, int row, int k) {
        const int i = k / 128 * 8 + k % 16 / 2, far = k % 128 / 64, lane = row % 8 * 4 + k / 16 % 4, e = k % 2;
        const u32 low = *(const u32 *)(unit + word_at(i, lane)) >> (16 * e + row / 8 * 8 + far * 4) & 15;
        const u32 bits = *(const u32 *)(unit + 2048 + word_at(i / 2, lane));
        return low | (bits >> (16 * e + i % 2 * 8 + row / 8 * 2 + far * 4) & 3) << 4;
    }
    // Of group j of 16.
    static __device__ __forceinline__ u8 scale(const u8 *unit, int row, int j) {
        return unit[3072 + (row % 8 * 4 + j % 8 / 2) * 8 + j / 8 * 4 + row / 8 * 2 + j % 2];
    }

    static __device__ __forceinline__ u8 byte(const u8 *unit, int row, int b) {
        if (b >= 208) return unit[3328 + row % 8 * 4 + row / 8 * 2 + b - 208];
        if (b >= 192) return scale(unit, row, b - 192);
        if (b < 128) {
            const int k = b / 64 * 128 + b % 64;
            return u8((code(unit, row, k) & 15) | (code(unit, row, k + 64) & 15) << 4);
        }
        const int k = (b - 128) / 32 * 128 + b % 32;
        u32 bits = 0;
        for (int n = 0; n < 4; ++n) bits |= code(unit, row, k + 32 * n) >> 4 << (2 * n);
        return u8(bits);
    }

    static __device__ __forceinline__ void unpack16(const u8 *unit, int row, int part, float *out) {
        const int half = part / 8, far = part % 8 / 4, lane = row % 8 * 4 + part % 4;
        const int shift = row / 8 * 8 + far * 4, upper = row / 8 * 2 + far * 4;
        const Quad a = load<Quad>(unit + half * 1024 + lane * 16), b = load<Quad>(unit + half * 1024 + 512 + lane * 16);
        const Quad h = load<Quad>(unit + 2048 + half * 512 + lane * 16);
        Codes codes;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            codes.w[i] = four_codes(a.x[2 * i] >> shift, a.x[2 * i + 1] >> shift, 0x000f000fu);
            codes.w[i + 2] = four_codes(b.x[2 * i] >> shift, b.x[2 * i + 1] >> shift, 0x000f000fu);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            codes.w[i] |= four_codes(h.x[i] >> upper, h.x[i] >> (8 + upper), 0x00030003u) << 4;
        }
        const float d = f16_to_f32(load<u16>(unit + 3328 + row % 8 * 4 + row / 8 * 2)) * float(i8(scale(unit, row, part)));
        scaled<32>(codes, d, out);
    }
};
