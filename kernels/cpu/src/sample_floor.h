// top-k and top-p as thresholds on the scores, without sorting.
//
// A threshold is found digit by digit of the ordered 32-bit key of a float (11, 11 and 10 bits): a histogram of the
// leading digit over all candidates, the digit at which the count, or the mass, from above reaches what is wanted, and
// the same among the candidates with that digit. Sums are made in the order of the row, so they are always the same.
#pragma once
#include <algorithm>

#include "sample_scan.h"

// Order of floats is order of their keys.
static inline uint32_t key_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
}
static inline float of_key(uint32_t key) {
  const uint32_t bits = key ^ (key >> 31 ? 0x80000000u : 0xffffffffu);
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Memory of one thread for rows of `vocab`.
struct Bench {
  static constexpr int64_t DIGITS = 2048;
  float* scores;   // [vocab + LANES]
  float* kept;     // [vocab + LANES] candidates
  float* weights;  // [vocab + LANES] their masses
  double* sums;    // [DIGITS]

  static int64_t bytes(int64_t vocab) { return (3 * column(vocab)) * sizeof(float) + DIGITS * sizeof(double); }
  Bench(char* memory, int64_t vocab) {
    scores = reinterpret_cast<float*>(memory);
    kept = scores + column(vocab);
    weights = kept + column(vocab);
    sums = reinterpret_cast<double*>(weights + column(vocab));
  }

 private:
  static int64_t column(int64_t vocab) { return (vocab + LANES + 15) / 16 * 16; }
};

// The largest of the n numbers for which the weights of all numbers from it upwards sum to `wanted`, else the smallest.
// Overwrites both arrays. `weight(i)` belongs to values[i], and move(i, j) puts it to j.
template <typename Weight, typename Move>
static inline float descend(float* values, int64_t n, double wanted, double* sums, Weight weight, Move move) {
  double above = 0;
  for (const auto& [shift, bits] : {std::pair(21, 11), std::pair(10, 11), std::pair(0, 10)}) {
    const uint32_t digits = 1u << bits;
    const auto digit_of = [&, shift = shift](int64_t i) { return key_of(values[i]) >> shift & (digits - 1); };
    std::fill(sums, sums + digits, 0.0);
    for (int64_t i = 0; i < n; i++) sums[digit_of(i)] += weight(i);
    uint32_t lowest = digits, digit = digits;
    while (digit-- > 0) {
      if (sums[digit] == 0) continue;
      lowest = digit;
      if (above + sums[digit] >= wanted) break;
      above += sums[digit];
    }
    // Nothing was reached: the lowest digit it is, whose sum is not above itself.
    if (digit != lowest) above -= sums[lowest];
    int64_t left = 0;
    for (int64_t i = 0; i < n; i++)
      if (digit_of(i) == lowest) {
        move(i, left);
        values[left++] = values[i];
      }
    n = left;
  }
  return values[0];
}

// The k-th largest of a row; NEVER if fewer than k are allowed at all. 0 < k < n.
static inline float floor_of_top_k(const float* row, int64_t n, int64_t k, Bench& bench) {
  const auto one = [](int64_t) { return 1.0; };
  const auto stay = [](int64_t, int64_t) {};
  float least = -__FLT_MAX__;
  if (8 * k <= n && n >= 64 * LANES) {
    // What k maxima of disjoint parts of the row reach, k tokens reach: that leaves few candidates.
    const int64_t vectors = n / LANES, groups = std::min(vectors, (4 * k + 511) / LANES);
    for (int64_t g = 0; g < groups; g++) {
      vf most = splat(NEVER);
      for (int64_t i = vectors * g / groups; i < vectors * (g + 1) / groups; i++)
        most = larger(load(row + i * LANES), most);
      store(bench.kept + g * LANES, most);
    }
    least = std::max(least, descend(bench.kept, groups * LANES, double(k), bench.sums, one, stay));
  }
  const int64_t count = gather(row, n, least, bench.kept);
  return count < k ? NEVER : descend(bench.kept, count, double(k), bench.sums, one, stay);
}

// The smallest score that top-p keeps of those that are at least `least`: from it upwards lies a share p of their mass.
// `most` is the largest of the row.
static inline float floor_of_top_p(const float* row, int64_t n, float p, float most, float least, Bench& bench) {
  double total = 0;
  if (least == NEVER) {
    total = sum_exp(row, n, most);
    // All that is below this has less than half of what top-p leaves out.
    least = most + float(std::log((1.0 - p) * total / (2.0 * n)));
  }
  const int64_t count = gather(row, n, least, bench.kept);
  float* weights = bench.weights;
  for (int64_t i = 0; i < count; i += LANES) store(weights + i, vec_exp(load(bench.kept + i) - most));
  if (total == 0)
    for (int64_t i = 0; i < count; i++) total += weights[i];
  return descend(
      bench.kept, count, p * total, bench.sums, [&](int64_t i) { return double(weights[i]); },
      [&](int64_t from, int64_t to) { weights[to] = weights[from]; });
}
