// The 16-bit float types, and rows of them read and written 16 bytes at a time. Arithmetic is float32.
#pragma once
#include "ptx.cuh"

namespace {

struct bf16 {
  static constexpr bool HALF = false;
  unsigned short bits;
  static __device__ __forceinline__ float widen(unsigned short x) { return bf16_to_float(x); }
  static __device__ __forceinline__ uint32_t pack(float low, float high) { return pack_bf16(low, high); }
};
struct f16 {
  static constexpr bool HALF = true;
  unsigned short bits;
  static __device__ __forceinline__ float widen(unsigned short x) { return f16_to_float(x); }
  static __device__ __forceinline__ uint32_t pack(float low, float high) { return pack_f16(low, high); }
};

constexpr int VECTOR = 8;  // numbers in 16 bytes

template <typename T>
__device__ __forceinline__ void unpack(uint32_t word, float& low, float& high) {
  low = T::widen(static_cast<unsigned short>(word));
  high = T::widen(static_cast<unsigned short>(word >> 16));
}
template <typename T>
__device__ __forceinline__ void unpack(const uint4& words, float (&x)[VECTOR]) {
  unpack<T>(words.x, x[0], x[1]);
  unpack<T>(words.y, x[2], x[3]);
  unpack<T>(words.z, x[4], x[5]);
  unpack<T>(words.w, x[6], x[7]);
}
template <typename T>
__device__ __forceinline__ uint4 pack(const float (&x)[VECTOR]) {
  return make_uint4(T::pack(x[0], x[1]), T::pack(x[2], x[3]), T::pack(x[4], x[5]), T::pack(x[6], x[7]));
}

// Vector i of a row; the row begins at a multiple of 16 bytes.
__device__ __forceinline__ uint4 vector_at(const void* row, int64_t i) { return static_cast<const uint4*>(row)[i]; }
__device__ __forceinline__ uint4& vector_at(void* row, int64_t i) { return static_cast<uint4*>(row)[i]; }

// The 8 float32 numbers of a weight that belong to vector i.
__device__ __forceinline__ void read_floats(const float* row, int64_t i, float (&x)[VECTOR]) {
  const float4* from = reinterpret_cast<const float4*>(row) + 2 * i;
  const float4 low = from[0], high = from[1];
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
  x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

}  // namespace
