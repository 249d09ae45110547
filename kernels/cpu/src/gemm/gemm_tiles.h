// The inner loop of the linear layers by tile registers: up to 32 rows of bfloat16 activations times one panel.
//
// Every output number is a sum over steps of 32 inputs in ascending order. The products of a step are two chains, those
// of the even and those of the odd inputs, as TDPBF16PS has them (tiles.h). Neither the number of rows nor where the sums
// rest in memory between two steps touches that order.
#pragma once
#include <algorithm>
#include <utility>

#include "../formats/groups.h"
#include "../formats/panel.h"
#include "gemm_kernel.h"
#include "../tiles.h"

constexpr int64_t TILED_ROWS = 32;  // that are multiplied together: two registers
constexpr int64_t TILE_STEP = 32;   // inputs of a register

constexpr int64_t X_STEP = 16 * TILE_STEP;  // numbers from one step of a row to the next one

// Copies a row to where tiles read it: its steps lie X_STEP numbers apart, those of 16 rows beside it between them, so
// that a register is loaded from memory that lies together. Up to `padded`, a multiple of TILE_STEP, there are zeros.
inline void copy_tiled(const bf16* from, int64_t inputs, int64_t padded, bf16* to) {
  for (; padded > 0; inputs -= TILE_STEP, padded -= TILE_STEP, from += TILE_STEP, to += X_STEP) {
    if (inputs < TILE_STEP) memset(to, 0, TILE_STEP * sizeof *to);
    if (inputs > 0) memcpy(to, from, std::min(inputs, TILE_STEP) * sizeof *to);
  }
}

// How far input `input` of such a row lies behind its first one.
inline int64_t tiled_at(int64_t input) { return input / TILE_STEP * X_STEP + input % TILE_STEP; }

#ifndef TILES
class TileKernel;  // no format is TILED
class GroupTileKernel;
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

// Some groups of a panel as UnpackedPairs, and what they are multiplied by.
struct TiledGroups {
  const char* unpacked;
  int64_t count, depth;
  const bf16* x;        // as copy_tiled has it, from the first group's first input on
  const float* x_sums;  // of the groups of each row, x_groups apart; null without minima
  int64_t x_groups;
  float* sums;          // of the rows, WIDTH apart
  bool resume;          // sums hold what earlier groups gave
};

// The same for up to 16 rows times groups: the products of a group are summed in a register from zero. Each output adds
// that sum times its scale, then less its minimum times the sum of the activations, in float32, as paired_kernel does.
//
// Registers: products of two groups in turn with each half of the panel in 0 .. 3, rows in 4, weights in 6 and 7.
class GroupTileKernel {
 public:
  ~GroupTileKernel() {
    if (rows_) tiles_.release();
  }

  void multiply(const TiledGroups& g, int64_t rows) {
    shape(rows, std::min(g.depth, TILE_STEP));
    pick(rows, std::make_integer_sequence<int, 16>())(*this, g);
  }

 private:
  typedef void (*Run)(GroupTileKernel&, const TiledGroups&);
  typedef float Products[2][16][LANES];

  void shape(int64_t rows, int64_t inputs) {
    if (rows == rows_ && inputs == inputs_) return;
    rows_ = rows, inputs_ = inputs;
    TileShapes shapes;
    for (int tile = 0; tile < 4; tile++) shapes.set(tile, rows, 64);
    shapes.set(4, rows, 2 * inputs), shapes.set(6, inputs / 2, 64), shapes.set(7, inputs / 2, 64);
    tiles_.configure(shapes);
  }

  template <int... R>
  static Run pick(int64_t rows, std::integer_sequence<int, R...>) {
    constexpr Run table[] = {run<R + 1>...};
    return table[rows - 1];
  }

  // As many sums as the vector registers hold: of few rows those of both halves of the panel.
  template <int R>
  static void run(GroupTileKernel& kernel, const TiledGroups& g) {
    if constexpr (2 * R <= 16) {
      kernel.run<R, 2>(g, 0);
    } else {
      kernel.run<R, 1>(g, 0);
      kernel.run<R, 1>(g, 1);
    }
  }

  template <int R, int HALVES>
  void run(const TiledGroups& g, int half) {
    float* const at = g.sums + half * LANES;
    vf sums[R][HALVES];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int h = 0; h < HALVES; h++) sums[r][h] = g.resume ? load(at + r * WIDTH + h * LANES) : vf{};
    alignas(64) Products products[2];
    for (int64_t group = 0; group <= g.count; group++) {  // a group is added while the next one is multiplied
      if (group < g.count) {
        if (group % 2)
          multiply<HALVES, 2>(g, group, half, products[1]);
        else
          multiply<HALVES, 0>(g, group, half, products[0]);
      }
      if (group > 0) add<R, HALVES>(g, group - 1, half, products[(group - 1) % 2], sums);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int h = 0; h < HALVES; h++) ::store(at + r * WIDTH + h * LANES, sums[r][h]);
  }

  static const char* step(const TiledGroups& g, int64_t group) {
    return g.unpacked + group * UnpackedPairs::bytes(g.depth);
  }

  template <int HALVES, int T>
  void multiply(const TiledGroups& g, int64_t group, int half, Products& products) {
    const bf16* x = g.x + tiled_at(group * g.depth);
    const char* pairs = step(g, group) + UnpackedPairs::SCALE_BYTES + half * LANES * 4;
    tiles_.zero<T>();
    if (HALVES == 2) tiles_.zero<T + 1>();
    for (int64_t k = 0; k < g.depth; k += TILE_STEP, x += X_STEP, pairs += TILE_STEP * WIDTH * 2) {
      tiles_.load<4>(x, TILE_STEP * 2);
      tiles_.load<6>(pairs, WIDTH * 4);
      tiles_.multiply<T, 4, 6>();
      if (HALVES == 2) {
        tiles_.load<7>(pairs + LANES * 4, WIDTH * 4);
        tiles_.multiply<T + 1, 4, 7>();
      }
    }
    tiles_.store<T>(products[0], LANES * 4);
    if (HALVES == 2) tiles_.store<T + 1>(products[1], LANES * 4);
  }

  template <int R, int HALVES>
  static void add(const TiledGroups& g, int64_t group, int half, const Products& products, vf (&sums)[R][HALVES]) {
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; h++) {
      vf scale, below;
      UnpackedPairs::load_scale(step(g, group), half + h, scale, below);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        sums[r][h] = fused(load(products[h][r]), scale, sums[r][h]);
        if (g.x_sums) sums[r][h] = fused(splat(g.x_sums[r * g.x_groups + group]), below, sums[r][h]);
      }
    }
  }

  Tiles tiles_;
  int64_t rows_ = 0, inputs_ = 0;
};

// One row times P panels of Pairs, with the bits of GroupTileKernel: weights take longer to unpack into memory than to
// multiply by one row. Of each 32 inputs (16 in groups of 16) the even and the odd ones are two chains from zero, which
// chain_pair goes on with by two inputs at a time. The row is as chain_inputs leaves it.
template <class W, int DEPTH, int P>
void chained_kernel(const Tile<bf16>& t) {
  constexpr int C = 2 * P, STEP = DEPTH < TILE_STEP ? DEPTH : TILE_STEP;
  const char* step = t.weights;
  const bf16* x = t.x;
  vf sums[C] = {};
  for (int64_t group = 0; group < t.steps; group++, step += W::bytes(DEPTH)) {
    vf products[C] = {};
    const char* numbers = step + W::SCALE_BYTES;
    for (int k = 0; k < DEPTH; k += STEP) {
      vf chains[2][C] = {};
#pragma GCC unroll 8
      for (int word = 0; word < STEP / W::NUMBERS; word++, numbers += WIDTH * 4, x += W::NUMBERS) {
        vu words[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
          const char* at = numbers + c / 2 * t.panel_bytes + c % 2 * LANES * 4;
          memcpy(&words[c], at, sizeof words[c]);
          __builtin_prefetch(at + PAIRS_AHEAD);
        }
#pragma GCC unroll 4
        for (int i = 0; i < W::EACH; i++)
#pragma GCC unroll 4
          for (int c = 0; c < C; c++)
            chains[i % 2][c] = chain_pair(x + 2 * i, W::chained(words[c], i % 2, i / 2), chains[i % 2][c]);
      }
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        const vf both = flushed(chains[0][c] + chains[1][c]);
        products[c] = k == 0 ? both : flushed(products[c] + both);
      }
    }
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      vf scale, below;
      W::load_scale(step + c / 2 * t.panel_bytes, c % 2, scale, below);
      sums[c] = fused(products[c], scale, sums[c]);
      if (W::MINS) sums[c] = fused(splat(t.x_sums[group]), below, sums[c]);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < C; c++) store(t.sums + c / 2 * t.sums_rows * WIDTH + c % 2 * LANES, sums[c]);
}

// Puts each 4 of `inputs`, a multiple of 4, in the order in which chained_kernel reads them: 2 and 0, then 3 and 1.
inline void chain_inputs(bf16* x, int64_t inputs) {
  for (int64_t i = 0; i < inputs; i += 4) {
    const bf16 four[] = {x[i + 2], x[i], x[i + 3], x[i + 1]};
    memcpy(x + i, four, sizeof four);
  }
}

#endif
