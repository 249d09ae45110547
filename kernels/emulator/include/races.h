// What the emulator tells the race checker (../races.cpp). Where a kernel is compiled with -fsanitize=thread, the
// compiler calls the checker for each access to memory, and these functions say in which order CUDA puts the accesses.
// In all other builds they are empty.
#pragma once
#include <cstddef>

#if defined(RACE_CHECKER)
#define RACES(name, ...) extern "C" __attribute__((visibility("default"))) void races_##name(__VA_ARGS__);
#elif defined(__SANITIZE_THREAD__)
#define RACES(name, ...) extern "C" void races_##name(__VA_ARGS__);
#else
#define RACES(name, ...) \
  static inline void races_##name(__VA_ARGS__) {}
#endif

RACES(launch, const void* params, size_t bytes)            // begins; kernels only read their parameters
RACES(block, unsigned number, int threads)                 // begins
RACES(shared, const void* at, size_t bytes)                // a piece of shared memory that this block has not used yet
RACES(turn, int thread, const char* stack, size_t bytes)   // a thread runs from here on
RACES(rest, char* found, size_t room)                      // until here; a race is described in `found`
RACES(quiet, int more)                                     // 1: accesses are the emulator's own from here; -1: to here
RACES(meet)                                                // all threads are at a barrier
RACES(arrive, int barrier)                                 // the thread is at one of some threads
RACES(leave, int barrier, const int* waiting, size_t count)  // all are there; these have waited
RACES(fence_for_wgmma)                                     // fence.proxy.async
RACES(read_by_wgmma, int thread, unsigned group, const void* at, size_t bytes, const char* file, int line)
RACES(wait_for_wgmma, unsigned group)
RACES(warp, int first_thread, unsigned lanes)              // lanes are at __syncwarp
RACES(fence)                                               // __threadfence
RACES(atomic, const void* at, size_t bytes)                // comes next
RACES(read, int thread, const void* at, size_t bytes, const char* file, int line)  // by a lane in a warp's function
RACES(copy, void* to, const void* from, size_t bytes, const char* file, int line)  // cp.async; from null: zeros
RACES(commit)
RACES(wait, size_t pending)

// While it lives, what the thread touches is the emulator's and not the kernel's.
struct Quiet {
  Quiet() { races_quiet(1); }
  ~Quiet() { races_quiet(-1); }
};
