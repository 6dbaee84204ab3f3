// The block formats on the device. Blocks in a file are records of odd sizes (18, 34, 210 bytes ..), which no wide load
// can read in place; so each field of all blocks of a tensor is repacked into a plane of its own. A plane starts
// 16-byte aligned and holds block b's field at b * size(f), so the field is aligned to gcd(size(f), 16) and is read by
// the widest load that fits. Repacking moves bytes and never changes them.
//
// Values are those of the CPU dequantisers bit for bit: (d * sc) * q - dmin * m in f32, each product and the difference
// rounded by itself. That holds only where contraction is off (-fmad=false).
//
// A code becomes a float without a conversion instruction, which runs at a quarter of the rate of an addition: a byte
// put under the exponent of 2^23 is the float 2^23 + byte, and subtracting 2^23 plus the code's offset is exact.
#pragma once

#include "codebooks.cuh"
#include "ptx.cuh"

// One aligned load.
template <class T> __device__ __forceinline__ T load(const u8 *p) { return *reinterpret_cast<const T *>(p); }

// The half at the lower or upper end of a word.
__device__ __forceinline__ float lower_half(u32 w) { return f16_to_f32(u16(w)); }
__device__ __forceinline__ float upper_half(u32 w) { return f16_to_f32(u16(w >> 16)); }

// Sixteen codes, a byte each.
struct Codes {
    u32 w[4];
};

// (byte >> shift) & mask of 16 bytes; `mask` repeats a byte that fits the bits which are left.
__device__ __forceinline__ Codes bits(const u8 *p, int shift, u32 mask) {
    const Quad q = load<Quad>(p);
    Codes c;
#pragma unroll
    for (int i = 0; i < 4; ++i) c.w[i] = (q.x[i] >> shift) & mask;
    return c;
}

// c | (upper << shift), where the shifted codes fit their bytes.
__device__ __forceinline__ Codes with(Codes c, Codes upper, int shift) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c.w[i] |= upper.w[i] << shift;
    return c;
}

// Four bits to the lowest bits of four bytes.
__device__ __forceinline__ u32 spread4(u32 four) { return ((four & 15) * 0x00204081u) & 0x01010101u; }

// 16 where bit i is set, else 0: the fifth bits of Q5 blocks.
__device__ __forceinline__ Codes fifth(u32 sixteen) {
    Codes c;
#pragma unroll
    for (int i = 0; i < 4; ++i) c.w[i] = spread4(sixteen >> (4 * i)) << 4;
    return c;
}

// Byte i of w less LESS.
template <int LESS> __device__ __forceinline__ float code(u32 w, int i) {
    return __uint_as_float(__byte_perm(w, 0x4b000000u, 0x7540u | u32(i))) - (8388608.0f + float(LESS));
}

// d * (code - LESS)
template <int LESS> __device__ __forceinline__ void scaled(const Codes &c, float d, float *out) {
#pragma unroll
    for (int i = 0; i < 16; ++i) out[i] = d * code<LESS>(c.w[i / 4], i % 4);
}

// d * code + m
__device__ __forceinline__ void plus(const Codes &c, float d, float m, float *out) {
#pragma unroll
    for (int i = 0; i < 16; ++i) out[i] = d * code<0>(c.w[i / 4], i % 4) + m;
}

// d * code - m
__device__ __forceinline__ void minus(const Codes &c, float d, float m, float *out) {
#pragma unroll
    for (int i = 0; i < 16; ++i) out[i] = d * code<0>(c.w[i / 4], i % 4) - m;
}

// Four codes of four bits, a byte each, to the table's bytes. A selector nibble has three bits of index, so both halves
// of the table are asked, and the fourth bit chooses between the answers.
__device__ __forceinline__ u32 lookup(u32 codes, u32 t0, u32 t1, u32 t2, u32 t3) {
    const u32 nibbles = __byte_perm(codes | (codes >> 4), 0, 0x4420u);
    const u32 index = nibbles & 0x7777u, upper = (nibbles & 0x8888u) >> 1;
    return __byte_perm(__byte_perm(t0, t1, index), __byte_perm(t2, t3, index), 0x3210u | upper);
}

__device__ __forceinline__ Codes lookup(Codes c, u32 t0, u32 t1, u32 t2, u32 t3) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c.w[i] = lookup(c.w[i], t0, t1, t2, t3);
    return c;
}

// Four magnitudes (below 128, not zero), negated where their bit of `signs` is set, plus 128.
__device__ __forceinline__ u32 negate(u32 magnitudes, u32 signs) {
    const u32 ones = spread4(signs);
    return (magnitudes ^ (ones * 255u) ^ 0x80808080u) + ones;
}

// Signs of eight values from seven bits: the eighth makes their number even.
__device__ __forceinline__ u32 even_signs(u32 seven) {
    seven &= 127;
    return seven | ((u32(__popc(seven)) & 1) << 7);
}

// Codes of 16 values from two entries of an IQ2 grid and their 16 signs.
__device__ __forceinline__ Codes grid2(u32 first, u32 second, u32 signs) {
    const u32 entry[2] = {first, second};
    Codes c;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        c.w[i] = negate(__byte_perm(LEVELS_IQ2, (entry[i / 2] >> (16 * (i % 2))) & 0xffffu), signs >> (4 * i));
    return c;
}

// Codes of 16 values from four entries of an IQ3 grid, the grid's levels and the values' signs.
__device__ __forceinline__ Codes grid3(const u32 (&entry)[4], u32 low, u32 high, u32 signs) {
    Codes c;
#pragma unroll
    for (int i = 0; i < 4; ++i) c.w[i] = negate(__byte_perm(low, high, entry[i]), signs >> (4 * i));
    return c;
}

// Every format below: VALUES per block of BYTES; FIELDS fields, field f at byte at(f) of the file's block, size(f)
// bytes long, which partition the block. unpack16 gives the 16 values from 16 * part on of the block whose fields start
// at f[0 .. FIELDS].

struct Q4_0 {
    static constexpr int VALUES = 32, BYTES = 18, FIELDS = 2; // nibbles, d
    static __device__ constexpr int at(int f) { return f == 0 ? 2 : 0; }
    static __device__ constexpr int size(int f) { return f == 0 ? 16 : 2; }
    static __device__ __forceinline__ void unpack16(const u8 *const *f, int part, float *out) {
        scaled<8>(bits(f[0], 4 * part, 0x0f0f0f0fu), f16_to_f32(load<u16>(f[1])), out);
    }
};

struct Q4_1 {
    static constexpr int VALUES = 32, BYTES = 20, FIELDS = 2; // nibbles, d and m
    static __device__ constexpr int at(int f) { return f == 0 ? 4 : 0; }
    static __device__ constexpr int size(int f) { return f == 0 ? 16 : 4; }
    static __device__ __forceinline__ void unpack16(const u8 *const *f, int part, float *out) {
        const u32 dm = load<u32>(f[1]);
        plus(bits(f[0], 4 * part, 0x0f0f0f0fu), lower_half(dm), upper_half(dm), out);
    }
};

struct Q5_0 {
    static constexpr int VALUES = 32, BYTES = 22, FIELDS = 3; // nibbles, fifth bits, d
    static __device__ constexpr int at(int f) { return f == 0 ? 6 : f == 1 ? 2 : 0; }
    static __device__ constexpr int size(int f) { return f == 0 ? 16 : f == 1 ? 4 : 2; }
    static __device__ __forceinline__ void unpack16(const u8 *const *f, int part, float *out) {
        const Codes low = bits(f[0], 4 * part, 0x0f0f0f0fu);
        scaled<16>(with(low, fifth(load<u32>(f[1]) >> (16 * part)), 0), f16_to_f32(load<u16>(f[2])), out);
    }
};

struct Q5_1 {
    static constexpr int VALUES = 32, BYTES = 24, FIELDS = 2; // nibbles; d, m and fifth bits
    static __device__ constexpr int at(int f) { return f == 0 ? 8 : 0; }
    static __device__ constexpr int size(int f) { return f == 0 ? 16 : 8; }
    static __device__ __forceinline__ void unpack16(const u8 *const *f, int part, float *out) {
        const u64 head = load<u64>(f[1]);
        const Codes low = bits(f[0], 4 * part, 0x0f0f0f0fu);
        plus(with(low, fifth(u32(head >> 32) >> (16 * part)), 0), lower_half(u32(head)), upper_half(u32(head)), out);
    }
};

struct Q8_0 {
    static constexpr int VALUES = 32, BYTES = 34, FIELDS = 2; // signed bytes, d
    static __device__ constexpr int at(int f) { return f == 0 ? 2 : 0; }
    static __device__ constexpr int size(int f) { return f == 0 ? 32 : 2; }
    static __device__ __forceinline__ void unpack16(const u8 *const *f, int part, float *out) {
        const Quad q = load<Quad>(f[0] + 16 * part);
        Codes c;
#pragma unroll
        for (int i = 0; i < 4; ++i) c.w[i] = q.x[i] ^ 0x80808080u;
        scaled<128>(c, f16_to_f32(load<u16>(f[1])), out);
    }
};

// Parts of Q2_K, Q3_K and Q6_K: two halves of 128 values, four groups of 32, two lanes of 16.

struct Q2_K {
    static constexpr int VALUES = 256, BYTES = 84, FIELDS = 3; // codes, scales with minima, d and dmin
    static __device__ constexpr int at(int f) { return f == 0 ? 16 : f == 1 ? 0 : 80; }
    static __device__ constexpr int size(int f) { return f == 0 ? 64 : f == 1 ? 16 : 4; }
    static __device__ __forceinline__ void unpack16(const u8 *const *f, int part, float *out) {
        const int half = part / 8, group = part / 2 % 4, lane = part % 2;
        const u32 scale = f[1][part], dm = load<u32>(f[2]);
        const float d = lower_half(dm) * float(scale & 15), m = upper_half(dm) * float(scale >> 4);
        minus(bits(f[0] + 32 * half + 16 * lane, 2 * group, 0x03030303u), d, m, out);
    }
};

struct Q3_K {
    static constexpr int VALUES = 256, BYTES = 110, FIELDS = 4; // low bits, third bits, scales, d
    static __device__ constexpr int at(int f) { return f == 0 ? 32 : f == 1 ? 0 : f == 2 ? 96 : 108; }
    static __device__ constexpr int size(int f) { return f == 0 ? 64 : f == 1 ? 32 : f == 2 ? 12 : 2; }
    static __device__ __forceinline__ void unpack16(const u8 *const *f, int part, float *out) {
        const int half = part / 8, group = part / 2 % 4, lane = part % 2;
        // Six bits: a nibble of the first eight bytes, two bits of the last four.
        const u32 nibble = (u32(f[2][part % 8]) >> (4 * half)) & 15, upper = load<u32>(f[2] + 8) >> (8 * (part % 4));
        const int scale = int(nibble | (((upper >> (2 * (part / 4))) & 3) << 4)) - 32;
        const Codes low = bits(f[0] + 32 * half + 16 * lane, 2 * group, 0x03030303u);
        const Codes third = bits(f[1] + 16 * lane, 4 * half + group, 0x01010101u);
        scaled<4>(with(low, third, 2), f16_to_f32(load<u16>(f[3])) * float(scale), out);
    }
};

// Scale and minimum of the eight sub-blocks of 32 of Q4_K and Q5_K, from the 16 bytes that begin their blocks: d, dmin
// and six-bit integers, in bytes 0..4 scales 0..4, in bytes 4..8 minima 0..4, in bytes 8..12 the low nibbles of both
// for 4..8, whose upper two bits are the upper two bits of the first eight bytes.
struct ScaleMin {
    float d, m;
};

__device__ __forceinline__ ScaleMin scale_min(const u8 *head, int sub) {
    const Quad h = load<Quad>(head);
    const int shift = 8 * (sub % 4);
    const u32 a = h.x[1] >> shift, b = h.x[2] >> shift, c = h.x[3] >> shift;
    const u32 scale = sub < 4 ? a & 63 : (c & 15) | ((a >> 2) & 48);
    const u32 min = sub < 4 ? b & 63 : ((c >> 4) & 15) | ((b >> 2) & 48);
    return {lower_half(h.x[0]) * float(scale), upper_half(h.x[0]) * float(min)};
}

struct Q4_K {
    static constexpr int VALUES = 256, BYTES = 144, FIELDS = 2; // nibbles; d, dmin, scales and minima
    static __device__ constexpr int at(int f) { return f == 0 ? 16 : 0; }
    static __device__ constexpr int size(int f) { return f == 0 ? 128 : 16; }
    static __device__ __forceinline__ void unpack16(const u8 *const *f, int part, float *out) {
        const int sub = part / 2, lane = part % 2;
        const ScaleMin s = scale_min(f[1], sub);
        minus(bits(f[0] + 32 * (sub / 2) + 16 * lane, 4 * (sub % 2), 0x0f0f0f0fu), s.d, s.m, out);
    }
};

struct Q5_K {
    static constexpr int VALUES = 256, BYTES = 176, FIELDS = 3; // nibbles; fifth bits; d, dmin, scales and minima
    static __device__ constexpr int at(int f) { return f == 0 ? 48 : f == 1 ? 16 : 0; }
    static __device__ constexpr int size(int f) { return f == 0 ? 128 : f == 1 ? 32 : 16; }
    static __device__ __forceinline__ void unpack16(const u8 *const *f, int part, float *out) {
        const int sub = part / 2, lane = part % 2;
        const ScaleMin s = scale_min(f[2], sub);
        const Codes low = bits(f[0] + 32 * (sub / 2) + 16 * lane, 4 * (sub % 2), 0x0f0f0f0fu);
        minus(with(low, bits(f[1] + 16 * lane, sub, 0x01010101u), 4), s.d, s.m, out);
    }
};

struct Q6_K {
    static constexpr int VALUES = 256, BYTES = 210, FIELDS = 4; // nibbles, upper two bits, signed scales, d
    static __device__ constexpr int at(int f) { return f == 0 ? 0 : f == 1 ? 128 : f == 2 ? 192 : 208; }
    static __device__ constexpr int size(int f) { return f == 0 ? 128 : f == 1 ? 64 : f == 2 ? 16 : 2; }
    static __device__ __forceinline__ void unpack16(const u8 *const *f, int part, float *out) {
        // Group k takes nibbles of bytes 32 * (k & 1) .., low ones for k < 2, and bits 2k, 2k + 1 of the upper bytes.
        const int half = part / 8, group = part / 2 % 4, lane = part % 2;
        const Codes low = bits(f[0] + 64 * half + 32 * (group % 2) + 16 * lane, 4 * (group / 2), 0x0f0f0f0fu);
        const Codes upper = bits(f[1] + 32 * half + 16 * lane, 2 * group, 0x03030303u);
        const float d = f16_to_f32(load<u16>(f[3])) * float(i8(f[2][part]));
        scaled<32>(with(low, upper, 4), d, out);
    }
};

struct IQ4_NL {
    static constexpr int VALUES = 32, BYTES = 18, FIELDS = 2; // nibbles, d
    static __device__ constexpr int at(int f) { return f == 0 ? 2 : 0; }
    static __device__ constexpr int size(int f) { return f == 0 ? 16 : 2; }
    static __device__ __forceinline__ void unpack16(const u8 *const *f, int part, float *out) {
        const Codes c = lookup(bits(f[0], 4 * part, 0x0f0f0f0fu), LEVELS_IQ4);
        scaled<128>(c, f16_to_f32(load<u16>(f[1])), out);
    }
};

struct IQ4_XS {
    static constexpr int VALUES = 256, BYTES = 136, FIELDS = 2; // nibbles; d and scales
    static __device__ constexpr int at(int f) { return f == 0 ? 8 : 0; }
    static __device__ constexpr int size(int f) { return f == 0 ? 128 : 8; }
    static __device__ __forceinline__ void unpack16(const u8 *const *f, int part, float *out) {
        // A six-bit scale less 32 for 32 values: a nibble of the last four bytes, two bits of bytes 2 and 3.
        const int sub = part / 2, lane = part % 2;
        const u64 head = load<u64>(f[1]);
        const u32 nibble = (u32(head >> 32) >> (4 * sub)) & 15, upper = (u32(head) >> (16 + 2 * sub)) & 3;
        const float d = lower_half(u32(head)) * float(int(nibble | (upper << 4)) - 32);
        scaled<128>(lookup(bits(f[0] + 16 * sub, 4 * lane, 0x0f0f0f0fu), LEVELS_IQ4), d, out);
    }
};

struct MXFP4 {
    static constexpr int VALUES = 32, BYTES = 17, FIELDS = 2; // nibbles, exponent
    static __device__ constexpr int at(int f) { return f == 0 ? 1 : 0; }
    static __device__ constexpr int size(int f) { return f == 0 ? 16 : 1; }
    static __device__ __forceinline__ void unpack16(const u8 *const *f, int part, float *out) {
        // Half of the e8m0 scale, 2^(e - 128), since the levels are doubled. The two smallest are subnormal.
        const u32 e = f[1][0];
        const float d = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
        scaled<128>(lookup(bits(f[0], 4 * part, 0x0f0f0f0fu), LEVELS_E2M1), d, out);
    }
};

struct NVFP4 {
    static constexpr int VALUES = 64, BYTES = 36, FIELDS = 2; // nibbles, scales
    static __device__ constexpr int at(int f) { return f == 0 ? 4 : 0; }
    static __device__ constexpr int size(int f) { return f == 0 ? 32 : 4; }
    static __device__ __forceinline__ void unpack16(const u8 *const *f, int part, float *out) {
        // Half of an unsigned e4m3 scale, bias 7, subnormals in units of 2^-9. The top bit does not count, except that
        // only 0x7f is NaN's pattern, which reads as zero.
        const u32 scale = f[1][part], exponent = (scale >> 3) & 15, mantissa = scale & 7;
        const float normal = __uint_as_float(((exponent + 127 - 8) << 23) | (mantissa << 20));
        const float subnormal = float(mantissa) * __uint_as_float((127u - 10) << 23);
        const float d = scale == 0x7f ? 0.0f : exponent == 0 ? subnormal : normal;
        // Low nibbles of eight bytes, then the high ones.
        const u64 nibbles = load<u64>(f[0] + 8 * part);
        const u32 first = u32(nibbles), second = u32(nibbles >> 32);
        Codes c = {{first, second, first >> 4, second >> 4}};
#pragma unroll
        for (int i = 0; i < 4; ++i) c.w[i] &= 0x0f0f0f0fu;
        scaled<128>(lookup(c, LEVELS_E2M1), d, out);
    }
};

// Scales of IQ2 and of IQ3_XXS are (d * (code + 1/2)) times a power of two; each step is exact, as d has eleven bits
// and the code four.

struct IQ2_XXS {
    static constexpr int VALUES = 256, BYTES = 66, FIELDS = 2; // indices with signs and scales, d
    static __device__ constexpr int at(int f) { return f == 0 ? 2 : 0; }
    static __device__ constexpr int size(int f) { return f == 0 ? 64 : 2; }
    static __device__ __forceinline__ void unpack16(const u8 *const *f, int part, float *out) {
        // For 32 values: four indices, four times seven sign bits, a scale of four bits.
        const u64 sub = load<u64>(f[0] + 8 * (part / 2));
        const u32 index = u32(sub) >> (16 * (part % 2)), rest = u32(sub >> 32), signs = rest >> (14 * (part % 2));
        const float d = f16_to_f32(load<u16>(f[1])) * (0.5f + float(rest >> 28)) * 0.25f;
        const u32 sixteen = even_signs(signs) | (even_signs(signs >> 7) << 8);
        scaled<128>(grid2(grid_iq2_xxs(index & 255), grid_iq2_xxs((index >> 8) & 255), sixteen), d, out);
    }
};

struct IQ2_XS {
    static constexpr int VALUES = 256, BYTES = 74, FIELDS = 3; // indices with signs, scales, d
    static __device__ constexpr int at(int f) { return f == 0 ? 2 : f == 1 ? 66 : 0; }
    static __device__ constexpr int size(int f) { return f == 0 ? 64 : f == 1 ? 8 : 2; }
    static __device__ __forceinline__ void unpack16(const u8 *const *f, int part, float *out) {
        // For eight values: nine bits of index, seven of signs.
        const u32 pair = load<u32>(f[0] + 4 * part), scale = (u32(f[1][part / 2]) >> (4 * (part % 2))) & 15;
        const float d = f16_to_f32(load<u16>(f[2])) * (0.5f + float(scale)) * 0.25f;
        const u32 signs = even_signs(pair >> 9) | (even_signs(pair >> 25) << 8);
        scaled<128>(grid2(grid_iq2_xs(pair & 511), grid_iq2_xs((pair >> 16) & 511), signs), d, out);
    }
};

struct IQ2_S {
    static constexpr int VALUES = 256, BYTES = 82, FIELDS = 5; // indices, signs, upper bits of indices, scales, d
    static __device__ constexpr int at(int f) { return f == 0 ? 2 : f == 1 ? 34 : f == 2 ? 66 : f == 3 ? 74 : 0; }
    static __device__ constexpr int size(int f) { return f < 2 ? 32 : f < 4 ? 8 : 2; }
    static __device__ __forceinline__ void unpack16(const u8 *const *f, int part, float *out) {
        const int shift = 4 * (part % 2);
        const u32 low = load<u16>(f[0] + 2 * part), signs = load<u16>(f[1] + 2 * part);
        const u32 upper = u32(f[2][part / 2]) >> shift, scale = (u32(f[3][part / 2]) >> shift) & 15;
        const float d = f16_to_f32(load<u16>(f[4])) * (0.5f + float(scale)) * 0.25f;
        const u32 first = (low & 255) | ((upper & 3) << 8), second = (low >> 8) | ((upper & 12) << 6);
        scaled<128>(grid2(grid_iq2_s(first), grid_iq2_s(second), signs), d, out);
    }
};

struct IQ3_XXS {
    static constexpr int VALUES = 256, BYTES = 98, FIELDS = 3; // indices, signs with scales, d
    static __device__ constexpr int at(int f) { return f == 0 ? 2 : f == 1 ? 66 : 0; }
    static __device__ constexpr int size(int f) { return f == 0 ? 64 : f == 1 ? 32 : 2; }
    static __device__ __forceinline__ void unpack16(const u8 *const *f, int part, float *out) {
        const u32 four = load<u32>(f[0] + 4 * part), rest = load<u32>(f[1] + 4 * (part / 2));
        const float d = f16_to_f32(load<u16>(f[2])) * (0.5f + float(rest >> 28)) * 0.5f;
        u32 entry[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) entry[i] = grid_iq3_xxs((four >> (8 * i)) & 255);
        const u32 signs = rest >> (14 * (part % 2)), sixteen = even_signs(signs) | (even_signs(signs >> 7) << 8);
        scaled<128>(grid3(entry, LEVELS_IQ3_XXS, sixteen), d, out);
    }
};

struct IQ3_S {
    static constexpr int VALUES = 256, BYTES = 110, FIELDS = 5; // indices, signs, ninth bits of indices, scales, d
    static __device__ constexpr int at(int f) { return f == 0 ? 2 : f == 1 ? 74 : f == 2 ? 66 : f == 3 ? 106 : 0; }
    static __device__ constexpr int size(int f) { return f == 0 ? 64 : f == 1 ? 32 : f == 2 ? 8 : f == 3 ? 4 : 2; }
    static __device__ __forceinline__ void unpack16(const u8 *const *f, int part, float *out) {
        const u32 four = load<u32>(f[0] + 4 * part), signs = load<u16>(f[1] + 2 * part);
        const u32 ninth = u32(f[2][part / 2]) >> (4 * (part % 2)), scale = (load<u32>(f[3]) >> (4 * (part / 2))) & 15;
        const float d = f16_to_f32(load<u16>(f[4])) * float(1 + 2 * scale);
        u32 entry[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) entry[i] = grid_iq3_s(((four >> (8 * i)) & 255) | (((ninth >> i) & 1) << 8));
        scaled<128>(grid3(entry, LEVELS_IQ3_S, signs), d, out);
    }
};
