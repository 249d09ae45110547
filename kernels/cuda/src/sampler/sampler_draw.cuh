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

constexpr int SHORTLIST = 3584;
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
  static constexpr bool SEEKS_FEW = true;
  const float* scores;
  int32_t count;

  template <typename Visit>
  __device__ __forceinline__ void operator()(Visit visit) const {
    for (int i = threadIdx.x; i < count; i += blockDim.x) visit(scores[i]);
  }
};
struct EachOfRow {
  static constexpr bool SEEKS_FEW = false;  // a walk reads the row
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

// What a row's ids are cut by.
struct Cuts {
  bool top_k, top_p, min_p;

  __device__ __forceinline__ Cuts(const SamplerRow& r, int vocab)
      : top_k(r.top_k > 0 && r.top_k < vocab), top_p(r.top_p < 1.0f), min_p(r.min_p > 0.0f) {}
  __device__ __forceinline__ bool any() const { return top_k || top_p || min_p; }
};

__device__ __forceinline__ float temperature_of(const SamplerRow& r) {
  return max(r.temperature, SMALLEST_NORMAL);  // so that its inverse is a number
}

// The same with the largest score / temperature.
struct Cut : Cuts {
  float temperature, most;

  __device__ __forceinline__ Cut(const SamplerRow& r, const Peak& peak, int vocab)
      : Cuts(r, vocab), temperature(temperature_of(r)), most(peak.most / temperature) {}
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
  const uint32_t low = key_of(edge), high = key_of(cut.most);
  if (cut.top_k) {
    const uint32_t wanted = r.top_k;
    floor = find_threshold<ForEach::SEEKS_FEW>(reinterpret_cast<uint32_t*>(sums), wanted, low, high, for_each,
                                               [](float) { return 1u; });
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
    const float nucleus = find_threshold<ForEach::SEEKS_FEW>(sums, wanted > 0 ? wanted : uint64_t(1), low, high,
                                                             for_each, weigh);
    floor = max(floor, nucleus);
  }
  if (cut.min_p) floor = max(floor, cut.most + logf(max(r.min_p, 1e-38f)));
  return floor;
}

// A score that some thousand ids reach: three quarters of the maxima of disjoint parts of the row do.
__device__ __forceinline__ float find_bound(const Maxima& maxima, const Peak& peak, Shortlist& list) {
#pragma unroll
  for (int k = 0; k < 4; k++) list.scores[k * blockDim.x + threadIdx.x] = maxima.of[k];
  const EachOf parts = {list.scores, static_cast<int32_t>(4 * blockDim.x)};
  const uint32_t wanted = 3 * blockDim.x;
  return find_threshold<true>(reinterpret_cast<uint32_t*>(list.sums), wanted, key_of(NEVER), key_of(peak.most), parts,
                              [](float) { return 1u; });
}

// Fills the list with the ids of at least `bound`. Returns the mass of the whole row, if it is asked for.
__device__ __forceinline__ uint64_t fill(const Row& row, const Cut& cut, const Peak& peak, float bound, bool sums,
                                         Shortlist& list) {
  const float inverse = 1.0f / cut.temperature;
  uint64_t mass = 0;
  if (threadIdx.x == 0) list.count = 0;
  __syncthreads();
  for_groups<true, 3>(row, [&](int group, float (&x)[4]) {
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
class Race {
 public:
  // bar: the best will be at least this.
  __device__ __forceinline__ Race(float temperature, float bar)
      : temperature_(temperature), scale_(LOG2_E / temperature), bar_(bar) {}

  // The scores of a group; those below `floor` take no part. A warp makes every call together.
  __device__ __forceinline__ void take(const SamplerRow& r, int group, const float (&x)[4], float floor) {
    // log2 of 2^32 exp(-bar), less what is lost below by rounding.
    const float level = 32.0f - LOG2_E * (bar_ - 0.01f - fabsf(bar_) * 0x1p-20f);
    const float limit = fmaf(largest(x), scale_, level);  // log2 of the largest word that can win
    if (!__any_sync(FULL_WARP, limit >= -1.0f)) return;
    const uint4 words = philox(r.seed, r.position, group);
    const uint32_t least = min(min(words.x, words.y), min(words.z, words.w));
    const bool can_win = static_cast<float>(least) <= exp2_approx(limit);
    if (!__any_sync(FULL_WARP, can_win)) return;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const uint32_t word = word_of(words, k);
      const float score = x[k] / temperature_;
      if (static_cast<float>(word) > exp2_approx(fmaf(x[k], scale_, level)) || score < floor) continue;
      const float total = score + gumbel(word);
      mine_ = max(mine_, total);
      best_ = Larger()(best_, ranked(total, 4 * group + k));
    }
    bar_ = max(bar_, across_warp(mine_, Larger()));
  }

  // Of the block, as `ranked` has it; called by all its threads.
  __device__ __forceinline__ uint64_t best() const { return across_block(best_, Larger()); }

 private:
  const float temperature_, scale_;
  float bar_, mine_ = NEVER;
  uint64_t best_ = 0;
};

__device__ __forceinline__ int draw_from_row(const SamplerRow& r, const Row& row, const Cut& cut, float floor) {
  Race race(cut.temperature, cut.most + LEAST_GUMBEL);
  for_groups<true, 2>(row, [&](int group, float (&x)[4]) {
    row.forbid(group, x);
    race.take(r, group, x, floor);
  });
  return id_of(race.best());
}

constexpr int UNLISTED = -1;  // in place of a token: there is no list that holds all that is kept

// The token where the floor lies in the list, whose scores are divided by the temperature. edge: ids of this very score
// may be missing; NEVER: none is.
__device__ __forceinline__ int draw_listed(const SamplerRow& r, const Cut& cut, uint64_t mass, float edge,
                                           Shortlist& list) {
  const float floor = find_floor(r, cut, mass, edge, list.sums, EachOf{list.scores, list.count});
  return floor > edge || edge == NEVER ? draw_from_list(r, floor, list) : UNLISTED;
}

// The token where it does not.
__device__ __forceinline__ int draw_unlisted(const SamplerRow& r, const Row& row, const Cut& cut, uint64_t mass,
                                             Shortlist& list) {
  const float floor = find_floor(r, cut, mass, NEVER, list.sums, EachOfRow{row, cut.temperature});
  return draw_from_row(r, row, cut, floor);
}

// The token by a second pass, or UNLISTED and the row's mass. Called by all threads of the block, with what the first
// pass found.
__device__ __forceinline__ int draw(const SamplerRow& r, const Row& row, const Maxima& maxima, const Peak& peak,
                                    Shortlist& list, uint64_t& mass) {
  const Cut cut(r, peak, row.vocab);
  if (!(fabsf(cut.most) < NOISELESS)) return peak.id;
  if (!cut.any()) return UNLISTED;
  const float bound = row.vocab > SHORTLIST ? find_bound(maxima, peak, list) : NEVER;
  const uint64_t sum = fill(row, cut, peak, bound, cut.top_p && !cut.top_k, list);
  if (threadIdx.x == 0) mass = sum;
  return list.count <= SHORTLIST ? draw_listed(r, cut, sum, bound / cut.temperature, list) : UNLISTED;
}

}  // namespace
