// Weights as they are. A step is one input.
#pragma once
#include "panel.h"

struct Float32 {
  typedef float Input;
  typedef vf Register;
  typedef Float32 ForBfloat16;
  static constexpr const char* NAME = "float32";
  static constexpr int DEPTH = 1, BYTES = 4 * WIDTH, PARTS = 1;
  static constexpr bool SCALED = false, ROUNDS = false, GROUPED = false, TILED = false, PREFETCHED = true;

  static Register load_weights(const char* p) { return load(reinterpret_cast<const float*>(p)); }
  static vf part(Register w, int) { return w; }
  static vf add(const float* x, vf w, vf sum) { return fused(splat(*x), w, sum); }

  static void pack(char* step, int64_t column, const float* numbers, float) {
    reinterpret_cast<float*>(step)[column] = *numbers;
  }
  static void unpack(const char* step, int64_t column, float* numbers) {
    *numbers = reinterpret_cast<const float*>(step)[column];
  }
};
