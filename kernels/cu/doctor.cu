// Host checks: patterns that links must carry unchanged, and bandwidth sweeps.
#include "common/ptx.cuh"

// A value that depends on place and seed: neighbouring places and seeds share no bytes by accident (Murmur3's finaliser).
static __device__ __forceinline__ u32 pattern_at(u64 i, u32 seed) {
    u32 h = (u32)i ^ (u32)(i >> 32) * 0x9e3779b9u ^ seed * 0x85ebca6bu;
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    return h ^ h >> 16;
}

extern "C" __global__ void pattern_fill(u32 *x, u64 count, u32 seed) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) x[i] = pattern_at(i, seed);
}

// Counts words that differ from the pattern, and keeps the first.
extern "C" __global__ void pattern_check(const u32 *x, u64 count, u32 seed, u32 *wrong, u64 *first) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) {
        if (x[i] != pattern_at(i, seed)) {
            atomicAdd(wrong, 1u);
            atomicMin(first, i);
        }
    }
}

// Integers as f32 whose sum over ranks is exact: rank r contributes (i mod 1024) + r.
extern "C" __global__ void integers_fill(float *x, u64 count, int rank) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) x[i] = (float)(i % 1024 + rank);
}
// Counts values whose bits are not those of `scale` times the sum of `ranks` ranks, and keeps the first. Equal sums that are summed
// again give scale = ranks.
extern "C" __global__ void integers_check(const float *x, u64 count, int ranks, int scale, u32 *wrong, u64 *first) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) {
        const float expected = (float)((i % 1024 * ranks + ranks * (ranks - 1) / 2) * scale);
        if (__float_as_uint(x[i]) != __float_as_uint(expected)) {
            atomicAdd(wrong, 1u);
            atomicMin(first, i);
        }
    }
}

// Reads every byte of a buffer; the sum keeps the loads alive. 16 bytes a thread, four in flight.
extern "C" __global__ void __launch_bounds__(512) read_sweep(const Quad *x, u64 quads, u32 *sink) {
    u32 sum = 0;
    const u64 step = (u64)gridDim.x * blockDim.x;
    u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    for (; i + 3 * step < quads; i += 4 * step) {
        const Quad a = x[i], b = x[i + step], c = x[i + 2 * step], d = x[i + 3 * step];
#pragma unroll
        for (int k = 0; k < 4; ++k) sum ^= a.x[k] ^ b.x[k] ^ c.x[k] ^ d.x[k];
    }
    for (; i < quads; i += step) sum ^= x[i].x[0] ^ x[i].x[1] ^ x[i].x[2] ^ x[i].x[3];
    if (sum == 0x12345678u) *sink = sum;
}

// Reads and writes every byte, four loads in flight as above.
extern "C" __global__ void __launch_bounds__(512) copy_sweep(const Quad *__restrict__ x, Quad *__restrict__ y, u64 quads) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    for (; i + 3 * step < quads; i += 4 * step) {
        const Quad a = x[i], b = x[i + step], c = x[i + 2 * step], d = x[i + 3 * step];
        y[i] = a, y[i + step] = b, y[i + 2 * step] = c, y[i + 3 * step] = d;
    }
    for (; i < quads; i += step) y[i] = x[i];
}

// Keeps the stream busy for so many nanoseconds, so that launches given meanwhile run without gaps when they are timed.
extern "C" __global__ void pause(u64 nanoseconds) {
    u64 start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}
