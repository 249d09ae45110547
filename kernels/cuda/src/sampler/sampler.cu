// The sampler: SamplingRows of kernels/ops.py. docs/kernels-cuda.md counts its passes over memory.
//
// Grid: x parts of a row, y rows. Block: whole warps, at most THREADS; so many where the vocabulary has more ids than
// SHORTLIST.
#include "sampler_edits.cuh"
#include "sampler_once.cuh"
#include "sampler_params.cuh"

enum { FINE, NOT_FINITE, NOTHING_ALLOWED };

namespace {

constexpr int THREADS = 512;  // two blocks run on a multiprocessor: one reads while the other looks for a threshold

// What is needed again at a row's end, by all threads alike. Registers would be too few.
struct Kept {
  uint64_t peak, mass;
  float log_sum;
};

// Any row, by one block: its token or UNLISTED.
__device__ __forceinline__ int draw_row(const SamplerParams& p, const SamplerRow& r, const Row& row, Shortlist& list,
                                        int& status, Kept& kept) {
  SHARED(bool, touched, THREADS);
  Given given;
  Maxima maxima;
  for_groups<false>(row, [&](int group, float (&x)[4]) {
    given.take(x, r.want_logprob);
    row.forbid(group, x);
    maxima.take(group, x);
  });
  if (!given.finite()) {
    status = NOT_FINITE;
    return 0;
  }
  if (r.want_logprob) {
    const float log_sum = given.log_sum();
    if (threadIdx.x == 0) kept.log_sum = log_sum;
  }
  if (has_edits(r)) {
    touch(p, r, touched);
    add_bias(p, r, row.scores);
    ban(p, r, row.scores);
    penalise(p, r, row.scores);
    if (touched[threadIdx.x]) {
      maxima = Maxima();
      for_groups<false>(row, [&](int group, float (&x)[4]) {
        row.forbid(group, x);
        maxima.take(group, x);
      });
    }
  }
  const uint64_t rank = maxima.peak(row);
  const Peak peak(rank);
  if (threadIdx.x == 0) kept.peak = rank;
  if (peak.most == NEVER) {
    status = NOTHING_ALLOWED;
    return 0;
  }
  return r.temperature > 0.0f ? draw(r, row, maxima, peak, list, kept.mass) : peak.id;
}

// A row of which nothing is known but its token, and to which nothing is done.
__device__ __forceinline__ bool is_plain(const SamplerRow& r, int vocab) {
  return vocab > SHORTLIST && !r.want_logprob && !has_edits(r);
}

__device__ __forceinline__ void sample_row(const SamplerParams& p) {
  SHARED(Shortlist, lists, 1);
  SHARED(Kept, kepts, 1);
  Kept& kept = kepts[0];
  Shortlist& list = lists[0];
  const int at = blockIdx.y, part = blockIdx.x;
  const SamplerRow& r = p.rows[at];
  const uint32_t* mask = r.mask < 0 ? nullptr : p.mask_words + static_cast<int64_t>(r.mask) * ((p.vocab + 31) / 32);
  const Row row = {p.logits + static_cast<int64_t>(at) * p.vocab, mask, p.vocab, 0, (p.vocab + 3) / 4};
  int token = TOO_MANY, status = FINE;
  if (is_plain(r, p.vocab)) {
    const bool lists = r.temperature > 0.0f && Cuts(r, p.vocab).any();
    const float bound = lists ? guess_bound(row, reinterpret_cast<uint32_t*>(list.sums)) : NEVER;
    SamplerPart found = look(r, row.part(part, p.parts), bound, list);
    if (p.parts > 1 && !gather(p, at, part, found, list)) return;
    if (threadIdx.x == 0) kept.peak = found.peak;
    status = !found.finite ? NOT_FINITE : number_of(found.peak) == NEVER ? NOTHING_ALLOWED : FINE;
    token = status == FINE ? draw_found(r, p.vocab, found, bound, list, kept.mass) : 0;
  } else if (part) {
    return;
  }
  if (token == TOO_MANY) token = draw_row(p, r, row, list, status, kept);
  __syncthreads();
  if (token == UNLISTED) token = draw_unlisted(r, row, Cut(r, Peak(kept.peak), p.vocab), kept.mass, list);
  const bool known = r.want_logprob && status == FINE;
  const float given = !known ? 0.0f : has_edits(r) ? given_logit(p, r, row.scores, token) : row.scores[token];
  if (threadIdx.x) return;
  p.tokens[at] = token;
  p.status[at] = status;
  p.logprobs[at] = known ? given - kept.log_sum : __uint_as_float(0x7fc00000u);  // NaN
  if (r.slot >= 0) p.last_tokens[r.slot] = token;
}

}  // namespace

RESIDENT_KERNEL(sample, SamplerParams, THREADS, 2, sample_row)
