"""Ends the process when one step runs far longer than it can take (docs/protocol.md#faults).

A hung engine thread cannot be stopped from within, and what supervises the worker restarts what exits, not what hangs.
Steps may overlap; each has its time from when it began, or from the end of the one before it. The thread here needs the
interpreter's lock, which kernels and waits release; a hang that keeps it is not seen.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger("orcinus.worker")

POLL_S = 0.25
LAST_WORDS_S = 2.0
ending = threading.Lock()
FLOOR_S = 60.0
SLACK = 10.0  # a step may take so many times what was predicted: other load, deeper contexts than the warm-up's


def limit_s(predicted_s: float, setting_s: float) -> float:
    """Return the seconds that a step may take: the setting, or with 0 what its predicted time allows.

    >>> limit_s(0.5, 0.0), limit_s(7.0, 0.0), limit_s(7.0, 3.0)
    (60.0, 70.0, 3.0)
    """
    return setting_s or max(FLOOR_S, SLACK * predicted_s)


@dataclass(frozen=True, eq=False, slots=True)
class Watched:
    """A step that may take so long."""

    name: str
    limit_s: float


class StepWatchdog:
    """Watches steps from `begin` to `end`, the oldest of those that are not ended at a time."""

    def __init__(self, on_stuck: Callable[[str], None] | None = None) -> None:
        """Start the thread. on_stuck: gets the line for the log; without one the process ends with status 1."""
        self._on_stuck = on_stuck or end_process
        self._lock = threading.Lock()
        self._steps: deque[Watched] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="step-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop; call it only when no step runs any more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def begin(self, name: str, limit_s: float) -> Watched:
        """Watch a step that may take `limit_s` seconds; return what `end` takes."""
        step = Watched(name, limit_s)
        with self._lock:
            self._steps.append(step)
        return step

    def end(self, step: Watched) -> None:
        with self._lock:
            self._steps.remove(step)

    def _oldest(self) -> Watched | None:
        with self._lock:
            return self._steps[0] if self._steps else None

    def _loop(self) -> None:
        watched: Watched | None = None
        ran, last = 0.0, time.monotonic()
        while not self._stop.wait(POLL_S):
            now, step = time.monotonic(), self._oldest()
            # While the whole process was stopped (SIGSTOP, a frozen container) the step did not run either.
            passed, last = min(now - last, 2 * POLL_S), now
            if step is None or step is not watched:
                watched, ran = step, 0.0
                continue
            ran += passed
            if ran > step.limit_s:
                self._on_stuck(
                    f"{step.name} has run for {ran:.1f} s, {step.limit_s:.1f} s is the most (--step-timeout-s): "
                    "the engine hangs, so the worker ends itself"
                )
                return


def end_process(line: str) -> None:
    """Say where every thread is and why, then ends the process at once with status 1. The first of several threads
    that find a reason says that reason."""
    if not ending.acquire(blocking=False):
        threading.Event().wait()

    def last_words() -> None:
        faulthandler.dump_traceback(sys.stderr)
        log.critical(line)  # last: orcinus up shows the end of the log

    # A full pipe, or a log lock that the hung thread holds, must not keep the process alive.
    speaker = threading.Thread(target=last_words, name="last-words", daemon=True)
    speaker.start()
    speaker.join(LAST_WORDS_S)
    os._exit(1)
