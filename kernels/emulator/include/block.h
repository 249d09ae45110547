// One thread block on fibers: barriers, warp collectives, copies under way, and the scheduler that runs it all.
//
// Threads run one at a time, in the order that the launch asks for, and change only where they wait. Blocks run one
// after another. What a GPU leaves undefined ends the launch with a text that names the source lines.
#pragma once
#include <pthread.h>

#include <algorithm>
#include <cstdarg>
#include <cstring>
#include <deque>
#include <memory>
#include <type_traits>
#include <vector>

#include "banks.h"
#include "fibers.h"
#include "races.h"

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace emulator {
namespace {

constexpr int WARP = 32;
constexpr unsigned MAX_THREADS = 1024, MAX_GRID_YZ = 65535;
constexpr size_t MAX_SHARED = 99 << 10;  // of a block on 8.6, 8.9 and 12.0, the least of all that the kernels run on
constexpr size_t MAX_SHARED_OF_9_0 = 227 << 10;
constexpr int BARRIERS = 16;
constexpr int SLOT = 64;                  // bytes that a lane may give to a collective or get from it
constexpr int FORWARD = 0, REVERSE = 1;   // any other order is the seed of a random one

enum class State : unsigned char { ready, at_barrier, in_warp, ended };

struct Where {
  const char* file;
  int line;
  bool operator==(const Where& other) const { return line == other.line && !strcmp(file, other.file); }
  const char* name() const {
    const char* slash = strrchr(file, '/');
    return slash ? slash + 1 : file;
  }
};

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  bool valid;  // else zeros are written
};

// A wgmma that a lane has started: its part of the sums.
struct Product {
  void (*finish)(const Product* of_lanes);  // of a warp
  float* sums;
  int columns;
  unsigned left[4];      // in registers, or
  uint64_t left_matrix;  // in shared memory
  uint64_t right_matrix;
  bool in_registers, add;
  Where where;
  unsigned group;  // which of the lane's
};

struct Thread {
  Fiber fiber;
  uint3 index;
  int lane, warp;
  State state;
  const char* what;  // it waits in, and where, and for which lanes
  Where where;
  unsigned mask;
  std::vector<Copy> open;                 // copies of no group yet
  std::deque<std::vector<Copy>> groups;  // committed, oldest first
  std::vector<Product> open_products;
  std::deque<std::vector<Product>> product_groups;
  unsigned products_committed;  // groups
};

struct Collective {
  unsigned mask, arrived;
  const char* what;
  Where where;
  alignas(16) unsigned char in[WARP][SLOT], out[WARP][SLOT];
};

struct Barrier {
  int waiting, true_ones, found;
  const char* what;
  Where where;
};

// A barrier of some threads.
struct Meeting {
  int threads, arrived = 0;
  std::vector<int> waiting;
};

// splitmix64. <random> and <mutex> would be a fifth of what a small program takes to compile.
struct Random {
  using result_type = uint64_t;
  uint64_t state;
  static constexpr result_type min() { return 0; }
  static constexpr result_type max() { return ~uint64_t(0); }
  result_type operator()() {
    uint64_t x = state += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
  }
};

// A piece of shared memory, exactly as large as was asked for, so that a sanitizer sees its end.
struct Memory {
  const void* key;
  unsigned char* at;
  size_t bytes;
};

struct Block {
  dim3 grid, size;
  uint3 index;
  int threads, order;
  bool failed;
  char* error;
  size_t error_room;
  Barrier barrier;
  Meeting meetings[BARRIERS];
  std::vector<std::unique_ptr<Thread>> thread;
  std::vector<std::vector<Collective>> warp;  // of each warp, one for every mask that it uses
  Memory dynamic;
  std::vector<Memory> declared;
  Random random;
  void (*body)(const void*);
  const void* params;
};

Block block;
Thread* current = nullptr;
pthread_mutex_t one_launch = PTHREAD_MUTEX_INITIALIZER;

struct Alone {
  Alone() { pthread_mutex_lock(&one_launch); }
  ~Alone() { pthread_mutex_unlock(&one_launch); }
};

// What kernels read of it all. The race checker, to which each read would be one of the kernel's, does not see these.
#define UNSEEN __attribute__((no_sanitize("thread"))) inline
UNSEEN uint3 thread_index() { return current->index; }
UNSEEN uint3 block_index() { return block.index; }
UNSEEN dim3 block_size() { return block.size; }
UNSEEN dim3 grid_size() { return block.grid; }
UNSEEN unsigned char* dynamic_memory() { return block.dynamic.at; }
UNSEEN int lane() { return current->lane; }
UNSEEN int warp_start() { return current->warp * WARP; }

// Notes what is wrong; the scheduler then ends the launch. The first text stays.
__attribute__((format(printf, 1, 2))) void note(const char* format, ...) {
  if (block.failed) return;
  block.failed = true;
  const uint3 at = block.index;
  const int used = snprintf(block.error, block.error_room, "block (%u, %u, %u): ", at.x, at.y, at.z);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(block.error + used, block.error_room - used, format, arguments);
  va_end(arguments);
}

// Called on a thread that cannot go on, after note().
[[noreturn]] void stop() {
  current->state = State::ended;
  current->fiber.leave();
  abort();
}

void wait(State state, const char* what, Where where, unsigned mask) {
  current->state = state;
  current->what = what;
  current->where = where;
  current->mask = mask;
  current->fiber.leave();
}

void all_met() {
  for (size_t warp = 0; warp < block.warp.size(); warp++) banks_met(warp);
}

// Waits until all threads of the block are here. Returns for how many of them `predicate` was true.
int meet(const char* what, Where where, bool predicate) {
  const Quiet quiet;
  Barrier& barrier = block.barrier;
  if (barrier.waiting == 0) {
    barrier.what = what;
    barrier.where = where;
    barrier.true_ones = 0;
  } else if (!(barrier.where == where) || strcmp(barrier.what, what)) {
    note("threads wait at two barriers: %s at %s:%d and %s at %s:%d", barrier.what, barrier.where.name(),
         barrier.where.line, what, where.name(), where.line);
    stop();
  }
  barrier.true_ones += predicate;
  if (++barrier.waiting == block.threads) {
    barrier.waiting = 0;
    barrier.found = barrier.true_ones;
    races_meet();
    all_met();
    for (int i = 0; i < block.threads; i++)
      if (block.thread[i]->state == State::at_barrier) block.thread[i]->state = State::ready;  // all are here
  } else {
    wait(State::at_barrier, what, where, 0);
  }
  return barrier.found;  // no thread passes the next barrier before this one comes there
}

// Comes to barrier `id` of so many threads, and stays until all of them are there, or goes on.
void meet_some(int id, int threads, bool stays, const char* what, Where where) {
  const Quiet quiet;
  if (id < 1 || id >= BARRIERS || threads < 1 || threads % WARP || threads > block.threads) {
    note("%s at %s:%d of barrier %d and %d threads", what, where.name(), where.line, id, threads);
    stop();
  }
  Meeting& meeting = block.meetings[id];
  if (meeting.arrived == 0) meeting.threads = threads;
  if (meeting.threads != threads || meeting.arrived == threads) {
    note("%s at %s:%d: barrier %d is one of %d threads, not of %d", what, where.name(), where.line, id,
         meeting.threads, threads);
    stop();
  }
  const int index = current->warp * WARP + current->lane;
  races_arrive(id);
  if (stays) meeting.waiting.push_back(index);
  if (++meeting.arrived == threads) {
    races_leave(id, meeting.waiting.data(), meeting.waiting.size());
    for (int i : meeting.waiting) block.thread[i]->state = State::ready;
    meeting.waiting.clear();
    meeting.arrived = 0;
  } else if (stays) {
    wait(State::at_barrier, what, where, id);
  }
}

// What the lanes of `mask` do together: each gives `in`; the last to come calls finish(in of all lanes, out of all
// lanes); each returns its own out. Lanes outside the mask have 0xff in every byte, and so has an out not written.
template <typename Out, typename In, typename Finish>
Out together(unsigned mask, const char* what, Where where, const In& in, Finish finish) {
  static_assert(sizeof(In) <= SLOT && sizeof(Out) <= SLOT, "larger than a lane's slot");
  static_assert(std::is_trivially_copyable<In>::value && std::is_trivially_copyable<Out>::value, "copied as bytes");
  const Quiet quiet;
  if (!(mask >> current->lane & 1)) {
    note("lane %d calls %s at %s:%d with the mask %08x, which it is not in", current->lane, what, where.name(),
         where.line, mask);
    stop();
  }
  std::vector<Collective>& all = block.warp[current->warp];
  size_t slot = 0;
  while (slot < all.size() && all[slot].mask != mask) slot++;
  if (slot == all.size()) {
    all.emplace_back();
    all[slot].mask = mask;
    all[slot].arrived = 0;
  }
  Collective& mine = all[slot];
  if (mine.arrived == 0) {
    mine.what = what;
    mine.where = where;
  } else if (!(mine.where == where) || strcmp(mine.what, what)) {
    note("lanes of warp %d diverge: %s at %s:%d and %s at %s:%d", current->warp, mine.what, mine.where.name(),
         mine.where.line, what, where.name(), where.line);
    stop();
  }
  memcpy(mine.in[current->lane], &in, sizeof in);
  mine.arrived |= 1u << current->lane;
  if (mine.arrived == mask) {
    if (mask == ~0u) banks_met(current->warp);
    In given[WARP];
    Out made[WARP];
    memset(static_cast<void*>(given), 0xff, sizeof given);
    memset(static_cast<void*>(made), 0xff, sizeof made);
    for (int lane = 0; lane < WARP; lane++)
      if (mask >> lane & 1) memcpy(static_cast<void*>(given + lane), mine.in[lane], sizeof(In));
    finish(given, made);
    mine.arrived = 0;
    for (int lane = 0; lane < WARP; lane++) {
      if (!(mask >> lane & 1)) continue;
      memcpy(mine.out[lane], made + lane, sizeof(Out));
      Thread& other = *block.thread[current->warp * WARP + lane];
      if (&other != current) other.state = State::ready;
    }
  } else {
    wait(State::in_warp, what, where, mask);
  }
  Out out;
  memcpy(static_cast<void*>(&out), block.warp[current->warp][slot].out[current->lane], sizeof out);
  return out;
}

void poison(const Memory& memory) {
  races_shared(memory.at, memory.bytes);
  memset(memory.at, 0xff, memory.bytes);  // NaN in every float type
}

Memory allocate(const void* key, size_t bytes) {
  void* at = nullptr;
  if (posix_memalign(&at, 1024, bytes ? bytes : 1)) {
    perror("emulator: no memory for what a block shares");
    abort();
  }
  const Memory made = {key, static_cast<unsigned char*>(at), bytes};
  poison(made);
  return made;
}

// The declared array of that key, the same for all threads of a block.
void* declared(const void* key, size_t bytes) {
  const Quiet quiet;
  for (const Memory& memory : block.declared)
    if (memory.key == key) return memory.at;
  block.declared.push_back(allocate(key, bytes));
  return block.declared.back().at;
}

bool in_shared(const void* address) {
  const auto holds = [address](const Memory& memory) {
    const unsigned char* at = static_cast<const unsigned char*>(address);
    return at >= memory.at && at < memory.at + memory.bytes;
  };
  return holds(block.dynamic) || std::any_of(block.declared.begin(), block.declared.end(), holds);
}

void land(const Copy& copy) {
  if (copy.valid)
    memcpy(copy.to, copy.from, copy.bytes);
  else
    memset(copy.to, 0, copy.bytes);
}

// An asynchronous copy may land anywhere between its start and the wait for it. Forward order: as late as it can, so
// that a missing wait shows. Reverse: at once, so that overwriting what others still read shows. Random: either.
void start_copy(const Copy& copy) {
  if (block.order == REVERSE || (block.order != FORWARD && block.random() % 2))
    land(copy);
  else
    current->open.push_back(copy);
}

void land_all_but(size_t groups) {
  const Quiet quiet;
  races_wait(groups);
  while (current->groups.size() > groups) {
    for (const Copy& copy : current->groups.front()) land(copy);
    current->groups.pop_front();
  }
}

// What the threads wait for, the same lines together.
void note_deadlock() {
  char text[1024];
  int used = 0, ended = 0;
  std::vector<const Thread*> seen;
  for (int i = 0; i < block.threads; i++) {
    const Thread* one = block.thread[i].get();
    if (one->state == State::ended) {
      ended++;
      continue;
    }
    const auto alike = [one](const Thread* other) { return other->where == one->where && other->mask == one->mask; };
    if (std::any_of(seen.begin(), seen.end(), alike)) continue;
    seen.push_back(one);
    int count = 0;
    for (int j = 0; j < block.threads; j++) {
      const Thread* other = block.thread[j].get();
      count += other->state != State::ended && alike(other);
    }
    if (used < int(sizeof text) - 200)
      used += snprintf(text + used, sizeof text - used, "%s%d wait in %s at %s:%d", used ? ", " : "", count, one->what,
                       one->where.name(), one->where.line);
  }
  note("deadlock: of %d threads %s, %d have ended", block.threads, text, ended);
}

void thread_body() {
  const auto body = block.body;
  const void* params = block.params;
  races_quiet(-1);
  body(params);
  races_quiet(1);
  current->state = State::ended;
  current->fiber.leave();
}

void run_block(std::vector<int>& order) {
  const uint3 at = block.index;
  races_block((at.z * block.grid.y + at.y) * block.grid.x + at.x, block.threads);
  block.barrier = {};
  for (Meeting& meeting : block.meetings) meeting = {};
  poison(block.dynamic);
  for (const Memory& memory : block.declared) poison(memory);
  for (auto& warp : block.warp) warp.clear();
  for (int i = 0; i < block.threads; i++) {
    Thread& one = *block.thread[i];
    one.state = State::ready;
    one.open.clear();
    one.groups.clear();
    one.open_products.clear();
    one.product_groups.clear();
    one.products_committed = 0;
    one.fiber.start(thread_body);
  }
  bool running = true;
  while (running && !block.failed) {
    if (block.order != FORWARD && block.order != REVERSE) std::shuffle(order.begin(), order.end(), block.random);
    bool moved = false;
    running = false;
    for (int i : order) {
      Thread& one = *block.thread[i];
      if (one.state == State::ready) {
        current = &one;
        races_turn(i, one.fiber.stack(), STACK_BYTES);
        one.fiber.enter();
        moved = true;
        char race[512];
        *race = 0;
        races_rest(race, sizeof race);
        if (*race) note("%s", race);
        if (block.failed) return;
      }
      running |= one.state != State::ended;
    }
    if (running && !moved) note_deadlock();
  }
  all_met();
}

bool bad_launch(dim3 grid, dim3 size, size_t shared, unsigned max_threads, size_t max_shared) {
  const uint64_t threads = uint64_t(size.x) * size.y * size.z;
  if (grid.x < 1 || grid.y < 1 || grid.z < 1 || grid.x > 0x7fffffffu || grid.y > MAX_GRID_YZ || grid.z > MAX_GRID_YZ)
    note("no GPU takes the grid %u x %u x %u", grid.x, grid.y, grid.z);
  else if (threads < 1 || threads > MAX_THREADS || threads > max_threads)
    note("a block of %llu threads; the kernel is made for 1 to %u", (unsigned long long)threads, max_threads);
  else if (shared > max_shared)
    note("%zu bytes of dynamic shared memory; a block has %zu at most", shared, max_shared);
  return block.failed;
}

// Runs every block of a grid. dims: grid x y z, block x y z. Returns 0, or 1 with the reason in `error`.
int launch(void (*body)(const void*), const void* params, size_t params_bytes, const unsigned* dims, size_t shared,
           unsigned max_threads, size_t max_shared, int order, char* error, size_t error_room) {
  const Alone alone;
  block.index = {};
  block.failed = false;
  block.error = error;
  block.error_room = error_room;
  block.grid = dim3(dims[0], dims[1], dims[2]);
  block.size = dim3(dims[3], dims[4], dims[5]);
  if (bad_launch(block.grid, block.size, shared, max_threads, max_shared)) return 1;
  block.threads = block.size.x * block.size.y * block.size.z;
  block.order = order;
  block.random.state = order;
  block.body = body;
  block.params = params;
  races_launch(params, params_bytes);
  block.dynamic = allocate(nullptr, shared);
  while (int(block.thread.size()) < block.threads) block.thread.push_back(std::make_unique<Thread>());
  block.warp.resize((block.threads + WARP - 1) / WARP);
  banks_launch(block.warp.size());
  std::vector<int> turns(block.threads);
  for (int i = 0; i < block.threads; i++) {
    Thread& one = *block.thread[i];
    one.lane = i % WARP;
    one.warp = i / WARP;
    one.index = {i % block.size.x, i / block.size.x % block.size.y, i / block.size.x / block.size.y};
    turns[i] = order == REVERSE ? block.threads - 1 - i : i;
  }
  const uint64_t blocks = uint64_t(block.grid.x) * block.grid.y * block.grid.z;
  std::vector<uint64_t> sequence(blocks);
  for (uint64_t i = 0; i < blocks; i++) sequence[i] = order == REVERSE ? blocks - 1 - i : i;
  if (order != FORWARD && order != REVERSE) std::shuffle(sequence.begin(), sequence.end(), block.random);
  for (uint64_t i : sequence) {
    const uint64_t row = i / block.grid.x;
    block.index = {unsigned(i % block.grid.x), unsigned(row % block.grid.y), unsigned(row / block.grid.y)};
    run_block(turns);
    if (block.failed) break;
  }
  free(block.dynamic.at);
  for (const Memory& memory : block.declared) free(memory.at);
  block.declared.clear();
  return block.failed;
}

}  // namespace
}  // namespace emulator
