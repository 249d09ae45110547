// What adapters add to rows, out[row] += up(down(x[row])) by the row's adapter (LoRA, arXiv 2106.09685): `low_rank_down`
// writes down(x[row]) in float32, `low_rank_up` adds up of that to out and rounds once.
//
// Rows come in items of up to ITEM_ROWS rows of one adapter, and a matrix is read once for ROWS of them. The sums of a
// row are added in an order that the sizes of the matrices decide, whatever rows are beside it.
// Grid: x items, more perhaps than there are; y pieces of RANKS ranks of each down matrix, or of THREADS vectors of out.
#include "numbers.cuh"

struct LowRankParams {
  const void* x;            // [rows, inputs]
  const void* down;         // [adapters, downs, rank, inputs]; adapters count from 1
  float* inner;             // [rows, downs, rank]
  const float* up;          // [adapters, rank, outputs]
  void* out;                // [rows, outputs]
  const int32_t* items;     // [1 + items, ITEM]: how many there are; then number of the adapter, rows, which rows
  const int32_t* ranks;     // [adapters, downs] of each down matrix, a multiple of RANKS; the ranks behind it are not read
  const int32_t* reads;     // [outputs / 8] down matrix of which a vector of out is the up matrix
  int32_t inputs;           // a multiple of 8
  int32_t outputs;          // a multiple of 8
  int32_t downs;
  int32_t rank;             // a multiple of RANKS
};

namespace {

constexpr int THREADS = 128;
constexpr int ITEM_ROWS = 16;
constexpr int ITEM = 2 + ITEM_ROWS;
constexpr int RANKS = 8;  // of a block of low_rank_down
constexpr int ROWS = 4;   // of which one thread has the sums
static_assert(RANKS * ROWS == 32, "a lane of the first warp writes one of the sums");

struct Item {
  int64_t adapter;  // from 0 on
  int count;
  const int32_t* rows;
};

__device__ __forceinline__ Item item_of(const LowRankParams& p) {
  const int32_t* item = p.items + static_cast<int64_t>(blockIdx.x + 1) * ITEM;
  return {item[0] - 1, item[1], item + 2};
}

// The rows from `first` on; behind the item's last, that one again.
__device__ __forceinline__ void some_rows(const Item& item, int first, int64_t (&rows)[ROWS]) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) rows[r] = item.rows[min(first + r, item.count - 1)];
}

// In `sums[0]` of lane i the sum of every lane's sums[i].
__device__ __forceinline__ void sum_of_warp(float (&sums)[32]) {
#pragma unroll
  for (int step = 0; step < 5; step++) {
    const int half = 16 >> step;
    const bool upper = threadIdx.x & half;
#pragma unroll
    for (int i = 0; i < 16; i++) {  // a number of steps that the compiler sees: else `sums` lies in local memory
      if (i >= half) continue;
      const float kept = upper ? sums[i + half] : sums[i], sent = upper ? sums[i] : sums[i + half];
      sums[i] = kept + __shfl_xor_sync(0xffffffffu, sent, half);
    }
  }
}

template <typename T>
__device__ __forceinline__ void low_rank_down(const LowRankParams& p) {
  SHARED(float, partial, THREADS);
  if (static_cast<int>(blockIdx.x) >= p.items[0]) return;
  const Item item = item_of(p);
  const int pieces = p.rank / RANKS, matrix = blockIdx.y / pieces, first_rank = blockIdx.y % pieces * RANKS;
  if (first_rank >= p.ranks[item.adapter * p.downs + matrix]) return;
  const int vectors = p.inputs / VECTOR, lane = threadIdx.x % 32;
  const int64_t weights = ((item.adapter * p.downs + matrix) * p.rank + first_rank) * vectors;
  for (int first = 0; first < item.count; first += ROWS) {
    int64_t rows[ROWS];
    some_rows(item, first, rows);
    float sums[RANKS * ROWS] = {};
    for (int i = threadIdx.x; i < vectors; i += THREADS) {
      float x[ROWS][VECTOR], weight[VECTOR];
#pragma unroll
      for (int r = 0; r < ROWS; r++) unpack<T>(vector_at(p.x, rows[r] * vectors + i), x[r]);
#pragma unroll
      for (int k = 0; k < RANKS; k++) {
        unpack<T>(vector_at(p.down, weights + static_cast<int64_t>(k) * vectors + i), weight);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
          for (int j = 0; j < VECTOR; j++) sums[k * ROWS + r] = fmaf(x[r][j], weight[j], sums[k * ROWS + r]);
      }
    }
    sum_of_warp(sums);
    partial[threadIdx.x] = sums[0];
    __syncthreads();
    if (threadIdx.x < 32 && first + lane % ROWS < item.count) {
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < THREADS / 32; warp++) sum += partial[warp * 32 + lane];
      const int64_t row = item.rows[first + lane % ROWS];
      p.inner[(row * p.downs + matrix) * p.rank + first_rank + lane / ROWS] = sum;
    }
    __syncthreads();
  }
}

template <typename T>
__device__ __forceinline__ void low_rank_up(const LowRankParams& p) {
  const int vectors = p.outputs / VECTOR, i = blockIdx.y * THREADS + threadIdx.x;
  if (static_cast<int>(blockIdx.x) >= p.items[0] || i >= vectors) return;
  const Item item = item_of(p);
  const int matrix = p.reads[i], ranks = p.ranks[item.adapter * p.downs + matrix];
  if (!ranks) return;
  const float* up = p.up + item.adapter * p.rank * p.outputs;
  for (int first = 0; first < item.count; first += ROWS) {
    int64_t rows[ROWS];
    some_rows(item, first, rows);
    float sums[ROWS][VECTOR] = {};
    for (int k = 0; k < ranks; k += 4) {
      float inner[ROWS][4], weight[VECTOR];
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const float4 four = *reinterpret_cast<const float4*>(p.inner + (rows[r] * p.downs + matrix) * p.rank + k);
        inner[r][0] = four.x, inner[r][1] = four.y, inner[r][2] = four.z, inner[r][3] = four.w;
      }
#pragma unroll
      for (int q = 0; q < 4; q++) {
        read_floats(up + static_cast<int64_t>(k + q) * p.outputs, i, weight);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
          for (int j = 0; j < VECTOR; j++) sums[r][j] = fmaf(inner[r][q], weight[j], sums[r][j]);
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      if (first + r >= item.count) continue;
      float out[VECTOR];
      unpack<T>(vector_at(p.out, rows[r] * vectors + i), out);
#pragma unroll
      for (int j = 0; j < VECTOR; j++) out[j] += sums[r][j];
      vector_at(p.out, rows[r] * vectors + i) = pack<T>(out);
    }
  }
}

}  // namespace

RESIDENT_KERNEL(low_rank_down_bf16, LowRankParams, THREADS, 4, low_rank_down<bf16>)
RESIDENT_KERNEL(low_rank_down_f16, LowRankParams, THREADS, 4, low_rank_down<f16>)
KERNEL(low_rank_up_bf16, LowRankParams, THREADS, low_rank_up<bf16>)
KERNEL(low_rank_up_f16, LowRankParams, THREADS, low_rank_up<f16>)
