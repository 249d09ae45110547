// How rows are sampled, as operations/sampling.py packs it; the meaning: SamplingRows, kernels/ops.py.
#pragma once
#include "ptx.cuh"

// One row; first_*, end_*: its entries in the arrays below.
struct SamplerRow {
  uint64_t seed;
  int64_t position;
  float temperature;
  float top_p;
  float min_p;
  float presence;
  float frequency;
  float repetition;
  int32_t top_k;
  int32_t want_logprob;
  int32_t slot;  // the drawn token becomes its last one; below zero: of none
  int32_t mask;  // row of mask_words; below zero: every id is allowed
  int32_t first_bias;
  int32_t end_bias;
  int32_t first_banned;
  int32_t end_banned;
  int32_t first_history;
  int32_t first_output;  // in the history, the prompt's tokens come before
  int32_t end_history;
};

// What one of several blocks has found in its part of a row.
struct SamplerPart {
  uint64_t peak;   // the largest score and its id
  uint64_t drawn;  // of a row that is not cut: the same with noise
  uint64_t tail;   // the mass of what is not listed
  int32_t listed;  // ids above the bound
  int32_t finite;
};

struct SamplerParams {
  float* logits;               // [rows or more, vocab]; what bias, bans and penalties change is changed here
  const SamplerRow* rows;      // [rows]
  const int32_t* bias_ids;     // equal ids of a row lie side by side
  const float* bias_values;    // as many
  const int32_t* banned_ids;   //
  const int32_t* history_ids;  // below zero: ~slot, that slot's last token
  const uint32_t* mask_words;  // [masks, (vocab + 31) / 32] bit i of word w: id 32 w + i is allowed
  float* bias_before;          // room for as many numbers as there are biases
  float* history_before;       // room for as many numbers as the history has tokens
  int32_t* history_counts;     // the same
  int32_t* last_tokens;        // [slots]
  int32_t* tokens;             // [rows], the results
  int32_t* status;             // [rows]
  float* logprobs;             // [rows], NaN where none is wanted
  SamplerPart* found;          // [rows, parts]; this and the next three are not used where a row is not split
  float* listed_scores;        // [rows, parts, SHORTLIST]
  int32_t* listed_ids;         // [rows, parts, SHORTLIST]
  uint32_t* arrived;           // [rows] blocks that are done; zero before and after a launch
  int32_t vocab;
  int32_t parts;  // of a row, a block for each; a power of two, at most 16
};
