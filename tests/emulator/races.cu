// Small kernels for the race checker. In those with names that end with _right all accesses are in order. Each of the
// others lacks one thing.
#include "cuda_emulator.h"
#include "ptx_twins.h"

struct Params {
  int* in;  // zeros
  int* out;
};

namespace {

constexpr int THREADS = 64;

// A thread reads what another one wrote to shared memory.
template <typename Order>
void pass(const Params& p, int other, Order order) {
  SHARED(int, held, THREADS);
  held[threadIdx.x] = threadIdx.x;  // <- written
  order();
  p.out[blockIdx.x * THREADS + threadIdx.x] = held[threadIdx.x ^ other];  // <- read
}

// The same for what another one's asynchronous copy brought; two groups are under way.
template <typename Order>
void bring(const Params& p, Order order, bool closed = true) {
  SHARED(int4, held, THREADS);
  cp_async_16(&held[threadIdx.x], p.in, true);  // <- copied
  if (closed) cp_async_commit();
  cp_async_commit();
  order();
  p.out[blockIdx.x * THREADS + threadIdx.x] = held[threadIdx.x ^ 33].x;  // <- used
}

// The second warp reads what the first one wrote.
template <typename Order>
void hand(const Params& p, Order order) {
  SHARED(int, held, THREADS);
  if (threadIdx.x < 32) held[threadIdx.x] = threadIdx.x;
  order();
  if (threadIdx.x >= 32) p.out[blockIdx.x * THREADS + threadIdx.x] = held[threadIdx.x - 32];
}

// A product of a matrix that all threads have written, and write anew.
template <typename Order, typename Then>
void multiply(const Params& p, Order order, Then then) {
  DYNAMIC_SHARED(int4, matrix);
  for (int i = 0; i < 2; i++) matrix[i * THREADS + threadIdx.x] = int4{0, 0, 0, 0};
  order();
  float sums[8][4] = {};
  const unsigned left[4] = {};
  wgmma_fence();
  wgmma_bf16(sums, left, wgmma_matrix(matrix, 16));
  wgmma_commit();
  then(sums);
  for (int i = 0; i < 2; i++) matrix[i * THREADS + (threadIdx.x ^ 40)].x = 1;
  wgmma_wait<0>(sums);
}

// Copies to a place that has just been read.
template <typename Order>
void refill(const Params& p, Order order) {
  SHARED(int4, held, THREADS);
  held[threadIdx.x].x = 0;
  __syncthreads();
  p.out[blockIdx.x * THREADS + threadIdx.x] = held[threadIdx.x ^ 33].x;
  order();
  cp_async_16(&held[threadIdx.x], p.in, true);
}

template <bool same>
void write_one_place(const Params& p) {
  SHARED(int, held, 1);
  held[0] = same ? 7 : int(threadIdx.x);
}

// A sum of what the threads add.
template <bool atomic, bool waits>
void count(const Params& p) {
  int* sum = p.out + 2 * blockIdx.x;
  if (atomic)
    atomicAdd(sum, 1);
  else
    sum[0]++;
  if (waits) __syncthreads();
  if (threadIdx.x == 1) sum[1] = sum[0];
}

// The block that comes last reads what all have written.
template <bool released, bool acquired>
void last_block(const Params& p) {
  p.out[1 + blockIdx.x * THREADS + threadIdx.x] = 1;
  __syncthreads();
  if (threadIdx.x) return;
  if (released) __threadfence();
  if (atomicAdd(p.out, 1) + 1 < int(gridDim.x)) return;
  if (acquired) __threadfence();
  for (unsigned i = 0; i < gridDim.x * THREADS; i++) p.in[0] += p.out[1 + i];
}

template <typename T, int apart>
void write_side_by_side(const Params& p) {
  reinterpret_cast<T*>(p.out)[blockIdx.x * apart + threadIdx.x] = T(1 + blockIdx.x);
}

}  // namespace

#define CASE(name, ...) KERNEL(name, Params, THREADS, [](const Params& p) { __VA_ARGS__; })

CASE(barrier_right, pass(p, 33, [] { __syncthreads(); }))
CASE(vote_of_all_right, pass(p, 33, [] { __syncthreads_or(1); }))
CASE(warp_right, pass(p, 1, [] { __syncwarp(); }))
CASE(pairs_right, pass(p, 1, [] { __syncwarp(3u << (threadIdx.x & 30)); }))
CASE(no_barrier, pass(p, 33, [] {}))
CASE(barrier_of_another_warp, pass(p, 33, [] { __syncwarp(); }))
CASE(barrier_of_other_lanes, pass(p, 1, [] { __syncwarp(0x55555555u << (threadIdx.x & 1)); }))
CASE(only_a_shuffle, pass(p, 1, [] { __shfl_sync(0xffffffffu, 1, 0); }))
CASE(only_a_vote, pass(p, 1, [] { __any_sync(0xffffffffu, 1); }))
CASE(barrier_of_some_right, pass(p, 33, [] { barrier_sync(1, THREADS); }))
CASE(arrival_right, hand(p, [] { threadIdx.x < 32 ? barrier_arrive(1, THREADS) : barrier_sync(1, THREADS); }))
CASE(only_an_arrival, pass(p, 33, [] { threadIdx.x < 32 ? barrier_arrive(1, THREADS) : barrier_sync(1, THREADS); }))
CASE(wgmma_right, multiply(p, [] { fence_for_wgmma(); __syncthreads(); }, [](auto& d) { wgmma_wait<0>(d); __syncthreads(); }))
CASE(wgmma_without_a_fence, multiply(p, [] { __syncthreads(); }, [](auto& d) { wgmma_wait<0>(d); __syncthreads(); }))
CASE(wgmma_fenced_by_the_reader, multiply(p, [] { __syncthreads(); fence_for_wgmma(); }, [](auto& d) { wgmma_wait<0>(d); __syncthreads(); }))
CASE(wgmma_not_waited_for, multiply(p, [] { fence_for_wgmma(); __syncthreads(); }, [](auto&) { __syncthreads(); }))
CASE(wgmma_of_another_warp, multiply(p, [] { fence_for_wgmma(); __syncthreads(); }, [](auto& d) { wgmma_wait<0>(d); }))
CASE(copy_right, bring(p, [] { cp_async_wait<1>(); __syncthreads(); }))
CASE(copy_of_a_closed_group, bring(p, [] { cp_async_wait<1>(); __syncthreads(); }, false))
CASE(copy_one_group_too_few, bring(p, [] { cp_async_wait<2>(); __syncthreads(); }))
CASE(copy_waited_for_too_late, bring(p, [] { __syncthreads(); cp_async_wait<0>(); }))
CASE(copy_of_another_warp, bring(p, [] { cp_async_wait<0>(); __syncwarp(); }))
CASE(refill_right, refill(p, [] { __syncthreads(); }))
CASE(refill_too_early, refill(p, [] { __syncwarp(); }))
CASE(same_value_right, write_one_place<true>(p))
CASE(other_values, write_one_place<false>(p))
CASE(atomics_right, count<true, true>(p))
CASE(atomics_read_too_early, count<true, false>(p))
CASE(no_atomics, count<false, true>(p))
CASE(fences_right, last_block<true, true>(p))
CASE(not_released, last_block<false, true>(p))
CASE(not_acquired, last_block<true, false>(p))
CASE(bytes_right, write_side_by_side<char, THREADS>(p))
CASE(blocks_overlap, write_side_by_side<int, THREADS - 1>(p))
