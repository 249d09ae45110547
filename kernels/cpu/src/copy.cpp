// Copies of whole blocks, and blocks in a plain order for tests and transfers.
#include <cstring>
#include <vector>

#include "kernels.h"
#include "kv_int8.h"

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

// Calls move(place in the block, place in plain order) for each number that a model sees.
template <typename T, typename Move>
void each_number(const Pool& p, int64_t block, Move move) {
  int64_t plain = 0;
  for (int layer = 0; layer < p.layers; layer++)
    for (int kind = 0; kind < 2; kind++)
      for (int head = 0; head < p.kv_heads; head++) {
        T* part = reinterpret_cast<T*>(kind ? v_part(p, block, layer, head) : k_part(p, block, layer, head));
        for (int offset = 0; offset < p.block_size; offset++) {
          const Lane lane = kind ? v_lane(p, offset) : k_lane(p, offset);
          for (int d = 0; d < p.head_stride; d++) {
            const bool padding = d >= p.head_dim;
            move(part[lane.start + d / 2 * lane.step + d % 2 * lane.pair], plain, padding);
            plain += !padding;
          }
        }
      }
}

template <typename T>
void read_plain(const Pool& p, int64_t block, T* out) {
  each_number<T>(p, block, [&](T& number, int64_t plain, bool padding) {
    if (!padding) out[plain] = number;
  });
}

template <typename T>
void write_plain(const Pool& p, int64_t block, const T* in) {
  each_number<T>(p, block, [&](T& number, int64_t plain, bool padding) { number = padding ? T(0) : in[plain]; });
}

// Calls move(part, whether of V, offset, plain numbers) for each token's K and V of a pool of 8 bits.
template <typename T, typename Move>
void each_token(const Pool& p, int64_t block, T* plain, Move move) {
  for (int layer = 0; layer < p.layers; layer++)
    for (int kind = 0; kind < 2; kind++)
      for (int head = 0; head < p.kv_heads; head++)
        for (int offset = 0; offset < p.block_size; offset++, plain += p.head_dim)
          move(kind ? v_part(p, block, layer, head) : k_part(p, block, layer, head), kind == 1, offset, plain);
}

template <typename T>
void read_int8(const Pool& p, int64_t block, T* out) {
  each_token(p, block, out, [&](char* part, bool is_value, int offset, T* plain) {
    const Int8Lane lane = int8_lane(p, part, is_value, offset);
    for (int d = 0; d < p.head_dim; d++) write(plain + d, lane.codes[d * lane.step] * *lane.scale);
  });
}

template <typename T>
void write_int8(const Pool& p, int64_t block, const T* in) {
  std::vector<float> x(p.head_stride);
  std::vector<int8_t> codes(p.head_stride);
  each_token(p, block, in, [&](char* part, bool is_value, int offset, const T* plain) {
    for (int d = 0; d < p.head_dim; d++) x[d] = read(plain + d);
    write_int8(p, part, is_value, offset, x.data(), codes.data());
  });
}

}  // namespace

extern "C" {

int32_t orcinus_head_stride(int32_t head_dim);
int64_t orcinus_block_bytes(int32_t layers, int32_t kv_heads, int32_t block_size, int32_t head_dim, int32_t dtype,
                            int32_t int8);

// `out`, `in`: [layers, 2 (K, V), kv_heads, block_size, head_dim] of the pool's dtype; a pool of 8 bits rounds `in`.
void orcinus_read_block(const Pool* pool, int64_t block, void* out);
void orcinus_write_block(const Pool* pool, int64_t block, const void* in);

}

int32_t orcinus_head_stride(int32_t head_dim) { return padded_head(head_dim); }

int64_t orcinus_block_bytes(int32_t layers, int32_t kv_heads, int32_t block_size, int32_t head_dim, int32_t dtype,
                            int32_t int8) {
  return int64_t(2) * layers * kv_heads * block_size * token_bytes(padded_head(head_dim), dtype, int8);
}

void orcinus_read_block(const Pool* pool, int64_t block, void* out) {
  if (pool->int8 && pool->dtype == F32) return read_int8(*pool, block, static_cast<float*>(out));
  if (pool->int8) return read_int8(*pool, block, static_cast<bf16*>(out));
  if (pool->dtype == F32) return read_plain(*pool, block, static_cast<uint32_t*>(out));
  read_plain(*pool, block, static_cast<uint16_t*>(out));
}

void orcinus_write_block(const Pool* pool, int64_t block, const void* in) {
  if (pool->int8 && pool->dtype == F32) return write_int8(*pool, block, static_cast<const float*>(in));
  if (pool->int8) return write_int8(*pool, block, static_cast<const bf16*>(in));
  if (pool->dtype == F32) return write_plain(*pool, block, static_cast<const uint32_t*>(in));
  write_plain(*pool, block, static_cast<const uint16_t*>(in));
}
