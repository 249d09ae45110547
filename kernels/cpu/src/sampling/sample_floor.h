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
  float* scores;      // [vocab + LANES]
  float* values;      // [vocab + LANES] candidates for a threshold
  float* weights;     // [vocab + LANES] and what each counts
  double (*sums)[2];  // [DIGITS] weights of the candidates with a digit, those of even and of odd places

  static int64_t bytes(int64_t vocab) { return 3 * column(vocab) * sizeof(float) + DIGITS * sizeof *sums; }
  Bench(char* memory, int64_t vocab) {
    scores = reinterpret_cast<float*>(memory);
    values = scores + column(vocab);
    weights = values + column(vocab);
    sums = reinterpret_cast<double(*)[2]>(weights + column(vocab));
  }

 private:
  static int64_t column(int64_t vocab) { return (vocab + LANES + 15) / 16 * 16; }
};

// Adds up the weights of the n candidates by digit. weigh(i) is the weight of candidate i.
template <typename Weigh>
static inline void add_up(Bench& bench, int64_t n, int shift, uint32_t digits, Weigh weigh) {
  std::fill(&bench.sums[0][0], &bench.sums[digits][0], 0.0);
  constexpr int64_t BLOCK = 64;
  uint32_t digit[BLOCK];
  for (int64_t start = 0; start < n; start += BLOCK) {
    const int64_t count = std::min(BLOCK, n - start);
    for (int64_t i = 0; i < count; i++) digit[i] = key_of(bench.values[start + i]) >> shift & (digits - 1);
    // Neighbours often have the same digit, and an addition would wait for the one before: hence two sums.
    for (int64_t i = 0; i < count; i++) bench.sums[digit[i]][i & 1] += weigh(start + i);
  }
}

// Keeps the candidates from low to high; returns how many.
template <bool weighted>
static inline int64_t keep_between(Bench& bench, int64_t n, float low, float high) {
  int64_t left = 0;
  for (int64_t i = 0; i < n; i += LANES) {
    const vf v = load(bench.values + i), w = load(bench.weights + i);
    uint32_t which = at_least(v, splat(low)) & at_least(splat(high), v);
    if (n - i < LANES) which &= (1u << (n - i)) - 1;
    if (!which) continue;
    if (weighted) close_up(bench.weights + left, w, which);
    left += close_up(bench.values + left, v, which);
  }
  return left;
}

// The largest of the n candidates for which the weights of all from it upwards sum to `wanted` > 0, else the smallest
// with a weight. Without weights each counts 1. Overwrites the candidates.
template <bool weighted>
static inline float descend(Bench& bench, int64_t n, double wanted) {
  double above = 0;
  uint32_t prefix = 0;
  for (const auto& [shift, bits] : {std::pair(21, 11), std::pair(10, 11), std::pair(0, 10)}) {
    const uint32_t digits = 1u << bits;
    add_up(bench, n, shift, digits, [&](int64_t i) { return weighted ? double(bench.weights[i]) : 1.0; });
    uint32_t found = 0;
    double upwards = above;
    for (uint32_t digit = digits; digit-- > 0 && upwards < wanted;) {
      const double sum = bench.sums[digit][0] + bench.sums[digit][1];
      if (sum == 0) continue;
      found = digit, above = upwards, upwards += sum;
    }
    prefix |= found << shift;
    if (shift) n = keep_between<weighted>(bench, n, of_key(prefix), of_key(prefix | ((1u << shift) - 1)));
  }
  return of_key(prefix);
}

// The k-th largest of a row; NEVER if fewer than k are allowed at all. 0 < k < n.
static inline float floor_of_top_k(const float* row, int64_t n, int64_t k, Bench& bench) {
  float least = -__FLT_MAX__;
  if (8 * k <= n && n >= 64 * LANES) {
    // What k maxima of disjoint parts of the row reach, k tokens reach: that leaves few candidates.
    const int64_t vectors = n / LANES, groups = std::min(vectors, (4 * k + 511) / LANES);
    for (int64_t g = 0; g < groups; g++) {
      vf most = splat(least);
      for (int64_t i = vectors * g / groups; i < vectors * (g + 1) / groups; i++)
        most = larger(load(row + i * LANES), most);
      store(bench.values + g * LANES, most + 0.0f);
    }
    least = descend<false>(bench, groups * LANES, double(k));
  }
  const int64_t count = gather(row, n, least, bench.values);
  return count < k ? NEVER : descend<false>(bench, count, double(k));
}

// The smallest score that top-p keeps of those that are at least `least`: from it upwards lies a share p of their mass.
// `most` is the largest of the row.
static inline float floor_of_top_p(const float* row, int64_t n, float p, float most, float least, Bench& bench) {
  const double share = std::max(p, 1e-30f);
  double total = 0;
  if (least == NEVER) {
    total = sum_exp(row, n, most);
    // All that is below this has less than half of what top-p leaves out.
    least = most + float(std::log((1 - share) * total / double(2 * n)));
  }
  const int64_t count = gather(row, n, least, bench.values);
  for (int64_t i = 0; i < count; i += LANES) store(bench.weights + i, vec_exp(load(bench.values + i) - most));
  if (total == 0)
    for (int64_t i = 0; i < count; i++) total += bench.weights[i];
  return descend<true>(bench, count, share * total);
}
