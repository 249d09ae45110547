// The wrappers of ptx.cuh for compute capability 9.0, one warpgroup or two, their numbers laid bare in memory.
#include "ptx.cuh"

struct Params {
  const void* a;
  const void* b;
  void* out;
  int n;
};

namespace {

constexpr int ROWS = 64, STEPS = 8;  // 16 numbers along k a step

// a: of registers, words that each thread holds, 4 a step; else [64, 128] in two panels of 64 columns. b: by lines along
// k as a, [columns, 128], or across k, [128, columns]; both as wgmma reads them. out [64, columns] float32, n more than
// the product.
template <bool half, bool registers, int columns>
__device__ void product(const Params& p) {
  DYNAMIC_SHARED(uint4, left);
  uint4* right = left + ROWS * 16;
  const int vectors = columns * 16;
  if (!registers)
    for (int i = threadIdx.x; i < ROWS * 16; i += 128) cp_async_16(left + i, static_cast<const uint4*>(p.a) + i, true);
  for (int i = threadIdx.x; i < vectors; i += 128) cp_async_16(right + i, static_cast<const uint4*>(p.b) + i, true);
  cp_async_commit();
  cp_async_wait<0>();
  fence_for_wgmma();
  barrier_sync(3, 128);
  float sums[columns / 8][4];
  for (int i = 0; i < columns / 8; i++)
    for (int j = 0; j < 4; j++) sums[i][j] = registers ? p.n : 1e30f;
  unsigned held[STEPS][4];
  for (int k = 0; k < STEPS; k++)
    for (int i = 0; i < 4; i++)
      held[k][i] = registers ? static_cast<const unsigned*>(p.a)[(k * 128 + threadIdx.x) * 4 + i] : 0;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < STEPS; k++) {
    const uint64_t a = wgmma_matrix(left, 16) + (k / 4 * ROWS * 8 + k % 4 * 2);
    const uint64_t along = wgmma_matrix(right, 16) + (k / 4 * columns * 8 + k % 4 * 2);
    const uint64_t across = wgmma_matrix(right, 128 * 128) + k * 128;
    if constexpr (registers && half)
      wgmma_f16(sums, held[k], across);
    else if constexpr (registers)
      wgmma_bf16(sums, held[k], across);
    else if constexpr (half)
      wgmma_f16(sums, a, along, k > 0);
    else
      wgmma_bf16(sums, a, along, k > 0);
  }
  wgmma_commit();
  wgmma_wait<0>(sums);
  for (int i = 0; i < columns / 8; i++)
    for (int j = 0; j < 4; j++) {
      const int row = threadIdx.x / 4 % 8 + threadIdx.x / 32 * 16 + j / 2 * 8, column = i * 8 + threadIdx.x % 4 * 2 + j % 2;
      static_cast<float*>(p.out)[row * columns + column] = sums[i][j] + (registers ? 0 : p.n);
    }
}

// The first warpgroup hands numbers to the second one, `n` times, in one place, and goes on while it reads.
__device__ void hand_over(const Params& p) {
  SHARED(int, place, 128);
  const int i = threadIdx.x % 128;
  int sum = 0;
  if (threadIdx.x < 128) {
    fewer_registers<24>();
    for (int round = 0; round < p.n; round++) {
      if (round > 0) barrier_sync(2, 256);
      place[i] = static_cast<const int*>(p.a)[round] + i;
      barrier_arrive(1, 256);
    }
    return;
  }
  more_registers<240>();
  for (int round = 0; round < p.n; round++) {
    barrier_sync(1, 256);
    sum = 3 * sum + place[127 - i];
    if (round < p.n - 1) barrier_arrive(2, 256);
  }
  static_cast<int*>(p.out)[i] = sum;
}

}  // namespace

#define PRODUCTS(name, half, registers)                                                 \
  WARPGROUP_KERNEL(name##_64, Params, 128, product<half, registers, 64>)                \
  WARPGROUP_KERNEL(name##_128, Params, 128, product<half, registers, 128>)
PRODUCTS(bf16_shared, false, false)
PRODUCTS(bf16_registers, false, true)
PRODUCTS(f16_shared, true, false)
PRODUCTS(f16_registers, true, true)
WARPGROUP_KERNEL(hand_over_, Params, 256, hand_over)
