// What the machine itself can do, for benches to compare with: reading memory, and multiplying in registers.
#include <omp.h>

#include "vec.h"

extern "C" {

// Reads `bytes` (a multiple of 64 per thread is used) with `threads` threads; the sum only keeps the reads alive.
float orcinus_read(const float* data, int64_t bytes, int32_t threads);
// Multiply-adds `rounds` times in 24 independent registers per thread; returns the floating point operations done.
double orcinus_multiply(int64_t rounds, int32_t threads);

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

double orcinus_multiply(int64_t rounds, int32_t threads) {
  double done = 0;
#pragma omp parallel num_threads(threads) reduction(+ : done)
  {
    constexpr int REGISTERS = 12;
    vf a[REGISTERS];
    for (int j = 0; j < REGISTERS; j++) a[j] = splat(float(j));
    vf x = splat(0.999f), y = splat(0.001f);
    for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 12
      for (int j = 0; j < REGISTERS; j++) a[j] = a[j] * x + y;
    }
    vf sum = a[0];
    for (int j = 1; j < REGISTERS; j++) sum += a[j];
    done += 2.0 * REGISTERS * LANES * rounds + (sum[0] == 12345.0f);
  }
  return done;
}
