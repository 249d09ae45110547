// Rows found by number: embedding, rows that sample, KV blocks. Numbers below zero are padding: nothing is written;
// of tokens only PADDING is.
//
// Grid: x rows, y pieces of a row of `threads` vectors each; for blocks x pairs, y pieces of COPIED * threads vectors
// of a part, z parts.
#include "numbers.cuh"

struct EmbedParams {
  const void* table;           // [vocabulary, hidden]
  const void* places;          // [positions, hidden] or null
  void* out;                   // [rows, hidden]
  const int32_t* tokens;       // [rows]; ~s, below zero, stands for last_tokens[s]
  const int32_t* positions;    // [rows]; not read without places
  const int32_t* last_tokens;  // [slots]
  int32_t hidden;              // a multiple of 8
  float scale;
};

struct SelectParams {
  const void* x;        // [any, width] of 16-bit numbers
  void* out;            // [rows, width]
  const int32_t* rows;  // [rows]
  int32_t width;        // a multiple of 8
};

// Strides, sizes and addresses are multiples of 16 bytes. A block is one part of part_bytes or several.
struct CopyParams {
  const void* source;
  void* target;
  const int32_t* from;  // [pairs] blocks of source; null: 0, 1, 2 ...
  const int32_t* to;    // [pairs] blocks of target; null: 0, 1, 2 ...
  int64_t source_stride;
  int64_t target_stride;
  int64_t source_part_stride;
  int64_t target_part_stride;
  int64_t part_bytes;
};

namespace {

constexpr int THREADS = 256;
constexpr int COPIED = 4;  // vectors of a thread, all read before the first is written
constexpr int32_t PADDING = -2147483647 - 1;

__device__ __forceinline__ int32_t token_of(const EmbedParams& p, int64_t row) {
  const int32_t id = p.tokens[row];
  return id >= 0 || id == PADDING ? id : p.last_tokens[~id];
}

template <typename T>
__device__ __forceinline__ void embed(const EmbedParams& p) {
  const int vectors = p.hidden / VECTOR, i = blockIdx.y * blockDim.x + threadIdx.x;
  const int64_t row = blockIdx.x, token = token_of(p, row);
  if (i >= vectors || token < 0) return;
  float x[VECTOR];
  unpack<T>(vector_at(p.table, token * vectors + i), x);
#pragma unroll
  for (int k = 0; k < VECTOR; k++) x[k] *= p.scale;
  if (p.places) {
    float place[VECTOR];
    unpack<T>(vector_at(p.places, static_cast<int64_t>(p.positions[row]) * vectors + i), place);
#pragma unroll
    for (int k = 0; k < VECTOR; k++) x[k] += place[k];
  }
  vector_at(p.out, row * vectors + i) = pack<T>(x);
}

__device__ __forceinline__ void select_row(const SelectParams& p) {
  const int vectors = p.width / VECTOR, i = blockIdx.y * blockDim.x + threadIdx.x;
  const int64_t row = blockIdx.x, from = p.rows[row];
  if (i >= vectors || from < 0) return;
  vector_at(p.out, row * vectors + i) = vector_at(p.x, from * vectors + i);
}

__device__ __forceinline__ void copy_pair(const CopyParams& p) {
  const int64_t pair = blockIdx.x, from = p.from ? p.from[pair] : pair, to = p.to ? p.to[pair] : pair;
  if (from < 0 || to < 0) return;
  const char* source = static_cast<const char*>(p.source) + from * p.source_stride + blockIdx.z * p.source_part_stride;
  char* target = static_cast<char*>(p.target) + to * p.target_stride + blockIdx.z * p.target_part_stride;
  const int64_t vectors = p.part_bytes / 16;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * blockDim.x * COPIED + threadIdx.x;
  uint4 held[COPIED];
#pragma unroll
  for (int j = 0; j < COPIED; j++)
    if (first + j * blockDim.x < vectors) held[j] = vector_at(source, first + j * blockDim.x);
#pragma unroll
  for (int j = 0; j < COPIED; j++)
    if (first + j * blockDim.x < vectors) vector_at(target, first + j * blockDim.x) = held[j];
}

}  // namespace

KERNEL(embed_bf16, EmbedParams, THREADS, embed<bf16>)
KERNEL(embed_f16, EmbedParams, THREADS, embed<f16>)
KERNEL(select_rows, SelectParams, THREADS, select_row)
KERNEL(copy_blocks, CopyParams, THREADS, copy_pair)
