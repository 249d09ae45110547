// What all weight formats share: the shape of a panel and the multiply-add.
#pragma once
#include "../vec/vec.h"

#if LANES > 4
#include <immintrin.h>
#endif

constexpr int WIDTH = 2 * LANES;  // outputs of a panel: two registers

// A list of formats.
template <class... W>
struct Formats {};

static inline vf fused(vf a, vf b, vf sum) {
#if LANES == 16
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif LANES == 8 && defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
  return a * b + sum;
#endif
}

#if LANES == 16 && defined(__AVX512BF16__)
#define PAIRS_OF_BFLOAT16
// Sums plus, for each output, two inputs x[0], x[1] times its pair of weights.
static inline vf dot_pair(const bf16* x, vu pairs, vf sums) {
  int32_t both;
  memcpy(&both, x, sizeof both);
  return (vf)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(both), (__m512bh)pairs);
}
#endif
