// The softmax of attention, row by row and segment by segment: scores become weights, and a row's state follows.
#pragma once
#include "attention_kernel.h"

static const float NOTHING = -__builtin_inff(), LOG2_E = 1.44269504f;

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

// How scores of base e become scores of base 2.
struct Scaling {
  float scale, softcap;  // softcap 0: none
};

// Scores of one row of a segment, keys begin .. end - 1 of which it sees, become those of base 2; what it does not see of
// their vectors becomes -inf. A key's bias is slope times its distance, `distance` for key 0. Returns the greatest.
template <bool ALIBI>
static inline float scale_scores(float* s, int begin, int end, Scaling scaling, float slope, int distance) {
  const vf lanes = lane_numbers();
  const vf scale = splat(scaling.softcap ? LOG2_E : scaling.scale * LOG2_E);
  vf most = splat(NOTHING);
  for (int at = begin / LANES * LANES; at < end; at += LANES) {
    const vf number = lanes + float(at);
    const vf bias = ALIBI ? (number + float(distance)) * slope : vf{};
    vf x = load(s + at);
    if (scaling.softcap) x = vec_softcap(x * scaling.scale, scaling.softcap);
    x = multiply_add(x, scale, bias);
    if (at < begin || at + LANES > end) x = number >= float(begin) && number < float(end) ? x : splat(NOTHING);
    store(s + at, x);
    most = vec_max(x, most);
  }
  return largest(most)[0];
}

// The greatest scores so far of `rows` rows, `most`, meet those of a segment. What exp is then taken relative to, and the
// factor that is left of the sums before. The arrays are padded to whole vectors.
static inline void raise(float* most, int rows, const float* highest, float* relative, float* keep) {
  float before[LANES], now[LANES];
  for (int r = 0; r < rows; r += LANES) {
    const int count = rows - r < LANES ? rows - r : LANES;
    memcpy(before, most + r, count * sizeof(float));
    const vf old = load(before), high = load(highest + r), greater = high > old ? high : old;
    const vf reference = greater == NOTHING ? vf{} : greater;
    store(relative + r, reference);
    store(keep + r, vec_exp2(old - reference));
    store(now, greater);
    memcpy(most + r, now, count * sizeof(float));
  }
}

// Scores of base 2 of one row become weights, which `use(at, weights)` takes, LANES at a time. The row's sum of weights,
// [16], first keeps `keep` of what it was.
template <typename Use>
static inline void weigh(const float* s, int begin, int end, float relative, float keep, float* weights, Use use) {
  vf sum = multiply_add(load(weights), splat(keep), vf{});
  for (int at = begin / LANES * LANES; at < end; at += LANES) {
    const vf weight = vec_exp2(load(s + at) - relative);
    use(at, weight);
    sum += weight;
  }
  store(weights, sum);
}
