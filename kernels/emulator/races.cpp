// The race checker: two accesses to the same bytes, one of them a write, that nothing in CUDA's memory model puts in
// order are a race, in whatever order the emulator happened to run them (vector clocks: Flanagan and Freund, FastTrack,
// PLDI 2009, section 2.2; all accesses that may still race are kept, so none is missed for lack of room).
//
// Threads of a block are in order only by __syncthreads and its like, barriers of some threads, __syncwarp, and __threadfence on both sides of
// an atomic; shuffles, votes, ldmatrix and mma order nothing. A group of cp.async is an agent of its own: what it
// does comes after all that its thread had done when it started the copy, and before what the thread does after it
// has waited for the group; other threads need a barrier besides. So is a group of wgmma, which sees what came before a fence for it. Blocks are in order by fences and atomics alone.
// Threads that write the value that is there already do not race with each other.
//
// A kernel compiled with -fsanitize=thread is linked with this instead of ThreadSanitizer's runtime: __tsan_* below is
// what g++ calls before each access. This file is compiled without.
#define RACE_CHECKER
#include "include/races.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr uintptr_t CHUNK = 16;  // bytes that are kept together

enum Kind : uint8_t { READ, WRITE, ATOMIC };

// A line of a file, or without a file an address of code.
struct Site {
  const char* file;
  uintptr_t at;
};

// One agent's access to some bytes of a chunk. Agents of a block with n threads: i is thread i, n + i its copies, 2 n + i
// its products.
struct Access {
  uint32_t block, clock;
  uint16_t agent, bytes;  // a bit for each byte
  Kind kind;
  Site site;
};

using Clocks = std::vector<uint32_t>;  // of each agent of a block

// How far the agents are that come before something.
struct Past {
  Clocks here;
  std::map<uint32_t, Clocks> elsewhere;  // in other blocks

  static void join(Clocks& all, const Clocks& more) {
    if (all.size() < more.size()) all.resize(more.size());
    for (size_t i = 0; i < more.size(); i++) all[i] = std::max(all[i], more[i]);
  }
  void join(const Past& other) {
    join(here, other.here);
    for (const auto& [block, clocks] : other.elsewhere) join(elsewhere[block], clocks);
  }
  bool includes(const Access& access, uint32_t block) const {
    if (access.block == block) return here[access.agent] >= access.clock;
    const auto found = elsewhere.find(access.block);
    return found != elsewhere.end() && found->second[access.agent] >= access.clock;
  }
};

struct Thread {
  Past past;
  Past fenced;                    // the part of it that wgmma sees: what was done before a fence for it
  Past released, received;  // released: what a fence gave to the atomics behind it; received: to the next fence
  uint32_t committed = 0;         // groups of copies
  int quiet = 1;                  // above 0: in the emulator, where each thread begins
};

// A write beside another one, which races unless it leaves the bytes as they are.
struct Suspect {
  const unsigned char* at = nullptr;
  std::vector<unsigned char> before;
  std::string text;
};

struct {
  const char *params, *stack = nullptr;
  size_t params_bytes, stack_bytes = 0;
  uint32_t block = 0, threads = 0;
  int running = -1;
  std::vector<Thread> thread;
  std::map<int, std::pair<Past, Past>> barriers;  // of some threads: what those had done, and fenced, that are there
  std::unordered_map<uintptr_t, std::vector<Access>> memory;  // by address / CHUNK
  std::unordered_map<uintptr_t, Past> flags;                  // what atomics at an address hand on
  std::vector<std::pair<const char*, size_t>> shared;
  Suspect suspect;
  std::string found;
} now;

bool within(const void* at, const char* start, size_t bytes) {
  return static_cast<size_t>(static_cast<const char*>(at) - start) < bytes;
}

std::string name_of(const Site& site) {
  char text[64];
  if (site.file) {
    const char* slash = strrchr(site.file, '/');
    return (slash ? slash + 1 : site.file) + (":" + std::to_string(site.at));
  }
  Dl_info info;  // kernels.emulator.program finds the line
  const uintptr_t base = dladdr(reinterpret_cast<void*>(site.at), &info) ? uintptr_t(info.dli_fbase) : 0;
  snprintf(text, sizeof text, "@0x%zx", size_t(site.at - 1 - base));  // the call's, not the next instruction's
  return text;
}

std::string name_of(const Access& access) {
  static const char* const kinds[] = {"read", "write", "atomic operation"};
  static const char* const agents[] = {" by thread ", " by a copy of thread ", " by a product of thread "};
  std::string text = kinds[access.kind];
  text += agents[access.agent / now.threads];  // all blocks are of one size
  text += std::to_string(access.agent % now.threads);
  if (access.block != now.block) text += " of block " + std::to_string(access.block);
  return text + " at " + name_of(access.site);
}

void report(const void* at, const Access& one, const Access& other, bool unless_same, size_t bytes) {
  const bool shared = std::any_of(now.shared.begin(), now.shared.end(),
                                  [at](const auto& piece) { return within(at, piece.first, piece.second); });
  const std::string text = "a race in " + std::string(shared ? "shared" : "global") + " memory: " + name_of(one) +
                           ", and in no order with it " + name_of(other);
  if (!unless_same) {
    if (now.found.empty()) now.found = text;
  } else if (!now.suspect.at) {
    const unsigned char* from = static_cast<const unsigned char*>(at);
    now.suspect = {from, {from, from + bytes}, text};
  }
}

// The write is done that was announced last.
void settle() {
  if (!now.suspect.at) return;
  if (memcmp(now.suspect.at, now.suspect.before.data(), now.suspect.before.size()) && now.found.empty())
    now.found = now.suspect.text;
  now.suspect.at = nullptr;
}

bool conflict(Kind one, Kind other) { return one == READ ? other != READ : one == WRITE || other != ATOMIC; }

// An access need not be kept when a later one, behind it in order, races with all that it could race with.
bool covers(Kind later, Kind earlier) { return later == WRITE || later == earlier; }

// All the bytes belong to chunk `key`.
void touch_chunk(uintptr_t key, const Access& access, const Past& past, const void* at, size_t bytes) {
  std::vector<Access>& seen = now.memory[key];
  for (size_t i = 0; i < seen.size();) {
    Access& other = seen[i];
    const uint16_t common = other.bytes & access.bytes;
    if (common && !past.includes(other, now.block)) {
      const bool by_threads = std::max(access.agent, other.agent) < now.threads;
      const bool both_write = access.kind == WRITE && other.kind == WRITE;
      if (conflict(access.kind, other.kind)) report(at, access, other, both_write && by_threads, bytes);
    } else if (common && covers(access.kind, other.kind)) {
      other.bytes &= ~common;
      if (!other.bytes) {
        other = seen.back();
        seen.pop_back();
        continue;
      }
    }
    i++;
  }
  seen.push_back(access);
}

void touch(Kind kind, uint32_t agent, uint32_t clock, const Past& past, const void* at, size_t bytes, Site site) {
  settle();
  const uintptr_t first = reinterpret_cast<uintptr_t>(at), end = first + bytes;
  for (uintptr_t key = first / CHUNK; key * CHUNK < end; key++) {
    const uintptr_t from = std::max(first, key * CHUNK) % CHUNK, room = std::min(end, (key + 1) * CHUNK) - key * CHUNK;
    const uint16_t mask = ((1u << room) - 1) & ~((1u << from) - 1);
    touch_chunk(key, {now.block, clock, uint16_t(agent), mask, kind, site}, past, at, bytes);
  }
}

void touch(Kind kind, int index, const void* at, size_t bytes, Site site) {
  const Past& past = now.thread[index].past;
  touch(kind, index, past.here[index], past, at, bytes, site);
}

// Called by the instrumented code, which the emulator is a part of.
inline void announce(Kind kind, const void* at, size_t bytes, void* code) {
  if (now.running < 0 || within(at, now.stack, now.stack_bytes) || now.thread[now.running].quiet) return;
  if (!within(at, now.params, now.params_bytes)) touch(kind, now.running, at, bytes, {nullptr, uintptr_t(code)});
}

// Threads learn what each of them knows. What they do from here on is not part of it.
template <typename Includes>
void join(Includes includes) {
  Past all, fenced;
  for (uint32_t i = 0; i < now.threads; i++) {
    if (!includes(i)) continue;
    all.join(now.thread[i].past);
    fenced.join(now.thread[i].fenced);
  }
  for (uint32_t i = 0; i < now.threads; i++) {
    if (!includes(i)) continue;
    now.thread[i].past = all;
    now.thread[i].fenced = fenced;
    now.thread[i].past.here[i]++;
  }
}

}  // namespace

void races_launch(const void* params, size_t bytes) {
  now.params = static_cast<const char*>(params);
  now.params_bytes = bytes;
  now.memory.clear();
  now.flags.clear();
  now.shared.clear();
  now.found.clear();
}

void races_block(unsigned number, int threads) {
  for (auto& [at, past] : now.flags) {
    if (!past.here.empty()) past.elsewhere[now.block] = std::move(past.here);
    past.here.clear();
  }
  now.block = number;
  now.threads = threads;
  now.thread.assign(threads, {});
  now.barriers.clear();
  for (int i = 0; i < threads; i++) {
    now.thread[i].past.here.assign(3 * threads, 0);
    now.thread[i].past.here[i] = 1;
    now.thread[i].fenced.here.assign(3 * threads, 0);
  }
}

void races_shared(const void* at, size_t bytes) {
  const char* start = static_cast<const char*>(at);
  for (uintptr_t key = uintptr_t(at) / CHUNK; key * CHUNK < uintptr_t(at) + bytes; key++) now.memory.erase(key);
  for (auto flag = now.flags.begin(); flag != now.flags.end();)
    flag = within(reinterpret_cast<void*>(flag->first), start, bytes) ? now.flags.erase(flag) : std::next(flag);
  const std::pair<const char*, size_t> piece(start, bytes);
  if (std::find(now.shared.begin(), now.shared.end(), piece) == now.shared.end()) now.shared.push_back(piece);
}

void races_turn(int thread, const char* stack, size_t bytes) {
  now.running = thread;
  now.stack = stack;
  now.stack_bytes = bytes;
}

void races_rest(char* found, size_t room) {
  settle();
  now.running = -1;
  snprintf(found, room, "%s", now.found.c_str());
}

void races_quiet(int more) {
  if (now.running >= 0) now.thread[now.running].quiet += more;
}

void races_meet() {
  join([](uint32_t) { return true; });
}

void races_arrive(int barrier) {
  Thread& one = now.thread[now.running];
  now.barriers[barrier].first.join(one.past);
  now.barriers[barrier].second.join(one.fenced);
  one.past.here[now.running]++;
}

void races_leave(int barrier, const int* waiting, size_t count) {
  const auto& [past, fenced] = now.barriers[barrier];
  for (size_t i = 0; i < count; i++) {
    now.thread[waiting[i]].past.join(past);
    now.thread[waiting[i]].fenced.join(fenced);
  }
  now.barriers.erase(barrier);
}

// Of what the thread itself has done, and its copies that it has waited for.
void races_fence_for_wgmma() {
  Thread& one = now.thread[now.running];
  for (uint32_t agent : {uint32_t(now.running), now.threads + now.running}) one.fenced.here[agent] = one.past.here[agent];
}

void races_warp(int first_thread, unsigned lanes) {
  join([=](uint32_t i) { return i - first_thread < 32 && lanes >> (i - first_thread) & 1; });
}

void races_fence() {
  Thread& one = now.thread[now.running];
  one.past.join(one.received);
  one.released = one.past;
  one.past.here[now.running]++;
}

void races_atomic(const void* at, size_t bytes) {
  touch(ATOMIC, now.running, at, bytes, {nullptr, uintptr_t(__builtin_return_address(0))});
  Thread& one = now.thread[now.running];
  const auto flag = now.flags.find(uintptr_t(at));
  if (flag != now.flags.end()) one.received.join(flag->second);
  if (!one.released.here.empty()) now.flags[uintptr_t(at)].join(one.released);
}

void races_read(int thread, const void* at, size_t bytes, const char* file, int line) {
  touch(READ, thread, at, bytes, {file, uintptr_t(line)});
}

// Its clock is the number of the group too.
void races_read_by_wgmma(int thread, unsigned group, const void* at, size_t bytes, const char* file, int line) {
  touch(READ, 2 * now.threads + thread, group, now.thread[thread].fenced, at, bytes, {file, uintptr_t(line)});
}

void races_wait_for_wgmma(unsigned group) {
  uint32_t& done = now.thread[now.running].past.here[2 * now.threads + now.running];
  done = std::max(done, uint32_t(group));
}

// Its clock is the number of the group that it will be in.
void races_copy(void* to, const void* from, size_t bytes, const char* file, int line) {
  const Thread& one = now.thread[now.running];
  const uint32_t agent = now.threads + now.running, group = one.committed + 1;
  if (from) touch(READ, agent, group, one.past, from, bytes, {file, uintptr_t(line)});
  touch(WRITE, agent, group, one.past, to, bytes, {file, uintptr_t(line)});
}

void races_commit() { now.thread[now.running].committed++; }

void races_wait(size_t pending) {
  Thread& one = now.thread[now.running];
  uint32_t& done = one.past.here[now.threads + now.running];
  if (one.committed > pending) done = std::max(done, uint32_t(one.committed - pending));
}

#define ANNOUNCED(name, ...) extern "C" __attribute__((visibility("default"))) void __tsan_##name(__VA_ARGS__)
#define ANNOUNCED_OF(bytes)                                                                               \
  ANNOUNCED(read##bytes, void* at) { announce(READ, at, bytes, __builtin_return_address(0)); }            \
  ANNOUNCED(write##bytes, void* at) { announce(WRITE, at, bytes, __builtin_return_address(0)); }          \
  ANNOUNCED(unaligned_read##bytes, void* at) { announce(READ, at, bytes, __builtin_return_address(0)); }  \
  ANNOUNCED(unaligned_write##bytes, void* at) { announce(WRITE, at, bytes, __builtin_return_address(0)); }
ANNOUNCED_OF(1)
ANNOUNCED_OF(2)
ANNOUNCED_OF(4)
ANNOUNCED_OF(8)
ANNOUNCED_OF(16)
ANNOUNCED(read_range, void* at, size_t bytes) { announce(READ, at, bytes, __builtin_return_address(0)); }
ANNOUNCED(write_range, void* at, size_t bytes) { announce(WRITE, at, bytes, __builtin_return_address(0)); }
ANNOUNCED(init) {}
ANNOUNCED(func_entry, void*) {}
ANNOUNCED(func_exit) {}
