// Counts what accesses to memory cost: wavefronts of shared memory and sectors of global memory, for each instruction
// of a warp, beside the least that its bytes take. Only in a program of PTX (kernels/emulator/ptx.py) with -DBANKS: there
// an access has the width and the memory that the compiler chose. In all other builds these functions are empty.
//
// Which accesses of the lanes are one request: those by the same instruction, each lane's n-th by it since the warp last
// met (a barrier, or a function of the whole warp). That is what a GPU does as long as the lanes of a warp take the same
// way between two meetings, or leave a loop one by one; where they take different ways in between, it issues as many
// requests as are counted here, or more.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

enum Space { SHARED_MEMORY, SHARED_ATOMICS, GLOBAL_MEMORY, GLOBAL_ATOMICS };

#ifdef BANKS

// Of one instruction in one launch. kernels/emulator/program.py has the same.
struct Banks {
  const char* at;  // line of the source
  uint64_t space, requests, taken, least;
};

namespace {

constexpr int BANK_LANES = 32, BANK_COUNT = 32;
constexpr uintptr_t WORD = 4, SECTOR = 32;

struct Request {
  uint32_t lanes = 0;
  uintptr_t at[BANK_LANES];
};

// The line in the PTX, and the memory: an asynchronous copy is in two.
using Key = std::pair<int, Space>;

// An instruction, and what a warp has asked for by it since it last met.
struct Instruction {
  const char* at;
  size_t bytes;
  size_t done[BANK_LANES] = {};  // requests that a lane is in
  std::vector<Request> requests;
};

std::vector<std::map<Key, Instruction>> pending;  // of each warp
std::map<Key, Banks> counts;

// How many times the busiest bank is asked by some lanes together. A word is read or written once for all lanes; atomics
// of one word wait for each other.
uint64_t busiest(const Request& request, size_t bytes, bool atomic, int first, int end) {
  std::vector<uintptr_t> words;
  for (int lane = first; lane < end; lane++)
    if (request.lanes >> lane & 1)
      for (size_t byte = 0; byte < bytes; byte += WORD) words.push_back((request.at[lane] + byte) / WORD);
  std::sort(words.begin(), words.end());
  if (!atomic) words.erase(std::unique(words.begin(), words.end()), words.end());
  uint64_t of_bank[BANK_COUNT] = {};
  for (uintptr_t word : words) of_bank[word % BANK_COUNT]++;
  return *std::max_element(of_bank, of_bank + BANK_COUNT);
}

// All lanes together where each has 4 bytes or fewer, half of them with 8 and a quarter with 16.
void count_wavefronts(const Request& request, size_t bytes, bool atomic, Banks& sum) {
  const int lanes = bytes <= WORD ? BANK_LANES : int(BANK_LANES * WORD / bytes);
  for (int first = 0; first < BANK_LANES; first += lanes) {
    const uint64_t wavefronts = busiest(request, bytes, atomic, first, first + lanes);
    sum.taken += wavefronts;
    sum.least += wavefronts > 0;
  }
}

void count_sectors(const Request& request, size_t bytes, Banks& sum) {
  std::vector<uintptr_t> starts, sectors;  // no access lies in two sectors: it begins at a multiple of its size
  for (int lane = 0; lane < BANK_LANES; lane++)
    if (request.lanes >> lane & 1) starts.push_back(request.at[lane]);
  std::sort(starts.begin(), starts.end());
  starts.erase(std::unique(starts.begin(), starts.end()), starts.end());
  for (uintptr_t start : starts)
    if (sectors.empty() || sectors.back() != start / SECTOR) sectors.push_back(start / SECTOR);
  sum.taken += sectors.size();
  sum.least += (starts.size() * bytes + SECTOR - 1) / SECTOR;
}

}  // namespace

inline void banks_launch(int warps) {
  pending.assign(warps, {});
  counts.clear();
}

inline void banks_access(Space space, const void* at, size_t bytes, const char* where, int line, int warp, int lane) {
  Instruction& of = pending[warp].try_emplace({line, space}, Instruction{where, bytes}).first->second;
  const size_t number = of.done[lane]++;
  if (number == of.requests.size()) of.requests.emplace_back();
  of.requests[number].lanes |= 1u << lane;
  of.requests[number].at[lane] = reinterpret_cast<uintptr_t>(at);
}

// All lanes of a warp are at the same place.
inline void banks_met(int warp) {
  for (const auto& [key, of] : pending[warp]) {
    const Space space = key.second;
    Banks& sum = counts.try_emplace(key, Banks{of.at, uint64_t(space), 0, 0, 0}).first->second;
    sum.requests += of.requests.size();
    for (const Request& request : of.requests) {
      if (space == SHARED_MEMORY || space == SHARED_ATOMICS)
        count_wavefronts(request, of.bytes, space == SHARED_ATOMICS, sum);
      else
        count_sectors(request, of.bytes, sum);
    }
  }
  pending[warp].clear();
}

// What the last launch took, in the order of the PTX. Returns how many instructions there are, `room` of them in `to`.
extern "C" __attribute__((visibility("default"))) size_t banks_found(Banks* to, size_t room) {
  size_t at = 0;
  for (const auto& [key, sum] : counts) {
    if (at == room) break;
    to[at++] = sum;
  }
  return counts.size();
}

#else

inline void banks_launch(int) {}
inline void banks_access(Space, const void*, size_t, const char*, int, int, int) {}
inline void banks_met(int) {}

#endif
