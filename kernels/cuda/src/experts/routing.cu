// Mixtures of experts: which experts a row is given to, and the weighted sum of what they give.
//
// A pair is a row and one of its experts: number row * top_k + rank, the largest weight first. `route` chooses, and its
// last block sorts all pairs by expert and cuts them into tiles of `tile_rows` pairs of one expert for `experts`
// (products.cu). Nothing goes to the host. In which order the pairs of an expert lie may differ from launch to launch;
// no result depends on it. Grid of route: x pieces of as many rows as a block has warps, which are more threads than
// experts; of combine: x rows, y pieces of THREADS vectors.
#include "numbers.cuh"

struct RouteParams {
  const float* logits;     // [rows, experts]
  const int32_t* present;  // [rows] or null: a row below zero is not there and given to no expert
  int32_t* chosen;         // [pairs] expert; below zero: none
  float* weights;          // [pairs]
  int32_t* order;          // [pairs] pairs by expert
  int4* tiles;             // [tiles] expert, its first and end place in `order`, its first tile; expert below zero: none
  unsigned* finished;      // how many blocks are; 0 before and after
  int32_t rows;
  int32_t experts;  // MAX_EXPERTS at most
  int32_t top_k;
  int32_t normalize;
  int32_t tile_rows;
  int32_t most_tiles;
};

struct CombineParams {
  const void* x;               // [pairs, width]
  const float* weights;        // [pairs]
  const void* shared;          // [rows, width] or null
  const float* shared_logits;  // [rows]
  void* out;                   // [rows, width]
  int32_t width;               // a multiple of 8
  int32_t top_k;
};

namespace {

constexpr int MAX_EXPERTS = 1024, WARPS = MAX_EXPERTS / 32;
constexpr unsigned ALL = 0xffffffffu;
constexpr int THREADS = 256;

// Larger for a larger logit, and of equal ones for the lower index. NaN is the largest of all.
__device__ __forceinline__ uint64_t key_of(float logit, int expert) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 is 0
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t ordered = is_nan ? ~0u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | ~static_cast<uint32_t>(expert);
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(ALL, x, step);
  return x;
}

// A warp chooses the experts of a row and their weights, the softmax over all logits.
__device__ __forceinline__ void choose(const RouteParams& p, int row) {
  const int lane = threadIdx.x % 32;
  const int64_t first = static_cast<int64_t>(row) * p.top_k;
  const float* logits = p.logits + static_cast<int64_t>(row) * p.experts;
  if (p.present && p.present[row] < 0) {
    for (int rank = lane; rank < p.top_k; rank += 32) p.chosen[first + rank] = -1, p.weights[first + rank] = 0.0f;
    return;
  }
  uint64_t last = ~0ull;  // no expert has this key
  float largest = 0.0f, total = 0.0f, of_chosen = 0.0f;
  for (int rank = 0; rank < p.top_k; rank++) {
    uint64_t best = 0;
    for (int expert = lane; expert < p.experts; expert += 32) {
      const uint64_t key = key_of(logits[expert], expert);
      if (key < last) best = max(best, key);
    }
#pragma unroll
    for (int step = 16; step; step /= 2) best = max(best, __shfl_xor_sync(ALL, best, step));
    last = best;
    const int expert = ~static_cast<uint32_t>(best);
    const float logit = logits[expert];
    if (rank == 0) {
      largest = logit;
      for (int other = lane; other < p.experts; other += 32) total += __expf(logits[other] - largest);
      total = sum_of_warp(total);
    }
    const float weight = __fdividef(__expf(logit - largest), total);
    of_chosen += weight;
    if (rank % 32 == lane) p.chosen[first + rank] = expert, p.weights[first + rank] = weight;
  }
  if (p.normalize)  // each lane, what it wrote
    for (int rank = lane; rank < p.top_k; rank += 32) p.weights[first + rank] /= of_chosen;
}

// Is this block the last one that is done? It then sees what all have written.
__device__ __forceinline__ bool is_last(unsigned* finished) {
  SHARED(int, last, 1);
  __syncthreads();
  if (gridDim.x == 1) return true;
  if (threadIdx.x == 0) {
    __threadfence();
    last[0] = atomicAdd(finished, 1u) == gridDim.x - 1;
    if (last[0]) atomicExch(finished, 0u);
    __threadfence();
  }
  __syncthreads();
  return last[0];
}

// The sum of what the threads before this one have; `all`: of all threads.
__device__ __forceinline__ int sum_before(int x, int& all) {
  SHARED(int, of_warps, WARPS);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(ALL, sum, step);
    if (lane >= step) sum += before;
  }
  __syncthreads();
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  int before = 0;
  all = 0;
#pragma unroll 4
  for (int i = 0; i < warps; i++) {
    if (i == warp) before = all;
    all += of_warps[i];
  }
  return before + sum - x;
}

// Calls given(pair, expert) for all pairs with an expert; a thread reads several at once.
template <typename Given>
__device__ __forceinline__ void each_pair(const RouteParams& p, Given given) {
  constexpr int AT_ONCE = 8;
  const int pairs = p.rows * p.top_k, threads = blockDim.x;
  for (int first = threadIdx.x; first < pairs; first += AT_ONCE * threads) {
    int experts[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) experts[i] = first + i * threads < pairs ? p.chosen[first + i * threads] : -1;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (experts[i] >= 0) given(first + i * threads, experts[i]);
  }
}

// A block's work: thread i has expert i.
__device__ __forceinline__ void sort(const RouteParams& p) {
  SHARED(int, places, MAX_EXPERTS);
  const int thread = threadIdx.x;
  places[thread] = 0;
  __syncthreads();
  each_pair(p, [&](int, int expert) { atomicAdd(&places[expert], 1); });
  __syncthreads();
  const int count = places[thread], tiles = (count + p.tile_rows - 1) / p.tile_rows;
  int all_pairs, all_tiles;
  const int first = sum_before(count, all_pairs), first_tile = sum_before(tiles, all_tiles);
  for (int tile = 0; tile < tiles; tile++)
    p.tiles[first_tile + tile] = make_int4(thread, first, first + count, first_tile);
  for (int tile = all_tiles + thread; tile < p.most_tiles; tile += blockDim.x) p.tiles[tile] = make_int4(-1, 0, 0, 0);
  places[thread] = first;
  __syncthreads();
  each_pair(p, [&](int pair, int expert) { p.order[atomicAdd(&places[expert], 1)] = pair; });
}

__device__ __forceinline__ void route_rows(const RouteParams& p) {
  const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (row < p.rows) choose(p, row);
  if (is_last(p.finished)) sort(p);
}

template <typename T>
__device__ __forceinline__ void combine(const CombineParams& p) {
  const int vectors = p.width / VECTOR, i = blockIdx.y * THREADS + threadIdx.x;
  if (i >= vectors) return;
  const int64_t row = blockIdx.x, first = row * p.top_k;
  float sum[VECTOR] = {}, x[VECTOR];
#pragma unroll 4
  for (int rank = 0; rank < p.top_k; rank++) {
    const float weight = p.weights[first + rank];
    unpack<T>(vector_at(p.x, (first + rank) * vectors + i), x);
#pragma unroll
    for (int k = 0; k < VECTOR; k++) sum[k] += weight * x[k];
  }
  if (p.shared) {
    const float gate = __fdividef(1.0f, 1.0f + __expf(-p.shared_logits[row]));
    unpack<T>(vector_at(p.shared, row * vectors + i), x);
#pragma unroll
    for (int k = 0; k < VECTOR; k++) sum[k] += gate * x[k];
  }
  vector_at(p.out, row * vectors + i) = pack<T>(sum);
}

}  // namespace

KERNEL(route, RouteParams, MAX_EXPERTS, route_rows)
KERNEL(combine_bf16, CombineParams, THREADS, combine<bf16>)
KERNEL(combine_f16, CombineParams, THREADS, combine<f16>)
