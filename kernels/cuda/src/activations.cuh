// The activations of single numbers, in float32.
#pragma once
#include "numbers.cuh"

enum { SILU, GELU, GELU_TANH, RELU };

namespace {

template <int kind>
__device__ __forceinline__ float activated(float x) {
  if (kind == SILU) return __fdividef(x, 1.0f + __expf(-x));
  if (kind == GELU) return 0.5f * x * erfcf(x * -0.70710678f);
  if (kind == GELU_TANH)  // (1 + tanh y) / 2 is the sigmoid of 2 y
    return __fdividef(x, 1.0f + __expf(-1.5957691216f * x * (1.0f + 0.044715f * x * x)));
  return x < 0.0f ? 0.0f : x;  // NaN stays
}

}  // namespace
