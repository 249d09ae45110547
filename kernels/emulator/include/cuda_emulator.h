// CUDA C++ for a CPU: what nvcc or NVRTC know by themselves, for g++. A .cu source includes this where they would.
//
// Shared memory is declared with SHARED and DYNAMIC_SHARED, which kernels/cuda/src/ptx.cuh has for the GPU: a static
// variable could be neither filled with NaN for each block nor fenced by a sanitizer (g++ ignores the section of one in
// a template).
#pragma once
#include "intrinsics.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __grid_constant__
#define __align__(n) alignas(n)
#define __constant__ static
#define __shared__ declare_it_with_SHARED

#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())
#define blockDim (emulator::block_size())
#define gridDim (emulator::grid_size())
#define warpSize 32

#define EMULATOR_VECTORS(name, T, align2, align4)                             \
  struct alignas(align2) name##2 {                                            \
    T x, y;                                                                   \
  };                                                                          \
  struct alignas(align4) name##4 {                                            \
    T x, y, z, w;                                                             \
  };                                                                          \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                  \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATOR_VECTORS(float, float, 8, 16)
EMULATOR_VECTORS(int, int, 8, 16)
EMULATOR_VECTORS(uint, unsigned, 8, 16)

// T name[count] in shared memory.
#define SHARED(T, name, count) \
  static char name##_key;      \
  T(&name)[count] = *reinterpret_cast<T(*)[count]>(emulator::declared(&name##_key, sizeof(T) * (count)))

// The dynamic shared memory of the block, as T* name.
#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(emulator::dynamic_memory())

// A kernel that a host launches by name: calls `body` with one Params by value, with `threads` threads a block at most.
#define KERNEL(name, Params, threads, ...) EMULATOR_KERNEL(name, Params, threads, emulator::MAX_SHARED, __VA_ARGS__)
#define EMULATOR_KERNEL(name, Params, threads, max_shared, ...)                                                 \
  extern "C" __attribute__((visibility("default"))) const unsigned name##_params = sizeof(Params);              \
  extern "C" __attribute__((visibility("default"))) int name##_launch(                                          \
      const void* params, const unsigned* dims, size_t shared, int order, char* error, size_t error_room) {     \
    const auto body = [](const void* given) { (__VA_ARGS__)(*static_cast<const Params*>(given)); };             \
    return emulator::launch(body, params, sizeof(Params), dims, shared, threads, max_shared, order, error,      \
                            error_room);                                                                        \
  }

// The same, to which registers are no matter here.
#define RESIDENT_KERNEL(name, Params, threads, blocks, ...) KERNEL(name, Params, threads, __VA_ARGS__)

// The same for compute capability 9.0 alone.
#define WARPGROUP_KERNEL(name, Params, threads, ...) \
  EMULATOR_KERNEL(name, Params, threads, emulator::MAX_SHARED_OF_9_0, __VA_ARGS__)
