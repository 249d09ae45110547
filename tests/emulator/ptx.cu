// Every wrapper of ptx.cuh and every warp function, one warp or one block at a time, its numbers laid bare in memory.
#include "ptx.cuh"

struct Params {
  const void* a;
  const void* b;
  void* out;
  int n;
};

namespace {

// a, b: words that lane i holds, 4 and 2; out: its 4 sums, which begin as n.
template <bool half>
__device__ void fragments(const Params& p) {
  const unsigned *a = static_cast<const unsigned*>(p.a) + threadIdx.x * 4, *b = static_cast<const unsigned*>(p.b) + threadIdx.x * 2;
  const unsigned left[4] = {a[0], a[1], a[2], a[3]};
  const float first = p.n;
  float sums[4] = {first, first, first, first};
  if (half)
    mma_f16(sums, left, b[0], b[1]);
  else
    mma_bf16(sums, left, b[0], b[1]);
  for (int i = 0; i < 4; i++) static_cast<float*>(p.out)[threadIdx.x * 4 + i] = sums[i];
}

// a: a 16 x 16 matrix of 16-bit numbers; out: the words that each lane gets for rows lane % 16, columns lane / 16 * 8.
template <bool trans>
__device__ void matrices(const Params& p) {
  SHARED(uint4, rows, 32);
  rows[threadIdx.x] = static_cast<const uint4*>(p.a)[threadIdx.x];
  __syncwarp();
  unsigned words[4];
  const uint4* at = rows + threadIdx.x % 16 * 2 + threadIdx.x / 16;
  if (trans)
    ldmatrix_x4_trans(words, at);
  else
    ldmatrix_x4(words, at);
  for (int i = 0; i < 4; i++) static_cast<unsigned*>(p.out)[threadIdx.x * 4 + i] = words[i];
}

// a [16, 16] times b [16, 8], both by rows in shared memory: the way attention multiplies by V. out [16, 8] float32.
__device__ void product(const Params& p) {
  SHARED(uint4, left, 32);
  SHARED(uint4, right, 32);  // its lower half is not there: lanes 16 .. 31 read the same rows again
  cp_async_16(left + threadIdx.x, static_cast<const uint4*>(p.a) + threadIdx.x, true);
  cp_async_16(right + threadIdx.x, static_cast<const uint4*>(p.b) + threadIdx.x % 16, threadIdx.x < 16);
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  unsigned a[4], b[4];
  ldmatrix_x4(a, left + threadIdx.x % 16 * 2 + threadIdx.x / 16);
  ldmatrix_x4_trans(b, right + threadIdx.x);
  float sums[4] = {0, 0, 0, 0};
  mma_bf16(sums, a, b[0], b[1]);
  float* out = static_cast<float*>(p.out);
  for (int i = 0; i < 4; i++) {
    const int row = threadIdx.x / 4 + i / 2 * 8, column = threadIdx.x % 4 * 2 + i % 2;
    out[row * 8 + column] = sums[i];
    out[128 + row * 8 + column] = __uint_as_float(b[2 + i / 2]);  // what was read from rows of zeros
  }
}

// a: n float32; out: their bf16 and f16 bits, and pairs (i, i + 1) packed.
__device__ void narrow(const Params& p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= p.n) return;
  const float *from = static_cast<const float*>(p.a), x = from[i], next = from[(i + 1) % p.n];
  unsigned short* bits = static_cast<unsigned short*>(p.out);
  bits[i] = float_to_bf16(x);
  bits[p.n + i] = float_to_f16(x);
  unsigned* words = reinterpret_cast<unsigned*>(bits + 2 * p.n);
  words[i] = pack_bf16(x, next);
  words[p.n + i] = pack_f16(x, next);
}

// out: every 16-bit number as bf16, then as f16; then 2^x of a.
__device__ void widen(const Params& p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float* out = static_cast<float*>(p.out);
  out[i] = bf16_to_float(i);
  out[65536 + i] = f16_to_float(i);
  if (i < p.n) out[131072 + i] = exp2_approx(static_cast<const float*>(p.a)[i]);
}

// a, b: words of two bf16 each; out: a b + a of both halves, then the same of words of f16 behind the n of bf16.
__device__ void multiply_add(const Params& p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= p.n) return;
  const unsigned *a = static_cast<const unsigned*>(p.a), *b = static_cast<const unsigned*>(p.b);
  unsigned* out = static_cast<unsigned*>(p.out);
  out[i] = fma_bf16x2(a[i], b[i], a[i]);
  out[p.n + i] = fma_f16x2(a[p.n + i], b[p.n + i], a[p.n + i]);
}

// out: rows of 32 results of one shuffle or vote each, of the lane's own a.
__device__ void warp(const Params& p) {
  const int lane = threadIdx.x, x = static_cast<const int*>(p.a)[lane];
  int* out = static_cast<int*>(p.out) + lane;
  const unsigned all = 0xffffffffu, half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  *out = __shfl_sync(all, x, lane * 7 + 3), out += 32;
  *out = __shfl_sync(all, x, 5, 8), out += 32;
  *out = __shfl_xor_sync(all, x, 17), out += 32;
  *out = __shfl_up_sync(all, x, 3, 16), out += 32;
  *out = __shfl_down_sync(all, x, 5, 16), out += 32;
  *out = __ballot_sync(all, x % 3 == 0), out += 32;
  *out = __any_sync(all, x == 7) * 2 + __all_sync(all, x >= 0), out += 32;
  int sum = x;
  for (int other = 8; other; other /= 2) sum += __shfl_xor_sync(half, sum, other);
  *out = sum;
}

// out: n counters that all threads of all blocks change: sum, max, min, or, last ticket, float sum; then block counts.
__device__ void counters(const Params& p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, x = static_cast<const int*>(p.a)[i];
  int* out = static_cast<int*>(p.out);
  atomicAdd(out, x);
  atomicMax(out + 1, x);
  atomicMin(out + 2, x);
  atomicOr(reinterpret_cast<unsigned*>(out + 3), 1u << (x & 31));
  if (atomicInc(reinterpret_cast<unsigned*>(out + 4), gridDim.x * blockDim.x - 1) == gridDim.x * blockDim.x - 1) out[6] = 1;
  atomicAdd(reinterpret_cast<float*>(out + 5), 0.5f);
  atomicAdd(reinterpret_cast<unsigned long long*>(out + 8), 1ull << 33);
  if (atomicCAS(out + 7, 0, 1) == 0) atomicExch(out + 10, 77);
  const int even = __syncthreads_count(x % 2 == 0), any = __syncthreads_or(x == 3);
  const int every = __syncthreads_and(x >= 0);
  if (threadIdx.x == 0) out[16 + blockIdx.x] = even * 4 + any * 2 + every;
}

}  // namespace

KERNEL(mma_bf16_fragments, Params, 32, fragments<false>)
KERNEL(mma_f16_fragments, Params, 32, fragments<true>)
KERNEL(matrices_plain, Params, 32, matrices<false>)
KERNEL(matrices_trans, Params, 32, matrices<true>)
KERNEL(product_, Params, 32, product)
KERNEL(narrow_, Params, 256, narrow)
KERNEL(widen_, Params, 256, widen)
KERNEL(multiply_add_, Params, 256, multiply_add)
KERNEL(warp_, Params, 32, warp)
KERNEL(counters_, Params, 256, counters)
