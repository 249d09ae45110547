// The inner loop of the linear layers by tile registers: up to 32 rows of bfloat16 activations times one panel.
//
// Every output number is a sum over steps of 32 inputs in ascending order. The products of a step are two chains, those
// of the even and those of the odd inputs, as TDPBF16PS has them (tiles.h). Neither the number of rows nor where the sums
// rest in memory between two steps touches that order.
#pragma once
#include <algorithm>

#include "formats/panel.h"
#include "tiles.h"

constexpr int64_t TILED_ROWS = 32;  // that are multiplied together: two registers
constexpr int64_t TILE_STEP = 32;   // inputs of a register

// Copies a row to where TileKernel reads it: its steps lie 16 * TILE_STEP numbers apart, those of 16 rows beside it
// between them, so that a register is loaded from memory that lies together. Padding to whole steps is zero.
inline void copy_tiled(const bf16* from, int64_t inputs, bf16* to) {
  for (; inputs >= TILE_STEP; inputs -= TILE_STEP, from += TILE_STEP, to += 16 * TILE_STEP)
    memcpy(to, from, TILE_STEP * sizeof *to);
  if (inputs == 0) return;
  memset(to, 0, TILE_STEP * sizeof *to);
  memcpy(to, from, inputs * sizeof *to);
}

#ifndef TILES
class TileKernel;  // no format is TILED
#else

static_assert(WIDTH == 32, "a panel is two registers of weights side by side");

// Registers: sums of the upper and the lower rows with each half of the panel in 0 .. 3, rows in 4 and 5, weights in 6
// and 7.
class TileKernel {
 public:
  ~TileKernel() {
    if (rows_) tiles_.release();
  }

  // sums[r][o] of `rows` rows, WIDTH apart, with a panel of `inputs` inputs, an even number: pairs of the inputs of an
  // output lie together. Rows are as copy_tiled has them, the lower 16 `lower` numbers behind the upper. `resume`: sums
  // hold what earlier inputs gave.
  void multiply(const bf16* x, int64_t lower, const char* panel, int64_t inputs, int64_t rows, float* sums,
                bool resume) {
    const int64_t steps = inputs / TILE_STEP, rest = inputs % TILE_STEP;
    if (steps) run(x, lower, panel, steps, TILE_STEP, rows, sums, resume);
    if (rest)
      run(x + steps * X_STEP, lower, panel + steps * TILE_STEP * WIDTH * 2, 1, rest, rows, sums, resume || steps);
  }

 private:
  static constexpr int64_t X_STEP = 16 * TILE_STEP;                                              // numbers
  static constexpr int64_t X_STRIDE = TILE_STEP * 2, SUMS_STRIDE = WIDTH * 4, PANEL_STRIDE = WIDTH * 4;  // bytes

  void run(const bf16* x, int64_t lower, const char* panel, int64_t steps, int64_t inputs, int64_t rows, float* sums,
           bool resume) {
    shape(rows, inputs);
    if (rows > 16)
      run<true>(x, lower, panel, steps, sums, resume);
    else
      run<false>(x, lower, panel, steps, sums, resume);
  }

  void shape(int64_t rows, int64_t inputs) {
    if (rows == rows_ && inputs == inputs_) return;
    rows_ = rows, inputs_ = inputs;
    const int64_t upper = std::min<int64_t>(rows, 16), lower = rows - upper;
    TileShapes shapes;
    shapes.set(0, upper, 64), shapes.set(1, upper, 64), shapes.set(4, upper, 2 * inputs);
    if (lower) shapes.set(2, lower, 64), shapes.set(3, lower, 64), shapes.set(5, lower, 2 * inputs);
    shapes.set(6, inputs / 2, 64), shapes.set(7, inputs / 2, 64);
    tiles_.configure(shapes);
  }

  template <bool LOWER>
  void run(const bf16* x, int64_t lower, const char* panel, int64_t steps, float* sums, bool resume) {
    float* const lower_sums = sums + 16 * WIDTH;
    if (resume) {
      tiles_.load<0>(sums, SUMS_STRIDE);
      tiles_.load<1>(sums + 16, SUMS_STRIDE);
      if (LOWER) {
        tiles_.load<2>(lower_sums, SUMS_STRIDE);
        tiles_.load<3>(lower_sums + 16, SUMS_STRIDE);
      }
    } else {
      tiles_.zero<0>();
      tiles_.zero<1>();
      if (LOWER) {
        tiles_.zero<2>();
        tiles_.zero<3>();
      }
    }
    for (int64_t i = 0; i < steps; i++, x += X_STEP, panel += TILE_STEP * WIDTH * 2) {
      tiles_.load<4>(x, X_STRIDE);
      tiles_.load<6>(panel, PANEL_STRIDE);
      tiles_.multiply<0, 4, 6>();
      tiles_.load<7>(panel + 64, PANEL_STRIDE);
      tiles_.multiply<1, 4, 7>();
      if (LOWER) {
        tiles_.load<5>(x + lower, X_STRIDE);
        tiles_.multiply<2, 5, 6>();
        tiles_.multiply<3, 5, 7>();
      }
    }
    tiles_.store<0>(sums, SUMS_STRIDE);
    tiles_.store<1>(sums + 16, SUMS_STRIDE);
    if (LOWER) {
      tiles_.store<2>(lower_sums, SUMS_STRIDE);
      tiles_.store<3>(lower_sums + 16, SUMS_STRIDE);
    }
  }

  Tiles tiles_;
  int64_t rows_ = 0, inputs_ = 0;
};

#endif
