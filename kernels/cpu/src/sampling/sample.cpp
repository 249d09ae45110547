// The sampler: SamplingRows of kernels/ops.py, a row by one thread.
//
// Noise is made only where it can matter. A token with score and random word that cannot reach the best so far is dropped
// by a bound that costs a few instructions; the logarithms of the exact noise are taken for the few that are left.
#include "../kernels.h"
#include "philox.h"
#include "sample_floor.h"

namespace {

enum Status : int64_t { FINE = 0, NOT_FINITE = 1, NOTHING_ALLOWED = 2 };

// Product before sum, each rounded separately, as the definition has it; compilers like to fuse them.
float minus_product(float x, float a, float b) {
  volatile float product = a * b;
  return x - product;
}

bool has_edits(const SampleArgs& a, int64_t row) {
  const auto any = [row](const int64_t* start) { return start && start[row] < start[row + 1]; };
  return any(a.bias_start) || any(a.banned_start) || any(a.history_start) || (a.mask_row && a.mask_row[row] >= 0);
}

void apply_mask(const uint32_t* words, int64_t vocab, float* scores) {
  vu lane;
  for (int i = 0; i < LANES; i++) lane[i] = 1u << i;
  for (int64_t i = 0; i < vocab; i += LANES) {
    const vu bits = (words[i / 32] >> (i % 32)) - vu{};
    vf v = load(scores + i);  // the bench has room behind the last
    store(scores + i, (bits & lane) != 0 ? v : splat(NEVER));
  }
}

// counts: [vocab], whatever it holds.
void apply_penalties(const SampleArgs& a, int64_t row, float* scores, float* counts) {
  const int64_t first = a.history_start[row], end = a.history_start[row + 1];
  const int64_t* ids = a.history_ids;
  for (int64_t i = first; i < end; i++) counts[ids[i]] = 0;
  for (int64_t i = first; i < end; i++) counts[ids[i]] += a.history_is_output[i];
  const float repetition = a.repetition[row];
  for (int64_t i = first; i < end; i++) {
    const float count = counts[ids[i]];
    if (count < 0) continue;
    counts[ids[i]] = -1;  // done
    float& score = scores[ids[i]];
    score = score > 0 ? score / repetition : score * repetition;
    score = minus_product(score, a.frequency[row], count);
    if (count > 0) score -= a.presence[row];
  }
}

// bench.scores = the row, edited.
void edit(const SampleArgs& a, int64_t row, const float* logits, Bench& bench) {
  float* scores = bench.scores;
  memcpy(scores, logits, a.vocab * sizeof(float));
  if (a.bias_start)
    for (int64_t i = a.bias_start[row]; i < a.bias_start[row + 1]; i++) scores[a.bias_ids[i]] += a.bias_values[i];
  if (a.banned_start)
    for (int64_t i = a.banned_start[row]; i < a.banned_start[row + 1]; i++) scores[a.banned_ids[i]] = NEVER;
  if (a.mask_row && a.mask_row[row] >= 0)
    apply_mask(a.mask_words + a.mask_row[row] * ((a.vocab + 31) / 32), a.vocab, scores);
  if (a.history_start) apply_penalties(a, row, scores, bench.weights);
}

// Gumbel-max over scores / temperature of at least `floor`, the largest of which is `most`. A floor asks for
// temperature 1.
int64_t draw(const float* scores, int64_t vocab, float temperature, float most, float floor, uint64_t seed,
             int64_t position) {
  const vf inverse = splat(1.0f / temperature);
  float best = NEVER;
  int64_t token = 0;
  vf bar, reach;
  const auto raise = [&] {
    // The best will be at least this; less what the comparisons below lose by rounding.
    float least = std::max(best, most + LEAST_GUMBEL);
    least -= 0.01f + std::fabs(least) * 0x1p-20f;
    bar = splat(least), reach = splat(std::max(floor, least - MAX_GUMBEL));
  };
  raise();
  const auto consider = [&](int64_t i, vf v, const vu& words) {
    // noise <= -log(u), so a token that wins has u <= exp(score - bar). A whole number n and a fraction f written as
    // the bits of a float make 2^n (1 + f), which 2^(n + f) never exceeds. u is in units of 2^-32 here.
    vf ahead = v * inverse - bar;
    ahead = ahead < -80.0f ? splat(-80.0f) : ahead;
    ahead = ahead > 60.0f ? splat(60.0f) : ahead;
    const vf exponent = multiply_add(ahead, splat(0x1p23f * 1.44269504f), splat(0x1p23f * 159));
    const vf bound = (vf)__builtin_convertvector(exponent, vi);
    uint32_t which = at_least(bound, __builtin_convertvector(words, vf));
    if (!which) return;
    for (; which; which &= which - 1) {
      const int lane = __builtin_ctz(which);
      const float score = v[lane] / temperature;
      if (!(score >= floor)) continue;
      const float total = score + gumbel(words[lane]);
      if (total > best) best = total, token = i + lane;
    }
    raise();
  };
  const auto group = [&](int64_t i, vf first, vf second) {
    if (!(at_least(first * inverse, reach) | at_least(second * inverse, reach))) return;
    const Words words = philox(seed, position, i);
    consider(i, first, words.first);
    consider(i + LANES, second, words.second);
  };
  int64_t i = 0;
  for (; i + 2 * LANES <= vocab; i += 2 * LANES) group(i, load(scores + i), load(scores + i + LANES));
  if (i < vocab)
    group(i, load_ending(scores + i, vocab - i, NEVER), load_ending(scores + i + LANES, vocab - i - LANES, NEVER));
  return token;
}

// A token of the scores with this peak; bench.scores may be these.
int64_t draw_truncated(const SampleArgs& a, int64_t row, const float* scores, const Peak& peak, Bench& bench) {
  // At least the smallest normal number, so that its inverse is a number.
  const float temperature = std::max(a.temperature[row], 0x1p-126f), most = peak.most / temperature;
  if (!std::isfinite(most)) return peak.where;  // so cold that it overflows: the limit
  const uint64_t seed = a.seed[row];
  const int64_t position = a.position[row], k = a.top_k[row];
  const bool top_k = k > 0 && k < a.vocab, top_p = a.top_p[row] < 1, min_p = a.min_p[row] > 0;
  if (!top_k && !top_p && !min_p) return draw(scores, a.vocab, temperature, most, NEVER, seed, position);
  for (int64_t i = 0; i + LANES <= a.vocab; i += LANES) store(bench.scores + i, load(scores + i) / temperature);
  for (int64_t i = a.vocab / LANES * LANES; i < a.vocab; i++) bench.scores[i] = scores[i] / temperature;
  float floor = NEVER;
  if (top_k) floor = floor_of_top_k(bench.scores, a.vocab, k, bench);
  if (top_p) floor = floor_of_top_p(bench.scores, a.vocab, a.top_p[row], most, floor, bench);
  if (min_p) floor = std::max(floor, most + std::log(std::max(a.min_p[row], 1e-38f)));
  return draw(bench.scores, a.vocab, 1.0f, most, floor, seed, position);
}

void sample_row(const SampleArgs& a, int64_t row, Bench& bench) {
  const float* logits = a.logits + row * a.vocab;
  const Peak given = find_peak(logits, a.vocab);
  a.tokens[row] = given.where;
  a.status[row] = given.finite ? FINE : NOT_FINITE;
  if (a.logprobs) a.logprobs[row] = NAN;
  if (!given.finite) return;
  const float* scores = logits;
  Peak peak = given;
  if (has_edits(a, row)) {
    edit(a, row, logits, bench);
    scores = bench.scores;
    peak = find_peak(scores, a.vocab);
    a.tokens[row] = peak.where;
    if (peak.most == NEVER) {
      a.status[row] = NOTHING_ALLOWED;
      return;
    }
  }
  if (a.temperature[row] > 0) a.tokens[row] = draw_truncated(a, row, scores, peak, bench);
  if (a.logprobs && a.want_logprob[row]) {
    const double sum = sum_exp(logits, a.vocab, given.most);
    a.logprobs[row] = float(double(logits[a.tokens[row]]) - given.most - std::log(sum));
  }
}

// Rows that are plain argmaxima. Few rows are cut into ranges of columns, so that all threads have work; the thread
// that ends the last piece joins them.
void sample_greedily(const SampleArgs& a, int64_t rows, Team& team) {
  constexpr int64_t COLUMNS = 16384;
  const int64_t vocab = a.vocab, cuts = rows < 2 * team.threads() ? std::max<int64_t>(1, vocab / COLUMNS) : 1;
  const auto finish = [&](int64_t row, const Peak& peak) {
    a.tokens[row] = peak.where;
    a.status[row] = peak.finite ? FINE : NOT_FINITE;
  };
  const auto first_of = [&](int64_t cut) { return vocab * cut / cuts; };
  auto& done = *reinterpret_cast<std::atomic<int64_t>*>(team.shared(Team::SHARED_ZEROS));
  for (int64_t i; (i = team.next()) < rows * cuts;) {
    const int64_t row = i / cuts, first = first_of(i % cuts), count = first_of(i % cuts + 1) - first;
    float* logits = a.logits + row * vocab + first;
    Peak peak = find_peak(logits, count);
    if (cuts == 1) {
      finish(row, peak);
      continue;
    }
    peak.where += first;
    memcpy(logits, &peak, sizeof peak);  // the numbers that were here are not needed any more
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < rows * cuts) continue;
    done.store(0, std::memory_order_relaxed);
    for (int64_t each = 0; each < rows; each++) {
      Peak best;
      for (int64_t cut = 0; cut < cuts; cut++) {
        Peak part;
        memcpy(static_cast<void*>(&part), a.logits + each * vocab + first_of(cut), sizeof part);
        part.finite &= best.finite;
        const bool higher = part.most > best.most;
        best.finite = part.finite;
        if (higher) best = part;
      }
      finish(each, best);
    }
  }
}

}  // namespace

void run_sample(const SampleArgs& a, int64_t rows, Team& team) {
  if (a.greedy) return sample_greedily(a, rows, team);
  Bench bench(team.scratch(Bench::bytes(a.vocab)), a.vocab);
  for (int64_t row; (row = team.next()) < rows;) sample_row(a, row, bench);
}
