// Small kernels of one warp for the counts of banks and sectors. test_banks.py says what each one takes.
#include "ptx.cuh"

struct Params {
  const int* in;  // begins with a sector
  int* out;       // the same
  int n;          // 0
};

namespace {

constexpr int THREADS = 32;

// Writes lane by lane to some places of an array of T, and reads one number behind its end.
template <typename T, typename Place>
__device__ void write_to(const Params& p, Place place) {
  SHARED(T, held, 33 * THREADS);
  T one = {};
  held[place(static_cast<int>(threadIdx.x))] = one;
  __syncwarp();
  p.out[threadIdx.x] = reinterpret_cast<const int*>(held)[p.n];
}

template <typename Place>
__device__ void read_from(const Params& p, Place place) {
  p.out[threadIdx.x] = p.in[place(static_cast<int>(threadIdx.x))];
}

__device__ void add_to(const Params& p, int place) {
  SHARED(int, sums, THREADS);
  sums[threadIdx.x] = 0;
  __syncwarp();
  atomicAdd(&sums[place], static_cast<int>(threadIdx.x) + p.n);
  __syncwarp();
  p.out[threadIdx.x] = sums[threadIdx.x];
}

// Rows of matrices so many chunks of 16 bytes apart.
__device__ void read_matrices(const Params& p, int apart) {
  SHARED(uint4, rows, 8 * THREADS);
  uint32_t words[4];
  ldmatrix_x4(words, rows + threadIdx.x * apart);
  p.out[threadIdx.x] = words[0] + words[1] + words[2] + words[3];
}

__device__ void copy(const Params& p, bool valid) {
  SHARED(uint4, held, THREADS);
  cp_async_16(held + threadIdx.x, p.in + 4 * threadIdx.x, valid);
  cp_async_commit();
  cp_async_wait<0>();
}

__device__ void leave_one_by_one(const Params& p) {
  int sum = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < p.n + 40; i += THREADS) sum += p.in[i];
  p.out[threadIdx.x] = sum;
}

// The lanes of one half after those of the other.
__device__ void take_turns(const Params& p) {
#pragma unroll 1
  for (int turn = p.n; turn < 2; turn++) {
    if (static_cast<int>(threadIdx.x) % 2 == turn) p.out[threadIdx.x] = turn;
    __syncwarp();
  }
}

}  // namespace

#define CASE(name, ...) KERNEL(name, Params, THREADS, [](const Params& p) { __VA_ARGS__; })

CASE(words_beside_each_other, write_to<int>(p, [](int lane) { return lane; }))
CASE(words_in_any_order, write_to<int>(p, [](int lane) { return lane * 7 % 32; }))
CASE(a_column, write_to<int>(p, [](int lane) { return lane * 32; }))
CASE(a_padded_column, write_to<int>(p, [](int lane) { return lane * 33; }))
CASE(every_other_word, write_to<int>(p, [](int lane) { return lane * 2; }))
CASE(half_words, write_to<unsigned short>(p, [](int lane) { return lane; }))
CASE(pairs_of_words, write_to<uint2>(p, [](int lane) { return lane; }))
CASE(every_other_pair, write_to<uint2>(p, [](int lane) { return lane * 2; }))
CASE(four_words, write_to<uint4>(p, [](int lane) { return lane; }))
CASE(every_other_four_words, write_to<uint4>(p, [](int lane) { return lane * 2; }))
CASE(sectors_beside_each_other, read_from(p, [](int lane) { return lane; }))
CASE(one_word_for_all, read_from(p, [](int) { return 5; }))
CASE(across_a_sector, read_from(p, [](int lane) { return lane + 1; }))
CASE(a_column_of_global_memory, read_from(p, [](int lane) { return lane * 32; }))
CASE(sums_of_lanes, add_to(p, threadIdx.x))
CASE(one_sum, add_to(p, 0))
CASE(matrices, read_matrices(p, 1))
CASE(matrices_in_a_column, read_matrices(p, 8))
CASE(copies, copy(p, p.n == 0))
CASE(copies_of_nothing, copy(p, p.n != 0))
CASE(lanes_leave_one_by_one, leave_one_by_one(p))
CASE(lanes_take_turns, take_turns(p))
