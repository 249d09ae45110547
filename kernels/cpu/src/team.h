// The threads that run a program together, as one of them sees them.
//
// Work inside a command is taken piece by piece from a shared counter, by the threads that are there: on a machine that
// others use too, a thread that lost its core is not waited for longer than one piece, and not at all if it has none.
// The order never changes a result (ops.h).
#pragma once
#include <atomic>
#include <cstdint>

class Team {
 public:
  // Memory that all threads see.
  struct Shared;

  Team(int threads, Shared* shared, std::atomic<int64_t>* counter)
      : threads_(threads), shared_(shared), counter_(counter) {}

  // At most so many take part.
  int threads() const { return threads_; }

  // The next piece of the current command that no thread has; ends at `pieces`.
  //   for (int64_t i; (i = team.next()) < pieces;) ...
  int64_t next() { return counter_->fetch_add(1, std::memory_order_relaxed); }

  // Scratch memory of this thread, at least `bytes`, aligned to 64, kept from call to call. Contents are whatever was
  // left there. One buffer: a second call may invalidate the first.
  char* scratch(int64_t bytes);

  // Memory that all threads of the team see, aligned to 64, kept from call to call; every thread that asks within a
  // command asks for the same `bytes`. The first SHARED_ZEROS bytes are 0 when a command begins; a command that changes
  // them restores them. What lies behind is whatever was left there.
  static constexpr int64_t SHARED_ZEROS = 4096;
  char* shared(int64_t bytes);

 private:
  int threads_;
  Shared* shared_;
  std::atomic<int64_t>* counter_;
};
