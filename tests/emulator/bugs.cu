// Small kernels, each right or with one bug planted. Comments "<- name" mark the lines that a report must name.
#include "cuda_emulator.h"
#include "ptx_twins.h"

struct Params {
  const float* in;
  float* out;
  int n;
};

namespace {

// Mirrors each block's numbers through shared memory.
template <bool synchronised>
void mirror(const Params& p) {
  DYNAMIC_SHARED(float, held);
  held[threadIdx.x] = p.in[blockIdx.x * blockDim.x + threadIdx.x];
  if (synchronised) __syncthreads();
  p.out[blockIdx.x * blockDim.x + threadIdx.x] = held[blockDim.x - 1 - threadIdx.x];
}

// Copies numbers through a ring of two slots of 4 numbers a thread: `pending` groups may be under way when it reads.
template <int pending>
void ring(const Params& p) {
  DYNAMIC_SHARED(float, held);
  float* mine = held + threadIdx.x * 8;
  for (int i = 0; i < 2; i++) {
    cp_async_16(mine + i * 4, p.in + (threadIdx.x * 2 + i) * 4, true);
    cp_async_commit();
  }
  for (int i = 0; i < 2; i++) {
    if (i == 0)
      cp_async_wait<pending>();
    else
      cp_async_wait<pending - 1>();
    for (int k = 0; k < 4; k++) p.out[(threadIdx.x * 2 + i) * 4 + k] = mine[i * 4 + k];
  }
}

// Every thread reads what its neighbour loaded, then loads the next round into the same place.
template <bool synchronised>
void refill(const Params& p) {
  DYNAMIC_SHARED(float, held);
  const int rounds = p.n, threads = blockDim.x;
  cp_async_16(held + threadIdx.x * 4, p.in + threadIdx.x * 4, true);
  for (int i = 0; i < rounds; i++) {
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    const int neighbour = (threadIdx.x + 1) % threads;
    for (int k = 0; k < 4; k++) p.out[(i * threads + threadIdx.x) * 4 + k] = held[neighbour * 4 + k];
    if (synchronised) __syncthreads();
    if (i + 1 < rounds) cp_async_16(held + threadIdx.x * 4, p.in + ((i + 1) * threads + threadIdx.x) * 4, true);
  }
}

void divergent_barrier(const Params& p) {
  if (threadIdx.x < 32) __syncthreads();  // <- divergent_barrier
  p.out[threadIdx.x] = 1;
}

void two_barriers(const Params& p) {
  if (threadIdx.x < 32)
    __syncthreads();  // <- first barrier
  else
    __syncthreads();  // <- second barrier
  p.out[threadIdx.x] = 1;
}

void divergent_warp(const Params& p) {
  float x = p.in[threadIdx.x];
  if (threadIdx.x % 32 < 7)
    x = __shfl_sync(0xffffffffu, x, 0);  // <- first shuffle
  else
    x = __shfl_sync(0xffffffffu, x, 0);  // <- second shuffle
  p.out[threadIdx.x] = x;
}

void lane_missing(const Params& p) {
  if (threadIdx.x != 5) __syncwarp();  // <- lane_missing
  p.out[threadIdx.x] = 1;
}

void not_in_mask(const Params& p) {
  p.out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1.0f, 0);  // <- not_in_mask
}

void uninitialised_dynamic(const Params& p) {
  DYNAMIC_SHARED(float, held);
  if (threadIdx.x > 0) held[threadIdx.x] = 1;
  __syncthreads();
  p.out[threadIdx.x] = held[threadIdx.x];
}

// What an earlier block left must not be there for the next: only block 0 writes.
template <typename T>
void uninitialised_declared(const Params& p) {
  SHARED(T, held, 64);
  SHARED(T, more, 1);
  if (blockIdx.x == 0) held[threadIdx.x] = more[0] = 1;
  __syncthreads();
  p.out[blockIdx.x * blockDim.x + threadIdx.x] = held[threadIdx.x] + more[0];
}

void misaligned_copy(const Params& p) {
  DYNAMIC_SHARED(float, held);
  cp_async_16(held + 1, p.in, true);  // <- misaligned_copy
}

void copy_to_global(const Params& p) {
  cp_async_16(p.out, p.in, true);  // <- copy_to_global
}

void beyond_global(const Params& p) { p.out[threadIdx.x] = p.in[threadIdx.x + p.n]; }

void beyond_dynamic(const Params& p) {
  DYNAMIC_SHARED(float, held);
  held[threadIdx.x + p.n] = 1;
}

void beyond_declared(const Params& p) {
  SHARED(float, held, 64);
  held[threadIdx.x] = 1;
  p.out[threadIdx.x] = held[threadIdx.x + p.n];
}

// All lanes of a 2-dimensional block, and where they are.
void places(const Params& p) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  p.out[block * blockDim.x * blockDim.y * blockDim.z + thread] += block * 1000 + thread;
}

// In which order threads and blocks come.
void arrivals(const Params& p) {
  static int arrived;
  if (p.n) arrived = 0;
  p.out[blockIdx.x * blockDim.x + threadIdx.x] = arrived++;
}

}  // namespace

KERNEL(mirror_right, Params, 1024, mirror<true>)
KERNEL(mirror_unsynchronised, Params, 64, mirror<false>)
KERNEL(ring_right, Params, 1024, ring<1>)
KERNEL(ring_short, Params, 1024, ring<2>)
KERNEL(refill_right, Params, 1024, refill<true>)
KERNEL(refill_unsynchronised, Params, 1024, refill<false>)
KERNEL(divergent_barrier_, Params, 1024, divergent_barrier)
KERNEL(two_barriers_, Params, 1024, two_barriers)
KERNEL(divergent_warp_, Params, 1024, divergent_warp)
KERNEL(lane_missing_, Params, 1024, lane_missing)
KERNEL(not_in_mask_, Params, 1024, not_in_mask)
KERNEL(uninitialised_dynamic_, Params, 1024, uninitialised_dynamic)
KERNEL(uninitialised_declared_, Params, 1024, uninitialised_declared<float>)
KERNEL(misaligned_copy_, Params, 1024, misaligned_copy)
KERNEL(copy_to_global_, Params, 1024, copy_to_global)
KERNEL(beyond_global_, Params, 1024, beyond_global)
KERNEL(beyond_dynamic_, Params, 1024, beyond_dynamic)
KERNEL(beyond_declared_, Params, 1024, beyond_declared)
KERNEL(places_, Params, 1024, places)
KERNEL(arrivals_, Params, 1024, arrivals)
