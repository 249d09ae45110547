// What the threads of a sampler's block do together: sums, maxima, and thresholds found digit by digit.
//
// Nothing here depends on the order of the threads: float sums have a fixed tree, and what atomics add up are whole
// numbers.
#pragma once
#include "ptx.cuh"

namespace {

constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr int DIGITS = 2048;
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
__device__ __forceinline__ Reached<Sum> find_digit(const Sum* sums, int digits, Sum wanted) {
  SHARED(Sum, of_warp, 32);
  SHARED(Reached<Sum>, found, 1);
  // Each thread has some neighbouring digits, the first one the highest.
  const int each = (digits + blockDim.x - 1) / blockDim.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int end = digits - static_cast<int>(threadIdx.x) * each, first = end > each ? end - each : 0;
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

// The largest score from which upwards the weights sum to `wanted` > 0; NEVER if those of all do not.
//
// It is found digit by digit of the key (11, 11 and 10 bits): the weights of a digit are summed in `sums`, which has
// room for DIGITS, then those of the scores that share the digit at which `wanted` is reached. for_each(visit) calls
// visit(score) for the scores of this thread, the same ones each time.
template <typename Sum, typename ForEach, typename Weigh>
__device__ __forceinline__ float find_threshold(Sum* sums, Sum wanted, ForEach for_each, Weigh weigh) {
  uint32_t key = 0;
  int shift = 32;
#pragma unroll 1
  for (int level = 0; level < 3; level++) {
    const int bits = level < 2 ? 11 : 10, digits = 1 << bits;
    shift -= bits;
    for (int i = threadIdx.x; i < digits; i += blockDim.x) sums[i] = 0;
    __syncthreads();
    for_each([&](float score) {
      const uint32_t other = key_of(score);
      if (((other ^ key) >> shift >> bits) == 0) add_to(&sums[other >> shift & (digits - 1)], weigh(score));
    });
    __syncthreads();
    const Reached<Sum> reached = find_digit(sums, digits, wanted);
    if (reached.digit < 0) return NEVER;
    key |= static_cast<uint32_t>(reached.digit) << shift;
    wanted -= reached.above;
  }
  return of_key(key);
}

}  // namespace
