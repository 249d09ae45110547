// The operations as functions. One or several threads of the team call them with the same arguments, and return when no
// piece is left to take. `rows` is resolved.
#pragma once
#include "ops.h"
#include "team.h"

void run_linear(const LinearArgs&, int64_t rows, Team&);
void run_embed(const EmbedArgs&, const Step&, int64_t rows, Team&);
void run_experts(const ExpertsArgs&, Team&);
void run_low_rank(const LowRankArgs&, Team&);
void run_route(const RouteArgs&, int64_t rows, Team&);
void run_combine(const CombineArgs&, int64_t rows, Team&);
void run_norm(const NormArgs&, int64_t rows, Team&);
void run_gated(const GatedArgs&, int64_t rows, Team&);
void run_activate(const ActivateArgs&, int64_t rows, Team&);
void run_add(const AddArgs&, int64_t rows, Team&);
void run_select(const SelectArgs&, const Step&, int64_t rows, Team&);
void run_rope(const RopeArgs&, const Step&, int64_t rows, Team&);
void run_attention(const AttentionArgs&, const Step&, int64_t rows, Team&);
void run_sample(const SampleArgs&, int64_t rows, Team&);
// One row of a packed weight as float32 (gemm.cpp), for embeddings that share the output matrix.
void unpack_row(const void* packed, int32_t weight_format, int64_t inputs, int64_t outputs, int64_t row, float* out);

void run_copy(const CopyArgs&, int64_t rows, Team&);
