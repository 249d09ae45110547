// What the instructions of translated PTX compute that C++ has no operator for (kernels/emulator/ptx.py).
//
// PTX ISA 9.0, "Instruction Set". Addresses in shared memory are numbers: the array in the upper bits, the offset below.
#pragma once
#include <cfenv>
#include <limits>

#include "cuda_emulator.h"
#include "ptx_twins.h"

#define WHERE (emulator::Where{__FILE__, __LINE__})
#define HERE "ldmatrix", WHERE

namespace {

inline unsigned char* declared(const void* key, size_t bytes) {
  return static_cast<unsigned char*>(emulator::declared(key, bytes));
}

inline uint64_t aligned(uint64_t address, size_t bytes, EMULATOR_HERE) {
  if (address % bytes) {
    emulator::note("%s:%d: an address that is no multiple of %zu", file, line, bytes);
    emulator::stop();
  }
  return address;
}

struct Shared {
  unsigned char* const* arrays;
  const size_t* sizes;

  void* at(uint32_t address, size_t bytes, size_t multiple, EMULATOR_HERE) const {
    const uint32_t array = address >> 24, offset = address & 0xffffff;
    if (offset + bytes > sizes[array] || offset % multiple) {
      emulator::note("%s:%d: %zu bytes at %u of an array of %zu in shared memory", file, line, bytes, offset,
                     sizes[array]);
      emulator::stop();
    }
    return arrays[array] + offset;
  }
};

// What an instruction reads or writes; where: line of the source.
inline void* touched(Space space, void* at, size_t bytes, const char* where, int line = __builtin_LINE()) {
  banks_access(space, at, bytes, where, line, emulator::current->warp, emulator::lane());
  return at;
}

// The lane that a shuffle reads, and whether it is one of the segment; else the lane reads its own value.
struct From {
  int lane;
  bool valid;
};
inline From from_lane(int other, bool valid) { return {valid ? other : emulator::current->lane, valid}; }
inline int segment_end(uint32_t c) {
  const int lane = emulator::current->lane, segments = c >> 8 & 31;
  return (lane & segments) | (c & 31 & ~segments);
}
inline From from_bfly(uint32_t b, uint32_t c) {
  const int other = emulator::current->lane ^ (b & 31);
  return from_lane(other, other <= segment_end(c));
}
inline From from_up(uint32_t b, uint32_t c) {
  const int other = emulator::current->lane - int(b & 31);
  return from_lane(other, other >= segment_end(c));
}
inline From from_down(uint32_t b, uint32_t c) {
  const int other = emulator::current->lane + int(b & 31);
  return from_lane(other, other <= segment_end(c));
}
inline From from_idx(uint32_t b, uint32_t c) {
  const int segments = c >> 8 & 31, other = (emulator::current->lane & segments) | (b & 31 & ~segments);
  return from_lane(other, other <= segment_end(c));
}

template <typename T>
inline T shl(T a, uint32_t n) {
  return n < 8 * sizeof(T) ? T(uint64_t(a) << n) : T(0);
}
template <typename T>
inline T shr(T a, uint32_t n) {
  return n < 8 * sizeof(T) ? T(a >> n) : a < T(0) ? T(-1) : T(0);
}
template <typename T>
inline T least(T a, T b) {
  if constexpr (std::is_same_v<T, float>) return fminf(a, b);  // of a NaN and a number the number
  return b < a ? b : a;
}
template <typename T>
inline T largest(T a, T b) {
  if constexpr (std::is_same_v<T, float>) return fmaxf(a, b);
  return a < b ? b : a;
}
template <typename T>
inline T divided(T a, T b, EMULATOR_HERE) {
  if (std::is_integral_v<T> && b == T(0)) {
    emulator::note("%s:%d: a division by zero", file, line);
    emulator::stop();
  }
  return a / b;
}
template <typename T>
inline T remainder(T a, T b, EMULATOR_HERE) {
  return a - divided(a, b, file, line) * b;
}
inline float reciprocal(float x) { return 1.0f / x; }
inline uint32_t reversed(uint32_t x) {
  uint32_t y = 0;
  for (int bit = 0; bit < 32; bit++) y |= (x >> bit & 1) << (31 - bit);
  return y;
}
// `bits` bits of a in place of those of b from `from` on.
template <typename T>
inline T inserted(T a, T b, uint32_t from, uint32_t bits) {
  const uint64_t ones = bits < 64 ? (uint64_t(1) << bits) - 1 : ~uint64_t(0), mask = ones << from;
  return T((uint64_t(b) & ~mask) | (uint64_t(a) << from & mask));
}
// Towards zero; what is out of range becomes the nearest number of the type, a NaN 0.
template <typename T, typename F>
inline T to_whole(F x) {
  if (x != x) return 0;
  const double whole = std::trunc(double(x));
  if (whole <= double(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  if (whole >= double(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  return T(whole);
}
inline float add_to_zero(float a, float b) {
  const int before = fegetround();
  fesetround(FE_TOWARDZERO);
  volatile float x = a, y = b;
  volatile float sum = x + y;
  fesetround(before);
  return sum;
}

// Finishes what the lanes of a warp have started.
inline void emulator_finish_open(const char* what, emulator::Where where) {
  wgmma_commit();
  emulator_finish_all_but(0, what, where);
}

}  // namespace

#define PTX_KERNEL(name, bytes, threads, max_shared)                                                        \
  extern "C" __attribute__((visibility("default"))) const unsigned name##_params = bytes;                   \
  extern "C" __attribute__((visibility("default"))) int name##_launch(                                      \
      const void* params, const unsigned* dims, size_t shared, int order, char* error, size_t error_room) { \
    return emulator::launch(name##_ptx, params, bytes, dims, shared, threads, max_shared, order, error,     \
                            error_room);                                                                    \
  }
