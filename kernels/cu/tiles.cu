// Weights in tiles (common/tiles.cuh): how they come there, and products with one row of x.
//
// A code n in the low byte of a bf16 word is n * 2^-133, exactly, so that codes become operands of tensor cores by one
// logical instruction for two; x is scaled by 2^100 on its way to shared memory. The 8 columns of the other operand are not
// tokens but the 8 scale groups of a unit: it is block-diagonal, and one set of accumulators holds the sums of the groups
// apart. Then every group's sum is scaled, and its minimum subtracted, in f32.
// Numerics: codes times x is exact, with f32 sums; `strict` has x in three bf16 parts that add up to it (smallest first),
// `fast` has it rounded to bf16 once. |x| must be less than 2^27. Sums are added by units, lanes and warps in one order.
// Moves: every weight once.
#include "common/block.cuh"
#include "common/tiles.cuh"
#include "common/async.cuh"

using Layout = TYPE;
using Block = Layout::Block;
constexpr int UNIT = Layout::UNIT, GROUP = Layout::GROUP;

// Whole tiles of a file's rows of `units` units, from a staging buffer to units `first ..`. A warp per unit.
extern "C" __global__ void tile_pack(const u8 *file, u8 *tiles, i64 first, i64 count, int units) {
    begin();
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (i64 u = blockIdx.x * (i64)warps + threadIdx.x / 32; u < count; u += (i64)gridDim.x * warps) {
        const i64 row = u / units * 16 + lane / 4;
        const u8 *upper = file + (row * units + u % units) * Block::BYTES;
        Layout::pack(upper, upper + (i64)8 * units * Block::BYTES, lane, tiles + (first + u) * UNIT);
    }
}

// Where byte `i` of a file's rows lies: its unit, the row in it, the byte of the block.
static __device__ __forceinline__ u8 tiled_byte(const u8 *tiles, i64 first, i64 i, int units) {
    const i64 block = i / Block::BYTES, row = block / units;
    return Layout::byte(tiles + (first + row / 16 * units + block % units) * UNIT, int(row % 16), int(i % Block::BYTES));
}

// The inverse of tile_pack.
extern "C" __global__ void tile_unpack(const u8 *tiles, u8 *file, i64 first, i64 bytes, int units) {
    begin();
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < bytes; i += (i64)gridDim.x * blockDim.x) {
        file[i] = tiled_byte(tiles, first, i, units);
    }
}

// Counts bytes that the tiles do not give back as the file has them.
extern "C" __global__ void tile_check(const u8 *file, const u8 *tiles, i64 first, i64 bytes, int units, u32 *wrong) {
    begin();
    u32 found = 0;
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < bytes; i += (i64)gridDim.x * blockDim.x) {
        found += tiled_byte(tiles, first, i, units) != file[i];
    }
    if (found) atomicAdd(wrong, found);
}

// What a product is made of. Units of a row of x: `units`; of the down projection, of each slot.
struct Work {
    const u8 *at[4]; // parts of W, each a stack of matrices
    i32 tiles[4];    // tiles of 16 rows of each part's matrices
    i32 units, stack, slots;
    i32 unused;
    const float *x;
    const i32 *ids;       // the slots' matrices
    const float *weights; // of slots
    float *y;
    i64 y_group; // from one slot's values to the next's
};

// Parts side by side; gate and up of chosen experts; the chosen experts' down projections, weighted and added.
enum Kind { PARTS, GATE_UP, DOWN };

constexpr int WARPS = 8, THREADS = 32 * WARPS;
// Chunks of eight units on their way; two blocks of a multiprocessor share its memory.
constexpr int STAGES = UNIT < 3000 ? 4 : 3, CHUNK = WARPS * UNIT;
constexpr float UP = 1.2676506002282294e30f;       // 2^100
constexpr float BACK = 1.16415321826934814e-10f; // 2^-33: a code's 2^-133 times `UP`

// Bytes of shared memory: the ring, its barriers, sums of warps (twice, of gate and up), room for a sum over the block.
constexpr int FIXED = STAGES * CHUNK + 16 * STAGES + 4 * 2 * 2 * WARPS * 16 + 128;

#if __CUDA_ARCH__ >= 900

// x to shared memory: P planes of bf16, scaled, and the sums of the groups in the scale of the products.
template <int P> static __device__ __forceinline__ void take_x(const float *x, int cols, u8 *to, float *sums) {
    constexpr int AT_ONCE = 6;
    for (int start = threadIdx.x * 4; start < cols; start += AT_ONCE * THREADS * 4) {
        Quad v[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const int i = start + n * THREADS * 4;
            v[n] = i < cols ? *(const Quad *)(x + i) : Quad{};
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const int i = start + n * THREADS * 4;
            if (i >= cols) break; // whole warps
            const float up = Layout::SHIFTED && (i & 128) ? UP / 16 : UP;
            float sum = 0.0f;
            u32 half[P][2] = {};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float rest = __uint_as_float(v[n].x[e]);
                sum += P == 1 ? round_bf16(rest) : rest;
#pragma unroll
                for (int p = 0; p < P; ++p) {
                    const float part = round_bf16(rest);
                    half[p][e / 2] |= u32(f32_to_bf16(part * up)) << (e % 2 * 16);
                    rest -= part;
                }
            }
#pragma unroll
            for (int p = 0; p < P; ++p) *(Pair *)(to + (p * cols + i) * 2) = Pair{half[p][0], half[p][1]};
#pragma unroll
            for (int step = GROUP / 8; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
            if (i % GROUP == 0) sums[i / GROUP] = sum * BACK;
        }
    }
}

// Where a lane finds what it multiplies: its place in the fragment, and x and its groups' sums of unit 0.
struct Lane {
    int lane;
    bool near, far; // whether its columns of the other operand are those of its groups; zero otherwise
    u32 x, plane, sums;
};

// The two columns of x that go with word i of a unit, in `near` and `far` lanes.
struct Operand {
    Quad near[2], far[2];

    __device__ __forceinline__ void take(int slot, u32 at, const Lane &l) {
        shared_quad_if(near[slot], at, l.near);
        shared_quad_if(far[slot], at, l.far);
    }
};

// A field of 6 bits.
static __device__ __forceinline__ float six(u32 w, int at) {
    return __uint_as_float(((w >> at) & 63u) | 0x4b000000u) - 8388608.0f;
}

// The nibble words of a lane.
static __device__ __forceinline__ void nibble_words(Quad (&a)[4], u32 at, int lane) {
#pragma unroll
    for (int q = 0; q < 4; ++q) a[q] = shared_quad(at + q * 512 + lane * 16);
}

// One unit at `at` in shared memory, times x: what it adds to the two rows of the lane. `taken` is called when the unit is
// in registers.
template <int P, class Taken>
static __device__ __forceinline__ void multiply(Tiles<Q4_K>, Operand &b, u32 at, int unit, const Lane &l, float (&row)[2],
                                                Taken taken) {
    Quad a[4];
    nibble_words(a, at, l.lane);
    const Pair s = shared_pair(at + 2048 + l.lane * 8), sums = shared_pair(l.sums + unit * (256 / GROUP * 4));
    taken();
    float acc[4][4] = {};
#pragma unroll
    for (int p = P - 1; p >= 0; --p) {
        const u32 x = l.x + p * l.plane + unit * 512;
        b.take(0, x, l);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            if (q < 3) b.take((q + 1) & 1, x + (q + 1) * 16, l);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u32 w = a[q].x[j], lower = w >> 8;
                mma(acc[j], w & 0x000f000fu, lower & 0x000f000fu, w & 0x00f000f0u, lower & 0x00f000f0u, b.near[q & 1].x[j],
                    b.far[q & 1].x[j]);
            }
        }
    }
    // d and dmin of both rows lie a quarter in each of the four lanes of a row.
    const u32 own = s.y >> 16, other = __shfl_xor_sync(~0u, own, 1);
    const u32 pair = l.lane & 1 ? (other | own << 16) : (own | other << 16), across = __shfl_xor_sync(~0u, pair, 2);
    const u32 halves[2] = {l.lane & 2 ? across : pair, l.lane & 2 ? pair : across};
    const u32 minima = __funnelshift_r(s.x, s.y, 24);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float d = lower_half(halves[r]), m = upper_half(halves[r]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int i = 2 * r + e;
            const float sum = (acc[0][i] + acc[2][i]) + (acc[1][i] + acc[3][i]);
            const float of_x = __uint_as_float(e ? sums.y : sums.x);
            row[r] += d * six(s.x, 6 * i) * sum - m * six(minima, 6 * i) * of_x;
        }
    }
}

template <int P, class Taken>
static __device__ __forceinline__ void multiply(Tiles<Q6_K>, Operand &b, u32 at, int unit, const Lane &l, float (&row)[2],
                                                Taken taken) {
    Quad a[4], bits[2];
    nibble_words(a, at, l.lane);
#pragma unroll
    for (int q = 0; q < 2; ++q) bits[q] = shared_quad(at + 2048 + q * 512 + l.lane * 16);
    const Pair s = shared_pair(at + 3072 + l.lane * 8);
    const u32 d = shared_word(at + 3328 + l.lane / 4 * 4);
    taken();
    float acc[4][4] = {}; // of either half, twice
#pragma unroll
    for (int p = P - 1; p >= 0; --p) {
        const u32 x = l.x + p * l.plane + unit * 512;
        b.take(0, x, l);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            if (q < 3) b.take((q + 1) & 1, x + (q + 1) / 2 * 256 + (q + 1) % 2 * 16, l);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u32 w = a[q].x[j], h = bits[q / 2].x[q % 2 * 2 + j / 2];
                const u32 h0 = j & 1 ? h >> 4 : h << 4, h1 = j & 1 ? h >> 6 : h << 2, h2 = j & 1 ? h >> 8 : h;
                const u32 h3 = j & 1 ? h >> 10 : h >> 2;
                mma(acc[q / 2 + 2 * (j & 1)], (w & 0x000f000fu) | (h0 & 0x00300030u),
                    ((w >> 8) & 0x000f000fu) | (h1 & 0x00300030u), ((w >> 4) & 0x000f000fu) | (h2 & 0x00300030u),
                    ((w >> 12) & 0x000f000fu) | (h3 & 0x00300030u), b.near[q & 1].x[j], b.far[q & 1].x[j]);
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u32 scales = half ? s.y : s.x;
        const Pair sums = shared_pair(l.sums + unit * (256 / GROUP * 4) + 32 * half);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float factor = (i < 2 ? lower_half(d) : upper_half(d)) * float(i8(scales >> (8 * i)));
            const float of_x = 32.0f * __uint_as_float(i % 2 ? sums.y : sums.x);
            row[i / 2] += factor * (acc[half][i] + acc[half + 2][i] - of_x);
        }
    }
}

// The product. A producer warp fetches chunks of eight units, each in one copy where they lie in a row; eight warps take a
// unit each. Blocks walk over tiles of 16 rows of the output. Weights are fetched before the kernel in front has ended,
// but where that one chooses which.
template <int KIND, int P> static __device__ __forceinline__ void product(const Work &w) {
    extern __shared__ __align__(128) u8 shared[];
    u8 *behind = shared + STAGES * CHUNK;
    const u32 ring = shared_address(shared), full = shared_address(behind), empty = full + 8 * STAGES;
    float *sums_of_warps = (float *)(behind + 16 * STAGES);
    u8 *x = shared + FIXED;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int units = KIND == DOWN ? w.units * w.slots : w.units, chunks = (units + WARPS - 1) / WARPS;
    const i64 matrix = (i64)w.tiles[0] * w.units * UNIT;
    int jobs = w.tiles[0];
    if (KIND == GATE_UP) jobs *= w.slots;
    if (KIND == PARTS) jobs += w.tiles[1] + w.tiles[2] + w.tiles[3];
    constexpr int PASSES = KIND == GATE_UP ? 2 : 1;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, WARPS);
        }
        barrier_init_fence();
    }
    __syncthreads();
    // The matrix of a slot, or -1.
    const auto expert = [&](int slot) {
        const int id = w.ids[slot];
        return id >= 0 && id < w.stack ? id : -1;
    };
    if (warp == WARPS) {
        if (lane != 0) return;
        if (KIND != PARTS) wait_for_kernels();
        const u64 policy = read_once();
        int stage = 0, parity = 1; // the first round waits for nothing
        for (int job = blockIdx.x; job < jobs; job += gridDim.x) {
            int part = 0, tile = job, id = 0;
            if (KIND == PARTS) {
                while (tile >= w.tiles[part]) tile -= w.tiles[part++];
            }
            if (KIND == GATE_UP) {
                id = expert(job / w.tiles[0]);
                tile = job % w.tiles[0];
                if (id < 0) continue;
            }
            for (int pass = 0; pass < PASSES; ++pass) {
                const u8 *from = w.at[KIND == GATE_UP ? pass : part] + id * matrix + (i64)tile * w.units * UNIT;
                for (int chunk = 0; chunk < chunks; ++chunk) {
                    const int first = chunk * WARPS, n = min(WARPS, units - first);
                    const u32 to = ring + stage * CHUNK;
                    barrier_wait(empty + 8 * stage, parity);
                    if (KIND != DOWN) {
                        barrier_expect(full + 8 * stage, n * UNIT);
                        copy_bulk(to, from + (i64)first * UNIT, n * UNIT, full + 8 * stage, policy);
                    } else {
                        // A run of units for each slot that the chunk meets.
                        int bytes = 0;
                        for (int u = 0, run; u < n; u += run) {
                            run = min(n - u, w.units - (first + u) % w.units);
                            if (expert((first + u) / w.units) >= 0) bytes += run * UNIT;
                        }
                        barrier_expect(full + 8 * stage, bytes);
                        for (int u = 0, run; u < n; u += run) {
                            const int slot = (first + u) / w.units, in_slot = (first + u) % w.units, of = expert(slot);
                            run = min(n - u, w.units - in_slot);
                            if (of < 0) continue;
                            const u8 *start = from + of * matrix + (i64)in_slot * UNIT;
                            copy_bulk(to + u * UNIT, start, run * UNIT, full + 8 * stage, policy);
                        }
                    }
                    if (++stage == STAGES) {
                        stage = 0;
                        parity ^= 1;
                    }
                }
            }
        }
        return;
    }

    wait_for_kernels();
    let_next_start();
    const int cols = units * 256;
    float *sums = (float *)(x + P * cols * 2);
    take_x<P>(w.x, cols, x, sums);
    meet(1, THREADS);
    const int g = lane / 4, c = lane % 4;
    const Lane l = {lane,       c == g, c + 4 == g, shared_address(x) + g * GROUP * 2, u32(cols) * 2, shared_address(sums) + c * 8};
    Operand b = {};
    int stage = 0, parity = 0, turn = 0;
    for (int job = blockIdx.x; job < jobs; job += gridDim.x) {
        if (KIND == GATE_UP && expert(job / w.tiles[0]) < 0) {
            float *to = w.y + job / w.tiles[0] * w.y_group + job % w.tiles[0] * 16;
            if (threadIdx.x < 16) to[threadIdx.x] = 0.0f;
            continue;
        }
        float *mine = sums_of_warps + turn % 2 * (2 * WARPS * 16);
#pragma unroll 1
        for (int pass = 0; pass < PASSES; ++pass) {
            float row[2] = {};
            for (int chunk = 0; chunk < chunks; ++chunk) {
                const int unit = chunk * WARPS + warp, slot = KIND == DOWN ? unit / w.units : 0;
                barrier_wait(full + 8 * stage, parity);
                const u32 done = empty + 8 * stage;
                const auto taken = [&]() {
                    __syncwarp();
                    if (lane == 0) barrier_arrive(done);
                };
                if (unit < units && (KIND != DOWN || expert(slot) >= 0)) {
                    const u32 at = ring + stage * CHUNK + warp * UNIT;
                    if (KIND == DOWN) {
                        float of_slot[2] = {};
                        multiply<P>(Layout(), b, at, unit, l, of_slot, taken);
                        const float weight = w.weights[slot];
                        row[0] += weight * of_slot[0];
                        row[1] += weight * of_slot[1];
                    } else {
                        multiply<P>(Layout(), b, at, unit, l, row, taken);
                    }
                } else {
                    taken();
                }
                if (++stage == STAGES) {
                    stage = 0;
                    parity ^= 1;
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                row[r] += __shfl_xor_sync(~0u, row[r], 1);
                row[r] += __shfl_xor_sync(~0u, row[r], 2);
                if (c == 0) mine[(pass * WARPS + warp) * 16 + r * 8 + g] = row[r];
            }
        }
        meet(1, THREADS);
        // The next sums go to the other half, and to this one only when all have met again.
        if (warp == turn % WARPS) {
            const int pass = PASSES == 2 ? lane / 16 : 0, i = lane % 16;
            float sum = 0.0f;
            for (int v = 0; v < WARPS; ++v) sum += mine[(pass * WARPS + v) * 16 + i];
            sum *= 1.0f / BACK;
            if (KIND == GATE_UP) {
                const float up = __shfl_down_sync(~0u, sum, 16);
                float *to = w.y + job / w.tiles[0] * w.y_group + job % w.tiles[0] * 16;
                if (lane < 16) to[i] = sum / (1.0f + expf(-sum)) * up;
            } else if (lane < 16) {
                w.y[job * 16 + i] = sum;
            }
        }
        ++turn;
    }
}

// Two blocks on a multiprocessor where registers allow it.
#define PRODUCT(NAME, KIND, P, RESIDENT)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS + 32, RESIDENT) NAME(const __grid_constant__ Work w) {                \
        product<KIND, P>(w);                                                                                                   \
    }
#else
// Older architectures have no such copies; nobody starts these there.
#define PRODUCT(NAME, KIND, P, RESIDENT)                                                                                        \
    extern "C" __global__ void NAME(const __grid_constant__ Work w) {}
#endif

PRODUCT(tile_parts_fast, PARTS, 1, 2)
PRODUCT(tile_parts_strict, PARTS, 3, 1)

// Q6_K would need more registers than half a multiprocessor has.
PRODUCT(tile_gate_up_fast, GATE_UP, 1, UNIT < 3000 ? 2 : 1)
PRODUCT(tile_gate_up_strict, GATE_UP, 3, 1)
PRODUCT(tile_down_fast, DOWN, 1, 2)
PRODUCT(tile_down_strict, DOWN, 3, 1)
