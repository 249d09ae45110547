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

}  // namespace
