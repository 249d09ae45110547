// Operations that read and write rows of activations once: embedding, norms, activations, residual, selection, and
// what stands before and after the experts of a mixture.
//
// Arithmetic is float32 whatever the rows are stored in. The last vector of a row that is not full takes the same path
// as the others, padded with zeros, so that a number does not depend on where it stands.
#include <algorithm>
#include <atomic>
#include <cmath>

#include "kernels.h"
#include "vec/vec_math.h"

namespace {

// Numbers per piece of work: about a microsecond, much more than taking the piece costs.
constexpr int64_t PIECE = 4096;

// Calls body(first row, end row) for pieces of whole rows.
template <typename Body>
void share_rows(int64_t rows, int64_t width, Team& team, Body body) {
  const int64_t each = std::max<int64_t>(1, PIECE / std::max<int64_t>(1, width));
  const int64_t pieces = (rows + each - 1) / each;
  for (int64_t i; (i = team.next()) < pieces;) body(i * each, std::min(rows, (i + 1) * each));
}

// Calls body(row, first column, end column); wide rows are cut.
template <typename Body>
void share_blocks(int64_t rows, int64_t width, Team& team, Body body) {
  if (width <= PIECE) {
    share_rows(rows, width, team, [&](int64_t first, int64_t end) {
      for (int64_t row = first; row < end; row++) body(row, 0, width);
    });
    return;
  }
  const int64_t cuts = (width + PIECE - 1) / PIECE;
  for (int64_t i; (i = team.next()) < rows * cuts;) {
    const int64_t first = i % cuts * PIECE;
    body(i / cuts, first, std::min(width, first + PIECE));
  }
}

// Calls body(first, n) for each vector of first .. end; n < LANES for the last at most.
template <typename Body>
inline void each_vector(int64_t first, int64_t end, Body body) {
  int64_t i = first;
  for (; i + LANES <= end; i += LANES) body(i, int64_t(LANES));
  if (i < end) body(i, end - i);
}

// Calls run(zero of the type that `dtype` means).
template <typename Run>
void with_type(int32_t dtype, Run run) {
  if (dtype == BF16)
    run(bf16());
  else
    run(float());
}

// Sums term(first, n) over a row: four running sums, joined in a fixed order.
template <typename Term>
inline float sum_row(int64_t width, Term term) {
  vf sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * LANES <= width; i += 4 * LANES)
    for (int j = 0; j < 4; j++) sums[j] += term(i + j * LANES, int64_t(LANES));
  each_vector(i, width, [&](int64_t first, int64_t n) { sums[0] += term(first, n); });
  float lanes[LANES];
  store(lanes, (sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (int half = LANES / 2; half; half /= 2)
    for (int j = 0; j < half; j++) lanes[j] += lanes[j + half];
  return lanes[0];
}

template <typename T>
void norm_row(const NormArgs& a, int64_t row) {
  const int64_t width = a.hidden;
  const T* x = static_cast<const T*>(a.x) + row * width;
  T* out = static_cast<T*>(a.out) + row * width;
  if (a.residual) {
    T* residual = static_cast<T*>(a.residual) + row * width;
    each_vector(0, width, [&](int64_t i, int64_t n) {
      store_part(residual + i, load_part(residual + i, n) + load_part(x + i, n), n);
    });
    x = residual;
  }
  float mean = 0;
  if (a.layer_norm) mean = sum_row(width, [&](int64_t i, int64_t n) { return load_part(x + i, n); }) / width;
  const float squares = sum_row(width, [&](int64_t i, int64_t n) {
    vf v = load_part(x + i, n) - mean;
    if (n < LANES)
      for (int64_t j = n; j < LANES; j++) v[j] = 0;  // the padding lies at -mean
    return v * v;
  });
  const float scale = 1.0f / std::sqrt(squares / width + a.eps);
  each_vector(0, width, [&](int64_t i, int64_t n) {
    vf v = (load_part(x + i, n) - mean) * scale * load_part(a.weight + i, n);
    if (a.bias) v += load_part(a.bias + i, n);
    store_part(out + i, v, n);
  });
}

template <int kind>
inline vf activation(vf x) {
  if (kind == SILU) return x / (1.0f + vec_exp(-x));
  if (kind == GELU) return x * vec_normal_cdf(x);
  if (kind == GELU_TANH) {  // (1 + tanh y) / 2 is the sigmoid of 2 y
    vf inner = x * multiply_add(splat(0.044715f) * x, x, splat(1.0f));
    return x / (1.0f + vec_exp(-1.5957691216f * inner));
  }
  return x < 0.0f ? vf{} : x;  // NaN stays
}

// What a gate and what stands beside it give.
template <int kind>
inline vf gated(vf gate, vf up) {
  if (kind != CLAMPED_SWIGLU) return activation<kind>(gate) * up;
  gate = vec_min(splat(7.0f), gate);  // NaN stays
  up = vec_max(splat(-7.0f), vec_min(splat(7.0f), up));
  return gate / (1.0f + vec_exp(-1.702f * gate)) * (up + 1.0f);
}

// Calls run(a constant that is the activation).
template <typename Run>
void with_activation(int32_t kind, Run run) {
  switch (kind) {
    case SILU: return run(std::integral_constant<int, SILU>());
    case GELU: return run(std::integral_constant<int, GELU>());
    case GELU_TANH: return run(std::integral_constant<int, GELU_TANH>());
    default: return run(std::integral_constant<int, RELU>());
  }
}

template <typename T, typename Table>
void embed_row(const EmbedArgs& a, const Table* source, int64_t position, T* out) {
  const T* place = a.places ? static_cast<const T*>(a.places) + position * a.hidden : nullptr;
  each_vector(0, a.hidden, [&](int64_t i, int64_t n) {
    vf v = load_part(source + i, n) * a.scale;
    if (place) v += load_part(place + i, n);
    store_part(out + i, v, n);
  });
}

// The experts of one row, as indices in `chosen`, and their weights.
void route_row(const RouteArgs& a, int64_t row, int32_t* chosen) {
  const float* logits = a.logits + row * a.experts;
  float* weights = a.weights + row * a.top_k;
  for (int32_t k = 0; k < a.top_k; k++) {
    int32_t best = -1;
    for (int32_t e = 0; e < a.experts; e++) {  // those behind the last one: smaller, or equal with a higher index
      if (k && !(logits[e] < logits[chosen[k - 1]] || (logits[e] == logits[chosen[k - 1]] && e > chosen[k - 1]))) continue;
      if (best < 0 || logits[e] > logits[best]) best = e;
    }
    chosen[k] = std::max(best, 0);  // NaN is behind none: the row's weights are NaN then, whatever the expert
  }
  const float largest = logits[chosen[0]];
  const float sum = sum_row(a.experts, [&](int64_t i, int64_t n) {
    vf v = vec_exp(load_part(logits + i, n) - largest);
    for (int64_t j = n; j < LANES; j++) v[j] = 0;
    return v;
  });
  float total = 0;
  for (int32_t k = 0; k < a.top_k; k++) total += weights[k] = vec_exp(splat(logits[chosen[k]] - largest))[0] / sum;
  for (int32_t k = 0; a.normalize && k < a.top_k; k++) weights[k] /= total;
}

// Counts the rows of each expert, then gives each its place; `places` hold the experts before.
void sort_by_expert(const RouteArgs& a, int64_t rows, int32_t* next) {
  std::fill(a.starts, a.starts + a.experts + 1, 0);
  for (int64_t i = 0; i < rows * a.top_k; i++) a.starts[a.places[i] + 1]++;
  for (int32_t e = 0; e < a.experts; e++) a.starts[e + 1] += a.starts[e];
  std::copy(a.starts, a.starts + a.experts, next);
  for (int64_t i = 0; i < rows * a.top_k; i++) {
    const int32_t place = next[a.places[i]]++;
    a.places[i] = place;
    a.order[place] = int32_t(i / a.top_k);
  }
}

template <typename T>
void combine_row(const CombineArgs& a, int64_t row, int64_t first, int64_t end) {
  const float* weights = a.weights + row * a.top_k;
  const int32_t* places = a.places + row * a.top_k;
  const T *x = static_cast<const T*>(a.x), *shared = static_cast<const T*>(a.shared);
  const vf gate = shared ? 1.0f / (1.0f + vec_exp(-splat(a.shared_logits[row]))) : vf{};
  each_vector(first, end, [&](int64_t i, int64_t n) {
    vf sum = {};
    for (int32_t k = 0; k < a.top_k; k++)
      sum = multiply_add(splat(weights[k]), load_part(x + places[k] * int64_t(a.size) + i, n), sum);
    if (shared) sum = multiply_add(gate, load_part(shared + row * a.size + i, n), sum);
    store_part(static_cast<T*>(a.out) + row * a.size + i, sum, n);
  });
}

}  // namespace

void run_route(const RouteArgs& a, int64_t rows, Team& team) {
  auto& done = *reinterpret_cast<std::atomic<int64_t>*>(team.shared(Team::SHARED_ZEROS));
  share_rows(rows, int64_t(a.experts) * a.top_k, team, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++) route_row(a, row, a.places + row * a.top_k);
    if (done.fetch_add(end - first, std::memory_order_acq_rel) + end - first < rows) return;
    done.store(0, std::memory_order_relaxed);
    sort_by_expert(a, rows, reinterpret_cast<int32_t*>(team.scratch(a.experts * sizeof(int32_t))));
  });
}

void run_combine(const CombineArgs& a, int64_t rows, Team& team) {
  with_type(a.dtype, [&](auto type) {
    share_blocks(rows, a.size, team, [&](int64_t row, int64_t first, int64_t end) {
      combine_row<decltype(type)>(a, row, first, end);
    });
  });
}

void run_embed(const EmbedArgs& a, const Step& step, int64_t rows, Team& team) {
  float* unpacked = a.packed ? reinterpret_cast<float*>(team.scratch(a.hidden * sizeof(float))) : nullptr;
  with_type(a.dtype, [&](auto type) {
    typedef decltype(type) T;
    share_rows(rows, a.hidden, team, [&](int64_t first, int64_t end) {
      for (int64_t row = first; row < end; row++) {
        const int64_t token = step.tokens[row], position = a.places ? step.positions[row] : 0;
        T* out = static_cast<T*>(a.out) + row * a.hidden;
        if (unpacked) {
          unpack_row(a.table, a.table_dtype, a.hidden, a.vocab, token, unpacked);
          embed_row(a, unpacked, position, out);
        } else {
          with_type(a.table_dtype, [&](auto table_type) {
            typedef decltype(table_type) Table;
            embed_row(a, static_cast<const Table*>(a.table) + token * a.hidden, position, out);
          });
        }
      }
    });
  });
}

void run_norm(const NormArgs& a, int64_t rows, Team& team) {
  with_type(a.dtype, [&](auto type) {
    share_rows(rows, a.hidden, team, [&](int64_t first, int64_t end) {
      for (int64_t row = first; row < end; row++) norm_row<decltype(type)>(a, row);
    });
  });
}

void run_gated(const GatedArgs& a, int64_t rows, Team& team) {
  with_type(a.dtype, [&](auto type) {
    typedef decltype(type) T;
    auto run = [&](auto kind) {
      share_blocks(rows, a.size, team, [&](int64_t row, int64_t first, int64_t end) {
        const T* gate = static_cast<const T*>(a.x) + row * 2 * a.size;
        T* out = static_cast<T*>(a.out) + row * a.size;
        each_vector(first, end, [&](int64_t i, int64_t n) {
          store_part(out + i, gated<kind()>(load_part(gate + i, n), load_part(gate + a.size + i, n)), n);
        });
      });
    };
    if (a.activation == CLAMPED_SWIGLU) return run(std::integral_constant<int, CLAMPED_SWIGLU>());
    with_activation(a.activation, run);
  });
}

void run_activate(const ActivateArgs& a, int64_t rows, Team& team) {
  with_type(a.dtype, [&](auto type) {
    typedef decltype(type) T;
    auto run = [&](auto kind) {
      share_blocks(rows, a.size, team, [&](int64_t row, int64_t first, int64_t end) {
        T* x = static_cast<T*>(a.x) + row * a.size;
        each_vector(first, end, [&](int64_t i, int64_t n) {
          const vf v = load_part(x + i, n);
          store_part(x + i, kind() == SOFTCAP ? vec_softcap(v, a.cap) : activation<kind()>(v), n);
        });
      });
    };
    if (a.activation == SOFTCAP) return run(std::integral_constant<int, SOFTCAP>());
    with_activation(a.activation, run);
  });
}

void run_add(const AddArgs& a, int64_t rows, Team& team) {
  with_type(a.dtype, [&](auto type) {
    typedef decltype(type) T;
    share_blocks(rows, a.size, team, [&](int64_t row, int64_t first, int64_t end) {
      T* residual = static_cast<T*>(a.residual) + row * a.size;
      const T* x = static_cast<const T*>(a.x) + row * a.size;
      each_vector(first, end, [&](int64_t i, int64_t n) {
        store_part(residual + i, load_part(residual + i, n) + load_part(x + i, n), n);
      });
    });
  });
}

void run_select(const SelectArgs& a, const Step& step, int64_t rows, Team& team) {
  const int64_t bytes = a.size * (a.dtype == BF16 ? sizeof(bf16) : sizeof(float));
  share_rows(rows, a.size, team, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++)
      memcpy(static_cast<char*>(a.out) + row * bytes,
             static_cast<const char*>(a.x) + step.sample_rows[row] * bytes, bytes);
  });
}
