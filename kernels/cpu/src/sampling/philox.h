// The sampler's noise: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), many
// counters at a time, and the Gumbel number that a word stands for. Which words: SamplingRows, kernels/ops.py.
#pragma once
#include <algorithm>
#include <cmath>

#include "../vec/vec.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

typedef uint64_t vq __attribute__((vector_size(4 * LANES)));  // LANES / 2 of them

// The 64-bit products of b with the low words; what is in the high words does not matter.
static inline vq multiply_words(vq a, uint32_t b) {
#if LANES == 16
  return (vq)_mm512_maskz_mul_epu32(0xff, (__m512i)a, _mm512_set1_epi64(b));
#elif LANES == 8
  return (vq)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif defined(__SSE2__)
  return (vq)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#else
  return (a & 0xffffffff) * b;
#endif
}

// The random words of 2 * LANES tokens in a row.
struct Words {
  vu first, second;
};

// Words of tokens `token` and up; token is a multiple of 2 * LANES.
static inline Words philox(uint64_t seed, int64_t position, int64_t token) {
  // Each counter has a 64-bit lane, and makes the words of four tokens. Even lanes hold the first half of the counters,
  // so that the words come out in the order of the tokens.
  vq counter;
  for (int i = 0; i < LANES / 4; i++) counter[2 * i] = i, counter[2 * i + 1] = LANES / 4 + i;
  const uint64_t where = position;
  vq c0 = counter + uint64_t(token) / 4, c1 = (where & 0xffffffff) - vq{}, c2 = (where >> 32) - vq{}, c3 = {};
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; round++) {
    vq p0 = multiply_words(c0, 0xD2511F53), p1 = multiply_words(c2, 0xCD9E8D57);
    c0 = p1 >> 32 ^ c1 ^ uint64_t(k0), c2 = p0 >> 32 ^ c3 ^ uint64_t(k1);
    c1 = p1, c3 = p0;  // their low words; the high ones are never read
    k0 += 0x9E3779B9, k1 += 0xBB67AE85;
  }
  vq low = (c0 & 0xffffffff) | c1 << 32, high = (c2 & 0xffffffff) | c3 << 32;
  vq even, odd;
  for (int i = 0; i < LANES / 2; i++) even[i] = i / 2 * 2 + i % 2 * (LANES / 2), odd[i] = even[i] + 1;
  return {(vu)__builtin_shuffle(low, high, even), (vu)__builtin_shuffle(low, high, odd)};
}

// The standard Gumbel number of a word. Both logarithms are right to the last bit of float32: a computation in
// float32 differs by that function's rounding only.
static inline float gumbel(uint32_t word) {
  const float u = std::min((float(word) + 0.5f) * 0x1p-32f, 1 - 0x1p-24f);
  const float exponential = float(-std::log1p(-double(u)));
  return float(-std::log(double(exponential)));
}

constexpr float LEAST_GUMBEL = -2.8125f;  // of all words: -log(-log(2^-24)) = -2.8115
constexpr float MAX_GUMBEL = 22.875f;    // -log(2^-33) = 22.8739
