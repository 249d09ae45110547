"""The virtual clock: one event loop for all simulated processes, which picks the next one to run by its seed.

A process is a queue of callbacks in the order in which asyncio would run them; which process runs next is drawn. So
every run is one that real processes may have, and a seed names it. Time passes only when no process can run. `install`
makes `time`, `random` and `secrets` follow the loop; it comes before the services are imported, since some of them keep
a function of `time` as a default.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import heapq
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

START_S = 1_800_000_000.0
"""The wall clock at virtual time 0."""
BOOT_S = 1000.0
"""The monotonic clock at virtual time 0: some services use 0 for `never`."""
MAX_CALLBACKS = 3_000_000
TRACE = 20_000

REAL = {name: getattr(time, name) for name in ("time", "monotonic", "perf_counter")}
"""The functions of the machine's clock."""

current: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class StuckError(Exception):
    """The run does not end: no process has anything to do, or one never rests."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What a handle stands for."""

    handle: asyncio.Handle
    context: contextvars.Context
    callback: Callable[..., Any]
    args: tuple[Any, ...]


class Process:
    """One simulated process: its tasks share a fate. `kill` ends it as SIGKILL does: no `finally` of it runs."""

    def __init__(self, loop: Loop, name: str) -> None:
        self.name = name
        self.loop = loop
        self.queue: deque[_Call] = deque()
        self.paused = False
        self.dead = False
        self.signals: dict[int, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
        self.tasks: list[asyncio.Task[Any]] = []
        self.on_kill: list[Callable[[], None]] = []

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """Call a function inside the process."""
        context = contextvars.Context()
        context.run(current.set, self)
        return context.run(work, *args)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task of the process."""
        task: asyncio.Task[Any] = self.run(self.loop.create_task, work)
        return task

    def signal(self, number: int) -> None:
        """Call the process's handler of a signal, if it has one by now."""
        if number in self.signals:
            handler, args = self.signals[number]
            self.run(self.loop.call_soon, handler, *args)

    def pause(self) -> None:
        self.paused = True
        self.loop.settle(self)

    def resume(self) -> None:
        self.paused = False
        self.loop.settle(self)

    def kill(self) -> None:
        self.dead = True
        self.queue.clear()
        self.loop.settle(self)
        for callback in self.on_kill:
            callback()


class _Task(asyncio.Task):  # type: ignore[type-arg]
    """A task with the same place in a set in every run."""

    numbers = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        _Task.numbers += 1
        self._number = _Task.numbers
        super().__init__(*args, **options)
        self._log_destroy_pending = False

    def __hash__(self) -> int:
        return self._number


class Loop(asyncio.BaseEventLoop):
    """An event loop on virtual time."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.wall_offset_s = 0.0  # of the clock that is read now: Redis's may be set apart
        self.callbacks = 0
        self.trace: deque[str] = deque(maxlen=TRACE)
        self.tasks: list[asyncio.Task[Any]] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self._timers: list[tuple[float, int, _Call]] = []
        self._order = 0
        self._nothing = Process(self, "-")
        self._runnable: list[Process] = []
        _Task.numbers = 0
        self.set_task_factory(self._make_task)

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        task = _Task(work, loop=loop, **options)
        self.tasks.append(task)  # kept, so that the tasks of killed processes are never closed within the run
        return task

    def note(self, text: str) -> None:
        """Add an event to the trace, and to the digest that two runs of one seed share."""
        process = current.get()
        line = f"{self.now_s:10.6f} {process.name if process else '-':12} {text}"
        self._digest.update(line.encode())
        self.trace.append(line)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def time(self) -> float:
        return BOOT_S + self.now_s

    def settle(self, process: Process) -> None:
        """Put a process among those that can run, or take it out."""
        can_run = bool(process.queue) and not process.paused and not process.dead
        if can_run != (process in self._runnable):
            (self._runnable.append if can_run else self._runnable.remove)(process)

    def _enqueue(self, call: _Call) -> None:
        process = call.context.get(current) or self._nothing
        if process.dead:
            return
        process.queue.append(call)
        if len(process.queue) == 1:
            self.settle(process)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        context = contextvars.copy_context() if context is None else context
        handle = asyncio.Handle(callback, args, self, context)
        self._enqueue(_Call(handle, context, callback, args))
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        context = contextvars.copy_context() if context is None else context
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._order += 1
        heapq.heappush(self._timers, (when, self._order, _Call(handle, context, callback, args)))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Leave a cancelled timer in the heap; it is skipped."""

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        if process := current.get():
            process.signals[int(sig)] = (callback, args)

    def _run_once(self) -> None:
        timers, runnable = self._timers, self._runnable
        while timers and (not runnable or timers[0][0] <= BOOT_S + self.now_s):
            when, _, call = heapq.heappop(timers)
            if not call.handle.cancelled():
                self.now_s = max(self.now_s, when - BOOT_S)
                self._enqueue(call)
        if not runnable:
            raise StuckError("no process has anything to do")
        self.callbacks += 1
        if self.callbacks > MAX_CALLBACKS:
            raise StuckError(f"more than {MAX_CALLBACKS} callbacks: a process never rests")
        process = runnable[int(self.random.random() * len(runnable))] if len(runnable) > 1 else runnable[0]
        call = process.queue.popleft()
        if not process.queue:
            runnable.remove(process)
        if not call.handle.cancelled():
            self._run(call)

    def _run(self, call: _Call) -> None:
        """Call as a handle of asyncio does: an error goes to the loop's handler."""
        try:
            call.context.run(call.callback, *call.args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            what = f"Exception in callback {call.callback!r}"
            self.call_exception_handler({"message": what, "exception": error, "handle": call.handle})

    def _write_to_self(self) -> None:
        """Nothing waits outside."""


_loop: Loop | None = None


def use(loop: Loop | None) -> None:
    """Let `time`, `random` and `secrets` follow a loop, or the machine again."""
    global _loop
    _loop = loop


def _wall_s() -> float:
    return REAL["time"]() if _loop is None else START_S + _loop.now_s + _loop.wall_offset_s


def _monotonic_s() -> float:
    return REAL["monotonic"]() if _loop is None else BOOT_S + _loop.now_s


def install() -> None:
    """Make `time`, `secrets` follow the loop in use."""
    time.time = _wall_s
    time.time_ns = lambda: int(_wall_s() * 1e9)
    time.monotonic = time.perf_counter = _monotonic_s
    time.monotonic_ns = time.perf_counter_ns = lambda: int(_monotonic_s() * 1e9)
    secrets.token_hex = lambda size=32: random.randbytes(size).hex()  # type: ignore[misc]
    secrets.randbits = random.getrandbits
