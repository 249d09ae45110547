// The inner loop of the linear layers: R rows of activations times P panels of packed weights.
//
// Weights are packed in panels of WIDTH outputs; inside a panel the inputs follow each other, so that a kernel reads
// one stream per panel. Every output number is ONE chain of fused multiply-adds over the inputs in ascending order
// (paired_kernel: over the groups, and each group's sum one over its inputs), whatever R and P are and wherever the chain
// is interrupted (sums rest in float32, exactly). This makes a row's result the same alone and in any batch.
#pragma once
#include <algorithm>
#include <utility>

#include "../formats/panel.h"
#include "../ops.h"

constexpr int TILE = LANES == 16 ? 14 : 6;       // rows of a tile: all registers but those of weights and activations
constexpr int WIDE_SUMS = LANES == 16 ? 24 : 12; // registers of sums when several panels run together

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Part `index` of `total` cut into `parts` as equal as possible: its begin.
inline int64_t cut(int64_t total, int64_t parts, int64_t index) {
  return total / parts * index + std::min(index, total % parts);
}

// Copies a row of activations to where a kernel reads it, with zeros up to `padded`.
inline void copy_row(const void* from, int32_t dtype, int64_t count, int64_t padded, float* to) {
  int64_t i = 0;
  if (dtype == F32) {
    memcpy(to, from, count * 4);
    i = count;
  } else {
    const bf16* source = static_cast<const bf16*>(from);
    for (; i + LANES <= count; i += LANES) store(to + i, load(source + i));
    for (; i < count; i++) to[i] = widen(source[i]);
  }
  for (; i < padded; i++) to[i] = 0;
}

inline void copy_row(const void* from, int32_t, int64_t count, int64_t padded, bf16* to) {
  memcpy(to, from, count * 2);
  for (int64_t i = count; i < padded; i++) to[i] = 0;
}

// What a kernel works on. Panels have HALVES * LANES outputs: WIDTH, or half of it, with half a step (low_rank.cpp).
// Sums of panel p, row r lie at sums[(p * sums_rows + r) * HALVES * LANES].
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
  int64_t depth;         // of a group
  const float* x_sums;   // of the groups of each row, x_groups apart; null without minima
  int64_t x_groups;
  const char* ahead;   // weights that are needed later, brought nearer meanwhile: the first panel's,
  int64_t ahead_step;  // and how far this moves per step
};

template <class W, int R, int P, int HALVES>
void kernel(const Tile<typename W::Input>& t) {
  constexpr int C = HALVES * P, BYTES = W::BYTES / 2 * HALVES, ROW = HALVES * LANES;
  float* const rest = t.sums;
  const int64_t panel = t.sums_rows * ROW, x_stride = t.x_stride, panel_bytes = t.panel_bytes;
  vf sums[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++)
      sums[r][c] = t.resume ? load(rest + c / HALVES * panel + r * ROW + c % HALVES * LANES) : vf{};
  const typename W::Input* x = t.x;
  const char *w = t.weights, *ahead = t.ahead;
  const int64_t ahead_step = t.ahead_step;
  for (const char* const end = w + t.steps * BYTES; w < end; w += BYTES, x += W::DEPTH, ahead += ahead_step) {
#pragma GCC unroll 8
    for (int p = 0; p < P * W::PREFETCHED; p++)
#pragma GCC unroll 2
      for (int at = 0; at < BYTES; at += 64) __builtin_prefetch(ahead + p * panel_bytes + at);
    typename W::Register weights[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++)
      weights[c] = W::load_weights(w + c / HALVES * panel_bytes + c % HALVES * (W::BYTES / 2));
#pragma GCC unroll 2
    for (int i = 0; i < W::PARTS; i++)
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++)
          sums[r][c] = W::add(x + r * x_stride + i, W::part(weights[c], i), sums[r][c]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) store(rest + c / HALVES * panel + r * ROW + c % HALVES * LANES, sums[r][c]);
}

// The same of a format of Groups for few rows: weights are unpacked in registers. `steps` are groups.
template <class W, int R, int P>
void grouped_kernel(const Tile<float>& t) {
  vf sums[R][2 * P] = {};
  const float* x = t.x;
  const char* step = t.weights;
  for (int64_t group = 0; group < t.steps; group++, step += W::BYTES) {
    vf scale[2 * P], below[2 * P];
#pragma GCC unroll 4
    for (int c = 0; c < 2 * P; c++) W::load_scale(step + c / 2 * t.panel_bytes, c % 2, scale[c], below[c]);
    const char* numbers = step + W::SCALE_BYTES;
    for (int word = 0; word < W::DEPTH / W::NUMBERS; word++, numbers += WIDTH * 4, x += W::NUMBERS) {
      vu words[2 * P];
#pragma GCC unroll 4
      for (int c = 0; c < 2 * P; c++) {
        const char* at = numbers + c / 2 * t.panel_bytes + c % 2 * LANES * 4;
        memcpy(&words[c], at, sizeof words[c]);
        __builtin_prefetch(at + W::AHEAD);
      }
#pragma GCC unroll 8
      for (int i = 0; i < W::NUMBERS; i++)
#pragma GCC unroll 4
        for (int c = 0; c < 2 * P; c++) {
          const vf weight = W::value(words[c] >> W::shift(i), scale[c], below[c]);
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) sums[r][c] = fused(splat(x[r * t.x_stride + i]), weight, sums[r][c]);
        }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < 2 * P; c++) store(t.sums + (c / 2 * t.sums_rows + r) * WIDTH + c % 2 * LANES, sums[r][c]);
}

constexpr int GROUPED_ROWS = 3;  // with more, unpacking into memory once costs less than the registers that are short

template <class W, int P>
void grouped_kernel(const Tile<float>& t, int64_t rows) {
  if (rows == 1) return grouped_kernel<W, 1, P>(t);
  if (rows == 2) return grouped_kernel<W, 2, P>(t);
  grouped_kernel<W, 3, P>(t);
}

#ifdef PAIRS_OF_BFLOAT16
constexpr int PAIRS_AHEAD = 4096;  // bytes of a panel that are fetched before they are unpacked

// R rows of bfloat16 times P panels of Pairs or UnpackedPairs; `steps` are groups of `depth` inputs. The products of a group
// are one chain over pairs of inputs from zero; the chain of an output adds each group's sum times its scale, then less its
// minimum times the sum of the activations.
template <class W, int R, int P>
void paired_kernel(const Tile<bf16>& t) {
  constexpr int C = 2 * P;
  constexpr bool HELD = R * C <= 16;  // sums stay in registers; more would displace the products
  const auto place = [&](int r, int c) { return t.sums + (c / 2 * t.sums_rows + r) * WIDTH + c % 2 * LANES; };
  vf sums[HELD ? R : 1][C];
#pragma GCC unroll 16
  for (int r = 0; HELD && r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) sums[r][c] = t.resume ? load(place(r, c)) : vf{};
  const char* step = t.weights;
  const bf16* x = t.x;
  const int64_t words_each = t.depth / W::NUMBERS, bytes = W::bytes(t.depth), ahead = t.ahead - t.weights;
  bool resume = t.resume;
  for (int64_t group = 0; group < t.steps; group++, step += bytes, resume = true) {
    vf products[R][C] = {};
    const char* numbers = step + W::SCALE_BYTES;
    for (int64_t word = 0; word < words_each; word++, numbers += WIDTH * 4, x += W::NUMBERS) {
      vu words[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) {
        const char* at = numbers + c / 2 * t.panel_bytes + c % 2 * LANES * 4;
        memcpy(&words[c], at, sizeof words[c]);
        if (W::PREFETCHED) __builtin_prefetch(at + ahead);
      }
#pragma GCC unroll 4
      for (int i = 0; i < W::EACH; i++) {
        vu weights[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) weights[c] = W::pair(words[c], i);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
          for (int c = 0; c < C; c++)
            products[r][c] = dot_pair(x + r * t.x_stride + 2 * i, weights[c], products[r][c]);
      }
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
      vf scale, below;
      W::load_scale(step + c / 2 * t.panel_bytes, c % 2, scale, below);
#pragma GCC unroll 2
      for (int at = c % 2 * 64; at < W::SCALE_BYTES * W::PREFETCHED; at += 128)
        __builtin_prefetch(step + c / 2 * t.panel_bytes + at + ahead);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        vf sum = fused(products[r][c], scale, HELD ? sums[r][c] : resume ? load(place(r, c)) : vf{});
        if (W::MINS && t.x_sums) sum = fused(splat(t.x_sums[r * t.x_groups + group]), below, sum);
        if (HELD)
          sums[r][c] = sum;
        else
          store(place(r, c), sum);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; HELD && r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) store(place(r, c), sums[r][c]);
}

// The sum of a group of activations, `count` of them, a multiple of 16; each 32 lie together, `stride` from the next.
inline float sum_pairs(const bf16* x, int64_t count, int64_t stride) {
  vf sums = {};
  for (int64_t i = 0; i < count; i += LANES) sums += load(x + i / 32 * stride + i % 32);
  float lanes[LANES];
  store(lanes, sums);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}
#endif

// How many panels run together for a tile of so many rows: few rows alone have too few independent sums to keep the
// multipliers busy.
template <int HALVES = 2>
constexpr int panels_together(int64_t rows) {
  return 4 * HALVES * rows <= WIDE_SUMS ? 4 : 2 * HALVES * rows <= WIDE_SUMS ? 2 : 1;
}

template <class W>
using Kernel = void (*)(const Tile<typename W::Input>&);

template <class W, int R, int P, int HALVES>
constexpr Kernel<W> kernel_of() {
#ifdef PAIRS_OF_BFLOAT16
  if constexpr (W::GROUPED) return paired_kernel<W, R, P>;
#endif
  if constexpr (!W::GROUPED) return kernel<W, R, P, HALVES>;
}

template <class W, int P, int HALVES, int... R>
constexpr Kernel<W> pick(int64_t rows, std::integer_sequence<int, R...>) {
  constexpr Kernel<W> table[] = {kernel_of<W, R + 1, P, HALVES>()...};
  return table[rows - 1];
}

// `together` is panels_together(rows) or less: 4, 2 or 1.
template <class W, int HALVES = 2>
Kernel<W> pick(int64_t rows, int together) {
  if (together == 4)
    return pick<W, 4, HALVES>(rows, std::make_integer_sequence<int, WIDE_SUMS / (4 * HALVES)>());
  if (together == 2)
    return pick<W, 2, HALVES>(rows, std::make_integer_sequence<int, WIDE_SUMS / (2 * HALVES)>());
  return pick<W, 1, HALVES>(rows, std::make_integer_sequence<int, TILE>());
}
