// The two products of attention in bfloat16 by tile registers, for up to 16 query rows and one segment of keys.
//
// A score is a sum over steps of 32 dimensions, of 16 where heads are no multiple of 32. An output number is a sum over
// steps of keys, whole tiles of V that lie together. A weight is the sum of two bfloat16, which are multiplied one after the other, so that its error is
// 2^-17 and not 2^-9. Within a step the order is that of TDPBF16PS (tiles.h). Nothing depends on the number of rows.
#pragma once
#include "../tiles.h"
#include "attention_kernel.h"

#ifdef TILES

// Registers: sums in 0 .. 3, queries in 4, keys in 5, values in 6, weights in 7.
class TileProducts {
 public:
  static constexpr int ROWS = 16;

  TileProducts(int64_t stride, int step_keys)
      : stride_(stride), step_(stride % 32 ? 16 : 32), step_keys_(step_keys) {}
  ~TileProducts() {
    if (rows_) tiles_.release();
  }

  // s[r][16 c + i] = q[r] . key i of tile c, for `count` tiles from k[0] on, up to SEGMENT_TILES; q as pack_query leaves
  // it.
  void scores(const float* q, int rows, const char* const* k, int count, float* s) {
    static_assert(SEGMENT_TILES == 4, "a register of sums for each tile");
    shape(rows);
    if (count == 4) return scores<4>(q, k, s);
    if (count == 3) return scores<3>(q, k, s);
    if (count == 2) return scores<2>(q, k, s);
    scores<1>(q, k, s);
  }

  // Takes the weights of LANES keys from `at` on for `values`. Denormal parts become zero, as in a product.
  void take(int row, int at, vf weight) {
    const __m256bh high = _mm512_cvtneps_pbh((__m512)weight);
    const vf widened = (vf)(__builtin_convertvector((vh)high, vu) << 16);
    const __m256bh low = _mm512_cvtneps_pbh((__m512)(weight - widened));
    memcpy(&parts_[0][row][at], &high, sizeof high);
    memcpy(&parts_[1][row][at], &low, sizeof low);
  }

  // out[r] += sum of weights[r][j] * v[j] for `rows` rows from row `top` on, over the keys of the steps first .. last - 1
  // of a segment; v: where each tile of its keys begins.
  void values(int top, int rows, int first, int last, const char* const* v, float* out) {
    shape(rows);
    for (int64_t column = 0; column < stride_; column += 64) {
      const int64_t left = stride_ - column;
      if (left >= 64)
        values<4>(top, first, last, v, column, out + column);
      else if (left == 48)
        values<3>(top, first, last, v, column, out + column);
      else if (left == 32)
        values<2>(top, first, last, v, column, out + column);
      else
        values<1>(top, first, last, v, column, out + column);
    }
  }

 private:
  void shape(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    TileShapes shapes;
    for (int sums = 0; sums < 4; sums++) shapes.set(sums, rows, 64);
    shapes.set(4, rows, step_ * 2), shapes.set(5, step_ / 2, 64);
    shapes.set(6, step_keys_ / 2, 64), shapes.set(7, rows, step_keys_ * 2);
    tiles_.configure(shapes);
  }

  template <int COUNT>
  void scores(const float* q, const char* const* k, float* s) {
    const char* query = reinterpret_cast<const char*>(q);
    times<COUNT>([&](auto c) INLINE { tiles_.zero<c>(); });
    for (int64_t d = 0; d < stride_; d += step_, query += step_ * 2) {
      tiles_.load<4>(query, stride_ * 4);
      times<COUNT>([&](auto c) INLINE {
        tiles_.load<5>(k[c] + d * TILE * 2, TILE * 4);
        tiles_.multiply<c, 4, 5>();
      });
    }
    times<COUNT>([&](auto c) INLINE { tiles_.store<c>(s + c * TILE, SEGMENT * 4); });
  }

  // Of 16 * COUNT dimensions.
  template <int COUNT>
  void values(int top, int first, int last, const char* const* v, int64_t column, float* out) {
    const int64_t bytes = stride_ * 4;  // of a row of sums, and of a pair of rows of values
    times<COUNT>([&](auto c) INLINE { tiles_.load<c>(out + c * 16, bytes); });
    for (int step = first; step < last; step++)
      for (int part = 0; part < 2; part++) {
        tiles_.load<7>(&parts_[part][top][step * step_keys_], SEGMENT * 2);
        times<COUNT>([&](auto c) INLINE {
          tiles_.load<6>(v[step * step_keys_ / TILE] + (column + c * 16) * 4, bytes);
          tiles_.multiply<c, 7, 6>();
        });
      }
    times<COUNT>([&](auto c) INLINE { tiles_.store<c>(out + c * 16, bytes); });
  }

  Tiles tiles_;
  const int64_t stride_, step_;  // step_: dimensions of a query that are multiplied at once
  const int step_keys_;
  int rows_ = 0;
  alignas(64) bf16 parts_[2][ROWS][SEGMENT];  // of the weights: rounded, and what that lost
};

#endif
