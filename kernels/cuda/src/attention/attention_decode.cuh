// What a block and its warps hold in decode attention: the work, the slabs on their way, the query heads, the sums.
#pragma once
#include "attention.cuh"

namespace {

constexpr int ROWS = 16;  // of mma

template <int D>
constexpr int CHUNKS = D / VECTOR;  // of a row
template <int D>
constexpr int UNIT = SLAB * CHUNKS<D>;  // K or V of a slab, in chunks
template <int D>
constexpr int UNITS = D <= 96 ? 5 : D <= 128 ? 4 : 3;  // of a warp's ring; one is read, the others are under way
template <int D>
constexpr int WARPS = D <= 128 ? 4 : 3;  // with four of 256, a block would not fit into the 99 KiB of sm_86 and sm_89
template <int D>
constexpr int THREADS = 32 * WARPS<D>;

// What a block works on.
struct Work {
  const int32_t* pages;      // of the sequence
  int64_t row;               // of q and out
  int kv_head, first_head;   // the first query head, counted from those of all KV heads
  int heads;                 // query heads, up to ROWS
  int from, context;         // the positions that are seen, the row's position being the last
  int first_slab, end_slab;  // none when the first is not below the end
};

__device__ __forceinline__ Work work_of(const AttentionParams& p, const AttentionItem& item) {
  const int first_in_group = blockIdx.x * ROWS;
  Work work;
  work.pages = p.pages + p.page_start[item.sequence];
  work.row = p.query_start[item.sequence] + item.first_token;
  work.kv_head = blockIdx.y;
  work.first_head = work.kv_head * p.group + first_in_group;
  work.heads = min(p.group - first_in_group, ROWS);
  work.context = p.context[item.sequence];
  work.from = p.window ? max(work.context - p.window, 0) : 0;
  work.first_slab = max(item.first_slab, work.from / SLAB);
  work.end_slab = min(item.end_slab, (work.context + SLAB - 1) / SLAB);
  return work;
}

// The slabs of a warp on their way to shared memory. Places there are counted in chunks. Where FP8, each warp has room
// for one widened unit, before the rings.
template <typename T, int D, bool FP8>
struct Ring {
  using Number = typename Stored<T, FP8>::Type;
  static constexpr int WIDE = FP8 ? UNIT<D> : 0;
  const AttentionParams& p;
  const Work& work;
  uint4* shared;
  const int first;  // unit 0
  const int wide;
  const SlabCopy<D, FP8> copy;
  const Number *keys, *values;  // this lane's first 16 bytes of the KV head in block 0
  int next;                 // slab to be fetched
  int page;                 // its block, asked for long before it is needed
  int64_t offset = 0;       // of the slab of the last fetched K
  int slot = UNITS<D> - 1;  // the unit that is being read

  __device__ __forceinline__ Ring(const AttentionParams& p, const Work& work, uint4* shared, int warp, int lane)
      : p(p),
        work(work),
        shared(shared),
        first(UNIT<D> + WARPS<D> * WIDE + warp * UNITS<D> * HELD<D, FP8>),
        wide(UNIT<D> + warp * WIDE),
        copy(lane) {
    constexpr int SIZE = SLAB * STORED<D, FP8>, CHUNK = 16 / sizeof(Number);
    const int64_t head = static_cast<int64_t>(work.kv_head) * p.slabs_per_block * SIZE + lane * CHUNK;
    keys = static_cast<const Number*>(p.keys) + head;
    values = static_cast<const Number*>(p.values) + head;
    next = work.first_slab + warp;
    find_page();
#pragma unroll
    for (int unit = 0; unit < UNITS<D> - 1; unit++) {
      if (unit % 2 == 0)
        fetch_keys(first + unit * HELD<D, FP8>);
      else
        fetch_values(first + unit * HELD<D, FP8>);
    }
  }

  __device__ __forceinline__ void find_page() { page = next < work.end_slab ? page_of(p, work.pages, next) : 0; }

  __device__ __forceinline__ void fetch_keys(int to) {
    offset = slab_offset<STORED<D, FP8>>(p, page, 0, next);
    if (next < work.end_slab) copy.start(shared, to, keys + offset);
    cp_async_commit();
  }

  __device__ __forceinline__ void fetch_values(int to) {
    if (next < work.end_slab) copy.start(shared, to, values + offset);
    cp_async_commit();
    next += WARPS<D>;
    find_page();
  }

  // Where the next unit lies, once it is there and, where FP8, widened. The one before it, which no lane reads any
  // more, is fetched anew: with the K or V that is UNITS - 1 further on.
  template <bool is_keys>
  __device__ __forceinline__ int take() {
    cp_async_wait<UNITS<D> - 2>();
    __syncwarp();
    const int spare = first + slot * HELD<D, FP8>;
    slot = slot == UNITS<D> - 1 ? 0 : slot + 1;
    if constexpr (is_keys == (UNITS<D> % 2 == 1))
      fetch_keys(spare);
    else
      fetch_values(spare);
    const int at = first + slot * HELD<D, FP8>;
    if constexpr (FP8) {
      widen_slab<T, D, D / 16>(shared + wide, shared + at, threadIdx.x % 32, [](int) { return true; });
      __syncwarp();
      return wide;
    } else {
      return at;
    }
  }
};

// The query heads as left operands of mma: in registers, or where these are too few read again for every slab.
template <int D>
struct Queries {
  static constexpr bool HELD = D <= 128;
  const uint4* shared;
  int first;
  uint32_t held[HELD ? D / 16 : 1][4];

  __device__ __forceinline__ Queries(const uint4* shared, int lane)
      : shared(shared), first(swizzled<D>(lane % 16, lane / 16)) {
    if constexpr (HELD) {
#pragma unroll
      for (int k = 0; k < D / 16; k++) read(held[k], k);
    }
  }

  __device__ __forceinline__ void read(uint32_t (&words)[4], int k) const {
    ldmatrix_x4(words, shared + behind<D>(first, 2 * k));
  }

  // s += numbers 16 k .. 16 k + 15 of the heads times those of the tokens.
  template <typename T>
  __device__ __forceinline__ void multiply(float (&s)[2][4], int k, const uint32_t (&keys)[4]) const {
    if constexpr (HELD) {
      mma<T>(s[0], held[k], keys[0], keys[1]);
      mma<T>(s[1], held[k], keys[2], keys[3]);
    } else {
      uint32_t words[4];
      read(words, k);
      mma<T>(s[0], words, keys[0], keys[1]);
      mma<T>(s[1], words, keys[2], keys[3]);
    }
  }
};

// What a warp has found so far, for rows lane / 4 and lane / 4 + 8 in the layout of mma.
template <int D>
struct Found {
  float sums[D / 8][4];  // of weights times V
  float largest[2];      // score
  float total[2];        // of weights, this lane's share

  __device__ __forceinline__ Found() {
#pragma unroll
    for (int n = 0; n < D / 8; n++) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
    largest[0] = largest[1] = minus_infinity();
    total[0] = total[1] = 0.0f;
  }

  __device__ __forceinline__ void raise(const float (&scores)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float before = largest[h];
      largest[h] = fmaxf(before, scores[h]);
      const float factor = exp2_approx(before - largest[h]);
      total[h] *= factor;
#pragma unroll
      for (int n = 0; n < D / 8; n++) {
        sums[n][2 * h] *= factor;
        sums[n][2 * h + 1] *= factor;
      }
    }
  }

  // Scores to weights, 2^(score - largest), as the left operand of mma.
  template <typename T>
  __device__ __forceinline__ void weigh(float (&s)[2][4], uint32_t (&weights)[4]) {
    float most[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      most[h] = fmaxf(fmaxf(s[0][2 * h], s[0][2 * h + 1]), fmaxf(s[1][2 * h], s[1][2 * h + 1]));
      most[h] = fmaxf(most[h], __shfl_xor_sync(ALL_LANES, most[h], 1));
      most[h] = fmaxf(most[h], __shfl_xor_sync(ALL_LANES, most[h], 2));
    }
    // After the first slabs this is rare, and D / 2 multiplications are saved.
    if (__any_sync(ALL_LANES, most[0] > largest[0] || most[1] > largest[1])) raise(most);
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const float first = exp2_approx(s[n][2 * h] - largest[h]), second = exp2_approx(s[n][2 * h + 1] - largest[h]);
        total[h] += first + second;
        weights[2 * n + h] = T::pack(first, second);
      }
    }
  }

  template <typename T>
  __device__ __forceinline__ void add(const uint32_t (&weights)[4], const uint4* shared, int first) {
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
      uint32_t words[4];
      ldmatrix_x4_trans(words, shared + behind<D>(first, 2 * n));
      mma<T>(sums[2 * n], weights, words[0], words[1]);
      mma<T>(sums[2 * n + 1], weights, words[2], words[3]);
    }
  }
};

}  // namespace
