// Reading a stored matrix sixteen values at a time, whatever its type. TYPE is defined by the build.
#pragma once
#include "ptx.cuh"
#include "tiles.cuh"
#include "unpack.cuh"

// The planes of a repacked tensor: plane f starts 16-byte aligned behind plane f - 1 and holds field f of every block.
template <class T> struct Planes {
    const u8 *at[T::FIELDS];

    __device__ __forceinline__ Planes(const u8 *base, i64 blocks) {
#pragma unroll
        for (int f = 0; f < T::FIELDS; ++f) {
            at[f] = base;
            base += (blocks * T::size(f) + 15) / 16 * 16;
        }
    }
};

// Sixteen values of row `row`, from column `16 * chunk` on; zeros behind the last of `cols` columns.
template <class T> struct Reader {
    // Loads in flight that registers have room for, and blocks that a multiprocessor is to hold at once.
    static constexpr int AT_ONCE = 4, RESIDENT = 4;
    Planes<T> planes;
    int cols;

    __device__ __forceinline__ Reader(const u8 *base, i64 blocks, int cols) : planes(base, blocks), cols(cols) {}

    __device__ __forceinline__ void load(i64 row, int chunk, float *out) const {
        constexpr int PARTS = T::VALUES / 16;
        const i64 block = row * (cols / T::VALUES) + chunk / PARTS;
        const u8 *fields[T::FIELDS];
#pragma unroll
        for (int f = 0; f < T::FIELDS; ++f) fields[f] = planes.at[f] + block * T::size(f);
        T::unpack16(fields, chunk % PARTS, out);
    }
};

// Plain types: one value is a block, rows need not be whole chunks.
struct F32 {
    static constexpr int VALUES = 1, BYTES = 4, FIELDS = 1;
    static __device__ constexpr int at(int) { return 0; }
    static __device__ constexpr int size(int) { return 4; }
    static __device__ __forceinline__ float value(const u8 *p, i64 i) { return ((const float *)p)[i]; }
};
struct F16 {
    static constexpr int VALUES = 1, BYTES = 2, FIELDS = 1;
    static __device__ constexpr int at(int) { return 0; }
    static __device__ constexpr int size(int) { return 2; }
    static __device__ __forceinline__ float value(const u8 *p, i64 i) { return f16_to_f32(((const u16 *)p)[i]); }
};
struct BF16 {
    static constexpr int VALUES = 1, BYTES = 2, FIELDS = 1;
    static __device__ constexpr int at(int) { return 0; }
    static __device__ constexpr int size(int) { return 2; }
    static __device__ __forceinline__ float value(const u8 *p, i64 i) { return bf16_to_f32(((const u16 *)p)[i]); }
};

template <class T> struct PlainReader {
    static constexpr int AT_ONCE = 4, RESIDENT = 4;
    const u8 *base;
    int cols;

    __device__ __forceinline__ PlainReader(const u8 *base, i64, int cols) : base(base), cols(cols) {}

    __device__ __forceinline__ void load(i64 row, int chunk, float *out) const {
        const i64 first = row * cols;
        if (chunk * 16 + 16 <= cols && cols % 16 == 0) {
            // Rows are whole chunks, so every chunk is aligned to its own size.
            const Quad *from = (const Quad *)(base + (first + chunk * 16) * T::BYTES);
#pragma unroll
            for (int q = 0; q < T::BYTES; ++q) {
                const Quad quad = from[q];
#pragma unroll
                for (int i = 0; i < 16 / T::BYTES; ++i) out[q * (16 / T::BYTES) + i] = T::value((const u8 *)&quad, i);
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int col = chunk * 16 + i;
            out[i] = col < cols ? T::value(base, first + col) : 0.0f;
        }
    }
};
template <> struct Reader<F32> : PlainReader<F32> { using PlainReader<F32>::PlainReader; };
template <> struct Reader<F16> : PlainReader<F16> { using PlainReader<F16>::PlainReader; };
template <> struct Reader<BF16> : PlainReader<BF16> { using PlainReader<BF16>::PlainReader; };

// Tiles: rows count through the stack, and columns are whole units.
template <class T> struct Reader<Tiles<T>> {
    static constexpr int AT_ONCE = 2, RESIDENT = 3;
    const u8 *base;
    int cols;

    __device__ __forceinline__ Reader(const u8 *base, i64, int cols) : base(base), cols(cols) {}

    __device__ __forceinline__ void load(i64 row, int chunk, float *out) const {
        const i64 unit = row / 16 * (cols / 256) + chunk / 16;
        Tiles<T>::unpack16(base + unit * Tiles<T>::UNIT, int(row % 16), chunk % 16, out);
    }
};
