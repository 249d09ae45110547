// What the threads of a sampler's block do together: sums, maxima, and thresholds found digit by digit.
//
// Nothing here depends on the order of the threads: float sums have a fixed tree, and what atomics add up are whole
// numbers.
#pragma once
#include "ptx.cuh"

namespace {

constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr int DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS;
constexpr float NEVER = __builtin_bit_cast(float, 0xff800000u);  // -infinity: a token that must not be drawn

// Order of floats is order of their keys; zeros of both signs have one.
__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ float of_key(uint32_t key) {
  return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

// The larger of two is that of the larger number and, among equals, of the smaller id.
__device__ __forceinline__ uint64_t ranked(float x, int id) {
  return static_cast<uint64_t>(key_of(x)) << 32 | ~static_cast<uint32_t>(id);
}
__device__ __forceinline__ int id_of(uint64_t rank) { return static_cast<int>(~static_cast<uint32_t>(rank)); }
__device__ __forceinline__ float number_of(uint64_t rank) { return of_key(static_cast<uint32_t>(rank >> 32)); }

struct Larger {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};
struct Plus {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};

template <typename T, typename Combine>
__device__ __forceinline__ T across_warp(T x, Combine combine) {
#pragma unroll
  for (int other = 16; other; other /= 2) x = combine(x, __shfl_xor_sync(FULL_WARP, x, other));
  return x;
}

// Every thread's x together, the same bits in all of them.
template <typename T, typename Combine>
__device__ __forceinline__ T across_block(T x, Combine combine) {
  SHARED(T, of_warp, 32);
  x = across_warp(x, combine);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  const int warps = blockDim.x / 32;
  x = of_warp[0];
  for (int i = 1; i < warps; i++) x = combine(x, of_warp[i]);
  __syncthreads();  // of_warp is free again
  return x;
}

// Adds to a sum in shared memory, whatever others add meanwhile. 64 bits would be added there by a loop of compare and
// swap, in which threads with the same digit, and most have the same few, wait for each other; halves with a carry are
// two additions, mostly one.
__device__ __forceinline__ void add_to(uint32_t* sum, uint32_t weight) { atomicAdd(sum, weight); }
__device__ __forceinline__ void add_to(uint64_t* sum, uint64_t weight) {
  uint32_t* halves = reinterpret_cast<uint32_t*>(sum);  // the lower one first
  const uint32_t low = static_cast<uint32_t>(weight), before = atomicAdd(&halves[0], low);
  const uint32_t high = static_cast<uint32_t>(weight >> 32) + (before + low < before ? 1 : 0);
  if (high) atomicAdd(&halves[1], high);
}

// A digit at which sums, from the highest digit downwards, reach what is wanted, and the sum of those above it. The
// digit is below zero if all together do not.
template <typename Sum>
struct Reached {
  int32_t digit;
  Sum above;
};

template <typename Sum>
__device__ __forceinline__ Reached<Sum> find_digit(const Sum* sums, Sum wanted) {
  SHARED(Sum, of_warp, 32);
  SHARED(Reached<Sum>, found, 1);
  // Each thread has some neighbouring digits, the first one the highest.
  const int each = (DIGITS + blockDim.x - 1) / blockDim.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int end = DIGITS - static_cast<int>(threadIdx.x) * each, first = end > each ? end - each : 0;
  // It adds them in a ring, and lanes with a first digit in one bank begin at different ones. (Unrolled, the loop takes
  // more registers than there are on sm_90.)
  constexpr int APART = 128 / sizeof(Sum);
  const int count = end - first;
  Sum mine = 0;
#pragma unroll 1
  for (int i = 0, at = lane % APART * each / APART; i < count; i++, at++) {
    if (at >= count) at = 0;
    mine += sums[first + at];
  }
  Sum upwards = mine;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const Sum other = __shfl_up_sync(FULL_WARP, upwards, distance);
    if (lane >= distance) upwards += other;
  }
  if (lane == 31) of_warp[warp] = upwards;
  if (threadIdx.x == 0) found[0].digit = -1;
  __syncthreads();
#pragma unroll 4
  for (int i = 0; i < warp; i++) upwards += of_warp[i];
  Sum above = upwards - mine;
  if (above < wanted && upwards >= wanted) {
    int digit = end - 1;
    while (above + sums[digit] < wanted) above += sums[digit--];
    found[0] = {digit, above};
  }
  __syncthreads();
  return found[0];
}

constexpr unsigned FEW = 32;

// The scores of a digit that few share, and their weights.
template <typename Sum>
struct Few {
  Sum weights[FEW];
  uint32_t keys[FEW];
  uint32_t count;  // more than FEW: some are not here
};

// The largest key from which upwards the weights sum to `wanted`. Each warp finds it by itself.
template <typename Sum>
__device__ __forceinline__ uint32_t find_among(const Few<Sum>& few, Sum wanted) {
  const unsigned lane = threadIdx.x % 32;
  const uint32_t mine = lane < few.count ? few.keys[lane] : 0;
  Sum upwards = 0;
  for (unsigned i = 0; i < few.count; i++)
    if (few.keys[i] >= mine) upwards += few.weights[i];
  return across_warp(lane < few.count && upwards >= wanted ? mine : 0u, Larger());
}

// The largest score from which upwards the weights sum to `wanted` > 0; NEVER if those of all do not. The scores that
// have weight have keys from `low` to `high`.
//
// It is found digit by digit of the key's distance from `low`, 11 bits at a time: the weights of a digit are summed in
// `sums`, which has room for DIGITS, then those of the scores that share the digit at which `wanted` is reached. Where
// these are few they are compared with each other instead; `seeks_few`: they are looked for, which takes a walk through
// the scores if they are not. for_each(visit) calls visit(score) for the scores of this thread, the same ones each time.
template <bool seeks_few, typename Sum, typename ForEach, typename Weigh>
__device__ __forceinline__ float find_threshold(Sum* sums, Sum wanted, uint32_t low, uint32_t high, ForEach for_each,
                                                Weigh weigh) {
  SHARED(Few<Sum>, fews, 1);
  Few<Sum>& few = fews[0];
  uint32_t span = high - low;
  int shift = max(0, 32 - DIGIT_BITS - __clz(span));
#pragma unroll 1
  while (true) {
    for (int i = threadIdx.x; i < DIGITS; i += blockDim.x) sums[i] = 0;
    if (threadIdx.x == 0) few.count = 0;
    __syncthreads();
    for_each([&](float score) {
      const uint32_t distance = key_of(score) - low;
      if (distance <= span) add_to(&sums[distance >> shift], weigh(score));
    });
    __syncthreads();
    const Reached<Sum> reached = find_digit(sums, wanted);
    if (reached.digit < 0) return NEVER;
    low += static_cast<uint32_t>(reached.digit) << shift;
    wanted -= reached.above;
    if (shift == 0) return of_key(low);
    span = (1u << shift) - 1;
    shift = max(0, shift - DIGIT_BITS);
    if (!seeks_few) continue;
    for_each([&](float score) {
      const uint32_t key = key_of(score);
      if (key - low > span) return;
      const uint32_t at = atomicAdd(&few.count, 1u);
      if (at < FEW) few.keys[at] = key, few.weights[at] = weigh(score);
    });
    __syncthreads();
    if (few.count <= FEW) return of_key(find_among(few, wanted));
    __syncthreads();  // all have read the count
  }
}

}  // namespace
