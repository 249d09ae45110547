// Attention of chunks as attention_prefill.cuh has it, for compute capability 9.0: FlashAttention-3 (Shah et al. 2024)
// with copies of 16 bytes, for a tile of keys is spread over many blocks of the cache.
//
// As many blocks as run at once go through all work: an item and a KV head. The first warpgroup of a block brings Q and
// then, KEYS tokens at a time from the last ones on, K V K V ... through two rings of buffers, and goes on with the next
// work. Each of the others goes through all keys with 64 rows of the tile: the tensor cores multiply the scores of the
// next keys, and the weights and values of the last ones, while it makes weights of scores and the other one does.
// Named barriers hand the buffers over.
// Grid: multiprocessors. Dynamic shared memory: (ROWS + 2 * STAGES * KEYS) * head_dim numbers, then two of Work.
#include "attention.cuh"

namespace {

constexpr int WARPGROUP = 128, CONSUMERS = 2, THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int ROWS = CONSUMERS * 64;
constexpr int KEYS = 128, STAGES = 2;
constexpr int SLABS = KEYS / SLAB / 4;  // of a tile, that a warp brings
constexpr int FETCHER_REGISTERS = 56, CONSUMER_REGISTERS = 224;

// Barriers. A full buffer has one for each warpgroup that reads it: none waits for the other.
constexpr int FULL_KEYS = 1, FULL_VALUES = FULL_KEYS + STAGES * CONSUMERS, FREE_KEYS = FULL_VALUES + STAGES * CONSUMERS;
constexpr int FREE_VALUES = FREE_KEYS + STAGES, FREE_QUERIES = FREE_VALUES + STAGES, TURN = FREE_QUERIES + 1;
static_assert(TURN + CONSUMERS <= 16, "a block has 16 barriers, the first of which is __syncthreads");

template <typename T, int N>
__device__ __forceinline__ void wgmma(float (&d)[N][4], uint64_t a, uint64_t b, bool add) {
  if constexpr (T::HALF)
    wgmma_f16(d, a, b, add);
  else
    wgmma_bf16(d, a, b, add);
}
template <typename T, int N>
__device__ __forceinline__ void wgmma(float (&d)[N][4], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (T::HALF)
    wgmma_f16(d, a, b);
  else
    wgmma_bf16(d, a, b);
}

// Where a chunk of a row lies in a matrix of `rows` rows, in chunks: 64 columns behind the other, swizzled for wgmma.
template <int rows>
__device__ __forceinline__ int place(int row, int chunk) {
  return (chunk / 8 * rows + row) * 8 + ((chunk ^ row) & 7);
}

// What the block has to do with an item and a KV head.
struct Work {
  int kv_head;
  int tokens;
  int first_row;           // of q and out: the item's first token
  int first_position;      // of the first token
  int first_key, end_key;  // the positions that some row sees, as far as they are the item's; perhaps none
  int start, tiles;        // one at least, of KEYS keys from position `start` on; none: there is no more work
  int partial, splits;     // see AttentionItem

  // The position of the first key of tile `t`; the last keys are tile 0.
  __device__ __forceinline__ int key_of(int t) const { return start + (tiles - 1 - t) * KEYS; }
};

__device__ __forceinline__ Work work_of(const AttentionParams& p, const AttentionItem& item, int kv_head) {
  const int begin = p.query_start[item.sequence], rows = p.query_start[item.sequence + 1] - begin;
  Work work;
  work.kv_head = kv_head;
  work.tokens = min(ROWS / p.group, rows - item.first_token);
  work.first_row = begin + item.first_token;
  work.first_position = p.context[item.sequence] - rows + item.first_token;
  work.first_key = max(item.first_slab * SLAB, p.window ? max(0, work.first_position - p.window + 1) : 0);
  work.end_key = max(work.first_key, min(item.end_slab * SLAB, work.first_position + work.tokens));
  work.start = work.first_key / SLAB * SLAB;
  work.tiles = max(1, (work.end_key - work.start + KEYS - 1) / KEYS);
  work.partial = item.partial;
  work.splits = item.splits;
  return work;
}

// The first warpgroup.
template <typename T, int D>
struct Fetcher {
  static constexpr int CHUNKS = D / VECTOR, TILE = KEYS * CHUNKS;

  const AttentionParams& p;
  uint4 *queries, *keys, *values;
  Work* works;     // two, in turn
  int page[SLABS];  // of this warp's slabs of the next tile
  int stage;        // of the next tile
  int tiles;        // so far

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }

  // Rows without a token become zeros.
  __device__ __forceinline__ void copy_queries(const Work& work) const {
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += WARPGROUP) {
      const int row = i / CHUNKS, chunk = i % CHUNKS, token = row / p.group;
      const bool there = token < work.tokens;
      const int64_t line =
          (static_cast<int64_t>(work.first_row + token) * p.kv_heads + work.kv_head) * p.group + row % p.group;
      cp_async_16(queries + place<ROWS>(row, chunk),
                  static_cast<const uint4*>(p.q) + (there ? line : 0) * CHUNKS + chunk, there);
    }
  }

  __device__ __forceinline__ void find_pages(const Work& work, const int32_t* pages, int t) {
    const int last = max(work.end_key - 1, 0) / SLAB;
#pragma unroll
    for (int i = 0; i < SLABS; i++)
      if (t < work.tiles) page[i] = page_of(p, pages, min(work.key_of(t) / SLAB + i * 4 + warp(), last));
  }

  // Keys that no row sees become zeros: what lies there may be NaN, and a weight of 0 does not take that out of sums.
  __device__ __forceinline__ void copy(const Work& work, uint4* to, const void* from, int t) const {
    constexpr int STEP = 32 / CHUNKS;  // rows that a warp copies at once
    const int first = place<KEYS>(warp() * SLAB + lane() / CHUNKS, lane() % CHUNKS);
#pragma unroll
    for (int i = 0; i < SLABS; i++) {
      const int slab = work.key_of(t) / SLAB + i * 4 + warp();
      const uint4* block = reinterpret_cast<const uint4*>(static_cast<const T*>(from) +
                                                          slab_offset<D>(p, page[i], work.kv_head, slab)) + lane();
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

  __device__ __forceinline__ void advance() {
    stage = stage == STAGES - 1 ? 0 : stage + 1;
    tiles++;
  }

  // Brings all that a work takes; `number`: of works before it. The last values are on their way when it returns.
  __device__ __forceinline__ void fetch(const AttentionItem& item, int kv_head, int number) {
    const Work work = work_of(p, item, kv_head);
    const int32_t* pages = p.pages + p.page_start[item.sequence];
    find_pages(work, pages, 0);
    for (int t = 0; t < work.tiles; t++) {
      if (tiles >= STAGES) barrier_sync(FREE_KEYS + stage, THREADS);
      copy(work, keys + stage * TILE, p.keys, t);
      if (t == 0) {
        if (number > 0) barrier_sync(FREE_QUERIES, THREADS);
        copy_queries(work);
        if (threadIdx.x == 0) works[number % 2] = work;
      }
      cp_async_commit();
      if (tiles > 0) {
        cp_async_wait<1>();
        hand_over(FULL_VALUES + (stage == 0 ? STAGES - 1 : stage - 1) * CONSUMERS);
      }
      if (tiles >= STAGES) barrier_sync(FREE_VALUES + stage, THREADS);
      copy(work, values + stage * TILE, p.values, t);
      cp_async_commit();
      find_pages(work, pages, t + 1);
      cp_async_wait<1>();
      hand_over(FULL_KEYS + stage * CONSUMERS);
      advance();
    }
  }

  // Ends the others, and is the last to come to each barrier.
  __device__ __forceinline__ void finish(int number) {
    if (tiles > 0) {
      cp_async_wait<0>();
      hand_over(FULL_VALUES + (stage == 0 ? STAGES - 1 : stage - 1) * CONSUMERS);
    }
    if (tiles >= STAGES) barrier_sync(FREE_KEYS + stage, THREADS);
    if (threadIdx.x == 0) works[number % 2].tiles = 0;
    hand_over(FULL_KEYS + stage * CONSUMERS);
    const int open = min(tiles, STAGES);
    if (number > 0) barrier_sync(FREE_QUERIES, THREADS);
    for (int i = 0; i < open; i++) {
      stage = tiles - open + i;
      if (tiles < STAGES || i > 0) barrier_sync(FREE_KEYS + stage % STAGES, THREADS);
      barrier_sync(FREE_VALUES + stage % STAGES, THREADS);
    }
  }
};

// A warpgroup with 64 rows. A tile's row is token * group + query head of the KV head. Sums lie as wgmma leaves them:
// [8 columns][i], row lane / 4 + i / 2 * 8 of the warp's 16, column lane % 4 * 2 + i % 2.
template <typename T, int D>
struct Rows {
  static constexpr int CHUNKS = D / VECTOR, TILE = KEYS * CHUNKS;

  const AttentionParams& p;
  const int consumer;  // which of the warpgroups with rows
  int first, last;     // positions of the warp's first and last row
  int end_key, window;
  int position[2];     // of this lane's rows
  float slope[2];      // of ALiBi, for scores before their scale
  float top[2];        // per row: the largest score, times log2(e); the weights so far are divided by 2^top
  float total[2];      // per row: this lane's share of the sum of the weights
  float factor[2];     // of sums so far, since the top has risen
  float sums[D / 8][4];
  float scores[KEYS / 8][4];
  uint32_t weights[KEYS / 16][4];

  __device__ __forceinline__ explicit Rows(const AttentionParams& params)
      : p(params), consumer(threadIdx.x / WARPGROUP - 1), window(params.window) {}

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int first_of_warp() { return (threadIdx.x - WARPGROUP) / 32 * 16; }
  // The row of this lane in the upper half (0) or the lower one (1).
  static __device__ __forceinline__ int row(int half) { return first_of_warp() + lane() / 4 + half * 8; }

  __device__ __forceinline__ void begin(const Work& work) {
    first = work.first_position + first_of_warp() / p.group;
    last = work.first_position + (first_of_warp() + 15) / p.group;
    end_key = work.end_key;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      position[half] = work.first_position + row(half) / p.group;
      slope[half] = p.slopes ? p.slopes[work.kv_head * p.group + row(half) % p.group] * LOG2_E / p.scale_log2 : 0.0f;
      top[half] = minus_infinity();
      total[half] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < D / 8; n++) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
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
    const bool all = key + KEYS <= min(first + 1, end_key) && (!window || key > last - window);
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
      const int end = min(position[half] + 1, end_key) - column;
      const int begin = window ? position[half] - window + 1 - column : -KEYS;
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++)
          if (n * 8 + i >= end || n * 8 + i < begin) scores[n][2 * half + i] = minus_infinity();
    }
  }

  __device__ __forceinline__ void run(const uint4* queries, const uint4* keys, const uint4* values, const Work* works) {
    const uint64_t left = wgmma_matrix(queries + consumer * 64 * 8, 16);
    const uint64_t right = wgmma_matrix(keys, 16), mean = wgmma_matrix(values, KEYS * 128);
    // Warpgroups take turns to multiply, so that one weighs meanwhile.
    if (consumer == 1) barrier_arrive(TURN, 2 * WARPGROUP);
    int stage = 0;
    for (int number = 0;; number++) {
      const Work& work = works[number % 2];
      barrier_sync(FULL_KEYS + stage * CONSUMERS + consumer, 2 * WARPGROUP);
      const int tiles = work.tiles;
      if (tiles == 0) break;
      start_scores(left, right + stage * TILE);
      begin(work);
      wgmma_wait<0>(scores);
      if (tiles == 1) barrier_arrive(FREE_QUERIES, THREADS);
      barrier_arrive(FREE_KEYS + stage, THREADS);
      int key = work.key_of(0);
      weigh(key);
      pack();
      for (int t = 1; t < tiles; t++) {
        const int before = stage;
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        barrier_sync(FULL_KEYS + stage * CONSUMERS + consumer, 2 * WARPGROUP);
        barrier_sync(TURN + consumer, 2 * WARPGROUP);
        start_scores(left, right + stage * TILE);
        scale_sums();
        barrier_sync(FULL_VALUES + before * CONSUMERS + consumer, 2 * WARPGROUP);
        start_sums(mean + before * TILE);
        barrier_arrive(TURN + 1 - consumer, 2 * WARPGROUP);
        wgmma_wait<1>(scores);
        if (t == tiles - 1) barrier_arrive(FREE_QUERIES, THREADS);
        barrier_arrive(FREE_KEYS + stage, THREADS);
        key -= KEYS;
        weigh(key);
        compute_now(scores, total[0] + total[1]);
        wgmma_wait<0>(sums);
        barrier_arrive(FREE_VALUES + before, THREADS);
        pack();
      }
      scale_sums();
      barrier_sync(FULL_VALUES + stage * CONSUMERS + consumer, 2 * WARPGROUP);
      start_sums(mean + stage * TILE);
      wgmma_wait<0>(sums);
      barrier_arrive(FREE_VALUES + stage, THREADS);
      stage = stage == STAGES - 1 ? 0 : stage + 1;
      write(work);
    }
    if (consumer == 0) barrier_sync(TURN, 2 * WARPGROUP);
  }

  // Rows of the result, or of partial results with the base-2 logarithm of their sum of exponentials.
  __device__ __forceinline__ void write(const Work& work) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float all = total[half];
      all += __shfl_xor_sync(ALL_LANES, all, 1);
      all += __shfl_xor_sync(ALL_LANES, all, 2);
      const int token = row(half) / p.group;
      const bool there = token < work.tokens;
      const int64_t line = work.partial < 0 ? work.first_row + token : work.partial + token * work.splits;
      const int64_t head = (line * p.kv_heads + work.kv_head) * p.group + row(half) % p.group;
      const float scale = all == 0.0f ? 0.0f : 1.0f / all;
      if (work.partial < 0)
        write_row(static_cast<T*>(p.out) + head * D, there, half, scale);
      else
        write_row(p.partial_out + head * D, there, half, scale);
      if (there && work.partial >= 0 && lane() % 4 == 0) p.partial_lse[head] = top[half] + log2f(all);
    }
  }
  // Two lanes exchange words, so that four of them write whole sectors: one has the columns of n, the other of n + 1.
  __device__ __forceinline__ void write_row(T* to, bool there, int half, float scale) const {
    const bool odd = lane() % 2;
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      const uint32_t low = T::pack(sums[n][2 * half] * scale, sums[n][2 * half + 1] * scale);
      const uint32_t high = T::pack(sums[n + 1][2 * half] * scale, sums[n + 1][2 * half + 1] * scale);
      const uint32_t other = __shfl_xor_sync(ALL_LANES, odd ? low : high, 1);
      uint2* const at = reinterpret_cast<uint2*>(to) + (n + odd) * 2 + lane() % 4 / 2;
      if (there) *at = odd ? make_uint2(other, high) : make_uint2(low, other);
    }
  }
  __device__ __forceinline__ void write_row(float* to, bool there, int half, float scale) const {
    if (!there) return;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
      reinterpret_cast<float2*>(to)[n * 4 + lane() % 4] =
          make_float2(sums[n][2 * half] * scale, sums[n][2 * half + 1] * scale);
  }
};

template <typename T, int D>
__device__ __forceinline__ void prefill(const AttentionParams& p) {
  DYNAMIC_SHARED(uint4, queries);
  uint4* keys = queries + ROWS * (D / VECTOR);
  uint4* values = keys + STAGES * KEYS * (D / VECTOR);
  Work* works = reinterpret_cast<Work*>(values + STAGES * KEYS * (D / VECTOR));
  if (threadIdx.x >= WARPGROUP) {
    more_registers<CONSUMER_REGISTERS>();
    Rows<T, D>(p).run(queries, keys, values, works);
    return;
  }
  fewer_registers<FETCHER_REGISTERS>();
  Fetcher<T, D> fetcher{p, queries, keys, values, works, {}, 0, 0};
  // Items are there by their length. Every other time the blocks take them in reverse order, so that none gets the
  // longest each time.
  const int total = p.item_count * p.kv_heads, blocks = gridDim.x;
  int number = 0;
  for (int from = 0, mine = blockIdx.x; from < total; from += blocks, mine = blocks - 1 - mine) {
    if (from + mine >= total) continue;
    const AttentionItem item = p.items[(from + mine) / p.kv_heads];
    if (item.sequence >= 0) fetcher.fetch(item, (from + mine) % p.kv_heads, number++);
  }
  fetcher.finish(number);
}

}  // namespace

WARPGROUP_KERNEL(attention_prefill_sm90_bf16_d64, AttentionParams, THREADS, prefill<bf16, 64>)
WARPGROUP_KERNEL(attention_prefill_sm90_bf16_d128, AttentionParams, THREADS, prefill<bf16, 128>)
WARPGROUP_KERNEL(attention_prefill_sm90_f16_d64, AttentionParams, THREADS, prefill<f16, 64>)
WARPGROUP_KERNEL(attention_prefill_sm90_f16_d128, AttentionParams, THREADS, prefill<f16, 128>)
