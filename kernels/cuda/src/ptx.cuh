// What the sources need beyond CUDA C++ itself, and every line of PTX. Kernels hold neither asm nor #ifdef.
//
// Each wrapper has a CPU twin of the same name in kernels/emulator/include/ptx_twins.h, and a test of the twin in
// tests/emulator/test_ptx.py. No CUDA header is included, so NVRTC needs none.
#pragma once

#ifdef CUDA_EMULATOR
#include "cuda_emulator.h"
#include "ptx_twins.h"
#else

typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;

// T name[count] in shared memory.
#define SHARED(T, name, count) __shared__ T name[count]

// The dynamic shared memory of the block, as T* name.
#define DYNAMIC_SHARED(T, name)                                   \
  extern __shared__ __align__(1024) unsigned char name##_bytes[]; \
  T* name = reinterpret_cast<T*>(name##_bytes)

// A kernel that a host launches by name: calls `body` with one Params by value, with `threads` threads a block at most.
#define KERNEL(name, Params, threads, ...)                                                           \
  extern "C" __constant__ unsigned name##_params = sizeof(Params);                                   \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ Params given) { \
    (__VA_ARGS__)(given);                                                                            \
  }

// From 12.0 on a multiprocessor has 100 KiB of shared memory: two blocks of what asks for three.
#if __CUDA_ARCH__ >= 1200
#define MOST_RESIDENT 2
#else
#define MOST_RESIDENT 32
#endif

// The same with so few registers that a multiprocessor has enough for `blocks` blocks of `threads` threads at once.
#define RESIDENT_KERNEL(name, Params, threads, blocks, ...)                                                     \
  extern "C" __constant__ unsigned name##_params = sizeof(Params);                                              \
  extern "C" __global__ void __launch_bounds__(threads, (blocks) < MOST_RESIDENT ? (blocks) : MOST_RESIDENT)    \
      name(const __grid_constant__ Params given) {                                                              \
    (__VA_ARGS__)(given);                                                                                       \
  }

// Copies 16 bytes to shared memory behind the thread's back, or writes 16 zeros when not valid.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
}
// Closes a group of the copies that this thread has started since the last one.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` of this thread's groups, the newest, are under way.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

__device__ __forceinline__ float bf16_to_float(unsigned short x) {
  return __uint_as_float(static_cast<uint32_t>(x) << 16);
}
__device__ __forceinline__ float f16_to_float(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
// To the nearest, even among equals; a NaN becomes 0x7fff.
__device__ __forceinline__ unsigned short float_to_bf16(float x) {
  unsigned short y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ unsigned short float_to_f16(float x) {
  unsigned short y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
// Two numbers in a word, the first in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// a b + c of both halves of the words, rounded once.
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// 2^x within 2 units in the last place.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Four 8 x 8 matrices of 16-bit numbers: lane i gives the address of row i % 8 of matrix i / 8 and gets, of each
// matrix, the numbers (lane / 4, lane % 4 * 2) and the next. `trans`: of the transposed matrices.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}

// d += a b, a 16 x 16 by rows, b 16 x 8 by columns, d 16 x 8 float32; which lane holds what: PTX ISA, mma.m16n8k16.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
