// Sums and scans over a warp and a block, each in one fixed order, so that runs are bit-equal.
#pragma once
#include "ptx.cuh"

// The sum over a warp, in every lane.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) v = v + __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}

// The sum over a block of whole warps, in every thread. `scratch` has room for 32 values.
__device__ __forceinline__ float block_sum(float v, float *scratch) {
    v = warp_sum(v);
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[warp] = v;
    __syncthreads();
    float sum = 0.0f;
    for (int w = 0; w < warps; ++w) sum = sum + scratch[w];
    return sum;
}

// How many threads before this one hold `flag`, and in `total` how many of the block do. `scratch` has room for 32.
__device__ __forceinline__ int block_rank(bool flag, int *scratch, int &total) {
    const u32 votes = __ballot_sync(0xffffffffu, flag);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    __syncthreads();
    if (lane == 0) scratch[warp] = __popc(votes);
    __syncthreads();
    int before = __popc(votes & ((1u << lane) - 1u));
    total = 0;
    for (int w = 0; w < warps; ++w) {
        if (w < warp) before += scratch[w];
        total += scratch[w];
    }
    return before;
}
