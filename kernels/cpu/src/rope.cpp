// Splits qkv, norms and rotates the heads of q and k, and writes k and v into the pool.
//
// A head is brought to float32, worked on there and rounded once when it is written.
#include <cmath>

#include "kernels.h"
#include "kv_8bit.h"
#include "vec/vec_exp.h"

namespace {

// Rows of a prompt that follow each other share a tile of K, and with it cache lines: one thread should have them all.
// Few rows are decodes, each in a separate block.
int64_t rows_per_piece(int64_t rows, int threads) { return rows >= TILE * 2 * threads ? TILE : 4; }

// x / sqrt(mean(x^2) + eps) * weight over one head.
void norm_head(float* x, const float* weight, int64_t size, float eps) {
  vf squares{};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) squares = multiply_add(load(x + i), load(x + i), squares);
  float sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += squares[lane];
  for (; i < size; i++) sum += x[i] * x[i];
  const float factor = 1.0f / sqrtf(sum / size + eps);
  for (i = 0; i < size; i++) x[i] = x[i] * factor * weight[i];
}

void rotate_head(float* x, const float* rope, int64_t rotary) {
  const int64_t half = rotary / 2;
  const float *cosines = rope, *sines = rope + half;
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    const vf a = load(x + i), b = load(x + half + i), c = load(cosines + i), s = load(sines + i);
    store(x + i, multiply_add(a, c, -(b * s)));
    store(x + half + i, multiply_add(b, c, a * s));
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[half + i], c = cosines[i], s = sines[i];
    x[i] = a * c - b * s;
    x[half + i] = b * c + a * s;
  }
}

template <typename T>
void read_head(const T* from, float* x, int64_t size, int64_t padded) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) store(x + i, load(from + i));
  for (; i < size; i++) x[i] = read(from + i);
  for (; i < padded; i++) x[i] = 0;
}

template <typename T>
void write_head(T* to, const float* x, int64_t size) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) store(to + i, load(x + i));
  for (; i < size; i++) write(to + i, x[i]);
}

// `padded` numbers, the padding's zeros with them.
template <typename T>
void write_lane(char* part, Lane lane, const float* x, int64_t padded) {
  T* to = reinterpret_cast<T*>(part) + lane.start;
  if (lane.step == 2 && lane.pair == 1) return write_head(to, x, padded);
  for (int64_t i = 0; i < padded; i += 2, to += lane.step) {
    write(to, x[i]);
    write(to + lane.pair, x[i + 1]);
  }
}

// K or V of one token; `codes`: memory for `head_stride` of them.
template <typename T>
void write_token(const Pool& pool, char* part, bool is_value, int64_t offset, const float* x, int8_t* codes) {
  if (pool.codes)
    return with_code(pool, [&](auto code) { write_codes<decltype(code)>(pool, part, is_value, offset, x, codes); });
  write_lane<T>(part, is_value ? v_lane(pool, offset) : k_lane(pool, offset), x, pool.head_stride);
}

template <typename T>
void rope(const RopeArgs& a, const Step& step, int64_t rows, Team& team) {
  const Pool& pool = *a.pool;
  const int64_t size = pool.head_dim, padded = pool.head_stride;
  const int64_t heads = a.heads, kv_heads = pool.kv_heads;
  float* x = reinterpret_cast<float*>(team.scratch(padded * (sizeof(float) + 1)));
  int8_t* codes = reinterpret_cast<int8_t*>(x + padded);
  const int64_t most = rows_per_piece(rows, team.threads()), pieces = (rows + most - 1) / most;
  for (int64_t piece; (piece = team.next()) < pieces;) {
    const int64_t end = rows < (piece + 1) * most ? rows : (piece + 1) * most;
    for (int64_t row = piece * most; row < end; row++) {
      const T* from = static_cast<const T*>(a.qkv) + row * (heads + 2 * kv_heads) * size;
      const float* angles = a.rope ? a.rope + step.positions[row] * int64_t(a.rotary) : nullptr;
      T* q = static_cast<T*>(a.q) + row * heads * size;
      for (int64_t head = 0; head < heads; head++, from += size, q += size) {
        read_head(from, x, size, padded);
        if (a.q_norm) norm_head(x, a.q_norm, size, a.eps);
        if (angles) rotate_head(x, angles, a.rotary);
        write_head(q, x, size);
      }
      const int64_t block = step.write_blocks[row], offset = step.write_offsets[row];
      for (int head = 0; head < kv_heads; head++, from += size) {
        read_head(from, x, size, padded);
        if (a.k_norm) norm_head(x, a.k_norm, size, a.eps);
        if (angles) rotate_head(x, angles, a.rotary);
        write_token<T>(pool, k_part(pool, block, a.layer, head), false, offset, x, codes);
      }
      for (int head = 0; head < kv_heads; head++, from += size) {
        read_head(from, x, size, padded);
        write_token<T>(pool, v_part(pool, block, a.layer, head), true, offset, x, codes);
      }
    }
  }
}

}  // namespace

void run_rope(const RopeArgs& a, const Step& step, int64_t rows, Team& team) {
  if (a.dtype == F32) return rope<float>(a, step, rows, team);
  rope<bf16>(a, step, rows, team);
}
