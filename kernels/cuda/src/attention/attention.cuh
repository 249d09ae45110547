// What the attention kernels share: the plan that they read (kernels/cuda/calls.py) and slabs of K and V in
// shared memory. A slab is SLAB tokens of one KV head, SLAB * D numbers in one piece of a block; where FP8, codes and
// scales (fp8.cuh), which a warp widens in shared memory to what the numbers would have been.
#pragma once
#include "fp8.cuh"
#include "tiles.cuh"

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
  int32_t window;           // the latest so many positions are seen, including the row's position; 0: all
  float scale_log2;         // the scale of the scores, times log2(e)
  int32_t item_count;
};

namespace {

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float LOG2_E = 1.4426950408889634f;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// The block of a slab, `pages` being the sequence's.
__device__ __forceinline__ int page_of(const AttentionParams& p, const int32_t* pages, int slab) {
  return pages[slab >> (__ffs(p.slabs_per_block) - 1)];
}

// What a pool holds for T, and how many of these a token and KV head have.
template <typename T, bool FP8>
struct Stored {
  using Type = T;
};
template <typename T>
struct Stored<T, true> {
  using Type = unsigned char;
};
template <int D, bool FP8>
constexpr int STORED = FP8 ? D + SCALE_BYTES : D;
// A slab as it lies in a block, in chunks of 16 bytes.
template <int D, bool FP8>
constexpr int HELD = FP8 ? SLAB * STORED<D, true> / 16 : SLAB * D / VECTOR;

// From the beginning of block 0 to a slab; D: STORED.
template <int D>
__device__ __forceinline__ int64_t slab_offset(const AttentionParams& p, int page, int kv_head, int slab) {
  const int64_t in_block = kv_head * p.slabs_per_block + (slab & (p.slabs_per_block - 1));
  return page * p.block_stride + in_block * (SLAB * D);
}

// A warp's way of copying a slab: lane by lane in one piece of memory, to rows as above, or as it lies.
template <int D, bool FP8 = false>
struct SlabCopy {
  static constexpr int CHUNKS = D / VECTOR, STEPS = SLAB * CHUNKS / 32;
  static constexpr bool WHOLE_ROWS = 32 % CHUNKS == 0;  // in a step: then all steps follow from the first
  int places[WHOLE_ROWS ? 1 : STEPS];

  __device__ __forceinline__ explicit SlabCopy(int lane) {
#pragma unroll
    for (int i = 0; i < (WHOLE_ROWS ? 1 : STEPS); i++)
      places[i] = swizzled<D>((i * 32 + lane) / CHUNKS, (i * 32 + lane) % CHUNKS);
  }

  // Starts it. to: a multiple of 8 chunks from the beginning of `shared`; from: the lane's first 16 bytes; there(i): is
  // its chunk i * 32 + lane there? If not, zeros are written.
  template <typename There>
  __device__ __forceinline__ void start(uint4* shared, int to, const void* from, There there) const {
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      const int at = WHOLE_ROWS ? ((to + places[0]) ^ (i * 32 / CHUNKS & 7)) + i * 32 : to + places[WHOLE_ROWS ? 0 : i];
      cp_async_16(shared + at, static_cast<const uint4*>(from) + i * 32, there(i));
    }
  }
  __device__ __forceinline__ void start(uint4* shared, int to, const void* from) const {
    start(shared, to, from, [](int) { return true; });
  }
};
template <int D>
struct SlabCopy<D, true> {
  const int lane;

  __device__ __forceinline__ explicit SlabCopy(int lane) : lane(lane) {}

  __device__ __forceinline__ void start(uint4* shared, int to, const void* from) const {
    constexpr int CHUNKS = HELD<D, true>;
#pragma unroll
    for (int i = 0; i < (CHUNKS + 31) / 32; i++)
      if (i * 32 + lane < CHUNKS)
        cp_async_16(shared + to + i * 32 + lane, static_cast<const uint4*>(from) + i * 32, true);
  }
};

// A warp widens the slab at `coded` to rows as above, numbers of tokens that are not seen to zeros. UNROLLED steps are
// on their way at once, as far as there are registers.
template <typename T, int D, int UNROLLED, typename Seen>
__device__ __forceinline__ void widen_slab(uint4* to, const uint4* coded, int lane, Seen is_seen) {
  constexpr int CHUNKS = D / VECTOR;
  const uint2* codes = reinterpret_cast<const uint2*>(coded);
  const float* scales = reinterpret_cast<const float*>(coded + SLAB * D / 16);
#pragma unroll UNROLLED
  for (int i = 0; i < SLAB * CHUNKS / 32; i++) {
    const int at = i * 32 + lane, row = at / CHUNKS;
    to[swizzled<D>(row, at % CHUNKS)] = widen<T>(codes[at], is_seen(row) ? scales[row] : 0.0f);
  }
}

}  // namespace
