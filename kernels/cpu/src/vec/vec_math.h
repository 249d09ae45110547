// What activations are made of, and vectors at the end of a row.
#pragma once
#include "vec_exp.h"

// The first n numbers, 0 < n <= LANES, and zeros after them; and back.
template <typename T>
static inline vf load_part(const T* p, int64_t n) {
  if (n == LANES) return load(p);
  T padded[LANES] = {};
  memcpy(padded, p, n * sizeof(T));
  return load(padded);
}
template <typename T>
static inline void store_part(T* p, vf v, int64_t n) {
  if (n == LANES) return store(p, v);
  T whole[LANES];
  store(whole, v);
  memcpy(p, whole, n * sizeof(T));
}

// The standard normal distribution function, (1 + erf(x / sqrt 2)) / 2; relative error below 1e-6 (4e-6 without FMA),
// far tails included. For a = |x|, Phi(-a) = exp(-a^2 / 2) t P(t) with t = 1 / (1 + 0.3 a); P is minimax in relative
// error on 0 <= a <= 14 (Remez, 3.5e-9).
static inline vf vec_normal_cdf(vf x) {
  vf a = x < 0.0f ? -x : x;
  a = a > 14.5f ? splat(14.5f) : a;  // the rest is 0, and a^2 stays finite
  vf t = 1.0f / multiply_add(splat(0.3f), a, splat(1.0f));
  vf p = multiply_add(splat(-0.02061281317f), t, splat(0.1123756904f));
  p = multiply_add(p, t, splat(-0.2280673078f));
  p = multiply_add(p, t, splat(0.1915814224f));
  p = multiply_add(p, t, splat(-0.07924711673f));
  p = multiply_add(p, t, splat(0.09605771221f));
  p = multiply_add(p, t, splat(0.07842561901f));
  p = multiply_add(p, t, splat(0.1102273158f));
  p = multiply_add(p, t, splat(0.1195728422f));
  p = multiply_add(p, t, splat(0.119686634f));
  vf square = a * a;
  vf lost = multiply_add(a, a, -square);  // what rounding took from a^2; it matters where exp is steep
  vf power = vec_exp(-0.5f * square);
  vf tail = multiply_add(power * lost, splat(-0.5f), power) * (t * p);
  return x < 0.0f ? tail : 1.0f - tail;
}
