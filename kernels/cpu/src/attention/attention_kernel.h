// The two products of attention, for a few query rows and one segment of keys, in registers.
//
// Each score is one chain of fused products over the dimensions, each output number one chain over the keys, both
// ascending. So a number does not depend on how many rows and keys are worked on together.
#pragma once
#include <utility>

#include "../kv.h"
#include "../vec/vec_exp.h"

static const int SEGMENT = 64;  // keys that are scored together, then weighed
static const int SEGMENT_TILES = SEGMENT / TILE;
static const int MAX_ROWS = 6;
static const int MAX_VECTORS = LANES == 16 ? 4 : 2;  // with MAX_ROWS they fill the register file

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

// body(0), body(1) .. with constants: what they index then lives in registers.
template <int... I, typename Body>
static inline __attribute__((always_inline)) void unrolled(std::integer_sequence<int, I...>, Body body) {
  (body(std::integral_constant<int, I>()), ...);
}
template <int COUNT, typename Body>
static inline __attribute__((always_inline)) void times(Body body) {
  unrolled(std::make_integer_sequence<int, COUNT>(), body);
}
#define INLINE __attribute__((always_inline))

// A query row as `scores` wants it, in 4 bytes a number: float32, or two bfloat16 in the first half of the row.
template <typename T>
static inline void pack_query(const T* q, int64_t size, int64_t stride, float* packed) {
#ifdef DOT_PAIRS
  if (sizeof(T) == 2) {
    memcpy(packed, q, size * 2);
    memset(reinterpret_cast<char*>(packed) + size * 2, 0, (stride - size) * 2);
    return;
  }
#endif
  int64_t d = 0;
  for (; d + LANES <= size; d += LANES) store(packed + d, load(q + d));
  for (; d < size; d++) packed[d] = read(q + d);
  for (; d < stride; d++) packed[d] = 0;
}

// s[r][c] = q[r] . k[c] for ROWS rows and VECTORS vectors of keys; k: where each vector's keys begin. `ahead`, if
// given, is memory that will be wanted soon, as much for each vector as its keys are.
template <typename T, int ROWS, int VECTORS>
static void scores(const float* q, const char* const* k, const char* const* ahead, int64_t stride, float* s) {
  vf sum[ROWS][VECTORS];
  const char *keys_of[VECTORS], *wanted[VECTORS];
  const float* query[ROWS];
  times<ROWS>([&](auto r) INLINE {
    query[r] = q + r * stride;
    times<VECTORS>([&](auto c) INLINE { sum[r][c] = vf{}; });
  });
  times<VECTORS>([&](auto c) INLINE {
    keys_of[c] = k[c];
    wanted[c] = ahead ? ahead[c] : nullptr;
  });
  const int64_t words = sizeof(T) == 2 ? stride / 2 : stride;  // of 4 bytes, for each key
  for (int64_t i = 0; i < words; i++) {
    const int64_t at = i * TILE * 4;
    if (ahead) times<VECTORS>([&](auto c) INLINE { __builtin_prefetch(wanted[c] + at); });
    if constexpr (sizeof(T) == 4) {
      vf keys[VECTORS];
      times<VECTORS>([&](auto c) INLINE { keys[c] = load(reinterpret_cast<const float*>(keys_of[c] + at)); });
      times<ROWS>([&](auto r) INLINE {
        const vf number = splat(query[r][i]);
        times<VECTORS>([&](auto c) INLINE { sum[r][c] = multiply_add(number, keys[c], sum[r][c]); });
      });
    } else {
#ifdef DOT_PAIRS
      __m512bh keys[VECTORS];
      times<VECTORS>([&](auto c) INLINE { keys[c] = (__m512bh)load_words(keys_of[c] + at); });
      times<ROWS>([&](auto r) INLINE {
        int32_t bits;
        memcpy(&bits, query[r] + i, 4);
        const __m512bh pair = (__m512bh)_mm512_set1_epi32(bits);
        times<VECTORS>([&](auto c) INLINE { sum[r][c] = (vf)_mm512_dpbf16_ps((__m512)sum[r][c], pair, keys[c]); });
      });
#else
      times<VECTORS>([&](auto c) INLINE {
        const vu keys = load_words(keys_of[c] + at);
        const vf low = low_half(keys), high = high_half(keys);
        times<ROWS>([&](auto r) INLINE {
          sum[r][c] = multiply_add(splat(query[r][2 * i]), low, sum[r][c]);
          sum[r][c] = multiply_add(splat(query[r][2 * i + 1]), high, sum[r][c]);
        });
      });
#endif
    }
  }
  times<ROWS>([&](auto r) INLINE {
    times<VECTORS>([&](auto c) INLINE { store(s + r * SEGMENT + c * LANES, sum[r][c]); });
  });
}

// One of two bfloat16 keys that lie side by side.
template <int ROWS, int VECTORS, bool HIGH>
static inline INLINE void add_half(const float* weights, const char* pairs, vf (&sum)[ROWS][VECTORS]) {
  times<VECTORS>([&](auto c) INLINE {
    const vu pair = load_words(pairs + c * LANES * 4);
    const vf row = HIGH ? high_half(pair) : low_half(pair);
    times<ROWS>([&](auto r) INLINE { sum[r][c] = multiply_add(splat(weights[r * SEGMENT]), row, sum[r][c]); });
  });
}

// out[r] = out[r] * keep[r] + weights[r][j] * v[j] over the keys begin <= j < end of a segment, for ROWS rows and
// VECTORS vectors of dimensions from `column` on; keep: null for 1. tiles: where each tile of V begins; `ahead`: as
// above, for each tile.
template <typename T, int ROWS, int VECTORS>
static void values(const float* weights, const float* keep, const char* const* tiles, const char* const* ahead,
                   int64_t stride, int64_t column, int begin, int end, float* out) {
  vf sum[ROWS][VECTORS];
  out += column;
  times<ROWS>([&](auto r) INLINE {
    times<VECTORS>([&](auto c) INLINE { sum[r][c] = load(out + r * stride + c * LANES); });
  });
  if (keep)
    times<ROWS>([&](auto r) INLINE {
      const vf factor = splat(keep[r]);
      times<VECTORS>([&](auto c) INLINE { sum[r][c] = multiply_add(sum[r][c], factor, vf{}); });
    });
  for (int tile = begin / TILE; tile * TILE < end; tile++) {
    const int from = begin > tile * TILE ? begin : tile * TILE;
    const int to = end < (tile + 1) * TILE ? end : (tile + 1) * TILE;
    const char* rows = tiles[tile] + column * 4;
    const char* wanted = ahead ? ahead[tile] + column * 4 : nullptr;
    if constexpr (sizeof(T) == 4) {
      for (int j = from; j < to; j++) {
        const int64_t at = j % TILE * stride * 4;
        if (wanted) times<VECTORS>([&](auto c) INLINE { __builtin_prefetch(wanted + at + c * LANES * 4); });
        vf row[VECTORS];
        times<VECTORS>([&](auto c) INLINE { row[c] = load(reinterpret_cast<const float*>(rows + at) + c * LANES); });
        times<ROWS>([&](auto r) INLINE {
          const vf weight = splat(weights[r * SEGMENT + j]);
          times<VECTORS>([&](auto c) INLINE { sum[r][c] = multiply_add(weight, row[c], sum[r][c]); });
        });
      }
    } else {
      int j = from;
      if (j % 2) {
        add_half<ROWS, VECTORS, true>(weights + j, rows + j % TILE / 2 * stride * 4, sum);
        j++;
      }
      for (; j + 1 < to; j += 2) {
        const int64_t at = j % TILE / 2 * stride * 4;
        if (wanted) times<VECTORS>([&](auto c) INLINE { __builtin_prefetch(wanted + at + c * LANES * 4); });
        add_half<ROWS, VECTORS, false>(weights + j, rows + at, sum);
        add_half<ROWS, VECTORS, true>(weights + j + 1, rows + at, sum);
      }
      if (j < to) add_half<ROWS, VECTORS, false>(weights + j, rows + j % TILE / 2 * stride * 4, sum);
    }
  }
  times<ROWS>([&](auto r) INLINE {
    times<VECTORS>([&](auto c) INLINE { store(out + r * stride + c * LANES, sum[r][c]); });
  });
}

// The instances, by number of rows and vectors.
template <typename T>
struct Products {
  using Scores = void (*)(const float*, const char* const*, const char* const*, int64_t, float*);
  using Values = void (*)(const float*, const float*, const char* const*, const char* const*, int64_t, int64_t, int,
                          int, float*);
  Scores score[MAX_ROWS][MAX_VECTORS];
  Values value[MAX_ROWS][MAX_VECTORS];

  constexpr Products() : Products(std::make_integer_sequence<int, MAX_ROWS * MAX_VECTORS>()) {}

 private:
  template <int... I>
  constexpr explicit Products(std::integer_sequence<int, I...>) : score{}, value{} {
    ((score[I / MAX_VECTORS][I % MAX_VECTORS] = scores<T, I / MAX_VECTORS + 1, I % MAX_VECTORS + 1>), ...);
    ((value[I / MAX_VECTORS][I % MAX_VECTORS] = values<T, I / MAX_VECTORS + 1, I % MAX_VECTORS + 1>), ...);
  }
};
