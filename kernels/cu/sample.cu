// Choice of a token over a vocabulary that is split by rank, greedy or with a temperature, and the step's inputs for the
// next one. NaN never wins; ties go to the lowest id. Moves: the logits once.
#include "common/ptx.cuh"

struct Choice {
    float key;
    i32 id; // -1: none
};

static __device__ __forceinline__ Choice better(Choice a, Choice b) {
    if (b.id < 0) return a;
    if (a.id < 0 || b.key > a.key || (b.key == a.key && b.id < a.id)) return b;
    return a;
}

// Gumbel noise: draw `position * 2^32 + id` of splitmix64 (Steele, Lea and Flood 2014), taken as the middle of one of 2^52
// parts of (0, 1).
static __device__ double noise(u64 seed, i32 position, i32 id) {
    const u64 draw = ((u64)(u32)position << 32 | (u32)id) + 1;
    u64 z = seed + draw * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    const double uniform = ((double)((z ^ (z >> 31)) >> 12) + 0.5) / 4503599627370496.0;
    return -log(-log(uniform));
}

// The choice among this rank's `width` logits of each row, whose first has id `first`: the largest logit where the
// temperature is 0, else the largest logit / temperature + noise, which follows the softmax (Maddison, Tarlow and Minka
// 2014). A block of whole warps per row; `seed` is [rows][2], the low half first.
extern "C" __global__ void __launch_bounds__(1024)
    sample(const float *logits, i64 row, int width, int first, const float *temperature, const u32 *seed,
           const i32 *position, Choice *out) {
    begin();
    __shared__ Choice scratch[32];
    const int r = blockIdx.x;
    const float *own = logits + r * row;
    const double t = temperature[r];
    const u64 s = (u64)seed[2 * r + 1] << 32 | seed[2 * r];
    Choice top = {0.0f, -1};
    // The likeliest one waits for memory alone, so many loads are on their way at once.
    constexpr int AT_ONCE = 16;
    const int stride = blockDim.x, greedy = t > 0 ? 0 : width / (AT_ONCE * stride) * (AT_ONCE * stride);
    for (int start = threadIdx.x; start < greedy; start += AT_ONCE * stride) {
        float keys[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) keys[k] = own[start + k * stride];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            if (!isnan(keys[k])) top = better(top, {keys[k], first + start + k * stride});
        }
    }
    for (int i = greedy + threadIdx.x; i < width; i += blockDim.x) {
        const float key = t > 0 ? (float)(own[i] / t + noise(s, position[r], first + i)) : own[i];
        if (!isnan(key)) top = better(top, {key, first + i});
    }
    for (int step = 16; step > 0; step >>= 1) {
        const Choice other = {__shfl_xor_sync(0xffffffffu, top.key, step), __shfl_xor_sync(0xffffffffu, top.id, step)};
        top = better(top, other);
    }
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = top;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < (int)blockDim.x / 32; ++w) top = better(top, scratch[w]);
        out[r] = top;
    }
}

// The best choice over ranks (`pairs` is [ranks][pair_row], this rank's own pairs where there is one rank) becomes each
// sequence's next token: its id and position replace the step's inputs, and the id is written to place `step % ring` of
// `tokens`, `[ring][n]`. Row r is token r; rows with position -1 stay.
extern "C" __global__ void commit(const Choice *pairs, int ranks, int pair_row, int n, i32 *id, i32 *position,
                                  i32 *tokens, int ring, u32 *step) {
    begin();
    for (int r = threadIdx.x; r < n; r += blockDim.x) {
        Choice top = pairs[r];
        for (int k = 1; k < ranks; ++k) top = better(top, pairs[(i64)k * pair_row + r]);
        const bool active = position[r] >= 0;
        if (active) {
            id[r] = max(top.id, 0);
            position[r] = position[r] + 1;
        }
        // -2 tells the host that no logit was a number; the step that is already behind runs on some id.
        tokens[(i64)(*step % ring) * n + r] = !active ? -1 : top.id < 0 ? -2 : top.id;
    }
    __syncthreads();
    if (threadIdx.x == 0) *step = *step + 1;
}
