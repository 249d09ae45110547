// The threads that run a program together, as one of them sees them.
//
// Work inside a command is taken piece by piece from a shared counter: on a machine that others use too, a thread that
// lost its core is not waited for longer than one piece. Who takes what never changes a result (ops.h).
#pragma once
#include <atomic>
#include <cstdint>

class Team {
 public:
  Team(int thread, int threads) : thread_(thread), threads_(threads) {}

  int thread() const { return thread_; }
  int threads() const { return threads_; }

  // The next piece of the current command that nobody has; ends at `pieces`.
  //   for (int64_t i; (i = team.next()) < pieces;) ...
  int64_t next() { return counter_->fetch_add(1, std::memory_order_relaxed); }

  // Set by the runner before each command.
  void use(std::atomic<int64_t>* counter) { counter_ = counter; }

  // Scratch memory of this thread, at least `bytes`, aligned to 64, kept from call to call. Contents are whatever was
  // left there. One buffer: a second call may invalidate the first.
  char* scratch(int64_t bytes);

 private:
  int thread_, threads_;
  std::atomic<int64_t>* counter_ = nullptr;
};
