// The softmax of attention, row by row and segment by segment: scores become weights, and a row's state follows.
#pragma once
#include "attention_kernel.h"

static const float NOTHING = -__builtin_inff();

using Lanes = std::make_integer_sequence<int, LANES>;

template <int... I>
static inline vf numbers(std::integer_sequence<int, I...>) {
  return vf{float(I)...};
}
static inline vf lane_numbers() { return numbers(Lanes()); }

// Lanes i and i ^ WIDTH change places.
template <int WIDTH, int... I>
static inline vf exchange(vf v, std::integer_sequence<int, I...>) {
  return __builtin_shuffle(v, vi{(I ^ WIDTH)...});
}
// Folds the lanes of a vector, halves first; each lane of the result holds it.
template <int WIDTH = LANES / 2, typename Fold>
static inline vf fold(vf v, Fold both) {
  v = both(v, exchange<WIDTH>(v, Lanes()));
  if constexpr (WIDTH > 1) v = fold<WIDTH / 2>(v, both);
  return v;
}
static inline vf largest(vf v) {
  return fold(v, [](vf a, vf b) { return vec_max(a, b); });
}
static inline float total(vf v) {
  return fold(v, [](vf a, vf b) { return a + b; })[0];
}

static inline void scale_row(float* x, int64_t size, vf factor) {
  for (int64_t i = 0; i < size; i += LANES) store(x + i, load(x + i) * factor);
}

// The softmax of some rows over some keys, not yet divided: sums of weighted values, sums of weights lane by lane,
// and the largest score (of base 2) so far.
struct State {
  float* values;   // [rows, stride]
  float* weights;  // [rows, 16]
  float* most;     // [rows]

  State(float* memory, int64_t rows, int64_t stride)
      : values(memory), weights(memory + rows * stride), most(memory + rows * (stride + 16)) {}

  void clear(int64_t rows, int64_t stride) {
    memset(values, 0, rows * stride * sizeof(float));
    memset(weights, 0, rows * 16 * sizeof(float));
    for (int64_t r = 0; r < rows; r++) most[r] = NOTHING;
  }
};

// What `exp` is taken relative to; a row with scores that are all -inf or NaN must not become NaN by -inf - -inf.
static inline float reference(float most) { return most == NOTHING ? 0.0f : most; }
static inline float power(float x) { return vec_exp2(splat(x))[0]; }

// first and then second, of one row, into first.
static inline void merge_row(State first, State second, int64_t row, int64_t stride) {
  float *weights = first.weights + row * 16, *values = first.values + row * stride;
  const float *more_weights = second.weights + row * 16, *more_values = second.values + row * stride;
  if (second.most[row] == NOTHING && total(load(more_weights)) == 0.0f) return;
  const float most = first.most[row] > second.most[row] ? first.most[row] : second.most[row];
  const vf keep = splat(power(first.most[row] - reference(most)));
  const vf take = splat(power(second.most[row] - reference(most)));
  store(weights, multiply_add(load(weights), keep, multiply_add(load(more_weights), take, vf{})));
  for (int64_t i = 0; i < stride; i += LANES)
    store(values + i, multiply_add(load(values + i), keep, multiply_add(load(more_values + i), take, vf{})));
  first.most[row] = most;
}

// Brings the greatest score and the sum of weights of a row to a segment with the greatest score `highest`. Returns
// what exp is taken relative to, and the factor that the row's values still need.
static inline vf raise(State state, int64_t row, vf highest, float* keep) {
  const float before = state.most[row], now = highest[0] > before ? highest[0] : before;
  const vf relative = splat(reference(now)), factor = vec_exp2(splat(before) - relative);
  float* weights = state.weights + row * 16;
  store(weights, multiply_add(load(weights), factor, vf{}));
  state.most[row] = now;
  *keep = factor[0];
  return relative;
}

// Scores of one row of a segment become weights; its state follows. The row sees keys begin .. end - 1.
template <bool ALIBI>
static inline void weigh_part(float* s, int begin, int end, float scale, float slope, int distance, State state,
                              int64_t row, float* keep) {
  vf most = splat(NOTHING);
  const vf lanes = lane_numbers();
  for (int at = begin / LANES * LANES; at < end; at += LANES) {
    const vf number = lanes + float(at);
    const vf bias = ALIBI ? (number + float(distance)) * slope : vf{};
    vf x = multiply_add(load(s + at), splat(scale), bias);
    x = number >= float(begin) && number < float(end) ? x : splat(NOTHING);
    store(s + at, x);
    most = vec_max(x, most);
  }
  const vf relative = raise(state, row, largest(most), keep);
  vf sum = load(state.weights + row * 16);
  for (int at = begin / LANES * LANES; at < end; at += LANES) {
    const vf weight = vec_exp2(load(s + at) - relative);
    store(s + at, weight);
    sum += weight;
  }
  store(state.weights + row * 16, sum);
}

// The same in registers, for a row that sees the whole segment.
template <bool ALIBI>
static inline void weigh_whole(float* s, float scale, float slope, int distance, State state, int64_t row,
                               float* keep) {
  const int vectors = SEGMENT / LANES;
  const vf lanes = lane_numbers();
  vf x[vectors], most = splat(NOTHING);
  times<vectors>([&](auto i) INLINE {
    const vf bias = ALIBI ? (lanes + float(i * LANES) + float(distance)) * slope : vf{};
    x[i] = multiply_add(load(s + i * LANES), splat(scale), bias);
    most = vec_max(x[i], most);
  });
  const vf relative = raise(state, row, largest(most), keep);
  vf sum = load(state.weights + row * 16);
  times<vectors>([&](auto i) INLINE {
    x[i] = vec_exp2(x[i] - relative);
    store(s + i * LANES, x[i]);
    sum += x[i];
  });
  store(state.weights + row * 16, sum);
}

template <bool ALIBI>
static inline void weigh(float* s, int begin, int end, float scale, float slope, int distance, State state,
                         int64_t row, float* keep) {
  if (begin == 0 && end == SEGMENT) return weigh_whole<ALIBI>(s, scale, slope, distance, state, row, keep);
  weigh_part<ALIBI>(s, begin, end, scale, slope, distance, state, row, keep);
}
