// Between the QKV matrix and attention: bias, split, norm of each head, rotary positions, K and V into their blocks.
//
// A warp has one head of one row, in shared memory as float32: a number and its partner may be in different lanes.
// Grid: x as many warps as there are heads of q, k and v in all rows. Dynamic shared memory: warps * head_dim floats.
#include "numbers.cuh"

struct RopeParams {
  const void* qkv;           // [rows, (heads + 2 kv_heads) * head_dim]: q, k, v
  void* q;                   // [rows, heads * head_dim]
  void* keys;                // this layer's K of block 0: [kv_heads, block_size, head_dim]
  void* values;              // this layer's V of block 0, the same
  const float* bias;         // [(heads + 2 kv_heads) * head_dim] or null
  const float* angles;       // [positions, rotary]: cosines, then sines; or null
  const float* q_norm;       // [head_dim] or null
  const float* k_norm;       // [head_dim] or null
  const int32_t* positions;  // [rows]; not read without angles
  const int32_t* slots;      // [rows] block * block_size + place in it; below zero: padding, no K and V are written
  int64_t block_stride;      // numbers from a block's K to the next block's
  int32_t rows;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;    // a multiple of 8
  int32_t block_size;  // tokens
  int32_t rotary;      // even, at most head_dim
  float q_eps;
  float k_eps;
};

namespace {

constexpr int THREADS = 256;
constexpr int PIECE = 4;  // numbers in 8 bytes: a lane's share of a head of 128

// x of the head's number i after the rotation; element i < rotary / 2 is paired with i + rotary / 2.
__device__ __forceinline__ float rotated(const float* x, int i, const float* angles, int half) {
  if (i >= 2 * half) return x[i];
  const int angle = i < half ? i : i - half;
  const float c = angles[angle], s = angles[half + angle];
  return i < half ? x[i] * c - x[i + half] * s : x[i] * c + x[angle] * s;
}

// The same for the PIECE numbers from i on, where a piece and its partners are pieces: half is a multiple of PIECE.
__device__ __forceinline__ float4 rotated_piece(const float* x, int i, const float* angles, int half) {
  float4 v = *reinterpret_cast<const float4*>(x + i);
  if (i >= 2 * half) return v;
  const int angle = i < half ? i : i - half;
  const float4 w = *reinterpret_cast<const float4*>(x + (i < half ? i + half : angle));
  const float4 c = *reinterpret_cast<const float4*>(angles + angle);
  float4 s = *reinterpret_cast<const float4*>(angles + half + angle);
  if (i < half) s = make_float4(-s.x, -s.y, -s.z, -s.w);
  return make_float4(v.x * c.x + w.x * s.x, v.y * c.y + w.y * s.y, v.z * c.z + w.z * s.z, v.w * c.w + w.w * s.w);
}

template <typename T>
__device__ __forceinline__ void rope_and_write(const RopeParams& p) {
  DYNAMIC_SHARED(float, heads_of_block);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int all_heads = p.heads + 2 * p.kv_heads, pieces = p.head_dim / PIECE;
  const unsigned index = blockIdx.x * (blockDim.x / 32) + warp;  // 32 bits: to divide 64 takes longer than all else
  const unsigned row_of_32 = index / all_heads;
  if (row_of_32 >= static_cast<unsigned>(p.rows)) return;
  const int64_t row = row_of_32;
  const int head = index - row_of_32 * all_heads;
  const bool is_q = head < p.heads, is_v = head >= p.heads + p.kv_heads;
  const int slot = is_q ? 0 : p.slots[row];
  if (slot < 0) return;
  float* x = heads_of_block + warp * p.head_dim;
  const uint2* from = static_cast<const uint2*>(p.qkv) + static_cast<int64_t>(index) * pieces;  // heads of a row lie one after another
  float square = 0.0f;
  for (int piece = lane; piece < pieces; piece += 32) {
    const uint2 words = from[piece];
    float4 v;
    unpack<T>(words.x, v.x, v.y);
    unpack<T>(words.y, v.z, v.w);
    if (p.bias) {
      const float4 b = reinterpret_cast<const float4*>(p.bias)[head * pieces + piece];
      v.x += b.x, v.y += b.y, v.z += b.z, v.w += b.w;
    }
    square += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    reinterpret_cast<float4*>(x)[piece] = v;
  }
  const float* weight = is_v ? nullptr : is_q ? p.q_norm : p.k_norm;
  if (weight) {
#pragma unroll
    for (int other = 16; other; other /= 2) square += __shfl_xor_sync(0xffffffffu, square, other);
    const float scale = rsqrtf(square / p.head_dim + (is_q ? p.q_eps : p.k_eps));
    for (int piece = lane; piece < pieces; piece += 32) {
      float4& v = reinterpret_cast<float4*>(x)[piece];
      const float4 w = reinterpret_cast<const float4*>(weight)[piece];
      v = make_float4(v.x * (scale * w.x), v.y * (scale * w.y), v.z * (scale * w.z), v.w * (scale * w.w));
    }
  }
  __syncwarp();
  const int half = is_v || !p.angles ? 0 : p.rotary / 2;
  const float* angles = half ? p.angles + static_cast<int64_t>(p.positions[row]) * p.rotary : nullptr;
  uint2* to;
  if (is_q) {
    to = static_cast<uint2*>(p.q) + (row * p.heads + head) * pieces;
  } else {
    const int kv_head = is_v ? head - p.heads - p.kv_heads : head - p.heads;
    T* base = static_cast<T*>(is_v ? p.values : p.keys) + slot / p.block_size * p.block_stride;
    to = reinterpret_cast<uint2*>(base) + (static_cast<int64_t>(kv_head) * p.block_size + slot % p.block_size) * pieces;
  }
  for (int piece = lane; piece < pieces; piece += 32) {
    const int i = piece * PIECE;
    const float4 v = half % PIECE == 0 ? rotated_piece(x, i, angles, half)
                                       : make_float4(rotated(x, i, angles, half), rotated(x, i + 1, angles, half),
                                                     rotated(x, i + 2, angles, half), rotated(x, i + 3, angles, half));
    to[piece] = make_uint2(T::pack(v.x, v.y), T::pack(v.z, v.w));
  }
}

}  // namespace

KERNEL(rope_and_write_bf16, RopeParams, THREADS, rope_and_write<bf16>)
KERNEL(rope_and_write_f16, RopeParams, THREADS, rope_and_write<f16>)
