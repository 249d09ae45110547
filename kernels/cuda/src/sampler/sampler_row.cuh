// Passes over a row of logits, four ids to a group, and what the first of them finds.
#pragma once
#include "sampler_block.cuh"

namespace {

constexpr float LOWEST = -0x1.fffffep127f;

// A row, or some groups of it.
struct Row {
  float* scores;         // [vocab]
  const uint32_t* mask;  // a bit for each id, 1 where it is allowed; null: all are
  int32_t vocab;
  int32_t first, end;  // groups; a part ends with its row or at a multiple of 32

  // The logits of ids 4 * group and up; LOWEST beyond the groups.
  __device__ __forceinline__ float4 read(int group) const {
    const int id = 4 * group;
    if (group >= end) return make_float4(LOWEST, LOWEST, LOWEST, LOWEST);
    if (vocab % 4) return make_float4(at(id), at(id + 1), at(id + 2), at(id + 3));
    return reinterpret_cast<const float4*>(scores)[group];
  }

  // One of so many parts of equal size, nearly.
  __device__ __forceinline__ Row part(int number, int parts) const {
    const int size = ((end + parts - 1) / parts + 31) / 32 * 32;
    return {scores, mask, vocab, number * size, min(end, (number + 1) * size)};
  }

  // NEVER where an id is masked or beyond the row. Masks are looked up each time: written to the row, they would cost
  // another pass, and an id that is not allowed stays so whatever is done to its score.
  __device__ __forceinline__ void forbid(int group, float (&x)[4]) const {
    if (!mask && 4 * group + 4 <= vocab) return;
    const uint32_t bits = mask && 4 * group < vocab ? mask[group / 8] >> (group % 8 * 4) : 0xfu;
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (4 * group + k >= vocab || !(bits >> k & 1)) x[k] = NEVER;
  }

 private:
  __device__ __forceinline__ float at(int id) const { return id < vocab ? scores[id] : LOWEST; }
};

// Calls visit(group, its logits) for the groups g of this thread, those with (g - first) % blockDim.x == threadIdx.x. A warp
// makes every call together, some with groups beyond the row. `backwards`: begins where the last pass has ended, of
// which the cache still has something. A thread reads `held` groups before it looks at the first.
template <bool backwards, int held = 4, typename Visit>
__device__ __forceinline__ void for_groups(const Row& row, Visit visit) {
  const int lane = threadIdx.x % 32, stride = held * blockDim.x;
  const int steps = (row.end - row.first + stride - 1) / stride;
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    const int first = row.first + (backwards ? steps - 1 - step : step) * stride + threadIdx.x;
    float4 read[held];
#pragma unroll
    for (int j = 0; j < held; j++) read[j] = row.read(first + j * blockDim.x);
#pragma unroll
    for (int j = 0; j < held; j++) {
      const int group = first + j * blockDim.x;
      if (group - lane >= row.end) continue;
      float x[4] = {read[j].x, read[j].y, read[j].z, read[j].w};
      visit(group, x);
    }
  }
}

__device__ __forceinline__ float largest(const float (&x)[4]) { return max(max(x[0], x[1]), max(x[2], x[3])); }

// What a thread sees of the logits as they were given: whether they are finite and, where it is asked for, the
// logarithm of the sum of their exponentials.
class Given {
 public:
  __device__ __forceinline__ void take(const float (&x)[4], bool sums) {
#pragma unroll
    for (int k = 0; k < 4; k++) probe_ = fmaf(x[k], 0.0f, probe_);
    if (!sums) return;
    const float most = max(most_, largest(x));
    sum_ *= __expf(most_ - most);
#pragma unroll
    for (int k = 0; k < 4; k++) sum_ += __expf(x[k] - most);
    most_ = most;
  }

  // Of the block; called by all its threads.
  __device__ __forceinline__ bool finite() const { return __syncthreads_and(probe_ == 0.0f); }
  __device__ __forceinline__ float log_sum() const {
    const float most = across_block(most_, Larger());
    return most + logf(across_block(sum_ * __expf(most_ - most), Plus()));
  }

 private:
  float probe_ = 0.0f, most_ = LOWEST, sum_ = 0.0f;
};

// The largest score of a row and the first id that has it.
struct Peak {
  float most;
  int32_t id;

  __device__ __forceinline__ explicit Peak(uint64_t rank) : most(number_of(rank)), id(id_of(rank)) {}
};

// The largest scores of a thread's part of the row: of the ids i for each i % 4, and the first group with the largest.
class Maxima {
 public:
  float of[4] = {NEVER, NEVER, NEVER, NEVER};

  __device__ __forceinline__ void take(int group, const float (&x)[4]) {
#pragma unroll
    for (int k = 0; k < 4; k++) of[k] = max(of[k], x[k]);
    const float most = largest(x);
    if (most > most_) most_ = most, group_ = group;
  }

  // Of the block, as `ranked` has it; called by all its threads.
  __device__ __forceinline__ uint64_t peak(const Row& row) const {
    const float4 held = row.read(group_);
    float x[4] = {held.x, held.y, held.z, held.w};
    row.forbid(group_, x);
    const int k = x[0] == most_ ? 0 : x[1] == most_ ? 1 : x[2] == most_ ? 2 : 3;
    return across_block(ranked(most_, 4 * group_ + k), Larger());
  }

 private:
  float most_ = NEVER;
  int group_ = 0;
};

}  // namespace
