// Attention of chunks over paged K and V, those of cached positions included: FlashAttention-2 (Dao 2023).
//
// A block has a work item and a KV head. Its tile of Q stays in shared memory. K and V come KEYS tokens at a time,
// as pieces K V K V ..., through a ring of buffers there: while one is worked on, the next ones are on their way. Each
// warp brings a slab of every piece, and goes through all keys with its rows of the tile.
// Kernels of fp8 bring codes, and each warp widens its slab of a piece to what a plain kernel's ring would have held.
// Grid: KV heads, work items: so that the longest items of all heads begin first. Dynamic shared memory: ROWS *
// head_dim numbers, KEYS * head_dim widened ones, STAGES * KEYS tokens as they are stored, then a RowTable.
#pragma once
#include "attention_prefill.cuh"

namespace {

// A warp starts the copies of its rows of Q. Rows without a token become zeros.
template <int D>
__device__ __forceinline__ void copy_queries(const AttentionParams& p, const Work& work, uint4* queries) {
  constexpr int ROWS = Tile<D>::ROWS / WARPS, CHUNKS = Tile<D>::CHUNKS;
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * ROWS, kv_head = blockIdx.x;
  // A lane finds the place in q of one row, for all lanes that copy parts of it.
  const int token = (first + lane % ROWS) / p.group, head = (first + lane % ROWS) % p.group;
  const int place = token < work.tokens ? ((work.first_row + token) * p.kv_heads + kv_head) * p.group + head : -1;
#pragma unroll
  for (int i = 0; i < ROWS * CHUNKS / 32; i++) {
    const int row = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
    const int from = __shfl_sync(ALL_LANES, place, row);
    const uint4* q = static_cast<const uint4*>(p.q) + static_cast<int64_t>(max(from, 0)) * CHUNKS + chunk;
    cp_async_16(queries + swizzled<D>(first + row, chunk), q, from >= 0);
  }
}

// Brings this warp's slab of one piece after another, in the order K V K V ...
template <typename T, int D, bool FP8>
struct Feed {
  static constexpr int SLAB_CHUNKS = HELD<D, FP8>;

  const AttentionParams& p;
  const Work& work;
  const int32_t* pages;  // of the sequence
  int page;              // of the next slab, read ahead of its use

  __device__ __forceinline__ Feed(const AttentionParams& params, const AttentionItem& item, const Work& todo)
      : p(params), work(todo), pages(params.pages + params.page_start[item.sequence]) {
    find_page(work.first_key / SLAB);
  }

  // first: the slab that the piece begins with.
  __device__ __forceinline__ void find_page(int first) {
    const int slab = first + threadIdx.x / 32, last = max(work.end_key - 1, 0) / SLAB;
    page = page_of(p, pages, min(slab, last));
  }

  // Starts the copies of a piece, if there is one, to place `to` of the ring. Keys that no row sees become zeros: what
  // lies there may be NaN, and a weight of 0 does not take that out of the sums.
  template <bool VALUES>
  __device__ __forceinline__ void copy(uint4* ring, int to, int first) {
    constexpr int CHUNKS = Tile<D>::CHUNKS;
    if (first * SLAB < work.end_key) {
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slab = first + warp;
      using Number = typename Stored<T, FP8>::Type;
      const Number* block = static_cast<const Number*>(VALUES ? p.values : p.keys);
      block += slab_offset<STORED<D, FP8>>(p, page, blockIdx.x, slab);
      const uint4* from = reinterpret_cast<const uint4*>(block) + lane;
      const SlabCopy<D, FP8> copy(lane);
      if constexpr (FP8) {
        copy.start(ring, to + warp * SLAB_CHUNKS, from);
      } else {
        const unsigned unseen = (work.first_key - slab * SLAB) * CHUNKS;
        const unsigned seen = (work.end_key - work.first_key) * CHUNKS;
        copy.start(ring, to + warp * SLAB_CHUNKS, from, [&](int i) { return lane - unseen + i * 32 < seen; });
      }
    }
    cp_async_commit();
    if (VALUES) find_page(first + WARPS);
  }

  // Widens this warp's slab of the piece at `from`, the first slab of which is `first`.
  __device__ __forceinline__ void widen(uint4* to, const uint4* from, int first) const {
    const int warp = threadIdx.x / 32, slab = first + warp;
    const unsigned unseen = work.first_key - slab * SLAB, seen = work.end_key - work.first_key;
    widen_slab<T, D, 2>(to + warp * SLAB * Tile<D>::CHUNKS, from + warp * SLAB_CHUNKS, threadIdx.x % 32,
                        [&](int token) { return token - unseen < seen; });
  }
};

template <typename T, int D, bool FP8 = false>
__device__ __forceinline__ void prefill(const AttentionParams& p) {
  constexpr int STAGES = Tile<D>::STAGES, PIECE = WARPS * HELD<D, FP8>;
  DYNAMIC_SHARED(uint4, queries);
  uint4* wide = queries + Tile<D>::ROWS * Tile<D>::CHUNKS;  // the piece that is worked on, where it must be widened
  uint4* ring = wide + (FP8 ? Tile<D>::PIECE : 0);
  RowTable<D>& table = *reinterpret_cast<RowTable<D>*>(ring + STAGES * PIECE);
  const AttentionItem item = p.items[blockIdx.y];
  if (item.sequence < 0) return;
  const Work work = work_of<D>(p, item);
  int slab = work.first_key / SLAB;
  Feed<T, D, FP8> feed(p, item, work);
  copy_queries<D>(p, work, queries);
  feed.template copy<false>(ring, 0, slab);  // closes a group of copies, the queries in it
  if (STAGES > 2) feed.template copy<true>(ring, PIECE, slab);
  table.fill(p, work);
  Rows<T, D> rows(p, work);
  int now = 0, next = STAGES - 1;  // buffers: of the piece that is worked on, and the one to be filled
  // The copies of a piece by all threads are there, and all threads are through with the piece before.
  const auto take = [&] {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    if constexpr (FP8) {
      feed.widen(wide, ring + now * PIECE, slab);
      __syncthreads();
    }
  };
  const auto piece = [&] { return FP8 ? wide : ring + now * PIECE; };
  const auto advance = [&] {
    next = now;
    now = now == STAGES - 1 ? 0 : now + 1;
  };
  for (; slab * SLAB < work.end_key; slab += WARPS) {
    const bool seen = rows.sees(slab * SLAB, p.window);
    uint32_t weights[Tile<D>::M_TILES][KEYS / 16][4];
    take();
    feed.template copy<STAGES % 2 == 0>(ring, next * PIECE, slab + (STAGES - 1) / 2 * WARPS);
    if (seen) rows.weigh(p, work, table, queries, piece(), slab * SLAB, weights);
    advance();
    take();
    feed.template copy<STAGES % 2 == 1>(ring, next * PIECE, slab + STAGES / 2 * WARPS);
    if (seen) rows.add(weights, piece());
    advance();
  }
  cp_async_wait<0>();
  rows.write(p, p.items[blockIdx.y]);
}

}  // namespace
