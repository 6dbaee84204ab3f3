// Routing: scores of all experts (sigmoid or softmax), bias, the best groups, the best experts (ties to the lowest index),
// their weights; then the experts' order for grouped products, and the sum over a token's experts.
// Numerics: f32; softmax and sums first to last; NaN never wins. Moves: the logits once, ids and weights.
#include "common/block.cuh"

struct Router {
    i32 experts, used, groups, groups_used;
    i32 softmax; // else sigmoid
    i32 normalise;
    float factor;
};

// Unbiased scores of one token, by the whole block; ends with a barrier.
static __device__ void gate(const Router &r, const float *logits, float *scores, float *scratch) {
    if (!r.softmax) {
        for (int e = threadIdx.x; e < r.experts; e += blockDim.x) scores[e] = 1.0f / (1.0f + expf(-logits[e]));
        __syncthreads();
        return;
    }
    if (threadIdx.x == 0) {
        float top = -INFINITY, sum = 0.0f;
        for (int e = 0; e < r.experts; ++e) top = fmaxf(top, logits[e]);
        for (int e = 0; e < r.experts; ++e) sum = sum + expf(logits[e] - top);
        scratch[0] = top;
        scratch[1] = sum;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < r.experts; e += blockDim.x) scores[e] = expf(logits[e] - scratch[0]) / scratch[1];
    __syncthreads();
}

// Index of the best of `scores[0..n]` that is not in `taken`, by one warp; -1 if none. Ties go to the lowest.
static __device__ int best(const float *scores, int n, const i32 *taken, int count) {
    float top = 0.0f;
    int at = -1;
    for (int e = threadIdx.x % 32; e < n; e += 32) {
        bool is_taken = false;
        for (int i = 0; i < count; ++i) is_taken |= taken[i] == e;
        if (!is_taken && !isnan(scores[e]) && (at < 0 || scores[e] > top)) {
            top = scores[e];
            at = e;
        }
    }
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        const float other = __shfl_xor_sync(0xffffffffu, top, step);
        const int index = __shfl_xor_sync(0xffffffffu, at, step);
        if (index >= 0 && (at < 0 || other > top || (other == top && index < at))) {
            top = other;
            at = index;
        }
    }
    return at;
}

// A block per token; `scores` of all experts in shared memory, then choice scores (biased, -inf outside the groups in use)
// to memory and the chosen ids, best first. Tokens behind the last (position -1) choose nothing.
extern "C" __global__ void route(Router r, const float *logits, i64 row, const float *bias, const i32 *position, float *choice,
                                 i64 choice_row, i32 *ids) {
    begin();
    extern __shared__ float scores[];
    __shared__ float scratch[2];
    float *group_scores = scores + r.experts;
    i32 *picked = (i32 *)(group_scores + r.groups);
    const int t = blockIdx.x, size = r.experts / r.groups;
    gate(r, logits + t * row, scores, scratch);
    for (int e = threadIdx.x; e < r.experts; e += blockDim.x) scores[e] = scores[e] + bias[e];
    __syncthreads();
    if (r.groups_used < r.groups && threadIdx.x < 32) {
        // A group counts as the sum of its two best.
        for (int g = 0; g < r.groups; ++g) {
            i32 two[2] = {-1, -1};
            float sum = 0.0f;
            for (int i = 0; i < min(2, size); ++i) {
                two[i] = best(scores + g * size, size, two, i);
                if (two[i] >= 0) sum = sum + scores[g * size + two[i]];
            }
            if (threadIdx.x == 0) group_scores[g] = sum;
        }
        __syncwarp();
        for (int i = 0; i < r.groups_used; ++i) {
            const int g = best(group_scores, r.groups, picked, i);
            if (threadIdx.x == 0) picked[i] = g;
            __syncwarp();
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < r.experts; e += blockDim.x) {
        bool used = r.groups_used == r.groups;
        for (int i = 0; !used && i < r.groups_used; ++i) used = picked[i] == e / size;
        if (!used) scores[e] = -INFINITY;
        choice[t * choice_row + e] = scores[e];
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        i32 *own = ids + (i64)t * r.used;
        for (int i = 0; i < r.used; ++i) {
            const int e = position[t] >= 0 ? best(scores, r.experts, picked, 0) : -1;
            if (threadIdx.x == 0) {
                own[i] = e;
                if (e >= 0) scores[e] = NAN; // never wins again
            }
            __syncwarp();
        }
    }
}

// Weights of the chosen experts: unbiased scores, over their sum where the model says so, times the routed factor.
extern "C" __global__ void expert_weights(Router r, const float *logits, i64 row, const i32 *ids, float *weights, i64 w_row) {
    begin();
    extern __shared__ float scores[];
    __shared__ float scratch[2];
    const int t = blockIdx.x;
    gate(r, logits + t * row, scores, scratch);
    if (threadIdx.x != 0) return;
    float sum = 0.0f;
    for (int i = 0; i < r.used; ++i) {
        const int e = ids[(i64)t * r.used + i];
        sum = sum + (e >= 0 && e < r.experts ? scores[e] : 0.0f);
    }
    sum = r.normalise ? sum + 1e-20f : 1.0f; // the guard of transformers
    for (int i = 0; i < r.used; ++i) {
        const int e = ids[(i64)t * r.used + i];
        weights[t * w_row + i] = (e >= 0 && e < r.experts ? scores[e] : 0.0f) / sum * r.factor;
    }
}

// The router as one thread per token reads it.
extern "C" __global__ void route_naive(Router r, const float *logits, i64 row, const float *bias, const i32 *position, int n,
                                       float *choice, i64 choice_row, i32 *ids, float *weights, i64 w_row) {
    begin();
    const int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= n) return;
    const int size = r.experts / r.groups;
    const float *l = logits + t * row;
    float *c = choice + t * choice_row, top = -INFINITY, total = 0.0f;
    for (int e = 0; e < r.experts; ++e) top = fmaxf(top, l[e]);
    for (int e = 0; e < r.experts; ++e) total = total + expf(l[e] - top);
    const auto score = [&](int e) { return r.softmax ? expf(l[e] - top) / total : 1.0f / (1.0f + expf(-l[e])); };
    for (int e = 0; e < r.experts; ++e) c[e] = score(e) + bias[e];
    // Groups that `groups_used` others beat are masked.
    const auto group_score = [&](int g) {
        float first = -INFINITY, second = -INFINITY;
        for (int e = g * size; e < (g + 1) * size; ++e) {
            const float s = score(e) + bias[e];
            if (s > first) {
                second = first;
                first = s;
            } else if (s > second) {
                second = s;
            }
        }
        return size > 1 ? first + second : first;
    };
    for (int g = 0; g < r.groups; ++g) {
        int before = 0;
        for (int o = 0; o < r.groups; ++o) {
            before += group_score(o) > group_score(g) || (group_score(o) == group_score(g) && o < g);
        }
        if (before >= r.groups_used) {
            for (int e = g * size; e < (g + 1) * size; ++e) c[e] = -INFINITY;
        }
    }
    float sum = 0.0f;
    for (int i = 0; i < r.used; ++i) {
        int at = -1;
        for (int e = 0; e < r.experts && position[t] >= 0; ++e) {
            bool taken = isnan(c[e]);
            for (int j = 0; j < i; ++j) taken |= ids[(i64)t * r.used + j] == e;
            if (!taken && (at < 0 || c[e] > c[at])) at = e;
        }
        ids[(i64)t * r.used + i] = at;
        weights[t * w_row + i] = at < 0 ? 0.0f : score(at);
        sum = sum + weights[t * w_row + i];
    }
    for (int i = 0; i < r.used; ++i) weights[t * w_row + i] = weights[t * w_row + i] / (r.normalise ? sum + 1e-20f : 1.0f) * r.factor;
}

// Sorts slots by expert, each expert's slots in their own order, and cuts them into tiles of at most `tile`: `order` lists
// slots, `tiles` holds (expert, first place, slots), zeros behind the last. Slots without an expert are left out. One block;
// a thread per expert counts, then a prefix sum, then each thread places its expert's slots.
extern "C" __global__ void __launch_bounds__(1024)
    group(const i32 *ids, int slots, int experts, int tile, i32 *order, i32 *tiles, int most_tiles) {
    begin();
    extern __shared__ i32 starts[]; // [experts + 1] places, [experts + 1] tiles
    i32 *tile_starts = starts + experts + 1;
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        int count = 0;
        for (int s = 0; s < slots; ++s) count += ids[s] == e;
        starts[e + 1] = count;
        tile_starts[e + 1] = (count + tile - 1) / tile;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        starts[0] = tile_starts[0] = 0;
        for (int e = 0; e < experts; ++e) {
            starts[e + 1] += starts[e];
            tile_starts[e + 1] += tile_starts[e];
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        int place = starts[e];
        for (int s = 0; s < slots; ++s) {
            if (ids[s] == e) order[place++] = s;
        }
        for (int b = tile_starts[e]; b < tile_starts[e + 1]; ++b) {
            const int first = starts[e] + (b - tile_starts[e]) * tile;
            tiles[3 * b] = e;
            tiles[3 * b + 1] = first;
            tiles[3 * b + 2] = min(tile, starts[e + 1] - first);
        }
    }
    __syncthreads();
    for (int b = tile_starts[experts] + threadIdx.x; b < most_tiles; b += blockDim.x) tiles[3 * b + 2] = 0;
}

// out[t] = sum over slots with an expert, in order, of weight times the slot's row.
extern "C" __global__ void combine_slots(const float *rows, const i32 *ids, int experts, int slots, int width,
                                         const float *weights, i64 w_row, float *out, i64 out_row) {
    begin();
    const int t = blockIdx.y;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < width; i += gridDim.x * blockDim.x) {
        float sum = 0.0f;
        for (int j = 0; j < slots; ++j) {
            const i64 s = (i64)t * slots + j;
            if (ids[s] >= 0 && ids[s] < experts) sum = fmaf(weights[t * w_row + j], rows[s * width + i], sum);
        }
        out[t * out_row + i] = sum;
    }
}
