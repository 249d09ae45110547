// Between the QKV matrix and attention: bias, split, norm of each head, rotary positions, K and V into their blocks.
//
// Some lanes of a warp have one head of one row. Each takes two vectors of it, a number and its partner in the rotation
// at the same place in both, and has both on the way before it looks at either.
// Grid: x so many blocks that every head of q, k and v in all rows has 1 << lane_bits threads.
#include "fp8.cuh"

struct RopeParams {
  const void* qkv;           // [rows, (heads + 2 kv_heads) * head_dim]: q, k, v
  void* q;                   // [rows, heads * head_dim]
  void* keys;                // this layer's K of block 0: [kv_heads, block_size, head_dim]; fp8: slabs (fp8.cuh)
  void* values;              // this layer's V of block 0, the same
  const float* bias;         // [(heads + 2 kv_heads) * head_dim] or null
  const float* angles;       // [positions, rotary]: cosines, then sines; or null
  const float* q_norm;       // [head_dim] or null
  const float* k_norm;       // [head_dim] or null
  const int32_t* positions;  // [rows]; not read without angles
  const int32_t* slots;      // [rows] block * block_size + place in it; below zero: padding, no K and V are written
  int64_t block_stride;      // numbers from a block's K to the next block's; fp8: bytes
  int32_t rows;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;    // a multiple of 8
  int32_t block_size;  // tokens
  int32_t rotary;      // even, at most head_dim
  int32_t lane_bits;   // a head has 1 << lane_bits lanes, of two vectors each or fewer
  float q_eps;
  float k_eps;
};

namespace {

constexpr int THREADS = 256;

// A head before it is rotated.
struct Head {
  const void* numbers;  // [head_dim]
  const float* bias;    // [head_dim] or null
  const float* weight;  // [head_dim] of its norm, or null
  float scale;          // of its norm

  template <typename T>
  __device__ __forceinline__ void read(int vector, float (&x)[VECTOR]) const {
    unpack<T>(vector_at(numbers, vector), x);
    if (!bias) return;
    float b[VECTOR];
    read_floats(bias, vector, b);
#pragma unroll
    for (int k = 0; k < VECTOR; k++) x[k] += b[k];
  }

  __device__ __forceinline__ void norm(int vector, float (&x)[VECTOR]) const {
    float w[VECTOR];
    read_floats(weight, vector, w);
#pragma unroll
    for (int k = 0; k < VECTOR; k++) x[k] *= scale * w[k];
  }

  // Number i, normed where there is a norm.
  template <typename T>
  __device__ __forceinline__ float at(int i) const {
    float x = T::widen(static_cast<const unsigned short*>(numbers)[i]);
    if (bias) x += bias[i];
    return weight ? x * (scale * weight[i]) : x;
  }
};

// Rotates the numbers of vector `at` and their partners. angles: cosines of the pairs, then sines.
__device__ __forceinline__ void rotate(float (&a)[VECTOR], float (&b)[VECTOR], const float* angles, int at, int half) {
  float c[VECTOR], s[VECTOR];
  read_floats(angles, at, c);
  read_floats(angles + half, at, s);
#pragma unroll
  for (int k = 0; k < VECTOR; k++) {
    const float x = a[k], y = b[k];
    a[k] = x * c[k] - y * s[k];
    b[k] = y * c[k] + x * s[k];
  }
}

// The same, number by number, for heads in which half a head does not fill whole vectors. The vector begins with number
// `first`; partners are read once more.
template <typename T>
__device__ __forceinline__ void rotate_alone(float (&x)[VECTOR], const Head& head, const float* angles, int first,
                                             int half) {
#pragma unroll
  for (int k = 0; k < VECTOR; k++) {
    const int i = first + k;
    if (i >= 2 * half) continue;
    const int angle = i < half ? i : i - half;
    const float c = angles[angle], s = angles[half + angle];
    x[k] = i < half ? x[k] * c - head.at<T>(i + half) * s : x[k] * c + head.at<T>(angle) * s;
  }
}

// Writes two vectors of a head of K or V in 8 bits; lane 0 writes the scale. size: of the head's largest number.
__device__ __forceinline__ void write_codes(const RopeParams& p, int slot, bool is_v, int kv_head, uint32_t size,
                                            int first, const float (&a)[VECTOR], int second, bool has_second,
                                            const float (&b)[VECTOR], int lane) {
  const int place = slot % p.block_size, token = place % SLAB;
  const int64_t slab = static_cast<int64_t>(kv_head) * (p.block_size / SLAB) + place / SLAB;
  unsigned char* base = static_cast<unsigned char*>(is_v ? p.values : p.keys) + slot / p.block_size * p.block_stride +
                        slab * coded_slab(p.head_dim);
  uint2* to = reinterpret_cast<uint2*>(base) + token * (p.head_dim / VECTOR);
  const float scale = scale_of(size);
  to[first] = encode(a, scale);
  if (has_second) to[second] = encode(b, scale);
  if (lane == 0) reinterpret_cast<float*>(base + SLAB * p.head_dim)[token] = scale;
}

template <typename T, bool FP8 = false>
__device__ __forceinline__ void rope_and_write(const RopeParams& p) {
  const int all_heads = p.heads + 2 * p.kv_heads, vectors = p.head_dim / VECTOR;
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x, index = thread >> p.lane_bits;
  const unsigned row_of_32 = index / all_heads;  // 32 bits: to divide 64 takes longer than all else
  const bool is_there = row_of_32 < static_cast<unsigned>(p.rows);
  const int64_t row = is_there ? row_of_32 : 0;
  const int head = is_there ? index - row_of_32 * all_heads : 0, lane = thread & ((1 << p.lane_bits) - 1);
  const bool is_q = head < p.heads, is_v = head >= p.heads + p.kv_heads;
  const int slot = is_q ? 0 : p.slots[row], half = is_v || !p.angles ? 0 : p.rotary / 2;
  const float* angles = half ? p.angles + static_cast<int64_t>(p.positions[row]) * p.rotary : nullptr;

  // Vectors `first` and `second`: partners if both halves are whole numbers of vectors; else, and beyond them, any two.
  const bool by_vectors = half % VECTOR == 0;
  const int pairs = by_vectors ? half / VECTOR : 0, rest = (vectors - 2 * pairs + 1) / 2;
  const bool is_pair = lane < pairs;
  const int first = is_pair ? lane : pairs + lane, second = first + (is_pair ? pairs : rest);
  const bool has_first = is_there && (is_pair || lane - pairs < rest), has_second = has_first && second < vectors;

  Head from = {static_cast<const uint4*>(p.qkv) + (row * all_heads + head) * vectors,
               p.bias ? p.bias + head * p.head_dim : nullptr, is_v ? nullptr : is_q ? p.q_norm : p.k_norm, 0.0f};
  float a[VECTOR] = {}, b[VECTOR] = {};
  if (has_first) from.read<T>(first, a);
  if (has_second) from.read<T>(second, b);
  if (p.q_norm || p.k_norm) {
    float square = 0.0f;
#pragma unroll
    for (int k = 0; k < VECTOR; k++) square += a[k] * a[k] + b[k] * b[k];
    for (int other = 1 << p.lane_bits >> 1; other; other /= 2) square += __shfl_xor_sync(0xffffffffu, square, other);
    from.scale = rsqrtf(square / p.head_dim + (is_q ? p.q_eps : p.k_eps));
    if (from.weight && has_first) from.norm(first, a);
    if (from.weight && has_second) from.norm(second, b);
  }
  const bool is_written = has_first && slot >= 0;
  if (!FP8 && !is_written) return;
  if (is_written && is_pair) {
    rotate(a, b, angles, first, half);
  } else if (is_written && !by_vectors) {
    rotate_alone<T>(a, from, angles, first * VECTOR, half);
    if (has_second) rotate_alone<T>(b, from, angles, second * VECTOR, half);
  }
  if constexpr (FP8) {
    uint32_t size = 0;
#pragma unroll
    for (int k = 0; k < VECTOR; k++) size = larger_size(larger_size(size, a[k]), b[k]);
    for (int other = 1 << p.lane_bits >> 1; other; other /= 2)
      size = max(size, __shfl_xor_sync(0xffffffffu, size, other));
    if (!is_written) return;
    if (!is_q) {
      const int kv_head = is_v ? head - p.heads - p.kv_heads : head - p.heads;
      return write_codes(p, slot, is_v, kv_head, size, first, a, second, has_second, b, lane);
    }
  }
  uint4* to;
  if (is_q) {
    to = static_cast<uint4*>(p.q) + (row * p.heads + head) * vectors;
  } else {
    const int kv_head = is_v ? head - p.heads - p.kv_heads : head - p.heads;
    T* base = static_cast<T*>(is_v ? p.values : p.keys) + slot / p.block_size * p.block_stride;
    to = reinterpret_cast<uint4*>(base) + (static_cast<int64_t>(kv_head) * p.block_size + slot % p.block_size) * vectors;
  }
  to[first] = pack<T>(a);
  if (has_second) to[second] = pack<T>(b);
}

}  // namespace

KERNEL(rope_and_write_bf16, RopeParams, THREADS, rope_and_write<bf16>)
KERNEL(rope_and_write_f16, RopeParams, THREADS, rope_and_write<f16>)
KERNEL(rope_and_write_fp8_bf16, RopeParams, THREADS, rope_and_write<bf16, true>)
KERNEL(rope_and_write_fp8_f16, RopeParams, THREADS, rope_and_write<f16, true>)
