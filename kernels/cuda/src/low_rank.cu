// What adapters add to rows, out[row] += up(down(x[row])) by the row's adapter (LoRA, arXiv 2106.09685): `low_rank_down`
// writes down(x[row]) in float32, `low_rank_up` adds up of that to out and rounds once.
//
// Rows come in items of up to ITEM_ROWS rows of one adapter, as many as a product of a tensor core has. A row's sums are
// added in an order that the sizes of the matrices decide, whatever rows are beside it.
// Grid: x items, more perhaps than there are; y pieces of RANKS ranks of each down matrix, or of 32 quads of out.
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

constexpr int DOWN_WARPS = 16;
constexpr int DOWN_THREADS = 32 * DOWN_WARPS;
constexpr int UP_WARPS = 2;
constexpr int UP_THREADS = 32 * UP_WARPS;
constexpr int ITEM_ROWS = 16;
constexpr int ITEM = 2 + ITEM_ROWS;
constexpr int RANKS = 8;                    // of a block of low_rank_down
constexpr int ROWS = ITEM_ROWS / UP_WARPS;  // of which one thread of low_rank_up has the sums
constexpr int QUAD = 4;                     // numbers of out of a thread
constexpr int SUMS = ITEM_ROWS * RANKS;
static_assert(ITEM_ROWS == 16 && RANKS == 8, "the rows and columns of one matrix product");
static_assert(SUMS <= DOWN_THREADS, "a thread adds what the warps have of one sum");

struct Item {
  int64_t adapter;  // from 0 on
  int count;
  const int32_t* rows;
};

__device__ __forceinline__ Item item_of(const LowRankParams& p) {
  const int32_t* item = p.items + static_cast<int64_t>(blockIdx.x + 1) * ITEM;
  return {item[0] - 1, item[1], item + 2};
}

__device__ __forceinline__ void mma(bf16, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_bf16(d, a, b0, b1);
}
__device__ __forceinline__ void mma(f16, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_f16(d, a, b0, b1);
}

// A warp multiplies four vectors of each row at a time, 32 numbers: lane i has vector i % 4 of rows i / 4 and i / 4 + 8
// and of rank i / 4. Which 16 of them are one product is the same for x and down, so nothing is shuffled.
template <typename T>
__device__ __forceinline__ void low_rank_down(const LowRankParams& p) {
  SHARED(float2, pairs, DOWN_WARPS * SUMS / 2);
  if (static_cast<int>(blockIdx.x) >= p.items[0]) return;
  const Item item = item_of(p);
  const int pieces = p.rank / RANKS, matrix = blockIdx.y / pieces, first_rank = blockIdx.y % pieces * RANKS;
  if (first_rank >= p.ranks[item.adapter * p.downs + matrix]) return;
  const int vectors = p.inputs / VECTOR, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = lane / 4, column = lane % 4;
  const int64_t weights = ((item.adapter * p.downs + matrix) * p.rank + first_rank + group) * vectors;
  const bool has_low = group < item.count, has_high = group + 8 < item.count;
  const int64_t low_row = has_low ? item.rows[group] : 0, high_row = has_high ? item.rows[group + 8] : 0;
  const uint4 none = make_uint4(0, 0, 0, 0);
  float sums[4] = {};
#pragma unroll 4
  for (int first = 4 * warp; first < vectors; first += 4 * DOWN_WARPS) {
    const int i = first + column;
    const bool valid = i < vectors;
    const uint4 weight = valid ? vector_at(p.down, weights + i) : none;
    const uint4 low = valid && has_low ? vector_at(p.x, low_row * vectors + i) : none;
    const uint4 high = valid && has_high ? vector_at(p.x, high_row * vectors + i) : none;
    mma(T{}, sums, {low.x, high.x, low.y, high.y}, weight.x, weight.y);
    mma(T{}, sums, {low.z, high.z, low.w, high.w}, weight.z, weight.w);
  }
  float2* mine = pairs + (warp * SUMS + group * RANKS) / 2 + column;
  mine[0] = make_float2(sums[0], sums[1]);
  mine[8 * RANKS / 2] = make_float2(sums[2], sums[3]);
  __syncthreads();
  const float* partial = reinterpret_cast<const float*>(pairs);
  const int row = threadIdx.x / RANKS;
  if (row >= item.count) return;
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < DOWN_WARPS; w++) sum += partial[w * SUMS + threadIdx.x];
  p.inner[(static_cast<int64_t>(item.rows[row]) * p.downs + matrix) * p.rank + first_rank + threadIdx.x % RANKS] = sum;
}

// A warp has ROWS rows of an item and 32 quads of out.
template <typename T>
__device__ __forceinline__ void low_rank_up(const LowRankParams& p) {
  const int quads = p.outputs / QUAD, i = blockIdx.y * 32 + threadIdx.x % 32, first = threadIdx.x / 32 * ROWS;
  if (static_cast<int>(blockIdx.x) >= p.items[0] || i >= quads) return;
  const Item item = item_of(p);
  if (first >= item.count) return;
  const int matrix = p.reads[i / 2], ranks = p.ranks[item.adapter * p.downs + matrix];
  if (!ranks) return;
  const float4* up = reinterpret_cast<const float4*>(p.up + item.adapter * p.rank * p.outputs) + i;
  const float* inner[ROWS];  // of a row; behind the item's last, that one again
  uint2* out[ROWS];
  uint2 words[ROWS];
  float sums[ROWS][QUAD] = {};
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int64_t row = item.rows[min(first + r, item.count - 1)];
    inner[r] = p.inner + (row * p.downs + matrix) * p.rank;
    out[r] = static_cast<uint2*>(p.out) + row * quads + i;
    words[r] = *out[r];
  }
#pragma unroll 1
  for (int k = 0; k < ranks; k += RANKS) {
    float4 weights[RANKS];
#pragma unroll
    for (int q = 0; q < RANKS; q++) weights[q] = up[static_cast<int64_t>(k + q) * quads];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const float4* from = reinterpret_cast<const float4*>(inner[r] + k);
      const float4 low = from[0], high = from[1];
      const float of_rank[RANKS] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int q = 0; q < RANKS; q++) {
        sums[r][0] = fmaf(of_rank[q], weights[q].x, sums[r][0]);
        sums[r][1] = fmaf(of_rank[q], weights[q].y, sums[r][1]);
        sums[r][2] = fmaf(of_rank[q], weights[q].z, sums[r][2]);
        sums[r][3] = fmaf(of_rank[q], weights[q].w, sums[r][3]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    if (first + r >= item.count) continue;
    float a, b, c, d;
    unpack<T>(words[r].x, a, b);
    unpack<T>(words[r].y, c, d);
    *out[r] = make_uint2(T::pack(a + sums[r][0], b + sums[r][1]), T::pack(c + sums[r][2], d + sums[r][3]));
  }
}

}  // namespace

RESIDENT_KERNEL(low_rank_down_bf16, LowRankParams, DOWN_THREADS, 1, low_rank_down<bf16>)
RESIDENT_KERNEL(low_rank_down_f16, LowRankParams, DOWN_THREADS, 1, low_rank_down<f16>)
KERNEL(low_rank_up_bf16, LowRankParams, UP_THREADS, low_rank_up<bf16>)
KERNEL(low_rank_up_f16, LowRankParams, UP_THREADS, low_rank_up<f16>)
