// Weights between the file's layout and the device's: each field of a block goes to a plane of its own, so that every
// load is aligned. Bytes are moved, never changed; unpack(repack(x)) = x is checked for every tensor as it is loaded.
// Shapes: `blocks` blocks of TYPE. Moves 2 x bytes.
#include "common/weights.cuh"

// The byte at `i` of the file's layout, as an index into the planes.
static __device__ __forceinline__ i64 place(i64 i, i64 blocks) {
    const i64 block = i / TYPE::BYTES;
    const int byte = i % TYPE::BYTES;
    i64 plane = 0;
    for (int f = 0; f < TYPE::FIELDS; ++f) {
        if (byte >= TYPE::at(f) && byte < TYPE::at(f) + TYPE::size(f)) {
            return plane + block * TYPE::size(f) + byte - TYPE::at(f);
        }
        plane += (blocks * TYPE::size(f) + 15) / 16 * 16;
    }
    return -1;
}

// Bytes `first ..` of a tensor of `blocks` blocks, from a staging buffer to their planes.
extern "C" __global__ void repack(const u8 *file, u8 *planes, i64 first, i64 bytes, i64 blocks) {
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < bytes; i += (i64)gridDim.x * blockDim.x) {
        planes[place(first + i, blocks)] = file[i];
    }
}

// The inverse, for reading weights back.
extern "C" __global__ void unpack(const u8 *planes, u8 *file, i64 first, i64 bytes, i64 blocks) {
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < bytes; i += (i64)gridDim.x * blockDim.x) {
        file[i] = planes[place(first + i, blocks)];
    }
}

// Counts bytes that the planes do not give back as the file has them.
extern "C" __global__ void repack_check(const u8 *file, const u8 *planes, i64 first, i64 bytes, i64 blocks, u32 *wrong) {
    u32 found = 0;
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < bytes; i += (i64)gridDim.x * blockDim.x) {
        found += planes[place(first + i, blocks)] != file[i];
    }
    if (found) atomicAdd(wrong, found);
}

// All values of rows `first_row ..` as f32: `[rows][cols]`.
extern "C" __global__ void dequantise(const u8 *planes, i64 blocks, int cols, i64 first_row, int rows, float *out) {
    const Reader<TYPE> w(planes, blocks, cols);
    const int chunks = (cols + 15) / 16;
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < (i64)rows * chunks; i += (i64)gridDim.x * blockDim.x) {
        const i64 row = i / chunks;
        const int chunk = i % chunks;
        float v[16];
        w.load(first_row + row, chunk, v);
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            if (chunk * 16 + j < cols) out[row * cols + chunk * 16 + j] = v[j];
        }
    }
}
