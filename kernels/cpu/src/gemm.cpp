// Linear layers: out = x @ weight.T + bias, over weights packed once (orcinus_pack) for gemm_kernel.h.
//
// Rows are cut into tiles and blocks of tiles, outputs into panels; a piece of work is some panels of one block of
// rows. Neither the cut nor the number of threads touches the order in which a number is summed (gemm_kernel.h).
#include <algorithm>
#include <cmath>

#include "gemm_kernel.h"
#include "kernels.h"

namespace {

constexpr int64_t BLOCK_TILES = 8;          // tiles of rows per block
constexpr int64_t GROUP = 4;                // panels per piece, at most
constexpr int64_t PASS_STEPS = 512;         // of a panel that the tiles of a block go through before the next one
constexpr int64_t AHEAD = 8192;             // bytes of weights that a lone tile fetches ahead: 53 GB/s times latency
constexpr int64_t COPY_BYTES = 512 * 1024;  // of a block's activations, when they have to be copied

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// The packed form: panels, then for I8 one scale per output.
struct Packed {
  int64_t panels, panel_bytes, step_bytes, depth;
  Packed(int32_t dtype, int64_t outputs, int64_t inputs) {
    depth = dtype == BF16 ? 2 : 1;
    step_bytes = dtype == I8 ? WIDTH : 4 * WIDTH;
    panels = ceil_div(outputs, WIDTH);
    panel_bytes = ceil_div(inputs, depth) * step_bytes;
  }
  int64_t scales_at() const { return round_up(panels * panel_bytes, 64); }
};

// Which panels of which block of rows a piece is. Pieces get smaller towards the end, so that threads end together.
class Pieces {
 public:
  Pieces(int64_t blocks, int64_t panels, int64_t most, int threads)
      : left_(blocks * panels), panels_(panels), most_(most), share_(2 * threads) {}

  int64_t block = 0, panel = 0, count = 0;

  // Goes on to piece `index`, which never falls; false: there is no such piece.
  bool seek(int64_t index) {
    for (; at_ <= index; at_++) {
      panel += count;
      left_ -= count;
      if (left_ == 0) return false;
      if (panel == panels_) panel = 0, block++;
      count = std::min({most_, std::max<int64_t>(1, left_ / share_), panels_ - panel});
    }
    return true;
  }

 private:
  int64_t left_, panels_, most_, share_, at_ = 0;
};

// Part `index` of `total` cut into `parts` as equal as possible: its begin.
int64_t cut(int64_t total, int64_t parts, int64_t index) {
  return total / parts * index + std::min(index, total % parts);
}

void copy_row(const void* from, int32_t dtype, int64_t count, int64_t padded, float* to) {
  int64_t i = 0;
  if (dtype == F32) {
    memcpy(to, from, count * 4);
    i = count;
  } else {
    const bf16* source = static_cast<const bf16*>(from);
    for (; i + LANES <= count; i += LANES) store(to + i, load(source + i));
    for (; i < count; i++) to[i] = widen(source[i]);
  }
  for (; i < padded; i++) to[i] = 0;
}

[[maybe_unused]] void copy_row(const void* from, int32_t, int64_t count, int64_t padded, bf16* to) {
  memcpy(to, from, count * 2);
  for (int64_t i = count; i < padded; i++) to[i] = 0;
}

// Sums of some rows of a panel to `count` outputs each, `stride` apart. Its own function, so that scale and bias are
// applied by the same instructions whoever calls.
template <class Out>
__attribute__((noinline)) void finish(const float* sums, int64_t rows, const float* scales, const float* bias, Out* out,
                                      int64_t stride, int64_t count) {
  float padded[2][WIDTH] = {};
  if (scales) memcpy(padded[0], scales, count * 4);
  if (bias) memcpy(padded[1], bias, count * 4);
  const vf scale[2] = {load(padded[0]), load(padded[0] + LANES)}, add[2] = {load(padded[1]), load(padded[1] + LANES)};
  for (int64_t r = 0; r < rows; r++, sums += WIDTH, out += stride) {
    vf v[2] = {load(sums), load(sums + LANES)};
    if (scales) v[0] *= scale[0], v[1] *= scale[1];
    if (bias) v[0] += add[0], v[1] += add[1];
    if (count == WIDTH) {
      store(out, v[0]);
      store(out + LANES, v[1]);
    } else {
      Out rest[WIDTH];
      store(rest, v[0]);
      store(rest + LANES, v[1]);
      memcpy(out, rest, count * sizeof(Out));
    }
  }
}

template <class W>
class Linear {
  typedef typename W::Input Input;

 public:
  Linear(const LinearArgs& args, int64_t rows, Team& team)
      : args_(args), rows_(rows), team_(team), packed_(args.weight_dtype, args.outputs, args.inputs) {
    tiles_ = ceil_div(rows, TILE);
    stride_ = args.inputs;
    int64_t most = BLOCK_TILES;
    const int32_t read_as = sizeof(Input) == 4 ? F32 : BF16;
    // Rows a multiple of 4096 bytes apart fall on each other in the first cache.
    copied_ = args.dtype != read_as || args.inputs % W::DEPTH || (rows > 4 && args.inputs * sizeof(Input) % 4096 == 0);
    if (copied_) {
      stride_ = round_up(args.inputs, 16) + 16;
      most = std::clamp<int64_t>(COPY_BYTES / (TILE * stride_ * sizeof(Input)), 1, most);
    }
    blocks_ = ceil_div(tiles_, most);
    block_rows_ = most * TILE;
    const int64_t copy_bytes = copied_ ? round_up(block_rows_ * stride_ * sizeof(Input), 64) : 0;
    char* memory = team.scratch(copy_bytes + GROUP * block_rows_ * WIDTH * 4);
    copy_ = reinterpret_cast<Input*>(memory);
    sums_ = reinterpret_cast<float*>(memory + copy_bytes);
  }

  void run() {
    Pieces pieces(blocks_, packed_.panels, GROUP, team_.threads());
    for (int64_t index; pieces.seek(index = team_.next());) {
      Pieces later = pieces;  // threads take turns more often than not
      next_ = later.seek(index + team_.threads()) ? later.panel : pieces.panel;
      if (pieces.block != block_) enter(pieces.block);
      multiply(pieces.panel, pieces.count);
      for (int64_t p = 0; p < pieces.count; p++) finish_panel(pieces.panel + p, sums_ + p * block_rows_ * WIDTH);
    }
  }

 private:
  int64_t first_row(int64_t tile) const { return cut(rows_, tiles_, tile); }

  // Block b is tiles first_tile_ .. end_tile_.
  void enter(int64_t block) {
    block_ = block;
    first_tile_ = cut(tiles_, blocks_, block);
    end_tile_ = cut(tiles_, blocks_, block + 1);
    begin_ = first_row(first_tile_);
    end_ = first_row(end_tile_);
    const int64_t row_bytes = args_.inputs * int64_t(args_.dtype == F32 ? 4 : 2);
    const char* source = static_cast<const char*>(args_.x) + begin_ * row_bytes;
    x_ = reinterpret_cast<const Input*>(source);
    if (!copied_) return;
    for (int64_t r = 0; r < end_ - begin_; r++)
      copy_row(source + r * row_bytes, args_.dtype, args_.inputs, round_up(args_.inputs, W::DEPTH), copy_ + r * stride_);
    x_ = copy_;
  }

  // Some panels of the block at hand; while it computes, each kernel fetches weights that are needed soon.
  void multiply(int64_t panel, int64_t count) {
    if (end_tile_ - first_tile_ == 1) return stream(panel, count);
    const int64_t steps = ceil_div(args_.inputs, W::DEPTH), tiles = end_tile_ - first_tile_;
    const int64_t passes = ceil_div(steps, PASS_STEPS);
    for (int64_t pass = 0; pass < passes; pass++) {
      const int64_t first = cut(steps, passes, pass), last = cut(steps, passes, pass + 1);
      for (int64_t p = 0; p < count; p++) {
        const char* next = p + 1 < count         ? weights(panel + p + 1, first)
                           : pass + 1 < passes ? weights(panel, last)
                                               : weights(next_, 0);
        for (int64_t tile = 0; tile < tiles; tile++)  // which share the fetching
          call(first_tile_ + tile, panel + p, p, 1, first, last, next + (last - first) * W::BYTES / tiles * tile,
               W::BYTES / tiles);
      }
    }
  }

  // The same for a lone tile: the weights flow by once, those that come AHEAD bytes later are fetched.
  void stream(int64_t panel, int64_t count) {
    const int64_t steps = ceil_div(args_.inputs, W::DEPTH);
    for (int64_t p = 0, together = panels_together(end_ - begin_); p < count; p += together) {
      while (together > count - p) together /= 2;
      const int64_t ahead = std::min<int64_t>(steps, AHEAD / (W::BYTES * together));
      const int64_t next = p + together < count ? panel + p + together : next_;
      if (steps > ahead)
        call(first_tile_, panel + p, p, together, 0, steps - ahead, weights(panel + p, ahead), W::BYTES);
      call(first_tile_, panel + p, p, together, steps - ahead, steps, weights(next, 0), W::BYTES);
    }
  }

  // Steps first .. last of one tile and `together` panels, whose sums have place p.
  void call(int64_t tile, int64_t panel, int64_t p, int64_t together, int64_t first, int64_t last, const char* ahead,
            int64_t ahead_step) {
    const int64_t row = first_row(tile);
    Tile<Input> t;
    t.x = x_ + (row - begin_) * stride_ + first * W::DEPTH;
    t.x_stride = stride_;
    t.weights = weights(panel, first);
    t.panel_bytes = packed_.panel_bytes;
    t.steps = last - first;
    t.sums = sums_ + (p * block_rows_ + row - begin_) * WIDTH;
    t.sums_rows = block_rows_;
    t.resume = first > 0;
    t.ahead = ahead;
    t.ahead_step = ahead_step;
    pick<W>(first_row(tile + 1) - row, together)(t);
  }

  const char* weights(int64_t panel, int64_t step) const {
    return static_cast<const char*>(args_.weight) + panel * packed_.panel_bytes + step * W::BYTES;
  }

  void finish_panel(int64_t panel, const float* sums) {
    const int64_t column = panel * WIDTH, count = std::min<int64_t>(WIDTH, args_.outputs - column);
    const float* bias = args_.bias ? args_.bias + column : nullptr;
    const float* scales = nullptr;
    if (args_.weight_dtype == I8)
      scales = reinterpret_cast<const float*>(static_cast<const char*>(args_.weight) + packed_.scales_at()) + column;
    const int64_t at = begin_ * args_.outputs + column;
    if (args_.out_dtype == F32)
      finish(sums, end_ - begin_, scales, bias, static_cast<float*>(args_.out) + at, args_.outputs, count);
    else
      finish(sums, end_ - begin_, scales, bias, static_cast<bf16*>(args_.out) + at, args_.outputs, count);
  }

  const LinearArgs& args_;
  const int64_t rows_;
  Team& team_;
  const Packed packed_;
  int64_t tiles_, blocks_, block_rows_, stride_;
  bool copied_;
  Input* copy_;
  float* sums_;
  int64_t block_ = -1, first_tile_ = 0, end_tile_ = 0, begin_ = 0, end_ = 0;
  int64_t next_ = 0;  // panel of the piece that this thread will likely take next
  const Input* x_ = nullptr;
};

// ---- packing

struct Source {
  const void* data;
  int32_t dtype;
  int64_t inputs;
  float at(int64_t row, int64_t input) const {
    const int64_t i = row * inputs + input;
    return dtype == F32 ? static_cast<const float*>(data)[i] : widen(static_cast<const bf16*>(data)[i]);
  }
};

float quantise(const Source& source, int64_t row) {
  float most = 0;
  for (int64_t k = 0; k < source.inputs; k++) most = std::max(most, std::fabs(source.at(row, k)));
  return most / 127;
}

}  // namespace

void run_linear(const LinearArgs& args, int64_t rows, Team& team) {
  switch (args.weight_dtype) {
    case F32: return Linear<FloatWeights>(args, rows, team).run();
    case I8: return Linear<Int8Weights>(args, rows, team).run();
    case BF16:
#ifdef BF16_PAIRS
      if (args.dtype == BF16) return Linear<PairWeights>(args, rows, team).run();
#endif
      return Linear<WidenedWeights>(args, rows, team).run();
  }
}

void unpack_row(const void* packed, int32_t weight_dtype, int64_t inputs, int64_t outputs, int64_t row, float* out) {
  const Packed p(weight_dtype, outputs, inputs);
  const char* base = static_cast<const char*>(packed);
  const char* panel = base + row / WIDTH * p.panel_bytes;
  const int64_t column = row % WIDTH;
  if (weight_dtype == F32) {
    const float* w = reinterpret_cast<const float*>(panel) + column;
    for (int64_t k = 0; k < inputs; k++) out[k] = w[k * WIDTH];
  } else if (weight_dtype == BF16) {
    const bf16* w = reinterpret_cast<const bf16*>(panel) + 2 * column;
    for (int64_t k = 0; k < inputs; k++) out[k] = widen(w[k / 2 * 2 * WIDTH + k % 2]);
  } else {
    const int8_t* w = reinterpret_cast<const int8_t*>(panel) + column;
    const float scale = reinterpret_cast<const float*>(base + p.scales_at())[row];
    for (int64_t k = 0; k < inputs; k++) out[k] = float(w[k * WIDTH]) * scale;
  }
}

extern "C" {

// Bytes of a packed weight; its memory is the caller's, aligned to 64.
int64_t orcinus_packed_bytes(int32_t weight_dtype, int64_t outputs, int64_t inputs) {
  const Packed p(weight_dtype, outputs, inputs);
  return p.scales_at() + (weight_dtype == I8 ? p.panels * WIDTH * 4 : 0);
}

// Packs `source` [rows, inputs], row-major, F32 or BF16, as rows first_row.. of a weight of `outputs` rows. I8: each
// row is scaled by max |w| / 127 and rounded to nearest. Padding after the last row is zeroed with that row.
void orcinus_pack(int32_t weight_dtype, void* packed, int64_t outputs, int64_t inputs, int64_t first_row, int64_t rows,
                  const void* source, int32_t source_dtype) {
  const Packed p(weight_dtype, outputs, inputs);
  const Source from{source, source_dtype, inputs};
  char* base = static_cast<char*>(packed);
  const int64_t end = first_row + rows, padded_end = end == outputs ? p.panels * WIDTH : end;
  for (int64_t begin = first_row; begin < padded_end; begin = (begin / WIDTH + 1) * WIDTH) {
    char* panel = base + begin / WIDTH * p.panel_bytes;
    const int64_t stop = std::min((begin / WIDTH + 1) * WIDTH, padded_end);
    float scale[WIDTH], inverse[WIDTH];
    if (weight_dtype == I8) {
      float* scales = reinterpret_cast<float*>(base + p.scales_at());
      for (int64_t row = begin; row < stop; row++) {
        const int64_t c = row % WIDTH;
        scale[c] = row < end ? quantise(from, row - first_row) : 0;
        inverse[c] = scale[c] > 0 ? 1 / scale[c] : 0;
        scales[row] = scale[c];
      }
    }
    for (int64_t k = 0; k < round_up(inputs, p.depth); k++)
      for (int64_t row = begin; row < stop; row++) {
        const int64_t c = row % WIDTH;
        const float w = row < end && k < inputs ? from.at(row - first_row, k) : 0;
        if (weight_dtype == F32)
          reinterpret_cast<float*>(panel)[k * WIDTH + c] = w;
        else if (weight_dtype == BF16)
          reinterpret_cast<bf16*>(panel)[(k / 2 * WIDTH + c) * 2 + k % 2] = narrow(w);
        else
          reinterpret_cast<int8_t*>(panel)[k * WIDTH + c] =
              int8_t(std::clamp<long>(std::lrintf(w * inverse[c]), -127, 127));
      }
  }
}

}  // extern "C"
