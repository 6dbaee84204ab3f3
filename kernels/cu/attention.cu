// Absorbed multi-head latent attention over the paged cache (MLA): head h of token t scores key u by
// scale (q_latent[h] . latent[u] + q_rope[h] . rope[u]) and sums the latents by the softmax of its scores.
// Layouts: cache rows `[latent | rope]`; q and out by head at a stride; `chosen` holds up to `most` positions per token, -1
// behind the last, or is null for every visible key.
// Numerics: f32; scores add by lanes, the softmax runs online over tiles of keys, splits are combined in order.
// Moves: every key row once per 8 heads. Limits: latent <= 512, rope <= 64.
#include "common/block.cuh"
#include "common/tokens.cuh"

constexpr int HEADS = 8, KEYS = 16, MOST_LATENT = 512, MOST_ROPE = 64;

struct Queries {
    const float *latent;
    i64 latent_row;
    i32 latent_start, latent_stride, latent_width;
    const float *rope;
    i64 rope_row;
    i32 rope_start, rope_stride, rope_width;
    i32 heads;
};

// Keys of token t: the chosen ones or all visible ones.
static __device__ __forceinline__ int keys_of(const Tokens &tokens, int t, const i32 *chosen, int most) {
    const int visible = tokens.position[t] + 1;
    return chosen && visible > most ? most : visible;
}

// Position of key `k` of token t, -1 where there is none.
static __device__ __forceinline__ int key_at(const Tokens &tokens, int t, const i32 *chosen, int most, int k) {
    if (!chosen) return k;
    const int p = chosen[(i64)t * most + k];
    return p <= tokens.position[t] ? p : -1;
}

// A warp per head, a block per (split of the keys, 8 heads, token). Writes `[token][head][split]`: the largest score, the
// sum of weights, and the weighted sum of latents.
extern "C" __global__ void __launch_bounds__(256, 1)
    attend(const float *cache, Queries q, float scale, const i32 *chosen, int most, Tokens tokens, int splits, int per_split,
           float *peaks, float *sums, float *partial) {
    begin();
    __shared__ alignas(16) float rows[KEYS][MOST_LATENT + MOST_ROPE];
    __shared__ int held[KEYS];
    const int split = blockIdx.x, t = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int head = blockIdx.y * HEADS + warp;
    const int width = q.latent_width + q.rope_width, keys = keys_of(tokens, t, chosen, most);
    const int first = split * per_split, last = min(first + per_split, keys);
    if (first >= keys) return; // surplus blocks of the bucket; `combine` counts splits as this does
    float ql[MOST_LATENT / 32], qr[MOST_ROPE / 32], acc[MOST_LATENT / 32];
    const bool own = head < q.heads;
    const float *latent = q.latent + t * q.latent_row + q.latent_start + (i64)head * q.latent_stride;
    const float *rope = q.rope + t * q.rope_row + q.rope_start + (i64)head * q.rope_stride;
#pragma unroll
    for (int i = 0; i < MOST_LATENT / 32; ++i) {
        ql[i] = own && lane + 32 * i < q.latent_width ? latent[lane + 32 * i] : 0.0f;
        acc[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < MOST_ROPE / 32; ++i) qr[i] = own && lane + 32 * i < q.rope_width ? rope[lane + 32 * i] : 0.0f;
    float peak = -INFINITY, sum = 0.0f;
    for (int k0 = first; k0 < last; k0 += KEYS) {
        __syncthreads();
        if (threadIdx.x < KEYS) {
            held[threadIdx.x] = k0 + threadIdx.x < last ? key_at(tokens, t, chosen, most, k0 + threadIdx.x) : -1;
        }
        __syncthreads();
        // A warp per key row, whole loads where rows are aligned to them.
        for (int k = warp; k < KEYS; k += HEADS) {
            const float *row = cache + (held[k] >= 0 ? cache_row(tokens, t, held[k]) * width : 0);
            if (held[k] < 0) {
                for (int col = lane; col < width; col += 32) rows[k][col] = 0.0f;
            } else if (width % 4 == 0) {
                for (int q = lane; q < width / 4; q += 32) ((Quad *)rows[k])[q] = ((const Quad *)row)[q];
            } else {
                for (int col = lane; col < width; col += 32) rows[k][col] = row[col];
            }
        }
        __syncthreads();
        float scores[KEYS], top = peak;
#pragma unroll
        for (int k = 0; k < KEYS; ++k) {
            float dot = 0.0f;
#pragma unroll
            for (int i = 0; i < MOST_LATENT / 32; ++i) {
                if (32 * i < q.latent_width && lane + 32 * i < q.latent_width) dot = fmaf(ql[i], rows[k][lane + 32 * i], dot);
            }
#pragma unroll
            for (int i = 0; i < MOST_ROPE / 32; ++i) {
                if (lane + 32 * i < q.rope_width) dot = fmaf(qr[i], rows[k][q.latent_width + lane + 32 * i], dot);
            }
            dot = warp_sum(dot);
            scores[k] = held[k] >= 0 ? dot * scale : -INFINITY;
            top = scores[k] > top || isnan(scores[k]) ? scores[k] : top;
        }
        if (top == -INFINITY) continue; // no key of this tile counts
        const float keep = expf(peak - top);
        sum = sum * keep;
#pragma unroll
        for (int i = 0; i < MOST_LATENT / 32; ++i) acc[i] = acc[i] * keep;
#pragma unroll
        for (int k = 0; k < KEYS; ++k) {
            if (held[k] < 0) continue;
            const float p = expf(scores[k] - top);
            sum = sum + p;
#pragma unroll
            for (int i = 0; i < MOST_LATENT / 32; ++i) {
                if (lane + 32 * i < q.latent_width) acc[i] = fmaf(p, rows[k][lane + 32 * i], acc[i]);
            }
        }
        peak = top;
    }
    if (!own) return;
    const i64 at = ((i64)t * q.heads + head) * splits + split;
    if (lane == 0) {
        peaks[at] = peak;
        sums[at] = sum;
    }
#pragma unroll
    for (int i = 0; i < MOST_LATENT / 32; ++i) {
        if (lane + 32 * i < q.latent_width) partial[at * q.latent_width + lane + 32 * i] = acc[i];
    }
}

// Joins the splits of each head, in order. A block per (head, token).
extern "C" __global__ void combine(const float *peaks, const float *sums, const float *partial, int heads, int latent,
                                   const i32 *chosen, int most, Tokens tokens, int splits, int per_split, float *out,
                                   i64 out_row) {
    begin();
    const int head = blockIdx.x, t = blockIdx.y, keys = keys_of(tokens, t, chosen, most);
    const int used = min((keys + per_split - 1) / per_split, splits);
    const i64 at = ((i64)t * heads + head) * splits;
    float top = -INFINITY;
    for (int s = 0; s < used; ++s) top = peaks[at + s] > top || isnan(peaks[at + s]) ? peaks[at + s] : top;
    float sum = 0.0f;
    for (int s = 0; s < used; ++s) sum = sum + sums[at + s] * (peaks[at + s] == -INFINITY ? 0.0f : expf(peaks[at + s] - top));
    for (int i = threadIdx.x; i < latent; i += blockDim.x) {
        float v = 0.0f;
        for (int s = 0; s < used; ++s) {
            if (peaks[at + s] == -INFINITY) continue;
            v = fmaf(partial[(at + s) * latent + i], expf(peaks[at + s] - top), v);
        }
        out[t * out_row + (i64)head * latent + i] = used > 0 ? v / sum : 0.0f;
    }
}

// The same in three plain passes. Scores `[token][head][keys]`, a thread per score.
extern "C" __global__ void scores_naive(const float *cache, Queries q, float scale, const i32 *chosen, int most, Tokens tokens,
                                        int width, float *scores) {
    begin();
    const int k = blockIdx.x * blockDim.x + threadIdx.x, head = blockIdx.y, t = blockIdx.z;
    if (k >= width) return;
    const int keys = keys_of(tokens, t, chosen, most);
    float *out = scores + ((i64)t * q.heads + head) * width + k;
    const int position = k < keys ? key_at(tokens, t, chosen, most, k) : -1;
    if (position < 0) {
        *out = -INFINITY;
        return;
    }
    const float *row = cache + cache_row(tokens, t, position) * (q.latent_width + q.rope_width);
    const float *latent = q.latent + t * q.latent_row + q.latent_start + (i64)head * q.latent_stride;
    const float *rope = q.rope + t * q.rope_row + q.rope_start + (i64)head * q.rope_stride;
    float dot = 0.0f;
    for (int i = 0; i < q.latent_width; ++i) dot = dot + latent[i] * row[i];
    for (int i = 0; i < q.rope_width; ++i) dot = dot + rope[i] * row[q.latent_width + i];
    *out = dot * scale;
}

// Softmax of each head's scores, in place; a thread per head.
extern "C" __global__ void softmax_naive(float *scores, int width, int heads_of_all_tokens) {
    begin();
    const int h = blockIdx.x * blockDim.x + threadIdx.x;
    if (h >= heads_of_all_tokens) return;
    float *s = scores + (i64)h * width, top = -INFINITY, sum = 0.0f;
    for (int k = 0; k < width; ++k) top = s[k] > top || isnan(s[k]) ? s[k] : top;
    for (int k = 0; k < width; ++k) sum = sum + (s[k] = s[k] == -INFINITY ? 0.0f : expf(s[k] - top));
    for (int k = 0; k < width; ++k) s[k] = sum == 0.0f ? 0.0f : s[k] / sum;
}

// Sum of the latents by weight; a thread per value.
extern "C" __global__ void weighted_naive(const float *cache, int row_width, const float *weights, int width, int heads,
                                          int latent, const i32 *chosen, int most, Tokens tokens, float *out, i64 out_row) {
    begin();
    const int i = blockIdx.x * blockDim.x + threadIdx.x, head = blockIdx.y, t = blockIdx.z;
    if (i >= latent) return;
    const int keys = keys_of(tokens, t, chosen, most);
    float v = 0.0f;
    for (int k = 0; k < keys; ++k) {
        const int position = key_at(tokens, t, chosen, most, k);
        if (position < 0) continue;
        v = v + weights[((i64)t * heads + head) * width + k] * cache[cache_row(tokens, t, position) * row_width + i];
    }
    out[t * out_row + (i64)head * latent + i] = v;
}
