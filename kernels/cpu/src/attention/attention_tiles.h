// The two products of attention in bfloat16 by tile registers, for up to 16 query rows and one segment of keys.
//
// A score is a sum over steps of 32 dimensions, of 16 where heads are no multiple of 32. An output number is a sum over
// steps of 16 keys. A weight is the sum of two bfloat16, which are multiplied one after the other, so that its error is
// 2^-17 and not 2^-9. Within a step the order is that of TDPBF16PS (tiles.h). Nothing depends on the number of rows.
#pragma once
#include "../tiles.h"
#include "attention_kernel.h"

#ifdef TILES

// Registers: sums in 0 and 1, both parts of the weights in 2 and 3, queries in 4, keys in 5 and 6, values in 7.
class TileProducts {
 public:
  static constexpr int ROWS = 16;

  explicit TileProducts(int64_t stride) : stride_(stride), step_(stride % 32 ? 16 : 32) {}
  ~TileProducts() {
    if (rows_) tiles_.release();
  }

  // s[r][16 c + i] = q[r] . key i of tile c, for `count` tiles from k[0] on; q as pack_query leaves it.
  void scores(const float* q, int rows, const char* const* k, int count, float* s) {
    shape(rows);
    int c = 0;
    for (; c + 1 < count; c += 2) scores<true>(q, k[c], k[c + 1], s + c * TILE);
    if (c < count) scores<false>(q, k[c], nullptr, s + c * TILE);
  }

  // out[r] += sum of weights[r][j] * v[j] over all keys of a segment; v: where each tile of them begins.
  void values(const float* weights, int rows, const char* const* v, float* out) {
    shape(rows);
    bf16 parts[2][ROWS][SEGMENT];
    for (int r = 0; r < rows; r++)
      for (int j = 0; j < SEGMENT; j += LANES) {
        const vf weight = load(weights + r * SEGMENT + j);
        store(&parts[0][r][j], weight);
        store(&parts[1][r][j], weight - load(&parts[0][r][j]));
      }
    int64_t column = 0;
    for (; column + 16 < stride_; column += 32) values<true>(parts[0][0], parts[1][0], v, column, out + column);
    if (column < stride_) values<false>(parts[0][0], parts[1][0], v, column, out + column);
  }

 private:
  void shape(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    TileShapes shapes;
    shapes.set(0, rows, 64), shapes.set(1, rows, 64);
    shapes.set(2, rows, TILE * 2), shapes.set(3, rows, TILE * 2);
    shapes.set(4, rows, step_ * 2), shapes.set(5, step_ / 2, 64), shapes.set(6, step_ / 2, 64);
    shapes.set(7, TILE / 2, 64);
    tiles_.configure(shapes);
  }

  // Of one tile of keys, or of two.
  template <bool TWO>
  void scores(const float* q, const char* first, const char* second, float* s) {
    const char* query = reinterpret_cast<const char*>(q);
    tiles_.zero<0>();
    if (TWO) tiles_.zero<1>();
    for (int64_t d = 0; d < stride_; d += step_, query += step_ * 2) {
      tiles_.load<4>(query, stride_ * 4);
      tiles_.load<5>(first + d * TILE * 2, TILE * 4);
      tiles_.multiply<0, 4, 5>();
      if (TWO) {
        tiles_.load<6>(second + d * TILE * 2, TILE * 4);
        tiles_.multiply<1, 4, 6>();
      }
    }
    tiles_.store<0>(s, SEGMENT * 4);
    if (TWO) tiles_.store<1>(s + TILE, SEGMENT * 4);
  }

  // Of 16 dimensions, or of 32.
  template <bool TWO>
  void values(const bf16* high, const bf16* low, const char* const* v, int64_t column, float* out) {
    const int64_t bytes = stride_ * 4;  // of a row of sums, and of a pair of rows of values
    tiles_.load<0>(out, bytes);
    if (TWO) tiles_.load<1>(out + 16, bytes);
    for (int tile = 0; tile < SEGMENT_TILES; tile++) {
      tiles_.load<2>(high + tile * TILE, SEGMENT * 2);
      tiles_.load<3>(low + tile * TILE, SEGMENT * 2);
      tiles_.load<7>(v[tile] + column * 4, bytes);
      tiles_.multiply<0, 2, 7>();
      tiles_.multiply<0, 3, 7>();
      if (TWO) {
        tiles_.load<7>(v[tile] + (column + 16) * 4, bytes);
        tiles_.multiply<1, 2, 7>();
        tiles_.multiply<1, 3, 7>();
      }
    }
    tiles_.store<0>(out, bytes);
    if (TWO) tiles_.store<1>(out + 16, bytes);
  }

  Tiles tiles_;
  const int64_t stride_, step_;
  int rows_ = 0;
};

#endif
