// The indexer (DSA): score of key u for token t is the sum over heads of w[t][h] relu(q[t][h] . k[u]); the `most` best
// visible keys are chosen, ascending, ties to the lowest position, -1 behind the last.
// Numerics: f32; products first to last, heads added over a warp. A NaN score counts as the largest, so that it shows.
// Moves: every index key once per token.
#include "common/block.cuh"
#include "common/tokens.cuh"

struct IndexQueries {
    const float *q;
    i64 q_row;
    i32 start, stride, width, heads;
    const float *weights;
    i64 w_row;
};

static __device__ __forceinline__ float relu(float x) { return x < 0.0f ? 0.0f : x; } // NaN stays NaN

// A warp per key, a lane per head; a block per (64 keys, token). `scores` is [tokens][width], -inf where masked. Rows of
// tokens that see at most `unscored` keys are left out: every key will be chosen.
extern "C" __global__ void __launch_bounds__(256)
    index_scores(const float *cache, IndexQueries in, Tokens tokens, int unscored, int width, float *scores) {
    begin();
    extern __shared__ float shared[];
    const int t = blockIdx.y, visible = tokens.position[t] + 1, first = blockIdx.x * 64;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (visible <= unscored) return;
    scores += (i64)t * width;
    if (first >= visible) {
        for (int u = first + threadIdx.x; u < min(first + 64, width); u += blockDim.x) scores[u] = -INFINITY;
        return;
    }
    // Queries with a padded row, so that lanes read different banks; then a key per warp.
    float *q = shared, *keys = shared + in.heads * (in.width + 1);
    for (int i = threadIdx.x; i < in.heads * in.width; i += blockDim.x) {
        const int h = i / in.width, d = i % in.width;
        q[h * (in.width + 1) + d] = in.q[t * in.q_row + in.start + (i64)h * in.stride + d];
    }
    __syncthreads();
    float *key = keys + warp * in.width;
    for (int u = first + warp; u < min(first + 64, width); u += 8) {
        if (u >= visible) {
            if (lane == 0) scores[u] = -INFINITY;
            continue;
        }
        const float *row = cache + cache_row(tokens, t, u) * in.width;
        __syncwarp();
        for (int d = lane; d < in.width; d += 32) key[d] = row[d];
        __syncwarp();
        float sum = 0.0f;
        for (int h = lane; h < in.heads; h += 32) {
            float dot = 0.0f;
            for (int d = 0; d < in.width; ++d) dot = fmaf(q[h * (in.width + 1) + d], key[d], dot);
            sum = fmaf(in.weights[t * in.w_row + h], relu(dot), sum);
        }
        sum = warp_sum(sum);
        if (lane == 0) scores[u] = sum;
    }
}

// A thread per score.
extern "C" __global__ void index_scores_naive(const float *cache, IndexQueries in, Tokens tokens, int width, float *scores) {
    begin();
    const int u = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
    if (u >= width) return;
    float sum = -INFINITY;
    if (u <= tokens.position[t]) {
        const float *key = cache + cache_row(tokens, t, u) * in.width;
        sum = 0.0f;
        for (int h = 0; h < in.heads; ++h) {
            const float *q = in.q + t * in.q_row + in.start + (i64)h * in.stride;
            float dot = 0.0f;
            for (int d = 0; d < in.width; ++d) dot = dot + q[d] * key[d];
            sum = sum + in.weights[t * in.w_row + h] * relu(dot);
        }
    }
    scores[(i64)t * width + u] = sum;
}

// A score as an integer of the same order: +0 = -0, NaN above all.
static __device__ __forceinline__ u32 order_of(float s) {
    if (isnan(s)) return 0xffffffffu;
    const u32 bits = __float_as_uint(s + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Radix selection, a block per token: four passes of eight bits find the boundary, one ordered pass writes the choice.
extern "C" __global__ void __launch_bounds__(1024)
    top_k(const float *scores, int width, Tokens tokens, int most, i32 *chosen, int chosen_row) {
    begin();
    __shared__ u32 counts[256];
    __shared__ int scratch[32];
    __shared__ u32 prefix;
    __shared__ int wanted;
    const int t = blockIdx.x, visible = tokens.position[t] + 1;
    chosen += (i64)t * chosen_row;
    if (visible <= most) {
        for (int i = threadIdx.x; i < chosen_row; i += blockDim.x) chosen[i] = i < visible ? i : -1;
        return;
    }
    scores += (i64)t * width;
    if (threadIdx.x == 0) {
        prefix = 0;
        wanted = most;
    }
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += blockDim.x) counts[i] = 0;
        __syncthreads();
        const u32 mask = shift == 24 ? 0u : 0xffffffffu << (shift + 8), known = prefix;
        for (int u = threadIdx.x; u < visible; u += blockDim.x) {
            const u32 order = order_of(scores[u]);
            if ((order & mask) == known) atomicAdd(&counts[order >> shift & 255u], 1u);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int digit = 255, left = wanted;
            while ((int)counts[digit] < left) left -= counts[digit--];
            wanted = left;
            prefix |= (u32)digit << shift;
        }
        __syncthreads();
    }
    // Everything above the boundary, and the first `wanted` at it.
    const u32 boundary = prefix;
    int written = 0, equal = 0;
    for (int u0 = 0; u0 < visible; u0 += blockDim.x) {
        const int u = u0 + threadIdx.x;
        const u32 order = u < visible ? order_of(scores[u]) : 0u;
        const bool at = u < visible && order == boundary;
        int total;
        const int rank = equal + block_rank(at, scratch, total);
        equal += total;
        const bool take = u < visible && (order > boundary || (at && rank < wanted));
        const int place = written + block_rank(take, scratch, total);
        written += total;
        if (take) chosen[place] = u;
    }
    for (int i = most + threadIdx.x; i < chosen_row; i += blockDim.x) chosen[i] = -1;
}

// The same by counting, for every key, the keys that come before it; a thread per key. `taken` is [tokens][width].
extern "C" __global__ void top_k_naive(const float *scores, int width, Tokens tokens, int most, u8 *taken) {
    begin();
    const int u = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y, visible = tokens.position[t] + 1;
    if (u >= width) return;
    scores += (i64)t * width;
    int before = 0;
    if (u < visible) {
        const u32 own = order_of(scores[u]);
        for (int v = 0; v < visible; ++v) {
            const u32 other = order_of(scores[v]);
            before += other > own || (other == own && v < u);
        }
    }
    taken[(i64)t * width + u] = u < visible && before < most;
}

// Lists what was taken, ascending; a thread per token.
extern "C" __global__ void list_naive(const u8 *taken, int width, i32 *chosen, int chosen_row, int n) {
    begin();
    const int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= n) return;
    int written = 0;
    for (int u = 0; u < width; ++u) {
        if (taken[(i64)t * width + u]) chosen[(i64)t * chosen_row + written++] = u;
    }
    while (written < chosen_row) chosen[(i64)t * chosen_row + written++] = -1;
}
