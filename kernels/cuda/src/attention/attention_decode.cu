// Decode attention: one row of a sequence. Its KV is read once for all query heads of a KV head.
//
// A block has one work item and up to 16 query heads of one KV head, which are the rows of mma.m16n8k16. Each warp
// reads every WARPS-th slab of the item through a private ring in shared memory, K and V in turn, and waits for no
// other warp until their results are brought together at the end.
// Kernels of fp8 read slabs of codes, and have the bits of the others over the numbers that these stand for.
// Grid: x tiles of 16 query heads, which read the same slabs at about the same time, y KV heads, z items. Dynamic
// shared memory: the query heads, then the rings (calls.py).
#include "attention_decode.cuh"

namespace {

template <int D>
constexpr int PADDED = D + 8;  // numbers from row to row of a warp's results: 8 bytes a lane, no bank conflict

// A block starts the copy of its query heads; rows behind the last one are zero.
template <typename T, int D>
__device__ __forceinline__ void copy_queries(uint4* tile, const AttentionParams& p, const Work& work) {
  const int64_t first = work.row * p.kv_heads * p.group + work.first_head;
  const uint4* from = static_cast<const uint4*>(p.q) + first * CHUNKS<D>;
  for (int chunk = threadIdx.x; chunk < UNIT<D>; chunk += THREADS<D>) {
    const int row = chunk / CHUNKS<D>;
    const bool valid = row < work.heads;
    cp_async_16(tile + swizzled<D>(row, chunk % CHUNKS<D>), from + (valid ? chunk : 0), valid);
  }
  cp_async_commit();
}

// s: the dot products of rows lane / 4 and lane / 4 + 8 with the tokens of a slab, in the layout of mma.
template <typename T, int D>
__device__ __forceinline__ void multiply_keys(float (&s)[2][4], const Queries<D>& queries, int first) {
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    uint32_t words[4];
    ldmatrix_x4(words, queries.shared + behind<D>(first, 2 * k));
    queries.template multiply<T>(s, k, words);
  }
}

// Whether a slab has tokens that are not seen.
__device__ __forceinline__ bool is_edge(const Work& work, int slab) {
  return slab * SLAB < work.from || (slab + 1) * SLAB > work.context;
}

// Dot products to scores in base 2. slopes: ALiBi's of the two rows, times log2(e); zero without it.
__device__ __forceinline__ void score(float (&s)[2][4], const AttentionParams& p, const Work& work,
                                      const float (&slopes)[2], int slab, int lane) {
  const int first = slab * SLAB + lane % 4 * 2;
  const float distance = first - (work.context - 1);
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) s[n][i] = s[n][i] * p.scale_log2 + slopes[i / 2] * (distance + (n * 8 + i % 2));
  if (!is_edge(work, slab)) return;
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int position = first + n * 8 + i % 2;
      if (position < work.from || position >= work.context) s[n][i] = minus_infinity();
    }
}

// V of tokens that are not seen becomes zero: whatever is there may be NaN, and a weight of zero would not hide it.
template <int D>
__device__ __forceinline__ void clear_unseen(uint4* values, const Work& work, int slab, int lane) {
  for (int chunk = lane; chunk < UNIT<D>; chunk += 32) {
    const int position = slab * SLAB + chunk / CHUNKS<D>;
    if (position < work.from || position >= work.context) values[chunk] = make_uint4(0, 0, 0, 0);
  }
  __syncwarp();
}

// A warp reads its slabs.
template <typename T, int D, bool FP8>
__device__ __forceinline__ void read_slabs(Found<D>& found, Ring<T, D, FP8>& ring, const Queries<D>& queries, int warp,
                                           int lane) {
  const AttentionParams& p = ring.p;
  const Work& work = ring.work;
  const int key = swizzled<D>(lane % 8 + lane / 16 * 8, lane / 8 % 2), value = swizzled<D>(lane % 16, lane / 16);
  float slopes[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = lane / 4 + 8 * h;
    slopes[h] = p.slopes && row < work.heads ? p.slopes[work.first_head + row] * LOG2_E : 0.0f;
  }
  for (int slab = work.first_slab + warp; slab < work.end_slab; slab += WARPS<D>) {
    const int keys = ring.template take<true>();
    float s[2][4] = {};
    multiply_keys<T, D>(s, queries, keys + key);
    score(s, p, work, slopes, slab, lane);
    uint32_t weights[4];
    found.template weigh<T>(s, weights);
    const int values = ring.template take<false>();
    if (is_edge(work, slab)) clear_unseen<D>(ring.shared + values, work, slab, lane);
    found.template add<T>(weights, ring.shared, values + value);
  }
}

// Four numbers of a query head, from `column` on, to out or to the partial results.
template <typename T, int D>
__device__ __forceinline__ void store(const AttentionParams& p, const Work& work, int partial, int row, int column,
                                      const float4& x, float lse) {
  const int64_t token = partial < 0 ? work.row : partial;
  const int64_t head = token * p.kv_heads * p.group + work.first_head + row, at = (head * D + column) / 4;
  if (partial < 0) {
    static_cast<uint2*>(p.out)[at] = make_uint2(T::pack(x.x, x.y), T::pack(x.z, x.w));
  } else {
    reinterpret_cast<float4*>(p.partial_out)[at] = x;
    if (column == 0) p.partial_lse[head] = lse;
  }
}

// The warps' results, one behind the other in shared memory, to one. `sums` [WARPS, ROWS, PADDED], `scales` [WARPS,
// ROWS] of largest score and total.
template <typename T, int D>
__device__ __forceinline__ void merge_and_store(const AttentionParams& p, const Work& work, int partial,
                                                const float* sums, const float2* scales) {
  for (int i = threadIdx.x; i < work.heads * (D / 4); i += THREADS<D>) {
    const int row = i / (D / 4), column = i % (D / 4) * 4;
    float largest = minus_infinity(), total = 0.0f;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int warp = 0; warp < WARPS<D>; warp++) largest = fmaxf(largest, scales[warp * ROWS + row].x);
#pragma unroll
    for (int warp = 0; warp < WARPS<D>; warp++) {
      const float2 its = scales[warp * ROWS + row];
      const float weight = exp2_approx(its.x - largest);
      const float4 x = *reinterpret_cast<const float4*>(sums + (warp * ROWS + row) * PADDED<D> + column);
      total += weight * its.y;
      sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
    }
    const float scale = 1.0f / total;
    const float4 mean = make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale);
    store<T, D>(p, work, partial, row, column, mean, largest + log2f(total));
  }
}

template <int D>
__device__ __forceinline__ void lay_down(const Found<D>& found, float* sums, float2* scales, int warp, int lane) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = warp * ROWS + lane / 4 + 8 * h;
    float total = found.total[h];
    total += __shfl_xor_sync(ALL_LANES, total, 1);
    total += __shfl_xor_sync(ALL_LANES, total, 2);
    if (lane % 4 == 0) scales[row] = make_float2(found.largest[h], total);
    float2* to = reinterpret_cast<float2*>(sums + row * PADDED<D> + lane % 4 * 2);
#pragma unroll
    for (int n = 0; n < D / 8; n++) to[n * 4] = make_float2(found.sums[n][2 * h], found.sums[n][2 * h + 1]);
  }
}

// A part of a sequence with nothing in it that is seen: the merge leaves it out.
__device__ __forceinline__ void store_nothing(const AttentionParams& p, const Work& work, int partial) {
  const int row = threadIdx.x;
  const int64_t first = static_cast<int64_t>(partial) * p.kv_heads * p.group + work.first_head;
  if (partial >= 0 && row < work.heads) p.partial_lse[first + row] = minus_infinity();
}

template <typename T, int D, bool FP8 = false>
__device__ __forceinline__ void attention_decode(const AttentionParams& p) {
  DYNAMIC_SHARED(uint4, shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const AttentionItem item = p.items[blockIdx.z];
  if (item.sequence < 0) return;
  const Work work = work_of(p, item);
  if (work.first_slab >= work.end_slab) return store_nothing(p, work, item.partial);
  copy_queries<T, D>(shared, p, work);
  Ring<T, D, FP8> ring(p, work, shared, warp, lane);
  cp_async_wait<UNITS<D> - 1>();  // the query heads, not yet the ring
  __syncthreads();
  Found<D> found;
  read_slabs<T, D, FP8>(found, ring, Queries<D>(shared, lane), warp, lane);
  __syncthreads();  // all have read their slabs and the query heads: the results take their place
  constexpr int SUMS = WARPS<D> * ROWS * PADDED<D>;
  constexpr int CHUNKS_THERE = UNIT<D> + WARPS<D> * (Ring<T, D, FP8>::WIDE + UNITS<D> * HELD<D, FP8>);
  static_assert(SUMS * 4 + WARPS<D> * ROWS * 8 <= CHUNKS_THERE * 16, "the results fit");
  float* sums = reinterpret_cast<float*>(shared);
  float2* scales = reinterpret_cast<float2*>(sums + SUMS);
  lay_down<D>(found, sums, scales, warp, lane);
  __syncthreads();
  merge_and_store<T, D>(p, work, item.partial, sums, scales);
}

}  // namespace

KERNEL(attention_decode_bf16_d64, AttentionParams, THREADS<64>, attention_decode<bf16, 64>)
KERNEL(attention_decode_bf16_d80, AttentionParams, THREADS<80>, attention_decode<bf16, 80>)
KERNEL(attention_decode_bf16_d96, AttentionParams, THREADS<96>, attention_decode<bf16, 96>)
KERNEL(attention_decode_bf16_d128, AttentionParams, THREADS<128>, attention_decode<bf16, 128>)
KERNEL(attention_decode_bf16_d256, AttentionParams, THREADS<256>, attention_decode<bf16, 256>)
KERNEL(attention_decode_f16_d64, AttentionParams, THREADS<64>, attention_decode<f16, 64>)
KERNEL(attention_decode_f16_d80, AttentionParams, THREADS<80>, attention_decode<f16, 80>)
KERNEL(attention_decode_f16_d96, AttentionParams, THREADS<96>, attention_decode<f16, 96>)
KERNEL(attention_decode_f16_d128, AttentionParams, THREADS<128>, attention_decode<f16, 128>)
KERNEL(attention_decode_f16_d256, AttentionParams, THREADS<256>, attention_decode<f16, 256>)
KERNEL(attention_decode_fp8_bf16_d64, AttentionParams, THREADS<64>, attention_decode<bf16, 64, true>)
KERNEL(attention_decode_fp8_bf16_d128, AttentionParams, THREADS<128>, attention_decode<bf16, 128, true>)
KERNEL(attention_decode_fp8_f16_d64, AttentionParams, THREADS<64>, attention_decode<f16, 64, true>)
KERNEL(attention_decode_fp8_f16_d128, AttentionParams, THREADS<128>, attention_decode<f16, 128, true>)
