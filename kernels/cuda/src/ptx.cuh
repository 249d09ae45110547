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
#define MAX_RESIDENT 2
#else
#define MAX_RESIDENT 32
#endif

// The same with so few registers that a multiprocessor has enough for `blocks` blocks of `threads` threads at once.
#define RESIDENT_KERNEL(name, Params, threads, blocks, ...)                                                     \
  extern "C" __constant__ unsigned name##_params = sizeof(Params);                                              \
  extern "C" __global__ void __launch_bounds__(threads, (blocks) < MAX_RESIDENT ? (blocks) : MAX_RESIDENT)    \
      name(const __grid_constant__ Params given) {                                                              \
    (__VA_ARGS__)(given);                                                                                       \
  }

// The same for compute capability 9.0 alone, which runs one block at once; for more_registers.
#define WARPGROUP_KERNEL(name, Params, threads, ...) RESIDENT_KERNEL(name, Params, threads, 1, __VA_ARGS__)

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

// The rest needs compute capability 9.0 (PTX ISA, wgmma). A warpgroup is 4 warps; the number of its first is a multiple
// of 4.

// Barrier `id`, 1 to 15, of `threads` threads, whole warps: those that arrive go on, those that sync wait for all.
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Lets the warpgroup have `count` registers a thread from here on; `more` waits until a warpgroup has given them back.
template <int count>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// What this thread has written to shared memory comes before what wgmma reads there after the next barrier.
__device__ __forceinline__ void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The descriptor of a matrix in shared memory. Its lines have 128 bytes, exchanged as Swizzled says; the first line is a
// multiple of 8. Where lines run along k, a line has 64 numbers of k, and 16 numbers further is 32 bytes further. Where
// lines run across k, `next` is the distance in bytes from 64 columns to the next 64.
__device__ __forceinline__ uint64_t wgmma_matrix(const void* shared, int next) {
  const uint64_t at = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  return (at & 0x3ffff) >> 4 | static_cast<uint64_t>(next >> 4) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

// Registers that the next wgmma reads or writes are there.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a group of what this warpgroup has started since the last one.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

#define WGMMA_4(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define WGMMA_16(d, n) WGMMA_4(d, n), WGMMA_4(d, n + 1), WGMMA_4(d, n + 2), WGMMA_4(d, n + 3)
#define WGMMA_32(d, n) WGMMA_16(d, n), WGMMA_16(d, n + 4)
#define WGMMA_64(d) WGMMA_32(d, 0), WGMMA_32(d, 8)
#define WGMMA_NAMES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_64 \
  WGMMA_NAMES_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// Waits until at most `pending` groups, the newest, are under way; the sums of the others, `d`, may then be used.
template <int pending>
__device__ __forceinline__ void wgmma_wait(float (&d)[8][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %32;" : WGMMA_32(d, 0) : "n"(pending) : "memory");
}
template <int pending>
__device__ __forceinline__ void wgmma_wait(float (&d)[16][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;" : WGMMA_64(d) : "n"(pending) : "memory");
}

// Computes x and `sum`, which is never below 0 and depends on all of x, here: the compiler and, but for the branch, the
// assembler move arithmetic behind a wait that it could go before.
template <int N>
__device__ __forceinline__ void compute_now(float (&x)[N][4], float sum) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : WGMMA_4(x, i));
  if (sum < 0.0f) asm volatile("nanosleep.u32 0;");
}

// Starts d (+)= a b: a 64 x 16 by lines along k, b 16 x 64 or 128 by lines along k (of a column), d as mma has it, warp
// by warp 16 rows.
#define WGMMA_OF_SHARED(name, type, columns, count, registers, names, a, b, more)                         \
  __device__ __forceinline__ void name(float (&d)[count][4], uint64_t left, uint64_t right, bool add) {   \
    asm volatile(                                                                                         \
        "{\n.reg .pred %%p;\nsetp.ne.b32 %%p, " more ", 0;\n"                                               \
        "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" names "}, " a ", " b    \
        ", %%p, 1, 1, 0, 0;\n}"                                                                           \
        : registers                                                                                       \
        : "l"(left), "l"(right), "r"(int(add))                                                            \
        : "memory");                                                                                      \
  }
// The same with `a` in registers as mma has it, and b by lines across k (of a row).
#define WGMMA_OF_REGISTERS(name, type, columns, count, registers, names, a, b)                            \
  __device__ __forceinline__ void name(float (&d)[count][4], const uint32_t (&left)[4], uint64_t right) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" names "}, {" a \
                 "}, " b ", 1, 1, 1, 1;"                                                                  \
                 : registers                                                                              \
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right)                     \
                 : "memory");                                                                             \
  }
WGMMA_OF_SHARED(wgmma_bf16, "bf16", "64", 8, WGMMA_32(d, 0), WGMMA_NAMES_32, "%32", "%33", "%34")
WGMMA_OF_SHARED(wgmma_bf16, "bf16", "128", 16, WGMMA_64(d), WGMMA_NAMES_64, "%64", "%65", "%66")
WGMMA_OF_REGISTERS(wgmma_bf16, "bf16", "64", 8, WGMMA_32(d, 0), WGMMA_NAMES_32, "%32, %33, %34, %35", "%36")
WGMMA_OF_REGISTERS(wgmma_bf16, "bf16", "128", 16, WGMMA_64(d), WGMMA_NAMES_64, "%64, %65, %66, %67", "%68")
WGMMA_OF_SHARED(wgmma_f16, "f16", "64", 8, WGMMA_32(d, 0), WGMMA_NAMES_32, "%32", "%33", "%34")
WGMMA_OF_SHARED(wgmma_f16, "f16", "128", 16, WGMMA_64(d), WGMMA_NAMES_64, "%64", "%65", "%66")
WGMMA_OF_REGISTERS(wgmma_f16, "f16", "64", 8, WGMMA_32(d, 0), WGMMA_NAMES_32, "%32, %33, %34, %35", "%36")
WGMMA_OF_REGISTERS(wgmma_f16, "f16", "128", 16, WGMMA_64(d), WGMMA_NAMES_64, "%64, %65, %66, %67", "%68")

#endif
