// W8A8: weights in 8 bits with one float32 scale per output, multiplied by activations that are rounded to 8 bits, each
// row with one scale (codes.h). Groups of kernels/ops.py says what an output is. A step is 4 inputs; their numbers, 128
// above the weights, lie together in 32 bits of each output.
//
// Products and sums are integers. A sum of row r has 128 * (the sum of r's codes) too much, which gemm.cpp takes off. It
// may wrap in between; what is left fits into 32 bits with up to 2^31 / (127 * 128) = 132,104 inputs. So every order gives
// the same number, and each instruction set has the same bits: VPDPBUSD with AVX-512 VNNI, else VPMADDWD over pairs of
// 16-bit numbers.
#pragma once
#include "panel.h"

struct W8A8 {
  typedef W8A8 ForBfloat16;
  static constexpr const char* NAME = "w8a8";
  static constexpr int DEPTH = 4, BYTES = 4 * WIDTH, PARTS = 1;
  static constexpr bool SCALED = true, ROUNDS = true, GROUPED = false, TILED = false, PREFETCHED = true;

  static vu load_words(const char* p) {
    vu words;
    memcpy(&words, p, sizeof words);
    return words;
  }

  // The registers of sums hold integers: zero has the same bits.
#if LANES == 16 && defined(__AVX512VNNI__)
  typedef int8_t Input;
  typedef vu Register;
  static constexpr int SHIFTS[] = {0, 8, 16, 24};  // where a word has each of its inputs

  static Register load_weights(const char* p) { return load_words(p); }
  static Register part(Register w, int) { return w; }
  static vf add(const int8_t* x, Register w, vf sum) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return (vf)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(four));
  }
#elif LANES > 4
  typedef int16_t Input;
  struct Register {
    vu first, last;  // pairs of inputs, 16 bits each
  };
  static constexpr int SHIFTS[] = {0, 16, 8, 24};

  static Register load_weights(const char* p) {
    const vu words = load_words(p);
    return {words & 0x00ff00ff, words >> 8 & 0x00ff00ff};
  }
  static Register part(Register w, int) { return w; }
  static vf add(const int16_t* x, Register w, vf sum) {
    return (vf)((vu)sum + products(x, w.first) + products(x + 2, w.last));
  }
  static vu products(const int16_t* x, vu pairs) {
    int32_t two;
    memcpy(&two, x, sizeof two);
#if LANES == 16
    return (vu)_mm512_maskz_madd_epi16(0xffff, (__m512i)pairs, _mm512_set1_epi32(two));
#else
    return (vu)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi32(two));
#endif
  }
#else
  typedef int8_t Input;
  typedef vu Register;
  static constexpr int SHIFTS[] = {0, 8, 16, 24};

  static Register load_weights(const char* p) { return load_words(p); }
  static Register part(Register w, int) { return w; }
  static vf add(const int8_t* x, Register w, vf sum) {
    vu found = (vu)sum;
    for (int i = 0; i < DEPTH; i++) found += (w >> SHIFTS[i] & 255) * uint32_t(x[i]);
    return (vf)found;
  }
#endif

  // `place`: of an output in its panel. `count` numbers, DEPTH at most; those behind them stand for 0.
  static void pack(char* step, int64_t place, const uint8_t* numbers, int64_t count) {
    uint32_t word = 0;
    for (int i = 0; i < DEPTH; i++) word |= uint32_t(i < count ? numbers[i] : 128) << SHIFTS[i];
    memcpy(step + place * 4, &word, 4);
  }
  static void unpack(const char* step, int64_t place, float* numbers) {
    uint32_t word;
    memcpy(&word, step + place * 4, 4);
    for (int i = 0; i < DEPTH; i++) numbers[i] = float(word >> SHIFTS[i] & 255) - 128;
  }
};
