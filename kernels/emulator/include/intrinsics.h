// The functions that CUDA C++ has without a header: synchronisation, shuffles, votes, atomics, mathematics.
//
// The last two arguments of those that wait are the caller's file and line, filled in by the compiler.
#pragma once
#include <cmath>

#include "block.h"

#define EMULATOR_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace {

inline void __syncthreads(EMULATOR_HERE) { emulator::meet("__syncthreads", {file, line}, false); }
inline int __syncthreads_count(int predicate, EMULATOR_HERE) {
  return emulator::meet("__syncthreads_count", {file, line}, predicate);
}
inline int __syncthreads_or(int predicate, EMULATOR_HERE) {
  return emulator::meet("__syncthreads_or", {file, line}, predicate) != 0;
}
inline int __syncthreads_and(int predicate, EMULATOR_HERE) {
  return emulator::meet("__syncthreads_and", {file, line}, predicate) == emulator::block.threads;
}
inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_HERE) {
  const int first = emulator::warp_start();
  emulator::together<char>(mask, "__syncwarp", {file, line}, char(0),
                           [=](const char*, char*) { races_warp(first, mask); });
}

template <typename T>
struct Shuffled {
  T value;
  int source;
};

// Every lane gets the value of its source. A source that does not take part gives 0xff bytes: NaN, or -1.
template <typename T>
inline T emulator_shuffle(unsigned mask, const char* what, emulator::Where where, T value, int source) {
  const Shuffled<T> mine = {value, source};
  return emulator::together<T>(mask, what, where, mine, [mask](const Shuffled<T>* given, T* made) {
    for (int lane = 0; lane < emulator::WARP; lane++)
      if (mask >> lane & 1) made[lane] = given[given[lane].source].value;
  });
}
template <typename T>
inline T __shfl_sync(unsigned mask, T value, int from, int width = 32, EMULATOR_HERE) {
  const int lane = emulator::lane();
  return emulator_shuffle(mask, "__shfl_sync", {file, line}, value, (lane & ~(width - 1)) | (from & (width - 1)));
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, EMULATOR_HERE) {
  const int lane = emulator::lane(), other = lane ^ bits;
  // Unlike up and down, xor may read a lane of an earlier segment, but no later one.
  const bool later = (other & ~(width - 1)) > (lane & ~(width - 1));
  return emulator_shuffle(mask, "__shfl_xor_sync", {file, line}, value, later ? lane : other);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_HERE) {
  const int lane = emulator::lane(), other = lane - int(delta);
  const bool outside = other < (lane & ~(width - 1));
  return emulator_shuffle(mask, "__shfl_up_sync", {file, line}, value, outside ? lane : other);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_HERE) {
  const int lane = emulator::lane(), other = lane + int(delta);
  const bool outside = other > (lane | (width - 1));
  return emulator_shuffle(mask, "__shfl_down_sync", {file, line}, value, outside ? lane : other);
}

inline unsigned emulator_vote(unsigned mask, const char* what, emulator::Where where, int predicate) {
  return emulator::together<unsigned>(mask, what, where, predicate, [mask](const int* given, unsigned* made) {
    unsigned found = 0;
    for (int lane = 0; lane < emulator::WARP; lane++)
      if (mask >> lane & 1 && given[lane]) found |= 1u << lane;
    for (int lane = 0; lane < emulator::WARP; lane++) made[lane] = found;
  });
}
inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_HERE) {
  return emulator_vote(mask, "__ballot_sync", {file, line}, predicate);
}
inline int __any_sync(unsigned mask, int predicate, EMULATOR_HERE) {
  return emulator_vote(mask, "__any_sync", {file, line}, predicate) != 0;
}
inline int __all_sync(unsigned mask, int predicate, EMULATOR_HERE) {
  return emulator_vote(mask, "__all_sync", {file, line}, predicate) == mask;
}

// Threads change only where they wait, so that plain reads and writes are atomic.
template <typename T, typename Next>
inline T emulator_replace(T* at, Next next) {
  races_atomic(at, sizeof(T));
  const Quiet quiet;
  const T old = *at;
  *at = next(old);
  return old;
}
template <typename T>
inline T atomicAdd(T* at, std::common_type_t<T> value) {
  return emulator_replace(at, [=](T old) { return T(old + value); });
}
template <typename T>
inline T atomicMax(T* at, std::common_type_t<T> value) {
  return emulator_replace(at, [=](T old) { return old < value ? value : old; });
}
template <typename T>
inline T atomicMin(T* at, std::common_type_t<T> value) {
  return emulator_replace(at, [=](T old) { return value < old ? value : old; });
}
template <typename T>
inline T atomicOr(T* at, std::common_type_t<T> value) {
  return emulator_replace(at, [=](T old) { return T(old | value); });
}
template <typename T>
inline T atomicAnd(T* at, std::common_type_t<T> value) {
  return emulator_replace(at, [=](T old) { return T(old & value); });
}
template <typename T>
inline T atomicExch(T* at, std::common_type_t<T> value) {
  return emulator_replace(at, [=](T) { return value; });
}
template <typename T>
inline T atomicCAS(T* at, std::common_type_t<T> expected, std::common_type_t<T> value) {
  return emulator_replace(at, [=](T old) { return old == expected ? value : old; });
}
inline unsigned atomicInc(unsigned* at, unsigned last) {
  return emulator_replace(at, [=](unsigned old) { return old >= last ? 0u : old + 1; });
}
inline void __threadfence() { races_fence(); }
inline void __threadfence_block() {}  // orders nothing for the race checker

// Exact where the GPU's fast variants are off by a few units in the last place.
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
// Never made part of a fused multiply-add.
inline float __fmul_rn(float a, float b) {
  volatile float product = a * b;
  return product;
}
template <typename T>
inline T __ldg(const T* at) {
  return *at;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
template <typename To, typename From>
inline To emulator_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float x) { return emulator_bits<unsigned>(x); }
inline int __float_as_int(float x) { return emulator_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return emulator_bits<float>(x); }
inline float __int_as_float(int x) { return emulator_bits<float>(x); }

using std::max;
using std::min;

}  // namespace
