// Attention of chunks as attention_prefill.cu has it, for compute capability 9.0: FlashAttention-3 (Shah et al. 2024)
// with copies of 16 bytes, for a tile of keys is spread over many blocks of the cache.
//
// A block has a work item and a KV head. The first warpgroup brings Q and then, KEYS tokens at a time from the last ones
// on, K V K V ... through two rings of buffers; each of the others goes through all keys with 64 rows of the tile. While
// the tensor cores multiply the scores of the next keys, and the weights and values of the last ones, a warpgroup makes
// weights of scores. Named barriers hand the buffers over.
// Grid: KV heads, work items. Dynamic shared memory: (ROWS + 2 * STAGES * KEYS) * head_dim numbers.
#include "attention.cuh"

#ifndef VARIANT_KEYS
#define VARIANT_KEYS 128
#define VARIANT_STAGES 2
#define VARIANT_TURNS 1
#endif
#ifndef VARIANT_SKIP
#define VARIANT_SKIP 0
#endif

namespace {

constexpr int WARPGROUP = 128, CONSUMERS = 2, THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int ROWS = CONSUMERS * 64;
constexpr int KEYS = VARIANT_KEYS, STAGES = VARIANT_STAGES;
constexpr int SLABS = KEYS / SLAB / 4;         // of a tile, that a warp brings
constexpr int FETCHER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

// Barriers: full ones for each warpgroup alone.
constexpr int FULL_KEYS = 1, FULL_VALUES = FULL_KEYS + STAGES * CONSUMERS, FREE_KEYS = FULL_VALUES + STAGES * CONSUMERS;
constexpr int FREE_VALUES = FREE_KEYS + STAGES, TURN = FREE_VALUES + STAGES;

template <typename T>
__device__ __forceinline__ void wgmma(float (&d)[8][4], uint64_t a, uint64_t b, bool add) {
  if constexpr (T::WIDE) wgmma_bf16(d, a, b, add); else wgmma_f16(d, a, b, add);
}
template <typename T>
__device__ __forceinline__ void wgmma(float (&d)[16][4], uint64_t a, uint64_t b, bool add) {
  if constexpr (T::WIDE) wgmma_bf16(d, a, b, add); else wgmma_f16(d, a, b, add);
}
template <typename T, int N>
__device__ __forceinline__ void wgmma(float (&d)[N][4], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (T::WIDE) wgmma_bf16(d, a, b); else wgmma_f16(d, a, b);
}

// Where a chunk of a row lies in a matrix of `rows` rows, in chunks: as wgmma reads it, line by line.
template <int rows>
__device__ __forceinline__ int place(int row, int chunk) {
  return (chunk / 8 * rows + row) * 8 + ((chunk ^ row) & 7);
}

// What a thread block has to do.
struct Work {
  int first_row;  // of q and out: the item's first token
  int tokens;
  int first_position;      // of the first token
  int first_key, end_key;  // the positions that some row sees, as far as they are the item's; perhaps none
  int tiles;               // of KEYS keys from start on
  int start;

  __device__ __forceinline__ Work(const AttentionParams& p, const AttentionItem& item) {
    const int begin = p.query_start[item.sequence], rows = p.query_start[item.sequence + 1] - begin;
    first_row = begin + item.first_token;
    tokens = min(ROWS / p.group, rows - item.first_token);
    first_position = p.context[item.sequence] - rows + item.first_token;
    first_key = max(item.first_slab * SLAB, p.window ? max(0, first_position - p.window + 1) : 0);
    end_key = min(item.end_slab * SLAB, first_position + tokens);
    start = first_key / SLAB * SLAB;
    tiles = end_key > first_key ? (end_key - start + KEYS - 1) / KEYS : 0;
  }
  // The position of the first key of tile `t`; the last keys are tile 0.
  __device__ __forceinline__ int key_of(int t) const { return start + (tiles - 1 - t) * KEYS; }
};

// The first warpgroup.
template <typename T, int D>
struct Fetcher {
  static constexpr int CHUNKS = D / VECTOR, TILE = KEYS * CHUNKS;

  const AttentionParams& p;
  const Work& work;
  const int32_t* pages;  // of the sequence
  int page[SLABS];       // of this warp's slabs of the next tile

  __device__ __forceinline__ Fetcher(const AttentionParams& params, const AttentionItem& item, const Work& todo)
      : p(params), work(todo), pages(params.pages + params.page_start[item.sequence]) {}

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }

  // Rows without a token become zeros.
  __device__ __forceinline__ void copy_queries(uint4* to) const {
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += WARPGROUP) {
      const int row = i / CHUNKS, chunk = i % CHUNKS, token = row / p.group;
      const bool there = token < work.tokens;
      const int64_t line =
          (static_cast<int64_t>(work.first_row + token) * p.kv_heads + blockIdx.x) * p.group + row % p.group;
      cp_async_16(to + place<ROWS>(row, chunk), static_cast<const uint4*>(p.q) + (there ? line : 0) * CHUNKS + chunk,
                  there);
    }
  }

  __device__ __forceinline__ void find_pages(int t) {
    const int last = (work.end_key - 1) / SLAB;
#pragma unroll
    for (int i = 0; i < SLABS; i++)
      if (t < work.tiles) page[i] = page_of(p, pages, min(work.key_of(t) / SLAB + i * 4 + warp(), last));
  }

  // Keys that no row sees become zeros: what lies there may be NaN, and a weight of 0 does not take that out of sums.
  __device__ __forceinline__ void copy(uint4* to, const void* from, int t) const {
    constexpr int STEP = 32 / CHUNKS;  // rows that a warp copies at once
    const int first = place<KEYS>(warp() * SLAB + lane() / CHUNKS, lane() % CHUNKS);
#pragma unroll
    for (int i = 0; i < SLABS; i++) {
      const int slab = work.key_of(t) / SLAB + i * 4 + warp();
      const uint4* block = reinterpret_cast<const uint4*>(static_cast<const T*>(from) +
                                                          slab_offset<D>(p, page[i], blockIdx.x, slab)) + lane();
      const unsigned unseen = (work.first_key - slab * SLAB) * CHUNKS, seen = (work.end_key - work.first_key) * CHUNKS;
#pragma unroll
      for (int j = 0; j < SLAB / STEP; j++)
        cp_async_16(to + i * 4 * SLAB * 8 + (first ^ (j * STEP & 7)) + j * STEP * 8, block + j * 32,
                    lane() - unseen + j * 32 < seen);
    }
  }

  // What was copied into a buffer is there, for all warpgroups that read it.
  static __device__ __forceinline__ void hand_over(int barrier) {
    fence_for_wgmma();
#pragma unroll
    for (int i = 0; i < CONSUMERS; i++) barrier_arrive(barrier + i, 2 * WARPGROUP);
  }

  __device__ __forceinline__ void run(uint4* queries, uint4* keys, uint4* values) {
    find_pages(0);
    copy_queries(queries);
    int stage = 0, before = 0;
    for (int t = 0; t < work.tiles; t++) {
      if (t >= STAGES) barrier_sync(FREE_KEYS + stage, THREADS);
      copy(keys + stage * TILE, p.keys, t);
      cp_async_commit();
      if (t > 0) {
        cp_async_wait<1>();
        hand_over(FULL_VALUES + before * CONSUMERS);
      }
      if (t >= STAGES) barrier_sync(FREE_VALUES + stage, THREADS);
      copy(values + stage * TILE, p.values, t);
      cp_async_commit();
      find_pages(t + 1);
      cp_async_wait<1>();
      hand_over(FULL_KEYS + stage * CONSUMERS);
      before = stage;
      stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    if (work.tiles) {
      cp_async_wait<0>();
      hand_over(FULL_VALUES + before * CONSUMERS);
    }
  }
};

// A warpgroup with 64 rows. A tile's row is token * group + query head of the KV head. Sums lie as wgmma leaves them:
// [8 columns][i], row lane / 4 + i / 2 * 8 of the warp's 16, column lane % 4 * 2 + i % 2.
template <typename T, int D>
struct Rows {
  static constexpr int CHUNKS = D / VECTOR, TILE = KEYS * CHUNKS;

  const AttentionParams& p;
  const Work& work;
  int group;             // of the warpgroups with rows
  int first, last;       // positions of the warp's first and last row
  int position[2];       // of this lane's rows
  float slope[2];        // of ALiBi, for scores before their scale
  float top[2];          // per row: the largest score, times log2(e); the weights so far are divided by 2^top
  float total[2];        // per row: this lane's share of the sum of the weights
  float factor[2];       // of sums so far, since the top has risen
  float sums[D / 8][4];
  float scores[KEYS / 8][4];
  uint32_t weights[KEYS / 16][4];

  __device__ __forceinline__ Rows(const AttentionParams& params, const Work& todo)
      : p(params), work(todo), group(threadIdx.x / WARPGROUP - 1) {
    first = work.first_position + row(-1) / p.group;
    last = work.first_position + (row(-1) + 15) / p.group;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      position[half] = work.first_position + row(half) / p.group;
      slope[half] = p.slopes ? p.slopes[blockIdx.x * p.group + row(half) % p.group] * LOG2_E / p.scale_log2 : 0.0f;
      top[half] = minus_infinity();
      total[half] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < D / 8; n++) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
  }

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  // The row of this lane in the upper or the lower half; -1: the warp's first.
  __device__ __forceinline__ int row(int half) const {
    const int of_warp = (threadIdx.x / 32 - 4) * 16;
    return half < 0 ? of_warp : of_warp + lane() / 4 + half * 8;
  }

  __device__ __forceinline__ void start_scores(uint64_t queries, uint64_t keys) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++)
      wgmma<T>(scores, queries + (k / 4 * ROWS * 8 + k % 4 * 2), keys + (k / 4 * KEYS * 8 + k % 4 * 2), k > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void start_sums(uint64_t values) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) wgmma<T>(sums, weights[k], values + k * 128);
    wgmma_commit();
  }

  // Scores become weights; `key` is the position of the first.
  __device__ __forceinline__ void weigh(int key) {
    if (p.slopes) add_slopes(key);
    const bool all = key + KEYS <= min(first + 1, work.end_key) && (!p.window || key > last - p.window);
    if (!all) hide(key);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float x = minus_infinity();
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++) x = fmaxf(x, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
      x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
      x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
      const float raised = fmaxf(x * p.scale_log2, top[half]);
      factor[half] = raised == top[half] ? 1.0f : exp2_approx(top[half] - raised);
      top[half] = raised;
      const float base = raised == minus_infinity() ? 0.0f : raised;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; i++) {
          scores[n][i] = exp2_approx(scores[n][i] * p.scale_log2 - base);
          sum += scores[n][i];
        }
      total[half] = total[half] * factor[half] + sum;
    }
  }

  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        weights[n / 2][n % 2 * 2 + half] = T::pack(scores[n][2 * half], scores[n][2 * half + 1]);
  }

  __device__ __forceinline__ void scale_sums() {
    if (VARIANT_SKIP && !__any_sync(ALL_LANES, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[n][i] *= factor[i / 2];
  }

  // ALiBi, in units of the scores before their scale.
  __device__ __forceinline__ void add_slopes(int key) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float nearest = slope[half] * (key + lane() % 4 * 2 - position[half]);
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) scores[n][2 * half + i] += slope[half] * (n * 8 + i) + nearest;
    }
  }

  // Takes out the keys that a row does not see.
  __device__ __forceinline__ void hide(int key) {
    const int column = key + lane() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int end = min(position[half] + 1, work.end_key) - column;
      const int begin = p.window ? position[half] - p.window + 1 - column : -KEYS;
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++)
          if (n * 8 + i >= end || n * 8 + i < begin) scores[n][2 * half + i] = minus_infinity();
    }
  }

  __device__ __forceinline__ void run(const uint4* queries, const uint4* keys, const uint4* values) {
    const uint64_t left = wgmma_matrix(queries + group * 64 * 8, 16);
    const uint64_t right = wgmma_matrix(keys, 16), add = wgmma_matrix(values, KEYS * 128);
    if (!work.tiles) return;
    // Barriers take turns: first the lower warpgroup multiplies, then the other, while that one weighs.
    if (VARIANT_TURNS && group == 1 && work.tiles > 1) barrier_arrive(TURN, 2 * WARPGROUP);
    barrier_sync(FULL_KEYS + group, 2 * WARPGROUP);
    start_scores(left, right);
    wgmma_wait<0>(scores);
    if (STAGES < work.tiles) barrier_arrive(FREE_KEYS, THREADS);
    weigh(work.key_of(0));
    pack();
    int before = 0, stage = STAGES == 1 ? 0 : 1;
    for (int t = 1; t < work.tiles; t++) {
      barrier_sync(FULL_KEYS + stage * CONSUMERS + group, 2 * WARPGROUP);
      if (VARIANT_TURNS) barrier_sync(TURN + group, 2 * WARPGROUP);
      start_scores(left, right + stage * TILE);
      barrier_sync(FULL_VALUES + before * CONSUMERS + group, 2 * WARPGROUP);
      start_sums(add + before * TILE);
      if (VARIANT_TURNS && (group == 0 || t < work.tiles - 1)) barrier_arrive(TURN + 1 - group, 2 * WARPGROUP);
      wgmma_wait<1>(scores);
      if (t + STAGES < work.tiles) barrier_arrive(FREE_KEYS + stage, THREADS);
      weigh(work.key_of(t));
      wgmma_wait<0>(sums);
      if (t - 1 + STAGES < work.tiles) barrier_arrive(FREE_VALUES + before, THREADS);
      scale_sums();
      pack();
      before = stage;
      stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    barrier_sync(FULL_VALUES + before * CONSUMERS + group, 2 * WARPGROUP);
    start_sums(add + before * TILE);
    wgmma_wait<0>(sums);
  }

  // Rows of the result, or of partial results with the base-2 logarithm of their sum of exponentials.
  __device__ __forceinline__ void write(const AttentionItem& item) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float all = total[half];
      all += __shfl_xor_sync(ALL_LANES, all, 1);
      all += __shfl_xor_sync(ALL_LANES, all, 2);
      const int token = row(half) / p.group;
      if (token >= work.tokens) continue;
      const int64_t line = item.partial < 0 ? work.first_row + token : item.partial + token * item.splits;
      const int64_t head = (line * p.kv_heads + blockIdx.x) * p.group + row(half) % p.group;
      const float scale = all == 0.0f ? 0.0f : 1.0f / all;
#pragma unroll
      for (int n = 0; n < D / 8; n++) {
        const float low = sums[n][2 * half] * scale, high = sums[n][2 * half + 1] * scale;
        const int64_t at = head * (D / 2) + n * 4 + lane() % 4;
        if (item.partial < 0)
          static_cast<uint32_t*>(p.out)[at] = T::pack(low, high);
        else
          reinterpret_cast<float2*>(p.partial_out)[at] = make_float2(low, high);
      }
      if (item.partial >= 0 && lane() % 4 == 0) p.partial_lse[head] = top[half] + log2f(all);
    }
  }
};

template <typename T, int D>
__device__ __forceinline__ void prefill(const AttentionParams& p) {
  DYNAMIC_SHARED(uint4, queries);
  uint4* keys = queries + ROWS * (D / VECTOR);
  uint4* values = keys + STAGES * KEYS * (D / VECTOR);
  const AttentionItem item = p.items[blockIdx.y];
  if (item.sequence < 0) return;
  const Work work(p, item);
  if (threadIdx.x < WARPGROUP) {
    fewer_registers<FETCHER_REGISTERS>();
    Fetcher<T, D>(p, item, work).run(queries, keys, values);
  } else {
    more_registers<CONSUMER_REGISTERS>();
    Rows<T, D> rows(p, work);
    rows.run(queries, keys, values);
    rows.write(item);
  }
}

}  // namespace

WARPGROUP_KERNEL(attention_prefill_sm90_bf16_d128, AttentionParams, THREADS, prefill<bf16, 128>)
WARPGROUP_KERNEL(attention_prefill_sm90_f16_d128, AttentionParams, THREADS, prefill<f16, 128>)
WARPGROUP_KERNEL(attention_prefill_sm90_bf16_d64, AttentionParams, THREADS, prefill<bf16, 64>)
WARPGROUP_KERNEL(attention_prefill_sm90_f16_d64, AttentionParams, THREADS, prefill<f16, 64>)
