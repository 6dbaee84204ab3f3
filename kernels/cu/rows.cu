// Element-wise work on columns of rows: rope, copies, sums, SwiGLU, appends, the sum over virtual ranks. A thread per
// value (or pair), each value read and written once; these kernels are their own naive form.
#include "common/tokens.cuh"

#define EACH(i, count) for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < (count); i += (i64)gridDim.x * blockDim.x)

// cos and sin of position * base^(-2 i / width) for each pair i: f64, rounded once. `[positions][width / 2][2]`.
extern "C" __global__ void rope_table(float *table, int positions, int width, double base) {
    begin();
    const int pairs = width / 2;
    EACH(i, (i64)positions * pairs) {
        const double angle = (double)(i / pairs) * pow(base, -2.0 * (double)(i % pairs) / (double)width);
        table[2 * i] = (float)cos(angle);
        table[2 * i + 1] = (float)sin(angle);
    }
}

// Rotates adjacent pairs of every head by the token's position, in place.
extern "C" __global__ void rope(float *x, i64 row, int start, int stride, int width, int heads, const float *table,
                                Tokens tokens, int n) {
    begin();
    const int pairs = width / 2;
    EACH(i, (i64)n * heads * pairs) {
        const int pair = i % pairs, head = i / pairs % heads, t = i / pairs / heads;
        const int position = tokens.position[t];
        if (position < 0) continue;
        float *at = x + t * row + start + (i64)head * stride + 2 * pair;
        const float cosine = table[((i64)position * pairs + pair) * 2], sine = table[((i64)position * pairs + pair) * 2 + 1];
        const float a = at[0], b = at[1];
        at[0] = a * cosine - b * sine;
        at[1] = b * cosine + a * sine;
    }
}

extern "C" __global__ void scale(float *x, i64 row, int width, float factor, int n) {
    begin();
    EACH(i, (i64)n * width) x[i / width * row + i % width] *= factor;
}

extern "C" __global__ void copy(const float *x, i64 x_row, int width, float *y, i64 y_row, int n) {
    begin();
    EACH(i, (i64)n * width) y[i / width * y_row + i % width] = x[i / width * x_row + i % width];
}

// Columns `from ..` of a wider, zero-padded row: the covering blocks of a rank's column range. Groups lie side by side
// in x and become rows of y.
extern "C" __global__ void widen(const float *x, i64 x_row, i64 x_group, int groups, int width, int from, float *y, int wide,
                                 int n) {
    begin();
    EACH(i, (i64)n * groups * wide) {
        const int col = i % wide - from, g = i / wide % groups, t = i / wide / groups;
        y[i] = col >= 0 && col < width ? x[t * x_row + g * x_group + col] : 0.0f;
    }
}

// Rows `rows[i]` of x; an entry of -1 gives zeros.
extern "C" __global__ void gather_rows(const float *x, i64 x_row, int width, const i32 *rows, float *y, i64 y_row,
                                       int n) {
    begin();
    EACH(i, (i64)n * width) {
        const int t = rows[i / width];
        y[i / width * y_row + i % width] = t < 0 ? 0.0f : x[t * x_row + i % width];
    }
}

extern "C" __global__ void add(float *x, i64 x_row, const float *y, i64 y_row, int width, int n) {
    begin();
    EACH(i, (i64)n * width) x[i / width * x_row + i % width] += y[i / width * y_row + i % width];
}

// y = silu(x[0..width]) x[width..2 width]; groups lie side by side in x and in y.
extern "C" __global__ void swiglu(const float *x, i64 x_row, i64 x_group, int groups, int width, float *y, i64 y_row, int n) {
    begin();
    EACH(i, (i64)n * groups * width) {
        const int col = i % width, g = i / width % groups, t = i / width / groups;
        const float gate = x[t * x_row + g * x_group + col], up = x[t * x_row + g * x_group + width + col];
        y[t * y_row + (i64)g * width + col] = gate / (1.0f + expf(-gate)) * up;
    }
}

// Each token's columns to its place in a layer of a paged cache.
extern "C" __global__ void append(float *cache, int width, const float *x, i64 x_row, Tokens tokens, int n) {
    begin();
    EACH(i, (i64)n * width) {
        const int t = i / width, position = tokens.position[t];
        if (position >= 0) cache[cache_row(tokens, t, position) * width + i % width] = x[t * x_row + i % width];
    }
}

// Most virtual ranks of one card.
struct Ranks {
    float *at[64];
};

// The sum of all ranks' rows in rank order, f32, written to every rank.
extern "C" __global__ void sum_ranks(Ranks ranks, int tp, i64 row, int width, int n) {
    begin();
    EACH(i, (i64)n * width) {
        const i64 at = i / width * row + i % width;
        float sum = 0.0f;
        for (int r = 0; r < tp; ++r) sum = sum + ranks.at[r][at];
        for (int r = 0; r < tp; ++r) ranks.at[r][at] = sum;
    }
}

extern "C" __global__ void fill(float *x, i64 count, float value) {
    begin();
    EACH(i, count) x[i] = value;
}

// Counts values that are NaN or infinite.
extern "C" __global__ void count_nonfinite(const float *x, i64 row, int width, int n, u32 *found) {
    begin();
    u32 own = 0;
    EACH(i, (i64)n * width) own += !isfinite(x[i / width * row + i % width]);
    if (own) atomicAdd(found, own);
}

// f32 to bf16 and back.
extern "C" __global__ void to_bf16(const float *x, u16 *y, i64 count) {
    begin();
    EACH(i, count) y[i] = f32_to_bf16(x[i]);
}
extern "C" __global__ void from_bf16(const u16 *x, float *y, i64 count) {
    begin();
    EACH(i, count) y[i] = bf16_to_f32(x[i]);
}
