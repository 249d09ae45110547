// What crosses from Python into this library: one array of Commands and one Step, by address.
//
// `orcinus_run` executes the commands in order with one team of threads; a command begins when the one before has ended
// on all of them, so it may read what an earlier one wrote. Python mirrors every struct (kernels/cpu/commands.py) and
// compares sizes when it loads the library. Meaning, shapes and formulas of the operations: kernels/ops.py.
//
// Results do not depend on how work is divided among threads, nor on what else is in the batch: each output number is
// computed by one thread in an order that is fixed by its row alone.
#pragma once
#include <cstdint>

enum DType : int32_t { F32 = 0, BF16 = 1 };

// Rows of a command: a number, or one of these, which the Step resolves. A recorded program is so run at any size. Less
// 2 for each further time they stand for a multiple: -3 is twice the tokens, -4 twice the samples.
enum Rows : int32_t { ROWS_TOKENS = -1, ROWS_SAMPLES = -2 };

enum Op : int32_t {
  OP_LINEAR = 1,
  OP_EMBED = 2,
  OP_NORM = 3,
  OP_GATED = 4,
  OP_ACTIVATE = 5,
  OP_ADD = 6,
  OP_SELECT = 7,
  OP_ROPE = 8,
  OP_ATTENTION = 9,
  OP_SAMPLE = 10,
  OP_COPY = 11,
  OP_ROUTE = 12,
  OP_EXPERTS = 13,
  OP_COMBINE = 14,
  OP_LOW_RANK = 15,
};

// CLAMPED_SWIGLU is of GatedArgs alone, SOFTCAP of ActivateArgs alone.
enum Activation : int32_t { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, CLAMPED_SWIGLU = 4, SOFTCAP = 5 };

// What an iteration computes: Batch of kernels/ops.py. All arrays are int32.
struct Step {
  int32_t tokens_count;   // N
  int32_t samples_count;  // R
  int32_t sequences;      // S
  int32_t table_stride;   // entries between two rows of `tables`
  const int32_t* tokens;        // [N]
  const int32_t* positions;     // [N]
  const int32_t* query_start;   // [S + 1]
  const int32_t* context;       // [S]
  const int32_t* tables;        // [S, table_stride]
  const int32_t* write_blocks;  // [N]
  const int32_t* write_offsets; // [N]
  const int32_t* sample_rows;   // [R]
};

enum : int32_t { NO_CODES, INT8_CODES, FP8_CODES };

// The paged KV pool. One block is `block_bytes` long and holds, layer by layer, K then V of every KV head; inside, the
// layout is that of kv.h. Head dimensions are padded to `head_stride`, a multiple of 16. codes: K and V are held in 8 bits
// where it is not NO_CODES (kv_8bit.h), and dtype is that of what reads and writes them.
struct Pool {
  char* blocks;
  int64_t block_bytes;
  int32_t layers, kv_heads, block_size, head_dim, head_stride, dtype, codes;
};

// out = x @ weight.T + bias. Weights are packed by orcinus_pack.
struct LinearArgs {
  const void* x;       // [rows, inputs] of `dtype`
  const void* weight;  // packed
  const float* bias;   // [outputs] or null
  void* out;           // [rows, outputs] of `out_dtype`, out_stride numbers from row to row
  int32_t inputs, outputs, out_stride;
  int32_t dtype, weight_format, out_dtype;  // weight_format: its place in formats.h
};

// out[i] = table[token i] * scale (+ places[position i])
struct EmbedArgs {
  const void* table;   // [vocab, hidden] of table_dtype or, when `packed`, a linear's weight of that format
  const void* places;  // [positions, hidden] of `dtype`, or null
  void* out;           // [rows, hidden] of `dtype`
  int32_t hidden, vocab, dtype, table_dtype, packed;
  float scale;
};

// Mean, variance and product in float32. `residual`, if there: residual += x first, in place, and normed is residual.
struct NormArgs {
  const void* x;        // [rows, hidden]
  void* residual;       // [rows, hidden] or null
  void* out;            // [rows, hidden]
  const float* weight;  // [hidden]
  const float* bias;    // [hidden] or null
  int32_t hidden, dtype;
  int32_t layer_norm;   // 0: RMSNorm
  float eps;
};

// out = activation(first half) * second half, or as kernels/ops.py says of CLAMPED_SWIGLU
struct GatedArgs {
  const void* x;  // [rows, 2 * size]
  void* out;      // [rows, size]
  int32_t size, dtype, activation;
};

// In place.
struct ActivateArgs {
  void* x;  // [rows, size]
  int32_t size, dtype, activation;
  float cap;  // of SOFTCAP: x = cap * tanh(x / cap)
};

// residual += x
struct AddArgs {
  void* residual;
  const void* x;
  int32_t size, dtype;
};

// out[r] = x[sample_rows[r]]
struct SelectArgs {
  const void* x;  // [N, size]
  void* out;      // [R, size]
  int32_t size, dtype;
};

// Splits qkv, norms q and k (if weights are given), rotates, writes k and v to the pool, leaves q in `q`.
struct RopeArgs {
  const void* qkv;       // [rows, (heads + 2 kv_heads) * head_dim]
  void* q;               // [rows, heads * head_dim]
  const float* rope;     // [positions, rotary]: cosines, then sines; null: no rotation
  const float* q_norm;   // [head_dim] or null
  const float* k_norm;   // [head_dim] or null
  const Pool* pool;
  int32_t heads, layer, rotary, dtype;
  float eps;
};

struct AttentionArgs {
  const void* q;        // [rows, heads * head_dim]
  void* out;            // [rows, heads * head_dim]
  const float* slopes;  // [heads] ALiBi, or null
  const float* sinks;   // [heads] a score without a value, or null
  const Pool* pool;
  int32_t heads, layer, dtype;
  int32_t window;       // 0: all positions; else the latest `window` of them, including the row's position
  float scale;
  float softcap;        // a scaled score s becomes softcap * tanh(s / softcap); 0: it stays
  int32_t causal;       // 0: each row sees all positions of its sequence; then without window and slopes
};

// SamplingRows of kernels/ops.py. Sparse entries are sorted by row, those of row r lie in start[r]:start[r + 1].
struct SampleArgs {
  float* logits;              // [rows, vocab], overwritten
  int64_t* tokens;            // [rows]
  int64_t* status;            // [rows]
  float* logprobs;            // [rows] or null
  const float* temperature;   // [rows], and the next ones too
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const uint64_t* seed;
  const int64_t* position;
  const uint8_t* want_logprob;
  const int64_t* bias_start;  // [rows + 1] or null
  const int64_t* bias_ids;
  const float* bias_values;
  const int64_t* banned_start;
  const int64_t* banned_ids;
  const int64_t* mask_row;    // [rows] row of mask_words or -1; null: no masks
  const uint32_t* mask_words; // [m, ceil(vocab / 32)]
  const int64_t* history_start;
  const int64_t* history_ids;
  const float* history_is_output;
  const float* presence;
  const float* frequency;
  const float* repetition;
  int32_t vocab;
  int32_t greedy;             // every row is a plain argmax
};

// Copies `bytes` each from source + from[i] * bytes to target + to[i] * bytes; rows is the number of copies.
struct CopyArgs {
  const char* source;
  char* target;
  const int32_t* from;
  const int32_t* to;
  int64_t bytes;
};

// The experts of each row, and the rows in the order of their experts, those of an expert in ascending order.
struct RouteArgs {
  const float* logits;  // [rows, experts]
  float* weights;       // [rows, top_k], largest first
  int32_t* places;      // [rows, top_k] where in `order` the row stands for that expert
  int32_t* order;       // [rows * top_k] rows
  int32_t* starts;      // [experts + 1] expert e has order[starts[e]:starts[e + 1]]
  int32_t experts, top_k;
  int32_t normalize;    // the weights of a row are divided by their sum
};

struct ExpertWeight {
  const void* weight;     // packed
  const float* bias;      // [outputs] or null
  int64_t weight_format;  // its place in formats.h
};

// out[i] = x[order[i]] @ the weight of the expert of place i, transposed, + its bias
struct ExpertsArgs {
  const void* x;                // [rows, inputs]; without `order` one row for each place
  const ExpertWeight* weights;  // [experts]
  const int32_t* order;         // as RouteArgs, or null
  const int32_t* starts;        // as RouteArgs
  void* out;                    // [places, outputs], out_stride numbers from row to row
  int32_t experts, inputs, outputs, out_stride, dtype;
};

// out[r] = the sum of weights[r, k] * x[places[r, k]] over k in ascending order, and sigmoid(shared_logits[r]) * shared[r]
struct CombineArgs {
  const void* x;               // [rows * top_k, size]
  const float* weights;        // as RouteArgs, and the next one too
  const int32_t* places;
  const void* shared;          // [rows, size] or null
  const float* shared_logits;  // [rows] or null
  void* out;                   // [rows, size]
  int32_t top_k, size, dtype;
};

// A matrix up of an adapter, for some of the outputs of a weight.
struct LowRankUp {
  const void* weight;  // [outputs, rank]
  int32_t first_output, outputs;
  int32_t first_rank, rank;  // those of the pair that it reads
};

// An adapter's matrices beside a weight: in the type of LowRankArgs, in panels of LANES outputs (low_rank.cpp).
struct LowRankPair {
  const void* down;  // [rank, inputs], all matrices down as one
  const LowRankUp* ups;
  int32_t count;  // of ups
  int32_t rank;   // 0: this adapter leaves the weight as it is
};

// Those of all adapters, by number.
struct LowRankPairs {
  const LowRankPair* pairs;
  int64_t count;
};

// Which rows of an iteration have which adapter.
struct AdapterRows {
  const int32_t* adapters;  // [count] numbers, ascending
  const int32_t* starts;    // [count + 1] adapter i has rows order[starts[i]:starts[i + 1]]
  const int32_t* order;     // rows, those of an adapter in ascending order
  int64_t count;
};

// out[row] += up(down(x[row])) for each row that has an adapter; in float32, the sum rounded once.
struct LowRankArgs {
  const void* x;              // [rows, inputs]
  void* out;                  // [rows, outputs]
  const LowRankPairs* pairs;  // both are read when the command runs
  const AdapterRows* adapters;
  int32_t inputs, outputs, dtype;
};

struct Command {
  int32_t op;
  int32_t rows;
  union {
    LinearArgs linear;
    EmbedArgs embed;
    NormArgs norm;
    GatedArgs gated;
    ActivateArgs activate;
    AddArgs add;
    SelectArgs select;
    RopeArgs rope;
    AttentionArgs attention;
    SampleArgs sample;
    CopyArgs copy;
    RouteArgs route;
    ExpertsArgs experts;
    CombineArgs combine;
    LowRankArgs low_rank;
  };
};
