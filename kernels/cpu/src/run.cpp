// The runner: threads go through a whole program, command after command.
#include <omp.h>
#include <time.h>

#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"
#include "sleeper.h"

namespace {

struct Scratch {
  char* memory = nullptr;
  int64_t bytes = 0;
  ~Scratch() { free(memory); }
};
thread_local Scratch scratch_of_thread;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Counts events that threads wait for. They spin for a while (a command takes microseconds), then sleep: on a machine
// with more work than cores the thread that is missing may need this very core.
class EventCount {
 public:
  uint32_t count() const { return count_.load(std::memory_order_seq_cst); }

  void notify() {
    count_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) wake();
  }

  // Returns when there was an event after `count`.
  void wait(uint32_t count) {
    const auto until = std::chrono::steady_clock::now() + SPIN;
    do {
      for (int i = 0; i < SPINS_A_LOOK; i++) {
        if (count_.load(std::memory_order_acquire) != count) return;
        relax();
      }
    } while (std::chrono::steady_clock::now() < until);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (count_.load(std::memory_order_seq_cst) == count) sleep(count);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  // A time: how long a pause takes depends on the CPU. The clock costs about as much, so it is looked at now and then.
  static constexpr std::chrono::microseconds SPIN{20};
  static constexpr int SPINS_A_LOOK = 16;

#if defined(__linux__)
  void sleep(uint32_t count) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&count_), FUTEX_WAIT_PRIVATE, count, nullptr, nullptr, 0);
  }
  void wake() {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&count_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
#else
  void sleep(uint32_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return count_.load(std::memory_order_seq_cst) != count; });
  }
  void wake() {
    { std::lock_guard<std::mutex> guard(mutex_); }  // no thread is between its look and its sleep
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
#endif

  alignas(64) std::atomic<uint32_t> count_{0};
  alignas(64) std::atomic<int> sleepers_{0};
};

bool binds_to_places() { return omp_get_num_places() > 0 && omp_get_proc_bind() != omp_proc_bind_false; }

// Where OMP_PROC_BIND or GOMP_CPU_AFFINITY is set, the runtime binds the process's first thread to one place when it is
// loaded. A thread inherits that, so each further one goes to a place of its own, as the runtime's threads do.
void bind_to_place([[maybe_unused]] int thread) {
#if defined(__linux__)
  if (!binds_to_places()) return;
  const int place = thread % omp_get_num_places();
  std::vector<int> cores(omp_get_place_num_procs(place));
  omp_get_place_proc_ids(place, cores.data());
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(core, &set);
  sched_setaffinity(0, sizeof set, &set);  // where the system refuses, the thread stays where it is
#endif
}

// Before a program, by the thread that calls it.
void move_away([[maybe_unused]] const std::vector<std::shared_ptr<Sleeper>>& sleepers) {
#if defined(__linux__)
  const int core = sched_getcpu();
  if (core < 0 || core >= CPU_SETSIZE || binds_to_places()) return;
  for (auto& one : sleepers) one->move_away_from(core);
#endif
}

struct alignas(64) Counter {
  std::atomic<int64_t> value{0};
};

int64_t resolve(int32_t rows, const Step& step) {
  if (rows >= 0) return rows;
  return int64_t((1 - rows) / 2) * (rows % 2 ? step.tokens_count : step.samples_count);
}

void execute(const Command& c, const Step& step, Team& team) {
  const int64_t rows = resolve(c.rows, step);
  if (rows <= 0) return;
  switch (c.op) {
    case OP_LINEAR: return run_linear(c.linear, rows, team);
    case OP_EMBED: return run_embed(c.embed, step, rows, team);
    case OP_NORM: return run_norm(c.norm, rows, team);
    case OP_GATED: return run_gated(c.gated, rows, team);
    case OP_ACTIVATE: return run_activate(c.activate, rows, team);
    case OP_ADD: return run_add(c.add, rows, team);
    case OP_SELECT: return run_select(c.select, step, rows, team);
    case OP_ROPE: return run_rope(c.rope, step, rows, team);
    case OP_ATTENTION: return run_attention(c.attention, step, rows, team);
    case OP_SAMPLE: return run_sample(c.sample, rows, team);
    case OP_COPY: return run_copy(c.copy, rows, team);
    case OP_ROUTE: return run_route(c.route, rows, team);
    case OP_EXPERTS: return run_experts(c.experts, team);
    case OP_COMBINE: return run_combine(c.combine, rows, team);
    case OP_LOW_RANK: return run_low_rank(c.low_rank, team);
  }
}

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

struct Program {
  const Command* commands;
  int64_t count;
  const Step* step;
  int threads;
  int64_t* ended_ns;  // of each command, if given
  std::vector<Counter> pieces;
};

}  // namespace

char* Team::scratch(int64_t bytes) {
  Scratch& s = scratch_of_thread;
  if (s.bytes < bytes) {
    free(s.memory);
    s.bytes = (bytes + 4095) / 4096 * 4096;
    s.memory = static_cast<char*>(aligned_alloc(64, s.bytes));
    if (!s.memory) abort();  // no exception may leave a parallel region
  }
  return s.memory;
}

struct Team::Shared {
  std::mutex mutex;
  Scratch scratch;
};

char* Team::shared(int64_t bytes) {
  std::lock_guard<std::mutex> guard(shared_->mutex);
  Scratch& s = shared_->scratch;
  if (s.bytes < bytes) {
    // The old memory is unused: within a command all ask for the same size.
    free(s.memory);
    s.bytes = (bytes + 4095) / 4096 * 4096;
    s.memory = static_cast<char*>(aligned_alloc(64, s.bytes));
    if (!s.memory) abort();
    memset(s.memory, 0, SHARED_ZEROS);
  }
  return s.memory;
}

// Runs the programs of one thread, with further threads of its own.
//
// A thread takes part in the command that is open when it comes by. The last thread that leaves a command closes it and
// opens the next one; threads leave when no piece is left, so all pieces are done then. No thread waits for others to
// arrive: one that sleeps, or that lost its core between two pieces, delays nothing.
class Runner : public std::enable_shared_from_this<Runner> {
 public:
  // Returns when the last command is closed.
  void run(Program& program) {
    while (started_ + 1 < program.threads && start_thread()) started_++;
    program_ = &program;
    first_ = end_.load(std::memory_order_relaxed);
    threads_.store(program.threads, std::memory_order_relaxed);
    end_.store(first_ + program.count, std::memory_order_release);
    if (program.threads > 1) {
      move_away(sleepers_);
      begun_.notify();
    }
    take_part(0);
  }

  // Ends the threads, some time later.
  void stop() {
    stopped_.store(true, std::memory_order_relaxed);
    begun_.notify();
  }

 private:
  static constexpr int THREAD_BITS = 16;
  static constexpr uint64_t THREADS = (1 << THREAD_BITS) - 1;

  bool start_thread() {
    try {
      auto sleeper = std::make_shared<Sleeper>();
      sleepers_.reserve(sleepers_.size() + 1);
      std::thread started([self = shared_from_this(), thread = started_ + 1, sleeper] {
        bind_to_place(thread);
        self->work(thread, *sleeper);
      });
      sleeper->started(started);
      sleepers_.push_back(std::move(sleeper));
      started.detach();
      return true;
    } catch (const std::system_error&) {
      return false;  // the program runs with those that are here
    }
  }

  void work(int thread, Sleeper& sleeper) {
    for (;;) {
      const uint32_t begun = begun_.count();
      if (stopped_.load(std::memory_order_relaxed)) return;
      take_part(thread);
      sleeper.sleeps();
      begun_.wait(begun);
      sleeper.woke();
    }
  }

  // Returns when no program runs that is for so many threads.
  void take_part(int thread) {
    for (int64_t last = -1;;) {
      const uint32_t closed = closed_.count();
      uint64_t open = open_.load(std::memory_order_acquire);
      const int64_t number = open >> THREAD_BITS;
      if (number >= end_.load(std::memory_order_acquire) || thread >= threads_.load(std::memory_order_relaxed)) return;
      if (number == last) {
        closed_.wait(closed);
        continue;
      }
      // A program and its memory stay while a thread is in one of its commands.
      if (!open_.compare_exchange_strong(open, open + 1, std::memory_order_acq_rel)) continue;
      Program& program = *program_;
      const int64_t i = number - first_;
      Team team(program.threads, &shared_, &program.pieces[i].value);
      execute(program.commands[i], *program.step, team);
      if (program.ended_ns) __atomic_store_n(&program.ended_ns[i], now_ns(), __ATOMIC_RELAXED);
      leave();
      last = number;
    }
  }

  void leave() {
    uint64_t open = open_.load(std::memory_order_relaxed), next;
    do {
      next = (open & THREADS) == 1 ? ((open >> THREAD_BITS) + 1) << THREAD_BITS : open - 1;
    } while (!open_.compare_exchange_weak(open, next, std::memory_order_acq_rel, std::memory_order_relaxed));
    if (next >> THREAD_BITS != open >> THREAD_BITS) closed_.notify();
  }

  // The number of the open command, which goes on from program to program, and how many threads are in it.
  alignas(64) std::atomic<uint64_t> open_{0};
  alignas(64) std::atomic<int64_t> end_{0};  // behind the last command of the program
  std::atomic<int> threads_{0};
  std::atomic<bool> stopped_{false};
  Program* program_ = nullptr;
  int64_t first_ = 0;
  int started_ = 0;
  EventCount begun_, closed_;  // programs, commands
  std::vector<std::shared_ptr<Sleeper>> sleepers_;  // of the other threads
  Team::Shared shared_;
};

static thread_local struct Caller {
  std::shared_ptr<Runner> runner = std::make_shared<Runner>();
  ~Caller() { runner->stop(); }
} caller;

extern "C" {

// `nanoseconds`, if given, gets the time of each command, from the end of the one before on.
void orcinus_run(const Command* commands, int64_t count, const Step* step, int32_t threads, int64_t* nanoseconds);
int64_t orcinus_size(int32_t op);
int32_t orcinus_lanes();
// The order and rounding of sums in a DType; what has the same name has the same bits.
const char* orcinus_numerics(int32_t dtype);

}

#include "tiles.h"

void orcinus_run(const Command* commands, int64_t count, const Step* step, int32_t threads, int64_t* nanoseconds) {
  Program program{commands, count, step, threads, nanoseconds, std::vector<Counter>(count)};
  int64_t begun = nanoseconds ? now_ns() : 0;
  caller.runner->run(program);
  for (int64_t i = 0; nanoseconds && i < count; i++) {
    const int64_t ended = nanoseconds[i];
    nanoseconds[i] = ended - begun;
    begun = ended;
  }
}

int64_t orcinus_size(int32_t op) {
  switch (op) {
    case 0: return sizeof(Command);
    case OP_LINEAR: return sizeof(LinearArgs);
    case OP_EMBED: return sizeof(EmbedArgs);
    case OP_NORM: return sizeof(NormArgs);
    case OP_GATED: return sizeof(GatedArgs);
    case OP_ACTIVATE: return sizeof(ActivateArgs);
    case OP_ADD: return sizeof(AddArgs);
    case OP_SELECT: return sizeof(SelectArgs);
    case OP_ROPE: return sizeof(RopeArgs);
    case OP_ATTENTION: return sizeof(AttentionArgs);
    case OP_SAMPLE: return sizeof(SampleArgs);
    case OP_COPY: return sizeof(CopyArgs);
    case OP_ROUTE: return sizeof(RouteArgs);
    case OP_EXPERTS: return sizeof(ExpertsArgs);
    case OP_COMBINE: return sizeof(CombineArgs);
    case OP_LOW_RANK: return sizeof(LowRankArgs);
    case 100: return sizeof(Step);
    case 101: return sizeof(Pool);
    case 102: return sizeof(LowRankPair);
    case 103: return sizeof(LowRankUp);
  }
  return -1;
}

int32_t orcinus_lanes() { return LANES; }

const char* orcinus_numerics([[maybe_unused]] int32_t dtype) {
#if defined(TILES)
  if (dtype == BF16) return "amx";
#elif LANES == 16 && defined(__AVX512BF16__)
  if (dtype == BF16) return "avx512bf16";
#endif
  return LANES == 16 ? "avx512" : LANES == 8 ? "avx2" : "plain";
}
