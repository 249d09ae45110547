// Where a number lies inside a block of the KV pool (Pool of ops.h). The only file that knows.
//
// A block: [layer][K part, V part]. K part of one KV head, float32: [head_stride][block_size], transposed, so that the
// scores of 16 tokens fill one register without a horizontal sum. V part: [block_size][head_stride].
#pragma once
#include "ops.h"

static inline int64_t item_bytes(int32_t dtype) { return dtype == F32 ? 4 : 2; }

static inline int64_t part_bytes(const Pool& p) {
  return int64_t(p.block_size) * p.head_stride * item_bytes(p.dtype);
}
// K of a block, layer and KV head; V lies kv_heads parts behind it.
static inline char* k_part(const Pool& p, int64_t block, int layer, int kv_head) {
  return p.blocks + block * p.block_bytes + (int64_t(2) * layer * p.kv_heads + kv_head) * part_bytes(p);
}
static inline char* v_part(const Pool& p, int64_t block, int layer, int kv_head) {
  return k_part(p, block, layer, kv_head) + p.kv_heads * part_bytes(p);
}
