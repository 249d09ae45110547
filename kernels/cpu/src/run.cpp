// The runner: one parallel region for a whole program, a barrier between two commands.
#include <omp.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"

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

// Threads meet here. Those that come early spin for a while (a command takes microseconds), then sleep: on a machine
// with more work than cores the one that is missing may need this very core.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}

  void wait() {
    uint32_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_seq_cst);
      if (sleepers_.load(std::memory_order_seq_cst) > 0) wake();
      return;
    }
    const auto until = std::chrono::steady_clock::now() + SPIN;
    do {
      for (int i = 0; i < SPINS_A_LOOK; i++) {
        if (round_.load(std::memory_order_acquire) != round) return;
        relax();
      }
    } while (std::chrono::steady_clock::now() < until);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (round_.load(std::memory_order_seq_cst) == round) sleep(round);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  // A time: how long a pause takes depends on the CPU. The clock costs about as much, so it is looked at now and then.
  static constexpr std::chrono::microseconds SPIN{20};
  static constexpr int SPINS_A_LOOK = 16;

  void sleep(uint32_t round) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&round_), FUTEX_WAIT_PRIVATE, round, nullptr, nullptr, 0);
#else
    relax();
#endif
  }
  void wake() {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&round_), FUTEX_WAKE_PRIVATE, threads_, nullptr, nullptr, 0);
#endif
  }

  const int threads_;
  std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<int> sleepers_{0};
};

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
// Of the thread that calls orcinus_run.
static thread_local Team::Shared shared_of_caller;

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

extern "C" {

// `nanoseconds`, if given, gets the time of each command as thread 0 saw it, its barrier included.
void orcinus_run(const Command* commands, int64_t count, const Step* step, int32_t threads, int64_t* nanoseconds);
int64_t orcinus_size(int32_t op);
int32_t orcinus_lanes();
// The order and rounding of sums in a DType; what has the same name has the same bits.
const char* orcinus_numerics(int32_t dtype);

}

#include <time.h>

static int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

#include "tiles.h"

void orcinus_run(const Command* commands, int64_t count, const Step* step, int32_t threads, int64_t* nanoseconds) {
  std::vector<Counter> counters(count);
  std::unique_ptr<Barrier> barrier;
  Team::Shared* shared = &shared_of_caller;
#pragma omp parallel num_threads(threads)
  {
#pragma omp single
    barrier = std::make_unique<Barrier>(omp_get_num_threads());
    Team team(omp_get_thread_num(), omp_get_num_threads(), shared);
    int64_t begun = nanoseconds && team.thread() == 0 ? now_ns() : 0;
    for (int64_t i = 0; i < count; i++) {
      team.use(&counters[i].value);
      execute(commands[i], *step, team);
      if (i + 1 < count) barrier->wait();
      if (begun) {
        int64_t ended = now_ns();
        nanoseconds[i] = ended - begun;
        begun = ended;
      }
    }
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
