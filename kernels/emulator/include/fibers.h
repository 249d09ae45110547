// Fibers: separate stacks that hand the processor to each other by a function call. One runs each CUDA thread.
//
// On x86-64 a switch is a dozen instructions; glibc's swapcontext, used elsewhere, makes two system calls each time.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if !defined(__x86_64__) || defined(EMULATOR_UCONTEXT)
#define EMULATOR_USES_UCONTEXT 1
#include <ucontext.h>
#endif

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#ifndef EMULATOR_USES_UCONTEXT
// Saves the registers that a call must preserve on the present stack, its top in *save, and goes on where `to` left.
extern "C" __attribute__((visibility("hidden"))) void emulator_switch(void** save, void* to);
asm(R"(
.text
.hidden emulator_switch
.type emulator_switch,@function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, .-emulator_switch
)");
#endif

namespace emulator {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t STACK_BYTES = 512 << 10;  // instrumented frames are large
#else
constexpr size_t STACK_BYTES = 128 << 10;  // untouched pages cost nothing
#endif

class Fiber {
 public:
  Fiber() {
    const size_t page = sysconf(_SC_PAGESIZE);
    const int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* got = mmap(nullptr, STACK_BYTES + page, PROT_READ | PROT_WRITE, how, -1, 0);
    if (got == MAP_FAILED) {
      perror("emulator: no memory for the stack of a thread");
      abort();
    }
    mprotect(got, page, PROT_NONE);  // a stack that overflows stops the process instead of spoiling another
    stack_ = static_cast<char*>(got) + page;
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  const char* stack() const { return stack_; }

  // The next enter() calls `entry`, whatever was on this stack before. `entry` must not return; it ends with leave().
  void start(void (*entry)()) {
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(stack_, STACK_BYTES);
#endif
    entry_ = entry;
#ifdef EMULATOR_USES_UCONTEXT
    getcontext(&mine_);
    mine_.uc_stack.ss_sp = stack_;
    mine_.uc_stack.ss_size = STACK_BYTES;
    mine_.uc_link = nullptr;
    makecontext(&mine_, first_call, 0);
#else
    void** top = reinterpret_cast<void**>(stack_ + STACK_BYTES - 64);
    *--top = nullptr;                                   // where first_call would return to: also aligns its frame
    *--top = reinterpret_cast<void*>(first_call);
    for (int preserved = 0; preserved < 6; preserved++) *--top = nullptr;
    mine_ = top;
#endif
  }

  // Called by the scheduler: runs the fiber until it leaves.
  void enter() {
    running_ = this;
#ifdef __SANITIZE_ADDRESS__
    void* fake;
    __sanitizer_start_switch_fiber(&fake, stack_, STACK_BYTES);
#endif
#ifdef EMULATOR_USES_UCONTEXT
    swapcontext(&scheduler_, &mine_);
#else
    emulator_switch(&scheduler_, mine_);
#endif
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
  }

  // Called on the fiber: back to the scheduler. Returns when the fiber is entered again.
  void leave() {
#ifdef __SANITIZE_ADDRESS__
    void* fake;
    __sanitizer_start_switch_fiber(&fake, scheduler_stack_, scheduler_bytes_);
#endif
#ifdef EMULATOR_USES_UCONTEXT
    swapcontext(&mine_, &scheduler_);
#else
    emulator_switch(&mine_, scheduler_);
#endif
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake, &scheduler_stack_, &scheduler_bytes_);
#endif
  }

 private:
  static void first_call() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack_, &scheduler_bytes_);
#endif
    running_->entry_();
    abort();
  }

#ifdef EMULATOR_USES_UCONTEXT
  ucontext_t mine_;
  static inline ucontext_t scheduler_;
#else
  void* mine_ = nullptr;
  static inline void* scheduler_ = nullptr;
#endif
#ifdef __SANITIZE_ADDRESS__
  static inline const void* scheduler_stack_ = nullptr;
  static inline size_t scheduler_bytes_ = 0;
#endif
  static inline Fiber* running_ = nullptr;
  char* stack_;
  void (*entry_)() = nullptr;
};

}  // namespace
}  // namespace emulator
