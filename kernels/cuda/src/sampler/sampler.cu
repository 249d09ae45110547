// The sampler: SamplingRows of kernels/ops.py, a row by one block. docs/kernels-cuda.md counts its passes over memory.
//
// Grid: x rows. Block: whole warps, at most THREADS; so many where the vocabulary has more ids than SHORTLIST.
#include "sampler_draw.cuh"
#include "sampler_edits.cuh"
#include "sampler_params.cuh"

enum { FINE, NOT_FINITE, NOTHING_ALLOWED };

namespace {

constexpr int THREADS = 512;  // two blocks run on a multiprocessor: one reads while the other looks for a threshold

struct Drawn {
  int32_t token, status;
  float logprob;
};

__device__ __forceinline__ Drawn draw_row(const SamplerParams& p, const SamplerRow& r) {
  SHARED(bool, touched, THREADS);
  const uint32_t* mask = r.mask < 0 ? nullptr : p.mask_words + static_cast<int64_t>(r.mask) * ((p.vocab + 31) / 32);
  const Row row = {p.logits + static_cast<int64_t>(blockIdx.x) * p.vocab, mask, p.vocab};
  const float nothing = __uint_as_float(0x7fc00000u);  // NaN
  Given given;
  Maxima maxima;
  for_groups<false>(row, [&](int group, float (&x)[4]) {
    given.take(x, r.want_logprob);
    row.forbid(group, x);
    maxima.take(group, x);
  });
  if (!given.finite()) return {0, NOT_FINITE, nothing};
  const float log_sum = r.want_logprob ? given.log_sum() : 0.0f;
  const bool edited = has_edits(r);
  if (edited) {
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
  const Peak peak = maxima.peak(row);
  if (peak.most == NEVER) return {0, NOTHING_ALLOWED, nothing};
  const int token = r.temperature > 0.0f ? draw(r, row, maxima, peak) : peak.id;
  if (!r.want_logprob) return {token, FINE, nothing};
  return {token, FINE, (edited ? given_logit(p, r, row.scores, token) : row.scores[token]) - log_sum};
}

__device__ __forceinline__ void sample_row(const SamplerParams& p) {
  const SamplerRow& r = p.rows[blockIdx.x];
  const Drawn drawn = draw_row(p, r);
  if (threadIdx.x) return;
  p.tokens[blockIdx.x] = drawn.token;
  p.status[blockIdx.x] = drawn.status;
  p.logprobs[blockIdx.x] = drawn.logprob;
  if (r.slot >= 0) p.last_tokens[r.slot] = drawn.token;
}

}  // namespace

KERNEL(sample, SamplerParams, THREADS, sample_row)
