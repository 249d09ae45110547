// The rows of a warp in chunked-prefill attention: scores, softmax and the weighted sum of V, all in registers.
//
// A tile's row is token * group + query head of the KV head; warp w has rows w * ROWS / WARPS and on. Sums lie as mma
// leaves them: [m tile][8 columns][i], row lane / 4 + i / 2 * 8 of the m tile, column lane % 4 * 2 + i % 2.
#pragma once
#include "attention.cuh"

namespace {

constexpr int WARPS = 4, THREADS = WARPS * 32;
constexpr int KEYS = WARPS * SLAB;  // of a piece of K or V

template <int D>
struct Tile {
  static constexpr int M_TILES = D > 128 ? 1 : 2;  // of a warp; the sums of two with D 256 do not fit into registers
  static constexpr int ROWS = WARPS * M_TILES * 16;
  static constexpr int STAGES = D > 128 ? 2 : 3;  // buffers for pieces, 2 or 3
  static constexpr int CHUNKS = D / VECTOR;       // of 16 bytes, in a row
  static constexpr int PIECE = KEYS * CHUNKS;
};

// What a thread block has to do.
struct Work {
  int first_row;  // of q and out: the item's first token
  int tokens;
  int first_position;  // of the first token
  int first_key, end_key;  // the positions that some row sees, as far as they are the item's; perhaps none
};

template <int D>
__device__ __forceinline__ Work work_of(const AttentionParams& p, const AttentionItem& item) {
  const int start = p.query_start[item.sequence], rows = p.query_start[item.sequence + 1] - start;
  Work work;
  work.first_row = start + item.first_token;
  work.tokens = min(Tile<D>::ROWS / p.group, rows - item.first_token);
  work.first_position = p.context[item.sequence] - rows + item.first_token;
  const int end = work.first_position + work.tokens;
  const int seen_from = p.window ? max(0, work.first_position - p.window + 1) : 0;
  work.first_key = max(item.first_slab * SLAB, seen_from);
  work.end_key = min(item.end_slab * SLAB, end);
  return work;
}

// What the loop over the keys asks of the tile's rows. It lies in shared memory, for registers are short there.
template <int D>
struct RowTable {
  int position[Tile<D>::ROWS];
  float slope[Tile<D>::ROWS];  // of ALiBi, for scores before their scale

  // Each thread fills in its row.
  __device__ __forceinline__ void fill(const AttentionParams& p, const Work& work) {
    const int row = threadIdx.x, token = row / p.group;
    if (row >= Tile<D>::ROWS) return;
    position[row] = work.first_position + token;
    if (p.slopes) slope[row] = p.slopes[blockIdx.x * p.group + row % p.group] * LOG2_E / p.scale_log2;
  }
};

template <typename T, int D>
struct Rows {
  static constexpr int M_TILES = Tile<D>::M_TILES, CHUNKS = Tile<D>::CHUNKS;

  int first, last;          // positions of the first and the last token; last is below zero where there is none
  float top[M_TILES][2];    // per row: the largest score, times log2(e); the weights so far are divided by 2^top
  float total[M_TILES][2];  // per row: this lane's share of the sum of the weights
  float sums[M_TILES][D / 8][4];

  __device__ __forceinline__ Rows(const AttentionParams& p, const Work& work) {
    const int row = threadIdx.x / 32 * M_TILES * 16, token = row / p.group;
    first = work.first_position + token;
    last = work.first_position + min((row + M_TILES * 16 - 1) / p.group, work.tokens - 1);
    if (token >= work.tokens) last = -1;
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        top[m][half] = minus_infinity();
        total[m][half] = 0.0f;
#pragma unroll
        for (int n = 0; n < D / 8; n++) sums[m][n][2 * half] = sums[m][n][2 * half + 1] = 0.0f;
      }
  }

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  // The tile's row that this lane has in an m tile, in its upper half (0) or its lower one (1).
  static __device__ __forceinline__ int row(int m, int half) {
    return (threadIdx.x / 32 * M_TILES + m) * 16 + lane() / 4 + half * 8;
  }

  // Does any row see any of KEYS keys from position `key` on?
  __device__ __forceinline__ bool sees(int key, int window) const {
    return key <= last && (!window || key + KEYS > first - window + 1);
  }
  // Do all rows see all of them?
  __device__ __forceinline__ bool sees_all(int key, int window, int end_key) const {
    return key + KEYS <= min(first + 1, end_key) && (!window || key > last - window);
  }

  // The weights of a piece's keys, [m tile][16 keys] as left operands of mma; `key` is the position of the first.
  __device__ __forceinline__ void weigh(const AttentionParams& p, const Work& work, const RowTable<D>& table,
                                        const uint4* queries, const uint4* keys, int key,
                                        uint32_t (&weights)[M_TILES][KEYS / 16][4]) {
    float scores[M_TILES][KEYS / 8][4];
    multiply(queries, keys, scores);
    if (p.slopes) add_slopes(table, key, scores);
    if (!sees_all(key, p.window, work.end_key)) hide(table, p.window, work.end_key, key, scores);
    raise_tops(p.scale_log2, scores);
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float base = top[m][half] == minus_infinity() ? 0.0f : top[m][half];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
          const float low = exp2_approx(scores[m][n][2 * half] * p.scale_log2 - base);
          const float high = exp2_approx(scores[m][n][2 * half + 1] * p.scale_log2 - base);
          total[m][half] += low + high;
          weights[m][n / 2][n % 2 * 2 + half] = T::pack(low, high);
        }
      }
  }

  // sums += weights * values
  __device__ __forceinline__ void add(const uint32_t (&weights)[M_TILES][KEYS / 16][4], const uint4* values) {
    const int value = swizzled<D>(lane() % 16, lane() / 16);
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
      for (int n = 0; n < D / 16; n++) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, values + behind<D>(value, 2 * n) + k * 16 * CHUNKS);
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
          mma<T>(sums[m][2 * n], weights[m][k], b[0], b[1]);
          mma<T>(sums[m][2 * n + 1], weights[m][k], b[2], b[3]);
        }
      }
  }

  // Rows of the result, or of partial results with the base-2 logarithm of their sum of exponentials. Item and work are
  // read again, for they would take registers in the loop over the keys.
  __device__ __forceinline__ void write(const AttentionParams& p, const AttentionItem& item) {
    const Work work = work_of<D>(p, item);
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float all = total[m][half];
        all += __shfl_xor_sync(ALL_LANES, all, 1);
        all += __shfl_xor_sync(ALL_LANES, all, 2);
        const int token = row(m, half) / p.group;
        if (token >= work.tokens) continue;
        const int64_t line = item.partial < 0 ? work.first_row + token : item.partial + token * item.splits;
        const int64_t head = (line * p.kv_heads + blockIdx.x) * p.group + row(m, half) % p.group;
        const float scale = all == 0.0f ? 0.0f : 1.0f / all;
        if (item.partial < 0)
          write_row(static_cast<T*>(p.out) + head * D, m, half, scale);
        else
          write_row(p.partial_out + head * D, m, half, scale);
        if (item.partial >= 0 && lane() % 4 == 0) p.partial_lse[head] = top[m][half] + log2f(all);
      }
  }

 private:
  using Scores = float[M_TILES][KEYS / 8][4];

  __device__ __forceinline__ void write_row(T* to, int m, int half, float scale) const {
#pragma unroll
    for (int n = 0; n < D / 8; n++)
      reinterpret_cast<uint32_t*>(to)[n * 4 + lane() % 4] =
          T::pack(sums[m][n][2 * half] * scale, sums[m][n][2 * half + 1] * scale);
  }
  __device__ __forceinline__ void write_row(float* to, int m, int half, float scale) const {
#pragma unroll
    for (int n = 0; n < D / 8; n++)
      reinterpret_cast<float2*>(to)[n * 4 + lane() % 4] =
          make_float2(sums[m][n][2 * half] * scale, sums[m][n][2 * half + 1] * scale);
  }

  static __device__ __forceinline__ void multiply(const uint4* queries, const uint4* keys, Scores& scores) {
    const int query = swizzled<D>(row(0, 0) - lane() / 4 + lane() % 16, lane() / 16);
    const int key = swizzled<D>(lane() % 8 + lane() / 16 * 8, lane() / 8 % 2);
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++) scores[m][n][0] = scores[m][n][1] = scores[m][n][2] = scores[m][n][3] = 0.0f;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      uint32_t a[M_TILES][4];
#pragma unroll
      for (int m = 0; m < M_TILES; m++) ldmatrix_x4(a[m], queries + behind<D>(query, 2 * k) + m * 16 * CHUNKS);
#pragma unroll
      for (int n = 0; n < KEYS / 16; n++) {
        uint32_t b[4];
        ldmatrix_x4(b, keys + behind<D>(key, 2 * k) + n * 16 * CHUNKS);
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
          mma<T>(scores[m][2 * n], a[m], b[0], b[1]);
          mma<T>(scores[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // ALiBi, in units of the scores before their scale.
  static __device__ __forceinline__ void add_slopes(const RowTable<D>& table, int key, Scores& scores) {
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float slope = table.slope[row(m, half)];
        const float nearest = slope * (key + lane() % 4 * 2 - table.position[row(m, half)]);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
          for (int i = 0; i < 2; i++) scores[m][n][2 * half + i] += slope * (n * 8 + i) + nearest;
      }
  }

  // Takes out the keys that a row does not see.
  static __device__ __forceinline__ void hide(const RowTable<D>& table, int window, int end_key, int key,
                                              Scores& scores) {
    const int column = key + lane() % 4 * 2;
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int position = table.position[row(m, half)];
        const int end = min(position + 1, end_key) - column;
        const int begin = window ? position - window + 1 - column : -KEYS;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
          for (int i = 0; i < 2; i++)
            if (n * 8 + i >= end || n * 8 + i < begin) scores[m][n][2 * half + i] = minus_infinity();
      }
  }

  // Brings the tops up to the largest scores, and the sums to them. After the first pieces this is seldom needed.
  __device__ __forceinline__ void raise_tops(float scale_log2, const Scores& scores) {
    float largest[M_TILES][2];
    bool grown = false;
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float x = minus_infinity();
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) x = fmaxf(x, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
        largest[m][half] = fmaxf(x * scale_log2, top[m][half]);
        grown |= largest[m][half] > top[m][half];
      }
    if (!__any_sync(ALL_LANES, grown)) return;
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float raised = largest[m][half];
        const float scale = raised == top[m][half] ? 1.0f : exp2_approx(top[m][half] - raised);
        top[m][half] = raised;
        total[m][half] *= scale;
#pragma unroll
        for (int n = 0; n < D / 8; n++) sums[m][n][2 * half] *= scale, sums[m][n][2 * half + 1] *= scale;
      }
  }
};

}  // namespace
