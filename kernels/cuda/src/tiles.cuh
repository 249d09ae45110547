// Tiles of 16-bit numbers as tensor cores take them: products of either type, and rows in shared memory.
#pragma once
#include "numbers.cuh"

namespace {

template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_bf16(d, a, b0, b1);
}
template <>
__device__ __forceinline__ void mma<f16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_f16(d, a, b0, b1);
}

// Rows in shared memory are so arranged that ldmatrix, which reads the same 16-byte chunk of 8 rows at a time, finds
// them in different banks. Rows of 8, 16 or 32 chunks all begin in the same bank, rows of 12 in two and of 10 in four
// different ones: 3, 2 or 1 bits of the row's number are added to the chunk's, within groups of EXCHANGED chunks.
template <int D>
constexpr int EXCHANGED = D % 64 == 0 ? 8 : D % 32 == 0 ? 4 : 2;

// Where a chunk of a row lies, in chunks.
template <int D>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  return row * (D / VECTOR) + (chunk ^ (row / (8 / EXCHANGED<D>) & (EXCHANGED<D> - 1)));
}

// Where the chunk lies that is `chunks` behind the one at `at`, the first or second of its row. `chunks` is even; where
// the compiler knows it, four sums are all that it has to compute for a row.
template <int D>
__device__ __forceinline__ int behind(int at, int chunks) {
  return (at ^ (chunks & (EXCHANGED<D> - 1))) + (chunks & ~(EXCHANGED<D> - 1));
}

}  // namespace
