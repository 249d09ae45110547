// Keeps a thread of a team from waking where its caller runs.
#pragma once
#include <atomic>
#include <thread>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#endif

// A thread that waits for the next program, and the core on which it sleeps.
//
// It is woken there. In a virtual machine that can be the caller's core though another is idle: the host has halted the
// idle one, which Linux takes for busy. The thread then waits until the kernel balances its queues, some milliseconds,
// and the caller does the work of several programs alone. So it is barred from the caller's core until it has woken.
class Sleeper {
 public:
#if defined(__linux__)
  // By the caller.
  void started(std::thread& thread) { handle_ = thread.native_handle(); }
  void move_away_from(int core) {
    if (core_.load(std::memory_order_relaxed) != core || is_barred_.load(std::memory_order_acquire)) return;
    cpu_set_t others;
    if (process_ != getpid() || sched_getaffinity(0, sizeof cores_, &cores_)) return;  // a child has no other threads
    others = cores_;
    CPU_CLR(core, &others);
    if (CPU_COUNT(&others) == 0) return;
    if (pthread_setaffinity_np(handle_, sizeof others, &others)) return;
    is_barred_.store(true, std::memory_order_release);  // last: what woke just now restores its cores the next time
  }

  // By the thread.
  void sleeps() { core_.store(sched_getcpu(), std::memory_order_relaxed); }
  void woke() {
    core_.store(-1, std::memory_order_relaxed);
    if (!is_barred_.load(std::memory_order_acquire)) return;
    sched_setaffinity(0, sizeof cores_, &cores_);
    is_barred_.store(false, std::memory_order_release);
  }

 private:
  const pid_t process_ = getpid();
  pthread_t handle_{};
  std::atomic<int> core_{-1};
  std::atomic<bool> is_barred_{false};
  cpu_set_t cores_;  // that it has again when it has woken; of the caller until it is barred, then of the thread
#else
  void started(std::thread&) {}
  void sleeps() {}
  void woke() {}
#endif
};
