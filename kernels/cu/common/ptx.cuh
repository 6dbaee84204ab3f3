// Types and single instructions. One wrapper per PTX instruction; nothing here includes a CUDA header, so NVRTC compiles
// every source without an include path of its own.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef short i16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)

// 16 bytes, loaded and stored by one instruction.
struct alignas(16) Quad {
    u32 x[4];
};

// f16 bits to f32, exact.
__device__ __forceinline__ float f16_to_f32(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

// bf16 bits to f32, exact.
__device__ __forceinline__ float bf16_to_f32(u16 h) { return __uint_as_float(u32(h) << 16); }

// f32 to bf16 bits, round to nearest even.
__device__ __forceinline__ u16 f32_to_bf16(float f) {
    u16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

// f32 rounded to the nearest bf16 value.
__device__ __forceinline__ float round_bf16(float f) { return bf16_to_f32(f32_to_bf16(f)); }

// Waits for the kernels in front, if this one was started before their end. Until then nothing but weights may be read.
__device__ __forceinline__ void wait_for_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start. Only behind the wait: then whatever was written two kernels back is there.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// How every kernel begins that is started before the one in front has ended.
__device__ __forceinline__ void begin() {
    wait_for_kernels();
    let_next_start();
}
