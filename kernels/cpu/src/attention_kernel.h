// The two products of attention, for a few query rows and one segment of keys, in registers.
//
// Each score is one chain of fused products over the dimensions, each output number one chain over the keys, both
// ascending. So a number does not depend on how many rows and keys are worked on together.
#pragma once
#include <utility>

#include "kv.h"
#include "vec_exp.h"

static const int SEGMENT = 64;  // keys whose scores are computed before they are weighed
static const int SEGMENT_TILES = SEGMENT / TILE;
static const int MOST_ROWS = 6;
static const int MOST_VECTORS = LANES == 16 ? 4 : 2;  // with MOST_ROWS they fill the register file

#if defined(__AVX512BF16__) && LANES == 16
#define DOT_PAIRS 1
#endif

static inline vu load_words(const char* p) {
  vu v;
  memcpy(&v, p, sizeof v);
  return v;
}
static inline vf low_half(vu words) { return (vf)(words << 16); }
static inline vf high_half(vu words) { return (vf)(words & 0xffff0000u); }

// Query rows as `scores` wants them: [head_stride][rows] float32, or [head_stride / 2][rows] pairs of bfloat16.
template <typename T>
static inline void pack_query(const T* q, int64_t size, int64_t stride, int rows, int row, char* packed) {
#ifdef DOT_PAIRS
  if (sizeof(T) == 2) {
    T* to = reinterpret_cast<T*>(packed) + 2 * row;
    for (int64_t d = 0; d < stride; d++) to[d / 2 * 2 * rows + d % 2] = d < size ? q[d] : T(0);
    return;
  }
#endif
  float* to = reinterpret_cast<float*>(packed) + row;
  for (int64_t d = 0; d < stride; d++) to[d * rows] = d < size ? read(q + d) : 0.0f;
}

// s[r][c] = q[r] . k[c] for ROWS rows and VECTORS vectors of keys; k: where each vector's keys begin. `ahead`, if
// given, is memory that will be wanted soon, as much for each vector as its keys are.
template <typename T, int ROWS, int VECTORS>
static void scores(const char* q, const char* const* k, const char* const* ahead, int64_t stride, float* s) {
  vf sum[ROWS][VECTORS] = {};
  const int64_t words = sizeof(T) == 2 ? stride / 2 : stride;  // of 4 bytes, for each key
  for (int64_t i = 0; i < words; i++) {
    const int64_t at = i * TILE * 4;
    if (ahead)
      for (int c = 0; c < VECTORS; c++) __builtin_prefetch(ahead[c] + at);
    if (sizeof(T) == 4) {
      const float* query = reinterpret_cast<const float*>(q) + i * ROWS;
      vf keys[VECTORS];
      for (int c = 0; c < VECTORS; c++) keys[c] = load(reinterpret_cast<const float*>(k[c] + at));
      for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < VECTORS; c++) sum[r][c] = multiply_add(splat(query[r]), keys[c], sum[r][c]);
    } else {
#ifdef DOT_PAIRS
      const int32_t* query = reinterpret_cast<const int32_t*>(q) + i * ROWS;
      vu keys[VECTORS];
      for (int c = 0; c < VECTORS; c++) keys[c] = load_words(k[c] + at);
      for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < VECTORS; c++)
          sum[r][c] = (vf)_mm512_dpbf16_ps((__m512)sum[r][c], (__m512bh)_mm512_set1_epi32(query[r]), (__m512bh)keys[c]);
#else
      const float* query = reinterpret_cast<const float*>(q) + 2 * i * ROWS;
      for (int c = 0; c < VECTORS; c++) {
        const vu keys = load_words(k[c] + at);
        const vf low = low_half(keys), high = high_half(keys);
        for (int r = 0; r < ROWS; r++) {
          sum[r][c] = multiply_add(splat(query[r]), low, sum[r][c]);
          sum[r][c] = multiply_add(splat(query[ROWS + r]), high, sum[r][c]);
        }
      }
#endif
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < VECTORS; c++) store(s + r * SEGMENT + c * LANES, sum[r][c]);
}

// out[r] += weights[r][j] * v[j] over the keys begin <= j < end of a segment, for ROWS rows and VECTORS vectors of
// dimensions from `column` on. tiles: where each tile of V begins; `ahead`: as above, for each tile.
template <typename T, int ROWS, int VECTORS>
static void values(const float* weights, const char* const* tiles, const char* const* ahead, int64_t stride,
                   int64_t column, int begin, int end, float* out) {
  vf sum[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < VECTORS; c++) sum[r][c] = load(out + r * stride + column + c * LANES);
  for (int tile = begin / TILE; tile * TILE < end; tile++) {
    const int from = begin > tile * TILE ? begin : tile * TILE;
    const int to = end < (tile + 1) * TILE ? end : (tile + 1) * TILE;
    const int step = sizeof(T) == 2 ? 2 : 1;  // keys that lie side by side
    for (int j = from / step * step; j < to; j += step) {
      const int64_t at = (j % TILE / step * stride + column) * 4;
      if (ahead)
        for (int c = 0; c < VECTORS; c++) __builtin_prefetch(ahead[tile] + at + c * LANES * 4);
      if (sizeof(T) == 4) {
        vf row[VECTORS];
        for (int c = 0; c < VECTORS; c++) row[c] = load(reinterpret_cast<const float*>(tiles[tile] + at) + c * LANES);
        for (int r = 0; r < ROWS; r++)
          for (int c = 0; c < VECTORS; c++)
            sum[r][c] = multiply_add(splat(weights[r * SEGMENT + j]), row[c], sum[r][c]);
      } else {
        const bool first = j >= from, second = j + 1 < to;
        for (int c = 0; c < VECTORS; c++) {
          const vu pair = load_words(tiles[tile] + at + c * LANES * 4);
          const vf low = low_half(pair), high = high_half(pair);
          if (first)
            for (int r = 0; r < ROWS; r++) sum[r][c] = multiply_add(splat(weights[r * SEGMENT + j]), low, sum[r][c]);
          if (second)
            for (int r = 0; r < ROWS; r++)
              sum[r][c] = multiply_add(splat(weights[r * SEGMENT + j + 1]), high, sum[r][c]);
        }
      }
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < VECTORS; c++) store(out + r * stride + column + c * LANES, sum[r][c]);
}

// The instances, by number of rows and vectors.
template <typename T>
struct Products {
  using Scores = void (*)(const char*, const char* const*, const char* const*, int64_t, float*);
  using Values = void (*)(const float*, const char* const*, const char* const*, int64_t, int64_t, int, int, float*);
  Scores score[MOST_ROWS][MOST_VECTORS];
  Values value[MOST_ROWS][MOST_VECTORS];

  constexpr Products() : Products(std::make_integer_sequence<int, MOST_ROWS * MOST_VECTORS>()) {}

 private:
  template <int... I>
  constexpr explicit Products(std::integer_sequence<int, I...>) : score{}, value{} {
    ((score[I / MOST_VECTORS][I % MOST_VECTORS] = scores<T, I / MOST_VECTORS + 1, I % MOST_VECTORS + 1>), ...);
    ((value[I / MOST_VECTORS][I % MOST_VECTORS] = values<T, I / MOST_VECTORS + 1, I % MOST_VECTORS + 1>), ...);
  }
};
