// Bias, bans and penalties, made in the row itself.
//
// Ids repeat, and no two threads may add to one score: the order of float additions would show. Biases of one id lie
// side by side and are added by one thread, in order. A history is counted in the place of the scores: they are put
// aside, each with the entry of the history that names it, and whole numbers take their place until all is counted.
// That needs room for two numbers a token, where counters beside the row would take one for every id of the vocabulary
// and row.
#pragma once
#include "sampler_params.cuh"
#include "sampler_row.cuh"

namespace {

__device__ __forceinline__ bool has_edits(const SamplerRow& r) {
  return r.first_bias < r.end_bias || r.first_banned < r.end_banned || r.first_history < r.end_history;
}

// A token of the history. last_tokens is written at the very end, and only the row of the slot may name it here.
__device__ __forceinline__ int known_token(const SamplerParams& p, int entry) {
  const int id = p.history_ids[entry];
  return id < 0 ? p.last_tokens[~id] : id;
}

__device__ __forceinline__ void add_bias(const SamplerParams& p, const SamplerRow& r, float* scores) {
  for (int i = r.first_bias + threadIdx.x; i < r.end_bias; i += blockDim.x) {
    const int id = p.bias_ids[i];
    if (i > r.first_bias && p.bias_ids[i - 1] == id) continue;  // the thread of the first of them adds all
    const float before = scores[id];
    float score = before;
    for (int j = i; j < r.end_bias && p.bias_ids[j] == id; j++) {
      p.bias_before[j] = before;
      score += p.bias_values[j];
    }
    scores[id] = score;
  }
  __syncthreads();
}

__device__ __forceinline__ void ban(const SamplerParams& p, const SamplerRow& r, float* scores) {
  for (int i = r.first_banned + threadIdx.x; i < r.end_banned; i += blockDim.x) scores[p.banned_ids[i]] = NEVER;
  __syncthreads();
}

// Entries of one id all write the same, so it does not matter which of them is the last.
__device__ __forceinline__ void penalise(const SamplerParams& p, const SamplerRow& r, float* scores) {
  int32_t* counts = reinterpret_cast<int32_t*>(scores);
  const int first = r.first_history + threadIdx.x, end = r.end_history, stride = blockDim.x;
  for (int i = first; i < end; i += stride) p.history_before[i] = scores[known_token(p, i)];
  __syncthreads();
  for (int i = first; i < end; i += stride) counts[known_token(p, i)] = 0;
  __syncthreads();
  for (int i = r.first_output + threadIdx.x; i < end; i += stride) atomicAdd(&counts[known_token(p, i)], 1);
  __syncthreads();
  for (int i = first; i < end; i += stride) p.history_counts[i] = counts[known_token(p, i)];
  __syncthreads();
  for (int i = first; i < end; i += stride) {
    const int count = p.history_counts[i];
    float score = p.history_before[i];
    score = score > 0.0f ? score / r.repetition : score * r.repetition;
    score -= __fmul_rn(r.frequency, static_cast<float>(count));  // rounded before it is subtracted
    if (count > 0) score -= r.presence;
    scores[known_token(p, i)] = score;
  }
  __syncthreads();
}

// The threads that read an edited id in for_groups.
__device__ __forceinline__ void touch(const SamplerParams& p, const SamplerRow& r, bool* touched) {
  const auto note = [&](int id) { touched[id / 4 % blockDim.x] = true; };
  touched[threadIdx.x] = false;
  __syncthreads();
  for (int i = r.first_bias + threadIdx.x; i < r.end_bias; i += blockDim.x) note(p.bias_ids[i]);
  for (int i = r.first_banned + threadIdx.x; i < r.end_banned; i += blockDim.x) note(p.banned_ids[i]);
  for (int i = r.first_history + threadIdx.x; i < r.end_history; i += blockDim.x) note(known_token(p, i));
  __syncthreads();
}

// The logit of an id as it was before the edits. Called by all threads of the block.
__device__ __forceinline__ float given_logit(const SamplerParams& p, const SamplerRow& r, const float* scores, int id) {
  SHARED(float, found, 1);
  if (threadIdx.x == 0) found[0] = scores[id];
  __syncthreads();
  for (int i = r.first_history + threadIdx.x; i < r.end_history; i += blockDim.x)
    if (known_token(p, i) == id) found[0] = p.history_before[i];
  __syncthreads();
  for (int i = r.first_bias + threadIdx.x; i < r.end_bias; i += blockDim.x)  // biases came first
    if (p.bias_ids[i] == id) found[0] = p.bias_before[i];
  __syncthreads();
  return found[0];
}

}  // namespace
