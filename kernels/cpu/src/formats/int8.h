// Weights rounded to 8 bits with one scale per output, max |w| / 127. A step is one input; activations stay exact.
#pragma once
#include <algorithm>
#include <cmath>

#include "../tiles.h"
#include "panel.h"

#ifdef TILES
struct Int8Tiles;
#endif

struct Int8 {
  typedef float Input;
  typedef vf Register;
#ifdef TILES
  typedef Int8Tiles ForBfloat16;
#else
  typedef Int8 ForBfloat16;
#endif
  static constexpr const char* NAME = "int8";
  static constexpr int DEPTH = 1, BYTES = WIDTH, PARTS = 1;
  static constexpr bool SCALED = true, ROUNDS = false, GROUPED = false, TILED = false, PREFETCHED = true;

  static Register load_weights(const char* p) {
#if LANES == 16
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return (vf)_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, bytes));
#elif LANES == 8
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    typedef int8_t vb __attribute__((vector_size(LANES)));
    vb bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, vi), vf);
#endif
  }
  static vf part(Register w, int) { return w; }
  static vf add(const float* x, vf w, vf sum) { return fused(splat(*x), w, sum); }

  // The scale of an output with numbers up to `largest`.
  static float scale(float largest) { return largest / 127; }
  static void pack(char* step, int64_t column, const float* numbers, float inverse) {
    reinterpret_cast<int8_t*>(step)[column] = int8_t(std::clamp<long>(std::lrintf(*numbers * inverse), -127, 127));
  }
  static void unpack(const char* step, int64_t column, float* numbers) {
    *numbers = reinterpret_cast<const int8_t*>(step)[column];
  }
};

#ifdef TILES
// The same packed form: some inputs at a time become bfloat16, exactly, and are multiplied by tiles.
struct Int8Tiles : Int8 {
  typedef bf16 Input;
  static constexpr bool TILED = true, IN_PLACE = false;
  static constexpr int AHEAD = 2048;  // bytes of a panel that are fetched before they are unpacked

  // `count` inputs of a panel from `step` on as pairs, [count / 2][WIDTH][2]; behind an odd number there is a zero.
  static void unpack_pairs(const char* step, int64_t count, char* out) {
    for (int64_t k = 0; k < count; k += 2)
      for (int h = 0; h < 2; h++, out += LANES * 4) {
        const char* numbers = step + k * WIDTH + h * LANES;
        if (h == 0) __builtin_prefetch(numbers + AHEAD);
        const vu even = (vu)load_weights(numbers) >> 16;
        const vu pairs = k + 1 < count ? even | (vu)load_weights(numbers + WIDTH) : even;
        memcpy(out, &pairs, sizeof pairs);
      }
  }
};
#endif
