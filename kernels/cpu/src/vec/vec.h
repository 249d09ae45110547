// Vectors of float32 as wide as the machine's registers, bfloat16 at the border, and the functions over them.
//
// Compiled once per instruction set: 16 lanes with AVX-512, 8 with AVX2 (16-lane vectors there would spill), 4 else.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#if LANES == 16
#include <immintrin.h>
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef uint16_t bf16;  // the bits of a bfloat16

static inline vf splat(float x) { return x - vf{}; }

static inline vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
static inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }

static inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
// To nearest, ties to even; NaN stays NaN.
static inline bf16 narrow(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return bf16(bits >> 16 | 0x40);
  return bf16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline vf load(const bf16* p) {
  vh h;
  memcpy(&h, p, sizeof h);
#if LANES == 16  // g++ 12 makes five instructions of the general line
  return (vf)((vu)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)h) << 16);
#else
  return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}
static inline void store(bf16* p, vf v) {
#if LANES == 16  // the numbers of the general lines below; the machine's conversion would lose denormals
  const vu u = (vu)v;
  const __m512i nearest = (__m512i)((u + 0x7fff + (u >> 16 & 1)) >> 16), quiet = (__m512i)(u >> 16 | 0x40);
  const __mmask16 broken = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
  const __m256i narrowed = _mm512_maskz_cvtepi32_epi16(0xffff, _mm512_mask_mov_epi32(nearest, broken, quiet));
  memcpy(p, &narrowed, sizeof narrowed);
#else
  vu bits = (vu)v;
  vu rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  vu nan = bits >> 16 | 0x40;
  vu is_nan = (vu)((bits & 0x7fffffff) > 0x7f800000u);
  vh h = __builtin_convertvector((is_nan & nan) | (~is_nan & rounded), vh);
  memcpy(p, &h, sizeof h);
#endif
}

static inline float read(const float* p) { return *p; }
static inline float read(const bf16* p) { return widen(*p); }
static inline void write(float* p, float x) { *p = x; }
static inline void write(bf16* p, float x) { *p = narrow(x); }
