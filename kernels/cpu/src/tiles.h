// Tile registers of AMX with the one instruction that is needed of them, TDPBF16PS, and the two by which a lone row is
// multiplied in the same order, chain_pair and flushed; or their twins in plain C++.
//
// The twin is compiled with -DTILES_TWIN, for tests on CPUs without AMX. It has the bits of the instruction
// (tests/kernels/cpu/test_tiles.py compares recorded ones) and traps where the CPU would raise an exception. TILES is
// defined where either is there.
#pragma once
#include "formats/panel.h"

#if LANES == 16 && defined(__AVX512BF16__) && (defined(TILES_TWIN) || (defined(__AMX_TILE__) && defined(__AMX_BF16__)))
#define TILES 1

// Rows and bytes a row of each tile register, as LDTILECFG reads them; 0 rows: the register is not used.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t rows_of_tile, int64_t bytes) {
    rows[tile] = uint8_t(rows_of_tile);
    row_bytes[tile] = uint16_t(bytes);
  }
};

#ifdef TILES_TWIN

// Denormal numbers become zero; the sign stays.
inline vf flushed(vf x) {
  const vu bits = (vu)x, denormal = (vu)((bits & 0x7fffffff) < 0x00800000u);
  return (vf)(bits & ~(denormal & 0x7fffffff));
}
inline vf flushed_fma(vf a, vf b, vf sum) {
  return flushed((vf)_mm512_fmadd_ps((__m512)flushed(a), (__m512)flushed(b), (__m512)flushed(sum)));
}

// Sums plus, for each output, x[1] times the upper half of its pair, then plus x[0] times the lower half: VDPBF16PS as
// CPUs with AMX have it. Each is a fused multiply-add; denormal numbers count as zero and become zero.
inline vf chain_pair(const bf16* x, vu pairs, vf sums) {
  sums = flushed_fma(splat(widen(x[1])), (vf)(pairs & 0xffff0000u), sums);
  return flushed_fma(splat(widen(x[0])), (vf)(pairs << 16), sums);
}

class Tiles {
 public:
  // Every register becomes zero, as it does in the CPU.
  void configure(const TileShapes& shapes) {
    shapes_ = shapes;
    memset(numbers_, 0, sizeof numbers_);
  }
  void release() { configure(TileShapes()); }
  template <int T>
  void zero() {
    memset(numbers_[T], 0, sizeof numbers_[T]);
  }
  template <int T>
  void load(const void* from, int64_t stride) {
    check(shapes_.rows[T] > 0);
    zero<T>();
    for (int r = 0; r < shapes_.rows[T]; r++)
      memcpy(numbers_[T][r], static_cast<const char*>(from) + r * stride, shapes_.row_bytes[T]);
  }
  template <int T>
  void store(void* to, int64_t stride) const {
    check(shapes_.rows[T] > 0);
    for (int r = 0; r < shapes_.rows[T]; r++)
      memcpy(static_cast<char*>(to) + r * stride, numbers_[T][r], shapes_.row_bytes[T]);
  }

  // c[m][n] += a[m][2 k] * b[k][n][0] + a[m][2 k + 1] * b[k][n][1] over k: the two products of k belong to two chains of
  // fused multiply-adds from zero; their sum is added to c. Denormal numbers count as zero and become zero.
  template <int C, int A, int B>
  void multiply() {
    const int rows = shapes_.rows[C], pairs = shapes_.rows[B];
    check(rows > 0 && pairs > 0 && shapes_.rows[A] == rows && shapes_.row_bytes[A] == 4 * pairs);
    check(shapes_.row_bytes[B] == shapes_.row_bytes[C]);
    for (int m = 0; m < rows; m++) {
      vf even = {}, odd = {};
      for (int k = 0; k < pairs; k++) {
        vu pair;
        memcpy(&pair, numbers_[B][k], sizeof pair);
        even = flushed_fma(splat(input(A, m, 2 * k)), (vf)(pair << 16), even);
        odd = flushed_fma(splat(input(A, m, 2 * k + 1)), (vf)(pair & 0xffff0000u), odd);
      }
      float* const sums = reinterpret_cast<float*>(numbers_[C][m]);
      ::store(sums, flushed(flushed(::load(sums)) + flushed(even + odd)));
    }
  }

 private:
  static void check(bool right) {
    if (!right) __builtin_trap();
  }
  float input(int tile, int row, int column) const {
    bf16 number;
    memcpy(&number, numbers_[tile][row] + column * sizeof number, sizeof number);
    return widen(number);
  }

  TileShapes shapes_;
  alignas(64) char numbers_[8][16][64] = {};
};

#else

inline vf flushed(vf x) { return (vf)_mm512_dpbf16_ps((__m512)x, __m512bh{}, __m512bh{}); }
inline vf chain_pair(const bf16* x, vu pairs, vf sums) { return dot_pair(x, pairs, sums); }

class Tiles {
 public:
  void configure(const TileShapes& shapes) { asm volatile("ldtilecfg\t%0" ::"m"(shapes)); }
  void release() { asm volatile("tilerelease"); }
  template <int T>
  void zero() {
    asm volatile("tilezero\t%%tmm%c0" ::"i"(T));
  }
  template <int T>
  void load(const void* from, int64_t stride) {
    asm volatile("tileloadd\t(%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  void store(void* to, int64_t stride) const {
    asm volatile("tilestored\t%%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
  }
  template <int C, int A, int B>
  void multiply() {
    asm volatile("tdpbf16ps\t%%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

#endif
#endif
