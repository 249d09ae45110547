// A token drawn from a row of scores: top-k, top-p and min-p as one threshold, then Gumbel-max.
//
// Few ids matter where a row is cut: those above a bound that the maxima of the first pass give are put into a short
// list in shared memory, and the threshold is found there. Only where the list does not hold it (a flat distribution,
// very many ties) the whole row is gone through again, some seven times.
#pragma once
#include "philox.cuh"
#include "sampler_params.cuh"
#include "sampler_row.cuh"

namespace {

constexpr int SHORTLIST = 3072;
constexpr float SMALLEST_NORMAL = 0x1p-126f, LOG2_E = 1.4426950408889634f;
constexpr float NOISELESS = 0x1p30f;  // beside a score as large as this, all noise is lost in rounding

struct Shortlist {
  uint64_t sums[DIGITS];
  float scores[SHORTLIST];  // divided by the temperature
  int32_t ids[SHORTLIST];
  int32_t count;  // of the ids above the bound; more than SHORTLIST: some are not here
};

// The scores of a thread, for find_threshold: of the first `count` of an array; of a whole row, rarely needed and so
// with few registers.
struct EachOf {
  const float* scores;
  int32_t count;

  template <typename Visit>
  __device__ __forceinline__ void operator()(Visit visit) const {
    for (int i = threadIdx.x; i < count; i += blockDim.x) visit(scores[i]);
  }
};
struct EachOfRow {
  const Row& row;
  float temperature;

  template <typename Visit>
  __device__ __forceinline__ void operator()(Visit visit) const {
    for_groups<false, 1>(row, [&](int group, float (&x)[4]) {
      row.forbid(group, x);
#pragma unroll
      for (int k = 0; k < 4; k++) visit(x[k] / temperature);
    });
  }
};

// What a row's ids are cut by. `most` is the largest score / temperature.
struct Cut {
  float temperature, most;
  bool top_k, top_p, min_p;

  __device__ __forceinline__ Cut(const SamplerRow& r, const Peak& peak, int vocab)
      : temperature(max(r.temperature, SMALLEST_NORMAL)),  // so that its inverse is a number
        most(peak.most / temperature),
        top_k(r.top_k > 0 && r.top_k < vocab),
        top_p(r.top_p < 1.0f),
        min_p(r.min_p > 0.0f) {}
};

// The probability mass of a score this far from the largest, in units of 2^-40 of the largest's.
__device__ __forceinline__ uint64_t mass_of(float distance) {
  return static_cast<uint64_t>(__expf(distance) * 0x1p40f);
}

// The smallest score that is kept. mass: of all scores, needed for top-p without top-k. for_each (see find_threshold)
// may leave out scores up to `edge`, and then a result that is no higher than that means nothing.
template <typename ForEach>
__device__ __forceinline__ float find_floor(const SamplerRow& r, const Cut& cut, uint64_t mass, float edge,
                                            uint64_t* sums, ForEach for_each) {
  float floor = NEVER;
  if (cut.top_k) {
    const uint32_t wanted = r.top_k;
    floor = find_threshold(reinterpret_cast<uint32_t*>(sums), wanted, for_each, [](float) { return 1u; });
    if (floor <= edge && edge > NEVER) return NEVER;  // top-p needs the mass of all that top-k leaves
  }
  if (cut.top_p) {
    const auto weigh = [&](float score) { return score >= floor ? mass_of(score - cut.most) : uint64_t(0); };
    if (cut.top_k) {
      mass = 0;
      for_each([&](float score) { mass += weigh(score); });
      mass = across_block(mass, Plus());
    }
    const uint64_t wanted = static_cast<uint64_t>(ceil(static_cast<double>(r.top_p) * static_cast<double>(mass)));
    const float nucleus = find_threshold(sums, wanted > 0 ? wanted : uint64_t(1), for_each, weigh);
    floor = max(floor, nucleus);
  }
  if (cut.min_p) floor = max(floor, cut.most + logf(max(r.min_p, 1e-38f)));
  return floor;
}

// A score that some thousand ids reach: three quarters of the maxima of disjoint parts of the row do.
__device__ __forceinline__ float find_bound(const Maxima& maxima, Shortlist& list) {
#pragma unroll
  for (int k = 0; k < 4; k++) list.scores[k * blockDim.x + threadIdx.x] = maxima.of[k];
  const EachOf parts = {list.scores, static_cast<int32_t>(4 * blockDim.x)};
  const uint32_t wanted = 3 * blockDim.x;
  return find_threshold(reinterpret_cast<uint32_t*>(list.sums), wanted, parts, [](float) { return 1u; });
}

// Fills the list with the ids of at least `bound`. Returns the mass of the whole row, if it is asked for.
__device__ __forceinline__ uint64_t fill(const Row& row, const Cut& cut, const Peak& peak, float bound, bool sums,
                                         Shortlist& list) {
  const float inverse = 1.0f / cut.temperature;
  uint64_t mass = 0;
  if (threadIdx.x == 0) list.count = 0;
  __syncthreads();
  for_groups<true>(row, [&](int group, float (&x)[4]) {
    row.forbid(group, x);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      if (sums) mass += mass_of((x[k] - peak.most) * inverse);
      if (x[k] < bound || x[k] == NEVER) continue;
      const int at = atomicAdd(&list.count, 1);
      if (at >= SHORTLIST) continue;
      list.scores[at] = x[k];
      list.ids[at] = 4 * group + k;
    }
  });
  __syncthreads();
  for (int i = threadIdx.x; i < min(list.count, SHORTLIST); i += blockDim.x) list.scores[i] /= cut.temperature;
  return sums ? across_block(mass, Plus()) : 0;
}

__device__ __forceinline__ int draw_from_list(const SamplerRow& r, float floor, const Shortlist& list) {
  uint64_t best = 0;
  for (int i = threadIdx.x; i < list.count; i += blockDim.x) {
    const float score = list.scores[i];
    if (score < floor) continue;
    const int id = list.ids[i];
    const uint32_t word = word_of(philox(r.seed, r.position, id / 4), id % 4);
    best = Larger()(best, ranked(score + gumbel(word), id));
  }
  return id_of(across_block(best, Larger()));
}

// Noise costs far more than reading a score, and most tokens cannot win: with u for a token's word, its noise is at
// most -log(u), so it needs u < exp(score - best so far). The logarithms are taken only where that holds.
__device__ __forceinline__ int draw_from_row(const SamplerRow& r, const Row& row, const Cut& cut, float floor) {
  const float scale = LOG2_E / cut.temperature;
  uint64_t best = 0;
  float mine = NEVER, bar = cut.most + LEAST_GUMBEL;  // the best will be at least this
  for_groups<true>(row, [&](int group, float (&x)[4]) {
    row.forbid(group, x);
    // log2 of 2^32 exp(-bar), less what is lost below by rounding.
    const float level = 32.0f - LOG2_E * (bar - 0.01f - fabsf(bar) * 0x1p-20f);
    const float limit = fmaf(largest(x), scale, level);  // log2 of the largest word that can win
    if (!__any_sync(FULL_WARP, limit >= -1.0f)) return;
    const uint4 words = philox(r.seed, r.position, group);
    const uint32_t least = min(min(words.x, words.y), min(words.z, words.w));
    const bool can_win = static_cast<float>(least) <= exp2_approx(limit);
    if (!__any_sync(FULL_WARP, can_win)) return;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const uint32_t word = word_of(words, k);
      const float score = x[k] / cut.temperature;
      if (static_cast<float>(word) > exp2_approx(fmaf(x[k], scale, level)) || score < floor) continue;
      const float total = score + gumbel(word);
      mine = max(mine, total);
      best = Larger()(best, ranked(total, 4 * group + k));
    }
    bar = max(bar, across_warp(mine, Larger()));
  });
  return id_of(across_block(best, Larger()));
}

// Called by all threads of the block, with what the first pass found.
__device__ __forceinline__ int draw(const SamplerRow& r, const Row& row, const Maxima& maxima, const Peak& peak) {
  SHARED(Shortlist, lists, 1);
  Shortlist& list = lists[0];
  const Cut cut(r, peak, row.vocab);
  if (!(fabsf(cut.most) < NOISELESS)) return peak.id;
  if (!cut.top_k && !cut.top_p && !cut.min_p) return draw_from_row(r, row, cut, NEVER);
  const float bound = row.vocab > SHORTLIST ? find_bound(maxima, list) : NEVER;
  const uint64_t mass = fill(row, cut, peak, bound, cut.top_p && !cut.top_k, list);
  if (list.count <= SHORTLIST) {
    const float edge = bound / cut.temperature;  // ids with this very score may be missing
    const float floor = find_floor(r, cut, mass, edge, list.sums, EachOf{list.scores, list.count});
    if (floor > edge || edge == NEVER) return draw_from_list(r, floor, list);
  }
  const float floor = find_floor(r, cut, mass, NEVER, list.sums, EachOfRow{row, cut.temperature});
  return draw_from_row(r, row, cut, floor);
}

}  // namespace
