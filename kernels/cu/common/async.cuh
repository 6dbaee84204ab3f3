// Copies that run by themselves, the barriers that tell of their end, and multiplications of tensor cores. One wrapper per
// PTX instruction; all but `mma` need sm_90.
#pragma once
#include "ptx.cuh"

__device__ __forceinline__ u32 shared_address(const void *p) { return u32(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// What was initialised is seen by the copies.
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Arrives, and lets the phase last until so many bytes more have come.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Waits until the phase of this parity has ended.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{\n.reg .pred p;\nL%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra L%=;\n}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}
// Starts a copy of a multiple of 16 bytes, of what is read once.
__device__ __forceinline__ void copy_bulk(u32 to, const void *from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Threads of the first `count` that meet at barrier `id`.
__device__ __forceinline__ void meet(int id, int count) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory"); }

__device__ __forceinline__ Quad shared_quad(u32 at) {
    Quad v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x[0]), "=r"(v.x[1]), "=r"(v.x[2]), "=r"(v.x[3]) : "r"(at));
    return v;
}
// Only where `on`; else `v` stays as it is.
__device__ __forceinline__ void shared_quad_if(Quad &v, u32 at, bool on) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.shared.v4.u32 {%0,%1,%2,%3},[%4];}"
                 : "+r"(v.x[0]), "+r"(v.x[1]), "+r"(v.x[2]), "+r"(v.x[3])
                 : "r"(at), "r"(u32(on)));
}
struct Pair {
    u32 x, y;
};
__device__ __forceinline__ Pair shared_pair(u32 at) {
    Pair v;
    asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}
__device__ __forceinline__ u32 shared_word(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0,[%1];" : "=r"(v) : "r"(at));
    return v;
}

// c += a b over 16 columns: 16 rows of a, 8 columns of b, bf16 with sums in f32.
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
