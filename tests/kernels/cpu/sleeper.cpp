// Prints the cores that a thread may have while it sleeps and when it has woken, a line each: see test_sleeper.py.
#include "sleeper.h"

#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <semaphore>

namespace {

cpu_set_t all;

void print(const char* when, pthread_t thread) {
  cpu_set_t set;
  pthread_getaffinity_np(thread, sizeof set, &set);
  printf("%s:", when);
  for (int core = 0; core < CPU_SETSIZE; core++)
    if (CPU_ISSET(core, &set)) printf(" %d", core);
  printf("\n");
  fflush(stdout);
}

void run_on(int core) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  sched_setaffinity(0, sizeof one, &one);  // returns there
}

}  // namespace

int main(int, char** arguments) {
  const int core = atoi(arguments[1]), other = atoi(arguments[2]);
  sched_getaffinity(0, sizeof all, &all);
  Sleeper sleeper;
  std::binary_semaphore sleeps{0}, wakes{0}, woke{0};
  std::thread thread([&] {
    for (int round = 0; round < 2; round++) {
      run_on(core);
      sleeper.sleeps();
      sched_setaffinity(0, sizeof all, &all);
      sleeps.release();
      wakes.acquire();
      sleeper.woke();
      print("woke", pthread_self());
      woke.release();
    }
  });
  sleeper.started(thread);
  const pthread_t handle = thread.native_handle();
  for (const int caller : {core, other}) {
    sleeps.acquire();
    if (fork() == 0) {  // without the thread
      sleeper.move_away_from(caller);
      print("child", pthread_self());
      _exit(0);
    }
    wait(nullptr);
    sleeper.move_away_from(caller);
    print("sleeps", handle);
    wakes.release();
    woke.acquire();
  }
  thread.join();
}
