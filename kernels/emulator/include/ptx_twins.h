// The CPU twins of the wrappers in kernels/cuda/src/ptx.cuh: same names, same meaning, lane for lane.
#pragma once
#include "intrinsics.h"

namespace {

inline void emulator_aligned(const void* address, const char* what, emulator::Where where, bool shared) {
  if (reinterpret_cast<uintptr_t>(address) % 16) {
    emulator::note("%s at %s:%d needs addresses that are multiples of 16", what, where.name(), where.line);
    emulator::stop();
  }
  if (shared && !emulator::in_shared(address)) {
    emulator::note("%s at %s:%d is given an address outside of shared memory", what, where.name(), where.line);
    emulator::stop();
  }
}

inline void cp_async_16(void* shared, const void* global, bool valid, EMULATOR_HERE) {
  const Quiet quiet;
  emulator_aligned(shared, "cp_async_16", {file, line}, true);
  emulator_aligned(global, "cp_async_16", {file, line}, false);
  races_copy(shared, valid ? global : nullptr, 16, file, line);
  emulator::start_copy({shared, global, 16, valid});
}
inline void cp_async_commit() {
  const Quiet quiet;
  races_commit();
  emulator::current->groups.push_back(std::move(emulator::current->open));
  emulator::current->open.clear();
}
template <int pending>
inline void cp_async_wait() {
  emulator::land_all_but(pending);
}

inline float bf16_to_float(unsigned short x) { return __uint_as_float(unsigned(x) << 16); }
inline unsigned short float_to_bf16(float x) {
  const unsigned bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
inline float f16_to_float(unsigned short x) { return float(emulator_bits<_Float16>(x)); }
inline unsigned short float_to_f16(float x) {
  if (x != x) return 0x7fff;
  return emulator_bits<unsigned short>(_Float16(x));
}
inline unsigned pack_bf16(float low, float high) { return float_to_bf16(low) | unsigned(float_to_bf16(high)) << 16; }
inline unsigned pack_f16(float low, float high) { return float_to_f16(low) | unsigned(float_to_f16(high)) << 16; }

inline unsigned fma_bf16x2(unsigned a, unsigned b, unsigned c) {
  const auto one = [=](int shift) {
    return unsigned(float_to_bf16(fmaf(bf16_to_float(a >> shift), bf16_to_float(b >> shift), bf16_to_float(c >> shift))));
  };
  return one(0) | one(16) << 16;
}
inline unsigned fma_f16x2(unsigned a, unsigned b, unsigned c) {
  const auto one = [=](int shift) {
    return unsigned(float_to_f16(fmaf(f16_to_float(a >> shift), f16_to_float(b >> shift), f16_to_float(c >> shift))));
  };
  return one(0) | one(16) << 16;
}

inline float exp2_approx(float x) { return exp2f(x); }

struct EmulatorFour {
  unsigned word[4];
};

inline void emulator_ldmatrix(unsigned (&r)[4], const void* row, bool trans, const char* what, emulator::Where where) {
  const Quiet quiet;
  const int first = emulator::warp_start();
  emulator_aligned(row, what, where, true);
  const EmulatorFour got = emulator::together<EmulatorFour>(
      0xffffffffu, what, where, row, [=](const void* const* rows, EmulatorFour* made) {
        for (int lane = 0; lane < 32; lane++)
          for (int matrix = 0; matrix < 4; matrix++)
            for (int k = 0; k < 2; k++) {
              const int major = lane / 4, minor = lane % 4 * 2 + k;
              const int i = trans ? minor : major, j = trans ? major : minor;
              const unsigned short* at = static_cast<const unsigned short*>(rows[matrix * 8 + i]) + j;
              races_read(first + lane, at, 2, where.file, where.line);
              unsigned short element;
              memcpy(&element, at, 2);
              unsigned& word = made[lane].word[matrix];
              word = k ? (word & 0xffffu) | unsigned(element) << 16 : element;
            }
      });
  memcpy(r, got.word, sizeof r);
}
inline void ldmatrix_x4(unsigned (&r)[4], const void* row, EMULATOR_HERE) {
  emulator_ldmatrix(r, row, false, "ldmatrix_x4", {file, line});
}
inline void ldmatrix_x4_trans(unsigned (&r)[4], const void* row, EMULATOR_HERE) {
  emulator_ldmatrix(r, row, true, "ldmatrix_x4_trans", {file, line});
}

struct EmulatorOperands {
  float c[4];
  unsigned a[4], b[2];
};
struct EmulatorSums {
  float d[4];
};

template <typename Widen>
inline void emulator_mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Widen widen, const char* what,
                         emulator::Where where) {
  const EmulatorOperands mine = {{d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  const EmulatorSums sums = emulator::together<EmulatorSums>(
      0xffffffffu, what, where, mine, [widen](const EmulatorOperands* given, EmulatorSums* made) {
        float left[16][16], right[16][8];  // m x k, k x n
        for (int lane = 0; lane < 32; lane++) {
          const int group = lane / 4, pair = lane % 4 * 2;
          for (int half = 0; half < 2; half++) {
            for (int i = 0; i < 4; i++)
              left[group + i % 2 * 8][pair + half + i / 2 * 8] = widen((unsigned short)(given[lane].a[i] >> 16 * half));
            for (int i = 0; i < 2; i++)
              right[pair + half + i * 8][group] = widen((unsigned short)(given[lane].b[i] >> 16 * half));
          }
        }
        for (int lane = 0; lane < 32; lane++)
          for (int i = 0; i < 4; i++) {
            const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            float sum = 0;
            for (int k = 0; k < 16; k++) sum += left[row][k] * right[k][column];
            made[lane].d[i] = given[lane].c[i] + sum;
          }
      });
  memcpy(d, sums.d, sizeof d);
}
inline void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, EMULATOR_HERE) {
  emulator_mma(d, a, b0, b1, bf16_to_float, "mma_bf16", {file, line});
}
inline void mma_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, EMULATOR_HERE) {
  emulator_mma(d, a, b0, b1, f16_to_float, "mma_f16", {file, line});
}

inline void barrier_arrive(int id, int threads, EMULATOR_HERE) {
  emulator::meet_some(id, threads, false, "barrier_arrive", {file, line});
}
inline void barrier_sync(int id, int threads, EMULATOR_HERE) {
  emulator::meet_some(id, threads, true, "barrier_sync", {file, line});
}
template <int count>
inline void fewer_registers() {
  static_assert(count >= 24 && count <= 256 && count % 8 == 0, "a number of registers that setmaxnreg has");
}
template <int count>
inline void more_registers() {
  fewer_registers<count>();
}
inline void fence_for_wgmma() {
  const Quiet quiet;
  races_fence_for_wgmma();
}

// Matrix descriptors are those of the PTX ISA, but for the address, which counts from the block's dynamic memory.
inline uint64_t wgmma_matrix(const void* shared, int next, EMULATOR_HERE) {
  const Quiet quiet;
  emulator_aligned(shared, "wgmma_matrix", {file, line}, true);
  const uint64_t at = static_cast<const unsigned char*>(shared) - emulator::block.dynamic.at;
  return (at & 0x3ffff) >> 4 | uint64_t(next >> 4) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}
// A number of a matrix, by its place across k and along it.
inline const unsigned short* emulator_number(uint64_t matrix, bool lines_along_k, int across, int k) {
  const size_t next = (matrix >> 16 & 0x3fff) << 4, eighth = (matrix >> 32 & 0x3fff) << 4;
  size_t at = (matrix & 0x3fff) << 4;
  if (lines_along_k)
    at += across / 8 * eighth + across % 8 * 128 + k * 2;
  else
    at += across / 64 * next + k / 8 * eighth + k % 8 * 128 + across % 64 * 2;
  at ^= (at >> 7 & 7) << 4;
  return reinterpret_cast<const unsigned short*>(emulator::block.dynamic.at + at);
}
// Reads 16 numbers along k, which a lane of the warp is said to read.
template <typename Widen>
inline void emulator_line(float (&to)[16], uint64_t matrix, bool lines_along_k, int across, int thread, unsigned group,
                          emulator::Where where, Widen widen) {
  if (matrix >> 62 != 1 || matrix >> 49 & 7) {
    emulator::note("wgmma at %s:%d reads a matrix that is not swizzled by 128 bytes", where.name(), where.line);
    emulator::stop();
  }
  for (int k = 0; k < 16; k++) {
    const unsigned short* from = emulator_number(matrix, lines_along_k, across, k);
    if (!emulator::in_shared(from)) {
      emulator::note("wgmma at %s:%d reads outside of shared memory", where.name(), where.line);
      emulator::stop();
    }
    if (lines_along_k ? k % 8 == 0 : across % 8 == 0)
      races_read_by_wgmma(thread, group, from, 16, where.file, where.line);
    unsigned short number;
    memcpy(&number, from, 2);
    to[k] = widen(number);
  }
}
template <float (*widen)(unsigned short)>
inline void emulator_multiply(const emulator::Product* lanes) {
  const emulator::Product& one = lanes[0];
  const int first = emulator::warp_start();
  float left[16][16];
  for (int row = 0; row < 16; row++)
    if (!one.in_registers)
      emulator_line(left[row], one.left_matrix, true, first / 32 % 4 * 16 + row, first + row, one.group, one.where,
                    widen);
  for (int lane = 0; lane < 32 && one.in_registers; lane++)
    for (int half = 0; half < 2; half++)
      for (int i = 0; i < 4; i++)
        left[lane / 4 + i % 2 * 8][lane % 4 * 2 + half + i / 2 * 8] =
            widen((unsigned short)(lanes[lane].left[i] >> 16 * half));
  for (int column = 0; column < one.columns; column++) {
    float right[16];
    emulator_line(right, one.right_matrix, !one.in_registers, column, first + column % 32, one.group, one.where, widen);
    for (int row = 0; row < 16; row++) {
      float sum = 0;
      for (int k = 0; k < 16; k++) sum += left[row][k] * right[k];
      float& d = lanes[row % 8 * 4 + column % 8 / 2].sums[column / 8 * 4 + row / 8 * 2 + column % 2];
      d = (one.add ? d : 0) + sum;
    }
  }
}
// Finishes all groups but the newest `pending` of a warp's lanes.
inline void emulator_finish(size_t pending, const char* what, emulator::Where where) {
  const Quiet quiet;
  emulator::together<int>(0xffffffffu, what, where, 0, [=](const int*, int*) {
    const auto thread = [](int lane) -> emulator::Thread& {
      return *emulator::block.thread[emulator::warp_start() + lane];
    };
    while (thread(0).product_groups.size() > pending) {
      for (size_t i = 0; i < thread(0).product_groups.front().size(); i++) {
        emulator::Product of_lanes[32];
        for (int lane = 0; lane < 32; lane++) of_lanes[lane] = thread(lane).product_groups.front()[i];
        of_lanes[0].finish(of_lanes);
      }
      for (int lane = 0; lane < 32; lane++) thread(lane).product_groups.pop_front();
    }
  });
}
// The same, of what a thread waits for.
inline void emulator_finish_all_but(unsigned pending, const char* what, emulator::Where where) {
  {
    const Quiet quiet;
    const unsigned committed = emulator::current->products_committed;
    if (committed > pending) races_wait_for_wgmma(committed - pending);
  }
  emulator_finish(pending, what, where);
}
inline void wgmma_fence() {}
// Products are there as late as they can, in the forward order, so that a missing wait shows, or at once.
inline void wgmma_commit(EMULATOR_HERE) {
  {
    const Quiet quiet;
    emulator::Thread& one = *emulator::current;
    one.products_committed++;
    for (emulator::Product& product : one.open_products) product.group = one.products_committed;
    one.product_groups.push_back(std::move(one.open_products));
    one.open_products.clear();
  }
  if (emulator::block.order != emulator::FORWARD) emulator_finish(0, "wgmma_commit", {file, line});
}
template <int pending, int columns>
inline void wgmma_wait(float (&)[columns][4], EMULATOR_HERE) {
  emulator_finish_all_but(pending, "wgmma_wait", {file, line});
}
template <int N>
inline void compute_now(float (&)[N][4], float) {}
inline void emulator_start(const emulator::Product& product) {
  const Quiet quiet;
  emulator::current->open_products.push_back(product);
}
#define EMULATOR_WGMMA(name, widen)                                                                                  \
  template <int columns>                                                                                             \
  inline void name(float (&d)[columns][4], uint64_t left, uint64_t right, bool add, EMULATOR_HERE) {                 \
    emulator_start({emulator_multiply<widen>, d[0], columns * 8, {}, left, right, false, add, {file, line}, 0});       \
  }                                                                                                                  \
  template <int columns>                                                                                             \
  inline void name(float (&d)[columns][4], const unsigned (&left)[4], uint64_t right, EMULATOR_HERE) {               \
    emulator_start({emulator_multiply<widen>, d[0], columns * 8, {left[0], left[1], left[2], left[3]}, 0, right, true, \
                    true, {file, line}, 0});                                                                         \
  }
EMULATOR_WGMMA(wgmma_bf16, bf16_to_float)
EMULATOR_WGMMA(wgmma_f16, f16_to_float)

}  // namespace
