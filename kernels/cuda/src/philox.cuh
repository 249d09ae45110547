// The sampler's noise: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and the
// Gumbel number that a word stands for. Which word a token has: SamplingRows, kernels/ops.py.
#pragma once
#include "ptx.cuh"

namespace {

// The random words of tokens 4 * group .. 4 * group + 3.
__device__ __forceinline__ uint4 philox(uint64_t seed, int64_t position, uint32_t group) {
  const uint64_t where = static_cast<uint64_t>(position);
  uint32_t c0 = group, c1 = static_cast<uint32_t>(where), c2 = static_cast<uint32_t>(where >> 32), c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = static_cast<uint64_t>(c0) * 0xD2511F53u, p1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1, c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return make_uint4(c0, c1, c2, c3);
}

// Word k, without an array that would lie in memory.
__device__ __forceinline__ uint32_t word_of(const uint4& words, int k) {
  return k & 2 ? (k & 1 ? words.w : words.z) : (k & 1 ? words.y : words.x);
}

// The standard Gumbel number of a word.
__device__ __forceinline__ float gumbel(uint32_t word) {
  const float u = min((static_cast<float>(word) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
  return -logf(-log1pf(-u));
}

constexpr float LEAST_GUMBEL = -2.8125f;  // of all words: -log(-log(2^-24)) = -2.8115

}  // namespace
