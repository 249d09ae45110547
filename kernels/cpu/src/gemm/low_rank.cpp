// What adapters add: out[row] += up(down(x[row])) for each row that has one (LoRA, arXiv 2106.09685).
//
// A matrix is panels of LANES outputs, half as wide as those of other weights: most adapters have ranks that would
// leave half of a panel of WIDTH empty. A step of a panel is one input in float32, two in bfloat16, as formats/ has
// them. A piece of work is some rows of one adapter. A sum is one chain of multiply-adds (gemm_kernel.h), so the cut
// into pieces touches no number.
#include "../formats/bfloat16.h"
#include "../formats/float32.h"
#include "gemm_kernel.h"
#include "../kernels.h"

namespace {

constexpr int64_t PIECE_ROWS[] = {4, 32};  // of an adapter, at least and at most
constexpr int64_t AHEAD = 4096;            // bytes of a panel that are fetched ahead

int64_t panels_of(int64_t outputs) { return ceil_div(outputs, LANES); }

// Multiplies rows by all panels of a matrix. `finish` gets the number of each panel and its sums, [rows, LANES]; `sums`
// has room for four panels.
template <class W, class Finish>
void multiply(const typename W::Input* x, int64_t stride, int64_t rows, const void* weights, int64_t outputs,
              int64_t inputs, float* sums, Finish finish) {
  const int64_t panels = panels_of(outputs), tiles = ceil_div(rows, TILE);
  Tile<typename W::Input> t = {};
  t.x_stride = stride;
  t.steps = ceil_div(inputs, W::DEPTH);
  t.panel_bytes = t.steps * W::BYTES / 2;
  t.sums_rows = rows;
  t.ahead_step = W::BYTES / 2;
  t.weights = static_cast<const char*>(weights);
  for (int64_t p = 0, together = panels_together<1>(ceil_div(rows, tiles)); p < panels; p += together) {
    while (together > panels - p) together /= 2;
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t row = cut(rows, tiles, tile);
      t.x = x + row * stride;
      t.ahead = t.weights + AHEAD;
      t.sums = sums + row * LANES;
      pick<W, 1>(cut(rows, tiles, tile + 1) - row, together)(t);
    }
    for (int64_t q = 0; q < together; q++) finish(p + q, sums + q * rows * LANES);
    t.weights += together * t.panel_bytes;
  }
}

// Adds sums to `count` numbers of rows into[0], into[1], .. of out, which is `stride` wide.
template <class Number>
void add(const float* sums, int64_t rows, const int32_t* into, Number* out, int64_t stride, int64_t count) {
  for (int64_t r = 0; r < rows; r++, sums += LANES) {
    Number* const row = out + into[r] * stride;
    if (count == LANES) {
      store(row, load(row) + load(sums));
      continue;
    }
    Number part[LANES] = {};
    memcpy(part, row, count * sizeof *row);
    store(part, load(part) + load(sums));
    memcpy(row, part, count * sizeof *row);
  }
}

// Memory of a thread for pieces of at most so many rows.
template <class Down, class Up>
struct Room {
  typename Down::Input* x;
  float *inner, *part, *sums;  // down(x), those ranks of it that an up matrix reads, and sums of four panels
  int64_t x_stride, inner_stride;

  Room(int64_t rows, int64_t inputs, int64_t rank, Team& team)
      : x_stride(round_up(inputs, Down::DEPTH) + 16), inner_stride(panels_of(rank) * LANES) {
    const int64_t x_bytes = round_up(rows * x_stride * sizeof *x, 64), part_width = rank + Up::DEPTH;
    char* const memory = team.scratch(x_bytes + rows * (4 * LANES + inner_stride + part_width) * 4);
    x = reinterpret_cast<typename Down::Input*>(memory);
    sums = reinterpret_cast<float*>(memory + x_bytes);
    inner = sums + rows * 4 * LANES;
    part = inner + rows * inner_stride;
  }
};

// Some rows of one adapter. Down, Up: the formats of its matrices.
template <class Down, class Up, class Number>
void run_piece(const LowRankArgs& a, const LowRankPair& pair, const int32_t* order, int64_t rows,
               const Room<Down, Up>& room) {
  for (int64_t r = 0; r < rows; r++)
    copy_row(static_cast<const Number*>(a.x) + int64_t(order[r]) * a.inputs, a.dtype, a.inputs,
             round_up(a.inputs, Down::DEPTH), room.x + r * room.x_stride);
  multiply<Down>(room.x, room.x_stride, rows, pair.down, pair.rank, a.inputs, room.sums,
                 [&](int64_t panel, const float* sums) {
                   for (int64_t r = 0; r < rows; r++)
                     store(room.inner + r * room.inner_stride + panel * LANES, load(sums + r * LANES));
                 });
  for (const LowRankUp* up = pair.ups; up < pair.ups + pair.count; up++) {
    const int64_t width = round_up(up->rank, Up::DEPTH);
    for (int64_t r = 0; r < rows; r++)
      copy_row(room.inner + r * room.inner_stride + up->first_rank, F32, up->rank, width, room.part + r * width);
    multiply<Up>(room.part, width, rows, up->weight, up->outputs, up->rank, room.sums,
                 [&](int64_t panel, const float* sums) {
                   const int64_t column = panel * LANES, count = std::min<int64_t>(LANES, up->outputs - column);
                   Number* const out = static_cast<Number*>(a.out) + up->first_output + column;
                   add(sums, rows, order, out, a.outputs, count);
                 });
  }
}

template <class Down, class Up, class Number>
void run(const LowRankArgs& a, Team& team) {
  const AdapterRows& of_rows = *a.adapters;
  const int64_t share = ceil_div(of_rows.starts[of_rows.count], 2 * team.threads());
  const int64_t most = std::clamp(share, PIECE_ROWS[0], PIECE_ROWS[1]);
  int64_t piece = team.next(), passed = 0;
  for (int64_t i = 0; i < of_rows.count; i++) {
    const int32_t adapter = of_rows.adapters[i];
    const LowRankPair pair = adapter < a.pairs->count ? a.pairs->pairs[adapter] : LowRankPair{};
    if (!pair.rank) continue;
    const int64_t first = of_rows.starts[i], rows = of_rows.starts[i + 1] - first;
    const int64_t pieces = ceil_div(rows, most);
    const Room<Down, Up> room(most, a.inputs, pair.rank, team);
    for (; piece < passed + pieces; piece = team.next()) {
      const int64_t begin = cut(rows, pieces, piece - passed), end = cut(rows, pieces, piece - passed + 1);
      run_piece<Down, Up, Number>(a, pair, of_rows.order + first + begin, end - begin, room);
    }
    passed += pieces;
  }
}

}  // namespace

void run_low_rank(const LowRankArgs& a, Team& team) {
  if (a.dtype == F32)
    run<Float32, Float32, float>(a, team);
  else
    run<Bfloat16Pairs, Bfloat16, bf16>(a, team);
}
