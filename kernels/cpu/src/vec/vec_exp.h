// exp and 2^x over vectors of float32, for the softmax, the activations and the sampler.
//
// Error below 1.5 ulp; results too small for a normal number are denormal, then 0. -inf gives exactly 0, what is too
// large inf, NaN stays NaN. Products and sums are fused explicitly: the same number comes out wherever this is inlined.
#pragma once
#include "vec.h"

#if LANES > 4 || defined(__FMA__)
#include <immintrin.h>
#endif

// a * b + c with one rounding where the machine can.
static inline vf multiply_add(vf a, vf b, vf c) {
#if LANES == 16
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8 && defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// The larger and the smaller; `b` where one of them is NaN.
static inline vf vec_max(vf a, vf b) {
#if LANES == 16
  return (vf)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);  // without the mask g++ 12 warns of its header
#elif LANES == 8
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
static inline vf vec_min(vf a, vf b) {
#if LANES == 16
  return (vf)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b);
#elif LANES == 8
  return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

// p * 2^n for whole numbers n of -300 .. 300, which `shifted` holds as its low bits behind 1.5 * 2^23.
static inline vf scale_by_power(vf p, vf n, vf shifted) {
#if LANES == 16
  (void)shifted;
  return (vf)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)n);
#else
  (void)n;
  // In two steps, because 2^n may be too large or too small for a normal number where p * 2^n is not.
  vi whole = (vi)shifted - 0x4b400000;
  vi half = whole >> 1;
  vf first = (vf)((vu)(half + 127) << 23);
  vf second = (vf)((vu)(whole - half + 127) << 23);
  return p * first * second;
#endif
}

// The polynomials are minimax in relative error (Remez), 3e-9 each.
static inline vf vec_exp(vf x) {
  x = vec_min(splat(90.0f), vec_max(splat(-105.0f), x));
  const vf shift = splat(12582912.0f);  // adding 1.5 * 2^23 rounds to a whole number
  vf shifted = multiply_add(x, splat(1.44269504f), shift);
  vf n = shifted - shift;
  vf r = multiply_add(n, splat(-0.693359375f), x);
  r = multiply_add(n, splat(2.12194440e-4f), r);
  vf p = multiply_add(splat(1.381459865e-3f), r, splat(8.36871688e-3f));
  p = multiply_add(p, r, splat(4.166838805e-2f));
  p = multiply_add(p, r, splat(1.666652063e-1f));
  p = multiply_add(p, r, splat(4.999999345e-1f));
  p = multiply_add(p, r, splat(1.0f));
  p = multiply_add(p, r, splat(1.0f));
  return scale_by_power(p, n, shifted);
}

static inline vf vec_exp2(vf x) {
  x = vec_min(splat(129.0f), vec_max(splat(-151.0f), x));
  const vf shift = splat(12582912.0f);
  vf shifted = x + shift;
  vf n = shifted - shift;
  vf r = x - n;
  vf p = multiply_add(splat(1.559468508e-4f), r, splat(1.340664691e-3f));
  p = multiply_add(p, r, splat(9.617692939e-3f));
  p = multiply_add(p, r, splat(5.550310543e-2f));
  p = multiply_add(p, r, splat(2.402265278e-1f));
  p = multiply_add(p, r, splat(6.93147215e-1f));
  p = multiply_add(p, r, splat(1.0f));
  return scale_by_power(p, n, shifted);
}

// cap * tanh(x / cap); the absolute error is below cap times 2e-7.
static inline vf vec_softcap(vf x, float cap) {
  const vf away = splat(2.0f * cap) / (1.0f + vec_exp(x * (2.0f / cap)));
  return cap - away;
}
