// What the machine itself can do, for benches to compare with: reading memory, and multiplying in registers.
#include <omp.h>

#include "ops.h"
#include "tiles.h"

extern "C" {

// Reads `bytes` (a multiple of 64 per thread is used) with `threads` threads; the sum only keeps the reads alive.
float orcinus_read(const float* data, int64_t bytes, int32_t threads);
// Multiplies a DType `rounds` times in registers, by the instructions that gemm.cpp takes for it; returns the floating
// point operations done.
double orcinus_multiply(int32_t dtype, int64_t rounds, int32_t threads);

}

float orcinus_read(const float* data, int64_t bytes, int32_t threads) {
  constexpr int64_t STEP = 4 * LANES;
  const int64_t steps = bytes / 4 / STEP;
  float total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
  {
    const int64_t mine = steps / omp_get_num_threads();
    const float* p = data + mine * omp_get_thread_num() * STEP;
    vf sums[4] = {};
    for (int64_t i = 0; i < mine; i++, p += STEP)
      for (int j = 0; j < 4; j++) sums[j] += load(p + j * LANES);
    const vf sum = sums[0] + sums[1] + sums[2] + sums[3];
    for (int j = 0; j < LANES; j++) total += sum[j];
  }
  return total;
}

namespace {

// Multiply-adds `rounds` times in independent registers; returns the floating point operations of a round.
double multiply_float32(int64_t rounds, float* kept) {
  constexpr int REGISTERS = 12;
  vf a[REGISTERS];
  for (int j = 0; j < REGISTERS; j++) a[j] = splat(float(j + 2));  // all different, and none that stays as it is
  vf x = splat(0.999f), y = splat(0.001f);
  for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 12
    for (int j = 0; j < REGISTERS; j++) a[j] = a[j] * x + y;
  }
  vf sum = a[0];
  for (int j = 1; j < REGISTERS; j++) sum += a[j];
  *kept = sum[0];
  return 2.0 * REGISTERS * LANES;
}

#ifdef TILES
double multiply_bfloat16(int64_t rounds, float* kept) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; tile++) shapes.set(tile, 16, 64);
  Tiles tiles;
  tiles.configure(shapes);
  for (int64_t i = 0; i < rounds; i++) {
    tiles.multiply<0, 4, 6>();
    tiles.multiply<1, 4, 7>();
    tiles.multiply<2, 5, 6>();
    tiles.multiply<3, 5, 7>();
  }
  float sums[16][16];
  tiles.store<0>(sums, sizeof sums[0]);
  tiles.release();
  *kept = sums[0][0];
  return 4 * 2.0 * 16 * 16 * 32;
}
#elif LANES == 16 && defined(__AVX512BF16__)
double multiply_bfloat16(int64_t rounds, float* kept) {
  constexpr int REGISTERS = 12;
  __m512 a[REGISTERS];
  for (int j = 0; j < REGISTERS; j++) a[j] = _mm512_set1_ps(float(j));  // all different
  const __m512bh x = (__m512bh)_mm512_set1_epi32(0x3f803f80), y = (__m512bh)_mm512_set1_epi32(0x3c003c00);
  for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 12
    for (int j = 0; j < REGISTERS; j++) a[j] = _mm512_dpbf16_ps(a[j], x, y);
  }
  vf sum = {};
  for (int j = 0; j < REGISTERS; j++) sum += (vf)a[j];
  *kept = sum[0];
  return 2.0 * REGISTERS * 2 * LANES;
}
#else
double multiply_bfloat16(int64_t rounds, float* kept) { return multiply_float32(rounds, kept); }  // they are widened
#endif

}  // namespace

double orcinus_multiply(int32_t dtype, int64_t rounds, int32_t threads) {
  double done = 0;
#pragma omp parallel num_threads(threads) reduction(+ : done)
  {
    float kept = 0;
    const double operations = dtype == F32 ? multiply_float32(rounds, &kept) : multiply_bfloat16(rounds, &kept);
    done += operations * rounds + (kept == 12345.0f);
  }
  return done;
}
