// Norms over columns of rows, a block per row, f32; squares are added by thread and then over the block.
// RMSNorm: y = w x / sqrt(mean(x^2) + eps). LayerNorm: x = w (x - mean) / sqrt(var + eps) + b.
// Moves: each value read twice (the second time from cache) and written once.
#include "common/block.cuh"

// Values of a row that a thread keeps: all loads are on their way before the first is used, and none is made twice.
constexpr int KEPT = 12;

template <class Load> static __device__ __forceinline__ void keep(float (&kept)[KEPT], int width, Load load) {
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int i = threadIdx.x + k * blockDim.x;
        kept[k] = i < width ? load(i) : 0.0f;
    }
}

// `use(i, value)` for every column of this thread, in order; `load` gives those that are not kept.
template <class Load, class Use>
static __device__ __forceinline__ void each(const float (&kept)[KEPT], int width, Load load, Use use) {
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int i = threadIdx.x + k * blockDim.x;
        if (i < width) use(i, kept[k]);
    }
    for (int i = threadIdx.x + KEPT * blockDim.x; i < width; i += blockDim.x) use(i, load(i));
}

// y = x * scale * w
template <class Load>
static __device__ __forceinline__ void scaled(const float (&own)[KEPT], const float (&weights)[KEPT], int width, Load of_x,
                                              float scale, const float *w, float *y) {
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int i = threadIdx.x + k * blockDim.x;
        if (i < width) y[i] = own[k] * scale * weights[k];
    }
    for (int i = threadIdx.x + KEPT * blockDim.x; i < width; i += blockDim.x) y[i] = of_x(i) * scale * w[i];
}

// y[t][0..width] from x[t][0..width].
extern "C" __global__ void rms_norm(const float *x, i64 x_row, const float *w, float eps, int width, float *y, i64 y_row) {
    begin();
    __shared__ float scratch[32];
    x += blockIdx.x * x_row;
    y += blockIdx.x * y_row;
    float own[KEPT], weights[KEPT], squares = 0.0f;
    const auto of_x = [&](int i) { return x[i]; };
    keep(own, width, of_x);
    keep(weights, width, [&](int i) { return w[i]; });
    each(own, width, of_x, [&](int, float v) { squares = fmaf(v, v, squares); });
    const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / (float)width + eps);
    scaled(own, weights, width, of_x, scale, w, y);
}

// residual += delta, then y = rms_norm(residual).
extern "C" __global__ void add_rms_norm(float *residual, i64 r_row, const float *delta, i64 d_row, const float *w, float eps,
                                        int width, float *y, i64 y_row) {
    begin();
    __shared__ float scratch[32];
    residual += blockIdx.x * r_row;
    delta += blockIdx.x * d_row;
    y += blockIdx.x * y_row;
    float own[KEPT], weights[KEPT], squares = 0.0f;
    const auto of_sum = [&](int i) { return residual[i] + delta[i]; };
    keep(own, width, of_sum);
    keep(weights, width, [&](int i) { return w[i]; });
    each(own, width, of_sum, [&](int i, float v) {
        residual[i] = v;
        squares = fmaf(v, v, squares);
    });
    const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / (float)width + eps);
    scaled(own, weights, width, [&](int i) { return residual[i]; }, scale, w, y);
}

// In place.
extern "C" __global__ void layer_norm(float *x, i64 x_row, const float *w, const float *b, float eps, int width) {
    begin();
    __shared__ float scratch[32];
    x += blockIdx.x * x_row;
    float sum = 0.0f, squares = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum = sum + x[i];
    const float mean = block_sum(sum, scratch) / (float)width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const float d = x[i] - mean;
        squares = fmaf(d, d, squares);
    }
    const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / (float)width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) x[i] = (x[i] - mean) * scale * w[i] + b[i];
}

// A thread per row, columns first to last.
extern "C" __global__ void rms_norm_naive(const float *x, i64 x_row, const float *w, float eps, int width, float *y, i64 y_row,
                                          int n) {
    begin();
    const int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= n) return;
    float squares = 0.0f;
    for (int i = 0; i < width; ++i) squares = squares + x[t * x_row + i] * x[t * x_row + i];
    const float scale = 1.0f / sqrtf(squares / (float)width + eps);
    for (int i = 0; i < width; ++i) y[t * y_row + i] = x[t * x_row + i] * scale * w[i];
}

extern "C" __global__ void layer_norm_naive(float *x, i64 x_row, const float *w, const float *b, float eps, int width, int n) {
    begin();
    const int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= n) return;
    float sum = 0.0f, squares = 0.0f;
    for (int i = 0; i < width; ++i) sum = sum + x[t * x_row + i];
    const float mean = sum / (float)width;
    for (int i = 0; i < width; ++i) {
        const float d = x[t * x_row + i] - mean;
        squares = squares + d * d;
    }
    const float scale = 1.0f / sqrtf(squares / (float)width + eps);
    for (int i = 0; i < width; ++i) x[t * x_row + i] = (x[t * x_row + i] - mean) * scale * w[i] + b[i];
}
