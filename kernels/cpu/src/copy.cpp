// Copies of whole blocks, and blocks in a plain order for tests and transfers.
#include <cstring>
#include <vector>

#include "kernels.h"
#include "kv_8bit.h"

void run_copy(const CopyArgs& a, int64_t rows, Team& team) {
  const int64_t part = 128 << 10;  // small enough that the threads end together
  const int64_t parts = (a.bytes + part - 1) / part;
  for (int64_t i; (i = team.next()) < rows * parts;) {
    const int64_t row = i / parts, begin = i % parts * part;
    const int64_t bytes = a.bytes - begin < part ? a.bytes - begin : part;
    memcpy(a.target + a.to[row] * a.bytes + begin, a.source + a.from[row] * a.bytes + begin, bytes);
  }
}

namespace {

template <typename T>
void read_plain(const Pool& p, int64_t block, T* out) {
  for (int layer = 0; layer < p.layers; layer++)
    for (int kind = 0; kind < 2; kind++)
      for (int head = 0; head < p.kv_heads; head++) {
        T* part = reinterpret_cast<T*>(kind ? v_part(p, block, layer, head) : k_part(p, block, layer, head));
        for (int offset = 0; offset < p.block_size; offset++) {
          const Lane lane = kind ? v_lane(p, offset) : k_lane(p, offset);
          for (int d = 0; d < p.head_dim; d++) *out++ = part[lane.start + d / 2 * lane.step + d % 2 * lane.pair];
        }
      }
}

template <typename Code, typename T>
void read_codes(const Pool& p, int64_t block, T* out) {
  for (int layer = 0; layer < p.layers; layer++)
    for (int kind = 0; kind < 2; kind++)
      for (int head = 0; head < p.kv_heads; head++)
        for (int offset = 0; offset < p.block_size; offset++) {
          char* part = kind ? v_part(p, block, layer, head) : k_part(p, block, layer, head);
          const CodeLane lane = code_lane(p, part, kind == 1, offset);
          for (int d = 0; d < p.head_dim; d++) write(out++, Code::decode(lane.codes[d * lane.step]) * *lane.scale);
        }
}

}  // namespace

extern "C" {

int32_t orcinus_head_stride(int32_t head_dim);
int64_t orcinus_block_bytes(int32_t layers, int32_t kv_heads, int32_t block_size, int32_t head_dim, int32_t dtype,
                            int32_t codes);

// `out`: [layers, 2 (K, V), kv_heads, block_size, head_dim] of the pool's dtype.
void orcinus_read_block(const Pool* pool, int64_t block, void* out);

}

int32_t orcinus_head_stride(int32_t head_dim) { return padded_head(head_dim); }

int64_t orcinus_block_bytes(int32_t layers, int32_t kv_heads, int32_t block_size, int32_t head_dim, int32_t dtype,
                            int32_t codes) {
  return int64_t(2) * layers * kv_heads * block_size * token_bytes(padded_head(head_dim), dtype, codes);
}

void orcinus_read_block(const Pool* pool, int64_t block, void* out) {
  if (pool->codes)
    return with_code(*pool, [&](auto code) {
      if (pool->dtype == F32) return read_codes<decltype(code)>(*pool, block, static_cast<float*>(out));
      read_codes<decltype(code)>(*pool, block, static_cast<bf16*>(out));
    });
  if (pool->dtype == F32) return read_plain(*pool, block, static_cast<uint32_t*>(out));
  read_plain(*pool, block, static_cast<uint16_t*>(out));
}
