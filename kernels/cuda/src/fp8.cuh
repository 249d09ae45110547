// K and V in 8 bits: codes of e4m3fn and a float32 scale for each token and KV head, of K and of V each.
//
// With x the head_dim numbers: scale = max |x| / 448, code = x / scale to the nearest, ties to even; a code stands for
// code * scale in float32, rounded to the type that attention reads (CacheShape of kernels/ops.py). The scale is NaN
// where a number is infinite or NaN. A slab of a KV head, SLAB tokens, lies in one piece: codes [SLAB][head_dim], then
// scales [SLAB].
// The weights of fp8 checkpoints are such codes, too, with scales of their own (linear_packed.cu).
#pragma once
#include "numbers.cuh"

namespace {

constexpr int SLAB = 16;
constexpr int SCALE_BYTES = 4;
constexpr float MAX_CODE = 448.0f;

// Bytes of a slab.
__device__ __forceinline__ int coded_slab(int head_dim) { return SLAB * (head_dim + SCALE_BYTES); }

// The larger of `size` and the bits of |x|, which ascend as |x| does; those of infinity and NaN come last.
__device__ __forceinline__ uint32_t larger_size(uint32_t size, float x) {
  return max(size, __float_as_uint(x) & 0x7fffffffu);
}

// size: of the largest number.
__device__ __forceinline__ float scale_of(uint32_t size) {
  return size >= 0x7f800000u ? __uint_as_float(0x7fffffffu) : __uint_as_float(size) / MAX_CODE;
}

// The code of a number, already divided by its scale.
__device__ __forceinline__ uint32_t code_of(float x) {
  const uint32_t bits = __float_as_uint(x), size = min(bits & 0x7fffffffu, 0x43e00000u);  // 448
  // Below 2^-6 codes are multiples of 2^-9, the last bit of a sum with 1.5 * 2^14.
  const uint32_t denormal = __float_as_uint(__uint_as_float(size) + 24576.0f) - 0x46c00000u;
  const uint32_t normal = ((size + 0x7ffffu + (size >> 20 & 1)) >> 20) - (120u << 3);  // 120: between the biases
  return (size < 0x3c800000u ? denormal : normal) | (bits >> 24 & 0x80u);
}

__device__ __forceinline__ uint2 encode(const float (&x)[VECTOR], float scale) {
  const float divisor = scale > 0.0f ? scale : __uint_as_float(0x7f800000u);
  uint32_t words[2] = {};
#pragma unroll
  for (int k = 0; k < VECTOR; k++) words[k / 4] |= code_of(x[k] / divisor) << k % 4 * 8;
  return make_uint2(words[0], words[1]);
}

// Two codes, each in the upper byte of a half of the word, as two numbers of T with the fields of the codes: those of
// float16 are 2^8 times smaller than what the codes stand for, those of bfloat16 2^120 times. Codes of NaN become 480.
template <typename T>
__device__ __forceinline__ uint32_t fields(uint32_t codes);
template <>
__device__ __forceinline__ uint32_t fields<f16>(uint32_t codes) {
  return (codes & 0x80008000u) | (codes >> 1 & 0x3f803f80u);
}
template <>
__device__ __forceinline__ uint32_t fields<bf16>(uint32_t codes) {
  return (codes & 0x80008000u) | (codes >> 4 & 0x07f007f0u);
}

// Two such codes as float32 numbers that are 2^8 times smaller.
__device__ __forceinline__ void decode(uint32_t codes, float& low, float& high) {
  unpack<f16>(fields<f16>(codes), low, high);
}

// The numbers of eight codes of a token.
template <typename T>
__device__ __forceinline__ uint4 widen(uint2 codes, float scale) {
  float x[VECTOR];
  decode((codes.x & 0xffu) << 8 | (codes.x & 0xff00u) << 16, x[0], x[1]);
  decode((codes.x >> 8 & 0xff00u) | (codes.x & 0xff000000u), x[2], x[3]);
  decode((codes.y & 0xffu) << 8 | (codes.y & 0xff00u) << 16, x[4], x[5]);
  decode((codes.y >> 8 & 0xff00u) | (codes.y & 0xff000000u), x[6], x[7]);
#pragma unroll
  for (int k = 0; k < VECTOR; k++) x[k] *= 256.0f * scale;
  return pack<T>(x);
}

}  // namespace
