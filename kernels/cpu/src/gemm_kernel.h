// The inner loop of the linear layers: R rows of activations times P panels of packed weights.
//
// Weights are packed in panels of WIDTH outputs; inside a panel the inputs follow each other, so that a kernel reads
// one stream per panel. Every output number is ONE chain of fused multiply-adds over the inputs in ascending order,
// whatever R and P are and wherever the chain is interrupted (sums rest in float32, exactly): this is what makes a
// row's result the same alone and in any batch.
#pragma once
#include <utility>

#include "ops.h"
#include "vec.h"

#if LANES > 4
#include <immintrin.h>
#endif

constexpr int WIDTH = 2 * LANES;                 // outputs of a panel: two registers
constexpr int TILE = LANES == 16 ? 14 : 6;       // rows of a tile: all registers but those of weights and activations
constexpr int WIDE_SUMS = LANES == 16 ? 24 : 12; // registers of sums when several panels run together

static inline vf fused(vf a, vf b, vf sum) {
#if LANES == 16
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif LANES == 8 && defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
  return a * b + sum;
#endif
}

// The kinds of weights. Input: what activations are read as. DEPTH: inputs per step. BYTES: of a panel per step.
// `load_weights` brings a step of LANES outputs into a register, which holds PARTS vectors of factors; `add` adds the
// products of one part with one row to the sums.
struct FloatWeights {
  typedef float Input;
  typedef vf Register;
  static constexpr int DEPTH = 1, BYTES = 4 * WIDTH, PARTS = 1;
  static Register load_weights(const char* p) { return load(reinterpret_cast<const float*>(p)); }
  static vf part(Register w, int) { return w; }
  static vf add(const float* x, vf w, vf sum) { return fused(splat(*x), w, sum); }
};

struct Int8Weights {
  typedef float Input;
  typedef vf Register;
  static constexpr int DEPTH = 1, BYTES = WIDTH, PARTS = 1;
  static Register load_weights(const char* p) {
#if LANES == 16
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return (vf)_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, bytes));
#elif LANES == 8
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    typedef int8_t vb __attribute__((vector_size(LANES)));
    vb bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, vi), vf);
#endif
  }
  static vf part(Register w, int) { return w; }
  static vf add(const float* x, vf w, vf sum) { return fused(splat(*x), w, sum); }
};

// A step is a pair of inputs; both numbers of an output lie together in 32 bits.
struct WidenedWeights {
  typedef float Input;
  typedef vu Register;
  static constexpr int DEPTH = 2, BYTES = 4 * WIDTH, PARTS = 2;
  static Register load_weights(const char* p) {
    vu v;
    memcpy(&v, p, sizeof v);
    return v;
  }
  static vf part(Register w, int i) { return (vf)(i == 0 ? w << 16 : w & 0xffff0000u); }
  static vf add(const float* x, vf w, vf sum) { return fused(splat(*x), w, sum); }
};

#if LANES == 16 && defined(__AVX512BF16__)
#define BF16_PAIRS 1
// The same layout, multiplied as it is.
struct PairWeights {
  typedef bf16 Input;
  typedef vu Register;
  static constexpr int DEPTH = 2, BYTES = 4 * WIDTH, PARTS = 1;
  static Register load_weights(const char* p) { return WidenedWeights::load_weights(p); }
  static Register part(Register w, int) { return w; }
  static vf add(const bf16* x, Register w, vf sum) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)w);
  }
};
#endif

// What a kernel works on. Sums of panel p, row r lie at sums[(p * sums_rows + r) * WIDTH].
template <class Input>
struct Tile {
  const Input* x;
  int64_t x_stride;
  const char* weights;
  int64_t panel_bytes;
  int64_t steps;
  float* sums;
  int64_t sums_rows;
  bool resume;         // sums hold what earlier steps gave
  const char* ahead;   // weights that are needed later, brought nearer meanwhile: the first panel's,
  int64_t ahead_step;  // and how far this moves per step
};

template <class W, int R, int P>
void kernel(const Tile<typename W::Input>& t) {
  float* const rest = t.sums;
  const int64_t panel = t.sums_rows * WIDTH, x_stride = t.x_stride, panel_bytes = t.panel_bytes;
  vf sums[R][2 * P];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < 2 * P; c++)
      sums[r][c] = t.resume ? load(rest + c / 2 * panel + r * WIDTH + c % 2 * LANES) : vf{};
  const typename W::Input* x = t.x;
  const char *w = t.weights, *ahead = t.ahead;
  const int64_t ahead_step = t.ahead_step;
  for (const char* const end = w + t.steps * W::BYTES; w < end; w += W::BYTES, x += W::DEPTH, ahead += ahead_step) {
#pragma GCC unroll 8
    for (int p = 0; p < P; p++)
#pragma GCC unroll 2
      for (int at = 0; at < W::BYTES; at += 64) __builtin_prefetch(ahead + p * panel_bytes + at);
    typename W::Register weights[2 * P];
#pragma GCC unroll 8
    for (int c = 0; c < 2 * P; c++)
      weights[c] = W::load_weights(w + c / 2 * panel_bytes + c % 2 * (W::BYTES / 2));
#pragma GCC unroll 2
    for (int i = 0; i < W::PARTS; i++)
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < 2 * P; c++)
          sums[r][c] = W::add(x + r * x_stride + i, W::part(weights[c], i), sums[r][c]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < 2 * P; c++) store(rest + c / 2 * panel + r * WIDTH + c % 2 * LANES, sums[r][c]);
}

// How many panels run together for a tile of so many rows: few rows alone have too few independent sums to keep the
// multipliers busy.
constexpr int panels_together(int64_t rows) {
  return 8 * rows <= WIDE_SUMS ? 4 : 4 * rows <= WIDE_SUMS ? 2 : 1;
}

template <class W>
using Kernel = void (*)(const Tile<typename W::Input>&);

template <class W, int P, int... R>
constexpr Kernel<W> pick(int64_t rows, std::integer_sequence<int, R...>) {
  constexpr Kernel<W> table[] = {kernel<W, R + 1, P>...};
  return table[rows - 1];
}

// `together` is panels_together(rows) or less: 4, 2 or 1.
template <class W>
Kernel<W> pick(int64_t rows, int together) {
  if (together == 4) return pick<W, 4>(rows, std::make_integer_sequence<int, WIDE_SUMS / 8>());
  if (together == 2) return pick<W, 2>(rows, std::make_integer_sequence<int, WIDE_SUMS / 4>());
  return pick<W, 1>(rows, std::make_integer_sequence<int, TILE>());
}
