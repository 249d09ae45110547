// RMSNorm and LayerNorm of rows, with the residual added first where there is one. One block per row.
#include "numbers.cuh"

struct NormParams {
  const void* x;        // [rows, hidden]
  void* residual;       // [rows, hidden], x is added to it in place; or null
  void* out;            // [rows, hidden]; may be x
  const float* weight;  // [hidden]
  const float* bias;    // [hidden] or null
  int32_t hidden;       // a multiple of 8, at most 8 * HELD * threads
  float eps;
};

namespace {

constexpr int THREADS = 1024;
constexpr int HELD = 4;  // vectors of a row that a thread keeps: nothing is read twice
constexpr int WARPS = HELD * THREADS / 32;  // as many as have one vector a lane

// Adds up x of the 32 vectors that a warp has; vector: this lane's. Sums of warps are added by `total`, so that the
// order of additions depends on the row's size alone and not on the number of threads.
__device__ __forceinline__ void add_up(float x, int vector, float* partial) {
#pragma unroll
  for (int other = 16; other; other /= 2) x += __shfl_xor_sync(0xffffffffu, x, other);
  if (vector % 32 == 0) partial[vector / 32] = x;
}

// The sum of a row, the same bits in all threads.
__device__ __forceinline__ float total(const float* partial, int vectors) {
  __syncthreads();
  float x = 0.0f;
  for (int i = threadIdx.x % 32; i * 32 < vectors; i += 32) x += partial[i];
#pragma unroll
  for (int other = 16; other; other /= 2) x += __shfl_xor_sync(0xffffffffu, x, other);
  return x;
}

template <typename T, bool layer_norm>
__device__ __forceinline__ void norm(const NormParams& p) {
  SHARED(float, sums, WARPS);
  SHARED(float, squares, WARPS);
  const int vectors = p.hidden / VECTOR;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * vectors;
  uint4 held[HELD];
  float x[VECTOR], y[VECTOR];
#pragma unroll
  for (int j = 0; j < HELD; j++) {  // all are on the way before the first is looked at
    const int i = j * blockDim.x + threadIdx.x;
    if (i < vectors) held[j] = vector_at(p.x, first + i);
  }
#pragma unroll
  for (int j = 0; j < HELD; j++) {
    if (j * blockDim.x >= static_cast<unsigned>(vectors)) break;
    const int i = j * blockDim.x + threadIdx.x;
    float sum = 0.0f, square = 0.0f;
    if (i < vectors) {
      unpack<T>(held[j], x);
      if (p.residual) {
        unpack<T>(vector_at(p.residual, first + i), y);
#pragma unroll
        for (int k = 0; k < VECTOR; k++) x[k] += y[k];
        held[j] = pack<T>(x);
        vector_at(p.residual, first + i) = held[j];
        unpack<T>(held[j], x);  // as it was stored
      }
#pragma unroll
      for (int k = 0; k < VECTOR; k++) {
        sum += x[k];
        square += x[k] * x[k];
      }
    }
    add_up(layer_norm ? sum : square, i, layer_norm ? sums : squares);
  }
  float mean = 0.0f;
  if (layer_norm) {
    mean = total(sums, vectors) / p.hidden;
#pragma unroll
    for (int j = 0; j < HELD; j++) {
      if (j * blockDim.x >= static_cast<unsigned>(vectors)) break;
      const int i = j * blockDim.x + threadIdx.x;
      float square = 0.0f;  // about the mean: beside a large one, the difference of two sums has no digits left
      if (i < vectors) {
        unpack<T>(held[j], x);
#pragma unroll
        for (int k = 0; k < VECTOR; k++) square += (x[k] - mean) * (x[k] - mean);
      }
      add_up(square, i, squares);
    }
  }
  const float scale = rsqrtf(total(squares, vectors) / p.hidden + p.eps);
#pragma unroll
  for (int j = 0; j < HELD; j++) {
    const int i = j * blockDim.x + threadIdx.x;
    if (i >= vectors) continue;
    unpack<T>(held[j], x);
    read_floats(p.weight, i, y);
#pragma unroll
    for (int k = 0; k < VECTOR; k++) x[k] = (x[k] - mean) * scale * y[k];
    if (p.bias) {
      read_floats(p.bias, i, y);
#pragma unroll
      for (int k = 0; k < VECTOR; k++) x[k] += y[k];
    }
    vector_at(p.out, first + i) = pack<T>(x);
  }
}

}  // namespace

KERNEL(rms_norm_bf16, NormParams, THREADS, norm<bf16, false>)
KERNEL(rms_norm_f16, NormParams, THREADS, norm<f16, false>)
KERNEL(layer_norm_bf16, NormParams, THREADS, norm<bf16, true>)
KERNEL(layer_norm_f16, NormParams, THREADS, norm<f16, true>)
