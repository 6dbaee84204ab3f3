// Greedy choice over a vocabulary that is split by rank, and the step's inputs for the next token. NaN never wins; ties go
// to the lowest id. Moves: the logits once.
#include "common/ptx.cuh"

struct Best {
    float logit;
    i32 id; // -1: none
};

static __device__ __forceinline__ Best better(Best a, Best b) {
    if (b.id < 0) return a;
    if (a.id < 0 || b.logit > a.logit || (b.logit == a.logit && b.id < a.id)) return b;
    return a;
}

// The best of this rank's `width` logits of each row, whose first has id `first`; a block of whole warps per row.
extern "C" __global__ void __launch_bounds__(1024) best_logit(const float *logits, i64 row, int width, int first, Best *out) {
    __shared__ Best scratch[32];
    const float *own = logits + blockIdx.x * row;
    Best top = {0.0f, -1};
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        if (!isnan(own[i])) top = better(top, {own[i], first + i});
    }
    for (int step = 16; step > 0; step >>= 1) {
        const Best other = {__shfl_xor_sync(0xffffffffu, top.logit, step), __shfl_xor_sync(0xffffffffu, top.id, step)};
        top = better(top, other);
    }
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = top;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < (int)blockDim.x / 32; ++w) top = better(top, scratch[w]);
        out[blockIdx.x] = top;
    }
}

// The best over ranks (`pairs` is [ranks][pair_row], this rank's own pairs where there is one rank) becomes each
// sequence's next token: its id and position replace the step's inputs, and the id is written to place `step % ring` of
// `tokens`, `[ring][n]`. Row r is token r; rows with position -1 stay.
extern "C" __global__ void advance(const Best *pairs, int ranks, int pair_row, int n, i32 *id, i32 *position, i32 *tokens,
                                   int ring, u32 *step) {
    for (int r = threadIdx.x; r < n; r += blockDim.x) {
        Best top = pairs[r];
        for (int k = 1; k < ranks; ++k) top = better(top, pairs[(i64)k * pair_row + r]);
        const bool active = position[r] >= 0;
        if (active) {
            id[r] = max(top.id, 0);
            position[r] = position[r] + 1;
        }
        tokens[(i64)(*step % ring) * n + r] = active ? max(top.id, 0) : -1;
    }
    __syncthreads();
    if (threadIdx.x == 0) *step = *step + 1;
}
