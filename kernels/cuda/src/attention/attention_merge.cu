// Brings the partial results of a token together: their mean, weighted by 2^lse.
//
// A lane has four numbers of a row, and the warps of a block share its parts; the order of additions depends on the
// number of parts alone. Parts with lse = -inf hold nothing and are left out, whatever lies there.
// Grid: x tokens, y blocks that share the pieces of a row.
#include "attention.cuh"

struct MergeParams {
  void* out;                 // [.., heads, head_dim]
  const float* partial_out;  // [.., heads, head_dim]
  const float* partial_lse;  // [.., heads] base 2
  const int32_t* starts;     // [tokens + 1] the parts of a token
  const int32_t* rows;       // [tokens] of out; below zero: nothing to do
  int32_t heads;
  int32_t head_dim;  // a multiple of 8
};

namespace {

constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int NUMBERS = 4;           // of a lane
constexpr int PIECE = 32 * NUMBERS;  // of a block at a time

// Several parts, the weight of the largest taken as 1.
struct Parts {
  float4 sum;  // of weights times numbers
  float lse;    // the largest
  float total;  // of weights

  __device__ __forceinline__ void add(const Parts& other) {
    if (other.lse == minus_infinity()) return;
    const float largest = fmaxf(lse, other.lse);
    const float mine = exp2_approx(lse - largest), its = exp2_approx(other.lse - largest);
    sum.x = sum.x * mine + other.sum.x * its;
    sum.y = sum.y * mine + other.sum.y * its;
    sum.z = sum.z * mine + other.sum.z * its;
    sum.w = sum.w * mine + other.sum.w * its;
    total = total * mine + other.total * its;
    lse = largest;
  }
};

// The parts that are this warp's, of four numbers from `column` on.
__device__ __forceinline__ Parts read_parts(const MergeParams& p, int first, int end, int column) {
  const int64_t width = static_cast<int64_t>(p.heads) * p.head_dim;
  const int head = column / p.head_dim;
  Parts parts = {make_float4(0, 0, 0, 0), minus_infinity(), 0.0f};
#pragma unroll 4
  for (int part = first; part < end; part += WARPS) {
    const float lse = p.partial_lse[static_cast<int64_t>(part) * p.heads + head];
    parts.add({*reinterpret_cast<const float4*>(p.partial_out + part * width + column), lse, 1.0f});
  }
  return parts;
}

template <typename T>
__device__ __forceinline__ void attention_merge(const MergeParams& p) {
  SHARED(float4, sums, THREADS);  // beside each other, lanes would meet in the same banks
  SHARED(float2, weights, THREADS);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = p.rows[blockIdx.x];
  if (row < 0) return;
  const int width = p.heads * p.head_dim, first = p.starts[blockIdx.x], end = p.starts[blockIdx.x + 1];
  for (int piece = blockIdx.y; piece * PIECE < width; piece += gridDim.y) {
    const int column = piece * PIECE + lane * NUMBERS;
    if (column < width) {
      const Parts mine = read_parts(p, first + warp, end, column);
      sums[threadIdx.x] = mine.sum;
      weights[threadIdx.x] = make_float2(mine.lse, mine.total);
    }
    __syncthreads();
    if (warp == 0 && column < width) {
      const auto of_warp = [&](int i) -> Parts {
        const float2 weight = weights[i * 32 + lane];
        return {sums[i * 32 + lane], weight.x, weight.y};
      };
      Parts all = of_warp(0);
      for (int other = 1; other < WARPS; other++) all.add(of_warp(other));
      const float4 x = all.sum;
      const float scale = 1.0f / all.total;
      static_cast<uint2*>(p.out)[(static_cast<int64_t>(row) * width + column) / NUMBERS] =
          make_uint2(T::pack(x.x * scale, x.y * scale), T::pack(x.z * scale, x.w * scale));
    }
    __syncthreads();
  }
}

}  // namespace

KERNEL(attention_merge_bf16, MergeParams, THREADS, attention_merge<bf16>)
KERNEL(attention_merge_f16, MergeParams, THREADS, attention_merge<f16>)
