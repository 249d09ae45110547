// Numbers in 8 bits with one scale: keys and values (kv_8bit.h), and the activations of W8A8 (formats/w8a8.h).
//
// Numbers x are held as a float32 scale = max |x| / MAX and as codes: x / scale, at most MAX in size, rounded to the
// nearest number that a code stands for, ties to even.
//   Int8Code  integers, MAX 127
//   Fp8Code   e4m3fn, MAX 448: sign, four bits of exponent with bias 7, three of fraction; denormal numbers below 2^-6
//             (OCP 8-bit Floating Point Specification 1.0, 5.3). The code of its NaN is not written.
// All codes stand for 0 where the scale is 0; the scale is NaN where a number is infinite or NaN. The codes stand for
// code * scale in float32.
#pragma once
#include "vec/vec_exp.h"

typedef int8_t codes8 __attribute__((vector_size(LANES)));

// LANES codes as integers of 32 bits, with their sign.
static inline vi load_codes(const int8_t* p) {
#if LANES == 16
  __m128i bytes;
  memcpy(&bytes, p, sizeof bytes);
  return (vi)_mm512_maskz_cvtepi8_epi32(0xffff, bytes);
#elif LANES == 8
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  codes8 bytes;
  memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, vi);
#endif
}

// A sum with it has no bits below `unit`, and ends in the number of units.
static inline float whole(float unit) { return 12582912.0f * unit; }  // 1.5 * 2^23

struct Int8Code {
  static constexpr float MAX = 127;
  static inline vi encode(vf x) { return (vi)(x + whole(1)) - (vi)splat(whole(1)); }
  static inline vf decode(const int8_t* p) {
#if LANES == 16
    return (vf)_mm512_maskz_cvtepi32_ps(0xffff, (__m512i)load_codes(p));
#elif LANES == 8
    return (vf)_mm256_cvtepi32_ps((__m256i)load_codes(p));
#else
    return __builtin_convertvector(load_codes(p), vf);
#endif
  }
  static inline float decode(int8_t code) { return code; }
};

struct Fp8Code {
  static constexpr float MAX = 448;
  static inline vi encode(vf x) {
    const vu bits = (vu)x, size = bits & 0x7fffffff;
    const vu denormal = (vu)((vf)size + whole(0x1p-9f)) - (vu)splat(whole(0x1p-9f));
    const vu normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);  // 120: the biases' distance
    return (vi)((size < 0x3c800000 ? denormal : normal) | (bits >> 24 & 0x80));  // 2^-6
  }
  // The fields of a code are those of a float16 that is 2^8 times smaller, and of a float32 that is 2^120 times smaller.
  // Codes 1 to 7 are denormal: their conversion from float16 takes no longer, a product of float32 does on some CPUs.
  static inline vf decode(const int8_t* p) {
#if LANES == 16
    __m128i bytes;
    memcpy(&bytes, p, sizeof bytes);
    const vh half = (vh)_mm256_cvtepi8_epi16(bytes) << 7 & 0xbf80;
    return (vf)_mm512_maskz_cvtph_ps(0xffff, (__m256i)half) * 256;
#elif LANES == 8 && defined(__F16C__)
    const vh half = (vh)_mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))) << 7 & 0xbf80;
    return (vf)_mm256_cvtph_ps((__m128i)half) * 256;
#else
    return (vf)(load_codes(p) << 20 & (int32_t)0x87f00000) * 0x1p120f;
#endif
  }
  static inline float decode(int8_t code) {
    const uint32_t bits = uint32_t(int32_t(code)) << 20 & 0x87f00000;
    float x;
    memcpy(&x, &bits, 4);
    return x * 0x1p120f;
  }
};

// The scale of `padded` numbers, a multiple of LANES.
static inline float code_scale(const float* x, int64_t padded, float most_code) {
  vu most = {};  // the bits of |x| ascend as |x| does, those of infinity and NaN come last
  for (int64_t i = 0; i < padded; i += LANES) {
    const vu size = (vu)load(x + i) & 0x7fffffff;
    most = size > most ? size : most;
  }
  uint32_t largest = 0;
  for (int lane = 0; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
  if (largest >= 0x7f800000) return __builtin_nanf("");
  float size;
  memcpy(&size, &largest, 4);
  return size / most_code;
}

template <typename Code>
static inline void encode(const float* x, float scale, int64_t padded, int8_t* codes) {
  const float divisor = scale > 0 ? scale : __builtin_inff();
  for (int64_t i = 0; i < padded; i += LANES) {
    // More than MAX only where the scale is denormal.
    const vf number = vec_max(vec_min(load(x + i) / divisor, splat(Code::MAX)), splat(-Code::MAX));
    const codes8 code = __builtin_convertvector(Code::encode(number), codes8);
    memcpy(codes + i, &code, sizeof code);
  }
}
