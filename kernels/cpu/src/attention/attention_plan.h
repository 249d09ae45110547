// What pieces the attention of one iteration falls into, and in which order they are taken.
//
// Every thread makes the same list from the Step, in microseconds, before each attention command.
#pragma once
#include <cstring>

#include "../ops.h"

static const int TILE_ROWS = 48;  // query rows, all heads of a group counted, that are worked on together
static const int SPLIT = 512;     // keys of one state of the softmax; the states of a row are merged in order

// `count` positions of a sequence from row `first` of its chunk on, for each KV head.
struct Piece {
  int32_t sequence, first, count;
  int32_t split, splits;  // the numbers of its keys' splits: from, how many
  int32_t slot;           // >= 0: one split alone; the last one to end of a slot and KV head merges
  int32_t index;          // of this split in the slot
  int64_t states;         // where the states of the slot begin in shared memory, in floats
};

class Plan {
 public:
  Plan(const Step& step, const AttentionArgs& a, int threads)
      : step_(step),
        window_(a.window),
        causal_(a.causal),
        kv_heads_(a.pool->kv_heads),
        group_(a.heads / a.pool->kv_heads),
        stride_(a.pool->head_stride),
        positions_(group_ < TILE_ROWS ? TILE_ROWS / group_ : 1) {
    int64_t total = 0;
    each_tile([&](const Piece& tile) { total += cost(tile, keys(tile)); });
    // Split is what would keep one thread busy while the others have nothing left.
    const int64_t shares = 8 * int64_t(threads) < MAX_SLOTS ? 8 * int64_t(threads) : MAX_SLOTS;
    dear_ = threads > 1 ? total * kv_heads_ / shares : INT64_MAX;
    each_piece([&](const Piece& piece) {
      count_++;
      places_[bucket(piece)]++;
      if (rows(piece) > most_rows_) most_rows_ = rows(piece);
      if (piece.slot >= 0) states_ = piece.states + piece.splits * kv_heads_ * state_size(rows(piece));
    });
  }

  int64_t pieces() const { return count_; }       // each for all KV heads
  int64_t most_rows() const { return most_rows_; }
  int64_t shared_states() const { return states_; }  // floats
  int64_t rows(const Piece& piece) const { return int64_t(piece.count) * group_; }

  // Floats of the state of `rows` query rows: sums of values, sums of weights, largest scores.
  int64_t state_size(int64_t rows) const { return rows * (stride_ + 16) + (rows + 15) / 16 * 16; }

  // Writes `pieces()` pieces, the dearest first.
  void list(Piece* out) {
    int64_t before = 0;
    for (int b = BUCKETS - 1; b >= 0; b--) {
      const int64_t here = places_[b];
      places_[b] = before;
      before += here;
    }
    each_piece([&](const Piece& piece) { out[places_[bucket(piece)]++] = piece; });
  }

  static const int64_t MAX_SLOTS = 1024;       // (slot, KV head) pairs
  static const int64_t MAX_STATES = 8 << 20;  // floats that splitting may take: memory that no plan of it knows

 private:
  static const int BUCKETS = 256;

  template <typename Use>
  void each_tile(Use use) const {
    for (int s = 0; s < step_.sequences; s++) {
      const int count = step_.query_start[s + 1] - step_.query_start[s];
      for (int first = 0; first < count; first += positions_) {
        Piece tile{s, first, count - first < positions_ ? count - first : positions_, 0, 0, -1, 0, 0};
        tile.split = lowest(position(tile)) / SPLIT;
        tile.splits = (end(tile) - 1) / SPLIT + 1 - tile.split;
        use(tile);
      }
    }
  }

  template <typename Use>
  void each_piece(Use use) const {
    int32_t slots = 0;
    int64_t states = 0;
    each_tile([&](Piece& tile) {
      const int64_t needed = tile.splits * kv_heads_ * state_size(rows(tile));
      if (tile.splits == 1 || cost(tile, keys(tile)) <= dear_ || states + needed > MAX_STATES) return use(tile);
      tile.slot = slots++;
      tile.states = states;
      states += needed;
      for (tile.index = 0; tile.index < tile.splits; tile.index++) use(tile);
    });
  }

  int lowest(int position) const { return window_ && position >= window_ ? position - window_ + 1 : 0; }
  // Of the first row of a piece, and behind the last key that a row of it sees.
  int position(const Piece& piece) const {
    const int count = step_.query_start[piece.sequence + 1] - step_.query_start[piece.sequence];
    return step_.context[piece.sequence] - count + piece.first;
  }
  int end(const Piece& piece) const {
    return causal_ ? position(piece) + piece.count : step_.context[piece.sequence];
  }
  int64_t keys(const Piece& piece) const { return end(piece) - lowest(position(piece)); }
  // In the time that a row needs for a key; reading the key takes as long as some rows.
  int64_t cost(const Piece& piece, int64_t keys) const { return (rows(piece) + 8) * keys; }

  int bucket(const Piece& piece) const {
    const float c = float(cost(piece, piece.slot < 0 ? keys(piece) : SPLIT));
    uint32_t bits;
    memcpy(&bits, &c, 4);
    const int b = int(bits >> 21) - (127 << 2);  // a quarter of an octave each
    return b < 0 ? 0 : b < BUCKETS ? b : BUCKETS - 1;
  }

  const Step& step_;
  const int window_;
  const bool causal_;
  const int64_t kv_heads_, group_, stride_;
  const int positions_;
  int64_t dear_ = 0, count_ = 0, most_rows_ = 0, states_ = 0;
  int64_t places_[BUCKETS] = {};
};
