// Linear layers: out = x @ weight.T + bias, over weights packed once (orcinus_pack) for gemm_kernel.h and
// gemm_tiles.h.
//
// Rows are cut into tiles and blocks of tiles, outputs into panels; a piece of work is some panels of one block of
// rows. Neither the cut nor the number of threads touches the order in which a number is summed (the two headers).
#include <algorithm>
#include <array>
#include <cmath>

#include "../codes.h"
#include "../formats.h"
#include "gemm_kernel.h"
#include "gemm_tiles.h"
#include "../kernels.h"

namespace {

constexpr int64_t BLOCK_TILES = 8;          // tiles of rows per block
constexpr int64_t GROUP = 4;                // panels per piece, at most
constexpr int64_t PASS_STEPS = 512;         // of a panel that the tiles of a block go through before the next one
constexpr int64_t AHEAD = 8192;             // bytes of weights that a lone tile fetches ahead: 53 GB/s times latency
constexpr int64_t UNPACKED_INPUTS = 512;    // of a panel unpacked at once, for several tiles: half of a second cache
constexpr int64_t LONE_INPUTS = 32;         // for each panel of a lone tile: half of the first cache
constexpr int64_t COPY_BYTES = 512 * 1024;  // of a block's activations, when they have to be copied
constexpr int64_t TILED_BLOCK = 32;         // tiles of rows per block that tile registers multiply,
constexpr int64_t TILED_COPY_BYTES = 1024 * 1024;  // and its copy: half of a second cache, which is larger there
constexpr int64_t TILED_INPUTS = 1024;      // of a panel at once then
constexpr int64_t TILED_GROUPS[] = {64, 256};  // of groups, for a lone tile and for more: memory is read meanwhile
constexpr int64_t LONE_UNPACKED = 64;       // the same of other formats, for a lone tile

// The packed form of a weight: panels, then one scale per output where the format has them.
template <class W>
struct Packed {
  int64_t panels, panel_bytes;
  Packed(int64_t outputs, int64_t inputs)
      : panels(ceil_div(outputs, WIDTH)), panel_bytes(ceil_div(inputs, W::DEPTH) * W::BYTES) {}
  int64_t scales_at() const { return round_up(panels * panel_bytes, 64); }
  int64_t bytes() const { return scales_at() + (W::SCALED ? panels * WIDTH * 4 : 0); }
};

// Which panels of which block of rows a piece is. Pieces get smaller towards the end, so that threads end together.
class Pieces {
 public:
  Pieces(int64_t blocks, int64_t panels, int64_t most, int threads)
      : left_(blocks * panels), panels_(panels), most_(most), share_(2 * threads) {}

  int64_t block = 0, panel = 0, count = 0;

  // Goes on to piece `index`, which never falls; false: there is no such piece, and `passed` is how many there are.
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
  int64_t passed() const { return at_; }

 private:
  int64_t left_, panels_, most_, share_, at_ = 0;
};

// Sums of some rows of a panel to `count` outputs each, `stride` apart. A separate function, so that scale and bias are
// applied by the same instructions for every caller.
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

// How a row of activations was rounded.
struct Rounded {
  float scale;
  int32_t sum;  // of the codes
};

// Integer sums of some rows of a panel to float32(sum) * the output's scale * the row's, in place. A separate function,
// so that no machine adds the bias to a product that is not rounded.
__attribute__((noinline)) void scale_sums(float* sums, int64_t rows, const float* scales, const Rounded* rounded) {
  for (int64_t r = 0; r < rows; r++)
    for (int h = 0; h < 2; h++, sums += LANES) {
      const vu sum = (vu)load(sums) - 128 * uint32_t(rounded[r].sum);
      store(sums, __builtin_convertvector((vi)sum, vf) * load(scales + h * LANES) * splat(rounded[r].scale));
    }
}

// How far a thread is in a command of several matrices: the pieces of one follow those of the one before.
struct Progress {
  int64_t piece;      // of all, which this thread has taken and not done
  int64_t first = 0;  // piece of the matrix at hand
};

// Memory of a thread for weights of a format that are unpacked before they are multiplied.
template <class W>
constexpr int64_t unpacked_bytes() {
#ifdef TILES
  if constexpr (W::TILED && W::GROUPED) return TILED_GROUPS[1] / W::DEPTH * UnpackedPairs::bytes(W::DEPTH);
#endif
  if constexpr (W::TILED) return W::IN_PLACE ? 0 : UNPACKED_INPUTS * WIDTH * 2;
  return W::GROUPED ? UNPACKED_INPUTS * WIDTH * 4 : 0;
}

template <class W>
class Linear {
  typedef typename W::Input Input;

 public:
  // from: the rows of x that are multiplied; null: all, one after another.
  Linear(const LinearArgs& args, int64_t rows, const int32_t* from, Team& team)
      : args_(args), rows_(rows), from_(from), team_(team), packed_(args.outputs, args.inputs) {
    tiles_ = ceil_div(rows, TILE_ROWS);
    stride_ = args.inputs;
    int64_t most = W::TILED ? TILED_BLOCK : BLOCK_TILES;
    const int32_t read_as = sizeof(Input) == 4 ? F32 : BF16;
    // Rows a multiple of 4096 bytes apart fall on each other in the first cache.
    copied_ = W::TILED || W::ROUNDS || from || args.dtype != read_as || args.inputs % DEPTH || (rows > 4 && args.inputs * sizeof(Input) % 4096 == 0);
    if (copied_) {
      stride_ = W::TILED ? round_up(args.inputs, TILED_MULTIPLE) : round_up(args.inputs, std::max(16, DEPTH)) + 16;
      most = std::clamp<int64_t>((W::TILED ? TILED_COPY_BYTES : COPY_BYTES) / (TILE_ROWS * stride_ * sizeof(Input)), 1, most);
    }
    blocks_ = ceil_div(tiles_, most);
    block_rows_ = most * TILE_ROWS;
    const int64_t copy_bytes = copied_ ? round_up(block_rows_ * stride_ * sizeof(Input), 64) : 0;
    const int64_t sums_bytes = GROUP * block_rows_ * WIDTH * 4;
    if constexpr (W::GROUPED && sizeof(Input) == 2) groups_ = W::MINS ? ceil_div(args.inputs, W::DEPTH) : 0;
    const int64_t x_sums_bytes = round_up(block_rows_ * groups_ * 4, 64);
    const int64_t padded = W::ROUNDS ? round_up(args.inputs, 64) : 0;
    const int64_t rounded_bytes = W::ROUNDS ? round_up(block_rows_ * sizeof(Rounded), 64) : 0;
    char* memory = team.scratch(copy_bytes + sums_bytes + x_sums_bytes + unpacked_bytes<W>() + rounded_bytes +
                                padded * (sizeof(float) + 1));
    copy_ = reinterpret_cast<Input*>(memory);
    sums_ = reinterpret_cast<float*>(memory + copy_bytes);
    x_sums_ = reinterpret_cast<float*>(memory + copy_bytes + sums_bytes);
    unpacked_ = memory + copy_bytes + sums_bytes + x_sums_bytes;
    rounded_ = reinterpret_cast<Rounded*>(unpacked_ + unpacked_bytes<W>());
    row_ = reinterpret_cast<float*>(unpacked_ + unpacked_bytes<W>() + rounded_bytes);
    codes_ = reinterpret_cast<int8_t*>(row_ + padded);
  }

  void run(Progress& progress) {
    Pieces pieces(blocks_, packed_.panels, GROUP, team_.threads());
    for (; pieces.seek(progress.piece - progress.first); progress.piece = team_.next()) {
      const int64_t index = progress.piece - progress.first;
      Pieces later = pieces;  // threads take turns more often than not
      next_ = later.seek(index + team_.threads()) ? later.panel : pieces.panel;
      if (pieces.block != block_) enter(pieces.block);
      multiply(pieces.panel, pieces.count);
      for (int64_t p = 0; p < pieces.count; p++) finish_panel(pieces.panel + p, sums_ + p * block_rows_ * WIDTH);
    }
    progress.first += pieces.passed();
  }

 private:
  static constexpr int DEPTH = W::DEPTH;  // activations are read in multiples of it
  static constexpr int64_t TILE_ROWS = W::TILED ? 16 : TILE;
  static constexpr int64_t TILED_MULTIPLE = std::max<int64_t>(TILE_STEP, DEPTH);  // of inputs that tiles multiply

  int64_t first_row(int64_t tile) const { return cut(rows_, tiles_, tile); }

  // Block b is tiles first_tile_ .. end_tile_.
  void enter(int64_t block) {
    block_ = block;
    first_tile_ = cut(tiles_, blocks_, block);
    end_tile_ = cut(tiles_, blocks_, block + 1);
    begin_ = first_row(first_tile_);
    end_ = first_row(end_tile_);
    const int64_t row_bytes = args_.inputs * int64_t(args_.dtype == F32 ? 4 : 2);
    const char* source = static_cast<const char*>(args_.x);
    x_ = reinterpret_cast<const Input*>(source + begin_ * row_bytes);
    if (copied_) copy(source, row_bytes);
#ifdef PAIRS_OF_BFLOAT16
    if constexpr (W::GROUPED && sizeof(Input) == 2)
      for (int64_t r = 0; r < end_ - begin_; r++)
        for (int64_t g = 0; g < groups_; g++)
          x_sums_[r * groups_ + g] = W::TILED && !is_chained()
                                         ? sum_pairs(tiled_row(r) + tiled_at(g * DEPTH), DEPTH, X_STEP)
                                         : sum_pairs(x_ + r * stride_ + g * DEPTH, DEPTH, TILE_STEP);
#endif
#ifdef TILES
    if constexpr (W::TILED && W::GROUPED)
      if (is_chained()) chain_inputs(copy_, stride_);
#endif
  }

  void copy(const char* source, int64_t row_bytes) {
    for (int64_t r = 0; r < end_ - begin_; r++) {
      const char* row = source + (from_ ? from_[begin_ + r] : begin_ + r) * row_bytes;
      if constexpr (W::ROUNDS)
        round(row, r);
      else if (is_chained())
        copy_row(row, args_.dtype, args_.inputs, stride_, copy_ + r * stride_);
      else if constexpr (W::TILED)
        copy_tiled(reinterpret_cast<const bf16*>(row), args_.inputs, stride_, tiled_row(r));
      else
        copy_row(row, args_.dtype, args_.inputs, round_up(args_.inputs, DEPTH), copy_ + r * stride_);
    }
    x_ = copy_;
  }
  // A row of activations as codes.
  void round(const char* row, int64_t r) {
    const int64_t padded = round_up(args_.inputs, LANES);
    copy_row(row, args_.dtype, args_.inputs, padded, row_);
    const float scale = code_scale(row_, padded, Int8Code::MAX);
    encode<Int8Code>(row_, scale, padded, codes_);
    Input* to = copy_ + r * stride_;
    int32_t sum = 0;
    for (int64_t i = 0; i < padded; i++) to[i] = codes_[i], sum += codes_[i];
    rounded_[r] = {scale, sum};
  }

  // A lone row of groups: tiles would take more time, and have the same bits.
  bool is_chained() const { return W::TILED && W::GROUPED && rows_ == 1; }
  Input* tiled_row(int64_t r) const { return copy_ + r / 16 * 16 * stride_ + r % 16 * TILE_STEP; }

  // Some panels of the block at hand; while it computes, each kernel fetches weights that are needed soon.
  void multiply(int64_t panel, int64_t count) {
    if constexpr (W::TILED && !W::GROUPED)
      multiply_tiled(panel, count);
    else if constexpr (!W::GROUPED)
      multiply_packed(panel, count);
#ifdef TILES
    else if constexpr (W::TILED)
      multiply_tiled_groups(panel, count);
#endif
#ifdef PAIRS_OF_BFLOAT16
    else if constexpr (W::PAIRED)
      multiply_paired(panel, count);
#endif
    else
      multiply_unpacked(panel, count);
  }

  // Few rows: two panels at a time, unpacked in registers.
  void multiply_grouped(int64_t panel, int64_t count) {
    Tile<Input> t = {};
    t.x = x_;
    t.x_stride = stride_;
    t.panel_bytes = packed_.panel_bytes;
    t.steps = ceil_div(args_.inputs, W::DEPTH);
    t.sums_rows = block_rows_;
    for (int64_t p = 0; p < count; p += 2) {
      t.weights = weights(panel + p, 0);
      t.sums = sums_ + p * block_rows_ * WIDTH;
      if (p + 1 < count)
        grouped_kernel<W, 2>(t, end_ - begin_);
      else
        grouped_kernel<W, 1>(t, end_ - begin_);
    }
  }

  // Some inputs of some panels become float32, then all tiles multiply by them.
  void multiply_unpacked(int64_t panel, int64_t count) {
    const int64_t inputs = round_up(args_.inputs, W::DEPTH), tiles = end_tile_ - first_tile_;
    if (end_ - begin_ <= GROUPED_ROWS) return multiply_grouped(panel, count);
    const int64_t at_once = tiles == 1 ? LONE_INPUTS : UNPACKED_INPUTS;
    for (int64_t p = 0, together = tiles == 1 ? panels_together(end_ - begin_) : 1; p < count; p += together) {
      while (together > count - p) together /= 2;
      for (int64_t first = 0; first < inputs; first += at_once) {
        const int64_t last = std::min(inputs, first + at_once);
        float* out = reinterpret_cast<float*>(unpacked_);
        for (int64_t q = 0; q < together; q++)
          for (int64_t k = first; k < last; k += W::PIECE, out += W::PIECE * WIDTH)
            W::unpack_piece(weights(panel + p + q, k / W::DEPTH), k % W::DEPTH, out);
        for (int64_t tile = first_tile_; tile < end_tile_; tile++) {
          const int64_t row = first_row(tile);
          Tile<Input> t;
          t.x = x_ + (row - begin_) * stride_ + first;
          t.x_stride = stride_;
          t.weights = t.ahead = unpacked_;
          t.panel_bytes = (last - first) * WIDTH * 4;
          t.steps = last - first;
          t.sums = sums_ + (p * block_rows_ + row - begin_) * WIDTH;
          t.sums_rows = block_rows_;
          t.resume = first > 0;
          t.ahead_step = 0;
          pick<Unpacked>(first_row(tile + 1) - row, together)(t);
        }
      }
    }
  }

#ifdef PAIRS_OF_BFLOAT16
  // The same for pairs of bfloat16: a lone tile unpacks them in registers, of several tiles each reads them unpacked.
  void multiply_paired(int64_t panel, int64_t count) {
    typedef typename W::Kernel Kernel;
    const int64_t rows = end_ - begin_, groups = ceil_div(args_.inputs, DEPTH), at_once = UNPACKED_INPUTS / DEPTH;
    if (end_tile_ - first_tile_ == 1) {
      for (int64_t p = 0, together = std::min(panels_together(rows), rows == 1 ? 4 : 2); p < count; p += together) {
        while (together > count - p) together /= 2;
        const int64_t ahead = std::clamp<int64_t>(AHEAD / (W::BYTES * together), 1, groups);
        const int64_t next = p + together < count ? panel + p + together : next_;
        const auto kernel = pick<Kernel>(rows, together);
        if (groups > ahead) kernel(lone_tile(panel, p, 0, groups - ahead, weights(panel + p, ahead)));
        kernel(lone_tile(panel, p, groups - ahead, groups, weights(next, 0)));
      }
      return;
    }
    for (int64_t p = 0; p < count; p++)
      for (int64_t first = 0; first < groups; first += at_once) {
        const int64_t last = std::min(groups, first + at_once);
        for (int64_t group = first; group < last; group++)
          UnpackedPairs::unpack<Kernel>(weights(panel + p, group), DEPTH,
                                        unpacked_ + (group - first) * UnpackedPairs::bytes(DEPTH));
        for (int64_t tile = first_tile_; tile < end_tile_; tile++)
          pick<UnpackedPairs>(first_row(tile + 1) - first_row(tile), 1)(tile_of(tile, p, unpacked_, 0, first, last));
      }
  }

  // Groups first .. last of the lone tile and of panels from panel + p on.
  Tile<Input> lone_tile(int64_t panel, int64_t p, int64_t first, int64_t last, const char* ahead) {
    Tile<Input> t = tile_of(first_tile_, p, weights(panel + p, first), packed_.panel_bytes, first, last);
    t.ahead = ahead;
    return t;
  }

  // Groups first .. last of a tile; the sums have place p.
  Tile<Input> tile_of(int64_t tile, int64_t p, const char* weights, int64_t panel_bytes, int64_t first, int64_t last) {
    const int64_t row = first_row(tile) - begin_;
    Tile<Input> t = {};
    t.x = x_ + row * stride_ + first * DEPTH;
    t.x_stride = stride_;
    t.depth = DEPTH;
    t.x_sums = groups_ ? x_sums_ + row * groups_ + first : nullptr;
    t.x_groups = groups_;
    t.weights = weights;
    t.panel_bytes = panel_bytes;
    t.steps = last - first;
    t.sums = sums_ + (p * block_rows_ + row) * WIDTH;
    t.sums_rows = block_rows_;
    t.resume = first > 0;
    return t;
  }
#endif

  // All rows of the block at hand by some inputs of one panel after another, which stay in the first cache meanwhile;
  // what is unpacked is paid once for all of them.
  void multiply_tiled(int64_t panel, int64_t count) {
    const int64_t inputs = args_.inputs, rows = end_ - begin_;
    const int64_t unpacked = rows <= 16 ? LONE_UNPACKED : UNPACKED_INPUTS;
    const int64_t at_once = !W::IN_PLACE ? unpacked : rows <= TILED_ROWS ? inputs : TILED_INPUTS;
    for (int64_t first = 0; first < inputs; first += at_once) {
      const int64_t these = std::min(inputs - first, at_once);
      for (int64_t p = 0; p < count; p++) {
        const char* pairs = weights(panel + p, first / W::DEPTH);
        if constexpr (!W::IN_PLACE) {
          W::unpack_pairs(pairs, these, unpacked_);
          pairs = unpacked_;
        }
        for (int64_t row = 0; row < rows; row += TILED_ROWS)
          tile_kernel_.multiply(x_ + row * stride_ + 16 * first, 16 * stride_, pairs, round_up(these, 2),
                                std::min(rows - row, TILED_ROWS), sums_ + (p * block_rows_ + row) * WIDTH, first > 0);
      }
    }
  }

#ifdef TILES
  // The same for groups.
  void multiply_tiled_groups(int64_t panel, int64_t count) {
    const int64_t rows = end_ - begin_, groups = ceil_div(args_.inputs, DEPTH);
    if (is_chained()) return multiply_chained(panel, count);
    const int64_t at_once = std::max<int64_t>(1, TILED_GROUPS[rows > 16] / DEPTH);
    for (int64_t p = 0; p < count; p++)
      for (int64_t first = 0; first < groups; first += at_once) {
        const int64_t last = std::min(groups, first + at_once);
        for (int64_t group = first; group < last; group++)
          UnpackedPairs::unpack<typename W::Kernel>(weights(panel + p, group), DEPTH,
                                                    unpacked_ + (group - first) * UnpackedPairs::bytes(DEPTH));
        for (int64_t row = 0; row < rows; row += 16) {
          const TiledGroups these{unpacked_, last - first, DEPTH, x_ + row * stride_ + tiled_at(first * DEPTH),
                                  groups_ ? x_sums_ + row * groups_ + first : nullptr, groups_,
                                  sums_ + (p * block_rows_ + row) * WIDTH, first > 0};
          tile_kernel_.multiply(these, std::min<int64_t>(rows - row, 16));
        }
      }
  }

  // One row: two panels at a time, unpacked in registers.
  void multiply_chained(int64_t panel, int64_t count) {
    typedef typename W::Kernel Kernel;
    for (int64_t p = 0; p < count; p += 2) {
      const auto kernel = p + 1 < count ? chained_kernel<Kernel, DEPTH, 2> : chained_kernel<Kernel, DEPTH, 1>;
      kernel(tile_of(first_tile_, p, weights(panel + p, 0), packed_.panel_bytes, 0, ceil_div(args_.inputs, DEPTH)));
    }
  }
#endif

  void multiply_packed(int64_t panel, int64_t count) {
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

  // Steps first .. last of one tile and `together` panels; their sums have place p.
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

  void finish_panel(int64_t panel, float* sums) {
    const int64_t column = panel * WIDTH, count = std::min<int64_t>(WIDTH, args_.outputs - column);
    const float* bias = args_.bias ? args_.bias + column : nullptr;
    const float* scales = nullptr;
    if constexpr (W::SCALED)
      scales = reinterpret_cast<const float*>(static_cast<const char*>(args_.weight) + packed_.scales_at()) + column;
    if constexpr (W::ROUNDS) {
      scale_sums(sums, end_ - begin_, scales, rounded_);
      scales = nullptr;
    }
    const int64_t at = begin_ * args_.out_stride + column;
    if (args_.out_dtype == F32)
      finish(sums, end_ - begin_, scales, bias, static_cast<float*>(args_.out) + at, args_.out_stride, count);
    else
      finish(sums, end_ - begin_, scales, bias, static_cast<bf16*>(args_.out) + at, args_.out_stride, count);
  }

  const LinearArgs& args_;
  const int64_t rows_;
  const int32_t* const from_;
  Team& team_;
  const Packed<W> packed_;
  int64_t tiles_, blocks_, block_rows_;
  int64_t stride_;  // of rows as they are multiplied
  bool copied_;
  Input* copy_;
  int64_t groups_ = 0;  // of a row, where sums of activations are needed
  float* x_sums_;
  float* sums_;
  char* unpacked_;
  Rounded* rounded_;  // of the rows of the block at hand
  float* row_;        // one of them, as float32
  int8_t* codes_;     // and as codes
  int64_t block_ = -1, first_tile_ = 0, end_tile_ = 0, begin_ = 0, end_ = 0;
  int64_t next_ = 0;  // panel of the piece that this thread will likely take next
  const Input* x_ = nullptr;
  struct NoTiles {};
  std::conditional_t<!W::TILED, NoTiles, std::conditional_t<W::GROUPED, GroupTileKernel, TileKernel>> tile_kernel_;
};

// ---- packing

struct Source {
  const void* data;
  int32_t dtype;
  int64_t inputs;
  const float *scales, *mins;  // of Groups, [rows, groups]; their numbers are `data`, [rows, inputs] of 8 bits
  float at(int64_t row, int64_t input) const {
    const int64_t i = row * inputs + input;
    return dtype == F32 ? static_cast<const float*>(data)[i] : widen(static_cast<const bf16*>(data)[i]);
  }
};

// Packs `count` rows of `source` as rows first_row.. of a weight. Padding after the last row is zeroed with that row.
template <class W>
void pack_numbers(char* packed, int64_t outputs, int64_t inputs, int64_t first_row, int64_t count,
                  const Source& source) {
  const Packed<W> p(outputs, inputs);
  const int64_t end = first_row + count, padded_end = end == outputs ? p.panels * WIDTH : end;
  for (int64_t begin = first_row; begin < padded_end; begin = (begin / WIDTH + 1) * WIDTH) {
    char* step = packed + begin / WIDTH * p.panel_bytes;
    const int64_t stop = std::min((begin / WIDTH + 1) * WIDTH, padded_end);
    float inverse[WIDTH] = {};
    if constexpr (W::SCALED) {
      float* scales = reinterpret_cast<float*>(packed + p.scales_at());
      for (int64_t row = begin; row < stop; row++) {
        float largest = 0;
        for (int64_t k = 0; row < end && k < inputs; k++)
          largest = std::max(largest, std::fabs(source.at(row - first_row, k)));
        scales[row] = W::scale(largest);
        inverse[row % WIDTH] = scales[row] > 0 ? 1 / scales[row] : 0;
      }
    }
    for (int64_t first = 0; first < inputs; first += W::DEPTH, step += W::BYTES)
      for (int64_t row = begin; row < stop; row++) {
        float numbers[W::DEPTH];
        for (int64_t k = 0; k < W::DEPTH; k++)
          numbers[k] = row < end && first + k < inputs ? source.at(row - first_row, first + k) : 0;
        W::pack(step, row % WIDTH, numbers, inverse[row % WIDTH]);
      }
  }
}

// The same for Groups.
template <class W>
void pack_groups(char* packed, int64_t outputs, int64_t inputs, int64_t first_row, int64_t count,
                 const Source& source) {
  const Packed<W> p(outputs, inputs);
  const int64_t groups = ceil_div(inputs, W::DEPTH), end = first_row + count;
  const int64_t padded_end = end == outputs ? p.panels * WIDTH : end;
  for (int64_t row = first_row; row < padded_end; row++) {
    char* step = packed + row / WIDTH * p.panel_bytes;
    const uint8_t* numbers = static_cast<const uint8_t*>(source.data) + (row - first_row) * inputs;
    for (int64_t group = 0; group < groups; group++, step += W::BYTES) {
      const int64_t at = (row - first_row) * groups + group, first = group * W::DEPTH;
      if (row < end)
        W::pack(step, row % WIDTH, numbers + first, inputs - first, source.scales[at],
                source.mins ? source.mins[at] : 0);
      else
        W::pack(step, row % WIDTH, nullptr, 0, 0, 0);
    }
  }
}

// The same for W8A8, of which a row is one group.
template <class W>
void pack_rounded(char* packed, int64_t outputs, int64_t inputs, int64_t first_row, int64_t count,
                  const Source& source) {
  const Packed<W> p(outputs, inputs);
  const int64_t end = first_row + count, padded_end = end == outputs ? p.panels * WIDTH : end;
  for (int64_t row = first_row; row < padded_end; row++) {
    char* step = packed + row / WIDTH * p.panel_bytes;
    const uint8_t* numbers = static_cast<const uint8_t*>(source.data) + (row - first_row) * inputs;
    for (int64_t first = 0; first < inputs; first += W::DEPTH, step += W::BYTES) {
      if (row < end)
        W::pack(step, row % WIDTH, numbers + first, inputs - first);
      else
        W::pack(step, row % WIDTH, nullptr, 0);
    }
    reinterpret_cast<float*>(packed + p.scales_at())[row] = row < end ? source.scales[row - first_row] : 0;
  }
}

template <class W>
void pack(char* packed, int64_t outputs, int64_t inputs, int64_t first_row, int64_t count, const Source& source) {
  if constexpr (W::GROUPED)
    pack_groups<W>(packed, outputs, inputs, first_row, count, source);
  else if constexpr (W::ROUNDS)
    pack_rounded<W>(packed, outputs, inputs, first_row, count, source);
  else
    pack_numbers<W>(packed, outputs, inputs, first_row, count, source);
}

// One row of a packed weight, [inputs] float32.
template <class W>
void unpack(const char* packed, int64_t outputs, int64_t inputs, int64_t row, float* out) {
  const Packed<W> p(outputs, inputs);
  const char* step = packed + row / WIDTH * p.panel_bytes;
  float scale = 1;
  if constexpr (W::SCALED) scale = reinterpret_cast<const float*>(packed + p.scales_at())[row];
  for (int64_t first = 0; first < inputs; first += W::DEPTH, step += W::BYTES) {
    float numbers[W::DEPTH];
    W::unpack(step, row % WIDTH, numbers);
    for (int64_t k = 0; k < std::min<int64_t>(W::DEPTH, inputs - first); k++)
      out[first + k] = W::SCALED ? numbers[k] * scale : numbers[k];
  }
}

template <class W>
int64_t packed_bytes(int64_t outputs, int64_t inputs) {
  return Packed<W>(outputs, inputs).bytes();
}

template <class W>
void multiply(const LinearArgs& args, int64_t rows, const int32_t* from, Progress& progress, Team& team) {
  if (args.dtype == BF16)
    Linear<typename W::ForBfloat16>(args, rows, from, team).run(progress);
  else
    Linear<W>(args, rows, from, team).run(progress);
}

// ---- the formats by number

struct Format {
  const char* name;
  bool grouped;  // packed from Groups
  int64_t (*packed_bytes)(int64_t outputs, int64_t inputs);
  void (*pack)(char*, int64_t outputs, int64_t inputs, int64_t first_row, int64_t count, const Source&);
  void (*unpack)(const char*, int64_t outputs, int64_t inputs, int64_t row, float* out);
  void (*multiply)(const LinearArgs&, int64_t rows, const int32_t* from, Progress&, Team&);
};

template <class... W>
constexpr std::array<Format, sizeof...(W)> table_of(Formats<W...>) {
  return {Format{W::NAME, W::GROUPED || W::ROUNDS, packed_bytes<W>, pack<W>, unpack<W>, multiply<W>}...};
}

constexpr auto FORMATS = table_of(WeightFormats{});

}  // namespace

void run_linear(const LinearArgs& args, int64_t rows, Team& team) {
  Progress progress{team.next()};
  FORMATS[args.weight_format].multiply(args, rows, nullptr, progress, team);
}

void run_experts(const ExpertsArgs& a, Team& team) {
  const int64_t item_bytes = a.dtype == F32 ? 4 : 2;
  Progress progress{team.next()};
  for (int32_t e = 0; e < a.experts; e++) {
    const int64_t first = a.starts[e], rows = a.starts[e + 1] - first;
    if (rows == 0) continue;
    const ExpertWeight& w = a.weights[e];
    const char* x = static_cast<const char*>(a.x) + (a.order ? 0 : first * a.inputs * item_bytes);
    const LinearArgs args{x, w.weight, w.bias, static_cast<char*>(a.out) + first * a.out_stride * item_bytes,
                          a.inputs, a.outputs, a.out_stride, a.dtype, int32_t(w.weight_format), a.dtype};
    FORMATS[w.weight_format].multiply(args, rows, a.order ? a.order + first : nullptr, progress, team);
  }
}

void unpack_row(const void* packed, int32_t weight_format, int64_t inputs, int64_t outputs, int64_t row, float* out) {
  FORMATS[weight_format].unpack(static_cast<const char*>(packed), outputs, inputs, row, out);
}

extern "C" {

// The name of a format, or null after the last one.
const char* orcinus_weight_format(int32_t number) {
  return number < int32_t(FORMATS.size()) ? FORMATS[number].name : nullptr;
}

// How formats of Groups are multiplied where activations are bfloat16; empty: as float32.
const char* orcinus_group_order() {
#if defined(TILES)
  return "tiles";
#elif defined(PAIRS_OF_BFLOAT16)
  return "pairs";
#else
  return "";
#endif
}

// Whether a format is packed from Groups.
int32_t orcinus_is_grouped(int32_t number) { return FORMATS[number].grouped; }

// Bytes of a packed weight; its memory is the caller's, aligned to 64.
int64_t orcinus_packed_bytes(int32_t weight_format, int64_t outputs, int64_t inputs) {
  return FORMATS[weight_format].packed_bytes(outputs, inputs);
}

// Packs `source` [rows, inputs], row-major, F32 or BF16, as rows first_row.. of a weight of `outputs` rows. A format of
// Groups takes numbers of 8 bits, scales and perhaps mins [rows, groups] instead.
void orcinus_pack(int32_t weight_format, void* packed, int64_t outputs, int64_t inputs, int64_t first_row, int64_t rows,
                  const void* source, int32_t source_dtype, const float* scales, const float* mins) {
  const Source from{source, source_dtype, inputs, scales, mins};
  FORMATS[weight_format].pack(static_cast<char*>(packed), outputs, inputs, first_row, rows, from);
}

}  // extern "C"
