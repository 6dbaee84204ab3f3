// Products of activations with a stored matrix of type TYPE: y[t][r] = sum over k of x[t][k] W[r][k].
// Layouts: W is `[stack][rows][cols]` in planes; x and y are f32 with a row stride; a group g (a head, a slot of a chosen
// expert) has a matrix of its own and its own places in x and y.
// Numerics: weights exact, one f32 fused multiply-add per product; the operand x is rounded to bf16 first when
// `recipe` is 1. `gemv` adds by lanes and then over the warp, `gemm` first to last; neither order depends on the run.
// Moves: gemv reads every weight once; gemm once per 64 rows of x.
#include "common/weights.cuh"
#include "common/block.cuh"

struct Matrix {
    const u8 *planes;
    i64 blocks; // of the whole stack
    i32 rows;
    i32 cols;
};

// Activations of groups: group g of row t starts at `at + t * row + g * group`.
struct Rows {
    float *at;
    i64 row;
    i64 group;
};

static __device__ __forceinline__ float operand(float x, int recipe) { return recipe ? round_bf16(x) : x; }

// The product of one row of W with N rows of x, in every lane. x rows are 16-byte aligned and padded to whole chunks
// unless `ragged`.
template <int N>
static __device__ __forceinline__ void dot(const Reader<TYPE> &w, i64 row, const float *x, i64 stride, int n, int recipe,
                                           bool ragged, float *sum) {
    const int chunks = (w.cols + 15) / 16;
#pragma unroll
    for (int t = 0; t < N; ++t) sum[t] = 0.0f;
    // Several chunks in flight hide the latency of memory where there are registers for it.
#pragma unroll(N == 1 ? Reader<TYPE>::AT_ONCE : 1)
    for (int chunk = threadIdx.x % 32; chunk < chunks; chunk += 32) {
        float v[16];
        w.load(row, chunk, v);
#pragma unroll
        for (int t = 0; t < N; ++t) {
            if (N > 1 && t >= n) break;
            const float *from = x + t * stride + chunk * 16;
            if (ragged) {
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    if (chunk * 16 + i < w.cols) sum[t] = fmaf(operand(from[i], recipe), v[i], sum[t]);
                }
                continue;
            }
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const Quad quad = ((const Quad *)from)[q];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sum[t] = fmaf(operand(__uint_as_float(quad.x[i]), recipe), v[4 * q + i], sum[t]);
                }
            }
        }
    }
#pragma unroll
    for (int t = 0; t < N; ++t) sum[t] = warp_sum(sum[t]);
}

static __device__ __forceinline__ bool is_ragged(const Matrix &w, const Rows &x) {
    return w.cols % 16 != 0 || x.row % 4 != 0 || x.group % 4 != 0 || (u64)x.at % 16 != 0;
}

// Blocks that a multiprocessor is to hold at once. Four leave 64 registers a thread; with several rows or matrices, code
// for sm_100 and later needs more and would spill.
#if __CUDA_ARCH__ >= 1000
constexpr int RESIDENT = 3;
#else
constexpr int RESIDENT = Reader<TYPE>::RESIDENT;
#endif

// One warp per row of W, for at most N rows of x. Grid: (rows / warps, groups); matrix g of the stack for group g.
template <int N> static __device__ __forceinline__ void gemv_body(Matrix w, Rows x, Rows y, int n, int recipe) {
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, g = blockIdx.y;
    if (row >= w.rows) return;
    float sum[N];
    const Reader<TYPE> reader(w.planes, w.blocks, w.cols);
    dot<N>(reader, (i64)g * w.rows + row, x.at + g * x.group, x.row, n, recipe, is_ragged(w, x), sum);
    if (threadIdx.x % 32 != 0) return;
#pragma unroll
    for (int t = 0; t < N; ++t) {
        if (t < n) y.at[t * y.row + g * y.group + row] = sum[t];
    }
}

extern "C" __global__ void __launch_bounds__(256, Reader<TYPE>::RESIDENT) gemv_1(Matrix w, Rows x, Rows y, int n, int recipe) {
    begin();
    gemv_body<1>(w, x, y, n, recipe);
}
extern "C" __global__ void __launch_bounds__(256, RESIDENT) gemv_2(Matrix w, Rows x, Rows y, int n, int recipe) {
    begin();
    gemv_body<2>(w, x, y, n, recipe);
}
extern "C" __global__ void __launch_bounds__(256, RESIDENT) gemv_4(Matrix w, Rows x, Rows y, int n, int recipe) {
    begin();
    gemv_body<4>(w, x, y, n, recipe);
}
extern "C" __global__ void __launch_bounds__(256, RESIDENT) gemv_8(Matrix w, Rows x, Rows y, int n, int recipe) {
    begin();
    gemv_body<8>(w, x, y, n, recipe);
}

// Slots of chosen experts: slot s = t * slots + j multiplies matrix ids[s]; its x is group j of row t, its y group j of
// row t. Slots without an expert (id out of range) give zeros. Grid: (rows / warps, tokens * slots).
extern "C" __global__ void __launch_bounds__(256, Reader<TYPE>::RESIDENT)
    gemv_slots(Matrix w, int stack, const i32 *ids, int slots, Rows x, Rows y, int recipe) {
    begin();
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, s = blockIdx.y, t = s / slots, j = s % slots;
    if (row >= w.rows) return;
    const int id = ids[s];
    float sum[1] = {0.0f};
    if (id >= 0 && id < stack) {
        const Reader<TYPE> reader(w.planes, w.blocks, w.cols);
        dot<1>(reader, (i64)id * w.rows + row, x.at + t * x.row + j * x.group, 0, 1, recipe, is_ragged(w, x), sum);
    }
    if (threadIdx.x % 32 == 0) y.at[t * y.row + j * y.group + row] = sum[0];
}

// Gate, up and SwiGLU of chosen experts in one pass: y[t][j][r] = silu(gate_r . x_t) * (up_r . x_t).
extern "C" __global__ void __launch_bounds__(256, RESIDENT)
    gemv_gate_up(Matrix gate, Matrix up, int stack, const i32 *ids, int slots, Rows x, Rows y, int recipe) {
    begin();
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, s = blockIdx.y, t = s / slots, j = s % slots;
    if (row >= gate.rows) return;
    const int id = ids[s];
    float out = 0.0f;
    if (id >= 0 && id < stack) {
        float g[1], u[1];
        const Reader<TYPE> gates(gate.planes, gate.blocks, gate.cols), ups(up.planes, up.blocks, up.cols);
        const bool ragged = is_ragged(gate, x);
        dot<1>(gates, (i64)id * gate.rows + row, x.at + t * x.row, 0, 1, recipe, ragged, g);
        dot<1>(ups, (i64)id * up.rows + row, x.at + t * x.row, 0, 1, recipe, ragged, u);
        out = g[0] / (1.0f + expf(-g[0])) * u[0];
    }
    if (threadIdx.x % 32 == 0) y.at[t * y.row + j * y.group + row] = out;
}

// Tiles of TILE rows of W by TILE rows of x, DEPTH columns at a time.
constexpr int TILE = 64, DEPTH = 32;

// One tile. `x_row(i)` and `y_row(i)` say where row i of the tile's x and y lie, or null behind the last.
template <class XRow, class YRow>
static __device__ __forceinline__ void gemm_tile(const Matrix &w, i64 first, int row0, XRow x_row, YRow y_row, int recipe) {
    __shared__ float ws[DEPTH][TILE + 1], xs[DEPTH][TILE + 1];
    const Reader<TYPE> reader(w.planes, w.blocks, w.cols);
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    float acc[4][4] = {};
    for (int k0 = 0; k0 < w.cols; k0 += DEPTH) {
        const int lane = threadIdx.x % 128, i = lane / 2, part = lane % 2;
        const int chunk = k0 / 16 + part;
        if (threadIdx.x < 128) {
            float v[16];
            const bool inside = row0 + i < w.rows && chunk * 16 < w.cols;
            if (inside) reader.load(first + row0 + i, chunk, v);
#pragma unroll
            for (int k = 0; k < 16; ++k) ws[part * 16 + k][i] = inside ? v[k] : 0.0f;
        } else {
            const float *from = x_row(i);
#pragma unroll
            for (int k = 0; k < 16; ++k) {
                const int col = chunk * 16 + k;
                xs[part * 16 + k][i] = from && col < w.cols ? operand(from[col], recipe) : 0.0f;
            }
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            float a[4], b[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                a[i] = xs[k][ty * 4 + i];
                b[i] = ws[k][tx + 16 * i];
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[i][j] = fmaf(a[i], b[j], acc[i][j]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float *to = y_row(ty * 4 + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = row0 + tx + 16 * j;
            if (to && row < w.rows) to[row] = acc[i][j];
        }
    }
}

// Any number of rows of x. Grid: (rows / TILE, n / TILE, groups).
extern "C" __global__ void __launch_bounds__(256) gemm(Matrix w, Rows x, Rows y, int n, int recipe) {
    begin();
    const int t0 = blockIdx.y * TILE, g = blockIdx.z;
    const auto x_row = [&](int i) { return t0 + i < n ? x.at + (t0 + i) * x.row + g * x.group : nullptr; };
    const auto y_row = [&](int i) { return t0 + i < n ? y.at + (t0 + i) * y.row + g * y.group : nullptr; };
    gemm_tile(w, (i64)g * w.rows, blockIdx.x * TILE, x_row, y_row, recipe);
}

// Slots sorted by expert: tile b holds `tiles[3 b + 2]` slots of expert `tiles[3 b]`, from place `tiles[3 b + 1]` of
// `order` on; tiles behind the last hold none. Grid: (rows / TILE, most tiles).
extern "C" __global__ void __launch_bounds__(256)
    gemm_slots(Matrix w, const i32 *tiles, const i32 *order, int slots, Rows x, Rows y, int recipe) {
    begin();
    const i32 id = tiles[3 * blockIdx.y], start = tiles[3 * blockIdx.y + 1], count = tiles[3 * blockIdx.y + 2];
    if (count == 0) return;
    const auto at = [&](const Rows &r, int i) -> float * {
        if (i >= count) return nullptr;
        const int s = order[start + i];
        return r.at + s / slots * r.row + s % slots * r.group;
    };
    const auto x_row = [&](int i) { return at(x, i); };
    const auto y_row = [&](int i) { return at(y, i); };
    gemm_tile(w, (i64)id * w.rows, blockIdx.x * TILE, x_row, y_row, recipe);
}

// The same as gemv and gemm, a thread per value, columns first to last.
extern "C" __global__ void matmul_naive(Matrix w, Rows x, Rows y, int n, int recipe) {
    begin();
    const int row = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y, g = blockIdx.z;
    if (row >= w.rows || t >= n) return;
    const Reader<TYPE> reader(w.planes, w.blocks, w.cols);
    float sum = 0.0f;
    for (int chunk = 0; chunk * 16 < w.cols; ++chunk) {
        float v[16];
        reader.load((i64)g * w.rows + row, chunk, v);
        for (int i = 0; i < 16 && chunk * 16 + i < w.cols; ++i) {
            sum = fmaf(operand(x.at[t * x.row + g * x.group + chunk * 16 + i], recipe), v[i], sum);
        }
    }
    y.at[t * y.row + g * y.group + row] = sum;
}

// The same as gemv_slots and gemm_slots.
extern "C" __global__ void slots_naive(Matrix w, int stack, const i32 *ids, int slots, Rows x, Rows y, int recipe) {
    begin();
    const int row = blockIdx.x * blockDim.x + threadIdx.x, s = blockIdx.y, t = s / slots, j = s % slots;
    if (row >= w.rows) return;
    const Reader<TYPE> reader(w.planes, w.blocks, w.cols);
    float sum = 0.0f;
    if (ids[s] >= 0 && ids[s] < stack) {
        for (int chunk = 0; chunk * 16 < w.cols; ++chunk) {
            float v[16];
            reader.load((i64)ids[s] * w.rows + row, chunk, v);
            for (int i = 0; i < 16 && chunk * 16 + i < w.cols; ++i) {
                sum = fmaf(operand(x.at[t * x.row + j * x.group + chunk * 16 + i], recipe), v[i], sum);
            }
        }
    }
    y.at[t * y.row + j * y.group + row] = sum;
}

// Rows `first ..` of a vocabulary-parallel table: y[t] = row of token t's id, zeros for ids of other ranks.
extern "C" __global__ void embed(Matrix w, int first, const i32 *ids, Rows y) {
    begin();
    const int t = blockIdx.x, row = ids[t] - first;
    const bool own = ids[t] >= 0 && row >= 0 && row < w.rows;
    const Reader<TYPE> reader(w.planes, w.blocks, w.cols);
    for (int chunk = threadIdx.x; chunk * 16 < w.cols; chunk += blockDim.x) {
        float v[16];
        if (own) reader.load(row, chunk, v);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            if (chunk * 16 + i < w.cols) y.at[t * y.row + chunk * 16 + i] = own ? v[i] : 0.0f;
        }
    }
}
