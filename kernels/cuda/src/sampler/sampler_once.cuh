// A row that is read once, by one block or by several with a part of it each; the last of these to come ends the draw.
//
// A sample of the row gives a bound before the pass, so that the short list and the mass of what is not listed come from
// the pass that finds the peak. The bound and the sums of whole numbers are the same for any number of parts.
#pragma once
#include "sampler_draw.cuh"

namespace {

constexpr int LISTED = 2800;  // ids of at least the bound, about
constexpr int TOO_MANY = -2;  // in place of a token: the list has no room for all above the bound
constexpr int LINE = 8;       // groups of a sample that lie side by side: 128 bytes

// Two keys, the larger one and the inverse of the smaller one.
struct Wider {
  __device__ __forceinline__ uint64_t operator()(uint64_t a, uint64_t b) const {
    constexpr uint64_t LOW = 0xffffffffu;
    return max(a & ~LOW, b & ~LOW) | max(a & LOW, b & LOW);
  }
};

// A score that some LISTED ids of the row reach, if its sample is like it.
__device__ __forceinline__ float guess_bound(const Row& row, uint32_t* sums) {
  const int lines = (row.end + LINE - 1) / LINE, taken = 4 * blockDim.x / LINE;
  int groups[4];
  float4 read[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const int line = static_cast<int>((j * blockDim.x + threadIdx.x) / LINE);
    groups[j] = line * lines / taken * LINE + threadIdx.x % LINE;
    read[j] = row.read(groups[j]);
  }
  float most[4] = {NEVER, NEVER, NEVER, NEVER};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    float x[4] = {read[j].x, read[j].y, read[j].z, read[j].w};
    row.forbid(groups[j], x);
#pragma unroll
    for (int k = 0; k < 4; k++) most[k] = max(most[k], x[k]);
  }
  uint64_t range = 0;
#pragma unroll
  for (int k = 0; k < 4; k++)
    if (most[k] > NEVER) range = Wider()(range, static_cast<uint64_t>(key_of(most[k])) << 32 | ~key_of(most[k]));
  for (int i = threadIdx.x; i < DIGITS; i += blockDim.x) sums[i] = 0;
  range = across_block(range, Wider());
  if (!range) return LOWEST;
  const float high = of_key(static_cast<uint32_t>(range >> 32)), low = of_key(~static_cast<uint32_t>(range));
  const float scale = high > low ? (DIGITS - 1) / (high - low) : 0.0f;
#pragma unroll
  for (int k = 0; k < 4; k++)
    if (most[k] > NEVER)  // 0 where NaN; the scale of maxima that hardly differ may be infinite
      atomicAdd(&sums[static_cast<int>(min(DIGITS - 1.0f, max(0.0f, (most[k] - low) * scale)))], 1u);
  __syncthreads();
  const int maxima = 4 * blockDim.x;
  const float share = static_cast<float>(LISTED) / row.vocab, below = max(1.0f - share, 0.0f);
  const uint32_t wanted = 1 + static_cast<uint32_t>((maxima - 1) * (1.0f - below * below * below * below));
  const int digit = find_digit(sums, wanted).digit;
  if (digit < 0) return LOWEST;
  return scale > 0.0f ? low + digit / scale : low;
}

// What a block finds in its part of the row, the ids of at least the bound in the list. Called by all its threads.
__device__ __forceinline__ SamplerPart look(const SamplerRow& r, const Row& part, float bound, Shortlist& list) {
  const Cuts cuts(r, part.vocab);
  const bool draws = r.temperature > 0.0f, lists = draws && cuts.any(), races = draws && !lists;
  const bool sums = lists && cuts.top_p && !cuts.top_k;
  const float scale = LOG2_E / temperature_of(r);
  Race race(temperature_of(r), LOWEST / 4);
  Given given;
  Maxima maxima;
  uint64_t tail = 0;
  if (threadIdx.x == 0) list.count = 0;
  __syncthreads();
  const auto see = [&](int group, float (&x)[4]) {
    given.take(x, false);
    part.forbid(group, x);
    maxima.take(group, x);
  };
  if (races) {
    for_groups<false, 2>(part, [&](int group, float (&x)[4]) {
      see(group, x);
      race.take(r, group, x, NEVER);
    });
  } else if (!lists) {
    for_groups<false>(part, see);
  } else {
    for_groups<false>(part, [&](int group, float (&x)[4]) {
      see(group, x);
      if (sums) {  // a listed one counts as 1
        float mass = 0.0f;
#pragma unroll
        for (int k = 0; k < 4; k++) mass += exp2_approx(min(0.0f, (x[k] - bound) * scale));
        tail += static_cast<uint64_t>(mass * 0x1p40f);
      }
      if (largest(x) < bound) return;
      int count = 0;
#pragma unroll
      for (int k = 0; k < 4; k++) count += x[k] >= bound;
      int at = atomicAdd(&list.count, count);
#pragma unroll
      for (int k = 0; k < 4; k++) {
        if (x[k] < bound) continue;
        if (at < SHORTLIST) list.scores[at] = x[k], list.ids[at] = 4 * group + k;
        at++;
      }
    });
  }
  SamplerPart found;
  found.finite = given.finite();  // a barrier: the list is complete
  found.peak = maxima.peak(part);
  found.drawn = races ? race.best() : 0;
  found.listed = list.count;
  found.tail = sums ? across_block(tail, Plus()) - (static_cast<uint64_t>(found.listed) << 40) : 0;
  return found;
}

// Leaves what a block found for the last one of its row. True for that one, which then has all of it.
__device__ __forceinline__ bool gather(const SamplerParams& p, int row, int part, SamplerPart& found, Shortlist& list) {
  constexpr int MAX_PARTS = 16;
  SHARED(SamplerPart, parts, MAX_PARTS);
  SHARED(int, is_last, 1);
  const int64_t first = static_cast<int64_t>(row) * p.parts, mine = (first + part) * SHORTLIST;
  for (int i = threadIdx.x; i < min(found.listed, SHORTLIST); i += blockDim.x) {
    p.listed_scores[mine + i] = list.scores[i];
    p.listed_ids[mine + i] = list.ids[i];
  }
  if (threadIdx.x == 0) p.found[first + part] = found;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last[0] = atomicInc(&p.arrived[row], p.parts - 1u) == p.parts - 1u;  // and is zero again
    __threadfence();
  }
  __syncthreads();
  if (!is_last[0]) return false;
  if (threadIdx.x < static_cast<unsigned>(p.parts)) parts[threadIdx.x] = p.found[first + threadIdx.x];
  __syncthreads();
  const int warp = threadIdx.x / 32, its = warp % p.parts;  // the part that this warp reads
  int before = 0;
  found = {0, 0, 0, 0, 1};
  for (int i = 0; i < p.parts; i++) {
    if (i == its) before = found.listed;
    found.peak = Larger()(found.peak, parts[i].peak);
    found.drawn = Larger()(found.drawn, parts[i].drawn);
    found.tail += parts[i].tail;
    found.listed += parts[i].listed;
    found.finite &= parts[i].finite;
  }
  if (found.listed <= SHORTLIST) {
    const int64_t from = (first + its) * SHORTLIST;
    const int stride = blockDim.x / p.parts;
#pragma unroll 4
    for (int i = warp / p.parts * 32 + threadIdx.x % 32; i < parts[its].listed; i += stride) {
      list.scores[before + i] = p.listed_scores[from + i];
      list.ids[before + i] = p.listed_ids[from + i];
    }
  }
  __syncthreads();
  return true;
}

// The token of a row of which all was found; UNLISTED and the row's mass; or TOO_MANY. Called by all threads of the
// block.
__device__ __forceinline__ int draw_found(const SamplerRow& r, int vocab, const SamplerPart& found, float bound,
                                          Shortlist& list, uint64_t& mass) {
  const Peak peak(found.peak);
  if (!(r.temperature > 0.0f)) return peak.id;
  const Cut cut(r, peak, vocab);
  if (!(fabsf(cut.most) < NOISELESS)) return peak.id;
  if (!cut.any()) return id_of(found.drawn);
  if (found.listed > SHORTLIST) return TOO_MANY;
  if (threadIdx.x == 0) list.count = found.listed;
  uint64_t sum = 0;
  for (int i = threadIdx.x; i < found.listed; i += blockDim.x) {
    const float score = list.scores[i] / cut.temperature;
    list.scores[i] = score;
    if (cut.top_p && !cut.top_k) sum += mass_of(score - cut.most);
  }
  __syncthreads();
  if (cut.top_p && !cut.top_k) {
    const float unit = exp2_approx((bound - peak.most) * (LOG2_E / cut.temperature));  // of the tail
    sum = across_block(sum, Plus()) + static_cast<uint64_t>(static_cast<double>(found.tail) * unit);
  }
  if (threadIdx.x == 0) mass = sum;
  return draw_listed(r, cut, sum, bound > LOWEST ? bound / cut.temperature : NEVER, list);
}

}  // namespace
