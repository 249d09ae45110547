// Passes over a row of scores that the sampler is made of. Ends of rows that do not fill a vector are padded with a
// number that does no harm.
#pragma once
#include <cmath>

#include "../vec/vec_exp.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

constexpr float NEVER = -INFINITY;  // the score of a token that must not be drawn

// Bit i: lane i is negative, as lanes of a true comparison are.
static inline uint32_t bits_of(vi lanes) {
#if LANES == 16
  return _mm512_movepi32_mask((__m512i)lanes);
#elif LANES == 8
  return _mm256_movemask_ps((__m256)lanes);
#elif defined(__SSE2__)
  return _mm_movemask_ps((__m128)lanes);
#else
  uint32_t bits = 0;
  for (int i = 0; i < LANES; i++) bits |= uint32_t(lanes[i] < 0) << i;
  return bits;
#endif
}

// Bit i: a[i] >= b[i].
static inline uint32_t at_least(vf a, vf b) {
#if LANES == 16
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#else
  return bits_of(a >= b);
#endif
}

static inline vf larger(vf a, vf b) { return a > b ? a : b; }

static inline float largest_lane(vf v) {
  float most = v[0];
  for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
  return most;
}

static inline vf load_ending(const float* p, int64_t n, float fill) {
  float padded[LANES];
  for (int i = 0; i < LANES; i++) padded[i] = i < n ? p[i] : fill;
  return load(padded);
}

// Calls body(i, scores i .. i + LANES) for a whole row.
template <typename Body>
static inline void scan(const float* row, int64_t n, float fill, Body body) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) body(i, load(row + i));
  if (i < n) body(i, load_ending(row + i, n - i, fill));
}

// The largest number of a row, where it is first, and whether all are finite.
struct Peak {
  float most = NEVER;
  int64_t where = 0;
  bool finite = true;
};

// Reads memory once; NaN and infinity are found by their bits, at no cost beside the reading.
static inline Peak find_peak(const float* row, int64_t n) {
  constexpr int64_t BLOCK = 4096;  // what is looked through again for the place
  Peak peak;
  vi magnitude = {};
  for (int64_t start = 0; start < n; start += BLOCK) {
    const int64_t count = n - start < BLOCK ? n - start : BLOCK;
    const float* block = row + start;
    vf most[4] = {splat(NEVER), splat(NEVER), splat(NEVER), splat(NEVER)};
    auto take = [&](vf v, int j) {
      vi bits = (vi)v & 0x7fffffff;
      magnitude = bits > magnitude ? bits : magnitude;
      most[j] = larger(v, most[j]);
    };
    int64_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES)
      for (int j = 0; j < 4; j++) take(load(block + i + j * LANES), j);
    scan(block + i, count - i, block[count - 1], [&](int64_t, vf v) { take(v, 0); });
    const float found = largest_lane(larger(larger(most[0], most[1]), larger(most[2], most[3])));
    if (found > peak.most) peak.most = found, peak.where = start;
  }
  for (int i = 0; i < LANES; i++) peak.finite &= magnitude[i] < 0x7f800000;
  while (peak.where < n - 1 && row[peak.where] != peak.most) peak.where++;
  return peak;
}

// Sums in double, lane by lane.
class Total {
 public:
  void add(vf v) {
    half parts[2];
    memcpy(parts, &v, sizeof v);
    low_ += __builtin_convertvector(parts[0], doubles);
    high_ += __builtin_convertvector(parts[1], doubles);
  }
  double value() const {
    double sum = 0;
    for (int i = 0; i < LANES / 2; i++) sum += low_[i] + high_[i];
    return sum;
  }

 private:
  typedef float half __attribute__((vector_size(2 * LANES)));
  typedef double doubles __attribute__((vector_size(4 * LANES)));
  doubles low_ = {}, high_ = {};
};

// sum of exp(row - most)
static inline double sum_exp(const float* row, int64_t n, float most) {
  Total total;
  scan(row, n, NEVER, [&](int64_t, vf v) { total.add(vec_exp(v - most)); });
  return total.value();
}

// Writes the lanes of v with set bits to `to`, closed up; returns how many. Overwrites LANES numbers.
static inline int64_t close_up(float* to, vf v, uint32_t which) {
#if LANES == 16
  store(to, (vf)_mm512_maskz_compress_ps(which, (__m512)v));
  return __builtin_popcount(which);
#else
  float lanes[LANES];
  store(lanes, v);
  int64_t count = 0;
  for (int i = 0; i < LANES; i++) to[count] = lanes[i], count += which >> i & 1;
  return count;
#endif
}

// Writes those of the row that are at least `floor` to `kept`, in order; returns how many. `kept` has room for LANES
// more. A zero comes out without a sign: the sampler orders numbers by their bits, too.
static inline int64_t gather(const float* row, int64_t n, float floor, float* kept) {
  int64_t count = 0;
  const vf least = splat(floor);
  scan(row, n, NAN, [&](int64_t, vf v) {
    if (const uint32_t which = at_least(v, least)) count += close_up(kept + count, v + 0.0f, which);
  });
  return count;
}
