// Where a number lies inside a block of the KV pool (Pool of ops.h). The only file that knows, with kv_8bit.h for pools
// of 8 bits: their tiles have codes and scales in place of numbers.
//
// A block: [layer][K part, V part][KV head]. One KV head's part holds block_size x head_stride numbers; those at
// head_dim and behind are 0 wherever a position was written. Tokens are grouped in tiles of 16:
//   K, float32   [tile][head_stride][16]         transposed, so that 16 scores fill one register
//   K, bfloat16  [tile][head_stride / 2][16][2]  two dimensions of a token side by side
//   V, float32   [block_size][head_stride]
//   V, bfloat16  [block_size / 2][head_stride][2]  two tokens side by side
// Pairs of bfloat16 are a 32-bit word each, which a shift and a mask widen: half the work of widening a row.
// A tile of K and the same tile of V have the same size in bytes.
#pragma once
#include "ops.h"

static const int TILE = 16;

static inline int64_t item_bytes(int32_t dtype) { return dtype == F32 ? 4 : 2; }

static inline int32_t padded_head(int32_t head_dim) { return (head_dim + 15) / 16 * 16; }

// Of one token's K or V.
static inline int64_t token_bytes(int64_t head_stride, int32_t dtype, int32_t codes) {
  return codes ? head_stride + int64_t(sizeof(float)) : head_stride * item_bytes(dtype);
}
static inline int64_t part_bytes(const Pool& p) {
  return p.block_size * token_bytes(p.head_stride, p.dtype, p.codes);
}
static inline int64_t tile_bytes(const Pool& p) { return TILE * token_bytes(p.head_stride, p.dtype, p.codes); }

// K of a block, layer and KV head; V lies kv_heads parts behind it.
static inline char* k_part(const Pool& p, int64_t block, int layer, int kv_head) {
  return p.blocks + block * p.block_bytes + (int64_t(2) * layer * p.kv_heads + kv_head) * part_bytes(p);
}
static inline char* v_part(const Pool& p, int64_t block, int layer, int kv_head) {
  return k_part(p, block, layer, kv_head) + p.kv_heads * part_bytes(p);
}

// Index, within a part, of the first number of the token at `offset`, and the distance between its numbers.
struct Lane {
  int64_t start;
  int64_t pair;  // distance from dimension 2 i to 2 i + 1
  int64_t step;  // distance from dimension 2 i to 2 i + 2
};
static inline Lane k_lane(const Pool& p, int64_t offset) {
  const int64_t tile = offset / TILE * TILE * p.head_stride;
  if (p.dtype == F32) return {tile + offset % TILE, TILE, 2 * TILE};
  return {tile + offset % TILE * 2, 1, 2 * TILE};
}
static inline Lane v_lane(const Pool& p, int64_t offset) {
  if (p.dtype == F32) return {offset * p.head_stride, 1, 2};
  return {offset / 2 * 2 * p.head_stride + offset % 2, 2, 4};
}
