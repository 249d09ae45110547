// Paged attention of decode rows and prefill chunks alike: the work on pieces of the plan.
//
// Keys are cut at fixed positions: into segments of 64, which are scored and then weighed, and into splits
// of 512, each with a separate softmax state. Both begin at position 0 of the sequence, and the states of a row are
// merged in order. So each row goes through the same operations in the same order whatever rows, blocks or threads it
// shares the iteration with. Keys a row does not see are left out, not multiplied by 0: their memory may hold NaN.
#include <utility>

#include "attention_kernel.h"
#include "attention_plan.h"
#include "attention_softmax.h"
#include "attention_tiles.h"
#include "../kernels.h"
#include "../kv_8bit.h"

namespace {

int smaller(int a, int b) { return a < b ? a : b; }
int larger(int a, int b) { return a > b ? a : b; }

template <typename T>
const Products<T> products;

// Whether tiles multiply: the scores, and the values of the steps of keys that a row sees all of. The values of a step
// that a row sees a part of are left to `products`, as 0 times a key that it does not see may be NaN.
#ifdef TILES
template <typename T>
constexpr bool BY_TILES = sizeof(T) == 2;
#else
class TileProducts;
template <typename T>
constexpr bool BY_TILES = false;
#endif

struct NoTiles {
  static constexpr int ROWS = MAX_ROWS;
  NoTiles(int64_t, int) {}
};

// One thread's work on the pieces of a command.
template <typename T>
class Worker {
 public:
  Worker(const AttentionArgs& a, const Step& step, char* memory, int64_t most_rows, int64_t state_size)
      : a_(a),
        step_(step),
        pool_(*a.pool),
        stride_(a.pool->head_stride),
        group_(a.heads / a.pool->kv_heads),
        tiles_in_block_(pool_.block_size / TILE),
        tile_bytes_(tile_bytes(pool_)),
        step_keys_(tiles_in_block_ % 2 ? TILE : 2 * TILE),
        tiles_(stride_, step_keys_),
        to_v_(v_part(pool_, 0, 0, 0) - k_part(pool_, 0, 0, 0)),
        wide_tile_bytes_(TILE * stride_ * int64_t(sizeof(T))) {
    scores_ = reinterpret_cast<float*>(memory);
    positions_ = reinterpret_cast<int32_t*>(scores_ + BLOCK_ROWS * SEGMENT);
    query_ = reinterpret_cast<float*>(positions_ + (most_rows + 15) / 16 * 16);
    states_ = query_ + most_rows * stride_;
    wide_ = memory + memory_without_wide(most_rows, stride_, state_size);
  }
  static int64_t memory(const Pool& pool, int64_t most_rows, int64_t state_size) {
    const int64_t wide = pool.codes ? 2 * SEGMENT * pool.head_stride * int64_t(sizeof(T)) : 0;
    return memory_without_wide(most_rows, pool.head_stride, state_size) + wide;
  }

  // The query rows of a piece and KV head.
  void begin(const Piece& piece, int64_t kv_head) {
    kv_head_ = kv_head;
    keys_ = keys_of(piece, kv_head);
    first_row_ = step_.query_start[piece.sequence] + piece.first;
    rows_ = piece.count * group_;
    blocks_ = (rows_ + BLOCK_ROWS - 1) / BLOCK_ROWS;
    per_block_ = rows_ / blocks_;
    larger_blocks_ = rows_ % blocks_;
    for (int row = 0; row < rows_; row++) {
      positions_[row] = keys_.position + row / group_;
      pack_query(head_of(static_cast<const T*>(a_.q), row), pool_.head_dim, stride_, query_ + row * stride_);
    }
    find_tiles(keys_, keys_.end - 1, after_k_, next_v_);  // nothing else, unless `follow` says so
  }
  // The piece that this thread takes next: its first keys are fetched while the last ones of this are worked on.
  void follow(const Piece& piece, int64_t kv_head) {
    const Keys keys = keys_of(piece, kv_head);
    const char* v[SEGMENT_TILES];
    find_tiles(keys, first_segment(keys, piece.split + (piece.slot < 0 ? 0 : piece.index)), after_k_, v);
  }

  float* own_state(int number, int64_t state_size) { return states_ + number * state_size; }
  State state(float* memory) const { return State(memory, rows_, stride_); }

  // The softmax state of the keys of one split; `last` of this piece?
  void attend(int split, bool last, State state) {
    state.clear(rows_, stride_);
    const int end = smaller(keys_.end, (split + 1) * SPLIT);
    int segment = first_segment(keys_, split);
    find_tiles(keys_, segment, k_, v_);
    for (; segment < end; segment += SEGMENT) {
      if (segment + SEGMENT < end || !last)
        find_tiles(keys_, segment + SEGMENT, next_k_, next_v_);
      else
        memcpy(next_k_, after_k_, sizeof next_k_);
      if (pool_.codes) with_code(pool_, [&](auto code) { widen<decltype(code)>(segment); });
      for (int b = 0; b < blocks_; b++) attend_segment(segment, b, state);
      memcpy(k_, next_k_, sizeof k_);
      memcpy(v_, next_v_, sizeof v_);
    }
  }

  void merge(State first, State second) {
    for (int64_t row = 0; row < rows_; row++) merge_row(first, second, row, stride_);
  }

  void finish(State state) {
    const int64_t size = pool_.head_dim;
    for (int row = 0; row < rows_; row++) {
      float* values = state.values + row * stride_;
      float weights = total(load(state.weights + row * 16));
      if (a_.sinks) weights += power(a_.sinks[head_number(row)] * LOG2_E - reference(state.most[row]));
      const vf sum = splat(weights);
      T* out = head_of(static_cast<T*>(a_.out), row);
      int64_t i = 0;
      for (; i + LANES <= size; i += LANES) store(out + i, load(values + i) / sum);
      for (; i < size; i++) write(out + i, values[i] / sum[0]);
    }
  }

 private:
  typedef std::conditional_t<BY_TILES<T>, TileProducts, NoTiles> OfTiles;
  static constexpr int BLOCK_ROWS = OfTiles::ROWS, PADDED_ROWS = (BLOCK_ROWS + LANES - 1) / LANES * LANES;

  static int64_t memory_without_wide(int64_t most_rows, int64_t stride, int64_t state_size) {
    return (BLOCK_ROWS * SEGMENT + (most_rows + 15) / 16 * 16 + most_rows * stride + 2 * state_size) * sizeof(float);
  }

  // Rows of a piece: position by position, the heads of the group one after another. A block is what the kernels take.
  int block_begin(int b) const { return b * per_block_ + smaller(b, larger_blocks_); }
  template <typename Q>
  Q* head_of(Q* base, int row) const {
    return base + ((first_row_ + row / group_) * int64_t(a_.heads) + head_number(row)) * pool_.head_dim;
  }
  int64_t head_number(int row) const { return kv_head_ * group_ + row % group_; }

  // Where the keys of a piece are, and which.
  struct Keys {
    const int32_t* table;
    const char* k;          // of this layer and KV head, were it in block 0
    int32_t position, end;  // of the first row, behind the last key that a row sees
  };
  Keys keys_of(const Piece& piece, int64_t kv_head) const {
    const int count = step_.query_start[piece.sequence + 1] - step_.query_start[piece.sequence];
    const int position = step_.context[piece.sequence] - count + piece.first;
    const int32_t* table = step_.tables + int64_t(piece.sequence) * step_.table_stride;
    const int end = a_.causal ? position + piece.count : step_.context[piece.sequence];
    return {table, k_part(pool_, 0, a_.layer, kv_head), position, end};
  }
  int first_segment(const Keys& keys, int split) const {
    const int lowest = a_.window ? larger(0, keys.position - a_.window + 1) : 0;
    return larger(lowest / SEGMENT * SEGMENT, split * SPLIT);
  }

  // Where the tiles of a segment lie. Those behind the end are never read; they stand for the last one before it.
  void find_tiles(const Keys& keys, int segment, const char** k, const char** v) const {
    int entry = segment / pool_.block_size, tile = segment % pool_.block_size / TILE;
    for (int t = 0; t < SEGMENT_TILES; t++) {
      if (t == 0 || segment + t * TILE < keys.end) {
        k[t] = keys.k + keys.table[entry] * pool_.block_bytes + tile * tile_bytes_;
        v[t] = k[t] + to_v_;
        if (++tile == tiles_in_block_) entry++, tile = 0;
      } else {
        k[t] = k[t - 1];
        v[t] = v[t - 1];
      }
    }
  }

  // Tiles of 8 bits, those that a row of the piece sees, become tiles of T in scratch memory.
  template <typename Code>
  void widen(int segment) {
    const int lowest = a_.window ? larger(0, keys_.position - a_.window + 1) : 0;
    for (int t = larger(0, lowest - segment) / TILE; t < SEGMENT_TILES && segment + t * TILE < keys_.end; t++) {
      char *k = wide_ + t * wide_tile_bytes_, *v = k + SEGMENT_TILES * wide_tile_bytes_;
      widen_k<T, Code>(k_[t], next_k_[t], stride_, k);
      widen_v<T, Code>(v_[t], next_k_[t] + to_v_, stride_, v);
      k_[t] = k;
      v_[t] = v;
    }
  }

  // Keys of a segment that a row sees, as begin and end within it.
  int sees_from(int row, int segment) const {
    return a_.window ? larger(0, positions_[row] - a_.window + 1 - segment) : 0;
  }
  int sees_to(int row, int segment) const {
    return smaller(SEGMENT, (a_.causal ? positions_[row] + 1 : keys_.end) - segment);
  }

  void attend_segment(int segment, int b, State state) {
    const int top = block_begin(b), bottom = block_begin(b + 1), rows = bottom - top;
    const int begin = sees_from(top, segment), end = sees_to(bottom - 1, segment);
    if (begin >= end) return;
    // What comes next is fetched while the first block is worked on, or while a segment of 8 bits is widened.
    const bool fetches = b == 0 && !pool_.codes;
    const int from = begin / LANES, to = (end + LANES - 1) / LANES;
    if constexpr (BY_TILES<T>) {
      if (fetches) fetch_next();
      tiles_.scores(query_ + top * stride_, rows, k_ + from, to - from, scores_ + from * LANES);
      return weigh_and_add(top, bottom, segment, state);
    }
    for (int vector = from; vector < to; vector += MAX_VECTORS) {
      const int count = smaller(MAX_VECTORS, to - vector);
      const char *keys[MAX_VECTORS], *ahead[MAX_VECTORS];
      for (int c = 0; c < count; c++) {
        const int at = (vector + c) * LANES;
        keys[c] = k_[at / TILE] + at % TILE * 4;
        ahead[c] = v_[at / TILE];
      }
      products<T>.score[rows - 1][count - 1](query_ + top * stride_, keys, fetches ? ahead : nullptr, stride_,
                                             scores_ + vector * LANES);
    }
    weigh_block(top, bottom, segment, state);
    const char* const* next = fetches ? next_k_ : nullptr;
    if (sees_all(top, segment) && sees_all(bottom - 1, segment))
      return add_values(rows, 0, 0, SEGMENT, keep_, next, state.values + top * stride_);
    add_seen_values(top, bottom, top, segment, next, state);
  }

  bool sees_all(int row, int segment) const { return sees_from(row, segment) == 0 && sees_to(row, segment) == SEGMENT; }

  // Values of the keys that rows top .. bottom - 1 of a block from row `first` on see, not all of them the whole segment.
  void add_seen_values(int top, int bottom, int first, int segment, const char* const* next, State state) {
    float* out = state.values + first * stride_;
    const int common_begin = sees_from(bottom - 1, segment), common_end = sees_to(top, segment);
    // Each row alone: the keys that only some of the rows see.
    const bool common = common_begin < common_end;
    for (int row = top; row < bottom; row++) {
      const int from = sees_from(row, segment), to = sees_to(row, segment);
      if (from >= to) continue;
      scale_row(state.values + row * stride_, stride_, splat(keep_[row - first]));
      add_values(1, row - first, from, common ? common_begin : to, nullptr, nullptr, out);
    }
    if (!common) return;
    add_values(bottom - top, top - first, common_begin, common_end, nullptr, next, out);
    for (int row = top; row < bottom; row++)
      add_values(1, row - first, common_end, sees_to(row, segment), nullptr, nullptr, out);
  }

  // The second half of a segment by tiles. A row first adds the keys at the front that are a part of a step, then whole
  // steps, then the part of a step at the end. Positions ascend, so rows that see the same stand together.
  void weigh_and_add(int top, int bottom, int segment, State state) {
    weigh_block(top, bottom, segment, state);
    for (int row = top; row < bottom; row++)
      if (sees_from(row, segment) < sees_to(row, segment) && keep_[row - top] != 1)
        scale_row(state.values + row * stride_, stride_, splat(keep_[row - top]));
    if (sees_all(top, segment) && sees_all(bottom - 1, segment))
      return add_steps(top, bottom, top, 0, SEGMENT / step_keys_, state);
    add_parts(top, bottom, state, [&](int row) {
      const int from = sees_from(row, segment), step_end = (from + step_keys_ - 1) / step_keys_ * step_keys_;
      return std::pair(from, smaller(sees_to(row, segment), step_end));
    });
    for (int step = 0; step < SEGMENT / step_keys_; step++) {
      int first = top;
      while (first < bottom && sees_to(first, segment) < (step + 1) * step_keys_) first++;
      int last = first;
      while (last < bottom && sees_from(last, segment) <= step * step_keys_) last++;
      if (first < last) add_steps(first, last, top, step, step + 1, state);
    }
    add_parts(top, bottom, state, [&](int row) {
      const int to = sees_to(row, segment), begin = to / step_keys_ * step_keys_;
      return std::pair(sees_from(row, segment) > begin ? to : begin, to);
    });
  }
  void add_steps(int first, int last, int top, int begin, int end, State state) {
    tiles_.values(first - top, last - first, begin, end, v_, state.values + first * stride_);
  }
  // Values of the keys `part(row)` of each row of a block, begin and end.
  template <typename Part>
  void add_parts(int top, int bottom, State state, Part part) {
    for (int row = top, alike; row < bottom; row += alike) {
      const auto keys = part(row);
      alike = 1;
      while (row + alike < bottom && alike < MAX_ROWS && part(row + alike) == keys) alike++;
      add_values(alike, row - top, keys.first, keys.second, nullptr, nullptr, state.values + top * stride_);
    }
  }

  // Brings the values of this segment and the keys of the next one nearer.
  void fetch_next() const {
    for (int tile = 0; tile < SEGMENT_TILES; tile++)
      for (int64_t at = 0; at < tile_bytes_; at += 64) {
        __builtin_prefetch(v_[tile] + at);
        __builtin_prefetch(next_k_[tile] + at);
      }
  }

  // Scores of the rows of a block become weights, and the states of the rows follow; rows that see none are left alone.
  void weigh_block(int top, int bottom, int segment, State state) {
    int first = top, last = bottom;
    while (first < last && sees_to(first, segment) <= 0) first++;
    while (first < last && sees_from(last - 1, segment) >= SEGMENT) last--;
    float highest[PADDED_ROWS], relative[PADDED_ROWS];
    for (int row = first; row < last; row++) highest[row - first] = scale_row_scores(row, row - top, segment);
    raise(state.most + first, last - first, highest, relative, keep_ + (first - top));
    for (int row = first; row < last; row++) {
      float* const s = scores_ + (row - top) * SEGMENT;
      const auto use = [&](int at, vf weight) INLINE {
        if constexpr (BY_TILES<T>) tiles_.take(row - top, at, weight);
        store(s + at, weight);
      };
      weigh(s, sees_from(row, segment), sees_to(row, segment), relative[row - first], keep_[row - top],
            state.weights + row * 16, use);
    }
  }

  float scale_row_scores(int row, int place, int segment) {
    const int begin = sees_from(row, segment), end = sees_to(row, segment);
    float* s = scores_ + place * SEGMENT;
    const Scaling scaling{a_.scale, a_.softcap};
    if (!a_.slopes) return scale_scores<false>(s, begin, end, scaling, 0, 0);
    const float slope = a_.slopes[head_number(row)] * LOG2_E;
    return scale_scores<true>(s, begin, end, scaling, slope, segment - positions_[row]);
  }

  // Values of keys begin .. end - 1 for `rows` rows of a block from `place` on.
  void add_values(int rows, int place, int begin, int end, const float* keep, const char* const* ahead,
                  float* out) const {
    if (begin >= end) return;
    const int vectors = stride_ / LANES;
    for (int vector = 0, count; vector < vectors; vector += count) {
      count = smaller(MAX_VECTORS, vectors - vector);
      products<T>.value[rows - 1][count - 1](scores_ + place * SEGMENT, keep, v_, ahead, stride_, vector * LANES,
                                             begin, end, out + place * stride_);
    }
  }

  const AttentionArgs& a_;
  const Step& step_;
  const Pool& pool_;
  const int64_t stride_;
  const int group_, tiles_in_block_;
  const int64_t tile_bytes_;
  const int step_keys_;  // that tiles multiply at once: two tiles of V where these lie together in every block
  OfTiles tiles_;
  const int64_t to_v_;
  const int64_t wide_tile_bytes_;
  int32_t* positions_;  // [rows]
  float* scores_;  // [BLOCK_ROWS, SEGMENT]
  float keep_[2 * PADDED_ROWS];  // what a segment's greatest score leaves of the values before
  float* query_;   // [rows, stride]
  float* states_;
  char* wide_;     // [2 (K, V), SEGMENT_TILES] tiles of T, for a pool of 8 bits
  int64_t kv_head_ = 0;
  Keys keys_{};
  int first_row_ = 0, rows_ = 0;
  int blocks_ = 0, per_block_ = 0, larger_blocks_ = 0;  // the first ones have a row more
  const char *k_[SEGMENT_TILES], *v_[SEGMENT_TILES], *next_k_[SEGMENT_TILES], *next_v_[SEGMENT_TILES];
  const char* after_k_[SEGMENT_TILES];  // the first segment of the piece after this one
};

template <typename T>
void attention(const AttentionArgs& a, const Step& step, Team& team) {
  Plan plan(step, a, team.threads());
  const int64_t kv_heads = a.pool->kv_heads, state_size = plan.state_size(plan.most_rows());
  const int64_t list_bytes = (plan.pieces() * int64_t(sizeof(Piece)) + 63) / 64 * 64;
  const int64_t work_bytes = Worker<T>::memory(*a.pool, plan.most_rows(), state_size);
  char* memory = team.scratch(list_bytes + work_bytes);
  Piece* list = reinterpret_cast<Piece*>(memory);
  plan.list(list);
  Worker<T> worker(a, step, memory + list_bytes, plan.most_rows(), state_size);
  char* shared = nullptr;
  if (plan.shared_states()) shared = team.shared(Team::SHARED_ZEROS + plan.shared_states() * sizeof(float));
  static_assert(Plan::MAX_SLOTS * sizeof(std::atomic<int32_t>) <= Team::SHARED_ZEROS, "a counter for each slot");

  const int64_t pieces = plan.pieces() * kv_heads;
  for (int64_t i = team.next(), after; i < pieces; i = after) {
    const Piece& piece = list[i / kv_heads];
    const int64_t kv_head = i % kv_heads;
    worker.begin(piece, kv_head);
    // Taken before it is begun, so that its keys can be fetched.
    after = team.next();
    if (after < pieces) worker.follow(list[after / kv_heads], after % kv_heads);
    if (piece.slot < 0) {
      State state = worker.state(worker.own_state(0, state_size));
      worker.attend(piece.split, piece.splits == 1, state);
      for (int split = 1; split < piece.splits; split++) {
        State more = worker.state(worker.own_state(1, state_size));
        worker.attend(piece.split + split, split + 1 == piece.splits, more);
        worker.merge(state, more);
      }
      worker.finish(state);
      continue;
    }
    const int64_t size = plan.state_size(plan.rows(piece));
    float* states =
        reinterpret_cast<float*>(shared + Team::SHARED_ZEROS) + piece.states + kv_head * piece.splits * size;
    worker.attend(piece.split + piece.index, true, worker.state(states + piece.index * size));
    auto& done = reinterpret_cast<std::atomic<int32_t>*>(shared)[piece.slot * kv_heads + kv_head];
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < piece.splits) continue;
    done.store(0, std::memory_order_relaxed);
    for (int split = 1; split < piece.splits; split++)
      worker.merge(worker.state(states), worker.state(states + split * size));
    worker.finish(worker.state(states));
  }
}

}  // namespace

void run_attention(const AttentionArgs& a, const Step& step, int64_t, Team& team) {
  if (a.dtype == F32) return attention<float>(a, step, team);
  attention<bf16>(a, step, team);
}
