// What the attention kernels share: the plan that they read (kernels/cuda/attention_calls.py) and slabs of K and V in
// shared memory. A slab is SLAB tokens of one KV head, SLAB * D numbers in one piece of a block.
#pragma once
#include "numbers.cuh"

struct __align__(16) AttentionItem {
  int32_t sequence;     // below zero: nothing to do
  int32_t first_token;  // counted from the sequence's first row of this iteration
  int32_t first_slab;
  int32_t end_slab;
  int32_t partial;  // row of the partial results that the item's first token writes; below zero: final
  int32_t splits;   // rows from one token's partial result to the next token's
  int32_t unused[2];
};

struct AttentionParams {
  const void* q;               // [rows, heads, D]
  void* out;                   // [rows, heads, D]
  const void* keys;            // this layer's K of block 0: [kv_heads, block_size, D]
  const void* values;          // this layer's V of block 0, the same
  const AttentionItem* items;  // [items]
  const int32_t* pages;        // blocks of all sequences, one after another
  const int32_t* page_start;   // [S] where those of a sequence begin
  const int32_t* context;      // [S] tokens of a sequence, its rows of this iteration included
  const int32_t* query_start;  // [S + 1] a sequence's first row
  float* partial_out;          // [.., heads, D]
  float* partial_lse;          // [.., heads] base 2
  const float* slopes;         // [heads] or null
  int64_t block_stride;        // numbers from a block's K to the next block's
  int32_t kv_heads;
  int32_t group;            // query heads of a KV head
  int32_t slabs_per_block;  // a power of two
  int32_t window;           // the latest so many positions are seen, the row's own included; 0: all
  float scale_log2;         // the scale of the scores, times log2(e)
};

namespace {

constexpr int SLAB = 16;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float LOG2_E = 1.4426950408889634f;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

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

// Where a 16-byte chunk of a row lies in shared memory, in chunks. ldmatrix reads the same chunk of 8 rows at a time,
// which must lie in different banks: rows of 8, 16 or 32 chunks all begin in the same bank, rows of 12 in two and of 10
// in four different ones, so 3, 2 or 1 bits of the row's number are added to the chunk's.
template <int D>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  constexpr int CHUNKS = D / VECTOR, EVEN = CHUNKS & -CHUNKS, EXCHANGED = EVEN < 8 ? EVEN : 8;
  return row * CHUNKS + (chunk ^ (row / (8 / EXCHANGED) & (EXCHANGED - 1)));
}

// The block of a slab, `pages` being the sequence's.
__device__ __forceinline__ int page_of(const AttentionParams& p, const int32_t* pages, int slab) {
  return pages[slab >> (__ffs(p.slabs_per_block) - 1)];
}

// Numbers from the beginning of block 0 to a slab.
template <int D>
__device__ __forceinline__ int64_t slab_offset(const AttentionParams& p, int page, int kv_head, int slab) {
  const int64_t in_block = kv_head * p.slabs_per_block + (slab & (p.slabs_per_block - 1));
  return page * p.block_stride + in_block * (SLAB * D);
}

// A warp starts the copy of a slab to shared memory.
template <int D>
__device__ __forceinline__ void copy_slab(uint4* to, const void* from, int lane) {
  constexpr int CHUNKS = D / VECTOR;
#pragma unroll
  for (int i = 0; i < SLAB * CHUNKS / 32; i++) {
    const int chunk = i * 32 + lane;
    cp_async_16(to + swizzled<D>(chunk / CHUNKS, chunk % CHUNKS), static_cast<const uint4*>(from) + chunk, true);
  }
}

}  // namespace
