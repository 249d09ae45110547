// Activations of single numbers, plain and gated, and the sum of a row and the residual. A thread has 8 numbers.
//
// Grid: x rows, y pieces of a row of `threads` vectors each.
#include "activations.cuh"

struct ActivationParams {
  const void* x;       // gated: [rows, 2 width], else [rows, width]
  void* out;           // [rows, width]; may be x when not gated
  int32_t width;       // a multiple of 8
  int32_t activation;  // one of those above
};

struct AddParams {
  const void* x;   // [rows, width]
  void* residual;  // [rows, width], x is added to it in place
  int32_t width;   // a multiple of 8
};

namespace {

constexpr int THREADS = 256;

template <typename T, bool gated, int kind>
__device__ __forceinline__ void activate_as(const ActivationParams& p) {
  const int vectors = p.width / VECTOR, i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i >= vectors) return;
  const int64_t row = blockIdx.x;
  float x[VECTOR], up[VECTOR];
  unpack<T>(vector_at(p.x, row * (gated ? 2 : 1) * vectors + i), x);
  if (gated) unpack<T>(vector_at(p.x, (row * 2 + 1) * vectors + i), up);
#pragma unroll
  for (int k = 0; k < VECTOR; k++) {
    x[k] = activated<kind>(x[k]);
    if (gated) x[k] *= up[k];
  }
  vector_at(p.out, row * vectors + i) = pack<T>(x);
}

template <typename T, bool gated>
__device__ __forceinline__ void activate(const ActivationParams& p) {
  switch (p.activation) {
    case SILU: return activate_as<T, gated, SILU>(p);
    case GELU: return activate_as<T, gated, GELU>(p);
    case GELU_TANH: return activate_as<T, gated, GELU_TANH>(p);
    default: return activate_as<T, gated, RELU>(p);
  }
}

template <typename T>
__device__ __forceinline__ void add(const AddParams& p) {
  const int vectors = p.width / VECTOR, i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i >= vectors) return;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * vectors + i;
  float x[VECTOR], sum[VECTOR];
  unpack<T>(vector_at(p.x, at), x);
  unpack<T>(vector_at(p.residual, at), sum);
#pragma unroll
  for (int k = 0; k < VECTOR; k++) sum[k] += x[k];
  vector_at(p.residual, at) = pack<T>(sum);
}

}  // namespace

KERNEL(gated_bf16, ActivationParams, THREADS, activate<bf16, true>)
KERNEL(gated_f16, ActivationParams, THREADS, activate<f16, true>)
KERNEL(activate_bf16, ActivationParams, THREADS, activate<bf16, false>)
KERNEL(activate_f16, ActivationParams, THREADS, activate<f16, false>)
KERNEL(add_bf16, AddParams, THREADS, add<bf16>)
KERNEL(add_f16, AddParams, THREADS, add<f16>)
